// SPDX-License-Identifier: Apache-2.0
// The chains of a backward with wgmma: both directions, with factors in bf16 and in fp16. Roles of
// the warps: chains_sm90.cuh.
#include "cuda/staged/backward/chains_sm90.hpp"

#include "cuda/launch/built.hpp"
#include "cuda/launch/launch.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/staged/backward/chains_sm90.cuh"
#include "cuda/staged/backward/chunk_grad_sm90.hpp"
#include "cuda/staged/backward/fp16_scale_sm90.cuh"

namespace kda::cuda::sm90 {
namespace {

using namespace chains;

struct KernelArgs {
  ChainArgs errors;
  reverse::KernelArgs reverse;
  unsigned reverse_blocks;  // the first ones: their chunks take longer
  RowView v;                // with fp16 factors
  uint32_t* fallback;
  float* scales;  // of what is handed on in fp16 (chunk_grad_sm90.hpp)
};

// ---- what both directions do -------------------------------------------------------------------

/// Index of the word of this block's columns among those of its sequence.
template <class C>
__device__ __forceinline__ int64_t fallback_word(const C& c) {
  return c.tile(0) * kFallbackWords + c.u_tile;
}

/// Stores the factor that takes this warp's columns of an operand back, for chunk_grad.
template <class C>
__device__ __forceinline__ void put_scale(const C& c, float* scales, int chunk, int kind,
                                          float back) {
  if (c.lane == 0)
    scales[(c.tile(chunk) * kOperandKinds + kind) * kScaledColumns + c.u_tile * (kVTile / 16) +
           c.tile_column / 16] = back;
}

/// The state to be handed on. In bf16 it is rounded again, as it is. In fp16 it is the operand,
/// unless that has few bits beside large rows; returns what takes it back, 0 for zeros.
template <class Row, class C>
__device__ __forceinline__ float hand_on(const C& c, const fp16_chain::Scale& scale,
                                         const uint32_t (&operand)[C::kSteps][4],
                                         uint32_t (&to_memory)[C::kSteps][4]) {
  if constexpr (std::is_same_v<Row, T>) {
    round_state(c, to_memory, scale.back);
    return 1;
  } else {
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) to_memory[step][i] = operand[step][i];
    if (__any_sync(~0u, fp16_chain::bits_of(operand) & fp16_chain::kLarge)) return scale.back;
    const int top = fp16_chain::exponent_of(c.state);
    if (top == fp16_chain::kExponentOfZeros) return 0;
    const fp16_chain::OwnScale own(scale, top);
    round_state<Row>(c, to_memory, own.by);
    return own.back;
  }
}

// ---- from left to right: states and errors -----------------------------------------------------

template <class, int kK, class = T>
struct Errors {
  using C = chain::Chain<T, kK, ChainUse::kErrors>;
  static constexpr bool kRows = false;  // nothing is copied by cp.async

  /// Operands of a chunk, and what is left behind it. wgmma wants tiles aligned to 1024 bytes.
  struct alignas(1024) Stage {
    T w[kChunk * kK], kg[kChunk * kK];
    T u[kChunk * kVTile];  // then E
    T state[kVTile * kK];  // before the chunk
    float gamma[kK], beta[kChunk];
  };

  C c;

  __device__ explicit Errors(const KernelArgs& args) : c(args.errors) {}
  __device__ int chunk_at(int turn) const { return turn; }
  __device__ static unsigned block(const KernelArgs& a) { return blockIdx.x - a.reverse_blocks; }
  __device__ bool is_idle() const { return c.num_chunks == 0; }

  template <class Visit>
  __device__ void for_each_factor(int chunk, Stage& s, Visit&& visit) const {
    visit_factor(c, chunk, s.w, c.a.factors.w, visit);
    visit(&s.u, tile_of<kChunk * kVTile>(c, c.a.factors.u, chunk), static_cast<int>(sizeof(s.u)));
    visit_factor(c, chunk, s.beta, c.a.factors.beta, visit);
    visit_factor(c, chunk, s.gamma, c.a.factors.gamma, visit);
    visit_factor(c, chunk, s.kg, c.a.factors.kg, visit);
  }
  __device__ void copy_rows(int, Stage&) const {}

