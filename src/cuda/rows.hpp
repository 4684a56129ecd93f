// SPDX-License-Identifier: Apache-2.0
// The rows of the CUDA backends in the registry. Each is in a backend.cpp; what they serve, how
// they plan and the memory they need is known in every build. A build without CUDA has rows that
// say so.
#pragma once

#include "registry/rows.hpp"

namespace kda::cuda {

/// One kernel for Hopper (sm_90a), bf16 or fp16, K = V = 64 or 128.
namespace fused {
extern const registry::ForwardRow kForward;
}  // namespace fused

/// One kernel for any card from sm_80 on, bf16 or fp16, K = V = 64 or 128.
namespace fused::portable {
extern const registry::ForwardRow kForward;
}  // namespace fused::portable

/// Gated DeltaNet on Hopper (sm_90a): one gate a head, bf16, K <= 128.
namespace gdn {
extern const registry::ForwardRow kForward;
extern const registry::BackwardRow kBackward;
}  // namespace gdn

/// Chunked, tensor cores, 16-bit q, k, v (the backward: bf16); K <= 128.
namespace staged {
extern const registry::ForwardRow kForward;
extern const registry::BackwardRow kBackward;
/// cuda.sm90.staged: rows in fp16 on Hopper (sm_90a), K = V = 128.
extern const registry::BackwardRow kFp16Backward;
}  // namespace staged

/// In fp32, token by token (the backward in chunks of 16): every problem; the only one for decode.
namespace recurrent {
extern const registry::ForwardRow kForward;
extern const registry::DecodeRow kDecode;
extern const registry::BackwardRow kBackward;
}  // namespace recurrent

/// The operations around KDA.
namespace layer {
extern const registry::LayerRow kLayer;
}  // namespace layer

}  // namespace kda::cuda
