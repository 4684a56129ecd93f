// SPDX-License-Identifier: Apache-2.0
// The oracle's gradients against derivatives of a forward that is written here once more, over any
// number type: the complex step (exact to rounding) and central differences.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <complex>
#include <functional>
#include <string>
#include <vector>

#include "core/convert.hpp"
#include "cpu/oracle/backward.hpp"
#include "support/harness.hpp"

namespace kda::cpu::oracle {
namespace {

using check::Inputs;
using Complex = std::complex<double>;

/// One dense sequence of a problem, as numbers of type T. The loss is sum d_o . o + sum d_S . S_T.
template <class T>
struct Model {
  const Problem* p = nullptr;
  std::vector<T> q, k, v, g, beta, A_log, dt_bias, state;
  std::vector<double> d_o, d_final_state;

  T sigmoid(T x) const { return 1.0 / (1.0 + exp(-x)); }
  T log_decay(int64_t t, int64_t head, int64_t d) const {
    const T raw = g[at(t, head, p->num_value_heads, p->key_dim) + static_cast<std::size_t>(d)];
    if (p->gate_mode == GateMode::kLog) return raw;
    T x = raw;
    if (p->dt_bias) x += dt_bias[static_cast<std::size_t>(head * p->key_dim + d)];
    const T a = p->A_log ? exp(A_log[static_cast<std::size_t>(head)]) : T(1);
    if (p->gate_mode == GateMode::kBounded) return p->lower_bound * sigmoid(a * x);
    return -a * log(1.0 + exp(x));
  }
  T step(int64_t t, int64_t head) const {
    const T raw = beta[static_cast<std::size_t>(t * p->num_value_heads + head)];
    if (p->beta_mode == BetaMode::kPlain) return raw;
    return (p->beta_mode == BetaMode::kSigmoid2 ? 2.0 : 1.0) * sigmoid(raw);
  }
  static std::size_t at(int64_t t, int64_t head, int64_t heads, int64_t size) {
    return static_cast<std::size_t>((t * heads + head) * size);
  }
  std::vector<T> row(const std::vector<T>& x, int64_t t, int64_t head) const {
    const auto size = static_cast<std::ptrdiff_t>(p->key_dim);
    const auto first =
        x.begin() + static_cast<std::ptrdiff_t>(at(t, head, p->num_heads, p->key_dim));
    std::vector<T> y(first, first + size);
    if (!p->qk_l2norm) return y;
    T sum = 1e-6;
    for (const T& element : y) sum += element * element;
    for (T& element : y) element /= sqrt(sum);
    return y;
  }

  T loss() const {
    T total = 0;
    const auto K = static_cast<std::size_t>(p->key_dim);
    const auto V = static_cast<std::size_t>(p->value_dim);
    for (int64_t head = 0; head < p->num_value_heads; ++head) {
      const std::size_t first = static_cast<std::size_t>(head) * K * V;
      std::vector<T> S(K * V, T(0));
      if (!state.empty())
        std::copy_n(state.begin() + static_cast<std::ptrdiff_t>(first), K * V, S.begin());
      for (int64_t t = 0; t < p->num_tokens; ++t) {
        const std::vector<T> q_row = row(q, t, head / (p->num_value_heads / p->num_heads));
        const std::vector<T> k_row = row(k, t, head / (p->num_value_heads / p->num_heads));
        for (std::size_t d = 0; d < K; ++d)
          for (std::size_t c = 0; c < V; ++c)
            S[d * V + c] *= exp(log_decay(t, head, static_cast<int64_t>(d)));
        for (std::size_t c = 0; c < V; ++c) {
          const std::size_t value = at(t, head, p->num_value_heads, p->value_dim) + c;
          T e = v[value];
          for (std::size_t d = 0; d < K; ++d) e -= k_row[d] * S[d * V + c];
          T o = 0;
          for (std::size_t d = 0; d < K; ++d) {
            S[d * V + c] += k_row[d] * step(t, head) * e;
            o += S[d * V + c] * q_row[d];
          }
          total += d_o[value] * effective_scale(*p) * o;
        }
      }
      for (std::size_t i = 0; i < K * V; ++i) total += d_final_state[first + i] * S[i];
    }
    return total;
  }

