// SPDX-License-Identifier: Apache-2.0
// The causal short convolution (include/kda/short_conv.hpp) and its gradients. A thread has kVector
// neighbouring channels and goes along the tokens of a run with the inputs of the taps in
// registers, so that each input is read once, but for the few in front of a run. The sequences of a
// run are looked up in cu_seqlens; a sequence's states belong to the thread where it begins, which
// reads the old state before it writes the new one. Sums of gradients go to memory run by run.
#include "cuda/launch/launch.cuh"
#include "cuda/layer/vectors.cuh"

namespace kda::cuda::layer {
namespace {

constexpr int kThreads = 128;
constexpr int kTaps = 4;  // a narrower convolution leaves out the first ones
constexpr int kBefore = kTaps - 1;

struct Sequence {
  int64_t n, row, begin, length;
  int64_t initial, final_state;  // slots; -1: none
};

__device__ __forceinline__ int64_t length_of(const Runs& r, int64_t i) {
  const int64_t entry = r.wide_lengths ? static_cast<const int64_t*>(r.lengths)[i]
                                       : static_cast<const int32_t*>(r.lengths)[i];
  return max(int64_t{0}, min(entry, r.num_tokens));
}

__device__ __forceinline__ int64_t slot_of(const ConvStates& states, int64_t first_slot,
                                           int64_t n) {
  if (!states.view.base) return -1;
  if (!states.indices) return n;
  const int64_t slot = states.indices[n];
  return slot < first_slot || slot >= states.num_slots ? -1 : slot;
}

__device__ __forceinline__ Sequence sequence_of(const ShortConvArgs& a, int64_t n) {
  Sequence s{n, n, 0, a.runs.num_tokens, -1, slot_of(a.final_state, a.first_slot, n)};
  if (a.runs.lengths) {
    s.row = 0, s.begin = length_of(a.runs, n);
    s.length = max(int64_t{0}, length_of(a.runs, n + 1) - s.begin);
  }
  if (!a.has_state || a.has_state[n]) s.initial = slot_of(a.initial, a.first_slot, n);
  return s;
}

/// body(sequence, first, last, starts) for what run `unit` has of each sequence: tokens [first,
/// last) of it, counted from its begin.
template <class Body>
__device__ __forceinline__ void for_each_part(const ShortConvArgs& a, int64_t unit, Body&& body) {
  const Runs& r = a.runs;
  const int64_t row = unit / r.runs, index = unit % r.runs;
  const int64_t first = index * r.run, last = min(first + r.run, r.num_tokens);
  if (!r.lengths) return body(sequence_of(a, row), first, last, index == 0);
  int64_t n = 0, behind = r.num_sequences;  // the first sequence that begins here or later
  while (n < behind) {
    const int64_t middle = (n + behind) / 2;
    if (length_of(r, middle) < first)
      n = middle + 1;
    else
      behind = middle;
  }
  if (n > 0) {
    const Sequence s = sequence_of(a, n - 1);
    const int64_t end = min(last, s.begin + s.length);
    if (end > first) body(s, first - s.begin, end - s.begin, false);
  }
  const bool is_last = index + 1 == r.runs;  // it has the empty sequences at the end too
  for (; n < r.num_sequences; ++n) {
    const Sequence s = sequence_of(a, n);
    if (!is_last && s.begin >= last) return;
    body(s, int64_t{0}, max(int64_t{0}, min(last - s.begin, s.length)), true);
  }
}

/// The channels of a thread: their taps, and where their elements lie.
template <int kVector>
struct Channels {
  const ShortConvArgs& a;
  const int64_t first;
  float weight[kTaps][kVector];
  float bias[kVector] = {};

  __device__ __forceinline__ Channels(const ShortConvArgs& args, int64_t first_channel)
      : a(args), first(first_channel) {
#pragma unroll
    for (int j = 0; j < kTaps; ++j)
#pragma unroll
      for (int i = 0; i < kVector; ++i) weight[j][i] = 0;
#pragma unroll
    for (int j = 0; j < kTaps; ++j)
      if (used(j))
        load_apart(a.weight, first * a.weight.strides[0] + tap(j) * a.weight.strides[1],
                   a.weight.strides[0], weight[j]);
    if (a.bias.base) load_apart(a.bias, first * a.bias.strides[0], a.bias.strides[0], bias);
  }
  __device__ __forceinline__ int tap(int j) const { return j - (kTaps - a.width); }
  __device__ __forceinline__ bool used(int j) const { return tap(j) >= 0; }

