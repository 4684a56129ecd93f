// SPDX-License-Identifier: Apache-2.0
// Checks of tensors that come with their memory, for calls without a plan.
#pragma once

#include <span>

#include "core/footprint.hpp"
#include "core/layout.hpp"
#include "kda/status.hpp"
#include "kda/tensor.hpp"

namespace kda {

/// A tensor of a call; unused trailing dimensions of `shape` are 1.
struct NamedView {
  const char* name = "";
  const TensorView* view = nullptr;
  Shape shape{1, 1, 1, 1};
  bool written = false;
  bool required = false;
};

/// Types, strides and pointers of all. Those without memory are left out, or refused where they are
/// required.
Status check_each(std::span<const NamedView> views);
/// No written one shares memory with another. All have passed check_each(): a stride that is
/// refused must not make them meet by chance.
Status check_overlaps(std::span<const NamedView> views);

/// Integers that a call reads: `bytes` from `data` on, which may be null.
struct NamedArray {
  const char* name = "";
  const void* data = nullptr;
  int64_t bytes = 0;
};
/// The first that a tensor lies over; null: none.
const NamedArray* first_overlap(const Footprint& tensor, std::span<const NamedArray> arrays);
/// That no written view lies over one of them.
Status check_overlaps(std::span<const NamedView> views, std::span<const NamedArray> arrays);

/// Whether two have memory in common.
bool share_memory(const NamedView& a, const NamedView& b);

Status check_count(const char* name, int64_t value, int64_t least);

inline char* element_of(const TensorView& view, int64_t offset) {
  return static_cast<char*>(view.data) + offset * dtype_size(view.dtype);
}

}  // namespace kda
