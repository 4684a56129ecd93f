// SPDX-License-Identifier: Apache-2.0
#include "cuda/staged/backward/reverse.hpp"

#include "cuda/launch/launch.cuh"
#include "cuda/staged/backward/reverse_chain.cuh"

namespace kda::cuda {
namespace {

using T = __nv_bfloat16;  // of the factors

// X goes into dS rounded. Adding what rounding leaves made errors 2 % smaller: those of the rounded
// factors are larger.

using reverse::KernelArgs;

/// Operands of one chunk. Each buffer is filled again for the chunk before as soon as its last
/// reader is done, so a copy has most of a chunk's time to arrive.
template <int kK>
struct Shared {
  T w[kChunk * kK], qg[kChunk * kK], kg[kChunk * kK];
  T Aqk[kChunk * kChunk], inverse[kChunk * kChunk], d_o[kChunk * kVTile];
  float gamma[kK], beta[kChunk], diag[kChunk];
};

template <int kK, int kWarps>
struct Kernel {
  using C = chain::Chain<T, kK, ChainUse::kReverse>;
  static constexpr int kSteps = C::kSteps, kTokenTiles = C::kTokenTiles;
  static constexpr int kColumns = kWarps * 16;
  static constexpr int kThreads = kWarps * 32 + 32;  // the last warp copies
  /// All threads meet. The barrier has a number: the copying warp comes to it elsewhere.
  static __device__ __forceinline__ void meet() { ptx::bar_sync<kThreads>(1); }

  C c;  // dS and where it belongs
  const KernelArgs& a;
  Shared<kK>& s;
  const int warp;

  __device__ Kernel(const KernelArgs& args, Shared<kK>& shared)
      : c(args.chain), a(args), s(shared), warp(static_cast<int>(threadIdx.x / 32)) {}

  // ---- copies: a group of cp.async each --------------------------------------------------------

  template <class Element, int kCount>
  __device__ void copy(Element (&target)[kCount], const void* source, int chunk) const {
    chain::copy_tile<sizeof(target), 32>(target, source, c.tile(chunk), c.lane);
  }
  __device__ void copy_d_o(int chunk) const {
    reverse::copy_d_o<kColumns>(c, a.d_o, chunk, c.column - warp * 16, s.d_o);
  }
  __device__ void copy_outputs(int chunk) const {
    if (chunk >= 0) {
      copy(s.Aqk, c.a.factors.Aqk, chunk);
      copy(s.diag, c.a.factors.diag, chunk);
      copy_d_o(chunk);
    }
    ptx::cp_async_commit();
  }
  __device__ void copy_k(int chunk) const {
    if (chunk >= 0) {
      copy(s.kg, c.a.factors.kg, chunk);
      copy(s.beta, c.a.factors.beta, chunk);
    }
    ptx::cp_async_commit();
  }
  __device__ void copy_q(int chunk) const {
    if (chunk >= 0) {
      copy(s.qg, c.a.factors.qg, chunk);
      copy(s.gamma, c.a.factors.gamma, chunk);
    }
    ptx::cp_async_commit();
  }
  __device__ void copy_w(int chunk) const {
    if (chunk >= 0) copy(s.w, c.a.factors.w, chunk);
    ptx::cp_async_commit();
  }
  __device__ void copy_inverse(int chunk) const {
    copy(s.inverse, c.a.factors.T, chunk);
    ptx::cp_async_commit();
  }

  /// Each barrier of the block: the oldest of the four groups in flight is here, and what was read
  /// before is free.
  __device__ void run_copies() const {
    const auto next = [] {
      ptx::cp_async_wait<3>();
      meet();
    };
    const int last = c.num_chunks - 1;
    copy_outputs(last);
    copy_k(last);
    copy_q(last);
    copy_w(last);
    for (int chunk = last; chunk >= 0; --chunk) {
      next();
      copy_inverse(chunk);
      next();
      copy_outputs(chunk - 1);
      next();
      copy_k(chunk - 1);
      next();
      copy_q(chunk - 1);
      next();
      copy_w(chunk - 1);
    }
    ptx::cp_async_wait<0>();
  }

  // ---- products --------------------------------------------------------------------------------

