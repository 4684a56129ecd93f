// SPDX-License-Identifier: Apache-2.0
// Blocks of a cluster (sm_90), which reach each other's shared memory. What lies in another block
// is named by what lies there in this one.
#pragma once

#include "cuda/ptx/mbarrier.cuh"

namespace kda::cuda::ptx {

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// Barrier of all threads of all blocks of the cluster.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

__device__ __forceinline__ uint32_t mapa(const void* pointer, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(pointer)), "r"(rank));
  return address;
}

/// Stores x where `target` lies in block `rank`.
__device__ __forceinline__ void st_cluster(const float* target, float x, int rank) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(mapa(target, rank)), "f"(x) : "memory");
}
/// At the barrier of block `rank`: what this thread wrote before is seen after
/// mbarrier_wait_cluster().
__device__ __forceinline__ void mbarrier_arrive_cluster(Mbarrier& barrier, int rank) {
  asm volatile(
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(mapa(&barrier, rank))
      : "memory");
}
__device__ __forceinline__ void mbarrier_wait_cluster(Mbarrier& barrier, int parity) {
  const BoundedWait wait;
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
        "selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(shared_address(&barrier)), "r"(parity)
        : "memory");
    wait.turn();
  }
}

/// Barriers of block `rank`; where they are is computed once.
class RemoteBarriers {
 public:
  __device__ __forceinline__ RemoteBarriers(Mbarrier* first, int rank)
      : first_(opaque(mapa(first, rank))) {}
  /// Orders reads before it; what this thread wrote need not be seen there.
  __device__ __forceinline__ void arrive(int i) const {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(
                     first_ + i * static_cast<uint32_t>(sizeof(Mbarrier)))
                 : "memory");
  }

 private:
  uint32_t first_;
  __device__ __forceinline__ static uint32_t opaque(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
  }
};
/// Starts a copy of `bytes`, a multiple of 16, from this block to where `target` lies in block
/// `rank`. The barrier there expects them.
__device__ __forceinline__ void cp_async_bulk_to_cluster(void* target, const void* source,
                                                         int bytes, Mbarrier& barrier, int rank) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(mapa(target, rank)),
      "r"(shared_address(source)), "r"(bytes), "r"(mapa(&barrier, rank))
      : "memory");
}

}  // namespace kda::cuda::ptx
