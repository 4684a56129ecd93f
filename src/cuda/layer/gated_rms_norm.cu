// SPDX-License-Identifier: Apache-2.0
// The gated RMS norm (include/kda/gated_rms_norm.hpp) and its gradients. A row belongs to a group
// of lanes of one warp, as many as it has vectors; a row of up to 32 vectors is read once, of a
// longer one the caches have the second reading. A group takes several rows where there are many;
// its sums for dweight are in registers, of a longer row in its own part of the workspace.
//
// A forward that cannot read vectors reads their elements one by one, in the same places: so sums
// have one order, and the bits of a row do not depend on where it lies in memory.
#include "cuda/launch/launch.cuh"
#include "cuda/layer/vectors.cuh"
#include "cuda/tile/warp.cuh"

namespace kda::cuda::layer {
namespace {

template <int kVector>
struct Place {
  int lanes, lane;
  int64_t group;  // of all blocks

  __device__ __forceinline__ explicit Place(int64_t channels) : lanes(lanes_of(kVector, channels)) {
    lane = static_cast<int>(threadIdx.x) % lanes;
    group = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / lanes;
  }
  __device__ __forceinline__ float sum(float x) const {
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2)
      if (offset < lanes) x += __shfl_xor_sync(~0u, x, offset);
    return x;
  }
};

__device__ __forceinline__ int64_t row_of(const NormArgs& a, const View& view, int64_t row) {
  const auto r = static_cast<uint32_t>(row);
  const uint32_t above = a.heads.quotient(r), batch = a.tokens.quotient(above);
  return batch * view.strides[0] + a.tokens.remainder(above) * view.strides[1] +
         a.heads.remainder(r) * view.strides[2];
}

template <int kVector>
__device__ __forceinline__ float squares_of(const float (&x)[kVector]) {
  float sum = 0;
#pragma unroll
  for (const float value : x) sum = fmaf(value, value, sum);
  return sum;
}

/// kVector neighbouring channels from `c` on, of which fewer may be there.
template <int kVector, bool kWide>
__device__ __forceinline__ Raw<kVector> load_channels(const NormArgs& a, const View& view,
                                                      int64_t row, int c) {
  Raw<kVector> raw;
  if constexpr (kWide)
    raw.load(view, row + c);
  else
    raw.load(view, row + c, static_cast<int>(a.channels) - c);
  return raw;
}
template <bool kWide, int kVector>
__device__ __forceinline__ void store_channels(const NormArgs& a, int64_t row, int c,
                                               const float (&x)[kVector]) {
  if constexpr (kWide) return store_vector(a.y, row + c, x);
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    if (c + i < a.channels) store_element(a.y.base, a.y.type, row + c + i, x[i]);
}

template <int kVector, bool kWide = true>
__device__ __forceinline__ void weights_at(const NormArgs& a, int c, float (&x)[kVector]) {
#pragma unroll
  for (float& value : x) value = 1;
  if (a.weight.base) load_channels<kVector, kWide>(a, a.weight, 0, c).convert(a.weight.type, x);
}

/// Adds the squares that a lane has of a row behind its first vector.
template <int kVector, bool kWide = true>
__device__ __forceinline__ float squares_behind(const NormArgs& a, const Place<kVector>& place,
                                                int64_t x_row) {
  float sum = 0;
  for (int c = (place.lane + place.lanes) * kVector; c < a.channels; c += place.lanes * kVector) {
    float x[kVector];
    load_channels<kVector, kWide>(a, a.x, x_row, c).convert(a.x.type, x);
    sum += squares_of(x);
  }
  return sum;
}

__device__ __forceinline__ float factor_of(const NormArgs& a, float squares) {
  return rsqrtf(squares / static_cast<float>(a.channels) + a.eps);
}

template <int kVector>
__device__ __forceinline__ void scale_vector(const NormArgs& a, float factor,
                                             const float (&weight)[kVector],
                                             const Raw<kVector>& raw_gate, float (&x)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] = x[i] * factor * weight[i];
  if (!a.gate.base) return;
  float gate[kVector];
  raw_gate.convert(a.gate.type, gate);
  const auto activation = static_cast<Activation>(a.activation);
  if (activation == Activation::kSigmoid) {  // not asked element by element
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] *= sigmoid(gate[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] *= activate(activation, gate[i]);
  }
}

