// SPDX-License-Identifier: Apache-2.0
// 16-bit formats: every bit pattern, and rounding at every boundary between neighbours.
#include "core/convert.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace kda {
namespace {

double fp16_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1f;
  const double mantissa = bits & 0x3ff;
  const double sign = bits & 0x8000 ? -1 : 1;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

TEST(Convert, Fp16ValuesAreExact) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    if ((half & 0x7c00) == 0x7c00) continue;
    ASSERT_EQ(fp16_to_float(half), fp16_value(half)) << bits;
    ASSERT_EQ(float_to_fp16(fp16_to_float(half)), half) << bits;
  }
}

TEST(Convert, Fp16RoundsToNearestEven) {
  for (uint16_t low = 0; low < 0x7bff; ++low) {
    const auto high = static_cast<uint16_t>(low + 1);
    const double middle = (fp16_value(low) + fp16_value(high)) / 2;
    const auto exact = static_cast<float>(middle);
    ASSERT_EQ(static_cast<double>(exact), middle);
    ASSERT_EQ(float_to_fp16(exact), low % 2 == 0 ? low : high);
    ASSERT_EQ(float_to_fp16(std::nextafter(exact, 0.0f)), low);
    ASSERT_EQ(float_to_fp16(std::nextafter(exact, 1e30f)), high);
  }
}

TEST(Convert, Bf16RoundsToNearestEven) {
  for (uint32_t low = 0; low < 0x7f7f; ++low) {
    const float below = bf16_to_float(static_cast<uint16_t>(low));
    const float middle = __builtin_bit_cast(float, (low << 16) | 0x8000u);
    ASSERT_EQ(float_to_bf16(below), low);
    ASSERT_EQ(float_to_bf16(middle), low % 2 == 0 ? low : low + 1);
    ASSERT_EQ(float_to_bf16(std::nextafter(middle, 0.0f)), low);
    ASSERT_EQ(float_to_bf16(std::nextafter(middle, std::numeric_limits<float>::infinity())),
              low + 1);
  }
}

TEST(Convert, SpecialValues) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(float_to_fp16(infinity), 0x7c00);
  EXPECT_EQ(float_to_fp16(-infinity), 0xfc00);
  EXPECT_EQ(float_to_fp16(65520.0f), 0x7c00);  // rounds past the largest
  EXPECT_EQ(float_to_fp16(65519.0f), 0x7bff);
  EXPECT_EQ(float_to_fp16(1e-10f), 0);
  EXPECT_EQ(float_to_fp16(-1e-10f), 0x8000);
  EXPECT_EQ(fp16_to_float(0x7c00), infinity);
  EXPECT_TRUE(std::isnan(fp16_to_float(0x7c01)));
  EXPECT_TRUE(std::isnan(fp16_to_float(float_to_fp16(NAN))));
  EXPECT_EQ(float_to_bf16(infinity), 0x7f80);
  EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(NAN))));
  EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(__builtin_bit_cast(float, 0x7f800001u)))));
}

TEST(Convert, ElementsOfEveryType) {
  alignas(8) char bytes[16];
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    store_element(bytes, dtype, 2, -1.5f);
    EXPECT_EQ(load_element(bytes, dtype, 2), -1.5f);
  }
}

TEST(Convert, DoublesOfEveryType) {
  alignas(8) char bytes[24];
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    store_double(bytes, dtype, 2, -1.5);
    EXPECT_EQ(load_double(bytes, dtype, 2), -1.5) << dtype_name(dtype);
    store_double(bytes, dtype, 1, 1.0 / 3);
    const double rounding[] = {0x1p-26, 0x1p-10, 0x1p-13, 0, 0, 0};
    EXPECT_NEAR(load_double(bytes, dtype, 1), 1.0 / 3, rounding[static_cast<int>(dtype)])
        << dtype_name(dtype);
  }
}

}  // namespace
}  // namespace kda
