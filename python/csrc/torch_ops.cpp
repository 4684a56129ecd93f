// SPDX-License-Identifier: Apache-2.0
// The operators libkda::forward, forward_into, update, update_with_tail and update_with_ring on
// PyTorch's stable ABI (2.10 and later): one library for every Python and every torch. Those of
// training: torch_backward.cpp. Meaning of the arguments: include/kda/problem.hpp; what users call:
// python/libkda/kda.py.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "call_options.hpp"
#include "device.hpp"
#include "memory.hpp"
#include "plans.hpp"
#include "problem.hpp"

namespace kda_torch {
namespace {

void run(kda_problem* problem, const Tensor& q, const std::vector<int64_t>& cu_seqlens,
         int64_t options, States pool = States::kOwn) {
  const OnDevice on_device(q);
  problem->stream = current_stream(q);
  kda_plan_options plan_options = options_for(q);
  apply_options(options, problem, &plan_options);
  const ForwardPlan plan = forward_plan(*problem, plan_options, cu_seqlens, pool);
  with_workspace(kda_plan_workspace_bytes(plan.get()), q, [&](void* workspace, size_t bytes) {
    check(kda_run(plan.get(), problem, workspace, bytes), pool);
  });
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

/// `p` with its outputs described: initial states and whether decode serves it are all that lacks.
void run_forward(kda_problem* p, const Tensor& q, const std::vector<int64_t>& lengths,
                 const MaybeTensor& initial_state, const MaybeTensor& has_state, bool state_v_first,
                 bool decode, int64_t options) {
  set_initial_state(p, q, initial_state, has_state, state_v_first);
  if (decode && few_tokens(lengths)) p->operation = KDA_DECODE;
  run(p, q, lengths, options);
}

std::tuple<Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta,
                                   MaybeTensor A_log, MaybeTensor dt_bias,
                                   MaybeTensor initial_state, MaybeTensor cu_seqlens,
                                   MaybeTensor cu_seqlens_cpu, int64_t gate_mode, int64_t beta_mode,
                                   double lower_bound, double scale, bool l2norm,
                                   bool state_v_first, bool output_final_state, bool decode,
                                   MaybeTensor has_state, int64_t head_map, int64_t options) {
  const Modes modes{gate_mode, beta_mode, lower_bound, scale, l2norm, state_v_first};
  kda_problem p = problem_of(q, k, v, g, beta, A_log, dt_bias, modes);
  set_head_map(&p, head_map);
  const Tensor o = new_output(&p, q, v);
  const std::vector<int64_t> lengths = set_lengths(&p, q, cu_seqlens, cu_seqlens_cpu);
  const Tensor final_state = new_final_state(&p, q, state_v_first, output_final_state);
  run_forward(&p, q, lengths, initial_state, has_state, state_v_first, decode, options);
  return {o, final_state};
}

/// forward() into tensors of the caller, of any strides that kernels write; `checkpoints` has the
/// state after every `checkpoint_every` tokens of each sequence.
void forward_into(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor o,
                  MaybeTensor final_state, MaybeTensor checkpoints, MaybeTensor A_log,
                  MaybeTensor dt_bias, MaybeTensor initial_state, MaybeTensor cu_seqlens,
                  MaybeTensor cu_seqlens_cpu, int64_t gate_mode, int64_t beta_mode,
                  double lower_bound, double scale, bool l2norm, bool state_v_first,
                  int64_t checkpoint_every, bool decode, MaybeTensor has_state, int64_t head_map,
                  int64_t options) {
  const Modes modes{gate_mode, beta_mode, lower_bound, scale, l2norm, state_v_first};
  kda_problem p = problem_of(q, k, v, g, beta, A_log, dt_bias, modes);
  set_head_map(&p, head_map);
  set_output(&p, o, q);
  const std::vector<int64_t> lengths = set_lengths(&p, q, cu_seqlens, cu_seqlens_cpu);
  const auto describe_output = [&](kda_state* target, const MaybeTensor& x, const char* name) {
    if (x) describe_state(target, *x, q, name, state_v_first, p);
  };
  describe_output(&p.final_state, final_state, "final_state");
  describe_output(&p.checkpoints, checkpoints, "checkpoints");
  p.checkpoint_every = checkpoint_every;
  run_forward(&p, q, lengths, initial_state, has_state, state_v_first,
              decode && final_state && !checkpoints, options);
}

/// One index a sequence, or [N, S] with one a token.
void set_indices(kda_state* state, kda_problem* p, const Tensor& indices, const Tensor& q,
                 const char* name) {
  const bool many = indices.dim() == 2;
  p->state_index_columns = many ? indices.size(1) : 1;
  const int64_t N = p->num_sequences;
  state->indices = static_cast<const int32_t*>(
      many ? dense_pointer(indices, q, name, kIndices, {N, indices.size(1)})
           : dense_pointer(indices, q, name, kIndices, {N}));
  state->indexed = 1;
}

/// Describes a call on a pool of states, but for its lengths and states.
kda_problem pool_problem(const Tensor& o, const Tensor& q, const Tensor& k, const Tensor& v,
                         const Tensor& g, const Tensor& beta, const MaybeTensor& A_log,
                         const MaybeTensor& dt_bias, const Modes& modes, int64_t head_map) {
  kda_problem p = problem_of(q, k, v, g, beta, A_log, dt_bias, modes);
  set_head_map(&p, head_map);
  if (computes_in_float64(q)) refuse("q must be ", kRows.text, ", got ", ScalarType::Double);
  set_output(&p, o, q);
  return p;
}

void update(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor o, Tensor states,
            MaybeTensor indices, MaybeTensor num_accepted_tokens, MaybeTensor A_log,
            MaybeTensor dt_bias, MaybeTensor cu_seqlens, MaybeTensor cu_seqlens_cpu, bool decode,
            int64_t gate_mode, int64_t beta_mode, double lower_bound, double scale, bool l2norm,
            bool state_v_first, bool zero_skipped, MaybeTensor has_state, int64_t first_slot,
            MaybeTensor drafts, MaybeTensor draft_indices, MaybeTensor parents,
            MaybeTensor checkpoints, MaybeTensor checkpoint_offsets, MaybeTensor checkpoint_indices,
            int64_t checkpoint_every, int64_t head_map, int64_t options, bool final_states) {
  const Modes modes{gate_mode, beta_mode, lower_bound, scale, l2norm, state_v_first};
  kda_problem p = pool_problem(o, q, k, v, g, beta, A_log, dt_bias, modes, head_map);
  const std::vector<int64_t> lengths = set_lengths(&p, q, cu_seqlens, cu_seqlens_cpu);
  if (drafts.has_value() != draft_indices.has_value())
    refuse("drafts and draft_indices are given together");
  const MaybeTensor& columns = drafts ? draft_indices : indices;
  const bool state_a_token = columns && columns->dim() == 2 && columns->size(1) > 1;
  if (drafts && (!state_a_token || !decode))
    refuse("drafts need decode, and draft_indices [N, S] with S above 1");
  if (drafts && indices && indices->dim() != 1)
    refuse("indices must have one dimension beside drafts, got ", indices->dim());
  if (checkpoints.has_value() != checkpoint_offsets.has_value() ||
      checkpoints.has_value() != checkpoint_indices.has_value())
    refuse("checkpoints, checkpoint_offsets and checkpoint_indices are given together");
  decode = decode && !checkpoints && (state_a_token || few_tokens(lengths));
  if (decode && !final_states) refuse("a decode writes its final states");
  p.operation = decode ? KDA_DECODE : KDA_FORWARD;
  p.zero_skipped = zero_skipped && (decode || indices);  // a forward without indices skips nothing
  describe_state(&p.initial_state, states, q, "states", state_v_first, p);
  if (indices) set_indices(&p.initial_state, &p, *indices, q, "indices");
  const auto has_slots = [&](const Tensor& x) { return x.size(0) > 0 || p.num_sequences == 0; };
  if (!has_slots(states)) refuse("states has no slots");
  if (drafts && !has_slots(*drafts)) refuse("drafts has no slots");
  if (checkpoints && !has_slots(*checkpoints)) refuse("checkpoints has no slots");
  p.first_slot = first_slot;
  if (!decode && final_states) p.final_state = p.initial_state;
  if (drafts) {
    describe_state(&p.final_state, *drafts, q, "drafts", state_v_first, p);
    set_indices(&p.final_state, &p, *draft_indices, q, "draft_indices");
  }
  if (parents) {
    p.token_parents = static_cast<const int32_t*>(
        dense_pointer(*parents, q, "parents", kIndices, {p.num_sequences, p.state_index_columns}));
    p.has_token_parents = 1;
  }
  if (checkpoints) {
    describe_state(&p.checkpoints, *checkpoints, q, "checkpoints", state_v_first, p);
    p.checkpoints.indices = static_cast<const int32_t*>(
        dense_pointer(*checkpoint_indices, q, "checkpoint_indices", kIndices, {p.num_sequences}));
    p.checkpoints.indexed = 1;
    p.checkpoint_offsets = static_cast<const int32_t*>(
        dense_pointer(*checkpoint_offsets, q, "checkpoint_offsets", kIndices, {p.num_sequences}));
    p.has_checkpoint_offsets = 1;
    p.checkpoint_every = checkpoint_every;
  }
  set_mask(&p, q, has_state);
  if (num_accepted_tokens) {
    p.num_accepted_tokens = static_cast<const int32_t*>(
        dense_pointer(*num_accepted_tokens, q, "num_accepted_tokens", kIndices, {p.num_sequences}));
    p.has_num_accepted_tokens = 1;
  }
  run(&p, q, lengths, options, drafts ? States::kDrafts : States::kPool);
}

/// Rows of tails, in slots of the same numbers as those of the problem's initial state.
kda_tail tail_of(const kda_problem& p, const Tensor& q, const Tensor& k, const Tensor& g,
                 const Tensor& v_new, const Tensor& folded) {
  expect_rows(k, q, "tail_k");
  kda_tail tail;
  kda_tail_init(&tail);
  const int64_t slots = p.initial_state.num_slots, HV = p.num_value_heads, R = k.size(2);
  tail.num_slots = slots;
  tail.rows = R;
  describe(&tail.k, k, q, "tail_k", kRows, {slots, p.num_heads, R, p.key_dim});
  describe_gates(&tail.g, g, q, "tail_g", {slots, HV, R}, p.key_dim);
  describe(&tail.v_new, v_new, q, "tail_v_new", kFloats, {slots, HV, R, p.value_dim});
  describe(&tail.folded, folded, q, "tail_folded", kIndices, {slots, HV});
  return tail;
}

/// Sets the tensors that split boundary states: all three, or none.
void set_split(kda_tail* tail, const kda_problem& p, const Tensor& q, const MaybeTensor& rest,
               const MaybeTensor& v, const MaybeTensor& beta, bool v_first) {
  if (!rest && !v && !beta) return;
  if (!rest || !v || !beta) refuse("tail_rest, tail_v and tail_beta are given together");
  const int64_t slots = tail->num_slots, HV = p.num_value_heads, K = p.key_dim, V = p.value_dim;
  describe(&tail->rest, *rest, q, "tail_rest", kRest,
           {slots, HV, v_first ? V : K, v_first ? K : V});
  describe(&tail->v, *v, q, "tail_v", kRows, {slots, HV, tail->rows, V});
  describe(&tail->beta, *beta, q, "tail_beta", kRows, {slots, HV, tail->rows});
}

/// Boundary states and tails, both in place (docs/design/decode.md, "Tails").
void update_with_tail(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor o, Tensor states,
                      Tensor indices, Tensor tail_k, Tensor tail_g, Tensor tail_v_new,
                      Tensor tail_folded, Tensor positions, MaybeTensor A_log, MaybeTensor dt_bias,
                      MaybeTensor cu_seqlens, MaybeTensor cu_seqlens_cpu, bool decode,
                      int64_t gate_mode, int64_t beta_mode, double lower_bound, double scale,
                      bool l2norm, bool state_v_first, MaybeTensor has_state, int64_t first_slot,
                      MaybeTensor sources, MaybeTensor parents, MaybeTensor accepted_rows,
                      bool settle, int64_t head_map, int64_t options, MaybeTensor tail_rest,
                      MaybeTensor tail_v, MaybeTensor tail_beta) {
  const Modes modes{gate_mode, beta_mode, lower_bound, scale, l2norm, state_v_first};
  kda_problem p = pool_problem(o, q, k, v, g, beta, A_log, dt_bias, modes, head_map);
  const std::vector<int64_t> lengths = set_lengths(&p, q, cu_seqlens, cu_seqlens_cpu);
  const int64_t N = p.num_sequences;
  const auto integers = [&](const Tensor& x, const char* name,
                            std::initializer_list<int64_t> shape) {
    return static_cast<const int32_t*>(dense_pointer(x, q, name, kIndices, shape));
  };
  p.operation = decode ? KDA_DECODE : KDA_FORWARD;
  p.zero_skipped = 1;
  describe_state(&p.initial_state, states, q, "states", state_v_first, p);
  if (states.size(0) == 0 && N > 0) refuse("states has no slots");
  p.initial_state.indices = integers(indices, "indices", {N});
  p.initial_state.indexed = 1;
  p.first_slot = first_slot;
  set_mask(&p, q, has_state);
  kda_tail tail = tail_of(p, q, tail_k, tail_g, tail_v_new, tail_folded);
  set_split(&tail, p, q, tail_rest, tail_v, tail_beta, state_v_first);
  tail.positions = integers(positions, "positions", {N});
  tail.settle = settle;
  if (sources) {
    tail.sources = integers(*sources, "sources", {N});
    tail.has_sources = 1;
  }
  const auto columns_of = [](const Tensor& x, const char* name) {
    if (x.dim() != 2) refuse(name, " must have 2 dimensions, got ", x.dim());
    return x.size(1);
  };
  if (parents) {
    p.state_index_columns = columns_of(*parents, "parents");
    p.token_parents = integers(*parents, "parents", {N, p.state_index_columns});
    p.has_token_parents = 1;
  }
  if (accepted_rows) {
    tail.accepted_columns = columns_of(*accepted_rows, "accepted_rows");
    tail.accepted_rows = integers(*accepted_rows, "accepted_rows", {N, tail.accepted_columns});
    if (tail.accepted_columns == 0) tail.accepted_rows = nullptr;
  }
  p.tail = &tail;
  run(&p, q, lengths, options, States::kTail);
}

/// Boundary states and rings, both in place: one token a sequence (TailDesc::ring).
void update_with_ring(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor o, Tensor states,
                      Tensor indices, Tensor ring_k, Tensor ring_g, Tensor ring_v_new,
                      Tensor counts, MaybeTensor flush, MaybeTensor A_log, MaybeTensor dt_bias,
                      int64_t gate_mode, int64_t beta_mode, double lower_bound, double scale,
                      bool l2norm, bool state_v_first, int64_t first_slot, int64_t head_map,
                      int64_t options) {
  const Modes modes{gate_mode, beta_mode, lower_bound, scale, l2norm, state_v_first};
  kda_problem p = pool_problem(o, q, k, v, g, beta, A_log, dt_bias, modes, head_map);
  const std::vector<int64_t> lengths = set_lengths(&p, q, {}, {});
  const int64_t N = p.num_sequences, HV = p.num_value_heads;
  const auto integers = [&](const Tensor& x, const char* name) {
    return static_cast<const int32_t*>(dense_pointer(x, q, name, kIndices, {N}));
  };
  p.operation = KDA_DECODE;
  p.zero_skipped = 1;
  describe_state(&p.initial_state, states, q, "states", state_v_first, p);
  if (states.size(0) == 0 && N > 0) refuse("states has no slots");
  p.initial_state.indices = integers(indices, "indices");
  p.initial_state.indexed = 1;
  p.first_slot = first_slot;
  expect_rows(ring_k, q, "ring_k");
  kda_tail ring;
  kda_tail_init(&ring);
  const int64_t slots = ring.num_slots = p.initial_state.num_slots, R = ring.rows = ring_k.size(2);
  describe(&ring.k, ring_k, q, "ring_k", kRows, {slots, p.num_heads, R, p.key_dim});
  describe(&ring.g, ring_g, q, "ring_g", kFloats, {slots, HV, R, p.key_dim});
  describe(&ring.v_new, ring_v_new, q, "ring_v_new", kRows, {slots, HV, R, p.value_dim});
  ring.ring = 1;
  ring.positions = integers(counts, "counts");
  if (flush) ring.flush = integers(*flush, "flush");
  ring.has_flush = flush ? 1 : 0;
  p.tail = &ring;
  run(&p, q, lengths, options, States::kTail);
}

}  // namespace
}  // namespace kda_torch

