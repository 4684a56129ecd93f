// SPDX-License-Identifier: Apache-2.0
// A decode step of a layer in one kernel (include/kda/fused_decode.hpp). A block has one head of
// one sequence: a thread a channel of q, k, v, g and y, and its convolutions; a warp a quarter of
// the state, as in decode. What the threads make of a token goes through shared memory to the
// warps, and o from there to the threads, which divide by its norm. State and convolution states
// are read once and written once.
#include "cuda/decode/tile.cuh"
#include "cuda/launch/launch.cuh"
#include "cuda/layer/vectors.cuh"
#include "cuda/ptx/cache.cuh"

namespace kda::cuda::layer {
namespace {

constexpr int kD = 128;  // channels of a head, and threads of a block
constexpr int kWarps = kD / 32;
constexpr int kTaps = 4;
constexpr int kBefore = kTaps - 1;

struct Shared {
  Token<kD> token;
  float v[kD], o[kD];
  float qq[kWarps], kk[kWarps], qk[kWarps], oo[kWarps];  // sums of a warp
};

__device__ __forceinline__ float sum_of(const float (&parts)[kWarps]) {
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

/// Whose channel a thread has.
struct Place {
  int64_t n, channel, slot;
  bool has_state;
};

/// The convolution of one channel, with the inputs before the token in registers.
class Conv {
 public:
  __device__ __forceinline__ Conv(const FusedDecodeArgs& a, const DecodePart& part,
                                  const Place& place)
      : part_(part), place_(place), first_tap_(kTaps - a.width) {
    const int64_t channel = place.channel;
#pragma unroll
    for (int j = 0; j < kTaps; ++j)
      weight_[j] = j < first_tap_ ? 0
                                  : load_bits(part.weight.base, part.weight.type,
                                              channel * part.weight.strides[0] +
                                                  (j - first_tap_) * part.weight.strides[1]);
    bias_ = part.bias.base
                ? load_bits(part.bias.base, part.bias.type, channel * part.bias.strides[0])
                : 0;
#pragma unroll
    for (int j = 0; j < kBefore; ++j)
      before_[j] = j < first_tap_ ? 0 : old_bits(a.state_width - kBefore + j);
    load(0);
  }
  /// Asks for the input of token `t`.
  __device__ __forceinline__ void load(int t) {
    next_ = load_bits(part_.x.base, part_.x.type, x_at(t));
  }
  /// The inputs before the first token, once they are waited for.
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int j = 0; j < kBefore; ++j) inputs_[j] = float_of(before_[j], part_.state.type);
  }
  /// silu(conv) of the token whose input was asked for.
  __device__ __forceinline__ float step() {
    const float now = float_of(next_, part_.x.type);
    float p = part_.bias.base ? float_of(bias_, part_.bias.type) : 0.0f;
#pragma unroll
    for (int j = 0; j < kTaps; ++j)
      if (j >= first_tap_)
        p = fmaf(float_of(weight_[j], part_.weight.type),
                 j < kBefore ? inputs_[j < kBefore ? j : 0] : now, p);
#pragma unroll
    for (int j = 0; j + 1 < kBefore; ++j) inputs_[j] = inputs_[j + 1];
    inputs_[kBefore - 1] = now;
    return p * sigmoid(p);
  }
  /// In place: an entry is read from where it is or behind.
  __device__ __forceinline__ void store(const FusedDecodeArgs& a) const {
    if (a.state_width == a.width - 1) {  // they are in registers
#pragma unroll
      for (int j = 0; j < kBefore; ++j)
        if (j >= first_tap_)
          store_element(part_.state.base, part_.state.type, state_at(j - first_tap_), inputs_[j]);
      return;
    }
    for (int64_t e = 0; e < a.state_width; ++e) {
      const int64_t t = a.num_tokens - a.state_width + e;
      const float x = t >= 0
                          ? float_of(load_bits(part_.x.base, part_.x.type, x_at(t)), part_.x.type)
                          : float_of(old_bits(a.state_width + t), part_.state.type);
      store_element(part_.state.base, part_.state.type, state_at(e), x);
    }
  }

