// SPDX-License-Identifier: Apache-2.0
// The gradients that the caller gets: value heads of a q/k head are added up in order, then the way
// back through norms, gates and steps (equations: stage/backward.hpp).
#pragma once

#include "cuda/recurrent/backward/chunk.cuh"
#include "cuda/recurrent/backward/gates.cuh"
#include "cuda/recurrent/backward/sequence.cuh"

namespace kda::cuda::backward {

/// Tokens that the chunks of a piece may have: the last one may begin with its last token.
constexpr int kMostTokens = kPieceTokens + kTokens - 1;

__device__ __forceinline__ double sum_of_lanes(double x) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

/// Sequence of token `t`, or -1 if its chunk does not begin in the piece at `first`.
__device__ inline int64_t sequence_of(const BackwardArgs& a, int64_t first, int64_t t) {
  const int64_t n = sequence_at(a, t);
  if (n < 0) return -1;
  const int64_t chunk = t - (t - sequence_range(a.map, n).begin) % kTokens;
  return chunk >= first && chunk < first + kPieceTokens ? n : -1;
}

template <int kK>
struct GradientsShared {
  int64_t sequence[kMostTokens];
  double dA_log[kWarps];
  float ddt_bias[kWarps][kK];
};

/// This lane's channels of a row.
template <int kK>
__device__ __forceinline__ void load_sums(const BackwardArgs& a, const float* rows,
                                          float (&x)[kK / 32]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kK / 32; ++n) {
    const int d = lane + 32 * n;
    x[n] = d < a.shape.K ? rows[d] : 0;
  }
}

/// From a value head of a q/k head to the next one.
template <class Args>
__device__ __forceinline__ int head_step(const Args& a) {
  return has_tiled_heads(a) ? static_cast<int>(a.shape.H) : 1;
}
/// The first of them, and one behind the last.
template <class Args>
__device__ __forceinline__ int64_t first_head(const Args& a, int64_t q_head, int64_t group) {
  return has_tiled_heads(a) ? q_head : q_head * group;
}
template <class Args>
__device__ __forceinline__ int64_t end_head(const Args& a, int64_t q_head, int64_t group) {
  return has_tiled_heads(a) ? a.shape.HV : (q_head + 1) * group;
}

/// dq or dk of a token: value heads added up, then the norm y = x r: dx = r (dy - x r^2 (x . dy)).
/// In fp64: of few channels nothing but eps of dx may be left.
template <int kK, class Args>
__device__ __forceinline__ void finish_row(const Args& a, const RowView& input, const RowView& out,
                                           int64_t n, int64_t token, int64_t q_head, float scale,
                                           const float* rows) {
  constexpr int kCount = kK / 32;
  const int lane = threadIdx.x % 32;
  const int group = static_cast<int>(a.shape.HV / a.shape.H);
  float dy[kCount] = {};
  for (int j = 0; j < group; ++j) {
    float head[kCount];
    load_sums<kK>(a, rows + j * head_step(a) * kRowFloats<kK>, head);
#pragma unroll
    for (int i = 0; i < kCount; ++i) dy[i] = j == 0 ? head[i] : dy[i] + head[i];
  }
  float x[kCount];
  double factor = scale, along = 0;
  if (a.gate.l2norm) {
    load_row(input, row_offset(input, a.map, n, token, q_head), a.shape.K, x);
    double xx = 0, xdy = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      xx += static_cast<double>(x[i]) * x[i];
      xdy += static_cast<double>(x[i]) * dy[i];
    }
    const double r2 = 1 / (sum_of_lanes(xx) + 1e-6);
    factor *= sqrt(r2);
    along = sum_of_lanes(xdy) * r2;
  }
  const int64_t at = row_offset(out, a.map, n, token, q_head);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int d = lane + 32 * i;
    if (d >= a.shape.K) continue;
    const double dx = a.gate.l2norm ? dy[i] - x[i] * along : dy[i];
    store_element(out.base, out.type, at + d, static_cast<float>(factor * dx));
  }
}

/// Whether dg is the sum over channels.
template <class Args>
__device__ __forceinline__ bool sums_channels(const Args& a) {
  if constexpr (kHasHeadGates<Args>)
    return a.dgate_step == 0;
  else
    return false;
}

