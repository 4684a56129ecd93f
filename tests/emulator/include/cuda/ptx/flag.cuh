// SPDX-License-Identifier: Apache-2.0
// src/cuda/ptx/flag.cuh on the emulator: blocks run one after the other, so a flag that is waited
// for was raised by a block before, or never will be.
#pragma once

#include <cstdint>

namespace kda::cuda::ptx {

inline void raise_flag(uint32_t* flag) {
  *flag = 1;
  emulator::note_progress();
}
inline void wait_for_flag(const uint32_t* flag) {
  while (!*flag) emulator::wait_for("a flag of another block");
}

}  // namespace kda::cuda::ptx
