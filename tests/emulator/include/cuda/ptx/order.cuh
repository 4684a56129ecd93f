// SPDX-License-Identifier: Apache-2.0
// src/cuda/ptx/order.cuh on the emulator: kernels run one after the other.
#pragma once

namespace kda::cuda::ptx {

inline void wait_for_launches_before() {}
inline void let_next_begin() {}

}  // namespace kda::cuda::ptx
