// SPDX-License-Identifier: Apache-2.0
// The fold of split boundary states (SplitDesc), in front of the decode: it reads and writes all
// bits. It makes v_new of its rows anew from them, one row after the other, as the recurrence does.
// Rows that stay behind it get the v_new that follows from the new bf16, which is what later tokens
// read. A block has a head of a sequence in registers.
//
// One head in 16 folds, and nobody knows which. As many blocks as run at once look at all heads,
// and share those that fold: a block for each would have 15 of 16 do nothing but wait for loads.
// The decode behind writes `folded`, so that all blocks find the same heads.
#include <algorithm>

#include "cuda/decode/tail/sequence.cuh"
#include "cuda/decode/tail/split.cuh"
#include "cuda/launch/launch.cuh"
#include "cuda/tile/warp.cuh"

namespace kda::cuda::tail {
namespace {

constexpr int kMostThreads = 256;
constexpr int kRows = 16;    // that lie in shared memory
constexpr int kQuads = 4;    // of channels, that a thread has in each of its four columns
constexpr int kLaneRow = 8;  // elements that a lane has of a row
constexpr int kBlocks = 2;   // of kMostThreads, that an SM has room for
constexpr int kHeads = 8;    // of a sequence, that a thread looks at

/// Neighbouring threads that share columns: with one kernel for all K.
KDA_HOST_DEVICE_INLINE int sharers_of(int K) { return K <= 64 ? 4 : K <= 128 ? 8 : 16; }

/// Rows in shared memory: normalised keys, decays, values, beta.
struct FoldRows {
  int keys, columns;  ///< floats of a row of channels, and of values

  KDA_HOST_DEVICE_INLINE static FoldRows of(const Shape& shape) {
    return {sharers_of(shape.K) * kQuads * 4, (shape.V + 3) / 4 * 4};
  }
  KDA_HOST_DEVICE_INLINE int floats() const { return kRows * (2 * keys + columns + 1); }
  __device__ static float* shared() { return reinterpret_cast<float*>(ptx::dynamic_shared()); }
  __device__ float* key(int i) const { return shared() + i * keys; }
  __device__ float* decay(int i) const { return shared() + (kRows + i) * keys; }
  __device__ float* value(int i) const { return shared() + 2 * kRows * keys + i * columns; }
  __device__ float* beta(int i) const { return shared() + kRows * (2 * keys + columns) + i; }
};

/// A head of a sequence, and where its rows and its state lie.
struct Head {
  const TailArgs& a;
  const int64_t head;
  const int q_head;
  const Start start;
  const FoldRows rows;

  __device__ Head(const TailArgs& args, int64_t n, int64_t of_head)
      : a(args),
        head(of_head),
        q_head(q_head_of(args, static_cast<int>(of_head))),
        start(start_of(args, n, of_head)),
        rows(FoldRows::of(args.shape)) {}

  __device__ int64_t row_at(const RowView& view, int64_t of_head, int i) const {
    const auto row = static_cast<uint32_t>(start.folded + i) % static_cast<uint32_t>(a.rows);
    return start.slot * view.stride_b + row * view.stride_t + of_head * view.stride_h;
  }

  /// Asks the L2 for a plane of S_0 that has no gaps.
  __device__ void prefetch(const StateView& view) const {
    constexpr int kLine = 64;  // numbers of 16 bits
    const int K = a.shape.K, V = a.shape.V;
    if (start.source < 0 || view.stride_row != (view.vk ? K : V)) return;
    const uint16_t* from =
        static_cast<const uint16_t*>(view.base) + state_offset(view, start.source, head, 0, 0);
    for (int i = static_cast<int>(threadIdx.x); i * kLine < K * V;
         i += static_cast<int>(blockDim.x))
      ptx::prefetch_l2(from + i * kLine);
  }

  /// A lane's elements of a row; past `size`: 0.
  __device__ static void load_row(const RowView& view, int64_t at, int size, int step,
                                  uint32_t (&bits)[kLaneRow]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int c = 0; c < kLaneRow; ++c) {
      const int element = 32 * c + lane;
      bits[c] = element < size ? load_bits(view.base, view.type, at + element * step) : 0;
    }
  }

