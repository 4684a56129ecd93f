// SPDX-License-Identifier: Apache-2.0
// Gradients against the oracle's: every regime, instruction set, type, length and size; zeros
// behind a loss, isolation, and the same bits for every thread count.
// (Random combinations: tests/fuzz/backward.cpp.)
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "check/tolerances.hpp"
#include "core/convert.hpp"
#include "core/layout.hpp"
#include "support/backward.hpp"

namespace kda {
namespace {

using check::GradientBuffers;
using check::Inputs;
using check::Regime;

using Truths = std::vector<cpu::oracle::HeadGradients>;

/// `truths`: as check::compare_gradients() has them.
void expect_within(const Inputs& inputs, const check::GradientOptions& options,
                   const test::BackwardRun& run, const std::string& what,
                   Truths* truths = nullptr) {
  GradientBuffers buffers = check::make_gradients(inputs, options);
  test::BackwardCall call(inputs, buffers.gradients, run);
  throw_if_error(call.run(&buffers));
  const check::GradientComparison comparison =
      check::compare_gradients(inputs, buffers,
                               {.marginal = check::is_marginal(inputs),
                                .operands = check::operands_of(call.plan.plan),
                                .num_threads = 2},
                               truths);
  EXPECT_FALSE(comparison.cancelled) << what;
  for (const auto& [name, errors] : comparison.errors) {
    const check::HeadError* worst = check::worst_error(errors);
    EXPECT_LE(worst->error, worst->tolerance)
        << what << ": " << name << " of sequence " << worst->sequence << ", head " << worst->head;
  }
}

TEST(Backward, EveryRegimeOnEveryBackend) {
  for (int regime = 0; regime < check::kNumRegimes; ++regime)
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      check::GenerateOptions options = test::shape(141, 1, 48, 40);
      options.num_value_heads = 2;
      options.regime = static_cast<Regime>(regime);
      options.dtype = dtype;
      options.seed = static_cast<uint64_t>(regime);
      options.initial_state = true;
      const Inputs inputs = check::generate(options);
      Truths truths;
      for (const std::string& backend : test::backward_backends())
        expect_within(inputs, {.d_o_dtype = dtype}, {.backend = backend},
                      backend + " " + check::regime_name(options.regime) + " " + dtype_name(dtype),
                      &truths);
    }
}

TEST(Backward, LengthsAroundChunksAndSpans) {
  for (const int64_t T : {1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 257}) {
    check::GenerateOptions options = test::shape(T, 1, 32, 32);
    options.initial_state = true;
    expect_within(check::generate(options), {}, {}, std::to_string(T));
  }
}

TEST(Backward, HeadDimensions) {
  for (const int64_t K : {1, 3, 8, 17, 60, 100, 128, 256})
    for (const int64_t V : {1, 5, 33, 100, 256}) {
      check::GenerateOptions options = test::shape(37, 1, K, V);
      options.seed = static_cast<uint64_t>(K * 1000 + V);
      const Inputs inputs = check::generate(options);
      Truths truths;
      for (const std::string& backend : test::backward_backends())
        expect_within(inputs, {}, {.backend = backend}, std::to_string(K) + " " + std::to_string(V),
                      &truths);
    }
}

TEST(Backward, GroupedHeads) {
  for (const int64_t group : {2, 3, 4}) {
    check::GenerateOptions options = test::shape(0, 2, 40, 24);
    options.num_value_heads = 2 * group;
    options.seq_lens = {70, 0, 1, 33};
    options.initial_state = true;
    expect_within(check::generate(options), {}, {.num_threads = 2}, std::to_string(group));
  }
}

/// The gradients of a group's q and k are the sums of those that expanded heads would have.
TEST(Backward, GroupsEqualExpandedHeads) {
  check::GenerateOptions options = test::shape(90, 2, 24, 16);
  options.num_value_heads = 6;
  const Inputs grouped = check::generate(options);
  Inputs expanded = grouped;
  Problem& p = expanded.problem;
  p.num_heads = 6;
  p.q = p.k = contiguous(DType::kFloat32, {1, 90, 6, 24});
  const auto expand = [](const io::Buffer& from) {
    io::Buffer to(from.size() * 3);
    for (std::size_t i = 0; i < to.size() / 4; ++i)
      to.as<float>()[i] = from.as<float>()[i / 24 / 3 * 24 + i % 24];
    return to;
  };
  expanded.q = expand(grouped.q);
  expanded.k = expand(grouped.k);
  GradientBuffers few = check::make_gradients(grouped), many = check::make_gradients(expanded);
  test::run_backward(grouped, &few);
  test::run_backward(expanded, &many);
  for (const auto& [sum, parts] : {std::pair{&few.dq, &many.dq}, std::pair{&few.dk, &many.dk}})
    for (std::size_t i = 0; i < sum->size() / 4; ++i) {
      double total = 0;
      for (std::size_t j = 0; j < 3; ++j)
        total += parts->as<float>()[(i / 24 * 3 + j) * 24 + i % 24];
      ASSERT_NEAR(sum->as<float>()[i], total, 1e-5) << i;
    }
  EXPECT_TRUE(test::same_bits(few.dv, many.dv));
  EXPECT_TRUE(test::same_bits(few.dg, many.dg));
  EXPECT_TRUE(test::same_bits(few.dbeta, many.dbeta));
}

TEST(Backward, WindowsAndKeptStates) {
  // Several windows, made again or started from what a forward has kept; both layouts.
  check::GenerateOptions options = test::shape(0, 1, 16, 16);
  options.num_value_heads = 2;
  options.seq_lens = {9000, 200, 4097};
  if (test::emulated()) options.seq_lens = {300, 20, 217};
  options.regime = Regime::kSlow;
  options.initial_state = true;
  Inputs inputs = check::generate(options);
  for (const StateLayout layout : {StateLayout::kKV, StateLayout::kVK}) {
    inputs.problem.state_layout = layout;
    Truths truths;
    for (const int64_t every : {0, 128, 4096, 64 * 1024})  // the last keeps nothing
      expect_within(inputs, {}, {.num_threads = 2, .kept_every = every}, std::to_string(every),
                    &truths);
  }
}

TEST(Backward, EveryGradientIsOptional) {
  for (const DType dtype : test::backward_types()) {
    check::GenerateOptions options = test::shape(50, 1, 24, 16);
    options.num_value_heads = 2;
    options.initial_state = true;
    options.dtype = dtype;
    const Inputs inputs = check::generate(options);
    GradientBuffers all = test::gradients_in_fp32(inputs);
    test::run_backward(inputs, &all);
    const auto outputs = test::gradient_outputs(all);
    for (std::size_t only = 0; only < outputs.size(); ++only) {
      GradientBuffers one = test::gradients_in_fp32(inputs);
      Gradients& g = one.gradients;
      std::optional<TensorDesc>* descs[] = {&g.dq,    &g.dk,     &g.dv,       &g.dg,
                                            &g.dbeta, &g.dA_log, &g.ddt_bias, &g.d_initial_state};
      for (std::size_t i = 0; i < outputs.size(); ++i)
        if (i != only) descs[i]->reset();
      const GradientBuffers untouched = one;
      test::run_backward(inputs, &one);
      for (std::size_t i = 0; i < outputs.size(); ++i)
        EXPECT_TRUE(
            test::same_bits(*test::gradient_outputs(one)[i],
                            i == only ? *outputs[i] : *test::gradient_outputs(untouched)[i]))
            << check::kGradientNames[only] << " " << check::kGradientNames[i];
    }
  }
}

TEST(Backward, PlainStepsOfZero) {
  check::GenerateOptions options = test::shape(100, 1, 32, 32);
  options.regime = Regime::kLog;
  Inputs inputs = check::generate(options);
  inputs.problem.qk_l2norm = false;
  inputs.problem.beta_mode = BetaMode::kPlain;
  for (int64_t t = 0; t < 100; ++t) {
    inputs.beta.as<float>()[t] = static_cast<float>(t % 3) * 0.5f;  // 0, 1/2, 1
    for (int64_t d = 0; d < 32; ++d) inputs.k.as<float>()[t * 32 + d] *= 0.15f;
  }
  for (const double scale : {0.0, -0.5}) {
    inputs.problem.scale = scale;
    expect_within(inputs, {}, {}, "plain");
  }
}

TEST(Backward, NoInputsOfAKind) {
  for (const DType dtype : test::backward_types()) {
    check::GenerateOptions options = test::shape(40, 1, 16, 16);
    options.initial_state = true;
    options.dtype = dtype;
    const Inputs inputs = check::generate(options);
    expect_within(inputs, {.d_o = false, .d_o_dtype = dtype}, {}, "d_final_state alone");
    expect_within(inputs, {.d_final_state = false, .d_o_dtype = dtype}, {}, "d_o alone");
  }
}

TEST(Backward, EmptySequencesPassTheStateOn) {
  for (const DType dtype : test::backward_types()) {
    for (const int64_t batch : {0, 2}) {
      check::GenerateOptions options = test::shape(0, 2, 16, 16);
      options.batch = batch;
      options.initial_state = true;
      options.dtype = dtype;
      const Inputs inputs = check::generate(options);
      GradientBuffers buffers = test::gradients_in_fp32(inputs);
      test::run_backward(inputs, &buffers);
      EXPECT_TRUE(test::same_bits(buffers.d_initial_state, buffers.d_final_state));
      for (std::size_t i = 0; i < buffers.dA_log.size() / 4; ++i)
        EXPECT_EQ(buffers.dA_log.as<float>()[i], 0);
    }
  }
}

/// Fp32 rows [begin, end) of a dense gradient.
bool all_zero(const io::Buffer& buffer, int64_t begin, int64_t end, int64_t row) {
  for (int64_t i = begin * row; i < end * row; ++i)
    if (buffer.as<float>()[i] != 0) return false;
  return true;
}

/// Elements [begin, end) of a dense d_o.
void set_d_o(GradientBuffers* buffers, int64_t begin, int64_t end, float value) {
  for (int64_t i = begin; i < end; ++i)
    store_element(buffers->d_o.data(), buffers->gradients.d_o->dtype, i, value);
}

TEST(Backward, NothingReachesTokensBehindALoss) {
  for (const auto [dtype, segments] : test::backward_forms()) {
    for (const Regime regime : {Regime::kStrong, Regime::kSoftplus, Regime::kNeedle, Regime::kSlow})
      for (const int64_t last : {0, 5, 40, 63, 64, 100}) {
        if (segments > 0 && regime != Regime::kSlow) continue;
        check::GenerateOptions options = test::shape(150, 1, 24, 40);
        options.regime = regime;
        options.dtype = dtype;
        const Inputs inputs = check::generate(options);
        GradientBuffers buffers = test::gradients_in_fp32(inputs, {.d_final_state = false});
        set_d_o(&buffers, (last + 1) * 40, 150 * 40, 0);
        test::run_backward(inputs, &buffers, {.segments = segments});
        EXPECT_TRUE(all_zero(buffers.dq, last + 1, 150, 24)) << last;
        EXPECT_TRUE(all_zero(buffers.dk, last + 1, 150, 24)) << last;
        EXPECT_TRUE(all_zero(buffers.dv, last + 1, 150, 40)) << last;
        EXPECT_TRUE(all_zero(buffers.dg, last + 1, 150, 24)) << last;
        EXPECT_TRUE(all_zero(buffers.dbeta, last + 1, 150, 1)) << last;
        EXPECT_FALSE(all_zero(buffers.dv, last, last + 1, 40)) << last;
      }
  }
}

TEST(Backward, DecaysOfZeroAreExact) {
  for (const DType dtype : test::backward_types()) {
    // All channels at -inf at token 50: nothing before it has a part in a loss behind it.
    check::GenerateOptions options = test::shape(120, 1, 24, 40);
    options.regime = Regime::kLog;
    options.dtype = dtype;
    Inputs inputs = check::generate(options);
    for (int64_t d = 0; d < 24; ++d) store_element(inputs.g.data(), dtype, 50 * 24 + d, -INFINITY);
    GradientBuffers buffers = test::gradients_in_fp32(inputs);
    set_d_o(&buffers, 0, 50 * 40, 0);
    test::run_backward(inputs, &buffers);
    for (const auto& [buffer, row] :
         {std::pair{&buffers.dq, 24}, std::pair{&buffers.dk, 24}, std::pair{&buffers.dv, 40}})
      EXPECT_TRUE(all_zero(*buffer, 0, 50, row));
    // In fp32 no sum has terms that cancel; a suffix sum leaves what fp32 rounds of them.
    const auto largest = [&](int64_t begin, int64_t end) {
      float most = 0;
      for (int64_t i = begin * 24; i < end * 24; ++i)
        most = std::max(most, std::fabs(buffers.dg.as<float>()[i]));
      return most;
    };
    EXPECT_LE(largest(0, 50), dtype == DType::kFloat32 ? 0 : 1e-6f * largest(50, 120));
    expect_within(inputs, {.d_o_dtype = dtype}, {}, "-inf");
  }
}

TEST(Backward, SequencesAndHeadsAreIsolated) {
  for (const auto [dtype, segments] : test::backward_forms()) {
    check::GenerateOptions options = test::shape(0, 2, 24, 40);
    options.num_value_heads = 4;
    options.seq_lens = {70, 45, 80};
    options.initial_state = true;
    options.dtype = dtype;
    const Inputs inputs = check::generate(options);
    GradientBuffers clean = test::gradients_in_fp32(inputs);
    Inputs poisoned = inputs;
    test::poison_rows(&poisoned, 70, 115);
    GradientBuffers dirty = clean;
    test::run_backward(inputs, &clean, {.num_threads = 2, .segments = segments});
    test::run_backward(poisoned, &dirty, {.num_threads = 1, .segments = segments});
    const auto same_rows = [&](const io::Buffer& a, const io::Buffer& b, int64_t begin, int64_t end,
                               std::size_t rows) {
      const std::size_t row = a.size() / rows;
      const auto first = static_cast<std::size_t>(begin) * row;
      return std::memcmp(a.data() + first, b.data() + first,
                         static_cast<std::size_t>(end - begin) * row) == 0;
    };
    const auto a = test::gradient_outputs(clean), b = test::gradient_outputs(dirty);
    for (const std::size_t i : {0, 1, 2, 3, 4}) {
      EXPECT_TRUE(same_rows(*a[i], *b[i], 0, 70, 195)) << check::kGradientNames[i];
      EXPECT_TRUE(same_rows(*a[i], *b[i], 115, 195, 195)) << check::kGradientNames[i];
    }
    EXPECT_TRUE(same_rows(*a[7], *b[7], 0, 1, 3));
    EXPECT_TRUE(same_rows(*a[7], *b[7], 2, 3, 3));

    // NaN in one value head stays out of the others, but for dq and dk of its group.
    GradientBuffers one_head = clean;
    for (int64_t t = 0; t < 195; ++t) {
      const int64_t at = (t * 4 + 1) * 40 + 3;
      set_d_o(&one_head, at, at + 1, NAN);
    }
    test::run_backward(inputs, &one_head, {.segments = segments});
    for (int64_t t = 0; t < 195; ++t)
      for (const int64_t head : {0, 2, 3}) {
        ASSERT_EQ(clean.dg.as<float>()[(t * 4 + head) * 24],
                  one_head.dg.as<float>()[(t * 4 + head) * 24]);
        ASSERT_EQ(clean.dv.as<float>()[(t * 4 + head) * 40],
                  one_head.dv.as<float>()[(t * 4 + head) * 40]);
        ASSERT_EQ(clean.dbeta.as<float>()[t * 4 + head], one_head.dbeta.as<float>()[t * 4 + head]);
      }
    for (int64_t t = 0; t < 195; ++t)
      ASSERT_EQ(clean.dq.as<float>()[(t * 2 + 1) * 24], one_head.dq.as<float>()[(t * 2 + 1) * 24]);
    // And is not lost in its own.
    EXPECT_TRUE(std::isnan(one_head.dg.as<float>()[(10 * 4 + 1) * 24]));
    EXPECT_TRUE(std::isnan(one_head.ddt_bias.as<float>()[1 * 24]));
    EXPECT_TRUE(std::isnan(one_head.dA_log.as<float>()[1]));
    EXPECT_FALSE(std::isnan(one_head.dA_log.as<float>()[0]));
  }
}

TEST(Backward, AloneEqualsInABatch) {
  for (const auto [dtype, segments] : test::backward_forms()) {
    check::GenerateOptions options = test::shape(0, 1, 24, 16);
    options.num_value_heads = 2;
    options.seq_lens = {33, 100, 7};
    options.dtype = dtype;
    const Inputs inputs = check::generate(options);
    GradientBuffers batch = test::gradients_in_fp32(inputs, {.d_final_state = false});
    test::run_backward(inputs, &batch, {.segments = segments});
    for (std::size_t n = 0; n < 3; ++n) {
      const Inputs one = test::only_sequence(inputs, n);
      GradientBuffers alone = test::gradients_in_fp32(one, {.d_final_state = false});
      const auto first = static_cast<std::size_t>(inputs.cu_seqlens[n]);
      std::memcpy(alone.d_o.data(), batch.d_o.data() + first * (batch.d_o.size() / 140),
                  alone.d_o.size());
      test::run_backward(one, &alone, {.segments = segments});
      for (std::size_t i = 0; i < 5; ++i) {
        const io::Buffer& whole = *test::gradient_outputs(batch)[i];
        const io::Buffer& part = *test::gradient_outputs(alone)[i];
        EXPECT_EQ(
            std::memcmp(whole.data() + first * (whole.size() / 140), part.data(), part.size()), 0)
            << check::kGradientNames[i];
      }
    }
  }
}

TEST(Backward, TheSameBitsForEveryThreadCountAndRepeat) {
  for (const auto [dtype, segments] : test::backward_forms()) {
    check::GenerateOptions options = test::shape(0, 2, 32, 40);
    options.num_value_heads = 6;
    options.seq_lens = {130, 1, 64, 30};
    options.initial_state = true;
    options.dtype = dtype;
    const Inputs inputs = check::generate(options);
    GradientBuffers first = test::gradients_in_fp32(inputs);
    const GradientBuffers empty = first;
    test::run_backward(inputs, &first, {.segments = segments});
    for (int repeat = 0; repeat < (test::emulated() ? 3 : 100); ++repeat) {
      GradientBuffers again = empty;
      test::run_backward(inputs, &again, {.num_threads = 1 + repeat % 8, .segments = segments});
      ASSERT_TRUE(test::same_gradients(first, again)) << repeat;
    }
  }
}

TEST(Backward, StridesChangeNothingAndGapsStay) {
  check::GenerateOptions options = test::shape(70, 2, 40, 24);
  options.batch = 2;
  options.num_value_heads = 4;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    options.dtype = dtype;
    Inputs inputs = check::generate(options);
    GradientBuffers dense = check::make_gradients(inputs, {.d_o_dtype = dtype});
    GradientBuffers strided = dense;
    test::run_backward(inputs, &dense);
    test::restride(&inputs, 8);
    test::restride_gradients(inputs.problem, &strided, 8);
    test::run_backward(inputs, &strided);
    // The dense result, spread, is the strided one: also in its gaps.
    test::restride_gradients(inputs.problem, &dense, 8);
    EXPECT_TRUE(test::same_gradients(dense, strided));
  }
}

