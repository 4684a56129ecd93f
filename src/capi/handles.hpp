// SPDX-License-Identifier: Apache-2.0
// The opaque structs of kda.h, and how a call reports.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "core/guard.hpp"
#include "kda/kda.h"
#include "kda/kda.hpp"

struct kda_plan_cache {
  kda::PlanCache plans;
};

struct kda_plan {
  std::shared_ptr<const kda::Plan> plan;
  // Made when it is first asked for.
  mutable std::once_flag json_made;
  mutable std::string json;
};

struct kda_backward_plan {
  kda::BackwardPlan plan;
  kda::Problem forward;
};

namespace kda::capi {

/// Keeps the message of a failure for kda_last_error().
kda_status report(Status status) noexcept;

/// Runs `body`; what it throws becomes a status.
template <class Body>
kda_status guarded_call(Body&& body) noexcept {
  return report(guarded(std::forward<Body>(body)));
}

}  // namespace kda::capi
