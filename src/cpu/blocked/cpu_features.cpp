// SPDX-License-Identifier: Apache-2.0
// Instruction sets that the running CPU and its operating system support; compiled for the
// baseline.
#include "cpu/blocked/kernels.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kda::cpu::blocked {

#if defined(__x86_64__)
namespace {

/// Registers that the operating system keeps when it switches threads: bits of XCR0.
constexpr unsigned kSavesYmm = 0x06;
constexpr unsigned kSavesZmm = 0xe6;

struct Features {
  bool avx2 = false, avx512 = false;
};

unsigned saved_registers() noexcept {
  unsigned low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

/// Reads the processor's own words: __builtin_cpu_supports asks the compiler's runtime, and that of
/// some compilers says no to everything.
Features ask_cpu() noexcept {
  constexpr unsigned kLeaf1 = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C;
  constexpr unsigned kLeaf7 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  unsigned a = 0, b = 0, c = 0, d = 0;
  Features found;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kLeaf1) != kLeaf1) return found;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return found;
  const unsigned saved = saved_registers();
  found.avx2 = (saved & kSavesYmm) == kSavesYmm && (b & bit_AVX2) != 0;
  found.avx512 = found.avx2 && (saved & kSavesZmm) == kSavesZmm && (b & kLeaf7) == kLeaf7;
  return found;
}

/// Asked once: CPUID leaves a virtual machine, which takes longer than a head's decode.
const Features& features() noexcept {
  static const Features found = ask_cpu();
  return found;
}

}  // namespace

bool cpu_has_avx2() noexcept { return features().avx2; }
bool cpu_has_avx512() noexcept { return features().avx512; }
#else
bool cpu_has_avx2() noexcept { return false; }
bool cpu_has_avx512() noexcept { return false; }
#endif

}  // namespace kda::cpu::blocked
