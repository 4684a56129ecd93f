// SPDX-License-Identifier: Apache-2.0
// The chain of chunks with wgmma. Warpgroups with 64 columns of V and all of K each do all products
// of a chunk. Of one more warpgroup a thread copies the factors of the next chunks into a ring of
// stages, and three warps write outputs.
#include "cuda/staged/chunk_delta_h_sm90.hpp"

#include "cuda/chain/chain.cuh"
#include "cuda/chain/outputs_sm90.cuh"
#include "cuda/chain/products_sm90.cuh"
#include "cuda/chain/ring_sm90.cuh"
#include "cuda/launch/built.hpp"
#include "cuda/launch/launch.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace kda::cuda::sm90 {
namespace {

template <class T, int kK, bool kForward>
struct OutputOperands {
  T qg[kChunk * kK], Aqk[kChunk * kChunk];
};
template <class T, int kK>
struct OutputOperands<T, kK, false> {};

/// Factors of one chunk, then its outputs in place of u. wgmma wants tiles aligned to 1024 bytes.
template <class T, int kK, int kGroups, bool kForward>
struct alignas(1024) Stage : OutputOperands<T, kK, kForward> {
  T w[kChunk * kK], kg[kChunk * kK], u[kGroups][kChunk * kVTile];
  float gamma[kK], beta[kChunk], diag[kChunk];
};

template <class T, int kK, int kGroups, ChainUse kUse>
struct Kernel {
  using C = chain::Chain<T, kK, kUse>;
  static constexpr int kTiles = C::kTiles, kSteps = C::kSteps, kTokenTiles = C::kTokenTiles;

  static constexpr bool kForward = kUse == ChainUse::kForward;
  using R = chain::Ring<Stage<T, kK, kGroups, kForward>, kForward ? 3 : 4>;
  using S = typename R::Stage;
  static constexpr int kWarps = 4 * kGroups;          // of the chain
  static constexpr int kStorers = kForward ? 3 : 0;   // warps, after the one that copies
  static constexpr int kThreads = 32 * kWarps + 128;  // whole warpgroups

  C c;  // the state and where it belongs
  R& ring;
  const int warp;

  __device__ Kernel(const ChainArgs& args, R& shared)
      : c(args),
        ring(shared),
        warp(__shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0)) {}

  // ---- copies ----------------------------------------------------------------------------------

  __device__ void init_barriers() const { ring.init_barriers(1, kWarps * 32, kStorers * 32); }

  /// visit(where it goes, where it lies, bytes) for each factor of a chunk that this block needs.
  template <class Visit>
  __device__ void for_each_factor(int chunk, S& s, Visit&& visit) const {
    const auto whole = [&](auto& target, const void* source) {
      visit(&target, static_cast<const char*>(source) + c.tile(chunk) * sizeof(target),
            static_cast<int>(sizeof(target)));
    };
    whole(s.w, c.a.factors.w);
    if constexpr (kForward) whole(s.qg, c.a.factors.qg);
    if (!c.transition)
      visit(&s.u,
            static_cast<const T*>(c.a.factors.u) +
                (c.tile(chunk) * c.v_tiles() + c.u_tile) * kChunk * kVTile,
            static_cast<int>(sizeof(s.u)));
    whole(s.beta, c.a.factors.beta);
    whole(s.gamma, c.a.factors.gamma);
    whole(s.kg, c.a.factors.kg);
    if constexpr (kForward) {
      whole(s.Aqk, c.a.factors.Aqk);
      whole(s.diag, c.a.factors.diag);
    }
  }

  __device__ void run_copies() const {
    for (int chunk = 0; chunk < c.num_chunks; ++chunk) {
      const int i = chunk % R::kStages, round = chunk / R::kStages;
      ring.wait_until_free(i, round);
      S& s = ring.stages[i];
      ring.copy(i, [&](auto&& visit) { for_each_factor(chunk, s, visit); });
    }
  }

  // ---- outputs ---------------------------------------------------------------------------------

  __device__ void run_stores(int thread) const {
    for (int chunk = 0; chunk < c.num_chunks; ++chunk) {
      const S& s = ring.stage(chunk);
      ring.wait_for_results(chunk);
      if (c.a.o.type != Element::kFloat32) chain::store_tiles<kStorers * 32>(c, chunk, s.u, thread);
      ptx::fence_async_proxy();  // what was put in place of u goes before the next u
      ring.is_read(chunk);
    }
  }

  // ---- one chunk -------------------------------------------------------------------------------

  __device__ void wait_for_factors(int chunk) const {
    if (chunk < c.num_chunks) ring.wait_for_operands(chunk);
  }

