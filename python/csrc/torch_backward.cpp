// SPDX-License-Identifier: Apache-2.0
// The operators of training: libkda::forward_kept, a forward that keeps what its backward reads;
// libkda::backward; libkda::has_backward and keeps_chunks (derivatives: python/libkda/ops.py); and
// the two halves of a backward of spans, for python/libkda/context_parallel/maps.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>
#include <optional>
#include <tuple>
#include <vector>

#include "call_options.hpp"
#include "device.hpp"
#include "memory.hpp"
#include "plans.hpp"
#include "problem.hpp"

namespace kda_torch {
namespace {

/// Bits of `wanted`, in the order of what backward returns.
enum Wanted : int64_t {
  kQ = 1,
  kK = 2,
  kV = 4,
  kG = 8,
  kBeta = 16,
  kALog = 32,
  kDtBias = 64,
  kInitialState = 128
};

kda_plan_options options_of(const Tensor& q, int64_t keep) {
  kda_plan_options options = options_for(q);
  if (keep < KDA_KEEP_CHUNKS || keep > INT32_MAX)
    refuse("keep must be -1, 0 or tokens, got ", keep);
  options.keep = static_cast<int32_t>(keep);
  return options;
}

/// Asked when the tensors are known to be on one device: a q that is on another one is what is
/// wrong then, and not `keep`.
void expect_keep_on(const Tensor& q, int64_t keep) {
  if (keep > 0 && q.is_cuda()) refuse("keep must be 0 or -1 on a GPU, got ", keep);
}

/// Room for what a plan keeps, from sizes alone, since a compiled graph knows no lengths: as
/// saved_bytes() of libkda/_binding/kernels.py. A sequence of n tokens has n / every states, and so
/// have all at most. On a GPU every chunk of 64 tokens has a state and errors, in 16 bits.
int64_t room_for_saved(const kda_problem& p, int64_t keep, bool on_gpu) {
  if (keep == 0) return 0;
  if (on_gpu) {
    const int64_t chunks = p.has_cu_seqlens ? p.num_tokens / 64 + p.num_sequences
                                            : p.batch * ((p.num_tokens + 63) / 64);
    return 128 + chunks * p.num_value_heads * (p.key_dim + 64) * p.value_dim * 2;
  }
  const int64_t every = keep > 0 ? keep : KDA_KEEP_DEFAULT;
  const int64_t states = p.batch * p.num_tokens / every;
  return 128 + states * p.num_value_heads * p.key_dim * p.value_dim * 4;
}

void describe_dense(kda_tensor* target, const Tensor& like, std::initializer_list<int64_t> shape) {
  check(kda_tensor_contiguous(target, nullptr, static_cast<kda_dtype>(dtype_of(like)),
                              static_cast<int32_t>(shape.size()), shape.begin()));
}

kda_gradients no_gradients() {
  kda_gradients gradients;
  std::memset(&gradients, 0, sizeof(gradients));
  gradients.struct_size = sizeof(gradients);
  return gradients;
}

/// Throws Unsupported where the library has no backward of this forward.
void expect_backward(const kda_problem& p, const Tensor& q, const Tensor& k, const Tensor& v,
                     const Tensor& g, const Tensor& beta, const kda_plan_options& options,
                     const std::vector<int64_t>& lengths) {
  const int64_t B = p.batch, T = p.num_tokens, H = p.num_heads, HV = p.num_value_heads;
  const int64_t K = p.key_dim, V = p.value_dim;
  kda_gradients gradients = no_gradients();
  describe_dense(&gradients.d_o, v, {B, T, HV, V});
  describe_dense(&gradients.dq, q, {B, T, H, K});
  describe_dense(&gradients.dk, k, {B, T, H, K});
  describe_dense(&gradients.dv, v, {B, T, HV, V});
  describe_dense(&gradients.dg, g, {B, T, HV, K});
  describe_dense(&gradients.dbeta, beta, {B, T, HV});
  backward_plan(p, gradients, options, lengths);
}

std::tuple<Tensor, Tensor, Tensor> forward_kept(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta,
                                                MaybeTensor A_log, MaybeTensor dt_bias,
                                                MaybeTensor initial_state, MaybeTensor cu_seqlens,
                                                MaybeTensor cu_seqlens_cpu, int64_t gate_mode,
                                                int64_t beta_mode, double lower_bound, double scale,
                                                bool l2norm, bool state_v_first,
                                                bool output_final_state, MaybeTensor has_state,
                                                int64_t keep, int64_t head_map, int64_t options) {
  const Modes modes{gate_mode, beta_mode, lower_bound, scale, l2norm, state_v_first};
  kda_problem p = problem_of(q, k, v, g, beta, A_log, dt_bias, modes);
  set_head_map(&p, head_map);
  const std::vector<int64_t> lengths = set_lengths(&p, q, cu_seqlens, cu_seqlens_cpu);
  set_initial_state(&p, q, initial_state, has_state, state_v_first);
  kda_plan_options plan_options = options_of(q, keep);
  expect_keep_on(q, keep);
  apply_options(options, &p, &plan_options);
  const Tensor o = new_output(&p, q, v);
  const Tensor final_state = new_final_state(&p, q, state_v_first, output_final_state);
  const OnDevice on_device(q);
  p.stream = current_stream(q);
  ForwardPlan plan;
  try {
    plan = forward_plan(p, plan_options, lengths);
    expect_backward(p, q, k, v, g, beta, plan_options, lengths);
  } catch (const Unsupported& error) {
    refuse("no backward pass: ", error.what() + sizeof(kRefusal) - 1);
  }
  Tensor saved =
      new_tensor<1>("saved", q, {room_for_saved(p, keep, q.is_cuda())}, aoti_torch_dtype_uint8());
  if (keep != 0 && !q.is_cuda())
    torch::stable::zero_(saved);  // what it has room for beyond: equal calls, equal bits
  const auto start = reinterpret_cast<uintptr_t>(saved.const_data_ptr());
  if (keep != 0) {
    if (aligned(start) != start) fail("memory is not aligned to 64");
    if (kda_plan_saved_bytes(plan.get()) > static_cast<size_t>(saved.numel()))
      fail("a plan keeps more than there is room for");
    p.saved = reinterpret_cast<void*>(start);
    p.saved_bytes = static_cast<size_t>(saved.numel());
  }
  with_workspace(kda_plan_workspace_bytes(plan.get()), q, [&](void* workspace, size_t bytes) {
    check(kda_run(plan.get(), &p, workspace, bytes));
  });
  return {o, final_state, saved};
}

/// Kernels read rows of any strides whose innermost is 1; a gradient may be one number for all.
MaybeTensor rows_of(const MaybeTensor& x, const Tensor& q, const char* name, const Types& types) {
  if (!x) return x;
  expect(*x, q, name, types);
  const auto last = static_cast<size_t>(x->dim()) - 1;
  if (x->dim() == 0 || x->strides()[last] == 1 || x->sizes()[last] == 1) return x;
  return torch::stable::contiguous(*x);
}

/// What forward_kept has kept, aligned: a hook of autograd may have moved it since.
MaybeTensor kept_of(const MaybeTensor& saved, const Tensor& q) {
  if (!saved) return saved;
  const auto start =
      reinterpret_cast<uintptr_t>(dense_pointer(*saved, q, "saved", kBytes, {saved->numel()}));
  return aligned(start) == start ? saved : MaybeTensor(torch::stable::clone(*saved));
}

/// What a backward is given, and its gradients.
struct Differentiated {
  OnDevice on_device;
  kda_problem problem;
  std::vector<int64_t> lengths;
  kda_plan_options options;
  kda_gradients gradients = no_gradients();
  MaybeTensor d_o_rows, d_state_rows;
  std::vector<Tensor> outputs;  ///< of q to dt_bias and of the initial state
  BackwardPlan plan;

