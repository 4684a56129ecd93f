// SPDX-License-Identifier: Apache-2.0
// chunk_grad alone: gradients of random states, errors, dZ and d_o against its formulas in fp64.
// That of Hopper takes them back through norms, gates and steps, too.
#include <cmath>
#include <functional>
#include <vector>

#include "support/gpu.hpp"

#ifdef KDA_WITH_CUDA

#include "cuda/launch/built.hpp"
#include "cuda/launch/views.hpp"
#include "cuda/recurrent/backward/backward.hpp"
#include "cuda/staged/backward/chunk_grad_sm90.hpp"
#include "cuda/tile/chunk.hpp"
#include "cuda/tile/swizzle.hpp"

namespace kda {
namespace {

using check::Inputs;
using check::Regime;
using Matrix = std::vector<std::vector<double>>;

constexpr int64_t kChunk = cuda::kChunk;
constexpr double kSmallBeta = 0x1p-8;

Matrix matrix(int64_t rows, int64_t columns) {
  return Matrix(static_cast<std::size_t>(rows),
                std::vector<double>(static_cast<std::size_t>(columns)));
}
double dot(const std::vector<double>& x, const std::vector<double>& y) {
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
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

double log_decay(const Problem& p, double raw, double bias, double A_log) {
  const double x = raw + bias, rate = std::exp(A_log);
  if (p.gate_mode == GateMode::kSoftplus)
    return -rate * (std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))));
  if (p.gate_mode == GateMode::kBounded) return p.lower_bound / (1 + std::exp(-rate * x));
  return raw;
}
double beta_of(const Problem& p, double raw) {
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
    const int64_t q_head = head / (x.HV() / x.H());
    for (int64_t i = 0; i < tokens; ++i) {
      const auto t = static_cast<std::size_t>(i);
      const int64_t at = (token0 + i) * x.HV() + head, q_at = (token0 + i) * x.H() + q_head;
      for (int64_t d = 0; d < x.K(); ++d) {
        const auto c = static_cast<std::size_t>(d);
        q[t][c] = load_element(x.inputs.q.data(), p.q.dtype, q_at * x.K() + d);
        k[t][c] = load_element(x.inputs.k.data(), p.k.dtype, q_at * x.K() + d);
        const double A_log = p.A_log ? x.inputs.A_log.as<float>()[head] : 0;
        const double bias = p.dt_bias ? x.inputs.dt_bias.as<float>()[head * x.K() + d] : 0;
        decay[t][c] = std::exp(
            log_decay(p, load_element(x.inputs.g.data(), p.g.dtype, at * x.K() + d), bias, A_log));
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
Gradients expected(const Chunk& c) {
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
  cuda::FinishedGradArgs args;

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

/// Runs the kernel; `rows` as it leaves them, NaN where it writes nothing.
std::vector<float> run(const Case& x) {
  Call call(x);
  throw_if_error(cuda::launch_chunk_grad({call.args}, {}));
  check::synchronize_device();
  return call.download_last<float>(call.rows());
}

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

Errors errors_of(const Case& x, const std::vector<float>& rows) {
  Errors errors;
  x.for_each_chunk([&](int64_t chunk, int64_t token0, int64_t count) {
    for (int64_t head = 0; head < x.HV(); ++head) {
      const Gradients want = expected(Chunk(x, chunk, token0, count, head));
      for (int64_t i = 0; i < count; ++i) {
        const float* row = rows.data() + ((token0 + i) * x.HV() + head) * x.row();
        const auto t = static_cast<std::size_t>(i);
        for (int64_t d = 0; d < x.K(); ++d) {
          const auto c = static_cast<std::size_t>(d);
          errors.dq.add(row[d], want.dq[t][c]);
          errors.dk.add(row[x.Kp() + d], want.dk[t][c]);
          errors.dg.add(row[2 * x.Kp() + d], want.dg[t][c]);
        }
        errors.dbeta.add(row[3 * x.Kp()], want.dbeta[t]);
      }
    }
  });
  return errors;
}

void expect_close(const Case& x, const std::string& what) {
  const Errors errors = errors_of(x, run(x));
  if (std::getenv("KDA_TEST_VERBOSE"))
    std::printf("  %-36s dq %.2e  dk %.2e  dg %.2e  dbeta %.2e\n", what.c_str(),
                errors.dq.relative(), errors.dk.relative(), errors.dg.relative(),
                errors.dbeta.relative());
  EXPECT_LT(errors.dq.relative(), 4.2e-3) << what;
  EXPECT_LT(errors.dk.relative(), 4.2e-3) << what;
  EXPECT_LT(errors.dg.relative(), 4.4e-3) << what;
  EXPECT_LT(errors.dbeta.relative(), 4.8e-3) << what;
}

class ChunkGrad : public test::GpuTest {};

check::GenerateOptions options_of(int64_t tokens, int64_t heads, int64_t K, int64_t V,
                                  Regime regime) {
  check::GenerateOptions options = test::shape16(tokens, heads, K, V);
  options.initial_state = false;
  options.regime = regime;
  return options;
}

TEST_F(ChunkGrad, EveryRegime) {
  for (int regime = 0; regime < check::kNumRegimes; ++regime)
    expect_close(Case(check::generate(options_of(130, 1, 128, 64, static_cast<Regime>(regime)))),
                 check::regime_name(static_cast<Regime>(regime)));
}

TEST_F(ChunkGrad, HeadSizes) {
  for (const int64_t K : {32, 64, 128})
    for (const int64_t V : {24, 64, 128})
      expect_close(Case(check::generate(options_of(70, 1, K, V, Regime::kTrained))),
                   "K " + std::to_string(K) + " V " + std::to_string(V));
}

TEST_F(ChunkGrad, LengthsAroundChunksAndSubchunks) {
  check::GenerateOptions options = options_of(0, 1, 64, 64, Regime::kStrong);
  options.seq_lens = {1, 15, 0, 16, 17, 63, 64, 65, 129};
  options.num_value_heads = 2;
  expect_close(Case(check::generate(options)), "packed, grouped");
  options.seq_lens.clear();
  options.batch = 2, options.num_tokens = 79;
  expect_close(Case(check::generate(options)), "batch of 2");
}

TEST_F(ChunkGrad, NothingIsWrittenBesideTheRows) {
  check::GenerateOptions options = options_of(0, 1, 40, 24, Regime::kTrained);
  options.seq_lens = {70, 3};
  const Case x(check::generate(options));
  const std::vector<float> rows = run(x);
  for (int64_t token = 0; token < x.tokens(); ++token)
    for (int64_t i = 3 * x.Kp() + 1; i < x.row(); ++i)
      EXPECT_TRUE(std::isnan(rows[static_cast<std::size_t>(token * x.row() + i)]));
}

/// Gates as f(token, channel) says, in the log domain.
Inputs with_log_gates(int64_t tokens, int64_t K, int64_t V, DType dtype,
                      const std::function<double(int64_t, int64_t)>& f) {
  Inputs inputs = check::generate(options_of(tokens, 1, K, V, Regime::kLog));
  inputs.problem.g = contiguous(dtype, {1, tokens, 1, K});
  inputs.g = io::Buffer(static_cast<std::size_t>(tokens * K * dtype_size(dtype)));
  for (int64_t i = 0; i < tokens * K; ++i)
    store_element(inputs.g.data(), dtype, i, static_cast<float>(f(i / K, i % K)));
  return inputs;
}

TEST_F(ChunkGrad, GatesOutOfTheAnchorsRange) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const auto gates = [&](const char* what, const std::function<double(int64_t, int64_t)>& f) {
      expect_close(Case(with_log_gates(100, 64, 64, dtype, f)), what);
    };
    gates("-inf here and there, else 0", [](int64_t token, int64_t channel) {
      return (token * 7 + channel * 3) % 11 == 0 ? -INFINITY : 0.0;
    });
    gates("most by exp(-42) a token",
          [](int64_t, int64_t channel) { return channel % 8 == 3 ? -0.1 : -42.0; });
    gates("one warp's channels alone", [](int64_t token, int64_t channel) {
      return channel / 16 == 1 ? -0.5 * static_cast<double>(token % 40) : -0.02;
    });
    gates("falls and grows", [](int64_t token, int64_t) {
      return token == 4 || token == 5 ? -52.0 : token == 8 || token == 9 ? 20.0 : -0.01;
    });
    gates("grows", [](int64_t, int64_t channel) { return channel % 2 ? 0.02 : -0.1; });
  }
}

TEST_F(ChunkGrad, DeadDecaysHaveNoGradient) {
  const auto dead = [](int64_t token, int64_t channel) { return (token + channel) % 5 == 0; };
  const Case x(with_log_gates(70, 64, 64, DType::kBFloat16, [&](int64_t token, int64_t channel) {
    return dead(token, channel) ? token % 2 ? -INFINITY : -120.0 : -0.1;
  }));
  const std::vector<float> rows = run(x);
  for (int64_t token = 0; token < 70; ++token)
    for (int64_t d = 0; d < 64; ++d)
      if (dead(token, d)) {
        EXPECT_EQ(rows[static_cast<std::size_t>(token * x.row() + 2 * x.Kp() + d)], 0);
      }
}

TEST_F(ChunkGrad, PlainBetasWithZeros) {
  Inputs inputs = check::generate(options_of(100, 2, 128, 64, Regime::kTrained));
  inputs.problem.beta_mode = BetaMode::kPlain;
  const float betas[] = {0.7f, 0.0f, 0x1p-9f, -0.4f, -0x1p-12f, 0x1p-8f, -0.0f};
  for (int64_t i = 0; i < 200; ++i)
    store_element(inputs.beta.data(), inputs.problem.beta.dtype, i, betas[i % 7]);
  expect_close(Case(inputs), "plain betas");
}

TEST_F(ChunkGrad, WithoutTheGradientOfOutputs) {
  Case x(check::generate(options_of(70, 1, 64, 64, Regime::kTrained)));
  x.with_d_o = false;
  expect_close(x, "no d_o");
}

/// One head and chunk: no loss from token `end` on.
void without_loss_from(Case* x, int64_t end) {
  std::memset(x->dh.data(), 0, x->dh.size());
  for (int64_t token = end; token < kChunk; ++token)
    for (int64_t v = 0; v < x->V(); ++v) {
      store_element(x->d_o.data(), DType::kBFloat16, token * x->V() + v, 0);
      store_element(x->dz.data(), DType::kBFloat16, x->at(0, 0, false, token, v), 0);
    }
}

/// What only later tokens have reaches no earlier one: exact zeros where nothing else is.
TEST_F(ChunkGrad, LaterTokensAreExactZerosToEarlierOnes) {
  Case x(check::generate(options_of(64, 1, 64, 64, Regime::kSoftplus)));
  constexpr int64_t kEnd = 21;
  without_loss_from(&x, kEnd);
  const std::vector<float> rows = run(x);
  for (int64_t token = kEnd; token < 64; ++token)
    for (int64_t i = 0; i <= 3 * 64; ++i)
      EXPECT_EQ(rows[static_cast<std::size_t>(token * x.row() + i)], 0) << token << " " << i;
}

/// NaN in all of its tokens and chunks, begin .. end - 1. One head, types of two bytes.
void poison_second_sequence(Case* x, int64_t begin_token, int64_t end_token, int64_t begin_chunk,
                            int64_t end_chunk) {
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

TEST_F(ChunkGrad, PoisonReachesNoOtherSequence) {
  check::GenerateOptions options = options_of(0, 1, 64, 64, Regime::kTrained);
  options.seq_lens = {40, 70, 30};
  const Case clean(check::generate(options));
  Case poisoned = clean;
  poison_second_sequence(&poisoned, 40, 110, 1, 3);
  const std::vector<float> want = run(clean), got = run(poisoned);
  const auto row = static_cast<std::size_t>(clean.row());
  EXPECT_EQ(std::memcmp(want.data(), got.data(), 4 * 40 * row), 0);
  EXPECT_EQ(std::memcmp(want.data() + 110 * row, got.data() + 110 * row, 4 * 30 * row), 0);
}

TEST_F(ChunkGrad, SameBitsAgain) {
  const Case x(check::generate(options_of(130, 2, 64, 64, Regime::kSoftplus)));
  const std::vector<float> first = run(x), second = run(x);
  EXPECT_EQ(std::memcmp(first.data(), second.data(), 4 * first.size()), 0);
}

// ---- on Hopper

/// dq, dk as the kernel stores them, [token, H, K], dg [token, HV, K], dbeta [token, HV], and the
/// sums of chunks [chunk, HV, K + 1]. NaN where it writes nothing.
struct Finished {
  io::Buffer dq, dk, dg;
  std::vector<float> dbeta;
  std::vector<double> sums;
  std::vector<uint32_t> fallback;
};
/// Chunks and value heads that were left to the second launch.
int64_t num_left(const Finished& x) {
  int64_t count = 0;
  for (std::size_t i = 0; i < x.fallback.size(); i += cuda::kFallbackWords)
    count += (x.fallback[i] | x.fallback[i + 1]) != 0;
  return count;
}

/// On few blocks each has several chunks.
Finished run_on_hopper(const Case& x, int64_t num_blocks = 3) {
  Call call(x);
  const auto rows = [&](int64_t heads) {
    return contiguous(DType::kBFloat16, {x.problem().batch, x.problem().num_tokens, heads, x.K()});
  };
  const auto size = static_cast<std::size_t>(x.tokens() * x.HV());
  const auto q_size = static_cast<std::size_t>(x.tokens() * x.H());
  const auto tiles = static_cast<std::size_t>(call.args.num_chunks * x.HV());
  const auto row_bytes = static_cast<std::size_t>(2 * x.K());
  const std::size_t first = call.memory.size();
  call.args.dq = cuda::row_view(rows(x.H()), call.unset(q_size * row_bytes));
  call.args.dk = cuda::row_view(rows(x.H()), call.unset(q_size * row_bytes));
  call.args.dg = cuda::row_view(rows(x.HV()), call.unset(size * row_bytes));
  call.args.dbeta = cuda::row_view(
      contiguous(DType::kFloat32, {x.problem().batch, x.problem().num_tokens, x.HV()}),
      call.unset(4 * size));
  const auto sums = tiles * static_cast<std::size_t>(x.K() + 1);
  call.args.sums = static_cast<double*>(call.unset(8 * sums));
  call.args.fallback = static_cast<uint32_t*>(call.unset(4 * tiles * cuda::kFallbackWords));
  call.args.rows = static_cast<float*>(call.unset(
      4 * std::max(call.rows(), static_cast<std::size_t>(num_blocks * cuda::kHeadSums))));
  if constexpr (cuda::sm90::kBuilt)
    throw_if_error(cuda::sm90::launch_chunk_grad(call.args, num_blocks, {}));
  check::synchronize_device();
  Finished out;
  out.dbeta.resize(size), out.sums.resize(sums);
  std::size_t next = first;
  for (io::Buffer* buffer : {&out.dq, &out.dk, &out.dg}) {
    *buffer = io::Buffer((buffer == &out.dg ? size : q_size) * row_bytes);
    call.memory[next++].download(buffer->data(), buffer->size());
  }
  call.memory[next++].download(out.dbeta.data(), 4 * size);
  call.memory[next++].download(out.sums.data(), 8 * sums);
  out.fallback.resize(tiles * cuda::kFallbackWords);
  call.memory[next].download(out.fallback.data(), 4 * out.fallback.size());
  return out;
}

/// From dy to dx of y = scale x / |x|, or scale x.
void undo_norm(const Problem& p, double scale, const std::vector<double>& x,
               std::vector<double>* dy) {
  const double r2 = p.qk_l2norm ? 1 / (dot(x, x) + 1e-6) : 0, along = dot(x, *dy) * r2;
  for (std::size_t d = 0; d < x.size(); ++d)
    (*dy)[d] = scale * (p.qk_l2norm ? std::sqrt(r2) : 1) * ((*dy)[d] - x[d] * along);
}

/// The gradients of a chunk, back through norms, gates and steps, and their sums.
struct Expected {
  Gradients raw;
  std::vector<double> sums;

  Expected(const Case& x, int64_t chunk, int64_t token0, int64_t count, int64_t head)
      : Expected(x, Chunk(x, chunk, token0, count, head), token0, head) {}

 private:
  Expected(const Case& x, const Chunk& chunk, int64_t token0, int64_t head)
      : raw(expected(chunk)), sums(static_cast<std::size_t>(x.K() + 1)) {
    const Problem& p = x.problem();
    const auto channels = static_cast<std::size_t>(x.K());
    const double rate = std::exp(p.A_log ? x.inputs.A_log.as<float>()[head] : 0);
    for (int64_t i = 0; i < chunk.count; ++i) {
      const auto t = static_cast<std::size_t>(i);
      const int64_t at = (token0 + i) * x.HV() + head;
      const int64_t q_at = (token0 + i) * x.H() + head / (x.HV() / x.H());
      std::vector<double> q(channels), k(q);
      for (std::size_t d = 0; d < channels; ++d) {
        const int64_t element = at * x.K() + static_cast<int64_t>(d);
        const int64_t q_element = q_at * x.K() + static_cast<int64_t>(d);
        q[d] = load_element(x.inputs.q.data(), p.q.dtype, q_element);
        k[d] = load_element(x.inputs.k.data(), p.k.dtype, q_element);
        const double g = load_element(x.inputs.g.data(), p.g.dtype, element);
        const double bias =
            p.dt_bias ? x.inputs.dt_bias.as<float>()[head * x.K() + static_cast<int64_t>(d)] : 0;
        double& dg = raw.dg[t][d];
        const double sigmoid = 1 / (1 + std::exp(-(g + bias)));
        if (p.gate_mode == GateMode::kSoftplus) {
          if (dg != 0) sums[channels] += dg * log_decay(p, g, bias, std::log(rate));
          dg *= -rate * sigmoid;
        } else if (p.gate_mode == GateMode::kBounded) {
          const double bounded = 1 / (1 + std::exp(-rate * (g + bias)));
          const double inner = dg * p.lower_bound * bounded * (1 - bounded) * rate;
          if (inner != 0) sums[channels] += inner * (g + bias);
          dg = inner;
        }
        sums[d] += dg;
      }
      undo_norm(p, effective_scale(p), q, &raw.dq[t]);
      undo_norm(p, 1, k, &raw.dk[t]);
      if (p.beta_mode != BetaMode::kPlain)  // beta cancels: beta' = beta sigmoid(-raw)
        raw.dbeta[t] = dot(chunk.dz[t], chunk.errors[t]) /
                       (1 + std::exp(load_element(x.inputs.beta.data(), p.beta.dtype, at)));
    }
  }
};

void expect_close_on_hopper(const Case& x, const std::string& what) {
  const Finished got = run_on_hopper(x);
  Errors errors;
  std::vector<Sums> sums(2);
  const auto channels = static_cast<std::size_t>(x.K());
  x.for_each_chunk([&](int64_t chunk, int64_t token0, int64_t count) {
    const auto add = [&](const io::Buffer& rows, int64_t heads, int64_t head,
                         const Matrix& want_rows, Sums* to) {
      for (int64_t i = 0; i < count; ++i)
        for (std::size_t d = 0; d < channels; ++d)
          to->add(load_element(rows.data(), DType::kBFloat16,
                               ((token0 + i) * heads + head) * x.K() + static_cast<int64_t>(d)),
                  want_rows[static_cast<std::size_t>(i)][d]);
    };
    const int64_t group = x.HV() / x.H();
    Matrix dq, dk;  // summed over the value heads of a q/k head
    for (int64_t head = 0; head < x.HV(); ++head) {
      const Expected want(x, chunk, token0, count, head);
      if (head % group == 0) dq = dk = matrix(count, x.K());
      for (std::size_t i = 0; i < dq.size(); ++i)
        for (std::size_t d = 0; d < channels; ++d)
          dq[i][d] += want.raw.dq[i][d], dk[i][d] += want.raw.dk[i][d];
      if (head % group == group - 1) {
        add(got.dq, x.H(), head / group, dq, &errors.dq);
        add(got.dk, x.H(), head / group, dk, &errors.dk);
      }
      add(got.dg, x.HV(), head, want.raw.dg, &errors.dg);
      for (int64_t i = 0; i < count; ++i)
        errors.dbeta.add(got.dbeta[static_cast<std::size_t>((token0 + i) * x.HV() + head)],
                         want.raw.dbeta[static_cast<std::size_t>(i)]);
      if (x.problem().gate_mode == GateMode::kLog) continue;
      const double* of_chunk =
          got.sums.data() + static_cast<std::size_t>(chunk * x.HV() + head) * (channels + 1);
      for (std::size_t d = 0; d <= channels; ++d)
        sums[d == channels].add(of_chunk[d], want.sums[d]);
    }
  });
  if (std::getenv("KDA_TEST_VERBOSE"))
    std::printf("  %-36s dq %.2e  dk %.2e  dg %.2e  dbeta %.2e  ddt_bias %.2e  dA_log %.2e\n",
                what.c_str(), errors.dq.relative(), errors.dk.relative(), errors.dg.relative(),
                errors.dbeta.relative(), sums[0].relative(), sums[1].relative());
  // A rounding to bf16 more than the rows have.
  EXPECT_LT(errors.dq.relative(), 4.5e-3) << what;
  EXPECT_LT(errors.dk.relative(), 4.5e-3) << what;
  EXPECT_LT(errors.dg.relative(), 4.8e-3) << what;
  EXPECT_LT(errors.dbeta.relative(), 4.8e-3) << what;
  EXPECT_LT(sums[0].relative(), 5e-3) << what;
  EXPECT_LT(sums[1].relative(), 2e-2) << what;  // one number a chunk, whose terms cancel
  for (std::size_t i = static_cast<std::size_t>(x.chunks() * x.HV()) * (channels + 1);
       i < got.sums.size(); ++i)
    EXPECT_EQ(got.sums[i], 0) << what << ", a chunk that is not there";
}

class ChunkGradOnHopper : public test::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped() && (!cuda::sm90::kBuilt || test::device().compute_capability != 90))
      GTEST_SKIP() << "needs a Hopper GPU";
  }
};

