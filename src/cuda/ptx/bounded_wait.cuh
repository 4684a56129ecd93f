// SPDX-License-Identifier: Apache-2.0
// Waits for other threads, blocks or copies.
#pragma once

#include <cstdint>

namespace kda::cuda::ptx {

/// Made before a loop that waits, and asked in every turn of it. With KDA_BOUNDED_WAITS (debug
/// builds) a wait of some 20 seconds ends the kernel with an error instead of hanging; else it is
/// nothing.
class BoundedWait {
 public:
#ifdef KDA_BOUNDED_WAITS
  __device__ __forceinline__ void turn() const {
    constexpr int64_t kMostCycles = 40'000'000'000;
    if (clock64() - begin_ > kMostCycles) __trap();
  }

 private:
  int64_t begin_ = clock64();
#else
  __device__ __forceinline__ void turn() const {}
#endif
};

}  // namespace kda::cuda::ptx
