// SPDX-License-Identifier: Apache-2.0
// Problems with arbitrary fields: refused with a message, or planned and run on exactly sized
// memory (under the sanitizers: not a byte outside).
#include <algorithm>

#include "core/layout.hpp"
#include "core/text.hpp"
#include "fuzz/fuzz.hpp"

namespace kda::fuzz {
namespace {

using check::Random;

constexpr int64_t kLargestBuffer = 1 << 20;

/// A value near the edges of what is legal, or far outside.
int64_t edge(Random& random, int64_t typical) {
  switch (random.below(10)) {
    case 0: return 0;
    case 1: return -1 - random.below(3);
    case 2: return INT64_MAX - random.below(2);
    case 3: return int64_t{1} << random.below(63);
    default: return 1 + random.below(typical);
  }
}

TensorDesc random_desc(Random& random, const Shape& shape, int rank) {
  TensorDesc desc;
  desc.dtype = static_cast<DType>(random.chance(0.05) ? edge(random, 5) % 100 : random.below(3));
  int64_t stride = 1;
  for (int d = rank - 1; d >= 0; --d) {
    const auto at = static_cast<std::size_t>(d);
    desc.strides[at] = random.chance(0.03) ? edge(random, 100) : stride;
    if (random.chance(0.3)) stride += random.below(5);
    if (__builtin_mul_overflow(stride, std::clamp<int64_t>(shape[at], 1, 1 << 20), &stride))
      stride = 1;
  }
  desc.alignment = random.chance(0.05) ? edge(random, 64) : 2 + 2 * (desc.dtype == DType::kFloat32);
  return desc;
}

std::optional<StateDesc> random_state(Random& random, const Problem& p, double chance) {
  if (!random.chance(chance)) return std::nullopt;
  StateDesc desc;
  desc.indexed = random.chance(0.5);
  desc.num_slots = desc.indexed ? edge(random, 6) : p.num_sequences;
  desc.tensor = random_desc(random, state_shape(p, desc), 4);
  if (random.chance(0.9)) desc.tensor.dtype = DType::kFloat32;
  if (random.chance(0.9)) desc.tensor.alignment = 4;
  return desc;
}

Problem random_problem(Random& random) {
  Problem p;
  const auto sometimes = [&](int64_t usual) {
    return random.chance(0.04) ? edge(random, usual) : 1 + random.below(usual);
  };
  p.operation = static_cast<Operation>(random.chance(0.02) ? 5 : random.below(2));
  p.num_heads = sometimes(3);
  p.num_value_heads = random.chance(0.1) ? sometimes(6) : p.num_heads;
  p.key_dim = sometimes(20);
  p.value_dim = sometimes(20);
  p.num_tokens = sometimes(p.operation == Operation::kDecode ? 8 : 40);
  p.batch = p.num_sequences = sometimes(3);
  if (random.chance(0.3)) {
    p.cu_seqlens = random.chance(0.05) ? DType::kFloat32 : DType::kInt64;
    p.batch = 1;
  }
  p.gate_mode = static_cast<GateMode>(random.below(random.chance(0.03) ? 9 : 3));
  p.beta_mode = static_cast<BetaMode>(random.below(random.chance(0.03) ? 9 : 3));
  p.state_layout = static_cast<StateLayout>(random.below(2));
  p.qk_l2norm = random.chance(0.5);
  p.q = random_desc(random, qk_shape(p), 4);
  p.k = random_desc(random, qk_shape(p), 4);
  p.v = random_desc(random, v_shape(p), 4);
  p.g = random_desc(random, g_shape(p), 4);
  p.beta = random_desc(random, beta_shape(p), 3);
  p.o = random_desc(random, v_shape(p), 4);
  const auto parameter = [&](const Shape& shape, int rank) {
    TensorDesc desc = random_desc(random, shape, rank);
    if (random.chance(0.95)) desc.dtype = DType::kFloat32;
    if (random.chance(0.95)) desc.alignment = 4;
    return desc;
  };
  if (p.gate_mode != GateMode::kLog || random.chance(0.05)) {
    if (random.chance(0.9)) p.A_log = parameter({p.num_value_heads, 1, 1, 1}, 1);
    if (random.chance(0.6)) p.dt_bias = parameter({p.num_value_heads, p.key_dim, 1, 1}, 2);
  }
  const bool decode = p.operation == Operation::kDecode;
  p.final_state = random_state(random, p, decode ? 0.3 : 0.6);
  p.initial_state = random_state(random, p, decode && !p.final_state ? 0.95 : 0.5);
  p.checkpoints = random_state(random, p, decode ? 0.03 : 0.2);
  p.checkpoint_every = p.checkpoints || random.chance(0.02) ? 16 * random.below(3) : 0;
  p.initial_state_mask = random.chance(0.2);
  if (decode && random.chance(0.2)) p.state_index_columns = edge(random, 8);
  p.num_accepted_tokens = random.chance(decode ? 0.2 : 0.01);
  p.zero_skipped = random.chance(decode ? 0.3 : 0.01);
  if (random.chance(0.2)) p.first_slot = edge(random, 2);
  p.batch_invariant = random.chance(0.2);
  return p;
}

/// Exactly the bytes that a descriptor covers; empty optional if too many to try.
struct Memory {
  std::vector<io::Buffer> buffers;
  bool too_large = false;