  /// Products run while the warps do something else; only the first is waited for at once.
  __device__ __forceinline__ void run_chunk(int chunk, S& s) {
    uint32_t rounded[kSteps][4], vn[4][4], low[4][4];
    float error[kTokenTiles][4], o[kTokenTiles][4];
    float2 gammas[kTiles];
    c.load_gammas(s.gamma, gammas);  // before products that would keep shared memory busy
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      chain::round_pairs<T>(c.state[2 * step], c.state[2 * step + 1], rounded[step]);
    ptx::wgmma_wait<0>();  // nothing pends; ptxas forgets that over the loop, and would wait later
    ptx::wgmma_fence();
    chain::multiply_rows<false>(rounded, s.w, error);
    ptx::wgmma_commit();
    if constexpr (kForward) {
      chain::multiply_rows<false>(rounded, s.qg, o);
      ptx::wgmma_commit();
    }
    c.decay_state(gammas);
    ptx::wgmma_wait<kForward ? 1 : 0>();
    ptx::fence_operands(error);
    c.prediction_error(s.u[warp / 4], s.beta, error);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      chain::round_pairs<T>(error[2 * step], error[2 * step + 1], vn[step]);
      if constexpr (C::kTwoParts) c.rests(error, step, vn[step], low[step]);
    }
    ptx::fence_operands(c.state);
    ptx::wgmma_fence();
    if constexpr (kForward) {  // what lies above the diagonal of Aqk is 0, and adds nothing
      chain::multiply_rows<true>(vn, s.Aqk, o);
      ptx::wgmma_commit();
    }
    // In the order of sums of the mma.sync kernel.
    if constexpr (C::kTwoParts)
      chain::multiply_tokens(c.state, s.kg, vn, low);
    else
      chain::multiply_tokens(c.state, s.kg, vn);
    ptx::wgmma_commit();
    if constexpr (kForward) {
      ptx::wgmma_wait<1>();
      ptx::fence_operands(o);
      c.add_diagonal(error, s.diag, o);
      if (c.a.o.type == Element::kFloat32)
        c.store_outputs(chunk, o);
      else
        chain::put_outputs(c, o, s.u[warp / 4]);
      ring.results_are_there(chunk);
    }
    wait_for_factors(chunk + 1);
    ptx::wgmma_wait<0>();
    ptx::fence_operands(c.state);
  }

  __device__ void run_chain() {
    c.load_start();
    wait_for_factors(0);
    for (int chunk = 0; chunk < c.num_chunks; ++chunk) {
      run_chunk(chunk, ring.stage(chunk));
      ring.is_read(chunk);
      c.store_checkpoint(chunk);
    }
    c.store_end();
  }
};

template <class T, int kK, int kGroups, ChainUse kUse>
__global__ void __launch_bounds__(Kernel<T, kK, kGroups, kUse>::kThreads, 1)
    chunk_delta_h_kernel(const __grid_constant__ ChainArgs a) {
  chain::write_flags<kUse>(a);
  using K = Kernel<T, kK, kGroups, kUse>;
  K kernel(a, *reinterpret_cast<typename K::R*>(ptx::dynamic_shared()));
  if (!kernel.c.template find_place<kGroups * 64>(kernel.warp)) return;
  if (threadIdx.x == 0) kernel.init_barriers();
  __syncthreads();
  if (kernel.warp < K::kWarps) {
    if constexpr (kGroups > 1) ptx::warpgroup_reg_alloc<216>();
    kernel.run_chain();
    return;
  }
  if constexpr (kGroups > 1) ptx::warpgroup_reg_dealloc<72>();
  if (kernel.warp > K::kWarps) {
    if constexpr (K::kForward)
      kernel.run_stores(static_cast<int>(threadIdx.x) - K::kWarps * 32 - 32);
  } else if (kernel.c.lane == 0) {
    kernel.run_copies();
  }
}

template <class T, int kK, int kGroups, ChainUse kUse>
Status launch(const ChainArgs& args, const Launch& where) {
  using K = Kernel<T, kK, kGroups, kUse>;
  static_assert(sizeof(typename K::R) <= kSharedMemory);
  return launch_kernel(kUse == ChainUse::kScan ? "segment_scan_sm90" : "chunk_delta_h_sm90",
                       chunk_delta_h_kernel<T, kK, kGroups, kUse>,
                       chain::blocks_of<kUse, kGroups * 64>(args), K::kThreads,
                       sizeof(typename K::R), where, args);
}

template <class T, int kK, int kGroups>
Status launch_use(const ChainArgs& args, ChainUse use, const Launch& where) {
  return use == ChainUse::kScan ? launch<T, kK, kGroups, ChainUse::kScan>(args, where)
                                : launch<T, kK, kGroups, ChainUse::kForward>(args, where);
}

template <class T, int kK>
Status launch_width(const ChainArgs& args, ChainUse use, bool wide, const Launch& where) {
  return wide ? launch_use<T, kK, 2>(args, use, where) : launch_use<T, kK, 1>(args, use, where);
}

}  // namespace

Status launch_chunk_delta_h(const ChainArgs& args, ChainUse use, bool fp16, int64_t num_sms,
                            const Launch& where) {
  // Two warpgroups on an SM share all factors but u: worth it where one for each is too many.
  const bool pairs = args.shape.V % 128 == 0 && (use == ChainUse::kForward || args.shape.K == 128);
  const int64_t blocks = use == ChainUse::kScan ? chain::blocks_of<ChainUse::kScan, 64>(args)
                                                : chain::blocks_of<ChainUse::kForward, 64>(args);
  const bool wide = pairs && blocks > num_sms;
  if (args.shape.K <= 64)
    return fp16 ? launch_width<__half, 64>(args, use, wide, where)
                : launch_width<__nv_bfloat16, 64>(args, use, wide, where);
  return fp16 ? launch_width<__half, 128>(args, use, wide, where)
              : launch_width<__nv_bfloat16, 128>(args, use, wide, where);
}

}  // namespace kda::cuda::sm90
