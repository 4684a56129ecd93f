// SPDX-License-Identifier: Apache-2.0
// Implementation: one row of the registry. The planner sees rows as data; run() calls them.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "stage/decode.hpp"
#include "stage/forward.hpp"
#include "stage/segment.hpp"

namespace kda::stage {

struct Implementation {
  const char* name;  ///< dotted, e.g. "cpu.blocked.avx2"
  DeviceKind device;
  int64_t chunk_size;
  /// Null if usable on this machine, else why not.
  const char* (*unavailable)() noexcept;
  /// Empty if it serves the problem, else why not.
  std::string (*decline)(const Problem& problem);
  /// For all threads together.
  std::size_t (*scratch_bytes)(const Problem& problem, int32_t num_threads);
  Status (*forward)(const Forward& args);
  Status (*decode)(const Decode& args);
  // Null where the implementation has no segments.
  Status (*segment_scan)(const SegmentScan& args);
  Status (*segment_merge)(const SegmentMerge& args);
  Status (*segment_correct)(const SegmentCorrect& args);
};

/// Every implementation of this build, best first.
std::span<const Implementation* const> registry() noexcept;

}  // namespace kda::stage
