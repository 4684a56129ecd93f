// SPDX-License-Identifier: Apache-2.0
// The gated RMS norm (include/kda/gated_rms_norm.hpp) and its gradients. A row belongs to a group
// of lanes of one warp, as many as it has vectors; a row of up to 32 vectors is read once, of a
// longer one the caches have the second reading. In the backward a group takes several rows, and
// its sums for dweight are in registers, or for a longer row in its own part of the workspace.
#include "cuda/launch/launch.cuh"
#include "cuda/layer/vectors.cuh"
#include "cuda/tile/warp.cuh"

namespace kda::cuda::layer {
namespace {

constexpr int kThreads = 128;

/// Lanes of a row: a power of two.
template <int kVector>
KDA_HOST_DEVICE int lanes_of(int64_t channels) {
  int lanes = 1;
  while (lanes < 32 && lanes * kVector < channels) lanes *= 2;
  return lanes;
}

template <int kVector>
struct Place {
  int lanes, lane;
  int64_t group;  // of all blocks

  __device__ __forceinline__ explicit Place(int64_t channels) : lanes(lanes_of<kVector>(channels)) {
    lane = static_cast<int>(threadIdx.x) % lanes;
    group = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / lanes;
  }
  __device__ __forceinline__ float sum(float x) const {
    for (int offset = 1; offset < lanes; offset *= 2) x += __shfl_xor_sync(~0u, x, offset);
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
__device__ __forceinline__ void weights_at(const NormArgs& a, int c, float (&x)[kVector]) {
#pragma unroll
  for (float& value : x) value = 1;
  if (a.weight.base) load_vector(a.weight, c, x);
}

/// 1 / sqrt(mean(x^2) + eps); `first` is the lane's first vector.
template <int kVector>
__device__ __forceinline__ float factor_of(const NormArgs& a, const Place<kVector>& place,
                                           int64_t x_row, const float (&first)[kVector]) {
  float sum = 0;
#pragma unroll
  for (const float x : first) sum = fmaf(x, x, sum);
  for (int c = (place.lane + place.lanes) * kVector; c < a.channels; c += place.lanes * kVector) {
    float more[kVector];
    load_vector(a.x, x_row + c, more);
#pragma unroll
    for (const float x : more) sum = fmaf(x, x, sum);
  }
  return 1.0f / sqrtf(place.sum(sum) / static_cast<float>(a.channels) + a.eps);
}

template <int kVector>
__global__ void __launch_bounds__(kThreads)
    gated_rms_norm_kernel(const __grid_constant__ NormArgs a) {
  const Place<kVector> place(a.channels);
  const bool mine = place.group < a.rows;  // else the lanes only take part in sums
  const int64_t row = mine ? place.group : 0;
  const auto activation = static_cast<Activation>(a.activation);
  const int64_t x_row = row_of(a, a.x, row), y_row = row_of(a, a.y, row),
                gate_row = row_of(a, a.gate, row);
  const int first = place.lane * kVector, step = place.lanes * kVector;
  Raw<kVector> raw, raw_gate;
  if (first < a.channels) {
    raw.load(a.x, x_row + first);
    if (a.gate.base) raw_gate.load(a.gate, gate_row + first);
  }
  float x[kVector];
  raw.convert(a.x.type, x);
  const float factor = factor_of(a, place, x_row, x);
  for (int c = first; mine && c < a.channels; c += step) {
    float gate[kVector], weight[kVector];
    if (c != first) load_vector(a.x, x_row + c, x);
    weights_at(a, c, weight);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = x[i] * factor * weight[i];
    if (a.gate.base) {
      if (c != first) raw_gate.load(a.gate, gate_row + c);
      raw_gate.convert(a.gate.type, gate);
#pragma unroll
      for (int i = 0; i < kVector; ++i) x[i] *= activate(activation, gate[i]);
    }
    store_vector(a.y, y_row + c, x);
  }
}

/// n = x / norm, dn = dy weight act(gate) of one vector.
template <int kVector>
struct Gradients {
  float n[kVector], dn[kVector], dgate[kVector], dweight[kVector];

  __device__ __forceinline__ Gradients(const NormBackwardArgs& b, float factor, int64_t dy_row,
                                       int64_t gate_row, int c, const float (&x)[kVector]) {
    const NormArgs& a = b.forward;
    float dy[kVector], gate[kVector], weight[kVector];
    load_vector(b.dy, dy_row + c, dy);
    if (a.gate.base) load_vector(a.gate, gate_row + c, gate);
    weights_at(a, c, weight);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      n[i] = x[i] * factor;
      Activated act{1.0f, 0.0f};
      if (a.gate.base) act = activate_with_slope(static_cast<Activation>(a.activation), gate[i]);
      dn[i] = dy[i] * weight[i] * act.value;
      dgate[i] = dy[i] * n[i] * weight[i] * act.slope;
      dweight[i] = dy[i] * n[i] * act.value;
    }
  }
};

template <int kVector>
__global__ void __launch_bounds__(kThreads)
    gated_rms_norm_backward_kernel(const __grid_constant__ NormBackwardArgs b) {
  const NormArgs& a = b.forward;
  const Place<kVector> place(a.channels);
  const int first = place.lane * kVector, step = place.lanes * kVector;
  float sums[kVector] = {};
  float* part = b.parts ? b.parts + place.group * a.channels : nullptr;
  for (int64_t begin = 0; begin < a.rows; begin += b.groups) {  // alike in all lanes of a warp
    const bool mine = place.group < b.groups && begin + place.group < a.rows;
    const int64_t row = mine ? begin + place.group : 0;
    const int64_t x_row = row_of(a, a.x, row), gate_row = row_of(a, a.gate, row),
                  dy_row = row_of(a, b.dy, row), dx_row = row_of(a, b.dx, row),
                  dgate_row = row_of(a, b.dgate, row);
    float x[kVector] = {};
    if (first < a.channels) load_vector(a.x, x_row + first, x);
    const float factor = factor_of(a, place, x_row, x);
    float sum = 0;
    for (int c = first; c < a.channels; c += step) {
      if (c != first) load_vector(a.x, x_row + c, x);
      const Gradients<kVector> g(b, factor, dy_row, gate_row, c, x);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum = fmaf(g.dn[i], g.n[i], sum);
    }
    const float mean = place.sum(sum) / static_cast<float>(a.channels);
    for (int c = first; mine && c < a.channels; c += step) {
      if (step < a.channels) load_vector(a.x, x_row + c, x);
      Gradients<kVector> g(b, factor, dy_row, gate_row, c, x);
      if (b.dgate.base) store_vector(b.dgate, dgate_row + c, g.dgate);
#pragma unroll
      for (int i = 0; i < kVector; ++i) g.dn[i] = (g.dn[i] - g.n[i] * mean) * factor;
      if (b.dx.base) store_vector(b.dx, dx_row + c, g.dn);
      if (!part) continue;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (step >= a.channels)
          sums[i] += g.dweight[i];
        else
          part[c + i] = (begin > 0 ? part[c + i] : 0.0f) + g.dweight[i];
      }
    }
  }
  if (!part || place.group >= b.groups || step < a.channels || first >= a.channels) return;
#pragma unroll
  for (int i = 0; i < kVector; ++i) part[first + i] = sums[i];
}

template <int kVector, class Args>
Status launch(const char* name, void (*kernel)(Args), int64_t channels, int64_t groups,
              const Launch& where, const Args& args) {
  const int64_t of_block = kThreads / lanes_of<kVector>(channels);
  return launch_kernel(name, kernel, (groups + of_block - 1) / of_block, kThreads, 0, where, args);
}

}  // namespace

Status launch_norm(const NormArgs& args, bool wide, const Launch& where) {
  const char* name = "gated_rms_norm";
  if (wide)
    return launch<kWideForward>(name, gated_rms_norm_kernel<kWideForward>, args.channels, args.rows,
                                where, args);
  return launch<1>(name, gated_rms_norm_kernel<1>, args.channels, args.rows, where, args);
}

Status launch_norm_backward(const NormBackwardArgs& args, bool wide, const Launch& where) {
  const char* name = "gated_rms_norm_backward";
  const int64_t channels = args.forward.channels;
  if (args.forward.rows == 0) return {};
  if (wide)
    return launch<kWideForward>(name, gated_rms_norm_backward_kernel<kWideForward>, channels,
                                args.groups, where, args);
  return launch<1>(name, gated_rms_norm_backward_kernel<1>, channels, args.groups, where, args);
}

}  // namespace kda::cuda::layer