  void* add(const TensorDesc& desc, const Shape& shape) {
    __int128 extent = 1;
    for (std::size_t d = 0; d < 4; ++d) {
      if (shape[d] == 0) extent = 0;
      if (shape[d] > 1) extent += static_cast<__int128>(desc.strides[d]) * (shape[d] - 1);
    }
    const __int128 bytes = extent * dtype_size(desc.dtype);
    if (bytes > kLargestBuffer || bytes < 0) {
      too_large = true;
      return nullptr;
    }
    buffers.emplace_back(static_cast<std::size_t>(bytes));
    buffers.back().fill(0x3c);  // small positive numbers in every type
    return buffers.back().data();
  }
};

std::vector<int64_t> random_lengths(const Problem& p, Random& random) {
  std::vector<int64_t> cu = {0};
  for (int64_t n = 1; n <= p.num_sequences; ++n)
    cu.push_back(n == p.num_sequences ? p.num_tokens
                                      : std::min(cu.back() + random.below(20), p.num_tokens));
  if (random.chance(0.1))
    cu[static_cast<std::size_t>(random.below(static_cast<int64_t>(cu.size())))] = edge(random, 50);
  return cu;
}

std::string run_case(const Options& options, int64_t index, Digest* digest) {
  Random random = random_of(options, index);
  const Problem p = random_problem(random);
  const Status valid = validate(p);
  if (!valid.ok())
    return valid.code() == StatusCode::kInvalidArgument && !valid.message().empty()
               ? ""
               : "refused without a reason";
  if (p.num_sequences > 64 || p.batch * p.num_tokens > 4096) return "";  // legal, but not small
  PlanOptions plan_options;
  plan_options.num_threads = 1;
  if (random.chance(0.3)) {
    plan_options =
        test::fixed_segments(1 + random.below(4), static_cast<SegmentMethod>(random.below(2)));
    plan_options.num_threads = 1;
  }
  Memory memory;
  Tensors t;
  t.q = memory.add(p.q, qk_shape(p));
  t.k = memory.add(p.k, qk_shape(p));
  t.v = memory.add(p.v, v_shape(p));
  t.g = memory.add(p.g, g_shape(p));
  t.beta = memory.add(p.beta, beta_shape(p));
  t.o = memory.add(p.o, v_shape(p));
  if (p.A_log)
    t.A_log = static_cast<const float*>(memory.add(*p.A_log, {p.num_value_heads, 1, 1, 1}));
  if (p.dt_bias)
    t.dt_bias =
        static_cast<const float*>(memory.add(*p.dt_bias, {p.num_value_heads, p.key_dim, 1, 1}));
  const auto add_state = [&](const std::optional<StateDesc>& state) -> void* {
    return state ? memory.add(state->tensor, state_shape(p, *state)) : nullptr;
  };
  t.initial_state = add_state(p.initial_state);
  t.final_state = add_state(p.final_state);
  t.checkpoints = add_state(p.checkpoints);
  if (memory.too_large) return "";
  std::vector<int32_t> slots(4096), accepted(64);
  for (int32_t& slot : slots) slot = static_cast<int32_t>(random.below(10) - 2);
  for (std::size_t i = 0; i < accepted.size(); ++i)
    accepted[i] = static_cast<int32_t>(random.below(3));
  for (std::size_t i = 0; i < slots.size() && random.chance(0.9); ++i)
    slots[i] = static_cast<int32_t>(i % 8);
  const std::vector<uint8_t> mask(64, 1);
  t.initial_state_indices = t.final_state_indices = t.checkpoint_indices = slots.data();
  t.num_accepted_tokens = accepted.data();
  t.initial_state_mask = mask.data();
  if (p.num_sequences * p.state_index_columns > 4096) return "";

  Plan plan;
  std::vector<int64_t> cu;
  if (p.cu_seqlens) cu = random_lengths(p, random);
  const bool bounds = p.cu_seqlens == DType::kInt64 && random.chance(0.3);
  t.cu_seqlens = cu.data();
  const Status planned = bounds ? make_plan_from_bounds(p, cpu_facts(), plan_options, &plan)
                                : make_plan(p, cu, cpu_facts(), plan_options, &plan);
  if (!planned.ok()) return planned.message().empty() ? "plan refused without a reason" : "";
  io::Buffer workspace(plan.workspace_bytes);
  const Status ran = run(plan, t, workspace.data(), workspace.size());
  std::vector<const io::Buffer*> buffers;
  for (const io::Buffer& buffer : memory.buffers) buffers.push_back(&buffer);
  digest->add(index, buffers);
  if (!ran.ok() && (ran.code() != StatusCode::kInvalidArgument || ran.message().empty()))
    return cat("run: ", status_code_name(ran.code()), " ", ran.message());
  if (plan.to_text(true).empty() || plan.to_json().empty()) return "the plan does not print";
  return "";
}

}  // namespace

Report fuzz_problems(const Options& options) {
  Digest digest;
  Report report =
      run_cases(options, [&](int64_t index) { return run_case(options, index, &digest); });
  report.digest = digest.value();
  return report;
}

}  // namespace kda::fuzz
