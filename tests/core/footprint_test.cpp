// SPDX-License-Identifier: Apache-2.0
#include "core/footprint.hpp"

#include <gtest/gtest.h>

namespace kda {
namespace {

TEST(Footprint, RangesOverlapWhereBothHaveBytes) {
  char memory[64];
  const Footprint whole = dense_footprint(memory, 64);
  EXPECT_TRUE(overlap(whole, dense_footprint(memory + 60, 8)));
  EXPECT_FALSE(overlap(whole, dense_footprint(memory + 64, 8)));
  EXPECT_FALSE(overlap(whole, dense_footprint(memory + 16, 0)));
  EXPECT_FALSE(overlap(dense_footprint(memory + 16, 0), whole));
}

}  // namespace
}  // namespace kda
