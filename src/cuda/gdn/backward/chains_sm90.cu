// SPDX-License-Identifier: Apache-2.0
// Chains of the backward of Gated DeltaNet. Roles of the warps: staged/backward/chains_sm90.cuh.
// Raw q and k are the operands; decays, norms and steps are factors of tokens. The scan of segments
// has chains of both directions that store nothing but their last state.
#include "cuda/gdn/backward/chains_sm90.hpp"

#include "cuda/gdn/forgotten.cuh"
#include "cuda/launch/built.hpp"
#include "cuda/launch/launch.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/staged/backward/chains_sm90.cuh"

namespace kda::cuda::gdn {
namespace {

using namespace sm90::chains;
constexpr int kK = kMostK;

struct KernelArgs : HeadGates<BackwardChainsArgs> {
  reverse::KernelArgs right_to_left;
  unsigned reverse_blocks;  // the first ones: their chunks take longer
};

/// A tile of q or k, which value heads share.
template <class C, class Target, class Visit>
__device__ __forceinline__ void visit_rows(const KernelArgs& a, const C& c, int chunk,
                                           Target& target, const void* source, Visit&& visit) {
  const int64_t tile = (c.chunk0 + chunk) * a.shape.H + q_head_of(a, static_cast<int>(c.head));
  visit(&target, static_cast<const char*>(source) + tile * sizeof(target),
        static_cast<int>(sizeof(target)));
}

/// x^T += or = factors of tokens times y^T.
template <class C, int kTokenTiles>
__device__ __forceinline__ void add_scaled(const C& c, const float* factors,
                                           const float (&y)[kTokenTiles][4],
                                           float (&x)[kTokenTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    const float2 factor = *reinterpret_cast<const float2*>(&factors[n * 8 + c.lane % 4 * 2]);
    x[n][0] += factor.x * y[n][0], x[n][1] += factor.y * y[n][1];
    x[n][2] += factor.x * y[n][2], x[n][3] += factor.y * y[n][3];
  }
}

template <class C>
__device__ __forceinline__ void decay_state(C& c, float factor) {
#pragma unroll
  for (int n = 0; n < C::kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) c.state[n][i] *= factor;
}

// ---- what heads forget -------------------------------------------------------------------------

/// Whether segments of its sequence are before and behind that of a chain.
struct Neighbours {
  bool before, behind;
  template <class C>
  __device__ explicit Neighbours(const C& c) {
    const TokenRange whole = sequence_range(c.a.map, c.tokens.sequence);
    before = c.tokens.begin > whole.begin, behind = c.tokens.end < whole.end;
  }
};

/// Chunks that a chain may begin with; 0: it has to take all of its segment.
template <class C>
__device__ int chunks_to_the_end(const C& c, const KernelArgs& a) {
  return a.forgets_before ? chunks_that_last_to_the_end(c, a.made.numbers) : 0;
}
template <class C>
__device__ int chunks_to_the_start(const C& c, const KernelArgs& a) {
  return a.forgets_behind ? chunks_that_last_to_the_start(c, a.made.numbers) : 0;
}

// ---- from left to right: states and errors -----------------------------------------------------

/// kScan: B of a segment from a state of zeros, or M from the identity with v = 0.
template <bool kScan>
struct Errors {
  using C = chain::Chain<T, kK, kScan ? ChainUse::kScan : ChainUse::kErrors>;
  static constexpr bool kRows = true;

  struct alignas(1024) Stage {
    T k[kChunk * kK], inverse[kSquare];
    T v[kChunk * kVTile];  // then E
    T state[kVTile * kK];  // before the chunk
    Numbers numbers;
  };

  C c;
  const KernelArgs& a;
  bool drops_M = false;

  __device__ explicit Errors(const KernelArgs& args) : c(args.errors), a(args) {}

