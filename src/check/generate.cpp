// SPDX-License-Identifier: Apache-2.0
#include "check/generate.hpp"

#include <cmath>
#include <limits>

#include "core/convert.hpp"
#include "core/layout.hpp"
#include "core/text.hpp"

namespace kda::check {
namespace {

constexpr const char* kRegimeNames[kNumRegimes] = {
    "strong", "slow",   "trained",    "mixed",      "softplus",
    "log",    "needle", "structured", "equal-keys", "trained-softplus"};
constexpr int64_t kAlternation = 8;  // tokens between switches of the structured regime

double logit(double p) { return std::log(p / (1 - p)); }
double inverse_softplus(double y) { return y + std::log(-std::expm1(-y)); }

io::Buffer floats(int64_t count, DType dtype) {
  return io::Buffer(static_cast<std::size_t>(count * dtype_size(dtype)));
}

/// Fills the tensors of one problem, in one fixed order.
class Generator {
 public:
  explicit Generator(const GenerateOptions& options) : o_(options), random_(options.seed) {}

  Inputs run() {
    describe();
    make_qkv();
    make_gate_parameters();
    make_gates();
    if (o_.head_gates) keep_one_gate();
    make_beta();
    if (o_.initial_state) make_initial_state();
    throw_if_error(validate(p_));
    return std::move(inputs_);
  }

 private:
  void describe() {
    p_.batch = o_.seq_lens.empty() ? o_.batch : 1;
    p_.num_tokens = o_.num_tokens;
    p_.num_sequences = p_.batch;
    if (!o_.seq_lens.empty()) {
      p_.cu_seqlens = DType::kInt64;
      p_.num_sequences = static_cast<int64_t>(o_.seq_lens.size());
      inputs_.cu_seqlens = {0};
      for (const int64_t length : o_.seq_lens) {
        if (length < 0) throw Error(invalid("seq_lens: ", length, " is negative"));
        inputs_.cu_seqlens.push_back(inputs_.cu_seqlens.back() + length);
      }
      p_.num_tokens = inputs_.cu_seqlens.back();
    }
    p_.num_heads = o_.num_heads;
    p_.num_value_heads = o_.num_value_heads;
    p_.head_map = o_.head_map;
    p_.key_dim = o_.key_dim;
    p_.value_dim = o_.value_dim;
    p_.qk_l2norm = true;
    p_.beta_mode = o_.regime == Regime::kEqualKeys ? BetaMode::kSigmoid2 : BetaMode::kSigmoid;
    const bool log = o_.regime == Regime::kLog || o_.regime == Regime::kNeedle;
    p_.gate_mode = log ? GateMode::kLog : softplus() ? GateMode::kSoftplus : GateMode::kBounded;
    const int64_t B = p_.batch, T = p_.num_tokens, H = p_.num_heads, HV = p_.num_value_heads;
    p_.q = p_.k = contiguous(o_.dtype, {B, T, H, p_.key_dim});
    p_.v = p_.o = contiguous(o_.dtype, {B, T, HV, p_.value_dim});
    p_.g = contiguous(o_.dtype, {B, T, HV, p_.key_dim});
    p_.beta = contiguous(o_.dtype, {B, T, HV});
    throw_if_error(validate_sizes());
  }

  /// Everything but A_log, which is made later.
  Status validate_sizes() const {
    Problem sizes = p_;
    sizes.gate_mode = GateMode::kLog;
    return validate(sizes);
  }

  io::Buffer normals(int64_t count) {
    io::Buffer buffer = floats(count, o_.dtype);
    for (int64_t i = 0; i < count; ++i) store_double(buffer.data(), o_.dtype, i, random_.normal());
    return buffer;
  }

  /// The type of parameters and states.
  DType wide_type() const { return state_type(p_); }
  int64_t tokens() const { return p_.batch * p_.num_tokens; }

  void make_qkv() {
    inputs_.q = normals(tokens() * p_.num_heads * p_.key_dim);
    inputs_.k = normals(tokens() * p_.num_heads * p_.key_dim);
    inputs_.v = normals(tokens() * p_.num_value_heads * p_.value_dim);
    if (o_.regime == Regime::kEqualKeys) repeat_first_key();
    if (o_.regime == Regime::kStructured) bridge_keys();
  }