  /// `made`: the outputs of an earlier call; empty: they are made here.
  Differentiated(const MaybeTensor& d_o, const MaybeTensor& d_final_state, const Tensor& q,
                 const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                 const MaybeTensor& A_log, const MaybeTensor& dt_bias,
                 const MaybeTensor& initial_state, const MaybeTensor& cu_seqlens,
                 const MaybeTensor& cu_seqlens_cpu, const Modes& modes,
                 const MaybeTensor& has_state, const kda_plan_options& plan_options, int64_t wanted,
                 std::vector<Tensor> made = {}, int64_t head_map = KDA_HEADS_GROUPED,
                 int64_t options_number = 0)
      : on_device(q), options(plan_options) {
    problem = problem_of(q, k, v, g, beta, A_log, dt_bias, modes);
    set_head_map(&problem, head_map);
    lengths = set_lengths(&problem, q, cu_seqlens, cu_seqlens_cpu);
    set_initial_state(&problem, q, initial_state, has_state, modes.state_v_first);
    expect_keep_on(q, options.keep);
    const kda_problem& p = problem;
    const int64_t B = p.batch, T = p.num_tokens, H = p.num_heads, HV = p.num_value_heads;
    const int64_t K = p.key_dim, V = p.value_dim, N = p.num_sequences;
    const int64_t rows = modes.state_v_first ? V : K, columns = modes.state_v_first ? K : V;
    describe_dense(&problem.o, v, {B, T, HV, V});
    if (wanted <= 0 || wanted >= 2 * kInitialState)
      refuse("wanted must have bits 0 to 7, at least one of them, got ", wanted);
    d_o_rows = rows_of(d_o, q, "d_o", kRows);
    d_state_rows = rows_of(d_final_state, q, "d_final_state", kStates);
    if (d_o_rows) describe(&gradients.d_o, *d_o_rows, q, "d_o", kRows, {B, T, HV, V});
    if (d_state_rows)
      describe(&gradients.d_final_state, *d_state_rows, q, "d_final_state", kStates,
               {N, HV, rows, columns});
    // A gradient has memory of its own and the type and shape of `x`; it is empty if not wanted.
    const auto make = [&](kda_tensor* target, const char* name, const MaybeTensor& x, int64_t bit,
                          const Types& types, std::initializer_list<int64_t> shape) {
      const bool is_wanted = (wanted & bit) != 0;
      if (is_wanted && !x) refuse("wanted: the ", name, ", which the forward has not");
      const size_t place = outputs.size();
      if (!made.empty()) {
        outputs.push_back(made[place]);
      } else if (!is_wanted) {
        outputs.push_back(new_tensor<1>(name, q, {0}, dtype_number(x ? *x : q)));
      } else {
        const auto sizes = x->sizes();
        outputs.push_back(new_tensor(name, q, {sizes.data(), sizes.size()}, dtype_number(*x)));
      }
      if (!is_wanted) return;
      if (target == &gradients.ddt_bias)
        describe_bias(target, outputs[place], q, name, p);
      else if (&types == &kParameters)
        describe_parameter(target, outputs[place], q, name, shape);
      else if (target == &gradients.dg)
        describe_gates(target, outputs[place], q, name, p);
      else
        describe(target, outputs[place], q, name, types, shape);
    };
    make(&gradients.dq, "gradient of q", q, kQ, kRows, {B, T, H, K});
    make(&gradients.dk, "gradient of k", k, kK, kRows, {B, T, H, K});
    make(&gradients.dv, "gradient of v", v, kV, kRows, {B, T, HV, V});
    make(&gradients.dg, "gradient of g", g, kG, kRows, {B, T, HV, K});
    make(&gradients.dbeta, "gradient of beta", beta, kBeta, kRows, {B, T, HV});
    make(&gradients.dA_log, "gradient of A_log", A_log, kALog, kParameters, {HV});
    make(&gradients.ddt_bias, "gradient of dt_bias", dt_bias, kDtBias, kParameters, {HV, K});
    make(&gradients.d_initial_state, "gradient of initial_state", initial_state, kInitialState,
         kStates, {N, HV, rows, columns});
    problem.stream = current_stream(q);
    apply_options(options_number, &problem, &options);
    plan = backward_plan(problem, gradients, options, lengths);
  }
  size_t bytes() const { return kda_backward_plan_workspace_bytes(plan.get()); }
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    MaybeTensor d_o, MaybeTensor d_final_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta,
    MaybeTensor A_log, MaybeTensor dt_bias, MaybeTensor initial_state, MaybeTensor cu_seqlens,
    MaybeTensor cu_seqlens_cpu, int64_t gate_mode, int64_t beta_mode, double lower_bound,
    double scale, bool l2norm, bool state_v_first, MaybeTensor has_state, MaybeTensor saved,
    int64_t keep, int64_t wanted, int64_t head_map, int64_t options) {
  Differentiated call(d_o, d_final_state, q, k, v, g, beta, A_log, dt_bias, initial_state,
                      cu_seqlens, cu_seqlens_cpu,
                      {gate_mode, beta_mode, lower_bound, scale, l2norm, state_v_first}, has_state,
                      options_of(q, keep), wanted, {}, head_map, options);
  const MaybeTensor kept = kept_of(saved, q);
  if (kept && kept->numel() > 0) {
    call.problem.saved = const_cast<void*>(kept->const_data_ptr());
    call.problem.saved_bytes = static_cast<size_t>(kept->numel());
  }
  with_workspace(call.bytes(), q, [&](void* room, size_t bytes) {
    check(kda_backward(call.plan.get(), &call.problem, &call.gradients, room, bytes));
  });
  const std::vector<Tensor>& o = call.outputs;
  return {o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7]};
}

kda_plan_options in_halves(const Tensor& q) {
  kda_plan_options options = options_of(q, 0);
  options.spans = 1;
  return options;
}

/// The first half of a backward of spans (include/kda/span.hpp); to D [N, HV, K, V], if it is
/// wanted, goes what leaves them. Returns room for the gradients, which span_backward_finish fills,
/// and the workspace: an empty one where the library has no such backward for these tensors, and
/// nothing is done.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>
span_backward_begin(Tensor d_o, Tensor d_final_state, Tensor q, Tensor k, Tensor v, Tensor g,
                    Tensor beta, MaybeTensor A_log, MaybeTensor dt_bias, Tensor initial_state,
                    Tensor cu_seqlens, Tensor cu_seqlens_cpu, int64_t gate_mode, int64_t beta_mode,
                    double lower_bound, double scale, bool l2norm, int64_t wanted, MaybeTensor D,
                    bool from_final) {
  if (!q.defined()) refuse("q must be a tensor, got None");
  if (!q.is_cuda()) refuse("q must be on a CUDA device, got ", device_text(q));
  std::optional<Differentiated> made;
  try {
    made.emplace(d_o, d_final_state, q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens,
                 cu_seqlens_cpu, Modes{gate_mode, beta_mode, lower_bound, scale, l2norm, false},
                 MaybeTensor{}, in_halves(q), wanted);
  } catch (const Unsupported&) {
    const Tensor none = new_tensor<1>("workspace", q, {0}, aoti_torch_dtype_uint8());
    return {none, none, none, none, none, none, none, none, none};
  }
  const kda_problem& p = made->problem;
  float* to = nullptr;
  if (D)
    to = static_cast<float*>(const_cast<void*>(dense_pointer(
        *D, q, "D", kFloats, {p.num_sequences, p.num_value_heads, p.key_dim, p.value_dim})));
  const Tensor memory = new_workspace(made->bytes(), q);
  check(kda_span_backward_begin(made->plan.get(), &p, &made->gradients, to, from_final ? 1 : 0,
                                workspace_in(memory), made->bytes()));
  const std::vector<Tensor>& o = made->outputs;
  return {o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7], memory};
}