  /// Makes row i of the tail, in place `to`. By a warp.
  __device__ void make_row(int i, int to, float rate) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, K = a.shape.K;
    uint32_t keys[kLaneRow], gates[kLaneRow], values[kLaneRow];
    load_row(a.tail_k, row_at(a.tail_k, q_head, i), K, 1, keys);
    load_row(a.tail_g, row_at(a.tail_g, head, i), K, gate_step(a), gates);
    load_row(a.tail_v, row_at(a.tail_v, head, i), a.shape.V, 1, values);
    float squares = 0;
#pragma unroll
    for (int c = 0; c < kLaneRow; ++c) {
      if (32 * c >= K) break;
      const float x = float_of(keys[c], a.k.type);
      squares = fmaf(x, x, squares);
    }
    const float factor = a.gate.l2norm ? rsqrtf(sum_over(squares, 1, 32) + 1e-6f) : 1.0f;
#pragma unroll
    for (int c = 0; c < kLaneRow; ++c) {
      const int channel = 32 * c + lane;
      if (32 * c >= max(rows.keys, rows.columns)) break;
      if (channel < rows.keys) {
        const bool is_there = channel < K;
        const float bias = is_there && a.gate.gate_mode != GateMode::kLog && a.gate.dt_bias
                               ? a.gate.dt_bias[head * a.gate.stride_dt + channel * bias_step(a)]
                               : 0.0f;
        const float gate = float_of(gates[c], a.g.type);
        rows.key(to)[channel] = factor * float_of(keys[c], a.k.type);
        rows.decay(to)[channel] =
            is_there ? exp2f(log2_decay_exact(a.gate, gate, bias, rate)) : 0.0f;
      }
      if (channel < rows.columns) rows.value(to)[channel] = float_of(values[c], a.v.type);
    }
    if (lane == 0)
      *rows.beta(to) = beta_value(
          a.gate, float_of(load_bits(a.tail_beta.base, a.beta.type, row_at(a.tail_beta, head, i)),
                           a.beta.type));
  }
  /// Makes rows [at, end). The block meets in front of it and behind it.
  __device__ void make_rows(int at, int end) const {
    const float rate = a.gate.A_log ? expf(a.gate.A_log[head * a.gate.stride_A]) : 1.0f;
    const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
    __syncthreads();
#pragma unroll 1
    for (int i = at + warp; i < end; i += warps) make_row(i, i - at, rate);
    __syncthreads();
  }
};

/// Four numbers of 16 bits that lie behind each other.
struct Quad {
  uint32_t words[2] = {};

  __device__ uint32_t element(int c) const { return words[c / 2] >> 16 * (c % 2) & 0xffffu; }
  /// kUpper: of the upper 16 bits of words, else of the lower ones.
  template <bool kUpper>
  __device__ __forceinline__ static Quad of(const uint32_t (&x)[4]) {
    constexpr uint32_t kBytes = kUpper ? 0x7632 : 0x5410;
    Quad quad;
    quad.words[0] = __byte_perm(x[0], x[1], kBytes),
    quad.words[1] = __byte_perm(x[2], x[3], kBytes);
    return quad;
  }
  __device__ static Quad load(const uint16_t* from) {
    const uint2 raw = *reinterpret_cast<const uint2*>(from);
    Quad quad;
    quad.words[0] = raw.x, quad.words[1] = raw.y;
    return quad;
  }
  __device__ static Quad load(const uint16_t* from, int count) {
    uint32_t x[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) x[c] = c < count ? from[c] : 0;
    return of<false>(x);
  }
  __device__ void store(uint16_t* to) const {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  }
  __device__ void store(uint16_t* to, int count) const {
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (c < count) to[c] = static_cast<uint16_t>(element(c));
  }
};

/// 16 channels of four columns, of a thread.
struct Columns {
  float S[kQuads][4][4];  ///< [channel][column]
  const Head& of;
  const int sharers, part, column;

  __device__ Columns(const Head& head, int first)
      : of(head),
        sharers(sharers_of(head.a.shape.K)),
        part(static_cast<int>(threadIdx.x) % sharers),
        column(first + static_cast<int>(threadIdx.x) / sharers * 4) {}
  __device__ int channel(int j) const { return (j * sharers + part) * 4; }

