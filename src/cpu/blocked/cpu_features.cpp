// SPDX-License-Identifier: Apache-2.0
// What the running CPU and its operating system support; compiled for the baseline.
#include "cpu/blocked/kernels.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kda::cpu::blocked {

#if defined(__x86_64__)
namespace {

/// Clang 14 does not know this feature's name.
bool cpu_has_f16c() noexcept {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

}  // namespace

bool cpu_has_avx2() noexcept {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c();
}
bool cpu_has_avx512() noexcept {
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#else
bool cpu_has_avx2() noexcept { return false; }
bool cpu_has_avx512() noexcept { return false; }
#endif

}  // namespace kda::cpu::blocked
