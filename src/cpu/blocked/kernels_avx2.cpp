// SPDX-License-Identifier: Apache-2.0
// The blocked backend's kernels for avx2; compiled with that instruction set (see CMakeLists.txt).
#include "cpu/blocked/kernels.hpp"

#if defined(__x86_64__)
#define KDA_ISA avx2
#include "cpu/blocked/simd_avx2.hpp"

// After the vocabulary it is written in.
#include "cpu/blocked/table.hpp"

namespace kda::cpu::blocked {

static constexpr Kernels kKernels = avx2::make_kernels("avx2");
const Kernels* avx2_kernels() noexcept { return &kKernels; }

}  // namespace kda::cpu::blocked
#else
namespace kda::cpu::blocked {

const Kernels* avx2_kernels() noexcept { return nullptr; }

}  // namespace kda::cpu::blocked
#endif
