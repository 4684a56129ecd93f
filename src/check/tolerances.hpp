// SPDX-License-Identifier: Apache-2.0
// Every tolerance of libkda. Errors are measured per (sequence, value head) as
//   |x - ref|_2 / max(|ref|_2, 1e-3 magnitude)     (compare.hpp, docs/accuracy.md)
// Loosening one needs a CHANGELOG line.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kda::check {

/// The metric's floor, of the magnitude.
inline constexpr double kCancellation = 1e-3;
/// fp32 arithmetic, fp32 stored: worst head of any problem.
inline constexpr double kFp32Worst = 1e-5;
/// and the median over heads.
inline constexpr double kFp32Median = 1e-6;
/// A result of a few values can cancel down to the metric's floor, 1e-3 of its magnitude, where
/// fp32 holds no more digits than this (K = V = 1: S = (1 - beta k^2) S0 + beta k v is one number).
inline constexpr double kFp32FewValues = 1e-4;
inline constexpr int64_t kFewValues = 16;
/// Two kinds of gradients may have more error; kda_fuzz backward counts those that need it, and
/// docs/accuracy.md says how many they are. With one or two channels the state is a product of
/// factors 1 - beta k^2, which may nearly cancel in every value alike.
inline constexpr int64_t kFewChannels = 2;
inline constexpr double kFewChannelsGradient = kFp32FewValues;
/// The other kind: terms that cancel below this share of their magnitude, where fp32 loses two
/// digits or more (a key of zeros: its norm multiplies the gradient by 1,000). They may have so
/// much of their magnitude more.
inline constexpr double kCancelled = 1e-2;
inline constexpr double kCancelledRounding = 1e-7;
inline constexpr double kMostExcepted = 0.01;  ///< of the problems
/// beta > 1.9 with repeated keys and next to no decay: every step nearly reflects the error of the
/// one before, and the fp32 rounding of the normalised key (6e-8) adds up over equal keys. A plain
/// serial fp32 loop loses as much (docs/accuracy.md); few values may cancel on top of it.
inline constexpr double kMarginalPerToken = 1e-7;
inline constexpr double kMarginalWorst = 1e-4;

/// Allowed error of one head. `rounding`: the error of the oracle's own result once it is stored in
/// the output's type (0 for fp32; about 1.66e-3 for bf16, 2.07e-4 for fp16 over many values, up to
/// 2^-8 and 2^-11 over few). Element by element, |round(y) - ref| <= |round(ref) - ref| + 2 |y -
/// ref|, so nothing but one rounding and fp32 arithmetic fits in. `values`: in the output of the
/// head.
inline double forward_tolerance(double rounding, int64_t values, int64_t tokens, bool marginal) {
  double arithmetic = values < kFewValues ? kFp32FewValues : kFp32Worst;
  if (marginal)
    arithmetic = std::max(kMarginalWorst, kMarginalPerToken * static_cast<double>(tokens));
  return rounding > 0 ? rounding + 2 * arithmetic : arithmetic;
}

/// Pipelines whose matrix products take 16-bit operands (cuda.sm80.staged, cuda.sm90.fused,
/// cuda.sm90.gdn): the rounding of every factor and of the state as an operand comes on top of the
/// output's (docs/accuracy.md).
inline constexpr double kBf16Operands = 8e-3;
inline constexpr double kFp16Operands = 1e-3;
/// beta near 2 on equal keys: the entries of T' are near 2 and alternate, so that what its rounding
/// leaves does not cancel where the sums do. 256 problems of 64 to 2000 tokens on an H200: up to 40
/// times at K = V = 64, 21 times at 128 (docs/accuracy.md).
inline constexpr double kMarginalOperands = 48;
/// A head of few values, such as two tokens of 128 channels, averages fewer roundings.
inline constexpr double kFewOperands = 2;
inline constexpr int64_t kFewOperandValues = 256;

