// SPDX-License-Identifier: Apache-2.0
// The stages of the chunked forward as calls of their own, for training and for measurement. Only
// plans of a backend that keeps the factors of chunks have them (PlanOptions::backend = "staged");
// others return kUnsupported. Formulas: docs/algorithm.md, "Chunked form", chunks of C = 64 tokens.
//
//   chunk_intra      gates, norms, scores, inverse, w, u: everything that needs no state
//   recompute_w_u    w, u, kg, qg again from the inputs and T
//   chunk_delta_h    the state at the start of every chunk, v_new, final states, checkpoints
//   chunk_o          outputs of all chunks at once, from h, vn and the factors
// chunk_intra, chunk_delta_h, chunk_o in this order compute what run() does.
#pragma once

#include "kda/plan.hpp"
#include "kda/run.hpp"

namespace kda {

/// Device buffers of one tile a (chunk of the batch, value head): tile = chunk * HV + head, `tiles`
/// of them (stage_sizes). 16-bit tiles have the type of q and are stored in 16-byte pieces, piece p
/// of row r at position p ^ (r % 8) of its group of 8. Kp: K rounded up to 64 or 128; Vt: number of
/// 64-column tiles of V.
struct StageTensors {
  void* w = nullptr;    ///< [tiles, 64, Kp]      T' Kgam
  void* u = nullptr;    ///< [tiles, Vt, 64, 64]  T' v
  void* kg = nullptr;   ///< [tiles, 64, Kp]      k exp(G_end - G); may be null in chunk_intra
  void* qg = nullptr;   ///< [tiles, 64, Kp]      scale q exp(G); may be null in chunk_intra
  void* Aqk = nullptr;  ///< [tiles, 64, 64]      below the diagonal
  void* T = nullptr;    ///< [tiles, 64, 64]      (I + N diag(beta))^-1; may be null in chunk_intra
  float* gamma = nullptr;  ///< [tiles, Kp]          exp(G_end)
  float* beta = nullptr;   ///< [tiles, 64]          after its transform
  float* diag = nullptr;   ///< [tiles, 64]          diagonal of Aqk
  void* h = nullptr;       ///< [tiles, Vt, 64, Kp]  S^T at the start of the chunk
  void* vn = nullptr;      ///< [tiles, Vt, 64, 64]  v_new
};

/// Bytes of each buffer of StageTensors, by the same names.
struct StageSizes {
  std::size_t tiles = 0;
  std::size_t w = 0, u = 0, kg = 0, qg = 0, Aqk = 0, T = 0, gamma = 0, beta = 0, diag = 0;
  std::size_t h = 0, vn = 0;
};

/// kUnsupported unless the plan's backend has these stages.
Status stage_sizes(const Plan& plan, StageSizes* sizes) noexcept;

/// Each checks its pointers, launches on `stream`, and returns; workspace and stream as in run().
Status chunk_intra(const Plan& plan, const Tensors& tensors, const StageTensors& stages,
                   void* workspace, std::size_t workspace_bytes, void* stream) noexcept;
Status recompute_w_u(const Plan& plan, const Tensors& tensors, const StageTensors& stages,
                     void* workspace, std::size_t workspace_bytes, void* stream) noexcept;
Status chunk_delta_h(const Plan& plan, const Tensors& tensors, const StageTensors& stages,
                     void* workspace, std::size_t workspace_bytes, void* stream) noexcept;
Status chunk_o(const Plan& plan, const Tensors& tensors, const StageTensors& stages,
               void* workspace, std::size_t workspace_bytes, void* stream) noexcept;

}  // namespace kda
