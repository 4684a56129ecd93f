// SPDX-License-Identifier: Apache-2.0
// Where the states of a consumer warp come from and go to.
#pragma once

#include "cuda/fused/state_scale.cuh"
#include "cuda/ptx/global_flag.cuh"

namespace kda::cuda::sm90::fused {

/// A state [K, V] in device memory, with steps in elements; null: none.
struct StatePlace {
  void* at = nullptr;
  int64_t k_step = 0, v_step = 0;
  bool bf16 = false;
};
/// The state of entry n of the view's slots.
template <class C>
__device__ StatePlace place_in(const C& c, const StateView& view, int64_t n) {
  const int64_t slot = state_slot(view, n);
  if (slot < 0) return {};
  // Opaque, so that no addresses of a rare path are kept in registers over the loop.
  const int64_t first = ptx::opaque(slot * view.stride_slot + c.head * view.stride_head);
  return {static_cast<char*>(view.base) + first * (view.bf16 ? 2 : 4),
          view.vk ? 1 : view.stride_row, view.vk ? view.stride_row : 1, view.bf16 != 0};
}
/// The state of segment n, in fp32.
template <class C>
__device__ StatePlace place_in(const C& c, const float* matrices, int64_t n) {
  return {const_cast<float*>(matrices) + ptx::opaque((n * c.a.shape.HV + c.head) * (C::kK * C::kK)),
          C::kK, 1, false};
}

/// Calls visit(accumulator, element) for this lane's. Pointers go from element to element.
template <class Element, class C, class Visit>
__device__ __forceinline__ void for_each_element(C& c, const StatePlace& place, Visit&& visit) {
  Element* at = static_cast<Element*>(place.at) + c.lane % 4 * 2 * place.k_step +
                (c.column + c.lane / 4) * place.v_step;
  Element* at8 = at + 8 * place.v_step;
#pragma unroll
  for (int n = 0; n < C::kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      visit(c.state[n][i], *at);
      visit(c.state[n][i + 2], *at8);
      const int64_t step = i == 0 ? place.k_step : 7 * place.k_step;
      at += step, at8 += step;
    }
}
template <class C>
__device__ void store_state_to(C& c, const StatePlace& place) {
  if (!place.at) return;
  const float back = kFp16<typename C::Operand> ? scale_back(c) : 1.0f;
  if (place.bf16)
    for_each_element<__nv_bfloat16>(
        c, place, [&](float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x * back); });
  else
    for_each_element<float>(c, place, [&](float x, float& to) { to = x * back; });
}
template <class C>
__device__ void load_state_from(C& c, const StatePlace& place) {
  if (!place.bf16)
    return for_each_element<const float>(c, place, [](float& x, const float& from) { x = from; });
  // Converting an element waits for it: not before all are asked for.
  for_each_element<const uint16_t>(
      c, place, [](float& x, const uint16_t& from) { x = __uint_as_float(from); });
#pragma unroll
  for (int i = 0; i < C::kTiles * 4; ++i)
    c.state[i / 4][i % 4] = widen_state(c.state[i / 4][i % 4]);
}

// ---- starts and ends of items

template <class C>
__device__ void load_start(C& c, const WorkItem& item) {
  const bool zero = C::kSegments && item.state == FusedState::kZero,
             identity = C::kSegments && item.state == FusedState::kTransition;
  const StatePlace place = zero || identity ? StatePlace{}
                           : c.a.states_in  ? place_in(c, c.a.states_in, c.unit)
                                            : place_in(c, c.a.initial, c.tokens.sequence);
  if (place.at) return load_state_from(c, place);
  if (!identity) c.scale.headroom = kHeadroomOfZeros;
  const int difference = c.column + c.lane / 4 - c.lane % 4 * 2;  // of column and channel
#pragma unroll
  for (int n = 0; n < C::kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      c.state[n][i] = identity && difference == n * 8 + i % 2 - i / 2 * 8 ? 1.0f : 0.0f;
}

/// Where the state lies that a range takes, each lane's own: [ranges, blocks, accumulators and what
/// scales them, threads].
template <class C>
__device__ float* handoff_state(const C& c, int64_t range) {
  constexpr int kRows = C::kTiles * 4 + 2;
  return c.a.handoff_states + (range * C::kBlocks + c.rank()) * (kRows * 128) + threadIdx.x;
}
/// The flag of a warp's state.
template <class C>
__device__ uint64_t* handoff_flag(const C& c, int64_t range) {
  return c.a.handoff_flags + (range * C::kBlocks + c.rank()) * 4 + threadIdx.x / 32;
}
/// Stores the state for the cluster that has the range before this one.
template <class C>
__device__ void store_handoff(const C& c) {
  const int64_t to = range_number<C::kBlocks>() - 1;
  float* at = handoff_state(c, to);
#pragma unroll
  for (int i = 0; i < C::kTiles * 4; ++i) at[i * 128] = c.state[i / 4][i % 4];
  at[C::kTiles * 4 * 128] = static_cast<float>(c.scale.exponent);
  at[(C::kTiles * 4 + 1) * 128] = c.scale.headroom;
  __syncwarp();
  if (c.lane == 0) ptx::st_release(handoff_flag(c, to), c.a.handoff_epoch);
}
/// Waits for the state of the cluster that has the range behind this one, and clears its flag.
template <class C>
__device__ void take_handoff(C& c) {
  const int64_t from = range_number<C::kBlocks>();
  ptx::wait_ld_acquire(handoff_flag(c, from), c.a.handoff_epoch);
  __syncwarp();
  if (c.lane == 0) *handoff_flag(c, from) = 0;
  const float* at = handoff_state(c, from);
#pragma unroll
  for (int i = 0; i < C::kTiles * 4; ++i) c.state[i / 4][i % 4] = at[i * 128];
  c.scale = {static_cast<int>(at[C::kTiles * 4 * 128]), at[(C::kTiles * 4 + 1) * 128]};
}

/// Where the state of an item goes: to the checkpoint of that number, or to the end of the item.
constexpr int64_t kAtEnd = -1, kNowhere = -2;

/// The matrices of a segment from zero, at its end or at a checkpoint inside of it; null: it does
/// not start from zero.
template <class C>
__device__ const float* made_of(const C& c, FusedState state, bool at_end) {
  if (!C::kSegments) return nullptr;
  if (state == FusedState::kZero) return at_end ? c.a.B : c.a.checkpoint_B;
  if (state == FusedState::kTransition) return at_end ? c.a.M : c.a.checkpoint_M;
  return nullptr;
}
template <class C>
__device__ StatePlace place_of(const C& c, const WorkItem& item, int64_t checkpoint) {
  const bool at_end = checkpoint == kAtEnd,
             starts_next = C::kSegments && at_end && item.state == FusedState::kFirst;
  const float* matrices = starts_next ? c.a.starts : made_of(c, item.state, at_end);
  if (matrices) return place_in(c, matrices, c.unit + starts_next);
  if (!at_end) return place_in(c, c.a.checkpoints, checkpoint);
  const bool last = (C::kSegments && item.state == FusedState::kWhole) ||  // without a map
                    c.tokens.end == sequence_range(c.a.map, c.tokens.sequence).end;
  return last ? place_in(c, c.a.final_state, c.tokens.sequence) : StatePlace{};
}
/// Hands the state on, or stores it.
template <class C>
__device__ void leave_state(C& c, const WorkItem& item, int64_t checkpoint) {
  if (checkpoint == kAtEnd && item.stores_state) return store_handoff(c);
  store_state_to(c, place_of(c, item, checkpoint));
}

}  // namespace kda::cuda::sm90::fused