  __device__ __forceinline__ void run_chunk(int, Stage& s) {
    uint32_t rounded[C::kSteps][4], vn[4][4], low[4][4];
    float error[C::kTokenTiles][4];
    float2 gammas[C::kTiles];
    c.load_gammas(s.gamma, gammas);  // before products that would keep shared memory busy
    round_state(c, rounded);
    ptx::wgmma_wait<0>();  // nothing pends; ptxas forgets that over the loop, and would wait later
    ptx::wgmma_fence();
    chain::multiply_rows<false>(rounded, s.w, error);
    ptx::wgmma_commit();
    put_state(c, rounded, s.state);
    c.decay_state(gammas);
    ptx::wgmma_wait<0>();
    ptx::fence_operands(error);
    c.prediction_error(s.u, s.beta, error);
    c.round_tokens(error, vn);
    put_tokens(c, vn, s.u);
    c.template scale_tokens<1>(s.beta, error);
    c.round_tokens(error, vn);
#pragma unroll
    for (int step = 0; step < 4; ++step) c.rests(error, step, vn[step], low[step]);
    ptx::fence_operands(c.state);
    ptx::wgmma_fence();
    chain::multiply_tokens(c.state, s.kg, vn, low);
    ptx::wgmma_commit();
  }
  __device__ void finish() {}

  __device__ void begin_stores(int chunk, const Stage& s) const {
    ptx::cp_async_bulk_store(tile_of<kVTile * kK>(c, c.a.h, chunk), s.state, sizeof(s.state));
    ptx::cp_async_bulk_store(tile_of<kChunk * kVTile>(c, c.a.vn, chunk), s.u, sizeof(s.u));
  }
  __device__ void store_rows(int, const Stage&, int) const {}
};

/// With fp16 factors there is no u: E = T' v - w S. State, v and errors are times a power of two.
template <int kK, class Row>
struct Errors<__half, kK, Row> {
  using C = chain::Chain<__half, kK, ChainUse::kErrors>;
  static constexpr bool kRows = true;

  struct alignas(1024) Stage {
    __half w[kChunk * kK], kg[kChunk * kK], inverse[kChunk * kChunk];
    Row v[kChunk * kVTile];  // then E
    Row state[kVTile * kK];  // before the chunk
    float gamma[kK], beta[kChunk];
  };
  static constexpr bool kHandsOnFp16 = std::is_same_v<Row, __half>;

  C c;
  const RowView& v;
  float* const scales;
  fp16_chain::Scale scale;

  __device__ explicit Errors(const KernelArgs& args)
      : c(args.errors), v(args.v), scales(args.scales) {}
  __device__ int chunk_at(int turn) const { return turn; }
  __device__ static unsigned block(const KernelArgs& a) { return blockIdx.x - a.reverse_blocks; }
  __device__ bool is_idle() const { return c.num_chunks == 0; }

  template <class Visit>
  __device__ void for_each_factor(int chunk, Stage& s, Visit&& visit) const {
    visit_factor(c, chunk, s.w, c.a.factors.w, visit);
    visit_factor(c, chunk, s.inverse, c.a.factors.T, visit);
    visit_factor(c, chunk, s.beta, c.a.factors.beta, visit);
    visit_factor(c, chunk, s.gamma, c.a.factors.gamma, visit);
    visit_factor(c, chunk, s.kg, c.a.factors.kg, visit);
  }
  __device__ void copy_rows(int chunk, Stage& s) const {
    reverse::copy_d_o<kColumns>(c, v, chunk, c.u_tile * kVTile, s.v);
  }

