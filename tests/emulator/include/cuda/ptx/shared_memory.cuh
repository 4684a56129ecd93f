// SPDX-License-Identifier: Apache-2.0
// src/cuda/ptx/shared_memory.cuh on the emulator.
#pragma once

#include "cuda/ptx/ptx.cuh"

namespace kda::cuda::ptx {

inline void st_shared(uint32_t address, uint32_t x) {
  std::memcpy(emulator::shared_pointer(address, 4), &x, 4);
}
inline float4 ld_shared_v4(uint32_t address) {
  return *static_cast<const float4*>(emulator::shared_pointer(address, 16));
}

}  // namespace kda::cuda::ptx
