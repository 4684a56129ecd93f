// SPDX-License-Identifier: Apache-2.0
// The cut that a kernel makes where only the GPU knows the lengths.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "cuda/gdn/device_cut.hpp"
#include "support/harness.hpp"
#include "support/length_tables.hpp"

namespace kda::test::gdn {

/// Expects the kernel to make the cut of `plan`: offsets of segments, then segments. `bounds`: a
/// plan without its lengths.
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
  const int64_t end = plan.cu_seqlens.back();
  while (wanted.size() < got.size()) wanted.insert(wanted.end(), {N - 1, end, end});
  EXPECT_EQ(got, wanted);
}

/// Draws random tables until the plans of `wanted` leave the cut to the kernel.
/// plan_of(table, from_bounds); model_of(problem, device).
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
    expect_same_cut(bounds, plan, model_of(plan.problem, plan.device));
    ASSERT_FALSE(::testing::Test::HasFailure()) << table.text();
  }
  EXPECT_GE(cut, wanted / 4);
}

}  // namespace kda::test::gdn
