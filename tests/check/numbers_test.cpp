// SPDX-License-Identifier: Apache-2.0
// Numbers are read whole or not at all.
#include "check/numbers.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace kda::check {
namespace {

TEST(ParseWhole, TakesDecimalDigitsAlone) {
  int64_t value = 7;
  for (const char* text : {"0", "8", "-8", "9223372036854775807", "-9223372036854775808"}) {
    ASSERT_TRUE(parse_whole(text, &value)) << text;
    EXPECT_EQ(std::to_string(value), text);
  }
  for (const char* text : {"", " ", " 8", "8 ", "+8", "010", "-010", "0x8", "8x", "8.0", "8e0",
                           "--8", "nan", "inf", "9223372036854775808", "-9223372036854775809"})
    EXPECT_FALSE(parse_whole(text, &value)) << text;
  uint64_t seed = 0;
  EXPECT_TRUE(parse_whole("18446744073709551615", &seed));
  EXPECT_EQ(seed, UINT64_MAX);
  EXPECT_FALSE(parse_whole("-1", &seed));
}

TEST(ParseReal, TakesWhatFp32Holds) {
  double value = 7;
  for (const auto& [text, expected] : {std::pair{"0", 0.0},
                                       {"-0", -0.0},
                                       {"0.5", 0.5},
                                       {".5", 0.5},
                                       {"5.", 5.0},
                                       {"-2.5e-3", -0.0025},
                                       {"3.4e38", 3.4e38},
                                       {"1.2e-38", 1.2e-38},
                                       {"12", 12.0}}) {
    EXPECT_EQ(parse_real(text, &value), nullptr) << text;
    EXPECT_EQ(value, expected) << text;
  }
  const std::pair<const char*, const char*> bad[] = {
      {"", "not a number"},       {" 1", "not a number"},     {"1 ", "not a number"},
      {"+1", "not a number"},     {"010", "not a number"},    {"00.5", "not a number"},
      {"0x10", "not a number"},   {"12x", "not a number"},    {"1e", "not a number"},
      {"-", "not a number"},      {"nan", "not a finite"},    {"-inf", "not a finite"},
      {"1e39", "range of fp32"},  {"-1e39", "range of fp32"}, {"1e-50", "range of fp32"},
      {"1e999", "range of fp32"}, {"1e-39", "range of fp32"}, {"1e-999", "range of fp32"},
  };
  for (const auto& [text, fault] : bad) {
    const char* found = parse_real(text, &value);
    ASSERT_NE(found, nullptr) << text;
    EXPECT_NE(std::string(found).find(fault), std::string::npos) << text << ": " << found;
  }
}

TEST(WriteReal, IsReadBackToTheBit) {
  for (const double number : {0.1 + 0.2, -1.0 / 3, 5.0, 1e-30, 0.08838834764831845}) {
    double again = 0;
    EXPECT_EQ(parse_real(write_real(number), &again), nullptr);
    EXPECT_EQ(again, number);
  }
  EXPECT_EQ(write_real(-5), "-5");
}

}  // namespace
}  // namespace kda::check