  /// False: there is nothing to do.
  __device__ bool begin() {
    if constexpr (kScan) {
      const Neighbours has(c);
      if (c.transition) return begin_transition(has);
      if (!has.behind || !a.errors.h) return false;
      const int last = chunks_to_the_end(c, a);
      if (a.forgets_before && c.column == 0 && threadIdx.x == 0)
        a.forgets_before[c.unit * a.shape.HV + c.head] = last > 0 || !has_state_before(has);
      if (last > 0) begin_with_the_last(c, last);
    }
    return true;
  }
  __device__ bool has_state_before(const Neighbours& has) const {
    return has.before || state_slot(a.errors.initial, c.tokens.sequence) >= 0;
  }
  /// M is zeros where it is bounded away or nothing is behind it, in both directions.
  __device__ bool begin_transition(const Neighbours& has) {
    if (!has.before && !has.behind) return false;
    const bool states =
        has.behind && a.errors.h && has_state_before(has) && chunks_to_the_end(c, a) == 0;
    const bool gradients =
        has.before && (has.behind || a.reverse.d_final.base) && chunks_to_the_start(c, a) == 0;
    drops_M = !states && !gradients;
    if (drops_M) c.num_chunks = 0;
    return true;
  }
  __device__ int chunk_at(int turn) const { return turn; }
  __device__ static unsigned block(const KernelArgs& a) { return blockIdx.x - a.reverse_blocks; }

  template <class Visit>
  __device__ void for_each_factor(int chunk, Stage& s, Visit&& visit) const {
    visit_rows(a, c, chunk, s.k, a.made.k, visit);
    visit_factor(c, chunk, s.numbers, a.made.numbers, visit);
    visit_factor(c, chunk, s.inverse, a.made.inverse, visit);
  }
  __device__ void copy_rows(int chunk, Stage& s) const {
    RowView v = a.v;
    if (kScan && c.transition) v.base = nullptr;  // zeros
    reverse::copy_d_o<kColumns>(c, v, chunk, c.u_tile * kVTile, s.v);
  }

  __device__ __forceinline__ void run_chunk(int, Stage& s) {
    uint32_t rounded[C::kSteps][4], x[4][4], rest[4][4];
    float z[C::kTokenTiles][4], e[C::kTokenTiles][4] = {};
    const float last = s.numbers.last;
    round_state(c, rounded);
    ptx::wgmma_wait<0>();  // nothing pends; ptxas forgets that over the loop, and would wait later
    ptx::wgmma_fence();
    chain::multiply_rows<false>(rounded, s.k, z);
    ptx::wgmma_commit();
    if constexpr (!kScan) put_state(c, rounded, s.state);
    decay_state(c, last);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      ptx::ldmatrix_x4_trans(x[step], ptx::shared_address(c.u_piece(s.v, step)));
    ptx::wgmma_wait<0>();
    ptx::fence_operands(z);
    c.template scale_tokens<-1>(s.numbers.row_k, z);
    add_rounded(x, z);  // Z^T
    c.round_tokens(z, x);
    ptx::fence_operands(z);
    ptx::wgmma_fence();
    chain::multiply_rows<true>(x, s.inverse, z);  // E^T: the diagonal of T' is Z in fp32
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::fence_operands(z);
    c.round_tokens(z, x);
    if constexpr (!kScan) put_tokens(c, x, s.v);
    add_scaled(c, s.numbers.col_k, z, e);
    c.round_tokens(e, x);
#pragma unroll
    for (int step = 0; step < 4; ++step) c.rests(e, step, x[step], rest[step]);
    ptx::fence_operands(c.state);
    ptx::wgmma_fence();
    chain::multiply_tokens(c.state, s.k, x, rest);
    ptx::wgmma_commit();
  }
  /// z^T += what A operands hold.
  __device__ __forceinline__ static void add_rounded(const uint32_t (&x)[4][4],
                                                     float (&z)[C::kTokenTiles][4]) {
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = ptx::unpack<T>(x[step][i]);
        z[2 * step + i / 2][i % 2 * 2] += pair.x;
        z[2 * step + i / 2][i % 2 * 2 + 1] += pair.y;
      }
  }
  __device__ void finish() {
    if constexpr (kScan) {
      if (drops_M) decay_state(c, 0);
      c.store_end();
    }
  }

  __device__ void begin_stores(int chunk, const Stage& s) const {
    if constexpr (kScan) return;
    ptx::cp_async_bulk_store(tile_of<kVTile * kK>(c, c.a.h, chunk), s.state, sizeof(s.state));
    ptx::cp_async_bulk_store(tile_of<kChunk * kVTile>(c, c.a.vn, chunk), s.v, sizeof(s.v));
  }
  __device__ void store_rows(int, const Stage&, int) const {}
};

// ---- from right to left: dS and dZ -------------------------------------------------------------

/// kScan: D of a segment, which is its state at the end.
template <bool kScan>
struct Reverse {
  using C = chain::Chain<T, kK, ChainUse::kReverse>;
  static constexpr bool kRows = true;

