// SPDX-License-Identifier: Apache-2.0
// The structs of kda.h as the C++ API has them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>

#include "capi/handles.hpp"
#include "core/text.hpp"
#include "kda/kda.h"
#include "kda/kda.hpp"

namespace kda::capi {

inline constexpr std::size_t kLargestStruct = 1 << 16;  // what a struct_size can be at all

/// Copies a caller's struct over a current default. An older version's is smaller: the rest keeps
/// its defaults. A newer one's is larger: what this version does not know must be zero.
template <class Struct>
Status read_struct(const Struct* given, const char* name, Struct* current) {
  if (!given) return invalid(name, ": is null");
  const std::size_t size = given->struct_size;
  if (size < sizeof(std::size_t) || size > kLargestStruct)
    return invalid(name, ": struct_size = ", size, " is no size of this struct (", sizeof(Struct),
                   "); set it to the sizeof of the struct");
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (size > sizeof(Struct) && std::any_of(bytes + sizeof(Struct), bytes + size,
                                           [](unsigned char byte) { return byte != 0; }))
    return invalid(name, ": struct_size = ", size,
                   " is of a newer version, and a field behind the ", sizeof(Struct),
                   " bytes of this one is set");
  std::memcpy(static_cast<void*>(current), given, std::min(size, sizeof(Struct)));
  return {};
}

/// A caller's problem as this version has it, and its tail, if it has one, which `tail` points to.
struct GivenProblem : kda_problem {
  kda_tail own_tail;
};

/// Whether a caller has filled it in.
bool is_described(const kda_tensor& given);
Problem problem_of(const kda_problem& c);
Tensors tensors_of(const kda_problem& c);

/// Reads a problem over the defaults of kda_problem_init().
Status read_problem(const kda_problem* given, GivenProblem* current);
/// Reads that of a call with a plan, which gives nothing that the plan was made without.
Status read_call(const kda_plan* plan, const kda_problem* given, GivenProblem* current);
/// The plan of `given`, which `current` has then. `cache` null: a plan of its own.
Status find_plan(PlanCache* cache, const kda_problem* given, const int64_t* cu_seqlens,
                 const kda_plan_options* options, GivenProblem* current,
                 std::shared_ptr<const Plan>* plan);
/// Row-major strides of a tensor of up to 4 dimensions.
Status describe_contiguous(kda_tensor* tensor, const void* data, int32_t dtype, int32_t rank,
                           const int64_t* shape);
/// The call gives nothing that its plan was made without: it would be left out without a word.
Status check_call(const Problem& planned, const kda_problem& c);
/// `given` may be null.
Status read_options(const kda_plan_options* given, DeviceFacts* device, PlanOptions* options);

/// All that a call of a backward has beside its problem.
struct GradientsOf {
  Gradients gradients;
  GradientTensors tensors;
};
GradientsOf gradients_of(const Problem& p, const kda_gradients& c);
/// Refuses gradients that the plan was made without.
Status check_gradients(const Gradients& planned, const kda_gradients& c);

}  // namespace kda::capi
