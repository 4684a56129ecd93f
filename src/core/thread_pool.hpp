// SPDX-License-Identifier: Apache-2.0
// One pool of worker threads for the process: started when first needed, safe to use from many
// threads at once and after fork(). Idle workers look for work for 50 us before they sleep, not on
// a core that another thread wants.
#pragma once

#include <cstdint>

#include "kda/status.hpp"

namespace kda {

/// Runs on one of the participating threads; `slot` < max_threads is unique among them.
using TaskFn = void (*)(void* context, int64_t task, int32_t slot) noexcept;

/// Cores that this process may use: a batch system, a container or taskset may leave it fewer than
/// the machine has.
int32_t usable_cores() noexcept;

/// Threads to use when the caller does not say: OMP_NUM_THREADS, else usable_cores() as they were
/// when first asked for.
int32_t default_num_threads() noexcept;

/// A job of fewer microseconds on one core wakes no thread for itself alone.
inline constexpr double kWorthWaking = 40;
/// How long a call takes on one core, roughly, where nobody knows better: long enough for any
/// thread.
inline constexpr double kLongWork = 1e9;

/// Calls fn for tasks 0..num_tasks-1 on up to `max_threads` threads, the caller's among them, and
/// returns when all are done. Fails before any task runs if a worker cannot be started.
/// `microseconds`: what all tasks take on one core, roughly. Few stay on the caller's thread, more
/// go to threads that are awake or soon needed again, and from kWorthWaking on threads are woken.
Status parallel_for(int64_t num_tasks, int32_t max_threads, TaskFn fn, void* context,
                    double microseconds = kLongWork) noexcept;

/// parallel_for over a callable `body(task, slot)`.
template <class Body>
Status parallel_tasks(int64_t num_tasks, int32_t max_threads, Body& body,
                      double microseconds = kLongWork) noexcept {
  const TaskFn call = [](void* context, int64_t task, int32_t slot) noexcept {
    (*static_cast<Body*>(context))(task, slot);
  };
  return parallel_for(num_tasks, max_threads, call, &body, microseconds);
}

}  // namespace kda