/// dg and dbeta of a token and value head; adds to the sums of the parameters.
template <int kK, class Args>
__device__ __forceinline__ void finish_gate(const Args& a, int64_t n, int64_t token, int64_t head,
                                            const float* rows, float (&ddt_bias)[kK / 32],
                                            float& dA_log) {
  constexpr int kCount = kK / 32;
  const int lane = threadIdx.x % 32;
  float dg[kCount], raw[kCount];
  load_sums<kK>(a, rows + 2 * kK, dg);
  load_row(a.g, row_offset(a.g, a.map, n, token, head), a.shape.K, raw, gate_step(a));
  const float rate = rate_of(a.gate, head);
  const int64_t at = a.dg.base ? row_offset(a.dg, a.map, n, token, head) : 0;
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int d = lane + 32 * i;
    if (d >= a.shape.K) continue;
    const float bias = a.gate.dt_bias ? a.gate.dt_bias[head * a.gate.stride_dt + d] : 0;
    const GateGradient gradient = undo_gate(a.gate, raw[i], bias, rate, dg[i]);
    ddt_bias[i] += gradient.raw;
    dA_log += gradient.A_log;
    if constexpr (kHasHeadGates<Args>) sum += gradient.raw;
    if (a.dg.base && !sums_channels(a)) store_element(a.dg.base, a.dg.type, at + d, gradient.raw);
  }
  if (sums_channels(a)) {
    sum = sum_of_lanes(sum);
    if (a.dg.base && lane == 0) store_element(a.dg.base, a.dg.type, at, static_cast<float>(sum));
  }
  if (!a.dbeta.base || lane > 0) return;
  float d_beta = 0;
  for (int64_t tile = 0; tile < a.sizes.tiles; ++tile) d_beta += rows[3 * kK + tile];
  const float raw_beta = float_of(
      load_bits(a.beta.base, a.beta.type, row_offset(a.beta, a.map, n, token, head)), a.beta.type);
  store_element(a.dbeta.base, a.dbeta.type, row_offset(a.dbeta, a.map, n, token, head),
                d_beta * step_slope(a.gate, raw_beta));
}

/// A block a piece and q/k head, a warp a token.
template <int kK, class Args>
__global__ void __launch_bounds__(kThreads)
    backward_gradients_kernel(const __grid_constant__ Args a) {
  constexpr int kCount = kK / 32;
  auto& shared = *reinterpret_cast<GradientsShared<kK>*>(ptx::dynamic_shared());
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto H = static_cast<unsigned>(a.shape.H);
  const int64_t q_head = blockIdx.x % H;
  const int64_t low = a.index * a.sizes.window;
  const int64_t first = low + int64_t{blockIdx.x / H} * kPieceTokens;
  const int64_t group = a.shape.HV / a.shape.H;
  if (threadIdx.x < kMostTokens)
    shared.sequence[threadIdx.x] = sequence_of(a, first, first + threadIdx.x);
  __syncthreads();
  const auto rows_of = [&](int64_t token, int64_t head) { return row_at<kK>(a, low, token, head); };
  for (int i = warp; i < kMostTokens; i += kWarps) {
    const int64_t n = shared.sequence[i], token = first + i;
    if (n < 0) continue;
    const float* rows = rows_of(token, first_head(a, q_head, group));
    if (a.dq.base) finish_row<kK>(a, a.q, a.dq, n, token, q_head, a.gate.scale, rows);
    if (a.dk.base) finish_row<kK>(a, a.k, a.dk, n, token, q_head, 1, rows + kK);
  }
  if (!a.dg.base && !a.dbeta.base && !a.sums) return;
  for (int64_t head = first_head(a, q_head, group); head < end_head(a, q_head, group);
       head += head_step(a)) {
    float ddt_bias[kCount] = {}, dA_log = 0;
    for (int i = warp; i < kMostTokens; i += kWarps)
      if (shared.sequence[i] >= 0)
        finish_gate<kK>(a, shared.sequence[i], first + i, head, rows_of(first + i, head), ddt_bias,
                        dA_log);
    if (!a.sums) continue;
    __syncthreads();  // the sums of the head before are done with
#pragma unroll
    for (int i = 0; i < kCount; ++i) shared.ddt_bias[warp][lane + 32 * i] = ddt_bias[i];
    const double sum = sum_of_lanes(dA_log);
    if (lane == 0) shared.dA_log[warp] = sum;
    __syncthreads();
    double* sums = a.sums + (first / kPieceTokens * a.shape.HV + head) * (a.shape.K + 1);
    for (int d = threadIdx.x; d <= a.shape.K; d += kThreads) {
      double total = 0;
      for (int w = 0; w < kWarps; ++w)
        total += d < a.shape.K ? static_cast<double>(shared.ddt_bias[w][d]) : shared.dA_log[w];
      sums[d] = total;
    }
  }
}

}  // namespace kda::cuda::backward
