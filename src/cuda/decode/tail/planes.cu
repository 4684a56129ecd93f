// SPDX-License-Identifier: Apache-2.0
// Split states of a forward with a tail, from and to the fp32 states of the forward inside.
#include "cuda/decode/tail/split.cuh"
#include "cuda/decode/tail/tail.hpp"
#include "cuda/launch/launch.cuh"
#include "cuda/ptx/ptx.cuh"

namespace kda::cuda::tail {
namespace {

constexpr int kThreads = 256;

/// A block has a head of a sequence.
__global__ void __launch_bounds__(kThreads) planes_kernel(const __grid_constant__ PlanesArgs a) {
  const int64_t n = a.first + a.shape.heads.quotient(blockIdx.x);
  const int64_t head = a.shape.heads.remainder(blockIdx.x);
  if (a.forward_slots[2 * n] < 0) return;
  const int columns = a.pool.vk ? a.shape.K : a.shape.V;
  const int64_t slot = a.pool.indices[n];
  const auto place = [&](const StateView& view, int64_t of, int i) {
    return of * view.stride_slot + head * view.stride_head + i / columns * view.stride_row +
           i % columns;
  };
  for (int i = static_cast<int>(threadIdx.x); i < a.shape.K * a.shape.V; i += kThreads) {
    uint16_t& bf16 = static_cast<uint16_t*>(a.pool.base)[place(a.pool, slot, i)];
    int16_t& rest = static_cast<int16_t*>(a.rest.base)[place(a.rest, slot, i)];
    float& number = static_cast<float*>(a.states.base)[place(a.states, n, i)];
    if (a.join) {
      number = SplitNumber{bf16, rest}.joined();
    } else {
      const SplitNumber split = SplitNumber::of(number);
      bf16 = static_cast<uint16_t>(split.bf16), rest = static_cast<int16_t>(split.rest);
    }
  }
}

}  // namespace

Status launch_planes(const PlanesArgs& args, const Launch& where) {
  return launch_kernel(args.join ? "join_states" : "split_states", planes_kernel,
                       args.count * args.shape.HV, kThreads, 0, where, args);
}

}  // namespace kda::cuda::tail