  __device__ __forceinline__ void run_chunk(int chunk, Stage& s) {
    uint32_t rounded[C::kSteps][4], to_memory[C::kSteps][4], minus_v[4][4], tokens[4][4];
    float error[C::kTokenTiles][4];
    float2 gammas[C::kTiles];
    ptx::wgmma_wait<0>();  // nothing pends; ptxas forgets that over the loop, and would wait later
    fp16_chain::round_scaled(c, scale, s.v, rounded,
                             [&] { return fp16_chain::load_rows<-1>(c, scale, s.v, minus_v); });
    c.load_gammas(s.gamma, gammas);
    ptx::wgmma_fence();
    chain::multiply_rows<false>(rounded, s.w, error);
    chain::multiply_rows<true>(minus_v, s.inverse, error);  // -E^T
    ptx::wgmma_commit();
    const float back = hand_on<Row>(c, scale, rounded, to_memory);
    if constexpr (kHandsOnFp16) put_scale(c, scales, chunk, 0, back);
    put_state(c, to_memory, s.state);
    c.decay_state(gammas);
    ptx::wgmma_wait<0>();
    ptx::fence_operands(error);
    fp16_chain::round_tokens<Row>(error, kHandsOnFp16 ? -1 : -scale.back, tokens);
    if constexpr (kHandsOnFp16) {
      const bool any = __any_sync(~0u, fp16_chain::bits_of(tokens) & 0x7fff7fffu);
      put_scale(c, scales, chunk, 1, any ? scale.back : 0);
    }
    put_tokens(c, tokens, s.v);
    c.template scale_tokens<-1>(s.beta, error);
    c.round_tokens(error, tokens);
    ptx::fence_operands(c.state);
    ptx::wgmma_fence();
    chain::multiply_tokens(c.state, s.kg, tokens);
    ptx::wgmma_commit();
  }
  __device__ void finish() {}

  __device__ void begin_stores(int chunk, const Stage& s) const {
    ptx::cp_async_bulk_store(tile_of<kVTile * kK>(c, c.a.h, chunk), s.state, sizeof(s.state));
    ptx::cp_async_bulk_store(tile_of<kChunk * kVTile>(c, c.a.vn, chunk), s.v, sizeof(s.v));
  }
  __device__ void store_rows(int, const Stage&, int) const {}
};

// ---- from right to left: dS and dZ -------------------------------------------------------------

/// F: of the factors. With fp16 state, d_o, X and dZ are times a power of two. kAlone: the gradient
/// before the sequence is all; there is no dZ.
template <class F, int kK, class Row = T, bool kAlone = false>
struct Reverse {
  using C = chain::Chain<F, kK, ChainUse::kReverse>;
  static constexpr bool kRows = true;
  static constexpr bool kFp16 = std::is_same_v<F, __half>;
  static constexpr bool kHandsOnFp16 = std::is_same_v<Row, __half>;

  struct alignas(1024) Stage {
    F kg[kChunk * kK];  // then dS behind the chunk
    F w[kChunk * kK], qg[kChunk * kK], Aqk[kChunk * kChunk], inverse[kChunk * kChunk];
    Row d_o[kChunk * kVTile];  // then dZ
    float gamma[kK], beta[kChunk], diag[kChunk];
  };

  C c;  // its state is dS
  const reverse::KernelArgs& a;
  fp16_chain::Scale scale;

  uint32_t* const fallback;
  float* const scales;

  __device__ explicit Reverse(const KernelArgs& args)
      : c(args.reverse.chain), a(args.reverse), fallback(args.fallback), scales(args.scales) {}
  __device__ int chunk_at(int turn) const { return c.num_chunks - 1 - turn; }
  __device__ static unsigned block(const KernelArgs&) { return blockIdx.x; }
  /// Without tokens the gradient before them, where it is wanted, is the one behind them.
  __device__ bool is_idle() const {
    return c.num_chunks == 0 && state_slot(c.a.final_state, c.tokens.sequence) < 0;
  }

