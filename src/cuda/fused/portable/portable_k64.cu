// SPDX-License-Identifier: Apache-2.0
// The portable kernels of K = V = 64: in a file of their own, so that both compile at once.
#include "cuda/fused/portable/kernel.cuh"

namespace kda::cuda::sm90::fused {

template Status launch_portable<64>(const PortableArgs&, const Launch&);

}  // namespace kda::cuda::sm90::fused
