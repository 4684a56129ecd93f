// SPDX-License-Identifier: Apache-2.0
// run() over given rows, an operation a function: tests bring rows of their own.
#pragma once

#include <span>

#include "registry/rows.hpp"

namespace kda::run_rows {

/// Runs a plan of that operation, as run() does; the plan's implementation is one of `rows`.
Status forward(std::span<const registry::ForwardRow* const> rows, const Plan& plan,
               const Tensors& tensors, void* workspace, std::size_t workspace_bytes,
               void* stream) noexcept;
Status decode(std::span<const registry::DecodeRow* const> rows, const Plan& plan,
              const Tensors& tensors, void* workspace, std::size_t workspace_bytes,
              void* stream) noexcept;

}  // namespace kda::run_rows
