// SPDX-License-Identifier: Apache-2.0
// Random tables of lengths, for kernels that cut as the planner does.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "core/layout.hpp"
#include "core/text.hpp"
#include "support/harness.hpp"

namespace kda::test {

/// KDA_TEST_TABLES: another number of tables.
inline int num_tables(int by_default) {
  const char* wanted = std::getenv("KDA_TEST_TABLES");
  return wanted ? std::atoi(wanted) : by_default;
}

/// A problem that the planner may cut, as far as a cut depends on it.
struct Table {
  std::vector<int64_t> cu_seqlens = {0};
  int64_t heads = 1, group = 1, dim = 128;  ///< group: value heads of a q/k head
  int32_t sms = 132, capability = 90;
  int64_t segments = 0;  ///< asked for; 0: as the planner likes
  bool batch_invariant = false, off = false;

  int64_t num_sequences() const { return static_cast<int64_t>(cu_seqlens.size()) - 1; }
  int64_t num_tokens() const { return cu_seqlens.back(); }
  void add(int64_t tokens) { cu_seqlens.push_back(cu_seqlens.back() + tokens); }

  Problem problem() const {
    Problem p;
    const int64_t T = num_tokens(), HV = heads * group;
    p.num_tokens = T, p.num_sequences = num_sequences();
    p.cu_seqlens = DType::kInt64;
    p.num_heads = heads, p.num_value_heads = HV;
    p.key_dim = p.value_dim = dim;
    p.q = p.k = contiguous(DType::kBFloat16, {1, T, heads, dim});
    p.v = p.g = p.o = contiguous(DType::kBFloat16, {1, T, HV, dim});
    p.beta = contiguous(DType::kBFloat16, {1, T, HV});
    p.batch_invariant = batch_invariant;
    if (batch_invariant || off) p.qk_l2norm = true, p.beta_mode = BetaMode::kSigmoid;
    return p;
  }
  std::string text() const {
    std::string text = cat("heads ", heads, " x ", group, ", K ", dim, ", SMs ", sms, ", sm_",
                           capability, ", segments ", segments, ", lengths");
    for (int64_t n = 0; n < std::min<int64_t>(num_sequences(), 12); ++n) {
      const auto at = static_cast<std::size_t>(n);
      text += cat(" ", cu_seqlens[at + 1] - cu_seqlens[at]);
    }
    return text;
  }
};

/// Lengths of a call, from short ones of a batch to one long document.
inline Table random_table(check::Random* random) {
  constexpr int64_t kHeads[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 40};
  Table table;
  table.heads = kHeads[random->below(10)];
  if (random->below(4) == 0) table.group = 1 + random->below(4);
  table.dim = random->below(3) == 0 ? 64 : 128;
  table.sms = static_cast<int32_t>(20 + random->below(141));
  if (random->below(3) == 0) table.capability = 80;
  if (random->below(8) == 0) table.segments = 2 + random->below(20);
  const int64_t count = random->below(4) == 0 ? 1 + random->below(200) : 1 + random->below(6);
  for (int64_t n = 0; n < count; ++n) {
    const double power = random->uniform() * (n == 0 ? 18 : 13);
    table.add(random->below(8) == 0 ? random->below(2) : static_cast<int64_t>(std::exp2(power)));
  }
  if (table.num_tokens() == 0) table.add(1);
  return table;
}

}  // namespace kda::test