TEST_F(ChunkGradOnHopper, EveryRegime) {
  for (int regime = 0; regime < check::kNumRegimes; ++regime)
    expect_close_on_hopper(
        Case(check::generate(options_of(130, 1, 128, 128, static_cast<Regime>(regime)))),
        check::regime_name(static_cast<Regime>(regime)));
}

TEST_F(ChunkGradOnHopper, LengthsAroundChunksAndSubchunks) {
  for (const Regime regime : {Regime::kStrong, Regime::kSoftplus, Regime::kLog}) {
    check::GenerateOptions options = options_of(0, 2, 128, 128, regime);
    options.seq_lens = {1, 15, 0, 16, 17, 63, 64, 65};
    expect_close_on_hopper(Case(check::generate(options)), "packed");
    options.seq_lens.clear();
    options.batch = 2, options.num_tokens = 79;
    expect_close_on_hopper(Case(check::generate(options)), "batch of 2");
  }
}

TEST_F(ChunkGradOnHopper, GatesOutOfTheAnchorsRange) {
  const auto gates = [&](const char* what, const std::function<double(int64_t, int64_t)>& f) {
    expect_close_on_hopper(Case(with_log_gates(100, 128, 128, DType::kBFloat16, f)), what);
  };
  gates("-inf here and there, else 0", [](int64_t token, int64_t channel) {
    return (token * 7 + channel * 3) % 11 == 0 ? -INFINITY : 0.0;
  });
  gates("one channel of the second chunk",
        [](int64_t token, int64_t channel) { return token > 70 && channel == 77 ? -42.0 : -0.02; });
  gates("falls and grows", [](int64_t token, int64_t) {
    return token == 4 || token == 5 ? -52.0 : token == 8 || token == 9 ? 20.0 : -0.01;
  });
  gates("at the end of the range",
        [](int64_t, int64_t channel) { return channel % 2 ? -5.1 : 0.02; });
  Inputs inputs = check::generate(options_of(100, 2, 128, 128, Regime::kSoftplus));
  for (int64_t i = 0; i < 100 * 128; ++i)
    if (i % 37 == 0) store_element(inputs.g.data(), DType::kBFloat16, 2 * i, 60);
  expect_close_on_hopper(Case(inputs), "softplus to -60 and below");
}

