// SPDX-License-Identifier: Apache-2.0
// Partition: which sequences are cut into segments, and how long a segment is. Pure functions of
// lengths, heads and the SM count; the published rules are pinned by tests/plan/partition_test.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "kda/plan.hpp"
#include "plan/cut_search.hpp"

namespace kda::plan {

/// The facts that a rule looks at.
struct Workload {
  std::vector<int64_t> lengths;  ///< tokens of each sequence
  int64_t num_value_heads = 1;
  int64_t key_dim = 128;
  int64_t value_dim = 128;
  int64_t num_sms = 132;
  int64_t num_heads = 1;  ///< of q and k
};

/// `cu_seqlens`: empty where lengths are unknown.
Workload workload_of(const Problem& problem, std::span<const int64_t> cu_seqlens,
                     const DeviceFacts& device);

struct Partition {
  bool on = false;
  int64_t chunk_tokens = 64;   ///< the rule's unit: segments start at multiples of it
  int64_t segment_chunks = 0;  ///< longest segment, in chunks
  std::vector<std::string> reasons;
  int64_t first_chunks = 0;  ///< of a sequence that is cut, its first segment; 0: as the others
  bool early_exit = false;   ///< made for transitions that stop where they are small
};

/// Nothing is cut.
Partition uncut(std::string reason);

/// FlashKDA: chunk 16, max_local_chunks = 2^round(log2(3 sqrt(H total_chunks / SMs))), ties to
/// even; on when Be H <= floor(SMs / 4), Be = total chunks / chunks of the longest sequence.
Partition flashkda_partition(const Workload& work);

/// cuLA: chunk 64, 2 V blocks, at least 16 chunks a segment, five guards (docs/planning.md).
Partition cula_partition(const Workload& work);

/// Cuts every sequence into as many segments, chunk `chunk_tokens`, at least one chunk each.
Partition fixed_partition(const Workload& work, int64_t num_segments);

/// Times that a search for the best cut compares: a backend predicts them, in microseconds.
struct CutSearch {
  double whole_us = 0;      ///< uncut
  double least_us = 0;      ///< however it is cut; 0: not known
  bool may_gain = true;     ///< whether any table of so many tokens and sequences can gain
  double minimum_gain = 1;  ///< a cut must win by this factor
  double minimum_step = 1;  ///< of the time with fewer segments, for more of them
  int patience = 64;        ///< so many segments more without a gain: still more have none either
  /// Lengths of a first segment to try, in lengths of the others. Empty: all are even.
  std::span<const double> first_segments;
  /// With segments of `segment_tokens` behind first ones of `first_tokens`.
  std::function<double(int64_t first_tokens, int64_t segment_tokens)> time_us;
  /// May put another cut in place of the best one, whose time is `best_us`; returns the time of
  /// what it leaves. Null: it stays. `chunks`: of the longest sequence.
  std::function<double(int64_t chunks, double best_us, Partition*)> refine;
};

/// The segment length with the least predicted time, if it gains: its time in `segmented_us`.
Partition best_partition(const Workload& work, const CutSearch& search, double* segmented_us);

/// Segments that one sequence of `tokens` tokens is cut into under `partition`.
int64_t num_segments_of(const Partition& partition, int64_t tokens, int64_t fixed_segments);

}  // namespace kda::plan