void span_backward_finish(Tensor d_o, Tensor d_final_state, Tensor q, Tensor k, Tensor v, Tensor g,
                          Tensor beta, MaybeTensor A_log, MaybeTensor dt_bias, Tensor initial_state,
                          Tensor cu_seqlens, Tensor cu_seqlens_cpu, int64_t gate_mode,
                          int64_t beta_mode, double lower_bound, double scale, bool l2norm,
                          int64_t wanted, Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta,
                          Tensor dA_log, Tensor ddt_bias, Tensor d_initial_state,
                          Tensor workspace) {
  const Differentiated call(
      d_o, d_final_state, q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens,
      cu_seqlens_cpu, {gate_mode, beta_mode, lower_bound, scale, l2norm, false}, {}, in_halves(q),
      wanted, {dq, dk, dv, dg, dbeta, dA_log, ddt_bias, d_initial_state});
  if (workspace.dim() != 1 || static_cast<size_t>(workspace.size(0)) != call.bytes() + 64)
    refuse("workspace must be what span_backward_begin has returned for the same arguments");
  check(kda_span_backward_finish(call.plan.get(), &call.problem, &call.gradients,
                                 workspace_in(workspace), call.bytes()));
}

/// Whether the library has a backward for tensors like these, whatever the options.
bool has_backward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta) {
  kda_problem p = problem_of(q, k, v, g, beta, {}, {}, Modes{0, 0, -5.0, 1.0, false, false});
  describe_dense(&p.o, v, {p.batch, p.num_tokens, p.num_value_heads, p.value_dim});
  try {
    expect_backward(p, q, k, v, g, beta, options_of(q, 0), {});
  } catch (const Unsupported&) {
    return false;
  }
  return true;
}

