// SPDX-License-Identifier: Apache-2.0
// The C ABI over the C++ API: problems, plans, run. It converts structs (structs.hpp), nothing
// else.
#include "kda/kda.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>

#include "capi/handles.hpp"
#include "capi/structs.hpp"
#include "core/text.hpp"
#include "kda/kda.hpp"

namespace kda::capi {
namespace {

thread_local Status last_error;

Status create_plan(kda_plan_cache* cache, const kda_problem* problem, const int64_t* cu_seqlens,
                   const kda_plan_options* options, kda_plan** plan) {
  if (!plan) return invalid("plan: is null");
  *plan = nullptr;
  GivenProblem c;
  auto made = std::make_unique<kda_plan>();
  KDA_RETURN_IF_ERROR(
      find_plan(cache ? &cache->plans : nullptr, problem, cu_seqlens, options, &c, &made->plan));
  *plan = made.release();
  return {};
}
}  // namespace

Status find_plan(PlanCache* cache, const kda_problem* given, const int64_t* cu_seqlens,
                 const kda_plan_options* options, GivenProblem* current,
                 std::shared_ptr<const Plan>* plan) {
  KDA_RETURN_IF_ERROR(read_problem(given, current));
  DeviceFacts device;
  PlanOptions plan_options;
  KDA_RETURN_IF_ERROR(read_options(options, &device, &plan_options));
  const Problem p = problem_of(*current);
  KDA_RETURN_IF_ERROR(validate(p));
  const bool bounds = p.cu_seqlens && !cu_seqlens;
  std::span<const int64_t> lengths;
  if (cu_seqlens) lengths = {cu_seqlens, static_cast<std::size_t>(p.num_sequences) + 1};
  if (cache)
    return bounds ? cache->find_from_bounds(p, device, plan_options, plan)
                  : cache->find(p, lengths, device, plan_options, plan);
  auto own = std::make_shared<Plan>();
  KDA_RETURN_IF_ERROR(bounds ? make_plan_from_bounds(p, device, plan_options, own.get())
                             : make_plan(p, lengths, device, plan_options, own.get()));
  *plan = std::move(own);
  return {};
}

Status describe_contiguous(kda_tensor* tensor, const void* data, int32_t dtype, int32_t rank,
                           const int64_t* shape) {
  if (!tensor) return invalid("tensor: is null");
  if (!shape) return invalid("shape: is null");
  if (rank < 1 || rank > 4) return invalid("rank: ", rank, " is outside 1..4");
  kda_tensor made{};
  made.data = const_cast<void*>(data);
  made.dtype = dtype;
  int64_t stride = 1;
  for (int32_t dim = rank - 1; dim >= 0; --dim) {
    made.strides[dim] = stride;
    if (shape[dim] < 0) return invalid("shape: dimension ", dim, " is negative");
    if (__builtin_mul_overflow(stride, shape[dim], &stride))
      return invalid("shape: its size overflows");
    if (stride == 0) stride = 1;
  }
  *tensor = made;
  return {};
}

kda_status report(Status status) noexcept {
  const auto code = static_cast<kda_status>(status.code());
  if (!status.ok()) last_error = std::move(status);
  return code;
}

}  // namespace kda::capi

using namespace kda::capi;

