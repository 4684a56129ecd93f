// SPDX-License-Identifier: Apache-2.0
// The operators of spans of longer sequences (include/kda/span.hpp): libkda::span_maps on the CPU,
// libkda::span_begin and libkda::span_finish on a GPU, libkda::fold_states on both. Who calls them:
// python/libkda/context_parallel/maps.py.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <optional>
#include <vector>

#include "device.hpp"
#include "memory.hpp"
#include "plans.hpp"
#include "problem.hpp"

namespace kda_torch {
namespace {

inline constexpr Types kSteps = {"int64", {ScalarType::Long, ScalarType::Long, ScalarType::Long}};
inline constexpr Types kRowsOnly = {"float32, bfloat16 or float16",
                                    {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half}};

/// `like`: its device is that of `x`.
float* floats_of(const Tensor& x, const Tensor& like, const char* name,
                 std::initializer_list<int64_t> shape) {
  return static_cast<float*>(const_cast<void*>(dense_pointer(x, like, name, kFloats, shape)));
}
float* floats_of(const Tensor& x, const char* name, std::initializer_list<int64_t> shape) {
  return floats_of(x, x, name, shape);
}

/// M [N, HV, K, K] of every sequence, and what it adds [N, HV, K, V]: B, or D where d_o is given.
/// With initial_state the state behind the sequence in the place of B.
void span_maps(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, MaybeTensor M, Tensor A,
               MaybeTensor d_o, MaybeTensor A_log, MaybeTensor dt_bias, MaybeTensor initial_state,
               Tensor cu_seqlens, int64_t gate_mode, int64_t beta_mode, double lower_bound,
               double scale, bool l2norm) {
  if (!q.is_cpu()) refuse("q must be on the CPU, got ", device_text(q));
  if (computes_in_float64(q))
    refuse("q must be float32, bfloat16 or float16, got ", ScalarType::Double);
  const Modes modes{gate_mode, beta_mode, lower_bound, scale, l2norm, false};
  kda_problem p = problem_of(q, k, v, g, beta, A_log, dt_bias, modes);
  const std::vector<int64_t> lengths = set_lengths(&p, q, cu_seqlens, {});
  set_initial_state(&p, q, initial_state, {}, false);
  const int64_t N = p.num_sequences, HV = p.num_value_heads, K = p.key_dim, V = p.value_dim;
  kda_maps maps;
  std::memset(&maps, 0, sizeof(maps));
  maps.struct_size = sizeof(maps);
  if (M) maps.M = floats_of(*M, "M", {N, HV, K, K});
  (d_o ? maps.D : maps.B) = floats_of(A, "A", {N, HV, K, V});
  if (d_o) {
    maps.d_o = dense_pointer(*d_o, q, "d_o", kRowsOnly, {p.batch, p.num_tokens, HV, V});
    maps.d_o_dtype = dtype_of(*d_o);
  }
  const Tensor o = new_output(&p, q, v);  // never touched: addresses, no memory
  const ForwardPlan plan = forward_plan(p, options_for(q), lengths);
  with_workspace(kda_plan_workspace_bytes(plan.get()), q, [&](void* workspace, size_t bytes) {
    check(kda_span_maps(plan.get(), &p, &maps, workspace, bytes));
  });
}

/// A half of a forward, on the device of q and its stream: both halves have this plan.
struct Half {
  OnDevice on_device;
  kda_problem problem;
  ForwardPlan plan;
  size_t bytes;

