// SPDX-License-Identifier: Apache-2.0
// torch tensors as the C ABI describes them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>

#include "kda/kda.h"

namespace kda_torch {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

/// Begins the text of a refusal and of nothing else: from torch 2.15 on the type of an exception
/// does not reach Python, so libkda/_binding/refusals.py knows a refusal by it.
inline constexpr char kRefusal[] = "libkda: ";
inline constexpr char kFailure[] = "libkda failed: ";

template <typename... Parts>
std::string text_of(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

/// What a caller got wrong: ValueError in Python. The text alone: no file, no line.
template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw std::invalid_argument(text_of(kRefusal, parts...));
}

/// What went wrong in a call that is right: RuntimeError in Python.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::runtime_error(text_of(kFailure, parts...));
}

/// What an operator's states are: initial_state and final_state; `states`; the same, and `drafts`
/// that are written; `states` that have tails.
enum class States { kOwn, kPool, kDrafts, kTail };

/// The C ABI's text, whose first word is an argument, in the words of the operators.
inline std::string in_words_of_operators(std::string text, States states) {
  const size_t end = text.find_first_of(": ");
  const std::string name = text.substr(0, end);
  const auto rename = [&](const char* word) { return word + text.substr(end); };
  if (name == "initial_state_mask") return rename("has_state");
  const bool drafts = states == States::kDrafts;
  if (name == "final_state_indices" && drafts) return rename("draft_indices");
  if (name == "initial_state_indices" || name == "final_state_indices") return rename("indices");
  if (name == "token_parents") return rename("parents");
  if (name == "final_state" && drafts) return rename("drafts");
  if (name == "num_accepted_tokens") return text + " (columns of indices)";
  if (name.rfind("tail.", 0) == 0) return "tail_" + text.substr(5);
  if (states == States::kTail && name == "state_index_columns") return rename("parents");
  if (states != States::kOwn && (name == "initial_state" || name == "final_state"))
    return rename("states");
  return text;
}

/// No implementation of this build takes a call that is right otherwise: ValueError in Python too.
struct Unsupported : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

inline void check(kda_status status, States states = States::kOwn) {
  if (status == KDA_OK) return;
  const std::string text = in_words_of_operators(kda_last_error(), states);
  if (status == KDA_INVALID_ARGUMENT) refuse(text);
  // An option of the caller that cannot be had; other causes are this build's.
  if (status == KDA_UNAVAILABLE && text.rfind("backend: ", 0) == 0) refuse(text);
  if (status == KDA_UNSUPPORTED) throw Unsupported(kRefusal + text);
  fail(text);
}

// ---- what an argument may be --------------------------------------------------------------------

/// The types that an argument may have; `with_float64`: also float64, where computes_in_float64().
struct Types {
  const char* text;
  std::array<ScalarType, 3> list;
  bool with_float64 = false;
};
inline constexpr Types kRows = {"float32, bfloat16 or float16",
                                {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half},
                                true};
inline constexpr Types kStates = {
    "float32 or bfloat16", {ScalarType::Float, ScalarType::BFloat16, ScalarType::Float}, true};
inline constexpr Types kParameters = {
    "float32", {ScalarType::Float, ScalarType::Float, ScalarType::Float}, true};
inline constexpr Types kLengths = {"int32 or int64",
                                   {ScalarType::Int, ScalarType::Long, ScalarType::Int}};
inline constexpr Types kFloats = {"float32",
                                  {ScalarType::Float, ScalarType::Float, ScalarType::Float}};
inline constexpr Types kIndices = {"int32", {ScalarType::Int, ScalarType::Int, ScalarType::Int}};
inline constexpr Types kRest = {"int16", {ScalarType::Short, ScalarType::Short, ScalarType::Short}};
inline constexpr Types kMasks = {"bool or uint8",
                                 {ScalarType::Bool, ScalarType::Byte, ScalarType::Bool}};

inline constexpr Types kBytes = {"uint8", {ScalarType::Byte, ScalarType::Byte, ScalarType::Byte}};

/// A call with q in float64 on the CPU: the library's oracle computes it, in float64 throughout.
inline bool computes_in_float64(const Tensor& q) {
  return q.is_cpu() && q.scalar_type() == ScalarType::Double;
}

inline int32_t dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Double: return KDA_FP64;
    case ScalarType::BFloat16: return KDA_BF16;
    case ScalarType::Half: return KDA_FP16;
    case ScalarType::Int: return KDA_INT32;
    case ScalarType::Short: return KDA_INT16;
    case ScalarType::Long: return KDA_INT64;
    default: return KDA_FP32;
  }
}

inline std::string shape_text(const int64_t* begin, const int64_t* end) {
  std::string text = "[";
  for (const int64_t* size = begin; size != end; ++size)
    text += (size == begin ? "" : ", ") + std::to_string(*size);
  return text + "]";
}

inline void expect_shape(const Tensor& x, const char* name, std::initializer_list<int64_t> shape,
                         const char* sources = "q, v, cu_seqlens") {
  const auto sizes = x.sizes();
  const bool same =
      sizes.size() == shape.size() && std::equal(shape.begin(), shape.end(), sizes.begin());
  if (!same)
    refuse(name, " must have shape ", shape_text(shape.begin(), shape.end()), ", got ",
           shape_text(sizes.begin(), sizes.end()), " (sizes of ", sources, ")");
}

