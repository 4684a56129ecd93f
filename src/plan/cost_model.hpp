// SPDX-License-Identifier: Apache-2.0
// Predicted times of the staged GPU schedule (chunk_intra, then one chain of chunks a state tile)
// and of the forward in one kernel, from named constants measured on an H200 at K = V = 128, bf16;
// those of K = V = 64 come from an H100 (docs/planning.md).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace kda::plan {

/// A chain kernel: a block walks the chunks of one sequence or segment for 64 columns of a state.
struct ChainCosts {
  double few_ns;          ///< a token, while half of the SMs are idle
  double alone_ns;        ///< a token, in a block with an SM for itself
  double shared_ns;       ///< of SM time; blocks beside each other take turns
  int64_t blocks_per_sm;  ///< at once
  double fixed_us;        ///< launch, first loads, states in and out, of each round of blocks
};

/// One kernel: a cluster of SMs goes through the tokens of its share of sequences and value heads
/// (src/cuda/fused/scheduler.cuh).
struct OneKernelCosts {
  double few_ns;     ///< a token, while half of the SMs are idle
  double full_ns;    ///< a token
  double stream_us;  ///< a sequence and value head besides
  double fixed_us;   ///< launch, first loads, last stores
  double handed_us;  ///< where clusters hand states on: parts of streams, waits
  int64_t sms;       ///< of a cluster
};

/// Segments of the one kernel: their merge and correction, which are launched early.
struct OnePassCosts {
  double merge_step_us;            ///< S' = M S + B, of each round of blocks
  double correct_bytes_per_token;  ///< Qt and rests read, o read and written, a value head
  double correct_bandwidth;        ///< of the card's, that the correction reaches
  double correct_fixed_us;         ///< with the launches that segments add
  double minimum_step;             ///< of the time with fewer segments, for more of them
  int64_t memory_tokens;           ///< after which transitions that may stop do, as a rule
  double most_loss;                ///< of the time without, where none does
};

struct CostConstants {
  double bytes_per_token = 1282;  ///< q, k, v, o, g in bf16 and beta, a value head
  double intra_work_ns = 100;     ///< chunk_intra: SM time of a token and value head
  double intra_fixed_us = 8;
  ChainCosts forward{19.5, 22, 19.5, 2, 5};
  ChainCosts scan{13.5, 18, 10.2, 2, 3};
  double merge_step_us = 1.9;  ///< in stages: S' = M S + B, of each round of blocks
  int64_t merge_columns = 8;   ///< of a block
  int64_t merge_blocks_per_sm = 1;
  double merge_fixed_us = 4;             ///< with the launches that segments add
  double factor_bytes_per_token = 1396;  ///< that the forward reads and writes, a value head
  double factor_bandwidth = 0.93;        ///< of the card's, that it reaches
  OneKernelCosts one_kernel{33.9, 35.2, 2.6, 8.7, 5, 2};
  OnePassCosts one_pass{1.6, 832, 0.82, 6.5, 0.985, 8192, 1.2};
  double minimum_gain = 1.12;  ///< segments must win by this factor
  double minimum_step = 0.98;  ///< in stages: of the time with fewer segments, for more of them
};

/// The defaults are those of Hopper's own kernels. Others are measured on an H200 too: the few_ns
/// of their scan as if its blocks were wide.
inline CostConstants costs_of(int32_t compute_capability, int64_t key_dim) {
  CostConstants costs;
  if (key_dim <= 64) costs.one_kernel = {29.9, 33, 2.7, 8.7, 5, 1};
  if (compute_capability != 90) {
    costs.forward = {30.6, 38, 38.7, 2, 14};
    costs.scan = {25.5, 25.5, 18.5, 4, 6};
    costs.merge_step_us = 3.4, costs.merge_blocks_per_sm = 2, costs.merge_fixed_us = 7;
  }
  return costs;
}

struct CostInput {
  std::vector<int64_t> lengths;  ///< tokens of each sequence
  int64_t num_value_heads;
  int64_t key_dim, value_dim;
  int64_t num_sms;
  double bytes_per_second;
};

inline int64_t tiles_of(int64_t columns) { return (columns + 63) / 64; }
inline double rounds_of(double blocks, double at_once) { return std::ceil(blocks / at_once); }

inline double total_tokens(const CostInput& in) {
  double total = 0;
  for (const int64_t length : in.lengths) total += static_cast<double>(length);
  return total;
}

inline double roofline_us(const CostInput& in, const CostConstants& c) {
  const double rows = static_cast<double>(in.key_dim + in.value_dim) / 256;
  return total_tokens(in) * static_cast<double>(in.num_value_heads) * c.bytes_per_token * rows /
         in.bytes_per_second * 1e6;
}

