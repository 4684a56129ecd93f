// SPDX-License-Identifier: Apache-2.0
// Decode where whole states can be copied in bulk (sm_90, sm_100; dense pools, K = V = 64 or 128):
// persistent blocks whose producer warp brings states and tokens ahead of the eight that update
// them. What it computes: smxx/decode.hpp.
#pragma once

#include "cuda/smxx/decode.hpp"

namespace kda::cuda {

/// Whether launch_decode_sm90() takes this problem on such a GPU.
bool decode_sm90_serves(const DecodeArgs& args, int compute_capability);

Status launch_decode_sm90(const DecodeArgs& args, int num_sms, const Launch& launch);

}  // namespace kda::cuda
