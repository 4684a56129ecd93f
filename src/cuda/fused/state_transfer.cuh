// SPDX-License-Identifier: Apache-2.0
// Where the states of a consumer warp come from and go to.
#pragma once

#include "cuda/fused/state_scale.cuh"
#include "cuda/ptx/global_flag.cuh"

namespace kda::cuda::sm90::fused {

template <int kK, class T, class Operand, bool kSegments>
struct States : ScaledState<kK, T, Operand> {
  using Base = ScaledState<kK, T, Operand>;
  using Base::a;
  using Base::Base;
  using Base::column;
  using Base::fused;
  using Base::head;
  using Base::kTiles;
  using Base::lane;
  using Base::scale;
  using Base::scale_back;
  using Base::span;
  using Base::state;
  using Base::unit;

  /// A state [K, V] in device memory, with steps in elements; null: none.
  struct Place {
    void* at = nullptr;
    int64_t k_step = 0, v_step = 0;
    bool bf16 = false;
  };
  /// Of what belongs to entry n of the view's slots.
  __device__ Place place_in(const StateView& view, int64_t n) const {
    const int64_t slot = state_slot(view, n);
    if (slot < 0) return {};
    // Opaque, so that no addresses of a rare path are kept in registers over the loop.
    const int64_t first = ptx::opaque(slot * view.stride_slot + head * view.stride_head);
    return {static_cast<char*>(view.base) + first * (view.bf16 ? 2 : 4),
            view.vk ? 1 : view.stride_row, view.vk ? view.stride_row : 1, view.bf16 != 0};
  }
  /// Of segment n, in fp32.
  __device__ Place place_in(const float* matrices, int64_t n) const {
    return {const_cast<float*>(matrices) + ptx::opaque((n * a.shape.HV + head) * (kK * kK)), kK, 1,
            false};
  }

  /// visit(accumulator, element) for this lane's. Pointers go from element to element.
  template <class Element, class Visit>
  __device__ __forceinline__ void for_each(const Place& place, Visit&& visit) {
    Element* at = static_cast<Element*>(place.at) + lane % 4 * 2 * place.k_step +
                  (column + lane / 4) * place.v_step;
    Element* at8 = at + 8 * place.v_step;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        visit(state[n][i], *at);
        visit(state[n][i + 2], *at8);
        const int64_t step = i == 0 ? place.k_step : 7 * place.k_step;
        at += step, at8 += step;
      }
  }
  __device__ void store(const Place& place) {
    if (!place.at) return;
    const float back = kHalf<Operand> ? scale_back() : 1.0f;
    if (place.bf16)
      for_each<__nv_bfloat16>(
          place, [&](float x, __nv_bfloat16& to) { to = __float2bfloat16_rn(x * back); });
    else
      for_each<float>(place, [&](float x, float& to) { to = x * back; });
  }
  __device__ void load(const Place& place) {
    if (!place.bf16)
      return for_each<const float>(place, [](float& x, const float& from) { x = from; });
    // Converting an element waits for it: not before all are asked for.
    for_each<const uint16_t>(place,
                             [](float& x, const uint16_t& from) { x = __uint_as_float(from); });
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) state[i / 4][i % 4] = widen_state(state[i / 4][i % 4]);
  }

  // ---- of parts --------------------------------------------------------------------------------

  __device__ void load_start(const Part& part) {
    const bool zero = kSegments && part.state == FusedState::kZero,
               identity = kSegments && part.state == FusedState::kTransition;
    const Place place = zero || identity ? Place{}
                        : a.states_in    ? place_in(a.states_in, unit)
                                         : place_in(a.initial, span.sequence);
    if (place.at) return load(place);
    if (!identity) scale.room = Base::kOfZeros;
    const int difference = column + lane / 4 - lane % 4 * 2;  // of column and channel
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        state[n][i] = identity && difference == n * 8 + i % 2 - i / 2 * 8 ? 1.0f : 0.0f;
  }
  /// Hands the state on, or says where it goes.
  __device__ Place end(const Part& part) const {
    if (part.handed_on) {
      hand_on();
      return {};
    }
    if (kSegments && part.state == FusedState::kZero) return place_in(a.B, part.segment);
    if (kSegments && part.state == FusedState::kTransition) return place_in(a.M, part.segment);
    if (kSegments && part.state == FusedState::kFirst)
      return place_in(fused.starts, part.segment + 1);
    const bool last = (kSegments && part.state == FusedState::kWhole) ||  // without a map
                      span.end == sequence_span(a.map, span.sequence).end;
    return last ? place_in(a.final_state, span.sequence) : Place{};
  }

  /// The state between two shares, a lane its own: [shares, blocks, accumulators and what scales
  /// them, threads].
  static constexpr int kHandedRows = kTiles * 4 + 2;
  __device__ float* handed(int64_t share) const {
    return fused.handoff_states +
           (share * kBlocks<kK> + ptx::cluster_rank()) * (kHandedRows * 128) + threadIdx.x;
  }
  /// Of a warp's state.
  __device__ uint64_t* flag(int64_t share) const {
    return fused.handoff_flags + (share * kBlocks<kK> + ptx::cluster_rank()) * 4 + threadIdx.x / 32;
  }
  __device__ void hand_on() const {
    const int64_t to = share_number<kBlocks<kK>>() - 1;
    float* at = handed(to);
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) at[i * 128] = state[i / 4][i % 4];
    at[kTiles * 4 * 128] = static_cast<float>(scale.exponent);
    at[(kTiles * 4 + 1) * 128] = scale.room;
    __syncwarp();
    if (lane == 0) ptx::st_release(flag(to), fused.handoff_epoch);
  }
  __device__ void take_over() {
    const int64_t from = share_number<kBlocks<kK>>();
    ptx::wait_ld_acquire(flag(from), fused.handoff_epoch);
    __syncwarp();
    if (lane == 0) *flag(from) = 0;
    const float* at = handed(from);
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) state[i / 4][i % 4] = at[i * 128];
    scale = {static_cast<int>(at[kTiles * 4 * 128]), at[(kTiles * 4 + 1) * 128]};
  }
};

}  // namespace kda::cuda::sm90::fused
