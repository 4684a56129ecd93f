// SPDX-License-Identifier: Apache-2.0
// The cut that the device makes where the host does not know the lengths: the planner's, for tables
// of every kind, and results with the bits of a call with host lengths.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "support/gpu.hpp"
#include "support/graph.hpp"

#ifdef KDA_WITH_CUDA

#include "cuda/fused/cost.hpp"
#include "cuda/fused/device_cut.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/built.hpp"
#include "plan/ledger.hpp"

namespace kda {
namespace {

using check::DeviceBuffer;
using check::Inputs;
using check::Regime;
using cuda::CutHeader;
using cuda::sm90::FusedState;
using cuda::sm90::WorkUnit;

std::size_t size(int64_t count) { return static_cast<std::size_t>(count); }

template <class T>
std::vector<T> read(const DeviceBuffer& from, int64_t count) {
  std::vector<T> values(size(count));
  from.download(values.data(), values.size() * sizeof(T));
  return values;
}

/// A problem that the planner may cut, as far as a cut depends on it.
struct Table {
  std::vector<int64_t> cu_seqlens = {0};
  int64_t heads = 1, dim = 128;
  int32_t sms = 132;
  bool early_exit = true;

  int64_t num_sequences() const { return static_cast<int64_t>(cu_seqlens.size()) - 1; }
  void add(int64_t tokens) { cu_seqlens.push_back(cu_seqlens.back() + tokens); }

  Problem problem() const {
    Problem p;
    const int64_t T = cu_seqlens.back();
    p.num_tokens = T, p.num_sequences = num_sequences();
    p.cu_seqlens = DType::kInt64;
    p.num_heads = p.num_value_heads = heads;
    p.key_dim = p.value_dim = dim;
    p.q = p.k = p.v = p.g = p.o = contiguous(DType::kBFloat16, {1, T, heads, dim});
    p.beta = contiguous(DType::kBFloat16, {1, T, heads});
    if (early_exit) {
      p.qk_l2norm = true;
      p.gate_mode = GateMode::kBounded, p.beta_mode = BetaMode::kSigmoid;
      p.A_log = contiguous(DType::kFloat32, {heads});
    }
    return p;
  }
};

/// Lengths of a call, from short ones of a batch to one long document.
Table random_table(check::Random* random) {
  constexpr int64_t kHeads[] = {1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64};
  Table table;
  table.heads = kHeads[random->below(11)];
  table.dim = random->below(3) == 0 ? 64 : 128;
  table.sms = static_cast<int32_t>(20 + random->below(141));
  table.early_exit = random->below(2) == 0;
  const int64_t count = random->below(4) == 0 ? 1 + random->below(200) : 1 + random->below(6);
  for (int64_t n = 0; n < count; ++n) {
    const double power = random->uniform() * (n == 0 ? 19 : 13);
    table.add(random->below(8) == 0 ? random->below(2) : static_cast<int64_t>(std::exp2(power)));
  }
  return table;
}

cuda::fused::CutModel model_of(const Table& table) {
  return cuda::fused::model_from_bounds(table.problem(), gpu_facts(table.sms),
                                        table.early_exit ? cuda::sm90::kNormCheckTokens : 0);
}

/// A plan from bounds gives the kernel this cut. The kernel takes it where there is one sequence.
cuda::sm90::WholeCut guess_of(const Table& table) {
  PlanOptions options;
  options.backend = "cuda.sm90.fused";
  options.most_cut_bytes = INT64_MAX;
  Plan plan;
  throw_if_error(make_plan_from_bounds(table.problem(), gpu_facts(table.sms), options, &plan));
  EXPECT_TRUE(table.num_sequences() == 1 || plan.device_cut.segment_chunks == 0);
  return cuda::sm90::guess_of(plan.device_cut);
}

/// The outputs of the kernel for a table, read back.
struct CutOnDevice {
  CutHeader cut;
  std::vector<int64_t> cut_sequences, offsets_behind, cu_seqlens, chunk_offsets;
  std::vector<WorkUnit> units;
  int32_t flags = -1;

