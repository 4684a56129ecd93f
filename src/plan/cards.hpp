// SPDX-License-Identifier: Apache-2.0
// Assumptions about a GPU that a plan knows by compute capability and multiprocessors alone, and a
// driver's words in their place.
#pragma once

#include "kda/plan.hpp"

namespace kda::plan {

/// The rate of a large copy, of what a data sheet or a driver has for the memory: an H100 was
/// measured at 0.89 of it, an H200 at 0.88.
inline constexpr double kCopyShare = 0.88;
/// The clock under load, of the highest one, which drivers tell.
inline constexpr double kLoadShare = 0.9;

/// A driver's words; 0: it does not know.
struct DriverRates {
  int clock_khz = 0;         ///< of multiprocessors, the highest
  int memory_clock_khz = 0;  ///< half of the transfers a second
  int memory_bus_bits = 0;
};

/// Puts what the driver says in place of what gpu_facts() assumes. An assumption within an eighth
/// of that stays, so that plans made elsewhere are those of the card. So do all of compute
/// capability 9.0, which the constants of its kernels were fitted with.
void take_driver_rates(const DriverRates& rates, DeviceFacts* facts);

}  // namespace kda::plan
