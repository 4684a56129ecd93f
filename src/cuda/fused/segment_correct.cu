// SPDX-License-Identifier: Apache-2.0
// A block corrects the outputs of some tokens of a segment, one head: [tokens, K] x [K, V] with
// S_in, rounded, in shared memory. The last blocks make final states and checkpoints, from two bf16
// parts of M and of S_in.
//
// Lanes load and store 16 bytes of a row: channels of Qt and columns of o are permuted inside of
// 32, so that what a lane has of a row is what mma wants of it. Which channel stands where does not
// matter as long as rows of S_in go the same way; its columns are stored permuted.
//
// With operands in fp16 Qt is fp16 and times a power of two, and so is S_in here: times one that
// follows from its largest number where that is far from 1.
#include "cuda/fused/segment_correct.hpp"

#include "cuda/fused/checkpoint_offsets.cuh"
#include "cuda/fused/output_residual.cuh"
#include "cuda/launch/launch.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/shared_memory.cuh"
#include "cuda/tile/elements.cuh"
#include "plan/cut_search.hpp"

namespace kda::cuda::sm90 {
namespace {

using Part = __nv_bfloat16;  // M and S_in are sums of two of these for final states
constexpr int kWarps = 4, kThreads = kWarps * 32;
constexpr int kGroup = 32;  // channels or columns that are permuted
constexpr int kWarpTokens = 16, kTokens = kWarps * kWarpTokens;
template <int kK>
constexpr int kFinalParts = kK / kTokens*(kK / kGroup);  // blocks of a final state
constexpr int kBlocksPerSm = 3;
constexpr int64_t kTypicalExit = 4096;           // tokens after which most transitions exit
static_assert(kNormCheckTokens % kTokens == 0);  // all rows of a step have their Qt, or none

template <int kK>
struct alignas(kK * 2) SharedState {
  uint16_t rows[kK * kK];  // [K, V], pieces of 8 columns swizzled
  uint32_t tops[kWarps];
};

/// The transitions whose segments are corrected, how many of their tokens a block corrects, and
/// whether some may have exited.
struct CorrectWork {
  const WorkUnit* units;
  int64_t num_units, block_tokens;
  bool exits;
};
/// Loading S_in costs a block as much as 85 tokens: a block has as many as leave one round of
/// blocks. Returns that, in tokens.
KDA_HOST_DEVICE inline int64_t tokens_of_block(int64_t longest, int64_t chains, int64_t at_once,
                                               bool early_exit) {
  const int64_t typical = early_exit ? plan::smaller(longest, kTypicalExit) : longest;
  return plan::larger(2, plan::ceil_div(plan::ceil_div(typical, kTokens) * chains, at_once)) *
         kTokens;
}

/// kEarlyExit: transitions may have exited before their segments end. T is the type of o, Operand
/// that of Qt and S_in.
template <int kK, class T, class Operand, bool kEarlyExit>
struct Correct {
  static constexpr int kV = kK, kGroups = kK / kGroup;
  static constexpr int kEights = kV / 8, kRowsAtOnce = kThreads / kEights;  // of a state
  static constexpr bool kFp16 = std::is_same_v<Operand, __half>;
  static constexpr bool kHasResidual = kFp16 && std::is_same_v<T, __nv_bfloat16>;
  const SegmentCorrectArgs& a;
  SharedState<kK>& shared;
  const CorrectWork work;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;