  CutOnDevice(const Table& table, const std::vector<int64_t>& given) {
    const int64_t N = table.num_sequences();
    cuda::sm90::DeviceCutArgs args;
    args.model = model_of(table);
    args.guess = guess_of(table);
    const int64_t most = args.model.most_behind;
    DeviceBuffer raw(given.size() * 8), map(size(N + 1) * 16), flag(4),
        header(size(cuda::device_cut_words(most)) * 8), offsets(size(N + 1) * 8),
        all_units(size(N + 2 * most + 1) * sizeof(WorkUnit));
    for (DeviceBuffer* buffer : {&map, &flag, &header, &offsets, &all_units}) buffer->fill(0xff);
    raw.upload(given.data(), given.size() * 8);
    auto* words = static_cast<int64_t*>(map.data());
    args.map = {raw.data(),
                true,
                N,
                table.cu_seqlens.back(),
                words,
                words + N + 1,
                static_cast<int32_t*>(flag.data())};
    args.cut = static_cast<CutHeader*>(header.data());
    args.offsets_behind = static_cast<int64_t*>(offsets.data());
    args.units = static_cast<WorkUnit*>(all_units.data());
    EXPECT_TRUE(cuda::sm90::launch_device_cut(args, {}).ok());
    check::synchronize_device();
    const std::vector<int64_t> head = read<int64_t>(header, cuda::device_cut_words(most));
    std::copy_n(head.data(), sizeof(cut) / 8, &cut.num_segments);
    cut_sequences.assign(head.begin() + sizeof(cut) / 8,
                         head.begin() + sizeof(cut) / 8 + cut.num_cut);
    offsets_behind = read<int64_t>(offsets, N + 1);
    cu_seqlens = read<int64_t>(map, N + 1);
    chunk_offsets = read<int64_t>(map, 2 * (N + 1));
    chunk_offsets.erase(chunk_offsets.begin(), chunk_offsets.begin() + N + 1);
    units = read<WorkUnit>(all_units, cut.num_segments + cut.num_behind + 1);
    flags = read<int32_t>(flag, 1)[0];
  }
};

/// The segments of a plan from lengths; one a sequence where nothing is cut.
std::vector<Segment> segments_of(const Plan& plan) {
  if (plan.segmented) return plan.segments;
  std::vector<Segment> all;
  for (std::size_t n = 0; n + 1 < plan.cu_seqlens.size(); ++n)
    all.push_back({static_cast<int64_t>(n), plan.cu_seqlens[n], plan.cu_seqlens[n + 1]});
  return all;
}

Plan plan_of(const Table& table) {
  PlanOptions options;
  options.backend = "cuda.sm90.fused";
  Plan plan;
  throw_if_error(
      make_plan(table.problem(), table.cu_seqlens, gpu_facts(table.sms), options, &plan));
  return plan;
}

std::string describe(const Table& table) {
  std::string text = cat("heads ", table.heads, ", K ", table.dim, ", SMs ", table.sms,
                         table.early_exit ? ", early exit" : "", ", lengths");
  for (int64_t n = 0; n < std::min<int64_t>(table.num_sequences(), 12); ++n)
    text += cat(" ", table.cu_seqlens[size(n + 1)] - table.cu_seqlens[size(n)]);
  return text;
}

void expect_same_cut(const Plan& plan, const CutOnDevice& device) {
  const std::vector<Segment> segments = segments_of(plan);
  const auto count = static_cast<int64_t>(segments.size()), N = plan.problem.num_sequences;
  ASSERT_EQ(device.cut.num_segments, count);
  ASSERT_EQ(device.cut.num_behind, count - N);
  EXPECT_EQ(device.cut.early_exit, plan.early_exit ? 1 : 0);
  EXPECT_EQ(device.chunk_offsets, plan.chunk_offsets);
  int64_t before = 0, transition = 0, most = 0, behind = 0;
  const auto expect_unit = [&](int64_t at, const Segment& segment, int64_t number,
                               FusedState state) {
    const WorkUnit& unit = device.units[size(at)];
    EXPECT_EQ(unit.tokens.sequence, segment.sequence) << at;
    EXPECT_EQ(unit.tokens.begin, segment.begin) << at;
    EXPECT_EQ(unit.tokens.end, segment.end) << at;
    EXPECT_EQ(unit.segment, number) << at;
    EXPECT_EQ(unit.state, state) << at;
    EXPECT_EQ(unit.before, before) << at;
    before += (segment.end - segment.begin + 63) / 64 + cuda::sm90::kWorkUnitCost;
  };
  std::vector<int64_t> cut;
  for (int64_t n = 0; n < count; ++n) {
    const Segment& segment = segments[size(n)];
    const bool first = n == 0 || segments[size(n - 1)].sequence != segment.sequence;
    const bool last = n + 1 == count || segments[size(n + 1)].sequence != segment.sequence;
    if (first) {
      EXPECT_EQ(device.offsets_behind[size(segment.sequence)], n - segment.sequence);
      behind = 0;
      if (!last) cut.push_back(segment.sequence);
    } else {
      most = std::max(most, ++behind);
      EXPECT_LE(segment.end - segment.begin, device.cut.longest_behind);
    }
    expect_unit(n, segment, n - segment.sequence - 1,
                !first ? FusedState::kZero
                : last ? FusedState::kWhole
                       : FusedState::kFirst);
  }
  for (int64_t n = 1; n < count; ++n) {
    const Segment& segment = segments[size(n)];
    if (segments[size(n - 1)].sequence != segment.sequence) continue;
    expect_unit(count + transition, segment, transition, FusedState::kTransition);
    ++transition;
  }
  EXPECT_EQ(device.units[size(count + transition)].before, before);
  EXPECT_EQ(device.offsets_behind[size(N)], count - N);
  EXPECT_EQ(device.cut.most_behind, most);
  EXPECT_EQ(device.cut_sequences, cut);
}

/// Where the host would cut, or a kernel could.
TEST(DeviceCutPlan, SaysWhyNothingIsCut) {
  Table table;
  table.heads = 4;
  table.add(65536);
  const auto expect = [&](const Problem& p, const PlanOptions& options, const char* reason) {
    Plan plan;
    throw_if_error(make_plan_from_bounds(p, gpu_facts(132), options, &plan));
    EXPECT_FALSE(plan.device_cut.on) << reason;
    const std::string text = plan.to_text(true);
    EXPECT_NE(text.find(reason), std::string::npos) << reason << "\n" << text;
  };
  for (const char* backend : {"", "cuda.sm90.fused", "cuda.sm80.staged"})
    for (const SegmentPolicy policy :
         {SegmentPolicy::kFlashKda, SegmentPolicy::kCula, SegmentPolicy::kFixed}) {
      PlanOptions options;
      options.backend = backend;
      options.context_parallel = policy;
      options.num_segments = policy == SegmentPolicy::kFixed ? 4 : 0;
      expect(table.problem(), options, "segments that are asked for need lengths on the host");
    }
  Problem invariant = table.problem();
  invariant.batch_invariant = true;
  expect(invariant, {}, "whether a kernel has room for all cuts would depend on the batch");
  Problem many = table.problem();
  many.num_sequences = 12001;
  PlanOptions fused;
  fused.backend = "cuda.sm90.fused";
  expect(many, fused, "12001 sequences are more than shared memory holds");
}

/// Checkpoints at offsets move no cut; those at all multiples are none of one pass.
TEST(DeviceCutPlan, CheckpointsMoveNoCut) {
  Table table;
  table.heads = 8;
  table.add(65536);
  Problem p = table.problem();
  p.checkpoints = StateDesc{
      .tensor = contiguous(DType::kFloat32, {1, 8, 128, 128}), .num_slots = 1, .indexed = true};
  p.checkpoint_every = 64;
  for (const bool offsets : {false, true}) {
    p.checkpoint_offsets = offsets;
    PlanOptions fused;
    fused.backend = offsets ? "" : "cuda.sm90.fused";
    Plan plan, bounds;
    throw_if_error(make_plan(p, table.cu_seqlens, gpu_facts(132), fused, &plan));
    throw_if_error(make_plan_from_bounds(p, gpu_facts(132), fused, &bounds));
    EXPECT_EQ(plan.implementation, "cuda.sm90.fused");
    EXPECT_EQ(plan.segmented, offsets);
    EXPECT_EQ(bounds.device_cut.on, offsets);
    EXPECT_EQ(plan.to_text(true).find("one pass declined: checkpoints at all multiples need the "
                                      "true start state; not cut") == std::string::npos,
              offsets);
  }
}

class DeviceCut : public test::HopperTest {};

/// KDA_TEST_TABLES: another number of tables.
int num_tables() {
  const char* wanted = std::getenv("KDA_TEST_TABLES");
  return wanted ? std::atoi(wanted) : test::emulated() ? 1500 : 5000;
}

TEST_F(DeviceCut, EqualsThePlanOfTheSameLengths) {
  check::Random random(11);
  const int wanted = num_tables();
  int cut = 0, exits = 0;
  for (int i = 0; i < wanted;) {
    const Table table = random_table(&random);
    if (table.cu_seqlens.back() == 0) continue;
    if (!may_cut(model_of(table), table.cu_seqlens.back(), table.num_sequences())) continue;
    ++i;
    const Plan plan = plan_of(table);
    cut += plan.segmented ? 1 : 0;
    exits += plan.early_exit ? 1 : 0;
    const CutOnDevice device(table, table.cu_seqlens);
    EXPECT_EQ(device.flags, 0);
    expect_same_cut(plan, device);
    ASSERT_FALSE(HasFailure()) << describe(table);
  }
  EXPECT_GE(cut, wanted / 4);
  EXPECT_GE(exits, wanted / 100);
}

/// The calls that the device cut was made for have segments: by the plan of their lengths, and by
/// the kernel.
TEST_F(DeviceCut, LongCallsAreCut) {
  const struct {
    std::vector<int64_t> lengths;
    int64_t heads, segments;
  } rows[] = {{{65536}, 8, 5}, {{8192}, 16, 3}, {{32768, 1024}, 12, 5}, {{2048}, 12, 3}};
  for (const auto& row : rows) {
    Table table;
    table.heads = row.heads;
    for (const int64_t length : row.lengths) table.add(length);
    const Plan plan = plan_of(table);
    EXPECT_EQ(static_cast<int64_t>(plan.segments.size()), row.segments) << describe(table);
    Plan bounds;
    throw_if_error(make_plan_from_bounds(table.problem(), gpu_facts(132), {}, &bounds));
    EXPECT_TRUE(bounds.device_cut.on) << describe(table);
    const CutOnDevice device(table, table.cu_seqlens);
    EXPECT_EQ(device.cut.num_segments, row.segments) << describe(table);
    expect_same_cut(plan, device);
  }
}

/// The kernel guesses that one sequence has all tokens. Where it has fewer, the cut is that of its
/// own length.
TEST_F(DeviceCut, OneSequenceWithoutAllTokens) {
  check::Random random(13);
  for (int i = 0; i < 40; ++i) {
    Table table, room;
    table.heads = room.heads = 1 + random.below(12);
    table.add(5000 + random.below(60000));
    room.add(table.cu_seqlens.back() + 1 + random.below(100000));
    const CutOnDevice device(room, table.cu_seqlens);
    EXPECT_EQ(device.flags, kBadSequences);
    EXPECT_EQ(device.cu_seqlens, table.cu_seqlens);
    expect_same_cut(plan_of(table), device);
    ASSERT_FALSE(HasFailure()) << describe(table);
  }
}

/// More entries than threads: the kernel takes them in tiles.
TEST_F(DeviceCut, ManySequences) {
  check::Random random(14);
  int cut = 0;
  for (const int64_t count : {511, 512, 513, 1023, 1024, 3000}) {
    Table table;
    table.heads = 1 + random.below(3);
    const int64_t longest = random.below(count);
    for (int64_t n = 0; n < count; ++n)
      table.add(n == longest ? 300000 + random.below(100000) : random.below(3) * random.below(90));
    const Plan plan = plan_of(table);
    cut += plan.segmented ? 1 : 0;
    const CutOnDevice device(table, table.cu_seqlens);
    EXPECT_EQ(device.flags, 0);
    expect_same_cut(plan, device);
    ASSERT_FALSE(HasFailure()) << describe(table);
    std::vector<int64_t> given = table.cu_seqlens;
    given[size(count / 2)] = -5;
    EXPECT_EQ(CutOnDevice(table, given).flags, kBadSequences);
  }
  EXPECT_GE(cut, 4);
}

/// Whatever the caller gives: nothing is written outside, every token is in one segment at most,
/// and it is flagged.
TEST_F(DeviceCut, BadLengthsAreClampedAndFlagged) {
  check::Random random(12);
  for (int i = 0; i < 200; ++i) {
    Table table;
    table.heads = 1 + random.below(4);
    table.add(20000 + random.below(50000));
    for (int64_t n = random.below(20); n > 0; --n) table.add(random.below(3000));
    std::vector<int64_t> given = table.cu_seqlens;
    const int64_t at = random.below(static_cast<int64_t>(given.size()));
    constexpr int64_t kWrong[] = {-1, INT64_MIN, INT64_MAX, 1 << 30};
    given[size(at)] = kWrong[random.below(4)];
    const CutOnDevice device(table, given);
    EXPECT_EQ(device.flags, kBadSequences);
    const int64_t T = table.cu_seqlens.back();
    int64_t end = 0;
    for (int64_t n = 0; n < device.cut.num_segments; ++n) {
      const auto& tokens = device.units[size(n)].tokens;
      ASSERT_GE(tokens.begin, end);
      ASSERT_GE(tokens.end, tokens.begin);
      ASSERT_LE(tokens.end, T);
      end = tokens.end;
    }
  }
}

// ---- results

/// The type of q, k, v, o, and K, which V equals.
struct Kind {
  int64_t K;
  DType dtype;
};

class DeviceCutResults : public test::HopperTest, public ::testing::WithParamInterface<Kind> {
 protected:
  check::GenerateOptions options(std::vector<int64_t> lengths, int64_t heads) const {
    check::GenerateOptions options =
        test::shape16(0, heads, GetParam().K, GetParam().K, GetParam().dtype);
    options.seq_lens = std::move(lengths);
    return options;
  }
  test::RunOptions run() const {
    test::RunOptions run{.plan = test::with_backend("cuda.sm90.fused"),
                         .out_dtype = GetParam().dtype};
    run.num_sms = static_cast<int32_t>(16 * GetParam().K / 64);
    return run;
  }
  /// Lengths on the host and on the device alone: the same bits.
  void expect_same_bits(const Inputs& inputs, const std::string& what, bool segmented = true) {
    test::RunOptions where = run();
    const test::Result host = test::run_inputs(inputs, where);
    where.from_bounds = true;
    const test::Result device = test::run_inputs(inputs, where);
    EXPECT_EQ(host.plan.segmented, segmented) << what;
    EXPECT_TRUE(device.plan.device_cut.on) << what;
    EXPECT_TRUE(test::same_bits(host.outputs.o, device.outputs.o)) << what;
    EXPECT_TRUE(test::same_bits(host.outputs.final_state, device.outputs.final_state)) << what;
  }
};

TEST_P(DeviceCutResults, HaveTheBitsOfHostLengths) {
  check::GenerateOptions some = options({1100, 70, 0, 600}, 1);
  for (const Regime regime :
       test::in_turn(static_cast<std::size_t>(GetParam().K / 64),
                     std::vector{Regime::kTrained, Regime::kStructured, Regime::kSoftplus})) {
    some.regime = regime;
    const std::string name = check::regime_name(regime);
    expect_same_bits(check::generate(some), name);
  }
  some.initial_state = false;
  expect_same_bits(check::generate(some), "no initial state");
}

/// More columns of states to merge than multiprocessors: a block has several of a head, and takes
/// its M from memory once.
TEST_F(DeviceCut, BlocksThatMergeSeveralColumns) {
  const struct {
    int64_t tokens, segments;
    int32_t sms;
  } rows[] = {{1200, 3, 10}, {1800, 4, 15}};
  for (const auto& row : rows) {
    check::GenerateOptions some = test::shape16(0, 2, 64, 64);
    some.seq_lens = {row.tokens};
    const Inputs inputs = check::generate(some);
    test::RunOptions where{.plan = test::with_backend("cuda.sm90.fused"),
                           .out_dtype = DType::kBFloat16,
                           .num_sms = row.sms};
    const test::Result host = test::run_inputs(inputs, where);
    where.from_bounds = true;
    const test::Result device = test::run_inputs(inputs, where);
    ASSERT_TRUE(device.plan.device_cut.on);
    EXPECT_EQ(static_cast<int64_t>(host.plan.segments.size()), row.segments);
    EXPECT_TRUE(test::same_bits(host.outputs.o, device.outputs.o)) << row.tokens;
    EXPECT_TRUE(test::same_bits(host.outputs.final_state, device.outputs.final_state));
  }
}

/// Two sequences, of the first of which transitions exit early.
struct EarlyExit {
  Inputs inputs;
  test::RunOptions where{.plan = test::with_backend("cuda.sm90.fused"),
                         .out_dtype = DType::kBFloat16};
  EarlyExit() {
    check::GenerateOptions some = test::shape16(0, 1, 128, 128);
    some.seq_lens = {80000, 300};
    inputs = check::generate(some);
    where.num_sms = 8;
  }
};

/// Transitions that exit early are not in the schedule.
TEST_F(DeviceCut, TransitionsThatMayExitEarly) {
  if (test::emulated()) GTEST_SKIP() << "80,000 tokens take minutes on the emulator";
  auto [inputs, where] = EarlyExit();
  const test::Result host = test::run_inputs(inputs, where);
  ASSERT_TRUE(host.plan.early_exit);
  where.from_bounds = true;
  const test::Result device = test::run_inputs(inputs, where);
  EXPECT_TRUE(test::same_bits(host.outputs.o, device.outputs.o));
  EXPECT_TRUE(test::same_bits(host.outputs.final_state, device.outputs.final_state));
}

/// One graph, other lengths at each replay: nothing is chosen when it is captured.
TEST_P(DeviceCutResults, OneGraphServesManyTables) {
  constexpr int64_t kTokens = 1100;
  Inputs inputs = check::generate(options({kTokens, 0, 0, 0, 0}, 1));
  test::RunOptions where = run();
  where.from_bounds = true;
  test::OnDevice call(inputs, where);
  ASSERT_TRUE(call.plan.device_cut.on);
  const test::Stream stream;
  const test::Graph graph(stream, [&] { EXPECT_TRUE(call.run(stream.stream).ok()); });
  check::Random random(3);
  where.from_bounds = false;
  int cut = 0;
  const int tables = test::emulated() ? 3 : 50;
  for (int i = 0; i < tables; ++i) {
    if (i > 0) {
      auto& ends = inputs.cu_seqlens;
      for (std::size_t n = 1; n + 1 < ends.size(); ++n)
        ends[n] = i % 2 == 0 ? kTokens : random.below(kTokens + 1);
      if (i % 4 == 2) ends[1] = random.below(300);
      std::sort(ends.begin(), ends.end());
    }
    test::replace_lengths(call.memory->tensors(), inputs.cu_seqlens);
    graph.launch(stream);
    call.read();
    const test::Result host = test::run_inputs(inputs, where);
    cut += host.plan.segmented ? 1 : 0;
    ASSERT_TRUE(test::same_bits(host.outputs.o, call.outputs.o)) << i;
    ASSERT_TRUE(test::same_bits(host.outputs.final_state, call.outputs.final_state)) << i;
  }
  EXPECT_GE(cut, 1);
}

/// The kernel that makes the maps zeroes them, with a cut or without one: nothing else is launched
/// for it.
TEST_P(DeviceCutResults, RowsOfNoSequenceAreZero) {
  constexpr int64_t kTokens = 1100, kFirst = 5, kLast = 1031;
  for (const SegmentPolicy policy : {SegmentPolicy::kAuto, SegmentPolicy::kOff}) {
    const Inputs inputs = check::generate(options({kTokens}, 1));
    test::RunOptions where = run();
    where.from_bounds = true;
    where.plan.context_parallel = policy;
    test::OnDevice call(inputs, where);
    ASSERT_EQ(call.plan.device_cut.on, policy == SegmentPolicy::kAuto);
    test::replace_lengths(call.memory->tensors(), {kFirst, kLast});
    ASSERT_TRUE(call.run().ok());
    call.read();
    const auto* o = reinterpret_cast<const uint16_t*>(call.outputs.o.data());
    for (int64_t i = 0; i < kTokens * GetParam().K; ++i) {
      const int64_t token = i / GetParam().K;
      if (token >= kFirst && token < kLast) continue;
      ASSERT_EQ(o[i], 0) << token;
    }
    EXPECT_NE(o[kFirst * GetParam().K], 0);
    EXPECT_NE(o[kLast * GetParam().K - 1], 0);
  }
}

TEST_P(DeviceCutResults, TablesThatAreNotCutRunWhole) {
  expect_same_bits(check::generate(options({300, 0, 200, 64, 1, 350, 320, 300}, 3)), "whole",
                   false);
}

TEST_P(DeviceCutResults, GroupedValueHeads) {
  check::GenerateOptions grouped = options({1500, 3}, 1);
  grouped.num_value_heads = 2;
  expect_same_bits(check::generate(grouped), "two value heads a head");
}

// ---- long calls on a whole card, against float64

class ContextParallel : public test::HopperTest {
 protected:
  void SetUp() override {
    HopperTest::SetUp();
    if (!IsSkipped() && test::emulated())
      GTEST_SKIP() << "8,192 tokens and more take minutes on the emulator";
  }
  static void expect_within(int64_t tokens, int64_t heads, SegmentPolicy policy,
                            bool initial_state) {
    check::GenerateOptions options = test::shape16(0, heads, 128, 128);
    options.seq_lens = {tokens};
    options.initial_state = initial_state;
    const Inputs inputs = check::generate(options);
    for (const bool from_bounds : {false, true}) {
      test::RunOptions where{.plan = test::with_backend("cuda.sm90.fused"),
                             .out_dtype = DType::kBFloat16,
                             .from_bounds = from_bounds};
      where.plan.context_parallel = policy;
      const test::OnDevice call(inputs, where);
      const bool cut = from_bounds ? call.plan.device_cut.on : call.plan.segmented;
      EXPECT_EQ(cut, policy == SegmentPolicy::kAuto);
      test::expect_within(inputs, where, "cuda.sm90.fused",
                          cat(tokens, " tokens", from_bounds ? ", from bounds" : ""));
    }
  }
};

TEST_F(ContextParallel, Off) { expect_within(8192, 4, SegmentPolicy::kOff, true); }
TEST_F(ContextParallel, At8K) { expect_within(8192, 4, SegmentPolicy::kAuto, false); }
TEST_F(ContextParallel, At64K) { expect_within(65536, 2, SegmentPolicy::kAuto, false); }
TEST_F(ContextParallel, WithInitialAndFinalStates) {
  expect_within(12000, 4, SegmentPolicy::kAuto, true);
}

// ---- checkpoints

/// Sequences of a call, each with a checkpoint after so many of its tokens, in slot n of a pool.
struct Tracked {
  Inputs inputs;
  std::vector<int32_t> offsets, slots;
  Plan plan;
  check::Outputs outputs;
  int32_t flags = -1;
  int64_t last_exit = -1;  ///< of the first head in the last segment of the first sequence

