// SPDX-License-Identifier: Apache-2.0
// Which sequence a token is of.
#pragma once

#include "cuda/recurrent/backward/backward.hpp"
#include "cuda/tile/elements.cuh"

namespace kda::cuda::backward {

/// Sequence of flattened token `t`; -1: none.
__device__ inline int64_t sequence_at(const BackwardArgs& a, int64_t t) {
  if (t >= a.num_tokens) return -1;
  if (!a.map.cu_seqlens) return t / a.map.num_tokens;
  int64_t n = 0, high = a.map.num_sequences;  // the first one that ends behind t
  while (n < high) {
    const int64_t middle = (n + high) / 2;
    if (a.map.cu_seqlens[middle + 1] > t)
      high = middle;
    else
      n = middle + 1;
  }
  return n < a.map.num_sequences && a.map.cu_seqlens[n] <= t ? n : -1;
}

}  // namespace kda::cuda::backward
