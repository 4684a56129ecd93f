// SPDX-License-Identifier: Apache-2.0
#include "cuda/decode/tail/verify.cuh"

#include <algorithm>

namespace kda::cuda::tail {

Status launch_verify(const TailArgs& args, const Launch& where) {
  TailArgs verify = args;
  // A fold has at most 16 rows, and behind folds there are fewer in front of the tokens.
  verify.most_sure = std::min(args.most_sure, static_cast<int32_t>(kTailBoundary));
  const int64_t blocks = num_blocks(args);
  const int64_t shared = verify_bytes(args.most_sure, args.most_tokens);
  const auto kernel = args.most_tokens <= 4 ? verify_kernel<4> : verify_kernel<kBatch>;
  return launch_kernel("verify", kernel, blocks, 32 * kVerifyWarps, static_cast<int>(shared), where,
                       verify);
}

}  // namespace kda::cuda::tail
