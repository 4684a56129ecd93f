// SPDX-License-Identifier: Apache-2.0
// torch tensors as the C ABI describes them.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "kda/kda.h"

namespace kda_torch {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check(kda_status status) {
  STD_TORCH_CHECK(status == KDA_OK, "libkda: ", kda_last_error());
}

inline int32_t dtype_of(const Tensor& x, const char* name) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return KDA_FP32;
    case ScalarType::BFloat16: return KDA_BF16;
    case ScalarType::Half: return KDA_FP16;
    case ScalarType::Int: return KDA_INT32;
    case ScalarType::Long: return KDA_INT64;
    default: break;
  }
  STD_TORCH_CHECK(false, "libkda: ", name, " must be fp32, bf16, fp16, int32 or int64");
}

inline std::string shape_text(const int64_t* begin, const int64_t* end) {
  std::string text = "[";
  for (const int64_t* size = begin; size != end; ++size)
    text += (size == begin ? "" : ", ") + std::to_string(*size);
  return text + "]";
}

inline void expect_shape(const Tensor& x, const char* name, std::initializer_list<int64_t> shape) {
  const auto sizes = x.sizes();
  const bool same =
      sizes.size() == shape.size() && std::equal(shape.begin(), shape.end(), sizes.begin());
  STD_TORCH_CHECK(same, "libkda: ", name, " must have shape ",
                  shape_text(shape.begin(), shape.end()), ", got ",
                  shape_text(sizes.begin(), sizes.end()));
}

/// A tensor of the shape given, with its strides and the alignment that its rows really have.
inline void describe(kda_tensor* target, const Tensor& x, const char* name,
                     std::initializer_list<int64_t> shape) {
  expect_shape(x, name, shape);
  target->data = const_cast<void*>(x.const_data_ptr());
  target->dtype = dtype_of(x, name);
  const auto size = static_cast<int64_t>(x.element_size());
  int64_t alignment = 16;
  const auto fit = [&](int64_t bytes) {
    while (bytes % alignment != 0) alignment /= 2;
  };
  fit(static_cast<int64_t>(reinterpret_cast<uintptr_t>(target->data) % 16));
  for (int64_t d = 0; d < x.dim(); ++d) {
    target->strides[d] = x.stride(d);
    if (d + 1 < x.dim()) fit(x.stride(d) * size);
  }
  target->alignment = std::max(alignment, size);
}

/// A parameter of the gate: contiguous, with as many elements as `shape`, in whatever shape it has.
inline void describe_parameter(kda_tensor* target, const Tensor& x, const char* name,
                               std::initializer_list<int64_t> shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  STD_TORCH_CHECK(x.is_contiguous() && x.numel() == count, "libkda: ", name,
                  " must be contiguous, with ", count, " elements, got ", x.numel());
  check(kda_tensor_contiguous(target, const_cast<void*>(x.const_data_ptr()),
                              static_cast<kda_dtype>(dtype_of(x, name)),
                              static_cast<int32_t>(shape.size()), shape.begin()));
  target->alignment = static_cast<int64_t>(x.element_size());
}

inline void describe_state(kda_state* target, const Tensor& x, const char* name, bool vk,
                           int64_t heads, int64_t key_dim, int64_t value_dim) {
  const int64_t slots = x.dim() > 0 ? x.size(0) : 0;
  describe(&target->tensor, x, name,
           {slots, heads, vk ? value_dim : key_dim, vk ? key_dim : value_dim});
  target->num_slots = slots;
  target->present = 1;
}

}  // namespace kda_torch
