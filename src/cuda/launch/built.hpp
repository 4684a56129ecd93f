// SPDX-License-Identifier: Apache-2.0
// Whether the kernels of this folder are there, and what they may take.
#pragma once

namespace kda::cuda::sm90 {

/// Whether this build has kernels of sm_90a, which run on devices of compute capability 9.0 only.
#ifdef KDA_WITH_SM90A
inline constexpr bool kBuilt = true;
#else
inline constexpr bool kBuilt = false;
#endif

inline constexpr int kSharedMemory = 227 * 1024;  ///< of a block

}  // namespace kda::cuda::sm90
