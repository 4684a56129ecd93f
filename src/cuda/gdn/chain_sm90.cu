// SPDX-License-Identifier: Apache-2.0
// A block has 64 or 128 columns of V of one value head of a sequence, a warpgroup for each 64: it
// holds S^T in its accumulators and does all products of a chunk by wgmma. Of one more warpgroup
// two warps copy the next chunks into a ring of stages (v by cp.async, tiles of the workspace by
// bulk copies), and two write outputs, which lie in a stage in place of v.
//
// A stage is full when 64 threads' rows of v and the tiles are there; it has its results when the
// outputs are in place of v; it is free when the chain and those who write have read it.
//
// M and B of segments come from the same chain without outputs: B from a state of zeros, M from the
// identity with v = 0. Two such blocks share an SM.
#include "cuda/gdn/chain_sm90.hpp"

#include <algorithm>

#include "core/return_if_error.hpp"
#include "cuda/chain/outputs_sm90.cuh"
#include "cuda/chain/products_sm90.cuh"
#include "cuda/chain/ring_sm90.cuh"
#include "cuda/gdn/forgotten.cuh"
#include "cuda/gdn/rows.cuh"
#include "cuda/launch/built.hpp"
#include "cuda/launch/launch.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace kda::cuda::gdn {
namespace {

template <class T, int kK, bool kForward>
struct OutputOperands {
  T q[kChunk * kK], scores[kSquare];
};
template <class T, int kK>
struct OutputOperands<T, kK, false> {};

/// wgmma wants tiles aligned to 1024 bytes.
template <class T, int kK, int kGroups, bool kForward>
struct alignas(1024) Stage : OutputOperands<T, kK, kForward> {
  T k[kChunk * kK], inverse[kSquare];
  T v[kGroups][kChunk * kVTile];  // then o
  Numbers numbers;
};

/// A chunk puts the outputs of the one before, with no branch while products run: the first one
/// puts what nobody reads.
template <class T, int kGroups, bool kForward>
struct BeforeFirst {
  alignas(128) T v[kGroups][kChunk * kVTile];
};
template <class T, int kGroups>
struct BeforeFirst<T, kGroups, false> {};

template <class T, int kK, int kGroups, ChainUse kUse>
struct Kernel {
  using C = chain::Chain<T, kK, kUse>;
  static constexpr int kTiles = C::kTiles, kSteps = C::kSteps, kTokenTiles = C::kTokenTiles;

  static constexpr bool kForward = kUse == ChainUse::kForward;
  static constexpr int kBlocksPerSm = kForward ? 1 : 2;
  using R = chain::Ring<Stage<T, kK, kGroups, kForward>, 3>;
  using S = typename R::Stage;
  struct Shared : R {
    BeforeFirst<T, kGroups, kForward> before_first;
  };
  static constexpr int kColumns = kGroups * kVTile;
  KDA_HOST_DEVICE static constexpr int64_t blocks_of_span(const Shape& shape) {
    const auto of = [](int columns) { return (columns + kColumns - 1) / kColumns; };
    return shape.HV * (of(shape.V) + (kForward ? 0 : of(shape.K)));
  }
  static constexpr int kChainThreads = 128 * kGroups;  // the first ones
  static constexpr int kCopiers = 64, kStorers = 64;   // the next ones
  static constexpr int kThreads = kChainThreads + kCopiers + kStorers;

  const HeadGates<ChainArgs>& a;
  C c;  // the state and where it belongs
  Shared& ring;
  const int warp;
  bool forgotten = false;  // M of this segment and head is bounded away
  bool made = false;       // the span is a segment that a kernel has made

  __device__ Kernel(const HeadGates<ChainArgs>& args, Shared& shared)
      : a(args),
        c(args),
        ring(shared),
        warp(__shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0)) {}

  __device__ void init_barriers() const {
    ring.init_barriers(kCopiers + 1, kChainThreads, kForward ? kStorers : 0);
  }

