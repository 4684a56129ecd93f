// SPDX-License-Identifier: Apache-2.0
// Kernels of a stream one after the other, the next one launched early (Launch::pdl): its blocks
// begin as those of the one before end, or as soon as that one lets them.
#pragma once

namespace kda::cuda::ptx {

/// Waits until kernels before this one are done, and what they wrote is there.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900  // elsewhere nothing is launched early
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// The next kernel may begin, if it was launched early; it still waits for this one.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace kda::cuda::ptx
