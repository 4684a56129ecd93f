// SPDX-License-Identifier: Apache-2.0
// A decode step of a layer in one kernel (include/kda/fused_decode.hpp). A block has one head of
// one sequence. A thread has one channel: half of them that of q and k and their convolutions, half
// that of v, of the gates and of y. A warp has an eighth of the state, as in decode. What the
// threads make of a token goes through shared memory to the warps, and o from there to the threads
// of y, which divide by its norm. State and convolution states are read once and written once.
#include "cuda/decode/tile.cuh"
#include "cuda/launch/launch.cuh"
#include "cuda/layer/vectors.cuh"
#include "cuda/ptx/cache.cuh"

namespace kda::cuda::layer {
namespace {

constexpr int kD = 128;           // channels of a head
constexpr int kThreads = 2 * kD;  // of a block: of q and k, then of v and y
constexpr int kWarps = kD / 32;   // of a half
constexpr int kTaps = 4;
constexpr int kBefore = kTaps - 1;

/// Places in FusedDecodeArgs::parts.
enum Part { kQ, kK, kV };

// A thread reads what it has written itself: these take no registers while the state does.

/// Inputs that a convolution keeps, fp32.
struct Taps {
  float weight[kTaps][kD], bias[kD];
  float inputs[kBefore][kD];  // before the token
};

struct GateParameters {
  float rate[kD], bias[kD], norm_weight[kD];
};

struct Shared {
  Token<kD> token;
  float v[kD], o[kD];
  float squares[2][kWarps], qk[kWarps];  // sums of a warp
  float beta;
  Taps taps[3];
  GateParameters gates;
};

__device__ __forceinline__ float sum_of(const float (&parts)[kWarps]) {
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}
/// Sums over all channels, of which a lane has 4.
__device__ __forceinline__ float sum_of_squares(const float (&x)[kD]) {
  const float4 y = reinterpret_cast<const float4*>(x)[threadIdx.x % 32];
  return sum_over(fmaf(y.x, y.x, y.y * y.y) + fmaf(y.z, y.z, y.w * y.w), 1, 32);
}

/// Elements of a view, `stride` apart. Products with strides are long: there is one a row.
class Elements {
 public:
  __device__ __forceinline__ Elements(const View& view, int64_t at, int64_t stride)
      : type_(view.type) {
    const int size = type_ == Element::kFloat32 ? 4 : 2;
    first_ = static_cast<char*>(view.base) + at * size, step_ = stride * size;
  }
  Elements() = default;
  __device__ __forceinline__ Elements moved(int64_t elements) const {
    Elements to = *this;
    to.first_ += elements * (type_ == Element::kFloat32 ? 4 : 2);
    return to;
  }
  __device__ __forceinline__ uint32_t bits(int i) const {
    return load_bits(first_ + i * step_, type_, 0);
  }
  __device__ __forceinline__ float value(uint32_t bits) const { return float_of(bits, type_); }
  __device__ __forceinline__ void store(int i, float x) const {
    store_element(first_ + i * step_, type_, 0, x);
  }

 private:
  char* first_;
  int64_t step_;
  Element type_;
};

/// A channel's elements of the tokens of a head.
__device__ __forceinline__ Elements row_of(const View& view, int n, int head, int c) {
  return {view, n * view.strides[0] + head * view.strides[2] + c * view.strides[3],
          view.strides[1]};
}

/// The convolution of one channel.
class Conv {
 public:
  __device__ __forceinline__ Conv(const FusedDecodeArgs& a, const DecodePart& part, Taps& taps,
                                  int n, int channel)
      : part_(part),
        taps_(taps),
        n_(n),
        channel_(channel),
        c_(channel % kD),
        first_tap_(kTaps - a.width) {}

