// SPDX-License-Identifier: Apache-2.0
// Kernels of a stream one after the other, the next one launched early (Launch::early): its blocks
// begin where blocks of the one before have ended, or all of them let it.
#pragma once

namespace kda::cuda::ptx {

/// Until kernels before this one are done, and what they wrote is there.
__device__ __forceinline__ void wait_for_launches_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
/// From now on blocks of the next kernel take what room there is.
__device__ __forceinline__ void let_launches_after_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace kda::cuda::ptx