  /// The tensors that have gradients, by name.
  std::vector<std::pair<std::string, std::vector<T>*>> inputs() {
    return {{"dq", &q},
            {"dk", &k},
            {"dv", &v},
            {"dg", &g},
            {"dbeta", &beta},
            {"dA_log", &A_log},
            {"ddt_bias", &dt_bias},
            {"d_initial_state", &state}};
  }
};

template <class T>
std::vector<T> numbers(const io::Buffer& buffer, DType dtype) {
  std::vector<T> values;
  for (int64_t i = 0; i < static_cast<int64_t>(buffer.size()) / dtype_size(dtype); ++i)
    values.push_back(load_element(buffer.data(), dtype, i));
  return values;
}

template <class T>
Model<T> make_model(const Inputs& in) {
  const Problem& p = in.problem;
  Model<T> m;
  m.p = &p;
  m.q = numbers<T>(in.q, p.q.dtype);
  m.k = numbers<T>(in.k, p.k.dtype);
  m.v = numbers<T>(in.v, p.v.dtype);
  m.g = numbers<T>(in.g, p.g.dtype);
  m.beta = numbers<T>(in.beta, p.beta.dtype);
  if (p.A_log) m.A_log = numbers<T>(in.A_log, DType::kFloat32);
  if (p.dt_bias) m.dt_bias = numbers<T>(in.dt_bias, DType::kFloat32);
  if (p.initial_state) m.state = numbers<T>(in.initial_state, DType::kFloat32);
  check::Random random(99);
  m.d_o.resize(m.v.size());
  for (double& x : m.d_o) x = random.normal();
  m.d_final_state.resize(static_cast<std::size_t>(p.num_value_heads * p.key_dim * p.value_dim));
  for (double& x : m.d_final_state) x = random.normal();
  return m;
}

/// The oracle's gradients of all heads in the order of Model::inputs(), dense.
std::vector<std::vector<double>> oracle_gradients(const Inputs& in, const Model<double>& m) {
  const Problem& p = in.problem;
  const int64_t T = p.num_tokens, HV = p.num_value_heads, K = p.key_dim, V = p.value_dim;
  const auto count = [](int64_t size) { return static_cast<std::size_t>(size); };
  std::vector<std::vector<double>> all = {std::vector<double>(count(T * p.num_heads * K)),
                                          std::vector<double>(count(T * p.num_heads * K)),
                                          std::vector<double>(count(T * HV * V)),
                                          std::vector<double>(count(T * HV * K)),
                                          std::vector<double>(count(T * HV)),
                                          std::vector<double>(m.A_log.size()),
                                          std::vector<double>(m.dt_bias.size()),
                                          std::vector<double>(m.state.size())};
  for (int64_t head = 0; head < HV; ++head) {
    std::vector<double> d_o;
    for (int64_t t = 0; t < T; ++t)
      for (int64_t c = 0; c < V; ++c) d_o.push_back(m.d_o[count((t * HV + head) * V + c)]);
    const auto first = m.d_final_state.begin() + head * K * V;
    const std::vector<double> d_final(first, first + K * V);
    std::vector<double> initial;
    if (p.initial_state)
      initial = load_state(p, *p.initial_state, in.initial_state.data(), 0, head);
    const HeadGradients r = backward_head(p, in.tensors(), {0, T}, head, initial, d_o, d_final);
    const int64_t q_head = head / (HV / p.num_heads);
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t d = 0; d < K; ++d) {
        all[0][count((t * p.num_heads + q_head) * K + d)] += r.dq.value[count(t * K + d)];
        all[1][count((t * p.num_heads + q_head) * K + d)] += r.dk.value[count(t * K + d)];
        all[3][count((t * HV + head) * K + d)] = r.dg.value[count(t * K + d)];
      }
      for (int64_t c = 0; c < V; ++c)
        all[2][count((t * HV + head) * V + c)] = r.dv.value[count(t * V + c)];
      all[4][count(t * HV + head)] = r.dbeta.value[count(t)];
    }
    if (p.A_log) all[5][count(head)] = r.dA_log.value[0];
    for (int64_t d = 0; p.dt_bias && d < K; ++d)
      all[6][count(head * K + d)] = r.ddt_bias.value[count(d)];
    for (int64_t i = 0; p.initial_state && i < K * V; ++i)
      all[7][count(head * K * V + i)] = r.d_initial_state.value[count(i)];
  }
  return all;
}

