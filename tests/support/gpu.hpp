// SPDX-License-Identifier: Apache-2.0
// What tests of the CUDA backends share. They run with KDA_TEST_DEVICE=cuda (./dev gpu-test) and
// are skipped elsewhere.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "core/convert.hpp"
#include "support/harness.hpp"

namespace kda::test {

class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_cuda()) GTEST_SKIP() << "needs KDA_TEST_DEVICE=cuda and a GPU";
  }
};

/// For kernels of Hopper alone.
class HopperTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped() && device().compute_capability != 90)
      GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  }
};

/// Tokens of a long case.
inline int64_t long_case(int64_t tokens) { return emulated() ? tokens / 4 : tokens; }

/// All of `values` on a GPU; on the emulated one, where they would take minutes, the one whose turn
/// it is.
template <typename Value>
std::vector<Value> in_turn(std::size_t turn, std::vector<Value> values) {
  return emulated() ? std::vector<Value>{values[turn % values.size()]} : values;
}

inline int32_t oracle_threads() {
  return static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
}

/// A planned problem with all of its memory on the current device: what a caller of run() holds.
struct OnDevice {
  Problem problem;
  Plan plan;
  check::Outputs outputs;  ///< on the host; read() fills them
  std::unique_ptr<check::DeviceTensors> memory;
  check::DeviceBuffer workspace;

  /// `checkpoint_offsets`: of a problem with them, one a sequence; that of sequence n goes to slot
  /// n.
  OnDevice(const check::Inputs& inputs, const RunOptions& options = {},
           const std::vector<int32_t>& checkpoint_offsets = {})
      : problem(inputs.problem) {
    if (problem.operation == Operation::kForward && !problem.final_state)
      check::want_final_state(&problem);
    outputs = check::make_outputs(&problem, options.out_dtype);
    const DeviceFacts facts = device_for(options);
    throw_if_error(options.from_bounds
                       ? make_plan_from_bounds(problem, facts, options.plan, &plan)
                       : make_plan(problem, inputs.cu_seqlens, facts, options.plan, &plan));
    Tensors host = inputs.tensors();
    if (options.from_bounds) host.cu_seqlens = inputs.cu_seqlens.data();
    outputs.attach(&host);
    std::vector<int32_t> slots(checkpoint_offsets.size());
    std::iota(slots.begin(), slots.end(), 0);
    if (problem.checkpoint_offsets) host.checkpoint_offsets = checkpoint_offsets.data();
    if (problem.checkpoint_offsets) host.checkpoint_indices = slots.data();
    memory = std::make_unique<check::DeviceTensors>(plan, host);
    workspace = check::DeviceBuffer(plan.workspace_bytes);
    workspace.fill(0xff);
  }
  Status run(void* stream = nullptr) const {
    return kda::run(plan, memory->tensors(), workspace.data(), workspace.size(), stream);
  }
  void read() {
    check::synchronize_device();
    memory->download();
  }
};

inline check::GenerateOptions shape16(int64_t tokens, int64_t heads, int64_t K, int64_t V,
                                      DType dtype = DType::kBFloat16) {
  check::GenerateOptions options = shape(tokens, heads, K, V);
  options.dtype = dtype;
  options.initial_state = true;
  return options;
}

/// With KDA_TEST_VERBOSE=1 prints the errors of a case.
inline void note(const std::string& what, double o, double state) {
  if (std::getenv("KDA_TEST_VERBOSE"))
    std::printf("  %-28s o %.2e  final state %.2e\n", what.c_str(), o, state);
}

/// Runs on `implementation`, within what its operands allow. An infinity must be that of the stored
/// reference.
inline void expect_within(const check::Inputs& inputs, const RunOptions& options,
                          const std::string& implementation, const std::string& what) {
  const Result result = run_inputs(inputs, options);
  ASSERT_EQ(result.plan.implementation, implementation) << what;
  const check::Comparison comparison = check::compare(inputs, result.problem, result.outputs,
                                                      {.marginal = check::is_marginal(inputs),
                                                       .infinities = true,
                                                       .operands = check::operands_of(result.plan),
                                                       .num_threads = oracle_threads()});
  const auto* o = comparison.worst_o();
  const auto* state = comparison.worst_final_state();
  note(what, o ? o->error : 0, state ? state->error : 0);
  EXPECT_TRUE(comparison.within())
      << what << ": o " << (o ? o->error : 0) << " of " << (o ? o->tolerance : 0)
      << ", final state " << (state ? state->error : 0) << " of " << (state ? state->tolerance : 0);
}