  /// Neighbours in a row, as they come and as two parts of 16 bits.
  struct Eight {
    float4 low, high;
    __device__ void load(const float* at) {
      low = reinterpret_cast<const float4*>(at)[0], high = reinterpret_cast<const float4*>(at)[1];
    }
    template <class Item = Part>
    __device__ uint4 rounded(float by = 1) const {
      return {ptx::pack<Item>(low.x * by, low.y * by), ptx::pack<Item>(low.z * by, low.w * by),
              ptx::pack<Item>(high.x * by, high.y * by), ptx::pack<Item>(high.z * by, high.w * by)};
    }
    /// The second part, what rounded() lacks (no output residual: those are 4 bits).
    __device__ uint4 residual() const {
      const uint4 kept = rounded();
      return {rest_of(low.x, low.y, kept.x), rest_of(low.z, low.w, kept.y),
              rest_of(high.x, high.y, kept.z), rest_of(high.z, high.w, kept.w)};
    }
    /// Bits of the largest of them and of `most`, without signs; of those below `limit`.
    __device__ uint32_t top(uint32_t most, uint32_t limit) const {
      for (const float x : {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}) {
        const uint32_t bits = __float_as_uint(x) & 0x7fffffff;
        most = max(most, bits < limit ? bits : 0);
      }
      return most;
    }
    __device__ static uint32_t rest_of(float x, float y, uint32_t rounded_pair) {
      const float2 kept = ptx::unpack<Part>(rounded_pair);
      return ptx::pack<Part>(x - kept.x, y - kept.y);
    }
  };

  __device__ int64_t matrix_of(int64_t segment, int64_t head) const {
    return (segment * a.shape.HV + head) * (kK * kV);
  }

  /// Offset of eight columns of a row, in bytes. Eight rows that are read at once differ in their
  /// last bit and in bits 3 and 4.
  __device__ static int place(int row, int piece) {
    return row * kV * 2 + (piece ^ (row % 2 + row / 8 % 4 * 2)) * 16;
  }

  /// Column 8 j + 2 m + e of a group stands at column 2 j + e of its tile m of 8. `at`: of tile 0
  /// of the group, in its row. Offsets of rows are those of `place`.
  __device__ static void put(uint32_t at, int tile, int offset, uint4 columns) {
    const uint32_t* pairs = &columns.x;
#pragma unroll
    for (int m = 0; m < 4; ++m) ptx::st_shared((at ^ (tile ^ m) * 16) + offset, pairs[m]);
  }
  __device__ uint32_t place_of_eight(int row, int eight) const {
    return ptx::shared_address(shared.rows) + place(row, eight / 4 * 4) + eight % 4 * 4;
  }
  /// visit(n, i, eight columns) for those of this thread: of row kRowsAtOnce (n + i) +
  /// thread / kEights. Loads come in batches: waits for them are most of what a block does.
  template <class Visit>
  __device__ void for_each_eight(const float* from, Visit&& visit) const {
    constexpr int kPieces = kK * kV / 8 / kThreads, kBatch = 4;
#pragma unroll 1
    for (int first = 0; first < kPieces; first += kBatch) {
      Eight x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) x[i].load(from + ((first + i) * kThreads + thread) * 8);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) visit(first, i, x[i]);
    }
  }
  /// `at`: of this thread's columns in the first rows.
  __device__ static uint4 put_state(uint32_t at, int n, int i, const Eight& x, float by) {
    const uint4 pairs = x.template rounded<Operand>(by);
    put(at, i * (kRowsAtOnce / 8) % 4 * 2, (n + i) * kRowsAtOnce * kV * 2, pairs);
    return pairs;
  }
  /// The largest of a block, which waits for all of its stores.
  __device__ uint32_t top_of_block(uint32_t top) const {
    top = ptx::redux_max(top);
    if (lane == 0) shared.tops[warp] = top;
    __syncthreads();
    top = shared.tops[0];
    for (int i = 1; i < kWarps; ++i) top = max(top, shared.tops[i]);
    __syncthreads();
    return top;
  }
  __device__ static float exp2_of(int exponent) {
    return __uint_as_float(static_cast<uint32_t>(127 + min(exponent, 127)) << 23);
  }

