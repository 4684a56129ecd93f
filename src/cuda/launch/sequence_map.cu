// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/sequence_map.hpp"

#include "cuda/launch/launch.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda {
namespace {

constexpr int kWordsALaunch = 500;  // kernel parameters end at 4 KB
constexpr int kThreads = 256;

struct UploadArgs {
  int64_t* target;
  int64_t count;
  int64_t words[kWordsALaunch];
};

__global__ void upload_kernel(const __grid_constant__ UploadArgs a) {
  ptx::griddepcontrol_launch_dependents();
  for (int64_t i = threadIdx.x; i < a.count; i += blockDim.x) a.target[i] = a.words[i];
}

__global__ void __launch_bounds__(kThreads) sequence_map_kernel(const SequenceMapArgs a) {
  ptx::griddepcontrol_launch_dependents();
  __shared__ int64_t largest[kThreads], chunks[kThreads];
  const int t = threadIdx.x;
  const int64_t N = a.num_sequences;
  // Each thread owns a run of entries: running maximum first, so that clamping never overlaps.
  const int64_t run = (N + 1 + kThreads - 1) / kThreads;
  const int64_t begin = min(t * run, N + 1), end = min(begin + run, N + 1);
  const auto raw = [&](int64_t i) {
    return a.wide ? static_cast<const int64_t*>(a.raw)[i]
                  : static_cast<int64_t>(static_cast<const int32_t*>(a.raw)[i]);
  };
  const auto clamped = [&](int64_t i) { return max(int64_t{0}, min(raw(i), a.num_tokens)); };
  bool bad = t == 0 && (raw(0) != 0 || raw(N) != a.num_tokens);
  int64_t top = 0;
  for (int64_t i = begin; i < end; ++i) {
    bad |= raw(i) != clamped(i) || (i > 0 && raw(i) < raw(i - 1));
    top = max(top, clamped(i));
  }
  largest[t] = top;
  __syncthreads();
  int64_t floor = 0;
  for (int i = 0; i < t; ++i) floor = max(floor, largest[i]);
  int64_t count = 0, previous = floor;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t value = max(previous, clamped(i));
    a.cu_seqlens[i] = value;
    if (i > 0) count += (value - previous + kChunk - 1) / kChunk;  // chunks of sequence i - 1
    previous = value;
  }
  chunks[t] = count;
  const bool any_bad = __syncthreads_or(bad);
  int64_t offset = 0;
  for (int i = 0; i < t; ++i) offset += chunks[i];
  previous = floor;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t value = a.cu_seqlens[i];
    if (i > 0) offset += (value - previous + kChunk - 1) / kChunk;
    a.chunk_offsets[i] = offset;
    previous = value;
  }
  if (t == 0 && a.flags) *a.flags = any_bad ? kBadSequences : 0;
}

}  // namespace

Status launch_upload(int64_t* target, const WordPieces& words, const Launch& launch) {
  UploadArgs args{target, 0, {}};
  const auto send = [&] {
    Status status =
        launch_kernel("upload", upload_kernel, args.count > 0, kThreads, 0, launch, args);
    args.target += args.count;
    args.count = 0;
    return status;
  };
  for (int piece = 0; piece < words.pieces; ++piece)
    for (int64_t i = 0; i < words.count[piece]; ++i) {
      args.words[args.count++] = words.source[piece][i];
      if (args.count < kWordsALaunch) continue;
      if (Status status = send(); !status.ok()) return status;
    }
  return send();
}

Status launch_sequence_map(const SequenceMapArgs& args, const Launch& launch) {
  return launch_kernel("sequence_map", sequence_map_kernel, 1, kThreads, 0, launch, args);
}

}  // namespace kda::cuda
