// SPDX-License-Identifier: Apache-2.0
// Division by a number that is known before the launch: the hardware has none for integers, and a
// block begins with four of them.
#pragma once

#include <bit>
#include <cstdint>

#include "core/host_device.hpp"

namespace kda::cuda {

/// n / value for n < 2^31, by a product: with s = ceil(log2 value) and m = floor(2^(31+s) / value)
/// + 1, m value exceeds 2^(31+s) by at most value <= 2^s, so n m / 2^(31+s) exceeds n / value by
/// less than 1 / value.
struct Divisor {
  uint32_t value = 1, multiplier = 0x80000001u, shift = 0;

  Divisor() = default;
  explicit Divisor(int64_t of)  ///< above what any launch divides, it need not be right
      : value(static_cast<uint32_t>(of < 1           ? 1
                                    : of < INT32_MAX ? of
                                                     : INT32_MAX)),
        shift(static_cast<uint32_t>(std::bit_width(value - 1))) {
    multiplier = static_cast<uint32_t>((uint64_t{1} << (31 + shift)) / value + 1);
  }

  KDA_HOST_DEVICE uint32_t quotient(uint32_t n) const {
    return static_cast<uint32_t>((uint64_t{2 * n} * multiplier) >> 32) >> shift;
  }
  KDA_HOST_DEVICE uint32_t remainder(uint32_t n) const { return n - quotient(n) * value; }
};

}  // namespace kda::cuda
