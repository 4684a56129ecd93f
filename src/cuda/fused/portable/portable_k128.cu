// SPDX-License-Identifier: Apache-2.0
// The portable kernels of K = V = 128, and the launch of those of any size.
#include "cuda/fused/portable/kernel.cuh"

namespace kda::cuda::sm90 {

extern template Status fused::launch_portable<64>(const PortableArgs&, const Launch&);

Status launch_portable_prefill(const PortableArgs& args, Launch where) {
  return args.shape.K == 64 ? fused::launch_portable<64>(args, where)
                            : fused::launch_portable<128>(args, where);
}

}  // namespace kda::cuda::sm90
