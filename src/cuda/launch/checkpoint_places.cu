// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/checkpoint_places.hpp"

#include "cuda/launch/launch.cuh"
#include "cuda/tile/metadata.cuh"

namespace kda::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    places_kernel(const __grid_constant__ CheckpointPlacesArgs a) {
  const int64_t n = blockIdx.x, first = checkpoints_before(a.map, a.every, n);
  const TokenRange tokens = sequence_range(a.map, n);
  const int64_t count = (tokens.end - tokens.begin) / a.every, offset = a.offsets[n];
  const int32_t index = a.checkpoints.indices[n];
  const bool none = offset <= 0 || is_none(a.checkpoints, index);
  const bool bad = !none && (offset % a.every != 0 || offset > count * a.every);
  // A bad one is flagged by the kernel that finds its slot outside of the buffer.
  const int64_t due = none ? -1 : bad ? 0 : offset / a.every - 1;
  const int32_t slot = bad ? INT32_MAX : index;
  for (int64_t i = threadIdx.x; i < count; i += kThreads)
    a.places[first + i] = i == due ? slot : -1;
}

}  // namespace

Status launch_checkpoint_places(const CheckpointPlacesArgs& args, const Launch& launch) {
  return launch_kernel("checkpoint_places", places_kernel, args.map.num_sequences, kThreads, 0,
                       launch, args);
}

}  // namespace kda::cuda
