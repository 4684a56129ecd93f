// SPDX-License-Identifier: Apache-2.0
// The short convolution in tiles of each sequence and block of channels.

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "core/guard.hpp"
#include "core/thread_pool.hpp"
#include "core/views.hpp"
#include "cpu/blocked/blocked.hpp"
#include "cpu/float_mode.hpp"
#include "cpu/layer/layer.hpp"
#include "cpu/layer/threads.hpp"
#include "stage/short_conv.hpp"

namespace kda::cpu::layer {
namespace {

using stage::length_entry;
using stage::num_sequences;
using stage::slot_of;

constexpr int kRow = kTileChannels;

// ---- one sequence and one block of channels -----------------------------------------------------

struct Sequence {
  int64_t n = 0, row = 0, begin = 0, length = 0;
  int64_t initial = -1, final = -1;  ///< slots
};

Sequence sequence_of(const ShortConv& call, int64_t n) {
  Sequence s{.n = n, .row = n, .begin = 0, .length = call.num_tokens};
  if (call.cu_seqlens) {
    s.row = 0;
    s.begin = length_entry(call, n);
    s.length = length_entry(call, n + 1) - s.begin;
  }
  s.initial = call.has_state && !call.has_state[n] ? -1 : slot_of(call, call.initial_state, n);
  s.final = slot_of(call, call.final_state, n);
  return s;
}

struct Block {
  int64_t first = 0;
  int count = 0;
};

/// Channels in blocks: as wide as tiles, or narrower where threads would have nothing to do.
class Blocks {
 public:
  Blocks(const ShortConv& call, int64_t sequences, int32_t threads)
      : channels_(call.channels), width_(kTileChannels) {
    constexpr int64_t kNarrow = 64;
    if (sequences * count() < threads) width_ = kNarrow;
  }
  int64_t count() const { return (channels_ + width_ - 1) / width_; }
  Block at(int64_t index) const {
    const int64_t first = index * width_;
    return {first, static_cast<int>(std::min(width_, channels_ - first))};
  }

 private:
  int64_t channels_, width_;
};

/// From token `token` of a sequence on.
Patch rows_at(const TensorView& view, const Sequence& s, int64_t token, const Block& block) {
  const auto& [row, along, across, unused] = view.strides;
  static_cast<void>(unused);
  const int64_t at = (s.row ? s.row * row : 0) + (s.begin + token ? (s.begin + token) * along : 0) +
                     (block.first ? block.first * across : 0);
  return {element_of(view, at), view.dtype, along, across};
}

/// From entry `entry` of a state on: entries of a state are its tokens.
Patch state_at(const TensorView& view, int64_t slot, int64_t entry, const Block& block) {
  const auto& [row, across, along, unused] = view.strides;
  static_cast<void>(unused);
  const int64_t at = (slot ? slot * row : 0) + (block.first ? block.first * across : 0) +
                     (entry ? entry * along : 0);
  return {element_of(view, at), view.dtype, along, across};
}

/// [D, W] or, with one column, [D].
Patch taps_at(const TensorView& view, const Block& block) {
  return {element_of(view, block.first ? block.first * view.strides[0] : 0), view.dtype,
          view.strides[1], view.strides[0]};
}

void clear_rows(float* tile, int64_t rows) {
  std::memset(tile, 0, static_cast<std::size_t>(rows) * kRow * sizeof(float));
}

/// The last rows of a tile, behind `tokens`, come in front of the next one.
void carry_rows(float* tile, int tokens, int rows) {
  std::memmove(tile, tile + tokens * kRow, static_cast<std::size_t>(rows) * kRow * sizeof(float));
}

struct alignas(64) Weights {
  float weight[kMaxWidth * kRow];
  float bias[kRow];

  Taps load(const Kernels& kernels, const ShortConv& call, const Block& block) {
    const int width = static_cast<int>(call.width);
    kernels.load_tile(taps_at(call.weight, block), width, block.count, weight);
    if (call.bias.data) kernels.load_tile(taps_at(call.bias, block), 1, block.count, bias);
    return {weight, call.bias.data ? bias : nullptr, width, call.activation == Activation::kSilu};
  }
};

/// Inputs in front of a sequence: the last W - 1 of its state.
void load_before(const Kernels& kernels, const ShortConv& call, const Sequence& s,
                 const Block& block, float* tile) {
  const int rows = static_cast<int>(call.width) - 1;
  if (s.initial < 0) return clear_rows(tile, rows);
  kernels.load_tile(state_at(call.initial_state.tensor, s.initial, call.state_width - rows, block),
                    rows, block.count, tile);
}

int tile_tokens(int64_t left) { return static_cast<int>(std::min<int64_t>(kTileTokens, left)); }

/// The last inputs. Of a state in place an entry is read before it is written: those that stay move
/// to the front.
void store_final(const Kernels& kernels, const ShortConv& call, const Sequence& s,
                 const Block& block, float* tile) {
  if (s.final < 0) return;
  const int64_t S = call.state_width;
  for (int64_t first = 0; first < S; first += kTileTokens) {
    const int rows = tile_tokens(S - first);
    const int old = static_cast<int>(std::clamp<int64_t>(S - s.length - first, 0, rows));
    if (old > 0 && s.initial >= 0)
      kernels.load_tile(state_at(call.initial_state.tensor, s.initial, s.length + first, block),
                        old, block.count, tile);
    else
      clear_rows(tile, old);
    if (old < rows)
      kernels.load_tile(rows_at(call.x, s, s.length - S + first + old, block), rows - old,
                        block.count, tile + old * kRow);
    kernels.store_tile(state_at(call.final_state.tensor, s.final, first, block), rows, block.count,
                       tile);
  }
}

class ForwardBlock {
 public:
  ForwardBlock(const Kernels& kernels, const ShortConv& call, const Sequence& s, const Block& block)
      : kernels_(kernels), call_(call), s_(s), block_(block) {
    taps_ = weights_.load(kernels, call, block);
    before_ = taps_.width - 1;
  }

