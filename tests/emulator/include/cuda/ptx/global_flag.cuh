// SPDX-License-Identifier: Apache-2.0
// src/cuda/ptx/global_flag.cuh on the emulator: blocks run one after the other, so a flag that is
// waited for was raised by a block before, or never will be.
#pragma once

#include <cstdint>

namespace kda::cuda::ptx {

inline void st_release(uint64_t* flag, uint64_t key) {
  *flag = key;
  emulator::note_progress();
}
inline void wait_ld_acquire(const uint64_t* flag, uint64_t key) {
  while (*flag != key) emulator::wait_for("a flag of another block");
}

}  // namespace kda::cuda::ptx
