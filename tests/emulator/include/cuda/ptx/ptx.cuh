// SPDX-License-Identifier: Apache-2.0
// src/cuda/ptx/ptx.cuh on the emulator: the same functions, by what the PTX manual says of them.
#pragma once

#include "emulator.hpp"
#include "product.hpp"

namespace kda::cuda::ptx {

using emulator::add_product;
using emulator::to_float;
using emulator::to_floats;

inline uint32_t shared_address(const void* pointer) { return emulator::shared_offset(pointer); }
inline unsigned char* dynamic_shared() { return emulator::dynamic_shared(); }

inline float ex2(float x) { return std::exp2(x); }
inline float lg2(float x) { return std::log2(x); }
inline float rcp(float x) { return 1.0f / x; }

template <int kThreads>
void bar_sync(int id) {
  emulator::barrier(id, kThreads, true);
}
template <int kThreads>
void bar_arrive(int id) {
  emulator::barrier(id, kThreads, false);
}
inline void prefetch_l2(const void*) {}
inline int64_t opaque(int64_t x) { return x; }
inline void make_opaque(unsigned&) {}
inline void make_opaque(int&) {}

/// A copy of zeros is one of minus its size.
template <int kBytes>
void cp_async(uint32_t target, const void* source, bool valid = true) {
  emulator::copy_async(emulator::shared_pointer(target, kBytes), source, valid ? kBytes : -kBytes);
}
inline void cp_async_commit() { emulator::commit_copies(); }
template <int kPending>
void cp_async_wait() {
  emulator::wait_copies(kPending);
}

struct LdmatrixIn {
  uint32_t address;
};
template <bool kTranspose>
void ldmatrix(void* const* in, void* const* out) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t x[8][8];
    for (int row = 0; row < 8; ++row)
      std::memcpy(x[row],
                  emulator::shared_pointer(static_cast<LdmatrixIn*>(in[matrix * 8 + row])->address),
                  16);
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4 * 2;
      const uint32_t low = kTranspose ? x[t][g] : x[g][t];
      const uint32_t high = kTranspose ? x[t + 1][g] : x[g][t + 1];
      static_cast<uint32_t*>(out[lane])[matrix] = low | high << 16;
    }
  }
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  LdmatrixIn in{address};
  emulator::warp_collective("ldmatrix", &in, r, ldmatrix<false>);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  LdmatrixIn in{address};
  emulator::warp_collective("ldmatrix.trans", &in, r, ldmatrix<true>);
}
struct StmatrixIn {
  uint32_t address;
  const uint32_t* pairs;
};
template <bool kTranspose>
void stmatrix(void* const* in, void* const*) {
  for (int row = 0; row < 32; ++row) {
    auto* to = static_cast<uint16_t*>(
        emulator::shared_pointer(static_cast<StmatrixIn*>(in[row])->address));
    for (int i = 0; i < 8; ++i) {
      const int lane = kTranspose ? i * 4 + row % 8 / 2 : row % 8 * 4 + i / 2;
      const int half = kTranspose ? row % 2 : i % 2;
      to[i] =
          static_cast<uint16_t>(static_cast<StmatrixIn*>(in[lane])->pairs[row / 8] >> 16 * half);
    }
  }
}
inline void stmatrix_x4_trans(uint32_t address, const uint32_t (&r)[4]) {
  StmatrixIn mine{address, r};
  emulator::warp_collective("stmatrix.trans", &mine, nullptr, stmatrix<true>);
}
inline void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
  StmatrixIn mine{address, r};
  emulator::warp_collective("stmatrix", &mine, nullptr, stmatrix<false>);
}
inline uint32_t movmatrix_trans(uint32_t x) {
  uint32_t result;
  emulator::warp_collective("movmatrix", &x, &result, [](void* const* in, void* const* out) {
    uint16_t m[8][8];
    for (int lane = 0; lane < 32; ++lane) {
      const uint32_t pair = *static_cast<uint32_t*>(in[lane]);
      m[lane / 4][lane % 4 * 2] = static_cast<uint16_t>(pair);
      m[lane / 4][lane % 4 * 2 + 1] = static_cast<uint16_t>(pair >> 16);
    }
    for (int lane = 0; lane < 32; ++lane)
      *static_cast<uint32_t*>(out[lane]) =
          m[lane % 4 * 2][lane / 4] | static_cast<uint32_t>(m[lane % 4 * 2 + 1][lane / 4]) << 16;
  });
  return result;
}

/// A lane's part of a, 16 x 16, whose registers have pairs of 16 bits.
template <class T>
void fill_a(float (&a)[16][16], const uint32_t* pairs, int lane) {
  float x[8];
  to_floats<T>(pairs, x), to_floats<T>(pairs + 2, x + 4);
  for (int i = 0; i < 4; ++i)
    std::memcpy(&a[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8], x + 2 * i, 8);
}

struct MmaIn {
  const uint32_t* a;
  uint32_t b[2];
};

template <class T>
void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MmaIn mine{a, {b0, b1}};
  emulator::warp_collective("mma", &mine, d, [](void* const* in, void* const* out) {
    float a16[16][16], b16[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const MmaIn& mma = *static_cast<MmaIn*>(in[lane]);
      fill_a<T>(a16, mma.a, lane);
      float x[4];
      to_floats<T>(mma.b, x);
      for (int i = 0; i < 4; ++i) b16[lane % 4 * 2 + i / 2 * 8 + i % 2][lane / 4] = x[i];
    }
    add_product(a16, b16, out);
  });
}

inline void mma_1688_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  MmaIn mine{a, {b0, b1}};
  emulator::warp_collective("mma.tf32", &mine, d, [](void* const* in, void* const* out) {
    float a8[16][8], b8[8][8];
    const auto tf32 = [](uint32_t bits) { return __uint_as_float(bits & ~0x1fffu); };
    for (int lane = 0; lane < 32; ++lane) {
      const MmaIn& x = *static_cast<MmaIn*>(in[lane]);
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) a8[g + i % 2 * 8][t + i / 2 * 4] = tf32(x.a[i]);
      for (int i = 0; i < 2; ++i) b8[t + i * 4][g] = tf32(x.b[i]);
    }
    add_product(a8, b8, out);
  });
}
inline uint32_t to_tf32(float x) { return __float_as_uint(x) + 0x1000u; }

template <class T>
uint32_t pack(float low, float high) {
  const emulator::Words x = emulator::round_to<T>(emulator::Floats{low, high});
  return x[0] | x[1] << 16;
}
template <class T>
float2 unpack(uint32_t pair) {
  const uint32_t from[2] = {pair};
  float x[4];
  to_floats<T>(from, x);
  return {x[0], x[1]};
}
template <class T>
uint32_t mul_x2(uint32_t x, uint32_t y) {
  const float2 a = unpack<T>(x), b = unpack<T>(y);
  return pack<T>(a.x * b.x, a.y * b.y);
}

}  // namespace kda::cuda::ptx
