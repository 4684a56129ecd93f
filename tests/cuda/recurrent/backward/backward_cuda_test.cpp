// SPDX-License-Identifier: Apache-2.0
// The backward on a GPU: windows, lengths and slots that only the device knows, graphs, streams,
// memory of the wrong device. Problems in fp32 are those of cuda.smxx.recurrent, in bf16 of
// cuda.sm80.staged. (Numbers: tests/stage/backward_test.cpp,
// tests/cuda/staged/backward/staged_backward_test.cpp.)
#include <cstring>
#include <thread>

#include "support/backward.hpp"
#include "support/gpu.hpp"
#include "support/graph.hpp"

#ifdef KDA_WITH_CUDA

namespace kda {
namespace {

using check::GradientBuffers;
using check::Inputs;

class BackwardOnGpu : public test::GpuTest {};

/// A planned backward with all of its memory on the device.
struct OnDevice {
  BackwardPlan plan;
  GradientBuffers* buffers;
  std::unique_ptr<check::DeviceTensors> inputs;
  std::unique_ptr<check::DeviceGradients> gradients;
  check::DeviceBuffer workspace;

  OnDevice(const Inputs& from, GradientBuffers* to, const test::BackwardRun& run = {})
      : buffers(to) {
    const test::BackwardCall call(from, to->gradients, run);
    plan = call.plan;
    inputs = std::make_unique<check::DeviceTensors>(plan.plan, call.tensors);
    gradients = std::make_unique<check::DeviceGradients>(plan, to->tensors());
    workspace = check::DeviceBuffer(plan.plan.workspace_bytes);
    workspace.fill(0xff);
    check::synchronize_device();
  }
  Status run(void* stream = nullptr) const {
    return backward(plan, inputs->tensors(), gradients->tensors(), workspace.data(),
                    workspace.size(), stream);
  }
  void read() {
    check::synchronize_device();
    gradients->download();
  }
  int32_t flags() const {
    io::Buffer copy(workspace.size());
    workspace.download(copy.data(), copy.size());
    int32_t bits = -1;
    for (const WorkspaceBlock& block : plan.plan.workspace)
      if (block.name == "device_flags") std::memcpy(&bits, copy.data() + block.offset, sizeof bits);
    return bits;
  }
};

GradientBuffers run_with(const Inputs& inputs, const test::BackwardRun& run) {
  GradientBuffers buffers = test::gradients_in_fp32(inputs);
  test::run_backward(inputs, &buffers, run);
  return buffers;
}

Inputs packed(std::vector<int64_t> lengths, int64_t K, int64_t V, uint64_t seed = 1,
              DType dtype = DType::kFloat32) {
  check::GenerateOptions options = test::shape(0, 1, K, V);
  options.num_value_heads = 2;
  options.seq_lens = std::move(lengths);
  options.initial_state = true;
  options.seed = seed;
  options.dtype = dtype;
  return check::generate(options);
}

TEST_F(BackwardOnGpu, WindowsChangeNoBit) {
  check::GenerateOptions rows = test::shape(150, 1, 24, 40);
  rows.batch = 3;
  rows.num_value_heads = 2;
  rows.initial_state = true;
  // Windows end in a chunk, with a sequence, and between empty ones; one has 64 sequences.
  std::vector<int64_t> ones(70, 1);
  ones.push_back(90);
  std::size_t turn = 0;
  for (const Inputs& inputs :
       {packed({100, 0, 1, 27, 0, 0, 250, 3, 80, 0}, 24, 40), packed({150, 60}, 130, 70),
        packed({64, 64, 0, 63, 65, 128}, 100, 70), packed(ones, 8, 8), check::generate(rows)}) {
    const GradientBuffers whole = run_with(inputs, {});
    for (const int64_t tokens : test::in_turn<int64_t>(turn++, {64, 128, 192})) {
      const test::BackwardRun run{.kept_every = tokens};
      EXPECT_TRUE(test::same_gradients(run_with(inputs, run), whole)) << tokens;
      const test::BackwardCall call(inputs, whole.gradients, run);
      const int64_t windows = (inputs.problem.batch * inputs.problem.num_tokens - 1) / tokens + 1;
      EXPECT_EQ(call.plan.plan.stages[0].name, windows > 1 ? "backward_starts" : "backward_states");
    }
  }
}

TEST_F(BackwardOnGpu, LengthsOfTheDeviceGiveTheSameBits) {
  for (const DType dtype : test::backward_types()) {
    const Inputs inputs = packed({70, 0, 33, 100, 0}, 24, 40, 1, dtype);
    for (const int64_t tokens : {0, 64})
      EXPECT_TRUE(
          test::same_gradients(run_with(inputs, {.kept_every = tokens, .from_bounds = true}),
                               run_with(inputs, {.kept_every = tokens})));
  }
}

TEST_F(BackwardOnGpu, BadLengthsAreClampedAndFlagged) {
  for (const DType dtype : test::backward_types()) {
    Inputs inputs = packed({70, 33, 100}, 24, 40, 1, dtype);
    const GradientBuffers good = run_with(inputs, {});
    for (const int64_t bad : {int64_t{-5}, int64_t{1} << 40, int64_t{60}}) {
      inputs.cu_seqlens = {0, 70, bad, 203};
      for (const int64_t tokens : {0, 64}) {
        GradientBuffers buffers = test::gradients_in_fp32(inputs);
        OnDevice call(inputs, &buffers, {.kept_every = tokens, .from_bounds = true});
        ASSERT_TRUE(call.run().ok());
        call.read();
        EXPECT_EQ(call.flags(), kBadSequences) << bad;
        // The first sequence is as it was.
        EXPECT_EQ(std::memcmp(buffers.dq.data(), good.dq.data(), 70 * 1 * 24 * 4), 0) << bad;
        EXPECT_EQ(std::memcmp(buffers.dv.data(), good.dv.data(), 70 * 2 * 40 * 4), 0) << bad;
      }
    }
  }
}

TEST_F(BackwardOnGpu, SlotsOutOfThePoolAreFlaggedAndNone) {
  for (const auto [dtype, segments] : test::backward_forms()) {
    Inputs inputs = packed({140, 130}, 24, 16, 1, dtype);
    inputs.problem.initial_state->indexed = true;
    const int32_t outside[] = {0, 2}, none[] = {0, -1};
    const GradientBuffers expected =
        run_with(inputs, {.segments = segments, .state_indices = none});
    for (const int64_t tokens : {0, 64}) {
      GradientBuffers buffers = test::gradients_in_fp32(inputs);
      OnDevice call(inputs, &buffers,
                    {.kept_every = tokens, .segments = segments, .state_indices = outside});
      ASSERT_TRUE(call.run().ok());
      call.read();
      EXPECT_EQ(call.flags(), kBadInitialIndex);
      EXPECT_TRUE(test::same_gradients(buffers, expected));
    }
  }
}

TEST_F(BackwardOnGpu, AUsedWorkspaceChangesNoBit) {
  for (const auto [dtype, segments] : test::backward_forms()) {
    const Inputs inputs = packed({70, 33}, 24, 40, 1, dtype);
    GradientBuffers first = test::gradients_in_fp32(inputs);
    OnDevice call(inputs, &first, {.kept_every = 64, .segments = segments});
    ASSERT_TRUE(call.run().ok());
    call.read();
    const GradientBuffers once = first;
    first = test::gradients_in_fp32(inputs);
    call.gradients = std::make_unique<check::DeviceGradients>(call.plan, first.tensors());
    ASSERT_TRUE(call.run().ok());
    call.read();
    EXPECT_TRUE(test::same_gradients(first, once));
  }
}

TEST_F(BackwardOnGpu, GraphsReplayWithNewData) {
  // Windows of a row, or the staged one, which has segments.
  for (const auto& [dtype, tokens, segments] :
       {std::tuple{DType::kFloat32, 0, 0}, std::tuple{DType::kFloat32, 64, 0},
        std::tuple{DType::kBFloat16, 0, 0}, std::tuple{DType::kBFloat16, 0, 2}})
    for (const bool from_bounds : {false, true}) {
      if (segments > 0 && from_bounds) continue;  // without lengths nothing is cut
      const Inputs old_inputs = packed({70, 0, 133}, 24, 40, 1, dtype),
                   new_inputs = packed({70, 0, 133}, 24, 40, 2, dtype);
      const test::BackwardRun run{
          .kept_every = tokens, .from_bounds = from_bounds, .segments = segments};
      GradientBuffers buffers = test::gradients_in_fp32(old_inputs);
      OnDevice call(old_inputs, &buffers, run);
      const test::Stream stream;
      const test::Graph graph(stream, [&] { EXPECT_TRUE(call.run(stream.stream).ok()); });
      for (const Inputs* inputs : {&old_inputs, &new_inputs}) {
        const Tensors& t = call.inputs->tensors();
        const auto refill = [](const void* to, const io::Buffer& from) {
          if (to)
            test::throw_if_cuda_error(
                cudaMemcpy(const_cast<void*>(to), from.data(), from.size(), cudaMemcpyHostToDevice),
                "refill");
        };
        refill(t.q, inputs->q), refill(t.k, inputs->k), refill(t.v, inputs->v);
        refill(t.g, inputs->g), refill(t.beta, inputs->beta);
        refill(t.A_log, inputs->A_log), refill(t.dt_bias, inputs->dt_bias);
        refill(t.initial_state, inputs->initial_state);
        check::synchronize_device();
        graph.launch(stream);
        call.read();
        EXPECT_TRUE(test::same_gradients(buffers, run_with(*inputs, run))) << tokens;
      }
    }
}

TEST_F(BackwardOnGpu, SixteenThreadsWithAStreamEachEqualOneAfterTheOther) {
  constexpr std::size_t kThreads = 16;
  const auto run_of = [](std::size_t t) {  // every fourth in segments
    return test::BackwardRun{.kept_every = 64, .segments = t % 4 == 1 ? 2 : 0};
  };
  std::vector<Inputs> inputs;
  std::vector<GradientBuffers> serial, parallel;
  for (std::size_t t = 0; t < kThreads; ++t) {
    inputs.push_back(packed({70, 0, test::long_case(133)}, 24, 40, t,
                            t % 2 ? DType::kBFloat16 : DType::kFloat32));
    serial.push_back(run_with(inputs[t], run_of(t)));
    parallel.push_back(test::gradients_in_fp32(inputs[t]));
  }
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      OnDevice call(inputs[t], &parallel[t], run_of(t));
      const test::Stream stream;
      throw_if_error(call.run(stream.stream));
      cudaStreamSynchronize(stream.stream);
      call.read();
    });
  for (std::thread& thread : threads) thread.join();
  for (std::size_t t = 0; t < kThreads; ++t)
    EXPECT_TRUE(test::same_gradients(parallel[t], serial[t])) << t;
}

