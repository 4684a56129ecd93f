// SPDX-License-Identifier: Apache-2.0
// State pools, masks, in-place states and checkpoints of forward.
#include <gtest/gtest.h>

#include <cstring>

#include "core/convert.hpp"
#include "core/guard.hpp"
#include "plan/ledger.hpp"
#include "support/harness.hpp"

namespace kda {
namespace {

using check::Inputs;

constexpr int64_t kK = 16, kV = 24, kHeads = 2;
constexpr int64_t kStateElems = kHeads * kK * kV;

/// Three sequences with initial states 0, 1, 2 of `inputs.initial_state`.
Inputs three_sequences() {
  check::GenerateOptions options = test::shape(0, kHeads, kK, kV);
  options.seq_lens = {20, 33, 5};
  options.initial_state = true;
  return check::generate(options);
}

StateDesc pool_of(int64_t slots) {
  StateDesc desc;
  desc.num_slots = slots;
  desc.indexed = true;
  desc.tensor = contiguous(DType::kFloat32, {slots, kHeads, kK, kV});
  return desc;
}

struct PoolRun {
  io::Buffer pool;
  check::Outputs outputs;
};

PoolRun run_in_pool(const Inputs& inputs, const std::vector<int32_t>& read,
                    const std::vector<int32_t>& write, const std::string& backend = "",
                    bool masked = false) {
  constexpr int64_t kSlots = 7;
  PoolRun result;
  result.pool = io::Buffer(kSlots * kStateElems * 4);
  result.pool.fill(0xcd);
  for (std::size_t n = 0; n < read.size(); ++n)
    if (read[n] >= 0)
      std::memcpy(result.pool.as<float>() + read[n] * kStateElems,
                  inputs.initial_state.as<float>() + n * kStateElems, kStateElems * 4);
  Problem p = inputs.problem;
  p.initial_state = pool_of(kSlots);
  p.initial_state_mask = masked;
  p.final_state = pool_of(kSlots);
  result.outputs.o = io::Buffer(58 * kHeads * kV * 4);
  p.o = contiguous(DType::kFloat32, {1, 58, kHeads, kV});
  Plan plan;
  throw_if_error(make_plan(p, inputs.cu_seqlens, test::device_of(backend),
                           test::with_backend(backend), &plan));
  io::Buffer workspace(plan.workspace_bytes);
  workspace.fill(0xff);
  const uint8_t mask[] = {0, 1, 1};
  Tensors tensors = inputs.tensors();
  tensors.o = result.outputs.o.data();
  tensors.initial_state = tensors.final_state = result.pool.data();
  tensors.initial_state_mask = mask;
  tensors.initial_state_indices = read.data();
  tensors.final_state_indices = write.data();
  throw_if_error(check::run_and_wait(plan, tensors, workspace.data(), workspace.size()));
  return result;
}

const float* slot(const io::Buffer& pool, int64_t index) {
  return pool.as<float>() + index * kStateElems;
}

TEST(States, InPlaceInAPool) {
  const Inputs inputs = three_sequences();
  const test::Result dense = test::run_inputs(inputs);
  const PoolRun pooled = run_in_pool(inputs, {4, 0, 6}, {4, 0, 6});
  EXPECT_TRUE(test::same_bits(dense.outputs.o, pooled.outputs.o));
  const int64_t slots[] = {4, 0, 6};
  for (int64_t n = 0; n < 3; ++n)
    EXPECT_EQ(std::memcmp(slot(pooled.pool, slots[n]), slot(dense.outputs.final_state, n),
                          kStateElems * 4),
              0);
  for (const int64_t unused : {1, 2, 3, 5})
    for (int64_t i = 0; i < kStateElems * 4; ++i)
      ASSERT_EQ(pooled.pool.as<unsigned char>()[unused * kStateElems * 4 + i], 0xcd);
}

TEST(States, CopyOnWriteAndSkippedSlots) {
  const Inputs inputs = three_sequences();
  const test::Result dense = test::run_inputs(inputs);
  const PoolRun pooled = run_in_pool(inputs, {1, 2, 3}, {5, -1, 3});
  EXPECT_TRUE(test::same_bits(dense.outputs.o, pooled.outputs.o));
  EXPECT_EQ(std::memcmp(slot(pooled.pool, 5), slot(dense.outputs.final_state, 0), kStateElems * 4),
            0);
  EXPECT_EQ(std::memcmp(slot(pooled.pool, 1), slot(inputs.initial_state, 0), kStateElems * 4), 0);
  EXPECT_EQ(std::memcmp(slot(pooled.pool, 2), slot(inputs.initial_state, 1), kStateElems * 4), 0);
}

TEST(States, NoSlotMeansZero) {
  Inputs inputs = three_sequences();
  const PoolRun pooled = run_in_pool(inputs, {-1, -1, -1}, {0, 1, 2});
  inputs.problem.initial_state.reset();
  const test::Result zero = test::run_inputs(inputs);
  EXPECT_TRUE(test::same_bits(zero.outputs.o, pooled.outputs.o));
}

/// Sequences of 128 channels in 16 bits, which any backend takes, from and to pool slots; each
/// leaves a state after 32 tokens and at its end.
PoolRun run_with_checkpoints(const Inputs& inputs, const PlanOptions& options, int64_t first_slot,
                             const std::vector<int32_t>& read, const std::vector<int32_t>& write,
                             const std::vector<int32_t>& checkpoints) {
  constexpr int64_t kSlots = 6;
  Problem p = inputs.problem;
  StateDesc pool;
  pool.num_slots = kSlots;
  pool.indexed = true;
  pool.tensor = contiguous(DType::kFloat32, {kSlots, p.num_value_heads, p.key_dim, p.value_dim});
  p.initial_state = p.final_state = pool;
  p.first_slot = first_slot;
  if (!checkpoints.empty()) {
    p.checkpoints = pool;
    p.checkpoint_every = 64;
  }
  PoolRun result;
  result.outputs = check::make_outputs(&p, p.v.dtype);
  result.pool = io::Buffer(result.outputs.final_state.size());
  for (std::size_t i = 0; i < result.pool.size() / 4; ++i)
    result.pool.as<float>()[i] = static_cast<float>(i % 251) / 512 - 0.25f;
  Plan plan;
  throw_if_error(make_plan(p, inputs.cu_seqlens, test::device_of(options.backend), options, &plan));
  io::Buffer workspace(plan.workspace_bytes);
  workspace.fill(0xff);
  Tensors tensors = inputs.tensors();
  result.outputs.attach(&tensors);
  tensors.initial_state = tensors.final_state = result.pool.data();
  tensors.initial_state_indices = read.data();
  tensors.final_state_indices = write.data();
  tensors.checkpoint_indices = checkpoints.data();
  throw_if_error(check::run_and_wait(plan, tensors, workspace.data(), workspace.size()));
  return result;
}

/// o of 4 sequences, of which two have no slot; in rows that lie apart.
io::Buffer outputs_in_pool(Inputs inputs, const std::string& backend, bool zeroes,
                           bool from_bounds) {
  Problem& p = inputs.problem;
  p.initial_state = p.final_state = pool_of(5);
  p.first_slot = 1;
  p.zero_skipped = zeroes;
  p.o = contiguous(DType::kFloat32, {p.batch, p.num_tokens, kHeads, kV});
  for (std::size_t dim = 0; dim < 3; ++dim) p.o.strides[dim] += p.o.strides[dim] / kV * 4;
  io::Buffer o(static_cast<std::size_t>(p.o.strides[0] * p.batch) * sizeof(float));
  o.fill(0xff);
  io::Buffer pool(5 * kStateElems * sizeof(float));
  pool.fill(0);
  Plan plan;
  throw_if_error(from_bounds ? make_plan_from_bounds(p, test::device_of(backend),
                                                     test::with_backend(backend), &plan)
                             : make_plan(p, inputs.cu_seqlens, test::device_of(backend),
                                         test::with_backend(backend), &plan));
  io::Buffer workspace(plan.workspace_bytes);
  workspace.fill(0xff);
  const int32_t slots[] = {3, 0, 2, -1};
  Tensors tensors = inputs.tensors();
  tensors.o = o.data();
  tensors.initial_state = tensors.final_state = pool.data();
  tensors.initial_state_indices = tensors.final_state_indices = slots;
  tensors.cu_seqlens = from_bounds ? inputs.cu_seqlens.data() : nullptr;  // else the plan has them
  throw_if_error(check::run_and_wait(plan, tensors, workspace.data(), workspace.size()));
  return o;
}

TEST(States, OutputsWithoutASlotAreZeroWhereAsked) {
  std::vector<std::string> backends = test::backends();
  backends.emplace_back("oracle");
  for (const std::string& backend : backends)
    for (const bool packed : {true, false})
      for (const bool from_bounds : {true, false}) {
        check::GenerateOptions options = test::shape(packed ? 0 : 20, kHeads, kK, kV);
        if (packed) options.seq_lens = {9, 20, 0, 33};
        if (!packed) options.batch = 4;
        const Inputs inputs = check::generate(options);
        io::Buffer expected = outputs_in_pool(inputs, backend, false, from_bounds);
        const int64_t row = kHeads * (kV + 4) * 4;
        const auto zero = [&](int64_t begin, int64_t end) {
          for (int64_t i = begin * kHeads; i < end * kHeads; ++i)
            std::memset(expected.data() + i * row / kHeads, 0, kV * 4);
        };
        zero(packed ? 9 : 20, packed ? 29 : 40);
        zero(packed ? 29 : 60, packed ? 62 : 80);
        EXPECT_TRUE(test::same_bits(expected, outputs_in_pool(inputs, backend, true, from_bounds)))
            << backend << (packed ? " packed" : " rows") << (from_bounds ? " from bounds" : "");
      }
}

TEST(States, SlotsBelowTheFirstOneMeanNone) {
  check::GenerateOptions options = test::shape(0, 1, 128, 128);
  options.dtype = DType::kBFloat16;
  options.seq_lens = {130, 70, 64, 9};
  const Inputs inputs = check::generate(options);
  std::vector<PlanOptions> plans = {test::with_backend("oracle"),
                                    test::fixed_segments(2, SegmentMethod::kScanMergeForward),
                                    test::fixed_segments(2, SegmentMethod::kOnePass)};
  for (const std::string& backend : test::backends()) plans.push_back(test::with_backend(backend));
  if (test::on_cuda()) plans.push_back(test::with_backend("staged"));
  for (const PlanOptions& plan : plans)
    for (const bool checkpoints : {true, false}) {
      const std::vector<int32_t> some = {0, 3, 0, INT32_MIN}, as_none = {-1, 3, -1, -1};
      const PoolRun null_block = run_with_checkpoints(inputs, plan, 1, {0, -7, 2, 0}, {4, 0, 2, 0},
                                                      checkpoints ? some : std::vector<int32_t>{});
      const PoolRun none = run_with_checkpoints(inputs, plan, 0, {-1, -1, 2, -1}, {4, -1, 2, -1},
                                                checkpoints ? as_none : std::vector<int32_t>{});
      EXPECT_TRUE(test::same_bits(null_block.outputs.o, none.outputs.o)) << plan.backend;
      EXPECT_TRUE(test::same_bits(null_block.pool, none.pool)) << plan.backend;
      EXPECT_TRUE(test::same_bits(null_block.outputs.checkpoints, none.outputs.checkpoints))
          << plan.backend;
      for (const int64_t unused : {0, 1, 3, 5})
        for (int64_t i = 0; i < 128 * 128; ++i) {
          const int64_t at = unused * 128 * 128 + i;
          ASSERT_EQ(null_block.pool.as<float>()[at], static_cast<float>(at % 251) / 512 - 0.25f);
        }
    }
}

TEST(States, MaskStartsFromZero) {
  Inputs inputs = three_sequences();
  Problem& p = inputs.problem;
  p.initial_state_mask = true;
  check::want_final_state(&p);
  check::Outputs outputs = check::make_outputs(&p, DType::kFloat32);
  Plan plan;
  ASSERT_TRUE(make_plan(p, inputs.cu_seqlens, test::device(), {}, &plan).ok());
  io::Buffer workspace(plan.workspace_bytes);
  const uint8_t mask[] = {1, 0, 255};
  Tensors tensors = inputs.tensors();
  outputs.attach(&tensors);
  tensors.initial_state_mask = mask;
  ASSERT_TRUE(check::run_and_wait(plan, tensors, workspace.data(), workspace.size()).ok());

  std::memset(inputs.initial_state.as<float>() + kStateElems, 0, kStateElems * 4);
  p.initial_state_mask = false;
  EXPECT_TRUE(test::same_bits(test::run_inputs(inputs).outputs.o, outputs.o));
}

TEST(States, Bf16StatesRoundOnce) {
  Inputs inputs = check::generate(test::shape(40, kHeads, kK, kV));
  const test::Result exact = test::run_inputs(inputs);
  for (const StateLayout layout : {StateLayout::kKV, StateLayout::kVK}) {
    Problem& p = inputs.problem;
    p.state_layout = layout;
    check::want_final_state(&p);
    p.final_state->tensor = layout == StateLayout::kKV
                                ? contiguous(DType::kBFloat16, {1, kHeads, kK, kV})
                                : contiguous(DType::kBFloat16, {1, kHeads, kV, kK});
    const test::Result rounded = test::run_inputs(inputs);
    for (int64_t h = 0; h < kHeads; ++h)
      for (int64_t d = 0; d < kK; ++d)
        for (int64_t c = 0; c < kV; ++c) {
          const int64_t at =
              layout == StateLayout::kKV ? (h * kK + d) * kV + c : (h * kV + c) * kK + d;
          ASSERT_EQ(rounded.outputs.final_state.as<uint16_t>()[at],
                    float_to_bf16(exact.outputs.final_state.as<float>()[(h * kK + d) * kV + c]));
        }
  }
}

/// Checkpoints of `inputs` every 16 tokens against runs that end there.
TEST(States, CheckpointsAreTheStatesThere) {
  const Inputs inputs = check::generate(test::shape(70, kHeads, kK, kV));
  for (const int64_t every : {16, 32, 48}) {
    Inputs with = inputs;
    const int64_t count = 70 / every;
    StateDesc desc;
    desc.num_slots = count;
    desc.tensor = contiguous(DType::kFloat32, {count, kHeads, kK, kV});
    with.problem.checkpoints = desc;
    with.problem.checkpoint_every = every;
    const test::Result result = test::run_inputs(with);
    const test::Result plain = test::run_inputs(inputs);
    EXPECT_TRUE(test::same_bits(plain.outputs.o, result.outputs.o));
    for (int64_t c = 0; c < count; ++c) {
      Inputs prefix = inputs;
      prefix.problem.num_tokens = (c + 1) * every;
      const test::Result there = test::run_inputs(prefix);
      EXPECT_EQ(std::memcmp(slot(result.outputs.checkpoints, c), there.outputs.final_state.data(),
                            kStateElems * 4),
                0)
          << every << " " << c;
    }
  }
}

TEST(States, CheckpointsIntoSlots) {
  check::GenerateOptions options = test::shape(0, kHeads, kK, kV);
  options.seq_lens = {40, 0, 16};
  Inputs inputs = check::generate(options);
  Problem& p = inputs.problem;
  p.checkpoint_every = 16;
  StateDesc desc;
  desc.num_slots = 3;
  desc.tensor = contiguous(DType::kFloat32, {3, kHeads, kK, kV});
  p.checkpoints = desc;
  const test::Result dense = test::run_inputs(inputs);

  p.checkpoints = pool_of(5);
  check::Outputs outputs = check::make_outputs(&p, DType::kFloat32);
  outputs.checkpoints.fill(0xcd);
  Plan plan;
  ASSERT_TRUE(make_plan(p, inputs.cu_seqlens, test::device(), {}, &plan).ok());
  io::Buffer workspace(plan.workspace_bytes);
  const int32_t slots[] = {3, -1, 0};
  Tensors tensors = inputs.tensors();
  outputs.attach(&tensors);
  tensors.checkpoint_indices = slots;
  ASSERT_TRUE(check::run_and_wait(plan, tensors, workspace.data(), workspace.size()).ok());
  EXPECT_EQ(std::memcmp(slot(outputs.checkpoints, 3), slot(dense.outputs.checkpoints, 0),
                        kStateElems * 4),
            0);
  EXPECT_EQ(std::memcmp(slot(outputs.checkpoints, 0), slot(dense.outputs.checkpoints, 2),
                        kStateElems * 4),
            0);
  for (const int64_t unused : {1, 2, 4})
    EXPECT_EQ(outputs.checkpoints.as<unsigned char>()[unused * kStateElems * 4], 0xcd);
}

/// Four sequences with one checkpoint each at most, in a pool of `type`: offsets and their slots.
struct Offsets {
  check::Inputs inputs;
  std::vector<int32_t> offsets = {16, 0, 48, 64}, slots = {4, 1, 2, 0};
  std::vector<int32_t> from = {-1, -1, -1, -1};  ///< slots of initial states, where there are any
  check::Outputs outputs;
  int32_t flags = 0;

