// SPDX-License-Identifier: Apache-2.0
// The formulas of chunk_grad (cuda/staged/backward/chunk_grad.hpp) in fp64, on random states,
// errors, dZ and d_o, and what a kernel is given of them on the device.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "core/layout.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/views.hpp"
#include "cuda/recurrent/backward/backward.hpp"
#include "cuda/staged/backward/chunk_grad_sm90.hpp"
#include "cuda/tile/chunk.hpp"
#include "cuda/tile/swizzle.hpp"
#include "support/gpu.hpp"

namespace kda::chunk_grad {

using check::Inputs;
using check::Regime;
using Matrix = std::vector<std::vector<double>>;

constexpr int64_t kChunk = cuda::kChunk;
constexpr double kSmallBeta = 0x1p-8;

inline Matrix matrix(int64_t rows, int64_t columns) {
  return Matrix(static_cast<std::size_t>(rows),
                std::vector<double>(static_cast<std::size_t>(columns)));
}
inline double dot(const std::vector<double>& x, const std::vector<double>& y) {
  // By pointers, for this is half the time of a test that is not optimised.
  const double *a = x.data(), *b = y.data();
  double sum = 0;
  for (std::size_t i = 0, count = x.size(); i < count; ++i) sum += a[i] * b[i];
  return sum;
}

/// A case, and what the kernel is given of the chains: random numbers of bf16.
struct Case {
  Inputs inputs;
  io::Buffer h, dh, errors, dz, d_o;
  bool with_d_o = true;

  explicit Case(Inputs from, uint64_t seed = 1) : inputs(std::move(from)) {
    random_ = check::Random(seed);
    h = random_tiles(true, 0.3), dh = random_tiles(true, 0.3);
    errors = random_tiles(false, 1), dz = random_tiles(false, 0.3);
    d_o = io::Buffer(static_cast<std::size_t>(2 * tokens() * HV() * V()));
    for (int64_t i = 0; i < tokens() * HV() * V(); ++i)
      store_element(d_o.data(), DType::kBFloat16, i, static_cast<float>(random_.normal()));
  }

  const Problem& problem() const { return inputs.problem; }
  int64_t K() const { return problem().key_dim; }
  int64_t V() const { return problem().value_dim; }
  int64_t H() const { return problem().num_heads; }
  int64_t HV() const { return problem().num_value_heads; }
  int64_t Kp() const { return K() <= 64 ? 64 : 128; }
  int64_t v_tiles() const { return (V() + 63) / 64; }
  int64_t tokens() const { return problem().batch * problem().num_tokens; }
  int64_t row() const { return cuda::backward_row(static_cast<int>(Kp())); }

  /// visit(chunk of the batch, first token, number of tokens)
  void for_each_chunk(const std::function<void(int64_t, int64_t, int64_t)>& visit) const {
    const std::vector<int64_t> offsets = inputs.offsets();
    int64_t chunk = 0;
    for (std::size_t n = 0; n + 1 < offsets.size(); ++n)
      for (int64_t token = offsets[n]; token < offsets[n + 1]; token += kChunk)
        visit(chunk++, token, std::min(kChunk, offsets[n + 1] - token));
  }
  int64_t chunks() const {
    int64_t count = 0;
    for_each_chunk([&](int64_t, int64_t, int64_t) { ++count; });
    return count;
  }
  /// The raw gate of a token of the batch, as its strides say.
  double gate(int64_t token, int64_t head, int64_t channel) const {
    const TensorDesc& g = problem().g;
    return load_element(inputs.g.data(), g.dtype,
                        row_offset(problem(), g, token, head) + channel * g.strides[3]);
  }
  /// Element of a tile [rows, columns].
  int64_t at(int64_t chunk, int64_t head, bool state, int64_t token_or_channel, int64_t v) const {
    const int64_t tile = (chunk * HV() + head) * v_tiles() + v / 64;
    const auto in_tile = [](int64_t row, int64_t column) {
      return cuda::swizzled(static_cast<int>(row), static_cast<int>(column / 8)) + column % 8;
    };
    return state ? tile * 64 * Kp() + in_tile(v % 64, token_or_channel)
                 : tile * 64 * 64 + in_tile(token_or_channel, v % 64);
  }