  struct alignas(1024) Stage {
    T k[kChunk * kK], q[kChunk * kK], scores[kSquare], inverse[kSquare];
    T d_o[kChunk * kVTile];  // then dZ
    T state[kVTile * kK];    // dS behind the chunk
    Numbers numbers;
  };

  C c;  // its state is dS
  const KernelArgs& a;

  __device__ explicit Reverse(const KernelArgs& args) : c(args.right_to_left.chain), a(args) {}
  /// False: there is nothing to do.
  __device__ bool begin() {
    if constexpr (kScan) {
      const Neighbours has(c);
      if (!has.before) return false;
      const int first = chunks_to_the_start(c, a);
      if (a.forgets_behind && c.column == 0 && threadIdx.x == 0)
        a.forgets_behind[c.unit * a.shape.HV + c.head] = first > 0 || !has_gradient_behind(has);
      if (first > 0) c.num_chunks = first;
    }
    return true;
  }
  __device__ bool has_gradient_behind(const Neighbours& has) const {
    return has.behind || a.reverse.d_final.base;
  }
  __device__ int chunk_at(int turn) const { return c.num_chunks - 1 - turn; }
  __device__ static unsigned block(const KernelArgs&) { return blockIdx.x; }

  template <class Visit>
  __device__ void for_each_factor(int chunk, Stage& s, Visit&& visit) const {
    visit_rows(a, c, chunk, s.k, a.made.k, visit);
    visit_factor(c, chunk, s.scores, a.made.scores, visit);
    visit_factor(c, chunk, s.numbers, a.made.numbers, visit);
    visit_rows(a, c, chunk, s.q, a.made.q, visit);
    visit_factor(c, chunk, s.inverse, a.made.inverse, visit);
  }
  __device__ void copy_rows(int chunk, Stage& s) const {
    reverse::copy_d_o<kColumns>(c, a.right_to_left.d_o, chunk, c.u_tile * kVTile, s.d_o);
  }

  __device__ __forceinline__ void run_chunk(int chunk, Stage& s) {
    uint32_t rounded[C::kSteps][4], d_o[4][4], tokens[4][4];
    float x[C::kTokenTiles][4], by_state[C::kTokenTiles][4];
    const float last = s.numbers.last;
    reverse::load_d_o(c, s.d_o, d_o, x);
    round_state(c, rounded);
    round_queries(s, x, tokens);
    c.template scale_tokens<1>(s.numbers.diag, x);
    ptx::wgmma_wait<0>();  // as above
    ptx::fence_operands(x);
    ptx::wgmma_fence();
    chain::multiply_rows<false>(rounded, s.k, by_state);
    chain::multiply_tokens(x, s.scores, d_o);
    ptx::wgmma_commit();
    if constexpr (!kScan) put_state(c, rounded, s.state);
    decay_state(c, last);
    ptx::fence_operands(c.state);
    ptx::wgmma_fence();
    chain::multiply_tokens(c.state, s.q, tokens);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    ptx::fence_operands(x);
    ptx::fence_operands(by_state);
    add_scaled(c, s.numbers.col_k, by_state, x);  // X^T
    c.round_tokens(x, d_o);
    ptx::fence_operands(x);
    ptx::wgmma_fence();
    chain::multiply_tokens(x, s.inverse, d_o);  // dZ^T: the diagonal of T' is X in fp32
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::fence_operands(x);
    ptx::fence_operands(c.state);
    if constexpr (!kScan) {
      c.round_tokens(x, d_o);
      put_tokens(c, d_o, s.d_o);
      if (c.a.o.base && !dv_is_dz()) c.store_outputs(chunk, x);
    }
    c.template scale_tokens<-1>(s.numbers.row_k, x);
    c.round_tokens(x, tokens);
    ptx::fence_operands(c.state);
    ptx::wgmma_fence();
    chain::multiply_tokens(c.state, s.k, tokens);
    ptx::wgmma_commit();
  }
  /// (row_q d_o)^T as A operands.
  __device__ __forceinline__ void round_queries(const Stage& s,
                                                const float (&d_o)[C::kTokenTiles][4],
                                                uint32_t (&out)[4][4]) const {
    float scaled[C::kTokenTiles][4] = {};
    add_scaled(c, s.numbers.row_q, d_o, scaled);
    c.round_tokens(scaled, out);
  }
  __device__ void finish() {
    if constexpr (kScan) {
      const int64_t matrix = c.unit * a.shape.HV + c.head;
      c.for_each_state(a.D + matrix * a.shape.K * a.shape.V, a.shape.V, 1,
                       [](float x, float& to) { to = x; });
    } else {
      const TokenRange whole = sequence_range(c.a.map, c.tokens.sequence);
      if (c.tokens.begin > whole.begin) return;
      c.tokens.end = whole.end;  // a first segment ends as its sequence would
      reverse::store_gradient(c, a.right_to_left.initial);
    }
  }

