// SPDX-License-Identifier: Apache-2.0
// chunk_delta_h and chunk_o for every GPU: the kernel, for the files that have instances of it.
#pragma once

#include "cuda/chain/chain.cuh"
#include "cuda/launch/launch.cuh"

namespace kda::cuda {
namespace {

/// Operands of one chunk. Each buffer is filled again for the next chunk as soon as its last reader
/// is done, so a copy has most of a chunk's time to arrive. 16-byte pieces are swizzled by row.
template <class T, int kK>
struct Shared {
  T w[kChunk * kK], qg[kChunk * kK], kg[kChunk * kK];
  T u[kChunk * kVTile], Aqk[kChunk * kChunk];
  float gamma[kK], beta[kChunk], diag[kChunk];
};

/// Forward: what the warps of the chain hand to those of the outputs, registers as they stand.
template <class T, int kK, int kWarps>
struct ForwardShared : Shared<T, kK> {
  uint4 states[kWarps][kK / 16][32];      // S^T before the chunk, rounded
  float4 errors[kWarps][kChunk / 8][32];  // vn^T
};

enum Barrier : int { kBlockBarrier, kChainGroup, kOutputGroup, kGiven, kTaken };

template <class T, int kK, int kWarps, ChainUse kUse>
struct Kernel {
  using C = chain::Chain<T, kK, kUse>;
  static constexpr int kSteps = C::kSteps, kTokenTiles = C::kTokenTiles;

  using S =
      std::conditional_t<kUse == ChainUse::kForward, ForwardShared<T, kK, kWarps>, Shared<T, kK>>;
  static constexpr int kThreads = kWarps * 32;  // of a group: forward has two

  C c;  // the state and where it belongs
  S& s;
  const int tid, warp;

  __device__ Kernel(const ChainArgs& args, S& shared)
      : c(args), s(shared), tid(static_cast<int>(threadIdx.x) % kThreads), warp(tid / 32) {}

  // ---- copies ----------------------------------------------------------------------------------

  template <int kBytes>
  __device__ void copy(void* target, const void* source, int64_t index) const {
    chain::copy_tile<kBytes, kThreads>(target, source, index, tid);
  }
  __device__ void copy_w(int chunk) const {
    if (chunk < c.num_chunks) {
      copy<sizeof(s.w)>(s.w, c.a.factors.w, c.tile(chunk));
      if (!c.transition)
        copy<sizeof(s.u)>(s.u, c.a.factors.u, c.tile(chunk) * c.v_tiles() + c.u_tile);
      copy<sizeof(s.beta)>(s.beta, c.a.factors.beta, c.tile(chunk));
    }
    ptx::cp_async_commit();
  }
  __device__ void copy_q(int chunk) const {
    if (chunk < c.num_chunks) copy<sizeof(s.qg)>(s.qg, c.a.factors.qg, c.tile(chunk));
    ptx::cp_async_commit();
  }
  __device__ void copy_k(int chunk) const {
    if (chunk < c.num_chunks) {
      copy<sizeof(s.kg)>(s.kg, c.a.factors.kg, c.tile(chunk));
      copy<sizeof(s.gamma)>(s.gamma, c.a.factors.gamma, c.tile(chunk));
    }
    ptx::cp_async_commit();
  }
  __device__ void copy_A(int chunk) const {
    if (chunk < c.num_chunks) {
      copy<sizeof(s.Aqk)>(s.Aqk, c.a.factors.Aqk, c.tile(chunk));
      copy<sizeof(s.diag)>(s.diag, c.a.factors.diag, c.tile(chunk));
    }
    ptx::cp_async_commit();
  }

  /// The large tiles of a chunk to L2: what is copied next then comes from there.
  __device__ void prefetch(int chunk) const {
    if (chunk >= c.num_chunks) return;
    const auto lines = [&](const void* base, int64_t bytes, int64_t index) {
      const char* from = static_cast<const char*>(base) + index * bytes;
      for (int64_t at = tid * 128; at < bytes; at += kThreads * 128) ptx::prefetch_l2(from + at);
    };
    lines(c.a.factors.w, sizeof(s.w), c.tile(chunk));
    lines(c.a.factors.kg, sizeof(s.kg), c.tile(chunk));
    lines(c.a.factors.qg, sizeof(s.qg), c.tile(chunk));
    lines(c.a.factors.u, sizeof(s.u), c.tile(chunk) * c.v_tiles() + c.u_tile);
    lines(c.a.factors.Aqk, sizeof(s.Aqk), c.tile(chunk));
  }

