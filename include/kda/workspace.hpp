// SPDX-License-Identifier: Apache-2.0
// Workspace: memory of a call on the CPU that later calls use again.
#pragma once

#include <cstddef>

#include "kda/status.hpp"

namespace kda {

/// Grows to what the largest call has needed, aligned to kWorkspaceAlignment. One call uses it at a
/// time: threads have one each.
class Workspace {
 public:
  Workspace() = default;
  ~Workspace();
  Workspace(Workspace&& other) noexcept;
  Workspace& operator=(Workspace&& other) noexcept;
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  /// At least `bytes`. Where it grows, what it held is lost. kOutOfMemory: it holds nothing then.
  Status reserve(std::size_t bytes) noexcept;

  void* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace kda
