// SPDX-License-Identifier: Apache-2.0
// The kernels of K = V = 64 that keep states and errors.
#include "cuda/fused/keep_kernel.cuh"

namespace kda::cuda::sm90::fused {

template Status launch_keep<64>(const KeepArgs&, const Launch&);

}  // namespace kda::cuda::sm90::fused
