// SPDX-License-Identifier: Apache-2.0
#include <bit>

#include "cuda/decode/tail/kernel.cuh"

namespace kda::cuda::tail {
namespace {

template <int kK, Access kAccess, bool kPacked>
Status launch_instance(const TailArgs& args, const Launch& where) {
  const int64_t tiles = (args.shape.V + kWarpColumns - 1) / kWarpColumns;
  const auto warps =
      static_cast<int>(std::bit_ceil(static_cast<uint64_t>(std::min<int64_t>(tiles, kMostWarps))));
  const int64_t blocks = num_blocks(args);
  const int64_t shared = shared_bytes(args.most_sure, args.most_tokens, args.shape.K, args.shape.V);
  return launch_kernel("tail", tail_kernel<kK, kAccess, kPacked>, blocks, 32 * warps,
                       static_cast<int>(shared), where, args);
}

template <int kK, Access kAccess>
Status launch_dense(const TailArgs& args, const Launch& where) {
  return args.initial.bf16 ? launch_instance<kK, kAccess, true>(args, where)
                           : launch_instance<kK, kAccess, false>(args, where);
}
template <int kK>
Status launch_dense(const TailArgs& args, const Launch& where) {
  return args.initial.vk ? launch_dense<kK, Access::kVectorsVK>(args, where)
                         : launch_dense<kK, Access::kVectorsKV>(args, where);
}

}  // namespace

Status launch_tail_decode(const TailArgs& args, const Launch& where) {
  if (args.rest.base && args.most_sure >= kTailBoundary)
    KDA_RETURN_IF_ERROR(launch_fold_split(args, where));
  const auto is_of = [&](int32_t size) {
    return args.vectors && args.shape.K == size && args.shape.V == size;
  };
  switch (kernel_of(is_of(kChannels), args.rows, args.most_tokens, args.parents != nullptr)) {
    case Kernel::kStep: return launch_step(args, where);
    case Kernel::kVerify: return launch_verify(args, where);
    case Kernel::kTail: break;
  }
  if (is_of(128)) return launch_dense<128>(args, where);
  if (is_of(64)) return launch_dense<64>(args, where);
  return launch_instance<256, Access::kScalar, false>(args, where);
}

}  // namespace kda::cuda::tail
