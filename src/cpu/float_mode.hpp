// SPDX-License-Identifier: Apache-2.0
// FloatMode: while it lives, this thread flushes subnormals to zero and rounds to nearest. A state
// that decays through the subnormal range would otherwise run more than ten times slower.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace kda::cpu {

class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(_mm_getcsr()) {
    constexpr unsigned kMaskAll = 0x1f80;
    constexpr unsigned kFlushToZero = 0x8000;
    constexpr unsigned kDenormalsAreZero = 0x0040;
    _mm_setcsr(kMaskAll | kFlushToZero | kDenormalsAreZero);
  }
  ~FloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    constexpr uint64_t kFlushToZero = uint64_t{1} << 24;
    asm volatile("msr fpcr, %0" : : "r"(kFlushToZero));
  }
  ~FloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_ = 0;
#else
  FloatMode() {}
  ~FloatMode() {}

 public:
#endif
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;
};

}  // namespace kda::cpu
