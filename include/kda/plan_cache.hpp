// SPDX-License-Identifier: Apache-2.0
// PlanCache: plans of the calls made so far. Planning takes microseconds to milliseconds; a serving
// loop asks for the same few shapes again and again.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "kda/plan.hpp"

namespace kda {

/// Thread safe. A plan that was handed out stays valid when the cache drops it or is gone.
class PlanCache {
 public:
  /// Keeps the `most_plans` plans that were asked for last.
  explicit PlanCache(std::size_t most_plans = 256);
  ~PlanCache();
  PlanCache(const PlanCache&) = delete;
  PlanCache& operator=(const PlanCache&) = delete;

  /// As make_plan(), or the plan that the same arguments gave before. A failure is not kept.
  Status find(const Problem& problem, std::span<const int64_t> cu_seqlens,
              const DeviceFacts& device, const PlanOptions& options,
              std::shared_ptr<const Plan>* plan) noexcept;
  /// As make_plan_from_bounds().
  Status find_from_bounds(const Problem& problem, const DeviceFacts& device,
                          const PlanOptions& options, std::shared_ptr<const Plan>* plan) noexcept;

  std::size_t size() const noexcept;

 private:
  struct Plans;
  std::unique_ptr<Plans> plans_;
};

/// The plans that forward(), decode(), kda_call() and kda_call_on() remember, of all threads.
PlanCache& shared_plans();

}  // namespace kda
