// SPDX-License-Identifier: Apache-2.0
// Partition: which sequences are cut into segments, and how long a segment is. Pure functions of
// lengths, heads and the SM count; the published rules are pinned by tests/plan/partition_test.cpp.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kda/plan.hpp"

namespace kda::plan {

/// What a rule looks at.
struct Workload {
  std::vector<int64_t> lengths;  ///< tokens of each sequence
  int64_t num_value_heads = 1;
  int64_t key_dim = 128;
  int64_t value_dim = 128;
  int64_t num_sms = 132;
  int64_t norm_check_tokens = 0;  ///< stage::Implementation's, where transitions may stop; else 0
};

struct Partition {
  bool on = false;
  int64_t chunk_tokens = 64;   ///< the rule's unit: segments start at multiples of it
  int64_t segment_chunks = 0;  ///< longest segment, in chunks
  std::vector<std::string> reasons;
  int64_t first_chunks = 0;  ///< of a sequence that is cut, its first segment; 0: as the others
  bool transitions_stop = false;
};

/// FlashKDA: chunk 16, max_local_chunks = 2^round(log2(3 sqrt(H total_chunks / SMs))), ties to
/// even; on when Be H <= floor(SMs / 4), Be = total chunks / chunks of the longest sequence.
Partition flashkda_partition(const Workload& work);

/// cuLA: chunk 64, 2 V blocks, at least 16 chunks a segment, five guards (docs/planning.md).
Partition cula_partition(const Workload& work);

/// The same number of segments for every sequence, chunk `chunk_tokens`, at least one chunk each.
Partition fixed_partition(const Workload& work, int64_t num_segments);

/// libkda's: the segment length with the least predicted time (cost_model.hpp), if it gains. In
/// stages, or in one pass of one kernel.
Partition auto_partition(const Workload& work, const DeviceFacts& device, bool one_kernel,
                         CostEstimate* cost);

/// Segments that one sequence of `chunks` chunks is cut into under `partition`.
int64_t num_segments_of(const Partition& partition, int64_t tokens, int64_t fixed_segments);

}  // namespace kda::plan
