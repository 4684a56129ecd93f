// SPDX-License-Identifier: Apache-2.0
// A block corrects the outputs of some tokens of a segment, one head: [tokens, K] x [K, V] with
// S_in, rounded, in shared memory. The last blocks make final states, from two bf16 parts of M and
// of S_in.
//
// Lanes load and store 16 bytes of a row: channels of Qt and columns of o are permuted inside of
// 32, so that what a lane has of a row is what mma wants of it. Which channel stands where does not
// matter as long as rows of S_in go the same way; its columns are stored permuted.
#include "cuda/sm90/segment_correct.hpp"

#include <algorithm>

#include "cuda/host/launch.cuh"
#include "cuda/ptx/order.cuh"
#include "cuda/ptx/ptx.cuh"
#include "cuda/tile/elements.cuh"

namespace kda::cuda::sm90 {
namespace {

using T = __nv_bfloat16;
constexpr int kK = 128, kV = 128, kWarps = 4, kThreads = kWarps * 32;
constexpr int kGroup = 32, kGroups = kK / kGroup;  // channels or columns that are permuted
constexpr int kWarpTokens = 16, kTokens = kWarps * kWarpTokens;
constexpr int kFinalParts = kK / kTokens * kGroups;  // blocks of a final state
constexpr int kBlocksPerSm = 3;
constexpr int64_t kTypicallyAlive = 8192;   // tokens, of transitions that may stop early
static_assert(kLookTokens % kTokens == 0);  // all rows of a step have their Qt, or none

/// kStop: transitions may have stopped before their segments end.
template <bool kStop>
struct Correct {
  const SegmentCorrectArgs& a;
  T* state;  // [K, V], pieces of 8 columns swizzled
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;

  /// Neighbours in a row, as they come and as two parts of 16 bits.
  struct Eight {
    float4 low, high;
    __device__ void load(const float* at) {
      low = reinterpret_cast<const float4*>(at)[0], high = reinterpret_cast<const float4*>(at)[1];
    }
    __device__ uint4 rounded() const {
      return {ptx::pack<T>(low.x, low.y), ptx::pack<T>(low.z, low.w), ptx::pack<T>(high.x, high.y),
              ptx::pack<T>(high.z, high.w)};
    }
    __device__ uint4 rest() const {
      const uint4 kept = rounded();
      return {rest_of(low.x, low.y, kept.x), rest_of(low.z, low.w, kept.y),
              rest_of(high.x, high.y, kept.z), rest_of(high.z, high.w, kept.w)};
    }
    /// Adds 0 times all of them to two sums: not 0 where one is not finite.
    __device__ void add_zeros(float2& sum) const {
      sum.x = fmaf(0.0f, low.x, fmaf(0.0f, low.y, fmaf(0.0f, low.z, fmaf(0.0f, low.w, sum.x))));
      sum.y = fmaf(0.0f, high.x, fmaf(0.0f, high.y, fmaf(0.0f, high.z, fmaf(0.0f, high.w, sum.y))));
    }
    __device__ static uint32_t rest_of(float x, float y, uint32_t rounded_pair) {
      const float2 kept = ptx::unpack<T>(rounded_pair);
      return ptx::pack<T>(x - kept.x, y - kept.y);
    }
  };

  __device__ int64_t matrix_of(int64_t segment, int64_t head) const {
    return (segment * a.shape.HV + head) * (kK * kV);
  }

  /// Eight rows that are read at once differ in their last bit and in bits 3 and 4.
  __device__ static int place(int row, int piece) {
    return row * kV + (piece ^ (row % 2 + row / 8 % 4 * 2)) * 8;
  }

  /// Column 8 j + 2 m + e of a group stands at column 2 j + e of its tile m of 8.
  __device__ void put(int row, int eight, uint4 columns) const {
    const int group = eight / 4, j = eight % 4;
    const uint32_t* pairs = &columns.x;
#pragma unroll
    for (int m = 0; m < 4; ++m)
      *reinterpret_cast<uint32_t*>(state + place(row, group * 4 + m) + j * 2) = pairs[m];
  }
  /// By all threads of a block: is all of the state finite? Loads come in batches: waits for them
  /// are most of what a block does.
  __device__ bool load_state(const float* from) const {
    constexpr int kRowPieces = kV / 8, kPieces = kK * kRowPieces / kThreads, kBatch = 4;
    float2 zero{};
    for (int first = 0; first < kPieces; first += kBatch) {
      Eight x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) x[i].load(from + ((first + i) * kThreads + thread) * 8);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int piece = (first + i) * kThreads + thread;
        put(piece / kRowPieces, piece % kRowPieces, x[i].rounded());
        x[i].add_zeros(zero);
      }
    }
    return !__syncthreads_or(zero.x + zero.y != 0);
  }

