// SPDX-License-Identifier: Apache-2.0
// Named bad calls: each is refused with a message that names the argument, before anything is
// written. (Bad files: tests/io, tests/check/inputs_test.cpp. Bad command lines: tests/tools.)
#include <gtest/gtest.h>

#include <climits>
#include <cmath>
#include <cstring>

#include "kda/kda.h"
#include "support/harness.hpp"

namespace kda {
namespace {

constexpr int64_t kHuge = INT64_MAX;

/// Everything a call needs, all legal: three packed sequences with every option in use.
struct Call {
  check::Inputs inputs;
  Problem problem;
  std::vector<int64_t> cu_seqlens;
  std::vector<int32_t> cu_narrow, initial_idx = {0, 1, 2}, final_idx = {3, 4, 5},
                                  checkpoint_idx = {6, 7};
  std::vector<uint8_t> mask = {1, 1, 1};
  std::vector<int32_t> accepted = {1, 1, 1}, parents, offsets;
  io::Buffer pool, checkpoints, o, room;
  PlanOptions options;
  Tensors tensors;
  bool from_bounds = false;
  std::size_t workspace_cut = 0;
  bool null_workspace = false, shift_workspace = false;

  static constexpr int64_t kSlots = 8;

  Call() {
    check::GenerateOptions shape = test::shape(0, 2, 16, 8);
    shape.seq_lens = {20, 3, 17};
    inputs = check::generate(shape);
    problem = inputs.problem;
    cu_seqlens = inputs.cu_seqlens;
    StateDesc states;
    states.num_slots = kSlots;
    states.indexed = true;
    states.tensor = contiguous(DType::kFloat32, {kSlots, 2, 16, 8});
    problem.initial_state = problem.final_state = problem.checkpoints = states;
    problem.checkpoint_every = 16;
    problem.initial_state_mask = true;
    pool = io::Buffer(kSlots * 2 * 16 * 8 * 4);
    pool.fill(0);
    checkpoints = pool;
    o = io::Buffer(40 * 2 * 8 * 4);
    tensors = inputs.tensors();
    tensors.o = o.data();
    tensors.initial_state = tensors.final_state = pool.data();
    tensors.checkpoints = checkpoints.data();
    cu_narrow.assign(cu_seqlens.begin(), cu_seqlens.end());
  }

  void make_drafts() {
    make_decode_with_final_state();
    problem.state_index_columns = 2;
    final_idx = {2, 3, 4, 5, 6, 7};
  }
  void make_decode_with_final_state() {
    const auto final_state = problem.final_state;
    make_decode();
    problem.final_state = final_state;
  }
  void make_decode() {
    problem.operation = Operation::kDecode;
    problem.final_state.reset();
    problem.checkpoints.reset();
    problem.checkpoint_every = 0;
    problem.initial_state_mask = false;
    problem.cu_seqlens.reset();
    problem.batch = problem.num_sequences = 3;
    problem.num_tokens = 2;
    cu_seqlens.clear();
    const auto resize = [](TensorDesc& desc, int64_t row) { desc.strides[0] = 2 * row; };
    resize(problem.q, 32);
    resize(problem.k, 32);
    resize(problem.v, 16);
    resize(problem.g, 32);
    resize(problem.o, 16);
    problem.beta = contiguous(DType::kFloat32, {3, 2, 2});
  }

  void poison() {
    o.fill(0xab);
    pool.fill(0xab);
    checkpoints.fill(0xab);
  }
  bool untouched() const {
    const auto clean = [](const io::Buffer& buffer) {
      for (std::size_t i = 0; i < buffer.size(); ++i)
        if (buffer.as<unsigned char>()[i] != 0xab) return false;
      return true;
    };
    return clean(o) && clean(pool) && clean(checkpoints);
  }

