// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/sequence_map.cuh"

#include "cuda/launch/launch.cuh"
#include "cuda/ptx/pdl.cuh"
#include "cuda/tile/block_scan.cuh"
#include "cuda/tile/chunk.hpp"

namespace kda::cuda {
namespace {

constexpr int kWordsALaunch = 500;  // kernel parameters end at 4 KB
constexpr int kThreads = 256, kWarps = kThreads / 32;

struct UploadArgs {
  int64_t* target;
  int64_t count;
  int64_t words[kWordsALaunch];
};

__global__ void upload_kernel(const __grid_constant__ UploadArgs a) {
  ptx::griddepcontrol_launch_dependents();
  for (int64_t i = threadIdx.x; i < a.count; i += blockDim.x) a.target[i] = a.words[i];
}

__global__ void __launch_bounds__(kThreads)
    sequence_map_kernel(const __grid_constant__ SequenceMapArgs a) {
  __shared__ uint64_t sums[kWarps];
  const int t = static_cast<int>(threadIdx.x);
  const GivenOffsets offsets{a};
  if (blockIdx.x > 0) return offsets.zero_rest();
  ptx::griddepcontrol_launch_dependents();
  Mended mended;
  uint64_t all = 0;  // chunks
#pragma unroll 1
  for (int64_t i = t; i - t <= a.num_sequences; i += kThreads) {
    const MapEntry entry = offsets.entry(i, offsets.given(i), mended);
    const auto chunks = static_cast<uint64_t>((entry.end - entry.begin + kChunk - 1) / kChunk);
    const uint64_t of_warp = scan_warp(chunks, sums);
    __syncthreads();
    const Scan scanned = scan_block<kWarps>(of_warp, sums);
    if (i <= a.num_sequences) {
      a.cu_seqlens[i] = entry.end;
      a.chunk_offsets[i] = static_cast<int64_t>(all + scanned.before + chunks);
    }
    all += scanned.all;
  }
  if (t == 0) offsets.flag(!mended.any && offsets.has_all(a.num_sequences));
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
  return launch_kernel("sequence_map", sequence_map_kernel, 1 + args.rest_blocks, kThreads, 0,
                       launch, args);
}

}  // namespace kda::cuda