  __device__ __forceinline__ int64_t row(const View& view, const Sequence& s, int64_t token) const {
    return s.row * view.strides[0] + (s.begin + token) * view.strides[1] + first * view.strides[2];
  }
  __device__ __forceinline__ int64_t entry(const View& view, int64_t slot, int64_t e) const {
    return slot * view.strides[0] + first * view.strides[1] + e * view.strides[2];
  }
  /// Entry `e` of the state that a sequence begins with.
  __device__ __forceinline__ void old_entry(const Sequence& s, int64_t e,
                                            float (&x)[kVector]) const {
#pragma unroll
    for (float& value : x) value = 0;
    if (s.initial >= 0 && e >= 0)
      load_apart(a.initial.view, entry(a.initial.view, s.initial, e), a.initial.view.strides[1], x);
  }
  /// Input `t` of a sequence, those below 0 from its state.
  __device__ __forceinline__ void input(const Sequence& s, int64_t t, float (&x)[kVector]) const {
    if (t >= 0)
      load_vector(a.x, row(a.x, s, t), x);
    else
      old_entry(s, a.state_width + t, x);
  }
  /// The inputs of the taps before token `t`.
  __device__ __forceinline__ void before(const Sequence& s, int64_t t,
                                         float (&inputs)[kBefore][kVector]) const {
#pragma unroll
    for (int j = 0; j < kBefore; ++j)
      if (used(j))
        input(s, t - kBefore + j, inputs[j]);
      else
        for (float& value : inputs[j]) value = 0;
  }
  /// bias + sum_j weight_j input_j, and the inputs move on by one.
  __device__ __forceinline__ void convolve(float (&inputs)[kBefore][kVector],
                                           const float (&now)[kVector], float (&p)[kVector]) const {
#pragma unroll
    for (int i = 0; i < kVector; ++i) p[i] = bias[i];
#pragma unroll
    for (int j = 0; j < kTaps; ++j)
      if (used(j))
#pragma unroll
        for (int i = 0; i < kVector; ++i)
          p[i] = fmaf(weight[j][i], j < kBefore ? inputs[j < kBefore ? j : 0][i] : now[i], p[i]);
  }
};

template <int kVector>
__device__ __forceinline__ void move_on(float (&rows)[kBefore][kVector],
                                        const float (&now)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
#pragma unroll
    for (int j = 0; j + 1 < kBefore; ++j) rows[j][i] = rows[j + 1][i];
    rows[kBefore - 1][i] = now[i];
  }
}

/// kCount rows from `at` on, all asked for at once. One channel whose tokens lie side by side is
/// read 16 bytes at a time.
template <int kVector, int kCount>
__device__ __forceinline__ void load_rows(const View& view, int64_t at, int64_t count,
                                          Raw<kVector> (&rows)[kCount]) {
  if constexpr (kVector == 1) {
    static_assert(kCount == 8);
    const int size = view.type == Element::kFloat32 ? 4 : 2;
    if (view.strides[1] == 1 && count >= kCount &&
        (reinterpret_cast<uintptr_t>(view.base) + at * size) % 16 == 0) {
      Raw<kCount> together;
      together.load(view, at);
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        rows[i].words[0] =
            size == 4 ? together.words[i] : together.words[i / 2] >> 16 * (i % 2) & 0xffff;
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (i < count) rows[i].load(view, at + i * view.strides[1]);
}

/// What a block computes: a run, and some of the channels.
struct Unit {
  int64_t run, first_channel;
};
template <int kVector>
__device__ __forceinline__ Unit unit_of(int64_t channels) {
  const int64_t of_run =
      (channels + kVector * int64_t{blockDim.x} - 1) / (kVector * int64_t{blockDim.x});
  return {blockIdx.x / of_run, (blockIdx.x % of_run * int64_t{blockDim.x} + threadIdx.x) * kVector};
}

template <int kVector>
__global__ void __launch_bounds__(kThreads)
    short_conv_kernel(const __grid_constant__ ShortConvArgs a) {
  constexpr int kAhead = kVector == 1 ? 8 : 4;
  const Unit unit = unit_of<kVector>(a.channels);
  if (unit.first_channel >= a.channels) return;
  const Channels<kVector> channels(a, unit.first_channel);
  for_each_part(a, unit.run, [&](const Sequence& s, int64_t first, int64_t last, bool starts) {
    float inputs[kBefore][kVector];
    if (first < last) channels.before(s, first, inputs);
    for (int64_t t = first; t < last; t += kAhead) {
      Raw<kVector> raw[kAhead];
      load_rows(a.x, channels.row(a.x, s, t), last - t, raw);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (t + i >= last) break;
        float now[kVector], p[kVector];
        raw[i].convert(a.x.type, now);
        channels.convolve(inputs, now, p);
        move_on(inputs, now);
        if (a.silu)
#pragma unroll
          for (float& value : p) value *= sigmoid(value);
        store_vector(a.y, channels.row(a.y, s, t + i), p);
      }
    }
    if (!starts || s.final_state < 0) return;
    // In place too: an entry is read from where it is or behind.
    for (int64_t e = 0; e < a.state_width; ++e) {
      float x[kVector];
      channels.input(s, s.length - a.state_width + e, x);
      const View& view = a.final_state.view;
      store_apart(view, channels.entry(view, s.final_state, e), view.strides[1], x);
    }
  });
}

// ---- gradients ----------------------------------------------------------------------------------

/// dy act'(p) of a token whose inputs are in registers.
template <int kVector>
__device__ __forceinline__ void slope_of(const ShortConvBackwardArgs& a,
                                         const Channels<kVector>& channels, const Sequence& s,
                                         int64_t t, float (&inputs)[kBefore][kVector],
                                         const float (&now)[kVector], float (&slope)[kVector]) {
#pragma unroll
  for (float& value : slope) value = 0;
  if (!a.dy.base) return;
  load_vector(a.dy, channels.row(a.dy, s, t), slope);
  if (!a.forward.silu) return;
  float p[kVector];
  channels.convolve(inputs, now, p);
#pragma unroll
  for (int i = 0; i < kVector; ++i) slope[i] *= activate_with_slope(Activation::kSilu, p[i]).slope;
}

/// x += entry `e` of the gradient of a sequence's final state, if there is one.
template <int kVector>
__device__ __forceinline__ void add_final(const ShortConvBackwardArgs& a,
                                          const Channels<kVector>& channels, const Sequence& s,
                                          int64_t e, float (&x)[kVector]) {
  if (!a.d_final.base || e < 0) return;
  float more[kVector];
  load_apart(a.d_final, channels.entry(a.d_final, s.n, e), a.d_final.strides[1], more);
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] += more[i];
}

/// The gradient of the state that a sequence begins with: by the slopes of its first tokens.
template <int kVector>
__device__ void store_initial(const ShortConvBackwardArgs& a, const Channels<kVector>& channels,
                              const Sequence& s) {
  const int64_t S = a.forward.state_width;
  float inputs[kBefore][kVector], slopes[kBefore][kVector] = {};
  channels.before(s, 0, inputs);
#pragma unroll
  for (int t = 0; t < kBefore; ++t) {
    if (t >= s.length) break;
    float now[kVector];
    channels.input(s, t, now);
    slope_of(a, channels, s, t, inputs, now, slopes[t]);
    move_on(inputs, now);
  }
  for (int64_t e = 0; e < S; ++e) {
    float x[kVector] = {};
    if (s.initial >= 0) {
#pragma unroll
      for (int t = 0; t < kBefore; ++t)
#pragma unroll
        for (int j = 0; j < kBefore; ++j)  // input e - S is under tap j of token t
          if (channels.used(j) && e - S == t - kBefore + j)
#pragma unroll
            for (int i = 0; i < kVector; ++i)
              x[i] = fmaf(channels.weight[j][i], slopes[t][i], x[i]);
      add_final(a, channels, s, e - s.length, x);
    }
    store_apart(a.d_initial, channels.entry(a.d_initial, s.n, e), a.d_initial.strides[1], x);
  }
}

template <int kVector>
__global__ void __launch_bounds__(kThreads)
    short_conv_backward_kernel(const __grid_constant__ ShortConvBackwardArgs a) {
  const ShortConvArgs& f = a.forward;
  const Unit unit = unit_of<kVector>(f.channels);
  if (unit.first_channel >= f.channels) return;
  const Channels<kVector> channels(f, unit.first_channel);
  float sums[kTaps + 1][kVector] = {};
  for_each_part(f, unit.run, [&](const Sequence& s, int64_t first, int64_t last, bool starts) {
    float inputs[kBefore][kVector], slopes[kBefore][kVector] = {};
    if (first < last) channels.before(s, first, inputs);
    // Behind the part are the other outputs that its inputs have a share in.
    for (int64_t t = first; first < last && t < last + f.width - 1; ++t) {
      float slope[kVector] = {};
      if (t < s.length) {
        float now[kVector];
        load_vector(f.x, channels.row(f.x, s, t), now);
        slope_of(a, channels, s, t, inputs, now, slope);
        if (t < last)
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
#pragma unroll
            for (int j = 0; j < kBefore; ++j) sums[j][i] = fmaf(slope[i], inputs[j][i], sums[j][i]);
            sums[kBefore][i] = fmaf(slope[i], now[i], sums[kBefore][i]);
            sums[kTaps][i] += slope[i];
          }
        move_on(inputs, now);
      }
      const int64_t of = t - (f.width - 1);  // the input whose last output this is
      if (a.dx.base && of >= first) {
        float x[kVector];
        // Output of + i has it under tap kTaps - 1 - i; slopes[kBefore - 1] is that of t - 1.
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          x[i] = 0;
#pragma unroll
          for (int j = 0; j < kTaps; ++j)
            if (channels.used(j)) {
              const int back = j - (kTaps - f.width);  // tokens before t
#pragma unroll
              for (int k = 0; k < kTaps; ++k)
                if (back == k)
                  x[i] = fmaf(channels.weight[j][i],
                              k == 0 ? slope[i] : slopes[kBefore - (k == 0 ? 1 : k)][i], x[i]);
            }
        }
        add_final(a, channels, s, of - s.length + f.state_width, x);
        store_vector(a.dx, channels.row(a.dx, s, of), x);
      }
      move_on(slopes, slope);
    }
    if (starts && a.d_initial.base) store_initial(a, channels, s);
  });
  if (!a.parts) return;
  float* part = a.parts + unit.run * (f.width + 1) * f.channels + unit.first_channel;
