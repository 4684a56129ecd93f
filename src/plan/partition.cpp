// SPDX-License-Identifier: Apache-2.0
#include "plan/partition.hpp"

#include <algorithm>
#include <cmath>

#include "core/text.hpp"

namespace kda::plan {
namespace {

struct ChunkCounts {
  int64_t total = 0;
  int64_t longest = 0;
};

ChunkCounts count_chunks(const Workload& work, int64_t chunk) {
  ChunkCounts counts;
  for (const int64_t tokens : work.lengths) {
    const int64_t chunks = ceil_div(tokens, chunk);
    counts.total += chunks;
    counts.longest = std::max(counts.longest, chunks);
  }
  return counts;
}

Partition declined(Partition partition, std::string reason) {
  partition.on = false;
  partition.segment_chunks = partition.first_chunks = 0;
  partition.reasons.push_back(std::move(reason));
  return partition;
}

}  // namespace

Workload workload_of(const Problem& problem, std::span<const int64_t> cu_seqlens,
                     const DeviceFacts& device) {
  Workload work{.lengths = {},
                .num_value_heads = problem.num_value_heads,
                .key_dim = problem.key_dim,
                .value_dim = problem.value_dim,
                .num_sms = device.num_sms,
                .num_heads = problem.num_heads};
  for (std::size_t n = 1; n < cu_seqlens.size(); ++n)
    work.lengths.push_back(cu_seqlens[n] - cu_seqlens[n - 1]);
  return work;
}

Partition uncut(std::string reason) { return {.reasons = {std::move(reason)}}; }

Partition flashkda_partition(const Workload& work) {
  Partition partition;
  partition.chunk_tokens = 16;
  const ChunkCounts chunks = count_chunks(work, partition.chunk_tokens);
  if (chunks.longest == 0) return declined(partition, "flashkda: no tokens");
  const int64_t limit = work.num_sms / 4;
  const int64_t heads = work.num_value_heads;
  // Be H <= limit without a division.
  if (chunks.total * heads > limit * chunks.longest)
    return declined(partition,
                    cat("flashkda: Be * H = ", chunks.total, " / ", chunks.longest, " * ", heads,
                        " > floor(SMs / 4) = ", limit, ": the card is full enough"));
  const double local = std::log2(
      3 * std::sqrt(static_cast<double>(heads * chunks.total) / static_cast<double>(work.num_sms)));
  // nearbyint: ties to even, as Python's round().
  const double exponent = std::max(0.0, std::nearbyint(local));
  partition.segment_chunks = int64_t{1} << static_cast<int64_t>(exponent);
  if (partition.segment_chunks >= chunks.longest)
    return declined(partition, cat("flashkda: max_local_chunks = 2^", exponent,
                                   " covers the longest sequence of ", chunks.longest, " chunks"));
  partition.on = true;
  partition.reasons.push_back(cat("flashkda: max_local_chunks = 2^round(log2(3 sqrt(", heads, " * ",
                                  chunks.total, " / ", work.num_sms,
                                  "))) = ", partition.segment_chunks, " chunks of 16 tokens"));
  return partition;
}

Partition cula_partition(const Workload& work) {
  constexpr int64_t kVBlocks = 2;
  constexpr int64_t kMinSubseqChunks = 16;
  constexpr int64_t kMinLongestChunks = 256;
  constexpr int64_t kMaxEffectiveHeads = 10;
  constexpr int64_t kChunksPerHead = 12;

  Partition partition;
  partition.chunk_tokens = 64;
  const ChunkCounts chunks = count_chunks(work, partition.chunk_tokens);
  const int64_t heads = work.num_value_heads;
  const auto num_sequences = static_cast<int64_t>(work.lengths.size());
  if (kVBlocks * heads * num_sequences >= work.num_sms)
    return declined(partition, cat("cula guard 0: 2 * H * N = ", kVBlocks * heads * num_sequences,
                                   " >= SMs = ", work.num_sms));
  if (chunks.longest < kMinLongestChunks)
    return declined(partition, cat("cula guard 1: longest sequence has ", chunks.longest,
                                   " chunks < ", kMinLongestChunks));
  if (chunks.total * heads > kMaxEffectiveHeads * chunks.longest)
    return declined(partition, cat("cula guard 2: Be * H = ", chunks.total, " / ", chunks.longest,
                                   " * ", heads, " > ", kMaxEffectiveHeads));
  const int64_t max_segments = work.num_sms / (kVBlocks * heads);
  if (chunks.longest < kChunksPerHead * heads * max_segments)
    return declined(partition,
                    cat("cula guard 3: expected segment ", chunks.longest, " / ", max_segments,
                        " < 12 * H = ", kChunksPerHead * heads, " chunks"));
  partition.segment_chunks = std::max(kMinSubseqChunks, ceil_div(chunks.longest, max_segments));
  int64_t split = 0;
  for (const int64_t tokens : work.lengths) {
    const int64_t segments =
        ceil_div(ceil_div(tokens, partition.chunk_tokens), partition.segment_chunks);
    if (segments > 1) split += segments;
  }
  if (split * kVBlocks * heads > work.num_sms)
    return declined(partition,
                    cat("cula guard 4: ", split, " segments * 2 * H > SMs = ", work.num_sms));
  partition.on = split > 1;
  partition.reasons.push_back(cat("cula: floor(SMs / (2 H)) = ", max_segments,
                                  " segments of at most ", partition.segment_chunks,
                                  " chunks of 64 tokens"));
  return partition;
}

Partition fixed_partition(const Workload& work, int64_t num_segments) {
  Partition partition;
  partition.chunk_tokens = kAutoChunk;
  const ChunkCounts chunks = count_chunks(work, partition.chunk_tokens);
  if (num_segments <= 1) return declined(partition, "one segment asked for");
  if (chunks.longest <= 1)
    return declined(partition, "no sequence is longer than one chunk of 64 tokens");
  partition.on = true;
  partition.segment_chunks = ceil_div(chunks.longest, num_segments);
  partition.reasons.push_back(
      cat(num_segments, " segments a sequence asked for (fewer where it has fewer chunks)"));
  return partition;
}

Partition best_partition(const Workload& work, const CutSearch& search, double* segmented_us) {
  static constexpr double kEven[] = {1};
  Partition partition;
  partition.chunk_tokens = kAutoChunk;
  const int64_t chunks = count_chunks(work, kAutoChunk).longest;
  const double whole = search.whole_us;
  if (whole < search.minimum_gain * search.least_us)
    return declined(partition, cat("auto: serial ", std::llround(whole),
                                   " us predicted, no segments take less than ",
                                   std::llround(search.least_us), " us"));
  if (!search.may_gain)
    return declined(partition, cat("auto: serial ", std::llround(whole),
                                   " us predicted, no cut of so many tokens gains"));
  const bool even = search.first_segments.empty();
  CutWalk walk{whole, search.minimum_step, search.patience};
  const auto most = static_cast<int>(std::min(kAutoMaxSegments, chunks));
  for (int segments = 2; segments <= most; ++segments) {
    if (walk.is_over(segments)) break;
    struct {
      double us = HUGE_VAL;
      CutLengths<int64_t> lengths;
    } least;
    for (const double first : even ? std::span<const double>(kEven) : search.first_segments) {
      const CutLengths<int64_t> lengths = cut_lengths<int64_t>(chunks, segments, first);
      const double us = search.time_us((even ? lengths.others : lengths.first) * kAutoChunk,
                                       lengths.others * kAutoChunk);
      if (us < least.us) least = {us, lengths};
    }
    if (!walk.take(segments, least.us)) continue;
    partition.segment_chunks = least.lengths.others;
    if (!even) partition.first_chunks = least.lengths.first;
  }
  double best = walk.best;
  if (walk.segments > 0 && search.refine) best = search.refine(chunks, best, &partition);
  if (walk.segments == 0 || whole < search.minimum_gain * best)
    return declined(partition,
                    cat("auto: serial ", std::llround(whole), " us predicted, segments would take ",
                        std::llround(best), " us"));
  partition.on = true;
  *segmented_us = best;
  partition.reasons.push_back(
      cat("auto: segments of ", partition.segment_chunks, " chunks of 64 tokens",
          partition.first_chunks > 0 ? cat(", first ones of ", partition.first_chunks) : "",
          partition.early_exit ? ", whose transitions stop where they are small" : "", ", ",
          std::llround(best), " us predicted against ", std::llround(whole), " us serial"));
  return partition;
}

int64_t num_segments_of(const Partition& partition, int64_t tokens, int64_t fixed_segments) {
  const int64_t chunks = ceil_div(tokens, partition.chunk_tokens);
  if (fixed_segments > 0) return fixed_segments_of(fixed_segments, chunks);
  return num_segments_of<int64_t>({partition.first_chunks, partition.segment_chunks}, chunks);
}

}  // namespace kda::plan
