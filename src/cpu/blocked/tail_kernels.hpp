// SPDX-License-Identifier: Apache-2.0
// The inner kernels of calls with a tail: one table of functions per instruction set. With S_0 the
// boundary state, rows i of the tail since then and D(t, i) = prod_{i < j <= t} exp(g_j) along
// parents (docs/design/decode.md, "Tails"):
//   N_i = sum k_t D(t, i) k_i,  A_i = scale sum q_t D(t, i) k_i
//   v_new_t = beta_t (v_t - S_0^T (k_t D(t, 0)) - sum_i N_i v_new_i)
//   o_t = S_0^T (scale q_t D(t, 0)) + sum_i A_i v_new_i + A_t v_new_t
//   fold of n rows: S <- D(n, 0) S_0 + sum_i (k_i D(n, i)) v_new_i^T
// A row of o, and of v_new, is the same sum in the same order however many rows a call has.
#pragma once

#include "cpu/blocked/kernels.hpp"

namespace kda::cpu::blocked {

inline constexpr int kFoldRows = 16;    ///< most rows of a fold
inline constexpr int kReadStreams = 4;  ///< parts of a state that is only read, side by side
inline constexpr int kReadRows = 8;     ///< rows whose products with S_0 are made together

/// Memory that comes next, which kernels ask for while they compute: a step waits for little else.
struct Ahead {
  const char* at = nullptr;   ///< in the first of kReadStreams streams
  const char* end = nullptr;  ///< of that one
  int64_t stream_bytes = 0;
};

inline void ask(Ahead& ahead, int lines) {
  for (int i = 0; i < lines && ahead.at < ahead.end; i += kReadStreams, ahead.at += 64)
    for (int n = 0; n < kReadStreams; ++n)
      __builtin_prefetch(ahead.at + n * ahead.stream_bytes, 0, 2);
}

/// One new token among the rows of its tail. Rows of keys and decays are kRowStride floats apart.
struct TailScores {
  const float* k = nullptr;     ///< [rows] normalised keys
  const float* a = nullptr;     ///< [rows] decays
  const float* q = nullptr;     ///< this token's, normalised and scaled
  int row = 0;                  ///< this token's
  const int* before = nullptr;  ///< the rows that it follows, oldest first
  int num_before = 0;
  int key_dim = 0;
  Ahead* ahead = nullptr;
  float* decay = nullptr;  ///< scratch [kRowStride]
  float* N = nullptr;      ///< out: [num_before]
  float* A = nullptr;
  float* kgam = nullptr;  ///< out: k_t D(t, 0)
  float* qgam = nullptr;  ///< out: scale q_t D(t, 0)
};

/// Products of up to kReadRows rows with a state.
struct TailRead {
  const float (*kgam)[kRowStride] = nullptr;  ///< kReadRows of them, those behind `rows` zero
  const float (*qgam)[kRowStride] = nullptr;
  int rows = 0;
  int key_dim = 0;
  int value_dim = 0;
  const char* state = nullptr;
  int64_t row_stride_bytes = 0;
  DType dtype = DType::kFloat32;
  float* x = nullptr;  ///< out: [rows, value_dim rounded up to kBlockV]
  float* y = nullptr;
};

/// One row of v_new and of o from these.
struct TailSolve {
  const float* N = nullptr;
  const float* A = nullptr;
  float diagonal = 0;
  float beta = 0;
  const int* before = nullptr;
  int num_before = 0;
  int row = 0;
  int columns = 0;  ///< value_dim rounded up to kBlockV
  const float* v = nullptr;
  const float* x = nullptr;
  float* y = nullptr;      ///< becomes o
  float* v_new = nullptr;  ///< [rows, columns]
};

/// A fold of up to kFoldRows rows.
struct TailFold {
  const float* k = nullptr;        ///< [rows, kRowStride] normalised keys
  const char* const* g = nullptr;  ///< raw gates of the rows
  const float* v_new = nullptr;    ///< [kFoldRows, value_dim rounded up], those behind `rows` zero
  int rows = 0;
  int value_dim = 0;
  const char* state_in = nullptr;
  char* state_out = nullptr;  ///< may be state_in
  int64_t row_stride_bytes_in = 0;
  int64_t row_stride_bytes_out = 0;
  DType dtype = DType::kFloat32;
  bool transposed = false;
  Ahead* ahead = nullptr;
  float (*kend)[kRowStride] = nullptr;  ///< scratch: kFoldRows rows
  float* decay = nullptr;               ///< scratch [kRowStride], as Group::decay
  float* keep = nullptr;
};

struct TailKernels {
  /// k of a row as it came in, normalised where the call says so.
  void (*key)(const PrepareArgs& args, const char* row, float* k);
  /// q and k of a token of the call; returns q . k, scaled.
  float (*token)(const PrepareArgs& args, int token, float* q, float* k);
  float (*beta)(const PrepareArgs& args, int token);
  /// exp(g) of a row of raw gates.
  void (*decay)(const PrepareArgs& args, const char* gates, float* a, Ahead* ahead);
  /// g of a row of raw gates.
  void (*log_decay)(const PrepareArgs& args, const char* gates, float* g);
  void (*scores)(const TailScores& args);
  void (*read_kv)(const TailRead& args);
  void (*read_vk)(const TailRead& args);
  void (*solve)(const TailSolve& args);
  /// `prepare`: for the gates.
  void (*fold)(const TailFold& args, const PrepareArgs& prepare);
};

}  // namespace kda::cpu::blocked
