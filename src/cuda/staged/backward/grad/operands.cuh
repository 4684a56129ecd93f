// SPDX-License-Identifier: Apache-2.0
// Rows and columns of q and k as operands.
#pragma once

#include "cuda/staged/backward/grad/context.cuh"

namespace kda::cuda::grad {

/// Operands of the tokens of a sub-chunk: rows of scaled q and of k, columns of beta k, normalised,
/// times factor(n, i).
struct RawRows {
  Operand q, k;
  TokenPair of_q, of_k, of_column;
  __device__ RawRows(const GradContext& c, int r)
      : of_q(c, c.s.q_factor, r), of_k(c, c.s.k_factor, r), of_column(c, c.s.beta_k_factor, r) {
    load_transposed(c, c.s.q, r, q);
    load_transposed(c, c.s.k, r, k);
  }
  template <class Factor>
  __device__ __forceinline__ void rows(Operand& q_rows, Operand& k_rows, Factor&& factor) const {
    scale_operand(q, q_rows, [&](int n, int i) { return of_q.at(n, i) * factor(n, i); });
    scale_operand(k, k_rows, [&](int n, int i) { return of_k.at(n, i) * factor(n, i); });
  }
  template <class Factor>
  __device__ __forceinline__ void columns(Operand& x, Factor&& factor) const {
    scale_operand(k, x, [&](int n, int i) { return of_column.at(n, i) * factor(n, i); });
  }
};

}  // namespace kda::cuda::grad