  /// sum += rows times columns of tiles from `tile0` on.
  template <int kTiles>
  __device__ void multiply(const uint4 (&rows)[kGroups][2], int tile0,
                           float (&sum)[kTiles][4]) const {
    const auto row =
        static_cast<int>(ptx::opaque(lane % 8));  // else 64 addresses stay in registers
#pragma unroll
    for (int group = 0; group < kGroups; ++group)
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const uint4 x = rows[group][0], y = rows[group][1];
        const uint32_t left[4] = {step ? x.z : x.x, step ? y.z : y.x, step ? x.w : x.y,
                                  step ? y.w : y.y};
        // Channels 2 j + e of the step are 8 j + 4 step + e, those 8 further two more.
        const int channel = group * kGroup + row / 2 * 8 + step * 4 + row % 2 + lane / 8 % 2 * 2;
#pragma unroll
        for (int tile = 0; tile < kTiles; tile += 2) {
          uint32_t right[4];
          ptx::ldmatrix_x4_trans(
              right, ptx::shared_address(state + place(channel, tile0 + tile + lane / 16)));
          ptx::mma_16816<T>(sum[tile], left, right[0], right[1]);
          ptx::mma_16816<T>(sum[tile + 1], left, right[2], right[3]);
        }
      }
  }

  /// A row of 32 columns plus what is missing.
  __device__ static uint4 sum_of(uint4 x, const float (*missing)[4], int half) {
    uint32_t* pairs = &x.x;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float2 y = ptx::unpack<T>(pairs[m]);
      pairs[m] = ptx::pack<T>(y.x + missing[m][half * 2], y.y + missing[m][half * 2 + 1]);
    }
    return x;
  }

  /// This lane's pieces of two rows of 16 tokens.
  struct Rows {
    int64_t at[2];
    bool valid[2];
    __device__ Rows(const Correct& c, const Span& span, int64_t head, int64_t first) {
      const int64_t token = first + c.warp * kWarpTokens + c.lane / 4;
      at[0] = row_offset(c.a.o, c.a.map, span.sequence, token, head) + c.lane % 4 * 8;
      at[1] = at[0] + 8 * c.a.o.stride_t;
      valid[0] = token < span.end, valid[1] = token + 8 < span.end;
    }
    __device__ void load(const void* base, uint4 (&x)[kGroups][2], bool there = true) const {
#pragma unroll
      for (int group = 0; group < kGroups; ++group)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          x[group][i] = valid[i] && there
                            ? *reinterpret_cast<const uint4*>(static_cast<const T*>(base) + at[i] +
                                                              group * kGroup)
                            : uint4{};
    }
    /// Rows of zeros add nothing to a finite state. Row by row: what others are must not change the
    /// bits of one.
    __device__ void keep_those_that_add(const uint4 (&q)[kGroups][2], bool finite) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t bits = 0;
#pragma unroll
        for (int group = 0; group < kGroups; ++group)
          bits |= q[group][i].x | q[group][i].y | q[group][i].z | q[group][i].w;
        bits &= 0x7fff7fff;                            // -0 is 0 too
        bits |= __shfl_xor_sync(0xffffffff, bits, 1);  // a row is in four lanes
        bits |= __shfl_xor_sync(0xffffffff, bits, 2);
        valid[i] = valid[i] && (bits != 0 || !finite);
      }
    }
    __device__ bool any() const { return __any_sync(0xffffffff, valid[0] || valid[1]); }
  };

  __device__ void run(int64_t place) const {
    const int64_t HV = a.shape.HV, head = place % HV;
    const FusedUnit unit = a.units[place / HV % a.num_units];
    const Span span = unit.span;
    int64_t first = span.begin + place / HV / a.num_units * a.block_tokens;
    const int64_t end = min(first + a.block_tokens, span.end);
    if (first >= end) return;
    const int64_t alive = kStop ? a.alive[unit.segment * HV + head] : end;
    uint4 q[kGroups][2], o[kGroups][2];
    Rows rows(*this, span, head, first);
    rows.load(a.Qt, q, !kStop || first < alive);
    const bool finite = load_state(a.states_in + matrix_of(unit.segment, head));
    while (!kStop || first < alive || !finite) {
      rows.keep_those_that_add(q, finite);
      rows.load(a.o.base, o);
      if (rows.any()) add_missing(rows, q, o);
      if ((first += kTokens) >= end) return;
      rows = Rows(*this, span, head, first);
      rows.load(a.Qt, q, !kStop || first < alive);
    }
  }
  __device__ void add_missing(const Rows& rows, const uint4 (&q)[kGroups][2],
                              const uint4 (&o)[kGroups][2]) const {
    float missing[kV / 8][4] = {};
    multiply(q, 0, missing);
#pragma unroll
    for (int group = 0; group < kGroups; ++group)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (rows.valid[i])
          *reinterpret_cast<uint4*>(static_cast<T*>(a.o.base) + rows.at[i] + group * kGroup) =
              sum_of(o[group][i], missing + group * 4, i);
  }

  /// 64 rows and 32 columns of the final state of a sequence that is cut: M S_in + B of its last
  /// segment.
  __device__ void make_final(int64_t place) const {
    const int64_t matrix_place = place / kFinalParts, head = matrix_place % a.shape.HV,
                  sequence = matrix_place / a.shape.HV;
    const int64_t slot = state_slot(a.final_state, sequence), last = a.offsets[sequence + 1] - 1;
    if (slot < 0 || last < a.offsets[sequence]) return;
    const int part = static_cast<int>(place % kFinalParts), columns = part % kGroups * kGroup;
    const int row = (part / kGroups * kWarps + warp) * kWarpTokens + lane / 4,
              column = columns + lane % 4 * 8;
    const int64_t matrix = matrix_of(last, head);
    Eight start[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) start[i].load(a.B + matrix + (row + i * 8) * kV + column);
    float sum[kGroup / 8][4] = {};
    add_product(a.M + matrix + row * kK + lane % 4 * 8, a.states_in + matrix + columns, sum);
#pragma unroll
    for (int i = 0; i < 16; ++i)
      store_state(a.final_state,
                  state_offset(a.final_state, slot, head, row + i / 8 * 8, column + i % 8),
                  sum[i % 8 / 2][i / 8 * 2 + i % 2] + (&start[i / 8].low.x)[i % 8]);
  }
  /// sum += M S of 16 rows and 32 columns, both in two parts: those of S lie beside each other.
  __device__ void add_product(const float* M, const float* S, float (&sum)[kGroup / 8][4]) const {
    constexpr int kPieces = kK * kGroups / kThreads;
    Eight x[kPieces], m[kGroups][2];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = i * kThreads + thread;
      x[i].load(S + piece / 4 * kV + piece % 4 * 8);
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group)
#pragma unroll
      for (int i = 0; i < 2; ++i) m[group][i].load(M + i * 8 * kK + group * kGroup);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int piece = i * kThreads + thread;
      put(piece / 4, piece % 4, x[i].rounded());
      put(piece / 4, 4 + piece % 4, x[i].rest());
    }
    uint4 rounded[kGroups][2], rest[kGroups][2];
