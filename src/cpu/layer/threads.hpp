// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/thread_pool.hpp"

namespace kda::cpu::layer {

/// The threads that are worth waking for `elements`.
inline int32_t threads_for(int64_t elements, int32_t num_threads) noexcept {
  constexpr int64_t kElementsWorthAThread = 1 << 15;  // some 10 us of work
  const int32_t most = num_threads == 0 ? default_num_threads() : num_threads;
  return static_cast<int32_t>(std::clamp<int64_t>(elements / kElementsWorthAThread, 1, most));
}

}  // namespace kda::cpu::layer