  struct StartState {
    bool finite;
    int exponent;  // of what S_in is times
  };
  /// S_in by all threads of a block.
  __device__ StartState load_state(const float* from) const {
    const uint32_t at = place_of_eight(thread / kEights, thread % kEights);
    uint32_t tops = 0;  // of rounded numbers without signs, in both 16 bits of a word
    for_each_eight(from, [&](int n, int i, const Eight& x) {
      const uint4 pairs = put_state(at, n, i, x, 1);
      for (const uint32_t pair : {pairs.x, pairs.y, pairs.z, pairs.w})
        tops = ptx::max_u16x2(tops, pair & 0x7fff7fff);
    });
    const uint32_t top = top_of_block(max(tops & 0xffff, tops >> 16));
    if (!kFp16) return {top < 0x7f80, 0};
    constexpr uint32_t kUsual[] = {0x1c00, 0x7800};  // 2^-8, 2^15
    return top >= kUsual[0] && top < kUsual[1] ? StartState{true, 0} : scale_state(from);
  }
  /// Times what takes its largest finite number to 1 to 2.
  __device__ StartState scale_state(const float* from) const {
    constexpr uint32_t kInfinity = 0x7f800000;
    uint32_t top = 0, finite_top = 0;
    for_each_eight(from, [&](int, int, const Eight& x) {
      top = x.top(top, ~0u);
      finite_top = x.top(finite_top, kInfinity);
    });
    const bool finite = top_of_block(top) < kInfinity;
    // The product with Qt's power of two has to be a float; the state may be zeros.
    const int exponent = max(-114, min(96, 127 - static_cast<int>(top_of_block(finite_top) >> 23)));
    const float by = exp2_of(exponent);
    for_each_eight(from, [&](int n, int i, const Eight& x) {
      put_state(place_of_eight(thread / kEights, thread % kEights), n, i, x, by);
    });
    __syncthreads();
    return {finite, exponent};
  }

