// SPDX-License-Identifier: Apache-2.0
// forward() and decode(): a remembered plan and a workspace that is kept, in one call.
#include "kda/run.hpp"

#include <cstdlib>
#include <memory>
#include <utility>

#include "core/guard.hpp"
#include "core/text.hpp"
#include "kda/plan_cache.hpp"

namespace kda {
namespace {

Status call(const Problem& problem, const Tensors& tensors, Workspace& workspace,
            std::span<const int64_t> cu_seqlens, const PlanOptions& options) {
  std::shared_ptr<const Plan> plan;
  KDA_RETURN_IF_ERROR(problem.cu_seqlens && cu_seqlens.empty()
                          ? shared_plans().find_from_bounds(problem, cpu_facts(), options, &plan)
                          : shared_plans().find(problem, cu_seqlens, cpu_facts(), options, &plan));
  KDA_RETURN_IF_ERROR(workspace.reserve(plan->workspace_bytes));
  return run(*plan, tensors, workspace.data(), workspace.size());
}

}  // namespace

PlanCache& shared_plans() {
  static PlanCache& plans = *new PlanCache();  // threads may call while the process ends
  return plans;
}

Status forward(Problem problem, const Tensors& tensors, Workspace& workspace,
               std::span<const int64_t> cu_seqlens, const PlanOptions& options) noexcept {
  problem.operation = Operation::kForward;
  return guarded([&] { return call(problem, tensors, workspace, cu_seqlens, options); });
}

Status decode(Problem problem, const Tensors& tensors, Workspace& workspace,
              std::span<const int64_t> cu_seqlens, const PlanOptions& options) noexcept {
  problem.operation = Operation::kDecode;
  return guarded([&] { return call(problem, tensors, workspace, cu_seqlens, options); });
}

Workspace::~Workspace() { std::free(data_); }

Workspace::Workspace(Workspace&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Workspace& Workspace::operator=(Workspace&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Status Workspace::reserve(std::size_t bytes) noexcept {
  if (bytes <= size_) return {};
  std::free(std::exchange(data_, nullptr));
  size_ = 0;
  const std::size_t rounded =
      (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  // Beyond the largest size of an object aligned_alloc() is not asked.
  if (bytes <= PTRDIFF_MAX - kWorkspaceAlignment)
    data_ = std::aligned_alloc(kWorkspaceAlignment, rounded);
  if (!data_)
    return guarded([&] {
      return Status(StatusCode::kOutOfMemory,
                    cat("workspace: ", bytes, " bytes cannot be allocated"));
    });
  size_ = rounded;
  return {};
}

}  // namespace kda
