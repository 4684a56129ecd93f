// SPDX-License-Identifier: Apache-2.0
// How servers use a GPU: graphs that are replayed with new data, many host threads with a stream
// each, several GPUs in a process, and the same bits every time.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <optional>

#include "kda/kda.h"
#include "support/gpu.hpp"
#include "support/graph.hpp"

#ifdef KDA_WITH_CUDA

namespace kda {
namespace {

using check::Inputs;
using test::Graph;
using test::OnDevice;
using test::Stream;

void expect_cuda(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

class Streams : public test::GpuTest {};

/// Forwards in stages, with and without segments, in one kernel, token by token, and decode.
struct Case {
  const char* name;
  Inputs inputs;
  test::RunOptions options;
};

/// Packed: with a map of sequences, which the decode kernel is launched behind, or lengths that it
/// reads itself.
Inputs decode_inputs(uint64_t seed, bool packed, int64_t heads = 4) {
  check::GenerateOptions options = test::shape(3, heads, 128, 128);
  if (packed)
    options.seq_lens = {1, 3, 0, 2, 1};
  else
    options.batch = 6;
  options.dtype = DType::kBFloat16;
  options.initial_state = true;
  options.seed = seed;
  Inputs inputs = check::generate(options);
  inputs.problem.operation = Operation::kDecode;
  return inputs;
}

std::vector<Case> cases(uint64_t seed) {
  check::GenerateOptions options = test::shape(0, 2, 128, 128);
  options.dtype = DType::kBFloat16;
  options.initial_state = true;
  options.seq_lens = {700, 65, 0, 300};
  options.seed = seed;
  const Inputs inputs = check::generate(options);
  const auto with = [](const PlanOptions& plan) {
    return test::RunOptions{.plan = plan, .out_dtype = DType::kBFloat16};
  };
  test::RunOptions from_bounds = with({});
  from_bounds.from_bounds = true;
  std::vector<Case> all = {{"staged", inputs, with(test::with_backend("staged"))},
                           {"segments", inputs, with(test::fixed_segments(3))},
                           {"recurrent", inputs, with(test::with_backend("recurrent"))},
                           {"decode", decode_inputs(seed, false), with({})},
                           {"packed decode", decode_inputs(seed, true), with({})},
                           {"decode of device lengths", decode_inputs(seed, true), from_bounds}};
  if (test::device().compute_capability == 90) {
    check::GenerateOptions one_gate = options;
    one_gate.head_gates = true;
    all.push_back({"gdn", check::generate(one_gate), with(test::with_backend("gdn"))});
    PlanOptions whole = test::with_backend("fused"),
                cut = test::fixed_segments(3, SegmentMethod::kOnePass);
    whole.context_parallel = SegmentPolicy::kOff;
    cut.backend = "fused";
    all.push_back({"fused", inputs, with(whole)});
    all.push_back({"fused segments", inputs, with(cut)});
    // 3 clusters: states go from one to the next.
    for (const char* name : {"fused", "fused segments"}) {
      Case shared = all[all.size() - 2];
      EXPECT_STREQ(shared.name, name);
      shared.options.num_sms = 6;
      all.push_back(shared);
    }
  }
  return all;
}

/// Everything a call writes, as it lies on the host after read(); decode writes the pool.
std::vector<std::byte> written(const OnDevice& call, const Inputs& inputs) {
  std::vector<std::byte> bytes;
  const auto add = [&](const io::Buffer& buffer) {
    bytes.insert(bytes.end(), buffer.data(), buffer.data() + buffer.size());
  };
  add(call.outputs.o);
  if (call.problem.operation == Operation::kDecode)
    add(inputs.initial_state);
  else
    add(call.outputs.final_state);
  return bytes;
}

std::vector<std::byte> run_once(Inputs inputs, const test::RunOptions& options,
                                void* stream = nullptr) {
  OnDevice call(inputs, options);
  throw_if_error(call.run(stream));
  call.read();
  return written(call, inputs);
}

TEST_F(Streams, AHundredRepeatsGiveTheSameBits) {
  for (const Case& c : cases(1)) {
    const auto first = run_once(c.inputs, c.options);
    for (int i = 0; i < 100; ++i) ASSERT_EQ(run_once(c.inputs, c.options), first) << c.name << i;
  }
}

TEST_F(Streams, GraphsReplayWithNewData) {
  const std::vector<Case> old_cases = cases(1), new_cases = cases(2);
  for (std::size_t i = 0; i < old_cases.size(); ++i) {
    const Case& c = old_cases[i];
    Inputs inputs = c.inputs;
    OnDevice call(inputs, c.options);
    const Stream stream;
    const Graph graph(stream, [&] { EXPECT_TRUE(call.run(stream.stream).ok()) << c.name; });
    std::size_t nodes = 0;
    expect_cuda(cudaGraphGetNodes(graph.graph, nullptr, &nodes));
    if (std::strstr(c.name, "fused")) {
      EXPECT_LE(nodes, 3u) << c.name;
    }
    for (const Case* data : {&old_cases[i], &new_cases[i]}) {
      const Tensors& t = call.memory->tensors();
      const auto refill = [](const void* to, const io::Buffer& from) {
        if (to)
          expect_cuda(
              cudaMemcpy(const_cast<void*>(to), from.data(), from.size(), cudaMemcpyHostToDevice));
      };
      refill(t.q, data->inputs.q), refill(t.k, data->inputs.k), refill(t.v, data->inputs.v);
      refill(t.g, data->inputs.g), refill(t.beta, data->inputs.beta);
      refill(t.A_log, data->inputs.A_log), refill(t.dt_bias, data->inputs.dt_bias);
      refill(t.initial_state, data->inputs.initial_state);
      check::synchronize_device();  // copies from pageable memory may end after the call
      graph.launch(stream);
      call.read();
      EXPECT_EQ(written(call, inputs), run_once(data->inputs, data->options)) << c.name;
    }
  }
}

/// `steps` of decode on one pool, with `wait` one at a time, else all before anything is waited
/// for.
std::vector<std::byte> run_steps(Inputs inputs, const test::RunOptions& options, int steps,
                                 bool wait) {
  OnDevice call(inputs, options);
  for (int i = 0; i < steps; ++i) {
    throw_if_error(call.run());
    if (wait) check::synchronize_device();
  }
  call.read();
  return written(call, inputs);
}

std::vector<std::byte> run_steps_as_graph(Inputs inputs, const test::RunOptions& options,
                                          int steps) {
  OnDevice call(inputs, options);
  check::synchronize_device();
  const Stream stream;
  const Graph graph(stream, [&] {
    for (int i = 0; i < steps; ++i) throw_if_error(call.run(stream.stream));
  });
  graph.launch(stream);
  call.read();
  return written(call, inputs);
}

/// Steps begin before those before them end: each one reads the states that the last one wrote. Few
/// heads: two steps have room at once, so that one that does not wait is too early.
TEST_F(Streams, StepsFollowEachOther) {
  for (const int64_t heads : {2, 64})
    for (const bool packed : {false, true}) {
      const Inputs inputs = decode_inputs(4, packed, heads);
      test::RunOptions options{.out_dtype = DType::kBFloat16};
      options.from_bounds = packed;
      const auto expected = run_steps(inputs, options, 20, true);
      EXPECT_TRUE(run_steps(inputs, options, 20, false) == expected) << heads << " " << packed;
      EXPECT_TRUE(run_steps_as_graph(inputs, options, 20) == expected) << heads << " " << packed;
    }
}

/// A pool with tails of rows of three tokens more, whose value heads share keys.
class TailSteps {
 public:
  static constexpr int kSteps = 12;

  explicit TailSteps(Operation operation) : inputs_(decode_inputs(6, false)) {
    Problem& p = inputs_.problem;
    p.operation = operation;
    p.num_heads /= 2;  // the q/k heads behind the first ones are left out
    p.initial_state->indexed = true;
    p.tail = tails(p, kTailBoundary + 2);
    outputs_ = check::make_outputs(&p, DType::kFloat32);
    throw_if_error(make_plan(p, {}, test::device(), {}, &plan_));
    Tensors host = inputs_.tensors();
    outputs_.attach(&host);
    host.initial_state_indices = slots_.data();
    memory_.emplace(plan_, host);
    workspace_ = check::DeviceBuffer(plan_.workspace_bytes);
    const auto made = [&](const TensorDesc& desc) {
      check::DeviceBuffer buffer(
          static_cast<std::size_t>(p.tail->num_slots * desc.strides[0] * dtype_size(desc.dtype)));
      buffer.fill(0);
      return buffer;
    };
    k_ = made(p.tail->k), g_ = made(p.tail->g), v_new_ = made(p.tail->v_new);
    folded_ = made(p.tail->folded);
    for (int32_t step = 0; step < kSteps; ++step) {
      const std::vector<int32_t> now(slots_.size(), 3 * step);
      positions_.emplace_back(now.size() * 4);
      positions_.back().upload(now.data(), now.size() * 4);
    }
  }
  void step(int i, void* stream = nullptr) {
    Tensors t = memory_->tensors();
    t.tail = {
        .k = k_.data(),
        .g = g_.data(),
        .v_new = static_cast<float*>(v_new_.data()),
        .folded = static_cast<int32_t*>(folded_.data()),
        .positions = static_cast<const int32_t*>(positions_[static_cast<std::size_t>(i)].data())};
    throw_if_error(run(plan_, t, workspace_.data(), workspace_.size(), stream));
  }
  std::vector<std::byte> written() {
    check::synchronize_device();
    memory_->download();
    std::vector<std::byte> bytes;
    for (const io::Buffer* buffer : {&outputs_.o, &inputs_.initial_state})
      bytes.insert(bytes.end(), buffer->data(), buffer->data() + buffer->size());
    return bytes;
  }

 private:
  Inputs inputs_;
  check::Outputs outputs_;
  std::vector<int32_t> slots_ = {3, 1, 0, 5, 2, 4};
  Plan plan_;
  std::optional<check::DeviceTensors> memory_;
  check::DeviceBuffer workspace_, k_, g_, v_new_, folded_;
  std::vector<check::DeviceBuffer> positions_;
};

/// Folds are in the graph: where they come only positions say.
TEST_F(Streams, GraphsOfCallsWithTailsFold) {
  for (const Operation operation : {Operation::kDecode, Operation::kForward}) {
    TailSteps waits(operation), replayed(operation);
    const int steps = operation == Operation::kDecode ? TailSteps::kSteps : 6;  // to token 18
    const std::vector<std::byte> before = waits.written();
    for (int i = 0; i < steps; ++i) {
      waits.step(i);
      check::synchronize_device();
    }
    check::synchronize_device();
    const Stream stream;
    const Graph graph(stream, [&] {
      for (int i = 0; i < steps; ++i) replayed.step(i, stream.stream);
    });
    graph.launch(stream);
    const std::vector<std::byte> expected = waits.written();
    EXPECT_TRUE(expected != before);
    EXPECT_TRUE(replayed.written() == expected);
  }
}

TEST_F(Streams, SixteenThreadsWithAStreamEachEqualOneAfterTheOther) {
  constexpr int kThreads = 16;
  for (std::size_t i = 0; i < cases(0).size(); ++i) {
    std::vector<Case> mine;
    std::vector<std::vector<std::byte>> serial, parallel(kThreads);
    for (int t = 0; t < kThreads; ++t) {
      mine.push_back(cases(static_cast<uint64_t>(t))[i]);
      serial.push_back(run_once(mine.back().inputs, mine.back().options));
    }
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t)
      threads.emplace_back([&, t] {
        const Stream stream;
        for (int repeat = 0; repeat < 5; ++repeat) {
          Inputs inputs = mine[static_cast<std::size_t>(t)].inputs;
          OnDevice call(inputs, mine[static_cast<std::size_t>(t)].options);
          check::synchronize_device();  // the copies above are on the default stream
          throw_if_error(call.run(stream.stream));
          cudaStreamSynchronize(stream.stream);
          call.read();
          parallel[static_cast<std::size_t>(t)] = written(call, inputs);
        }
      });
    for (std::thread& thread : threads) thread.join();
    for (int t = 0; t < kThreads; ++t)
      EXPECT_EQ(parallel[static_cast<std::size_t>(t)], serial[static_cast<std::size_t>(t)])
          << mine[0].name << " thread " << t;
  }
}

/// A prefill of one prompt into a pool, in C and in device memory.
struct PoolCall {
  static constexpr int64_t kTokens = 70, kHeads = 2, kDim = 64, kSlots = 4;
  check::Inputs inputs;
  check::DeviceBuffer q, k, v, g, beta, o, pool, slot;
  kda_problem problem;

