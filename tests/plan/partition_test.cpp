// SPDX-License-Identifier: Apache-2.0
// The published segment rules, pinned to their published tables.
#include "plan/partition.hpp"

#include <gtest/gtest.h>

#include "core/text.hpp"
#include "support/harness.hpp"
#include "tools/kda/flags.hpp"

namespace kda::plan {
namespace {

Workload work_of(const std::string& lengths, int64_t heads, int64_t sms) {
  Workload work;
  work.lengths = tools::parse_lengths(lengths);
  work.num_value_heads = heads;
  work.num_sms = sms;
  return work;
}

/// Segments of the longest sequence; 1 when the rule declines.
int64_t longest_split(const Partition& partition, const Workload& work) {
  if (!partition.on) return 1;
  int64_t most = 1;
  for (const int64_t tokens : work.lengths)
    most = std::max(most, num_segments_of(partition, tokens, 0));
  return most;
}

int64_t cula(const std::string& lengths, int64_t heads, int64_t sms = 152) {
  const Workload work = work_of(lengths, heads, sms);
  return longest_split(cula_partition(work), work);
}

TEST(CulaPolicy, PublishedTableFor152Sms) {
  for (const char* lengths :
       {"64K", "128K", "64K,512,256,128", "128K,1K", "128K,2x1K", "128K,5x1K", "128K,10x1K"})
    EXPECT_EQ(cula(lengths, 4), 19) << lengths;
  for (const char* lengths :
       {"64K", "128K", "64K,512,256,128", "128K,1K", "128K,2x1K", "128K,5x1K"})
    EXPECT_EQ(cula(lengths, 8), 9) << lengths;
  EXPECT_EQ(cula("128K,10x1K", 8), 1);
  for (const int64_t heads : {4, 8})
    for (const char* lengths : {"4K", "8K", "32K", "8x4K", "4x8K", "2x16K", "24K,8K", "28K,4K",
                                "32K,256,256", "40K,1K,8K"})
      EXPECT_EQ(cula(lengths, heads), 1) << lengths;
}

std::string cula_reason(const std::string& lengths, int64_t heads, int64_t sms = 152) {
  return cula_partition(work_of(lengths, heads, sms)).reasons.back();
}

TEST(CulaPolicy, EveryGuardSpeaks) {
  EXPECT_NE(cula_reason("128K,10x1K", 8).find("guard 0"), std::string::npos);
  EXPECT_NE(cula_reason("8K", 4).find("guard 1"), std::string::npos);
  EXPECT_NE(cula_reason("3x32K", 4).find("guard 2"), std::string::npos);
  EXPECT_NE(cula_reason("32K", 4).find("guard 3"), std::string::npos);
  EXPECT_NE(cula_reason("2x64K", 4).find("guard 4"), std::string::npos);
  EXPECT_NE(cula_reason("64K", 4).find("19"), std::string::npos);
}

TEST(FlashKdaPolicy, PublishedThresholdFor78Sms) {
  for (const int64_t heads : {1, 8, 16, 19})
    EXPECT_TRUE(flashkda_partition(work_of("8192", heads, 78)).on) << heads;
  for (const int64_t heads : {20, 32, 64})
    EXPECT_FALSE(flashkda_partition(work_of("8192", heads, 78)).on) << heads;
}

TEST(FlashKdaPolicy, SegmentLengths) {
  // 2^round(log2(3 sqrt(H chunks / SMs))), written out.
  const auto chunks = [](const char* lengths, int64_t heads, int64_t sms) {
    return flashkda_partition(work_of(lengths, heads, sms)).segment_chunks;
  };
  EXPECT_EQ(chunks("8192", 16, 78), 32);   // 3 sqrt(105.03) = 30.7 -> 2^4.94
  EXPECT_EQ(chunks("65536", 8, 132), 64);  // 3 sqrt(248.2) = 47.3 -> 2^5.56
  EXPECT_EQ(chunks("4096", 4, 132), 8);    // 3 sqrt(7.76) = 8.4 -> 2^3.06
  EXPECT_EQ(chunks("131072", 4, 132), 64);
}

TEST(FlashKdaPolicy, SkewRaisesTheEffectiveBatch) {
  EXPECT_TRUE(flashkda_partition(work_of("64K,512", 16, 78)).on);
  EXPECT_FALSE(flashkda_partition(work_of("2x32K", 16, 78)).on);
  EXPECT_FALSE(flashkda_partition(work_of("0", 1, 78)).on);
  EXPECT_FALSE(flashkda_partition(work_of("16", 1, 78)).on);
}

TEST(FixedPolicy, AtMostOneSegmentAChunk) {
  const Workload work = work_of("1000,64,65,0", 4, 132);
  const Partition partition = fixed_partition(work, 8);
  ASSERT_TRUE(partition.on);
  EXPECT_EQ(num_segments_of(partition, 1000, 8), 8);
  EXPECT_EQ(num_segments_of(partition, 65, 8), 2);
  EXPECT_EQ(num_segments_of(partition, 64, 8), 1);
  EXPECT_EQ(num_segments_of(partition, 0, 8), 1);
  EXPECT_FALSE(fixed_partition(work, 1).on);
  EXPECT_FALSE(fixed_partition(work_of("64", 4, 132), 8).on);
}

TEST(ParseLengths, SuffixesAndRepeats) {
  EXPECT_EQ(tools::parse_lengths("1,2K,3x4"), (std::vector<int64_t>{1, 2048, 4, 4, 4}));
  EXPECT_EQ(tools::parse_lengths("2x1k,0"), (std::vector<int64_t>{1024, 1024, 0}));
  for (const char* bad : {"", "a", "1,", ",1", "-5", "1.5", "x4", "4x", "99999999999999999999",
                          "999999999x1", "1 2", "0x10z"})
    EXPECT_THROW(tools::parse_lengths(bad), Error) << bad;
}

}  // namespace
}  // namespace kda::plan
