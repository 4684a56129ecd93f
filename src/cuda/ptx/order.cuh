// SPDX-License-Identifier: Apache-2.0
// Kernels of a stream one after the other, the next one launched early (Launch::early): its blocks
// begin as those of the one before end, or as soon as that one lets them.
#pragma once

namespace kda::cuda::ptx {

/// Until kernels before this one are done, and what they wrote is there.
__device__ __forceinline__ void wait_for_launches_before() {
#if __CUDA_ARCH__ >= 900  // elsewhere nothing is launched early
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// The next kernel may begin, if it was launched early; it still waits for this one.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace kda::cuda::ptx
