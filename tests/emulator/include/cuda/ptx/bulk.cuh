// SPDX-License-Identifier: Apache-2.0
// src/cuda/ptx/bulk.cuh on the emulator. A copy is done at once; its barrier counts it all the
// same.
#pragma once

#include "emulator.hpp"

#define KDA_BULK_COPIES 1

namespace kda::cuda::ptx {

struct EmulatedBarrier {
  uint32_t phase : 1;
  uint32_t count : 15;
  uint32_t pending : 16;
  int32_t bytes;
};
static_assert(sizeof(EmulatedBarrier) == 8);

inline EmulatedBarrier& barrier_at(uint32_t barrier) {
  return *static_cast<EmulatedBarrier*>(emulator::shared_pointer(barrier));
}
inline void complete_if_due(EmulatedBarrier& b) {
  if (b.pending > 0 || b.bytes != 0) return;
  b.phase ^= 1;
  b.pending = b.count;
  emulator::note_progress();
}

inline void barrier_init(uint32_t barrier, uint32_t count) {
  barrier_at(barrier) = {0, count & 0x7fff, count & 0xffff, 0};
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint32_t barrier) {
  EmulatedBarrier& b = barrier_at(barrier);
  --b.pending;
  complete_if_due(b);
}
inline void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  EmulatedBarrier& b = barrier_at(barrier);
  b.bytes += static_cast<int32_t>(bytes);
  --b.pending;
  complete_if_due(b);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  while (barrier_at(barrier).phase == parity) emulator::wait_for("a barrier in shared memory");
}
inline void bulk_load(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
  std::memcpy(emulator::shared_pointer(target), source, bytes);
  EmulatedBarrier& b = barrier_at(barrier);
  b.bytes -= static_cast<int32_t>(bytes);
  complete_if_due(b);
}

}  // namespace kda::cuda::ptx
