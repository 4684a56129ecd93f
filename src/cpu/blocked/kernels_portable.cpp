// SPDX-License-Identifier: Apache-2.0
// The blocked backend's kernels for portable; compiled with that instruction set (see
// CMakeLists.txt).
#define KDA_ISA portable
#include "cpu/blocked/simd_portable.hpp"

// After the vocabulary it is written in.
#include "cpu/blocked/table.hpp"

namespace kda::cpu::blocked {

static constexpr Kernels kKernels = portable::make_kernels("portable");
const Kernels* portable_kernels() noexcept { return &kKernels; }

}  // namespace kda::cpu::blocked
