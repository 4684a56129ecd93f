// SPDX-License-Identifier: Apache-2.0
// Implementation: one row of the registry. The planner sees rows as data; run() calls them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "stage/chunk.hpp"
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
  /// Why segments of a problem are not joined in one pass; empty if they are. Null: nothing.
  std::string (*decline_one_pass)(const Problem& problem) = nullptr;
  /// One pass on a GPU: transitions can come after all else and stop where M is small, which is
  /// looked at after every so many tokens. 0: they cannot.
  int64_t norm_check_tokens = 0;
  /// Blocks of its own in the workspace; null: scratch_bytes alone. False if sizes overflow.
  bool (*add_blocks)(Plan& plan) = nullptr;
  int32_t min_compute_capability = 0;  ///< CUDA: 10 major + minor
  int32_t max_compute_capability = INT32_MAX;
  /// Null where the implementation keeps no factors of chunks.
  Status (*chunk)(const Chunk& args) = nullptr;
  StageSizes (*stage_sizes)(const Plan& plan) = nullptr;
  /// Why the next one should serve what this one can, where no backend is asked for; empty if it
  /// should not. Null: it never should.
  std::string (*yield)(const Plan& plan) = nullptr;
};

/// Every implementation of this build, best first.
std::span<const Implementation* const> registry() noexcept;

}  // namespace kda::stage