TEST_F(BackwardOnGpu, TwoGpusInOneProcess) {
  if (cuda_device_count() < 2) GTEST_SKIP() << "needs two GPUs";
  const auto on = [](int device) {
    test::throw_if_cuda_error(cudaSetDevice(device), "cudaSetDevice");
  };
  for (const auto [dtype, segments] : test::backward_forms()) {
    const Inputs inputs = packed({70, 0, 133}, 24, 40, 1, dtype);
    on(0);
    const GradientBuffers expected = run_with(inputs, {.segments = segments});
    GradientBuffers first = test::gradients_in_fp32(inputs), second = first;
    OnDevice one(inputs, &first, {.segments = segments});
    on(1);
    OnDevice other(inputs, &second, {.segments = segments});
    throw_if_error(other.run());
    const Status status = backward(other.plan, one.inputs->tensors(), other.gradients->tensors(),
                                   other.workspace.data(), other.workspace.size());
    EXPECT_NE(status.message().find("is memory of device 0, the current device is 1"),
              std::string::npos)
        << status.message();
    other.read();
    EXPECT_TRUE(test::same_gradients(second, expected));
    on(0);
    throw_if_error(one.run());
    one.read();
    EXPECT_TRUE(test::same_gradients(first, expected));
  }
}

/// No call allocates device memory.
TEST_F(BackwardOnGpu, TakesNoMemory) {
  for (const auto [dtype, segments] : test::backward_forms()) {
    const Inputs inputs = packed({70, 0, 133}, 24, 40, 1, dtype);
    GradientBuffers buffers = test::gradients_in_fp32(inputs);
    OnDevice call(inputs, &buffers, {.segments = segments});
    throw_if_error(call.run());  // a kernel's first launch loads it
    check::synchronize_device();
    const auto free_bytes = [] {
      std::size_t free = 0, total = 0;
      test::throw_if_cuda_error(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
      return free;
    };
    const std::size_t before = free_bytes();
    for (int i = 0; i < (test::emulated() ? 1 : 20); ++i) throw_if_error(call.run());
    check::synchronize_device();
    EXPECT_EQ(free_bytes(), before);
  }
}

TEST_F(BackwardOnGpu, MemoryOfTheHostIsRefusedByName) {
  for (const DType dtype : test::backward_types()) {
    const Inputs inputs = packed({70, 33}, 24, 40, 1, dtype);
    GradientBuffers buffers = test::gradients_in_fp32(inputs);
    OnDevice call(inputs, &buffers);
    const GradientTensors host = buffers.tensors(), good = call.gradients->tensors();
    const auto refusal = [&](auto&& spoil) {
      GradientTensors bad = good;
      spoil(bad);
      return backward(call.plan, call.inputs->tensors(), bad, call.workspace.data(),
                      call.workspace.size())
          .message();
    };
    EXPECT_NE(refusal([&](auto& t) { t.d_o = host.d_o; }).find("d_o: is host memory"),
              std::string::npos);
    EXPECT_NE(refusal([&](auto& t) { t.dg = host.dg; }).find("dg: is host memory"),
              std::string::npos);
    EXPECT_NE(refusal([&](auto& t) { t.dbeta = nullptr; }).find("dbeta: pointer is null"),
              std::string::npos);
    EXPECT_NE(refusal([&](auto& t) { t.dk = t.dq; }).find("overlaps"), std::string::npos);
    const Status status = backward(call.plan, call.inputs->tensors(), good, call.workspace.data(),
                                   call.workspace.size() - 1);
    EXPECT_NE(status.message().find("workspace"), std::string::npos) << status.message();
  }
}

TEST_F(BackwardOnGpu, PlansThatKeepStatesAreDeclined) {
  const Inputs inputs = packed({70, 33}, 24, 40);
  PlanOptions options;
  options.keep = KeepPolicy::kStates;
  Problem p = inputs.problem;
  check::make_outputs(&p, DType::kFloat32);
  Plan plan;
  ASSERT_TRUE(make_plan(p, inputs.cu_seqlens, test::device(), options, &plan).ok());
  EXPECT_TRUE(plan.implementation.empty());
  EXPECT_NE(plan.to_text(true).find("keeps nothing for a backward"), std::string::npos);
}

}  // namespace
}  // namespace kda
#endif
