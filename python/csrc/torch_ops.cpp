// SPDX-License-Identifier: Apache-2.0
// The operators libkda::forward, forward_into and update on PyTorch's stable ABI (2.10 and later):
// one library for every Python and every torch. Meaning of the arguments: include/kda/problem.hpp;
// what users call: python/libkda/kda.py.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "describe.hpp"
#include "device.hpp"
#include "memory.hpp"
#include "plan_cache.hpp"

namespace kda_torch {
namespace {

using MaybeTensor = std::optional<Tensor>;

/// Options that both operators share, as kda.h numbers them.
struct Modes {
  int64_t gate_mode, beta_mode;
  double lower_bound, scale;
  bool l2norm, state_v_first;
};

int32_t mode_of(const char* name, int64_t value, int64_t last) {
  if (value < 0 || value > last) refuse(name, " must be 0 to ", last, ", got ", value);
  return static_cast<int32_t>(value);
}

/// Before anything is asked of its shape.
void expect_rows(const Tensor& x, const Tensor& q, const char* name) {
  expect(x, q, name, kRows);
  if (x.dim() != 4) refuse(name, " must have 4 dimensions, got ", x.dim());
}

/// Everything but states and lengths.
kda_problem problem_of(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                       const Tensor& beta, const Tensor& o, const MaybeTensor& A_log,
                       const MaybeTensor& dt_bias, const Modes& modes) {
  expect_rows(q, q, "q"), expect_rows(v, q, "v");
  kda_problem p;
  kda_problem_init(&p);
  const int64_t B = q.size(0), T = q.size(1), H = q.size(2), K = q.size(3);
  const int64_t HV = v.size(2), V = v.size(3);
  p.batch = p.num_sequences = B;
  p.num_tokens = T;
  p.num_heads = H;
  p.num_value_heads = HV;
  p.key_dim = K;
  p.value_dim = V;
  describe(&p.q, q, q, "q", kRows, {B, T, H, K});
  describe(&p.k, k, q, "k", kRows, {B, T, H, K});
  describe(&p.v, v, q, "v", kRows, {B, T, HV, V});
  describe(&p.g, g, q, "g", kRows, {B, T, HV, K});
  describe(&p.beta, beta, q, "beta", kRows, {B, T, HV});
  describe(&p.o, o, q, "o", kRows, {B, T, HV, V});
  if (A_log) describe_parameter(&p.A_log, *A_log, q, "A_log", {HV});
  if (dt_bias) describe_parameter(&p.dt_bias, *dt_bias, q, "dt_bias", {HV, K});
  p.gate_mode = mode_of("gate_mode", modes.gate_mode, KDA_GATE_BOUNDED);
  p.beta_mode = mode_of("beta_mode", modes.beta_mode, KDA_BETA_SIGMOID2);
  p.state_layout = modes.state_v_first ? KDA_STATE_VK : KDA_STATE_KV;
  p.lower_bound = modes.lower_bound;
  p.scale = modes.scale;
  p.has_scale = 1;
  p.qk_l2norm = modes.l2norm;
  p.trusted = 1;  // expect() has looked
  return p;
}

std::vector<int64_t> values_of(const Tensor& host, const char* name, int64_t count) {
  const void* data = dense_pointer(host, host, name, kLengths, {count});
  if (dtype_of(host) == KDA_INT64) {
    const auto* values = static_cast<const int64_t*>(data);
    return {values, values + count};
  }
  const auto* values = static_cast<const int32_t*>(data);
  return {values, values + count};
}

/// Lengths that stand for those of a GPU: errors name what the caller gave.
void check_hint(const std::vector<int64_t>& hint, int64_t tokens) {
  if (hint.front() != 0)
    refuse("cu_seqlens_cpu: starts with ", hint.front(), ", must start with 0");
  if (hint.back() != tokens)
    refuse("cu_seqlens_cpu: ends with ", hint.back(), ", must end with T = ", tokens);
  for (size_t n = 0; n + 1 < hint.size(); ++n)
    if (hint[n + 1] < hint[n])
      refuse("cu_seqlens_cpu: entry ", n + 1, " = ", hint[n + 1], " is below entry ", n, " = ",
             hint[n]);
}

/// cu_seqlens as kernels read it, and its copy on the host if there is one.
std::vector<int64_t> set_lengths(kda_problem* p, const Tensor& q, const MaybeTensor& cu_seqlens,
                                 const MaybeTensor& cu_seqlens_cpu) {
  if (!cu_seqlens) {
    if (cu_seqlens_cpu) refuse("cu_seqlens_cpu is given without cu_seqlens");
    return {};
  }
  const Tensor& cu = *cu_seqlens;
  if (cu.dim() != 1 || cu.size(0) == 0)
    refuse("cu_seqlens must have shape [N + 1], got ",
           shape_text(cu.sizes().begin(), cu.sizes().end()));
  p->cu_seqlens = dense_pointer(cu, q, "cu_seqlens", kLengths, {cu.size(0)});
  p->num_sequences = cu.size(0) - 1;
  p->has_cu_seqlens = 1;
  p->cu_seqlens_dtype = dtype_of(cu);
  std::vector<int64_t> lengths;
  if (q.is_cpu()) lengths = values_of(cu, "cu_seqlens", cu.size(0));
  if (!cu_seqlens_cpu) return lengths;
  if (!cu_seqlens_cpu->is_cpu())
    refuse("cu_seqlens_cpu must be on the CPU, got ", device_text(*cu_seqlens_cpu));
  std::vector<int64_t> hint = values_of(*cu_seqlens_cpu, "cu_seqlens_cpu", cu.size(0));
  for (size_t n = 0; n < lengths.size(); ++n)
    if (lengths[n] != hint[n])
      refuse("cu_seqlens_cpu: entry ", n, " = ", hint[n], " is ", lengths[n], " in cu_seqlens");
  if (lengths.empty()) check_hint(hint, q.size(1));
  return hint;
}

void run(kda_problem* problem, const Tensor& q, const std::vector<int64_t>& cu_seqlens,
         bool pool = false) {
  static PlanCache cache;
  const OnDevice on_device(q);
  problem->stream = current_stream(q);
  const PlanCache::Plan plan = cache.find(*problem, options_for(q), cu_seqlens, pool);
  const size_t bytes = kda_plan_workspace_bytes(plan.get());
  if (bytes == 0) return check(kda_run(plan.get(), problem, nullptr, 0), pool);
  const Tensor memory =
      new_tensor<1>("workspace", q, {static_cast<int64_t>(bytes) + 64}, aoti_torch_dtype_uint8());
  const auto start = reinterpret_cast<uintptr_t>(memory.const_data_ptr());
  check(kda_run(plan.get(), problem, reinterpret_cast<void*>((start + 63) / 64 * 64), bytes), pool);
}

/// Whether the decode kernel takes every sequence. Lengths that the host does not know may be any:
/// then it computes all tokens.
bool few_tokens(const std::vector<int64_t>& cu_seqlens) {
  constexpr uint64_t kMost = 8;
  for (size_t n = 0; n + 1 < cu_seqlens.size(); ++n)  // not checked yet: they may be any integers
    if (static_cast<uint64_t>(cu_seqlens[n + 1]) - static_cast<uint64_t>(cu_seqlens[n]) > kMost)
      return false;
  return true;
}

/// Which sequences start from their initial state; the others start from zero.
void set_mask(kda_problem* p, const Tensor& q, const MaybeTensor& has_state) {
  if (!has_state) return;
  if (!p->initial_state.present) refuse("has_state is given without an initial state");
  p->initial_state_mask = static_cast<const uint8_t*>(
      dense_pointer(*has_state, q, "has_state", kMasks, {p->num_sequences}));
  p->has_initial_state_mask = 1;
}

/// `p` with its outputs described: initial states and whether decode serves it are all that lacks.
void run_forward(kda_problem* p, const Tensor& q, const std::vector<int64_t>& lengths,
                 const MaybeTensor& initial_state, const MaybeTensor& has_state, bool state_v_first,
                 bool decode) {
  if (initial_state)
    describe_state(&p->initial_state, *initial_state, q, "initial_state", state_v_first, *p);
  set_mask(p, q, has_state);
  if (decode && few_tokens(lengths)) p->operation = KDA_DECODE;
  run(p, q, lengths);
}

std::tuple<Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta,
                                   MaybeTensor A_log, MaybeTensor dt_bias,
                                   MaybeTensor initial_state, MaybeTensor cu_seqlens,
                                   MaybeTensor cu_seqlens_cpu, int64_t gate_mode, int64_t beta_mode,
                                   double lower_bound, double scale, bool l2norm,
                                   bool state_v_first, bool output_final_state, bool decode,
                                   MaybeTensor has_state) {
  const Modes modes{gate_mode, beta_mode, lower_bound, scale, l2norm, state_v_first};
  expect_rows(q, q, "q"), expect_rows(v, q, "v");
  const Tensor o =
      new_tensor<4>("o", v, {v.size(0), v.size(1), v.size(2), v.size(3)}, dtype_number(v));
  kda_problem p = problem_of(q, k, v, g, beta, o, A_log, dt_bias, modes);
  const std::vector<int64_t> lengths = set_lengths(&p, q, cu_seqlens, cu_seqlens_cpu);
  const int64_t HV = p.num_value_heads, K = p.key_dim, V = p.value_dim;
  const int64_t slots = output_final_state ? p.num_sequences : 0;
  const Tensor final_state =
      new_tensor<4>("final_state", q, {slots, HV, state_v_first ? V : K, state_v_first ? K : V},
                    aoti_torch_dtype_float32());
  if (output_final_state)
    describe_state(&p.final_state, final_state, q, "final_state", state_v_first, p);
  run_forward(&p, q, lengths, initial_state, has_state, state_v_first, decode);
  return {o, final_state};
}

/// forward() into tensors of the caller, of any strides that kernels write; `checkpoints` has the
/// state after every `checkpoint_every` tokens of each sequence.
void forward_into(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor o,
                  MaybeTensor final_state, MaybeTensor checkpoints, MaybeTensor A_log,
                  MaybeTensor dt_bias, MaybeTensor initial_state, MaybeTensor cu_seqlens,
                  MaybeTensor cu_seqlens_cpu, int64_t gate_mode, int64_t beta_mode,
                  double lower_bound, double scale, bool l2norm, bool state_v_first,
                  int64_t checkpoint_every, bool decode, MaybeTensor has_state) {
  const Modes modes{gate_mode, beta_mode, lower_bound, scale, l2norm, state_v_first};
  kda_problem p = problem_of(q, k, v, g, beta, o, A_log, dt_bias, modes);
  const std::vector<int64_t> lengths = set_lengths(&p, q, cu_seqlens, cu_seqlens_cpu);
  const auto describe_output = [&](kda_state* target, const MaybeTensor& x, const char* name) {
    if (x) describe_state(target, *x, q, name, state_v_first, p);
  };
  describe_output(&p.final_state, final_state, "final_state");
  describe_output(&p.checkpoints, checkpoints, "checkpoints");
  p.checkpoint_every = checkpoint_every;
  run_forward(&p, q, lengths, initial_state, has_state, state_v_first,
              decode && final_state && !checkpoints);
}

/// One index a sequence, or [N, S] with one a token.
void set_indices(kda_state* state, kda_problem* p, const Tensor& indices, const Tensor& q) {
  const bool many = indices.dim() == 2;
  p->state_index_columns = many ? indices.size(1) : 1;
  const int64_t N = p->num_sequences;
  state->indices = static_cast<const int32_t*>(
      many ? dense_pointer(indices, q, "indices", kIndices, {N, indices.size(1)})
           : dense_pointer(indices, q, "indices", kIndices, {N}));
  state->indexed = 1;
}

void update(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor o, Tensor states,
            MaybeTensor indices, MaybeTensor num_accepted_tokens, MaybeTensor A_log,
            MaybeTensor dt_bias, MaybeTensor cu_seqlens, MaybeTensor cu_seqlens_cpu, bool decode,
            int64_t gate_mode, int64_t beta_mode, double lower_bound, double scale, bool l2norm,
            bool state_v_first, bool zero_skipped, MaybeTensor has_state, int64_t first_slot) {
  const Modes modes{gate_mode, beta_mode, lower_bound, scale, l2norm, state_v_first};
  kda_problem p = problem_of(q, k, v, g, beta, o, A_log, dt_bias, modes);
  const std::vector<int64_t> lengths = set_lengths(&p, q, cu_seqlens, cu_seqlens_cpu);
  const bool state_a_token = indices && indices->dim() == 2 && indices->size(1) > 1;
  decode = decode && (state_a_token || few_tokens(lengths));
  p.operation = decode ? KDA_DECODE : KDA_FORWARD;
  p.zero_skipped = decode && zero_skipped;  // a forward of lengths on the host skips nothing
  describe_state(&p.initial_state, states, q, "states", state_v_first, p);
  if (indices) set_indices(&p.initial_state, &p, *indices, q);
  if (states.size(0) == 0 && p.num_sequences > 0) refuse("states has no slots");
  p.first_slot = first_slot;
  if (!decode) p.final_state = p.initial_state;
  set_mask(&p, q, has_state);
  if (num_accepted_tokens) {
    p.num_accepted_tokens = static_cast<const int32_t*>(
        dense_pointer(*num_accepted_tokens, q, "num_accepted_tokens", kIndices, {p.num_sequences}));
    p.has_num_accepted_tokens = 1;
  }
  run(&p, q, lengths, true);
}

}  // namespace
}  // namespace kda_torch

