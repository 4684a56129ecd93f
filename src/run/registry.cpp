// SPDX-License-Identifier: Apache-2.0
// The implementations of this build, best first, the reference last.
#include "cpu/blocked/blocked.hpp"
#include "cpu/oracle/implementation.hpp"
#include "cuda/host/fused.hpp"
#include "cuda/host/rows.hpp"
#include "stage/implementation.hpp"

namespace kda::stage {

std::span<const Implementation* const> registry() noexcept {
  static constexpr const Implementation* kRows[] = {
      &cpu::blocked::kAvx512, &cpu::blocked::kAvx2, &cpu::blocked::kPortable, &cpu::oracle::kOracle,
      &cuda::kFused,          &cuda::kStaged,       &cuda::kRecurrent,
  };
  return kRows;
}

}  // namespace kda::stage
