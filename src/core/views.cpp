// SPDX-License-Identifier: Apache-2.0
#include "core/views.hpp"

#include <algorithm>

#include "core/text.hpp"

namespace kda {
namespace {

bool is_empty(const Shape& shape) {
  return std::any_of(shape.begin(), shape.end(), [](int64_t size) { return size == 0; });
}

/// That an output's elements lie apart: in order of strides, each steps over all that is inside.
Status check_distinct(const NamedView& given) {
  std::array<std::size_t, 4> order{0, 1, 2, 3};
  const auto& strides = given.view->strides;
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return strides[a] < strides[b]; });
  int64_t reach = 0;
  for (const std::size_t dim : order) {
    if (given.shape[dim] == 1) continue;
    if (strides[dim] <= reach)
      return invalid(given.name, ": is written, and its elements overlap: stride ", strides[dim],
                     " of dimension ", dim);
    reach += strides[dim] * (given.shape[dim] - 1);
  }
  return {};
}

Status check_strides(const NamedView& given) {
  int64_t reach = dtype_size(given.view->dtype);
  for (std::size_t dim = 0; dim < 4; ++dim) {
    if (given.shape[dim] == 1) continue;
    const int64_t stride = given.view->strides[dim];
    if (stride == kUnsetStride)
      return invalid(given.name, ": stride of dimension ", dim, " is not set");
    if (stride < 0)
      return invalid(given.name, ": stride of dimension ", dim, " is ", stride,
                     ", must not be negative");
    int64_t part = 0;
    if (__builtin_mul_overflow(stride, given.shape[dim] - 1, &part) ||
        __builtin_mul_overflow(part, dtype_size(given.view->dtype), &part) ||
        __builtin_add_overflow(reach, part, &reach))
      return invalid(given.name, ": reaches beyond 2^63 bytes");
  }
  return given.written ? check_distinct(given) : Status{};
}

Status check_view(const NamedView& given) {
  const TensorView& view = *given.view;
  if (view.dtype != DType::kFloat32 && view.dtype != DType::kBFloat16 &&
      view.dtype != DType::kFloat16)
    return invalid(given.name, ": type is ", dtype_name(view.dtype),
                   ", must be fp32, bf16 or fp16");
  if (is_empty(given.shape)) return {};
  KDA_RETURN_IF_ERROR(check_strides(given));
  const auto size = static_cast<std::uintptr_t>(dtype_size(view.dtype));
  if (reinterpret_cast<std::uintptr_t>(view.data) % size != 0)
    return invalid(given.name, ": pointer is not aligned to the ", size, " bytes of an element");
  return {};
}

}  // namespace

bool share_memory(const NamedView& a, const NamedView& b) {
  if (!a.view->data || !b.view->data || is_empty(a.shape) || is_empty(b.shape)) return false;
  return overlap(footprint(a.view->data, a.view->dtype, a.shape, a.view->strides),
                 footprint(b.view->data, b.view->dtype, b.shape, b.view->strides));
}

Status check_each(std::span<const NamedView> views) {
  for (const NamedView& given : views) {
    if (given.view->data)
      KDA_RETURN_IF_ERROR(check_view(given));
    else if (given.required && !is_empty(given.shape))
      return invalid(given.name, ": pointer is null");
  }
  return {};
}

Status check_overlaps(std::span<const NamedView> views) {
  for (std::size_t a = 0; a < views.size(); ++a)
    for (std::size_t b = 0; b < a; ++b) {
      if (!views[a].written && !views[b].written) continue;
      const NamedView& written = views[a].written ? views[a] : views[b];
      const NamedView& other = views[a].written ? views[b] : views[a];
      if (share_memory(written, other)) return invalid(written.name, ": overlaps ", other.name);
    }
  return {};
}

const NamedArray* first_overlap(const Footprint& tensor, std::span<const NamedArray> arrays) {
  for (const NamedArray& array : arrays)
    if (array.data && overlap(tensor, dense_footprint(array.data, array.bytes))) return &array;
  return nullptr;
}

Status check_overlaps(std::span<const NamedView> views, std::span<const NamedArray> arrays) {
  for (const NamedView& given : views) {
    const TensorView& view = *given.view;
    if (!given.written || !view.data || is_empty(given.shape)) continue;
    const Footprint out = footprint(view.data, view.dtype, given.shape, view.strides);
    if (const NamedArray* array = first_overlap(out, arrays))
      return invalid(given.name, ": overlaps ", array->name);
  }
  return {};
}

Status check_count(const char* name, int64_t value, int64_t least) {
  constexpr int64_t kMost = int64_t{1} << 40;  // sums and products of two such stay far from 2^63
  if (value >= least && value <= kMost) return {};
  return invalid(name, ": is ", value, ", must be ", least, " to 2^40");
}

}  // namespace kda
