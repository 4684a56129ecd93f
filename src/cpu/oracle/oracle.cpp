// SPDX-License-Identifier: Apache-2.0
#include "cpu/oracle/oracle.hpp"

#include <cmath>

#include "core/convert.hpp"
#include "core/layout.hpp"

namespace kda::cpu::oracle {
namespace {

using Vector = std::vector<double>;

double softplus(double x) { return std::fmax(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }

/// `a`: the rate of the head.
double gate(const Problem& p, const Tensors& t, double a, double raw, int64_t head,
            int64_t channel) {
  const double x = raw + gate_bias(p, t, head, channel);
  switch (p.gate_mode) {
    case GateMode::kLog: break;
    case GateMode::kSoftplus: return -a * softplus(x);
    case GateMode::kBounded: return p.lower_bound * sigmoid(a * x);
  }
  return raw;
}

// A channel of a step. __restrict, for these are more pairs of arrays than a compiler compares
// before it makes vectors of a loop.

/// S' = Diag(exp g) S;  prediction = S'^T k
void decay_row(std::size_t V, double decay, double k, double* __restrict S,
               double* __restrict S_magnitude, double* __restrict prediction) {
  for (std::size_t c = 0; c < V; ++c) {
    S[c] *= decay;
    S_magnitude[c] *= decay;
    prediction[c] += S[c] * k;
  }
}
/// S = S' + k v_new^T;  o = S^T q
void update_row(std::size_t V, double k, double q, const double* __restrict v_new,
                double* __restrict S, double* __restrict S_magnitude, double* __restrict o,
                double* __restrict o_magnitude) {
  const double abs_k = std::fabs(k), abs_q = std::fabs(q);
  for (std::size_t c = 0; c < V; ++c) {
    S[c] += k * v_new[c];
    S_magnitude[c] += abs_k * std::fabs(v_new[c]);
    o[c] += S[c] * q;
    o_magnitude[c] += S_magnitude[c] * abs_q;
  }
}

}  // namespace

void l2_normalize(std::vector<double>& x) {
  double sum = 0;
  for (double element : x) sum += element * element;
  const double factor = 1 / std::sqrt(sum + 1e-6);
  for (double& element : x) element *= factor;
}

double gate_rate(const Problem& p, const Tensors& t, int64_t head) {
  if (!p.A_log) return 1;
  return std::exp(load_double(t.A_log, p.A_log->dtype, head * p.A_log->strides[0]));
}

double gate_bias(const Problem& p, const Tensors& t, int64_t head, int64_t channel) {
  if (!p.dt_bias) return 0;
  return load_double(t.dt_bias, p.dt_bias->dtype,
                     head * p.dt_bias->strides[0] + (has_head_bias(p) ? 0 : channel));
}

std::vector<double> load_row(const Problem& p, const TensorDesc& desc, const void* base,
                             int64_t flat_token, int64_t head, int64_t size) {
  const int64_t first = row_offset(p, desc, flat_token, head);
  const int64_t step = desc.strides[3] == 0 ? 0 : 1;  // 0: one gate for all channels
  Vector row(static_cast<std::size_t>(size));
  for (int64_t i = 0; i < size; ++i)
    row[static_cast<std::size_t>(i)] = load_double(base, desc.dtype, first + i * step);
  return row;
}

std::vector<double> load_rows(const Problem& p, const TensorDesc& desc, const void* base, Span span,
                              int64_t head, int64_t size) {
  Vector rows;
  rows.reserve(static_cast<std::size_t>((span.end - span.begin) * size));
  for (int64_t token = span.begin; token < span.end; ++token) {
    const Vector row = load_row(p, desc, base, token, head, size);
    rows.insert(rows.end(), row.begin(), row.end());
  }
  return rows;
}

std::vector<double> log_decay(const Problem& p, const Tensors& t, int64_t flat_token,
                              int64_t value_head) {
  return log_decay(p, t, load_row(p, p.g, t.g, flat_token, value_head, p.key_dim), value_head);
}

std::vector<double> log_decay(const Problem& p, const Tensors& t, std::vector<double> raw,
                              int64_t value_head) {
  const double a = gate_rate(p, t, value_head);
  for (std::size_t d = 0; d < raw.size(); ++d)
    raw[d] = gate(p, t, a, raw[d], value_head, static_cast<int64_t>(d));
  return raw;
}

double step_size(const Problem& p, const Tensors& t, int64_t flat_token, int64_t head) {
  return step_size(p, load_double(t.beta, p.beta.dtype, row_offset(p, p.beta, flat_token, head)));
}

double step_size(const Problem& p, double raw) {
  if (p.beta_mode == BetaMode::kPlain) return raw;
  return (p.beta_mode == BetaMode::kSigmoid2 ? 2 : 1) * sigmoid(raw);
}

std::vector<double> load_state(const Problem& p, const StateDesc& desc, const void* base,
                               int64_t slot, int64_t value_head) {
  const bool kv = p.state_layout == StateLayout::kKV;
  Vector state(static_cast<std::size_t>(p.key_dim * p.value_dim));
  for (int64_t d = 0; d < p.key_dim; ++d)
    for (int64_t c = 0; c < p.value_dim; ++c) {
      const int64_t row = kv ? d : c;
      const int64_t column = kv ? c : d;
      const int64_t at = state_offset(desc, slot, value_head) + row * desc.tensor.strides[2];
      state[static_cast<std::size_t>(d * p.value_dim + c)] =
          load_double(base, desc.tensor.dtype, at + column);
    }
  return state;
}

void store_state(const Problem& p, const StateDesc& desc, void* base, int64_t slot, int64_t head,
                 const double* state) {
  if (slot < 0) return;
  const bool kv = p.state_layout == StateLayout::kKV;
  for (int64_t d = 0; d < p.key_dim; ++d)
    for (int64_t c = 0; c < p.value_dim; ++c) {
      const int64_t at =
          state_offset(desc, slot, head) + (kv ? d : c) * desc.tensor.strides[2] + (kv ? c : d);
      store_double(base, desc.tensor.dtype, at, state[d * p.value_dim + c]);
    }
}

void store_outputs(const stage::Call& call, Span span, int64_t head, const std::vector<double>& o) {
  const Problem& p = call.problem;
  const double* value = o.data();
  for (int64_t token = span.begin; token < span.end; ++token) {
    const int64_t at = row_offset(p, p.o, token, head);
    for (int64_t c = 0; c < p.value_dim; ++c)
      store_double(call.tensors.o, p.o.dtype, at + c, *value++);
  }
}

HeadResult run_head(const Problem& p, const Tensors& t, Span span, int64_t value_head,
                    const std::vector<double>& initial_state, bool keep_states) {
  const auto K = static_cast<std::size_t>(p.key_dim);
  const auto V = static_cast<std::size_t>(p.value_dim);
  const auto L = static_cast<std::size_t>(span.end - span.begin);
  const double scale = effective_scale(p);

  HeadResult result;
  result.o.assign(L * V, 0);
  result.o_magnitude.assign(L * V, 0);
  if (keep_states) result.token_states.reserve(L * K * V);
  Vector S = initial_state.empty() ? Vector(K * V, 0) : initial_state;
  Vector S_magnitude(K * V);
  for (std::size_t i = 0; i < K * V; ++i) S_magnitude[i] = std::fabs(S[i]);

  for (std::size_t i = 0; i < L; ++i) {
    const int64_t token = span.begin + static_cast<int64_t>(i);
    const int64_t q_head = q_head_of(p, value_head);
    Vector q = load_row(p, p.q, t.q, token, q_head, p.key_dim);
    Vector k = load_row(p, p.k, t.k, token, q_head, p.key_dim);
    const Vector v = load_row(p, p.v, t.v, token, value_head, p.value_dim);
    const Vector g = log_decay(p, t, token, value_head);
    const double beta = step_size(p, t, token, value_head);
    if (p.qk_l2norm) {
      l2_normalize(q);
      l2_normalize(k);
    }

    Vector prediction(V, 0);
    for (std::size_t d = 0; d < K; ++d)
      decay_row(V, std::exp(g[d]), k[d], &S[d * V], &S_magnitude[d * V], prediction.data());
    // v_new = beta (v - prediction)
    Vector v_new(V);
    for (std::size_t c = 0; c < V; ++c) v_new[c] = beta * (v[c] - prediction[c]);
    result.v_new.insert(result.v_new.end(), v_new.begin(), v_new.end());
    double* o = &result.o[i * V];
    double* o_magnitude = &result.o_magnitude[i * V];
    for (std::size_t d = 0; d < K; ++d)
      update_row(V, k[d], q[d], v_new.data(), &S[d * V], &S_magnitude[d * V], o, o_magnitude);
    for (std::size_t c = 0; c < V; ++c) {
      o[c] *= scale;
      o_magnitude[c] *= std::fabs(scale);
    }
    if (keep_states) result.token_states.insert(result.token_states.end(), S.begin(), S.end());
  }
  result.state = std::move(S);
  result.state_magnitude = std::move(S_magnitude);
  return result;
}

}  // namespace kda::cpu::oracle