  // ---- chunk_o ---------------------------------------------------------------------------------

  /// o^T += vn^T Aqk^T, which is strictly lower.
  __device__ __forceinline__ void multiply_lower(const uint32_t (&vn)[4][4],
                                                 float (&o)[kTokenTiles][4]) const {
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int n = step * 2; n < kTokenTiles; n += 2) {
        uint32_t b[4];
        const int row = n * 8 + c.lane % 8 + c.lane / 16 * 8;
        ptx::ldmatrix_x4(b, ptx::shared_address(s.Aqk + swizzled(row, step * 2 + c.lane / 8 % 2)));
        ptx::mma_16816<T>(o[n], vn[step], b[0], b[1]);
        ptx::mma_16816<T>(o[n + 1], vn[step], b[2], b[3]);
      }
  }

  /// chunk_o: the outputs of one chunk from its stored state and errors.
  __device__ void run_outputs() {
    copy_q(0);
    copy_A(0);
    uint32_t rounded[kSteps][4], vn[4][4];
    c.for_each_stored_state(0, rounded, [](uint32_t& pair, const uint32_t* at) { pair = *at; });
    c.for_each_stored_error(
        0, vn, [](uint32_t& pair, const uint32_t* at) { pair = ptx::movmatrix_trans(*at); });
    float error[kTokenTiles][4];
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 pair = ptx::unpack<T>(vn[n / 2][n % 2 * 2 + half]);
        error[n][2 * half] = pair.x;
        error[n][2 * half + 1] = pair.y;
      }
    float o[kTokenTiles][4] = {};
    ptx::cp_async_wait<0>();
    __syncthreads();
    c.multiply_rows(rounded, s.qg, o);
    c.add_diagonal(error, s.diag, o);
    multiply_lower(vn, o);
    c.store_outputs(0, o);
  }

  /// The chain of chunks: state to state, and what the outputs need of each.
  __device__ void run_chain() {
    copy_w(0);
    copy_k(0);
    c.load_start();
    for (int chunk = 0; chunk < c.num_chunks; ++chunk) {
      uint32_t rounded[kSteps][4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        chain::round_pairs<T>(c.state[2 * step], c.state[2 * step + 1], rounded[step]);
      if constexpr (kUse == ChainUse::kStates || kUse == ChainUse::kErrors)
        c.store_state(chunk, rounded);
      if constexpr (kUse == ChainUse::kForward) {
        if (chunk > 0) ptx::bar_sync<2 * kThreads>(kTaken);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          s.states[warp][step][c.lane] = {rounded[step][0], rounded[step][1], rounded[step][2],
                                          rounded[step][3]};
      }
      float error[kTokenTiles][4] = {};
      if (chunk == 0)
        ptx::cp_async_wait<1>();
      else
        ptx::cp_async_wait<0>();
      ptx::bar_sync<kThreads>(kChainGroup);  // w, u are here; kg of the last chunk is free
      if (chunk > 0) copy_k(chunk);
      c.multiply_rows(rounded, s.w, error);
      c.prediction_error(s.u, s.beta, error);
      if constexpr (kUse == ChainUse::kForward) {
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n)
          s.errors[warp][n][c.lane] = {error[n][0], error[n][1], error[n][2], error[n][3]};
        __threadfence_block();
        ptx::bar_arrive<2 * kThreads>(kGiven);
      }
      uint32_t vn[4][4];
      c.round_tokens(error, vn);
      if constexpr (kUse == ChainUse::kStates) c.store_errors(chunk, vn);
      if constexpr (kUse == ChainUse::kErrors) {
        c.store_errors(chunk, vn);
        c.template scale_tokens<1>(s.beta, error);
        c.round_tokens(error, vn);
      }
      ptx::cp_async_wait<0>();
      ptx::bar_sync<kThreads>(kChainGroup);  // kg is here; w, u are free
      copy_w(chunk + 1);
      float2 gammas[C::kTiles];
      c.load_gammas(s.gamma, gammas);
      c.decay_state(gammas);
      if constexpr (C::kTwoParts)
        c.add_products(vn, s.kg, error);
      else
        c.add_products(vn, s.kg);
      c.store_checkpoint(chunk);
    }
    if (kUse == ChainUse::kForward && c.num_chunks > 0) ptx::bar_sync<2 * kThreads>(kTaken);
    ptx::cp_async_wait<0>();
    c.store_end();
  }