  /// with(j, r, its address, how many of its elements there are) for the vectors of a plane.
  /// kVectors: all of them or none.
  template <bool kVectors, class With>
  __device__ __forceinline__ void visit(const StateView& view, int64_t slot, With&& with) const {
    const int K = of.a.shape.K, V = of.a.shape.V;
    const int64_t next = view.vk ? 4 * sharers : 4 * sharers * view.stride_row;
    uint16_t* quad =
        static_cast<uint16_t*>(view.base) + state_offset(view, slot, of.head, channel(0), column);
#pragma unroll
    for (int j = 0; j < kQuads; ++j, quad += next) {
      uint16_t* at = quad;
#pragma unroll
      for (int r = 0; r < 4; ++r, at += view.stride_row) {
        const bool is_there = kVectors  ? channel(j) < K && column < V
                              : view.vk ? column + r < V
                                        : channel(j) + r < K;
        with(j, r, at, !is_there ? 0 : kVectors ? 4 : view.vk ? K - channel(j) : V - column);
      }
    }
  }
  /// From the layout [K, V] to [V, K] and back.
  __device__ void transpose() {
    if (!of.a.initial.vk) return;
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < r; ++c) {
          const float x = S[j][r][c];
          S[j][r][c] = S[j][c][r], S[j][c][r] = x;
        }
  }
  template <bool kVectors>
  __device__ __forceinline__ void load_plane(const StateView& view, int64_t slot,
                                             Quad (&quads)[kQuads][4]) const {
    visit<kVectors>(view, slot, [&](int j, int r, const uint16_t* at, int count) {
      if constexpr (!kVectors)
        quads[j][r] = Quad::load(at, count);
      else if (count > 0)
        quads[j][r] = Quad::load(at);
    });
  }
  /// All loads are on their way before one is waited for.
  template <bool kVectors>
  __device__ __forceinline__ void load_planes(int64_t slot) {
    Quad high[kQuads][4], low[kQuads][4];
    load_plane<kVectors>(of.a.initial, slot, high);
    load_plane<kVectors>(of.a.rest, slot, low);
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          S[j][r][c] =
              SplitNumber{high[j][r].element(c), static_cast<int16_t>(low[j][r].element(c))}
                  .joined();
  }
  /// The state of a slot; -1: it is zero.
  __device__ void load(int64_t slot) {
    if (slot < 0) {
#pragma unroll
      for (int j = 0; j < kQuads; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
          for (int c = 0; c < 4; ++c) S[j][r][c] = 0;
      return;
    }
    if (has_vectors())
      load_planes<true>(slot);
    else
      load_planes<false>(slot);
    transpose();
  }
  __device__ bool has_vectors() const { return of.a.initial.vectors && of.a.rest.vectors; }
  template <bool kVectors, bool kUpper>
  __device__ __forceinline__ void store_plane(const StateView& view, int64_t slot) const {
    visit<kVectors>(view, slot, [&](int j, int r, uint16_t* at, int count) {
      uint32_t bits[4];
#pragma unroll
      for (int c = 0; c < 4; ++c)
        bits[c] = SplitNumber::bits_of(S[j][r][c]) + (kUpper ? 0x8000u : 0u);
      if constexpr (!kVectors)
        Quad::of<kUpper>(bits).store(at, count);
      else if (count > 0)
        Quad::of<kUpper>(bits).store(at);
    });
  }
  /// Rounds to bf16 behind it.
  __device__ void store(int64_t slot) {
    transpose();
    if (has_vectors()) {
      store_plane<true, true>(of.a.initial, slot);
      store_plane<true, false>(of.a.rest, slot);
    } else {
      store_plane<false, true>(of.a.initial, slot);
      store_plane<false, false>(of.a.rest, slot);
    }
#pragma unroll
    for (int j = 0; j < kQuads; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) S[j][r][c] = SplitNumber::of(S[j][r][c]).rounded();
    transpose();
  }

  __device__ static void spread(const float* from, float (&x)[4]) {
    const float4 y = *reinterpret_cast<const float4*>(from);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  }
  /// The sum over the threads that share columns, of the column that this lane has of its four.
  __device__ float sum_of_lane(float (&sums)[4]) const {
    reduce_scatter<4, 2>(sums);
    if (sharers >= 8) sums[0] += __shfl_xor_sync(~0u, sums[0], 4);
    if (sharers >= 16) sums[0] += __shfl_xor_sync(~0u, sums[0], 8);
    return sums[0];
  }
  /// Takes the state behind a row, and returns v_new of the lane's column.
  __device__ __forceinline__ float advance(int row) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float keys[kQuads][4], sums[4] = {};
#pragma unroll
    for (int j = 0; j < kQuads; ++j) {
      float decay[4];
      spread(of.rows.decay(row) + channel(j), decay);
      spread(of.rows.key(row) + channel(j), keys[j]);
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          S[j][r][c] *= decay[r];
          sums[c] = fmaf(S[j][r][c], keys[j][r], sums[c]);
        }
    }
    const float value = lane_column() < of.a.shape.V ? of.rows.value(row)[lane_column()] : 0.0f;
    const float mine = *of.rows.beta(row) * (value - sum_of_lane(sums));
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float v_new = __shfl_sync(~0u, mine, (lane & ~3) + c);
#pragma unroll
      for (int j = 0; j < kQuads; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) S[j][r][c] = fmaf(keys[j][r], v_new, S[j][r][c]);
    }
    return mine;
  }
  __device__ int lane_column() const { return column + static_cast<int>(threadIdx.x) % 4; }
  __device__ void store_v_new(int i, float x) const {
    if (part >= 4 || lane_column() >= of.a.shape.V) return;
    const RowView& view = of.a.tail_v_new;
    static_cast<float*>(view.base)[of.row_at(view, of.head, i) + lane_column()] = x;
  }
};

