// SPDX-License-Identifier: Apache-2.0
// The gated RMS norm in blocks of rows.

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "core/convert.hpp"
#include "core/guard.hpp"
#include "core/text.hpp"
#include "core/thread_pool.hpp"
#include "core/views.hpp"
#include "cpu/blocked/blocked.hpp"
#include "cpu/float_mode.hpp"
#include "cpu/layer/layer.hpp"
#include "cpu/layer/threads.hpp"

namespace kda::cpu::layer {
namespace {

constexpr int64_t kRowsOfASum = 32;   // added up in fp32
constexpr int64_t kMostBlocks = 256;  // with sums for dweight of their own

int64_t num_rows(const GatedRmsNorm& call) { return call.rows[0] * call.rows[1] * call.rows[2]; }

/// The first element of row `row`, null without memory.
char* row_of(const GatedRmsNorm& call, const TensorView& view, int64_t row) {
  if (!view.data) return nullptr;
  const int64_t head = row % call.rows[2], token = row / call.rows[2] % call.rows[1];
  const int64_t batch = row / call.rows[2] / call.rows[1];
  const auto step = [&](int64_t index, std::size_t dim) {
    return index ? index * view.strides[dim] : 0;
  };
  return element_of(view, step(batch, 0) + step(token, 1) + step(head, 2));
}

NormRow norm_row(const GatedRmsNorm& call, int64_t row) {
  NormRow norm{.x = row_of(call, call.x, row), .gate = row_of(call, call.gate, row)};
  norm.weight = static_cast<const char*>(call.weight.data);
  norm.x_dtype = call.x.dtype, norm.gate_dtype = call.gate.dtype;
  norm.weight_dtype = call.weight.dtype;
  norm.channels = call.channels;
  norm.eps = static_cast<float>(call.eps);
  norm.activation = call.activation;
  return norm;
}

/// Rows that lie evenly in a tensor, `step` elements apart: those of every `count` from a multiple
/// of it on.
struct Even {
  int64_t count = 1, step = 0;
};

Even evenly(const GatedRmsNorm& call, const TensorView& view) {
  Even found;
  for (std::size_t dim = 3; dim-- > 0;) {
    if (call.rows[dim] == 1) continue;
    if (found.count == 1) found.step = view.strides[dim];
    if (view.strides[dim] != found.step * found.count) break;
    found.count *= call.rows[dim];
  }
  return found;
}

/// Rows of all tensors of a call that kernels take at once.
class EvenRows {
 public:
  explicit EvenRows(const GatedRmsNorm& call) : count_(num_rows(call)) {
    steps_.x = add(call, call.x), steps_.gate = add(call, call.gate);
  }
  int64_t add(const GatedRmsNorm& call, const TensorView& view) {
    if (!view.data) return 0;
    const Even even = evenly(call, view);
    count_ = std::min(count_, even.count);
    return even.step;
  }
  NormSteps& steps() { return steps_; }
  const NormSteps& steps() const { return steps_; }
  /// The end of those from `row` on.
  int64_t end(int64_t row, int64_t last) const {
    return std::min(last, (row / count_ + 1) * count_);
  }

 private:
  int64_t count_;
  NormSteps steps_;
};

int32_t threads_of(const GatedRmsNorm& call) {
  return threads_for(num_rows(call) * call.channels, call.num_threads);
}

/// Blocks of rows, and their sums for dweight.
class Backward {
 public:
  Backward(const Kernels& kernels, const GatedRmsNorm& call, const GatedRmsNormGradients& gradients)
      : kernels_(kernels), call_(call), g_(gradients), even_(call) {
    NormSteps& steps = even_.steps();
    steps.y = even_.add(call, g_.dy), steps.dx = even_.add(call, g_.dx);
    steps.dgate = even_.add(call, g_.dgate);
    rows_of_block_ = std::max(kRowsOfASum, (num_rows(call) + kMostBlocks - 1) / kMostBlocks);
    blocks_ = (num_rows(call) + rows_of_block_ - 1) / rows_of_block_;
    if (!g_.dweight.data) return;
    parts_.resize(static_cast<std::size_t>(blocks_ * call.channels));
    sums_.resize(parts_.size());
  }