  /// Whether a kernel that cuts has left this block something to do. Asked first: to find a place
  /// takes loads one after the other, and blocks that have none come in many rounds.
  __device__ bool has_place() {
    if (!a.made_segments) return true;
    const int64_t count = *a.made_segments;
    if constexpr (kForward) {
      made = count > 0;
      const int64_t spans = made ? count : a.map.num_sequences;
      return is_wide(spans, a.shape.HV, a.shape.V, a.num_sms) == (kGroups == 2) &&
             blockIdx.x < spans * blocks_of_span(a.shape);
    }
    return blockIdx.x < (count - a.map.num_sequences) * blocks_of_span(a.shape);
  }
  /// Its place among the blocks of all spans.
  __device__ unsigned place() const {
    if (kForward || !a.made_segments) return blockIdx.x;
    const auto blocks = static_cast<unsigned>(blocks_of_span(a.shape));
    return static_cast<unsigned>(a.made_followed[blockIdx.x / blocks]) * blocks +
           blockIdx.x % blocks;
  }

  // ---- what a head forgets ---------------------------------------------------------------------

  /// Leaves out of the chain what a scan needs not walk through.
  __device__ void skip_what_is_forgotten() {
    const int last = chunks_that_last_to_the_end(c, a.made.numbers);
    if (c.transition && c.column == 0 && threadIdx.x == 0)
      a.forgotten[c.unit * a.shape.HV + c.head] = last > 0;
    if (last == 0) return;
    forgotten = c.transition;
    begin_with_the_last(c, forgotten ? 0 : last);
  }

  // ---- copies ----------------------------------------------------------------------------------

  /// visit(where it goes, where it lies, bytes) for each tile of a chunk. In the order in which the
  /// chain wants them.
  template <class Visit>
  __device__ void for_each_tile(int chunk, int q_head, S& s, Visit&& visit) const {
    const auto whole = [&](auto& target, const void* source, int64_t tile) {
      visit(&target, static_cast<const char*>(source) + tile * sizeof(target),
            static_cast<int>(sizeof(target)));
    };
    const int64_t rows = (c.chunk0 + chunk) * a.shape.H + q_head, own = c.tile(chunk);
    whole(s.k, a.made.k, rows);
    if constexpr (kForward) whole(s.q, a.made.q, rows);
    whole(s.numbers, a.made.numbers, own);
    whole(s.inverse, a.made.inverse, own);
    if constexpr (kForward) whole(s.scores, a.made.scores, own);
  }

  /// Rows of v that come are the next ones.
  __device__ void run_copies(int thread) const {
    const int q_head = q_head_of(a, static_cast<int>(c.head));
    const T* v = static_cast<const T*>(a.v.base) +
                 row_offset(a.v, a.map, c.tokens.sequence, c.tokens.begin, c.head);
    for (int chunk = 0; chunk < c.num_chunks; ++chunk) {
      const int i = chunk % R::kStages, round = chunk / R::kStages;
      const auto count = static_cast<int>(min(
          static_cast<int64_t>(kChunk), c.tokens.end - c.tokens.begin - int64_t{chunk} * kChunk));
      ring.wait_until_free(i, round);
      S& s = ring.stages[i];
      if (thread == 0) ring.copy(i, [&](auto&& visit) { for_each_tile(chunk, q_head, s, visit); });
      if (!c.transition) {
#pragma unroll 1
        for (int group = 0; group < kGroups; ++group) {
          const int column = (c.u_tile + group) * kVTile;
          copy_rows<kVTile, kCopiers>(s.v[group], v + column, a.v.stride_t, count,
                                      a.shape.V - column, thread);
        }
        v += kChunk * a.v.stride_t;
      }
      ring.arrive_after_copies(i);
    }
  }

  // ---- outputs ---------------------------------------------------------------------------------