  /// sum += rows times columns of tiles from `tile0` on.
  template <class Item, int kTiles>
  __device__ void multiply(const uint4 (&rows)[kGroups][2], int tile0,
                           float (&sum)[kTiles][4]) const {
    // Channels 2 j + e of a step are 8 j + 4 step + e, those 8 further two more.
    const int row = lane % 8;
    const uint32_t right_at = ptx::shared_address(shared.rows) +
                              place(row / 2 * 8 + row % 2 + lane / 8 % 2 * 2, tile0 + lane / 16);
#pragma unroll
    for (int group = 0; group < kGroups; ++group)
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const uint4 x = rows[group][0], y = rows[group][1];
        const uint32_t left[4] = {step ? x.z : x.x, step ? y.z : y.x, step ? x.w : x.y,
                                  step ? y.w : y.y};
#pragma unroll
        for (int tile = 0; tile < kTiles; tile += 2) {
          uint32_t right[4];
          ptx::ldmatrix_x4_trans(right,
                                 (right_at ^ tile * 16) + (group * kGroup + step * 4) * (kV * 2));
          ptx::mma_16816<Item>(sum[tile], left, right[0], right[1]);
          ptx::mma_16816<Item>(sum[tile + 1], left, right[2], right[3]);
        }
      }
  }

  /// Eight columns of a row, with their residual, plus what the start state adds.
  template <int kUpper>
  __device__ static uint4 sum_of(uint4 x, uint4 residual, const float (*missing)[4], float by) {
    uint32_t* pairs = &x.x;
    const uint32_t* words = &residual.x;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float2 y = kHasResidual ? fused::with_residual<kUpper>(pairs[m], words[m])
                                    : ptx::unpack<T>(pairs[m]);
      pairs[m] = ptx::pack<T>(fmaf(missing[m][kUpper * 2], by, y.x),
                              fmaf(missing[m][kUpper * 2 + 1], by, y.y));
    }
    return x;
  }

  /// This lane's pieces of two rows of 16 tokens.
  struct Rows {
    int64_t at[2], residual_at;
    bool valid[2];
    __device__ Rows(const Correct& c, const WorkUnit& unit, int64_t head, int64_t first) {
      const TokenRange tokens = unit.tokens;
      const int64_t run = first + c.warp * kWarpTokens, token = run + c.lane / 4;
      at[0] = row_offset(c.a.o, c.a.map, tokens.sequence, token, head) + c.lane % 4 * 8;
      at[1] = at[0] + 8 * c.a.o.stride_t;
      residual_at = kHasResidual ? fused::residual_place<kV>(c.a.shape, unit.segment, run, head) +
                                       c.lane % 4 / 2 * fused::kResidualLanes + c.lane / 4 * 4
                                 : 0;
      valid[0] = token < tokens.end, valid[1] = token + 8 < tokens.end;
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
    /// Loads residual words of both rows, shifted to columns from 8 on where this lane has those.
    __device__ void load_residual(const Correct& c, uint4 (&x)[kGroups]) const {
      if (!kHasResidual) return;
      const int right = c.lane % 2 * 8;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (valid[0] || valid[1])
          x[group] = *reinterpret_cast<const uint4*>(c.a.residual + residual_at +
                                                     group * 2 * fused::kResidualLanes);
        x[group] = {x[group].x >> right, x[group].y >> right, x[group].z >> right,
                    x[group].w >> right};
      }
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
    const WorkUnit unit = work.units[place / HV % work.num_units];
    const TokenRange tokens = unit.tokens;
    int64_t first = tokens.begin + place / HV / work.num_units * work.block_tokens;
    const int64_t end = min(first + work.block_tokens, tokens.end);
    if (first >= end) return;
    const int64_t exit = kEarlyExit && work.exits ? a.exit_tokens[unit.segment * HV + head] : end;
    uint4 q[kGroups][2], o[kGroups][2], residual[kGroups]{};
    Rows rows(*this, unit, head, first);
    rows.load(a.Qt, q, !kEarlyExit || first < exit);
    const StartState start = load_state(a.states_in + matrix_of(unit.segment, head));
    const float back = exp2_of(kFp16 ? -start.exponent - a.qt_exponent : 0);
    while (!kEarlyExit || first < exit || !start.finite) {
      rows.keep_those_that_add(q, start.finite);
      rows.load(a.o.base, o);
      rows.load_residual(*this, residual);
      if (rows.any()) add_missing(rows, q, o, residual, back);
      if ((first += kTokens) >= end) return;
      rows = Rows(*this, unit, head, first);
      rows.load(a.Qt, q, !kEarlyExit || first < exit);
    }
  }
  __device__ void add_missing(const Rows& rows, const uint4 (&q)[kGroups][2],
                              const uint4 (&o)[kGroups][2], const uint4 (&residual)[kGroups],
                              float back) const {
    float missing[kV / 8][4] = {};
    multiply<Operand>(q, 0, missing);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      auto* at = static_cast<T*>(a.o.base) + group * kGroup;
      const float(*of_group)[4] = missing + group * 4;
      if (rows.valid[0])
        *reinterpret_cast<uint4*>(at + rows.at[0]) =
            sum_of<0>(o[group][0], residual[group], of_group, back);
      if (rows.valid[1])
        *reinterpret_cast<uint4*>(at + rows.at[1]) =
            sum_of<1>(o[group][1], residual[group], of_group, back);
    }
  }

  /// A state to make, in `slot` (negative: none) of a buffer: M S_in + B, of a segment.
  struct Made {
    StateView to;  // by value: through a reference each store would read it again
    int64_t slot;
    const float *M, *B, *start;  // of a head
  };
  /// 64 rows and 32 columns of the final state or the checkpoint of a sequence that is cut.
  __device__ void make_state(int64_t sequence, bool checkpoint, int64_t place) const {
    const int64_t head = place / kFinalParts<kK> % a.shape.HV;
    if (a.offsets[sequence + 1] == a.offsets[sequence]) return;
    const Made made = checkpoint ? checkpoint_of(sequence, head) : final_of(sequence, head);
    if (made.slot >= 0) make(made, head, static_cast<int>(place % kFinalParts<kK>));
  }
  __device__ Made final_of(int64_t sequence, int64_t head) const {
    const int64_t matrix = matrix_of(a.offsets[sequence + 1] - 1, head);
    return {a.final_state, state_slot(a.final_state, sequence), a.M + matrix, a.B + matrix,
            a.states_in + matrix};
  }
  /// None where it is not behind the first segment: the fused kernel has stored it. Past an exit M
  /// is what it was there.
  __device__ Made checkpoint_of(int64_t sequence, int64_t head) const {
    const TokenRange all = sequence_range(a.map, sequence);
    const int64_t offset = fused::checkpoint_offset(a, all), at = all.begin + offset;
    const int64_t end = a.offsets[sequence + 1];
    int64_t segment = a.offsets[sequence];
    if (offset == 0 || at <= work.units[segment].tokens.begin) segment = end;
    while (segment < end && at > work.units[segment].tokens.end) ++segment;
    if (segment == end) return {a.checkpoints, -1};
    const int64_t matrix = matrix_of(segment, head);
    const bool exited = kEarlyExit && work.exits && at > a.exit_tokens[segment * a.shape.HV + head];
    return {a.checkpoints, state_slot(a.checkpoints, sequence),
            (exited ? a.M : a.checkpoint_M) + matrix, a.checkpoint_B + matrix,
            a.states_in + matrix};
  }
  __device__ void make(const Made& made, int64_t head, int part) const {
    const int columns = part % kGroups * kGroup;
    const int row = (part / kGroups * kWarps + warp) * kWarpTokens + lane / 4,
              column = columns + lane % 4 * 8;
    Eight start[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) start[i].load(made.B + (row + i * 8) * kV + column);
    float sum[kGroup / 8][4] = {};
    add_product(made.M + row * kK + lane % 4 * 8, made.start + columns, sum);
    const StateView& to = made.to;
    const int64_t at = state_offset(to, made.slot, head, row, column);
    const int64_t down = to.vk ? 1 : to.stride_row, right = to.vk ? to.stride_row : 1;
#pragma unroll
    for (int i = 0; i < 16; ++i)
      store_state(to, at + i / 8 * 8 * down + i % 8 * right,
                  sum[i % 8 / 2][i / 8 * 2 + i % 2] + (&start[i / 8].low.x)[i % 8]);
  }
  /// sum += M S of 16 rows and 32 columns, both in two parts: those of S lie beside each other.
  __device__ void add_product(const float* M, const float* S, float (&sum)[kGroup / 8][4]) const {
    constexpr int kPieces = kK * kGroup / 8 / kThreads;
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
      put(place_of_eight(piece / 4, piece % 4), 0, 0, x[i].rounded());
      put(place_of_eight(piece / 4, 4 + piece % 4), 0, 0, x[i].residual());
    }
    uint4 rounded[kGroups][2], residual[kGroups][2];
