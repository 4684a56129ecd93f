// SPDX-License-Identifier: Apache-2.0
// Numbers of 16 bits, and products of matrices, four elements at a time: tensor cores are a good
// part of what a test costs. CUDA's conversions for hosts branch, so that no compiler makes vectors
// of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace emulator {

typedef float Floats __attribute__((vector_size(16)));
/// Four neighbours anywhere in memory.
typedef float Neighbours __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint16_t Halves __attribute__((vector_size(8)));

inline Words all(uint32_t x) { return Words{} + x; }
/// Elements of `x` are numbers without a sign.
inline Words less(Words x, int limit) { return (Words)((Ints)x < limit); }
inline Words select(Words mask, Words x, Words y) { return (mask & x) | (~mask & y); }

/// Four neighbours of type T.
template <class T>
void to_floats(const void* from, float* to) {
  Halves bits;
  std::memcpy(&bits, from, 8);
  const Words wide = __builtin_convertvector(bits, Words);
  Words x = wide << 16;
  if constexpr (std::is_same_v<T, __half>) {
    const Words size = wide & 0x7fff;
    const Words bias = select(less(size, 0x7c00), all(112u << 23), all(224u << 23));
    const Floats subnormal = __builtin_convertvector((Ints)size, Floats) * 0x1p-24f;
    x = select(less(size, 0x400), (Words)subnormal, (size << 13) + bias) | (wide & 0x8000) << 16;
  }
  std::memcpy(to, &x, 16);
}
template <class T>
float to_float(uint16_t bits) {
  const uint16_t from[4] = {bits};
  float x[4];
  to_floats<T>(from, x);
  return x[0];
}

/// The nearest numbers of type T, ties to even, in the low halves.
template <class T>
Words round_to(Floats from) {
  const Words bits = (Words)from, sign = bits & 0x80000000u, size = bits ^ sign;
  Words x = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  if constexpr (std::is_same_v<T, __half>) {
    const Words normal = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    // The last place of numbers from 0.5 on is that of subnormal ones.
    const Words subnormal = (Words)((Floats)size + 0.5f) - 0x3f000000;
    const Words finite = select(less(size, 113 << 23), subnormal, normal);
    x = select(less(size, 143 << 23), finite, all(0x7c00)) | sign >> 16;
  }
  return select(less(size, 0x7f800001), x, all(0x7fff));
}

/// d += a b, 16 rows, element by element in the order of k. d is spread over the lanes: of every
/// 8 columns a lane has two neighbours of rows r and r + 8. All of it is registers, which have no
/// alignment: checks in its inner loop would be most of what checks cost.
template <int kK, int kColumns>
__attribute__((no_sanitize("alignment"))) void add_product(const float (&a)[16][kK],
                                                           const float (&b)[kK][kColumns],
                                                           void* const* d) {
  constexpr int kBlock = kColumns % 16 == 0 ? 16 : 8, kVectors = kBlock / 4;
  static_assert(kColumns % 8 == 0);
  for (int first = 0; first < kColumns; first += kBlock)
    for (int row = 0; row < 8; ++row) {
      float upper[kBlock], lower[kBlock], *lanes[4];  // of rows r and r + 8
      for (int i = 0; i < 4; ++i) lanes[i] = static_cast<float*>(d[row * 4 + i]) + first / 2;
      for (int n = 0; n < kBlock; n += 2) {
        std::memcpy(upper + n, lanes[n % 8 / 2] + n / 8 * 4, 8);
        std::memcpy(lower + n, lanes[n % 8 / 2] + n / 8 * 4 + 2, 8);
      }
      Floats x[kVectors], y[kVectors];
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i)
        x[i] = ((Neighbours*)upper)[i], y[i] = ((Neighbours*)lower)[i];
      for (int k = 0; k < kK; ++k)
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) {
          const Floats of_b = ((const Neighbours*)(b[k] + first))[i];
          x[i] += a[row][k] * of_b, y[i] += a[row + 8][k] * of_b;
        }
#pragma GCC unroll 8
      for (int i = 0; i < kVectors; ++i)
        ((Neighbours*)upper)[i] = x[i], ((Neighbours*)lower)[i] = y[i];
      for (int n = 0; n < kBlock; n += 2) {
        std::memcpy(lanes[n % 8 / 2] + n / 8 * 4, upper + n, 8);
        std::memcpy(lanes[n % 8 / 2] + n / 8 * 4 + 2, lower + n, 8);
      }
    }
}

}  // namespace emulator