/// Gates that one anchor does not reach and several do: no chunk is left.
TEST_F(ChunkGradOnHopper, SeveralAnchors) {
  const auto gates = [&](const char* what, const std::function<double(int64_t, int64_t)>& f) {
    for (const int64_t K : {128, 64}) {
      const Case x(with_log_gates(70, K, K, DType::kBFloat16, f));
      EXPECT_EQ(num_left(run_on_hopper(x)), 0) << what;
      expect_close_on_hopper(x, what);
    }
  };
  gates("all tokens alike",
        [](int64_t, int64_t channel) { return -0.2 * static_cast<double>(channel % 64); });
  gates("-inf, -1000 and 0", [](int64_t token, int64_t channel) {
    const int64_t turn = (token * 7 + channel * 3) % 11;
    return turn == 0 ? -INFINITY : turn == 1 ? -1000.0 : 0.0;
  });
  gates("one sub-chunk", [](int64_t token, int64_t) { return token / 16 == 2 ? -7.0 : -0.02; });
  gates("the last token", [](int64_t token, int64_t) { return token % 16 == 15 ? -90.0 : -0.02; });
  gates("at anchors", [](int64_t token, int64_t) {
    return token % 16 == 3 ? -83.0 : token % 16 == 4 ? -0.125 : -0.01;
  });
  for (const Regime regime : {Regime::kSoftplus, Regime::kTrainedSoftplus, Regime::kNeedle})
    EXPECT_EQ(num_left(run_on_hopper(Case(check::generate(options_of(70, 1, 128, 128, regime))))),
              0)
        << check::regime_name(regime);
}

