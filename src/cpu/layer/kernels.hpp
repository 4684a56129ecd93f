// SPDX-License-Identifier: Apache-2.0
// The inner kernels of the layer's other operations, short convolution and gated norm: one table
// per instruction set, beside those of the blocked backend.
//
// The convolution works on tiles of fp32, [tokens][kTileChannels], whatever type and order of
// dimensions the tensors have. Columns up to the next multiple of a vector are computed too; what
// is in them is stored nowhere.
#pragma once

#include <cstdint>

#include "kda/types.hpp"

namespace kda::cpu::layer {

/// Wide, so that a row of a tensor is long enough for the processor to fetch ahead, and together
/// within a first-level cache of 48 KB.
inline constexpr int kTileChannels = 256;
inline constexpr int kTileTokens = 16;
inline constexpr int kMaxWidth = 4;

/// A part of a tensor, from its first element on; strides in elements.
struct Patch {
  char* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t token_stride = 0;
  int64_t channel_stride = 0;
};

/// The taps of a tile's channels.
struct Taps {
  const float* weight = nullptr;  ///< [width][kTileChannels], the oldest first
  const float* bias = nullptr;    ///< [kTileChannels] or null
  int width = 0;
  bool silu = false;
};

/// One row of a norm.
struct NormRow {
  const char* x = nullptr;
  const char* gate = nullptr;    ///< or null
  const char* weight = nullptr;  ///< or null
  DType x_dtype = DType::kFloat32, gate_dtype = DType::kFloat32, weight_dtype = DType::kFloat32;
  int64_t channels = 0;
  float eps = 0;
  Activation activation = Activation::kNone;
};

struct NormRowGradients {
  const char* dy = nullptr;
  char* dx = nullptr;        ///< or null
  char* dgate = nullptr;     ///< or null
  float* dweight = nullptr;  ///< [channels], added to; or null
  DType dy_dtype = DType::kFloat32, dx_dtype = DType::kFloat32, dgate_dtype = DType::kFloat32;
};

/// From one row to the next, in elements. `y`: of dy in a backward.
struct NormSteps {
  int64_t x = 0, gate = 0, y = 0, dx = 0, dgate = 0;
};

struct Kernels {
  void (*load_tile)(const Patch& source, int tokens, int channels, float* tile);
  void (*store_tile)(const Patch& target, int tokens, int channels, const float* tile);

  /// out[t] = act(bias + sum_j weight[j] in[t + j]); `in` has width - 1 rows more.
  void (*convolve)(const Taps& taps, const float* in, int tokens, int channels, float* out);
  /// slope[t] *= act'(bias + sum_j weight[j] in[t + j])
  void (*convolve_slopes)(const Taps& taps, const float* in, int tokens, int channels,
                          float* slope);
  /// sums[j] += sum_t slope[t] in[t + j], sums[width] += sum_t slope[t]; [width +
  /// 1][kTileChannels].
  void (*convolve_sums)(int width, const float* in, const float* slope, int tokens, int channels,
                        double* sums);

  void (*norm)(const NormRow& row, char* y, DType y_dtype);
  void (*norm_backward)(const NormRow& row, const NormRowGradients& gradients);

  /// Norms `count` rows from `first` on, of fewer channels than a vector has.
  int vector_width;
  void (*norm_narrow)(const NormRow& first, const NormSteps& steps, int64_t count, char* y,
                      DType y_dtype);
  void (*norm_narrow_backward)(const NormRow& first, const NormSteps& steps, int64_t count,
                               const NormRowGradients& gradients);
};

}  // namespace kda::cpu::layer
