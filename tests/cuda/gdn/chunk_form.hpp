// SPDX-License-Identifier: Apache-2.0
// The chunk form of Gated DeltaNet in float64, as the kernels have it (docs/design/gdn.md): what
// their factors are compared with. That it is the recurrence is tested against the oracle.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/convert.hpp"
#include "core/layout.hpp"
#include "cpu/oracle/oracle.hpp"
#include "support/harness.hpp"

namespace kda::test::gdn {

using Doubles = std::vector<double>;
inline constexpr int64_t kChunk = 64;

/// Factors of one chunk and value head, [tokens] or [tokens, tokens].
struct ChunkFactors {
  int64_t tokens = 0;
  Doubles q, k, v;  // raw rows
  Doubles row_k, row_q, col_k, beta, diag;
  Doubles inverse, scores;  // T' - I and A
  double last = 1;
  double log2_bound = 0;  // of the norm of the map of the chunk's start state

  static std::size_t at(int64_t i, int64_t j, int64_t width) {
    return static_cast<std::size_t>(i * width + j);
  }

  ChunkFactors(const check::Inputs& inputs, cpu::oracle::Span span, int64_t head)
      : tokens(span.end - span.begin) {
    load(inputs, span, head);
    normalise(inputs.problem);
    find_decays(inputs, span, head);
    multiply(inputs.problem.key_dim);
    find_bound(inputs.problem.key_dim);
  }

 private:
  Doubles q_norm, k_norm, sum;  // sum of log decays, 0 of those that are -inf
  std::vector<int64_t> zeros;   // how many are

  void load(const check::Inputs& inputs, cpu::oracle::Span span, int64_t head) {
    const Problem& p = inputs.problem;
    const Tensors t = inputs.tensors();
    const int64_t q_head = q_head_of(p, head);
    q = cpu::oracle::load_rows(p, p.q, t.q, span, q_head, p.key_dim);
    k = cpu::oracle::load_rows(p, p.k, t.k, span, q_head, p.key_dim);
    v = cpu::oracle::load_rows(p, p.v, t.v, span, head, p.value_dim);
    for (int64_t i = 0; i < tokens; ++i)
      beta.push_back(cpu::oracle::step_size(p, t, span.begin + i, head));
  }

  void normalise(const Problem& p) {
    const auto norm = [&](const Doubles& rows, int64_t i) {
      double squares = 1e-6;
      for (int64_t d = 0; d < p.key_dim; ++d) squares += std::pow(rows[at(i, d, p.key_dim)], 2);
      return p.qk_l2norm ? 1 / std::sqrt(squares) : 1.0;
    };
    for (int64_t i = 0; i < tokens; ++i) {
      q_norm.push_back(effective_scale(p) * norm(q, i));
      k_norm.push_back(norm(k, i));
    }
  }

  void find_decays(const check::Inputs& inputs, cpu::oracle::Span span, int64_t head) {
    double all = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < tokens; ++i) {
      const double g =
          cpu::oracle::log_decay(inputs.problem, inputs.tensors(), span.begin + i, head)[0];
      const bool zero = std::isinf(g);
      all += zero ? 0 : g;
      count += zero;
      sum.push_back(all);
      zeros.push_back(count);
    }
    for (int64_t i = 0; i < tokens; ++i) {
      const auto n = static_cast<std::size_t>(i);
      const double since_start = zeros[n] > 0 ? 0 : std::exp(sum[n]);
      row_k.push_back(since_start * k_norm[n]);
      row_q.push_back(since_start * q_norm[n]);
      col_k.push_back(between(tokens - 1, i) * k_norm[n] * beta[n]);
      last = since_start;
    }
  }

  double between(int64_t i, int64_t j) const {
    const auto a = static_cast<std::size_t>(i), b = static_cast<std::size_t>(j);
    return zeros[a] != zeros[b] ? 0 : std::exp(sum[a] - sum[b]);
  }

  /// A token multiplies by its gate, and by |1 - beta |k|^2| along k.
  void find_bound(int64_t K) {
    if (tokens == 0) return;
    log2_bound = zeros.back() > 0 ? -HUGE_VAL : sum.back() / std::log(2);
    for (int64_t i = 0; i < tokens; ++i) {
      const auto n = static_cast<std::size_t>(i);
      double square = 0;
      for (int64_t d = 0; d < K; ++d) square += std::pow(k[at(i, d, K)] * k_norm[n], 2);
      log2_bound += std::log2(std::max(1.0, std::abs(1 - beta[n] * square)));
    }
  }