  /// Asks for weights and bias, and finds all of the way to the state but for its slot.
  __device__ __forceinline__ void load_weights(const FusedDecodeArgs& a) {
    const View& view = part_.weight;
    const Elements weight(view, channel_ * view.strides[0], view.strides[1]);
#pragma unroll
    for (int j = 0; j < kTaps; ++j)
      if (j >= first_tap_) weight_[j] = weight.bits(j - first_tap_);
    if (part_.bias.base)
      bias_ = load_bits(part_.bias.base, part_.bias.type, channel_ * part_.bias.strides[0]);
    before_slot_ = state_of(0).moved((a.state_width - kBefore) * part_.state.strides[2]);
  }
  /// Asks for the input of token `t`.
  __device__ __forceinline__ void load(int t) { next_ = x().bits(t); }
  /// Asks for the inputs before the first token.
  __device__ __forceinline__ void load_before(int slot, bool has_state) {
    const Elements state = before_slot_.moved(slot * part_.state.strides[0]);
#pragma unroll
    for (int j = 0; j < kBefore; ++j)
      if (j >= first_tap_) before_[j] = has_state ? state.bits(j) : 0;
  }
  /// Waits for all of that.
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int j = 0; j < kTaps; ++j)
      if (j >= first_tap_) taps_.weight[j][c_] = float_of(weight_[j], part_.weight.type);
    taps_.bias[c_] = part_.bias.base ? float_of(bias_, part_.bias.type) : 0.0f;
#pragma unroll
    for (int j = 0; j < kBefore; ++j)
      if (j >= first_tap_) taps_.inputs[j][c_] = float_of(before_[j], part_.state.type);
  }
  /// silu(conv) of the token whose input was asked for.
  __device__ __forceinline__ float step() {
    const float now = float_of(next_, part_.x.type);
    float p = taps_.bias[c_];
#pragma unroll
    for (int j = 0; j < kBefore; ++j)
      if (j >= first_tap_) {
        p = fmaf(taps_.weight[j][c_], taps_.inputs[j][c_], p);
        taps_.inputs[j][c_] = j + 1 < kBefore ? taps_.inputs[j + 1][c_] : now;
      }
    p = fmaf(taps_.weight[kBefore][c_], now, p);
    return p * sigmoid(p);
  }
  /// In place: an entry is read from where it is or behind.
  __device__ __forceinline__ void store(const FusedDecodeArgs& a, int slot, bool has_state) const {
    const Elements state = state_of(slot);
    if (a.state_width == a.width - 1) {
#pragma unroll
      for (int j = 0; j < kBefore; ++j)
        if (j >= first_tap_) state.store(j - first_tap_, taps_.inputs[j][c_]);
      return;
    }
    const int width = static_cast<int>(a.state_width);
    for (int e = 0; e < width; ++e) {
      const int t = a.num_tokens - width + e;
      float value = 0;
      if (t >= 0)
        value = x().value(x().bits(t));
      else if (has_state)
        value = state.value(state.bits(width + t));
      state.store(e, value);
    }
  }

 private:
  __device__ __forceinline__ Elements x() const {
    const View& view = part_.x;
    return {view, n_ * view.strides[0] + channel_ * view.strides[2], view.strides[1]};
  }
  __device__ __forceinline__ Elements state_of(int slot) const {
    const View& view = part_.state;
    return {view, slot * view.strides[0] + channel_ * view.strides[1], view.strides[2]};
  }
  const DecodePart& part_;
  Taps& taps_;
  const int n_, channel_, c_, first_tap_;
  Elements before_slot_;
  uint32_t weight_[kTaps], before_[kBefore], bias_, next_;
};

/// The gates of one channel: of the state, of the step and of the output.
class Gates {
 public:
  __device__ __forceinline__ Gates(const FusedDecodeArgs& a, GateParameters& parameters, int n,
                                   int head, int c)
      : a_(a), parameters_(parameters), n_(n), head_(head), c_(c) {}

