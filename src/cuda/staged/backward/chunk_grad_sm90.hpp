// SPDX-License-Identifier: Apache-2.0
// Stage chunk_grad on Hopper, for K = V = 128 or 64: the sums of chunk_grad.hpp, those over the
// value heads of a q/k head, and back through norms, gates and steps (finish.hpp) without another
// pass.
#pragma once

#include "cuda/staged/backward/chunk_grad.hpp"

namespace kda::cuda {

/// With several value heads a q/k head the first launch keeps sums over those that a block has done
/// in `rows`: so many floats of each block, of which there are at most as many as chunks and q/k
/// heads. (The factors of these, over which the rows lie, take more.)
inline constexpr int64_t kHeadSums = 2 * 64 * 128;

/// fp16 operands: S0, E, dS and dZ, each times a power of two for every 16 columns of V.
inline constexpr int kOperandKinds = 4, kScaledColumns = 8;

struct FinishedGradArgs : ChunkGradArgs {
  RowView dq, dk, dg, dbeta;  ///< no base: not wanted
  RowView dv;                 ///< which is dZ; no base: not wanted, or the chains have stored it
  /// [chunk of the batch, HV, K + 1]: ddt_bias and dA_log of a chunk; null: not wanted.
  double* sums = nullptr;
  /// Workspace, kFallbackWords of each chunk and value head: which fall back to the second launch.
  uint32_t* fallback = nullptr;
  /// [chunk of the batch, HV, kOperandKinds, kScaledColumns], with fp16 operands: factors that take
  /// each 16 columns of V of h, errors, dh and dz back; 0 for zeros. Null: bf16, as they are.
  const float* scales = nullptr;
  /// Set by the launch.
  unsigned tiles = 0;       ///< chunks and value heads
  unsigned zero = 0;        ///< which the compiler does not know
  unsigned pair_tasks = 0;  ///< chunks and pairs of value heads
  Divisor pairs;            ///< of a chunk; the last may be one value head
};

/// Where the kernel has the gates of a chunk while it works on it, and dg.
enum class GradGates {
  kTiles,  ///< g, dg of bf16 with rows at multiples of 16 bytes, grouped heads: shared memory
  kRows,   ///< any g and dg with a gradient a channel: read and stored where they lie
  kHead,   ///< one gate a head: a number a token, and dg its sums over channels
};
/// A bounded gate from this on stays in the range of an anchor: 16 tokens decay by 2^-120 at most.
inline constexpr float kLeastFp16Bound = -5.19f;
/// The name of the first launch. `fp16`: rows and operands are.
constexpr const char* grad_kernel(GradGates gates, bool fp16) {
  return fp16                         ? "chunk_grad_sm90, fp16"
         : gates == GradGates::kTiles ? "chunk_grad_sm90"
         : gates == GradGates::kRows  ? "chunk_grad_sm90, gates by rows"
                                      : "chunk_grad_sm90, a gate a head";
}

namespace sm90 {

/// K = V = 128, or K = V = 64 and a value head a q/k head; q, k, d_o, dq, dk of bf16 with rows that
/// begin at multiples of 16 bytes, dv the same or none.
///
/// Two launches. Chunks fall back from the first whose decays go beyond the range of its anchors,
/// and those with plain betas near 0, to the second, which has the sums of the other GPUs' kernel.
/// `rows` is for these.
///
/// With `scales` q, k, d_o, dq, dk and dv, h, errors, dh and dz are in fp16: K = V = 128, gates
/// softplus, or bounded by at least kLeastFp16Bound, betas of a sigmoid, and a gradient a channel.
/// Sums over tokens are in tf32. No chunk falls back.
Status launch_chunk_grad(const HeadGates<FinishedGradArgs>& args, GradGates gates, int64_t num_sms,
                         const Launch& launch);

}  // namespace sm90
}  // namespace kda::cuda