  void multiply(int64_t K) {
    const auto dot = [&](const Doubles& x, int64_t i, int64_t j) {
      double product = 0;
      for (int64_t d = 0; d < K; ++d) product += x[at(i, d, K)] * k[at(j, d, K)];
      return product;
    };
    inverse.assign(at(tokens, 0, tokens), 0);
    scores = inverse;
    Doubles L = inverse;
    for (int64_t i = 0; i < tokens; ++i) {
      const auto n = static_cast<std::size_t>(i);
      diag.push_back(dot(q, i, i) * q_norm[n] * k_norm[n] * beta[n]);
      for (int64_t j = 0; j < i; ++j) {
        const auto m = static_cast<std::size_t>(j);
        const double factor = between(i, j) * k_norm[m] * beta[m];
        scores[at(i, j, tokens)] = dot(q, i, j) * q_norm[n] * factor;
        L[at(i, j, tokens)] = dot(k, i, j) * k_norm[n] * factor;
      }
    }
    for (int64_t j = 0; j < tokens; ++j)  // (I + L) T' = I, column by column
      for (int64_t i = j + 1; i < tokens; ++i) {
        double left = -L[at(i, j, tokens)];
        for (int64_t m = j + 1; m < i; ++m) left -= L[at(i, m, tokens)] * inverse[at(m, j, tokens)];
        inverse[at(i, j, tokens)] = left;
      }
  }
};

/// Products take their operands as they are, or rounded to bf16.
enum class Operands { kFloat64, kBFloat16 };

/// o [L, V] and the state [K, V] after one sequence of a value head. With operands in bf16 o is
/// too, and a state takes errors in two parts, as the kernels have it.
struct ChunkForm {
  Doubles o, state;

  ChunkForm(const check::Inputs& inputs, cpu::oracle::Span span, int64_t head, Doubles start,
            Operands operands = Operands::kFloat64)
      : state(std::move(start)), rounds_(operands == Operands::kBFloat16) {
    const Problem& p = inputs.problem;
    if (state.empty()) state.assign(static_cast<std::size_t>(p.key_dim * p.value_dim), 0);
    for (int64_t begin = span.begin; begin < span.end; begin += kChunk) {
      ChunkFactors factors(inputs, {begin, std::min(begin + kChunk, span.end)}, head);
      for (Doubles* square : {&factors.inverse, &factors.scores})
        for (double& x : *square) x = rounded(x);
      step(factors, p.key_dim, p.value_dim);
    }
  }

 private:
  double rounded(double x) const {
    return rounds_ ? static_cast<double>(bf16_to_float(float_to_bf16(static_cast<float>(x)))) : x;
  }
  double in_two_parts(double x) const {
    const double first = rounded(x);
    return first + rounded(x - first);
  }
  static std::size_t at(int64_t i, int64_t j, int64_t width) {
    return ChunkFactors::at(i, j, width);
  }

  void step(const ChunkFactors& f, int64_t K, int64_t V) {
    for (int64_t c = 0; c < V; ++c) {
      Doubles z, errors, column;  // of the state
      for (int64_t d = 0; d < K; ++d) column.push_back(rounded(state[at(d, c, V)]));
      const auto read = [&](const Doubles& rows, int64_t i) {
        double product = 0;
        for (int64_t d = 0; d < K; ++d)
          product += rows[at(i, d, K)] * column[static_cast<std::size_t>(d)];
        return product;
      };
      for (int64_t i = 0; i < f.tokens; ++i) {
        const auto n = static_cast<std::size_t>(i);
        z.push_back(f.v[at(i, c, V)] - f.row_k[n] * read(f.k, i));
        double error = z.back(), out = f.row_q[n] * read(f.q, i);
        for (int64_t j = 0; j < i; ++j)
          error += f.inverse[at(i, j, f.tokens)] * rounded(z[static_cast<std::size_t>(j)]);
        errors.push_back(error);
        for (int64_t j = 0; j < i; ++j)
          out += f.scores[at(i, j, f.tokens)] * rounded(errors[static_cast<std::size_t>(j)]);
        outputs.push_back(rounded(out + f.diag[n] * error));
      }
      Doubles scaled;
      for (std::size_t i = 0; i < errors.size(); ++i)
        scaled.push_back(in_two_parts(f.col_k[i] * errors[i]));
      for (int64_t d = 0; d < K; ++d) {
        double& x = state[at(d, c, V)];
        x *= f.last;
        for (int64_t i = 0; i < f.tokens; ++i)
          x += f.k[at(i, d, K)] * scaled[static_cast<std::size_t>(i)];
      }
    }
    for (int64_t i = 0; i < f.tokens; ++i)
      for (int64_t c = 0; c < V; ++c) o.push_back(outputs[at(c, i, f.tokens)]);
    outputs.clear();
  }

  const bool rounds_;
  Doubles outputs;  // of the chunk, [V, tokens]
};

}  // namespace kda::test::gdn
