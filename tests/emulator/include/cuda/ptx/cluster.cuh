// SPDX-License-Identifier: Apache-2.0
// src/cuda/ptx/cluster.cuh on the emulator: the blocks of a cluster run together.
#pragma once

#include "cuda/ptx/mbarrier.cuh"

namespace kda::cuda::ptx {

inline int cluster_rank() { return emulator::cluster_rank(); }
inline void cluster_sync() { emulator::cluster_barrier(); }

template <class Object>
Object* in_block(Object& object, int rank) {
  return static_cast<Object*>(emulator::shared_pointer_in(shared_address(&object), rank));
}
inline void st_cluster(const float* target, float x, int rank) {
  *static_cast<float*>(emulator::shared_pointer_in(shared_address(target), rank)) = x;
}
inline void mbarrier_arrive_cluster(Mbarrier& barrier, int rank) {
  emulator::mbarrier_arrive(in_block(barrier, rank)->state, 0);
}
inline void mbarrier_wait_cluster(Mbarrier& barrier, int parity) { mbarrier_wait(barrier, parity); }
class RemoteBarriers {
 public:
  RemoteBarriers(Mbarrier* first, int rank) : first_(in_block(*first, rank)) {}
  void arrive(int i) const { emulator::mbarrier_arrive(first_[i].state, 0); }

 private:
  Mbarrier* first_;
};
inline void cp_async_bulk_to_cluster(void* target, const void* source, int bytes, Mbarrier& barrier,
                                     int rank) {
  emulator::cp_async_bulk(emulator::shared_pointer_in(shared_address(target), rank), source, bytes,
                          in_block(barrier, rank)->state);
}

}  // namespace kda::cuda::ptx
