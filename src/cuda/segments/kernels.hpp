// SPDX-License-Identifier: Apache-2.0
// Which kernel merges segments.
#pragma once

#include "cuda/common/common.hpp"

namespace kda::cuda {

/// Whether segment_merge is Hopper's kernel, which the row of a backend and the launch ask.
inline bool merges_on_hopper(const DeviceFacts& device, int64_t key_dim) {
  return has_hopper_kernels(device) && (key_dim == 64 || key_dim == 128);
}

inline const char* merge_kernel(const DeviceFacts& device, int64_t key_dim) {
  return merges_on_hopper(device, key_dim) ? "segment_merge_sm90" : "segment_merge";
}

}  // namespace kda::cuda
