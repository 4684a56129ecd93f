// SPDX-License-Identifier: Apache-2.0
// A server's two steps in C++17, on a pool of states and over the C ABI alone (kda/call.hpp): the
// prompts of two requests, packed, into their slots; then a token of each, in place. What comes out
// is compared with a forward of each request.
#include <cmath>
#include <cstdio>
#include <vector>

#include "kda/call.hpp"

namespace {

constexpr int64_t H = 4, D = 128, kSlots = 8, kRow = H * D;

std::vector<float> waves(int64_t count, float pace, float shift) {
  std::vector<float> x(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = shift + std::sin(pace * static_cast<float>(i));
  return x;
}

/// Inputs of `count` tokens, and the outputs of a call.
struct Tokens {
  explicit Tokens(int64_t count, float phase = 0)
      : q(waves(count * kRow, .7f, phase)),
        k(waves(count * kRow, 1.3f, phase)),
        v(waves(count * kRow, .9f, phase)),
        g(waves(count * kRow, .3f, -1.5f)),
        beta(waves(count * H, .5f, phase)),
        o(q.size()) {}
  void append(const Tokens& other) {
    q.insert(q.end(), other.q.begin(), other.q.end());
    k.insert(k.end(), other.k.begin(), other.k.end());
    v.insert(v.end(), other.v.begin(), other.v.end());
    g.insert(g.end(), other.g.begin(), other.g.end());
    beta.insert(beta.end(), other.beta.begin(), other.beta.end());
    o.resize(q.size());
  }
  std::vector<float> q, k, v, g, beta, o;
};

/// A problem of [batch, tokens], with the options of the layer.
kda::c::Problem problem_of(Tokens& x, int64_t batch, int64_t tokens) {
  kda::c::Problem p;
  p.batch = p.num_sequences = batch;
  p.num_tokens = tokens;
  p.num_heads = p.num_value_heads = H;
  p.beta_mode = KDA_BETA_SIGMOID;
  p.qk_l2norm = 1;
  p.tokens(KDA_FP32, {x.q.data(), x.k.data(), x.v.data(), x.g.data(), x.beta.data(), x.o.data()});
  return p;
}

double relative_error(const std::vector<float>& whole, const float* last) {
  double error = 0, norm = 0;
  const float* expected = whole.data() + whole.size() - kRow;
  for (int64_t i = 0; i < kRow; ++i) {
    error += std::pow(last[i] - expected[i], 2);
    norm += std::pow(expected[i], 2);
  }
  return norm > 0 ? std::sqrt(error / norm) : 1;
}

}  // namespace

int main() {
  Tokens first(60), second(36, .25f), packed = first, next(2, .5f);
  packed.append(second);
  std::vector<float> pool(kSlots * H * D * D);
  const int32_t slots[] = {5, 2};
  const int64_t ends[] = {0, 60, 96};

  kda::c::Problem prefill = problem_of(packed, 1, 96);
  prefill.num_sequences = 2;
  prefill.has_cu_seqlens = 1;
  prefill.states(&kda_problem::final_state, pool.data(), KDA_FP32, kSlots, slots);
  kda::c::call(prefill, ends);

  kda::c::Problem step = problem_of(next, 2, 1);
  step.operation = KDA_DECODE;
  step.states(&kda_problem::initial_state, pool.data(), KDA_FP32, kSlots, slots);
  kda::c::call(step);

  double worst = 0;
  for (int n = 0; n < 2; ++n) {
    Tokens whole = n == 0 ? first : second, token(0);
    const auto part = [&](const std::vector<float>& x, int64_t size) {
      return std::vector<float>(x.begin() + n * size, x.begin() + (n + 1) * size);
    };
    token.q = part(next.q, kRow), token.k = part(next.k, kRow), token.v = part(next.v, kRow);
    token.g = part(next.g, kRow), token.beta = part(next.beta, H);
    whole.append(token);
    kda::c::call(problem_of(whole, 1, ends[n + 1] - ends[n] + 1));
    worst = std::fmax(worst, relative_error(whole.o, next.o.data() + n * kRow));
  }
  try {
    step.num_sequences = 3;
    kda::c::call(step);
    return 1;
  } catch (const kda::c::Error& error) {  // what is refused says why
    std::printf("two requests in a pool: relative error %.1e; %s\n", worst, error.what());
  }
  return worst < 1e-5 ? 0 : 1;
}