  explicit PoolCall(uint64_t seed) {
    check::GenerateOptions options = test::shape(kTokens, kHeads, kDim, kDim);
    options.regime = check::Regime::kLog;
    options.seed = seed;
    inputs = check::generate(options);
    const auto copy = [](check::DeviceBuffer* to, const io::Buffer& from) {
      *to = check::DeviceBuffer(from.size());
      to->upload(from.data(), from.size());
    };
    copy(&q, inputs.q);
    copy(&k, inputs.k);
    copy(&v, inputs.v);
    copy(&g, inputs.g);
    copy(&beta, inputs.beta);
    o = check::DeviceBuffer(inputs.v.size());
    pool = check::DeviceBuffer(kSlots * kHeads * kDim * kDim * sizeof(float));
    const int32_t used = 2;
    slot = check::DeviceBuffer(sizeof(used));
    slot.upload(&used, sizeof(used));
    o.fill(0xff);
    pool.fill(0xff);
    kda_problem_init(&problem);
    problem.num_tokens = kTokens;
    problem.num_heads = problem.num_value_heads = kHeads;
    problem.key_dim = problem.value_dim = kDim;
    problem.gate_mode = static_cast<int32_t>(inputs.problem.gate_mode);
    problem.beta_mode = static_cast<int32_t>(inputs.problem.beta_mode);
    problem.qk_l2norm = inputs.problem.qk_l2norm;
    const kda_rows rows = {q.data(), k.data(), v.data(), g.data(), beta.data(), o.data()};
    EXPECT_EQ(kda_tokens(&problem, KDA_FP32, &rows), KDA_OK) << kda_last_error();
    EXPECT_EQ(kda_states(&problem, &problem.final_state, pool.data(), KDA_FP32, kSlots,
                         static_cast<const int32_t*>(slot.data())),
              KDA_OK);
  }
};

TEST_F(Streams, GraphsOfCallsInTheCallersMemory) {
  PoolCall call(5);
  ASSERT_FALSE(call.inputs.problem.A_log.has_value());
  kda_plan_options options;
  kda_plan_options_init(&options);
  ASSERT_EQ(kda_plan_options_cuda(&options, 0), KDA_OK) << kda_last_error();
  std::size_t bytes = 0;
  ASSERT_EQ(kda_call_on(&call.problem, nullptr, &options, nullptr, &bytes), KDA_OK)
      << kda_last_error();
  check::DeviceBuffer workspace(bytes);
  workspace.fill(0xff);
  const Stream stream;
  call.problem.stream = stream.stream;
  // Nothing may be allocated, and nothing waited for, while a stream is captured.
  const Graph graph(stream, [&] {
    EXPECT_EQ(kda_call_on(&call.problem, nullptr, &options, workspace.data(), &bytes), KDA_OK)
        << kda_last_error();
  });
  graph.launch(stream);
  check::synchronize_device();

  const test::Result expected = test::run_inputs(call.inputs);
  std::vector<float> o(call.o.size() / sizeof(float)), pool(call.pool.size() / sizeof(float));
  call.o.download(o.data(), call.o.size());
  call.pool.download(pool.data(), call.pool.size());
  EXPECT_EQ(std::memcmp(o.data(), expected.outputs.o.data(), call.o.size()), 0);
  const std::size_t state = pool.size() / PoolCall::kSlots;
  EXPECT_EQ(std::memcmp(pool.data() + 2 * state, expected.outputs.final_state.data(),
                        state * sizeof(float)),
            0);
  for (std::size_t i = 0; i < pool.size(); ++i)
    if (i / state != 2) {
      ASSERT_TRUE(std::isnan(pool[i])) << i;
    }
  // A workspace that is too small is refused.
  std::size_t few = bytes - 64;
  EXPECT_EQ(kda_call_on(&call.problem, nullptr, &options, workspace.data(), &few),
            KDA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(kda_last_error()).rfind("workspace", 0), 0u) << kda_last_error();
}

TEST_F(Streams, TwoGpusInOneProcess) {
  if (cuda_device_count() < 2) GTEST_SKIP() << "needs two GPUs";
  for (const Case& c : cases(3)) {
    expect_cuda(cudaSetDevice(0));
    const auto expected = run_once(c.inputs, c.options);
    Inputs first_inputs = c.inputs, second_inputs = c.inputs;
    OnDevice first(first_inputs, c.options);
    expect_cuda(cudaSetDevice(1));
    OnDevice second(second_inputs, c.options);
    throw_if_error(second.run());
    // Memory of the other device is refused by name.
    const Status status =
        run(second.plan, first.memory->tensors(), second.workspace.data(), second.workspace.size());
    EXPECT_NE(status.message().find("is memory of device 0, the current device is 1"),
              std::string::npos)
        << status.message();
    second.read();
    EXPECT_EQ(written(second, second_inputs), expected) << c.name;
    expect_cuda(cudaSetDevice(0));
    throw_if_error(first.run());
    first.read();
    EXPECT_EQ(written(first, first_inputs), expected) << c.name;
  }
}

}  // namespace
}  // namespace kda
#endif
