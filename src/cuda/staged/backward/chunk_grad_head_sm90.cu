// SPDX-License-Identifier: Apache-2.0
// chunk_grad_sm90.cu with one gate a head.
#include "cuda/staged/backward/grad_sm90/kernel.cuh"

namespace kda::cuda::sm90 {

Status launch_grad_head(const grad::Args& args, int64_t num_sms, const Launch& where) {
  return launch<GradGates::kHead>(args, num_sms, where);
}

}  // namespace kda::cuda::sm90