/// Folds rows [0, target) into the columns of the block from `first` on, and makes v_new of the
/// sure rows behind them anew.
__device__ __forceinline__ void fold_columns(const Head& head, int first, int target) {
  Columns state(head, first);
  if (first == 0) head.prefetch(head.a.initial), head.prefetch(head.a.rest);
  const int sure = head.start.sure();
#pragma unroll 1
  for (int at = 0;; at += kRows) {
    const int end = min(at + kRows, sure);
    head.make_rows(at, end);
    if (at == 0) state.load(head.start.source);
#pragma unroll 1
    for (int i = at;; ++i) {
      if (i == target && (i < end || end == sure)) state.store(head.start.slot);
      if (i == end) break;
      const float v_new = state.advance(i - at);
      if (i >= target) state.store_v_new(i, v_new);
    }
    if (end == sure) return;
  }
}

/// Folds what is due in a head.
__device__ __forceinline__ void fold_head(const TailArgs& a, int64_t n, int64_t of_head) {
  const Head head(a, n, of_head);
  const int target = fold_target(a, n, head.start) - head.start.folded;
  const int columns = static_cast<int>(blockDim.x) / sharers_of(a.shape.K) * 4;
#pragma unroll 1
  for (int first = 0; first < a.shape.V; first += columns) fold_columns(head, first, target);
}

/// The heads of a group, kHeads of a sequence, that fold: bits.
__device__ __forceinline__ unsigned folds_of(const TailArgs& a, int64_t n, int64_t group) {
  const Start place = place_of(a, n);
  if (place.skip || num_computed(a, n, decode::tokens_of(a, n)) < 0) return 0;
  unsigned folds = 0;
#pragma unroll
  for (int j = 0; j < kHeads; ++j) {
    const int64_t head = min(group * kHeads + j, static_cast<int64_t>(a.shape.HV - 1));
    Start start = place;
    read_folded(a, n, head, &start);
    const bool is_due = writes_state(a, start, fold_target(a, n, start) - start.folded);
    if (!start.skip && is_due && group * kHeads + j < a.shape.HV) folds |= 1u << j;
  }
  return folds;
}

/// The sum of `count` over the threads in front, and over all of the block. It meets twice.
__device__ __forceinline__ int2 sums_in_front(int count) {
  __shared__ int of_warps[kMostThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int upto = count;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(~0u, upto, step);
    if (lane >= step) upto += before;
  }
  __syncthreads();
  if (lane == 31) of_warps[warp] = upto;
  __syncthreads();
  int front = upto - count, all = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
    front += w < warp ? of_warps[w] : 0;
    all += of_warps[w];
  }
  return {front, all};
}

__device__ __forceinline__ int position_of_bit(unsigned bits, int index) {
  for (; index > 0; --index) bits &= bits - 1;
  return __ffs(static_cast<int>(bits)) - 1;
}

__global__ void __launch_bounds__(kMostThreads, kBlocks)
    fold_split_kernel(const __grid_constant__ TailArgs a) {
  __shared__ int64_t chosen;
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const unsigned groups = (static_cast<unsigned>(a.shape.HV) + kHeads - 1) / kHeads;
  const int64_t all = a.map.num_sequences * groups;
  int64_t next = blockIdx.x, found = 0;  // of the folds, in order
#pragma unroll 1
  for (int64_t first = 0; first < all; first += blockDim.x) {
    const int64_t i = first + threadIdx.x, n = i / groups, group = i % groups;
    const unsigned folds = i < all ? folds_of(a, n, group) : 0;
    const int2 sums = sums_in_front(__popc(folds));
#pragma unroll 1
    for (; next < found + sums.y; next += gridDim.x) {
      const int64_t index = next - found - sums.x;
      if (index >= 0 && index < __popc(folds))
        chosen = n * a.shape.HV + group * kHeads + position_of_bit(folds, static_cast<int>(index));
      __syncthreads();
      const int64_t head = chosen;
      fold_head(a, a.shape.heads.quotient(static_cast<unsigned>(head)),
                a.shape.heads.remainder(static_cast<unsigned>(head)));
      __syncthreads();
    }
    found += sums.y;
  }
}

}  // namespace

Status launch_fold_split(const TailArgs& args, const Launch& where) {
  const int64_t N = args.map.num_sequences;
  if (N == 0) return {};
  const int columns = 128 / sharers_of(args.shape.K);  // of a warp
  const int warps = std::min((args.shape.V + columns - 1) / columns, kMostThreads / 32);
  const int64_t at_once = int64_t{args.ahead} * kBlocks * (kMostThreads / 32 / warps);
  return launch_kernel("fold_split", fold_split_kernel, std::min(N * args.shape.HV, at_once),
                       32 * warps, 4 * FoldRows::of(args.shape).floats(), where, args);
}

}  // namespace kda::cuda::tail
