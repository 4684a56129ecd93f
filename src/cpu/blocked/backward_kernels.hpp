// SPDX-License-Identifier: Apache-2.0
// The inner kernels of the blocked backward pass, one table per instruction set.
//
// A chunk is 16 tokens of one value head, one vector of tokens. With the names of kernels.hpp, the
// state S0 before the chunk, dS the gradient of the state behind it, q holding scale q, and
// decay(j, i) = prod_{j<t<=i} a_t:
//   E = v - kgam S0 - N v_new              v_new = beta E
//   dv_new = kend dS + A^T d_o - N^T dZ    dZ = beta dv_new (which is dv), last token first
//   P_ij = d_o_i . v_new_j  (j <= i)       R_ij = -dZ_i . v_new_j  (j < i)
//   U = d_o S0^T,  W = -dZ S0^T,  X = v_new dS^T                      [16, K]
//   dq_i = gamma_i U_i + sum_{j<=i} P_ij k_j decay(j, i)
//   dk_i = gamma_i W_i + sum_{j<i} R_ij k_j decay(j, i)
//          + decay(i, 15) X_i + sum_{r>=i} (P_ri q_r + R_ri k_r) decay(i, r)
//   dS <- Gamma dS + qgam^T d_o - kgam^T dZ
// dg_t is the sum of what passes through the decay of token t, channel by channel:
//   Gamma rowsum(S0 dS) + sum_{i>=t} gamma_i (q_i U_i + k_i W_i) + sum_{j<t} decay(j, 15) k_j X_j
//   + sum_{j<t<=i} decay(j, i) k_j (P_ij q_i + R_ij k_i)
// Nothing is subtracted that was added before: no digits are lost where gates are strong.
#pragma once

#include "cpu/blocked/kernels.hpp"

namespace kda::cpu::blocked {

inline constexpr int kBackwardChunk = 16;
inline constexpr int kMaxRows = 256;    ///< largest K
inline constexpr int kRowsPadded = 16;  ///< rows of K in scratch are a multiple of this

/// Operands that prepare() makes of a chunk; rows past the last token are zero, decays 1.
struct alignas(64) BackwardChunk {
  float q[kBackwardChunk][kRowStride];  ///< scale q, after the norm
  float k[kBackwardChunk][kRowStride];
  float a[kBackwardChunk][kRowStride];
  float kgam[kBackwardChunk][kRowStride];
  float qgam[kBackwardChunk][kRowStride];
  float kend[kBackwardChunk][kRowStride];
  float kmid[kBackwardChunk / 2][kRowStride];  ///< keys of the first half, decayed to its end
  float decay[kRowStride];                     ///< as in Group
  float keep[kRowStride];
  float N[kBackwardChunk][kBackwardChunk];
  float A[kBackwardChunk][kBackwardChunk];
  float beta[kBackwardChunk];
  int key_dim;
  int padded;  ///< K rounded up to kRowsPadded
  int num_tokens;
};

/// Sums over V of a chunk, filled block by block; tokens are columns, those of d_o before those of
/// -dZ.
struct alignas(64) BackwardSums {
  float rows[kMaxRows][kBlockV];             ///< U^T | W^T
  float columns[kMaxRows][kBackwardChunk];   ///< X^T
  float pairs[kBackwardChunk][kBlockV];      ///< P^T | R^T: row j, column i
  float boundary[kMaxRows][kBackwardChunk];  ///< rowsum(S0 dS), in lanes
  float d_beta[kBackwardChunk];              ///< by the step size
};

/// Gradients of a chunk by q (scaled), k (normalised) and the log decay.
struct alignas(64) BackwardRows {
  float dq[kBackwardChunk][kRowStride];
  float dk[kBackwardChunk][kRowStride];
  float dg[kBackwardChunk][kRowStride];
};

/// One block of value columns of a chunk; tiles are [16, kBlockV], states [padded, kBlockV].
struct ReverseArgs {
  const float* state;  ///< S0
  float* d_state;      ///< dS, in and out
  const float* errors;
  const float* d_o;
  float* dv;
  int num_lines;  ///< to ask for in this block
};

struct BackwardKernels {
  void (*clear)(const BackwardChunk& chunk, BackwardSums& sums);
  /// `keys_only`: nothing of q is read or made.
  void (*prepare)(const PrepareArgs& args, bool keys_only, BackwardChunk& chunk);
  /// errors = E of the chunk; `state` becomes that behind it. Asks for `num_lines` of the lines.
  void (*advance)(const BackwardChunk& chunk, const float* v, float* state, float* errors,
                  int num_lines, LineQueue& lines);
  /// The state behind the chunk, from that before it and E.
  void (*rebuild)(const BackwardChunk& chunk, const float* errors, const float* state, float* next);
  void (*reverse)(const BackwardChunk& chunk, const ReverseArgs& args, BackwardSums& sums,
                  LineQueue& lines);
  void (*gradients)(const BackwardChunk& chunk, const BackwardSums& sums, BackwardRows& rows);

  /// The rows of a chunk as tiles [blocks, 16, kBlockV], zero where there is no token or column.
  void (*load_tiles)(const RowSource& rows, int count, int columns, float* tiles);
  /// The way back.
  void (*store_tiles)(const float* tiles, int count, int columns, char* rows,
                      int64_t token_stride_bytes, DType dtype);

  /// out += row, [0, count).
  void (*add_row)(const float* row, int count, float* out);
  /// row *= factor.
  void (*scale_row)(float factor, int count, float* row);
  /// row: from the gradient by scale y to that by x, y = x rsqrt(sum x^2 + eps), in place.
  void (*undo_norm)(const RowSource& x, int token, float scale, int key_dim, float* row);
  /// From the gradient by the log decay of token `token` to that by the raw gate, in place. Adds
  /// what it means for dt_bias and for A_log, by channel.
  void (*undo_gate)(const PrepareArgs& args, int token, float* row, float* ddt_bias, float* dA_log);
  /// Derivative of the step size by raw beta.
  float (*step_slope)(const PrepareArgs& args, int token);
};

}  // namespace kda::cpu::blocked