  __device__ void run_stores(int thread) const {
    for (int chunk = 0; chunk < c.num_chunks; ++chunk) {
      const S& s = ring.stage(chunk);
      ring.wait_for_results(chunk);
      if (a.o.type != Element::kFloat32) chain::store_tiles<kStorers>(c, chunk, s.v, thread);
      ring.is_read(chunk);
    }
  }

  // ---- one chunk -------------------------------------------------------------------------------

  __device__ void wait_for_operands(int chunk) const {
    if (chunk < c.num_chunks) ring.wait_for_operands(chunk);
  }

  /// Z^T = v^T - row_k (k S)^T, in place of (k S)^T. A transition has v = 0.
  __device__ __forceinline__ void subtract_from_v(const S& s, float (&z)[kTokenTiles][4]) const {
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
      uint32_t v[4] = {};  // tokens step*16..+7 and +8..15, columns 0..7 and 8..15 of this warp
      if (!c.transition)
        ptx::ldmatrix_x4_trans(v, ptx::shared_address(c.u_piece(s.v[warp / 4], step)));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = 2 * step + i / 2;
        const float2 factor =
            *reinterpret_cast<const float2*>(&s.numbers.row_k[n * 8 + c.lane % 4 * 2]);
        const float2 value = ptx::unpack<T>(v[i]);
        float* x = z[n] + i % 2 * 2;
        x[0] = value.x - factor.x * x[0];
        x[1] = value.y - factor.y * x[1];
      }
    }
  }

  __device__ __forceinline__ void decay_state(float factor) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) c.state[n][i] *= factor;
  }

  /// S^T += (col_k E)^T k, in the operands' type twice where that keeps the sum's digits.
  __device__ __forceinline__ void add_to_state(const S& s, const float (&e)[kTokenTiles][4]) {
    uint32_t x[4][4], rest[4][4];
    float scaled[kTokenTiles][4];
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const float2 factor =
          *reinterpret_cast<const float2*>(&s.numbers.col_k[n * 8 + c.lane % 4 * 2]);
#pragma unroll
      for (int i = 0; i < 4; ++i) scaled[n][i] = (i % 2 == 0 ? factor.x : factor.y) * e[n][i];
    }
    c.round_tokens(scaled, x);
    ptx::fence_operands(c.state);
    ptx::wgmma_fence();
    chain::multiply_tokens(c.state, s.k, x);
    if constexpr (C::kTwoParts) {
#pragma unroll
      for (int step = 0; step < 4; ++step) c.rests(scaled, step, x[step], rest[step]);
      ptx::wgmma_fence();
      chain::multiply_tokens(c.state, s.k, rest);
    }
    ptx::wgmma_commit();
  }

  /// Half of (q S)^T.
  template <int kHalf>
  __device__ __forceinline__ void read_by_q(const uint32_t (&rounded)[kSteps][4], const S& s,
                                            float (&o)[kTokenTiles][4]) const {
    const uint64_t tile = chain::tile_at(s.q);
    ptx::fence_operands(o);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) {
      const int step = kHalf * kSteps / 2 + i;
      if (step == 0)
        ptx::wgmma_n64_k_major<T, false>(o, rounded[step], tile);
      else
        ptx::wgmma_n64_k_major<T, true>(o, rounded[step], ptx::next_columns(tile, step * 16));
    }
    ptx::wgmma_commit();
  }

  /// o of a chunk, which are there, in place of its v.
  __device__ __forceinline__ void put_outputs(int chunk, const float (&o)[kTokenTiles][4]) {
    if (a.o.type != Element::kFloat32) chain::put_outputs(c, o, ring.stage(chunk).v[warp / 4]);
    hand_over(chunk);
  }
  __device__ __forceinline__ void hand_over(int chunk) {
    ring.results_are_there(chunk);
    ring.is_read(chunk);
  }

  __device__ __forceinline__ void round_state(uint32_t (&rounded)[kSteps][4]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      chain::round_pairs<T>(c.state[2 * step], c.state[2 * step + 1], rounded[step]);
  }

  /// Products run in the order in which they are begun, and while the warps do something else: each
  /// step of the chain (k S, Z, E, the state) has a product of the outputs behind it. Nothing pends
  /// at the end, as ptxas forgets over the loop what does; outputs are put by the next chunk.
  __device__ __forceinline__ void run_chunk(int chunk, S& s, uint32_t (&rounded)[kSteps][4],
                                            float (&o)[kTokenTiles][4]) {
    uint32_t x[4][4];
    float z[kTokenTiles][4];
    c.forget_lane();
    const float last = s.numbers.last;  // before products that would keep shared memory busy
    ptx::wgmma_wait<0>();  // nothing pends; ptxas forgets that over the loop, and would wait later
    if constexpr (kForward) ptx::fence_operands(o);
    ptx::wgmma_fence();
    chain::multiply_rows<false>(rounded, s.k, z);
    ptx::wgmma_commit();
    decay_state(last);
    if constexpr (kForward) {
      if (a.o.type != Element::kFloat32)
        chain::put_outputs(c, o,
                           (chunk > 0 ? ring.stage(chunk - 1).v : ring.before_first.v)[warp / 4]);
      if (chunk > 0) hand_over(chunk - 1);
      read_by_q<0>(rounded, s, o);
    }
    ptx::wgmma_wait<kForward ? 1 : 0>();
    ptx::fence_operands(z);
    subtract_from_v(s, z);
    c.round_tokens(z, x);
    ptx::fence_operands(z);
    ptx::wgmma_fence();
    chain::multiply_rows<true>(x, s.inverse, z);  // E^T: the diagonal of T' is Z in fp32
    ptx::wgmma_commit();
    if constexpr (kForward) read_by_q<1>(rounded, s, o);
    ptx::wgmma_wait<kForward ? 1 : 0>();
    ptx::fence_operands(z);
    add_to_state(s, z);
    if constexpr (kForward) {
      c.round_tokens(z, x);
      ptx::wgmma_wait<1>();
      ptx::fence_operands(o);
      c.template scale_tokens<1>(s.numbers.row_q, o);
      c.add_diagonal(z, s.numbers.diag, o);
      ptx::fence_operands(o);
      ptx::wgmma_fence();
      chain::multiply_rows<true>(x, s.scores, o);
      ptx::wgmma_commit();
    }
    ptx::wgmma_wait<kForward ? 1 : 0>();
    ptx::fence_operands(c.state);
    round_state(rounded);
    wait_for_operands(chunk + 1);
    ptx::wgmma_wait<0>();
    if constexpr (kForward) {
      ptx::fence_operands(o);
      if (a.o.type == Element::kFloat32) c.store_outputs(chunk, o);
    }
  }

  __device__ void load_start() {
    if (!made) c.load_start();
    if (!forgotten && !made) return;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) c.state[n][i] = 0;
    if (!made) return;
    const int64_t matrix = c.unit * a.shape.HV + c.head;
    c.for_each_state(a.made_states_in + matrix * a.shape.K * a.shape.V, a.shape.V, 1,
                     [](float& x, const float& from) { x = from; });
  }

  __device__ void run_chain() {
    float o[kTokenTiles][4] = {};
    uint32_t rounded[kSteps][4];
    load_start();
    round_state(rounded);
    wait_for_operands(0);
    for (int chunk = 0; chunk < c.num_chunks; ++chunk) {
      run_chunk(chunk, ring.stage(chunk), rounded, o);
      if constexpr (!kForward) ring.is_read(chunk);
      c.store_checkpoint(chunk);
    }
    if constexpr (kForward)
      if (c.num_chunks > 0) put_outputs(c.num_chunks - 1, o);
    c.store_end();
  }
};

