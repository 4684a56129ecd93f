// SPDX-License-Identifier: Apache-2.0
// Factors of the forward.
#include "cuda/gdn/intra_sm90.cuh"

namespace kda::cuda::gdn {

Status launch_intra(const HeadGates<IntraArgs>& args, const Launch& where) {
  constexpr const char* kName = "gdn_intra_sm90";
  return args.shape.K <= 64 ? launch<__nv_bfloat16, 64>(kName, args, where)
                            : launch<__nv_bfloat16, 128>(kName, args, where);
}

}  // namespace kda::cuda::gdn
