// SPDX-License-Identifier: Apache-2.0
// src/cuda/ptx/pdl.cuh on the emulator: kernels run one after the other.
#pragma once

namespace kda::cuda::ptx {

inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

}  // namespace kda::cuda::ptx