  /// Forward, beside the chain: the outputs of each chunk.
  __device__ void run_chain_outputs() {
    copy_q(0);
    copy_A(0);
    prefetch(1);
    for (int chunk = 0; chunk < c.num_chunks; ++chunk) {
      prefetch(chunk + 2);
      ptx::bar_sync<2 * kThreads>(kGiven);
      uint32_t rounded[kSteps][4], vn[4][4];
      float error[kTokenTiles][4], o[kTokenTiles][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint4 x = s.states[warp][step][c.lane];
        rounded[step][0] = x.x, rounded[step][1] = x.y, rounded[step][2] = x.z,
        rounded[step][3] = x.w;
      }
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        const float4 x = s.errors[warp][n][c.lane];
        error[n][0] = x.x, error[n][1] = x.y, error[n][2] = x.z, error[n][3] = x.w;
      }
      ptx::bar_arrive<2 * kThreads>(kTaken);
      c.round_tokens(error, vn);
      ptx::cp_async_wait<1>();
      ptx::bar_sync<kThreads>(kOutputGroup);  // qg is here
      c.multiply_rows(rounded, s.qg, o);
      ptx::cp_async_wait<0>();
      ptx::bar_sync<kThreads>(kOutputGroup);  // Aqk is here; qg is free
      copy_q(chunk + 1);
      c.add_diagonal(error, s.diag, o);
      multiply_lower(vn, o);
      ptx::bar_sync<kThreads>(kOutputGroup);  // Aqk is free
      copy_A(chunk + 1);
      c.store_outputs(chunk, o);
    }
    ptx::cp_async_wait<0>();
  }
};

/// Threads of a block: forward has a second group of warps, for the outputs.
template <int kWarps, ChainUse kUse>
constexpr int kBlockThreads = kWarps * 32 * (kUse == ChainUse::kForward ? 2 : 1);

template <class T, int kK, int kWarps, ChainUse kUse>
__global__ void __launch_bounds__(kBlockThreads<kWarps, kUse>)
    chunk_delta_h_kernel(const __grid_constant__ ChainArgs a) {
  chain::write_flags<kUse>(a);
  using K = Kernel<T, kK, kWarps, kUse>;
  K kernel(a, *reinterpret_cast<typename K::S*>(ptx::dynamic_shared()));
  if (!kernel.c.template find_place<kWarps * 16>(kernel.warp)) return;
  if constexpr (kUse == ChainUse::kOutputs)
    kernel.run_outputs();
  else if (threadIdx.x < kWarps * 32)
    kernel.run_chain();
  else if constexpr (kUse == ChainUse::kForward)
    kernel.run_chain_outputs();
}

template <class T, int kK, int kWarps, ChainUse kUse>
Status launch(const ChainArgs& args, const Launch& where) {
  constexpr int kShared = sizeof(typename Kernel<T, kK, kWarps, kUse>::S);
  static_assert(kShared <= kMostShared);
  return launch_kernel(kUse == ChainUse::kScan      ? "segment_scan"
                       : kUse == ChainUse::kOutputs ? "chunk_o"
                                                    : "chunk_delta_h",
                       chunk_delta_h_kernel<T, kK, kWarps, kUse>,
                       chain::blocks_of<kUse, kWarps * 16>(args), kBlockThreads<kWarps, kUse>,
                       kShared, where, args);
}

}  // namespace
}  // namespace kda::cuda
