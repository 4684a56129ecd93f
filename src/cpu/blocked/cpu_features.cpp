// SPDX-License-Identifier: Apache-2.0
// What the running CPU and its operating system support; compiled for the baseline.
#include "cpu/blocked/kernels.hpp"

namespace kda::cpu::blocked {

#if defined(__x86_64__)
bool cpu_has_avx2() noexcept {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
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
