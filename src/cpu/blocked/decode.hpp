// SPDX-License-Identifier: Apache-2.0
// Decode: one chunk of 1..8 tokens against a state in the caller's memory, read once from it and
// written once (equations: kernels.hpp). The second look at a tile comes from the cache.
#pragma once

#include "cpu/blocked/kernels.hpp"
#include "cpu/blocked/prepare.hpp"
#include "cpu/blocked/rows.hpp"
#include "cpu/blocked/tail_kernels.hpp"

namespace kda::cpu::blocked::KDA_ISA {

constexpr int kDecodeVecs = kWidth == 16 ? 8 : 4;  // column vectors (kv) of one token together
constexpr int kPrefetchRows = 12;                  // state rows asked for ahead

/// Asks for a row that the first column group will not read all of by itself.
template <bool kWritten>
static inline void prefetch_row(const char* row, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, kWritten ? 1 : 0, 2);
}

static inline F load_vector_part(const char* src, DType dtype, int count) {
  if (count >= kWidth) return load_vector(src, dtype);
  alignas(64) float lane[kWidth];
  load_row(src, dtype, count, kWidth, lane);
  return load(lane);
}
static inline void store_vector_part(char* dst, DType dtype, int count, F x) {
  if (count >= kWidth) return store_vector(dst, dtype, x);
  alignas(64) float lane[kWidth];
  store(lane, x);
  store_row(lane, dtype, count, dst);
}

/// v_new and o of one lane group from the state reads x = kgam S0, y = qgam S0.
template <int kRows>
static inline void decode_substitute(const Group& group, const F (&v)[kRows], const F (&x)[kRows],
                                     F (&y)[kRows], F (&v_new)[kRows]) {
  for (int i = 0; i < kRows; ++i) {
    F e = v[i] - x[i];
    for (int j = 0; j < i; ++j) e = fnma(set1(group.N[0][i][j]), v_new[j], e);
    v_new[i] = e * set1(group.beta[i]);
    for (int j = 0; j <= i; ++j) y[i] = fma(set1(group.A[0][i][j]), v_new[j], y[i]);
  }
}

/// body.operator()<kVecs>(first, valid) for column vectors of `value_dim` columns: as many at a
/// time as rows leave room for in registers.
template <int kRows, class Body>
static inline __attribute__((always_inline)) void for_each_columns(int value_dim, Body&& body) {
  constexpr int kVecs = kDecodeVecs > kRows ? kDecodeVecs / kRows : 1;
  int first = 0;
  for (; first + kVecs * kWidth <= value_dim; first += kVecs * kWidth)
    body.template operator()<kVecs>(first, kVecs * kWidth);
  for (; first < value_dim; first += kWidth) body.template operator()<1>(first, value_dim - first);
}

/// A state [K, V] in memory.
struct StateRows {
  const char* data;
  int64_t stride_bytes;
  DType dtype;
  int value_dim;
  int key_dim;
};

/// The row of a state that comes at place i where `kStreams` parts of it are read side by side: a
/// stream ends with its page for a processor that reads ahead, and several end at different times.
template <int kStreams>
static inline int stream_row(int i, int rows) {
  return i % kStreams * (rows / kStreams) + i / kStreams;
}

/// x = kgam S, y = qgam S in columns first..first + kVecs kWidth, `valid` of them real. kWritten:
/// the state is written afterwards.
template <int kRows, int kVecs, bool kWritten>
static inline void read_columns(const StateRows& state, const float (*kgam)[kRowStride],
                                const float (*qgam)[kRowStride], int first, int valid,
                                F (&x)[kVecs][kRows], F (&y)[kVecs][kRows]) {
  const int64_t at = static_cast<int64_t>(first) * element_bytes(state.dtype);
  const int step = kWidth * element_bytes(state.dtype);
  for (int n = 0; n < kVecs; ++n)
    for (int i = 0; i < kRows; ++i) x[n][i] = y[n][i] = set1(0);
  const auto read_row = [&](int d, const char* ahead) {
    const char* row = state.data + d * state.stride_bytes + at;
    if (ahead) prefetch_row<kWritten>(ahead, state.value_dim * element_bytes(state.dtype));
    for (int n = 0; n < kVecs; ++n) {
      const F s = load_vector_part(row + n * step, state.dtype, valid - n * kWidth);
      for (int i = 0; i < kRows; ++i) {
        x[n][i] = fma(set1(kgam[i][d]), s, x[n][i]);
        y[n][i] = fma(set1(qgam[i][d]), s, y[n][i]);
      }
    }
  };
  const auto read = [&]<int kStreams>() {
    for (int i = 0; i < state.key_dim; ++i) {
      const bool asks = first == 0 && i + kPrefetchRows < state.key_dim;
      const int later = stream_row<kStreams>(i + kPrefetchRows, state.key_dim);
      read_row(stream_row<kStreams>(i, state.key_dim),
               asks ? state.data + later * state.stride_bytes : nullptr);
    }
  };
  if (!kWritten && state.key_dim % kReadStreams == 0)
    read.template operator()<kReadStreams>();
  else
    read.template operator()<1>();
}