  /// Asks for what all tokens share.
  __device__ __forceinline__ void load_parameters() {
    const GateView& gate = a_.gate;
    const bool has_gate = gate.gate_mode != GateMode::kLog;
    A_log_ = has_gate && gate.A_log ? gate.A_log[head_ * gate.stride_A] : 0.0f;
    bias_ = has_gate && gate.dt_bias ? gate.dt_bias[(head_ * kD + c_) * gate.stride_dt] : 0.0f;
    if (a_.norm_weight.base)
      weight_ = load_bits(a_.norm_weight.base, a_.norm_weight.type, c_ * a_.norm_weight.strides[0]);
  }
  /// Asks for those of token `t`.
  __device__ __forceinline__ void load(int t) {
    g_ = row_of(a_.g, n_, head_, c_).bits(t);
    beta_ = row_of(a_.beta, n_, head_, 0).bits(t);
    if (a_.output_gate.base) output_ = row_of(a_.output_gate, n_, head_, c_).bits(t);
  }
  /// Waits for what all tokens share.
  __device__ __forceinline__ void begin() {
    parameters_.rate[c_] = expf(A_log_), parameters_.bias[c_] = bias_;
    parameters_.norm_weight[c_] =
        a_.norm_weight.base ? float_of(weight_, a_.norm_weight.type) : 1.0f;
  }
  __device__ __forceinline__ float decay() const {
    return exp2f(log2_decay_exact(a_.gate, float_of(g_, a_.g.type), parameters_.bias[c_],
                                  parameters_.rate[c_]));
  }
  __device__ __forceinline__ float beta() const {
    return beta_value(a_.gate, float_of(beta_, a_.beta.type));
  }
  /// Returns the factor of the normed o.
  __device__ __forceinline__ float of_output() const {
    const float weight = parameters_.norm_weight[c_];
    return a_.output_gate.base
               ? weight * activate(a_.activation, float_of(output_, a_.output_gate.type))
               : weight;
  }

 private:
  const FusedDecodeArgs& a_;
  GateParameters& parameters_;
  const int n_, head_, c_;
  float A_log_, bias_;
  uint32_t weight_, g_, beta_, output_;
};

/// Prefetches what a later block will read to the L2: one warp asks for its state and for a row of
/// the rest a lane. Memory that is busy with stores of others answers late, and a block has nothing
/// else to do.
class Ahead {
 public:
  __device__ __forceinline__ explicit Ahead(const FusedDecodeArgs& a) {
    const unsigned block = blockIdx.x + a.ahead;
    if (a.ahead == 0 || block >= gridDim.x || threadIdx.x < kThreads - 32) return;
    n_ = static_cast<int>(a.heads.quotient(block));
    head_ = static_cast<int>(a.heads.remainder(block));
    slot_ = a.states.indices ? a.states.indices[n_] : n_;
  }
  __device__ __forceinline__ void prefetch(const FusedDecodeArgs& a) const {
    if (lacks_slot(a.states, slot_)) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane < 9) {
      const View& view = a.parts[lane / 3].state;
      const int64_t entry = a.state_width - kBefore + lane % 3;
      if (entry >= 0)
        row(view, slot_ * view.strides[0] + entry * view.strides[2], head_ * kD, view.strides[1]);
    } else if (lane < 12) {
      const View& view = a.parts[lane - 9].x;
      row(view, n_ * view.strides[0], head_ * kD, view.strides[2]);
    } else if (lane < 14) {
      const View& view = lane == 12 ? a.g : a.output_gate;
      if (view.base) row(view, n_ * view.strides[0] + head_ * view.strides[2], 0, view.strides[3]);
    } else if (lane == 14) {
      const int size = a.states.bf16 ? 2 : 4;
      ptx::cp_async_bulk_prefetch_l2(
          reinterpret_cast<uintptr_t>(a.states.base) +
              static_cast<uintptr_t>(state_offset(a.states, slot_, head_, 0, 0) * size),
          kD * kD * size);
    }
  }

 private:
  /// Channels that lie side by side.
  __device__ __forceinline__ static void row(const View& view, int64_t at, int channel,
                                             int64_t stride) {
    const int size = view.type == Element::kFloat32 ? 4 : 2;
    if (stride == 1)
      ptx::cp_async_bulk_prefetch_l2(
          reinterpret_cast<uintptr_t>(view.base) + static_cast<uintptr_t>((at + channel) * size),
          kD * size);
  }
  int n_ = 0, head_ = 0, slot_ = -1;
};

