// SPDX-License-Identifier: Apache-2.0
#include "cuda/decode/tail/ring.cuh"

namespace kda::cuda::tail {

Status launch_ring_decode(const RingArgs& args, const Launch& where) {
  const int64_t blocks = num_blocks(args);
  const auto shared = ring_layout(args.rows).bytes();
  return launch_kernel("ring", args.initial.bf16 ? ring_kernel<true> : ring_kernel<false>, blocks,
                       kChannels, shared, where, args);
}

}  // namespace kda::cuda::tail
