// SPDX-License-Identifier: Apache-2.0
#include "cuda/staged/chunk_intra.hpp"

#include "cuda/launch/launch.cuh"
#include "cuda/ptx/clock.cuh"
#include "cuda/staged/intra/solve.cuh"

namespace kda::cuda {
namespace {

using intra::kBlock;

/// The two stages as sequences of steps; each file of intra/ adds the steps of its name.
template <class T, int kK>
struct Kernel : intra::Solve<T, kK> {
  using Base = intra::Solve<T, kK>;
  using Base::a;
  using Base::Base;
  using Base::fine_levels;
  using Base::forget_indices;
  using Base::head;
  using Base::invert_halves;
  using Base::invert_pairs;
  using Base::kAnchored;
  using Base::keep_pairs;
  using Base::kThreads;
  using Base::kWarps;
  using Base::load_rows;
  using Base::s;
  using Base::scan_totals;
  using Base::store_scalars;
  using Base::store_tokens;
  using Base::tid;
  using Base::tile_of;
  using Base::token_operands;
  using Base::token_products;
  using Base::unit_norms;
  using Base::warp;
  using typename Base::Accumulators;

  template <bool kTokens>
  __device__ void intra() {
    constexpr bool kDiagonal = kAnchored && !kTokens;
    this->template load_inputs<true>();
    keep_pairs();
    this->template norms<true>();
    scan_totals();
    __syncthreads();  // decayed rows take the place of raw ones
    this->template block_operands<kDiagonal>();
    __syncthreads();
    forget_indices();
    Accumulators scores;
    this->template block_products<kDiagonal>(scores);
    __syncthreads();  // operands give way to decays or squares
    if constexpr (kTokens) {
      token_operands();
      __syncthreads();
      token_products(scores);
      __syncthreads();
      store_tokens(scores);
    }
    store_scalars();
    this->template store_blocks<kDiagonal>(scores);
    if constexpr (!kTokens) fine_levels();
    forget_indices();
    this->template decayed_rows<true>();
    __syncthreads();
    forget_indices();
    load_rows(s.q, a.v, head, 0, a.shape.V);
    invert_pairs();
    if (kWarps == 4 || warp() >= 4) this->template copy_square<128, true>(a.factors.Aqk, tid % 128);
    __syncthreads();
    invert_halves();
    ptx::cp_async_wait<0>();
    __syncthreads();
    this->template solve<false>(s.q);
    if (a.factors.T) this->template copy_square<kThreads, false>(a.factors.T, tid);
  }

  /// Blocks of T' on and below the diagonal: all that anything reads.
  __device__ void load_inverse() const {
    const T* stored = tile_of(a.factors.T, kChunk * kChunk);
#pragma unroll
    for (int i = 0; i < kChunk * 8 / kThreads; ++i) {
      const int row = tid / 8 + i * (kThreads / 8), piece = tid % 8;
      ptx::cp_async<16>(ptx::shared_address(&s.after.inverse[row][piece * 8]),
                        stored + swizzled(row, piece), piece * 8 < row / kBlock * kBlock + kBlock);
    }
    ptx::cp_async_commit();
  }

  __device__ void recompute() {
    load_rows(s.after.v, a.v, head, 0, a.shape.V);
    load_inverse();
    if (!a.gate.l2norm) unit_norms();
    this->template load_inputs<false>();
    forget_indices();
    if (a.gate.l2norm) {
      this->template norms<false>();
      __syncthreads();  // Kgam takes the place of k
    }
    this->template decayed_rows<false>();
    __syncthreads();
    this->template solve<true>(s.after.v);
  }
};

enum class Form { kTensor, kToken, kRecompute };

/// Blocks that an SM should hold: two whose threads keep raw inputs in registers do better than
/// three that read them again from shared memory, which is what chunk_intra has least of.
__host__ __device__ constexpr int blocks_of(Form form, int K) {
  if (form == Form::kRecompute) return K == 64 ? 5 : 3;
  return K == 64 ? 4 : 2;
}

/// The first blocks of an SM begin one after the other, so that one computes while the next one
/// loads; later ones are apart by then. Without it all wait for memory together, then compute.
template <unsigned kBlocks>
__device__ void begin_apart() {
  constexpr unsigned kCycles = 15000;  // about what a block takes
  const unsigned first = ptx::nsmid() * kBlocks;
  if (blockIdx.x < first && first < gridDim.x)
    ptx::wait_cycles(blockIdx.x / ptx::nsmid() * (kCycles / kBlocks));
}

template <class T, int kK, Form kForm>
__global__ void __launch_bounds__(2 * kK, blocks_of(kForm, kK))
    chunk_intra_kernel(const __grid_constant__ ChunkIntraArgs a) {
  if constexpr (kForm == Form::kRecompute) begin_apart<blocks_of(kForm, kK)>();
  const ChunkTokens chunk = chunk_tokens(a.map, a.shape.heads.quotient(blockIdx.x));
  if (chunk.count == 0) return;
  Kernel<T, kK> kernel(a, *reinterpret_cast<intra::Shared<T, kK>*>(ptx::dynamic_shared()), chunk,
                       static_cast<int>(a.shape.heads.remainder(blockIdx.x)), threadIdx.x);
  if constexpr (kForm == Form::kRecompute)
    kernel.recompute();
  else
    kernel.template intra<kForm == Form::kToken>();
}

template <Form kForm, class T, int kK>
Status launch(const ChunkIntraArgs& args, const Launch& where) {
  constexpr auto kBytes = static_cast<int>(intra::Shared<T, kK>::bytes(kForm != Form::kRecompute));
  static_assert(kBytes <= kMostShared);
  return launch_kernel(kForm == Form::kRecompute ? "recompute_w_u" : "chunk_intra",
                       chunk_intra_kernel<T, kK, kForm>, args.num_chunks * args.shape.HV,
                       Kernel<T, kK>::kThreads, kBytes, where, args);
}

template <Form kForm>
Status launch_any(const ChunkIntraArgs& args, bool half, const Launch& where) {
  if (args.shape.K <= 64)
    return half ? launch<kForm, __half, 64>(args, where)
                : launch<kForm, __nv_bfloat16, 64>(args, where);
  return half ? launch<kForm, __half, 128>(args, where)
              : launch<kForm, __nv_bfloat16, 128>(args, where);
}

}  // namespace

Status launch_chunk_intra(const ChunkIntraArgs& args, bool half, bool tokens, const Launch& where) {
  return tokens ? launch_any<Form::kToken>(args, half, where)
                : launch_any<Form::kTensor>(args, half, where);
}

Status launch_recompute_w_u(const ChunkIntraArgs& args, bool half, const Launch& where) {
  return launch_any<Form::kRecompute>(args, half, where);
}

}  // namespace kda::cuda
