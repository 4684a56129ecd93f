// SPDX-License-Identifier: Apache-2.0
// The same bits for every thread count, batch, order, and cut at a chunk boundary.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "cpu/blocked/kernels.hpp"
#include "support/harness.hpp"

namespace kda {
namespace {

using check::Inputs;

void expect_same(const test::Result& a, const test::Result& b) {
  EXPECT_TRUE(test::same_bits(a.outputs.o, b.outputs.o));
  EXPECT_TRUE(test::same_bits(a.outputs.final_state, b.outputs.final_state));
}

void set_initial_state(Inputs* inputs, const io::Buffer& state) {
  Problem& p = inputs->problem;
  StateDesc desc;
  desc.num_slots = 1;
  desc.tensor = contiguous(DType::kFloat32, {1, p.num_value_heads, p.key_dim, p.value_dim});
  p.initial_state = desc;
  inputs->initial_state = state;
}

TEST(Determinism, ThreadCounts) {
  check::GenerateOptions options = test::shape(0, 1, 64, 128);
  options.num_value_heads = 3;
  options.seq_lens = {130, 1, 64};
  const Inputs inputs = check::generate(options);
  const test::Result one = test::run_inputs(inputs, {.plan = test::with_threads(1)});
  for (int32_t threads = 2; threads <= 8; ++threads)
    expect_same(one, test::run_inputs(inputs, {.plan = test::with_threads(threads)}));
}

TEST(Determinism, Repeats) {
  const Inputs inputs = check::generate(test::shape(150, 2));
  const test::Result first = test::run_inputs(inputs);
  for (int repeat = 0; repeat < 100; ++repeat) expect_same(first, test::run_inputs(inputs));
}

TEST(Determinism, ManyHostThreads) {
  const Inputs inputs = check::generate(test::shape(100, 2));
  const test::Result serial = test::run_inputs(inputs);
  std::vector<std::thread> callers;
  std::atomic<int> same{0};
  for (int c = 0; c < 16; ++c)
    callers.emplace_back([&] {
      const test::Result mine = test::run_inputs(inputs, {.plan = test::with_threads(2)});
      same += test::same_bits(serial.outputs.o, mine.outputs.o);
    });
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(same, 16);
}

TEST(Determinism, ResumingAtAnyChunkBoundary) {
  for (const std::string& backend : test::backends()) {
    const Inputs inputs = check::generate(test::shape(100, 2, 32, 48));
    const test::RunOptions run{.plan = test::with_backend(backend)};
    const test::Result whole = test::run_inputs(inputs, run);
    const std::size_t row = test::row_bytes(whole.problem.o, 2, 48);
    for (int64_t cut = 0; cut <= 100; cut += cpu::blocked::kChunk) {
      const test::Result head = test::run_inputs(test::slice(inputs, 0, cut), run);
      Inputs rest = test::slice(inputs, cut, 100);
      set_initial_state(&rest, head.outputs.final_state);
      const test::Result tail = test::run_inputs(rest, run);
      EXPECT_TRUE(test::same_bits(whole.outputs.final_state, tail.outputs.final_state)) << cut;
      EXPECT_EQ(std::memcmp(whole.outputs.o.data() + static_cast<std::size_t>(cut) * row,
                            tail.outputs.o.data(), tail.outputs.o.size()),
                0)
          << cut;
    }
  }
}

TEST(Determinism, AloneEqualsInABatch) {
  check::GenerateOptions options = test::shape(0, 2, 32, 32);
  options.seq_lens = {33, 100, 7};
  EXPECT_TRUE(test::same_bits_alone(check::generate(options)));
}

TEST(Determinism, BothStateLayoutsAreTheSameNumbers) {
  Inputs inputs = check::generate(test::shape(50, 1, 24, 40));
  const test::Result kv = test::run_inputs(inputs);
  inputs.problem.state_layout = StateLayout::kVK;
  const test::Result vk = test::run_inputs(inputs);
  EXPECT_TRUE(test::same_bits(kv.outputs.o, vk.outputs.o));
  for (int d = 0; d < 24; ++d)
    for (int c = 0; c < 40; ++c)
      ASSERT_EQ(kv.outputs.final_state.as<float>()[d * 40 + c],
                vk.outputs.final_state.as<float>()[c * 24 + d]);
}

TEST(Determinism, PlansFromBoundsGiveTheSameBits) {
  check::GenerateOptions options = test::shape(0, 1, 16, 16);
  options.seq_lens = {20, 0, 13};
  const Inputs inputs = check::generate(options);
  const test::Result known = test::run_inputs(inputs);
  for (const DType dtype : {DType::kInt32, DType::kInt64}) {
    Problem p = known.problem;
    p.cu_seqlens = dtype;
    Plan plan;
    ASSERT_TRUE(make_plan_from_bounds(p, test::device(), {}, &plan).ok());
    EXPECT_FALSE(plan.lengths_known);
    check::Outputs outputs = check::make_outputs(&p, DType::kFloat32);
    const std::vector<int32_t> narrow(inputs.cu_seqlens.begin(), inputs.cu_seqlens.end());
    Tensors tensors = inputs.tensors();
    tensors.cu_seqlens =
        dtype == DType::kInt64 ? static_cast<const void*>(inputs.cu_seqlens.data()) : narrow.data();
    outputs.attach(&tensors);
    io::Buffer workspace(plan.workspace_bytes);
    ASSERT_TRUE(check::run_and_wait(plan, tensors, workspace.data(), workspace.size()).ok());
    EXPECT_TRUE(test::same_bits(known.outputs.o, outputs.o));
    EXPECT_TRUE(test::same_bits(known.outputs.final_state, outputs.final_state));
  }
}

}  // namespace
}  // namespace kda