template <class T, int kK, int kGroups, ChainUse kUse>
__global__ void __launch_bounds__(Kernel<T, kK, kGroups, kUse>::kThreads,
                                  Kernel<T, kK, kGroups, kUse>::kBlocksPerSm)
    gdn_chain_kernel(const __grid_constant__ HeadGates<ChainArgs> a) {
  using K = Kernel<T, kK, kGroups, kUse>;
  ptx::griddepcontrol_wait();
  chain::write_flags<kUse>(a);
  K kernel(a, *reinterpret_cast<typename K::Shared*>(ptx::dynamic_shared()));
  if (!kernel.has_place() ||
      !kernel.c.template find_place<K::kColumns>(kernel.warp, kernel.place()))
    return;
  if constexpr (kUse == ChainUse::kScan)
    if (a.may_forget) kernel.skip_what_is_forgotten();
  if (threadIdx.x == 0) kernel.init_barriers();
  __syncthreads();
  const auto thread = static_cast<int>(threadIdx.x) - K::kChainThreads;
  // Where more than one warpgroup of a chain is on an SM; never more than the launch gave.
  constexpr bool kShared = kGroups * K::kBlocksPerSm > 1;
  if (thread < 0) {
    if constexpr (kShared) ptx::warpgroup_reg_alloc<K::kForward ? 224 : 192>();
    kernel.run_chain();
    return;
  }
  if constexpr (kShared) ptx::warpgroup_reg_dealloc<K::kForward ? 56 : 64>();
  if (thread < K::kCopiers)
    kernel.run_copies(thread);
  else if constexpr (K::kForward)
    kernel.run_stores(thread - K::kCopiers);
}

