// SPDX-License-Identifier: Apache-2.0
#include "cpu/oracle/backward.hpp"

#include <algorithm>
#include <cmath>

#include "core/layout.hpp"

namespace kda::cpu::oracle {
namespace {

using Vector = std::vector<double>;

/// States are stored so many tokens apart; those between are made again. They are 256 KiB each at
/// K = V = 128, and should stay in a cache.
constexpr std::size_t kStoredEvery = 16;

/// 0 wins over infinity: a decay of 0 passes nothing on, whatever stands behind it.
double product(double a, double b) { return a == 0 || b == 0 ? 0 : a * b; }

/// Operands of the recurrence that a token brings, and what its transforms need to be undone.
struct Token {
  Vector q, k;  // after the norm
  double q_factor = 1, k_factor = 1;
  Vector v, decay;
  double beta = 0;
};

double norm_factor(const Vector& x) {
  double sum = 0;
  for (const double element : x) sum += element * element;
  return 1 / std::sqrt(sum + 1e-6);
}

Token load_token(const Problem& p, const Tensors& t, int64_t token, int64_t head) {
  Token x;
  x.q = load_row(p, p.q, t.q, token, q_head_of(p, head), p.key_dim);
  x.k = load_row(p, p.k, t.k, token, q_head_of(p, head), p.key_dim);
  if (p.qk_l2norm) {
    x.q_factor = norm_factor(x.q);
    x.k_factor = norm_factor(x.k);
    for (double& element : x.q) element *= x.q_factor;
    for (double& element : x.k) element *= x.k_factor;
  }
  x.v = load_row(p, p.v, t.v, token, head, p.value_dim);
  x.decay = log_decay(p, t, token, head);
  for (double& g : x.decay) g = std::exp(g);
  x.beta = step_size(p, t, token, head);
  return x;
}

/// A state with its magnitude, [K, V].
struct State {
  Vector value, magnitude;
};

/// S -> S' = Diag(decay) S
void decay_state(const Token& x, State* S) {
  const std::size_t V = x.v.size();
  for (std::size_t d = 0; d < x.decay.size(); ++d)
    for (std::size_t c = 0; c < V; ++c) {
      S->value[d * V + c] *= x.decay[d];
      S->magnitude[d * V + c] *= x.decay[d];
    }
}

/// e = v - S'^T k
Vector prediction_error(const Token& x, const State& S) {
  Vector e = x.v;
  for (std::size_t d = 0; d < x.k.size(); ++d)
    for (std::size_t c = 0; c < e.size(); ++c) e[c] -= S.value[d * e.size() + c] * x.k[d];
  return e;
}

/// S += a b^T
void add_outer(const Vector& a, const Vector& b, State* S) {
  for (std::size_t d = 0; d < a.size(); ++d)
    for (std::size_t c = 0; c < b.size(); ++c) {
      S->value[d * b.size() + c] += a[d] * b[c];
      S->magnitude[d * b.size() + c] += std::fabs(a[d] * b[c]);
    }
}

Vector scaled(const Vector& x, double factor) {
  Vector y = x;
  for (double& element : y) element *= factor;
  return y;
}

void step(const Token& x, State* S) {
  decay_state(x, S);
  add_outer(x.k, scaled(prediction_error(x, *S), x.beta), S);
}

/// Gradient of x from that of y = x r, r = rsqrt(sum x^2 + eps).
void undo_norm(const Vector& y, double r, double* value, double* magnitude) {
  double dot = 0, abs_dot = 0;
  for (std::size_t d = 0; d < y.size(); ++d) {
    dot += y[d] * value[d];
    abs_dot += std::fabs(y[d]) * magnitude[d];
  }
  for (std::size_t d = 0; d < y.size(); ++d) {
    value[d] = r * (value[d] - y[d] * dot);
    magnitude[d] = r * (magnitude[d] + std::fabs(y[d]) * abs_dot);
  }
}

/// Derivatives of the log decay by the raw gate (dt_bias has the same) and by A_log.
struct GateSlope {
  double raw = 1;
  double A_log = 0;
};

/// `a`: the rate of the head.
GateSlope gate_slope(const Problem& p, const Tensors& t, double a, double raw, double g,
                     int64_t head, int64_t channel) {
  const double x = raw + gate_bias(p, t, head, channel);
  switch (p.gate_mode) {
    case GateMode::kLog: break;
    case GateMode::kSoftplus: return {-a * sigmoid(x), g};
    case GateMode::kBounded: {
      const double inner = p.lower_bound * sigmoid(a * x) * sigmoid(-a * x);
      return {a * inner, product(a * x, inner)};
    }
  }
  return {};
}

double step_slope(const Problem& p, double raw) {
  if (p.beta_mode == BetaMode::kPlain) return 1;
  return (p.beta_mode == BetaMode::kSigmoid2 ? 2 : 1) * sigmoid(raw) * sigmoid(-raw);
}

/// Rows of a gradient [L, size].
double* row(Vector& x, std::size_t i, std::size_t size) { return x.data() + i * size; }

/// Adds a sum over columns, and that of its magnitudes; four partial sums of each, else every
/// addition would wait for the one before it.
template <class Term>
void add_row(std::size_t columns, Term term, double* value, double* magnitude) {
  double values[4] = {}, magnitudes[4] = {};
  std::size_t c = 0;
  for (; c + 4 <= columns; c += 4)
    for (std::size_t i = 0; i < 4; ++i) term(c + i, &values[i], &magnitudes[i]);
  for (; c < columns; ++c) term(c, &values[0], &magnitudes[0]);
  *value += (values[0] + values[1]) + (values[2] + values[3]);
  *magnitude += (magnitudes[0] + magnitudes[1]) + (magnitudes[2] + magnitudes[3]);
}

/// Gradients by q, k, v, log decay and step size of one token. `before` is the decayed state before
/// it (S'), `dS` the gradient of the state after it, which becomes that of the state before it.
void token_gradients(const Token& x, const Vector& d_o, double scale, std::size_t i,
                     const State& before, State* dS, HeadGradients* out) {
  const std::size_t K = x.k.size(), V = x.v.size();
  const Vector e = prediction_error(x, before);
  const Vector v_new = scaled(e, x.beta);
  add_outer(scaled(x.q, scale), d_o, dS);

  Vector dv_new(V, 0), dv_new_magnitude(V, 0);
  for (std::size_t d = 0; d < K; ++d)
    for (std::size_t c = 0; c < V; ++c) {
      dv_new[c] += dS->value[d * V + c] * x.k[d];
      dv_new_magnitude[c] += dS->magnitude[d * V + c] * std::fabs(x.k[d]);
    }
  double* dv = row(out->dv.value, i, V);
  for (std::size_t c = 0; c < V; ++c) {
    out->dbeta.value[i] += dv_new[c] * e[c];
    out->dbeta.magnitude[i] += dv_new_magnitude[c] * std::fabs(e[c]);
    dv[c] = x.beta * dv_new[c];
    out->dv.magnitude[i * V + c] = std::fabs(x.beta) * dv_new_magnitude[c];
  }
  for (std::size_t d = 0; d < K; ++d) {
    const double k = x.k[d];
    const double* S = &before.value[d * V];
    const double* S_magnitude = &before.magnitude[d * V];
    const double* dS_row = &dS->value[d * V];
    const double* dS_magnitude = &dS->magnitude[d * V];
    const auto add_dq = [&](std::size_t c, double* value, double* magnitude) {
      const double update = k * v_new[c];  // S = S' + k v_new^T
      *value += scale * (S[c] + update) * d_o[c];
      *magnitude += std::fabs(scale * d_o[c]) * (S_magnitude[c] + std::fabs(update));
    };
    const auto add_dk = [&](std::size_t c, double* value, double* magnitude) {
      *value += dS_row[c] * v_new[c] - S[c] * dv[c];
      *magnitude += dS_magnitude[c] * std::fabs(v_new[c]) + S_magnitude[c] * std::fabs(dv[c]);
    };
    add_row(V, add_dq, &out->dq.value[i * K + d], &out->dq.magnitude[i * K + d]);
    add_row(V, add_dk, &out->dk.value[i * K + d], &out->dk.magnitude[i * K + d]);
  }
  add_outer(scaled(x.k, -1), Vector(dv, dv + V), dS);
  for (std::size_t d = 0; d < K; ++d) {
    const std::size_t first = d * V;
    const auto add_dg = [&](std::size_t c, double* value, double* magnitude) {
      *value += before.value[first + c] * dS->value[first + c];
      *magnitude += before.magnitude[first + c] * dS->magnitude[first + c];
    };
    add_row(V, add_dg, &out->dg.value[i * K + d], &out->dg.magnitude[i * K + d]);
  }
  decay_state(x, dS);
}

/// From gradients of what the recurrence takes to gradients of what the caller gave.
void undo_transforms(const Problem& p, const Tensors& t, int64_t token, int64_t head,
                     const Token& x, std::size_t i, HeadGradients* out) {
  const std::size_t K = x.k.size();
  if (p.qk_l2norm) {
    undo_norm(x.q, x.q_factor, row(out->dq.value, i, K), row(out->dq.magnitude, i, K));
    undo_norm(x.k, x.k_factor, row(out->dk.value, i, K), row(out->dk.magnitude, i, K));
  }
  const double raw_beta = load_row(p, p.beta, t.beta, token, head, 1)[0];
  out->dbeta.value[i] *= step_slope(p, raw_beta);
  out->dbeta.magnitude[i] *= step_slope(p, raw_beta);
  const Vector raw = load_row(p, p.g, t.g, token, head, p.key_dim);
  const Vector g = log_decay(p, t, token, head);
  const double a = gate_rate(p, t, head);
  for (std::size_t d = 0; d < K; ++d) {
    double& value = out->dg.value[i * K + d];
    double& magnitude = out->dg.magnitude[i * K + d];
    const GateSlope slope = gate_slope(p, t, a, raw[d], g[d], head, static_cast<int64_t>(d));
    if (p.A_log) {
      out->dA_log.value[0] += product(slope.A_log, value);
      out->dA_log.magnitude[0] += product(std::fabs(slope.A_log), magnitude);
    }
    value = product(slope.raw, value);
    magnitude = product(std::fabs(slope.raw), magnitude);
    if (p.dt_bias) {
      out->ddt_bias.value[d] += value;
      out->ddt_bias.magnitude[d] += magnitude;
    }
  }
}

State start_state(const Vector& value, std::size_t count) {
  State S{value.empty() ? Vector(count, 0) : value, {}};
  S.magnitude = S.value;
  for (double& element : S.magnitude) element = std::fabs(element);
  return S;
}

}  // namespace

HeadGradients backward_head(const Problem& p, const Tensors& t, Span span, int64_t value_head,
                            const std::vector<double>& initial_state,
                            const std::vector<double>& d_o,
                            const std::vector<double>& d_final_state) {
  const auto K = static_cast<std::size_t>(p.key_dim);
  const auto V = static_cast<std::size_t>(p.value_dim);
  const auto L = static_cast<std::size_t>(span.end - span.begin);
  HeadGradients out;
  for (Gradient* rows : {&out.dq, &out.dk, &out.dg}) rows->resize(L * K);
  out.dv.resize(L * V);
  out.dbeta.resize(L);
  out.dA_log.resize(1);
  out.ddt_bias.resize(K);
  const auto token_at = [&](std::size_t i) {
    return load_token(p, t, span.begin + static_cast<int64_t>(i), value_head);
  };

  std::vector<State> stored;
  State S = start_state(initial_state, K * V);
  for (std::size_t i = 0; i < L; ++i) {
    if (i % kStoredEvery == 0) stored.push_back(S);
    step(token_at(i), &S);
  }
  State dS = start_state(d_final_state, K * V);
  std::vector<State> decayed(std::min(kStoredEvery, L));  // S' of every token
  for (std::size_t block = stored.size(); block-- > 0;) {
    const std::size_t first = block * kStoredEvery;
    const std::size_t last = std::min(first + kStoredEvery, L);
    std::vector<Token> tokens;
    S = stored[block];
    for (std::size_t i = first; i < last; ++i) {
      tokens.push_back(token_at(i));
      decay_state(tokens.back(), &S);
      decayed[i - first] = S;
      add_outer(tokens.back().k, scaled(prediction_error(tokens.back(), S), tokens.back().beta),
                &S);
    }
    for (std::size_t i = last; i-- > first;) {
      const Token& x = tokens[i - first];
      const auto at = static_cast<std::ptrdiff_t>(i * V);
      const Vector d_o_row =
          d_o.empty() ? Vector(V, 0)
                      : Vector(d_o.begin() + at, d_o.begin() + at + static_cast<int64_t>(V));
      token_gradients(x, d_o_row, effective_scale(p), i, decayed[i - first], &dS, &out);
      undo_transforms(p, t, span.begin + static_cast<int64_t>(i), value_head, x, i, &out);
    }
  }
  out.d_initial_state = {dS.value, dS.magnitude};
  return out;
}

}  // namespace kda::cpu::oracle