TEST_F(ChunkGradOnHopper, DeadDecaysHaveNoGradient) {
  const auto dead = [](int64_t token, int64_t channel) { return (token + channel) % 5 == 0; };
  Inputs softplus = check::generate(options_of(70, 1, 128, 128, Regime::kSoftplus));
  for (int64_t i = 0; i < 70 * 128; ++i)
    if (dead(i / 128, i % 128)) store_element(softplus.g.data(), DType::kBFloat16, i, INFINITY);
  const Inputs log =
      with_log_gates(70, 128, 128, DType::kBFloat16, [&](int64_t token, int64_t channel) {
        return dead(token, channel) ? token % 2 ? -INFINITY : -120.0 : -0.1;
      });
  for (const Inputs& inputs : {softplus, log}) {
    const Finished got = run_on_hopper(Case(inputs));
    EXPECT_EQ(num_left(got), 0);
    for (int64_t i = 0; i < 70 * 128; ++i) {
      const float dg = load_element(got.dg.data(), DType::kBFloat16, i);
      EXPECT_TRUE(dead(i / 128, i % 128) ? dg == 0 : std::isfinite(dg)) << i;
    }
    if (inputs.problem.gate_mode != GateMode::kSoftplus) continue;
    for (const double sum : got.sums) {
      EXPECT_TRUE(std::isfinite(sum));
    }
  }
}

