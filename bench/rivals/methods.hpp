// SPDX-License-Identifier: Apache-2.0
// Two other ways to run the recurrence of one head on a CPU, written as well as we could: rivals
// of the blocked backend. fp32, log gates, K = V = 128, rows with a token stride.
#pragma once

#include <cstdint>

namespace kda::rivals {

inline constexpr int kDim = 128;

/// One head: token t of x is at x + t * stride.
struct Head {
  const float *q, *k, *v, *g, *beta;
  float* o;
  int64_t stride, beta_stride, num_tokens;
  float scale;
  int64_t dim;    ///< kDim, as a run-time value
  float* state;   ///< [kDim, kDim], zero at first
  float* last_k;  ///< [kDim] scratch
};

struct Methods {
  const char* isa;
  /// ggml's way: token by token; decay, dot, update, dot as separate sweeps over the whole state,
  /// which is kept transposed so that every sweep runs along rows.
  void (*separate_sweeps)(const Head&);
  /// Token by token, but in blocks of value columns that stay in the L1 cache, with one sweep a
  /// token: the last token's update, this one's decay and both dots together.
  void (*fused_sweep)(const Head&);
};

Methods portable_methods();
Methods avx2_methods();
Methods avx512_methods();

}  // namespace kda::rivals
