// SPDX-License-Identifier: Apache-2.0
// Parts of a plan that CUDA backends make alike.
#pragma once

#include "plan/builder.hpp"
#include "registry/rows.hpp"

namespace kda::cuda {

inline constexpr const char* kNoSm90a = "this build has no kernels of sm_90a";

namespace sm90 {
/// Null if kernels of sm_90a can be used here, else why not.
const char* unavailable() noexcept;
}  // namespace sm90

/// Whether kernels of sm_90a run on a device. A build without CUDA launches nothing, and plans as
/// one that has them.
bool has_hopper_kernels(const DeviceFacts& device);

/// Shared memory that a block may have on cards of a compute capability: CUDA C++ Programming
/// Guide, technical specifications. A capability that is not known there has the least.
constexpr int64_t block_shared_bytes(int32_t capability) {
  const bool largest = capability / 10 == 9 || capability / 10 == 10;
  const bool large = capability == 80 || capability == 87;
  return int64_t{largest ? 227 : large ? 163 : 99} * 1024;
}

/// Empty if `desc` is aligned to `needed` bytes.
std::string decline_alignment(const char* name, const TensorDesc& desc, int64_t needed);

/// Whether kernels flag bad metadata, which the host cannot look at.
bool has_device_flags(const Plan& plan);

/// Books the maps of sequences and segments, and the flags of bad metadata.
void book_maps(plan::PlanBuilder& builder);

/// Where dt_bias has one bias a head, for kernels of `stage` that read one a channel: books the
/// rows and lists the kernel that fills them (cuda/launch/head_bias.hpp).
void plan_expand_bias(plan::PlanBuilder& builder, const char* stage);
/// Lists the kernel that adds up their gradient, if it is wanted a head.
void list_sum_bias(plan::PlanBuilder& builder, const char* stage);

/// Parts of V: each of two goes to an SM of its own while that fills idle ones.
int64_t v_splits(const Plan& plan);

/// Chunks of 64 tokens in the batch at most, by tokens and sequences alone.
int64_t bound_of_chunks(const Problem& p);
/// As many as there are with known lengths, else at most.
int64_t most_chunks(const Plan& plan);

extern const registry::DeviceChecks kDeviceChecks;

}  // namespace kda::cuda
