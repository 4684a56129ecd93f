// SPDX-License-Identifier: Apache-2.0
// Kernels of a stream one after the other, the next one launched early (Launch::early): its blocks
// begin as those of the one before end.
#pragma once

namespace kda::cuda::ptx {

/// Until kernels before this one are done, and what they wrote is there.
__device__ __forceinline__ void wait_for_launches_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace kda::cuda::ptx