/// `floor`: what counts as the reference's norm if that is smaller.
double distance(const std::vector<double>& x, const std::vector<double>& ref, double floor) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    error += (x[i] - ref[i]) * (x[i] - ref[i]);
    size += ref[i] * ref[i];
  }
  return std::sqrt(error) / std::max(std::sqrt(size), floor);
}

void expect_derivatives(const Inputs& in, const std::string& what) {
  Model<double> real = make_model<double>(in);
  Model<Complex> complex = make_model<Complex>(in);
  const std::vector<std::vector<double>> gradients = oracle_gradients(in, real);
  for (std::size_t tensor = 0; tensor < gradients.size(); ++tensor) {
    std::vector<double>& x = *real.inputs()[tensor].second;
    std::vector<Complex>& z = *complex.inputs()[tensor].second;
    if (x.empty()) continue;
    std::vector<double> by_step, by_difference;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const Complex kept = z[i];
      z[i] += Complex(0, 1e-30);
      by_step.push_back(complex.loss().imag() / 1e-30);
      z[i] = kept;
      const double value = x[i];
      x[i] = value + 1e-5;
      const double above = real.loss();
      x[i] = value - 1e-5;
      by_difference.push_back((above - real.loss()) / 2e-5);
      x[i] = value;
    }
    EXPECT_LT(distance(gradients[tensor], by_step, 0), 1e-9)
        << what << " " << real.inputs()[tensor].first;
    // Differences of a loss of size 10 lose derivatives near 0.
    EXPECT_LT(distance(gradients[tensor], by_difference, 1e-2), 1e-6)
        << what << " " << real.inputs()[tensor].first;
  }
}

Inputs small(check::Regime regime, uint64_t seed = 1) {
  check::GenerateOptions options = test::shape(7, 1, 5, 3);
  options.num_value_heads = 2;
  options.regime = regime;
  options.initial_state = true;
  options.seed = seed;
  return check::generate(options);
}

TEST(OracleBackward, EveryRegime) {
  for (int regime = 0; regime < check::kNumRegimes; ++regime) {
    if (static_cast<check::Regime>(regime) == check::Regime::kNeedle) continue;  // g = -inf
    const auto which = static_cast<check::Regime>(regime);
    expect_derivatives(small(which), check::regime_name(which));
  }
}

TEST(OracleBackward, EveryOption) {
  for (const bool norm : {false, true})
    for (const BetaMode beta : {BetaMode::kPlain, BetaMode::kSigmoid, BetaMode::kSigmoid2}) {
      Inputs in = small(check::Regime::kLog, 2);
      in.problem.qk_l2norm = norm;
      in.problem.beta_mode = beta;
      in.problem.scale = -0.7;
      in.beta.as<float>()[4] = 0;
      expect_derivatives(in, std::string("log ") + beta_mode_name(beta));
    }
  for (const bool A_log : {false, true})
    for (const bool dt_bias : {false, true}) {
      Inputs in = small(check::Regime::kStrong, 3);
      in.problem.lower_bound = -2;
      if (!A_log) in.problem.A_log.reset();
      if (!dt_bias) in.problem.dt_bias.reset();
      expect_derivatives(in, "bounded");
      if (!A_log) continue;
      in.problem.gate_mode = GateMode::kSoftplus;
      expect_derivatives(in, "softplus");
    }
  Inputs in = small(check::Regime::kTrained, 4);
  in.problem.initial_state.reset();
  expect_derivatives(in, "no initial state");
}

