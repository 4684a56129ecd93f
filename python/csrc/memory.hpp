// SPDX-License-Identifier: Apache-2.0
// Memory of torch's allocators. Where one has none, the stable ABI writes stack frames to stderr
// and loses the reason; so Python is asked for large pieces first.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#include "describe.hpp"

namespace kda_torch {

/// Allocates and frees `bytes`; returns 0, or 1 with the allocator's words in `text`. What was free
/// for it is free for the next call: torch's allocators keep it.
using MemoryProbe = int32_t (*)(int64_t bytes, int32_t cuda, int32_t index, char* text,
                                int64_t text_bytes);
inline MemoryProbe memory_probe = nullptr;  // set once, while the package is imported

inline void expect_memory(const char* name, int64_t bytes, const Tensor& like) {
  constexpr int64_t kLarge = int64_t{1} << 26;  // less costs more to ask for than to take
  if (bytes < kLarge || !memory_probe) return;
  char text[2048] = "";
  if (memory_probe(bytes, like.is_cuda() ? 1 : 0, like.get_device_index(), text, sizeof(text)) == 0)
    return;
  fail(name, ": ", bytes, " bytes cannot be allocated: ", text);
}

/// An uninitialised contiguous tensor where `like` is, without a way through the dispatcher.
inline Tensor new_tensor(const char* name, const Tensor& like, std::span<const int64_t> shape,
                         int32_t dtype) {
  constexpr size_t kMostDimensions = 64;  // torch's
  std::array<int64_t, kMostDimensions> strides;
  int64_t stride = 1;
  bool fits = shape.size() <= kMostDimensions;
  for (size_t d = shape.size(); fits && d-- > 0;) {
    strides[d] = stride;
    fits = !__builtin_mul_overflow(stride, std::max<int64_t>(shape[d], 1), &stride);
  }
  int64_t bytes = 0;
  const auto size = static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  if (!fits || __builtin_mul_overflow(stride, size, &bytes))
    refuse(name, " would have more than 2^63 bytes");
  expect_memory(name, bytes, like);
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(),
                                                  strides.data(), dtype, device_type_of(like),
                                                  like.get_device_index(), &handle));
  return Tensor(handle);
}

template <size_t kRank>
Tensor new_tensor(const char* name, const Tensor& like, const std::array<int64_t, kRank>& shape,
                  int32_t dtype) {
  return new_tensor(name, like, std::span<const int64_t>(shape), dtype);
}

inline uintptr_t aligned(uintptr_t address) { return (address + 63) / 64 * 64; }

/// Memory that holds `bytes` from an address that is aligned to 64 bytes on.
inline Tensor new_workspace(size_t bytes, const Tensor& like) {
  return new_tensor<1>("workspace", like, {static_cast<int64_t>(bytes) + 64},
                       aoti_torch_dtype_uint8());
}
inline void* workspace_in(const Tensor& memory) {
  return reinterpret_cast<void*>(aligned(reinterpret_cast<uintptr_t>(memory.const_data_ptr())));
}

/// body(memory, bytes), where kernels may write; memory is aligned to 64 bytes, null for none.
template <class Body>
void with_workspace(size_t bytes, const Tensor& like, Body&& body) {
  if (bytes == 0) return body(nullptr, 0);
  const Tensor memory = new_workspace(bytes, like);
  body(workspace_in(memory), bytes);
}

}  // namespace kda_torch
