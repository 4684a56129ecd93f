// SPDX-License-Identifier: Apache-2.0
#include "cuda/staged/backward/finish.hpp"

#include "cuda/backward/gates.cuh"
#include "cuda/backward/sequence.cuh"
#include "cuda/launch/launch.cuh"
#include "cuda/tile/warp.cuh"

namespace kda::cuda {
namespace {

using namespace backward;

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;  // tokens whose loads are in flight together, a lane

/// A lane's four channels of a row.
struct Four {
  float x[4] = {};
};

/// A lane's part of the work: kLanes lanes have a token.
template <int kLanes>
struct Place {
  static constexpr int kTeams = kThreads / kLanes;  // of a block
  static constexpr int kK = 4 * kLanes;
  static constexpr int kRow = backward_row(kK);

  const BackwardArgs& a;
  const int64_t first;  // token of the piece
  const int head, q_head, in_group;
  const int team, channel;
  const bool inside;  // the lane's channels exist

  __device__ explicit Place(const BackwardArgs& args)
      : a(args),
        first(int64_t{blockIdx.x / static_cast<unsigned>(args.shape.HV)} * kPieceTokens),
        head(static_cast<int>(args.shape.heads.remainder(blockIdx.x))),
        q_head(static_cast<int>(args.shape.group.quotient(static_cast<unsigned>(head)))),
        in_group(head - q_head * group()),
        team(static_cast<int>(threadIdx.x) / kLanes),
        channel(static_cast<int>(threadIdx.x) % kLanes * 4),
        inside(channel < args.shape.K) {}

  __device__ int group() const { return static_cast<int>(a.shape.HV / a.shape.H); }
  __device__ const float* row(int token, int64_t value_head) const {
    return a.rows + ((first + token) * a.shape.HV + value_head) * kRow;
  }
  __device__ Four load_row(const float* from) const {
    const float4 y = *reinterpret_cast<const float4*>(from + channel);
    return {{y.x, y.y, y.z, y.w}};
  }
  /// This lane's elements of a row of a tensor of the caller's, as they lie in memory.
  __device__ void load(const RowView& view, int64_t at, uint32_t (&bits)[4]) const {
    if (!inside) return;
    if (view.type == Element::kFloat32) {
      const auto* from = reinterpret_cast<const uint2*>(static_cast<const float*>(view.base) + at);
      const uint2 x = from[channel / 2], y = from[channel / 2 + 1];
      bits[0] = x.x, bits[1] = x.y, bits[2] = y.x, bits[3] = y.y;
    } else {
      const auto* from =
          reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(view.base) + at);
      const uint32_t x = from[channel / 2], y = from[channel / 2 + 1];
      bits[0] = x & 0xffffu, bits[1] = x >> 16, bits[2] = y & 0xffffu, bits[3] = y >> 16;
    }
  }
  __device__ Four convert(const RowView& view, const uint32_t (&bits)[4]) const {
    Four out;
#pragma unroll
    for (int i = 0; i < 4; ++i) out.x[i] = inside ? float_of(bits[i], view.type) : 0.0f;
    return out;
  }
  __device__ void store(const RowView& view, int64_t at, const Four& y) const {
    if (!inside) return;
    if (view.type == Element::kBFloat16 && view.whole_words) {
      auto* to = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(view.base) + at + channel);
      to[0] = ptx::pack<__nv_bfloat16>(y.x[0], y.x[1]);
      to[1] = ptx::pack<__nv_bfloat16>(y.x[2], y.x[3]);
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) store_element(view.base, view.type, at + channel + i, y.x[i]);
  }
};

template <int kLanes>
struct Shared {
  int64_t sequence[kPieceTokens];  // of each token; -1: none
  double dA_log[Place<kLanes>::kTeams];
  float ddt_bias[Place<kLanes>::kTeams][Place<kLanes>::kK];
};

/// dq or dk of the piece's tokens that this value head of its group takes.
template <int kLanes>
__device__ void finish_rows(const Place<kLanes>& p, const int64_t (&sequence)[kPieceTokens],
                            const RowView& input, const RowView& out, int which, float scale) {
  const BackwardArgs& a = p.a;
  const int group = p.group(), step = group * Place<kLanes>::kTeams;
#pragma unroll 1
  for (int base = 0; base < kPieceTokens; base += kAtOnce * step) {  // the same in a warp's teams
    const int token0 = base + p.in_group + group * p.team;
    Four dy[kAtOnce];
    uint32_t bits[kAtOnce][4];
    bool there[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = token0 + i * step;
      there[i] = token < kPieceTokens && sequence[token] >= 0;
      if (!there[i]) continue;
      dy[i] = p.load_row(p.row(token, p.q_head * group) + which * Place<kLanes>::kK);
      if (a.gate.l2norm)
        p.load(input, row_offset(input, a.map, sequence[token], p.first + token, p.q_head),
               bits[i]);
    }
#pragma unroll 1
    for (int j = 1; j < group; ++j)
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (!there[i]) continue;
        const Four more =
            p.load_row(p.row(token0 + i * step, p.q_head * group + j) + which * Place<kLanes>::kK);
#pragma unroll
        for (int n = 0; n < 4; ++n) dy[i].x[n] += more.x[n];
      }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (!__any_sync(~0u, there[i])) continue;  // lanes of two teams meet in a warp
      float factor = scale, along = 0;
      Four x;
      if (a.gate.l2norm) {
        x = p.convert(input, bits[i]);
        float xx = 0, xdy = 0;
#pragma unroll
        for (int n = 0; n < 4; ++n)
          xx = fmaf(x.x[n], x.x[n], xx), xdy = fmaf(x.x[n], dy[i].x[n], xdy);
        const float r2 = 1 / (sum_over(xx, 1, kLanes) + 1e-6f);
        along = sum_over(xdy, 1, kLanes) * r2;
        factor *= sqrtf(r2);
      }
      if (!there[i]) continue;
      const int token = token0 + i * step;
#pragma unroll
      for (int n = 0; n < 4; ++n) dy[i].x[n] = factor * fmaf(-x.x[n], along, dy[i].x[n]);
      p.store(out, row_offset(out, a.map, sequence[token], p.first + token, p.q_head), dy[i]);
    }
  }
}

