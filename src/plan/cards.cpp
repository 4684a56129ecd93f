// SPDX-License-Identifier: Apache-2.0
#include "plan/cards.hpp"

#include <cmath>
#include <cstdlib>

#include "core/text.hpp"

namespace kda {
namespace {

/// A card as its vendor publishes it. Clocks are those under load where somebody has told them,
/// else the boost clock.
struct Card {
  int32_t compute_capability, num_sms;
  double gigahertz, copy_bytes_per_second;
};

constexpr double from_data_sheet(double gigabytes_per_second) {
  return gigabytes_per_second * 1e9 * plan::kCopyShare;
}

constexpr int32_t kHopper = 90;
/// By compute capability. That of an H200 was measured: a large copy.
constexpr Card kCards[] = {
    {80, 56, 1.44, from_data_sheet(933)},     // A30
    {80, 108, 1.41, from_data_sheet(2039)},   // A100 80 GB
    {86, 28, 1.7, from_data_sheet(360)},      // RTX 3060
    {86, 72, 1.7, from_data_sheet(600)},      // A10
    {86, 82, 1.7, from_data_sheet(936)},      // RTX 3090
    {86, 84, 1.7, from_data_sheet(768)},      // RTX A6000
    {87, 16, 1.3, from_data_sheet(205)},      // Jetson AGX Orin
    {89, 58, 2.0, from_data_sheet(300)},      // L4
    {89, 128, 2.4, from_data_sheet(1008)},    // RTX 4090
    {89, 142, 2.4, from_data_sheet(864)},     // L40S
    {kHopper, 132, 1.75, 4.24e12},            // H200
    {100, 148, 1.85, from_data_sheet(8000)},  // B200
    {103, 148, 1.85, from_data_sheet(8000)},  // B300
    {110, 20, 1.55, from_data_sheet(273)},    // Jetson AGX Thor
    {120, 84, 2.4, from_data_sheet(960)},     // RTX 5080
    {120, 170, 2.4, from_data_sheet(1792)},   // RTX 5090
    {121, 48, 2.4, from_data_sheet(273)},     // DGX Spark
};

/// The card of the nearest number of multiprocessors, of the highest capability up to this one.
const Card& card_like(int32_t num_sms, int32_t compute_capability) {
  const Card* like = &kCards[0];
  const auto distance = [&](const Card& card) { return std::abs(int64_t{card.num_sms} - num_sms); };
  for (const Card& card : kCards) {
    if (card.compute_capability > compute_capability) break;
    if (card.compute_capability > like->compute_capability || distance(card) < distance(*like))
      like = &card;
  }
  return *like;
}

/// `said` where an assumption is off by more than an eighth.
double nearer(double assumed, double said) {
  return said > 0 && std::abs(assumed / said - 1) > 0.125 ? said : assumed;
}

}  // namespace

DeviceFacts gpu_facts(int32_t num_sms, int32_t compute_capability) {
  const Card& like = card_like(num_sms, compute_capability);
  DeviceFacts facts;
  facts.kind = DeviceKind::kCuda;
  facts.name = cat("sm_", compute_capability, ", ", num_sms, " SMs");
  facts.compute_capability = compute_capability;
  facts.num_sms = num_sms;
  facts.memory_bytes_per_second = like.copy_bytes_per_second * num_sms / like.num_sms;
  facts.gigahertz = like.gigahertz;
  return facts;
}

void plan::take_driver_rates(const DriverRates& rates, DeviceFacts* facts) {
  if (facts->compute_capability == kHopper) return;
  const double bytes_per_second = 2e3 * rates.memory_clock_khz * rates.memory_bus_bits / 8;
  facts->memory_bytes_per_second =
      nearer(facts->memory_bytes_per_second, kCopyShare * bytes_per_second);
  facts->gigahertz = nearer(facts->gigahertz, kLoadShare * rates.clock_khz * 1e-6);
}

}  // namespace kda
