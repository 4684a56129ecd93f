// SPDX-License-Identifier: Apache-2.0
// Which kernels this build has, and what those of sm_90a may take.
#pragma once

namespace kda::cuda {

/// `function` where this build has CUDA kernels, else null: rows of a build without CUDA are never
/// run, and link to nothing.
template <auto kFunction>
constexpr auto if_built() {
#ifdef KDA_NO_CUDA
  return decltype(kFunction){nullptr};
#else
  return kFunction;
#endif
}

}  // namespace kda::cuda

namespace kda::cuda::sm90 {

/// Whether this build has kernels of sm_90a, which run on devices of compute capability 9.0 only.
#ifdef KDA_WITH_SM90A
inline constexpr bool kBuilt = true;
#else
inline constexpr bool kBuilt = false;
#endif

inline constexpr int kSharedMemory = 227 * 1024;  ///< of a block

}  // namespace kda::cuda::sm90
