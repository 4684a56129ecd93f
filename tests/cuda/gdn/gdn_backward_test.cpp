// SPDX-License-Identifier: Apache-2.0
// The backward of cuda.sm90.gdn against the oracle: gates, lengths, heads, sizes, steps, segments,
// what is wanted of it, and what it declines.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>

#include "check/tolerances.hpp"
#include "core/convert.hpp"
#include "core/layout.hpp"
#include "cuda/gdn/backward/backend.hpp"
#include "cuda/gdn/backward/cost.hpp"
#include "cuda/gdn/backward/sizes.hpp"
#include "cuda/gdn/identities.hpp"
#include "cuda/gdn/inputs.hpp"
#include "cuda/gdn/made_cut.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/rows.hpp"
#include "support/backward.hpp"
#include "support/backward_graph.hpp"
#include "support/gpu.hpp"
#include "support/length_tables.hpp"
#include "support/padded.hpp"

namespace kda {
namespace {

using check::GradientBuffers;
using check::GradientOptions;
using check::Inputs;
using test::BackwardRun;
using test::gdn::Gates;
using Errors = std::map<std::string, double>;

constexpr const char* kName = "cuda.sm90.gdn";
constexpr GradientOptions kBf16{.d_o_dtype = DType::kBFloat16};

class GdnBackward : public test::HopperTest {};

BackwardRun on_gdn() { return {.backend = "gdn"}; }

/// Gradients of final states that are not all that few tokens get.
GradientBuffers gradients_of(const Inputs& inputs, const GradientOptions& options = kBf16) {
  GradientBuffers buffers = check::make_gradients(inputs, options);
  if (buffers.gradients.d_final_state)
    test::scale_by(&buffers.d_final_state, buffers.gradients.d_final_state->dtype,
                   [](int64_t) { return 0.1; });
  return buffers;
}

void run(const Inputs& inputs, GradientBuffers* buffers, const BackwardRun& how = on_gdn()) {
  test::BackwardCall call(inputs, buffers->gradients, how);
  ASSERT_EQ(call.plan.plan.implementation, kName);
  throw_if_error(call.run(buffers));
}

check::GradientComparison all_errors(const Inputs& inputs, const GradientBuffers& buffers) {
  return check::compare_gradients(inputs, buffers,
                                  {.marginal = check::is_marginal(inputs),
                                   .operands = DType::kBFloat16,
                                   .num_threads = test::oracle_threads()});
}

/// Errors of every gradient over all heads; those of each head are within their tolerances.
Errors errors_of(const Inputs& inputs, const GradientBuffers& buffers, const std::string& what) {
  const check::GradientComparison comparison = all_errors(inputs, buffers);
  for (const auto& [name, errors] : comparison.errors) {
    const check::HeadError* worst = check::worst_error(errors);
    EXPECT_LE(worst->error, worst->tolerance)
        << what << ": " << name << " of sequence " << worst->sequence << ", head " << worst->head;
  }
  if (std::getenv("KDA_TEST_VERBOSE"))
    for (const auto& [name, error] : comparison.all_heads)
      std::printf("  %-28s %-16s %.2e\n", what.c_str(), name.c_str(), error);
  return comparison.all_heads;
}

Errors expect_within(const Inputs& inputs, GradientBuffers buffers, const std::string& what,
                     const BackwardRun& how = on_gdn()) {
  run(inputs, &buffers, how);
  return errors_of(inputs, buffers, what);
}
Errors expect_within(const Inputs& inputs, const std::string& what) {
  return expect_within(inputs, gradients_of(inputs), what);
}

// ---- gates

/// The gradient by the one gate of a token, which the oracle has by channel.
double gate_gradient(const cpu::oracle::HeadGradients& truth, int64_t token) {
  double sum = 0;
  for (std::size_t d = 0; d < 128; ++d)
    sum += truth.dg.value[static_cast<std::size_t>(token) * 128 + d];
  return sum;
}

/// 1.15 times what bf16 operands, states, errors and outputs cost in emulation, relative L2 over
/// all heads, in the order of `names`, and 0.4e-3 at least.
void expect_all_within(const Errors& errors, const std::array<double, 6>& bounds,
                       const std::string& what) {
  constexpr const char* kNames[] = {"dq", "dk", "dv", "dg", "dbeta", "d_initial_state"};
  for (std::size_t i = 0; i < bounds.size(); ++i)
    EXPECT_LE(errors.at(kNames[i]), 1e-3 * std::max(1.15 * bounds[i], 0.4))
        << what << ": " << kNames[i];
}

TEST_F(GdnBackward, EveryGate) {
  const int64_t tokens = test::emulated() ? 200 : 1000;
  for (const Gates gates : test::gdn::kAllGates) {
    const std::string name = test::gdn::name_of(gates);
    const int64_t heads = test::emulated() ? 1 : 2;
    const Inputs inputs = test::gdn::inputs_of(
        {.lengths = {tokens}, .H = heads, .HV = 3 * heads, .K = 128, .V = 128, .gates = gates});
    std::array<double, 6> bounds{2.8, 3.9, 3.2, 2.9, 4.1, 2.5};
    if (gates == Gates::kPositive)  // states grow, and what rounding has left in them
      for (double& bound : bounds) bound *= 1.5;
    expect_all_within(expect_within(inputs, name), bounds, name);
  }
}

TEST_F(GdnBackward, EqualKeysWithStepsNear2) {
  // The forward loses digits of its states there (docs/design/gdn.md), and so do the gradients.
  const Inputs inputs = test::gdn::inputs_of(
      {.lengths = {150}, .K = 128, .V = 128, .gates = Gates::kSlow, .equal_keys = true});
  GradientBuffers buffers = gradients_of(inputs);
  run(inputs, &buffers);
  for (const auto& [name, error] : all_errors(inputs, buffers).all_heads)
    EXPECT_LE(error, 0.2) << name;
}

// ---- lengths, heads, sizes

TEST_F(GdnBackward, LengthsAroundChunks) {
  const std::vector<int64_t> lengths{1, 2, 15, 16, 17, 0, 33, 63, 64, 65, 127, 129};
  std::size_t turn = 0;
  for (const Gates gates : {Gates::kTrained, Gates::kNeedle})
    expect_within(
        test::gdn::inputs_of(
            {.lengths = lengths, .HV = 1, .K = 128, .V = 128, .gates = gates, .seed = ++turn}),
        test::gdn::name_of(gates));
}

TEST_F(GdnBackward, NoTokens) {
  const Inputs inputs = test::gdn::inputs_of({.lengths = {0, 0}, .K = 128, .V = 128, .bias = true});
  expect_within(inputs, "no tokens");
}

TEST_F(GdnBackward, ValueHeadsOfAQueryHead) {
  for (const int64_t of_each : {3, 5})
    for (const HeadMap map : {HeadMap::kGrouped, HeadMap::kTiled})
      expect_within(test::gdn::inputs_of({.lengths = {90, 20},
                                          .H = 2,
                                          .HV = 2 * of_each,
                                          .K = 128,
                                          .V = 128,
                                          .map = map,
                                          .bias = true}),
                    std::to_string(of_each) + (map == HeadMap::kTiled ? " tiled" : " grouped"));
}

TEST_F(GdnBackward, SizesOfHeads) {
  for (const auto& [K, V] :
       {std::pair<int64_t, int64_t>{128, 256}, {96, 192}, {72, 8}, {64, 64}, {128, 72}, {16, 128}})
    expect_within(test::gdn::inputs_of({.lengths = {100}, .K = K, .V = V}),
                  "K " + std::to_string(K) + " V " + std::to_string(V));
}

TEST_F(GdnBackward, BlocksTakeSeveralChunks) {
  // As on a GPU with few SMs: 2 blocks for 12 chunks, of which some have no sequence.
  const Inputs padded = test::with_rows_behind(test::gdn::inputs_of(
      {.lengths = {130, 0, 70, 60}, .H = 2, .HV = 4, .K = 128, .V = 128, .bias = true}));
  BackwardRun few = on_gdn();
  few.num_sms = 2;
  few.from_bounds = true;
  GradientBuffers buffers = gradients_of(padded);
  run(padded, &buffers, few);
  const int64_t tokens = padded.problem.num_tokens, end = padded.cu_seqlens.back();
  for (const io::Buffer* rows :
       {&buffers.dq, &buffers.dk, &buffers.dv, &buffers.dg, &buffers.dbeta})
    EXPECT_TRUE(test::rows_are_zero(*rows, tokens, end, tokens));
  errors_of(test::without_rows_behind(padded), buffers, "lengths on the device");
}

TEST_F(GdnBackward, RingsGoOnOverUnits) {
  // One block, in which stages and numbers of heads come in odd counts a q/k head. With several
  // heads of one tile of V copies are two heads ahead.
  for (const auto& [H, HV, V] :
       {std::array<int64_t, 3>{3, 3, 64}, {1, 3, 192}, {1, 5, 64}, {2, 6, 64}}) {
    const Inputs inputs = test::gdn::inputs_of(
        {.lengths = {70, 1}, .H = H, .HV = HV, .V = V, .gates = Gates::kTrained});
    BackwardRun one = on_gdn();
    one.num_sms = 1;
    expect_within(inputs, gradients_of(inputs),
                  std::to_string(HV / H) + " heads, V " + std::to_string(V), one);
  }
}

// ---- steps, norms, scales

TEST_F(GdnBackward, PlainSteps) {
  for (const double beta : {2.0, 1.0, 0x1p-9, 0.0, -0.5}) {
    Inputs inputs = test::gdn::inputs_of({.lengths = {100}, .K = 128, .V = 128});
    test::gdn::set_betas(&inputs, beta);
    expect_within(inputs, "beta " + std::to_string(beta));
  }
}

TEST_F(GdnBackward, Scales) {
  for (const double scale : {0.0, -0.3, 1e-20}) {
    Inputs inputs = test::gdn::inputs_of({.lengths = {100}, .K = 128, .V = 128});
    inputs.problem.scale = scale;
    expect_within(inputs, "scale " + std::to_string(scale));
  }
}

TEST_F(GdnBackward, KeysAndQueriesOfZeros) {
  for (const bool norm : {false, true}) {
    Inputs inputs =
        test::gdn::inputs_of({.lengths = {100}, .K = 128, .V = 128, .gates = Gates::kSlow});
    inputs.problem.qk_l2norm = norm;
    test::scale_by(&inputs.k, DType::kBFloat16,
                   [](int64_t i) { return i / 128 % 3 == 0 ? 0 : 0.05; });
    test::scale_by(&inputs.q, DType::kBFloat16, [](int64_t i) { return i / 128 % 5 == 0 ? 0 : 1; });
    expect_within(inputs, norm ? "zeros, norm" : "zeros, no norm");
  }
}

TEST_F(GdnBackward, KeysAndQueriesOfAnyLength) {
  Inputs inputs =
      test::gdn::inputs_of({.lengths = {100}, .K = 128, .V = 128, .gates = Gates::kSlow});
  inputs.problem.qk_l2norm = false;
  // Steps of 1 and keys of length 1.2 let states grow.
  test::scale_by(&inputs.k, DType::kBFloat16, [](int64_t) { return 1.2 / std::sqrt(128.0); });
  test::scale_by(&inputs.q, DType::kBFloat16,
                 [](int64_t i) { return i / 128 % 2 ? 0x1p10 : 0x1p-10; });
  expect_within(inputs, "no norm");
  inputs.problem.qk_l2norm = true;
  test::scale_by(&inputs.k, DType::kBFloat16, [](int64_t i) { return i / 128 % 2 ? 0x1p20 : 1; });
  expect_within(inputs, "norm of long keys");
}

// ---- gradients of any size

TEST_F(GdnBackward, GradientsOfAnySize) {
  const Inputs inputs = test::gdn::inputs_of({.lengths = {100}, .K = 128, .V = 128});
  for (const double size : {0x1p30, 0x1p-30}) {
    GradientBuffers buffers = gradients_of(inputs);
    test::scale_by(&buffers.d_o, DType::kBFloat16, [=](int64_t) { return size; });
    test::scale_by(&buffers.d_final_state, DType::kFloat32, [=](int64_t) { return size; });
    expect_within(inputs, buffers, "d_o times " + std::to_string(size));
  }
  GradientBuffers buffers = gradients_of(inputs);
  check::Random random(5);
  std::vector<double> sizes(100);
  for (double& size : sizes) size = std::exp2(std::floor(random.uniform(-24, 1)));
  test::scale_by(&buffers.d_o, DType::kBFloat16,
                 [&](int64_t i) { return sizes[static_cast<std::size_t>(i / 256)]; });
  expect_within(inputs, buffers, "d_o over 2^24");
}

/// Large terms of later tokens cost earlier tokens no digits, because nothing is subtracted.
TEST_F(GdnBackward, EarlyTokensKeepTheirDigits) {
  for (const Gates gates : {Gates::kStrong, Gates::kNeedle}) {
    const Inputs inputs =
        test::gdn::inputs_of({.lengths = {128}, .HV = 1, .K = 128, .V = 128, .gates = gates});
    GradientBuffers buffers = gradients_of(inputs);
    const auto early = [](int64_t token) { return token % 64 < 32; };
    test::scale_by(&buffers.d_o, DType::kBFloat16,
                   [&](int64_t i) { return early(i / 128) ? 0x1p-24 : 1; });
    test::scale_by(&buffers.d_final_state, DType::kFloat32, [](int64_t) { return 0; });
    run(inputs, &buffers);
    std::vector<cpu::oracle::HeadGradients> truths;
    check::compare_gradients(inputs, buffers, {.operands = DType::kBFloat16}, &truths);
    std::vector<double> errors;
    for (int64_t t = 0; t < 128; ++t) {
      const double truth = gate_gradient(truths[0], t);
      if (t % 64 < 16 && truth != 0)
        errors.push_back(std::abs(load_double(buffers.dg.data(), DType::kFloat32, t) - truth) /
                         std::abs(truth));
    }
    ASSERT_GT(errors.size(), 20u);
    std::sort(errors.begin(), errors.end());
    EXPECT_LE(errors[errors.size() / 2], 0.02) << test::gdn::name_of(gates);
  }
}

TEST_F(GdnBackward, ZerosBehindALoss) {
  const Inputs inputs = test::gdn::inputs_of({.lengths = {150}, .HV = 1, .K = 128, .V = 128});
  GradientBuffers buffers = gradients_of(inputs);
  constexpr int64_t kLast = 75;
  test::scale_by(&buffers.d_o, DType::kBFloat16,
                 [](int64_t i) { return i / 128 <= kLast ? 1 : 0; });
  test::scale_by(&buffers.d_final_state, DType::kFloat32, [](int64_t) { return 0; });
  run(inputs, &buffers);
  for (const io::Buffer* rows :
       {&buffers.dq, &buffers.dk, &buffers.dv, &buffers.dg, &buffers.dbeta})
    EXPECT_TRUE(test::rows_are_zero(*rows, 150, kLast + 1, 150));
}

// ---- what holds without a reference

/// A GPU takes the heads of a layer; whole and in segments.
TEST_F(GdnBackward, EquationsWithoutAReference) {
  const int64_t tokens = test::emulated() ? 130 : 1024, H = test::emulated() ? 1 : 16;
  for (const auto& [gates, segments] :
       {std::pair<Gates, int64_t>{Gates::kSlow, 0}, {Gates::kZero, 2}, {Gates::kNeedle, 0}}) {
    const Inputs inputs = test::gdn::of_the_recurrence(gates, tokens, H, 2 * H);
    const test::gdn::Training all(inputs, gradients_of(inputs), "gdn", segments);
    test::gdn::Sides of_gates;
    all.add_gates_of(0, all, &of_gates);
    all.add_gates_of(64, all.behind(64, "gdn"), &of_gates);
    const std::vector<double> E = all.what_steps_find("gdn");
    const std::pair<const char*, double> errors[] = {{"queries", all.of_queries()},
                                                     {"keys", all.of_keys(E)},
                                                     {"steps", all.of_steps(E)},
                                                     {"gates", of_gates.error()},
                                                     {"values", all.of_all_values()}};
    for (const auto& [name, error] : errors) {
      EXPECT_LE(error, 0.01) << name << ", gates " << test::gdn::name_of(gates);
      if (std::getenv("KDA_TEST_VERBOSE"))
        std::printf("  %-28s %-16s %.2e\n", test::gdn::name_of(gates), name, error);
    }
  }
}

// ---- states

TEST_F(GdnBackward, PoolsAndMasksOfInitialStates) {
  Inputs inputs = test::gdn::inputs_of({.lengths = {40, 30}, .HV = 1, .K = 128, .V = 128});
  const std::size_t state = std::size_t{128} * 128 * sizeof(float);
  io::Buffer pool(3 * state);
  pool.fill(0xff);
  std::memcpy(pool.data() + 2 * state, inputs.initial_state.data(), state);
  std::memcpy(pool.data(), inputs.initial_state.data() + state, state);
  Inputs pooled = inputs;
  pooled.initial_state = pool;
  pooled.problem.initial_state->num_slots = 3;
  pooled.problem.initial_state->indexed = true;
  GradientBuffers dense = gradients_of(inputs), a = dense, b = dense;
  run(inputs, &dense);
  const int32_t none[] = {2, -1}, all[] = {2, 0};
  BackwardRun how = on_gdn();
  how.state_indices = none;
  run(pooled, &a, how);
  const uint8_t mask[] = {1, 0};
  pooled.problem.initial_state_mask = true;
  how.state_indices = all, how.state_mask = mask;
  run(pooled, &b, how);
  EXPECT_TRUE(test::same_gradients(a, b));
  EXPECT_EQ(std::memcmp(a.d_initial_state.data(), dense.d_initial_state.data(), state), 0);
  EXPECT_TRUE(test::rows_are_zero(a.d_initial_state, 2, 1, 2));
}

TEST_F(GdnBackward, StatesInBf16) {
  Inputs inputs = test::gdn::inputs_of({.lengths = {100}, .K = 128, .V = 128});
  io::Buffer rounded(inputs.initial_state.size() / 2);
  for (int64_t i = 0; i < int64_t{2} * 128 * 128; ++i)
    store_element(rounded.data(), DType::kBFloat16, i, inputs.initial_state.as<float>()[i]);
  inputs.initial_state = rounded;
  inputs.problem.initial_state->tensor = contiguous(DType::kBFloat16, {1, 2, 128, 128});
  expect_within(inputs, check::make_gradients(inputs, kBf16), "bf16 states");
}

// ---- what is wanted

TEST_F(GdnBackward, SomeGradientsAreNotWanted) {
  const Inputs inputs = test::gdn::inputs_of({.lengths = {70}, .K = 128, .V = 128, .bias = true});
  const GradientBuffers unwritten = gradients_of(inputs);
  GradientBuffers all = unwritten;
  run(inputs, &all);
  const std::pair<std::optional<TensorDesc> Gradients::*, io::Buffer GradientBuffers::*> each[] = {
      {&Gradients::dq, &GradientBuffers::dq},
      {&Gradients::dk, &GradientBuffers::dk},
      {&Gradients::dg, &GradientBuffers::dg},
      {&Gradients::dbeta, &GradientBuffers::dbeta},
      {&Gradients::dA_log, &GradientBuffers::dA_log},
      {&Gradients::ddt_bias, &GradientBuffers::ddt_bias},
      {&Gradients::dv, &GradientBuffers::dv},
      {&Gradients::d_initial_state, &GradientBuffers::d_initial_state}};
  GradientBuffers none = unwritten, values = all;  // values: dv and d_initial_state
  for (const auto& [desc, buffer] : each) {
    GradientBuffers got = unwritten, want = all;
    (got.gradients.*desc).reset();
    want.*buffer = unwritten.*buffer;
    run(inputs, &got);
    EXPECT_TRUE(test::same_gradients(got, want));
    if (desc == &Gradients::dv || desc == &Gradients::d_initial_state) continue;
    (none.gradients.*desc).reset();
    values.*buffer = unwritten.*buffer;
  }
  test::BackwardCall call(inputs, none.gradients, on_gdn());
  EXPECT_EQ(call.plan.plan.kernels.size(), 2u);
  throw_if_error(call.run(&none));
  EXPECT_TRUE(test::same_gradients(none, values));
}

TEST_F(GdnBackward, GradientsThatCome) {
  const Inputs inputs = test::gdn::inputs_of(
      {.lengths = {70}, .K = 128, .V = 128, .gates = Gates::kSlow, .initial_state = false});
  expect_within(inputs, gradients_of(inputs, {.d_o = false}), "d_final_state alone");
  expect_within(inputs,
                gradients_of(inputs, {.d_final_state = false, .d_o_dtype = DType::kBFloat16}),
                "d_o alone");
}

TEST_F(GdnBackward, TypesAndStrides) {
  for (const DType gate : {DType::kBFloat16, DType::kFloat16})
    for (const DType out : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      if (test::emulated() && (gate == DType::kFloat16) != (out == DType::kFloat32)) continue;
      Inputs inputs = test::gdn::inputs_of(
          {.lengths = {70}, .K = 128, .V = 128, .gates = Gates::kSlow, .gate = gate});
      GradientBuffers buffers = gradients_of(inputs);
      Gradients& g = buffers.gradients;
      for (const auto& [desc, buffer] :
           {std::pair{&g.dv, &buffers.dv}, std::pair{&g.dg, &buffers.dg},
            std::pair{&g.dbeta, &buffers.dbeta}}) {
        *buffer = io::Buffer(buffer->size() / static_cast<std::size_t>(dtype_size((*desc)->dtype)) *
                             static_cast<std::size_t>(dtype_size(out)));
        buffer->fill(0xff);
        (*desc)->dtype = out;
      }
      test::restride(&inputs, 8);
      test::restride_gradients(inputs.problem, &buffers, 8);
      // Rows of dq and dk are aligned to 16 bytes.
      const GradientBuffers dense = gradients_of(inputs);
      buffers.dq = dense.dq, buffers.dk = dense.dk;
      g.dq = dense.gradients.dq, g.dk = dense.gradients.dk;
      test::pad_tensor(&buffers.dq, &*g.dq, qk_shape(inputs.problem), 8);
      test::pad_tensor(&buffers.dk, &*g.dk, qk_shape(inputs.problem), 16);
      expect_within(inputs, buffers, std::string(dtype_name(gate)) + " " + dtype_name(out));
    }
}

// ---- bits

/// Gradients of a sequence alone have the bits that they have as the first one of a batch.
void expect_same_beginning(const GradientBuffers& alone, const GradientBuffers& batch) {
  const std::pair<const io::Buffer*, const io::Buffer*> each[] = {{&alone.dq, &batch.dq},
                                                                  {&alone.dk, &batch.dk},
                                                                  {&alone.dv, &batch.dv},
                                                                  {&alone.dg, &batch.dg},
                                                                  {&alone.dbeta, &batch.dbeta}};
  for (const auto& [one, all] : each)
    EXPECT_EQ(std::memcmp(one->data(), all->data(), one->size()), 0);
}

TEST_F(GdnBackward, BitsAreTheSameAgainAndAlone) {
  const Inputs inputs =
      test::gdn::inputs_of({.lengths = {100, 70}, .K = 128, .V = 128, .gates = Gates::kTrained});
  GradientBuffers a = gradients_of(inputs), b = a;
  run(inputs, &a);
  BackwardRun few = on_gdn();
  few.num_sms = 1;
  run(inputs, &b, few);
  EXPECT_TRUE(test::same_gradients(a, b));
  const Inputs alone = test::only_sequence(inputs, 0);
  GradientBuffers c = gradients_of(alone);
  const auto copy = [](io::Buffer* to, const io::Buffer& from) {
    std::copy_n(from.data(), to->size(), to->data());
  };
  copy(&c.d_o, a.d_o), copy(&c.d_final_state, a.d_final_state);
  run(alone, &c);
  expect_same_beginning(c, a);
}

// ---- groups of heads

void one_head(plan::PlanBuilder& builder) { cuda::gdn::plan_backward_within(builder, 1); }
/// Two of three q/k heads in a group, one in the last.
void two_heads(plan::PlanBuilder& builder) {
  cuda::gdn::plan_backward_within(builder, 2.5 * cuda::gdn::bytes_of_head(builder.plan().problem));
}

TEST_F(GdnBackward, GroupsOfHeadsChangeNoBit) {
  Inputs inputs =
      test::gdn::inputs_of({.lengths = {66, 0, 5}, .H = 3, .HV = 6, .V = 72, .bias = true});
  const auto expect_same = [&](const GradientBuffers& buffers, const BackwardRun& how) {
    GradientBuffers whole = buffers;
    run(inputs, &whole, {.backend = how.backend, .segments = how.segments});
    for (const auto& [plan_groups, groups] :
         {std::pair{&one_head, "heads: 3 groups of 1 of 3 q/k heads"},
          {&two_heads, "heads: 2 groups of 2 of 3 q/k heads"}}) {
      std::string text;
      const GradientBuffers grouped =
          test::run_planned_by(cuda::gdn::kBackward.head, plan_groups, inputs, buffers, &text, how);
      EXPECT_TRUE(test::same_gradients(grouped, whole)) << groups;
      EXPECT_NE(text.find(groups), std::string::npos) << text;
      EXPECT_EQ(text.find("gdn_cut") != std::string::npos, how.from_bounds) << text;
    }
  };
  test::restride(&inputs, 8);
  expect_same(gradients_of(inputs), on_gdn());
  BackwardRun cut = on_gdn();
  cut.segments = 2;
  expect_same(gradients_of(inputs), cut);
  cut.from_bounds = true;
  expect_same(gradients_of(inputs), cut);
  GradientBuffers values = gradients_of(inputs);
  Gradients& g = values.gradients;
  for (auto* desc : {&g.dq, &g.dk, &g.dg, &g.dbeta, &g.dA_log, &g.ddt_bias}) desc->reset();
  expect_same(values, on_gdn());
}

// ---- segments

/// Every sequence in so many segments; exact ones have their transitions whatever the gates are.
struct Cut {
  int64_t segments = 2;
  bool exact = false;
};
std::string text_of(const Cut& cut) {
  return std::to_string(cut.segments) + (cut.exact ? " exact segments" : " segments");
}
BackwardRun in_segments(int64_t count) {
  BackwardRun how = on_gdn();
  how.segments = count;
  return how;
}
Inputs with(Inputs inputs, const Cut& cut) {
  inputs.problem.batch_invariant = cut.exact;
  return inputs;
}
Errors expect_within(const Inputs& inputs, GradientBuffers buffers, const std::string& what,
                     const Cut& cut) {
  return expect_within(with(inputs, cut), std::move(buffers), what + ", " + text_of(cut),
                       in_segments(cut.segments));
}
Errors expect_within(const Inputs& inputs, const std::string& what, const Cut& cut) {
  return expect_within(inputs, gradients_of(inputs), what, cut);
}

TEST_F(GdnBackward, SegmentsOfEveryGate) {
  std::size_t turn = 0;
  for (const Gates gates : test::gdn::kAllGates)
    for (const Cut& cut : test::in_turn<Cut>(turn++, {{2}, {3, true}, {3}, {2, true}, {9}})) {
      const std::string name = test::gdn::name_of(gates);
      std::array<double, 6> bounds{2.8, 3.9, 3.2, 2.9, 4.1, 2.5};
      if (gates == Gates::kPositive)
        for (double& bound : bounds) bound *= 1.5;
      bounds[3] *= 3;  // of few tokens of a head terms may cancel
      expect_all_within(
          expect_within(
              test::gdn::inputs_of(
                  {.lengths = {330, 0, 70, 1}, .HV = 1, .K = 128, .V = 128, .gates = gates}),
              name, cut),
          bounds, name);
    }
}

TEST_F(GdnBackward, SegmentsWhetherExactOrNot) {
  for (const Gates gates : {Gates::kStrong, Gates::kTrained, Gates::kNeedle, Gates::kZero})
    for (const bool exact : {false, true})
      expect_within(test::gdn::inputs_of({.lengths = {250}, .HV = 4, .gates = gates}),
                    test::gdn::name_of(gates), Cut{3, exact});
}

TEST_F(GdnBackward, SegmentsOfEverySize) {
  for (const auto& [K, V] :
       {std::pair<int64_t, int64_t>{128, 64}, {64, 128}, {96, 192}, {40, 72}, {64, 64}})
    for (const bool exact : {false, true})
      expect_within(test::gdn::inputs_of({.lengths = {135, 64}, .HV = 1, .K = K, .V = V}),
                    "K " + std::to_string(K) + " V " + std::to_string(V), Cut{2, exact});
}

TEST_F(GdnBackward, SegmentsOfValueHeadsOfAQueryHead) {
  for (const HeadMap map : {HeadMap::kGrouped, HeadMap::kTiled})
    expect_within(test::gdn::inputs_of({.lengths = {150, 20},
                                        .H = 2,
                                        .HV = 6,
                                        .gates = Gates::kTrained,
                                        .map = map,
                                        .bias = true}),
                  map == HeadMap::kTiled ? "tiled" : "grouped", Cut{3});
}

TEST_F(GdnBackward, SegmentsOfStepsOfZeroAndTwo) {
  for (const Gates gates : {Gates::kFirst, Gates::kZero})
    for (const double beta : {0.0, 2.0})
      for (const bool exact : {false, true}) {
        Inputs inputs = test::gdn::inputs_of({.lengths = {200}, .gates = gates});
        test::gdn::set_betas(&inputs, beta);
        // Nothing is written: what is left of the initial state has no digits but in exact
        // segments.
        if (beta == 0 && gates == Gates::kFirst && !exact) continue;
        expect_within(inputs, "beta " + std::to_string(beta), Cut{3, exact});
      }
}

TEST_F(GdnBackward, SegmentsOfKeysThatAreNotNormalised) {
  for (const Gates gates : {Gates::kFirst, Gates::kZero, Gates::kNeedle, Gates::kStrong})
    for (const Cut& cut : {Cut{2}, Cut{3, true}}) {
      expect_within(test::gdn::growing(gates, 1, 0.9), test::gdn::name_of(gates), cut);
      expect_within(test::gdn::growing(gates, 1.2, 1.5), test::gdn::name_of(gates), cut);
    }
}

/// A chunk forgets by 2^-20 what chunks on either side of it have made grow: within its segment,
/// and in the next one.
TEST_F(GdnBackward, SegmentsOfChunksThatGrow) {
  for (const bool backwards : {false, true})
    for (const int64_t growing : {2, 3})  // chunks of segments of three
      expect_within(test::gdn::chunks_that_grow(growing, backwards),
                    std::to_string(growing) + (backwards ? " last" : " first") + " chunks grow",
                    Cut{3});
}

/// Nothing but final states has a gradient: all that is left of it counts.
TEST_F(GdnBackward, SegmentsOfAGradientOfTheEnd) {
  for (const Gates gates : {Gates::kFirst, Gates::kSlow}) {
    const Inputs inputs = test::gdn::inputs_of({.lengths = {140}, .gates = gates});
    expect_within(inputs, gradients_of(inputs, {.d_o = false}), "d_final_state alone", Cut{3});
  }
}

/// Rows of `tensor` from `begin` to `end` have no NaN.
bool is_finite(const io::Buffer& tensor, const TensorDesc& desc, int64_t tokens, int64_t begin,
               int64_t end) {
  const auto count =
      static_cast<int64_t>(tensor.size() / static_cast<std::size_t>(dtype_size(desc.dtype)));
  for (int64_t i = begin * (count / tokens); i < end * (count / tokens); ++i)
    if (!std::isfinite(load_double(tensor.data(), desc.dtype, i))) return false;
  return true;
}

/// A NaN of the first token's v is in its head's states as long as M is read, and one of the last
/// token's d_o is in its gradients: heads that forget are free of either in the segment behind the
/// next one, and others are not.
TEST_F(GdnBackward, SegmentsDropWhatHeadsForget) {
  constexpr int64_t kTokens = 256;  // four segments of a chunk
  for (const bool exact : {false, true})
    for (const bool behind : {false, true}) {
      const Inputs clean = test::gdn::inputs_of({.lengths = {kTokens},
                                                 .HV = 1,
                                                 .K = 128,
                                                 .V = 128,
                                                 .gates = Gates::kStrong,
                                                 .initial_state = false});
      GradientBuffers buffers = gradients_of(clean);
      Inputs inputs = with(clean, {4, exact});
      io::Buffer& rows = behind ? buffers.d_o : inputs.v;
      store_double(rows.data(), DType::kBFloat16, behind ? (kTokens - 1) * 128 : 0, NAN);
      run(inputs, &buffers, in_segments(4));
      const auto finite = [&](int64_t chunk) {
        return is_finite(behind ? buffers.dv : buffers.dk, *buffers.gradients.dv, kTokens,
                         64 * chunk, 64 * chunk + 64);
      };
      const std::string what = std::string(behind ? "d_o" : "v") + (exact ? ", exact" : "");
      EXPECT_FALSE(finite(behind ? 3 : 0)) << what;
      EXPECT_EQ(finite(behind ? 0 : 3), !exact) << what;
    }
}

TEST_F(GdnBackward, SegmentsOfSequencesDoNotKnowOfEachOther) {
  const Inputs inputs = test::gdn::inputs_of(
      {.lengths = {150, 0, 130}, .K = 128, .V = 128, .gates = Gates::kTrained});
  GradientBuffers all = gradients_of(inputs);
  run(inputs, &all, in_segments(2));
  const Inputs alone = test::only_sequence(inputs, 0);
  GradientBuffers one = gradients_of(alone);
  const auto copy = [](io::Buffer* to, const io::Buffer& from) {
    std::copy_n(from.data(), to->size(), to->data());
  };
  copy(&one.d_o, all.d_o), copy(&one.d_final_state, all.d_final_state);
  BackwardRun few = in_segments(2);
  few.num_sms = 1;
  run(alone, &one, few);
  expect_same_beginning(one, all);
}

TEST_F(GdnBackward, SegmentsWithoutGradientsOfTokens) {
  const Inputs inputs =
      test::gdn::inputs_of({.lengths = {150, 70}, .K = 128, .V = 128, .gates = Gates::kSlow});
  for (const bool exact : {false, true}) {
    const Inputs cut = with(inputs, {3, exact});
    GradientBuffers all = gradients_of(cut), values = all;
    Gradients& g = values.gradients;
    g.dq.reset(), g.dk.reset(), g.dg.reset(), g.dbeta.reset();
    run(cut, &all, in_segments(3));
    test::BackwardCall call(cut, g, in_segments(3));
    EXPECT_EQ(call.plan.plan.kernels.size(), 4u);
    throw_if_error(call.run(&values));
    for (const auto& [a, b] :
         {std::pair{&all.dv, &values.dv}, std::pair{&all.d_initial_state, &values.d_initial_state}})
      EXPECT_EQ(std::memcmp(a->data(), b->data(), a->size()), 0);
  }
}

TEST_F(GdnBackward, SegmentsOfSequencesWithoutInitialStates) {
  const Inputs inputs = test::gdn::inputs_of(
      {.lengths = {140, 130}, .HV = 1, .K = 128, .V = 128, .gates = Gates::kSlow});
  GradientBuffers dense = gradients_of(inputs), masked = dense;
  run(inputs, &dense, in_segments(2));
  Inputs with_mask = inputs;
  with_mask.problem.initial_state_mask = true;
  const uint8_t mask[] = {1, 0};
  BackwardRun how = in_segments(2);
  how.state_mask = mask;
  run(with_mask, &masked, how);
  EXPECT_TRUE(test::rows_are_zero(masked.d_initial_state, 2, 1, 2));
  const std::size_t state = std::size_t{128} * 128 * sizeof(float);
  EXPECT_EQ(std::memcmp(masked.d_initial_state.data(), dense.d_initial_state.data(), state), 0);
  const Inputs none = test::gdn::inputs_of(
      {.lengths = {140, 130}, .HV = 1, .gates = Gates::kSlow, .initial_state = false});
  for (const bool exact : {false, true}) expect_within(none, "no initial states", Cut{3, exact});
}

// ---- segments of lengths that only the device knows

TEST_F(GdnBackward, SegmentsMadeOnTheDeviceHaveTheBitsOfHostLengths) {
  const auto expect = [](const Inputs& inputs, bool cut, const std::string& what) {
    GradientBuffers host = gradients_of(inputs), device = host;
    BackwardRun how = in_segments(3);
    test::BackwardCall on_host(inputs, host.gradients, how);
    how.from_bounds = true;
    test::BackwardCall on_device(inputs, device.gradients, how);
    EXPECT_EQ(on_host.plan.plan.segmented, cut) << what;
    EXPECT_TRUE(on_device.plan.plan.device_cut.on) << what;
    throw_if_error(on_host.run(&host));
    throw_if_error(on_device.run(&device));
    EXPECT_TRUE(test::same_gradients(host, device)) << what;
  };
  expect(test::gdn::inputs_of({.lengths = {0, 200, 70, 1}, .HV = 1, .gates = Gates::kTrained}),
         true, "cut");
  expect(test::gdn::inputs_of({.lengths = {64, 0, 30}, .HV = 1}), false, "whole");
  expect(test::gdn::inputs_of(
             {.lengths = {135, 64}, .HV = 1, .K = 96, .V = 72, .gates = Gates::kZero}),
         true, "K 96, V 72");
}

/// Initial states in slots of a pool, one of them below first_slot, and a masked one.
TEST_F(GdnBackward, PoolsOfACutMadeOnTheDevice) {
  Inputs inputs = test::gdn::inputs_of({.lengths = {130, 70, 65}, .HV = 1});
  inputs.problem.initial_state->indexed = true;
  inputs.problem.initial_state_mask = true;
  inputs.problem.first_slot = 1;
  const int32_t slots[] = {2, 0, 1};
  const uint8_t mask[] = {1, 1, 0};
  GradientBuffers host = gradients_of(inputs), device = host;
  BackwardRun how = in_segments(3);
  how.state_indices = slots, how.state_mask = mask;
  run(inputs, &host, how);
  how.from_bounds = true;
  test::BackwardCall on_device(inputs, device.gradients, how);
  ASSERT_TRUE(on_device.plan.plan.device_cut.on);
  throw_if_error(on_device.run(&device));
  EXPECT_TRUE(test::same_gradients(host, device));
  EXPECT_TRUE(test::rows_are_zero(device.d_initial_state, 3, 1, 3));
  EXPECT_FALSE(test::rows_are_zero(device.d_initial_state, 3, 0, 1));
}

TEST_F(GdnBackward, OffsetsThatGoBackAreClampedAndFlagged) {
  constexpr int64_t kFar = int64_t{1} << 40;
  Inputs inputs = test::gdn::inputs_of({.lengths = {140, 0, 0}, .HV = 1});
  inputs.cu_seqlens = {0, 70, 70, 140};
  test::expect_clamped(inputs, gradients_of(inputs), {0, 70, 20, kFar}, in_segments(3));
  inputs.cu_seqlens = {0, 0, 140, 140};
  test::expect_clamped(inputs, gradients_of(inputs), {-kFar, -1, 140, 3}, in_segments(3));
}

#ifdef KDA_WITH_CUDA

/// One graph, other lengths at each replay: cut, whole, and with sequences without tokens.
TEST_F(GdnBackward, OneGraphServesManyTables) {
  const Inputs inputs = test::gdn::inputs_of({.lengths = {192, 0, 0}, .gates = Gates::kTrained});
  test::expect_one_graph(
      inputs, gradients_of(inputs), in_segments(3),
      {{0, 192, 192, 192}, {0, 64, 128, 192}, {0, 0, 10, 192}, {0, 130, 130, 192}});
}

#endif

/// The planner's cuts, by predicted times.
TEST_F(GdnBackward, CutsThatGainOnTheDeviceHaveTheBitsOfHostLengths) {
  if (test::emulated()) GTEST_SKIP() << "16,384 tokens take minutes on the emulator";
  for (const Gates gates : {Gates::kTrained, Gates::kZero}) {
    const Inputs inputs = test::gdn::inputs_of(
        {.lengths = {16000, 0, 384}, .H = 2, .HV = 8, .K = 128, .V = 128, .gates = gates});
    GradientBuffers host = gradients_of(inputs), device = host;
    BackwardRun how = on_gdn();
    test::BackwardCall on_host(inputs, host.gradients, how);
    how.from_bounds = true;
    test::BackwardCall on_device(inputs, device.gradients, how);
    EXPECT_TRUE(on_host.plan.plan.segmented && on_device.plan.plan.device_cut.on);
    throw_if_error(on_host.run(&host));
    throw_if_error(on_device.run(&device));
    EXPECT_TRUE(test::same_gradients(host, device)) << test::gdn::name_of(gates);
  }
}

#ifdef KDA_WITH_SM90A

Plan plan_of(const test::Table& table, bool from_bounds) {
  Problem p = table.problem();
  p.g = head_gates(DType::kBFloat16, 1, p.num_tokens, p.num_value_heads);
  const DeviceFacts facts = gpu_facts(table.sms);
  const Gradients gradients{.d_o = p.v, .dq = p.q};
  PlanOptions options, named;
  if (table.segments > 0) options = test::fixed_segments(table.segments);
  options.most_cut_bytes = INT64_MAX;
  named.backend = "gdn";
  Plan forward;
  BackwardPlan plan;
  throw_if_error(from_bounds ? make_plan_from_bounds(p, facts, options, &forward)
                             : make_plan(p, table.cu_seqlens, facts, options, &forward));
  throw_if_error(make_backward_plan(forward, gradients, named, &plan));
  return plan.plan;
}

TEST_F(GdnBackward, AKernelFindsThePlannersCut) {
  test::gdn::expect_the_planners_cuts(
      32, test::num_tables(test::emulated() ? 150 : 5000), plan_of, [](const Plan& plan) {
        return cuda::gdn::backward_model_from_bounds(plan.problem, plan.device,
                                                     cuda::gdn::booked_groups(plan));
      });
}

#endif

// ---- what it declines

std::string refusal(const Inputs& inputs, const Gradients& gradients, const char* backend = "gdn",
                    int32_t capability = 90) {
  Plan forward;
  BackwardPlan plan;
  throw_if_error(
      make_plan(inputs.problem, inputs.cu_seqlens, gpu_facts(132, capability), {}, &forward));
  PlanOptions options;
  options.backend = backend;
  const Status status = make_backward_plan(forward, gradients, options, &plan);
  return status.ok() ? plan.plan.implementation : std::string(status.message());
}

TEST(GdnBackwardPlan, ServesWhatItCan) {
  const Inputs inputs = test::gdn::inputs_of({.K = 128, .V = 128});
  const Gradients good = check::make_gradients(inputs, kBf16).gradients;
  EXPECT_EQ(refusal(inputs, good), kName);
  EXPECT_EQ(refusal(inputs, good, ""), kName);
  const std::string begin = std::string("backend: ") + kName + " cannot serve: ";
  const auto expect = [&](const std::string& reason, auto&& change) {
    Gradients g = good;
    change(g);
    EXPECT_EQ(refusal(inputs, g), begin + reason);
  };
  expect("d_o is not of bf16 rows aligned to 16 bytes",
         [](Gradients& g) { g.d_o->dtype = DType::kFloat32; });
  expect("dk is not of bf16 rows aligned to 16 bytes",
         [](Gradients& g) { g.dk->dtype = DType::kFloat32; });
  EXPECT_EQ(refusal(inputs, good, "gdn", 100),
            begin + "is for compute capability 90, sm_100, 132 SMs has 100");
  Inputs fp16 = inputs;
  fp16.problem.v.dtype = DType::kFloat16;
  EXPECT_EQ(refusal(fp16, good), begin + "v is fp16; needs bf16");
}

// ---- cuts

/// A training step of one sequence.
BackwardPlan layer_plan(int64_t tokens, int64_t heads, int64_t value_heads,
                        const PlanOptions& options = {}, bool batch_invariant = false,
                        const char* backend = "gdn", bool known = true) {
  Problem p = test::gdn::inputs_of(
                  {.lengths = {1}, .H = 1, .HV = 1, .K = 128, .V = 128, .initial_state = false})
                  .problem;
  p.num_tokens = tokens, p.num_heads = heads, p.num_value_heads = value_heads;
  p.q = p.k = contiguous(DType::kBFloat16, {1, tokens, heads, 128});
  p.v = p.o = contiguous(DType::kBFloat16, {1, tokens, value_heads, 128});
  p.g = head_gates(DType::kFloat32, 1, tokens, value_heads);
  p.beta = contiguous(DType::kBFloat16, {1, tokens, value_heads});
  p.A_log = contiguous(DType::kFloat32, {value_heads});
  p.batch_invariant = batch_invariant;
  const Gradients gradients{.d_o = p.v, .dq = p.q, .dk = p.k, .dv = p.v, .dg = p.g};
  Plan forward;
  BackwardPlan plan;
  PlanOptions named;
  named.backend = backend;
  const std::vector<int64_t> offsets{0, tokens};
  throw_if_error(known ? make_plan(p, offsets, gpu_facts(132), options, &forward)
                       : make_plan_from_bounds(p, gpu_facts(132), options, &forward));
  throw_if_error(make_backward_plan(forward, gradients, named, &plan));
  return plan;
}

bool has_block(const Plan& plan, std::string_view name) {
  return std::ranges::any_of(plan.workspace, [&](const auto& block) { return block.name == name; });
}

TEST(GdnBackwardPlan, CutsWhatGains) {
  const Plan plan = layer_plan(65536, 2, 8).plan;
  EXPECT_EQ(plan.implementation, kName);
  EXPECT_TRUE(plan.segmented && plan.early_exit) << plan.to_text(true);
  EXPECT_GE(plan.segments.size(), 3U);
  EXPECT_LT(plan.cost.segmented_us, 0.6 * plan.cost.serial_us);
  EXPECT_GT(plan.cost.segmented_us, plan.cost.roofline_us);
  EXPECT_TRUE(has_block(plan, cuda::block::kGdnForgotten));
  EXPECT_TRUE(has_block(plan, cuda::block::kSegmentD));
  // The chains of 64 value heads fill the card, and so do those of 32 in both directions.
  EXPECT_FALSE(layer_plan(8192, 16, 64).plan.segmented);
  EXPECT_FALSE(layer_plan(32768, 16, 32).plan.segmented);
  EXPECT_FALSE(layer_plan(256, 2, 8).plan.segmented);
  PlanOptions off;
  off.context_parallel = SegmentPolicy::kOff;
  const Plan whole = layer_plan(65536, 2, 8, off).plan;
  EXPECT_FALSE(whole.segmented || has_block(whole, cuda::block::kSegmentD));
}

TEST(GdnBackwardPlan, KeepsTransitionsOfBatchInvariantCalls) {
  const Plan automatic = layer_plan(65536, 2, 8, {}, /*batch_invariant=*/true).plan;
  EXPECT_FALSE(automatic.segmented);
  EXPECT_NE(std::ranges::find(automatic.reasons, "batch_invariant: auto cuts no backward"),
            automatic.reasons.end());
  const Plan exact = layer_plan(4096, 2, 8, test::fixed_segments(3), true).plan;
  EXPECT_EQ(exact.segments.size(), 3U);
  EXPECT_FALSE(exact.early_exit || has_block(exact, cuda::block::kGdnForgotten));
}

/// Why the backend does not serve a call that names none; empty if it does.
std::string why_not(const Plan& plan) {
  for (const Candidate& row : plan.candidates)
    if (row.name == kName) return row.reason;
  return "no such backend";
}

/// The cases of bench/cases/gdn.txt, in all of which an H200 took half the time of the staged
/// backward or two thirds, and long sequences of few heads.
TEST(GdnBackwardPlan, ServesWhereItIsFaster) {
  const auto plan_of = [](int64_t tokens, int64_t heads, int64_t value_heads, bool known = true,
                          const PlanOptions& options = {}, bool invariant = false) {
    return layer_plan(tokens, heads, value_heads, options, invariant, "", known).plan;
  };
  PlanOptions off;
  off.context_parallel = SegmentPolicy::kOff;
  for (const bool known : {true, false})
    for (const auto& [tokens, heads, value_heads] :
         {std::array<int64_t, 3>{8192, 16, 32}, {8192, 16, 64}, {32768, 16, 32}, {2048, 16, 32}}) {
      EXPECT_EQ(why_not(plan_of(tokens, heads, value_heads, known)), "");
      EXPECT_EQ(why_not(plan_of(tokens, heads, value_heads, known, off)), "");
      EXPECT_EQ(why_not(plan_of(tokens, heads, value_heads, known, {}, true)), "");
    }
  EXPECT_EQ(why_not(plan_of(65536, 2, 8)), "");
  EXPECT_EQ(why_not(plan_of(65536, 2, 8, false, off)), "");
  const Plan bounds = plan_of(65536, 2, 8, /*known=*/false);
  EXPECT_EQ(why_not(bounds), "");
  EXPECT_TRUE(bounds.device_cut.on && bounds.early_exit);
  // Room for the cut of the other backend alone.
  PlanOptions little;
  little.most_cut_bytes = int64_t{128} << 20;
  const Plan other = plan_of(65536, 2, 8, /*known=*/false, little);
  EXPECT_NE(why_not(other).find("of one sequence; cuda.sm80.staged"), std::string::npos)
      << why_not(other);
}

TEST(GdnBackwardPlan, LargeWorkspacesAreOfGroupsOfHeads) {
  for (const bool known : {true, false})
    for (const auto& [heads, value_heads, groups] :
         {std::tuple{16, 32, "heads: one group"},
          {16, 64, "heads: 2 groups of 8 of 16 q/k heads"},
          {15, 60, "heads: 2 groups of 8 of 15 q/k heads"}}) {
      const BackwardPlan plan = layer_plan(65536, heads, value_heads, {}, false, "", known);
      EXPECT_EQ(why_not(plan.plan), "");
      const std::string text = plan.to_text(true);
      EXPECT_NE(text.find(groups), std::string::npos) << text;
      EXPECT_EQ(text.find("of each group: dq") != std::string::npos, value_heads > 32) << text;
      EXPECT_LT(plan.plan.workspace_bytes, std::size_t{4'800'000'000});
    }
  // Tiled value heads of a q/k head are no neighbours.
  Problem tiled = layer_plan(65536, 16, 64).plan.problem;
  tiled.head_map = HeadMap::kTiled;
  EXPECT_EQ(cuda::gdn::backward_groups(tiled).count, 1);
}

TEST(GdnBackwardPlan, RefusesCutsFromBoundsThatGainLittle) {
  test::gdn::expect_refusals_to_cost_little(42, [](const Problem& p, const DeviceFacts& facts) {
    return cuda::gdn::backward_model_from_bounds(p, facts, {p.num_heads, 1});
  });
}

}  // namespace
}  // namespace kda
