// SPDX-License-Identifier: Apache-2.0
#include "cuda/tile/divisor.hpp"

#include <gtest/gtest.h>

#include <initializer_list>

namespace kda::cuda {
namespace {

constexpr uint32_t kMost = 0x7fffffffu;

void expect_exact(uint32_t n, uint32_t value) {
  const Divisor divisor(value);
  ASSERT_EQ(divisor.quotient(n), n / value) << n << " / " << value;
  ASSERT_EQ(divisor.remainder(n), n % value) << n << " % " << value;
}

TEST(Divisor, EqualsDivision) {
  for (uint32_t value = 1; value < 3000; ++value)
    for (uint32_t n = 0; n < 4 * value; n += 1 + n / 97) expect_exact(n, value);
}

TEST(Divisor, AroundMultiplesUpToTheLargestNumber) {
  for (const uint32_t value : {1u, 2u, 3u, 5u, 7u, 96u, 641u, 65535u, 65536u, 65537u, 1u << 30,
                               (1u << 30) + 1, kMost - 1, kMost})
    for (uint32_t step = 0; step < 1000; ++step) {
      const uint32_t multiple = (kMost / value - step * (kMost / value / 1000)) * value;
      expect_exact(multiple, value);
      if (multiple > 0) expect_exact(multiple - 1, value);
      if (multiple < kMost) expect_exact(multiple + 1, value);
    }
}

TEST(Divisor, OfNothingIsOne) { EXPECT_EQ(Divisor(0).quotient(7), 7u); }

}  // namespace
}  // namespace kda::cuda
