// SPDX-License-Identifier: Apache-2.0
#include "cuda/decode/tail/step.cuh"

namespace kda::cuda::tail {

Status launch_step(const TailArgs& args, const Launch& where) {
  const int64_t blocks = num_blocks(args);
  const StateView& states = args.initial;
  const auto kernel = states.vk ? (states.bf16 ? step_kernel<Access::kVectorsVK, true>
                                               : step_kernel<Access::kVectorsVK, false>)
                                : (states.bf16 ? step_kernel<Access::kVectorsKV, true>
                                               : step_kernel<Access::kVectorsKV, false>);
  return launch_kernel("step", kernel, blocks, kChannels, layout_of_step(args).bytes(), where,
                       args);
}

}  // namespace kda::cuda::tail