  void run() {
    load_before(kernels_, call_, s_, block_, in_);
    run_tokens(0, std::min<int64_t>(kTileTokens, s_.length));
    int64_t done = kTileTokens;
    if (block_.count == 1) {
      done = run_pieces(done);
      if (done < s_.length) load(done - before_, before_, in_);
    }
    run_tokens(done, s_.length);
    store_final(kernels_, call_, s_, block_, out_);
  }

 private:
  void load(int64_t token, int tokens, float* tile) {
    kernels_.load_tile(rows_at(call_.x, s_, token, block_), tokens, block_.count, tile);
  }

  /// Tokens that follow those in front of in_.
  void run_tokens(int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kTileTokens) {
      const int tokens = tile_tokens(end - first);
      load(first, tokens, in_ + before_ * kRow);
      kernels_.convolve(taps_, in_, tokens, block_.count, out_);
      kernels_.store_tile(rows_at(call_.y, s_, first, block_), tokens, block_.count, out_);
      carry_rows(in_, tokens, before_);
    }
  }

  /// One channel leaves a tile empty. So columns are pieces of the sequence, kTileTokens tokens
  /// each, with the tokens in front of them. Returns the first token behind whole pieces.
  int64_t run_pieces(int64_t begin) {
    const int64_t pieces = std::max<int64_t>(0, s_.length - begin) / kTileTokens;
    if (pieces < 2) return begin;
    for (int row = 0; row <= before_; ++row)
      std::fill_n(weights_.weight + row * kRow, kRow, weights_.weight[row * kRow]);
    if (taps_.bias) std::fill_n(weights_.bias, kRow, weights_.bias[0]);
    const auto side_by_side = [](Patch patch) {
      patch.channel_stride = kTileTokens * patch.token_stride;
      return patch;
    };
    for (int64_t piece = 0; piece < pieces; piece += kTileChannels) {
      const int columns = static_cast<int>(std::min<int64_t>(kTileChannels, pieces - piece));
      const int64_t first = begin + piece * kTileTokens;
      kernels_.load_tile(side_by_side(rows_at(call_.x, s_, first - before_, block_)),
                         kTileTokens + before_, columns, in_);
      kernels_.convolve(taps_, in_, kTileTokens, columns, out_);
      kernels_.store_tile(side_by_side(rows_at(call_.y, s_, first, block_)), kTileTokens, columns,
                          out_);
    }
    return begin + pieces * kTileTokens;
  }

  const Kernels& kernels_;
  const ShortConv& call_;
  const Sequence& s_;
  const Block block_;
  Taps taps_;
  int before_ = 0;
  Weights weights_;
  alignas(64) float in_[(kTileTokens + kMaxWidth - 1) * kRow];
  alignas(64) float out_[kTileTokens * kRow];
};

// ---- backward -----------------------------------------------------------------------------------

/// One block of channels over all sequences, whose sums for the parameters are its own.
class BackwardBlock {
 public:
  BackwardBlock(const Kernels& kernels, const ShortConv& call, const ShortConvGradients& gradients,
                const Block& block)
      : kernels_(kernels), call_(call), g_(gradients), block_(block) {
    taps_ = weights_.load(kernels, call, block);
    for (int j = 0; j < taps_.width; ++j)
      std::memcpy(turned_ + j * kRow, weights_.weight + (taps_.width - 1 - j) * kRow,
                  kRow * sizeof(float));
  }

  void run() {
    for (int64_t n = 0; n < num_sequences(call_); ++n) run_sequence(sequence_of(call_, n));
    const int width = taps_.width;
    for (int i = 0; i < (width + 1) * kRow; ++i) out_[i] = static_cast<float>(sums_[i]);
    if (g_.dweight.data)
      kernels_.store_tile(taps_at(g_.dweight, block_), width, block_.count, out_);
    if (g_.dbias.data)
      kernels_.store_tile(taps_at(g_.dbias, block_), 1, block_.count, out_ + width * kRow);
  }

