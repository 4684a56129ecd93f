// SPDX-License-Identifier: Apache-2.0
// Factors of the backward: those of the forward, and more numbers of tokens.
#include "cuda/gdn/intra_sm90.cuh"

namespace kda::cuda::gdn {

Status launch_intra(const BackwardIntraArgs& args, const Launch& where) {
  return launch<__nv_bfloat16, 128>("gdn_intra_sm90, backward", args, where);
}

}  // namespace kda::cuda::gdn
