// SPDX-License-Identifier: Apache-2.0
// The fused forward of one gate a head (src/cuda/fused), in a file of its own, so that the kernels
// of a gate a channel keep their machine code and their hash.
#include "cuda/fused/kernel.cuh"

namespace kda::cuda::sm90::fused {

template <bool kSegments>
Status launch_head_gates(const ArgsOf<kSegments>& args, const Launch& where) {
  return launch<128, __nv_bfloat16, OneAHead<float>, GateMode::kLog, kSegments>(args, where);
}

template Status launch_head_gates<false>(const FusedPrefillArgs&, const Launch&);
template Status launch_head_gates<true>(const UnitArgs&, const Launch&);

}  // namespace kda::cuda::sm90::fused