TEST(Backward, MasksAndPoolsOfInitialStates) {
  for (const DType dtype : test::backward_types()) {
    check::GenerateOptions options = test::shape(0, 1, 16, 24);
    options.seq_lens = {40, 30, 20};
    options.initial_state = true;
    options.dtype = dtype;
    Inputs inputs = check::generate(options);
    GradientBuffers dense = test::gradients_in_fp32(inputs);
    GradientBuffers pooled = dense;
    test::run_backward(inputs, &dense);
    // The same states in a pool of 5 slots; sequence 1 starts from none.
    const std::size_t state = 16 * 24 * 4;
    io::Buffer pool(5 * state);
    pool.fill(0xff);
    std::memcpy(pool.data() + 4 * state, inputs.initial_state.data(), state);
    std::memcpy(pool.data() + 1 * state, inputs.initial_state.data() + 2 * state, state);
    std::memcpy(pool.data() + 2 * state, inputs.initial_state.data() + 1 * state, state);
    Inputs none = inputs;
    none.problem.initial_state.reset();
    inputs.initial_state = pool;
    inputs.problem.initial_state->num_slots = 5;
    inputs.problem.initial_state->indexed = true;
    const int32_t slots[] = {4, -1, 1}, all_slots[] = {4, 2, 1};
    const uint8_t mask[] = {1, 0, 1};
    test::run_backward(inputs, &pooled, {.state_indices = slots});
    GradientBuffers masked = pooled;
    inputs.problem.initial_state_mask = true;
    test::run_backward(inputs, &masked, {.state_indices = all_slots, .state_mask = mask});
    EXPECT_TRUE(test::same_gradients(pooled, masked));
    const auto part = [&](const GradientBuffers& buffers, std::size_t n) {
      return buffers.d_initial_state.data() + n * state;
    };
    EXPECT_EQ(std::memcmp(part(pooled, 0), part(dense, 0), state), 0);
    EXPECT_EQ(std::memcmp(part(pooled, 2), part(dense, 2), state), 0);
    EXPECT_TRUE(all_zero(pooled.d_initial_state, 1, 2, 16 * 24));
    GradientBuffers from_zero = test::gradients_in_fp32(none);
    test::run_backward(none, &from_zero);
    EXPECT_EQ(
        std::memcmp(pooled.dk.data() + 40 * 16 * 4, from_zero.dk.data() + 40 * 16 * 4, 30 * 16 * 4),
        0);
  }
}