/// Called by python/libkda/ops.py.
extern "C" __attribute__((visibility("default"))) void kda_torch_set_memory_probe(
    kda_torch::MemoryProbe probe) {
  kda_torch::memory_probe = probe;
}

/// The number of these options, which have been looked at. Called by
/// python/libkda/_binding/options.py.
extern "C" __attribute__((visibility("default"))) int64_t kda_torch_number_of_options(
    int32_t context_parallel, int64_t num_segments, int32_t intra_form, const char* backend,
    int32_t batch_invariant, int64_t most_cut_bytes) {
  return kda_torch::call_options.number_of(
      {context_parallel, num_segments, intra_form, backend, batch_invariant != 0, most_cut_bytes});
}

STABLE_TORCH_LIBRARY(libkda, m) {
  m.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? "
      "dt_bias, Tensor? initial_state, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, int gate_mode, "
      "int beta_mode, float lower_bound, float scale, bool l2norm, bool state_v_first, bool "
      "output_final_state, bool decode=False, Tensor? has_state=None, int head_map=0, int "
      "options=0) "
      "-> (Tensor, Tensor)");
  m.def(
      "forward_into(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) o, Tensor(b!)? "
      "final_state, Tensor(c!)? checkpoints, Tensor? A_log, Tensor? dt_bias, Tensor? "
      "initial_state, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, int gate_mode, int beta_mode, "
      "float lower_bound, float scale, bool l2norm, bool state_v_first, int checkpoint_every=0, "
      "bool decode=False, Tensor? has_state=None, int head_map=0, int options=0) -> ()");
  m.def(
      "update(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) o, Tensor(b!) "
      "states, Tensor? indices, Tensor? num_accepted_tokens, Tensor? A_log, Tensor? dt_bias, "
      "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, bool decode, int gate_mode, int beta_mode, "
      "float lower_bound, float scale, bool l2norm, bool state_v_first, bool zero_skipped=False, "
      "Tensor? has_state=None, int first_slot=0, Tensor(c!)? drafts=None, Tensor? "
      "draft_indices=None, Tensor? parents=None, Tensor(d!)? checkpoints=None, Tensor? "
      "checkpoint_offsets=None, Tensor? checkpoint_indices=None, int checkpoint_every=16, int "
      "head_map=0, int options=0, bool final_states=True) -> ()");
  m.def(
      "update_with_tail(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) o, "
      "Tensor(b!) states, Tensor indices, Tensor(c!) tail_k, Tensor(d!) tail_g, Tensor(e!) "
      "tail_v_new, Tensor(f!) tail_folded, Tensor positions, Tensor? A_log, Tensor? dt_bias, "
      "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, bool decode, int gate_mode, int beta_mode, "
      "float lower_bound, float scale, bool l2norm, bool state_v_first, Tensor? has_state=None, "
      "int first_slot=0, Tensor? sources=None, Tensor? parents=None, Tensor? accepted_rows=None, "
      "bool settle=False, int head_map=0, int options=0, Tensor(g!)? tail_rest=None, Tensor(h!)? "
      "tail_v=None, Tensor(i!)? tail_beta=None) -> ()");
  m.def(
      "update_with_ring(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) o, "
      "Tensor(b!) states, Tensor indices, Tensor(c!) ring_k, Tensor(d!) ring_g, Tensor(e!) "
      "ring_v_new, Tensor counts, Tensor? flush, Tensor? A_log, Tensor? dt_bias, int gate_mode, "
      "int beta_mode, float lower_bound, float scale, bool l2norm, bool state_v_first, int "
      "first_slot=0, int head_map=0, int options=0) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(libkda, CompositeExplicitAutograd, m) {
  m.impl("forward", TORCH_BOX(&kda_torch::forward));
  m.impl("forward_into", TORCH_BOX(&kda_torch::forward_into));
  m.impl("update", TORCH_BOX(&kda_torch::update));
  m.impl("update_with_tail", TORCH_BOX(&kda_torch::update_with_tail));
  m.impl("update_with_ring", TORCH_BOX(&kda_torch::update_with_ring));
}
