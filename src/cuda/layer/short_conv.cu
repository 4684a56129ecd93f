// SPDX-License-Identifier: Apache-2.0
// The causal short convolution (include/kda/short_conv.hpp) and its gradients. A thread has kVector
// neighbouring channels and goes along the tokens of a run with the inputs of the taps in
// registers, so that each input is read once, but for the few in front of a run. The sequences of a
// run are looked up in cu_seqlens; a sequence's states belong to the thread where it begins, which
// reads the old state before it writes the new one. Sums of gradients go to memory run by run.
#include "cuda/launch/launch.cuh"
#include "cuda/layer/vectors.cuh"
#include "cuda/tile/elements.cuh"

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

__device__ __forceinline__ int64_t slot_of(const ConvStates& states, int64_t n) {
  if (!states.view.base) return -1;
  if (!states.indices) return n;
  const int64_t slot = states.indices[n];
  return lacks_slot(states, slot) ? -1 : slot;
}

__device__ __forceinline__ Sequence sequence_of(const ShortConvArgs& a, int64_t n) {
  Sequence s{n, n, 0, a.runs.num_tokens, -1, slot_of(a.final_state, n)};
  if (a.runs.lengths) {
    s.row = 0, s.begin = length_of(a.runs, n);
    s.length = max(int64_t{0}, length_of(a.runs, n + 1) - s.begin);
  }
  if (!a.has_state || a.has_state[n]) s.initial = slot_of(a.initial, n);
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

/// The channels of a thread: their taps, and where their elements lie. A vector of them has four
/// taps; other widths are for threads of one channel.
template <int kVector>
struct Channels {
  const ShortConvArgs& a;
  const int64_t first;
  float weight[kTaps][kVector] = {};
  float bias[kVector] = {};

  __device__ __forceinline__ Channels(const ShortConvArgs& args, int64_t first_channel)
      : a(args), first(first_channel) {
    const auto& strides = a.weight.strides;
    if (kVector > 1 && a.dense_taps) {
      float all[kTaps][kVector];  // channel by channel
#pragma unroll
      for (int i = 0; i < kTaps; ++i) load_vector(a.weight, first * kTaps + i * kVector, all[i]);
#pragma unroll
      for (int j = 0; j < kTaps; ++j)
#pragma unroll
        for (int i = 0; i < kVector; ++i)
          weight[j][i] = all[(i * kTaps + j) / kVector][(i * kTaps + j) % kVector];
    } else {
#pragma unroll
      for (int j = 0; j < kTaps; ++j)
        if (used(j))
          load_apart(a.weight, first * strides[0] + tap(j) * strides[1], strides[0], a.weight.wide,
                     weight[j]);
    }
    if (a.bias.base)
      load_apart(a.bias, first * a.bias.strides[0], a.bias.strides[0], a.bias.wide, bias);
  }
  __device__ __forceinline__ int tap(int j) const {
    return kVector > 1 ? j : j - (kTaps - a.width);
  }
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
    const View& view = a.initial.view;
    if (s.initial >= 0 && e >= 0)
      load_apart(view, entry(view, s.initial, e), view.strides[1], view.wide, x);
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
  /// bias + sum_j weight_j input_j
  __device__ __forceinline__ void convolve(const float (&inputs)[kBefore][kVector],
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
  if constexpr (kVector == 1 && kCount == 8) {
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

/// Work of a block: a run, and some of the channels.
struct Unit {
  int64_t run, first_channel;
};
template <int kVector>
__device__ __forceinline__ Unit unit_of(int64_t channels) {
  const int64_t of_block = kVector * int64_t{blockDim.x};
  const auto of_run = static_cast<uint32_t>((channels + of_block - 1) / of_block);
  return {blockIdx.x / of_run, blockIdx.x % of_run * of_block + threadIdx.x * kVector};
}

template <int kVector>
__global__ void __launch_bounds__(kThreads, kVector == 1 ? 6 : 4)
    short_conv_kernel(const __grid_constant__ ShortConvArgs a) {
  constexpr int kAhead = kVector == 1 ? 8 : 4;
  const Unit unit = unit_of<kVector>(a.channels);
  if (unit.first_channel >= a.channels) return;
  const Channels<kVector> channels(a, unit.first_channel);
  for_each_part(a, unit.run, [&](const Sequence& s, int64_t first, int64_t last, bool starts) {
    float inputs[kBefore][kVector];
    if (first < last) channels.before(s, first, inputs);
    int64_t x_at = channels.row(a.x, s, first), y_at = channels.row(a.y, s, first);
    for (int64_t left = last - first; left > 0; left -= kAhead) {
      Raw<kVector> raw[kAhead];
      load_rows(a.x, x_at, left, raw);
      x_at += kAhead * a.x.strides[1];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (i >= left) break;
        float now[kVector], p[kVector];
        raw[i].convert(a.x.type, now);
        channels.convolve(inputs, now, p);
        move_on(inputs, now);
        if (a.silu)
#pragma unroll
          for (float& value : p) value *= sigmoid(value);
        store_vector(a.y, y_at, p);
        y_at += a.y.strides[1];
      }
    }
    if (!starts || s.final_state < 0) return;
    const View& view = a.final_state.view;
    if (first < last && last == s.length && a.state_width == a.width - 1) {  // they are here
#pragma unroll
      for (int j = 0; j < kBefore; ++j)
        if (channels.used(j))
          store_apart(view, channels.entry(view, s.final_state, channels.tap(j)), view.strides[1],
                      view.wide, inputs[j]);
      return;
    }
    // In place too: an entry is read from where it is or behind.
    for (int64_t e = 0; e < a.state_width; ++e) {
      float x[kVector];
      channels.input(s, s.length - a.state_width + e, x);
      store_apart(view, channels.entry(view, s.final_state, e), view.strides[1], view.wide, x);
    }
  });
}

// ---- gradients ----------------------------------------------------------------------------------

/// dy act'(p) of a token whose inputs are in registers; `slope` comes as dy.
template <int kVector>
__device__ __forceinline__ void slope_of(const Channels<kVector>& channels,
                                         const float (&inputs)[kBefore][kVector],
                                         const float (&now)[kVector], float (&slope)[kVector]) {
  if (!channels.a.silu) return;
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
  load_apart(a.d_final, channels.entry(a.d_final, s.n, e), a.d_final.strides[1], false, more);
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] += more[i];
}

/// The gradient of the state that a sequence begins with: by the slopes of its first tokens. A
/// thread has a channel of a sequence.
__global__ void __launch_bounds__(kThreads)
    short_conv_states_backward_kernel(const __grid_constant__ ShortConvBackwardArgs a) {
  const Unit unit = unit_of<1>(a.forward.channels);
  if (unit.first_channel >= a.forward.channels) return;
  const Channels<1> channels(a.forward, unit.first_channel);
  const Sequence s = sequence_of(a.forward, unit.run);
  const int64_t S = a.forward.state_width;
  float inputs[kBefore][1], slopes[kBefore][1] = {};
  channels.before(s, 0, inputs);
#pragma unroll
  for (int t = 0; t < kBefore; ++t) {
    if (t >= s.length || !a.dy.base) break;
    float now[1];
    channels.input(s, t, now);
    load_vector(a.dy, channels.row(a.dy, s, t), slopes[t]);
    slope_of(channels, inputs, now, slopes[t]);
    move_on(inputs, now);
  }
  for (int64_t e = 0; e < S; ++e) {
    float x[1] = {};
    if (s.initial >= 0) {
#pragma unroll
      for (int t = 0; t < kBefore; ++t)
#pragma unroll
        for (int j = 0; j < kBefore; ++j)  // input e - S is under tap j of token t
          if (channels.used(j) && e - S == t - kBefore + j)
            x[0] = fmaf(channels.weight[j][0], slopes[t][0], x[0]);
      add_final(a, channels, s, e - s.length, x);
    }
    store_vector(a.d_initial, channels.entry(a.d_initial, s.n, e), x);
  }
}

template <int kVector>
__global__ void __launch_bounds__(kThreads, kVector == 1 ? 4 : 3)
    short_conv_backward_kernel(const __grid_constant__ ShortConvBackwardArgs a) {
  constexpr int kAhead = kVector == 1 ? 8 : 4;
  const ShortConvArgs& f = a.forward;
  const Unit unit = unit_of<kVector>(f.channels);
  if (unit.first_channel >= f.channels) return;
  const Channels<kVector> channels(f, unit.first_channel);
  float sums[kTaps + 1][kVector] = {};
  for_each_part(f, unit.run, [&](const Sequence& s, int64_t first, int64_t last, bool) {
    float inputs[kBefore][kVector], slopes[kBefore][kVector] = {};
    if (first < last) channels.before(s, first, inputs);
    int64_t x_at = channels.row(f.x, s, first), dy_at = channels.row(a.dy, s, first);
    int64_t dx_at = channels.row(a.dx, s, first);
    // Behind the part are the other outputs that its inputs have a share in.
    const int64_t end = first < last ? last + kBefore : first;
    for (int64_t begin = first; begin < end; begin += kAhead) {
      Raw<kVector> raw[kAhead], raw_dy[kAhead];
      const int64_t there = min(end, s.length) - begin;
      load_rows(f.x, x_at, there, raw);
      if (a.dy.base) load_rows(a.dy, dy_at, there, raw_dy);
      x_at += kAhead * f.x.strides[1], dy_at += kAhead * a.dy.strides[1];
#pragma unroll
      for (int step = 0; step < kAhead; ++step) {
        const int64_t t = begin + step;
        if (t >= end) break;
        float slope[kVector] = {};
        if (step < there) {
          float now[kVector];
          raw[step].convert(f.x.type, now);
          if (a.dy.base) {
            raw_dy[step].convert(a.dy.type, slope);
            slope_of(channels, inputs, now, slope);
          }
          if (t < last)
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
#pragma unroll
              for (int j = 0; j < kBefore; ++j)
                sums[j][i] = fmaf(slope[i], inputs[j][i], sums[j][i]);
              sums[kBefore][i] = fmaf(slope[i], now[i], sums[kBefore][i]);
              sums[kTaps][i] += slope[i];
            }
          move_on(inputs, now);
        }
        if (a.dx.base && t >= first + kBefore) {
          // Input t - 3 is under tap j of output t - j; slopes has those of t - 3 to t - 1.
          float x[kVector] = {};
#pragma unroll
          for (int j = 0; j < kTaps; ++j)
            if (channels.used(j))
#pragma unroll
              for (int i = 0; i < kVector; ++i)
                x[i] = fmaf(channels.weight[j][i],
                            j == 0 ? slope[i] : slopes[kBefore - (j ? j : 1)][i], x[i]);
          add_final(a, channels, s, t - kBefore - s.length + f.state_width, x);
          store_vector(a.dx, dx_at, x);
          dx_at += a.dx.strides[1];
        }
        move_on(slopes, slope);
      }
    }
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

constexpr int kSumColumns = 32, kSumRows = 32;

__global__ void __launch_bounds__(kSumColumns* kSumRows)
    layer_sum_kernel(const __grid_constant__ SumArgs a) {
  __shared__ double shared[kSumRows][kSumColumns];
  const int lane = threadIdx.x % kSumColumns, row = threadIdx.x / kSumColumns;
  const int64_t column = int64_t{blockIdx.x} * kSumColumns + lane;
  double sum = 0;
  if (column < a.columns)
#pragma unroll 4
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

/// On as many blocks of channels for each of `units`.
template <int kVector, class Args>
Status launch(const char* name, void (*kernel)(Args), int64_t channels, int64_t units,
              const Launch& where, const Args& args) {
  const int64_t vectors = (channels + kVector - 1) / kVector;
  const int64_t threads = min(int64_t{kThreads}, (vectors + 31) / 32 * 32);
  return launch_kernel(name, kernel, units * ((vectors + threads - 1) / threads),
                       static_cast<int>(threads), 0, where, args);
}

int64_t units_of(const Runs& runs) { return (runs.lengths ? 1 : runs.num_sequences) * runs.runs; }

}  // namespace

Status launch_short_conv(const ShortConvArgs& args, bool wide, const Launch& where) {
  const auto run = [&]<int kVector>(auto kernel) {
    return launch<kVector>("short_conv", kernel, args.channels, units_of(args.runs), where, args);
  };
  return wide ? run.operator()<kWideForward>(short_conv_kernel<kWideForward>)
              : run.operator()<1>(short_conv_kernel<1>);
}

Status launch_short_conv_backward(const ShortConvBackwardArgs& args, bool wide,
                                  const Launch& where) {
  const ShortConvArgs& shape = args.forward;
  const auto run = [&]<int kVector>(auto kernel) {
    return launch<kVector>("short_conv_backward", kernel, shape.channels, units_of(shape.runs),
                           where, args);
  };
  if (args.d_initial.base) {
    const Status status = launch<1>("short_conv_states_backward", short_conv_states_backward_kernel,
                                    shape.channels, shape.runs.num_sequences, where, args);
    if (!status.ok()) return status;
  }
  return wide ? run.operator()<kWideBackward>(short_conv_backward_kernel<kWideBackward>)
              : run.operator()<1>(short_conv_backward_kernel<1>);
}

Status launch_sum(const SumArgs& args, const Launch& where) {
  return launch_kernel("layer_sum", layer_sum_kernel,
                       (args.columns + kSumColumns - 1) / kSumColumns, kSumColumns * kSumRows, 0,
                       where, args);
}

}  // namespace kda::cuda::layer