  template <class Visit>
  __device__ void for_each_factor(int chunk, Stage& s, Visit&& visit) const {
    visit_factor(c, chunk, s.Aqk, c.a.factors.Aqk, visit);
    visit_factor(c, chunk, s.diag, c.a.factors.diag, visit);
    visit_factor(c, chunk, s.kg, c.a.factors.kg, visit);
    visit_factor(c, chunk, s.beta, c.a.factors.beta, visit);
    visit_factor(c, chunk, s.gamma, c.a.factors.gamma, visit);
    visit_factor(c, chunk, s.qg, c.a.factors.qg, visit);
    visit_factor(c, chunk, s.w, c.a.factors.w, visit);
    if constexpr (!kAlone) visit_factor(c, chunk, s.inverse, c.a.factors.T, visit);
  }
  __device__ void copy_rows(int chunk, Stage& s) const {
    reverse::copy_d_o<kColumns>(c, a.d_o, chunk, c.u_tile * kVTile, s.d_o);
  }

  __device__ __forceinline__ void run_chunk(int chunk, Stage& s) {
    uint32_t rounded[C::kSteps][4], to_memory[C::kSteps][4], d_o[4][4], minus_X[4][4];
    float x[C::kTokenTiles][4];
    float2 gammas[C::kTiles];
    if constexpr (kFp16) {
      ptx::wgmma_wait<0>();  // as above
      fp16_chain::round_scaled(c, scale, s.d_o, rounded,
                               [&] { return fp16_chain::load_rows<1>(c, scale, s.d_o, d_o, x); });
      c.load_gammas(s.gamma, gammas);
      c.template scale_tokens<1>(s.diag, x);
    } else {
      c.load_gammas(s.gamma, gammas);
      reverse::load_d_o(c, s.d_o, d_o, x);
      c.template scale_tokens<1>(s.diag, x);
      round_state(c, rounded);
      ptx::wgmma_wait<0>();  // as above
    }
    ptx::fence_operands(x);
    ptx::wgmma_fence();
    chain::multiply_tokens(x, s.Aqk, d_o);
    chain::multiply_rows<true>(rounded, s.kg, x);  // dVn^T
    ptx::wgmma_commit();
    if constexpr (kFp16) {
      const float back = hand_on<Row>(c, scale, rounded, to_memory);
      if constexpr (kHandsOnFp16)
        if (c.a.h) put_scale(c, scales, chunk, 2, back);
    }
    c.decay_state(gammas);
    ptx::fence_operands(c.state);
    ptx::wgmma_fence();
    chain::multiply_tokens(c.state, s.qg, d_o);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    ptx::fence_operands(x);
    c.template scale_tokens<-1>(s.beta, x);
    c.round_tokens(x, minus_X);
    if constexpr (kAlone) {
      ptx::fence_operands(c.state);
      ptx::wgmma_fence();
      chain::multiply_tokens(c.state, s.w, minus_X);
      ptx::wgmma_commit();
    } else {
      make_dz(chunk, s, kFp16 ? to_memory : rounded, minus_X, x);
    }
  }
  /// And what X adds to dS. `behind`: the rounded dS behind the chunk.
  __device__ __forceinline__ void make_dz(int chunk, Stage& s,
                                          const uint32_t (&behind)[C::kSteps][4],
                                          const uint32_t (&minus_X)[4][4],
                                          float (&x)[C::kTokenTiles][4]) {
    // T' has ones on its diagonal: they add the rounded -X to what rounding left of it.
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = ptx::unpack<F>(minus_X[step][i]);
        x[2 * step + i / 2][i % 2 * 2] -= pair.x;
        x[2 * step + i / 2][i % 2 * 2 + 1] -= pair.y;
      }
    ptx::fence_operands(x);
    ptx::wgmma_fence();
    chain::multiply_tokens(c.state, s.w, minus_X);
    ptx::wgmma_commit();
    chain::multiply_tokens(x, s.inverse, minus_X);  // -dZ^T
    ptx::wgmma_commit();
    ptx::bar_sync<kChainThreads>(1);  // all warps have read kg
    put_state(c, behind, reinterpret_cast<Row*>(s.kg));
    ptx::wgmma_wait<0>();
    ptx::fence_operands(x);
    uint32_t dz[4][4];
    if constexpr (kHandsOnFp16) round_dz(chunk, x, dz);
#pragma unroll
    for (int n = 0; n < C::kTokenTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][i] = kFp16 ? x[n][i] * -scale.back : -x[n][i];
    if constexpr (!kHandsOnFp16) fp16_chain::round_tokens<Row>(x, 1, dz);
    put_tokens(c, dz, s.d_o);
    if (c.a.o.base && !dv_is_dz()) c.store_outputs(chunk, x);
  }
  /// -x; times a power of two of its own if it is small: betas may be far below 1.
  __device__ __forceinline__ void round_dz(int chunk, const float (&x)[C::kTokenTiles][4],
                                           uint32_t (&dz)[4][4]) const {
    constexpr uint32_t kEnough = 0x70007000;  // of 2^-11 and more
    fp16_chain::round_tokens<Row>(x, -1, dz);
    float back = scale.back;
    if (!__any_sync(~0u, fp16_chain::bits_of(dz) & kEnough)) {
      const int top = fp16_chain::exponent_of(x);
      const bool zeros = top == fp16_chain::kExponentOfZeros;
      const fp16_chain::OwnScale own(scale, zeros ? 0 : top);
      fp16_chain::round_tokens<Row>(x, -own.by, dz);
      back = zeros ? 0 : own.back;
    }
    if (c.a.h) put_scale(c, scales, chunk, 3, back);
  }
  __device__ void finish() {
    if constexpr (kFp16) {
      if (fallback && c.num_chunks > 0) {
        const bool lost = fp16_chain::has_lost(c, scale);
        if (c.lane == 0)
          reinterpret_cast<uint8_t*>(fallback + fallback_word(c))[c.tile_column / 16] = lost;
      }
      scale.take_back(c);
    }
    reverse::store_gradient(c, a.initial);
  }

