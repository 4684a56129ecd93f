// SPDX-License-Identifier: Apache-2.0
#include "cuda/decode/decode.cuh"
#include "cuda/decode/drafts.hpp"

// Functions that the kernel finds by the type of its arguments; the others are in
// cuda/decode/decode.cuh.
namespace kda::cuda::drafts {

using decode::Slots;
using decode::Unit;

__device__ __forceinline__ Slots slots_of(const DraftArgs& a, int64_t n) {
  const DecodeArgs& base = a;
  if (a.in_place) return decode::slots_of(base, n);
  if (!a.initial.base) return {};
  const int64_t slot = a.initial.indices ? a.initial.indices[n] : n;
  if (lacks_slot(a.initial, slot)) return {-1, -1, true};
  return {a.initial.mask && a.initial.mask[n] == 0 ? -1 : slot, -1, false};
}

__device__ __forceinline__ int64_t slot_of_token(const DraftArgs& a, int64_t n, int64_t i) {
  const DecodeArgs& base = a;
  return decode::target_slot(base, n, i, false, {});
}

/// Whether the sequence's token `i` > 0 has a parent whose state is there.
__device__ __forceinline__ bool has_parent(const DraftArgs& a, int64_t n, int64_t i) {
  const int64_t parent = a.parents[n * a.index_columns + i];
  return parent >= 0 && parent < i && (parent == i - 1 || slot_of_token(a, n, parent) >= 0);
}

__device__ __forceinline__ int64_t most_in_tree(const DraftArgs& a, int64_t n, int64_t tokens) {
  if (!a.parents) return tokens;
  for (int64_t i = 1; i < tokens; ++i)
    if (!has_parent(a, n, i)) return i;
  return tokens;
}

template <class Tile>
__device__ __forceinline__ void restore_parent(const DraftArgs& a, const Unit& unit, int64_t i,
                                               Tile* tile) {
  if (!a.parents || i == 0) return;
  const int64_t parent = a.parents[unit.n * a.index_columns + i];
  if (parent == i - 1) return;
  const int64_t slot = slot_of_token(a, unit.n, parent);
  if (a.target.bf16)
    tile->template load<true>(a.target, a.shape, slot, unit.head);
  else
    tile->template load<false>(a.target, a.shape, slot, unit.head);
}

/// Flags of device metadata, by a block that has nothing else to do.
__device__ inline void write_flags(const DraftArgs& a) {
  const int64_t N = a.map.num_sequences, S = a.index_columns;
  if (a.in_place) {
    const DecodeArgs& base = a;
    decode::write_flags(base);
  } else {
    DecodeArgs chain = a;  // of one index a sequence
    chain.index_columns = 1;
    chain.target = {};
    decode::write_flags(chain);
  }
  const bool bad_slot =
      !a.in_place && any_index_outside(a.target.indices, N * S, a.target.num_slots);
  bool bad_parent = false, many = false;
  for (int64_t n = threadIdx.x; n < N; n += blockDim.x) {
    if (slots_of(a, n).skip) continue;
    const TokenRange tokens = decode::tokens_of(a, n);
    many |= tokens.end - tokens.begin > S;
    for (int64_t i = 1; a.parents && i < min(S, tokens.end - tokens.begin); ++i) {
      if (a.parents[n * S + i] < 0) break;
      bad_parent |= !has_parent(a, n, i);
    }
  }
  const int any_slot = __syncthreads_or(bad_slot), any_parent = __syncthreads_or(bad_parent),
            any_many = __syncthreads_or(many);
  if (threadIdx.x == 0)
    *a.flags |= (any_slot ? kBadFinalIndex : 0) | (any_parent ? kBadTokenParents : 0) |
                (any_many ? kTooManyDecodeTokens : 0);
}

/// Kernels for dense buffers are those of kK = 128 alone. One kernel takes states one by one, of
/// any size.
Status launch_decode(const DraftArgs& args, const Launch& where) {
  if (!decode::has_vectors(args) || !decode::is_dense<128>(args))
    return decode::launch<256, Access::kScalar, false>(args, where);
  return args.target.vk ? decode::launch<128, Access::kVectorsVK, true>(args, where)
                        : decode::launch<128, Access::kVectorsKV, true>(args, where);
}

}  // namespace kda::cuda::drafts