template <class T, int kK, int kGroups, ChainUse kUse>
Status launch(const HeadGates<ChainArgs>& args, const Launch& where,
              int64_t most_blocks = INT64_MAX) {
  using K = Kernel<T, kK, kGroups, kUse>;
  static_assert(K::kBlocksPerSm * (sizeof(typename K::Shared) + 1024) <=
                sm90::kSharedMemory + 1024);
  int64_t spans = args.map.segments ? args.map.num_segments : args.map.num_sequences;
  if (!K::kForward && args.made_segments) spans -= args.map.num_sequences;
  return launch_kernel(K::kForward ? "gdn_chain_sm90" : "gdn_scan_sm90",
                       gdn_chain_kernel<T, kK, kGroups, kUse>,
                       std::min(most_blocks, spans * K::blocks_of_span(args.shape)), K::kThreads,
                       sizeof(typename K::Shared), where, args);
}

template <class T, int kK>
Status launch_width(const HeadGates<ChainArgs>& args, const Launch& where) {
  constexpr ChainUse kUse = ChainUse::kForward;
  const int64_t N = args.map.num_sequences, HV = args.shape.HV, V = args.shape.V;
  const int64_t spans = args.map.segments ? args.map.num_segments : N;
  if (args.made_segments && has_both_widths(N, spans, HV, V, args.num_sms))
    KDA_RETURN_IF_ERROR((launch<T, kK, 1, kUse>(args, where, args.num_sms)));
  return is_wide(spans, HV, V, args.num_sms) ? launch<T, kK, 2, kUse>(args, where)
                                             : launch<T, kK, 1, kUse>(args, where);
}

}  // namespace

Status launch_chain(const HeadGates<ChainArgs>& args, const Launch& where) {
  return args.shape.K <= 64 ? launch_width<__nv_bfloat16, 64>(args, where)
                            : launch_width<__nv_bfloat16, 128>(args, where);
}

Status launch_scan(const HeadGates<ChainArgs>& args, const Launch& where) {
  return args.shape.K <= 64 ? launch<__nv_bfloat16, 64, 1, ChainUse::kScan>(args, where)
                            : launch<__nv_bfloat16, 128, 1, ChainUse::kScan>(args, where);
}

}  // namespace kda::cuda::gdn
