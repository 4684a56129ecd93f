// SPDX-License-Identifier: Apache-2.0
// Parts that the kernels of segment_merge share: the 8 columns of a state that a block has, 4 at a
// time.
#pragma once

#include "core/host_device.hpp"
#include "cuda/segments/segment_merge.hpp"
#include "cuda/tile/elements.cuh"

namespace kda::cuda::merge {

constexpr int kColumns = 8;  ///< of the state, a block; every block of a head reads all of M

__device__ inline float4 load4(const float* source, int count, bool vector) {
  if (count >= 4 && vector) return *reinterpret_cast<const float4*>(source);
  return {count > 0 ? source[0] : 0.0f, count > 1 ? source[1] : 0.0f, count > 2 ? source[2] : 0.0f,
          count > 3 ? source[3] : 0.0f};
}
__device__ inline void store4(float* target, int count, bool vector, float4 x) {
  if (count >= 4 && vector) {
    *reinterpret_cast<float4*>(target) = x;
    return;
  }
  if (count > 0) target[0] = x.x;
  if (count > 1) target[1] = x.y;
  if (count > 2) target[2] = x.z;
  if (count > 3) target[3] = x.w;
}

/// Which head of which sequence, and columns.
struct Place {
  int64_t sequence, head;
  int column0;
};
__device__ inline Place place_of(const SegmentMergeArgs& a, unsigned block) {
  const unsigned tiles = (a.shape.V + kColumns - 1) / kColumns;
  const auto HV = static_cast<unsigned>(a.shape.HV);
  return {block / tiles / HV, block / tiles % HV, static_cast<int>(block % tiles) * kColumns};
}
KDA_HOST_DEVICE inline int64_t places_of_sequence(const SegmentMergeArgs& args) {
  return args.shape.HV * ((args.shape.V + kColumns - 1) / kColumns);
}
inline int64_t blocks_of(const SegmentMergeArgs& args) {
  return args.map.num_sequences * places_of_sequence(args);
}

/// 4 columns from `column` on of one row of B and of the states; zeros where there is nothing.
struct Row {
  const SegmentMergeArgs& a;
  const int64_t head;
  const int row, column;

  __device__ int64_t offset(int64_t segment) const {
    return ((segment * a.shape.HV + head) * a.shape.K + row) * a.shape.V + column;
  }
  __device__ int count() const { return row < a.shape.K ? a.shape.V - column : 0; }
  __device__ bool vectors() const { return a.shape.V % 4 == 0; }

  __device__ float4 initial(int64_t sequence) const {
    const int64_t slot = state_slot(a.initial, sequence);
    float y[4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (slot >= 0 && i < count())
        y[i] = load_state_bits(a.initial, state_offset(a.initial, slot, head, row, column + i));
    if (a.initial.bf16)
#pragma unroll
      for (float& x : y) x = widen_state(x);
    return {y[0], y[1], y[2], y[3]};
  }
  __device__ float4 start(int64_t segment) const {
    return load4(a.states_in + offset(segment), count(), vectors());
  }
  __device__ float4 B(int64_t segment) const {
    return load4(a.B + offset(segment), count(), vectors());
  }
  __device__ void store(int64_t segment, float4 x) const {
    store4(a.states_in + offset(segment), count(), vectors(), x);
  }
};

}  // namespace kda::cuda::merge