#pragma unroll
    for (int i = 0; i < kGroups * 2; ++i)
      rounded[i / 2][i % 2] = m[i / 2][i % 2].rounded(),
                         residual[i / 2][i % 2] = m[i / 2][i % 2].residual();
    __syncthreads();
    multiply<Part>(residual, 0, sum);
    multiply<Part>(rounded, kGroup / 8, sum);
    multiply<Part>(rounded, 0, sum);
  }
};

/// Blocks that make the states of `count` sequences: final states, then checkpoints.
template <int kK>
struct StateBlocks {
  int64_t of_sequence, final_states, all;
  __host__ __device__ StateBlocks(const SegmentCorrectArgs& a, int64_t count)
      : of_sequence(a.shape.HV * kFinalParts<kK>),
        final_states(a.final_state.base ? count * of_sequence : 0),
        all(final_states + (a.checkpoints.base ? count * of_sequence : 0)) {}
  __device__ bool checkpoint(int64_t i) const { return i >= final_states; }
  /// Number of the sequence whose state block i makes a part of.
  __device__ int64_t number(int64_t i) const {
    return (i - (checkpoint(i) ? final_states : 0)) / of_sequence;
  }
};

template <int kK, class T, class Operand, bool kEarlyExit>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    segment_correct_kernel(const __grid_constant__ SegmentCorrectArgs a) {
  const Correct<kK, T, Operand, kEarlyExit> correct{
      a,
      *reinterpret_cast<SharedState<kK>*>(ptx::dynamic_shared()),
      {a.units, a.num_units, a.block_tokens, kEarlyExit}};
  const StateBlocks<kK> states(a, a.map.num_sequences);
  const int64_t place = blockIdx.x, state_place = place - (gridDim.x - states.all);
  ptx::griddepcontrol_wait();
  if (state_place >= 0)
    correct.make_state(states.number(state_place), states.checkpoint(state_place), state_place);
  else
    correct.run(place);
}