  /// acc^T += x^T lower, a lower triangular matrix of tokens; kUnit: without its diagonal of ones.
  template <bool kUnit>
  __device__ __forceinline__ void multiply_lower(const uint32_t (&x)[4][4], const T* lower,
                                                 float (&acc)[kTokenTiles][4]) const {
    // Lanes hold rows 2 (lane % 4) and the next one of column lane / 4, in squares of 8.
    const uint32_t row = c.lane / 4 % 2 ? 0x0000ffffu : 0xffff0000u;
    const uint32_t kept = kUnit && c.lane / 8 == c.lane % 4 ? row : 0xffffffffu;
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int n = 0; n <= 2 * step; n += 2) {
        uint32_t b[4];
        c.load_columns(lower, step, n, b);
        if (kUnit && n == 2 * step) b[0] &= kept, b[3] &= kept;
        ptx::mma_16816<T>(acc[n], x[step], b[0], b[1]);
        ptx::mma_16816<T>(acc[n + 1], x[step], b[2], b[3]);
      }
  }

  /// dVn^T without the state's part: (Aqk^T d_o + diag d_o)^T. Leaves d_o^T as A operands.
  __device__ __forceinline__ void multiply_outputs(uint32_t (&d_o)[4][4],
                                                   float (&x)[kTokenTiles][4]) const {
    reverse::load_d_o(c, s.d_o, d_o, x);
    c.template scale_tokens<1>(s.diag, x);
    multiply_lower<false>(d_o, s.Aqk, x);
  }

  // ---- the chain -------------------------------------------------------------------------------

  __device__ void run_chain() {
    c.load_start();
    for (int chunk = c.num_chunks - 1; chunk >= 0; --chunk) {
      uint32_t rounded[kSteps][4], d_o[4][4];
      float x[kTokenTiles][4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        chain::round_pairs<T>(c.state[2 * step], c.state[2 * step + 1], rounded[step]);
      meet();  // Aqk, diag and d_o are here, T' is free
      multiply_outputs(d_o, x);
      meet();                             // kg and beta are here, Aqk, diag and d_o are free
      c.multiply_rows(rounded, s.kg, x);  // dVn^T
      c.store_state(chunk, rounded);
      c.template scale_tokens<-1>(s.beta, x);  // -X^T
      meet();                                  // qg and gamma are here, kg and beta are free
      float2 gammas[C::kTiles];
      c.load_gammas(s.gamma, gammas);
      c.decay_state(gammas);
      c.add_products(d_o, s.qg);
      meet();  // w is here, qg and gamma are free
      uint32_t minus_X[4][4];
      c.round_tokens(x, minus_X);
      c.add_products(minus_X, s.w);
      meet();  // T' is here, w is free
      multiply_lower<true>(minus_X, s.inverse, x);
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][i] = -x[n][i];  // dZ^T
      uint32_t dz[4][4];
      c.round_tokens(x, dz);
      c.store_errors(chunk, dz);
      if (c.a.o.base) c.store_outputs(chunk, x);
    }
    reverse::store_gradient(c, a.initial);
  }
};

template <int kK, int kWarps>
__global__ void __launch_bounds__(Kernel<kK, kWarps>::kThreads)
    chunk_reverse_kernel(const __grid_constant__ KernelArgs a) {
  using K = Kernel<kK, kWarps>;
  K kernel(a, *reinterpret_cast<Shared<kK>*>(ptx::dynamic_shared()));
  if (!kernel.c.template find_place<K::kColumns>(kernel.warp)) return;
  if (kernel.warp < kWarps)
    kernel.run_chain();
  else
    kernel.run_copies();
}

template <int kK, int kWarps>
Status launch(const KernelArgs& args, const Launch& where) {
  using K = Kernel<kK, kWarps>;
  constexpr int kShared = sizeof(Shared<kK>);
  static_assert(kShared <= kMostShared);
  return launch_kernel("chunk_reverse", chunk_reverse_kernel<kK, kWarps>,
                       chain::blocks_of<ChainUse::kReverse, K::kColumns>(args.chain), K::kThreads,
                       kShared, where, args);
}

template <int kK>
Status launch_width(const KernelArgs& args, bool narrow, const Launch& where) {
  return narrow ? launch<kK, 2>(args, where) : launch<kK, 4>(args, where);
}

}  // namespace

Status launch_chunk_reverse(const ReverseArgs& args, bool narrow, const Launch& where) {
  const KernelArgs given = reverse::kernel_args(args);
  return args.shape.K <= 64 ? launch_width<64>(given, narrow, where)
                            : launch_width<128>(given, narrow, where);
}

}  // namespace kda::cuda