/// Of the time at K = V = 128; at K = V = 64 six tenths of it were measured.
inline double intra_us(const CostInput& in, const CostConstants& c) {
  const double size = 0.2 + 0.8 * static_cast<double>(in.key_dim + in.value_dim) / 256;
  return total_tokens(in) * static_cast<double>(in.num_value_heads) /
             static_cast<double>(in.num_sms) * c.intra_work_ns * size * 1e-3 +
         c.intra_fixed_us;
}

/// `chains` chains of `total` tokens a value head, `tiles` blocks each: the longest chain, or all
/// of them in rounds of as many as fit, whichever is more.
inline double chains_us(const CostInput& in, const ChainCosts& c, double chains, double longest,
                        double total, int64_t tiles) {
  if (chains == 0) return 0;
  const auto sms = static_cast<double>(in.num_sms);
  const double blocks = chains * static_cast<double>(in.num_value_heads * tiles);
  const double at_once = sms * static_cast<double>(c.blocks_per_sm);
  const auto token_ns = [&](double of_blocks) {
    return 2 * blocks <= sms ? c.few_ns
                             : std::max(c.alone_ns, c.shared_ns * rounds_of(of_blocks, sms));
  };
  // Most of a chunk is latency: five sixths of the time at K = 64.
  const double size = (2 + static_cast<double>(in.key_dim) / 128) / 3;
  const double us_per_ns = size * 1e-3, mean = total / chains;
  const auto round_us = [&](double of_blocks) {
    return of_blocks > 0 ? mean * token_ns(of_blocks) * us_per_ns + c.fixed_us : 0;
  };
  const double full = std::floor(blocks / at_once);
  const double all = full * round_us(at_once) + round_us(blocks - full * at_once);
  // Blocks beside the longest one slow it down while they last.
  const double beside = std::min(mean, longest);
  const double one =
      (beside * token_ns(std::min(blocks, at_once)) + (longest - beside) * token_ns(1)) *
          us_per_ns +
      c.fixed_us;
  return std::max(one, all);
}

/// The chains of the forward, or what memory needs for their factors and outputs.
inline double forward_us(const CostInput& in, const CostConstants& c, double chains,
                         double longest) {
  const double size = static_cast<double>(in.key_dim + in.value_dim) / 256;
  const double memory = total_tokens(in) * static_cast<double>(in.num_value_heads) *
                        c.factor_bytes_per_token * size /
                        (c.factor_bandwidth * in.bytes_per_second) * 1e6;
  return std::max(
      memory, chains_us(in, c.forward, chains, longest, total_tokens(in), tiles_of(in.value_dim)));
}

inline double serial_us(const CostInput& in, const CostConstants& c) {
  const int64_t longest = *std::max_element(in.lengths.begin(), in.lengths.end());
  const double forward =
      forward_us(in, c, static_cast<double>(in.lengths.size()), static_cast<double>(longest));
  return std::max(roofline_us(in, c), intra_us(in, c) + forward);
}

inline double clusters_of(const CostInput& in, const OneKernelCosts& one) {
  return std::max(1.0, std::floor(static_cast<double>(in.num_sms) / static_cast<double>(one.sms)));
}

/// cuda.sm90.fused: every cluster has its share of all tokens and streams, none less than the
/// longest stream.
inline double one_kernel_us(const CostInput& in, const OneKernelCosts& one, double units,
                            double tokens, double longest) {
  const auto heads = static_cast<double>(in.num_value_heads);
  const double streams = units * heads;
  const double clusters = clusters_of(in, one);
  const double token_us = (2 * streams <= clusters ? one.few_ns : one.full_ns) * 1e-3;
  const double alone = longest * token_us + one.stream_us + one.fixed_us;
  if (streams <= clusters) return alone;
  const double shared =
      (tokens * heads * token_us + streams * one.stream_us) / clusters + one.fixed_us;
  return std::max(alone, shared) + one.handed_us;
}
inline double one_kernel_us(const CostInput& in, const CostConstants& c) {
  const auto longest = static_cast<double>(*std::max_element(in.lengths.begin(), in.lengths.end()));
  return std::max(roofline_us(in, c),
                  one_kernel_us(in, c.one_kernel, static_cast<double>(in.lengths.size()),
                                total_tokens(in), longest));
}

/// However it is cut: all tokens and streams, as if no cluster were ever idle.
inline double least_one_kernel_us(const CostInput& in, const CostConstants& c) {
  const OneKernelCosts& one = c.one_kernel;
  const auto sequences = std::count_if(in.lengths.begin(), in.lengths.end(),
                                       [](int64_t length) { return length > 0; });
  const double of_head =
      total_tokens(in) * one.few_ns * 1e-3 + static_cast<double>(sequences) * one.stream_us;
  const double clusters = clusters_of(in, one);
  return of_head * static_cast<double>(in.num_value_heads) / clusters + one.fixed_us;
}

