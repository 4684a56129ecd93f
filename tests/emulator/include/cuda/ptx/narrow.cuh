// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/ptx/ptx.cuh"

namespace kda::cuda::ptx {

/// As m16n8k16 whose second half is 0.
inline void mma_1688(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  const uint32_t a[4] = {a0, a1, 0, 0};
  mma_16816<__nv_bfloat16>(d, a, b, 0);
}

inline float inverse_root(float x) { return 1 / std::sqrt(x); }

}  // namespace kda::cuda::ptx
