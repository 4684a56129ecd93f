// SPDX-License-Identifier: Apache-2.0
// Which tokens a chunk of the batch holds.
#pragma once

#include "cuda/tile/chunk.hpp"
#include "cuda/tile/elements.cuh"

namespace kda::cuda {

struct ChunkTokens {
  int64_t sequence = 0;
  int64_t begin = 0;  ///< first token, flattened
  int64_t row = 0;    ///< the same, of its batch row
  int batch = 0;      ///< that row: the sequence, or 0 with cu_seqlens
  int count = 0;      ///< 1..64; 0: no such chunk
};

__device__ __forceinline__ int64_t chunks_of(int64_t tokens) {
  return (tokens + kChunk - 1) / kChunk;
}

/// Chunk `c` of the batch: arithmetic without cu_seqlens, else a binary search in chunk_offsets.
__device__ inline ChunkTokens chunk_tokens(const SequenceMap& map, unsigned c) {
  ChunkTokens chunk;
  int64_t end = map.num_tokens;
  if (!map.cu_seqlens) {
    chunk.batch = static_cast<int>(map.chunks.quotient(c));
    chunk.row = static_cast<int64_t>(map.chunks.remainder(c)) * kChunk;
    chunk.sequence = chunk.batch;
    chunk.begin = chunk.sequence * map.num_tokens + chunk.row;
  } else {
    if (c >= map.chunk_offsets[map.num_sequences]) return chunk;
    int64_t low = 0, high = map.num_sequences;  // offsets[low] <= c < offsets[high]
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (map.chunk_offsets[middle] <= c ? low : high) = middle;
    }
    const TokenRange tokens = sequence_range(map, low);
    chunk.sequence = low;
    chunk.begin = chunk.row = tokens.begin + (c - map.chunk_offsets[low]) * kChunk;
    end = tokens.end;
  }
  chunk.count = static_cast<int>(min(static_cast<int64_t>(kChunk), end - chunk.row));
  return chunk;
}

/// Offset of the first row of a chunk.
__device__ __forceinline__ int64_t chunk_offset(const RowView& view, const ChunkTokens& chunk,
                                                int64_t head) {
  return chunk.batch * view.stride_b + chunk.row * view.stride_t + head * view.stride_h;
}

/// First chunk of a span that begins at a chunk boundary of its sequence.
__device__ __forceinline__ int64_t first_chunk(const SequenceMap& map, const TokenRange& tokens) {
  const TokenRange whole = sequence_range(map, tokens.sequence);
  const int64_t before = map.cu_seqlens ? map.chunk_offsets[tokens.sequence]
                                        : tokens.sequence * chunks_of(map.num_tokens);
  return before + (tokens.begin - whole.begin) / kChunk;
}

}  // namespace kda::cuda
