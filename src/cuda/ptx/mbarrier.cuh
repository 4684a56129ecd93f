// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory (sm_80), and copies by the hardware that arrive at them (sm_90).
#pragma once

#include <cstdint>

#include "cuda/ptx/bounded_wait.cuh"
#include "cuda/ptx/ptx.cuh"

namespace kda::cuda::ptx {

/// In shared memory. A phase is over when `arrivals` threads have arrived and all bytes expected of
/// it are there; then the next one begins.
struct Mbarrier {
  uint64_t state;
};

__device__ __forceinline__ void mbarrier_init(Mbarrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals)
               : "memory");
}
/// Called by the thread that initialised barriers, before others use them (after a barrier of the
/// block).
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(Mbarrier& barrier) {
  asm volatile("{.reg .b64 s; mbarrier.arrive.shared.b64 s, [%0];}" ::"r"(shared_address(&barrier))
               : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier& barrier, int bytes) {
  asm volatile("{.reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1;}" ::"r"(
                   shared_address(&barrier)),
               "r"(bytes)
               : "memory");
}
/// Arrives when all cp.async() of this thread so far are there.
__device__ __forceinline__ void mbarrier_arrive_after_copies(Mbarrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}
/// Waits until the phase of this parity (0 for the first) is over.
__device__ __forceinline__ void mbarrier_wait(Mbarrier& barrier, int parity) {
  const uint32_t address = shared_address(&barrier);
  const BoundedWait wait;
  uint32_t done = 0;
  while (!done) {
#if __CUDA_ARCH__ >= 900  // it sleeps for a while
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
    if (!done) __nanosleep(40);
#endif
    wait.turn();
  }
}

/// Orders what this thread wrote to shared memory before copies that are begun after it.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Starts a copy of `bytes`, a multiple of 16, from global to shared memory, both aligned to 16.
/// `barrier` expects them.
__device__ __forceinline__ void cp_async_bulk(void* target, const void* source, int bytes,
                                              Mbarrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(target)),
      "l"(source), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}

/// Starts a copy of `bytes`, a multiple of 16, from shared to global memory, both aligned to 16.
/// fence_async_proxy() of who wrote to shared memory comes before it.
__device__ __forceinline__ void cp_async_bulk_store(void* target, const void* source, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
               "r"(shared_address(source)), "r"(bytes)
               : "memory");
}
/// Waits until this thread's stores have read shared memory.
__device__ __forceinline__ void cp_async_bulk_wait_read() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

}  // namespace kda::cuda::ptx
