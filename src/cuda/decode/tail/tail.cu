// SPDX-License-Identifier: Apache-2.0
#include <bit>

#include "cuda/decode/tail/kernel.cuh"

namespace kda::cuda::tail {
namespace {

/// Tokens of a sequence from which on launch_verify() is faster.
constexpr int32_t kFewestOfVerify = 3;

template <int kK, Access kAccess, bool kPacked>
Status launch_instance(const TailArgs& args, const Launch& where) {
  const int64_t tiles = (args.shape.V + kWarpColumns - 1) / kWarpColumns;
  const auto warps =
      static_cast<int>(std::bit_ceil(static_cast<uint64_t>(std::min<int64_t>(tiles, kMostWarps))));
  const int64_t blocks = args.map.num_sequences * args.shape.HV + (args.flags ? 1 : 0);
  const int64_t shared = shared_bytes(args.most_sure, args.most_tokens, args.shape.K, args.shape.V);
  return launch_kernel("tail", tail_kernel<kK, kAccess, kPacked>, blocks, 32 * warps,
                       static_cast<int>(shared), where, args);
}

/// Whether rows begin at multiples of 16 bytes.
bool has_vectors(const RowView& view) {
  const int64_t unit = view.type == Element::kFloat32 ? 4 : 8;
  return reinterpret_cast<uintptr_t>(view.base) % 16 == 0 && view.stride_b % unit == 0 &&
         view.stride_t % unit == 0 && view.stride_h % unit == 0;
}

/// Whether states have rows of kK elements without gaps, in vectors, and so have the tail and the
/// tokens.
template <int kK>
bool is_dense(const TailArgs& args) {
  bool vectors = gate_step(args) == 0 || (has_vectors(args.g) && has_vectors(args.tail_g));
  for (const RowView* view : {&args.q, &args.k, &args.v, &args.tail_k, &args.tail_v_new})
    vectors &= has_vectors(*view);
  return vectors && args.shape.K == kK && args.shape.V == kK && args.initial.stride_row == kK &&
         args.initial.vectors;
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
  if (is_dense<128>(args))
    return args.most_tokens < kFewestOfVerify || args.parents ? launch_dense<128>(args, where)
                                                              : launch_verify(args, where);
  if (is_dense<64>(args)) return launch_dense<64>(args, where);
  return launch_instance<256, Access::kScalar, false>(args, where);
}

}  // namespace kda::cuda::tail