#pragma unroll
    for (int i = 0; i < kGroups * 2; ++i)
      rounded[i / 2][i % 2] = m[i / 2][i % 2].rounded(),
                         rest[i / 2][i % 2] = m[i / 2][i % 2].rest();
    __syncthreads();
    multiply(rest, 0, sum);
    multiply(rounded, kGroup / 8, sum);
    multiply(rounded, 0, sum);
  }
};

__host__ __device__ int64_t state_blocks(const SegmentCorrectArgs& a) {
  return a.final_state.base ? a.map.num_sequences * a.shape.HV * kFinalParts : 0;
}

template <bool kStop>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    segment_correct_kernel(const __grid_constant__ SegmentCorrectArgs a) {
  const Correct<kStop> correct{a, reinterpret_cast<T*>(ptx::dynamic_shared())};
  const int64_t place = blockIdx.x, state_place = place - (gridDim.x - state_blocks(a));
  ptx::wait_for_launches_before();
  if (state_place >= 0)
    correct.make_final(state_place);
  else
    correct.run(place);
}

}  // namespace

Status launch_segment_correct(SegmentCorrectArgs args, int64_t num_sms, const Launch& where) {
  // S_in of a block is as much as 85 tokens: as many of them as leave one round of blocks.
  const int64_t streams = args.num_units * args.shape.HV;
  const int64_t longest = args.alive ? std::min(args.longest, kTypicallyAlive) : args.longest;
  const int64_t tiles = (longest + kTokens - 1) / kTokens;
  const int64_t blocks = num_sms * kBlocksPerSm;
  args.block_tokens = std::max<int64_t>(2, (tiles * streams + blocks - 1) / blocks) * kTokens;
  const int64_t parts = (args.longest + args.block_tokens - 1) / args.block_tokens;
  return launch_kernel("segment_correct",
                       args.alive ? segment_correct_kernel<true> : segment_correct_kernel<false>,
                       state_blocks(args) + streams * parts, kThreads,
                       kK * kV * static_cast<int>(sizeof(T)), where, args);
}

}  // namespace kda::cuda::sm90
