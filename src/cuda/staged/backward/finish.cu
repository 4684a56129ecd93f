// SPDX-License-Identifier: Apache-2.0
#include "cuda/staged/backward/finish.hpp"

#include "cuda/launch/launch.cuh"
#include "cuda/recurrent/backward/gates.cuh"
#include "cuda/recurrent/backward/sequence.cuh"
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
using Bits = uint32_t[4];  ///< as they lie in memory, in 16 bits two each

enum View : int { kQ, kK, kG, kBeta, kDq, kDk, kDg, kDbeta, kNumViews };

/// Where the rows of a piece's tokens lie: found once, since addresses were most instructions.
struct Offsets {
  int64_t at[kNumViews][kPieceTokens];
  int first, last;  ///< tokens of the piece that sequences have: first .. last - 1
};

template <int kLanes>
struct Shared {
  static constexpr int kTeams = kThreads / kLanes;
  Offsets offsets;
  double dA_log[kTeams];
  float ddt_bias[kTeams][4 * kLanes];
};

/// A lane's part of the work: kLanes lanes have a token. kPairs: all rows of q, k, g, dq, dk, dg
/// are bf16 and begin at multiples of two elements, but for gates of one a head.
template <int kLanes, bool kPairs>
struct Place {
  static constexpr int kTeams = kThreads / kLanes;  // of a block
  static constexpr int kChannels = 4 * kLanes;
  static constexpr int kRow = backward_row(kChannels);

  const HeadGates<BackwardArgs>& a;
  const Offsets& offsets;
  const int64_t first;  // token of the piece
  const int head, q_head;
  const int head_step, first_head;  // of the value heads of a q/k head
  const int team, channel;
  const bool inside;  // the lane's channels exist

  __device__ Place(const HeadGates<BackwardArgs>& args, const Offsets& found)
      : a(args),
        offsets(found),
        first(int64_t{blockIdx.x / static_cast<unsigned>(args.shape.HV)} * kPieceTokens),
        head(static_cast<int>(args.shape.heads.remainder(blockIdx.x))),
        q_head(q_head_of(args, head)),
        head_step(args.tiled ? static_cast<int>(args.shape.H) : 1),
        first_head(args.tiled ? q_head : q_head * group()),
        team(static_cast<int>(threadIdx.x) / kLanes),
        channel(static_cast<int>(threadIdx.x) % kLanes * 4),
        inside(channel < args.shape.K) {}

  __device__ int group() const { return static_cast<int>(a.shape.HV / a.shape.H); }
  __device__ int in_group() const { return (head - first_head) / head_step; }
  /// A gradient of a token and value head, in the rows of chunk_grad.
  __device__ const float* row(int token, int value_head, int which) const {
    return a.rows + ((first + token) * a.shape.HV + value_head) * kRow + which * kChannels;
  }
  __device__ Four load_row(const float* from) const {
    const float4 y = *reinterpret_cast<const float4*>(from + channel);
    return {{y.x, y.y, y.z, y.w}};
  }
  __device__ void load(const RowView& view, int64_t at, Bits& bits) const {
    if (!inside) return;
    if (!kPairs && view.type == Element::kFloat32) {
      const auto* from = reinterpret_cast<const uint2*>(static_cast<const float*>(view.base) + at);
      const uint2 x = from[channel / 2], y = from[channel / 2 + 1];
      bits[0] = x.x, bits[1] = x.y, bits[2] = y.x, bits[3] = y.y;
      return;
    }
    const auto* from =
        reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(view.base) + at);
    bits[0] = from[channel / 2], bits[1] = from[channel / 2 + 1];
  }
  __device__ Four convert(const RowView& view, const Bits& bits) const {
    Four out;
    if (!inside) return out;
    if (!kPairs && view.type == Element::kFloat32) {
#pragma unroll
      for (int n = 0; n < 4; ++n) out.x[n] = __uint_as_float(bits[n]);
      return out;
    }
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      const float2 y = kPairs || view.type == Element::kBFloat16
                           ? ptx::unpack<__nv_bfloat16>(bits[n / 2])
                           : ptx::unpack<__half>(bits[n / 2]);
      out.x[n] = y.x, out.x[n + 1] = y.y;
    }
    return out;
  }
  /// One gate a head is that of all channels.
  __device__ void load_gate(int64_t at, Bits& bits) const {
    if (a.gate_step != 0) return load(a.g, at, bits);
    bits[0] = load_bits(a.g.base, a.g.type, at);
  }
  __device__ Four convert_gate(const Bits& bits) const {
    if (a.gate_step != 0) return convert(a.g, bits);
    const float x = float_of(bits[0], a.g.type);
    return {{x, x, x, x}};
  }
  __device__ void store(const RowView& view, int64_t at, const Four& y) const {
    if (!inside) return;
    if constexpr (kPairs) {
      auto* to = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(view.base) + at + channel);
      to[0] = ptx::pack<__nv_bfloat16>(y.x[0], y.x[1]);
      to[1] = ptx::pack<__nv_bfloat16>(y.x[2], y.x[3]);
    } else {
#pragma unroll
      for (int n = 0; n < 4; ++n) store_element(view.base, view.type, at + channel + n, y.x[n]);
    }
  }
  /// dg of a token that is `there`. Where it is one a head, it is summed over the channels, in an
  /// order that is always the same; all lanes of the warp take part.
  __device__ void store_gate(int token, bool there, const Four& y) const {
    if (a.dgate_step != 0) {
      if (there) store(a.dg, offsets.at[kDg][token], y);
      return;
    }
    const float own = inside && there ? (y.x[0] + y.x[1]) + (y.x[2] + y.x[3]) : 0.0f;
    const float sum = sum_over(own, 1, kLanes);
    if (there && channel == 0) store_element(a.dg.base, a.dg.type, offsets.at[kDg][token], sum);
  }
  /// Tokens token0, token0 + step, .. of which there are kAtOnce; beyond the last one it again.
  __device__ int token(int token0, int i, int step) const {
    return min(token0 + i * step, offsets.last - 1);
  }
};