extern "C" {

const char* kda_version(void) { return KDA_VERSION_STRING; }

const char* kda_status_name(kda_status status) {
  return kda::status_code_name(static_cast<kda::StatusCode>(status));
}

const char* kda_last_error(void) { return last_error.message().c_str(); }

void(kda_problem_init)(kda_problem* problem) {
  kda_problem_init_size(problem, offsetof(kda_problem, first_slot));
}

void kda_problem_init_size(kda_problem* problem, size_t struct_size) {
  if (!problem || struct_size < sizeof(problem->struct_size)) return;
  kda_problem defaults{};
  defaults.struct_size = struct_size;
  defaults.batch = 1;
  defaults.num_heads = 1;
  defaults.num_value_heads = 1;
  defaults.num_sequences = 1;
  defaults.key_dim = 128;
  defaults.value_dim = 128;
  defaults.lower_bound = -5;
  defaults.state_index_columns = 1;
  defaults.cu_seqlens_dtype = KDA_INT32;
  std::memset(static_cast<void*>(problem), 0, struct_size);
  std::memcpy(static_cast<void*>(problem), &defaults, std::min(struct_size, sizeof(defaults)));
}

void(kda_plan_options_init)(kda_plan_options* options) {
  kda_plan_options_init_size(options, offsetof(kda_plan_options, spans));
}

void kda_plan_options_init_size(kda_plan_options* options, size_t struct_size) {
  if (!options || struct_size < sizeof(options->struct_size)) return;
  std::memset(static_cast<void*>(options), 0, struct_size);
  options->struct_size = struct_size;
}

void kda_tail_init_size(kda_tail* tail, size_t struct_size) {
  if (!tail || struct_size < sizeof(tail->struct_size)) return;
  std::memset(static_cast<void*>(tail), 0, struct_size);
  tail->struct_size = struct_size;
}

kda_status kda_plan_options_cuda(kda_plan_options* options, int32_t ordinal) {
  return guarded_call([&] {
    if (!options) return kda::invalid("options: is null");
    kda::DeviceFacts facts;
    KDA_RETURN_IF_ERROR(kda::cuda_device_facts(ordinal, &facts));
    options->device_kind = KDA_CUDA;
    options->num_sms = facts.num_sms;
    options->compute_capability = facts.compute_capability;
    if (options->struct_size >= offsetof(kda_plan_options, gigahertz) + sizeof(double)) {
      options->memory_bytes_per_second = facts.memory_bytes_per_second;
      options->gigahertz = facts.gigahertz;
    }
    return kda::Status{};
  });
}

kda_status kda_tensor_contiguous(kda_tensor* tensor, void* data, kda_dtype dtype, int32_t rank,
                                 const int64_t* shape) {
  return guarded_call([&] { return describe_contiguous(tensor, data, dtype, rank, shape); });
}

kda_status kda_validate(const kda_problem* problem) {
  return guarded_call([&] {
    GivenProblem c;
    KDA_RETURN_IF_ERROR(read_problem(problem, &c));
    return kda::validate(problem_of(c));
  });
}

kda_status kda_supported(const kda_problem* problem, const kda_plan_options* options) {
  return guarded_call([&] {
    GivenProblem c;
    KDA_RETURN_IF_ERROR(read_problem(problem, &c));
    kda::DeviceFacts device;
    kda::PlanOptions asked;
    KDA_RETURN_IF_ERROR(read_options(options, &device, &asked));
    return kda::supported(problem_of(c), device, asked);
  });
}

kda_status kda_plan_create(const kda_problem* problem, const int64_t* cu_seqlens,
                           const kda_plan_options* options, kda_plan** plan) {
  return guarded_call([&] { return create_plan(nullptr, problem, cu_seqlens, options, plan); });
}

kda_status kda_plan_cache_create(size_t most_plans, kda_plan_cache** cache) {
  return guarded_call([&] {
    if (!cache) return kda::invalid("cache: is null");
    *cache = nullptr;
    *cache = new kda_plan_cache{kda::PlanCache(most_plans == 0 ? 256 : most_plans)};
    return kda::Status{};
  });
}

void kda_plan_cache_destroy(kda_plan_cache* cache) { delete cache; }

kda_status kda_plan_cache_find(kda_plan_cache* cache, const kda_problem* problem,
                               const int64_t* cu_seqlens, const kda_plan_options* options,
                               kda_plan** plan) {
  return guarded_call([&] {
    if (!cache) return kda::invalid("cache: is null");
    return create_plan(cache, problem, cu_seqlens, options, plan);
  });
}

void kda_plan_destroy(kda_plan* plan) { delete plan; }

size_t kda_plan_workspace_bytes(const kda_plan* plan) {
  return plan ? plan->plan->workspace_bytes : 0;
}

int64_t kda_plan_num_segments(const kda_plan* plan) {
  return plan ? static_cast<int64_t>(plan->plan->segments.size()) : 0;
}

const char* kda_plan_json(const kda_plan* plan) {
  const kda_status status = guarded_call([&] {
    if (plan) std::call_once(plan->json_made, [&] { plan->json = plan->plan->to_json(); });
    return kda::Status{};
  });
  return plan && status == KDA_OK ? plan->json.c_str() : "";
}

const char* kda_plan_implementation(const kda_plan* plan) {
  return plan ? plan->plan->implementation.c_str() : "";
}

kda_status kda_run(const kda_plan* plan, const kda_problem* problem, void* workspace,
                   size_t workspace_bytes) {
  return guarded_call([&] {
    GivenProblem c;
    KDA_RETURN_IF_ERROR(read_call(plan, problem, &c));
    return kda::run(*plan->plan, tensors_of(c), workspace, workspace_bytes, c.stream);
  });
}

size_t kda_plan_saved_bytes(const kda_plan* plan) { return plan ? plan->plan->saved_bytes : 0; }

}  // extern "C"