/// What segments of at most `segment_tokens` behind first ones of `first_tokens` give.
struct Cut {
  double segments = 0, behind = 0, tokens_behind = 0;  ///< behind the first one of their sequence
  int64_t most = 1;                                    ///< of a sequence
};
inline Cut cut_of(const CostInput& in, int64_t first_tokens, int64_t segment_tokens) {
  Cut cut;
  for (const int64_t length : in.lengths) {
    const int64_t tokens_behind = std::max<int64_t>(0, length - first_tokens);
    const int64_t behind = (tokens_behind + segment_tokens - 1) / segment_tokens;
    cut.most = std::max(cut.most, behind + 1);
    cut.segments += static_cast<double>(behind + (length > 0));
    cut.behind += static_cast<double>(behind);
    cut.tokens_behind += static_cast<double>(tokens_behind);
  }
  return cut;
}

inline double merge_us(const CostInput& in, const CostConstants& c, int64_t steps, double step_us) {
  const double blocks =
      static_cast<double>(in.num_value_heads) *
      std::ceil(static_cast<double>(in.value_dim) / static_cast<double>(c.merge_columns));
  const double size = static_cast<double>(in.key_dim * in.key_dim) / (128.0 * 128.0);
  return static_cast<double>(steps) * step_us * size *
             rounds_of(blocks, static_cast<double>(in.num_sms * c.merge_blocks_per_sm)) +
         c.merge_fixed_us;
}

/// Scan, merge, forward with segments of at most `segment_tokens`.
inline double segmented_us(const CostInput& in, const CostConstants& c, int64_t segment_tokens) {
  const Cut cut = cut_of(in, segment_tokens, segment_tokens);
  const auto longest = static_cast<double>(segment_tokens);
  const double scan = chains_us(in, c.scan, cut.behind, longest, cut.tokens_behind,
                                tiles_of(in.value_dim) + tiles_of(in.key_dim));
  const double forward = forward_us(in, c, cut.segments, longest);
  return std::max(roofline_us(in, c), intra_us(in, c) + scan +
                                          merge_us(in, c, cut.most - 1, c.merge_step_us) + forward);
}

/// Merge, where a sequence has a third segment, and correction of so many tokens a value head.
inline double join_us(const CostInput& in, const CostConstants& c, const Cut& cut, double tokens) {
  const double size = static_cast<double>(in.value_dim) / 128;
  const double correct = tokens * static_cast<double>(in.num_value_heads) * size *
                             c.one_pass.correct_bytes_per_token /
                             (c.one_pass.correct_bandwidth * in.bytes_per_second) * 1e6 +
                         c.one_pass.correct_fixed_us;
  return correct + (cut.most > 2 ? merge_us(in, c, cut.most - 2, c.one_pass.merge_step_us) : 0);
}

/// One kernel, in one pass: transitions are streams of their own.
inline double one_pass_us(const CostInput& in, const CostConstants& c, int64_t first_tokens,
                          int64_t segment_tokens) {
  const Cut cut = cut_of(in, first_tokens, segment_tokens);
  const double streams = one_kernel_us(in, c.one_kernel, cut.segments + cut.behind,
                                       total_tokens(in) + cut.tokens_behind,
                                       static_cast<double>(std::max(first_tokens, segment_tokens)));
  return std::max(roofline_us(in, c), streams + join_us(in, c, cut, cut.tokens_behind));
}

/// The same with transitions after all else, a cluster each, that stop after `memory_tokens`.
/// Infinite where there are more of them than clusters.
inline double stopped_pass_us(const CostInput& in, const CostConstants& c, int64_t segment_tokens,
                              int64_t memory_tokens, int64_t norm_check_tokens) {
  const Cut cut = cut_of(in, segment_tokens, segment_tokens);
  const OneKernelCosts& one = c.one_kernel;
  if (cut.behind * static_cast<double>(in.num_value_heads) > clusters_of(in, one)) return HUGE_VAL;
  const auto run = static_cast<double>(std::min(segment_tokens, memory_tokens));
  const double streams =
      one_kernel_us(in, one, cut.segments, total_tokens(in), static_cast<double>(segment_tokens));
  const double transitions =
      run * one.full_ns * 1e-3 +
      std::ceil(run / static_cast<double>(norm_check_tokens)) * one.stream_us;
  const double tokens = std::min(cut.tokens_behind, cut.behind * run);
  return std::max(roofline_us(in, c), streams + transitions + join_us(in, c, cut, tokens));
}

}  // namespace kda::plan
