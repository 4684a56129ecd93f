// SPDX-License-Identifier: Apache-2.0
// Which kernels a staged forward launches: decided once, from its plan. The plan lists them, its
// costs and its launches read them.
#pragma once

#include "cuda/tile/chunk.hpp"
#include "plan/builder.hpp"

namespace kda::cuda::staged {

/// Narrow tiles of V while that gives idle SMs work. The values do not depend on it. `chains`: of
/// `columns` columns of a state each.
inline bool narrow_tiles(int64_t num_sms, int64_t chains, int64_t columns) {
  return 2 * chains * ((columns + kVTile - 1) / kVTile) <= num_sms;
}

/// A launch of chunk_delta_h.
struct ChainKernel {
  bool hopper = false;  ///< chunk_delta_h_sm90.cu, else chunk_delta_h_chains_sm80.cu
  bool fp16 = false;    ///< type of the factors, else bf16
  bool narrow = false;  ///< a block has 32 columns of V, else 64; Hopper's has its own widths
  int64_t num_sms = 0;
};

struct ForwardKernels {
  bool fp16 = false;         ///< type of q, k, v and of the factors, else bf16
  bool tokens = false;       ///< chunk_intra by tokens
  ChainKernel chains, scan;  ///< of the forward; of segments
};
ForwardKernels kernels_of(const Plan& plan);

/// Adds them to the plan.
void list_kernels(plan::PlanBuilder& builder);

}  // namespace kda::cuda::staged
