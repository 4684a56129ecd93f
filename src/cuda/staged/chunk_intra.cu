// SPDX-License-Identifier: Apache-2.0
#include "cuda/staged/chunk_intra.hpp"

#include "cuda/launch/launch.cuh"
#include "cuda/ptx/clock.cuh"
#include "cuda/staged/intra/run.cuh"

namespace kda::cuda {
namespace {

// ---- the other stage

template <class C>
__device__ void run_recompute(C& c) {
  const ChunkIntraArgs& a = c.a;
  intra::load_rows(c, c.s.after.v, a.v, c.head, 0, a.shape.V);
  intra::load_inverse(c);
  if (!a.gate.l2norm) intra::unit_norms(c);
  intra::load_inputs<false>(c);
  c.forget_index();
  if (a.gate.l2norm) {
    intra::find_norms<false>(c);
    __syncthreads();  // Kgam takes the place of k
  }
  intra::decayed_rows<false>(c);
  __syncthreads();
  intra::solve<true>(c, c.s.after.v);
}

// ---- the kernel

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
    chunk_intra_kernel(const __grid_constant__ HeadGates<ChunkIntraArgs> a) {
  if constexpr (kForm == Form::kRecompute) begin_apart<blocks_of(kForm, kK)>();
  const ChunkTokens chunk = chunk_tokens(a.map, a.shape.heads.quotient(blockIdx.x));
  if (chunk.count == 0) return;
  intra::IntraContext<T, kK> context(
      a, *reinterpret_cast<intra::Shared<T, kK>*>(ptx::dynamic_shared()), chunk,
      static_cast<int>(a.shape.heads.remainder(blockIdx.x)), threadIdx.x);
  if constexpr (kForm == Form::kRecompute)
    run_recompute(context);
  else
    intra::run_intra<kForm == Form::kToken>(context);
}

template <Form kForm, class T, int kK>
Status launch(const HeadGates<ChunkIntraArgs>& args, const Launch& where) {
  constexpr auto kBytes = static_cast<int>(intra::Shared<T, kK>::bytes(kForm != Form::kRecompute));
  static_assert(kBytes <= kMostShared);
  return launch_kernel(kForm == Form::kRecompute ? "recompute_w_u"
                       : kForm == Form::kToken   ? "chunk_intra_tokens"
                                                 : "chunk_intra",
                       chunk_intra_kernel<T, kK, kForm>, args.num_chunks * args.shape.HV,
                       intra::IntraContext<T, kK>::kThreads, kBytes, where, args);
}

template <Form kForm>
Status launch_any(const HeadGates<ChunkIntraArgs>& args, bool fp16, const Launch& where) {
  if (args.shape.K <= 64)
    return fp16 ? launch<kForm, __half, 64>(args, where)
                : launch<kForm, __nv_bfloat16, 64>(args, where);
  return fp16 ? launch<kForm, __half, 128>(args, where)
              : launch<kForm, __nv_bfloat16, 128>(args, where);
}

}  // namespace

Status launch_chunk_intra(const HeadGates<ChunkIntraArgs>& args, bool fp16, bool tokens,
                          const Launch& where) {
  return tokens ? launch_any<Form::kToken>(args, fp16, where)
                : launch_any<Form::kTensor>(args, fp16, where);
}

Status launch_recompute_w_u(const HeadGates<ChunkIntraArgs>& args, bool fp16, const Launch& where) {
  return launch_any<Form::kRecompute>(args, fp16, where);
}

}  // namespace kda::cuda
