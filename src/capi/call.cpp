// SPDX-License-Identifier: Apache-2.0
// Calls of kda.h that need no plan of the caller, and descriptions of tensors in a line.
#include <algorithm>
#include <cstddef>
#include <memory>

#include "capi/handles.hpp"
#include "capi/structs.hpp"
#include "core/text.hpp"
#include "kda/kda.h"
#include "kda/kda.hpp"

namespace kda::capi {
namespace {

Status call_on_cpu(const kda_problem* problem, const int64_t* cu_seqlens) {
  GivenProblem c;
  std::shared_ptr<const Plan> plan;
  KDA_RETURN_IF_ERROR(find_plan(&shared_plans(), problem, cu_seqlens, nullptr, &c, &plan));
  thread_local Workspace workspace;
  KDA_RETURN_IF_ERROR(workspace.reserve(plan->workspace_bytes));
  return run(*plan, tensors_of(c), workspace.data(), workspace.size(), c.stream);
}

Status call_on(const kda_problem* problem, const int64_t* cu_seqlens,
               const kda_plan_options* options, void* workspace, size_t* workspace_bytes) {
  if (!workspace_bytes) return invalid("workspace_bytes: is null");
  GivenProblem c;
  std::shared_ptr<const Plan> plan;
  KDA_RETURN_IF_ERROR(find_plan(&shared_plans(), problem, cu_seqlens, options, &c, &plan));
  if (workspace) return run(*plan, tensors_of(c), workspace, *workspace_bytes, c.stream);
  *workspace_bytes = std::max(plan->workspace_bytes, kWorkspaceAlignment);
  return {};
}

/// Whether a caller's struct has the fields up to the one that begins at `end`.
Status expect_fields(const kda_problem* problem, std::size_t end) {
  if (!problem) return invalid("problem: is null");
  if (problem->struct_size < end || problem->struct_size > kLargestStruct)
    return invalid("problem: struct_size = ", problem->struct_size,
                   " is no size of this struct; call kda_problem_init first");
  return {};
}

Status expect_sizes(const kda_problem& p) {
  const struct {
    const char* name;
    int64_t size;
  } sizes[] = {{"batch", p.batch},         {"num_tokens", p.num_tokens},
               {"num_heads", p.num_heads}, {"num_value_heads", p.num_value_heads},
               {"key_dim", p.key_dim},     {"value_dim", p.value_dim}};
  for (const auto& [name, size] : sizes)
    if (size < 0) return invalid(name, ": ", size, " is negative");
  return {};
}

Status describe_tokens(kda_problem* problem, kda_dtype dtype, const kda_rows& rows) {
  KDA_RETURN_IF_ERROR(expect_fields(problem, offsetof(kda_problem, A_log)));
  KDA_RETURN_IF_ERROR(expect_sizes(*problem));
  const kda_problem& p = *problem;
  const int64_t B = p.batch, T = p.num_tokens, H = p.num_heads, HV = p.num_value_heads;
  const int64_t of_q[] = {B, T, H, p.key_dim}, of_v[] = {B, T, HV, p.value_dim},
                of_g[] = {B, T, HV, p.key_dim};
  const struct {
    kda_tensor kda_problem::*tensor;
    const void* data;
    int32_t rank;
    const int64_t* shape;
  } tensors[] = {{&kda_problem::q, rows.q, 4, of_q},       {&kda_problem::k, rows.k, 4, of_q},
                 {&kda_problem::v, rows.v, 4, of_v},       {&kda_problem::g, rows.g, 4, of_g},
                 {&kda_problem::beta, rows.beta, 3, of_g}, {&kda_problem::o, rows.o, 4, of_v}};
  kda_problem described{};
  for (const auto& row : tensors)
    KDA_RETURN_IF_ERROR(
        describe_contiguous(&(described.*row.tensor), row.data, dtype, row.rank, row.shape));
  for (const auto& row : tensors) problem->*row.tensor = described.*row.tensor;
  return {};
}

Status describe_states(const kda_problem* problem, kda_state* state, void* data, kda_dtype dtype,
                       int64_t num_slots, const int32_t* indices) {
  KDA_RETURN_IF_ERROR(expect_fields(problem, offsetof(kda_problem, q)));
  if (!state) return invalid("state: is null");
  KDA_RETURN_IF_ERROR(expect_sizes(*problem));
  if (num_slots < 0) return invalid("num_slots: ", num_slots, " is negative");
  const bool v_first = problem->state_layout == KDA_STATE_VK;
  const int64_t shape[] = {num_slots, problem->num_value_heads,
                           v_first ? problem->value_dim : problem->key_dim,
                           v_first ? problem->key_dim : problem->value_dim};
  kda_state made{};
  KDA_RETURN_IF_ERROR(describe_contiguous(&made.tensor, data, dtype, 4, shape));
  made.num_slots = num_slots;
  made.indices = indices;
  made.present = 1;
  made.indexed = indices != nullptr;
  *state = made;
  return {};
}

Status expect_tail(const kda_tail* tail, std::size_t bytes) {
  if (!tail) return invalid("tail: is null");
  if (tail->struct_size < bytes || tail->struct_size > kLargestStruct)
    return invalid("tail: struct_size = ", tail->struct_size,
                   " is no size of this struct; call kda_tail_init first");
  return {};
}

Status describe_tail(const kda_problem* problem, kda_tail* tail, int64_t rows,
                     const kda_tail_data* data) {
  KDA_RETURN_IF_ERROR(expect_fields(problem, offsetof(kda_problem, final_state)));
  KDA_RETURN_IF_ERROR(expect_tail(tail, offsetof(kda_tail, positions)));
  KDA_RETURN_IF_ERROR(expect_sizes(*problem));
  if (rows < 0) return invalid("rows: ", rows, " is negative");
  const kda_problem& p = *problem;
  const int64_t slots = p.initial_state.num_slots;
  if (slots < 0) return invalid("initial_state: num_slots = ", slots, " is negative");
  const bool head_gate = p.key_dim > 1 && is_described(p.g) && p.g.strides[3] == 0;
  const int64_t of_k[] = {slots, p.num_heads, rows, p.key_dim},
                of_g[] = {slots, p.num_value_heads, rows, head_gate ? 1 : p.key_dim},
                of_v[] = {slots, p.num_value_heads, rows, p.value_dim};
  const kda_tail_data none = {};
  const kda_tail_data& at = data ? *data : none;
  kda_tail made{};
  KDA_RETURN_IF_ERROR(describe_contiguous(&made.k, at.k, p.k.dtype, 4, of_k));
  KDA_RETURN_IF_ERROR(describe_contiguous(&made.g, at.g, p.g.dtype, 4, of_g));
  KDA_RETURN_IF_ERROR(describe_contiguous(&made.v_new, at.v_new, KDA_FP32, 4, of_v));
  KDA_RETURN_IF_ERROR(describe_contiguous(&made.folded, at.folded, KDA_INT32, 2, of_v));
  if (head_gate) made.g.strides[3] = 0;
  tail->k = made.k, tail->g = made.g, tail->v_new = made.v_new, tail->folded = made.folded;
  tail->num_slots = slots;
  tail->rows = rows;
  return {};
}

Status describe_split(const kda_problem* problem, kda_tail* tail, const kda_split_data* data) {
  KDA_RETURN_IF_ERROR(expect_fields(problem, offsetof(kda_problem, final_state)));
  KDA_RETURN_IF_ERROR(expect_tail(tail, offsetof(kda_tail, ring)));
  KDA_RETURN_IF_ERROR(expect_sizes(*problem));
  const kda_problem& p = *problem;
  const int64_t slots = tail->num_slots, rows = tail->rows, HV = p.num_value_heads;
  if (rows <= 0) return invalid("tail: rows = ", rows, "; call kda_tails first");
  const bool v_first = p.state_layout == KDA_STATE_VK;
  const int64_t of_states[] = {slots, HV, v_first ? p.value_dim : p.key_dim,
                               v_first ? p.key_dim : p.value_dim},
                of_v[] = {slots, HV, rows, p.value_dim};
  const kda_split_data none = {};
  const kda_split_data& at = data ? *data : none;
  kda_tail made{};
  KDA_RETURN_IF_ERROR(describe_contiguous(&made.rest, at.rest, KDA_INT16, 4, of_states));
  KDA_RETURN_IF_ERROR(describe_contiguous(&made.v, at.v, p.v.dtype, 4, of_v));
  KDA_RETURN_IF_ERROR(describe_contiguous(&made.beta, at.beta, p.beta.dtype, 3, of_v));
  tail->rest = made.rest, tail->v = made.v, tail->beta = made.beta;
  return {};
}

}  // namespace
}  // namespace kda::capi