TEST(OracleBackward, StoredStatesMeet) {
  // Longer than the distance between stored states.
  check::GenerateOptions options = test::shape(131, 1, 3, 2);
  options.regime = check::Regime::kSlow;
  options.initial_state = true;
  expect_derivatives(check::generate(options), "long");
}

TEST(OracleBackward, DecaysOfZeroPassNothing) {
  // g = -inf in front of token 4: earlier tokens have no part in what follows, and no NaN appears.
  Inputs in = small(check::Regime::kLog, 5);
  const Problem& p = in.problem;
  for (int64_t i = 4 * 2 * 5; i < 5 * 2 * 5; ++i) in.g.as<float>()[i] = -INFINITY;
  Model<double> m = make_model<double>(in);
  std::fill(m.d_o.begin(), m.d_o.begin() + 4 * 2 * 3, 0.0);
  const std::vector<std::vector<double>> gradients = oracle_gradients(in, m);
  for (std::size_t tensor = 0; tensor < gradients.size(); ++tensor)
    for (const double x : gradients[tensor]) ASSERT_TRUE(std::isfinite(x)) << tensor;
  for (int64_t i = 0; i < 4 * p.key_dim; ++i)
    ASSERT_EQ(gradients[0][static_cast<std::size_t>(i)], 0);
  for (int64_t i = 0; i < 4 * 2 * p.value_dim; ++i)
    ASSERT_EQ(gradients[2][static_cast<std::size_t>(i)], 0);
  // Infinite raw gates: their derivatives are limits, 0.
  for (const GateMode mode : {GateMode::kSoftplus, GateMode::kBounded}) {
    Inputs gated = small(check::Regime::kStrong, 6);
    gated.problem.gate_mode = mode;
    gated.g.as<float>()[11] = INFINITY;
    gated.g.as<float>()[31] = -INFINITY;
    for (const auto& values : oracle_gradients(gated, make_model<double>(gated)))
      for (const double x : values) ASSERT_TRUE(std::isfinite(x)) << gate_mode_name(mode);
  }
}

TEST(OracleBackward, MagnitudesBoundTheValues) {
  const Inputs in = small(check::Regime::kTrained, 7);
  const Model<double> m = make_model<double>(in);
  const HeadGradients r = backward_head(
      in.problem, in.tensors(), {0, 7}, 0,
      load_state(in.problem, *in.problem.initial_state, in.initial_state.data(), 0, 0),
      std::vector<double>(21, 0.5), {});
  for (const Gradient* gradient :
       {&r.dq, &r.dk, &r.dv, &r.dg, &r.dbeta, &r.dA_log, &r.ddt_bias, &r.d_initial_state})
    for (std::size_t i = 0; i < gradient->value.size(); ++i)
      EXPECT_LE(std::fabs(gradient->value[i]), gradient->magnitude[i] * (1 + 1e-12));
}

TEST(OracleBackward, NothingInNothingOut) {
  const Inputs in = small(check::Regime::kTrained, 8);
  const HeadGradients zero = backward_head(in.problem, in.tensors(), {0, 7}, 1, {}, {}, {});
  for (const double x : zero.dk.value) EXPECT_EQ(x, 0);
  std::vector<double> d_final(15);
  for (std::size_t i = 0; i < 15; ++i) d_final[i] = static_cast<double>(i);
  const HeadGradients empty = backward_head(in.problem, in.tensors(), {3, 3}, 1, {}, {}, d_final);
  EXPECT_EQ(empty.d_initial_state.value, d_final);
}

}  // namespace
}  // namespace kda::cpu::oracle