  /// Whether rows of dv are what dZ is.
  __device__ bool dv_is_dz() const { return c.a.o.type == Element::kBFloat16 && c.a.o.whole_words; }

  __device__ void begin_stores(int chunk, const Stage& s) const {
    if (kScan || !c.a.h) return;  // no gradient is wanted that needs them
    ptx::cp_async_bulk_store(tile_of<kVTile * kK>(c, c.a.h, chunk), s.state, sizeof(s.state));
    ptx::cp_async_bulk_store(tile_of<kChunk * kVTile>(c, c.a.vn, chunk), s.d_o, sizeof(s.d_o));
  }
  __device__ void store_rows(int chunk, const Stage& s, int thread) const {
    if (!kScan && c.a.o.base && dv_is_dz()) store_values(c, chunk, s.d_o, thread);
  }
};

// ---- the kernels -------------------------------------------------------------------------------

/// Whether a chain has a place that a kernel has cut, or that it has not.
template <class C>
__device__ bool is_there(const C& c, const int64_t* made_segments) {
  return !made_segments || !c.a.map.segments || c.unit < *made_segments;
}

template <class Direction>
__device__ __forceinline__ void run(const KernelArgs& a) {
  Pipeline<Direction> pipeline(a, *reinterpret_cast<Ring<Direction>*>(ptx::dynamic_shared()));
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  pipeline.d.c.template find_place<kColumns>(warp, Direction::block(a));
  if (is_there(pipeline.d.c, a.made_segments) && pipeline.d.begin()) run_warps(pipeline, warp);
}

template <bool kScan>
__global__ void __launch_bounds__(kThreads, 1)
    gdn_backward_chains_kernel(const __grid_constant__ KernelArgs a) {
  ptx::griddepcontrol_wait();
  if constexpr (!kScan) chain::write_flags<ChainUse::kErrors>(a.errors);
  // A kernel has cut, or it has not; before places are looked up, which takes several loads.
  if (a.made_segments && (*a.made_segments > 0) != (a.errors.map.segments != nullptr)) return;
  if (blockIdx.x < a.reverse_blocks)
    run<Reverse<kScan>>(a);
  else
    run<Errors<kScan>>(a);
}

template <bool kScan>
Status launch(const char* name, const HeadGates<BackwardChainsArgs>& args, bool errors,
              const Launch& where) {
  constexpr int kBytes = std::max(sizeof(Ring<Errors<kScan>>), sizeof(Ring<Reverse<kScan>>));
  static_assert(kBytes <= sm90::kSharedMemory);
  KernelArgs given = {};
  static_cast<HeadGates<BackwardChainsArgs>&>(given) = args;
  given.right_to_left = reverse::kernel_args(args.reverse);
  given.right_to_left.chain.states_in = args.d_states;
  if (kScan) given.right_to_left.chain.initial = {};  // D is from zero
  int64_t blocks = chain::blocks_of<ChainUse::kReverse, kColumns>(given.right_to_left.chain);
  given.reverse_blocks = static_cast<unsigned>(blocks);
  constexpr ChainUse kErrors = kScan ? ChainUse::kScan : ChainUse::kErrors;
  if (errors) blocks += chain::blocks_of<kErrors, kColumns>(args.errors);
  return launch_kernel(name, gdn_backward_chains_kernel<kScan>, blocks, kThreads, kBytes, where,
                       given);
}

}  // namespace

Status launch_backward_chains(const HeadGates<BackwardChainsArgs>& args, const Launch& where) {
  return launch<false>("gdn_backward_chains_sm90", args, args.errors.h != nullptr, where);
}

Status launch_backward_scan(const HeadGates<BackwardChainsArgs>& args, const Launch& where) {
  return launch<true>("gdn_backward_scan_sm90", args, /*errors=*/true, where);
}

}  // namespace kda::cuda::gdn