 private:
  __device__ __forceinline__ int64_t x_at(int64_t t) const {
    const auto& strides = part_.x.strides;
    return place_.n * strides[0] + t * strides[1] + place_.channel * strides[2];
  }
  __device__ __forceinline__ int64_t state_at(int64_t entry) const {
    const auto& strides = part_.state.strides;
    return place_.slot * strides[0] + place_.channel * strides[1] + entry * strides[2];
  }
  __device__ __forceinline__ uint32_t old_bits(int64_t entry) const {
    return place_.has_state ? load_bits(part_.state.base, part_.state.type, state_at(entry)) : 0;
  }
  const DecodePart& part_;
  const Place& place_;
  const int first_tap_;
  uint32_t weight_[kTaps], before_[kBefore], bias_, next_;
  float inputs_[kBefore];
};

__device__ __forceinline__ int64_t row_of(const View& view, int64_t n, int t, int64_t head) {
  return n * view.strides[0] + t * view.strides[1] + head * view.strides[2];
}

/// The state that a block behind the running ones will read, for the L2.
__device__ __forceinline__ void prefetch_ahead(const FusedDecodeArgs& a) {
  const unsigned block = blockIdx.x + a.ahead;
  if (threadIdx.x != 0 || a.ahead == 0 || block >= gridDim.x) return;
  const int64_t n = a.heads.quotient(block);
  const int64_t slot = state_slot(a.states, n);
  if (slot < 0) return;
  const int size = a.states.bf16 ? 2 : 4;
  ptx::cp_async_bulk_prefetch_l2(
      reinterpret_cast<uintptr_t>(a.states.base) +
          static_cast<uintptr_t>(state_offset(a.states, slot, a.heads.remainder(block), 0, 0) *
                                 size),
      kD * kD * size);
}

template <Access kAccess>
__global__ void __launch_bounds__(kD, 2)
    fused_decode_kernel(const __grid_constant__ FusedDecodeArgs a) {
  using Tile = typename TileOf<kD, kAccess, true>::Type;
  __shared__ Shared shared;
  const int c = static_cast<int>(threadIdx.x), warp = c / 32, lane = c % 32;
  const int64_t n = a.heads.quotient(blockIdx.x), head = a.heads.remainder(blockIdx.x);
  const int64_t slot = a.states.indices ? a.states.indices[n] : n;
  if (slot < a.states.first_slot || slot >= a.states.num_slots) {
    for (int t = 0; t < a.num_tokens; ++t)
      store_element(a.y.base, a.y.type, row_of(a.y, n, t, head) + c * a.y.strides[3], 0.0f);
    return;
  }
  const bool has_state = !a.states.mask || a.states.mask[n] != 0;
  const int64_t channel = head * kD + c;
  const Place place{n, channel, slot, has_state};
  Conv q(a, a.q, place), k(a, a.k, place), v(a, a.v, place);
  uint32_t raw_g, raw_beta, raw_gate = 0;
  const auto load_token = [&](int t) {
    raw_g = load_bits(a.g.base, a.g.type, row_of(a.g, n, t, head) + c * a.g.strides[3]);
    raw_beta = load_bits(a.beta.base, a.beta.type, row_of(a.beta, n, t, head));
    if (a.output_gate.base)
      raw_gate = load_bits(a.output_gate.base, a.output_gate.type,
                           row_of(a.output_gate, n, t, head) + c * a.output_gate.strides[3]);
  };
  load_token(0);
  const bool has_gate = a.gate.gate_mode != GateMode::kLog;
  const float A_log = has_gate && a.gate.A_log ? a.gate.A_log[head * a.gate.stride_A] : 0.0f;
  const float g_bias =
      has_gate && a.gate.dt_bias ? a.gate.dt_bias[channel * a.gate.stride_dt] : 0.0f;
  const uint32_t raw_weight = a.norm_weight.base ? load_bits(a.norm_weight.base, a.norm_weight.type,
                                                             c * a.norm_weight.strides[0])
                                                 : 0;
  kda::cuda::Shape shape;
  shape.K = shape.V = kD;
  Tile tile(warp * 32);
  if (!has_state)
    tile.clear();
  else if (a.states.bf16)
    tile.template load<true>(a.states, shape, slot, head);
  else
    tile.template load<false>(a.states, shape, slot, head);
  prefetch_ahead(a);
  q.begin(), k.begin(), v.begin();
  const float rate = expf(A_log);
  const float weight = a.norm_weight.base ? float_of(raw_weight, a.norm_weight.type) : 1.0f;
  for (int t = 0; t < a.num_tokens; ++t) {
    const float q_c = q.step(), k_c = k.step(), v_c = v.step();
    const float decay = exp2f(log2_decay_exact(a.gate, float_of(raw_g, a.g.type), g_bias, rate));
    const float beta = beta_value(a.gate, float_of(raw_beta, a.beta.type));
    const float gate =
        a.output_gate.base ? activate(a.activation, float_of(raw_gate, a.output_gate.type)) : 1.0f;
    const float qq = sum_over(q_c * q_c, 1, 32), kk = sum_over(k_c * k_c, 1, 32),
                qk = sum_over(q_c * k_c, 1, 32);
    if (lane == 0) shared.qq[warp] = qq, shared.kk[warp] = kk, shared.qk[warp] = qk;
    if (t + 1 < a.num_tokens) load_token(t + 1), q.load(t + 1), k.load(t + 1), v.load(t + 1);
    __syncthreads();
    float q_scale = 1, k_scale = 1;
    if (a.gate.l2norm) {
      q_scale = 1.0f / sqrtf(sum_of(shared.qq) + 1e-6f);
      k_scale = 1.0f / sqrtf(sum_of(shared.kk) + 1e-6f);
    }
    shared.token.decay[c] = decay;
    shared.token.q[c] = q_c * q_scale, shared.token.k[c] = k_c * k_scale;
    shared.v[c] = v_c;
    if (c == 0) shared.token.qk = sum_of(shared.qk) * q_scale * k_scale;
    __syncthreads();
    float values[Tile::kOwned], o[Tile::kOwned];
#pragma unroll
    for (int i = 0; i < Tile::kOwned; ++i) values[i] = shared.v[tile.value(i)];
    tile.step(shared.token, beta, a.gate.scale, values, o);
#pragma unroll
    for (int i = 0; i < Tile::kOwned; ++i)
      if (tile.writes_output()) shared.o[tile.value(i)] = o[i];
    __syncthreads();
    float y = shared.o[c];
    if (a.norm) {
      const float oo = sum_over(y * y, 1, 32);
      if (lane == 0) shared.oo[warp] = oo;
      __syncthreads();
      y *= 1.0f / sqrtf(sum_of(shared.oo) / kD + a.norm_eps);
    }
    store_element(a.y.base, a.y.type, row_of(a.y, n, t, head) + c * a.y.strides[3],
                  y * weight * gate);
  }
  if (a.states.bf16)
    tile.template store<true>(a.states, shape, slot, head);
  else
    tile.template store<false>(a.states, shape, slot, head);
  q.store(a), k.store(a), v.store(a);
}

}  // namespace

Status launch_fused_decode(const FusedDecodeArgs& args, const Launch& where) {
  const int64_t blocks = args.num_sequences * args.heads.value;
  const auto run = [&](auto kernel) {
    return launch_kernel("fused_decode", kernel, blocks, kD, 0, where, args);
  };
  return args.states.vk ? run(fused_decode_kernel<Access::kVectorsVK>)
                        : run(fused_decode_kernel<Access::kVectorsKV>);
}

}  // namespace kda::cuda::layer