TEST_F(ChunkGradOnHopper, StepsAndNorms) {
  for (const BetaMode mode : {BetaMode::kPlain, BetaMode::kSigmoid, BetaMode::kSigmoid2}) {
    Inputs inputs = check::generate(options_of(100, 2, 128, 128, Regime::kTrained));
    inputs.problem.beta_mode = mode;
    inputs.problem.qk_l2norm = mode != BetaMode::kSigmoid2;
    if (mode == BetaMode::kSigmoid2) inputs.problem.scale = -0.5;
    if (mode == BetaMode::kPlain)  // the first chunk has small ones
      for (int64_t i = 0; i < 200; ++i) {
        const float betas[] = {0.7f, 0.0f, 0x1p-9f, -0.4f, -0x1p-12f, 0x1p-8f, -0.0f};
        store_element(inputs.beta.data(), inputs.problem.beta.dtype, i,
                      i < 128 ? betas[i % 7] : 0.5f);
      }
    expect_close_on_hopper(Case(inputs), beta_mode_name(mode));
  }
}

TEST_F(ChunkGradOnHopper, InfiniteGatesOfBoundedMode) {
  Inputs inputs = check::generate(options_of(70, 1, 128, 128, Regime::kTrained));
  for (int64_t i = 0; i < 70 * 128; i += 13)
    store_element(inputs.g.data(), DType::kBFloat16, i, i % 2 ? -INFINITY : INFINITY);
  const Finished got = run_on_hopper(Case(inputs));
  for (const double sum : got.sums) EXPECT_TRUE(std::isfinite(sum));
  for (int64_t i = 0; i < 70 * 128; i += 13)
    EXPECT_EQ(load_element(got.dg.data(), DType::kBFloat16, i), 0);
}