template <Access kAccess>
__global__ void __launch_bounds__(kThreads, 2)
    fused_decode_kernel(const __grid_constant__ FusedDecodeArgs a) {
  using Tile = typename TileOf<kD, kAccess, true, kD * kD / kThreads>::Type;
  __shared__ Shared shared;
  const int c = static_cast<int>(threadIdx.x) % kD, lane = c % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const bool has_qk = threadIdx.x < kD, has_y = !has_qk;
  const int n = static_cast<int>(a.heads.quotient(blockIdx.x));
  const int head = static_cast<int>(a.heads.remainder(blockIdx.x));
  const int slot = a.states.indices ? a.states.indices[n] : n;
  const bool has_state = !a.states.mask || a.states.mask[n] != 0;
  const Ahead ahead(a);
  const int first = has_qk ? kQ : kV;
  Conv q_or_v(a, a.parts[first], shared.taps[first], n, head * kD + c);
  Conv k(a, a.parts[kK], shared.taps[kK], n, head * kD + c);
  Gates gates(a, shared.gates, n, head, c);
  const auto load_token = [&](int t) {
    q_or_v.load(t);
    has_qk ? k.load(t) : gates.load(t);
  };
  q_or_v.load_weights(a);
  has_qk ? k.load_weights(a) : gates.load_parameters();
  load_token(0);  // before the slot is there
  if (lacks_slot(a.states, slot)) {
    for (int t = 0; t < a.num_tokens && has_y; ++t) row_of(a.y, n, head, c).store(t, 0.0f);
    return;
  }
  q_or_v.load_before(slot, has_state);
  if (has_qk) k.load_before(slot, has_state);
  kda::cuda::Shape shape;
  shape.K = shape.V = kD;
  Tile tile(warp * (kD * 32 / kThreads));
  if (!has_state)
    tile.clear();
  else if (a.states.bf16)
    tile.template load<true>(a.states, shape, slot, head);
  else
    tile.template load<false>(a.states, shape, slot, head);
  ahead.prefetch(a);
  q_or_v.begin();
  has_qk ? k.begin() : gates.begin();
  for (int t = 0; t < a.num_tokens; ++t) {
    const float x = q_or_v.step();
    float k_c = 0, factor = 0;
    if (has_qk) {
      k_c = k.step();
      const float qq = sum_over(x * x, 1, 32), kk = sum_over(k_c * k_c, 1, 32),
                  qk = sum_over(x * k_c, 1, 32);
      if (lane == 0)
        shared.squares[kQ][warp] = qq, shared.squares[kK][warp] = kk, shared.qk[warp] = qk;
    } else {
      shared.v[c] = x;
      shared.token.decay[c] = gates.decay();
      if (c == 0) shared.beta = gates.beta();
      factor = gates.of_output();
    }
    if (t + 1 < a.num_tokens) load_token(t + 1);
    __syncthreads();
    if (has_qk) {
      const auto scale = [&](Part of) {
        return a.gate.l2norm ? 1.0f / sqrtf(sum_of(shared.squares[of]) + 1e-6f) : 1.0f;
      };
      const float q_scale = scale(kQ), k_scale = scale(kK);
      shared.token.q[c] = x * q_scale, shared.token.k[c] = k_c * k_scale;
      if (c == 0) shared.token.qk = sum_of(shared.qk) * q_scale * k_scale;
    }
    __syncthreads();
    float values[Tile::kOwned], o[Tile::kOwned];
#pragma unroll
    for (int i = 0; i < Tile::kOwned; ++i) values[i] = shared.v[tile.value(i)];
    tile.step(shared.token, shared.beta, a.gate.scale, values, o);
#pragma unroll
    for (int i = 0; i < Tile::kOwned; ++i)
      if (tile.writes_output()) shared.o[tile.value(i)] = o[i];
    if (t + 1 == a.num_tokens) {  // on its way while o is normed
      if (a.states.bf16)
        tile.template store<true>(a.states, shape, slot, head);
      else
        tile.template store<false>(a.states, shape, slot, head);
    }
    __syncthreads();
    if (!has_y) continue;
    const float norm = a.norm ? 1.0f / sqrtf(sum_of_squares(shared.o) / kD + a.norm_eps) : 1.0f;
    row_of(a.y, n, head, c).store(t, shared.o[c] * norm * factor);
  }
  q_or_v.store(a, slot, has_state);
  if (has_qk) k.store(a, slot, has_state);
}

}  // namespace

Status launch_fused_decode(const FusedDecodeArgs& args, const Launch& where) {
  const int64_t blocks = args.num_sequences * args.heads.value;
  const auto run = [&](auto kernel) {
    return launch_kernel("fused_decode", kernel, blocks, kThreads, 0, where, args);
  };
  return args.states.vk ? run(fused_decode_kernel<Access::kVectorsVK>)
                        : run(fused_decode_kernel<Access::kVectorsKV>);
}

}  // namespace kda::cuda::layer
