// SPDX-License-Identifier: Apache-2.0
// The whole forward in one kernel on any card from sm_80 on: fused/fused_prefill.hpp, without
// units. portable/kernel.cuh is the place to start reading.
#pragma once

#include "cuda/fused/fused_prefill.hpp"

namespace kda::cuda::sm90 {

/// `clusters` counts blocks here: at most one a chain, which is 64 columns of V of a head.
struct PortableArgs : FusedPrefillArgs {
  static constexpr unsigned cluster() { return 1; }
  int shared_bytes = 0;  ///< that a block of the card may have
};

/// Takes q, k, v, o in bf16 with g in bf16 or fp32, or all five in fp16 (then fp16_operands, and no
/// gates as logarithms). Rows are aligned to 16 bytes, K = V = 64 or 128, checkpoints lie at
/// multiples of kSubchunk tokens.
Status launch_portable_prefill(const PortableArgs& args, Launch launch);

}  // namespace kda::cuda::sm90
