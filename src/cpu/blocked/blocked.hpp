// SPDX-License-Identifier: Apache-2.0
// The blocked CPU backend: chunks of 8 tokens, state blocks in the L1 cache, one registry row per
// instruction set. Results do not depend on the number of threads.
#pragma once

#include "cpu/blocked/kernels.hpp"
#include "registry/rows.hpp"
#include "stage/backward.hpp"

namespace kda::cpu::blocked {

std::size_t scratch_bytes(const Problem& problem, int32_t num_threads);

Status forward(const Kernels& kernels, const stage::Forward& args);
Status decode(const Kernels& kernels, const stage::Decode& args);
/// Calls with a tail, of both operations.
std::size_t tail_scratch_bytes(const Problem& problem, int32_t num_threads);
Status tail_call(const Kernels& kernels, const stage::Call& call);

Status segment_scan(const Kernels& kernels, const stage::SegmentScan& args);
Status segment_merge(const Kernels& kernels, const stage::SegmentMerge& args);
Status segment_correct(const Kernels& kernels, const stage::SegmentCorrect& args);
Status span_maps(const Kernels& kernels, const stage::SpanMapsCall& args);
Status fold_states(const Kernels& kernels, const StateFold& fold);

/// Sequences are taken in so many runs at most: sums for dA_log and ddt_bias are kept for each.
inline constexpr int64_t kMaxRuns = 1024;
/// `kept_every`: of the states that a forward kept; 0: none.
std::size_t backward_scratch_bytes(const Plan& plan, int64_t kept_every);
Status backward(const Kernels& kernels, const stage::Backward& args);

extern const registry::ForwardRow kAvx512Forward, kAvx2Forward, kPortableForward;
extern const registry::DecodeRow kAvx512Decode, kAvx2Decode, kPortableDecode;
extern const registry::BackwardRow kAvx512Backward, kAvx2Backward, kPortableBackward;

/// The fastest table that this CPU can run.
const Kernels& best_kernels() noexcept;

}  // namespace kda::cpu::blocked
