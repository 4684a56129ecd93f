// SPDX-License-Identifier: Apache-2.0
// Zeros in the rows that belong to no sequence, or to one without a slot of its state. Where only
// the device knows cu_seqlens, the last offset may lie before the last token (a padded batch in a
// CUDA graph). Other kernels write rows of sequences alone; this one writes the rest.
#pragma once

#include <span>

#include "cuda/launch/launch.hpp"
#include "cuda/launch/written_tensor.hpp"
#include "cuda/tile/arguments.hpp"

namespace kda::registry {
struct WrittenRows;
}
namespace kda::stage {
struct Call;
}

namespace kda::cuda {

struct ZeroRowsArgs {
  static constexpr int kMost = 5;
  const void* lengths = nullptr;  ///< [N + 1] cu_seqlens on the device, of any values; null: B = N
  int32_t wide_lengths = 0;       ///< int64
  int64_t num_sequences = 0;      ///< N
  int64_t num_tokens = 0;         ///< T
  StateView states;               ///< a sequence without a slot has zeros; no indices: all have one
  WrittenTensor tensors[kMost];
  int count = 0;

  /// Left out where it has no memory or no elements.
  void add(const WrittenTensor& tensor) {
    if (tensor.base && tensor.heads > 0 && tensor.size > 0) tensors[count++] = tensor;
  }
};

/// Rows before the first offset, from the last one on, and of sequences without a slot. `blocks`:
/// at most.
Status launch_zero_rows(const ZeroRowsArgs& args, int64_t blocks, const Launch& launch);

/// DeviceChecks::zero_rows.
Status zero_rows(const stage::Call& call, std::span<const registry::WrittenRows> written);
/// Leaves out rows of no sequence: the map kernel of the call has zeroed them
/// (SequenceMapArgs::rest).
Status zero_rows_without_slot(const stage::Call& call,
                              std::span<const registry::WrittenRows> written);

}  // namespace kda::cuda
