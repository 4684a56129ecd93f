// SPDX-License-Identifier: Apache-2.0
// Tiles of bf16 states for a step of one token: a lane has twice as many elements as of fp32, as
// they lie in memory, and makes numbers of them in each sweep. A warp so has as many bytes on their
// way as one of fp32. Sums are those of tile.cuh, in the same order. (Rows that are columns of keys
// gain nothing by it.)
#pragma once

#include "cuda/decode/tile.cuh"

namespace kda::cuda {

/// Which of the two sweeps makes numbers. Each has instructions of its own, for ptxas would keep
/// those of the first one for the second: they are more than there are registers.
enum class Sweep { kSums, kUpdate };

/// Two neighbouring bf16 of a state, decayed.
template <Sweep kSweep>
__device__ __forceinline__ void decayed_pair(uint32_t word, float first, float second, float* x) {
  const uint32_t low = kSweep == Sweep::kSums ? word << 16 : __byte_perm(word, 0, 0x1044);
  const uint32_t high = kSweep == Sweep::kSums ? word & 0xffff0000u : __byte_perm(word, 0, 0x3244);
  x[0] = __uint_as_float(low) * first, x[1] = __uint_as_float(high) * second;
}

/// Tile of a dense buffer whose rows are channels: a lane has 8 neighbouring columns.
template <int kK>
struct PackedTileKV {
  static constexpr int kColumns = 64;
  static constexpr int kOwned = 8;
  static constexpr int kColumnLanes = kColumns / kOwned;
  static constexpr int kGroups = 32 / kColumnLanes;
  static constexpr int kQuads = kK / 4 / kGroups;
  uint4 S[kQuads][4];
  const int lane;
  const int column0;

  __device__ explicit PackedTileKV(int first)
      : lane(static_cast<int>(threadIdx.x) % 32), column0(first) {}
  __device__ void clear() {
#pragma unroll
    for (auto& quad : S)
#pragma unroll
      for (uint4& row : quad) row = make_uint4(0, 0, 0, 0);
  }

  __device__ int channel(int j) const { return (j * kGroups + lane / kColumnLanes) * 4; }
  __device__ int value(int i) const { return column0 + lane % kColumnLanes * kOwned + i; }
  __device__ bool writes_output() const { return lane < kColumnLanes; }

  /// This lane's vectors of a state.
  __device__ uint4* vectors(const StateView& states, int64_t slot, int64_t head) const {
    return reinterpret_cast<uint4*>(static_cast<uint16_t*>(states.base) +
                                    state_offset(states, slot, head, channel(0), value(0)));
  }
  __device__ static int vector(int j, int r) { return (j * kGroups * 4 + r) * kK / 8; }
  template <bool>
  __device__ void load(const StateView& states, const Shape&, int64_t slot, int64_t head) {
    const uint4* from = vectors(states, slot, head);
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) S[j][r] = from[vector(j, r)];
  }
  template <bool>
  __device__ void store(const StateView& states, const Shape&, int64_t slot, int64_t head) {
    uint4* to = vectors(states, slot, head);
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) to[vector(j, r)] = S[j][r];
  }

  __device__ static void spread(const float* from, float (&x)[4]) {
    const float4 y = *reinterpret_cast<const float4*>(from);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  }
  template <Sweep kSweep>
  __device__ static void decayed(const uint4& row, float decay, float (&x)[kOwned]) {
    const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) decayed_pair<kSweep>(words[c], decay, decay, x + 2 * c);
  }

  __device__ void step(const Token<kK>& token, float beta, float scale, const float (&v)[kOwned],
                       float (&o)[kOwned]) {
    float read[kOwned] = {}, out[kOwned] = {}, v_new[kOwned];
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      float decay[4], k[4], q[4];
      spread(token.decay + channel(j), decay);
      spread(token.k + channel(j), k);
      spread(token.q + channel(j), q);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float s[kOwned];
        decayed<Sweep::kSums>(S[j][r], decay[r], s);
#pragma unroll
        for (int c = 0; c < kOwned; ++c) {
          read[c] = fmaf(s[c], k[r], read[c]);
          out[c] = fmaf(s[c], q[r], out[c]);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kOwned; ++c) {
      v_new[c] = beta * (v[c] - sum_over(read[c], kColumnLanes, 32));
      o[c] = scale * fmaf(token.qk, v_new[c], sum_over(out[c], kColumnLanes, 32));
    }
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      float decay[4], k[4];
      spread(token.decay + channel(j), decay);
      spread(token.k + channel(j), k);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float s[kOwned];
        decayed<Sweep::kUpdate>(S[j][r], decay[r], s);
#pragma unroll
        for (int c = 0; c < kOwned; ++c) s[c] = fmaf(k[r], v_new[c], s[c]);
        S[j][r] =
            make_uint4(ptx::pack<__nv_bfloat16>(s[0], s[1]), ptx::pack<__nv_bfloat16>(s[2], s[3]),
                       ptx::pack<__nv_bfloat16>(s[4], s[5]), ptx::pack<__nv_bfloat16>(s[6], s[7]));
      }
    }
  }
};

}  // namespace kda::cuda