#pragma unroll
  for (int j = 0; j <= kTaps; ++j)
    if (channels.used(j))
#pragma unroll
      for (int i = 0; i < kVector; ++i) part[channels.tap(j) * f.channels + i] = sums[j][i];
}

// ---- sums over parts ----------------------------------------------------------------------------

constexpr int kSumColumns = 32, kSumRows = 8;

__global__ void __launch_bounds__(kSumColumns* kSumRows)
    layer_sum_kernel(const __grid_constant__ SumArgs a) {
  __shared__ double shared[kSumRows][kSumColumns];
  const int lane = threadIdx.x % kSumColumns, row = threadIdx.x / kSumColumns;
  const int64_t column = int64_t{blockIdx.x} * kSumColumns + lane;
  double sum = 0;
  if (column < a.columns)
    for (int64_t part = row; part < a.num_parts; part += kSumRows)
      sum += static_cast<double>(a.parts[part * a.row + column]);
  shared[row][lane] = sum;
  __syncthreads();
  if (row != 0 || column >= a.columns) return;
  for (int i = 1; i < kSumRows; ++i) sum += shared[i][lane];
  const int64_t tap = column / a.channels, c = column % a.channels;
  const View& to = tap < a.taps ? a.dweight : a.dbias;
  if (to.base)
    store_element(to.base, to.type, c * to.strides[0] + (tap < a.taps ? tap * to.strides[1] : 0),
                  static_cast<float>(sum));
}

