// SPDX-License-Identifier: Apache-2.0
// make_plan() over given rows: tests bring rows of their own.
#pragma once

#include <span>

#include "registry/rows.hpp"

namespace kda::plan {

/// Plans as make_plan() does; `rows` best first. `cu_seqlens` null: from bounds. `gradients`: those
/// of a backward.
Status plan_with(std::span<const registry::Head* const> rows, const Problem& problem,
                 const std::span<const int64_t>* cu_seqlens, const DeviceFacts& device,
                 const PlanOptions& options, Plan* plan,
                 const Gradients* gradients = nullptr) noexcept;

}  // namespace kda::plan
