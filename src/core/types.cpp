// SPDX-License-Identifier: Apache-2.0
// Names and sizes of the enumerations, and the row-major descriptor.
#include "kda/types.hpp"

#include <cstddef>

#include "kda/problem.hpp"
#include "kda/status.hpp"
#include "kda/tensor.hpp"

namespace kda {
namespace {

template <class Enum, std::size_t kCount>
const char* name_of(Enum value, const char* const (&names)[kCount]) noexcept {
  const auto idx = static_cast<int64_t>(value);
  return idx >= 0 && idx < static_cast<int64_t>(kCount) ? names[idx] : "invalid";
}

}  // namespace

const char* status_code_name(StatusCode code) noexcept {
  return name_of(code, {"ok", "invalid argument", "unsupported", "unavailable", "out of memory",
                        "out of resources", "internal error", "device error"});
}

int64_t dtype_size(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32: return 4;
    case DType::kBFloat16:
    case DType::kFloat16:
    case DType::kInt16: return 2;
    case DType::kInt64:
    case DType::kFloat64: return 8;
  }
  return 0;
}

const char* operation_name(Operation operation) noexcept {
  return name_of(operation, {"forward", "decode"});
}
const char* dtype_name(DType dtype) noexcept {
  return name_of(dtype, {"fp32", "bf16", "fp16", "int32", "int64", "fp64", "int16"});
}
const char* gate_mode_name(GateMode mode) noexcept {
  return name_of(mode, {"log", "softplus", "bounded"});
}
const char* beta_mode_name(BetaMode mode) noexcept {
  return name_of(mode, {"plain", "sigmoid", "sigmoid2"});
}
const char* head_map_name(HeadMap map) noexcept { return name_of(map, {"grouped", "tiled"}); }
const char* state_layout_name(StateLayout layout) noexcept { return name_of(layout, {"kv", "vk"}); }
const char* activation_name(Activation activation) noexcept {
  return name_of(activation, {"none", "silu", "sigmoid"});
}
const char* device_kind_name(DeviceKind kind) noexcept { return name_of(kind, {"cpu", "cuda"}); }

TensorDesc contiguous(DType dtype, std::initializer_list<int64_t> shape) noexcept {
  TensorDesc desc;
  desc.dtype = dtype;
  int64_t stride = 1;
  int64_t dim = static_cast<int64_t>(shape.size());
  for (const int64_t* extent = shape.end(); extent != shape.begin();) {
    --extent;
    --dim;
    if (dim < 4) desc.strides[static_cast<std::size_t>(dim)] = stride;
    const bool innermost = extent + 1 == shape.end();
    const uint64_t bytes = static_cast<uint64_t>(stride) * static_cast<uint64_t>(dtype_size(dtype));
    while (!innermost && bytes % static_cast<uint64_t>(desc.alignment) != 0) desc.alignment /= 2;
    if (__builtin_mul_overflow(stride, *extent, &stride)) stride = INT64_MAX;
  }
  return desc;
}

TensorDesc head_gates(DType dtype, int64_t batch, int64_t num_tokens,
                      int64_t num_value_heads) noexcept {
  TensorDesc desc = contiguous(dtype, {batch, num_tokens, num_value_heads, 1});
  desc.strides[3] = 0;
  return desc;
}

TensorDesc head_bias(DType dtype, int64_t num_value_heads) noexcept {
  TensorDesc desc = contiguous(dtype, {num_value_heads, 1});
  desc.strides[1] = 0;
  return desc;
}

}  // namespace kda