 private:
  /// NaN past V; zeros past the tokens of a chunk, and past K.
  io::Buffer random_tiles(bool state, double size) {
    const int64_t rows = state ? Kp() : kChunk;
    io::Buffer tiles(static_cast<std::size_t>(2 * chunks() * HV() * v_tiles() * 64 * rows));
    std::memset(tiles.data(), 0xff, tiles.size());
    for_each_chunk([&](int64_t chunk, int64_t, int64_t count) {
      for (int64_t head = 0; head < HV(); ++head)
        for (int64_t row = 0; row < rows; ++row)
          for (int64_t v = 0; v < V(); ++v)
            store_element(
                tiles.data(), DType::kBFloat16, at(chunk, head, state, row, v),
                row < (state ? K() : count) ? static_cast<float>(size * random_.normal()) : 0.0f);
    });
    return tiles;
  }

  check::Random random_{0};
};

inline double log_decay(const Problem& p, double raw, double bias, double A_log) {
  const double x = raw + bias, rate = std::exp(A_log);
  if (p.gate_mode == GateMode::kSoftplus)
    return -rate * (std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))));
  if (p.gate_mode == GateMode::kBounded) return p.lower_bound / (1 + std::exp(-rate * x));
  return raw;
}
inline double beta_of(const Problem& p, double raw) {
  if (p.beta_mode == BetaMode::kPlain) return raw;
  return (p.beta_mode == BetaMode::kSigmoid2 ? 2 : 1) / (1 + std::exp(-raw));
}

/// The tokens of a chunk and value head in fp64.
struct Chunk {
  int64_t count;
  Matrix q, k, decay;      // [tokens, K]: scaled and normalised
  Matrix d_o, errors, dz;  // [tokens, V]
  Matrix state, d_state;   // [K, V]
  std::vector<double> beta;

  Chunk(const Case& x, int64_t chunk, int64_t token0, int64_t tokens, int64_t head)
      : count(tokens),
        q(matrix(tokens, x.K())),
        k(q),
        decay(q),
        d_o(matrix(tokens, x.V())),
        errors(d_o),
        dz(d_o),
        state(matrix(x.K(), x.V())),
        d_state(state),
        beta(static_cast<std::size_t>(tokens)) {
    const Problem& p = x.problem();
    const auto bf16 = [](const io::Buffer& from, int64_t at) {
      return static_cast<double>(load_element(from.data(), DType::kBFloat16, at));
    };
    const int64_t q_head = q_head_of(p, head);
    for (int64_t i = 0; i < tokens; ++i) {
      const auto t = static_cast<std::size_t>(i);
      const int64_t at = (token0 + i) * x.HV() + head, q_at = (token0 + i) * x.H() + q_head;
      for (int64_t d = 0; d < x.K(); ++d) {
        const auto c = static_cast<std::size_t>(d);
        q[t][c] = load_element(x.inputs.q.data(), p.q.dtype, q_at * x.K() + d);
        k[t][c] = load_element(x.inputs.k.data(), p.k.dtype, q_at * x.K() + d);
        const double A_log = p.A_log ? x.inputs.A_log.as<float>()[head] : 0;
        const double bias = p.dt_bias ? x.inputs.dt_bias.as<float>()[head * x.K() + d] : 0;
        decay[t][c] = std::exp(log_decay(p, x.gate(token0 + i, head, d), bias, A_log));
      }
      normalise(p, effective_scale(p), &q[t]);
      normalise(p, 1, &k[t]);
      beta[t] = beta_of(p, load_element(x.inputs.beta.data(), p.beta.dtype, at));
      for (int64_t v = 0; v < x.V(); ++v) {
        const auto c = static_cast<std::size_t>(v);
        d_o[t][c] = x.with_d_o ? bf16(x.d_o, at * x.V() + v) : 0;
        errors[t][c] = bf16(x.errors, x.at(chunk, head, false, i, v));
        dz[t][c] = bf16(x.dz, x.at(chunk, head, false, i, v));
      }
    }
    for (int64_t d = 0; d < x.K(); ++d)
      for (int64_t v = 0; v < x.V(); ++v) {
        const int64_t at = x.at(chunk, head, true, d, v);
        state[static_cast<std::size_t>(d)][static_cast<std::size_t>(v)] = bf16(x.h, at);
        d_state[static_cast<std::size_t>(d)][static_cast<std::size_t>(v)] = bf16(x.dh, at);
      }
  }

 private:
  static void normalise(const Problem& p, double scale, std::vector<double>* row) {
    if (p.qk_l2norm) scale /= std::sqrt(dot(*row, *row) + 1e-6);
    for (double& element : *row) element *= scale;
  }
};

