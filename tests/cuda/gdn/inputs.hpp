// SPDX-License-Identifier: Apache-2.0
// Inputs of Gated DeltaNet: one gate a head, of every kind that a kernel may meet.
#pragma once

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "core/convert.hpp"
#include "support/harness.hpp"

namespace kda::test::gdn {

enum class Gates {
  kFirst,    ///< softplus, as first weights of layers have them: A up to 16
  kTrained,  ///< softplus, wide: slow and fast heads
  kStrong,   ///< softplus: no state outlives a few tokens
  kBounded,  ///< the mode, with its default bound
  kSlow,     ///< log
  kZero,     ///< log: nothing is forgotten
  kNeedle,   ///< log: slow, but for tokens of -200, -inf and 0
  kPositive  ///< log: slow, of either sign
};
inline constexpr Gates kAllGates[] = {Gates::kFirst,   Gates::kTrained, Gates::kStrong,
                                      Gates::kBounded, Gates::kSlow,    Gates::kZero,
                                      Gates::kNeedle,  Gates::kPositive};
inline const char* name_of(Gates gates) {
  constexpr const char* kNames[] = {"first weights", "trained", "strong", "bounded",
                                    "slow",          "zero",    "needle", "positive"};
  return kNames[static_cast<int>(gates)];
}

struct Options {
  std::vector<int64_t> lengths{200};
  int64_t H = 1, HV = 2, K = 64, V = 64;
  Gates gates = Gates::kFirst;
  HeadMap map = HeadMap::kGrouped;
  DType gate = DType::kFloat32;
  bool equal_keys = false;  ///< with steps near 2
  bool bias = false;        ///< what gates of a head have in common lies in dt_bias [HV]
  bool initial_state = true;
  uint64_t seed = 1;
};

/// Fills fp32 parameters of heads and raw gates [tokens, HV].
class GateMaker {
 public:
  GateMaker(const Options& o, check::Inputs* inputs) : o_(o), inputs_(*inputs), random_(o.seed) {}

  void run() {
    Problem& p = inputs_.problem;
    p.gate_mode = mode();
    p.g = head_gates(o_.gate, 1, p.num_tokens, o_.HV);
    inputs_.g = io::Buffer(count(p.num_tokens * o_.HV) * count(dtype_size(o_.gate)));
    if (p.gate_mode != GateMode::kLog) {
      p.A_log = contiguous(DType::kFloat32, {o_.HV});
      inputs_.A_log = io::Buffer(count(o_.HV) * sizeof(float));
    }
    if (o_.bias) {
      p.dt_bias = head_bias(DType::kFloat32, o_.HV);
      inputs_.dt_bias = io::Buffer(count(o_.HV) * sizeof(float));
    }
    for (int64_t head = 0; head < o_.HV; ++head) make_head(head);
  }

 private:
  static std::size_t count(int64_t x) { return static_cast<std::size_t>(x); }

  GateMode mode() const {
    switch (o_.gates) {
      case Gates::kFirst:
      case Gates::kTrained:
      case Gates::kStrong: return GateMode::kSoftplus;
      case Gates::kBounded: return GateMode::kBounded;
      default: return GateMode::kLog;
    }
  }

  void make_head(int64_t head) {
    const bool first = o_.gates == Gates::kFirst;
    double A = 1, step = random_.log_uniform(1e-3, first ? 0.1 : 1);
    if (first) A = random_.uniform(1e-2, 16);
    if (o_.gates == Gates::kTrained) A = random_.log_uniform(0.05, 16);
    if (o_.gates == Gates::kStrong) A = 16, step = 1;
    if (mode() != GateMode::kLog) inputs_.A_log.as<float>()[head] = static_cast<float>(std::log(A));
    double bias = std::log(std::expm1(step));
    if (o_.bias) inputs_.dt_bias.as<float>()[head] = static_cast<float>(std::exchange(bias, 0));
    const double pace = random_.log_uniform(1e-4, 0.5);
    for (int64_t t = 0; t < inputs_.problem.num_tokens; ++t)
      store_double(inputs_.g.data(), o_.gate, t * o_.HV + head, gate(bias, pace));
  }