  void repeat_first_key() {
    const int64_t row = p_.num_heads * p_.key_dim;
    const auto bytes = static_cast<std::size_t>(row * dtype_size(o_.dtype));
    for (int64_t t = 1; t < tokens(); ++t)
      std::memcpy(inputs_.k.data() + static_cast<std::size_t>(t) * bytes, inputs_.k.data(), bytes);
  }

  /// A key that carries weight from the set that is about to forget into the other one.
  void bridge_keys() {
    for (int64_t t = 0; t < tokens(); t += kAlternation)
      for (int64_t h = 0; h < p_.num_heads; ++h)
        for (int64_t d = 0; d < p_.key_dim; ++d)
          store_double(inputs_.k.data(), o_.dtype, (t * p_.num_heads + h) * p_.key_dim + d,
                       d % 2 == 0 ? 1 : -1);
  }

  bool strong_head(int64_t head) const {
    return o_.regime == Regime::kStrong || (o_.regime == Regime::kMixed && head % 2 == 0);
  }

  bool softplus() const {
    return o_.regime == Regime::kSoftplus || o_.regime == Regime::kTrainedSoftplus;
  }

  double channel_bias(int64_t head, double A) {
    if (strong_head(head)) return random_.uniform();
    const double bound = -p_.lower_bound;
    switch (o_.regime) {
      case Regime::kSoftplus: return inverse_softplus(random_.log_uniform(1e-4, 1));
      case Regime::kTrainedSoftplus: return inverse_softplus(random_.log_uniform(4e-4, 2) / A);
      case Regime::kTrained: return logit(random_.log_uniform(1e-3, 4.95) / bound);
      case Regime::kStructured: return 0;
      default: return logit(random_.log_uniform(1e-4, 0.5) / bound);  // slow, mixed, equal keys
    }
  }

  void make_gate_parameters() {
    if (p_.gate_mode == GateMode::kLog) return;
    const int64_t HV = p_.num_value_heads;
    const DType type = wide_type();
    p_.A_log = contiguous(type, {HV});
    p_.dt_bias = contiguous(type, {HV, p_.key_dim});
    inputs_.A_log = floats(HV, type);
    inputs_.dt_bias = floats(HV * p_.key_dim, type);
    for (int64_t head = 0; head < HV; ++head) {
      double A_log = 0;
      if (strong_head(head)) A_log = random_.uniform();
      if (softplus()) A_log = std::log(random_.uniform(1, o_.regime == Regime::kSoftplus ? 16 : 6));
      store_double(inputs_.A_log.data(), type, head, A_log);
      for (int64_t d = 0; d < p_.key_dim; ++d)
        store_double(inputs_.dt_bias.data(), type, head * p_.key_dim + d,
                     channel_bias(head, std::exp(A_log)));
    }
  }

  /// Raw gate, or log decay in the log regimes, of one element.
  double gate(int64_t token, int64_t head, int64_t channel, const std::vector<double>& pace) {
    const auto at = static_cast<std::size_t>(head * p_.key_dim + channel);
    switch (o_.regime) {
      case Regime::kStrong: return random_.normal();
      case Regime::kMixed: return random_.normal() * (strong_head(head) ? 1 : 0.5);
      case Regime::kSoftplus: return 2 * random_.normal();
      case Regime::kTrainedSoftplus: return 1.8 * random_.normal();
      case Regime::kStructured: {
        const bool forgets = (token / kAlternation + channel) % 2 == 0;
        return forgets ? 20 : -20;
      }
      case Regime::kLog: return -pace[at] * std::exp(random_.normal() / 2);
      case Regime::kNeedle: return needle(token, channel, pace[at]);
      default: return 0.5 * random_.normal();
    }
  }

  double needle(int64_t token, int64_t channel, double pace) {
    const double slow = -pace * std::exp(random_.normal() / 2);
    const double draw = random_.uniform();
    if (channel == 0 && p_.key_dim > 1) return 0;
    if (token % 37 == 19) return -200;
    if (draw < 0.002) return -1000;
    if (draw < 0.003) return -std::numeric_limits<double>::infinity();
    return slow;
  }

