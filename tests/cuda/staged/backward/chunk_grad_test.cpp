// SPDX-License-Identifier: Apache-2.0
// chunk_grad for every GPU: gradients of random states, errors, dZ and d_o against its formulas.
#include "support/gpu.hpp"

#ifdef KDA_WITH_CUDA

#include "support/chunk_grad_reference.hpp"

namespace kda::chunk_grad {
namespace {

/// Runs the kernel; `rows` as it leaves them, NaN where it writes nothing.
std::vector<float> run(const Case& x) {
  Call call(x);
  throw_if_error(cuda::launch_chunk_grad({call.args}, {}));
  check::synchronize_device();
  return call.download_last<float>(call.rows());
}

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

}  // namespace
}  // namespace kda::chunk_grad

#endif