TEST(Backward, LeavesCheckpointsToItsForward) {
  Inputs inputs = check::generate(test::shape(40, 1, 16, 24));
  const GradientBuffers buffers = test::gradients_in_fp32(inputs);
  StateDesc pool;
  pool.num_slots = 2;
  pool.indexed = true;
  pool.tensor = contiguous(DType::kFloat32, {2, 1, 16, 24});
  inputs.problem.checkpoints = pool;
  inputs.problem.checkpoint_every = 16;
  for (const bool offsets : {false, true}) {
    inputs.problem.checkpoint_offsets = offsets;
    Plan forward;
    throw_if_error(make_plan(inputs.problem, {}, test::device(), {}, &forward));
    BackwardPlan plan;
    const Status status = make_backward_plan(forward, buffers.gradients, {}, &plan);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_FALSE(plan.plan.problem.checkpoints || plan.plan.problem.checkpoint_offsets);
  }
}

/// Dot product of rows t of two fp32 tensors.
double dot(const io::Buffer& a, const io::Buffer& b, int64_t t, int64_t size) {
  double sum = 0;
  for (int64_t i = t * size; i < (t + 1) * size; ++i)
    sum += static_cast<double>(a.as<float>()[i]) * b.as<float>()[i];
  return sum;
}

/// Prediction errors e of all tokens: a query that is the key reads e from the state,
/// S_t^T k_t = v_t - (1 - beta_t |k_t|^2) e_t.
io::Buffer prediction_errors(Inputs inputs, int64_t T, int64_t K, int64_t V) {
  inputs.q = inputs.k;
  inputs.problem.scale = 1.0;
  const test::Result read = test::run_inputs(inputs);
  io::Buffer errors(inputs.v.size());
  for (int64_t t = 0; t < T; ++t) {
    const double rest = 1 - inputs.beta.as<float>()[t] * dot(inputs.k, inputs.k, t, K);
    for (int64_t i = t * V; i < (t + 1) * V; ++i)
      errors.as<float>()[i] =
          static_cast<float>((inputs.v.as<float>()[i] - read.outputs.o.as<float>()[i]) / rest);
  }
  return errors;
}

