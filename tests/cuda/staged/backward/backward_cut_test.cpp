// SPDX-License-Identifier: Apache-2.0
// The cut that a kernel of the backward makes where only the device knows the lengths: the
// planner's, for tables of every kind, and gradients with the bits of a call with host lengths.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "cuda/staged/backward/cost.hpp"
#include "cuda/staged/backward/device_cut.hpp"
#include "cuda/staged/backward/sizes.hpp"
#include "support/backward.hpp"
#include "support/backward_graph.hpp"
#include "support/gpu.hpp"
#include "support/length_tables.hpp"

namespace kda {
namespace {

using check::GradientBuffers;
using check::Inputs;
using check::Regime;
using cuda::staged::BackwardModel;

constexpr const char* kName = "cuda.sm80.staged";

using test::num_tables;
using test::random_table;
using test::Table;

BackwardPlan plan_of(const Table& table, bool from_bounds) {
  const Problem p = table.problem();
  const DeviceFacts facts = gpu_facts(table.sms, table.capability);
  Plan forward;
  BackwardPlan plan;
  Gradients gradients;
  gradients.d_o = contiguous(DType::kBFloat16, {1, p.num_tokens, p.num_value_heads, table.dim});
  gradients.dq = contiguous(DType::kBFloat16, {1, p.num_tokens, p.num_heads, table.dim});
  PlanOptions options;
  options.most_cut_bytes = INT64_MAX;
  if (table.segments > 0)
    options.context_parallel = SegmentPolicy::kFixed, options.num_segments = table.segments;
  if (table.off) options.context_parallel = SegmentPolicy::kOff;
  throw_if_error(from_bounds ? make_plan_from_bounds(p, facts, options, &forward)
                             : make_plan(p, table.cu_seqlens, facts, options, &forward));
  options.backend = kName;
  throw_if_error(make_backward_plan(forward, gradients, options, &plan));
  return plan;
}

// ---- on the host

/// In the order of the kernel, and with its integers: all candidates first, then the walk.
int64_t segment_chunks_as_a_kernel(const BackwardModel& m, const std::vector<int64_t>& cu_seqlens) {
  cuda::CostSizes in = m.sizes;
  std::vector<int> lengths;
  for (std::size_t n = 1; n < cu_seqlens.size(); ++n) {
    lengths.push_back(static_cast<int>(cu_seqlens[n] - cu_seqlens[n - 1]));
    in.sums.longest = std::max<int64_t>(in.sums.longest, lengths.back());
  }
  in.sums.sequences = static_cast<int64_t>(lengths.size());
  in.sums.tokens = cu_seqlens.back();
  const int chunks = plan::ceil_div(static_cast<int>(in.sums.longest), 64);
  const int most = std::min(static_cast<int>(plan::kAutoMaxSegments), chunks);
  std::vector<double> us;
  for (int segments = 2; segments <= most; ++segments) {
    const int tokens = 64 * plan::cut_lengths(chunks, segments, 1).others;
    plan::Cut<int> sum;
    for (const int length : lengths) sum.add(length, tokens, tokens);
    us.push_back(cuda::staged::candidate_us(
        m, in, {tokens, {sum.segments, sum.behind, sum.tokens_behind, sum.most}}));
  }
  const double whole = cuda::staged::candidate_us(m, in, {});
  plan::CutWalk walk{whole, m.backward.minimum_step, static_cast<int>(plan::kAutoMaxSegments)};
  for (int segments = 2; segments <= most; ++segments)
    walk.take(segments, us[static_cast<std::size_t>(segments - 2)]);
  if (walk.segments == 0 || whole < plan::kMinimumGain * walk.best) return 0;
  return plan::cut_lengths(chunks, walk.segments, 1).others;
}

TEST(BackwardCut, AKernelFindsThePlannersCut) {
  check::Random random(21);
  const int wanted = num_tables(2000);
  int cut = 0;
  for (int i = 0; i < wanted; ++i) {
    const Table table = random_table(&random);
    const cuda::HeadGroups groups{1 + random.below(table.heads), 1};
    const Problem p = table.problem();
    const DeviceFacts facts = gpu_facts(table.sms, table.capability);
    const BackwardModel m = cuda::staged::backward_model(cuda::cost_sizes(p, facts), facts, groups,
                                                         false, random.below(2) == 0);
    CostEstimate cost;
    const plan::Partition expected = cuda::staged::auto_backward_partition(
        plan::workload_of(p, table.cu_seqlens, facts), facts, groups, false, m.kept, &cost);
    const bool may = cuda::staged::may_cut(m, table.num_tokens(), table.num_sequences());
    const int64_t got = may ? segment_chunks_as_a_kernel(m, table.cu_seqlens) : 0;
    ASSERT_EQ(got, expected.on ? expected.segment_chunks : 0) << table.text();
    cut += expected.on ? 1 : 0;
  }
  EXPECT_GE(cut, wanted / 8);
}

/// A kernel multiplies chunks and segments in 32 bits.
TEST(BackwardCut, MoreSegmentsThanAKernelCountsAreNotCut) {
  Table table;
  table.add(3000000);
  table.segments = 45000;
  EXPECT_TRUE(plan_of(table, true).plan.device_cut.on);
  table.segments = 46000;
  const BackwardPlan bounds = plan_of(table, true);
  EXPECT_FALSE(bounds.plan.device_cut.on);
  const std::string text = bounds.to_text(true);
  EXPECT_NE(text.find("num_segments: 46000 segments of 3000000 tokens are more"), std::string::npos)
      << text;
  table = {};
  table.add(3000);
  table.segments = 1 << 20;  // as many as it has chunks
  EXPECT_TRUE(plan_of(table, true).plan.device_cut.on);
}

TEST(BackwardCut, BoundsSayWhatAPlanNeeds) {
  Table table;
  table.heads = 4;
  table.add(30000);
  table.add(2768);
  const BackwardPlan bounds = plan_of(table, true), lengths = plan_of(table, false);
  ASSERT_TRUE(bounds.plan.device_cut.on);
  EXPECT_EQ(bounds.plan.device_cut.most_behind, 2 * 132 / 4);
  EXPECT_TRUE(lengths.plan.segmented);
  EXPECT_LE(lengths.plan.segments.size(), 2 + bounds.plan.device_cut.most_behind);
  const std::string text = bounds.to_text(true);
  for (const char* part : {"at most 66 segments behind first ones", "backward_cut", "both_merges"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
}

/// Segments and kernels of a sequence, whatever else is in the batch. Nothing is cut with `off`.
TEST(BackwardCut, BatchInvariantPlansAreThoseOfSequencesAlone) {
  check::Random random(24);
  const auto names_of = [](const BackwardPlan& plan) {
    std::vector<std::string> names;
    for (const KernelChoice& choice : plan.plan.kernels) {
      const bool grad = choice.stage == "chunk_grad", chains = choice.stage == "chunk_reverse";
      if (grad || (chains && choice.kernel != "d_chains" && choice.kernel != "both_merges"))
        names.push_back(choice.kernel);
    }
    return std::set<std::string>(names.begin(), names.end());
  };
  const int wanted = num_tables(300);
  int cut = 0;
  for (int i = 0; i < wanted; ++i) {
    Table table = random_table(&random);
    (i % 4 < 2 ? table.off : table.batch_invariant) = true;
    table.dim = 128;  // where factors may be in fp16
    if (i % 2 == 0) table.group = 8;
    const BackwardPlan batch = plan_of(table, false);
    cut += batch.plan.segmented ? 1 : 0;
    for (int64_t n = 0; n < std::min<int64_t>(table.num_sequences(), 8); ++n) {
      Table one = table;
      one.cu_seqlens = {0};
      one.add(table.cu_seqlens[static_cast<std::size_t>(n + 1)] -
              table.cu_seqlens[static_cast<std::size_t>(n)]);
      if (one.num_tokens() == 0) continue;
      const BackwardPlan alone = plan_of(one, false);
      const auto& offsets = batch.plan.segment_offsets;
      const int64_t of_batch = batch.plan.segmented ? offsets[static_cast<std::size_t>(n + 1)] -
                                                          offsets[static_cast<std::size_t>(n)]
                                                    : 1;
      const int64_t of_alone = alone.plan.segmented ? alone.plan.segment_offsets.back() : 1;
      ASSERT_EQ(of_batch, of_alone) << table.text() << ", sequence " << n;
      ASSERT_EQ(names_of(batch), names_of(alone)) << table.text() << ", sequence " << n;
    }
  }
  EXPECT_GE(cut, wanted / 20);
}

TEST(BackwardCut, NothingIsCutFromBoundsAndThePlanSaysWhy) {
  const auto reasons_of = [](const Problem& p, PlanOptions options) {
    Plan forward;
    BackwardPlan plan;
    Gradients gradients;
    gradients.d_o = contiguous(p.v.dtype, {1, p.num_tokens, p.num_value_heads, p.value_dim});
    gradients.dq = contiguous(p.q.dtype, {1, p.num_tokens, p.num_heads, p.key_dim});
    throw_if_error(make_plan_from_bounds(p, gpu_facts(132), options, &forward));
    throw_if_error(make_backward_plan(forward, gradients, {}, &plan));
    EXPECT_FALSE(plan.plan.device_cut.on);
    return plan.to_text(true);
  };
  Table table;
  table.heads = 4;
  table.add(32768);
  const Problem p = table.problem();
  const auto expect = [&](const Problem& problem, const PlanOptions& options, const char* reason) {
    const std::string text = reasons_of(problem, options);
    EXPECT_NE(text.find(reason), std::string::npos) << reason << "\n" << text;
  };
  PlanOptions off, asked, small;
  off.context_parallel = SegmentPolicy::kOff;
  expect(p, off, "off: asked for");
  asked.context_parallel = SegmentPolicy::kCula;
  expect(p, asked, "need lengths on the host");
  asked.context_parallel = SegmentPolicy::kFixed, asked.num_segments = 1;
  expect(p, asked, "no sequence can be cut");
  small.most_cut_bytes = 1 << 20;
  expect(p, small, "more than most_cut_bytes = 1048576");
  Problem invariant = p;
  invariant.batch_invariant = true;
  expect(invariant, {}, "batch_invariant: not cut");
  table.heads = 64;
  expect(table.problem(), {}, "no table of 32768 tokens gains by a cut");
}

#ifdef KDA_WITH_CUDA

// ---- the kernel

class BackwardCutOnDevice : public test::GpuTest {};

std::size_t size(int64_t count) { return static_cast<std::size_t>(count); }

template <class T>
std::vector<T> read(const void* from, int64_t count) {
  std::vector<T> values(size(count));
  EXPECT_EQ(cudaMemcpy(values.data(), from, values.size() * sizeof(T), cudaMemcpyDeviceToHost),
            cudaSuccess);
  return values;
}

/// The outputs of the kernel for checked offsets of a table, read back.
struct CutOnDevice {
  std::vector<int64_t> segment_offsets, cu_seqlens, chunk_offsets, cut_chunk_offsets,
      whole_cu_seqlens, whole_chunk_offsets;
  std::vector<cuda::TokenRange> segments;
  std::vector<int32_t> initial_slots, sequence_slots, own_slots, whole_slots;

  CutOnDevice(const BackwardPlan& bounds, const std::vector<int64_t>& offsets,
              const std::vector<int64_t>& chunks) {
    const int64_t N = bounds.plan.problem.num_sequences,
                  units = N + bounds.plan.device_cut.most_behind;
    check::DeviceBuffer map(size(N + 1) * 16),
        words(size(cuda::staged::cut_maps_words(N, units)) * 8), states(16);
    words.fill(0xff);
    std::vector<int64_t> both = offsets;
    both.insert(both.end(), chunks.begin(), chunks.end());
    map.upload(both.data(), both.size() * 8);
    cuda::staged::BackwardCutArgs args;
    args.map.num_sequences = N, args.map.num_tokens = bounds.plan.problem.num_tokens;
    args.map.cu_seqlens = static_cast<int64_t*>(map.data());
    args.map.chunk_offsets = args.map.cu_seqlens + N + 1;
    args.initial.base = states.data(), args.initial.num_slots = N;
    args.model = cuda::staged::model_from_bounds(bounds.plan, cuda::staged::groups_of(bounds.plan));
    args.fixed_segments = cuda::staged::fixed_segments(bounds.plan);
    args.out = cuda::staged::cut_maps(static_cast<int64_t*>(words.data()), N, units);
    EXPECT_TRUE(cuda::staged::launch_backward_cut(args, {}).ok());
    check::synchronize_device();
    const cuda::staged::CutMaps& out = args.out;
    segment_offsets = read<int64_t>(out.segment_offsets, N + 1);
    segments = read<cuda::TokenRange>(out.segments, units);
    cu_seqlens = read<int64_t>(out.cu_seqlens, units + 1);
    chunk_offsets = read<int64_t>(out.chunk_offsets, units + 1);
    cut_chunk_offsets = read<int64_t>(out.cut_chunk_offsets, N + 1);
    whole_cu_seqlens = read<int64_t>(out.whole_cu_seqlens, N + 1);
    whole_chunk_offsets = read<int64_t>(out.whole_chunk_offsets, N + 1);
    initial_slots = read<int32_t>(out.initial_slots, units);
    sequence_slots = read<int32_t>(out.sequence_slots, units);
    own_slots = read<int32_t>(out.own_slots, units);
    whole_slots = read<int32_t>(out.whole_slots, N);
  }
};

/// The family that has work has the plan's maps, the other one nothing.
void expect_same_cut(const Plan& plan, const CutOnDevice& device) {
  const int64_t N = plan.problem.num_sequences;
  const auto count = static_cast<int64_t>(plan.segments.size());
  const auto units = static_cast<int64_t>(device.segments.size());
  const std::vector<int64_t> zeros(size(N + 1));
  EXPECT_EQ(device.segment_offsets, plan.segmented ? plan.segment_offsets : zeros);
  EXPECT_EQ(device.cut_chunk_offsets, plan.segmented ? plan.chunk_offsets : zeros);
  EXPECT_EQ(device.whole_cu_seqlens, plan.segmented ? zeros : plan.cu_seqlens);
  EXPECT_EQ(device.whole_chunk_offsets, plan.segmented ? zeros : plan.chunk_offsets);
  for (int64_t n = 0; n < N; ++n)
    EXPECT_EQ(device.whole_slots[size(n)], plan.segmented ? -1 : n) << n;
  ASSERT_LE(count, units);
  int64_t chunks = 0;
  for (int64_t i = 0; i < units; ++i) {
    const cuda::TokenRange& got = device.segments[size(i)];
    EXPECT_EQ(device.cu_seqlens[size(i)], got.begin) << i;
    EXPECT_EQ(device.cu_seqlens[size(i + 1)], got.end) << i;
    EXPECT_EQ(device.chunk_offsets[size(i)], chunks) << i;
    EXPECT_EQ(device.own_slots[size(i)], i < count ? i : -1) << i;
    chunks += (got.end - got.begin + 63) / 64;
    if (i >= count) {
      EXPECT_EQ(got.begin, got.end) << i;
      EXPECT_EQ(device.initial_slots[size(i)], -1) << i;
      EXPECT_EQ(device.sequence_slots[size(i)], -1) << i;
      continue;
    }
    const Segment& wanted = plan.segments[size(i)];
    EXPECT_EQ(got.sequence, wanted.sequence) << i;
    EXPECT_EQ(got.begin, wanted.begin) << i;
    EXPECT_EQ(got.end, wanted.end) << i;
    const bool first = i == plan.segment_offsets[size(wanted.sequence)];
    EXPECT_EQ(device.initial_slots[size(i)], first ? wanted.sequence : -1) << i;
    EXPECT_EQ(device.sequence_slots[size(i)], first ? wanted.sequence : -1) << i;
  }
  EXPECT_EQ(chunks, plan.segmented ? plan.chunk_offsets.back() : 0);
}

TEST_F(BackwardCutOnDevice, EqualsThePlanOfTheSameLengths) {
  check::Random random(22);
  const int wanted = num_tables(test::emulated() ? 300 : 5000);
  int cut = 0;
  for (int i = 0; i < wanted;) {
    const Table table = random_table(&random);
    const BackwardPlan bounds = plan_of(table, true);
    if (!bounds.plan.device_cut.on) continue;
    ++i;
    const BackwardPlan plan = plan_of(table, false);
    cut += plan.plan.segmented ? 1 : 0;
    expect_same_cut(plan.plan, {bounds, table.cu_seqlens, plan.plan.chunk_offsets});
    ASSERT_FALSE(HasFailure()) << table.text();
  }
  EXPECT_GE(cut, wanted / 4);
}

// ---- gradients

Inputs packed(std::vector<int64_t> lengths, int64_t K, int64_t V, Regime regime,
              int64_t value_heads = 1) {
  check::GenerateOptions options = test::shape16(0, 1, K, V);
  options.num_value_heads = value_heads;
  options.seq_lens = std::move(lengths);
  options.regime = regime;
  return check::generate(options);
}

constexpr check::GradientOptions kBf16{.d_o_dtype = DType::kBFloat16};

/// Lengths on the host and on the device alone: the same bits.
void expect_same_bits(const Inputs& inputs, const check::GradientOptions& options, bool segmented,
                      const std::string& what, test::BackwardRun run = {}) {
  const GradientBuffers buffers = check::make_gradients(inputs, options);
  GradientBuffers host = buffers, device = buffers;
  test::BackwardCall on_host(inputs, buffers.gradients, run);
  run.from_bounds = true;
  test::BackwardCall on_device(inputs, buffers.gradients, run);
  ASSERT_EQ(on_device.plan.plan.implementation, kName) << what;
  EXPECT_EQ(on_host.plan.plan.segmented, segmented) << what;
  EXPECT_TRUE(on_device.plan.plan.device_cut.on) << what;
  throw_if_error(on_host.run(&host));
  throw_if_error(on_device.run(&device));
  EXPECT_TRUE(test::same_gradients(host, device)) << what;
}

/// Without segments that gain: so many are asked for. Sequences of a chunk at most have one.
TEST_F(BackwardCutOnDevice, GradientsHaveTheBitsOfHostLengths) {
  const auto expect = [](const Inputs& inputs, bool cut, const std::string& what,
                         const check::GradientOptions& options = kBf16) {
    expect_same_bits(inputs, options, cut, what, {.segments = 3});
  };
  // K = V = 128 and gates of a layer: whole sequences have fp16 chains, segments have bf16 ones.
  expect(packed({130, 0, 64}, 128, 128, Regime::kTrained, 2), true, "trained, cut");
  expect(packed({64, 0, 30}, 128, 128, Regime::kTrained, 2), false, "trained, whole");
  expect(packed({70, 1}, 128, 128, Regime::kLog), true, "log, cut");
  expect(packed({0, 130, 65, 0, 300}, 64, 64, Regime::kSlow), true, "K 64, cut");
  expect(packed({0, 64, 33, 0, 1}, 64, 64, Regime::kSlow), false, "K 64, whole");
  expect(packed({0, 130, 65}, 40, 72, Regime::kSlow), true, "K 40, V 72, cut");
  Inputs states = packed({100, 1}, 128, 128, Regime::kTrained);
  states.problem.state_layout = StateLayout::kVK;
  expect(states, true, "vk", {.d_final_state = false, .d_o_dtype = DType::kBFloat16});
  states.problem.initial_state.reset();
  expect(states, true, "no states");
}

/// States by a mask, and what the forward has kept.
TEST_F(BackwardCutOnDevice, GradientsOfStatesThatAreNotAllThere) {
  const uint8_t mask[] = {1, 0};
  for (const bool cut : {true, false}) {
    Inputs inputs = packed({cut ? 130 : 64, 20}, 128, 128, Regime::kTrained);
    inputs.problem.initial_state_mask = true;
    const test::BackwardRun run{
        .keep_chunks = test::device().compute_capability == 90, .segments = 2, .state_mask = mask};
    expect_same_bits(inputs, kBf16, cut, cut ? "cut" : "whole", run);
  }
}

/// Offsets that go back or leave the tokens are clamped: the call is one of the clamped offsets.
TEST_F(BackwardCutOnDevice, OffsetsThatGoBackAreClamped) {
  constexpr int64_t kFar = int64_t{1} << 40;
  const std::vector<int64_t> given[] = {{0, 70, 20, kFar}, {-kFar, -1, 66, 3}};
  const std::vector<int64_t> clamped[] = {{0, 70, 70, 80}, {0, 0, 66, 66}};
  for (int i = 0; i < (test::emulated() ? 1 : 2); ++i) {
    Inputs inputs = packed({clamped[i].back(), 0, 0}, 64, 64, Regime::kTrained);
    inputs.cu_seqlens = clamped[i];
    test::expect_clamped(inputs, check::make_gradients(inputs, kBf16), given[i], {.segments = 3});
  }
}

/// As the planner likes.
TEST_F(BackwardCutOnDevice, CutsThatGain) {
  if (test::emulated()) GTEST_SKIP() << "takes a minute there: some 9,000 tokens";
  for (const Regime regime : {Regime::kTrained, Regime::kLog, Regime::kSoftplus}) {
    const std::string name = check::regime_name(regime);
    expect_same_bits(packed({9000, 100, 0, 300}, 128, 128, regime, 2), kBf16, true, name);
    expect_same_bits(packed({3200, 3100, 0, 3100}, 128, 128, regime, 2), kBf16, false, name);
  }
}

/// More offsets than threads.
TEST_F(BackwardCutOnDevice, CountsManySequences) {
  for (const int64_t segments : {0, 5})
    for (const int64_t count : {511, 512, 513, 1100, 2600}) {
      check::Random random(count);
      Table table;
      table.capability = test::device().compute_capability;
      table.segments = segments;
      const int64_t longest = random.below(count);
      for (int64_t n = 0; n < count; ++n)
        table.add(n == longest ? 200000 : random.below(3) * random.below(200));
      const BackwardPlan bounds = plan_of(table, true), plan = plan_of(table, false);
      ASSERT_TRUE(bounds.plan.device_cut.on);
      EXPECT_TRUE(plan.plan.segmented);
      expect_same_cut(plan.plan, {bounds, table.cu_seqlens, plan.plan.chunk_offsets});
      ASSERT_FALSE(HasFailure()) << table.text();
    }
}

/// So many that products of chunks and segments nearly fill 32 bits.
TEST_F(BackwardCutOnDevice, CountsManySegments) {
  Table table;
  table.capability = test::device().compute_capability;
  table.add(3000000);
  table.segments = 45000;
  const BackwardPlan bounds = plan_of(table, true), plan = plan_of(table, false);
  ASSERT_TRUE(bounds.plan.device_cut.on);
  expect_same_cut(plan.plan, {bounds, table.cu_seqlens, plan.plan.chunk_offsets});
}

/// One graph, other lengths at each replay: nothing is chosen when it is captured.
TEST_F(BackwardCutOnDevice, OneGraphServesManyTables) {
  constexpr int64_t kTokens = 160;
  const Inputs inputs = packed({kTokens, 0, 0}, 128, 128, Regime::kTrained);
  check::Random random(3);
  std::vector<std::vector<int64_t>> tables;
  for (int i = 0; i < (test::emulated() ? 3 : 50); ++i) {
    std::vector<int64_t> ends = inputs.cu_seqlens;
    if (i > 0) ends[1] = random.below(kTokens + 1), ends[2] = random.below(kTokens + 1);
    if (i % 4 == 2) ends[1] = 50, ends[2] = 100;
    std::sort(ends.begin(), ends.end());
    tables.push_back(ends);
  }
  test::expect_one_graph(inputs, check::make_gradients(inputs, kBf16), {.segments = 3}, tables);
}

#endif

}  // namespace
}  // namespace kda