/// State [K, V]: the same columns, with their update.
template <int kRows, int kVecs>
static inline void decode_columns(const DecodeArgs& args, int first, int valid) {
  const Group& group = *args.group;
  const int stride_v = round_up(args.value_dim, kBlockV);
  const int64_t at = static_cast<int64_t>(first) * element_bytes(args.dtype_in);
  const int step = kWidth * element_bytes(args.dtype_in);
  F x[kVecs][kRows];
  F y[kVecs][kRows];
  read_columns<kRows, kVecs, true>(
      {args.state_in, args.row_stride_bytes_in, args.dtype_in, args.value_dim, group.key_dim},
      group.kgam, group.qgam, first, valid, x, y);
  F v_new[kVecs][kRows];
  for (int n = 0; n < kVecs; ++n) {
    F v[kRows];
    for (int i = 0; i < kRows; ++i) v[i] = load(args.v + i * stride_v + first + n * kWidth);
    decode_substitute<kRows>(group, v, x[n], y[n], v_new[n]);
    for (int i = 0; i < kRows; ++i) store(args.o + i * stride_v + first + n * kWidth, y[n][i]);
  }
  if (!args.state_out) return;
  const int64_t out_at = static_cast<int64_t>(first) * element_bytes(args.dtype_out);
  const int out_step = kWidth * element_bytes(args.dtype_out);
  for (int d = 0; d < group.key_dim; ++d) {
    const char* row = args.state_in + d * args.row_stride_bytes_in + at;
    char* out = args.state_out + d * args.row_stride_bytes_out + out_at;
    for (int n = 0; n < kVecs; ++n) {
      const int count = valid - n * kWidth;
      F s = load_vector_part(row + n * step, args.dtype_in, count);
      s = fma(s, set1(group.decay[0][d]), bit_and(s, set1(group.keep[0][d])));
      for (int i = 0; i < kRows; ++i) s = fma(set1(group.kend[i][d]), v_new[n][i], s);
      store_vector_part(out + n * out_step, args.dtype_out, count, s);
    }
  }
}

template <int kRows>
static inline void decode_kv_rows(const DecodeArgs& args) {
  for_each_columns<kRows>(args.value_dim, [&]<int kVecs>(int first, int valid) {
    decode_columns<kRows, kVecs>(args, first, valid);
  });
}

/// Lanes of x = kgam s, y = qgam s of a row s of a state [V, K], one value column, and a copy of
/// it.
template <int kRows>
static inline void read_row(const char* row, DType dtype, int key_dim,
                            const float (*kgam)[kRowStride], const float (*qgam)[kRowStride],
                            float* copy, F (&x)[kRows], F (&y)[kRows]) {
  const int step = element_bytes(dtype);
  for (int i = 0; i < kRows; ++i) x[i] = y[i] = set1(0);
  for (int d = 0; d < key_dim; d += kWidth) {
    const F state = load_vector_part(row + d * step, dtype, key_dim - d);
    store(copy + d, state);
    for (int i = 0; i < kRows; ++i) {
      x[i] = fma(load(kgam[i] + d), state, x[i]);
      y[i] = fma(load(qgam[i] + d), state, y[i]);
    }
  }
}

/// State [V, K]: one row is one value column.
template <int kRows>
static inline void decode_vk_rows(const DecodeArgs& args) {
  const Group& group = *args.group;
  const int stride_v = round_up(args.value_dim, kBlockV);
  const int out_step = element_bytes(args.dtype_out);
  alignas(64) float s[kRowStride];
  for (int c = 0; c < args.value_dim; ++c) {
    const char* row = args.state_in + c * args.row_stride_bytes_in;
    F x[kRows];
    F y[kRows];
    read_row<kRows>(row, args.dtype_in, group.key_dim, group.kgam, group.qgam, s, x, y);
    F v[kRows];
    F v_new[kRows];
    for (int i = 0; i < kRows; ++i) {
      v[i] = set1(args.v[i * stride_v + c]);
      x[i] = set1(reduce_add(x[i]));
      y[i] = set1(reduce_add(y[i]));
    }
    decode_substitute<kRows>(group, v, x, y, v_new);
    for (int i = 0; i < kRows; ++i) {
      alignas(64) float lane[kWidth];
      store(lane, y[i]);
      args.o[i * stride_v + c] = lane[0];
    }
    if (!args.state_out) continue;
    char* out = args.state_out + c * args.row_stride_bytes_out;
    for (int d = 0; d < group.key_dim; d += kWidth) {
      F state = load(s + d);
      state = fma(state, load(group.decay[0] + d), bit_and(state, load(group.keep[0] + d)));
      for (int i = 0; i < kRows; ++i) state = fma(load(group.kend[i] + d), v_new[i], state);
      store_vector_part(out + d * out_step, args.dtype_out, group.key_dim - d, state);
    }
  }
}

// A count between two instances runs as the next larger one: the extra rows of the chunk are zero.
static void decode_kv(const DecodeArgs& args) {
  const int count = args.group->num_tokens;
  if (count == 1) return decode_kv_rows<1>(args);
  if (count == 2) return decode_kv_rows<2>(args);
  return count <= 4 ? decode_kv_rows<4>(args) : decode_kv_rows<8>(args);
}

static void decode_vk(const DecodeArgs& args) {
  const int count = args.group->num_tokens;
  if (count == 1) return decode_vk_rows<1>(args);
  if (count == 2) return decode_vk_rows<2>(args);
  return count <= 4 ? decode_vk_rows<4>(args) : decode_vk_rows<8>(args);
}

}  // namespace kda::cpu::blocked::KDA_ISA