template <bool kWide>
__global__ void __launch_bounds__(kNormThreads)
    gated_rms_norm_kernel(const __grid_constant__ NormArgs a) {
  constexpr int kVector = kWideForward;
  const Place<kVector> place(a.channels);
  const int first = place.lane * kVector, step = place.lanes * kVector;
  const bool has_first = first < a.channels;
  float weight[kVector] = {};
  if (has_first) weights_at<kVector, kWide>(a, first, weight);
  for (int64_t begin = 0; begin < a.rows; begin += a.groups) {  // alike in all lanes of a warp
    const int64_t row = begin + place.group;
    const bool mine = place.group < a.groups && row < a.rows;  // else it only takes part in sums
    const int64_t at = mine ? row : 0;
    const int64_t x_row = row_of(a, a.x, at), gate_row = row_of(a, a.gate, at);
    Raw<kVector> raw, raw_gate;
    if (has_first) {
      raw = load_channels<kVector, kWide>(a, a.x, x_row, first);
      if (a.gate.base) raw_gate = load_channels<kVector, kWide>(a, a.gate, gate_row, first);
    }
    float x[kVector];
    raw.convert(a.x.type, x);
    const float squares = squares_of(x) + squares_behind<kVector, kWide>(a, place, x_row);
    const float factor = factor_of(a, place.sum(squares));
    if (!mine || !has_first) continue;
    const int64_t y_row = row_of(a, a.y, at);
    scale_vector(a, factor, weight, raw_gate, x);
    store_channels<kWide>(a, y_row, first, x);
    for (int c = first + step; c < a.channels; c += step) {
      float more[kVector];
      load_channels<kVector, kWide>(a, a.x, x_row, c).convert(a.x.type, x);
      weights_at<kVector, kWide>(a, c, more);
      if (a.gate.base) raw_gate = load_channels<kVector, kWide>(a, a.gate, gate_row, c);
      scale_vector(a, factor, more, raw_gate, x);
      store_channels<kWide>(a, y_row, c, x);
    }
  }
}

// ---- gradients ----------------------------------------------------------------------------------

/// Where a row of each tensor begins.
struct Rows {
  int64_t x, gate, dy, dx, dgate;

  __device__ __forceinline__ Rows(const NormBackwardArgs& b, int64_t row)
      : x(row_of(b.forward, b.forward.x, row)),
        gate(row_of(b.forward, b.forward.gate, row)),
        dy(row_of(b.forward, b.dy, row)),
        dx(row_of(b.forward, b.dx, row)),
        dgate(row_of(b.forward, b.dgate, row)) {}
};

/// A vector of a row: x, dy act(gate), and dy act'(gate).
template <int kVector>
struct Vector {
  float x[kVector] = {}, dy[kVector] = {}, slope[kVector] = {};

  __device__ __forceinline__ void load(const NormBackwardArgs& b, const Rows& rows, int c) {
    const NormArgs& a = b.forward;
    Raw<kVector> raw_x, raw_dy, raw_gate;
    raw_x.load(a.x, rows.x + c), raw_dy.load(b.dy, rows.dy + c);
    if (a.gate.base) raw_gate.load(a.gate, rows.gate + c);
    raw_x.convert(a.x.type, x), raw_dy.convert(b.dy.type, dy);
    if (!a.gate.base) return;
    float gate[kVector];
    raw_gate.convert(a.gate.type, gate);
    const auto activation = static_cast<Activation>(a.activation);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const Activated act = activate_with_slope(activation, gate[i]);
      slope[i] = dy[i] * act.slope;
      dy[i] *= act.value;
    }
  }
  /// sum dn x, dn = dy weight act(gate)
  __device__ __forceinline__ float product(const float (&weight)[kVector]) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum = fmaf(dy[i] * weight[i], x[i], sum);
    return sum;
  }
  /// With n = x factor: dgate, and dx = (dn - n mean(dn n)) factor; dweight in dy.
  __device__ __forceinline__ void store(const NormBackwardArgs& b, const Rows& rows, int c,
                                        float factor, float mean, const float (&weight)[kVector]) {
    float dx[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float n = x[i] * factor;
      slope[i] *= n * weight[i];
      dx[i] = (dy[i] * weight[i] - n * mean) * factor;
      dy[i] *= n;
    }
    if (b.dgate.base) store_vector(b.dgate, rows.dgate + c, slope);
    if (b.dx.base) store_vector(b.dx, rows.dx + c, dx);
  }
};