  Status run() {
    auto body = [this](int64_t block, int32_t) noexcept { run_block(block); };
    KDA_RETURN_IF_ERROR(parallel_tasks(blocks_, threads_of(call_), body));
    for (int64_t d = 0; g_.dweight.data && d < call_.channels; ++d) {
      double sum = 0;
      for (int64_t block = 0; block < blocks_; ++block)
        sum += sums_[static_cast<std::size_t>(block * call_.channels + d)];
      store_element(g_.dweight.data, g_.dweight.dtype, d, static_cast<float>(sum));
    }
    return {};
  }

 private:
  void run_block(int64_t block) noexcept {
    const FloatMode mode;
    const int64_t end = std::min(num_rows(call_), (block + 1) * rows_of_block_);
    float* part = g_.dweight.data ? parts_.data() + block * call_.channels : nullptr;
    for (int64_t first = block * rows_of_block_; first < end;) {
      const int64_t last = std::min(end, (first / kRowsOfASum + 1) * kRowsOfASum);
      run_rows(first, last, part);
      if (part) add_part(block);
      first = last;
    }
  }

  void run_rows(int64_t first, int64_t last, float* part) noexcept {
    const bool narrow = call_.channels < kernels_.vector_width;
    for (int64_t row = first; row < last;) {
      const NormRowGradients gradients{.dy = row_of(call_, g_.dy, row),
                                       .dx = row_of(call_, g_.dx, row),
                                       .dgate = row_of(call_, g_.dgate, row),
                                       .dweight = part,
                                       .dy_dtype = g_.dy.dtype,
                                       .dx_dtype = g_.dx.dtype,
                                       .dgate_dtype = g_.dgate.dtype};
      const int64_t end = narrow ? even_.end(row, last) : row + 1;
      if (narrow)
        kernels_.norm_narrow_backward(norm_row(call_, row), even_.steps(), end - row, gradients);
      else
        kernels_.norm_backward(norm_row(call_, row), gradients);
      row = end;
    }
  }

  void add_part(int64_t block) {
    float* part = parts_.data() + block * call_.channels;
    double* sums = sums_.data() + block * call_.channels;
    for (int64_t d = 0; d < call_.channels; ++d) {
      sums[d] += static_cast<double>(part[d]);
      part[d] = 0;
    }
  }

  const Kernels& kernels_;
  const GatedRmsNorm& call_;
  const GatedRmsNormGradients& g_;
  EvenRows even_;
  int64_t rows_of_block_ = 0, blocks_ = 0;
  std::vector<float> parts_;
  std::vector<double> sums_;
};

}  // namespace

Status gated_rms_norm(const Kernels& kernels, const GatedRmsNorm& call) noexcept {
  return guarded([&] {
    const int64_t rows = num_rows(call), rows_of_task = std::max<int64_t>(1, 8192 / call.channels);
    EvenRows even(call);
    even.steps().y = even.add(call, call.y);
    const bool narrow = call.channels < kernels.vector_width;
    auto body = [&](int64_t task, int32_t) noexcept {
      const FloatMode mode;
      const int64_t last = std::min(rows, (task + 1) * rows_of_task);
      for (int64_t row = task * rows_of_task; row < last;) {
        const int64_t end = narrow ? even.end(row, last) : row + 1;
        char* y = row_of(call, call.y, row);
        if (narrow)
          kernels.norm_narrow(norm_row(call, row), even.steps(), end - row, y, call.y.dtype);
        else
          kernels.norm(norm_row(call, row), y, call.y.dtype);
        row = end;
      }
    };
    return parallel_tasks((rows + rows_of_task - 1) / rows_of_task, threads_of(call), body);
  });
}

Status gated_rms_norm_backward(const Kernels& kernels, const GatedRmsNorm& call,
                               const GatedRmsNormGradients& gradients) noexcept {
  return guarded([&] { return Backward(kernels, call, gradients).run(); });
}

}  // namespace kda::cpu::layer
