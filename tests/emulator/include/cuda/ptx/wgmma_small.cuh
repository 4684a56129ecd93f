// SPDX-License-Identifier: Apache-2.0
// src/cuda/ptx/wgmma_small.cuh on the emulator.
#pragma once

#include "cuda/ptx/wgmma.cuh"

namespace kda::cuda::ptx {

inline void compiler_fence(bool) {}

template <int kTiles>
void rename_registers(float (&)[kTiles][4], unsigned) {}

template <class T, bool kAccumulate>
void wgmma_n32_k_major(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b) {
  WgmmaIn mine{a, b};
  if (!kAccumulate) std::memset(d, 0, sizeof(d));
  emulator::warp_collective("wgmma.32", &mine, d, [](void* const* in, void* const* out) {
    warp_product<T, 32>(in, out, load_rows<T, 32>);
  });
}

template <class T, int kTiles>
void wgmma_16_mn_major(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t b) {
  WgmmaIn mine{a, b};
  emulator::warp_collective("wgmma.16", &mine, d, [](void* const* in, void* const* out) {
    warp_product<T, kTiles * 8>(in, out, load_columns<T, kTiles * 8, 2048>);
  });
}

}  // namespace kda::cuda::ptx