  /// Whether rows of dv are what dZ is.
  __device__ bool dv_is_dz() const {
    return !kHandsOnFp16 && c.a.o.type == Element::kBFloat16 && c.a.o.whole_words;
  }

  __device__ void begin_stores(int chunk, const Stage& s) const {
    if (!c.a.h) return;  // the gradient before the sequence is all
    ptx::cp_async_bulk_store(tile_of<kVTile * kK>(c, c.a.h, chunk), s.kg, sizeof(s.kg));
    ptx::cp_async_bulk_store(tile_of<kChunk * kVTile>(c, c.a.vn, chunk), s.d_o, sizeof(s.d_o));
  }

  /// Rows of dv, by three warps.
  __device__ void store_rows(int chunk, const Stage& s, int thread) const {
    if (c.a.o.base && dv_is_dz()) store_values(c, chunk, s.d_o, thread);
  }
};

// ---- one block ---------------------------------------------------------------------------------

/// kFallback: only chains that the fp16 kernel could not finish.
template <class Direction, bool kFallback>
__device__ __forceinline__ void run(const KernelArgs& a) {
  Pipeline<Direction> pipeline(a, *reinterpret_cast<Ring<Direction>*>(ptx::dynamic_shared()));
  const int warp = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0);
  auto& c = pipeline.d.c;
  c.template find_place<kColumns>(warp, Direction::block(a));
  if constexpr (kFallback) {
    if (c.num_chunks == 0) return;
    const uint32_t* words = a.fallback + c.tile(0) * kFallbackWords;
    if ((words[0] | words[1]) == 0) return;
  }
  if (!pipeline.d.is_idle()) run_warps(pipeline, warp);
}