/// Asks for a checkpoint a sequence at an offset, in a slot of its own.
inline void want_checkpoints(Problem* p, DType states) {
  p->checkpoints = StateDesc{.tensor = contiguous(states, {p->num_sequences, p->num_value_heads,
                                                           p->key_dim, p->value_dim}),
                             .num_slots = p->num_sequences,
                             .indexed = true};
  p->checkpoint_every = 16;
  p->checkpoint_offsets = true;
}
inline std::size_t checkpoint_bytes(const Problem& p) {
  return static_cast<std::size_t>(p.num_value_heads * p.key_dim * p.value_dim *
                                  dtype_size(p.checkpoints->tensor.dtype));
}
/// The checkpoint of sequence n behind `offset` tokens, as the final state of these in float64 has
/// it.
inline void expect_checkpoint(const check::Inputs& inputs, const Plan& plan,
                              const check::Outputs& outputs, std::size_t n, int64_t offset,
                              const std::string& what) {
  const Problem& whole = plan.problem;
  check::Inputs prefix = slice(only_sequence(inputs, n), 0, offset);
  Problem& p = prefix.problem;
  p.checkpoints.reset();
  p.checkpoint_every = 0;
  p.checkpoint_offsets = false;
  p.final_state.reset();
  check::want_final_state(&p);
  p.final_state->tensor.dtype = whole.checkpoints->tensor.dtype;
  check::Outputs there = check::make_outputs(&p, whole.o.dtype);
  const std::size_t row = outputs.o.size() / static_cast<std::size_t>(whole.num_tokens);
  std::memcpy(there.o.data(),
              outputs.o.data() + static_cast<std::size_t>(inputs.cu_seqlens[n]) * row,
              there.o.size());
  std::memcpy(there.final_state.data(), outputs.checkpoints.data() + n * checkpoint_bytes(whole),
              checkpoint_bytes(whole));
  const check::Comparison comparison = check::compare(prefix, p, there,
                                                      {.marginal = check::is_marginal(inputs),
                                                       .operands = check::operands_of(plan),
                                                       .num_threads = oracle_threads()});
  const auto* state = comparison.worst_final_state();
  note(what, 0, state->error);
  EXPECT_TRUE(comparison.within())
      << what << ", sequence " << n << ": " << state->error << " of " << state->tolerance;
}

/// Channels that decay at paces of their own, the fastest by exp(-12) a token: in bf16 rows of
/// every run of 16 tokens lie on both sides of what the anchored form can hold.
inline check::Inputs paced(int64_t K, int64_t V, DType dtype) {
  check::GenerateOptions options = shape16(140, 1, K, V, dtype);
  options.regime = check::Regime::kLog;
  check::Inputs inputs = check::generate(options);
  for (int64_t i = 0; i < 140 * K; ++i) {
    const auto pace = static_cast<float>(i % K % 23) / 22, wave = static_cast<float>(i % 7 - 3);
    store_element(inputs.g.data(), dtype, i, -12 * pace * (1 + 0.3f * wave));
  }
  return inputs;
}

/// Positive gates: a run decays below the anchored form's range by exp(2 `down`), and its last rows
/// are in it again.
inline check::Inputs falls_and_grows(int64_t K, int64_t V, float down) {
  check::GenerateOptions options = shape16(70, 1, K, V);
  options.regime = check::Regime::kLog;
  options.initial_state = false;
  check::Inputs inputs = check::generate(options);
  for (int64_t i = 0; i < 70 * K; ++i) {
    const int64_t token = i / K;
    const bool falls = token == 4 || token == 5, grows = token == 8 || token == 9;
    store_element(inputs.g.data(), DType::kBFloat16, i, falls ? down : grows ? 20.0f : -0.01f);
  }
  return inputs;
}

}  // namespace kda::test