/// One thread a token.
__device__ void find_offsets(const BackwardArgs& a, int64_t first, int head, int q_head,
                             Offsets& offsets) {
  const int token = static_cast<int>(threadIdx.x);
  if (token == 0) offsets.first = kPieceTokens, offsets.last = 0;
  __syncthreads();
  if (token < kPieceTokens) {
    const int64_t n = sequence_at(a, first + token);
    if (n >= 0) {
      atomicMin(&offsets.first, token), atomicMax(&offsets.last, token + 1);
      const auto find = [&](View which, const RowView& view, int of) {
        if (view.base) offsets.at[which][token] = row_offset(view, a.map, n, first + token, of);
      };
      find(kQ, a.q, q_head), find(kK, a.k, q_head), find(kDq, a.dq, q_head);
      find(kDk, a.dk, q_head), find(kG, a.g, head), find(kBeta, a.beta, head);
      find(kDg, a.dg, head), find(kDbeta, a.dbeta, head);
    }
  }
  __syncthreads();
}

/// dq or dk of the piece's tokens that this value head of its group takes.
template <class P>
__device__ void finish_rows(const P& p, View in, const RowView& input, View out,
                            const RowView& output, int which, float scale) {
  const HeadGates<BackwardArgs>& a = p.a;
  const Offsets& offsets = p.offsets;
  const int group = p.group(), in_group = p.in_group(), step = group * P::kTeams;
#pragma unroll 1
  for (int base = offsets.first; base < offsets.last; base += kAtOnce * step) {
    const int token0 = base + in_group + group * p.team;  // a warp's teams stay together
    Four dy[kAtOnce];
    Bits bits[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = p.token(token0, i, step);
      dy[i] = p.load_row(p.row(token, p.first_head, which));
      if (a.gate.l2norm) p.load(input, offsets.at[in][token], bits[i]);
    }
#pragma unroll 1
    for (int j = 1; j < group; ++j)
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const Four more =
            p.load_row(p.row(p.token(token0, i, step), p.first_head + j * p.head_step, which));
#pragma unroll
        for (int n = 0; n < 4; ++n) dy[i].x[n] += more.x[n];
      }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float factor = scale, along = 0;
      Four x;
      if (a.gate.l2norm) {
        x = p.convert(input, bits[i]);
        float xx = 0, xdy = 0;
#pragma unroll
        for (int n = 0; n < 4; ++n)
          xx = fmaf(x.x[n], x.x[n], xx), xdy = fmaf(x.x[n], dy[i].x[n], xdy);
        const float r = rsqrtf(sum_over(xx, 1, P::kChannels / 4) + 1e-6f);
        along = sum_over(xdy, 1, P::kChannels / 4) * r * r;
        factor *= r;
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) dy[i].x[n] = factor * fmaf(-x.x[n], along, dy[i].x[n]);
      const int token = token0 + i * step;
      if (token < offsets.last) p.store(output, offsets.at[out][token], dy[i]);
    }
  }
}

/// dbeta of a token.
template <class P>
__device__ __forceinline__ void finish_beta(const P& p, int token) {
  const HeadGates<BackwardArgs>& a = p.a;
  const float raw =
      float_of(load_bits(a.beta.base, a.beta.type, p.offsets.at[kBeta][token]), a.beta.type);
  store_element(a.dbeta.base, a.dbeta.type, p.offsets.at[kDbeta][token],
                *p.row(token, p.head, 3) * step_slope(a.gate, raw));
}