  explicit Offsets(DType type) {
    check::GenerateOptions options = test::shape(0, kHeads, kK, kV);
    options.seq_lens = {40, 33, 50, 70};
    inputs = check::generate(options);
    Problem& p = inputs.problem;
    p.checkpoints = pool_of(5);
    p.checkpoints->tensor.dtype = type;
    p.checkpoint_every = 16;
    p.checkpoint_offsets = true;
    outputs = check::make_outputs(&p, DType::kFloat32);
    outputs.checkpoints.fill(0xcd);
  }
  Status run(const std::string& backend, bool from_bounds) {
    Plan plan;
    const DeviceFacts device = test::device_of(backend);
    const PlanOptions options = test::with_backend(backend);
    KDA_RETURN_IF_ERROR(from_bounds
                            ? make_plan_from_bounds(inputs.problem, device, options, &plan)
                            : make_plan(inputs.problem, inputs.cu_seqlens, device, options, &plan));
    io::Buffer workspace(plan.workspace_bytes);
    Tensors t = inputs.tensors();
    if (from_bounds) t.cu_seqlens = inputs.cu_seqlens.data();
    outputs.attach(&t);
    io::Buffer pool(5 * kStateElems * 4);
    pool.fill(0xff);  // NaN
    if (inputs.problem.initial_state) {
      t.initial_state = pool.data();
      t.initial_state_indices = from.data();
    }
    t.checkpoint_offsets = offsets.data();
    t.checkpoint_indices = slots.data();
    KDA_RETURN_IF_ERROR(check::run_and_wait(plan, t, workspace.data(), workspace.size()));
    if (const void* word = plan::find_block(plan, workspace.data(), "device_flags"))
      std::memcpy(&flags, word, sizeof flags);
    return {};
  }
};

TEST(States, CheckpointsAtOffsets) {
  std::vector<std::string> backends = test::backends();
  backends.emplace_back("oracle");
  for (const std::string& backend : backends)
    for (const DType type : {DType::kFloat32, DType::kBFloat16})
      for (const bool from_bounds : {false, true}) {
        Offsets some(type);
        some.inputs.problem.first_slot = 1;  // the last sequence has none
        some.offsets[3] = 1000000;
        ASSERT_TRUE(some.run(backend, from_bounds).ok()) << backend;
        EXPECT_EQ(some.flags, 0);
        Offsets all(type);  // a slot every 16 tokens: 2 + 2 + 3 + 4 of them
        all.inputs.problem.checkpoint_offsets = false;
        all.inputs.problem.checkpoints->num_slots = 11;
        all.inputs.problem.checkpoints->indexed = false;
        all.outputs = check::make_outputs(&all.inputs.problem, DType::kFloat32);
        ASSERT_TRUE(all.run(backend, from_bounds).ok()) << backend;
        EXPECT_TRUE(test::same_bits(some.outputs.o, all.outputs.o)) << backend;
        const auto bytes = static_cast<std::size_t>(kStateElems * dtype_size(type));
        for (const auto& [slot, checkpoint] : {std::pair{4, 0}, std::pair{2, 6}})
          EXPECT_EQ(std::memcmp(some.outputs.checkpoints.data() + bytes * slot,
                                all.outputs.checkpoints.data() + bytes * checkpoint, bytes),
                    0)
              << backend << " slot " << slot;
        for (const std::size_t unused : {0, 1, 3})
          for (std::size_t i = 0; i < bytes; ++i)
            ASSERT_EQ(some.outputs.checkpoints.as<unsigned char>()[unused * bytes + i], 0xcd)
                << backend << " slot " << unused;
      }
}

/// They start from zero, and their checkpoints are stored all the same.
TEST(States, CheckpointsOfSequencesWithoutASlot) {
  std::vector<std::string> backends = test::backends();
  backends.emplace_back("oracle");
  for (const std::string& backend : backends) {
    Offsets zero(DType::kFloat32), pooled = zero;
    pooled.inputs.problem.initial_state = pool_of(5);
    ASSERT_TRUE(zero.run(backend, false).ok()) << backend;
    ASSERT_TRUE(pooled.run(backend, false).ok()) << backend;
    EXPECT_TRUE(test::same_bits(zero.outputs.o, pooled.outputs.o)) << backend;
    EXPECT_TRUE(test::same_bits(zero.outputs.checkpoints, pooled.outputs.checkpoints)) << backend;
    EXPECT_NE(pooled.outputs.checkpoints.as<unsigned char>()[4 * kStateElems * 4], 0xcd) << backend;
  }
}

/// What the CPU refuses a GPU takes as no checkpoint, and flags.
TEST(States, OffsetsThatAreNoCheckpoints) {
  const struct {
    int32_t offset;
    const char* message;
  } rows[] = {{24, "checkpoint_offsets: entry 2 = 24 is not a multiple of 16"},
              {64, "checkpoint_offsets: entry 2 = 64 is above 50, the length of its sequence"}};
  for (const auto& row : rows)
    for (const std::string& backend : test::backends()) {
      Offsets o(DType::kFloat32);
      o.offsets[2] = row.offset;
      const Status status = o.run(backend, false);
      if (!test::on_cuda()) {
        EXPECT_EQ(status.message(), row.message);
        continue;
      }
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(o.flags, kBadCheckpointIndex) << backend;
      EXPECT_EQ(o.outputs.checkpoints.as<unsigned char>()[2 * kStateElems * 4], 0xcd) << backend;
      EXPECT_NE(o.outputs.checkpoints.as<unsigned char>()[4 * kStateElems * 4], 0xcd) << backend;
    }
}

TEST(States, OracleBackendAgreesOnPoolsMasksAndSkips) {
  // The same calls as above, by both implementations, must leave the same pools.
  const Inputs inputs = three_sequences();
  const std::vector<int32_t> read = {1, -1, 3}, write = {5, -1, 3};
  for (const bool masked : {false, true}) {
    const PoolRun fast = run_in_pool(inputs, read, write, "", masked);
    const PoolRun truth = run_in_pool(inputs, read, write, "oracle", masked);
    for (const int64_t written : {3, 5})
      for (int64_t i = 0; i < kStateElems; ++i)
        ASSERT_NEAR(slot(fast.pool, written)[i], slot(truth.pool, written)[i], 1e-5);
    EXPECT_EQ(std::memcmp(slot(fast.pool, 1), slot(truth.pool, 1), kStateElems * 4), 0);
  }
}

TEST(States, OracleBackendServesTheSameOptions) {
  Inputs inputs = three_sequences();
  Problem& p = inputs.problem;
  p.checkpoint_every = 16;
  StateDesc desc;
  desc.num_slots = 3;
  desc.tensor = contiguous(DType::kFloat32, {3, kHeads, kK, kV});
  p.checkpoints = desc;
  for (const StateLayout layout : {StateLayout::kKV, StateLayout::kVK}) {
    p.state_layout = layout;
    const auto shape = [&](int64_t n) {
      return layout == StateLayout::kKV ? contiguous(DType::kFloat32, {n, kHeads, kK, kV})
                                        : contiguous(DType::kFloat32, {n, kHeads, kV, kK});
    };
    p.initial_state->tensor = shape(3);
    p.checkpoints->tensor = shape(3);
    p.final_state.reset();
    const test::Result truth = test::run_inputs(inputs, {.plan = test::with_backend("oracle")});
    const test::Result fast = test::run_inputs(inputs);
    for (int64_t i = 0; i < 3 * kStateElems; ++i) {
      ASSERT_NEAR(truth.outputs.checkpoints.as<float>()[i], fast.outputs.checkpoints.as<float>()[i],
                  1e-5);
      ASSERT_NEAR(truth.outputs.final_state.as<float>()[i], fast.outputs.final_state.as<float>()[i],
                  1e-5);
    }
  }
}

}  // namespace
}  // namespace kda