struct Gradients {
  Matrix dq, dk, dg;
  std::vector<double> dbeta;
};

/// The contract of launch_chunk_grad(), channel by channel.
inline Gradients expected(const Chunk& c) {
  const auto count = static_cast<std::size_t>(c.count);
  const std::size_t K = c.state.size();
  Gradients out{matrix(c.count, static_cast<int64_t>(K)), {}, {}, std::vector<double>(count)};
  out.dk = out.dg = out.dq;
  Matrix P = matrix(c.count, c.count), R = P;
  for (std::size_t i = 0; i < count; ++i)
    for (std::size_t j = 0; j <= i; ++j) {
      P[i][j] = dot(c.d_o[i], c.errors[j]);
      if (j < i) R[i][j] = -dot(c.dz[i], c.errors[j]);
    }
  std::vector<double> along(count);  // k . columns
  for (std::size_t d = 0; d < K; ++d) {
    std::vector<double> rows(count), columns(count), from_end(count);
    double start = 1, end = 1;
    for (std::size_t i = 0; i < count; ++i) {
      start *= c.decay[i][d];
      out.dq[i][d] = start * dot(c.d_o[i], c.state[d]);
      rows[i] = -start * dot(c.dz[i], c.state[d]);
    }
    double through = start * dot(c.state[d], c.d_state[d]);
    for (std::size_t j = count; j-- > 0;) {
      columns[j] = end * dot(c.errors[j], c.d_state[d]);
      through += c.beta[j] * c.k[j][d] * columns[j];
      end *= c.decay[j][d];
    }
    for (std::size_t j = 0; j < count; ++j) {
      double between = 1;
      for (std::size_t i = j; i < count; ++i) {
        if (i > j) between *= c.decay[i][d];
        out.dq[i][d] += P[i][j] * c.beta[j] * between * c.k[j][d];
        rows[i] += R[i][j] * c.beta[j] * between * c.k[j][d];
        columns[j] += between * (P[i][j] * c.q[i][d] + R[i][j] * c.k[i][d]);
      }
    }
    for (std::size_t i = count; i-- > 0;) {
      out.dk[i][d] = rows[i] + c.beta[i] * columns[i];
      along[i] += c.k[i][d] * columns[i];
      through += c.q[i][d] * out.dq[i][d] + c.k[i][d] * (rows[i] - c.beta[i] * columns[i]);
      out.dg[i][d] = through;
    }
  }
  for (std::size_t j = 0; j < count; ++j)
    out.dbeta[j] =
        std::abs(c.beta[j]) < kSmallBeta ? along[j] : dot(c.dz[j], c.errors[j]) / c.beta[j];
  return out;
}

/// What a kernel is given, on the device.
struct Call {
  const Case& x;
  std::vector<check::DeviceBuffer> memory;
  cuda::HeadGates<cuda::FinishedGradArgs> args;

  explicit Call(const Case& of) : x(of) {
    const Problem& p = x.problem();
    const std::vector<int64_t> offsets = x.inputs.offsets();
    std::vector<int64_t> words(offsets);
    words.push_back(0);
    for (std::size_t n = 0; n + 1 < offsets.size(); ++n)
      words.push_back(words.back() + (offsets[n + 1] - offsets[n] + kChunk - 1) / kChunk);
    Tensors tensors;
    tensors.q = upload(x.inputs.q), tensors.k = upload(x.inputs.k);
    tensors.g = upload(x.inputs.g), tensors.beta = upload(x.inputs.beta);
    if (p.A_log) tensors.A_log = upload(x.inputs.A_log);
    if (p.dt_bias) tensors.dt_bias = upload(x.inputs.dt_bias);
    args.shape = cuda::shape_of(p);
    args.map.num_sequences = p.num_sequences;
    args.map.num_tokens = p.num_tokens;
    args.map.chunks = cuda::Divisor((p.num_tokens + kChunk - 1) / kChunk);
    if (p.cu_seqlens) {
      const auto* map = static_cast<const int64_t*>(device(words.data(), 8 * words.size()));
      args.map.cu_seqlens = map;
      args.map.chunk_offsets = map + offsets.size();
    }
    args.num_chunks = x.chunks() + (p.cu_seqlens ? 2 : 0);
    args.q = cuda::row_view(p.q, tensors.q), args.k = cuda::row_view(p.k, tensors.k);
    args.g = cuda::row_view(p.g, tensors.g), args.beta = cuda::row_view(p.beta, tensors.beta);
    args.gate = cuda::gate_view(p, tensors);
    args.gate_step = args.dgate_step = has_head_gate(p) ? 0 : 1;
    args.tiled = p.head_map == HeadMap::kTiled;
    if (x.with_d_o) {
      const TensorDesc desc = contiguous(DType::kBFloat16, {p.batch, p.num_tokens, x.HV(), x.V()});
      args.d_o = cuda::row_view(desc, upload(x.d_o));
    }
    args.h = upload(x.h), args.dh = upload(x.dh);
    args.errors = upload(x.errors), args.dz = upload(x.dz);
    args.rows = static_cast<float*>(unset(4 * rows()));
  }

