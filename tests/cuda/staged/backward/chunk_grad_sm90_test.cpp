// SPDX-License-Identifier: Apache-2.0
// chunk_grad on Hopper: as chunk_grad_test.cpp, and back through norms, gates and steps.
#include "support/gpu.hpp"

#ifdef KDA_WITH_CUDA

#include "support/chunk_grad_reference.hpp"

namespace kda::chunk_grad {
namespace {

using cuda::GradGates;

/// How a kernel is run.
struct How {
  int64_t num_blocks = 3;  ///< few: each has several chunks
  DType dg_dtype = DType::kBFloat16;
  bool dg_by_channel = false;  ///< where g has one gate a head
  int64_t dg_gap = 0;          ///< elements between rows of dg, which nobody writes
  bool by_rows = false;        ///< gates that could be in tiles are not
  bool no_dg = false;
};

/// dg as a caller may want it.
TensorDesc dg_of(const Problem& p, const How& how) {
  const bool a_head = has_head_gate(p) && !how.dg_by_channel;
  TensorDesc dg = contiguous(how.dg_dtype, {p.batch, p.num_tokens, p.num_value_heads,
                                            (a_head ? 1 : p.key_dim) + how.dg_gap});
  dg.strides[3] = a_head ? 0 : 1;
  return dg;
}

/// dq, dk as the kernel stores them, [token, H, K], dg as described, dbeta [token, HV], and the
/// sums of chunks [chunk, HV, K + 1]. NaN where it writes nothing.
struct Finished {
  io::Buffer dq, dk, dg;
  TensorDesc dg_desc;
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

GradGates gates_of(const Problem& p, const How& how) {
  if (has_head_gate(p)) return how.dg_by_channel ? GradGates::kRows : GradGates::kHead;
  const bool tiles = p.g.dtype == DType::kBFloat16 && how.dg_dtype == DType::kBFloat16 &&
                     how.dg_gap == 0 && p.head_map == HeadMap::kGrouped && !how.by_rows;
  return tiles ? GradGates::kTiles : GradGates::kRows;
}

Finished run_on_hopper(const Case& x, const How& how = {}) {
  Call call(x);
  const int64_t num_blocks = how.num_blocks;
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
  Finished out;
  out.dg_desc = dg_of(x.problem(), how);
  out.dg = io::Buffer(static_cast<std::size_t>(x.tokens() * x.HV() * out.dg_desc.strides[2] *
                                               dtype_size(how.dg_dtype)));
  call.args.dg = cuda::row_view(out.dg_desc, call.unset(out.dg.size()));
  if (how.no_dg) call.args.dg.base = nullptr;
  call.args.dgate_step = static_cast<int32_t>(out.dg_desc.strides[3]);
  call.args.dbeta = cuda::row_view(
      contiguous(DType::kFloat32, {x.problem().batch, x.problem().num_tokens, x.HV()}),
      call.unset(4 * size));
  const auto sums = tiles * static_cast<std::size_t>(x.K() + 1);
  call.args.sums = static_cast<double*>(call.unset(8 * sums));
  call.args.fallback = static_cast<uint32_t*>(call.unset(4 * tiles * cuda::kFallbackWords));
  call.args.rows = static_cast<float*>(call.unset(
      4 * std::max(call.rows(), static_cast<std::size_t>(num_blocks * cuda::kHeadSums))));
  if constexpr (cuda::sm90::kBuilt)
    throw_if_error(
        cuda::sm90::launch_chunk_grad(call.args, gates_of(x.problem(), how), num_blocks, {}));
  check::synchronize_device();
  out.dbeta.resize(size), out.sums.resize(sums);
  std::size_t next = first;
  for (io::Buffer* buffer : {&out.dq, &out.dk, &out.dg}) {
    if (buffer != &out.dg) *buffer = io::Buffer(q_size * row_bytes);
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
      const int64_t q_at = (token0 + i) * x.H() + q_head_of(p, head);
      std::vector<double> q(channels), k(q);
      for (std::size_t d = 0; d < channels; ++d) {
        const int64_t q_element = q_at * x.K() + static_cast<int64_t>(d);
        q[d] = load_element(x.inputs.q.data(), p.q.dtype, q_element);
        k[d] = load_element(x.inputs.k.data(), p.k.dtype, q_element);
        const double g = x.gate(token0 + i, head, static_cast<int64_t>(d));
        const double bias =
            p.dt_bias ? x.inputs.dt_bias.as<float>()[head * x.K() + static_cast<int64_t>(d)] : 0;
        double& dg = raw.dg[t][d];
        const double sigmoid = 1 / (1 + std::exp(-(g + bias)));
        if (p.gate_mode == GateMode::kSoftplus) {
          if (dg != 0) sums[channels] += dg * log_decay(p, g, bias, std::log(rate));
          dg *= -rate * sigmoid;
        } else if (p.gate_mode == GateMode::kBounded) {
          const double bounded = 1 / (1 + std::exp(-rate * (g + bias)));
          const double inner =
              dg * p.lower_bound * bounded * rate / (1 + std::exp(rate * (g + bias)));
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

/// dg of the kernel beside the expected one, and nothing but 0xff between its rows.
void add_dg(const Case& x, const Finished& got, int64_t token, int64_t head,
            const std::vector<double>& want, Sums* to) {
  const TensorDesc& desc = got.dg_desc;
  const int64_t at = row_offset(x.problem(), desc, token, head);
  const auto element = [&](int64_t i) { return load_element(got.dg.data(), desc.dtype, at + i); };
  const int64_t row = desc.strides[3] == 0 ? 1 : x.K();
  if (desc.strides[3] == 0) {
    double sum = 0;
    for (const double channel : want) sum += channel;
    to->add(element(0), sum);
  } else {
    for (std::size_t d = 0; d < want.size(); ++d)
      to->add(element(static_cast<int64_t>(d)), want[d]);
  }
  for (int64_t i = row; i < desc.strides[2]; ++i) EXPECT_TRUE(std::isnan(element(i))) << i;
}

void expect_close_on_hopper(const Case& x, const std::string& what, const How& how = {}) {
  const Finished got = run_on_hopper(x, how);
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
    for (int64_t turn = 0; turn < x.HV(); ++turn) {
      const int64_t head = value_head_of(x.problem(), turn / group, turn % group);
      const Expected want(x, chunk, token0, count, head);
      if (turn % group == 0) dq = dk = matrix(count, x.K());
      for (std::size_t i = 0; i < dq.size(); ++i)
        for (std::size_t d = 0; d < channels; ++d)
          dq[i][d] += want.raw.dq[i][d], dk[i][d] += want.raw.dk[i][d];
      if (turn % group == group - 1) {
        add(got.dq, x.H(), turn / group, dq, &errors.dq);
        add(got.dk, x.H(), turn / group, dk, &errors.dk);
      }
      for (int64_t i = 0; i < count; ++i)
        add_dg(x, got, token0 + i, head, want.raw.dg[static_cast<std::size_t>(i)], &errors.dg);
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
  // One a head is a sum over channels, whose terms cancel.
  EXPECT_LT(errors.dg.relative(), got.dg_desc.strides[3] == 0 ? 8e-3 : 4.8e-3) << what;
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
    const std::string what = "value head " + std::to_string(fallback) + " falls back";
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
  const Finished want = run_on_hopper(x, {.num_blocks = 1});
  for (const int64_t blocks : {1, 4}) {
    const Finished got = run_on_hopper(x, {.num_blocks = blocks});
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
    const std::string what = "head " + std::to_string(fallback) + " of 64 channels falls back";
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
  const Finished want = run_on_hopper(clean, {.num_blocks = 1}),
                 got = run_on_hopper(poisoned, {.num_blocks = 1});
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

// ---- gates that are in no tile

/// Gates in fp32 that are no bf16 numbers.
Inputs with_fp32_gates(Inputs inputs) {
  Problem& p = inputs.problem;
  const Shape shape = has_head_gate(p) ? beta_shape(p) : g_shape(p);
  const int64_t count = shape[0] * shape[1] * shape[2] * shape[3];
  io::Buffer gates(static_cast<std::size_t>(4 * count));
  for (int64_t i = 0; i < count; ++i)
    gates.as<float>()[i] =
        load_element(inputs.g.data(), p.g.dtype, i) * (1 + 0x1p-9f * static_cast<float>(i % 3));
  inputs.g = std::move(gates);
  p.g.dtype = DType::kFloat32;
  p.g.alignment = 4;
  return inputs;
}
Inputs with_head_gates(Inputs inputs) {
  test::keep_one_gate(&inputs);
  return inputs;
}
constexpr How kFp32{.dg_dtype = DType::kFloat32};

void expect_same_but_dg(const Finished& a, const Finished& b, const std::string& what) {
  EXPECT_TRUE(test::same_bits(a.dq, b.dq)) << what;
  EXPECT_TRUE(test::same_bits(a.dk, b.dk)) << what;
  EXPECT_EQ(a.dbeta, b.dbeta) << what;
  EXPECT_EQ(std::memcmp(a.sums.data(), b.sums.data(), 8 * a.sums.size()), 0) << what;
  EXPECT_EQ(a.fallback, b.fallback) << what;
}

/// The sizes that have kernels of their own: a value head, several of a q/k head, pairs of heads.
std::vector<check::GenerateOptions> every_form(Regime regime) {
  check::GenerateOptions one = options_of(0, 1, 128, 128, regime),
                         several = options_of(0, 2, 128, 128, regime),
                         pairs = options_of(0, 3, 64, 64, regime);
  several.num_value_heads = 4;
  std::vector<check::GenerateOptions> all{one, several, pairs};
  for (check::GenerateOptions& options : all) options.seq_lens = {1, 0, 79};
  return all;
}

TEST_F(ChunkGradOnHopper, GatesInFp32InEveryRegime) {
  for (int regime = 0; regime < check::kNumRegimes; ++regime) {
    const auto of = static_cast<Regime>(regime);
    const Inputs inputs = check::generate(options_of(130, 1, 128, 128, of));
    expect_close_on_hopper(Case(with_fp32_gates(inputs)),
                           "fp32 gates, " + std::string(check::regime_name(of)), kFp32);
    expect_close_on_hopper(Case(with_fp32_gates(with_head_gates(inputs))),
                           "a gate a head, " + std::string(check::regime_name(of)), kFp32);
  }
}

TEST_F(ChunkGradOnHopper, GatesInFp32OfEveryForm) {
  for (const Regime regime : {Regime::kSoftplus, Regime::kTrained, Regime::kLog})
    for (const check::GenerateOptions& options : every_form(regime)) {
      const Inputs inputs = check::generate(options);
      const std::string what = std::string(check::regime_name(regime)) + ", " +
                               std::to_string(inputs.problem.num_value_heads) + " heads";
      expect_close_on_hopper(Case(with_fp32_gates(inputs)), "fp32 gates, " + what, kFp32);
      expect_close_on_hopper(Case(with_fp32_gates(with_head_gates(inputs))),
                             "a gate a head, " + what, kFp32);
    }
}

TEST_F(ChunkGradOnHopper, LengthsOfGatesInNoTile) {
  for (const Regime regime : {Regime::kStrong, Regime::kSoftplus, Regime::kLog}) {
    check::GenerateOptions options = options_of(0, 2, 128, 128, regime);
    options.seq_lens = {1, 15, 0, 16, 17, 63, 64, 65};
    Inputs packed = check::generate(options);
    options.seq_lens.clear();
    options.batch = 2, options.num_tokens = 79;
    Inputs rows = check::generate(options);
    for (const Inputs& inputs : {packed, rows}) {
      expect_close_on_hopper(Case(with_fp32_gates(inputs)), "fp32 gates", kFp32);
      expect_close_on_hopper(Case(with_fp32_gates(with_head_gates(inputs))), "a gate a head",
                             kFp32);
    }
  }
}

/// The kernel of rows has the sums of the kernel of tiles.
TEST_F(ChunkGradOnHopper, RowsOfGatesHaveTheBitsOfTiles) {
  for (const Regime regime : {Regime::kSoftplus, Regime::kTrained, Regime::kLog})
    for (const check::GenerateOptions& options : every_form(regime)) {
      const Case x(check::generate(options));
      const std::string what = check::regime_name(regime);
      const auto run = [&](const How& how) {
        Finished found = run_on_hopper(x, how);
        if (regime == Regime::kLog) found.sums.clear();  // without parameters nobody reads them
        return found;
      };
      const Finished want = run({}), got = run({.by_rows = true}), in_fp32 = run(kFp32);
      expect_same_but_dg(got, want, what);
      EXPECT_TRUE(test::same_bits(got.dg, want.dg)) << what;
      expect_same_but_dg(in_fp32, want, what);
      for (int64_t i = 0; i < static_cast<int64_t>(want.dg.size() / 2); ++i) {
        char rounded[2];
        store_element(rounded, DType::kBFloat16, 0, in_fp32.dg.as<float>()[i]);
        ASSERT_EQ(std::memcmp(rounded, want.dg.data() + 2 * i, 2), 0) << what << " " << i;
      }
    }
}

TEST_F(ChunkGradOnHopper, GatesOfAnyTypeAndStrides) {
  check::GenerateOptions options = grouped(70, 2, 2, Regime::kTrained);
  options.batch = 2;
  const Inputs inputs = check::generate(options);
  for (const bool a_head : {false, true})
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      Inputs dense = a_head ? with_head_gates(inputs) : inputs;
      Problem& p = dense.problem;
      const Shape shape = a_head ? beta_shape(p) : g_shape(p);
      const int64_t count = shape[0] * shape[1] * shape[2] * shape[3];
      io::Buffer gates(static_cast<std::size_t>(count * dtype_size(dtype)));
      for (int64_t i = 0; i < count; ++i)
        store_element(gates.data(), dtype, i, load_element(dense.g.data(), p.g.dtype, i));
      dense.g = std::move(gates);
      p.g.dtype = dtype;
      const Finished want = run_on_hopper(Case(dense), kFp32);
      const int64_t K = shape[3], heads = shape[2], tokens = shape[1];
      for (const auto& strides :
           {std::array<int64_t, 4>{tokens * (heads * (K + 3) + 1) + 5, heads * (K + 3) + 1, K + 3,
                                   a_head ? 0 : 1},
            std::array<int64_t, 4>{tokens * heads * K, K, tokens * K, a_head ? 0 : 1}}) {
        Inputs spread = dense;
        spread.g = test::spread_tensor(dense.g, &spread.problem.g, shape, strides);
        const std::string what =
            cat(dtype_name(dtype), a_head ? " a head" : "", ", rows ", strides[1], " apart");
        expect_close_on_hopper(Case(spread), what, {.dg_dtype = dtype, .dg_gap = 5});
        const Finished got = run_on_hopper(Case(spread), kFp32);
        expect_same_but_dg(got, want, what);
        EXPECT_TRUE(test::same_bits(got.dg, want.dg)) << what;
      }
    }
}

TEST_F(ChunkGradOnHopper, OneGateAHeadHasTheBitsOfGatesWrittenOut) {
  for (const Regime regime : {Regime::kSoftplus, Regime::kTrained, Regime::kLog})
    for (const check::GenerateOptions& options : every_form(regime)) {
      const Inputs inputs = with_fp32_gates(with_head_gates(check::generate(options)));
      const Finished each = run_on_hopper(Case(test::with_gates_expanded(inputs)), kFp32);
      const Finished by_channel =
          run_on_hopper(Case(inputs), {.dg_dtype = DType::kFloat32, .dg_by_channel = true});
      const Finished sums = run_on_hopper(Case(inputs), kFp32);
      const std::string what = check::regime_name(regime);
      expect_same_but_dg(by_channel, each, what);
      expect_same_but_dg(sums, each, what);
      EXPECT_TRUE(test::same_bits(by_channel.dg, each.dg)) << what;
      const auto K = static_cast<std::size_t>(inputs.problem.key_dim);
      for (std::size_t row = 0; row < sums.dg.size() / 4; ++row) {
        double sum = 0, magnitude = 0;
        for (std::size_t d = row * K; d < (row + 1) * K; ++d) {
          sum += each.dg.as<float>()[d];
          magnitude += std::fabs(each.dg.as<float>()[d]);
        }
        ASSERT_NEAR(sums.dg.as<float>()[row], sum, 1e-6 * magnitude) << what << " " << row;
      }
    }
}

TEST_F(ChunkGradOnHopper, TiledHeads) {
  for (const bool a_head : {false, true})
    for (const Regime regime : {Regime::kLog, Regime::kSoftplus}) {
      check::GenerateOptions options = grouped(0, 2, 3, regime);
      options.seq_lens = {70, 0, 9};
      Inputs inputs = check::generate(options);
      if (a_head) inputs = with_head_gates(inputs);
      inputs.problem.head_map = HeadMap::kTiled;
      expect_close_on_hopper(Case(inputs), a_head ? "tiled, a gate a head" : "tiled");
    }
}

TEST_F(ChunkGradOnHopper, GatesInNoTileThatAreLeft) {
  for (const HeadMap map : {HeadMap::kGrouped, HeadMap::kTiled})
    for (const bool a_head : {false, true}) {
      Inputs inputs = with_growth(grouped(70, 2, 3, Regime::kLog), 1);
      inputs.problem.head_map = map;
      const Case x(with_fp32_gates(a_head ? with_head_gates(inputs) : inputs));
      const std::string what = cat(head_map_name(map), a_head ? ", a gate a head" : "");
      EXPECT_EQ(num_left(run_on_hopper(x, kFp32)), 1) << what;
      expect_close_on_hopper(x, what, kFp32);
      if (a_head)
        expect_close_on_hopper(x, what + ", dg by channel",
                               {.dg_dtype = DType::kBFloat16, .dg_by_channel = true, .dg_gap = 1});
    }
  for (const BetaMode mode : {BetaMode::kPlain, BetaMode::kSigmoid2}) {  // all of them small
    Inputs inputs = check::generate(options_of(70, 3, 64, 64, Regime::kSoftplus));
    inputs.problem.beta_mode = mode;
    if (mode == BetaMode::kPlain)
      for (int64_t i = 0; i < 210; ++i)
        store_element(inputs.beta.data(), inputs.problem.beta.dtype, i, 0x1p-10f);
    for (const bool a_head : {false, true})
      expect_close_on_hopper(Case(with_fp32_gates(a_head ? with_head_gates(inputs) : inputs)),
                             cat("pairs, ", beta_mode_name(mode)), kFp32);
  }
}

/// Bounded gates far from 0, where their slope is small on either side.
TEST_F(ChunkGradOnHopper, SlopesOfSaturatedGates) {
  for (const int64_t K : {128, 64})
    for (const double raw : {20.0, -20.0, 60.0, -60.0}) {
      Inputs inputs = check::generate(options_of(70, 1, K, K, Regime::kTrained));
      Problem& p = inputs.problem;
      ASSERT_EQ(p.gate_mode, GateMode::kBounded);
      p.A_log.reset(), p.dt_bias.reset(), p.lower_bound = -0.1;
      for (int64_t i = 0; i < 70 * K; ++i)
        store_element(inputs.g.data(), p.g.dtype, i, static_cast<float>(raw));
      const std::string what = cat("gates of ", raw, ", K = ", K);
      EXPECT_EQ(num_left(run_on_hopper(Case(inputs))), 0) << what;
      expect_close_on_hopper(Case(inputs), what);
      expect_close_on_hopper(Case(with_fp32_gates(inputs)), what + ", fp32", kFp32);
      expect_close_on_hopper(Case(with_fp32_gates(with_head_gates(inputs))), what + ", a head",
                             kFp32);
    }
}

TEST_F(ChunkGradOnHopper, DgThatIsNotWanted) {
  for (const bool a_head : {false, true}) {
    const Inputs inputs = check::generate(options_of(70, 1, 128, 128, Regime::kSoftplus));
    const Case x(with_fp32_gates(a_head ? with_head_gates(inputs) : inputs));
    const Finished want = run_on_hopper(x, kFp32), got = run_on_hopper(x, {.no_dg = true});
    expect_same_but_dg(got, want, "no dg");
    for (std::size_t i = 0; i < got.dg.size(); ++i) ASSERT_EQ(got.dg.data()[i], std::byte{0xff});
  }
}

}  // namespace
}  // namespace kda::chunk_grad

#endif
