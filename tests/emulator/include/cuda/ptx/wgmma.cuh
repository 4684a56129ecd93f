// SPDX-License-Identifier: Apache-2.0
// src/cuda/ptx/wgmma.cuh on the emulator. The warps of a warpgroup multiply rows of their own, so
// each product is one of a warp; it is done when it is issued.
#pragma once

#include "cuda/ptx/ptx.cuh"

namespace kda::cuda::ptx {

template <int kRows = 64>
uint64_t tile_descriptor(uint32_t shared_address) {
  emulator::shared_pointer(shared_address, 1024);  // aligned as swizzled pieces have to be
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
  to_floats<T>(bits, x), to_floats<T>(bits + 4, x + 4);
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

struct WgmmaSharedIn {
  uint64_t a, b;
};

template <class T, bool kTransposed, bool kAccumulate>
void wgmma_n64_shared(float (&d)[8][4], uint64_t a, uint64_t b) {
  WgmmaSharedIn mine{a, b};
  if (!kAccumulate) std::memset(d, 0, sizeof(d));
  emulator::warp_collective("wgmma.shared", &mine, d, [](void* const* in, void* const* out) {
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
    load_rows<T, 64>(tiles.b, b64);
    add_product(a16, b64, out);
  });
}

}  // namespace kda::cuda::ptx