  Half(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
       const Tensor& o, const Tensor& final_state, const MaybeTensor& A_log,
       const MaybeTensor& dt_bias, const Tensor& cu_seqlens, const Tensor& cu_seqlens_cpu,
       const Modes& modes)
      : on_device(q) {
    if (!q.is_cuda()) refuse("q must be on a CUDA device, got ", device_text(q));
    problem = problem_of(q, k, v, g, beta, A_log, dt_bias, modes);
    set_output(&problem, o, q);
    const std::vector<int64_t> lengths = set_lengths(&problem, q, cu_seqlens, cu_seqlens_cpu);
    describe_state(&problem.final_state, final_state, q, "final_state", modes.state_v_first,
                   problem);
    problem.stream = current_stream(q);
    kda_plan_options options = options_for(q);
    options.spans = 1;
    plan = forward_plan(problem, options, lengths);
    bytes = kda_plan_workspace_bytes(plan.get());
  }
  /// fp32 [N, HV, K, columns].
  float* matrices(const Tensor& x, const Tensor& q, const char* name, int64_t columns) const {
    return floats_of(x, q, name,
                     {problem.num_sequences, problem.num_value_heads, problem.key_dim, columns});
  }
};

/// Returns the workspace, for span_finish; an empty one where the library has no such forward for
/// these tensors, and nothing is done. The final states are not written yet.
Tensor span_begin(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor o, Tensor final_state,
                  MaybeTensor A_log, MaybeTensor dt_bias, Tensor cu_seqlens, Tensor cu_seqlens_cpu,
                  int64_t gate_mode, int64_t beta_mode, double lower_bound, double scale,
                  bool l2norm, MaybeTensor M, MaybeTensor B) {
  std::optional<Half> made;
  try {
    made.emplace(q, k, v, g, beta, o, final_state, A_log, dt_bias, cu_seqlens, cu_seqlens_cpu,
                 Modes{gate_mode, beta_mode, lower_bound, scale, l2norm, false});
  } catch (const std::exception&) {  // the ordinary forward says what does not fit
    return new_tensor<1>("workspace", q, {0}, aoti_torch_dtype_uint8());
  }
  const Half& half = *made;
  kda_maps maps;
  std::memset(&maps, 0, sizeof(maps));
  maps.struct_size = sizeof(maps);
  if (M) maps.M = half.matrices(*M, q, "M", half.problem.key_dim);
  if (B) maps.B = half.matrices(*B, q, "B", half.problem.value_dim);
  const Tensor memory = new_workspace(half.bytes, q);
  check(kda_span_begin(half.plan.get(), &half.problem, &maps, workspace_in(memory), half.bytes));
  return memory;
}

void span_finish(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor o, Tensor final_state,
                 MaybeTensor A_log, MaybeTensor dt_bias, Tensor cu_seqlens, Tensor cu_seqlens_cpu,
                 int64_t gate_mode, int64_t beta_mode, double lower_bound, double scale,
                 bool l2norm, Tensor states, Tensor workspace) {
  const Half half(q, k, v, g, beta, o, final_state, A_log, dt_bias, cu_seqlens, cu_seqlens_cpu,
                  {gate_mode, beta_mode, lower_bound, scale, l2norm, false});
  if (workspace.dim() != 1 || static_cast<size_t>(workspace.size(0)) != half.bytes + 64)
    refuse("workspace must be what span_begin has returned for the same arguments");
  const float* starts = half.matrices(states, q, "states", half.problem.value_dim);
  check(
      kda_span_finish(half.plan.get(), &half.problem, starts, workspace_in(workspace), half.bytes));
}

/// Steps [S, 3] of (start, map, store) over rows of `maps_per_row` maps: of each M, then what it
/// adds, HV K (K + V) floats; rows that are shorter hold none. On a GPU, `device_steps`: the steps
/// in its memory.
void fold_states(Tensor maps, int64_t maps_per_row, Tensor starts, Tensor states, Tensor steps,
                 MaybeTensor device_steps, bool transposed) {
  for (const auto& [x, name] :
       {std::pair<const Tensor&, const char*>{starts, "starts"}, {states, "states"}})
    if (x.dim() != 4) refuse(name, " must have 4 dimensions, got ", x.dim());
  const int64_t HV = states.size(1), K = states.size(2), V = states.size(3);
  if (maps.dim() != 2) refuse("maps must have 2 dimensions, got ", maps.dim());
  if (steps.dim() != 2) refuse("steps must have 2 dimensions, got ", steps.dim());
  if (maps_per_row < 1) refuse("maps_per_row must be above 0, got ", maps_per_row);
  const int64_t rows = maps.size(0), row = maps.size(1);
  const OnDevice on_device(states);
  kda_fold fold;
  std::memset(&fold, 0, sizeof(fold));
  fold.struct_size = sizeof(fold);
  fold.num_value_heads = HV, fold.key_dim = K, fold.value_dim = V;
  fold.map_stride = HV * K * (K + V);
  fold.maps_per_row = maps_per_row, fold.row_stride = row;
  fold.num_maps = row / maps_per_row < fold.map_stride ? 0 : rows * maps_per_row;
  fold.M = floats_of(maps, states, "maps", {rows, row});
  fold.A = fold.M ? fold.M + HV * K * K : nullptr;
  fold.num_starts = starts.size(0);
  fold.starts = floats_of(starts, states, "starts", {fold.num_starts, HV, K, V});
  fold.num_states = states.size(0);
  fold.states = floats_of(states, "states", {fold.num_states, HV, K, V});
  fold.num_steps = steps.size(0);
  static_assert(sizeof(kda_fold_step) == 3 * sizeof(int64_t));
  const auto table = [&](const Tensor& x, const Tensor& like, const char* name) {
    return static_cast<const kda_fold_step*>(
        dense_pointer(x, like, name, kSteps, {fold.num_steps, 3}));
  };
  if (!steps.is_cpu()) refuse("steps must be on the CPU, got ", device_text(steps));
  fold.steps = table(steps, steps, "steps");
  fold.transposed = transposed;
  if (states.is_cuda()) {
    if (!device_steps) refuse("device_steps must be given where states are on a CUDA device");
    fold.device_kind = KDA_CUDA;
    fold.device_steps = table(*device_steps, states, "device_steps");
    fold.stream = current_stream(states);
  } else {
    fold.num_threads = options_for(states).num_threads;
  }
  check(kda_fold_states(&fold));
}

}  // namespace
}  // namespace kda_torch

STABLE_TORCH_LIBRARY_FRAGMENT(libkda, m) {
  m.def(
      "span_maps(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!)? M, Tensor(b!) A, "
      "Tensor? d_o, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, Tensor cu_seqlens, int "
      "gate_mode, int beta_mode, float lower_bound, float scale, bool l2norm) -> ()");
  m.def(
      "fold_states(Tensor maps, int maps_per_row, Tensor starts, Tensor(a!) states, Tensor steps, "
      "Tensor? device_steps, bool transposed) -> ()");
#define KDA_HALF                                                                                  \
  "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) o, Tensor(b!) final_state, "  \
  "Tensor? A_log, Tensor? dt_bias, Tensor cu_seqlens, Tensor cu_seqlens_cpu, int gate_mode, int " \
  "beta_mode, float lower_bound, float scale, bool l2norm"
  m.def("span_begin" KDA_HALF ", Tensor(c!)? M, Tensor(d!)? B) -> Tensor");
  m.def("span_finish" KDA_HALF ", Tensor states, Tensor(c!) workspace) -> ()");
#undef KDA_HALF
}

STABLE_TORCH_LIBRARY_IMPL(libkda, CompositeExplicitAutograd, m) {
  m.impl("span_maps", TORCH_BOX(&kda_torch::span_maps));
  m.impl("fold_states", TORCH_BOX(&kda_torch::fold_states));
  m.impl("span_begin", TORCH_BOX(&kda_torch::span_begin));
  m.impl("span_finish", TORCH_BOX(&kda_torch::span_finish));
}