  void make_gates() {
    const int64_t HV = p_.num_value_heads;
    std::vector<double> pace;
    for (int64_t i = 0; i < HV * p_.key_dim; ++i) pace.push_back(random_.log_uniform(1e-4, 3));
    inputs_.g = floats(tokens() * HV * p_.key_dim, o_.dtype);
    int64_t at = 0;
    for (int64_t t = 0; t < tokens(); ++t)
      for (int64_t head = 0; head < HV; ++head)
        for (int64_t d = 0; d < p_.key_dim; ++d)
          store_double(inputs_.g.data(), o_.dtype, at++, gate(t, head, d, pace));
  }

  /// Keeps that of a channel which is like most, its bias inside.
  void keep_one_gate() {
    const int64_t rows = tokens() * p_.num_value_heads, K = p_.key_dim, channel = K > 1 ? 1 : 0;
    const DType type = wide_type();
    io::Buffer gates = floats(rows, type);
    for (int64_t i = 0; i < rows; ++i) {
      double x = load_double(inputs_.g.data(), p_.g.dtype, i * K + channel);
      if (p_.dt_bias)
        x += load_double(inputs_.dt_bias.data(), p_.dt_bias->dtype,
                         i % p_.num_value_heads * K + channel);
      store_double(gates.data(), type, i, x);
    }
    inputs_.g = std::move(gates);
    p_.g = head_gates(type, p_.batch, p_.num_tokens, p_.num_value_heads);
    p_.dt_bias.reset();
    inputs_.dt_bias = {};
  }

  void make_beta() {
    const int64_t HV = p_.num_value_heads;
    inputs_.beta = floats(tokens() * HV, o_.dtype);
    for (int64_t i = 0; i < tokens() * HV; ++i) {
      double raw = random_.normal();
      if (o_.regime == Regime::kEqualKeys) raw = 6 + 0.5 * raw;  // 2 sigmoid = 1.995
      if (o_.regime == Regime::kStructured) raw += i / HV % kAlternation == 0 ? 6 : -4;
      store_double(inputs_.beta.data(), o_.dtype, i, raw);
    }
  }

  void make_initial_state() {
    StateDesc desc;
    desc.num_slots = p_.num_sequences;
    const Shape shape = state_shape(p_, desc);
    desc.tensor = contiguous(wide_type(), {shape[0], shape[1], shape[2], shape[3]});
    p_.initial_state = desc;
    const int64_t count = shape[0] * shape[1] * shape[2] * shape[3];
    inputs_.initial_state = floats(count, wide_type());
    for (int64_t i = 0; i < count; ++i)
      store_double(inputs_.initial_state.data(), wide_type(), i, random_.normal());
  }

  const GenerateOptions& o_;
  Random random_;
  Inputs inputs_;
  Problem& p_ = inputs_.problem;
};

}  // namespace

const char* regime_name(Regime regime) { return kRegimeNames[static_cast<std::size_t>(regime)]; }

Regime parse_regime(const std::string& text) {
  std::string accepted;
  for (int i = 0; i < kNumRegimes; ++i) {
    if (text == kRegimeNames[i]) return static_cast<Regime>(i);
    accepted += cat(i ? ", " : "", kRegimeNames[i]);
  }
  throw Error(invalid("regime: '", text, "' is not one of ", accepted));
}

Inputs generate(const GenerateOptions& options) { return Generator(options).run(); }

uint64_t Random::next() {
  state_ += 0x9e3779b97f4a7c15u;
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
double Random::uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
double Random::uniform(double low, double high) { return low + (high - low) * uniform(); }
double Random::log_uniform(double low, double high) {
  return std::exp(uniform(std::log(low), std::log(high)));
}
double Random::normal() {
  constexpr double kTwoPi = 6.283185307179586;
  const double radius = std::sqrt(-2 * std::log(1 - uniform()));
  return radius * std::cos(kTwoPi * uniform());
}
int64_t Random::below(int64_t count) {
  return static_cast<int64_t>(next() % static_cast<uint64_t>(count));
}

}  // namespace kda::check