/// dg of the piece's tokens, and this team's share of the sums.
template <GateMode kMode, class P>
__device__ void finish_gates(const P& p, Four& ddt_bias, float& dA_log) {
  const HeadGates<BackwardArgs>& a = p.a;
  const Offsets& offsets = p.offsets;
  GateView gate = a.gate;
  gate.gate_mode = kMode;  // known to the compiler
  const float rate = gate.A_log ? expf(gate.A_log[p.head * gate.stride_A]) : 1.0f;
  Four bias;
  if (gate.dt_bias && p.inside)
#pragma unroll
    for (int n = 0; n < 4; ++n) bias.x[n] = gate.dt_bias[p.head * gate.stride_dt + p.channel + n];
#pragma unroll 1
  for (int base = offsets.first; base < offsets.last; base += kAtOnce * P::kTeams) {
    const int token0 = base + p.team;
    Four dg[kAtOnce];
    Bits bits[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = p.token(token0, i, P::kTeams);
      dg[i] = p.load_row(p.row(token, p.head, 2));
      p.load_gate(offsets.at[kG][token], bits[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int token = token0 + i * P::kTeams;
      const bool there = token < offsets.last;
      if (there && p.inside) {
        const Four raw = p.convert_gate(bits[i]);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const GateGradient gradient = undo_gate(gate, raw.x[n], bias.x[n], rate, dg[i].x[n]);
          ddt_bias.x[n] += gradient.raw;
          dA_log += gradient.A_log;
          dg[i].x[n] = gradient.raw;
        }
      }
      if (a.dg.base) p.store_gate(token, there, dg[i]);
    }
  }
}

/// The sums of the piece from those of the teams, in order.
template <class P, class S>
__device__ void store_sums(const P& p, S& s, const Four& ddt_bias, float dA_log) {
  const HeadGates<BackwardArgs>& a = p.a;
#pragma unroll
  for (int n = 0; n < 4; ++n) s.ddt_bias[p.team][p.channel + n] = ddt_bias.x[n];
  double sum = dA_log;
#pragma unroll
  for (int offset = 1; offset < P::kChannels / 4; offset *= 2)
    sum += __shfl_xor_sync(~0u, sum, offset);
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
template <int kLanes, bool kPairs>
__global__ void __launch_bounds__(kThreads, 3)
    finish_gradients_kernel(const __grid_constant__ HeadGates<BackwardArgs> a) {
  auto& s = *reinterpret_cast<Shared<kLanes>*>(ptx::dynamic_shared());
  const Place<kLanes, kPairs> place(a, s.offsets);
  find_offsets(a, place.first, place.head, place.q_head, s.offsets);
  if (a.dq.base) finish_rows(place, kQ, a.q, kDq, a.dq, 0, a.gate.scale);
  if (a.dk.base) finish_rows(place, kK, a.k, kDk, a.dk, 1, 1);
  const int token = static_cast<int>(threadIdx.x);
  if (a.dbeta.base && token >= s.offsets.first && token < s.offsets.last) finish_beta(place, token);
  if (!a.dg.base && !a.sums) return;
  Four ddt_bias;
  float dA_log = 0;
  if (a.gate.gate_mode == GateMode::kLog)
    finish_gates<GateMode::kLog>(place, ddt_bias, dA_log);
  else if (a.gate.gate_mode == GateMode::kSoftplus)
    finish_gates<GateMode::kSoftplus>(place, ddt_bias, dA_log);
  else
    finish_gates<GateMode::kBounded>(place, ddt_bias, dA_log);
  if (a.sums) store_sums(place, s, ddt_bias, dA_log);
}

bool is_pairs(const RowView& view) {
  return !view.base || (view.type == Element::kBFloat16 && view.whole_words);
}

template <int kLanes, bool kPairs>
Status launch(const HeadGates<BackwardArgs>& args, const Launch& where) {
  return launch_kernel("backward_gradients", finish_gradients_kernel<kLanes, kPairs>,
                       pieces_of(args.num_tokens) * args.shape.HV, kThreads, sizeof(Shared<kLanes>),
                       where, args);
}

template <int kLanes>
Status launch(const HeadGates<BackwardArgs>& args, const Launch& where) {
  bool pairs = true;
  for (const RowView* view : {&args.q, &args.k, &args.dq, &args.dk})
    pairs = pairs && is_pairs(*view);
  if (args.gate_step != 0) pairs = pairs && is_pairs(args.g);
  if (args.dgate_step != 0) pairs = pairs && is_pairs(args.dg);
  return pairs ? launch<kLanes, true>(args, where) : launch<kLanes, false>(args, where);
}

}  // namespace

Status launch_finish_gradients(const HeadGates<BackwardArgs>& args, const Launch& where) {
  return args.shape.K <= 64 ? launch<16>(args, where) : launch<32>(args, where);
}

}  // namespace kda::cuda
