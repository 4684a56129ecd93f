// SPDX-License-Identifier: Apache-2.0
// The inner kernels of the blocked backend: one table of functions per instruction set.
//
// A chunk is 8 tokens of one value head; with S0 the state before it and a_t = exp(g_t)
// (docs/algorithm.md, "Chunked form"):
//   gamma_i = prod_{t<=i} a_t, Gamma = gamma_7                 per channel
//   kgam_i = k_i gamma_i, qgam_i = scale q_i gamma_i, kend_i = k_i prod_{t>i} a_t
//   N_ij = k_i . (k_j prod_{j<t<=i} a_t)  (j < i),  A_ij = scale q_i . (same)  (j <= i)
//   v_new_i = beta_i (v_i - kgam_i S0 - sum_{j<i} N_ij v_new_j)
//   o_i = qgam_i S0 + sum_{j<=i} A_ij v_new_j
//   S1 = Gamma S0 + kend^T v_new
// All factors are products of decays, never quotients or differences of sums: exact for any gate.
// Row i reads tokens <= i only: causal to the bit.
//
// prepare() does what is shared by all value columns, sweep() the rest for a block of 32 columns,
// whose state stays in the L1 cache over a group of chunks.
#pragma once

#include <cstdint>

#include "kda/types.hpp"

namespace kda::cpu::layer {
struct Kernels;
}

namespace kda::cpu::blocked {

inline constexpr int kChunk = 8;
inline constexpr int kGroupTokens = 16;  ///< tokens prepared at a time
inline constexpr int kGroupChunks = kGroupTokens / kChunk;
inline constexpr int kBlockV = 32;  ///< value columns of one state block
inline constexpr int kRowTile = 8;  ///< state blocks have a multiple of so many rows
/// Floats between rows: K <= 256 plus a cache line, so that equal columns of 8 rows do not fall
/// into the same sets of the L1 cache.
inline constexpr int kRowStride = 272;

/// One input tensor at (first token, head): token i starts at data + i * token_stride_bytes.
struct RowSource {
  const char* data = nullptr;
  int64_t token_stride_bytes = 0;
  DType dtype = DType::kFloat32;
};

struct PrepareArgs {
  RowSource q, k, g, beta;
  int key_dim = 0;
  int num_tokens = 0;     ///< 1..kGroupTokens
  bool one_gate = false;  ///< g has one element for all channels
  bool one_bias = false;  ///< dt_bias too
  GateMode gate_mode = GateMode::kLog;
  float gate_factor = 1;  ///< a = exp(A_log)
  float lower_bound = -5;
  const float* dt_bias = nullptr;  ///< [K], or with one_bias one element; or null
  BetaMode beta_mode = BetaMode::kPlain;
  bool qk_l2norm = false;
  float scale = 1;
};

/// Operands that prepare() leaves for sweep(), chunk by chunk; rows past the last token are zero.
struct alignas(64) Group {
  float kgam[kGroupTokens][kRowStride];
  float qgam[kGroupTokens][kRowStride];
  float kend[kGroupTokens][kRowStride];
  /// S <- S * decay + (S & keep): (Gamma, 0), or for Gamma > 1/2 (Gamma - 1, all ones), which
  /// keeps the digits of a slow decay that fp32 rounds off near 1.
  float decay[kGroupChunks][kRowStride];
  float keep[kGroupChunks][kRowStride];
  float N[kGroupChunks][kChunk][kChunk];
  float A[kGroupChunks][kChunk][kChunk];
  float beta[kGroupTokens];
  // Scratch of prepare(): one chunk of inputs.
  float q_row[kChunk][kRowStride];
  float k_row[kChunk][kRowStride];
  float a_row[kChunk][kRowStride];
  int key_dim;
  int num_tokens;
};

/// Cache lines to ask for during a sweep, one between a few multiply-adds. Asked for in a burst,
/// they would wait for the processor's miss buffers: 10% of the time (docs/log/2026-11.md).
struct LineQueue {
  const char* const* next = nullptr;
  const char* const* end = nullptr;
};

/// Decode of one value head, m <= 8 tokens prepared as one chunk.
struct DecodeArgs {
  const Group* group = nullptr;
  const char* state_in = nullptr;  ///< [K, V] or [V, K]
  char* state_out = nullptr;       ///< may be state_in
  int64_t row_stride_bytes_in = 0;
  int64_t row_stride_bytes_out = 0;
  DType dtype_in = DType::kFloat32;
  DType dtype_out = DType::kFloat32;
  int value_dim = 0;
  const float* v = nullptr;  ///< [m, value_dim rounded up to kBlockV], zero padded
  float* o = nullptr;        ///< same shape
};

struct BackwardKernels;
struct TailKernels;

struct Kernels {
  const char* name;

  void (*prepare)(const PrepareArgs& args, Group& group);

  /// `state`: [K rounded up to kRowTile, kBlockV]. `v`, `o`: [num_tokens, kBlockV]; v == null
  /// means 0, o == null means that no output is wanted.
  void (*sweep)(const Group& group, float* state, const float* v, float* o, LineQueue& lines);

  /// out[r, :] += sum_p a[r * a_stride + p] * block[p, :], out and block with kBlockV columns.
  void (*matmul_block)(const float* a, int64_t a_stride, int rows, int depth, const float* block,
                       float* out);

  void (*decode_kv)(const DecodeArgs& args);
  void (*decode_vk)(const DecodeArgs& args);

  /// dst[0, count) = fp32(src), dst[count, padded) = 0.
  void (*load_row)(const void* src, DType dtype, int count, int padded, float* dst);
  void (*store_row)(const float* src, DType dtype, int count, void* dst);

  /// Multiply-adds a second are measured with: `iterations` rounds of 12 independent chains.
  /// Returns the number of fp32 multiply-adds done.
  int64_t (*peak_fma)(int64_t iterations);

  const BackwardKernels* backward;
  const TailKernels* tail;
  const layer::Kernels* layer;
};

/// Tables of this build; the ISA-specific ones are null where the compiler does not target x86.
const Kernels* portable_kernels() noexcept;
const Kernels* avx2_kernels() noexcept;
const Kernels* avx512_kernels() noexcept;

/// Says what the running CPU can execute.
bool cpu_has_avx2() noexcept;
bool cpu_has_avx512() noexcept;

}  // namespace kda::cpu::blocked