template <class F, int kK, bool kFallback, class Row>
__global__ void __launch_bounds__(kThreads, 1)
    backward_chains_kernel(const __grid_constant__ KernelArgs a) {
  ptx::griddepcontrol_wait();
  chain::write_flags<ChainUse::kErrors>(a.errors);
  if (blockIdx.x < a.reverse_blocks)
    run<Reverse<F, kK, Row>, kFallback>(a);
  else
    run<Errors<F, kK, Row>, kFallback>(a);
}

template <class F, int kK, bool kFallback = false, class Row = T>
Status launch(const KernelArgs& args, int64_t blocks, const Launch& where) {
  constexpr int kBytes =
      std::max(sizeof(Ring<Errors<F, kK, Row>>), sizeof(Ring<Reverse<F, kK, Row>>));
  static_assert(kBytes <= kSharedMemory);
  return launch_kernel(kFallback                   ? "backward_chains, fallback"
                       : std::is_same_v<F, __half> ? "backward_chains_fp16"
                                                   : "backward_chains",
                       backward_chains_kernel<F, kK, kFallback, Row>, blocks, kThreads, kBytes,
                       where, args);
}

template <int kK>
__global__ void __launch_bounds__(kThreads, 1)
    d_chains_kernel(const __grid_constant__ KernelArgs a) {
  ptx::griddepcontrol_wait();
  run<Reverse<T, kK, T, /*kAlone=*/true>, false>(a);
}

template <int kK>
Status launch_alone(const KernelArgs& args, int64_t blocks, const Launch& where) {
  return launch_kernel("d_chains", d_chains_kernel<kK>, blocks, kThreads,
                       sizeof(Ring<Reverse<T, kK, T, true>>), where, args);
}

/// Their blocks, and what they are given.
int64_t blocks_of(const ChainArgs* errors, const ReverseArgs* reverse, KernelArgs* args) {
  int64_t blocks = 0;
  if (reverse) {
    args->reverse = reverse::kernel_args(*reverse);
    blocks = chain::blocks_of<ChainUse::kReverse, kColumns>(args->reverse.chain);
    args->reverse_blocks = static_cast<unsigned>(blocks);
  }
  if (errors) {
    args->errors = *errors;
    if (errors->h) blocks += chain::blocks_of<ChainUse::kErrors, kColumns>(*errors);
  }
  return blocks;
}

}  // namespace

Status launch_chains(const ChainArgs* errors, const ReverseArgs* reverse, const Launch& where) {
  KernelArgs args = {};
  const int64_t blocks = blocks_of(errors, reverse, &args);
  const int64_t K = reverse ? reverse->shape.K : errors->shape.K;
  if (!errors && !reverse->dh && !reverse->dv.base)
    return K <= 64 ? launch_alone<64>(args, blocks, where) : launch_alone<128>(args, blocks, where);
  return K <= 64 ? launch<T, 64>(args, blocks, where) : launch<T, 128>(args, blocks, where);
}

Status launch_fp16_chains(const ChainArgs* errors, const ReverseArgs& reverse, const RowView& v,
                          uint32_t* fallback, const Launch& where) {
  KernelArgs args = {};
  const int64_t blocks = blocks_of(errors, &reverse, &args);
  args.v = v;
  args.fallback = fallback;
  return launch<__half, 128>(args, blocks, where);
}

Status launch_fp16_row_chains(const ChainArgs* errors, const ReverseArgs& reverse, const RowView& v,
                              float* scales, const Launch& where) {
  KernelArgs args = {};
  const int64_t blocks = blocks_of(errors, &reverse, &args);
  args.v = v;
  args.scales = scales;
  return launch<__half, 128, false, __half>(args, blocks, where);
}

Status launch_fallback_chains(const ChainArgs* errors, const ReverseArgs& reverse,
                              uint32_t* fallback, const Launch& where) {
  KernelArgs args = {};
  const int64_t blocks = blocks_of(errors, &reverse, &args);
  args.errors.flags = nullptr;  // set by the chains before
  args.fallback = fallback;
  return launch<T, 128, true>(args, blocks, where);
}

}  // namespace kda::cuda::sm90
