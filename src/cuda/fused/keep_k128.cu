// SPDX-License-Identifier: Apache-2.0
// The kernels of K = V = 128 that keep states and errors, and the launch of any size.
#include "cuda/fused/keep_kernel.cuh"

namespace kda::cuda::sm90 {

extern template Status fused::launch_keep<64>(const KeepArgs&, const Launch&);

Status launch_fused_keep(const KeepArgs& args, Launch where) {
  return args.shape.K == 64 ? fused::launch_keep<64>(args, where)
                            : fused::launch_keep<128>(args, where);
}

}  // namespace kda::cuda::sm90
