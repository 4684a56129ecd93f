// SPDX-License-Identifier: Apache-2.0
// src/cuda/ptx/wgmma.cuh on the emulator. The warps of a warpgroup multiply rows of their own, so
// each product is one of a warp; it is done when it is issued.
#pragma once

#include "cuda/ptx/ptx.cuh"

namespace kda::cuda::ptx {

inline uint64_t tile_descriptor(uint32_t shared_address) { return shared_address; }
inline uint64_t next_columns(uint64_t tile, int columns) {
  return tile + static_cast<uint64_t>(columns / 64 * 8192 + columns % 64 * 2);
}
inline uint64_t next_rows(uint64_t tile, int rows) {
  return tile + static_cast<uint64_t>(rows * 128);
}
template <int kCount>
void take_registers() {}
template <int kCount>
void give_registers() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kPending>
void wgmma_wait() {}
template <int kTiles>
void hold(float (&)[kTiles][4]) {}

/// An element of a tile whose 16-byte pieces are swizzled over 1024 bytes, by its plain address.
template <class T>
float tile_element(uint64_t address) {
  uint16_t bits;
  std::memcpy(&bits,
              emulator::shared_pointer(static_cast<uint32_t>(address ^ (address >> 7 & 7) << 4), 2),
              2);
  return to_float<T>(bits);
}

struct WgmmaIn {
  const uint32_t* a;
  uint64_t b;
};

/// d += a b for the 16 rows of a warp; address(b, k, n) of an element of b.
template <class T, int kColumns, class Address>
void warp_product(void* const* in, void* const* out, Address address) {
  float a[16][16];
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i)
      for (int half = 0; half < 2; ++half)
        a[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8 + half] =
            to_float<T>(static_cast<uint16_t>(static_cast<WgmmaIn*>(in[lane])->a[i] >> 16 * half));
  const uint64_t b = static_cast<WgmmaIn*>(in[0])->b;
  for (int n = 0; n < kColumns; ++n)
    for (int k = 0; k < 16; ++k) {
      const float x = tile_element<T>(address(b, k, n));
      for (int row = 0; row < 16; ++row) {
        const int lane = row % 8 * 4 + n % 8 / 2;
        static_cast<float*>(out[lane])[n / 8 * 4 + row / 8 * 2 + n % 2] += a[row][k] * x;
      }
    }
}

template <class T, bool kAccumulate>
void wgmma_64_rows(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
  WgmmaIn mine{a, b};
  if (!kAccumulate) std::memset(d, 0, sizeof(d));
  emulator::warp_collective("wgmma", &mine, d, [](void* const* in, void* const* out) {
    warp_product<T, 64>(in, out, [](uint64_t tile, int k, int n) {
      return tile + static_cast<uint64_t>(n * 128 + k * 2);
    });
  });
}

template <class T, int kTiles>
void wgmma_columns(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t b) {
  WgmmaIn mine{a, b};
  emulator::warp_collective("wgmma.trans", &mine, d, [](void* const* in, void* const* out) {
    warp_product<T, kTiles * 8>(in, out, [](uint64_t tile, int k, int n) {
      return tile + static_cast<uint64_t>(n / 64 * 8192 + k * 128 + n % 64 * 2);
    });
  });
}

}  // namespace kda::cuda::ptx