/// dbeta of a token, by the first lane of its team.
template <int kLanes>
__device__ __forceinline__ void finish_beta(const Place<kLanes>& p, int64_t sequence, int token) {
  const BackwardArgs& a = p.a;
  if (!a.dbeta.base || p.channel > 0) return;
  const auto offset = [&](const RowView& view) {
    return row_offset(view, a.map, sequence, p.first + token, p.head);
  };
  const float raw = float_of(load_bits(a.beta.base, a.beta.type, offset(a.beta)), a.beta.type);
  store_element(a.dbeta.base, a.dbeta.type, offset(a.dbeta),
                p.row(token, p.head)[3 * Place<kLanes>::kK] * step_slope(a.gate, raw));
}

/// dg and dbeta of the piece's tokens, and this team's share of the sums.
template <int kLanes>
__device__ void finish_gates(const Place<kLanes>& p, const int64_t (&sequence)[kPieceTokens],
                             Four& ddt_bias, float& dA_log) {
  using P = Place<kLanes>;
  const BackwardArgs& a = p.a;
  const float rate = a.gate.A_log ? expf(a.gate.A_log[p.head * a.gate.stride_A]) : 1.0f;
  Four bias;
  if (a.gate.dt_bias && p.inside)
#pragma unroll
    for (int n = 0; n < 4; ++n)
      bias.x[n] = a.gate.dt_bias[p.head * a.gate.stride_dt + p.channel + n];
#pragma unroll 1
  for (int base = 0; base < kPieceTokens; base += kAtOnce * P::kTeams) {
    const int token0 = base + p.team;
    Four dg[kAtOnce];
    uint32_t bits[kAtOnce][4];
    bool there[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = token0 + i * P::kTeams;
      there[i] = token < kPieceTokens && sequence[token] >= 0;
      if (!there[i]) continue;
      dg[i] = p.load_row(p.row(token, p.head) + 2 * P::kK);
      p.load(a.g, row_offset(a.g, a.map, sequence[token], p.first + token, p.head), bits[i]);
      finish_beta(p, sequence[token], token);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (!there[i] || !p.inside) continue;
      const Four raw = p.convert(a.g, bits[i]);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const GateGradient gradient = undo_gate(a.gate, raw.x[n], bias.x[n], rate, dg[i].x[n]);
        ddt_bias.x[n] += gradient.raw;
        dA_log += gradient.A_log;
        dg[i].x[n] = gradient.raw;
      }
      const int token = token0 + i * P::kTeams;
      if (a.dg.base)
        p.store(a.dg, row_offset(a.dg, a.map, sequence[token], p.first + token, p.head), dg[i]);
    }
  }
}

/// The sums of the piece from those of the teams, in order.
template <int kLanes>
__device__ void store_sums(const Place<kLanes>& p, Shared<kLanes>& s, const Four& ddt_bias,
                           float dA_log) {
  using P = Place<kLanes>;
  const BackwardArgs& a = p.a;
#pragma unroll
  for (int n = 0; n < 4; ++n) s.ddt_bias[p.team][p.channel + n] = ddt_bias.x[n];
  double sum = dA_log;
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (p.channel == 0) s.dA_log[p.team] = sum;
  __syncthreads();
  double* sums = a.sums + (p.first / kPieceTokens * a.shape.HV + p.head) * (a.shape.K + 1);
  for (int d = static_cast<int>(threadIdx.x); d <= a.shape.K; d += kThreads) {
    double total = 0;
    for (int team = 0; team < P::kTeams; ++team)
      total += d < a.shape.K ? static_cast<double>(s.ddt_bias[team][d]) : s.dA_log[team];
    sums[d] = total;
  }
}

/// A block a piece of 64 tokens and a value head. The value heads of a group share the tokens of
/// its q/k head.
template <int kLanes>
__global__ void __launch_bounds__(kThreads, 2)
    finish_gradients_kernel(const __grid_constant__ BackwardArgs a) {
  auto& s = *reinterpret_cast<Shared<kLanes>*>(ptx::dynamic_shared());
  const Place<kLanes> place(a);
  if (threadIdx.x < kPieceTokens)
    s.sequence[threadIdx.x] = sequence_at(a, place.first + threadIdx.x);
  __syncthreads();
  if (a.dq.base) finish_rows(place, s.sequence, a.q, a.dq, 0, a.gate.scale);
  if (a.dk.base) finish_rows(place, s.sequence, a.k, a.dk, 1, 1);
  if (!a.dg.base && !a.dbeta.base && !a.sums) return;
  Four ddt_bias;
  float dA_log = 0;
  finish_gates(place, s.sequence, ddt_bias, dA_log);
  if (a.sums) store_sums(place, s, ddt_bias, dA_log);
}

template <int kLanes>
Status launch(const BackwardArgs& args, const Launch& where) {
  return launch_kernel("backward_gradients", finish_gradients_kernel<kLanes>,
                       (args.num_tokens + kPieceTokens - 1) / kPieceTokens * args.shape.HV,
                       kThreads, sizeof(Shared<kLanes>), where, args);
}

}  // namespace

Status launch_finish_gradients(const BackwardArgs& args, const Launch& where) {
  return args.shape.K <= 64 ? launch<16>(args, where) : launch<32>(args, where);
}

}  // namespace kda::cuda
