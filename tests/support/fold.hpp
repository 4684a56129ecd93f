// SPDX-License-Identifier: Apache-2.0
// A fold of a few maps, on the host.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kda/span.hpp"

namespace kda::test {

using Floats = std::vector<float>;

/// Equal to the bit: floats may be NaN.
inline bool same_bits(const Floats& a, const Floats& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
    return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y);
  });
}

/// Two chains over four maps of three heads; nothing is stored in the last state.
struct FoldCase {
  Floats maps, starts, states;
  std::vector<FoldStep> steps;
  StateFold fold;

  FoldCase(int64_t K, int64_t V, bool transposed) {
    const int64_t heads = 3, count = 4;
    const int64_t stride = heads * K * (K + V);
    maps.resize(static_cast<std::size_t>(count * stride));
    starts.resize(static_cast<std::size_t>(2 * heads * K * V));
    states.assign(static_cast<std::size_t>(4 * heads * K * V), NAN);
    uint32_t seed = 1;
    for (Floats* all : {&maps, &starts})
      for (float& x : *all) {
        seed = seed * 1664525 + 1013904223;
        x = (static_cast<float>(seed >> 8) * 0x1p-23f - 1) / static_cast<float>(K);
      }
    steps = {{.start = 1, .store = 0},
             {.map = 2},
             {.map = 0, .store = 2},
             {.start = FoldStep::kZero, .map = 3, .store = 1}};
    fold = {.num_value_heads = heads,
            .key_dim = K,
            .value_dim = V,
            .num_maps = count,
            .map_stride = stride,
            .M = maps.data(),
            .A = maps.data() + heads * K * K,
            .transposed = transposed,
            .num_starts = 2,
            .starts = starts.data(),
            .num_states = 4,
            .states = states.data(),
            .steps = steps,
            .num_threads = 2};
  }

  /// The maps in rows of `per_row`, each with `behind` floats of NaN behind them.
  void put_in_rows(int64_t per_row, int64_t behind) {
    const int64_t map = fold.map_stride, row = per_row * map + behind;
    Floats spread(static_cast<std::size_t>((fold.num_maps + per_row - 1) / per_row * row), NAN);
    for (int64_t i = 0; i < fold.num_maps; ++i)
      std::copy_n(maps.data() + i * map, map,
                  spread.data() + i / per_row * row + i % per_row * map);
    fold.A = spread.data() + (fold.A - fold.M);
    maps = std::move(spread);
    fold.M = maps.data();
    fold.maps_per_row = per_row, fold.row_stride = row;
  }
};

}  // namespace kda::test
