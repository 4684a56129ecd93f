// SPDX-License-Identifier: Apache-2.0
// The cut that a kernel makes where only the GPU knows the lengths.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/gdn/cost.hpp"
#include "cuda/gdn/device_cut.hpp"
#include "support/harness.hpp"
#include "support/length_tables.hpp"

namespace kda::test::gdn {

/// Expects the kernel to make the cut of `plan`: offsets of segments, then segments, then those
/// that have one behind them. `bounds`: a plan without its lengths.
template <class Model>
void expect_same_cut(const Plan& bounds, const Plan& plan, const Model& model) {
  const int64_t N = plan.problem.num_sequences, places = N + bounds.device_cut.most_behind;
  const auto words = [](int64_t count) { return static_cast<std::size_t>(count); };
  std::vector<int64_t> map = plan.cu_seqlens, got(words(cuda::gdn::cut_maps_words(N, places)));
  map.insert(map.end(), plan.chunk_offsets.begin(), plan.chunk_offsets.end());
  check::DeviceBuffer in(map.size() * 8), out(got.size() * 8);
  in.upload(map.data(), map.size() * 8);
  out.fill(0xff);
  cuda::gdn::CutArgs<Model> args;
  args.map.num_sequences = N, args.map.num_tokens = plan.problem.num_tokens;
  args.map.cu_seqlens = static_cast<int64_t*>(in.data());
  args.map.chunk_offsets = args.map.cu_seqlens + N + 1;
  args.model = model;
  args.fixed_segments = plan.requested.num_segments;
  args.out = cuda::gdn::cut_maps(static_cast<int64_t*>(out.data()), N, places);
  throw_if_error(cuda::gdn::launch_cut(args, {}));
  check::synchronize_device();
  out.download(got.data(), got.size() * 8);
  std::vector<int64_t> wanted =
      plan.segmented ? plan.segment_offsets : std::vector<int64_t>(words(N + 1));
  ASSERT_LE(static_cast<int64_t>(plan.segments.size()), places);
  for (const Segment& x : plan.segments) wanted.insert(wanted.end(), {x.sequence, x.begin, x.end});
  if (!plan.segmented)
    for (int64_t n = 0; n < N; ++n)
      wanted.insert(wanted.end(), {n, plan.cu_seqlens[words(n)], plan.cu_seqlens[words(n + 1)]});
  const int64_t end = plan.cu_seqlens.back();
  while (wanted.size() < words(N + 1 + 3 * places)) wanted.insert(wanted.end(), {N - 1, end, end});
  for (std::size_t i = 0; i + 1 < plan.segments.size(); ++i)
    if (plan.segments[i].sequence == plan.segments[i + 1].sequence)
      wanted.push_back(static_cast<int64_t>(i));
  wanted.resize(got.size(), -1);  // as it was
  EXPECT_EQ(got, wanted);
}

/// Draws random tables until the plans of `wanted` leave the cut to the kernel.
/// plan_of(table, from_bounds); model_of(plan).
template <class PlanOf, class ModelOf>
void expect_the_planners_cuts(uint64_t seed, int wanted, PlanOf&& plan_of, ModelOf&& model_of) {
  check::Random random(seed);
  int cut = 0;
  for (int i = 0; i < wanted;) {
    const Table table = random_table(&random);
    const Plan bounds = plan_of(table, true), plan = plan_of(table, false);
    if (!bounds.device_cut.on) {
      ASSERT_FALSE(plan.segmented) << table.text();
      continue;
    }
    ++i;
    cut += plan.segmented;
    expect_same_cut(bounds, plan, model_of(bounds));
    ASSERT_FALSE(::testing::Test::HasFailure()) << table.text();
  }
  EXPECT_GE(cut, wanted / 4);
}

/// may_cut() refuses few random tables that would gain by a cut of up to 64 segments, and none that
/// would gain much; it refuses most of those that cannot gain. model_of(problem, device).
template <class ModelOf>
void expect_refusals_to_cost_little(uint64_t seed, ModelOf&& model_of) {
  check::Random random(seed);
  int gain = 0, gain_and_refused = 0, refused = 0;
  constexpr int kTables = 3000;
  for (int i = 0; i < kTables; ++i) {
    Table table = random_table(&random);
    table.heads = 1 + random.below(8), table.group = 1 + random.below(4);
    const Problem p = table.problem();
    const DeviceFacts facts = gpu_facts(table.sms);
    const auto m = model_of(p, facts);
    const plan::Workload work = plan::workload_of(p, table.cu_seqlens, facts);
    const cuda::CostInput in = cuda::cost_input(work, facts);
    const int64_t chunks = plan::ceil_div(in.sums.longest, plan::kAutoChunk);
    double least = HUGE_VAL;
    for (int64_t n = 2; n <= std::min(plan::kAutoMaxSegments, chunks); ++n)
      least = std::min(least, candidate_us(m, cuda::gdn::padded(in),
                                           cuda::gdn::even_cut(
                                               in, plan::ceil_div(chunks, n) * plan::kAutoChunk)));
    const double whole = candidate_us(m, cuda::gdn::padded(in), {});
    const bool gains = whole >= plan::kMinimumGain * least;
    const bool may = may_cut(m, table.num_tokens(), table.num_sequences());
    gain += gains, refused += !may, gain_and_refused += gains && !may;
    ASSERT_TRUE(may || whole <= 1.25 * least) << table.text();
    if (table.num_sequences() == 1) {
      ASSERT_TRUE(may || !gains) << table.text();
    }
  }
  EXPECT_GE(gain, kTables / 10);
  EXPECT_LE(gain_and_refused, gain / 100);
  EXPECT_GE(refused, (kTables - gain) / 2);
}

}  // namespace kda::test::gdn
