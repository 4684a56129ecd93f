// SPDX-License-Identifier: Apache-2.0
// Sequences: where each sequence begins and ends, in flattened [B * T] tokens, without a copy.
#pragma once

#include <cstdint>
#include <span>

#include "kda/problem.hpp"

namespace kda::stage {

class Sequences {
 public:
  /// `host`: [N + 1] or empty. `raw`: the caller's cu_seqlens, used when `host` is empty and the
  /// problem has cu_seqlens. Otherwise every sequence has T tokens.
  Sequences(const Problem& problem, std::span<const int64_t> host, const void* raw)
      : num_tokens_(problem.num_tokens),
        count_(problem.num_sequences),
        host_(host),
        raw_(problem.cu_seqlens ? raw : nullptr),
        wide_(problem.cu_seqlens == DType::kInt64) {}

  int64_t count() const { return count_; }
  int64_t begin(int64_t n) const {
    if (!host_.empty()) return host_[static_cast<std::size_t>(n)];
    if (!raw_) return n * num_tokens_;
    return wide_ ? static_cast<const int64_t*>(raw_)[n] : static_cast<const int32_t*>(raw_)[n];
  }
  int64_t end(int64_t n) const { return begin(n + 1); }
  int64_t length(int64_t n) const { return end(n) - begin(n); }
  /// How many states the sequences before n have, one every `every` tokens.
  int64_t states_before(int64_t n, int64_t every) const {
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) count += length(i) / every;
    return count;
  }

 private:
  int64_t num_tokens_;
  int64_t count_;
  std::span<const int64_t> host_;
  const void* raw_;
  bool wide_;
};

}  // namespace kda::stage
