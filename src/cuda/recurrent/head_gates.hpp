// SPDX-License-Identifier: Apache-2.0
// Decode, recurrence and backward in fp32 of one gate a head, or of q/k heads that are tiled over
// the value heads: the kernels of src/cuda/{decode,recurrent,backward} with other arguments. They
// are in files of their own, so that the others keep their machine code.
#pragma once

#include "cuda/decode/decode.hpp"
#include "cuda/recurrent/backward/backward.hpp"
#include "cuda/recurrent/recurrent.hpp"
#include "cuda/tile/head_gates.hpp"

namespace kda::cuda::head_gates {

Status launch_decode(const HeadGates<DecodeArgs>& args, const Launch& launch);
Status launch_recurrent(const HeadGates<RecurrentArgs>& args, const Launch& launch);
Status launch_backward(const HeadGates<BackwardArgs>& args, const Launch& launch);

}  // namespace kda::cuda::head_gates
