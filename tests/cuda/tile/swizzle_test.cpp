// SPDX-License-Identifier: Apache-2.0
#include "cuda/tile/swizzle.hpp"

#include <gtest/gtest.h>

#include <set>

namespace kda::cuda {
namespace {

template <int kRows>
void expect_permutation() {
  std::set<int> places;
  for (int piece = 0; piece < 16; ++piece)  // 128 columns
    for (int row = 0; row < kRows; ++row) {
      const int at = swizzled<kRows>(row, piece);
      EXPECT_EQ(at % 8, 0);
      EXPECT_EQ(at / 64, piece / 8 * kRows + row) << "a piece stays in its row of 64 columns";
      places.insert(at);
    }
  EXPECT_EQ(places.size(), 16u * kRows);
  EXPECT_EQ(*places.rbegin(), kRows * 128 - 8);
}

TEST(Swizzle, PermutesThePiecesOfARow) {
  expect_permutation<16>();
  expect_permutation<32>();
  expect_permutation<64>();
}

/// Eight rows of the same piece are what ldmatrix reads at once: 16 bytes each, of 128 bytes of
/// banks.
TEST(Swizzle, EightRowsLieInAllBanks) {
  for (int piece = 0; piece < 16; ++piece)
    for (int row0 = 0; row0 < 64; row0 += 8) {
      std::set<int> banks;
      for (int row = row0; row < row0 + 8; ++row) banks.insert(swizzled(row, piece) * 2 % 128);
      EXPECT_EQ(banks.size(), 8u) << row0 << " " << piece;
    }
}

TEST(Swizzle, FromConstantsIsTheSame) {
  for (int row0 = 0; row0 < 64; row0 += 8)
    for (int piece0 = 0; piece0 < 16; ++piece0)
      for (int row = 0; row < 16; ++row)
        for (int piece = 0; piece < 2; ++piece)
          if ((piece0 & piece) == 0) {
            EXPECT_EQ(swizzled_from(row0, piece0, row, piece), swizzled(row0 + row, piece0 + piece))
                << row0 << " " << piece0 << " " << row << " " << piece;
          }
}

}  // namespace
}  // namespace kda::cuda