TEST_F(ChunkGradOnHopper, WithoutTheGradientOfOutputs) {
  Case x(check::generate(options_of(70, 1, 128, 128, Regime::kTrained)));
  x.with_d_o = false;
  expect_close_on_hopper(x, "no d_o");
}

check::GenerateOptions grouped(int64_t tokens, int64_t heads, int64_t group, Regime regime) {
  check::GenerateOptions options = options_of(tokens, heads, 128, 128, regime);
  options.num_value_heads = heads * group;
  return options;
}

TEST_F(ChunkGradOnHopper, ValueHeadsOfAQueryHead) {
  for (const auto& [group, regime] : {std::pair{2, Regime::kTrained},
                                      {3, Regime::kSoftplus},
                                      {4, Regime::kLog},
                                      {8, Regime::kStrong}}) {
    check::GenerateOptions options = grouped(0, 2, group, regime);
    options.seq_lens = {1, 33, 0, 79};
    expect_close_on_hopper(Case(check::generate(options)),
                           "packed, groups of " + std::to_string(group));
  }
  check::GenerateOptions options = grouped(70, 1, 5, Regime::kTrained);
  options.batch = 2;
  Inputs inputs = check::generate(options);
  inputs.problem.qk_l2norm = false;
  inputs.problem.scale = -0.5;
  expect_close_on_hopper(Case(inputs), "batch of 2, no norm");
}