template <int kVector>
__global__ void __launch_bounds__(kNormThreads)
    gated_rms_norm_backward_kernel(const __grid_constant__ NormBackwardArgs b) {
  const NormArgs& a = b.forward;
  const Place<kVector> place(a.channels);
  const int first = place.lane * kVector, step = place.lanes * kVector;
  const bool has_first = first < a.channels;
  float sums[kVector] = {}, weight[kVector] = {};
  if (has_first) weights_at(a, first, weight);
  const bool is_long = step < a.channels;  // sums behind the first vector are in memory
  float* part =
      b.parts ? b.parts + (is_long ? place.group : int64_t{blockIdx.x}) * a.channels : nullptr;
  for (int64_t begin = 0; begin < a.rows; begin += a.groups) {
    const bool mine = place.group < a.groups && begin + place.group < a.rows;
    const Rows rows(b, mine ? begin + place.group : 0);
    Vector<kVector> v;
    if (has_first) v.load(b, rows, first);
    float product = v.product(weight);
    for (int c = first + step; c < a.channels; c += step) {
      Vector<kVector> more;
      float weights[kVector];
      more.load(b, rows, c), weights_at(a, c, weights);
      product += more.product(weights);
    }
    const float squares = place.sum(squares_of(v.x) + squares_behind(a, place, rows.x));
    const float factor = factor_of(a, squares);
    const float mean = place.sum(product) * factor / static_cast<float>(a.channels);
    if (!mine || !has_first) continue;
    v.store(b, rows, first, factor, mean, weight);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[i] += v.dy[i];
    for (int c = first + step; c < a.channels; c += step) {
      float weights[kVector];
      v.load(b, rows, c), weights_at(a, c, weights);
      v.store(b, rows, c, factor, mean, weights);
      if (part)
#pragma unroll
        for (int i = 0; i < kVector; ++i) part[c + i] = (begin > 0 ? part[c + i] : 0.0f) + v.dy[i];
    }
  }
  if (!part) return;
  if (is_long) {
    if (place.group < a.groups && place.group < a.rows)
#pragma unroll
      for (int i = 0; i < kVector; ++i) part[first + i] = sums[i];
    return;
  }
  // The groups of a block, one after the other.
  __shared__ float shared[kNormThreads * kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) shared[threadIdx.x * kVector + i] = sums[i];
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < a.channels; c += kNormThreads) {
    float sum = 0;
    for (int at = c; at < kNormThreads * kVector; at += step) sum += shared[at];
    part[c] = sum;
  }
}

template <int kVector, class Args>
Status launch(const char* name, void (*kernel)(Args), int64_t channels, int64_t groups,
              const Launch& where, const Args& args) {
  const int64_t of_block = kNormThreads / lanes_of(kVector, channels);
  return launch_kernel(name, kernel, (groups + of_block - 1) / of_block, kNormThreads, 0, where,
                       args);
}

}  // namespace

Status launch_norm(const NormArgs& args, bool wide, const Launch& where) {
  return launch<kWideForward>("gated_rms_norm",
                              wide ? gated_rms_norm_kernel<true> : gated_rms_norm_kernel<false>,
                              args.channels, args.groups, where, args);
}

Status launch_norm_backward(const NormBackwardArgs& args, bool wide, const Launch& where) {
  const char* name = "gated_rms_norm_backward";
  const int64_t channels = args.forward.channels;
  if (args.forward.rows == 0) return {};
  if (wide)
    return launch<kWideForward>(name, gated_rms_norm_backward_kernel<kWideForward>, channels,
                                args.forward.groups, where, args);
  return launch<1>(name, gated_rms_norm_backward_kernel<1>, channels, args.forward.groups, where,
                   args);
}

}  // namespace kda::cuda::layer
