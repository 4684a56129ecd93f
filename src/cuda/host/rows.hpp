// SPDX-License-Identifier: Apache-2.0
// Registry rows of the CUDA backends. What they serve and the memory they need is known in every
// build (rows.cpp); the functions launch kernels, or say that there is no CUDA (no_cuda.cpp).
#pragma once

#include "stage/implementation.hpp"

namespace kda::cuda {

/// Chunked, tensor cores, 16-bit q, k, v; K <= 128.
extern const stage::Implementation kStaged;
/// Token by token in fp32: every problem; the only one for decode.
extern const stage::Implementation kRecurrent;

namespace staged {
Status forward(const stage::Forward& args);
Status segment_scan(const stage::SegmentScan& args);
Status chunk(const stage::Chunk& args);
}  // namespace staged

namespace recurrent {
Status forward(const stage::Forward& args);
Status decode(const stage::Decode& args);
Status segment_scan(const stage::SegmentScan& args);
}  // namespace recurrent

Status segment_merge(const stage::SegmentMerge& args);

/// Chunks of 64 tokens in the batch: exact with known lengths, else at most.
int64_t most_chunks(const Plan& plan);

}  // namespace kda::cuda
