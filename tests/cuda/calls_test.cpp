// SPDX-License-Identifier: Apache-2.0
// Calls on a GPU that must be refused before anything is launched, and device metadata that the
// host cannot see: flagged, never followed out of bounds. (Bad calls of any device: tests/run.)
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <set>
#include <string>

#include "kda/kda.h"
#include "support/gpu.hpp"

namespace kda {
namespace {

using check::DeviceBuffer;
using check::Inputs;
using test::OnDevice;

class Calls : public test::GpuTest {};

Inputs packed_inputs() {
  check::GenerateOptions options = test::shape(0, 2, 64, 64);
  options.dtype = DType::kBFloat16;
  options.initial_state = true;
  options.seq_lens = {130, 64, 7};
  return check::generate(options);
}

TEST_F(Calls, HostMemoryIsRefusedByName) {
  const Inputs inputs = packed_inputs();
  OnDevice call(inputs);
  const std::pair<const char*, std::function<void(Tensors*)>> rows[] = {
      {"q", [&](Tensors* t) { t->q = inputs.q.data(); }},
      {"k", [&](Tensors* t) { t->k = inputs.k.data(); }},
      {"v", [&](Tensors* t) { t->v = inputs.v.data(); }},
      {"g", [&](Tensors* t) { t->g = inputs.g.data(); }},
      {"beta", [&](Tensors* t) { t->beta = inputs.beta.data(); }},
      {"o", [&](Tensors* t) { t->o = call.outputs.o.data(); }},
      {"initial_state",
       [&](Tensors* t) { t->initial_state = const_cast<std::byte*>(inputs.initial_state.data()); }},
      {"final_state", [&](Tensors* t) { t->final_state = call.outputs.final_state.data(); }}};
  for (const auto& [name, change] : rows) {
    Tensors tensors = call.memory->tensors();
    change(&tensors);
    const Status status = run(call.plan, tensors, call.workspace.data(), call.workspace.size());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << name;
    EXPECT_EQ(status.message().rfind(std::string(name) + ": is host memory", 0), 0u)
        << status.message();
  }
  io::Buffer host(call.plan.workspace_bytes);
  const Status status = run(call.plan, call.memory->tensors(), host.data(), host.size());
  EXPECT_EQ(status.message().rfind("workspace: is host memory", 0), 0u) << status.message();
  call.read();
  for (std::size_t i = 0; i < call.outputs.o.size(); ++i)
    ASSERT_EQ(static_cast<unsigned char>(call.outputs.o.data()[i]), 0xff) << "written at " << i;
}

TEST_F(Calls, APlanForAnotherGpuIsRefused) {
  const Inputs inputs = packed_inputs();
  OnDevice call(inputs);
  const int other = test::device().compute_capability == 80 ? 90 : 80;
  Plan plan;
  throw_if_error(make_plan(call.problem, inputs.cu_seqlens, gpu_facts(108, other), {}, &plan));
  DeviceBuffer workspace(plan.workspace_bytes);
  const Status status = run(plan, call.memory->tensors(), workspace.data(), workspace.size());
  EXPECT_EQ(status.message().rfind("plan: made for compute capability " + std::to_string(other), 0),
            0u)
      << status.message();
}

/// Every chunk stage, without buffers.
void expect_from_chunk_stages(const OnDevice& call, StatusCode code) {
  for (const auto stage : {chunk_intra, recompute_w_u, chunk_delta_h, chunk_o})
    EXPECT_EQ(stage(call.plan, call.memory->tensors(), {}, call.workspace.data(),
                    call.workspace.size(), nullptr)
                  .code(),
              code);
}

TEST_F(Calls, StageCallsNeedTheirPlanAndPointers) {
  check::GenerateOptions options = test::shape(300, 1, 64, 64);
  options.dtype = DType::kBFloat16;
  const Inputs inputs = check::generate(options);
  OnDevice serial(inputs), cut(inputs, {.plan = test::fixed_segments(3)});
  DeviceBuffer memory(1 << 20);
  auto* pointer = static_cast<float*>(memory.data());
  const SegmentTensors all{pointer, pointer, pointer};
  float host = 0;
  for (const auto stage : {segment_scan, segment_merge, segment_forward}) {
    EXPECT_EQ(stage(serial.plan, serial.memory->tensors(), all, serial.workspace.data(),
                    serial.workspace.size(), nullptr)
                  .message(),
              "plan: is not segmented");
    for (const SegmentTensors& missing : {SegmentTensors{}, SegmentTensors{&host, &host, &host}})
      EXPECT_EQ(stage(cut.plan, cut.memory->tensors(), missing, cut.workspace.data(),
                      cut.workspace.size(), nullptr)
                    .code(),
                StatusCode::kInvalidArgument);
  }
  expect_from_chunk_stages(serial, StatusCode::kInvalidArgument);
}

TEST_F(Calls, StageBuffersAreCheckedOneByOne) {
  check::GenerateOptions options = test::shape(70, 1, 64, 64);
  options.dtype = DType::kBFloat16;
  const Inputs inputs = check::generate(options);
  OnDevice call(inputs, {.plan = test::with_backend("staged"), .out_dtype = DType::kBFloat16});
  DeviceBuffer memory(1 << 20);
  char host[64];
  using Member = void* StageTensors::*;
  const std::pair<const char*, Member> members[] = {
      {"w", &StageTensors::w},   {"u", &StageTensors::u},     {"kg", &StageTensors::kg},
      {"qg", &StageTensors::qg}, {"Aqk", &StageTensors::Aqk}, {"T", &StageTensors::T},
      {"h", &StageTensors::h},   {"vn", &StageTensors::vn}};
  using Stage = decltype(&chunk_intra);
  const std::pair<Stage, std::set<std::string>> rows[] = {
      {chunk_intra, {"w", "u", "Aqk"}},
      {recompute_w_u, {"w", "u", "T"}},
      {chunk_delta_h, {"w", "u", "kg", "h", "vn"}},
      {chunk_o, {"qg", "Aqk", "h", "vn"}}};
  for (const auto& [stage, needed] : rows)
    for (const auto& [name, member] : members) {
      StageTensors stages;
      for (const auto& row : members) stages.*row.second = memory.data();
      stages.gamma = stages.beta = stages.diag = static_cast<float*>(memory.data());
      const auto run_it = [&] {
        return stage(call.plan, call.memory->tensors(), stages, call.workspace.data(),
                     call.workspace.size(), nullptr);
      };
      stages.*member = host;
      EXPECT_EQ(run_it().message().rfind(std::string(name) + ": is host memory", 0), 0u) << name;
      stages.*member = static_cast<char*>(memory.data()) + 8;
      EXPECT_EQ(run_it().message(), std::string(name) + ": pointer is not aligned to 16 bytes");
      stages.*member = nullptr;
      EXPECT_EQ(run_it().message(),
                needed.contains(name) ? std::string(name) + ": pointer is null" : "")
          << name;
    }
  EXPECT_EQ(stage_sizes(call.plan, nullptr).message(), "sizes: is null");
}

TEST_F(Calls, OtherBackendsHaveNoChunkStages) {
  const Inputs inputs = check::generate(test::shape(20, 1, 16, 16));
  OnDevice call(inputs, {.plan = test::with_backend("recurrent")});
  StageSizes sizes;
  EXPECT_EQ(stage_sizes(call.plan, &sizes).code(), StatusCode::kUnsupported);
  expect_from_chunk_stages(call, StatusCode::kUnsupported);
}

TEST_F(Calls, ArraysOfMetadataAreCheckedByName) {
  Inputs inputs = packed_inputs();
  Problem& p = inputs.problem;
  StateDesc states;
  states.num_slots = 3;
  states.indexed = true;
  states.tensor = contiguous(DType::kFloat32, {3, 2, 64, 64});
  p.initial_state = p.final_state = p.checkpoints = states;
  p.checkpoint_every = 64;
  p.checkpoint_offsets = true;
  p.initial_state_mask = true;
  check::Outputs outputs = check::make_outputs(&p, DType::kBFloat16);
  Plan plan;
  throw_if_error(make_plan_from_bounds(p, test::device(), {}, &plan));
  const int64_t cu[] = {0, 130, 194, 201};
  const int32_t slots[] = {0, 1, 2}, offsets[] = {128, 64, 0};
  const uint8_t mask[] = {1, 1, 1};
  Tensors host = inputs.tensors();
  outputs.attach(&host);
  host.cu_seqlens = cu;
  host.initial_state_indices = host.final_state_indices = host.checkpoint_indices = slots;
  host.checkpoint_offsets = offsets;
  host.initial_state_mask = mask;
  check::DeviceTensors memory(plan, host);
  DeviceBuffer workspace(plan.workspace_bytes);
  ASSERT_TRUE(run(plan, memory.tensors(), workspace.data(), workspace.size()).ok());
  const std::pair<const char*, std::function<void(Tensors*, bool)>> rows[] = {
      {"cu_seqlens", [&](Tensors* t, bool null) { t->cu_seqlens = null ? nullptr : cu; }},
      {"initial_state_indices",
       [&](Tensors* t, bool null) { t->initial_state_indices = null ? nullptr : slots; }},
      {"final_state_indices",
       [&](Tensors* t, bool null) { t->final_state_indices = null ? nullptr : slots; }},
      {"checkpoint_indices",
       [&](Tensors* t, bool null) { t->checkpoint_indices = null ? nullptr : slots; }},
      {"checkpoint_offsets",
       [&](Tensors* t, bool null) { t->checkpoint_offsets = null ? nullptr : offsets; }},
      {"initial_state_mask",
       [&](Tensors* t, bool null) { t->initial_state_mask = null ? nullptr : mask; }}};
  for (const auto& [name, change] : rows)
    for (const bool null : {true, false}) {
      Tensors tensors = memory.tensors();
      change(&tensors, null);
      const Status status = run(plan, tensors, workspace.data(), workspace.size());
      EXPECT_EQ(status.message().rfind(
                    std::string(name) + (null ? ": pointer is null" : ": is host memory"), 0),
                0u)
          << status.message();
    }
  // Slots are read with their offsets, of a buffer without any too.
  p.checkpoints->num_slots = 0;
  throw_if_error(make_plan_from_bounds(p, test::device(), {}, &plan));
  DeviceBuffer room(plan.workspace_bytes);
  Tensors tensors = memory.tensors();
  tensors.checkpoint_indices = nullptr;
  EXPECT_EQ(run(plan, tensors, room.data(), room.size()).message(),
            "checkpoint_indices: pointer is null");
}

/// A trusted caller's pointers are not asked about; what needs no driver is looked at all the same.
TEST_F(Calls, TrustedPointersGiveTheSame) {
  Inputs inputs = packed_inputs();
  Problem& p = inputs.problem;
  check::want_final_state(&p);
  check::Outputs outputs = check::make_outputs(&p, DType::kBFloat16);
  Plan plan;
  throw_if_error(make_plan(p, inputs.cu_seqlens, test::device(), {}, &plan));
  std::vector<io::Buffer> results;
  for (const bool trusted : {false, true}) {
    Tensors host = inputs.tensors();
    outputs.o.fill(0xff);
    outputs.attach(&host);
    check::DeviceTensors memory(plan, host);
    DeviceBuffer workspace(plan.workspace_bytes);
    Tensors tensors = memory.tensors();
    tensors.trusted = trusted;
    const Status status = run(plan, tensors, workspace.data(), workspace.size());
    ASSERT_TRUE(status.ok()) << status.message();
    memory.download();
    results.push_back(outputs.o);
    tensors.q = nullptr;
    EXPECT_EQ(run(plan, tensors, workspace.data(), workspace.size()).message(),
              "q: pointer is null");
  }
  EXPECT_TRUE(test::same_bits(results[0], results[1]));
}

/// The word that a call of `plan` leaves in its workspace.
int32_t flags_of(const Plan& plan, const DeviceBuffer& workspace) {
  check::synchronize_device();
  std::vector<unsigned char> bytes(workspace.size());
  workspace.download(bytes.data(), bytes.size());
  for (const WorkspaceBlock& block : plan.workspace)
    if (block.name == "device_flags") {
      int32_t flags = 0;
      std::memcpy(&flags, bytes.data() + block.offset, sizeof flags);
      return flags;
    }
  ADD_FAILURE() << "the plan has no flags";
  return -1;
}

/// cu_seqlens of three sequences and 201 tokens, right ones first, as elements of `type`.
void expect_lengths_flagged(const Inputs& inputs, Problem p, DType type,
                            const std::string& backend) {
  SCOPED_TRACE(backend + (p.operation == Operation::kDecode ? " decode " : " ") + dtype_name(type));
  p.cu_seqlens = type;
  check::Outputs outputs = check::make_outputs(&p, DType::kBFloat16);
  Plan plan;
  throw_if_error(make_plan_from_bounds(p, test::device(), test::with_backend(backend), &plan));
  const int64_t far = type == DType::kInt64 ? 1LL << 40 : 1 << 30;
  const int64_t rows[][4] = {{0, 130, 194, 201},   {0, 130, 100, 201}, {0, 130, 194, 5000},
                             {-64, 130, 194, 201}, {0, far, 194, 201}, {0, -far, 0, 201},
                             {5, 4, 3, 2},         {0, 130, 194, 200}};
  const auto bytes = [&](const int64_t(&row)[4]) {
    io::Buffer cu(4 * static_cast<std::size_t>(dtype_size(type)));
    for (int i = 0; i < 4; ++i) {
      if (type == DType::kInt64)
        cu.as<int64_t>()[i] = row[i];
      else
        cu.as<int32_t>()[i] = static_cast<int32_t>(row[i]);
    }
    return cu;
  };
  const io::Buffer good = bytes(rows[0]);
  Tensors host = inputs.tensors();
  outputs.attach(&host);
  host.cu_seqlens = good.data();
  check::DeviceTensors memory(plan, host);
  DeviceBuffer workspace(plan.workspace_bytes);
  for (const auto& row : rows) {
    const io::Buffer from = bytes(row);
    DeviceBuffer cu(from.size());
    cu.upload(from.data(), from.size());
    Tensors tensors = memory.tensors();
    tensors.cu_seqlens = cu.data();
    throw_if_error(run(plan, tensors, workspace.data(), workspace.size()));
    EXPECT_EQ(flags_of(plan, workspace), &row == rows ? 0 : kBadSequences)
        << row[1] << " " << row[3];
  }
}

TEST_F(Calls, WrongDeviceCuSeqlensAreClampedAndFlagged) {
  const Inputs inputs = packed_inputs();
  Problem p = inputs.problem;
  check::want_final_state(&p);
  for (const DType type : {DType::kInt64, DType::kInt32}) {
    for (const std::string& backend : test::backends())
      expect_lengths_flagged(inputs, p, type, backend);
    Problem decode = p;
    decode.operation = Operation::kDecode;
    expect_lengths_flagged(inputs, decode, type, "");
  }
}

/// A batch that is padded, as a captured graph has it: lengths on the device cover fewer tokens
/// than there are, and some sequences have none. The other rows of o are 0, with zero_skipped by
/// the decode kernel itself.
TEST_F(Calls, DecodeZeroesRowsOfNoSequence) {
  const std::vector<int64_t> covers[] = {
      {0, 1, 2, 4, 4, 4}, {3, 4, 5, 6, 7, 7}, {0, 0, 0, 0, 0, 0}};
  for (const int64_t dim : {64, 128})
    for (const std::vector<int64_t>& cover : covers) {
      check::GenerateOptions options = test::shape(0, 3, dim, dim);
      options.dtype = DType::kBFloat16;
      options.initial_state = true;
      options.seq_lens = {1, 1, 2, 7, 0};
      const Inputs inputs = check::generate(options);
      Problem p = inputs.problem;
      p.operation = Operation::kDecode;
      p.cu_seqlens = DType::kInt64;
      check::Outputs left = check::make_outputs(&p, DType::kBFloat16);  // by a kernel of its own
      check::Outputs zeroed = check::make_outputs(&p, DType::kBFloat16);
      io::Buffer states[2] = {inputs.initial_state, inputs.initial_state};
      for (check::Outputs* outputs : {&left, &zeroed}) {
        p.zero_skipped = outputs == &zeroed;
        Plan plan;
        throw_if_error(make_plan_from_bounds(p, test::device(), {}, &plan));
        Tensors host = inputs.tensors();
        outputs->attach(&host);
        host.initial_state = states[p.zero_skipped ? 1 : 0].data();
        host.cu_seqlens = cover.data();
        io::Buffer workspace(plan.workspace_bytes);
        throw_if_error(check::run_and_wait(plan, host, workspace.data(), workspace.size()));
      }
      const std::size_t row = test::row_bytes(p.o, p.num_value_heads, p.value_dim);
      for (int64_t t = 0; t < p.num_tokens; ++t) {
        if (t >= cover.front() && t < cover.back()) continue;
        const std::byte* of_token = left.o.data() + static_cast<std::size_t>(t) * row;
        for (std::size_t i = 0; i < row; ++i)
          ASSERT_EQ(std::to_integer<int>(of_token[i]), 0) << "token " << t;
      }
      EXPECT_TRUE(test::same_bits(left.o, zeroed.o)) << "K " << dim << " from " << cover[0];
      EXPECT_TRUE(test::same_bits(states[0], states[1])) << "K " << dim << " from " << cover[0];
    }
}

/// Three sequences with states in a pool, whose indices on the device are right and wrong.
void expect_flags(Inputs inputs, const PlanOptions& options) {
  Problem& p = inputs.problem;
  StateDesc states;
  states.num_slots = 3;
  states.indexed = true;
  states.tensor = contiguous(DType::kFloat32, {3, p.num_value_heads, p.key_dim, p.value_dim});
  p.initial_state = p.final_state = states;
  check::Outputs outputs = check::make_outputs(&p, DType::kBFloat16);
  const int32_t good[] = {2, 0, 1};
  Plan plan;
  throw_if_error(make_plan(p, inputs.cu_seqlens, test::device(), options, &plan));
  SCOPED_TRACE(plan.implementation + (plan.segmented ? " in segments" : ""));
  Tensors host = inputs.tensors();
  outputs.attach(&host);
  host.initial_state_indices = good;
  host.final_state_indices = good;
  check::DeviceTensors memory(plan, host);
  DeviceBuffer workspace(plan.workspace_bytes), wrong(sizeof good);
  throw_if_error(run(plan, memory.tensors(), workspace.data(), workspace.size()));
  EXPECT_EQ(flags_of(plan, workspace), 0);
  for (const int32_t value : {3, -2, INT32_MAX, INT32_MIN}) {
    const int32_t bad[] = {2, value, 1};
    const bool none = value < 0;
    wrong.upload(bad, sizeof bad);
    Tensors tensors = memory.tensors();
    tensors.initial_state_indices = static_cast<const int32_t*>(wrong.data());
    throw_if_error(run(plan, tensors, workspace.data(), workspace.size()));
    EXPECT_EQ(flags_of(plan, workspace), none ? 0 : kBadInitialIndex) << value;
    tensors = memory.tensors();
    tensors.final_state_indices = static_cast<const int32_t*>(wrong.data());
    throw_if_error(run(plan, tensors, workspace.data(), workspace.size()));
    EXPECT_EQ(flags_of(plan, workspace), none ? 0 : kBadFinalIndex) << value;
  }
}

TEST_F(Calls, WrongDeviceIndicesAreSkippedAndFlagged) {
  for (const std::string& backend : test::backends())
    expect_flags(packed_inputs(), test::with_backend(backend));
}

TEST_F(Calls, WrongDeviceIndicesOfSegmentsAreSkippedAndFlagged) {
  if (test::device().compute_capability != 90) GTEST_SKIP() << "needs compute capability 9.0";
  check::GenerateOptions options = test::shape16(0, 2, 128, 128);
  options.seq_lens = {130, 64, 7};
  for (const SegmentMethod method : {SegmentMethod::kScanMergeForward, SegmentMethod::kOnePass}) {
    PlanOptions plan = test::fixed_segments(2, method);
    plan.backend = "fused";
    expect_flags(check::generate(options), plan);
  }
}

/// Keys of about length 1, not normalised again.
void take_keys_as_they_are(Inputs* inputs) {
  Problem& p = inputs->problem;
  p.qk_l2norm = false;
  const auto size = 1 / std::sqrt(static_cast<float>(p.key_dim));
  const int64_t count = p.batch * p.num_tokens * p.num_heads * p.key_dim;
  for (int64_t i = 0; i < count; ++i)
    store_element(inputs->k.data(), p.k.dtype, i,
                  size * load_element(inputs->k.data(), p.k.dtype, i));
}

/// Stage by stage on the caller's buffers: what run() computes, and recompute_w_u gives
/// chunk_intra's bits again.
TEST_F(Calls, ChunkStagesMatchRun) {
  struct Case {
    int64_t K, V;
    DType dtype;
    bool l2norm;
  };
  for (const auto& [K, V, dtype, l2norm] :
       {Case{128, 128, DType::kBFloat16, true}, Case{128, 200, DType::kBFloat16, false},
        Case{64, 128, DType::kFloat16, true}, Case{64, 72, DType::kFloat16, false}}) {
    check::GenerateOptions options = test::shape(0, 2, K, V);
    options.num_value_heads = 4;
    options.dtype = dtype;
    options.initial_state = true;
    options.seq_lens = {200, 64, 0, 129};
    Inputs inputs = check::generate(options);
    if (!l2norm) take_keys_as_they_are(&inputs);
    const test::RunOptions in_stages{.plan = test::with_backend("staged"), .out_dtype = dtype};
    OnDevice whole(inputs, in_stages), staged(inputs, in_stages);
    throw_if_error(whole.run());
    whole.read();
    StageSizes sizes;
    throw_if_error(stage_sizes(staged.plan, &sizes));
    DeviceBuffer w(sizes.w), u(sizes.u), kg(sizes.kg), qg(sizes.qg), Aqk(sizes.Aqk), T(sizes.T),
        gamma(sizes.gamma), beta(sizes.beta), diag(sizes.diag), h(sizes.h), vn(sizes.vn);
    for (DeviceBuffer* buffer : {&w, &u, &kg, &qg, &Aqk, &T, &gamma, &beta, &diag, &h, &vn})
      buffer->fill(0xff);
    const auto fp32 = [](DeviceBuffer& buffer) { return static_cast<float*>(buffer.data()); };
    const StageTensors stages{w.data(),    u.data(),   kg.data(),  qg.data(), Aqk.data(), T.data(),
                              fp32(gamma), fp32(beta), fp32(diag), h.data(),  vn.data()};
    const auto call = [&](auto stage) {
      throw_if_error(stage(staged.plan, staged.memory->tensors(), stages, staged.workspace.data(),
                           staged.workspace.size(), nullptr));
      check::synchronize_device();
    };
    const auto contents = [](const DeviceBuffer& buffer) {
      std::vector<unsigned char> bytes(buffer.size());
      buffer.download(bytes.data(), bytes.size());
      return bytes;
    };
    call(chunk_intra);
    std::vector<std::vector<unsigned char>> first;
    for (DeviceBuffer* buffer : {&w, &u, &kg, &qg}) {
      first.push_back(contents(*buffer));
      buffer->fill(0xff);
    }
    call(recompute_w_u);
    std::size_t i = 0;
    for (DeviceBuffer* buffer : {&w, &u, &kg, &qg})
      EXPECT_EQ(contents(*buffer), first[i++]) << "recomputed tensor " << i;
    call(chunk_delta_h);
    call(chunk_o);
    staged.read();
    EXPECT_TRUE(test::same_bits(whole.outputs.final_state, staged.outputs.final_state));
    const check::Comparison comparison = check::compare(
        inputs, staged.problem, staged.outputs,
        {.operands = check::operands_of(staged.plan), .num_threads = test::oracle_threads()});
    EXPECT_TRUE(comparison.within()) << comparison.worst_o()->error;
  }
}

/// The same stages through the C ABI, in the order of run().
TEST_F(Calls, ChunkStagesThroughTheCAbi) {
  constexpr int64_t T = 100, H = 2, K = 64, V = 64;
  check::GenerateOptions options = test::shape(T, H, K, V);
  options.dtype = DType::kBFloat16;
  options.regime = check::Regime::kLog;
  const Inputs inputs = check::generate(options);
  OnDevice whole(inputs, {.plan = test::with_backend("staged"), .out_dtype = DType::kBFloat16});
  throw_if_error(whole.run());
  whole.read();

  kda_problem p;
  kda_problem_init(&p);
  p.num_tokens = T;
  p.num_heads = p.num_value_heads = H;
  p.key_dim = K, p.value_dim = V;
  p.beta_mode = static_cast<kda_beta_mode>(whole.problem.beta_mode);
  p.qk_l2norm = whole.problem.qk_l2norm;
  const Tensors& t = whole.memory->tensors();
  const auto set = [](kda_tensor* tensor, const void* data, const TensorDesc& desc) {
    tensor->data = const_cast<void*>(data);
    tensor->dtype = static_cast<kda_dtype>(desc.dtype);
    std::copy(desc.strides.begin(), desc.strides.end(), tensor->strides);
  };
  DeviceBuffer o(T * H * V * 2);
  o.fill(0xff);
  set(&p.q, t.q, whole.problem.q), set(&p.k, t.k, whole.problem.k);
  set(&p.v, t.v, whole.problem.v), set(&p.g, t.g, whole.problem.g);
  set(&p.beta, t.beta, whole.problem.beta), set(&p.o, o.data(), whole.problem.o);
  kda_plan_options plan_options;
  kda_plan_options_init(&plan_options);
  ASSERT_EQ(kda_plan_options_cuda(&plan_options, 0), KDA_OK) << kda_last_error();
  plan_options.backend = "staged";
  EXPECT_EQ(plan_options.gigahertz, test::device().gigahertz);
  EXPECT_EQ(plan_options.memory_bytes_per_second, test::device().memory_bytes_per_second);
  kda_plan_options older = plan_options;  // of a program that has no such fields
  older.struct_size = offsetof(kda_plan_options, memory_bytes_per_second);
  older.gigahertz = 7;
  ASSERT_EQ(kda_plan_options_cuda(&older, 0), KDA_OK) << kda_last_error();
  EXPECT_EQ(older.gigahertz, 7);
  EXPECT_EQ(kda_plan_options_cuda(&plan_options, 99), KDA_UNAVAILABLE);
  kda_plan* plan = nullptr;
  ASSERT_EQ(kda_plan_create(&p, nullptr, &plan_options, &plan), KDA_OK) << kda_last_error();
  DeviceBuffer workspace(kda_plan_workspace_bytes(plan));
  kda_stage_bytes bytes{};
  bytes.struct_size = sizeof bytes;
  ASSERT_EQ(kda_stage_sizes(plan, &bytes), KDA_OK) << kda_last_error();
  DeviceBuffer w(bytes.w), u(bytes.u), kg(bytes.kg), qg(bytes.qg), Aqk(bytes.Aqk), T_(bytes.T),
      gamma(bytes.gamma), beta(bytes.beta), diag(bytes.diag), h(bytes.h), vn(bytes.vn);
  kda_stages stages{};
  stages.struct_size = sizeof stages;
  stages.w = w.data(), stages.u = u.data(), stages.kg = kg.data(), stages.qg = qg.data();
  stages.Aqk = Aqk.data(), stages.T = T_.data(), stages.h = h.data(), stages.vn = vn.data();
  stages.gamma = static_cast<float*>(gamma.data());
  stages.beta = static_cast<float*>(beta.data());
  stages.diag = static_cast<float*>(diag.data());
  EXPECT_EQ(kda_stage_sizes(nullptr, &bytes), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_stage_sizes(plan, nullptr), KDA_INVALID_ARGUMENT);
  kda_stage_bytes short_bytes{};
  EXPECT_EQ(kda_stage_sizes(plan, &short_bytes), KDA_INVALID_ARGUMENT);
  short_bytes.struct_size = offsetof(kda_stage_bytes, u);
  EXPECT_EQ(kda_stage_sizes(plan, &short_bytes), KDA_OK) << kda_last_error();
  EXPECT_EQ(short_bytes.w, bytes.w);
  EXPECT_EQ(short_bytes.u, 0u) << "beyond an older caller's struct";
  for (const auto call : {kda_chunk_intra, kda_recompute_w_u, kda_chunk_delta_h, kda_chunk_o}) {
    EXPECT_EQ(call(nullptr, &p, &stages, nullptr, 0), KDA_INVALID_ARGUMENT);
    EXPECT_EQ(call(plan, nullptr, &stages, nullptr, 0), KDA_INVALID_ARGUMENT);
    EXPECT_EQ(call(plan, &p, nullptr, nullptr, 0), KDA_INVALID_ARGUMENT);
  }
  for (const auto call : {kda_chunk_intra, kda_recompute_w_u, kda_chunk_delta_h, kda_chunk_o})
    ASSERT_EQ(call(plan, &p, &stages, workspace.data(), workspace.size()), KDA_OK)
        << kda_last_error();
  check::synchronize_device();
  io::Buffer result(o.size());
  o.download(result.data(), result.size());
  check::Outputs outputs = whole.outputs;
  outputs.o = result;
  const check::Comparison comparison = check::compare(
      inputs, whole.problem, outputs,
      {.operands = check::operands_of(whole.plan), .num_threads = test::oracle_threads()});
  EXPECT_TRUE(comparison.within()) << comparison.worst_o()->error;
  kda_plan_destroy(plan);
}

}  // namespace
}  // namespace kda
