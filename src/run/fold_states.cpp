// SPDX-License-Identifier: Apache-2.0
// fold_states(): checks, then the first implementation that this machine can run.
#include <algorithm>
#include <utility>

#include "core/guard.hpp"
#include "core/text.hpp"
#include "kda/span.hpp"
#include "registry/rows.hpp"

namespace kda {
namespace {

Status check_size(const char* name, int64_t value, int64_t most) {
  if (value >= 1 && value <= most) return {};
  return invalid(name, " = ", value, " is outside 1..", most);
}

Status check_buffer(const char* name, const void* pointer, const char* count_name, int64_t count) {
  if (count < 0) return invalid(count_name, " = ", count, " is negative");
  if (count > 0 && !pointer) return invalid(name, ": pointer is null");
  return {};
}

Status check_entry(std::size_t step, const char* name, int64_t entry, int64_t lowest,
                   int64_t count) {
  if (entry >= lowest && entry < count) return {};
  return invalid("steps: ", name, " of step ", step, " is ", entry, ", outside ", lowest, "..",
                 count - 1);
}

Status check_fold(const StateFold& f) {
  constexpr int64_t kMostHeads = 65535;
  KDA_RETURN_IF_ERROR(check_size("num_value_heads", f.num_value_heads, kMostHeads));
  KDA_RETURN_IF_ERROR(check_size("key_dim", f.key_dim, kMaxHeadDim));
  KDA_RETURN_IF_ERROR(check_size("value_dim", f.value_dim, kMaxHeadDim));
  KDA_RETURN_IF_ERROR(check_buffer("M", f.M, "num_maps", f.num_maps));
  KDA_RETURN_IF_ERROR(check_buffer("A", f.A, "num_maps", f.num_maps));
  KDA_RETURN_IF_ERROR(check_buffer("starts", f.starts, "num_starts", f.num_starts));
  KDA_RETURN_IF_ERROR(check_buffer("states", f.states, "num_states", f.num_states));
  const int64_t least = f.num_value_heads * f.key_dim * std::max(f.key_dim, f.value_dim);
  if (f.num_maps > 1 && f.map_stride < least)
    return invalid("map_stride = ", f.map_stride, " is below the ", least, " floats of a map");
  if (f.maps_per_row < 0) return invalid("maps_per_row = ", f.maps_per_row, " is negative");
  if (f.maps_per_row > 0 && f.num_maps > f.maps_per_row &&
      f.row_stride / f.maps_per_row < f.map_stride)
    return invalid("row_stride = ", f.row_stride, " is below the ", f.maps_per_row, " maps of ",
                   f.map_stride, " floats of a row");
  if (f.num_threads < 0) return invalid("num_threads = ", f.num_threads, " is negative");
  for (std::size_t i = 0; i < f.steps.size(); ++i) {
    const FoldStep& step = f.steps[i];
    KDA_RETURN_IF_ERROR(check_entry(i, "start", step.start, FoldStep::kZero, f.num_starts));
    KDA_RETURN_IF_ERROR(check_entry(i, "map", step.map, FoldStep::kNone, f.num_maps));
    KDA_RETURN_IF_ERROR(check_entry(i, "store", step.store, FoldStep::kNone, f.num_states));
  }
  if (!f.steps.empty() && f.steps.front().start == FoldStep::kNone)
    return invalid("steps: the first step has no start");
  return {};
}

/// Pointers of a fold on a GPU.
Status check_device_memory(const registry::Head& head, const StateFold& f) {
  if (!head.device_checks) return {};
  if (!f.steps.empty() && !f.device_steps) return invalid("device_steps: pointer is null");
  for (const auto& [name, pointer] : {std::pair<const char*, const void*>{"M", f.M},
                                      {"A", f.A},
                                      {"starts", f.starts},
                                      {"states", f.states},
                                      {"device_steps", f.device_steps}})
    KDA_RETURN_IF_ERROR(head.device_checks->pointer(name, pointer));
  return {};
}

}  // namespace

Status fold_states(const StateFold& fold) noexcept {
  return guarded([&] {
    KDA_RETURN_IF_ERROR(check_fold(fold));
    const char* reason = "device: no implementation folds states there";
    for (const registry::ForwardRow* row : registry::forward_rows()) {
      if (row->head.device != fold.device || !row->spans) continue;
      if (const char* why = row->head.unavailable()) {
        reason = why;
      } else if (row->spans->fold) {
        KDA_RETURN_IF_ERROR(check_device_memory(row->head, fold));
        return row->spans->fold(fold);
      }
    }
    return Status(StatusCode::kUnsupported, reason);
  });
}

}  // namespace kda