  Status execute() {
    Plan plan;
    tensors.initial_state_indices = initial_idx.empty() ? nullptr : initial_idx.data();
    tensors.final_state_indices = final_idx.empty() ? nullptr : final_idx.data();
    tensors.checkpoint_indices = checkpoint_idx.empty() ? nullptr : checkpoint_idx.data();
    tensors.initial_state_mask = mask.empty() ? nullptr : mask.data();
    tensors.num_accepted_tokens = accepted.empty() ? nullptr : accepted.data();
    tensors.checkpoint_offsets = offsets.empty() ? nullptr : offsets.data();
    tensors.token_parents = parents.empty() ? nullptr : parents.data();
    const Status planned = from_bounds
                               ? make_plan_from_bounds(problem, cpu_facts(), options, &plan)
                               : make_plan(problem, cu_seqlens, cpu_facts(), options, &plan);
    if (!planned.ok()) return planned;
    io::Buffer workspace(plan.workspace_bytes + 8);
    workspace.fill(0xff);
    char* at = workspace.as<char>() + (shift_workspace ? 8 : 0);
    return run(plan, tensors, null_workspace ? nullptr : at, plan.workspace_bytes - workspace_cut);
  }
};

struct BadCall {
  const char* name;
  void (*spoil)(Call&);
  const char* message;
};

using C = Call;

const BadCall kBadProblems[] = {
    {"operation", [](C& c) { c.problem.operation = static_cast<Operation>(7); },
     "operation: value 7"},
    {"batch_negative", [](C& c) { c.problem.batch = -1; }, "batch: B = -1"},
    {"batch_huge", [](C& c) { c.problem.batch = kHuge; }, "batch: B"},
    {"tokens_negative", [](C& c) { c.problem.num_tokens = -1; }, "num_tokens: T = -1"},
    {"tokens_huge", [](C& c) { c.problem.num_tokens = kHuge; }, "num_tokens: T"},
    {"tokens_product",
     [](C& c) {
       c.problem.batch = 1 << 20;
       c.problem.num_tokens = 1 << 20;
     },
     "B * T"},
    {"heads_zero", [](C& c) { c.problem.num_heads = 0; }, "num_heads: H = 0"},
    {"heads_negative", [](C& c) { c.problem.num_heads = -2; }, "num_heads: H = -2"},
    {"heads_huge", [](C& c) { c.problem.num_heads = 70000; }, "num_heads: H"},
    {"value_heads_zero", [](C& c) { c.problem.num_value_heads = 0; }, "num_value_heads"},
    {"value_heads_ratio", [](C& c) { c.problem.num_value_heads = 3; },
     "v: HV = 3 is not a multiple of H = 2"},
    {"value_heads_fewer", [](C& c) { c.problem.num_value_heads = 1; },
     "v: HV = 1 is not a multiple"},
    {"key_dim_zero", [](C& c) { c.problem.key_dim = 0; }, "key_dim: K = 0"},
    {"key_dim_large", [](C& c) { c.problem.key_dim = 257; }, "key_dim: K = 257"},
    {"value_dim_zero", [](C& c) { c.problem.value_dim = 0; }, "value_dim: V = 0"},
    {"value_dim_large", [](C& c) { c.problem.value_dim = 1000; }, "value_dim: V = 1000"},
    {"sequences_negative", [](C& c) { c.problem.num_sequences = -1; }, "num_sequences: N = -1"},
    {"sequences_huge", [](C& c) { c.problem.num_sequences = kHuge; }, "num_sequences: N"},
    {"sequences_without_lengths", [](C& c) { c.problem.cu_seqlens.reset(); },
     "num_sequences: N = 3 is not B = 1"},
    {"lengths_with_batch", [](C& c) { c.problem.batch = 3; }, "cu_seqlens: needs batch = 1"},
    {"lengths_dtype", [](C& c) { c.problem.cu_seqlens = DType::kFloat32; },
     "cu_seqlens: dtype fp32"},
    {"gate_unknown", [](C& c) { c.problem.gate_mode = static_cast<GateMode>(9); },
     "gate_mode: value 9"},
    {"gate_negative", [](C& c) { c.problem.gate_mode = static_cast<GateMode>(-1); },
     "gate_mode: value -1"},
    {"beta_mode_unknown", [](C& c) { c.problem.beta_mode = static_cast<BetaMode>(3); },
     "beta_mode: value 3"},
    {"layout_unknown", [](C& c) { c.problem.state_layout = static_cast<StateLayout>(2); },
     "state_layout: value 2"},
    {"softplus_needs_A_log",
     [](C& c) {
       c.problem.gate_mode = GateMode::kSoftplus;
       c.problem.A_log.reset();
     },
     "A_log: required"},
    {"log_takes_no_A_log", [](C& c) { c.problem.gate_mode = GateMode::kLog; }, "A_log: given"},
    {"log_takes_no_dt_bias",
     [](C& c) {
       c.problem.gate_mode = GateMode::kLog;
       c.problem.A_log.reset();
     },
     "dt_bias: given"},
    {"lower_bound_zero", [](C& c) { c.problem.lower_bound = 0; }, "lower_bound: 0"},
    {"lower_bound_positive", [](C& c) { c.problem.lower_bound = 5; }, "lower_bound: 5"},
    {"lower_bound_nan", [](C& c) { c.problem.lower_bound = NAN; }, "lower_bound"},
    {"lower_bound_infinite", [](C& c) { c.problem.lower_bound = -INFINITY; }, "lower_bound"},
    {"scale_nan", [](C& c) { c.problem.scale = NAN; }, "scale"},
    {"scale_infinite", [](C& c) { c.problem.scale = INFINITY; }, "scale"},
    {"scale_above_fp32", [](C& c) { c.problem.scale = -1e39; }, "scale: the size of -1e+39"},
    {"scale_zero_in_fp32", [](C& c) { c.problem.scale = 1e-46; }, "scale: the size of 1e-46"},
    {"lower_bound_above_fp32", [](C& c) { c.problem.lower_bound = -1e39; },
     "lower_bound: -1e+39 is outside -1e35..-1e-35"},
    {"lower_bound_zero_in_fp32", [](C& c) { c.problem.lower_bound = -1e-46; },
     "lower_bound: -1e-46 is outside"},
    {"q_undescribed", [](C& c) { c.problem.q = {}; }, "q: was never described"},
    {"beta_undescribed", [](C& c) { c.problem.beta = {}; }, "beta: was never described"},
    {"beta_dtype_alone",
     [](C& c) {
       c.problem.beta = {};
       c.problem.beta.dtype = DType::kFloat32;
     },
     "beta: was never described"},
    {"g_half_described",
     [](C& c) {
       c.problem.g = {};
       c.problem.g.strides[3] = 1;
     },
     "g: the stride of dimension 1 was never set"},
    {"A_log_undescribed", [](C& c) { c.problem.A_log = TensorDesc{DType::kFloat32}; },
     "A_log: was never described"},
    {"pool_undescribed",
     [](C& c) { c.problem.initial_state->tensor = TensorDesc{DType::kFloat32}; },
     "initial_state: was never described"},
    {"q_dtype", [](C& c) { c.problem.q.dtype = DType::kInt32; }, "q: dtype int32"},
    {"k_dtype", [](C& c) { c.problem.k.dtype = DType::kInt64; }, "k: dtype int64"},
    {"v_dtype", [](C& c) { c.problem.v.dtype = static_cast<DType>(42); }, "v: dtype"},
    {"g_dtype", [](C& c) { c.problem.g.dtype = DType::kInt32; }, "g: dtype"},
    {"beta_dtype", [](C& c) { c.problem.beta.dtype = DType::kInt32; }, "beta: dtype"},
    {"o_dtype", [](C& c) { c.problem.o.dtype = DType::kInt32; }, "o: dtype"},
    {"A_log_dtype", [](C& c) { c.problem.A_log->dtype = DType::kBFloat16; }, "A_log: dtype bf16"},
    {"dt_bias_dtype", [](C& c) { c.problem.dt_bias->dtype = DType::kFloat16; },
     "dt_bias: dtype fp16"},
    {"q_innermost", [](C& c) { c.problem.q.strides[3] = 2; }, "q: innermost stride is 2"},
    {"k_innermost", [](C& c) { c.problem.k.strides[3] = 0; }, "k: innermost stride is 0"},
    {"v_innermost", [](C& c) { c.problem.v.strides[3] = -1; }, "v: innermost stride is -1"},
    {"g_innermost", [](C& c) { c.problem.g.strides[3] = 4; },
     "g: innermost stride is 4, must be 1, or 0 for one gate a head"},
    {"head_map_unknown", [](C& c) { c.problem.head_map = static_cast<HeadMap>(2); },
     "head_map: value 2"},
    {"o_innermost", [](C& c) { c.problem.o.strides[3] = 4; }, "o: innermost"},
    {"dt_bias_innermost", [](C& c) { c.problem.dt_bias->strides[1] = 2; },
     "dt_bias: innermost stride is 2, must be 1, or 0 for one bias a head"},
    {"dt_bias_of_a_gate_a_channel", [](C& c) { c.problem.dt_bias->strides[1] = 0; },
     "dt_bias: innermost stride is 0, but g has a gate a channel"},
    {"q_negative_stride", [](C& c) { c.problem.q.strides[1] = -32; }, "q: stride -32"},
    {"beta_negative_stride", [](C& c) { c.problem.beta.strides[2] = -1; }, "beta: stride -1"},
    {"q_stride_overflow", [](C& c) { c.problem.q.strides[1] = kHuge; }, "q: stride"},
    {"v_stride_overflow", [](C& c) { c.problem.v.strides[1] = kHuge / 8; }, "v: stride"},
    {"o_stride_overflow", [](C& c) { c.problem.o.strides[2] = kHuge - 7; }, "o: stride"},
    {"q_alignment_zero", [](C& c) { c.problem.q.alignment = 0; }, "q: alignment 0"},
    {"q_alignment_negative", [](C& c) { c.problem.q.alignment = -16; }, "q: alignment -16"},
    {"q_alignment_odd", [](C& c) { c.problem.q.alignment = 24; }, "q: alignment 24"},
    {"q_alignment_huge", [](C& c) { c.problem.q.alignment = 8192; }, "q: alignment 8192"},
    {"q_alignment_below_type", [](C& c) { c.problem.q.alignment = 2; }, "q: alignment 2 is below"},
    {"k_stride_misaligned", [](C& c) { c.problem.k.strides[1] = 33; },
     "k: stride 33 of dimension 1 is 132 bytes"},
    {"o_overlapping_tokens", [](C& c) { c.problem.o.strides[1] = 0; },
     "o: stride 0 makes elements of this output overlap"},
    {"o_overlapping_heads", [](C& c) { c.problem.o.strides[2] = 4; }, "o: stride 4"},
    {"final_overlapping_slots", [](C& c) { c.problem.final_state->tensor.strides[0] = 8; },
     "final_state: stride"},
    {"initial_dtype", [](C& c) { c.problem.initial_state->tensor.dtype = DType::kFloat16; },
     "initial_state: dtype fp16"},
    {"final_dtype", [](C& c) { c.problem.final_state->tensor.dtype = DType::kInt32; },
     "final_state: dtype"},
    {"checkpoint_dtype", [](C& c) { c.problem.checkpoints->tensor.dtype = DType::kFloat16; },
     "checkpoints: dtype"},
    {"initial_slots_negative", [](C& c) { c.problem.initial_state->num_slots = -1; },
     "initial_state: num_slots = -1"},
    {"initial_slots_mismatch", [](C& c) { c.problem.initial_state->indexed = false; },
     "initial_state: num_slots = 8 is not the number of sequences"},
    {"final_slots_mismatch", [](C& c) { c.problem.final_state->indexed = false; },
     "final_state: num_slots = 8"},
    {"initial_innermost", [](C& c) { c.problem.initial_state->tensor.strides[3] = 2; },
     "initial_state: innermost"},
    {"initial_slot_stride_overflow",
     [](C& c) { c.problem.initial_state->tensor.strides[0] = kHuge / 4; }, "initial_state: stride"},
    {"checkpoint_every_zero", [](C& c) { c.problem.checkpoint_every = 0; }, "checkpoint_every: 0"},
    {"checkpoint_every_odd", [](C& c) { c.problem.checkpoint_every = 24; }, "checkpoint_every: 24"},
    {"checkpoint_every_negative", [](C& c) { c.problem.checkpoint_every = -16; },
     "checkpoint_every: -16"},
    {"checkpoint_count", [](C& c) { c.problem.checkpoints->indexed = false; },
     "checkpoints: num_slots = 8 is not the number of checkpoints 2"},
    {"mask_without_state", [](C& c) { c.problem.initial_state.reset(); },
     "initial_state_mask: given without"},
    {"columns_in_forward", [](C& c) { c.problem.state_index_columns = 2; }, "state_index_columns"},
    {"accepted_in_forward", [](C& c) { c.problem.num_accepted_tokens = true; },
     "num_accepted_tokens"},
    {"zeroes_in_forward_without_state",
     [](C& c) {
       c.problem.zero_skipped = true;
       c.problem.initial_state.reset();
       c.problem.initial_state_mask = false;
     },
     "zero_skipped: a forward needs an indexed initial_state"},
    {"zeroes_with_final_state",
     [](C& c) {
       c.make_decode_with_final_state();
       c.problem.zero_skipped = true;
     },
     "zero_skipped: belongs to decode in place"},
    {"decode_without_pool",
     [](C& c) {
       c.make_decode();
       c.problem.initial_state.reset();
     },
     "initial_state: decode needs"},
    {"decode_final_state",
     [](C& c) {
       c.make_decode_with_final_state();
       c.problem.num_accepted_tokens = true;
     },
     "final_state: with num_accepted_tokens"},
    {"drafts_unindexed",
     [](C& c) {
       c.make_drafts();
       c.problem.final_state->indexed = false;
       c.problem.final_state->num_slots = 3;
     },
     "state_index_columns: S = 2 needs indexed states"},
    {"parents_of_one_column",
     [](C& c) {
       c.make_decode();
       c.problem.token_parents = true;
     },
     "token_parents: needs a state a token"},
    {"parents_in_forward", [](C& c) { c.problem.token_parents = true; },
     "token_parents: belong to decode"},
    {"decode_checkpoints",
     [](C& c) {
       const auto s = c.problem.checkpoints;
       c.make_decode();
       c.problem.checkpoints = s;
     },
     "checkpoints, checkpoint_offsets: belong to forward"},
    {"decode_too_many_tokens",
     [](C& c) {
       c.make_decode();
       c.problem.num_tokens = 9;
       c.problem.batch = c.problem.num_sequences = 1;
     },
     "num_tokens: decode takes 1..8"},
    {"decode_columns_zero",
     [](C& c) {
       c.make_decode();
       c.problem.state_index_columns = 0;
     },
     "state_index_columns: S = 0"},
    {"decode_columns_unindexed",
     [](C& c) {
       c.make_decode();
       c.problem.initial_state->indexed = false;
       c.problem.initial_state->num_slots = 3;
       c.problem.state_index_columns = 2;
     },
     "needs indexed states"},
    {"decode_columns_too_few",
     [](C& c) {
       c.make_decode();
       c.problem.state_index_columns = 2;
       c.problem.num_tokens = 3;
       c.problem.batch = c.problem.num_sequences = 1;
     },
     "state_index_columns: S = 2 is below the 3 tokens"},
    {"decode_overlapping_pool",
     [](C& c) {
       c.make_decode();
       c.problem.initial_state->tensor.strides[0] = 0;
     },
     "initial_state: stride 0"},
    {"first_slot_negative", [](C& c) { c.problem.first_slot = -1; },
     "first_slot = -1 is outside 0.."},
    {"first_slot_huge", [](C& c) { c.problem.first_slot = int64_t{1} << 32; },
     "first_slot = 4294967296 is outside 0.."},
    {"first_slot_above_pool", [](C& c) { c.problem.first_slot = 9; },
     "first_slot = 9 is above 8, the number of slots of initial_state"},
    {"first_slot_without_indices",
     [](C& c) {
       c.make_decode();
       c.problem.initial_state->indexed = false;
       c.problem.initial_state->num_slots = 3;
       c.problem.first_slot = 1;
     },
     "first_slot = 1 needs indexed states"},
    {"lengths_missing", [](C& c) { c.cu_seqlens.clear(); },
     "cu_seqlens: has 0 entries, needs N + 1 = 4"},
    {"lengths_short", [](C& c) { c.cu_seqlens.pop_back(); }, "cu_seqlens: has 3 entries"},
    {"lengths_first", [](C& c) { c.cu_seqlens[0] = 1; }, "cu_seqlens: starts with 1"},
    {"lengths_last", [](C& c) { c.cu_seqlens[3] = 41; }, "cu_seqlens: ends with 41"},
    {"lengths_decreasing", [](C& c) { c.cu_seqlens[1] = 30; },
     "cu_seqlens: entry 2 = 23 is below entry 1 = 30"},
    {"lengths_negative", [](C& c) { c.cu_seqlens[1] = -5; }, "cu_seqlens: entry 1 = -5"},
    {"lengths_unasked",
     [](C& c) {
       c.make_decode();
       c.cu_seqlens = {0, 2, 4, 6};
     },
     "cu_seqlens: 4 lengths given"},
    {"threads_negative", [](C& c) { c.options.num_threads = -1; }, "num_threads: -1"},
    {"threads_huge", [](C& c) { c.options.num_threads = 5000; }, "num_threads: 5000"},
    {"policy_unknown", [](C& c) { c.options.context_parallel = static_cast<SegmentPolicy>(8); },
     "context_parallel: value 8"},
    {"segments_zero", [](C& c) { c.options = test::fixed_segments(0); }, "num_segments: 0"},
    {"segments_negative", [](C& c) { c.options = test::fixed_segments(-3); }, "num_segments: -3"},
    {"segments_huge", [](C& c) { c.options = test::fixed_segments(kHuge); }, "num_segments"},
    {"backend_unknown", [](C& c) { c.options.backend = "none"; }, "backend: 'none'"},
    {"backend_weird", [](C& c) { c.options.backend = "../x"; }, "backend: '../x'"},
};

const BadCall kBadRuns[] = {
    {"q_null", [](C& c) { c.tensors.q = nullptr; }, "q: pointer is null"},
    {"k_null", [](C& c) { c.tensors.k = nullptr; }, "k: pointer is null"},
    {"v_null", [](C& c) { c.tensors.v = nullptr; }, "v: pointer is null"},
    {"g_null", [](C& c) { c.tensors.g = nullptr; }, "g: pointer is null"},
    {"beta_null", [](C& c) { c.tensors.beta = nullptr; }, "beta: pointer is null"},
    {"A_log_null", [](C& c) { c.tensors.A_log = nullptr; }, "A_log: pointer is null"},
    {"dt_bias_null", [](C& c) { c.tensors.dt_bias = nullptr; }, "dt_bias: pointer is null"},
    {"o_null", [](C& c) { c.tensors.o = nullptr; }, "o: pointer is null"},
    {"initial_null", [](C& c) { c.tensors.initial_state = nullptr; },
     "initial_state: pointer is null"},
    {"final_null", [](C& c) { c.tensors.final_state = nullptr; }, "final_state: pointer is null"},
    {"checkpoints_null", [](C& c) { c.tensors.checkpoints = nullptr; },
     "checkpoints: pointer is null"},
    {"initial_indices_null", [](C& c) { c.initial_idx.clear(); },
     "initial_state_indices: pointer is null"},
    {"final_indices_null", [](C& c) { c.final_idx.clear(); },
     "final_state_indices: pointer is null"},
    {"checkpoint_indices_null", [](C& c) { c.checkpoint_idx.clear(); },
     "checkpoint_indices: pointer is null"},
    {"mask_null", [](C& c) { c.mask.clear(); }, "initial_state_mask: pointer is null"},
    {"A_log_above_fp32", [](C& c) { c.inputs.A_log.as<float>()[1] = 89; },
     "A_log: entry 1 = 89 is above 88 with gate bounded"},
    {"A_log_infinite", [](C& c) { c.inputs.A_log.as<float>()[0] = INFINITY; },
     "A_log: entry 0 = inf is above 88"},
    {"A_log_beyond_softplus",
     [](C& c) {
       c.problem.gate_mode = GateMode::kSoftplus;
       c.inputs.A_log.as<float>()[1] = 71;
     },
     "A_log: entry 1 = 71 is above 70 with gate softplus"},
    {"lengths_of_another_plan",
     [](C& c) {
       c.room = io::Buffer(4 * 8);
       const int64_t other[] = {0, 4, 23, 40};
       std::memcpy(c.room.data(), other, sizeof other);
       c.tensors.cu_seqlens = c.room.data();
     },
     "cu_seqlens: entry 1 = 4, but the plan was made for 20"},
    {"q_misaligned", [](C& c) { c.tensors.q = c.inputs.q.data() + 4; },
     "q: pointer is not aligned to the stated 16"},
    {"v_misaligned", [](C& c) { c.tensors.v = c.inputs.v.data() + 8; },
     "v: pointer is not aligned"},
    {"o_misaligned", [](C& c) { c.tensors.o = c.o.data() + 2; }, "o: pointer is not aligned"},
    {"pool_misaligned", [](C& c) { c.tensors.initial_state = c.pool.data() + 4; },
     "initial_state: pointer is not aligned"},
    {"initial_slot_above", [](C& c) { c.initial_idx[2] = 8; },
     "initial_state_indices: entry 2 = 8 is outside 0..7 (a negative one means none)"},
    {"initial_num_slots_forgotten",
     [](C& c) {
       c.make_decode();
       c.problem.initial_state->num_slots = 0;
     },
     "initial_state_indices: entry 0 = 0, but the buffer has num_slots = 0"},
    {"initial_slot_max", [](C& c) { c.initial_idx[1] = INT_MAX; },
     "initial_state_indices: entry 1"},
    {"final_slot_above", [](C& c) { c.final_idx[1] = 8; }, "final_state_indices: entry 1 = 8"},
    {"checkpoint_slot_above", [](C& c) { c.checkpoint_idx[1] = 9; },
     "checkpoint_indices: entry 1 = 9"},
    {"final_slot_twice",
     [](C& c) {
       c.final_idx = {3, 3, 5};
     },
     "final_state_indices: slot 3 would be written twice"},
    {"checkpoint_slot_twice",
     [](C& c) {
       c.checkpoint_idx = {6, 6};
     },
     "checkpoint_indices: slot 6 would be written twice"},
    {"slot_read_and_written",
     [](C& c) {
       c.final_idx = {1, 4, 5};
     },
     "initial_state_indices: slot 1 of sequence 1 would be written by another"},
    {"checkpoint_into_final_slot",
     [](C& c) {
       c.tensors.checkpoints = c.pool.data();
       c.checkpoint_idx = {3, 7};
     },
     "checkpoint_indices: slot 3 would be written twice"},
    {"checkpoint_into_read_slot",
     [](C& c) {
       c.tensors.checkpoints = c.pool.data();
       c.checkpoint_idx = {0, 7};
     },
     "initial_state_indices: slot 0"},
    {"checkpoint_pool_read",
     [](C& c) {
       c.problem.final_state.reset();
       c.tensors.checkpoints = c.pool.data();
       c.checkpoint_idx = {2, 7};
     },
     "initial_state_indices: slot 2"},
    {"o_over_q", [](C& c) { c.tensors.o = c.inputs.q.data(); }, "o: overlaps q"},
    {"o_over_end_of_v",
     [](C& c) {  // in room of their own: what lies behind v elsewhere is anybody's
       c.room = io::Buffer(2 * c.inputs.v.size());
       c.tensors.v = c.room.data();
       c.tensors.o = c.room.data() + c.inputs.v.size() - 16;
     },
     "o: overlaps v"},
    {"o_over_beta", [](C& c) { c.tensors.o = c.inputs.beta.data(); }, "o: overlaps"},
    {"o_over_g", [](C& c) { c.tensors.o = c.inputs.g.data() + 64; }, "o: overlaps g"},
    {"o_over_pool", [](C& c) { c.tensors.o = c.pool.data() + 256; }, "o: overlaps initial_state"},
    {"final_over_k", [](C& c) { c.tensors.final_state = c.inputs.k.data(); }, "final_state"},
    {"final_over_shifted_pool", [](C& c) { c.tensors.final_state = c.pool.data() + 16; },
     "final_state: overlaps"},
    // Vectors that are long enough for an output; what is read of them is legal.
    {"o_over_slots",
     [](C& c) {
       c.initial_idx.resize(1024);
       c.tensors.o = c.initial_idx.data();
     },
     "o: overlaps initial_state_indices in memory"},
    {"o_over_final_slots",
     [](C& c) {
       c.final_idx.resize(1024);
       c.tensors.o = c.final_idx.data();
     },
     "o: overlaps final_state_indices in memory"},
    {"o_over_checkpoint_slots",
     [](C& c) {
       c.checkpoint_idx.resize(1024);
       c.tensors.o = c.checkpoint_idx.data();
     },
     "o: overlaps checkpoint_indices in memory"},
    {"o_over_mask",
     [](C& c) {
       c.mask.resize(4096);
       c.tensors.o = c.mask.data();
     },
     "o: overlaps initial_state_mask in memory"},
    {"o_over_lengths",
     [](C& c) {
       c.from_bounds = true;
       c.cu_seqlens.resize(1024);
       c.tensors.o = c.cu_seqlens.data();
       c.tensors.cu_seqlens = c.cu_seqlens.data();
     },
     "o: overlaps cu_seqlens in memory"},
    {"o_over_offsets",
     [](C& c) {
       c.problem.checkpoint_offsets = true;
       c.checkpoint_idx = {5, 6, 7};
       c.offsets = {16, 0, 16};
       c.offsets.resize(1024);
       c.tensors.o = c.offsets.data();
     },
     "o: overlaps checkpoint_offsets in memory"},
    {"o_over_accepted",
     [](C& c) {
       c.make_decode();
       c.initial_idx = {0, 1, 2, 3, 4, 5};
       c.problem.state_index_columns = 2;
       c.problem.num_accepted_tokens = true;
       c.accepted.resize(1024);
       c.tensors.o = c.accepted.data();
     },
     "o: overlaps num_accepted_tokens in memory"},
    {"drafts_over_parents",
     [](C& c) {
       c.make_drafts();
       c.tensors.checkpoints = nullptr;
       c.problem.token_parents = true;
       c.parents.resize(4096);
       c.tensors.final_state = c.parents.data();
     },
     "final_state: overlaps token_parents in memory"},
    {"pool_over_slots",
     [](C& c) {
       c.make_decode();
       c.initial_idx.resize(4096);
       c.tensors.initial_state = c.initial_idx.data();
     },
     "initial_state: overlaps initial_state_indices in memory"},
    {"checkpoints_over_o", [](C& c) { c.tensors.checkpoints = c.o.data(); },
     "o: overlaps checkpoints"},
    {"workspace_null", [](C& c) { c.null_workspace = true; }, "workspace: is null"},
    {"workspace_small", [](C& c) { c.workspace_cut = 1; }, "workspace: has"},
    {"workspace_misaligned", [](C& c) { c.shift_workspace = true; },
     "workspace: is not aligned to 64"},
    {"bounds_lengths_null", [](C& c) { c.from_bounds = true; }, "cu_seqlens: pointer is null"},
    {"bounds_lengths_decreasing",
     [](C& c) {
       c.from_bounds = true;
       c.cu_seqlens[1] = 35;
       c.tensors.cu_seqlens = c.cu_seqlens.data();
     },
     "cu_seqlens: entry 2 = 23"},
    {"bounds_lengths_first",
     [](C& c) {
       c.from_bounds = true;
       c.cu_seqlens[0] = -1;
       c.tensors.cu_seqlens = c.cu_seqlens.data();
     },
     "cu_seqlens: starts with -1"},
    {"bounds_lengths_last",
     [](C& c) {
       c.from_bounds = true;
       c.cu_seqlens[3] = 1000;
       c.tensors.cu_seqlens = c.cu_seqlens.data();
     },
     "cu_seqlens: ends with 1000"},
    {"bounds_narrow_lengths",
     [](C& c) {
       c.from_bounds = true;
       c.problem.cu_seqlens = DType::kInt32;
       c.cu_narrow[2] = INT_MAX;
       c.tensors.cu_seqlens = c.cu_narrow.data();
     },
     "cu_seqlens"},
    {"bounds_checkpoint_count",
     [](C& c) {
       c.from_bounds = true;
       c.problem.checkpoints->indexed = false;
       c.tensors.cu_seqlens = c.cu_seqlens.data();
     },
     "checkpoints: num_slots = 8"},
    {"decode_slot_above",
     [](C& c) {
       c.make_decode();
       c.initial_idx = {0, 8, 1};
     },
     "initial_state_indices: entry 1 = 8"},
    {"decode_slot_twice",
     [](C& c) {
       c.make_decode();
       c.initial_idx = {4, 2, 4};
     },
     "initial_state_indices: slot 4 would be written twice"},
    {"decode_accepted_null",
     [](C& c) {
       c.make_decode();
       c.problem.num_accepted_tokens = true;
       c.accepted.clear();
     },
     "num_accepted_tokens: pointer is null"},
    {"decode_accepted_zero",
     [](C& c) {
       c.make_decode();
       c.problem.num_accepted_tokens = true;
       c.accepted = {1, 0, 1};
     },
     "num_accepted_tokens: entry 1 = 0"},
    {"decode_accepted_above",
     [](C& c) {
       c.make_decode();
       c.problem.num_accepted_tokens = true;
       c.accepted = {1, 2, 1};
     },
     "num_accepted_tokens: entry 1 = 2 is outside 1..1"},
    {"drafts_slot_twice",
     [](C& c) {
       c.make_drafts();
       c.final_idx[3] = 2;
     },
     "final_state_indices: slot 2 would be written twice"},
    {"drafts_slot_outside",
     [](C& c) {
       c.make_drafts();
       c.final_idx[5] = Call::kSlots;
     },
     "final_state_indices: entry 5 = 8 is outside"},
    {"drafts_written_while_read",
     [](C& c) {
       c.make_drafts();
       c.final_idx[5] = 0;  // of sequence 2, and read by sequence 0
     },
     "initial_state_indices: slot 0 of sequence 0 would be written by another"},
    {"pool_of_two_sizes", [](C& c) { c.problem.final_state->num_slots = 6; },
     "final_state: overlaps initial_state in memory"},
    {"offsets_null",
     [](C& c) {
       c.problem.checkpoint_offsets = true;
       c.checkpoint_idx = {5, 6, 7};
     },
     "checkpoint_offsets: pointer is null"},
    {"offsets_without_indices",
     [](C& c) {
       c.problem.checkpoint_offsets = true;
       c.problem.checkpoints->indexed = false;
       c.problem.checkpoints->num_slots = 2;
     },
     "checkpoint_offsets: needs checkpoints with indices"},
    {"offsets_in_decode",
     [](C& c) {
       c.make_decode();
       c.problem.checkpoint_offsets = true;
     },
     "checkpoints, checkpoint_offsets: belong to forward"},
    {"offsets_in_one_slot",
     [](C& c) {
       c.problem.checkpoint_offsets = true;
       c.offsets = {16, 0, 16};
       c.checkpoint_idx = {6, 6, 6};
     },
     "checkpoint_indices: slot 6 would be written twice"},
    {"parents_null",
     [](C& c) {
       c.make_drafts();
       c.problem.token_parents = true;
     },
     "token_parents: pointer is null"},
    {"parents_not_below",
     [](C& c) {
       c.make_drafts();
       c.problem.token_parents = true;
       c.parents = {0, 0, 0, 1, 0, 0};
     },
     "token_parents: entry 1, 1 = 1 is not below 1"},
    {"decode_written_while_read",
     [](C& c) {
       c.make_decode();
       c.problem.state_index_columns = 2;
       c.initial_idx = {0, 1, 2, 3, 4, 5};
       c.problem.num_accepted_tokens = true;
       c.accepted = {1, 1, 2};
       c.initial_idx[5] = 1;
     },
     "would be written"},
    {"decode_bounds_too_long",
     [](C& c) {
       c.problem.operation = Operation::kDecode;
       c.problem.final_state.reset();
       c.problem.checkpoints.reset();
       c.problem.initial_state_mask = false;
       c.from_bounds = true;
       c.tensors.cu_seqlens = c.cu_seqlens.data();
     },
     "cu_seqlens: decode takes at most 8"},
    {"decode_pool_over_o",
     [](C& c) {
       c.make_decode();
       c.tensors.initial_state = c.o.data();
     },
     "overlaps"},
    {"decode_pool_null",
     [](C& c) {
       c.make_decode();
       c.tensors.initial_state = nullptr;
     },
     "initial_state: pointer is null"},
};

class BadCalls : public testing::TestWithParam<BadCall> {};

TEST_P(BadCalls, IsRefusedAndWritesNothing) {
  Call call;
  GetParam().spoil(call);
  // Poison what outputs may not touch; a spoiled call may point them into the inputs.
  if (call.tensors.o == call.o.data()) call.poison();
  const bool watched = call.tensors.o == call.o.data();
  const Status status = call.execute();
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.message().find(GetParam().message), std::string::npos) << status.message();
  if (watched) {
    EXPECT_TRUE(call.untouched());
  }
}

std::string name_of(const testing::TestParamInfo<BadCall>& entry) { return entry.param.name; }
INSTANTIATE_TEST_SUITE_P(Problems, BadCalls, testing::ValuesIn(kBadProblems), name_of);
INSTANTIATE_TEST_SUITE_P(Runs, BadCalls, testing::ValuesIn(kBadRuns), name_of);

/// Every tensor of a problem, by name.
std::vector<std::pair<std::string, TensorDesc*>> tensors_of(Problem& p) {
  return {{"q", &p.q},
          {"k", &p.k},
          {"v", &p.v},
          {"g", &p.g},
          {"beta", &p.beta},
          {"A_log", &*p.A_log},
          {"dt_bias", &*p.dt_bias},
          {"initial_state", &p.initial_state->tensor},
          {"o", &p.o},
          {"final_state", &p.final_state->tensor},
          {"checkpoints", &p.checkpoints->tensor}};
}

TEST(BadFloat64, IsForTheOracleAlone) {
  Call good;
  const std::size_t count = tensors_of(good.problem).size();
  for (std::size_t i = 0; i < count; ++i) {
    Call call;
    const auto [name, desc] = tensors_of(call.problem)[i];
    desc->dtype = DType::kFloat64;
    call.options.backend = "blocked";
    call.poison();
    const Status status = call.execute();
    EXPECT_EQ(status.code(), StatusCode::kUnavailable) << name;
    EXPECT_NE(
        status.message().find(name + ": dtype fp64, only backend oracle computes it, on the CPU"),
        std::string::npos)
        << status.message();
    EXPECT_TRUE(call.untouched()) << name;
    // On a GPU nothing does.
    Plan plan;
    for (const Status& refused :
         {make_plan(call.problem, call.cu_seqlens, gpu_facts(132), {}, &plan),
          supported(call.problem, gpu_facts(132))}) {
      EXPECT_EQ(refused.code(), StatusCode::kUnsupported) << name;
      EXPECT_EQ(refused.message(),
                name + ": dtype fp64, only backend oracle computes it, on the CPU");
    }
    EXPECT_TRUE(supported(call.problem, cpu_facts()).ok()) << name;
  }
}

TEST(BadFloat64, IsCheckedAsItIs) {
  Call call;
  call.problem.A_log->dtype = DType::kFloat64;
  io::Buffer A_log(16);
  A_log.as<double>()[0] = 0;
  A_log.as<double>()[1] = 88.0000001;  // 88 as fp32
  call.tensors.A_log = A_log.data();
  call.poison();
  EXPECT_NE(call.execute().message().find("A_log: entry 1 = 88"), std::string::npos)
      << call.execute().message();
  EXPECT_TRUE(call.untouched());
  call.tensors.A_log = A_log.data() + 4;
  EXPECT_EQ(call.execute().message(), "A_log: pointer is not aligned to the stated 16 bytes");
  call.tensors.A_log = A_log.data();
  call.problem.cu_seqlens = DType::kFloat64;
  EXPECT_EQ(call.execute().message(), "cu_seqlens: dtype fp64 is not int32 or int64");
  EXPECT_TRUE(call.untouched());
}

TEST(GoodCalls, TheUnspoiledCallsSucceed) {
  Call forward;
  EXPECT_TRUE(forward.execute().ok()) << forward.execute().message();
  Call decode;
  decode.make_decode();
  EXPECT_TRUE(decode.execute().ok()) << decode.execute().message();
  Call bounds;
  bounds.from_bounds = true;
  bounds.tensors.cu_seqlens = bounds.cu_seqlens.data();
  EXPECT_TRUE(bounds.execute().ok());
}

TEST(GoodCalls, AnyNumberOfSequencesMayHaveNoSlot) {
  Call forward;
  forward.problem.first_slot = 2;
  forward.initial_idx = {INT_MIN, 1, 0};
  forward.final_idx = {1, 1, -2};
  forward.checkpoint_idx = {0, 0};
  EXPECT_TRUE(forward.execute().ok()) << forward.execute().message();
  Call decode;
  decode.make_decode();
  decode.problem.first_slot = 1;
  decode.initial_idx = {0, -9, 0};
  EXPECT_TRUE(decode.execute().ok()) << decode.execute().message();
  decode.problem.first_slot = 0;
  EXPECT_EQ(decode.execute().message(), "initial_state_indices: slot 0 would be written twice");
}

TEST(GoodCalls, InterleavedViewsDoNotOverlap) {
  // v and o as column groups of one buffer: ranges cross, elements do not.
  Call call;
  io::Buffer fused(40 * 64 * 4);
  for (int64_t t = 0; t < 40; ++t)
    std::memcpy(fused.as<float>() + t * 64, call.inputs.v.as<float>() + t * 16, 64);
  call.problem.v.strides[1] = call.problem.o.strides[1] = 64;
  call.tensors.v = fused.data();
  call.tensors.o = fused.as<float>() + 16;
  EXPECT_TRUE(call.execute().ok()) << call.execute().message();
  call.tensors.o = fused.as<float>() + 8;
  EXPECT_EQ(call.execute().message(), "o: overlaps v in memory");
  call.tensors.o = fused.as<float>() + 56;
  EXPECT_FALSE(call.execute().ok());
}

TEST(GoodCalls, NullPlanIsRefused) {
  Call call;
  EXPECT_EQ(make_plan(call.problem, call.cu_seqlens, cpu_facts(), {}, nullptr).message(),
            "plan: is null");
  DeviceFacts device = cpu_facts();
  device.num_sms = 0;
  Plan plan;
  EXPECT_NE(make_plan(call.problem, call.cu_seqlens, device, {}, &plan).message().find("num_sms"),
            std::string::npos);
}

TEST(BadCallCount, IsAtLeastTwoHundredWithFilesAndCommandLines) {
  // 37 bad files (tests/io), 30 bad tensors (tests/check), 45 bad command lines (tests/tools).
  const std::size_t here = std::size(kBadProblems) + std::size(kBadRuns);
  EXPECT_GE(here, 150u);
  EXPECT_GE(here + 37 + 30 + 45, 200u);
}

}  // namespace
}  // namespace kda
