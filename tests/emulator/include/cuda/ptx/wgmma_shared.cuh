// SPDX-License-Identifier: Apache-2.0
// src/cuda/ptx/wgmma_shared.cuh on the emulator.
#pragma once

#include "cuda/ptx/wgmma.cuh"

namespace kda::cuda::ptx {

template <class T, bool kTransposed>
void wgmma_n64_shared_mn_major(float (&d)[8][4], uint64_t a, uint64_t b) {
  WgmmaSharedIn mine{a, b};
  emulator::warp_collective("wgmma.shared.mn", &mine, d, [](void* const* in, void* const* out) {
    const auto& tiles = *static_cast<WgmmaSharedIn*>(in[0]);
    const uint64_t row0 = threadIdx.x / 32 % 4 * 16;
    float a16[16][16], b64[16][64];
    for (uint64_t i = 0; i < 16; ++i)
      for (uint64_t j = 0; j < 16; j += 8) {
        float x[8];
        load_piece<T>(tiles.a + (kTransposed ? i * 128 + (row0 + j) * 2 : (row0 + i) * 128 + j * 2),
                      x);
        for (uint64_t n = 0; n < 8; ++n) (kTransposed ? a16[j + n][i] : a16[i][j + n]) = x[n];
      }
    load_columns<T, 64, 8192>(tiles.b, b64);
    add_product(a16, b64, out);
  });
}

}  // namespace kda::cuda::ptx
