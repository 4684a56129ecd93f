// SPDX-License-Identifier: Apache-2.0
// Tiles of the short convolution (kernels.hpp). A vector holds channels of one token.
#pragma once

#include "cpu/blocked/rows.hpp"
#include "cpu/layer/activation.hpp"
#include "cpu/layer/kernels.hpp"

namespace kda::cpu::blocked::KDA_ISA {

using layer::kTileChannels;
using layer::kTileTokens;
using layer::Patch;
using layer::Taps;

static inline int padded(int channels) { return (channels + kWidth - 1) / kWidth * kWidth; }

// ---- tiles in and out ---------------------------------------------------------------------------

/// Where tokens are innermost: kWidth x kWidth elements at a time, turned over in registers.
static void load_turned(const Patch& source, int token, int channels, float* tile) {
  const int step = element_bytes(source.dtype);
  float square[kWidth][kWidth];
  for (int c = 0; c < channels; c += kWidth) {
    for (int i = 0; i < kWidth; ++i) {
      const int64_t at = token + (c + i) * source.channel_stride;
      store(square[i],
            c + i < channels ? load_vector(source.data + at * step, source.dtype) : set1(0.0f));
    }
    transpose(square[0], kWidth, tile + token * kTileChannels + c, kTileChannels);
  }
}

static void store_turned(const Patch& target, int token, int channels, const float* tile) {
  const int step = element_bytes(target.dtype);
  float square[kWidth][kWidth];
  for (int c = 0; c < channels; c += kWidth) {
    transpose(tile + token * kTileChannels + c, kTileChannels, square[0], kWidth);
    for (int i = 0; i < kWidth && c + i < channels; ++i) {
      const int64_t at = token + (c + i) * target.channel_stride;
      store_vector(target.data + at * step, target.dtype, load(square[i]));
    }
  }
}

/// The few columns of weights and states, whose channels lie densely, kStride elements each: plain
/// loops that the compiler turns into shuffles.
constexpr int kMostNarrow = 4;

template <int kStride>
static void load_narrow(const float* __restrict source, int tokens, int channels,
                        float* __restrict tile) {
  for (int t = 0; t < tokens; ++t)
    for (int c = 0; c < channels; ++c) tile[t * kTileChannels + c] = source[c * kStride + t];
}

template <int kStride>
static void store_narrow(const float* __restrict tile, int channels, float* __restrict target) {
  for (int c = 0; c < channels; ++c)
    for (int t = 0; t < kStride; ++t) target[c * kStride + t] = tile[t * kTileChannels + c];
}

static inline bool is_narrow(const Patch& patch, int tokens) {
  return patch.token_stride == 1 && patch.channel_stride >= tokens &&
         patch.channel_stride >= kMostNarrow - 1 && patch.channel_stride <= kMostNarrow;
}

static void load_narrow_tile(const Patch& source, int tokens, int channels, float* tile) {
  float dense[kTileChannels * kMostNarrow];
  const auto stride = static_cast<int>(source.channel_stride);
  const int count = (channels - 1) * stride + tokens;
  load_row(source.data, source.dtype, count, padded(channels) * stride, dense);
  if (stride == 4) return load_narrow<4>(dense, tokens, padded(channels), tile);
  load_narrow<3>(dense, tokens, padded(channels), tile);
}

static void store_narrow_tile(const Patch& target, int channels, const float* tile) {
  float dense[kTileChannels * kMostNarrow];
  const auto stride = static_cast<int>(target.channel_stride);
  if (stride == 4)
    store_narrow<4>(tile, channels, dense);
  else
    store_narrow<3>(tile, channels, dense);
  store_row(dense, target.dtype, channels * stride, target.data);
}

static void load_tile(const Patch& source, int tokens, int channels, float* tile) {
  const int step = element_bytes(source.dtype), columns = padded(channels);
  if (source.channel_stride == 1) {
    for (int t = 0; t < tokens; ++t)
      load_row(source.data + t * source.token_stride * step, source.dtype, channels, columns,
               tile + t * kTileChannels);
    return;
  }
  if (is_narrow(source, tokens)) return load_narrow_tile(source, tokens, channels, tile);
  int t = 0;
  if (source.token_stride == 1)
    for (; t + kWidth <= tokens; t += kWidth) load_turned(source, t, channels, tile);
  for (int c = 0; c < columns; ++c)
    for (int row = t; row < tokens; ++row)
      tile[row * kTileChannels + c] =
          c < channels ? load_element(source.data, source.dtype,
                                      row * source.token_stride + c * source.channel_stride)
                       : 0.0f;
}

static void store_tile(const Patch& target, int tokens, int channels, const float* tile) {
  const int step = element_bytes(target.dtype);
  if (target.channel_stride == 1) {
    for (int t = 0; t < tokens; ++t)
      store_row(tile + t * kTileChannels, target.dtype, channels,
                target.data + t * target.token_stride * step);
    return;
  }
  if (is_narrow(target, tokens) && tokens == target.channel_stride)
    return store_narrow_tile(target, channels, tile);
  int t = 0;
  if (target.token_stride == 1)
    for (; t + kWidth <= tokens; t += kWidth) store_turned(target, t, channels, tile);
  for (int c = 0; c < channels; ++c)
    for (int row = t; row < tokens; ++row)
      store_element(target.data, target.dtype,
                    row * target.token_stride + c * target.channel_stride,
                    tile[row * kTileChannels + c]);
}

// ---- the convolution ----------------------------------------------------------------------------

/// finish(row, c, p) of every vector, p = bias + sum_j weight[j] in[t + j].
template <int kTaps, class Finish>
static inline void sum_of_taps(const Taps& taps, const float* in, int tokens, int channels,
                               Finish&& finish) {
  for (int c = 0; c < channels; c += kWidth) {
    F weight[kTaps], x[kTaps];
    for (int j = 0; j < kTaps; ++j) weight[j] = load(taps.weight + j * kTileChannels + c);
    const F bias = taps.bias ? load(taps.bias + c) : set1(0.0f);
    for (int j = 0; j + 1 < kTaps; ++j) x[j + 1] = load(in + j * kTileChannels + c);
    for (int t = 0; t < tokens; ++t) {
      for (int j = 0; j + 1 < kTaps; ++j) x[j] = x[j + 1];
      x[kTaps - 1] = load(in + (t + kTaps - 1) * kTileChannels + c);
      F p = bias;
      for (int j = 0; j < kTaps; ++j) p = fma(weight[j], x[j], p);
      finish(t * kTileChannels + c, p);
    }
  }
}

template <class Finish>
static inline void each_sum(const Taps& taps, const float* in, int tokens, int channels,
                            Finish&& finish) {
  if (taps.width == 2) return sum_of_taps<2>(taps, in, tokens, channels, finish);
  if (taps.width == 3) return sum_of_taps<3>(taps, in, tokens, channels, finish);
  return sum_of_taps<4>(taps, in, tokens, channels, finish);
}

static void convolve(const Taps& taps, const float* in, int tokens, int channels, float* out) {
  if (taps.silu)
    each_sum(taps, in, tokens, channels,
             [out](int at, F p) { store(out + at, activate(Activation::kSilu, p)); });
  else
    each_sum(taps, in, tokens, channels, [out](int at, F p) { store(out + at, p); });
}

static void convolve_slopes(const Taps& taps, const float* in, int tokens, int channels,
                            float* slope) {
  if (!taps.silu) return;
  each_sum(taps, in, tokens, channels, [slope](int at, F p) {
    store(slope + at, load(slope + at) * activate_with_slope(Activation::kSilu, p).slope);
  });
}

static void convolve_sums(int width, const float* in, const float* slope, int tokens, int channels,
                          double* sums) {
  for (int c = 0; c < channels; c += kWidth)
    for (int j = 0; j <= width; ++j) {
      F sum = set1(0.0f);
      for (int t = 0; t < tokens; ++t) {
        const F x = j < width ? load(in + (t + j) * kTileChannels + c) : set1(1.0f);
        sum = fma(load(slope + t * kTileChannels + c), x, sum);
      }
      float part[kWidth];
      store(part, sum);
      for (int i = 0; i < kWidth; ++i) sums[j * kTileChannels + c + i] += part[i];
    }
}

}  // namespace kda::cpu::blocked::KDA_ISA