/// Gates of a value head, in the log domain, fall and grow beyond the range of anchors.
Inputs with_growth(check::GenerateOptions options, int64_t head) {
  options.regime = Regime::kLog;
  Inputs inputs = check::generate(options);
  const int64_t K = inputs.problem.key_dim, HV = inputs.problem.num_value_heads;
  for (const auto& [token, gate] : {std::pair{4, -52.0f}, {5, -52.0f}, {8, 20.0f}, {9, 20.0f}})
    for (int64_t d = 0; d < K; ++d)
      store_element(inputs.g.data(), inputs.problem.g.dtype, (token * HV + head) * K + d, gate);
  return inputs;
}

/// With a value head that is left all of its group is done again.
TEST_F(ChunkGradOnHopper, ValueHeadsThatAreLeft) {
  for (const int64_t fallback : {0, 4}) {  // of two groups of three
    const std::string what = "value head " + std::to_string(fallback) + " is fallback";
    const Case x(with_growth(grouped(70, 2, 3, Regime::kLog), fallback));
    EXPECT_EQ(num_left(run_on_hopper(x)), 1) << what;
    expect_close_on_hopper(x, what);
  }
  Inputs inputs = check::generate(grouped(100, 1, 2, Regime::kTrained));
  inputs.problem.beta_mode = BetaMode::kPlain;
  for (int64_t i = 0; i < 200; ++i)
    store_element(inputs.beta.data(), inputs.problem.beta.dtype, i, i == 141 ? 0.0f : 0.5f);
  EXPECT_EQ(num_left(run_on_hopper(Case(inputs))), 1);
  expect_close_on_hopper(Case(inputs), "one beta of 0");
}

TEST_F(ChunkGradOnHopper, BlocksChangeNoBitOfGroups) {
  check::GenerateOptions options = grouped(0, 2, 3, Regime::kSoftplus);
  options.seq_lens = {70, 9};
  const Case x(check::generate(options));
  const Finished want = run_on_hopper(x, 1);
  for (const int64_t blocks : {1, 4}) {
    const Finished got = run_on_hopper(x, blocks);
    for (io::Buffer Finished::*rows : {&Finished::dq, &Finished::dk, &Finished::dg})
      EXPECT_EQ(std::memcmp((want.*rows).data(), (got.*rows).data(), (want.*rows).size()), 0)
          << blocks;
    EXPECT_EQ(want.dbeta, got.dbeta) << blocks;
    EXPECT_EQ(want.sums, got.sums) << blocks;
  }
}

// ---- two value heads in a block

TEST_F(ChunkGradOnHopper, PairsInEveryRegime) {
  for (int regime = 0; regime < check::kNumRegimes; ++regime)
    expect_close_on_hopper(
        Case(check::generate(options_of(70, 2, 64, 64, static_cast<Regime>(regime)))),
        "K = V = 64, " + std::string(check::regime_name(static_cast<Regime>(regime))));
}

TEST_F(ChunkGradOnHopper, PairsOfAnyLengthAndNumber) {
  for (const int64_t heads : {1, 2, 3, 5}) {  // the last one may be alone
    check::GenerateOptions options = options_of(0, heads, 64, 64, Regime::kSoftplus);
    options.seq_lens = {1, 33, 0, 79};
    expect_close_on_hopper(Case(check::generate(options)),
                           "packed, " + std::to_string(heads) + " heads of 64");
  }
  check::GenerateOptions options = options_of(70, 3, 64, 64, Regime::kLog);
  options.batch = 2;
  Inputs inputs = check::generate(options);
  inputs.problem.qk_l2norm = false;
  inputs.problem.scale = -0.5;
  expect_close_on_hopper(Case(inputs), "batch of 2, no norm");
}

TEST_F(ChunkGradOnHopper, PairsOfWhichOneIsLeft) {
  for (const int64_t fallback : {1, 2}) {
    const std::string what = "head " + std::to_string(fallback) + " of 64 channels is fallback";
    const Case x(with_growth(options_of(70, 3, 64, 64, Regime::kLog), fallback));
    EXPECT_EQ(num_left(run_on_hopper(x)), 1) << what;
    expect_close_on_hopper(x, what);
  }
  for (const BetaMode mode : {BetaMode::kPlain, BetaMode::kSigmoid2}) {
    Inputs inputs = check::generate(options_of(100, 2, 64, 64, Regime::kTrained));
    inputs.problem.beta_mode = mode;
    if (mode == BetaMode::kPlain)
      for (int64_t i = 0; i < 200; ++i)
        store_element(inputs.beta.data(), inputs.problem.beta.dtype, i, i == 141 ? 0.0f : 0.5f);
    expect_close_on_hopper(Case(inputs), "heads of 64, " + std::string(beta_mode_name(mode)));
  }
}