/// Blocks walk over what a cut on the device leaves to do: as many blocks as are there at once.
template <int kK, class T, class Operand>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    walking_correct_kernel(const __grid_constant__ SegmentCorrectArgs a) {
  ptx::griddepcontrol_wait();
  const CutHeader& cut = *a.cut;
  if (cut.num_behind == 0) return;
  const int64_t chains = cut.num_behind * a.shape.HV;
  const bool exits = cut.early_exit != 0;
  const CorrectWork work{a.units + cut.num_segments, cut.num_behind,
                         tokens_of_block(cut.longest_behind, chains, gridDim.x, exits), exits};
  const Correct<kK, T, Operand, /*kEarlyExit=*/true> correct{
      a, *reinterpret_cast<SharedState<kK>*>(ptx::dynamic_shared()), work};
  const int64_t outputs = chains * plan::ceil_div(cut.longest_behind, work.block_tokens);
  const StateBlocks<kK> states(a, cut.num_cut);
  for (int64_t place = blockIdx.x; place < outputs + states.all; place += gridDim.x) {
    const int64_t i = place - outputs;
    if (i < 0)
      correct.run(place);
    else
      correct.make_state(cut_sequences(&cut)[states.number(i)], states.checkpoint(i), i);
    __syncthreads();  // the next one has its state in the same place
  }
}

/// `blocks`: how many correct outputs, or walk.
template <int kK, class T, class Operand>
Status launch(const SegmentCorrectArgs& args, int64_t blocks, const Launch& where) {
  if (args.cut)
    return launch_kernel("segment_correct_walking", walking_correct_kernel<kK, T, Operand>, blocks,
                         kThreads, sizeof(SharedState<kK>), where, args);
  return launch_kernel("segment_correct",
                       args.exit_tokens ? segment_correct_kernel<kK, T, Operand, true>
                                        : segment_correct_kernel<kK, T, Operand, false>,
                       StateBlocks<kK>(args, args.map.num_sequences).all + blocks, kThreads,
                       sizeof(SharedState<kK>), where, args);
}
template <int kK>
Status launch_size(const SegmentCorrectArgs& args, int64_t blocks, const Launch& where) {
  using Bf16 = __nv_bfloat16;
  if (args.o.type == Element::kFloat16) return launch<kK, __half, __half>(args, blocks, where);
  return args.fp16_operands ? launch<kK, Bf16, __half>(args, blocks, where)
                            : launch<kK, Bf16, Bf16>(args, blocks, where);
}

}  // namespace

Status launch_segment_correct(SegmentCorrectArgs args, int64_t num_sms, const Launch& where) {
  const int64_t at_once = num_sms * kBlocksPerSm;
  if (args.cut)
    return args.shape.K == 64 ? launch_size<64>(args, at_once, where)
                              : launch_size<128>(args, at_once, where);
  const int64_t chains = args.num_units * args.shape.HV;
  args.block_tokens = tokens_of_block(args.longest, chains, at_once, args.exit_tokens != nullptr);
  const int64_t parts = (args.longest + args.block_tokens - 1) / args.block_tokens;
  return args.shape.K == 64 ? launch_size<64>(args, chains * parts, where)
                            : launch_size<128>(args, chains * parts, where);
}

}  // namespace kda::cuda::sm90