/// Whether a forward of tensors like these has kernels that keep states and errors of its chunks,
/// and gains by it.
bool keeps_chunks(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, MaybeTensor cu_seqlens,
                  int64_t head_map, int64_t options) {
  kda_problem p = problem_of(q, k, v, g, beta, {}, {}, Modes{0, 0, -5.0, 1.0, false, false});
  set_head_map(&p, head_map);
  set_lengths(&p, q, cu_seqlens, {});
  describe_dense(&p.o, v, {p.batch, p.num_tokens, p.num_value_heads, p.value_dim});
  kda_plan_options plan_options = options_of(q, KDA_KEEP_CHUNKS);
  apply_options(options, &p, &plan_options);
  return kda_supported(&p, &plan_options) == KDA_OK;
}

}  // namespace
}  // namespace kda_torch

STABLE_TORCH_LIBRARY_FRAGMENT(libkda, m) {
  m.def(
      "forward_kept(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? "
      "dt_bias, Tensor? initial_state, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, int gate_mode, "
      "int beta_mode, float lower_bound, float scale, bool l2norm, bool state_v_first, bool "
      "output_final_state, Tensor? has_state=None, int keep=0, int head_map=0, int options=0) -> "
      "(Tensor, Tensor, Tensor)");
  m.def(
      "backward(Tensor? d_o, Tensor? d_final_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor "
      "beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, Tensor? cu_seqlens, Tensor? "
      "cu_seqlens_cpu, int gate_mode, int beta_mode, float lower_bound, float scale, bool l2norm, "
      "bool state_v_first, Tensor? has_state, Tensor? saved, int keep, int wanted, int "
      "head_map=0, int options=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
      "Tensor)");
#define KDA_HALF                                                                                 \
  "(Tensor d_o, Tensor d_final_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "     \
  "Tensor? "                                                                                     \
  "A_log, Tensor? dt_bias, Tensor initial_state, Tensor cu_seqlens, Tensor cu_seqlens_cpu, int " \
  "gate_mode, int beta_mode, float lower_bound, float scale, bool l2norm, int wanted, "
  m.def("span_backward_begin" KDA_HALF
        "Tensor(a!)? D, bool from_final) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, "
        "Tensor, Tensor, Tensor)");
  m.def("span_backward_finish" KDA_HALF
        "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!) dg, Tensor(e!) dbeta, Tensor(f!) "
        "dA_log, Tensor(g!) ddt_bias, Tensor(h!) d_initial_state, Tensor(i!) workspace) -> ()");
#undef KDA_HALF
  m.def("has_backward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta) -> bool");
  m.def(
      "keeps_chunks(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? cu_seqlens, int "
      "head_map, int options=0) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(libkda, CompositeExplicitAutograd, m) {
  m.impl("forward_kept", TORCH_BOX(&kda_torch::forward_kept));
  m.impl("backward", TORCH_BOX(&kda_torch::backward));
  m.impl("span_backward_begin", TORCH_BOX(&kda_torch::span_backward_begin));
  m.impl("span_backward_finish", TORCH_BOX(&kda_torch::span_backward_finish));
  m.impl("has_backward", TORCH_BOX(&kda_torch::has_backward));
  m.impl("keeps_chunks", TORCH_BOX(&kda_torch::keeps_chunks));
}