/// What holds between gradients without any reference, token by token.
TEST(Backward, Identities) {
  constexpr int64_t T = 100, K = 32, V = 40;
  check::GenerateOptions options = test::shape(T, 1, K, V);
  options.regime = Regime::kLog;
  Inputs inputs = check::generate(options);
  Problem& p = inputs.problem;
  p.qk_l2norm = false;
  p.beta_mode = BetaMode::kPlain;
  for (int64_t i = 0; i < T * K; ++i) inputs.k.as<float>()[i] *= 0.15f;
  for (int64_t t = 0; t < T; ++t)
    inputs.beta.as<float>()[t] = 0.1f + 0.01f * static_cast<float>(t % 50);
  GradientBuffers buffers = check::make_gradients(inputs);
  test::run_backward(inputs, &buffers);
  const test::Result forward = test::run_inputs(inputs);
  const io::Buffer errors = prediction_errors(inputs, T, K, V);
  for (int64_t t = 0; t < T; ++t) {
    const double step = dot(buffers.dv, errors, t, V);
    EXPECT_NEAR(dot(inputs.q, buffers.dq, t, K), dot(forward.outputs.o, buffers.d_o, t, V), 1e-4);
    EXPECT_NEAR(inputs.beta.as<float>()[t] * buffers.dbeta.as<float>()[t], step, 1e-4);
    EXPECT_NEAR(dot(inputs.k, buffers.dk, t, K), 2 * step - dot(buffers.dv, inputs.v, t, V), 1e-4);
  }
}

