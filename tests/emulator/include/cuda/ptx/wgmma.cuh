// SPDX-License-Identifier: Apache-2.0
// src/cuda/ptx/wgmma.cuh on the emulator. The warps of a warpgroup multiply rows of their own, so
// each product is one of a warp; it is done when it is issued.
#pragma once

#include "cuda/ptx/ptx.cuh"

namespace kda::cuda::ptx {

template <int kRows = 64>
uint64_t tile_descriptor(uint32_t shared_address) {
  return shared_address;
}
template <int kRows = 64>
uint64_t next_columns(uint64_t tile, int columns) {
  return tile + static_cast<uint64_t>(columns / 64 * kRows * 128 + columns % 64 * 2);
}
inline uint64_t next_rows(uint64_t tile, int rows) {
  return tile + static_cast<uint64_t>(rows * 128);
}
template <int kCount>
void warpgroup_reg_alloc() {}
template <int kCount>
void warpgroup_reg_dealloc() {}
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int kPending>
void wgmma_wait() {}
template <int kTiles>
void fence_operands(float (&)[kTiles][4]) {}

/// Eight neighbours of a tile whose 16-byte pieces are swizzled over 1024 bytes, by their plain
/// address.
template <class T>
void load_piece(uint64_t address, float (&x)[8]) {
  uint16_t bits[8];
  std::memcpy(
      bits, emulator::shared_pointer(static_cast<uint32_t>(address ^ (address >> 7 & 7) << 4)), 16);
  for (int i = 0; i < 8; ++i) x[i] = to_float<T>(bits[i]);
}
/// b [16, kColumns], of which a tile has rows of columns: 128 bytes are 64 of k.
template <class T, int kColumns>
void load_rows(uint64_t tile, float (&b)[16][kColumns]) {
  for (int n = 0; n < kColumns; ++n)
    for (int k = 0; k < 16; k += 8) {
      float x[8];
      load_piece<T>(tile + static_cast<uint64_t>(n * 128 + k * 2), x);
      for (int i = 0; i < 8; ++i) b[k + i][n] = x[i];
    }
}
/// The same where 128 bytes are 64 columns, and the next 64 lie kBytes on.
template <class T, int kColumns, int kBytes>
void load_columns(uint64_t tile, float (&b)[16][kColumns]) {
  for (int k = 0; k < 16; ++k)
    for (int n = 0; n < kColumns; n += 8)
      load_piece<T>(tile + static_cast<uint64_t>(n / 64 * kBytes + k * 128 + n % 64 * 2),
                    reinterpret_cast<float(&)[8]>(b[k][n]));
}

struct WgmmaIn {
  const uint32_t* a;
  uint64_t b;
};

/// d += a b for the 16 rows of a warp; load(tile, b).
template <class T, int kColumns, class Load>
void warp_product(void* const* in, void* const* out, Load load) {
  float a[16][16], b[16][kColumns];
  for (int lane = 0; lane < 32; ++lane) fill_a<T>(a, static_cast<WgmmaIn*>(in[lane])->a, lane);
  load(static_cast<WgmmaIn*>(in[0])->b, b);
  add_product(a, b, out);
}

template <class T, bool kAccumulate>
void wgmma_n64_k_major(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {
  WgmmaIn mine{a, b};
  if (!kAccumulate) std::memset(d, 0, sizeof(d));
  emulator::warp_collective("wgmma", &mine, d, [](void* const* in, void* const* out) {
    warp_product<T, 64>(in, out, load_rows<T, 64>);
  });
}

template <class T, int kTiles>
void wgmma_mn_major(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t b) {
  WgmmaIn mine{a, b};
  emulator::warp_collective("wgmma.trans", &mine, d, [](void* const* in, void* const* out) {
    warp_product<T, kTiles * 8>(in, out, load_columns<T, kTiles * 8, 8192>);
  });
}

}  // namespace kda::cuda::ptx
