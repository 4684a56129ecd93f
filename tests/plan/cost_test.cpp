// SPDX-License-Identifier: Apache-2.0
// What the CUDA backends predict, and the cuts that they choose by it.
#include <gtest/gtest.h>

#include "core/layout.hpp"
#include "core/text.hpp"
#include "cuda/fused/cost.hpp"
#include "cuda/fused/portable/cost.hpp"
#include "cuda/gdn/backward/cost.hpp"
#include "cuda/gdn/cost.hpp"
#include "cuda/staged/backward/cost.hpp"
#include "cuda/staged/cost.hpp"
#include "tools/kda/flags.hpp"

namespace kda::cuda {
namespace {

plan::Workload work_of(const char* lengths, int64_t heads) {
  return {.lengths = tools::parse_lengths(lengths),
          .num_value_heads = heads,
          .num_sms = 132,
          .num_heads = heads};
}

plan::Partition staged_cut(const char* lengths, int64_t heads, CostEstimate* cost) {
  return staged::auto_partition(work_of(lengths, heads), gpu_facts(132), cost);
}

using PortableKind = fused::portable::Kind;
double portable_us(const char* lengths, int64_t heads, int64_t K, const DeviceFacts& device,
                   PortableKind kind = PortableKind::kFp16Operands) {
  plan::Workload work = work_of(lengths, heads);
  work.key_dim = work.value_dim = K;
  work.num_sms = device.num_sms;
  return fused::portable::predict(work, kind, device).fused_us;
}

TEST(PortableCost, CountsStepsByTheMemoryOfABlock) {
  const auto predicted = [](const char* lengths, int64_t heads, int32_t capability, int64_t K) {
    return portable_us(lengths, heads, K, gpu_facts(108, capability));
  };
  // 128 chains of 512 steps of 1,755 cycles and 4,350 besides, on 108 SMs of 1.41 GHz.
  constexpr double kChain = 512 * 1.755 + 4.35;
  EXPECT_NEAR(predicted("8192", 64, 80, 128), 128.0 / 108 * kChain / 1.41 + 12, 1);
  EXPECT_NEAR(predicted("8192", 16, 80, 128), kChain / 1.41 + 12, 1);
  EXPECT_NEAR(predicted("8192", 1, 80, 128), predicted("8192", 16, 80, 128), 1e-6);
  EXPECT_NEAR(predicted("8x1024", 108, 80, 64), 8 * (64 * 0.96 + 4.42) / 1.41 + 12, 1);
  EXPECT_GT(predicted("8192", 64, 86, 128), 1.1 * predicted("8192", 64, 80, 128));
  // 8.7 has the memory of 8.0, at its own clock; there it is bytes that take as long.
  DeviceFacts orin = gpu_facts(108, 87);
  orin.memory_bytes_per_second = 1e13;
  EXPECT_NEAR(portable_us("8192", 64, 128, orin), 128.0 / 108 * kChain / 1.3 + 12, 1);
  for (const int32_t capability : {80, 86, 87, 89, 90, 100, 103, 110, 120, 121})
    EXPECT_GT(predicted("8192", 64, capability, 128), predicted("8192", 64, capability, 64));
  EXPECT_EQ(predicted("0", 64, 80, 128), 0);
}

/// docs/log/2026-11.md, "The portable fused kernel".
TEST(PortableCost, IsNearTheTimesOfAnH200) {
  const DeviceFacts h200 = gpu_facts(132);
  DeviceFacts small = gpu_facts(132, 86);  // the form of 99 KB
  small.gigahertz = h200.gigahertz, small.memory_bytes_per_second = h200.memory_bytes_per_second;
  const struct {
    const char* lengths;
    int64_t heads, K;
    PortableKind kind;
    double large_us, small_us;
  } rows[] = {{"8192", 64, 128, PortableKind::kFp16Operands, 530.0, 725.2},
              {"8x1024", 64, 128, PortableKind::kFp16Operands, 539.4, 741.5},
              {"64x128", 64, 128, PortableKind::kFp16Operands, 662.8, 0},
              {"2048", 64, 128, PortableKind::kFp16Operands, 143.1, 0},
              {"8192", 32, 128, PortableKind::kFp16Operands, 524.6, 716.8},
              {"8192", 8, 128, PortableKind::kFp16Operands, 521.1, 0},
              {"8192", 64, 128, PortableKind::kSoftplus, 654.7, 988.7},
              {"8192", 64, 128, PortableKind::kFp16Rows, 601.4, 893.1},
              {"8192", 64, 128, PortableKind::kBf16Operands, 482.3, 0},
              {"8192", 16, 64, PortableKind::kFp16Operands, 285.3, 0},
              {"8192", 128, 64, PortableKind::kFp16Operands, 299.5, 407.1},
              {"8x1024", 128, 64, PortableKind::kFp16Operands, 311.8, 416.6},
              {"64x128", 128, 64, PortableKind::kFp16Operands, 439.1, 0},
              {"8192", 128, 64, PortableKind::kSoftplus, 324.3, 0},
              {"8192", 128, 64, PortableKind::kFp16Rows, 310.0, 0},
              {"8192", 128, 64, PortableKind::kBf16Operands, 313.7, 0}};
  for (const auto& row : rows) {
    const std::string what = cat(row.lengths, ", H ", row.heads, ", K ", row.K);
    EXPECT_NEAR(portable_us(row.lengths, row.heads, row.K, h200, row.kind), row.large_us,
                0.04 * row.large_us)
        << what;
    if (row.small_us == 0) continue;
    EXPECT_NEAR(portable_us(row.lengths, row.heads, row.K, small, row.kind), row.small_us,
                0.07 * row.small_us)
        << what;
  }
  // Products with fp32 sums at the rate of GeForce cards take longer than steps did there.
  EXPECT_NEAR(portable_us("8192", 64, 128, small, PortableKind::kBf16Operands),
              (512 * 85 * 32 * 1.15 + 4880) / 1750 + 12, 1);
}

TEST(PortableCost, IsNoLessThanBytesTake) {
  const DeviceFacts spark = gpu_facts(48, 121);
  EXPECT_NEAR(portable_us("8192", 64, 128, spark), 8192.0 * 64 * 1282 / (273e3 * 0.88 * 0.93), 5);
}

TEST(PortableCost, KindsAreThoseOfTheKernels) {
  Problem p;
  p.q = p.g = contiguous(DType::kBFloat16, {1, 64, 1, 128});
  p.gate_mode = GateMode::kLog;
  EXPECT_EQ(fused::portable::kind_of(p), PortableKind::kBf16Operands);
  p.qk_l2norm = true, p.gate_mode = GateMode::kBounded, p.beta_mode = BetaMode::kSigmoid;
  EXPECT_EQ(fused::portable::kind_of(p), PortableKind::kFp16Operands);
  p.g.dtype = DType::kFloat32;
  EXPECT_EQ(fused::portable::kind_of(p), PortableKind::kBf16Operands);
  p.gate_mode = GateMode::kSoftplus;
  EXPECT_EQ(fused::portable::kind_of(p), PortableKind::kSoftplus);
  p.q.dtype = DType::kFloat16;
  EXPECT_EQ(fused::portable::kind_of(p), PortableKind::kFp16Rows);
}

/// Times of an H200 stand for other cards by their clock, and none is less than bytes take.
TEST(StagedCost, OfAnotherCardIsByItsClockAndItsMemory) {
  const auto us = [](const DeviceFacts& device) {
    plan::Workload work = work_of("8192", 64);
    work.num_sms = device.num_sms;
    return staged::serial_us(cost_input(work, device), staged::costs_of(device));
  };
  DeviceFacts card = gpu_facts(132, 80);
  card.memory_bytes_per_second = 4.24e12, card.gigahertz = kH200Gigahertz;
  EXPECT_NEAR(us(card), 724.3, 0.03 * 724.3);  // measured, with no instruction of Hopper
  const double fast = us(card);
  card.gigahertz /= 2;
  EXPECT_NEAR(us(card), 2 * fast, 0.05 * fast);
  card.gigahertz = 0;  // not known: that of an H200
  EXPECT_EQ(us(card), fast);
  card.memory_bytes_per_second = 240e9;  // a DGX Spark
  EXPECT_NEAR(us(card), 8192.0 * 64 * (2200 + 1396 / 0.93) / 240e3, 0.02 * us(card));
  EXPECT_EQ(staged::costs_of(gpu_facts(132)).intra_work_ns, 100);
  EXPECT_EQ(staged::backward_costs_of(gpu_facts(132)).gradients_ns,
            staged::kSm90Backward.gradients_ns);
  DeviceFacts a100 = gpu_facts(108, 80);
  EXPECT_NEAR(staged::backward_costs_of(a100).gradients_ns, 446 * 1.75 / 1.41, 1e-6);
}

TEST(StagedCost, FillsAnIdleCardAndLeavesAFullOneAlone) {
  const auto cuts = [](const char* lengths, int64_t heads) {
    CostEstimate cost;
    return staged_cut(lengths, heads, &cost).on;
  };
  EXPECT_TRUE(cuts("128K", 4));
  EXPECT_TRUE(cuts("64K", 8));
  EXPECT_TRUE(cuts("64K,512,256,128", 4));
  EXPECT_FALSE(cuts("1024", 4));
  EXPECT_FALSE(cuts("8192", 132));
  EXPECT_FALSE(cuts("64x1024", 64));
  EXPECT_FALSE(cuts("0", 4));
}

TEST(StagedCost, PredictionsAreOrdered) {
  CostEstimate cost;
  ASSERT_TRUE(staged_cut("128K", 4, &cost).on);
  EXPECT_GE(cost.serial_us, cost.roofline_us);
  EXPECT_LT(cost.segmented_us, cost.serial_us / 2);
  EXPECT_GE(cost.segmented_us, cost.roofline_us);
}

/// An H200 takes 577 us for 32,768 tokens and 4 heads in 16 segments, 612 us in 8, 611 us in 11
/// (docs/log/2026-11.md).
TEST(StagedBackwardCost, TakesTheSegmentsThatWereMeasuredToBeBest) {
  const DeviceFacts device = gpu_facts(132);
  const auto cut = [&](const char* lengths, int64_t heads) {
    CostEstimate cost;
    return staged::auto_backward_partition(work_of(lengths, heads), device, {heads, 1},
                                           /*phases=*/false, /*kept=*/false, &cost);
  };
  EXPECT_EQ(cut("32K", 4).segment_chunks, 32);
  EXPECT_FALSE(cut("8K", 16).on);
  EXPECT_FALSE(cut("8K", 64).on);
  const plan::Workload work = work_of("32K", 4);
  const CostInput in = cost_input(work, device);
  const auto model = staged::backward_model(in, device, {4, 1}, false, false);
  for (const auto& [segments, us] : {std::pair{8, 612}, {11, 611}, {16, 577}}) {
    const int64_t tokens = (32768 / 64 + segments - 1) / segments * 64;
    EXPECT_NEAR(staged::backward_us(model, in, {tokens, cut_of(in, tokens, tokens)}), us, 0.03 * us)
        << segments;
  }
}

/// Times of whole calls on an H200, us; one gate a head.
TEST(GdnCost, IsWithinATenthOfTheTimesOfAnH200) {
  const struct {
    const char* lengths;
    int64_t heads, value_heads, segments;
    double us;
  } rows[] = {{"8192", 16, 64, 1, 296},   {"4x2048", 16, 64, 1, 278}, {"8x1024", 16, 64, 1, 284},
              {"8x1024", 16, 32, 1, 170}, {"8192", 16, 32, 4, 277},   {"8192", 2, 8, 8, 107},
              {"32K", 16, 32, 7, 956},    {"64K", 2, 8, 27, 532},     {"64K", 2, 8, 16, 482}};
  for (const auto& row : rows) {
    plan::Workload work = work_of(row.lengths, row.value_heads);
    work.num_heads = row.heads;
    const CostInput in = cost_input(work, gpu_facts(132));
    const int64_t chunks = plan::ceil_div(longest_of(in), plan::kAutoChunk);
    const double us =
        row.segments == 1
            ? gdn::serial_us(in)
            : gdn::unforgetting_us(in, plan::ceil_div(chunks, row.segments) * plan::kAutoChunk);
    EXPECT_NEAR(us, row.us, 0.1 * row.us) << row.lengths << ", " << row.value_heads << " heads";
  }
}

/// Times of whole backwards on an H200, us; one gate a head, uncut.
TEST(GdnBackwardCost, IsNearTheTimesOfAnH200) {
  const struct {
    const char* lengths;
    int64_t heads, value_heads;
    double us;
  } rows[] = {{"8192", 16, 32, 560},
              {"8192", 16, 64, 1020},
              {"32K", 16, 32, 2250},
              {"8x1024", 16, 32, 600},
              {"2048", 16, 32, 156}};
  for (const auto& row : rows) {
    plan::Workload work = work_of(row.lengths, row.value_heads);
    work.num_heads = row.heads;
    const CostInput in = cost_input(work, gpu_facts(132));
    EXPECT_NEAR(gdn::whole_backward_us(in, {in.num_heads, 1}), row.us, 0.05 * row.us)
        << row.lengths;
  }
}

/// What lets the planner leave out the search where it cannot gain.
TEST(FusedCost, NoCutTakesLessThanTheLeast) {
  for (const int64_t K : {64, 128})
    for (const char* lengths : {"64", "1K", "8K", "128K", "8x4K", "64x128", "128K,10x1K", "0,4K,0"})
      for (const int64_t heads : {1, 4, 16, 66, 96}) {
        const std::string what = cat(lengths, ", H ", heads, ", K ", K);
        const fused::Costs& costs = fused::costs_of(K);
        plan::Workload work = work_of(lengths, heads);
        work.key_dim = work.value_dim = K;
        const CostInput in = cost_input(work, gpu_facts(132));
        const fused::CutModel model = fused::model_of(in, costs);
        const double least = fused::least_us(model, in.sums);
        EXPECT_GE(fused::forward_us(model, in.sums), least) << what;
        for (const int64_t segment : {64, 512, 4096})
          for (const int64_t first : {1, 2})
            EXPECT_GE(fused::one_pass_us(model, in.sums, cut_of(in, first * segment, segment),
                                         first * segment),
                      least)
                << what << ", segments of " << segment;
      }
}

}  // namespace
}  // namespace kda::cuda
