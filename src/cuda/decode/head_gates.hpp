// SPDX-License-Identifier: Apache-2.0
// Decode of one gate a head, or of q/k heads that are tiled over the value heads: the kernels
// beside it with other arguments, in a source of their own, so that the others keep their machine
// code.
#pragma once

#include "cuda/decode/decode.hpp"
#include "cuda/tile/head_gates.hpp"

namespace kda::cuda::head_gates {

Status launch_decode(const HeadGates<DecodeArgs>& args, const Launch& launch);

}  // namespace kda::cuda::head_gates