/// A sequence is two: the second from the final state of the first, whose gradient is that of the
/// second's initial state. There dg of the first token of the second is rowsum(S0 * dS0).
TEST(Backward, HalvesChainedThroughTheStateAreTheWhole) {
  constexpr int64_t T = 150, K = 24, V = 40;
  check::GenerateOptions options = test::shape(T, 1, K, V);
  options.initial_state = true;
  options.regime = Regime::kLog;
  const Inputs inputs = check::generate(options);
  GradientBuffers whole = check::make_gradients(inputs);
  test::run_backward(inputs, &whole);
  for (const int64_t cut : {1, 16, 17, 48, 64, 77, 128, 149}) {
    Inputs first = test::slice(inputs, 0, cut), second = test::slice(inputs, cut, T);
    const test::Result left = test::run_inputs(first);
    second.initial_state = left.outputs.final_state;
    GradientBuffers d_second = check::make_gradients(second),
                    d_first = check::make_gradients(first);
    const auto rows = static_cast<std::size_t>(V) * sizeof(float);
    std::memcpy(d_second.d_o.data(), whole.d_o.data() + static_cast<std::size_t>(cut) * rows,
                d_second.d_o.size());
    d_second.d_final_state = whole.d_final_state;
    test::run_backward(second, &d_second);
    std::memcpy(d_first.d_o.data(), whole.d_o.data(), d_first.d_o.size());
    d_first.d_final_state = d_second.d_initial_state;
    test::run_backward(first, &d_first);

    const auto all = test::gradient_outputs(whole), a = test::gradient_outputs(d_first),
               b = test::gradient_outputs(d_second);
    for (std::size_t i = 0; i < 5; ++i) {  // dq, dk, dv, dg, dbeta
      const auto size = static_cast<int64_t>(all[i]->size() / sizeof(float));
      const int64_t row = size / T;
      for (int64_t n = 0; n < size; ++n) {
        const float found = n < cut * row ? a[i]->as<float>()[n] : b[i]->as<float>()[n - cut * row];
        ASSERT_NEAR(found, all[i]->as<float>()[n], 2e-5)
            << check::kGradientNames[i] << " " << n / row << " cut at " << cut;
      }
    }
    if (cut % 16 == 0) {  // chunks of the backward begin there: the same bits
      EXPECT_TRUE(test::same_bits(d_first.d_initial_state, whole.d_initial_state)) << cut;
      EXPECT_EQ(std::memcmp(d_first.dv.data(), whole.dv.data(), d_first.dv.size()), 0) << cut;
      EXPECT_EQ(
          std::memcmp(d_second.dv.data(), whole.dv.data() + d_first.dv.size(), d_second.dv.size()),
          0)
          << cut;
    }
    for (int64_t d = 0; d < K; ++d)
      EXPECT_NEAR(dot(second.initial_state, d_second.d_initial_state, d, V),
                  d_second.dg.as<float>()[d], 2e-5)
          << d << " cut at " << cut;
  }
}