/// NaN in one value head of a pair stays out of the other.
TEST_F(ChunkGradOnHopper, PoisonReachesNoOtherHeadOfItsPair) {
  const Case clean(check::generate(options_of(64, 2, 64, 64, Regime::kTrained)));
  Case poisoned = clean;
  for (io::Buffer* tiles : {&poisoned.errors, &poisoned.dz, &poisoned.h, &poisoned.dh})
    std::memset(tiles->data() + 2 * kChunk * 64, 0xff, 2 * kChunk * 64);
  const Finished want = run_on_hopper(clean), got = run_on_hopper(poisoned);
  for (io::Buffer Finished::*rows : {&Finished::dq, &Finished::dk, &Finished::dg})
    for (int64_t token = 0; token < 64; ++token)
      for (int64_t head = 0; head < 2; ++head) {
        const bool same = std::memcmp((want.*rows).data() + (2 * token + head) * 128,
                                      (got.*rows).data() + (2 * token + head) * 128, 128) == 0;
        EXPECT_EQ(same, head == 0) << token << " " << head;
      }
  EXPECT_EQ(std::memcmp(want.sums.data(), got.sums.data(), 8 * 65), 0);
}

/// NaN in one value head of a chunk stays out of other chunks and q/k heads.
TEST_F(ChunkGradOnHopper, PoisonReachesNoOtherQueryHead) {
  const Case clean(check::generate(grouped(100, 2, 2, Regime::kTrained)));
  Case poisoned = clean;
  const int64_t tile = 2 * kChunk * 128;  // bytes of E
  std::memset(poisoned.errors.data() + 1 * tile, 0xff, static_cast<std::size_t>(tile));
  const Finished want = run_on_hopper(clean, 1), got = run_on_hopper(poisoned, 1);
  for (io::Buffer Finished::*rows : {&Finished::dq, &Finished::dk})
    for (int64_t token = 0; token < 100; ++token)
      for (int64_t head = 0; head < 2; ++head) {
        const bool same = std::memcmp((want.*rows).data() + (2 * token + head) * 256,
                                      (got.*rows).data() + (2 * token + head) * 256, 256) == 0;
        EXPECT_EQ(same, head == 1 || token >= kChunk) << token << " " << head;
      }
}

/// What only later tokens have reaches no earlier one: exact zeros where nothing else is.
TEST_F(ChunkGradOnHopper, LaterTokensAreExactZerosToEarlierOnes) {
  Case x(check::generate(options_of(64, 1, 128, 128, Regime::kStrong)));
  constexpr int64_t kEnd = 21;
  without_loss_from(&x, kEnd);
  const Finished got = run_on_hopper(x);
  for (int64_t i = kEnd * 128; i < 64 * 128; ++i)
    for (const io::Buffer* rows : {&got.dq, &got.dk, &got.dg})
      EXPECT_EQ(load_element(rows->data(), DType::kBFloat16, i), 0) << i;
  for (std::size_t token = kEnd; token < 64; ++token) EXPECT_EQ(got.dbeta[token], 0) << token;
}

TEST_F(ChunkGradOnHopper, PoisonReachesNoOtherSequence) {
  for (const Regime regime : {Regime::kTrained, Regime::kLog}) {
    check::GenerateOptions options = options_of(0, 1, 128, 128, regime);
    options.seq_lens = {40, 70, 30};
    const Case clean(check::generate(options));
    Case poisoned = clean;
    poison_second_sequence(&poisoned, 40, 110, 1, 3);
    const Finished want = run_on_hopper(clean), got = run_on_hopper(poisoned);
    const auto same = [](const auto& x, const auto& y, std::size_t begin, std::size_t end) {
      return std::memcmp(x.data() + begin, y.data() + begin, (end - begin) * sizeof(*x.data())) ==
             0;
    };
    for (const auto& [begin, end] : {std::pair<std::size_t, std::size_t>{0, 40}, {110, 140}}) {
      EXPECT_TRUE(same(want.dq, got.dq, 256 * begin, 256 * end));
      EXPECT_TRUE(same(want.dk, got.dk, 256 * begin, 256 * end));
      EXPECT_TRUE(same(want.dg, got.dg, 256 * begin, 256 * end));
      EXPECT_TRUE(same(want.dbeta, got.dbeta, begin, end));
    }
    EXPECT_TRUE(same(want.sums, got.sums, 0, 129));
    EXPECT_TRUE(same(want.sums, got.sums, 3 * 129, 4 * 129));
  }
}

TEST_F(ChunkGradOnHopper, SameBitsAgain) {
  const Case x(check::generate(options_of(130, 2, 128, 128, Regime::kSoftplus)));
  const Finished first = run_on_hopper(x), second = run_on_hopper(x);
  for (io::Buffer Finished::*rows : {&Finished::dq, &Finished::dk, &Finished::dg})
    EXPECT_EQ(std::memcmp((first.*rows).data(), (second.*rows).data(), (first.*rows).size()), 0);
  EXPECT_EQ(first.dbeta, second.dbeta);
  EXPECT_EQ(first.sums, second.sums);
}

}  // namespace
}  // namespace kda

#endif