  Tracked(Inputs given, std::vector<int32_t> at, DType states)
      : inputs(std::move(given)), offsets(std::move(at)) {
    Problem& p = inputs.problem;
    for (std::size_t n = 0; n < offsets.size(); ++n) slots.push_back(static_cast<int32_t>(n));
    test::want_checkpoints(&p, states);
    check::want_final_state(&p);
  }
  void run(const test::RunOptions& where) {
    outputs = check::make_outputs(&inputs.problem, where.out_dtype);
    const DeviceFacts facts = test::device_for(where);
    throw_if_error(where.from_bounds
                       ? make_plan_from_bounds(inputs.problem, facts, where.plan, &plan)
                       : make_plan(inputs.problem, inputs.cu_seqlens, facts, where.plan, &plan));
    io::Buffer workspace(plan.workspace_bytes);
    workspace.fill(0xff);
    Tensors tensors = inputs.tensors();
    if (where.from_bounds) tensors.cu_seqlens = inputs.cu_seqlens.data();
    outputs.attach(&tensors);
    tensors.checkpoint_offsets = offsets.data();
    tensors.checkpoint_indices = slots.data();
    throw_if_error(check::run_and_wait(plan, tensors, workspace.data(), workspace.size()));
    std::memcpy(&flags, plan::find_block(plan, workspace.data(), "device_flags"), sizeof flags);
    if (plan.early_exit && plan.lengths_known) {
      const int64_t row = plan.segment_offsets[1] - 2;  // the first segment has none
      const void* exits = plan::find_block(plan, workspace.data(), stage::kExitToken.name);
      std::memcpy(&last_exit,
                  static_cast<const int64_t*>(exits) + row * plan.problem.num_value_heads,
                  sizeof last_exit);
    }
  }
  /// Whether slot n was left as it was.
  bool untouched(std::size_t n) const {
    const std::size_t bytes = test::checkpoint_bytes(inputs.problem);
    const auto* at = outputs.checkpoints.as<unsigned char>() + n * bytes;
    return std::all_of(at, at + bytes, [](unsigned char x) { return x == 0xff; });
  }
  void expect_right(std::size_t n, const std::string& what) const {
    test::expect_checkpoint(inputs, plan, outputs, n, offsets[n], what);
  }
};

/// In segments behind first ones, at a boundary, in a first segment, in sequences that are not cut:
/// with lengths on the host and on the device, and outputs with the bits of a call without them.
TEST_P(DeviceCutResults, CheckpointsAtOffsets) {
  const bool wide = GetParam().K == 128, fp16 = GetParam().dtype == DType::kFloat16;
  check::GenerateOptions some = options({1100, 70, 0, 600, 40}, 1);
  some.regime = std::array{Regime::kTrained, Regime::kStructured, Regime::kSoftplus,
                           Regime::kSlow}[(wide ? 1 : 0) + (fp16 ? 2 : 0)];
  const Inputs inputs = check::generate(some);
  const std::string name = check::regime_name(some.regime);
  test::RunOptions where = run();
  const test::Result plain = test::run_inputs(inputs, where);
  ASSERT_TRUE(plain.plan.segmented);
  const auto boundary = static_cast<int32_t>(plain.plan.segments[0].end);
  for (const auto& [last, behind] : test::in_turn(
           wide == fp16 ? 1 : 0, std::vector{std::pair{1088, 16}, std::pair{boundary, 592}})) {
    Tracked host(inputs, {last, 64, 16, behind, -16},
                 last == boundary ? DType::kBFloat16 : DType::kFloat32);
    Tracked device = host;
    host.run(where);
    ASSERT_EQ(host.plan.segments.size(), plain.plan.segments.size()) << name;
    where.from_bounds = true;
    device.run(where);
    where.from_bounds = false;
    ASSERT_TRUE(device.plan.device_cut.on);
    EXPECT_EQ(host.flags | device.flags, 0);
    EXPECT_TRUE(test::same_bits(host.outputs.o, plain.outputs.o)) << name;
    EXPECT_TRUE(test::same_bits(host.outputs.final_state, plain.outputs.final_state)) << name;
    EXPECT_TRUE(test::same_bits(host.outputs.o, device.outputs.o)) << name;
    EXPECT_TRUE(test::same_bits(host.outputs.final_state, device.outputs.final_state)) << name;
    EXPECT_TRUE(test::same_bits(host.outputs.checkpoints, device.outputs.checkpoints)) << name;
    for (const std::size_t n : {0, 1, 3}) host.expect_right(n, name);
    EXPECT_TRUE(host.untouched(2) && host.untouched(4));
  }
}

/// Behind the token at which the transition of its segment has exited, and before it.
TEST_F(DeviceCut, CheckpointsPastAnEarlyExit) {
  if (test::emulated()) GTEST_SKIP() << "80,000 tokens take minutes on the emulator";
  auto [inputs, where] = EarlyExit();
  const test::Result plain = test::run_inputs(inputs, where);
  ASSERT_TRUE(plain.plan.early_exit);
  const auto end = static_cast<int32_t>(plain.plan.segments[0].end);
  for (const int32_t offset : {79984, end + 64}) {
    Tracked host(inputs, {offset, 288}, DType::kFloat32), device = host;
    host.run(where);
    ASSERT_TRUE(host.plan.early_exit);
    if (offset == 79984) {
      EXPECT_LT(host.last_exit, offset);
    }
    where.from_bounds = true;
    device.run(where);
    where.from_bounds = false;
    EXPECT_TRUE(test::same_bits(plain.outputs.o, host.outputs.o)) << offset;
    EXPECT_TRUE(test::same_bits(host.outputs.checkpoints, device.outputs.checkpoints)) << offset;
    for (const std::size_t n : {0, 1}) host.expect_right(n, cat("offset ", offset));
  }
}

/// In segments that are asked for, joined in one pass or run again from their start states.
TEST_F(DeviceCut, CheckpointsOfSegmentsThatAreAskedFor) {
  check::GenerateOptions some = test::shape16(0, 1, 128, 128);
  some.seq_lens = {300, 70};
  const Inputs inputs = check::generate(some);
  for (const auto method : {SegmentMethod::kScanMergeForward, SegmentMethod::kOnePass}) {
    test::RunOptions where{.plan = test::with_backend("cuda.sm90.fused"),
                           .out_dtype = DType::kBFloat16};
    where.plan.context_parallel = SegmentPolicy::kFixed;
    where.plan.num_segments = 3;
    where.plan.segment_method = method;
    Tracked call(inputs, {208, 64}, DType::kFloat32);
    call.run(where);
    ASSERT_TRUE(call.plan.segmented);
    ASSERT_EQ(call.plan.resolved.segment_method, method);
    EXPECT_EQ(call.flags, 0);
    for (const std::size_t n : {0, 1})
      call.expect_right(n, cat("method ", static_cast<int>(method)));
  }
}

/// Offsets and slots that are none are flagged, and nothing is stored for them.
TEST_P(DeviceCutResults, OffsetsThatAreNoCheckpointsAreFlagged) {
  const Inputs inputs = check::generate(options({1100, 70}, 1));
  const auto turn = size(GetParam().K / 64 + (GetParam().dtype == DType::kFloat16 ? 2 : 0));
  for (const auto& [offset, slot] : test::in_turn(
           turn, std::vector{std::pair{1000, 0}, std::pair{1104, 0}, std::pair{992, 2}})) {
    Tracked call(inputs, {offset, 48}, DType::kFloat32);
    call.slots[0] = slot;
    test::RunOptions where = run();
    where.from_bounds = slot == 0;
    call.run(where);
    EXPECT_EQ(call.flags, kBadCheckpointIndex) << offset;
    EXPECT_TRUE(call.untouched(0)) << offset;
    EXPECT_FALSE(call.untouched(1)) << offset;
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, DeviceCutResults,
                         ::testing::Values(Kind{128, DType::kBFloat16}, Kind{64, DType::kBFloat16},
                                           Kind{128, DType::kFloat16}, Kind{64, DType::kFloat16}),
                         [](const auto& kind) {
                           return cat("K", kind.param.K,
                                      kind.param.dtype == DType::kFloat16 ? "_fp16" : "_bf16");
                         });

}  // namespace
}  // namespace kda

#endif