/// Called by python/libkda/ops.py.
extern "C" __attribute__((visibility("default"))) void kda_torch_set_memory_probe(
    kda_torch::MemoryProbe probe) {
  kda_torch::memory_probe = probe;
}

STABLE_TORCH_LIBRARY(libkda, m) {
  m.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? "
      "dt_bias, Tensor? initial_state, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, int gate_mode, "
      "int beta_mode, float lower_bound, float scale, bool l2norm, bool state_v_first, bool "
      "output_final_state, bool decode=False, Tensor? has_state=None) -> (Tensor, Tensor)");
  m.def(
      "forward_into(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) o, Tensor(b!)? "
      "final_state, Tensor(c!)? checkpoints, Tensor? A_log, Tensor? dt_bias, Tensor? "
      "initial_state, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, int gate_mode, int beta_mode, "
      "float lower_bound, float scale, bool l2norm, bool state_v_first, int checkpoint_every=0, "
      "bool decode=False, Tensor? has_state=None) -> ()");
  m.def(
      "update(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) o, Tensor(b!) "
      "states, Tensor? indices, Tensor? num_accepted_tokens, Tensor? A_log, Tensor? dt_bias, "
      "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, bool decode, int gate_mode, int beta_mode, "
      "float lower_bound, float scale, bool l2norm, bool state_v_first, bool zero_skipped=False, "
      "Tensor? has_state=None, int first_slot=0) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(libkda, CompositeExplicitAutograd, m) {
  m.impl("forward", TORCH_BOX(&kda_torch::forward));
  m.impl("forward_into", TORCH_BOX(&kda_torch::forward_into));
  m.impl("update", TORCH_BOX(&kda_torch::update));
}
