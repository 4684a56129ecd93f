// SPDX-License-Identifier: Apache-2.0
// Which kernels a staged backward launches: decided once, from its plan and the gradients wanted.
// The plan lists them, its costs and its launches read them.
#pragma once

#include <string>

#include "cuda/staged/backward/chunk_grad_sm90.hpp"
#include "cuda/staged/kernels.hpp"

namespace kda::cuda::staged {

struct BackwardKernels {
  /// From left to right the states and errors, from right to left dS and dZ.
  enum class Chains {
    kPortable,   ///< a launch each: chunk_delta_h_errors_sm80.cu, reverse.cu
    kWgmma,      ///< one launch: chains_sm90.cu, factors in bf16
    kWgmmaFp16,  ///< the same with factors in fp16
  };
  /// chunk_grad.
  enum class Grad {
    kNone,      ///< no gradient is wanted that tokens have from states and errors
    kPortable,  ///< chunk_grad.cu, and finish.cu for norms, gates, steps
    kHopper,    ///< chunk_grad_sm90.cu, which finishes them itself
  };

  Chains chains = Chains::kPortable;
  Grad grad = Grad::kNone;
  GradGates grad_gates = GradGates::kTiles;  ///< of kHopper
  bool errors = false;  ///< states and errors are made, or flags are to be written by their chains
  bool grad_stores_dv = false;  ///< chunk_grad stores dv, which is dZ; else the chains do
  bool parameters = false;      ///< dA_log or ddt_bias is wanted
  bool fp16_rows = false;       ///< q, k, v, d_o, and all that chains hand to chunk_grad
  bool may_fall_back = false;   ///< kWgmmaFp16: a second launch may redo chains with bf16 factors
  bool merge_hopper = false;    ///< segment_merge_sm90.cu
  /// Both merges of segments in a launch. A call in two phases needs them apart.
  bool one_merge = false;
  ChainKernel scan;  ///< of segments
  /// Portable chains have 32 columns of V a block in a group of at most so many value heads, and 64
  /// in a larger one; the same of the scan.
  int64_t narrow_heads = 0, narrow_scan_heads = 0;

  bool on_hopper() const { return chains != Chains::kPortable; }
};

/// Why factors of chains cannot be in fp16; empty if they can.
std::string decline_fp16_factors(const Problem& p);

/// Rows of this type at multiples of 16 bytes, as the caller states it; so are those of no tensor.
bool has_whole_rows(const TensorDesc& desc, DType type);
bool has_whole_rows(const std::optional<TensorDesc>& desc, DType type);

/// Pure: the same answer for the plan's texts, its costs and its launches.
BackwardKernels kernels_of(const Plan& plan, const Gradients& gradients);

/// Kernels of segments in a plan whose sequences a kernel cuts, where `whole` are those of
/// sequences that are not cut. Segments fill the card: no block of portable chains is narrow.
BackwardKernels kernels_of_cut(const BackwardKernels& whole);

/// Whether Hopper's chunk_grad has kernels of these sizes.
inline bool has_hopper_grad(int64_t key_dim, int64_t value_dim, int64_t value_heads_of_each) {
  return key_dim == value_dim && (key_dim == 128 || (key_dim == 64 && value_heads_of_each == 1));
}

/// Whether its blocks, which take all value heads of a q/k head and chunk in turn, `units` of them,
/// end before the portable kernel, which has a block for each value head and needs 2.9 times the
/// time of an SM. Up to four turns take less than one of its blocks.
inline bool has_units_enough(int64_t units, int64_t value_heads_of_each, int64_t num_sms) {
  return value_heads_of_each <= 4 || 3 * units >= num_sms;
}

/// Adds stages and kernels to the plan, in the order of the launches of a group of heads.
void list_backward(plan::PlanBuilder& builder, const BackwardKernels& kernels);

}  // namespace kda::cuda::staged