 private:
  void run_sequence(const Sequence& s) {
    const int before = taps_.width - 1;
    float* fresh = slope_ + before * kRow;
    load_before(kernels_, call_, s, block_, in_);
    clear_rows(slope_, before);
    for (int64_t first = 0; first < s.length; first += kTileTokens) {
      const int tokens = tile_tokens(s.length - first);
      kernels_.load_tile(rows_at(call_.x, s, first, block_), tokens, block_.count,
                         in_ + before * kRow);
      if (g_.dy.data)
        kernels_.load_tile(rows_at(g_.dy, s, first, block_), tokens, block_.count, fresh);
      else
        clear_rows(fresh, tokens);
      kernels_.convolve_slopes(taps_, in_, tokens, block_.count, fresh);
      kernels_.convolve_sums(taps_.width, in_, fresh, tokens, block_.count, sums_);
      store_inputs(s, first - before, tokens);
      carry_rows(in_, tokens, before);
      carry_rows(slope_, tokens, before);
    }
    clear_rows(fresh, before);
    store_inputs(s, s.length - before, before);
    store_rest_of_state(s);
  }

  /// Gradients of the inputs `first` and on, those below 0 of the state: by the slopes of the W
  /// outputs that each has a part in, which begin slope_.
  void store_inputs(const Sequence& s, int64_t first, int count) {
    const Taps turned{turned_, nullptr, taps_.width, false};
    kernels_.convolve(turned, slope_, count, block_.count, out_);
    add_final(s, first, count);
    const int old = static_cast<int>(std::clamp<int64_t>(-first, 0, count));
    if (old > 0 && g_.d_initial_state.data) {
      if (s.initial < 0) clear_rows(out_, old);
      kernels_.store_tile(state_at(g_.d_initial_state, s.n, call_.state_width + first, block_), old,
                          block_.count, out_);
    }
    if (old < count && g_.dx.data)
      kernels_.store_tile(rows_at(g_.dx, s, first + old, block_), count - old, block_.count,
                          out_ + old * kRow);
  }

  /// out_ += the gradient of the final state's entry that the input `first` and on became.
  void add_final(const Sequence& s, int64_t first, int count) {
    const int64_t entry = first - s.length + call_.state_width;
    const int skipped = static_cast<int>(std::clamp<int64_t>(-entry, 0, count));
    if (!g_.d_final_state.data || skipped == count) return;
    const int rows = count - skipped;
    kernels_.load_tile(state_at(g_.d_final_state, s.n, entry + skipped, block_), rows, block_.count,
                       more_);
    for (int t = 0; t < rows; ++t)
      for (int c = 0; c < block_.count; ++c) out_[(t + skipped) * kRow + c] += more_[t * kRow + c];
  }

  /// Entries of a state in front of those that the convolution reads: they only move.
  void store_rest_of_state(const Sequence& s) {
    if (!g_.d_initial_state.data) return;
    const int64_t rest = call_.state_width - (taps_.width - 1);
    for (int64_t first = 0; first < rest; first += kTileTokens) {
      const int rows = tile_tokens(rest - first);
      clear_rows(out_, rows);
      if (s.initial >= 0) add_final(s, first - call_.state_width, rows);
      kernels_.store_tile(state_at(g_.d_initial_state, s.n, first, block_), rows, block_.count,
                          out_);
    }
  }

  const Kernels& kernels_;
  const ShortConv& call_;
  const ShortConvGradients& g_;
  const Block block_;
  Taps taps_;
  Weights weights_;
  alignas(64) float turned_[kMaxWidth * kRow];
  alignas(64) float in_[(kTileTokens + kMaxWidth - 1) * kRow];
  alignas(64) float slope_[(kTileTokens + kMaxWidth - 1) * kRow];
  alignas(64) float out_[kTileTokens * kRow];
  alignas(64) float more_[kTileTokens * kRow];
  double sums_[(kMaxWidth + 1) * kRow] = {};
};

int32_t threads_of(const ShortConv& call) {
  return threads_for(call.batch * call.num_tokens * call.channels, call.num_threads);
}

}  // namespace

Status short_conv(const Kernels& kernels, const ShortConv& call) noexcept {
  return guarded([&] {
    const int32_t threads = threads_of(call);
    const Blocks blocks(call, num_sequences(call), threads);
    auto body = [&](int64_t task, int32_t) noexcept {
      const FloatMode mode;
      const Sequence s = sequence_of(call, task / blocks.count());
      ForwardBlock(kernels, call, s, blocks.at(task % blocks.count())).run();
    };
    return parallel_tasks(num_sequences(call) * blocks.count(), threads, body);
  });
}

Status short_conv_backward(const Kernels& kernels, const ShortConv& call,
                           const ShortConvGradients& gradients) noexcept {
  return guarded([&] {
    const int32_t threads = threads_of(call);
    const Blocks blocks(call, 1, threads);
    auto body = [&](int64_t task, int32_t) noexcept {
      const FloatMode mode;
      BackwardBlock(kernels, call, gradients, blocks.at(task)).run();
    };
    return parallel_tasks(blocks.count(), threads, body);
  });
}

}  // namespace kda::cpu::layer
