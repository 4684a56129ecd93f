// SPDX-License-Identifier: Apache-2.0
// generate(): random inputs of every gate regime, the same on every machine for a seed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check/inputs.hpp"

namespace kda::check {

/// A difficulty that gates are built to provoke; docs/files.md has the table.
enum class Regime : int32_t {
  kStrong,
  kSlow,
  kTrained,
  kMixed,
  kSoftplus,
  kLog,
  kNeedle,
  kStructured,
  kEqualKeys,
  kTrainedSoftplus,
};
inline constexpr int kNumRegimes = 10;

const char* regime_name(Regime regime);
Regime parse_regime(const std::string& text);  ///< throws kda::Error

struct GenerateOptions {
  int64_t batch = 1;
  int64_t num_tokens = 0;         ///< of each row; ignored with seq_lens
  std::vector<int64_t> seq_lens;  ///< not empty: one row with cu_seqlens
  int64_t num_heads = 1;
  int64_t num_value_heads = 1;
  int64_t key_dim = 128;
  int64_t value_dim = 128;
  DType dtype = DType::kBFloat16;  ///< fp64: also of parameters and states, else fp32
  Regime regime = Regime::kTrained;
  uint64_t seed = 0;
  bool initial_state = false;
  bool head_gates = false;  ///< one gate a head, no dt_bias, in fp32 (fp64): Gated DeltaNet
  HeadMap head_map = HeadMap::kGrouped;
};

/// Row-major inputs with the options and modes of the regime. Throws kda::Error on bad sizes.
Inputs generate(const GenerateOptions& options);

/// splitmix64: small, fast, the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next();
  double uniform();  ///< [0, 1)
  double uniform(double low, double high);
  double log_uniform(double low, double high);
  double normal();
  int64_t below(int64_t count);  ///< 0..count-1
  bool chance(double probability) { return uniform() < probability; }

 private:
  uint64_t state_;
};

}  // namespace kda::check