template <int kVector, class Args>
Status launch(const char* name, void (*kernel)(Args), const ShortConvArgs& shape,
              const Launch& where, const Args& args) {
  const int64_t vectors = (shape.channels + kVector - 1) / kVector;
  const int64_t threads = std::min<int64_t>(kThreads, (vectors + 31) / 32 * 32);
  const int64_t rows = shape.runs.lengths ? 1 : shape.runs.num_sequences;
  return launch_kernel(name, kernel, rows * shape.runs.runs * ((vectors + threads - 1) / threads),
                       static_cast<int>(threads), 0, where, args);
}

}  // namespace

Status launch_short_conv(const ShortConvArgs& args, bool wide, const Launch& where) {
  if (wide)
    return launch<kWideForward>("short_conv", short_conv_kernel<kWideForward>, args, where, args);
  return launch<1>("short_conv", short_conv_kernel<1>, args, where, args);
}

Status launch_short_conv_backward(const ShortConvBackwardArgs& args, bool wide,
                                  const Launch& where) {
  const auto run = [&](auto kernel, auto vector) {
    return launch<vector()>("short_conv_backward", kernel, args.forward, where, args);
  };
  if (wide)
    return run(short_conv_backward_kernel<kWideBackward>,
               std::integral_constant<int, kWideBackward>());
  return run(short_conv_backward_kernel<1>, std::integral_constant<int, 1>());
}

Status launch_sum(const SumArgs& args, const Launch& where) {
  return launch_kernel("layer_sum", layer_sum_kernel,
                       (args.columns + kSumColumns - 1) / kSumColumns, kSumColumns * kSumRows, 0,
                       where, args);
}

}  // namespace kda::cuda::layer