using namespace kda::capi;

extern "C" {

kda_status kda_call(const kda_problem* problem, const int64_t* cu_seqlens) {
  return guarded_call([&] { return call_on_cpu(problem, cu_seqlens); });
}

kda_status kda_call_on(const kda_problem* problem, const int64_t* cu_seqlens,
                       const kda_plan_options* options, void* workspace, size_t* workspace_bytes) {
  return guarded_call(
      [&] { return call_on(problem, cu_seqlens, options, workspace, workspace_bytes); });
}

kda_status kda_tokens(kda_problem* problem, kda_dtype dtype, const kda_rows* rows) {
  return guarded_call([&] {
    if (!rows) return kda::invalid("rows: is null");
    return describe_tokens(problem, dtype, *rows);
  });
}

kda_status kda_tails(const kda_problem* problem, kda_tail* tail, int64_t rows,
                     const kda_tail_data* data) {
  return guarded_call([&] { return describe_tail(problem, tail, rows, data); });
}

kda_status kda_split_states(const kda_problem* problem, kda_tail* tail,
                            const kda_split_data* data) {
  return guarded_call([&] { return describe_split(problem, tail, data); });
}

kda_status kda_states(const kda_problem* problem, kda_state* state, void* data, kda_dtype dtype,
                      int64_t num_slots, const int32_t* indices) {
  return guarded_call(
      [&] { return describe_states(problem, state, data, dtype, num_slots, indices); });
}

}  // extern "C"
