// SPDX-License-Identifier: Apache-2.0
// src/cuda/ptx/mbarrier.cuh on the emulator. A copy is done when somebody waits for its barrier:
// who reads without waiting finds what was there before.
#pragma once

#include "cuda/ptx/ptx.cuh"

namespace kda::cuda::ptx {

struct Mbarrier {
  uint64_t state;  // index of the emulator's own; shared memory that was not initialised has none
};

inline void mbarrier_init(Mbarrier& barrier, int arrivals) {
  barrier.state = emulator::mbarrier_init(arrivals);
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(Mbarrier& barrier) { emulator::mbarrier_arrive(barrier.state, 0); }
inline void mbarrier_arrive_expect_tx(Mbarrier& barrier, int bytes) {
  emulator::mbarrier_arrive(barrier.state, bytes);
}
inline void mbarrier_arrive_after_copies(Mbarrier& barrier) {
  emulator::mbarrier_arrive_after_copies(barrier.state);
}
inline void mbarrier_wait(Mbarrier& barrier, int parity) {
  emulator::mbarrier_wait(barrier.state, parity);
}
inline void fence_async_proxy() {}
inline void cp_async_bulk(void* target, const void* source, int bytes, Mbarrier& barrier) {
  emulator::cp_async_bulk(emulator::shared_pointer(shared_address(target)), source, bytes,
                          barrier.state);
}
inline void cp_async_bulk_store(void* target, const void* source, int bytes) {
  emulator::cp_async_bulk_store(target, source, bytes);
}
inline void cp_async_bulk_wait_read() {
  emulator::commit_copies();
  emulator::wait_copies(0);
}

}  // namespace kda::cuda::ptx
