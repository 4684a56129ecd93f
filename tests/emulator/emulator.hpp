// SPDX-License-Identifier: Apache-2.0
// CUDA kernels on the CPU, for machines without a GPU: the .cu files are compiled as C++, every
// thread of a block is a fiber, and whatever threads do together (shuffles, mma, barriers, copies)
// is done by the last of them to arrive. Blocks, or clusters of them, run one after the other. What
// it finds: wrong results, wrong indices, misaligned addresses, reads of what a copy still writes,
// barriers that do not match (a deadlock is reported). What it does not: races that need another
// order of instructions, and time.
//
// Included first in every kernel (-include). include/cuda/ptx/ replaces src/cuda/ptx/.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "recording.hpp"

#undef __global__
#undef __device__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#undef __cluster_dims__
#undef __align__
#define __global__
#define __device__
#define __shared__ static thread_local
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))

namespace emulator {

/// Runs body() once a thread of every block; while this host thread captures a graph, keeps it
/// instead.
void launch(dim3 grid, dim3 block, unsigned of_cluster, std::size_t shared_bytes,
            std::function<void()> body);

/// Launches kept between the two calls, to run again in order.
using Graph = std::vector<std::function<void()>>;
void begin_capture();
Graph end_capture();

/// All 32 lanes of a warp call it with the same `kind`; the last to come runs compute(in, out) on
/// the arrays of all lanes' pointers.
using Compute = void (*)(void* const* in, void* const* out);
void warp_collective(const char* kind, void* in, void* out, Compute compute);

/// `id` 0..15 for `threads` threads; those that only arrive do not wait.
void barrier(int id, int threads, bool wait);
bool block_or(bool value);

int cluster_rank();
void cluster_barrier();

unsigned char* dynamic_shared();
/// What has this offset in block `rank` of the cluster.
void* shared_pointer_in(uint32_t offset, int rank);
uint32_t shared_offset(const void* pointer);
void* shared_pointer(uint32_t offset, int alignment = 16);

void copy_async(void* target, const void* source, int bytes);
void commit_copies();
void wait_copies(int pending);

/// Barriers of ptx/mbarrier.cuh, by index within the block.
uint64_t mbarrier_init(int arrivals);
void mbarrier_arrive(uint64_t barrier, int expected_bytes);
/// This thread's copies without a group are the barrier's from here on.
void mbarrier_arrive_after_copies(uint64_t barrier);
void mbarrier_wait(uint64_t barrier, int parity);
void cp_async_bulk(void* target, const void* source, int bytes, uint64_t barrier);
/// To global memory: done when its thread waits for its group.
void cp_async_bulk_store(void* target, const void* source, int bytes);

/// Lets other threads run; `what` this one waits for, should there be a deadlock.
void wait_for(const char* what);
/// Something happened that another thread may wait for.
void note_progress();

}  // namespace emulator

// Indices of the thread that runs; set at every switch.
inline thread_local uint3 threadIdx, blockIdx;
inline thread_local dim3 blockDim, gridDim;

inline void __syncthreads() { emulator::barrier(0, static_cast<int>(blockDim.x), true); }
inline bool __any_sync(unsigned, int x) {
  int result = 0;
  emulator::warp_collective("vote", &x, &result, [](void* const* all, void* const* out) {
    int any = 0;
    for (int lane = 0; lane < 32; ++lane) any |= *static_cast<int*>(all[lane]) != 0;
    for (int lane = 0; lane < 32; ++lane) *static_cast<int*>(out[lane]) = any;
  });
  return result != 0;
}
inline unsigned __ballot_sync(unsigned, int x) {
  unsigned result = 0;
  emulator::warp_collective("ballot", &x, &result, [](void* const* all, void* const* out) {
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane)
      bits |= (*static_cast<int*>(all[lane]) != 0 ? 1U : 0U) << lane;
    for (int lane = 0; lane < 32; ++lane) *static_cast<unsigned*>(out[lane]) = bits;
  });
  return result;
}
inline bool __syncthreads_or(int x) { return emulator::block_or(x != 0); }
inline void __syncwarp() {
  emulator::warp_collective("syncwarp", nullptr, nullptr, [](void* const*, void* const*) {});
}
inline void __threadfence_block() {}

template <class T>
struct Shuffle {
  T value;
  int from;
};
template <class T>
T __shfl_sync(unsigned, T value, int from) {
  Shuffle<T> in{value, from};
  T result;
  emulator::warp_collective("shuffle", &in, &result, [](void* const* all, void* const* out) {
    for (int lane = 0; lane < 32; ++lane)
      *static_cast<T*>(out[lane]) =
          static_cast<Shuffle<T>*>(all[static_cast<Shuffle<T>*>(all[lane])->from % 32])->value;
  });
  return result;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  return __shfl_sync(mask, value, (static_cast<int>(threadIdx.x) % 32) ^ lane_mask);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, int delta) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return __shfl_sync(mask, value, lane < delta ? lane : lane - delta);
}
inline int __reduce_max_sync(unsigned mask, int x) {
  for (int step = 16; step > 0; step /= 2) x = std::max(x, __shfl_xor_sync(mask, x, step));
  return x;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

inline float __uint_as_float(uint32_t x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
/// Bytes of x (0 to 3) and y (4 to 7), one of each four bits of the selector.
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = uint64_t{y} << 32 | x;
  uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = selector >> (4 * i) & 7;
    bytes |= static_cast<uint32_t>(both >> (8 * byte) & 0xff) << (8 * i);
  }
  return bytes;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
T atomicAdd(T* target, T value) {
  const T old = *target;
  *target += value;
  return old;
}
template <class T>
T atomicMin(T* target, T value) {
  const T old = *target;
  *target = min(old, value);
  return old;
}
template <class T>
T atomicMax(T* target, T value) {
  const T old = *target;
  *target = max(old, value);
  return old;
}

namespace emulator {

template <class Args>
cudaError_t launch_named(const char* name, const cudaLaunchConfig_t* config, void (*kernel)(Args),
                         const Args& args) {
  if (Recording* recorded = recording()) {
    recorded->launches.push_back(
        {name, config->gridDim.x, config->blockDim.x, config->dynamicSmemBytes});
    return cudaSuccess;
  }
  unsigned of_cluster = 1;
  if constexpr (requires { args.cluster(); }) of_cluster = args.cluster();
  emulator::launch(config->gridDim, config->blockDim, of_cluster, config->dynamicSmemBytes,
                   [kernel, args] { kernel(args); });
  return cudaSuccess;
}

}  // namespace emulator

/// Its one caller, launch_kernel() of cuda/launch/launch.cuh, has the name of the kernel.
#define cudaLaunchKernelEx(config, kernel, args) emulator::launch_named(name, config, kernel, args)
template <class Args>
cudaError_t cudaFuncSetAttribute(void (*)(Args), cudaFuncAttribute, int) {
  return cudaSuccess;
}