/// A forward that keeps states, run by its stages, keeps what run() keeps.
TEST(Backward, SegmentStagesKeepStates) {
  check::GenerateOptions options = test::shape(700, 2, 16, 24);
  options.initial_state = true;
  options.regime = Regime::kSlow;
  const Inputs inputs = check::generate(options);
  Problem p = inputs.problem;
  check::Outputs outputs = check::make_outputs(&p, DType::kFloat32);
  PlanOptions cut = test::fixed_segments(4);
  cut.keep = KeepPolicy::kStates;
  cut.kept_state_every = 64;
  cut.num_threads = 1;
  Plan forward;
  throw_if_error(make_plan(p, {}, cpu_facts(), cut, &forward));
  ASSERT_EQ(forward.segments.size(), 4u);
  Tensors tensors = inputs.tensors();
  outputs.attach(&tensors);
  io::Buffer room(forward.workspace_bytes), by_run(forward.saved_bytes),
      by_stages(forward.saved_bytes);
  by_run.fill(0xff);
  by_stages.fill(0xff);
  const auto save_to = [&](io::Buffer& saved) {
    tensors.saved = saved.data();
    tensors.saved_bytes = saved.size();
  };
  save_to(by_run);
  throw_if_error(run(forward, tensors, room.data(), room.size()));
  std::vector<float> M(4 * 2 * 16 * 16), B(4 * 2 * 16 * 24), states(B.size());
  const SegmentTensors segments{M.data(), B.data(), states.data()};
  save_to(by_stages);
  for (const auto stage : {segment_scan, segment_merge, segment_forward})
    throw_if_error(stage(forward, tensors, segments, room.data(), room.size(), nullptr));
  EXPECT_TRUE(test::same_bits(by_run, by_stages));

  GradientBuffers expected = check::make_gradients(inputs), found = expected;
  BackwardPlan plan;
  throw_if_error(make_backward_plan(forward, expected.gradients, {}, &plan));
  io::Buffer workspace(plan.plan.workspace_bytes);
  for (const auto& [saved, gradients] :
       {std::pair{&by_run, &expected}, std::pair{&by_stages, &found}}) {
    save_to(*saved);
    throw_if_error(
        backward(plan, tensors, gradients->tensors(), workspace.data(), workspace.size()));
  }
  EXPECT_TRUE(test::same_gradients(expected, found));
}

}  // namespace
}  // namespace kda
