// SPDX-License-Identifier: Apache-2.0
// The blocked backend's kernels for avx512; compiled with that instruction set (see
// CMakeLists.txt).
#include "cpu/blocked/kernels.hpp"

#if defined(__x86_64__)
#define KDA_ISA avx512
#include "cpu/blocked/simd_avx512.hpp"

// After the vocabulary it is written in.
#include "cpu/blocked/table.hpp"

namespace kda::cpu::blocked {

static constexpr Kernels kKernels = avx512::make_kernels("avx512");
const Kernels* avx512_kernels() noexcept { return &kKernels; }

}  // namespace kda::cpu::blocked
#else
namespace kda::cpu::blocked {

const Kernels* avx512_kernels() noexcept { return nullptr; }

}  // namespace kda::cpu::blocked
#endif