  double gate(double bias, double pace) {
    const double normal = random_.normal(), draw = random_.uniform();
    switch (o_.gates) {
      case Gates::kFirst:
      case Gates::kStrong: return bias + normal;
      case Gates::kTrained: return bias + 2 * normal;
      case Gates::kBounded: return 3 * normal - 4;
      case Gates::kZero: return 0;
      case Gates::kPositive: return 0.1 * normal;
      case Gates::kNeedle:
        if (draw < 1.0 / 24) return -200;
        if (draw < 1.0 / 16) return -std::numeric_limits<double>::infinity();
        if (draw < 1.0 / 6) return 0;
        break;
      case Gates::kSlow: break;
    }
    return -pace * std::exp(normal / 2);
  }

  const Options& o_;
  check::Inputs& inputs_;
  check::Random random_;
};

/// Packed sequences in bf16, q and k normalised by the call.
inline check::Inputs inputs_of(const Options& o) {
  check::GenerateOptions options = shape(0, o.H, o.K, o.V);
  options.num_value_heads = o.HV;
  options.seq_lens = o.lengths;
  options.dtype = DType::kBFloat16;
  options.regime = o.equal_keys ? check::Regime::kEqualKeys : check::Regime::kLog;
  options.initial_state = o.initial_state;
  options.seed = o.seed;
  check::Inputs inputs = check::generate(options);
  Problem& p = inputs.problem;
  p.A_log.reset(), p.dt_bias.reset();
  inputs.A_log = inputs.dt_bias = {};
  GateMaker(o, &inputs).run();
  p.head_map = o.map;
  for (int64_t i = 0; p.initial_state && i < p.num_sequences * o.HV * o.K * o.V; ++i)
    inputs.initial_state.as<float>()[i] *= 0.3f;
  throw_if_error(validate(p));
  return inputs;
}

/// Steps as they are, in place of logits: every one is `beta`.
inline void set_betas(check::Inputs* inputs, double beta) {
  Problem& p = inputs->problem;
  p.beta_mode = BetaMode::kPlain;
  for (int64_t i = 0; i < p.batch * p.num_tokens * p.num_value_heads; ++i)
    store_double(inputs->beta.data(), p.beta.dtype, i, beta);
}

/// Keys of lengths around `size`, which are not normalised, with plain steps. Longer than 1 with
/// steps of up to 2 the state grows along them, faster than gates decay it, and no bound of gates
/// alone holds.
inline check::Inputs growing(Gates gates, double size, double beta) {
  check::Inputs inputs = inputs_of({.lengths = {200}, .gates = gates});
  Problem& p = inputs.problem;
  p.qk_l2norm = false;
  for (int64_t i = 0; i < p.num_tokens * p.num_heads * p.key_dim; ++i)
    for (io::Buffer* rows : {&inputs.q, &inputs.k})
      store_double(rows->data(), p.q.dtype, i,
                   size * load_double(rows->data(), p.q.dtype, i) / std::sqrt(p.key_dim));
  set_betas(&inputs, beta);
  return inputs;
}

/// Nine chunks of 64 tokens: so many that grow, one that forgets by 2^-20 what is in front of it,
/// and others that forget next to nothing; `backwards`: from the last one to the first.
inline check::Inputs chunks_that_grow(int64_t chunks, bool backwards = false) {
  check::Inputs inputs =
      inputs_of({.lengths = {9 * 64}, .HV = 1, .gates = Gates::kZero, .initial_state = false});
  for (int64_t t = 0; t < inputs.problem.num_tokens; ++t) {
    const int64_t chunk = backwards ? 8 - t / 64 : t / 64;
    store_double(inputs.g.data(), inputs.problem.g.dtype, t,
                 chunk < chunks ? 0.1 : (chunk == chunks ? -0.222 : -0.01));
  }
  return inputs;
}

}  // namespace kda::test::gdn