/// Error that 16-bit operands may add; `half`: fp16.
inline double operand_tolerance(bool half, int64_t values, bool marginal) {
  const double one = half ? kFp16Operands : kBf16Operands;
  return one * (marginal ? kMarginalOperands : 1) *
         (values <= kFewOperandValues ? kFewOperands : 1);
}

/// Gradients of cuda.sm80.staged, whose products take bf16 operands: the error over all heads of a
/// problem of some hundred tokens without equal keys, stored in bf16 or not, and that of one head
/// where its terms do not cancel. In one head roundings average less. That of d_initial_state is
/// what 12 heads with slow gates needed on an H200, 2.75e-3, and a little more.
struct GradientBound {
  const char* name;
  double all_heads, one_head;
};
inline constexpr GradientBound kBf16Gradients[] = {
    {"dq", 4.2e-3, 1.3e-2},       {"dk", 4.2e-3, 1.3e-2},
    {"dv", 4.0e-3, 1.2e-2},       {"dg", 4.8e-3, 1.5e-2},
    {"dbeta", 4.8e-3, 1.5e-2},    {"dA_log", 5.0e-3, 1.5e-2},
    {"ddt_bias", 4.0e-3, 1.2e-2}, {"d_initial_state", 2.9e-3, 1.3e-2}};
/// Bounds where the chains have fp16 operands: K = V = 128 on Hopper. Sums of a parameter are as
/// above.
inline constexpr GradientBound kFp16ChainGradients[] = {
    {"dq", 3.5e-3, 1.3e-2}, {"dk", 3.5e-3, 1.3e-2},    {"dv", 2.4e-3, 1.2e-2},
    {"dg", 4.0e-3, 1.5e-2}, {"dbeta", 3.6e-3, 1.5e-2}, {"d_initial_state", 1.0e-3, 1.3e-2}};
/// Bounds over all heads for rows in fp16, whose products take fp16 or tf32: K = V = 128 on Hopper.
/// One head has kFp16RowsShare of the bounds above.
inline constexpr GradientBound kFp16RowGradients[] = {
    {"dq", 0.6e-3, 0}, {"dk", 0.6e-3, 0},    {"dv", 0.6e-3, 0},
    {"dg", 1.0e-3, 0}, {"dbeta", 0.6e-3, 0}, {"ddt_bias", 1.0e-3, 0}};
inline constexpr double kFp16RowsShare = 0.15;
/// The share of their magnitude that roundings leave of terms that cancel.
inline constexpr double kCancelledOperands = 0.1;

/// The gradient of an initial state that strong gates leave below this share of d_final_state. What
/// is left came from token to token through the scores of some keys: a matrix of rank one, whose
/// values have these scores as common factors. So their errors do not average, and they add up
/// from token to token. A score is a sum over a few channels, which may cancel; its operands and
/// their decays are rounded to bf16. Of 2,500 heads of 12 to 32 tokens one in 65 had an error above
/// 2.4e-2, one in 1,000 above 9.8e-2, and the worst had 1.6e-1 (docs/log/2026-11.md).
inline constexpr double kDecayed = 1e-6;
inline constexpr double kDecayedOperands = 16;

/// Error that bf16 operands may add to a gradient of one head; `left`: |reference| / |magnitude|.
inline double gradient_operand_tolerance(double one_head, double left, int64_t values,
                                         bool marginal, bool decayed) {
  return one_head * (marginal ? kMarginalOperands : 1) * (decayed ? kDecayedOperands : 1) *
         (values <= kFewOperandValues ? kFewOperands : 1) *
         std::max(1.0, kCancelledOperands / std::max(left, kCancellation));
}

/// The published figure for bf16 outputs of at least so many values a head.
inline constexpr double kBf16Output = 1.8e-3;
inline constexpr int64_t kManyValues = 16384;

/// Context parallelism: error relative to the serial run's.
inline constexpr double kSegmented16BitRatio = 1.1;
inline constexpr double kSegmentedFp32Ratio = 2.0;

}  // namespace kda::check
