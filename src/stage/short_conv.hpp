// SPDX-License-Identifier: Apache-2.0
// Sequences of a call of the short convolution. Its contract is
// include/kda/short_conv.hpp.
#pragma once

#include "kda/short_conv.hpp"

namespace kda::stage {

inline constexpr int64_t kMaxConvWidth = 4;

inline int64_t num_sequences(const ShortConv& call) {
  return call.cu_seqlens ? call.num_sequences : call.batch;
}

inline int64_t length_entry(const ShortConv& call, int64_t n) {
  return call.cu_seqlens_dtype == DType::kInt64 ? static_cast<const int64_t*>(call.cu_seqlens)[n]
                                                : static_cast<const int32_t*>(call.cu_seqlens)[n];
}

/// The slot of sequence n, -1: none. On the host.
inline int64_t slot_of(const ShortConv& call, const ConvState& state, int64_t n) {
  if (!state.tensor.data) return -1;
  if (!state.indices) return n;
  return state.indices[n] < call.first_slot ? -1 : state.indices[n];
}

}  // namespace kda::stage