inline int32_t dtype_number(const Tensor& x) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  return dtype;
}

inline int32_t device_type_of(const Tensor& x) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &type));
  return type;
}

inline std::string device_text(const Tensor& x) {
  const int32_t type = device_type_of(x);
  if (type == aoti_torch_device_type_cpu()) return "cpu";
  if (type == aoti_torch_device_type_meta()) return "meta";
  const char* name = type == aoti_torch_device_type_cuda() ? "cuda:" : "another device:";
  return name + std::to_string(x.get_device_index());
}

/// Elements from the first of a tensor to one behind its last.
inline int64_t extent_of(const Tensor& x) {
  const auto sizes = x.sizes();
  const auto strides = x.strides();
  int64_t extent = 1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return 0;
    extent += strides[d] * (sizes[d] - 1);
  }
  return extent;
}

/// Memory where `device` is, the operator's argument `first`, of one of `types`: nothing else is
/// known of what a caller hands over.
inline void expect(const Tensor& x, const Tensor& device, const char* name, const Types& types,
                   const char* first = "q") {
  if (!x.defined()) refuse(name, " must be a tensor, got None");
  int32_t layout = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(x.get(), &layout));
  if (layout != aoti_torch_layout_strided())
    refuse(name, " must be a dense tensor, got another layout (sparse or mkldnn)");
  if (device_type_of(x) != device_type_of(device) ||
      x.get_device_index() != device.get_device_index())
    refuse(name, " must be on the device of ", first, ", ", device_text(device), ", got ",
           device_text(x));
  // Numbers, since torch's enumeration has types that its stable one has not.
  const auto type = static_cast<ScalarType>(dtype_number(x));
  const bool float64 =
      types.with_float64 && type == ScalarType::Double && computes_in_float64(device);
  if (!float64 && std::find(types.list.begin(), types.list.end(), type) == types.list.end())
    refuse(name, " must be ", types.text, ", got ", type);
  int64_t bytes = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(x.get(), &bytes));
  const auto size = static_cast<int64_t>(x.element_size());
  if (const int64_t extent = extent_of(x); extent > 0 && bytes / size - x.storage_offset() < extent)
    refuse(name, " has a storage of ", bytes, " bytes, less than its shape and strides reach");
}

// ---- descriptions -------------------------------------------------------------------------------

/// A tensor of the shape given, with its strides and the alignment that its rows really have.
inline void describe(kda_tensor* target, const Tensor& x, const Tensor& q, const char* name,
                     const Types& types, std::initializer_list<int64_t> shape) {
  expect(x, q, name, types);
  expect_shape(x, name, shape);
  target->data = const_cast<void*>(x.const_data_ptr());
  target->dtype = dtype_of(x);
  const auto size = static_cast<int64_t>(x.element_size());
  int64_t alignment = 16;
  const auto fit = [&](int64_t bytes) {
    while (bytes % alignment != 0) alignment /= 2;
  };
  fit(static_cast<int64_t>(reinterpret_cast<uintptr_t>(target->data) % 16));
  const auto strides = x.strides();
  for (size_t d = 0; d < strides.size(); ++d) {
    target->strides[d] = strides[d];
    if (d + 1 < strides.size()) fit(strides[d] * size);
  }
  target->alignment = std::max(alignment, size);
}

/// A parameter of the gate: contiguous, with as many elements as `shape`, in whatever shape it has.
inline void describe_parameter(kda_tensor* target, const Tensor& x, const Tensor& q,
                               const char* name, std::initializer_list<int64_t> shape) {
  expect(x, q, name, kParameters);
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  if (!x.is_contiguous() || x.numel() != count)
    refuse(name, " must be contiguous, with ", count, " elements, got ", x.numel());
  check(kda_tensor_contiguous(target, const_cast<void*>(x.const_data_ptr()),
                              static_cast<kda_dtype>(dtype_of(x)),
                              static_cast<int32_t>(shape.size()), shape.begin()));
  target->alignment = static_cast<int64_t>(x.element_size());
}

inline void describe_state(kda_state* target, const Tensor& x, const Tensor& q, const char* name,
                           bool vk, const kda_problem& p) {
  const int64_t slots = x.dim() > 0 ? x.size(0) : 0;
  const int64_t K = p.key_dim, V = p.value_dim;
  describe(&target->tensor, x, q, name, kStates,
           {slots, p.num_value_heads, vk ? V : K, vk ? K : V});
  target->num_slots = slots;
  target->present = 1;
}

/// Integers or flags that kernels read one after the other.
inline const void* dense_pointer(const Tensor& x, const Tensor& device, const char* name,
                                 const Types& types, std::initializer_list<int64_t> shape) {
  expect(x, device, name, types);
  expect_shape(x, name, shape);
  if (!x.is_contiguous()) refuse(name, " must be contiguous");
  return x.const_data_ptr();
}

}  // namespace kda_torch
