// SPDX-License-Identifier: Apache-2.0
// Tensors of up to 4 dimensions in memory of any strides, all NaN until they are written.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "check/generate.hpp"
#include "core/convert.hpp"
#include "core/layout.hpp"
#include "kda/tensor.hpp"

namespace kda::test {

class StridedArray {
 public:
  StridedArray() = default;
  /// `order`: dimensions from the outermost in memory to the innermost; `gap`: elements left out
  /// behind each row of the innermost one.
  StridedArray(DType dtype, Shape shape, std::array<int, 4> order = {0, 1, 2, 3}, int64_t gap = 0)
      : dtype_(dtype), shape_(shape) {
    int64_t stride = 1;
    for (int i = 3; i >= 0; --i) {
      const auto dim = static_cast<std::size_t>(order[static_cast<std::size_t>(i)]);
      strides_[dim] = stride;
      stride *= shape[dim];
      if (i == 3 || shape[static_cast<std::size_t>(order[3])] == 1) stride += gap;
    }
    bytes_.assign(static_cast<std::size_t>(std::max<int64_t>(stride, 1) * dtype_size(dtype)), 0xff);
  }

  const Shape& shape() const { return shape_; }
  int64_t offset(const Shape& index) const {
    int64_t at = 0;
    for (std::size_t d = 0; d < 4; ++d) at += index[d] * strides_[d];
    return at;
  }
  double get(const Shape& index) const { return load_double(bytes_.data(), dtype_, offset(index)); }
  void set(const Shape& index, double value) {
    store_double(bytes_.data(), dtype_, offset(index), value);
  }

  void each(const std::function<void(const Shape&)>& body) const {
    Shape i{};
    for (i[0] = 0; i[0] < shape_[0]; ++i[0])
      for (i[1] = 0; i[1] < shape_[1]; ++i[1])
        for (i[2] = 0; i[2] < shape_[2]; ++i[2])
          for (i[3] = 0; i[3] < shape_[3]; ++i[3]) body(i);
  }
  void randomize(check::Random& random) {
    each([&](const Shape& i) { set(i, random.normal()); });
  }

  TensorView view() {
    TensorView view{bytes_.data(), dtype_, strides_};
    for (std::size_t d = 0; d < 4; ++d)
      if (shape_[d] == 1) view.strides[d] = kUnsetStride;  // never used
    return view;
  }

  /// Whether bytes between the elements are as they were made.
  bool gaps_are_untouched() const {
    std::vector<unsigned char> rest = bytes_;
    const auto size = static_cast<std::size_t>(dtype_size(dtype_));
    each([&](const Shape& i) {
      std::memset(rest.data() + static_cast<std::size_t>(offset(i)) * size, 0xff, size);
    });
    return std::all_of(rest.begin(), rest.end(), [](unsigned char byte) { return byte == 0xff; });
  }

  friend bool operator==(const StridedArray&, const StridedArray&) = default;

 private:
  DType dtype_ = DType::kFloat32;
  Shape shape_{};
  std::array<int64_t, 4> strides_{};
  std::vector<unsigned char> bytes_;
};

/// The greatest relative error of a number that was rounded to the type.
inline double rounding_of(DType dtype) {
  return dtype == DType::kBFloat16 ? 0x1p-8 : dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-24;
}

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

}  // namespace kda::test
