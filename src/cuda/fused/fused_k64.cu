// SPDX-License-Identifier: Apache-2.0
// The kernels of K = V = 64: in a file of their own, so that both compile at once.
#include "cuda/fused/kernel.cuh"

namespace kda::cuda::sm90::fused {

template Status launch_prefill<64, false>(const FusedPrefillArgs&, const Launch&);
template Status launch_prefill<64, true>(const UnitArgs&, const Launch&);

}  // namespace kda::cuda::sm90::fused