  std::size_t rows() const { return static_cast<std::size_t>(x.tokens() * x.HV() * x.row()); }
  void* device(const void* source, std::size_t bytes) {
    memory.emplace_back(bytes);
    memory.back().upload(source, bytes);
    return memory.back().data();
  }
  void* upload(const io::Buffer& from) { return device(from.data(), from.size()); }
  void* unset(std::size_t bytes) {
    memory.emplace_back(bytes);
    memory.back().fill(0xff);
    return memory.back().data();
  }
  /// The buffer that was made last.
  template <class T>
  std::vector<T> download_last(std::size_t count) const {
    std::vector<T> out(count);
    memory.back().download(out.data(), sizeof(T) * count);
    return out;
  }
};

struct Sums {
  double error = 0, size = 0;
  void add(double got, double want) {
    error += (got - want) * (got - want), size += want * want;
    if (!std::isfinite(got)) error = NAN;
  }
  double relative() const { return size > 0 ? std::sqrt(error / size) : std::sqrt(error); }
};

/// Errors relative to the norm over all heads.
struct Errors {
  Sums dq, dk, dg, dbeta;
};

inline check::GenerateOptions options_of(int64_t tokens, int64_t heads, int64_t K, int64_t V,
                                         Regime regime) {
  check::GenerateOptions options = test::shape16(tokens, heads, K, V);
  options.initial_state = false;
  options.regime = regime;
  return options;
}

/// Gates as f(token, channel) says, in the log domain.
inline Inputs with_log_gates(int64_t tokens, int64_t K, int64_t V, DType dtype,
                             const std::function<double(int64_t, int64_t)>& f) {
  Inputs inputs = check::generate(options_of(tokens, 1, K, V, Regime::kLog));
  inputs.problem.g = contiguous(dtype, {1, tokens, 1, K});
  inputs.g = io::Buffer(static_cast<std::size_t>(tokens * K * dtype_size(dtype)));
  for (int64_t i = 0; i < tokens * K; ++i)
    store_element(inputs.g.data(), dtype, i, static_cast<float>(f(i / K, i % K)));
  return inputs;
}

/// One head and chunk: no loss from token `end` on.
inline void without_loss_from(Case* x, int64_t end) {
  std::memset(x->dh.data(), 0, x->dh.size());
  for (int64_t token = end; token < kChunk; ++token)
    for (int64_t v = 0; v < x->V(); ++v) {
      store_element(x->d_o.data(), DType::kBFloat16, token * x->V() + v, 0);
      store_element(x->dz.data(), DType::kBFloat16, x->at(0, 0, false, token, v), 0);
    }
}

/// NaN in all of its tokens and chunks, begin .. end - 1. One head, types of two bytes.
inline void poison_second_sequence(Case* x, int64_t begin_token, int64_t end_token,
                                   int64_t begin_chunk, int64_t end_chunk) {
  const auto poison = [](io::Buffer* buffer, int64_t row, int64_t begin, int64_t end) {
    std::memset(buffer->data() + begin * row, 0xff, static_cast<std::size_t>((end - begin) * row));
  };
  for (io::Buffer* rows : {&x->inputs.q, &x->inputs.k, &x->inputs.g})
    poison(rows, 2 * x->K(), begin_token, end_token);
  poison(&x->d_o, 2 * x->V(), begin_token, end_token);
  poison(&x->inputs.beta, 2, begin_token, end_token);
  for (io::Buffer* tiles : {&x->h, &x->dh})
    poison(tiles, 2 * x->K() * x->V(), begin_chunk, end_chunk);
  for (io::Buffer* tiles : {&x->errors, &x->dz})
    poison(tiles, 2 * kChunk * x->V(), begin_chunk, end_chunk);
}

}  // namespace kda::chunk_grad
