// SPDX-License-Identifier: Apache-2.0
// The fused decode step against the three operations that it is, in float64: convolution and SiLU,
// the recurrence with its gates, the gated norm.
#include "kda/fused_decode.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "support/gpu.hpp"
#include "support/layer_targets.hpp"

namespace kda::test {
namespace {

constexpr int64_t kD = 128;

struct Options {
  int64_t N = 3, T = 1, H = 2, width = 4, state_width = 3;
  GateMode gate_mode = GateMode::kBounded;
  BetaMode beta_mode = BetaMode::kSigmoid;
  bool l2norm = true, bias = false, norm = true, output_gate = true, norm_weight = true;
  bool A_log = true, dt_bias = true;
  Activation activation = Activation::kSigmoid;
  DType rows = DType::kBFloat16, weights = DType::kFloat32, conv = DType::kBFloat16;
  DType state = DType::kFloat32;
  bool vk = true;
  bool channels_inner = true;  // of convolution states: as vLLM has them
  int64_t gap = 0;             // behind a slot, of both pools, as in a page
  int64_t num_slots = 7, first_slot = 1;
  std::vector<int32_t> slots = {5, 0, 2};
  std::vector<uint8_t> has_state;
};

struct Case {
  Options o;
  StridedArray x, weight, bias, conv, g, beta, A_log, dt_bias, state, gate, norm_weight, y;

  explicit Case(const Options& options) : o(options) {
    const int64_t HD = o.H * kD;
    x = StridedArray(o.rows, {o.N, o.T, 3 * HD, 1}, {0, 1, 2, 3}, 24);
    weight = StridedArray(o.weights, {3 * HD, o.width, 1, 1});
    bias = StridedArray(o.weights, {3 * HD, 1, 1, 1});
    conv = StridedArray(o.conv, {o.num_slots, 3 * HD, o.state_width, 1},
                        o.channels_inner ? std::array{0, 2, 1, 3} : std::array{0, 1, 2, 3},
                        o.channels_inner ? 8 : 0);
    g = StridedArray(o.rows, {o.N, o.T, o.H, kD});
    beta = StridedArray(o.rows, {o.N, o.T, o.H, 1}, {0, 1, 2, 3}, 5);
    A_log = StridedArray(DType::kFloat32, {o.H, 1, 1, 1});
    dt_bias = StridedArray(DType::kFloat32, {HD, 1, 1, 1});
    // Heads are dense; a slot has a row more.
    state = StridedArray(o.state, {o.num_slots, o.H + 1, kD, kD});
    gate = StridedArray(o.rows, {o.N, o.T, o.H, kD}, {0, 2, 1, 3});
    norm_weight = StridedArray(o.weights, {kD, 1, 1, 1});
    y = StridedArray(o.rows, {o.N, o.T, o.H, kD}, {0, 1, 2, 3}, 8);
    check::Random random(4);
    for (StridedArray* array :
         {&x, &weight, &bias, &conv, &g, &beta, &A_log, &dt_bias, &state, &gate, &norm_weight})
      array->randomize(random);
    if (o.gate_mode == GateMode::kLog)
      g.each([&](const Shape& i) { g.set(i, -std::fabs(g.get(i))); });
    if (o.beta_mode == BetaMode::kPlain)
      beta.each([&](const Shape& i) { beta.set(i, sigmoid(beta.get(i))); });
    state.each([&](const Shape& i) { state.set(i, 0.1 * state.get(i)); });
  }

  static TensorView at(const TensorView& view, int64_t offset) {
    TensorView moved = view;
    moved.data = static_cast<char*>(view.data) + offset * dtype_size(view.dtype);
    return moved;
  }
  FusedDecode call(DeviceCopies& copies) {
    const int64_t HD = o.H * kD;
    FusedDecode call{.num_sequences = o.N, .num_tokens = o.T, .num_heads = o.H, .width = o.width};
    const TensorView all_x = copies(x.view(), x.shape()),
                     all_w = copies(weight.view(), weight.shape());
    const TensorView all_b = copies(bias.view(), bias.shape()),
                     all_c = copies(conv.view(), conv.shape());
    int64_t first = 0;
    for (FusedDecode::Part* part : {&call.q, &call.k, &call.v}) {
      part->x = at(all_x, x.offset({0, 0, first, 0}));
      part->weight = at(all_w, weight.offset({first, 0, 0, 0}));
      if (o.bias) part->bias = at(all_b, first);
      part->state = at(all_c, conv.offset({0, first, 0, 0}));
      first += HD;
    }
    call.state_width = o.state_width;
    call.g = copies(g.view(), g.shape()), call.beta = copies(beta.view(), beta.shape());
    call.gate_mode = o.gate_mode, call.beta_mode = o.beta_mode, call.qk_l2norm = o.l2norm;
    if (o.A_log) call.A_log = copies(A_log.view(), A_log.shape());
    if (o.dt_bias) call.dt_bias = copies(dt_bias.view(), dt_bias.shape());
    call.state = copies(state.view(), state.shape());
    call.state_layout = o.vk ? StateLayout::kVK : StateLayout::kKV;
    call.num_slots = o.num_slots, call.first_slot = o.first_slot;
    call.slots = copies(o.slots.data(), o.N);
    if (!o.has_state.empty()) call.has_state = copies(o.has_state.data(), o.N);
    call.norm = o.norm, call.activation = o.activation;
    if (o.norm_weight) call.norm_weight = copies(norm_weight.view(), norm_weight.shape());
    if (o.output_gate) call.output_gate = copies(gate.view(), gate.shape());
    call.y = copies(y.view(), y.shape());
    return call;
  }
};

/// What a step makes of one head of one sequence.
struct Expected {
  std::vector<double> y, state, conv;  // [T, D], [K, V], [3, D, S]
};

Expected expected_of(const Case& c, int64_t n, int64_t h) {
  const Options& o = c.o;
  const int64_t slot = o.slots[static_cast<std::size_t>(n)], S = o.state_width, W = o.width;
  const bool fresh = !o.has_state.empty() && !o.has_state[static_cast<std::size_t>(n)];
  const auto at = [](std::vector<double>& x, int64_t i) -> double& {
    return x[static_cast<std::size_t>(i)];
  };
  Expected e;
  e.state.resize(kD * kD), e.conv.resize(static_cast<std::size_t>(3 * kD * S));
  e.y.resize(static_cast<std::size_t>(o.T * kD));
  for (int64_t k = 0; k < kD && !fresh; ++k)
    for (int64_t v = 0; v < kD; ++v)
      at(e.state, k * kD + v) = c.state.get({slot, h, o.vk ? v : k, o.vk ? k : v});
  const auto input = [&](int64_t channel, int64_t t) {
    if (t >= 0) return c.x.get({n, t, channel, 0});
    return fresh || t < -S ? 0 : c.conv.get({slot, channel, S + t, 0});
  };
  for (int64_t part = 0; part < 3; ++part)
    for (int64_t d = 0; d < kD; ++d)
      for (int64_t s = 0; s < S; ++s)
        at(e.conv, (part * kD + d) * S + s) = input((part * o.H + h) * kD + d, o.T - S + s);
  for (int64_t t = 0; t < o.T; ++t) {
    std::vector<double> row[3], error(kD), out(kD);
    for (int64_t part = 0; part < 3; ++part)
      for (int64_t d = 0; d < kD; ++d) {
        const int64_t channel = (part * o.H + h) * kD + d;
        double p = o.bias ? c.bias.get({channel, 0, 0, 0}) : 0;
        for (int64_t j = 0; j < W; ++j)
          p += c.weight.get({channel, j, 0, 0}) * input(channel, t - W + 1 + j);
        row[part].push_back(p * sigmoid(p));
      }
    for (int part = 0; part < 2 && o.l2norm; ++part) {
      double sum = 1e-6;
      for (const double x : row[part]) sum += x * x;
      for (double& x : row[part]) x /= std::sqrt(sum);
    }
    const double raw_beta = c.beta.get({n, t, h, 0});
    const double beta = o.beta_mode == BetaMode::kPlain ? raw_beta : sigmoid(raw_beta);
    for (int64_t k = 0; k < kD; ++k) {
      double g = c.g.get({n, t, h, k});
      const double a = o.A_log ? std::exp(c.A_log.get({h, 0, 0, 0})) : 1;
      const double x = g + (o.dt_bias ? c.dt_bias.get({h * kD + k, 0, 0, 0}) : 0);
      if (o.gate_mode == GateMode::kSoftplus) g = -a * std::log1p(std::exp(x));
      if (o.gate_mode == GateMode::kBounded) g = -5 * sigmoid(a * x);
      for (int64_t v = 0; v < kD; ++v) {
        at(e.state, k * kD + v) *= std::exp(g);
        at(error, v) -= at(e.state, k * kD + v) * at(row[1], k);
      }
    }
    double squares = 0;
    for (int64_t v = 0; v < kD; ++v) {
      const double change = beta * (at(row[2], v) + at(error, v));
      for (int64_t k = 0; k < kD; ++k) {
        at(e.state, k * kD + v) += at(row[1], k) * change;
        at(out, v) += at(e.state, k * kD + v) * at(row[0], k) / std::sqrt(double{kD});
      }
      squares += at(out, v) * at(out, v);
    }
    for (int64_t v = 0; v < kD; ++v) {
      double y = at(out, v);
      if (o.norm) y /= std::sqrt(squares / kD + 1e-5);
      if (o.norm_weight) y *= c.norm_weight.get({v, 0, 0, 0});
      const double gate = c.gate.get({n, t, h, v});
      if (o.output_gate)
        y *= o.activation == Activation::kSilu   ? gate * sigmoid(gate)
             : o.activation == Activation::kNone ? gate
                                                 : sigmoid(gate);
      at(e.y, t * kD + v) = y;
    }
  }
  return e;
}

void expect_near(double found, double expected, DType dtype, const char* what) {
  const double bound = 1.02 * rounding_of(dtype) * std::fabs(expected) + 2e-5;
  ASSERT_LE(std::fabs(found - expected), bound) << what << ": " << found << " for " << expected;
}

void expect_right(const Options& options) {
  Case c(options), before(options);
  const Options& o = c.o;
  DeviceCopies copies;
  const Status status = fused_decode(c.call(copies));
  ASSERT_TRUE(status.ok()) << status.message();
  copies.download();
  for (int64_t n = 0; n < o.N; ++n) {
    const int64_t slot = o.slots[static_cast<std::size_t>(n)];
    const bool skipped = slot < o.first_slot || slot >= o.num_slots;
    for (int64_t h = 0; h < o.H; ++h) {
      if (skipped) {
        for (int64_t i = 0; i < o.T * kD; ++i) ASSERT_EQ(c.y.get({n, i / kD, h, i % kD}), 0);
        continue;
      }
      const Expected e = expected_of(before, n, h);
      for (int64_t i = 0; i < o.T * kD; ++i)
        ASSERT_NO_FATAL_FAILURE(expect_near(c.y.get({n, i / kD, h, i % kD}),
                                            e.y[static_cast<std::size_t>(i)], o.rows, "y"));
      for (int64_t k = 0; k < kD; ++k)
        for (int64_t v = 0; v < kD; ++v) {
          const Shape at = {slot, h, o.vk ? v : k, o.vk ? k : v};
          ASSERT_NO_FATAL_FAILURE(expect_near(
              c.state.get(at), e.state[static_cast<std::size_t>(k * kD + v)], o.state, "state"));
          c.state.set(at, before.state.get(at));  // so that what is left must be untouched
        }
      for (int64_t part = 0; part < 3; ++part)
        for (int64_t d = 0; d < kD; ++d)
          for (int64_t s = 0; s < o.state_width; ++s) {
            const Shape at = {slot, (part * o.H + h) * kD + d, s, 0};
            ASSERT_NO_FATAL_FAILURE(
                expect_near(c.conv.get(at),
                            e.conv[static_cast<std::size_t>((part * kD + d) * o.state_width + s)],
                            o.conv, "convolution state"));
            c.conv.set(at, before.conv.get(at));
          }
    }
  }
  EXPECT_EQ(c.state, before.state);
  EXPECT_EQ(c.conv, before.conv);
  EXPECT_TRUE(c.y.gaps_are_untouched());
}

class FusedDecodeTest : public GpuTest {};

TEST_F(FusedDecodeTest, EveryGate) {
  for (const GateMode mode : {GateMode::kLog, GateMode::kSoftplus, GateMode::kBounded})
    for (const bool vk : {false, true})
      ASSERT_NO_FATAL_FAILURE(expect_right({.gate_mode = mode, .vk = vk}));
  ASSERT_NO_FATAL_FAILURE(expect_right({.A_log = false, .dt_bias = false}));
}

TEST_F(FusedDecodeTest, EveryOption) {
  ASSERT_NO_FATAL_FAILURE(expect_right({.beta_mode = BetaMode::kPlain, .l2norm = false}));
  ASSERT_NO_FATAL_FAILURE(expect_right({.bias = true, .norm_weight = false}));
  ASSERT_NO_FATAL_FAILURE(
      expect_right({.norm = false, .output_gate = false, .norm_weight = false}));
  for (const Activation activation : {Activation::kNone, Activation::kSilu})
    ASSERT_NO_FATAL_FAILURE(expect_right({.activation = activation}));
  for (const int64_t width : {2, 3})
    for (const int64_t state_width : {width - 1, int64_t{4}, int64_t{9}})
      ASSERT_NO_FATAL_FAILURE(expect_right({.T = 2, .width = width, .state_width = state_width}));
}

TEST_F(FusedDecodeTest, EveryNumberOfTokensAndHeads) {
  for (int64_t T = 1; T <= 8; ++T)
    ASSERT_NO_FATAL_FAILURE(expect_right({.T = T, .H = 1, .vk = T % 2 == 0}));
  ASSERT_NO_FATAL_FAILURE(expect_right({.N = 1, .H = 6, .slots = {1}}));
}

TEST_F(FusedDecodeTest, EveryType) {
  for (const DType rows : {DType::kFloat32, DType::kFloat16})
    for (const DType state : {DType::kFloat32, DType::kBFloat16})
      ASSERT_NO_FATAL_FAILURE(expect_right({.T = 2,
                                            .H = 1,
                                            .rows = rows,
                                            .weights = rows,
                                            .conv = rows,
                                            .state = state,
                                            .vk = rows == DType::kFloat32,
                                            .channels_inner = false}));
}

TEST_F(FusedDecodeTest, SlotsAndNewSequences) {
  // Below first_slot, beyond the pool, and from zero over what an old sequence left.
  ASSERT_NO_FATAL_FAILURE(expect_right(
      {.N = 5, .T = 2, .H = 1, .slots = {0, 7, -9, 6, 1}, .has_state = {1, 1, 1, 0, 1}}));
  ASSERT_NO_FATAL_FAILURE(expect_right({.N = 2, .H = 1, .first_slot = 0, .slots = {0, -1}}));
}

TEST_F(FusedDecodeTest, NamesTheArgument) {
  const auto refusal = [](const std::function<void(FusedDecode&)>& change) {
    Case c{Options{}};
    const StridedArray y = c.y, state = c.state;
    DeviceCopies copies;
    FusedDecode call = c.call(copies);
    change(call);
    const Status status = fused_decode(call);
    EXPECT_FALSE(status.ok());
    copies.download();
    EXPECT_EQ(c.y, y);
    EXPECT_EQ(c.state, state);
    return status.message();
  };
  using C = FusedDecode&;
  EXPECT_EQ(refusal([](C c) { c.num_tokens = 9; }), "num_tokens: is 9, must be 1 to 8");
  EXPECT_EQ(refusal([](C c) { c.head_dim = 64; }), "head_dim: is 64, one kernel has 128 alone");
  EXPECT_EQ(refusal([](C c) { c.width = 5; }), "width: is 5, must be 2 to 4");
  EXPECT_EQ(refusal([](C c) { c.state_width = 2; }), "state_width: is 2, must be 3 to 2^40");
  EXPECT_EQ(refusal([](C c) { c.k.weight.data = nullptr; }), "k.weight: pointer is null");
  EXPECT_EQ(refusal([](C c) { c.gate_mode = GateMode::kSoftplus, c.A_log = {}; }),
            "A_log: required by gate softplus");
  EXPECT_EQ(refusal([](C c) { c.A_log.dtype = DType::kBFloat16; }),
            "A_log: type is bf16, must be fp32");
  EXPECT_EQ(refusal([](C c) { c.gate_mode = static_cast<GateMode>(3); }),
            "gate_mode: is 3, must be 0 to 2");
  EXPECT_EQ(refusal([](C c) { c.beta_mode = static_cast<BetaMode>(-1); }),
            "beta_mode: is -1, must be 0 to 2");
  EXPECT_EQ(refusal([](C c) { c.activation = static_cast<Activation>(7); }),
            "activation: is 7, must be none, silu or sigmoid");
  EXPECT_EQ(refusal([](C c) { c.lower_bound = 1; }),
            "lower_bound: 1 is not a finite number below 0");
  EXPECT_EQ(refusal([](C c) { c.slots = nullptr; }),
            "num_slots: is 7, must be N = 3 without slots");
  EXPECT_EQ(refusal([](C c) { c.y.data = c.g.data; }).substr(0, 11), "y: overlaps");
  EXPECT_EQ(refusal([](C c) { c.slots = static_cast<const int32_t*>(c.y.data); }),
            "y: overlaps slots");
  EXPECT_EQ(refusal([](C c) { c.has_state = static_cast<const uint8_t*>(c.q.state.data); }),
            "q.state: overlaps has_state");
  EXPECT_EQ(refusal([](C c) { c.state.strides[2] = 132; }).substr(0, 6), "state:");
  // On a CPU rates and slots are read, which lie on the device here.
  EXPECT_EQ(refusal([](C c) {
              c.device = DeviceKind::kCpu;
              c.gate_mode = GateMode::kBounded, c.A_log = {};
              c.slots = nullptr, c.num_slots = c.num_sequences;
            }).substr(0, 22),
            "device: is the CPU, wh");
  EXPECT_EQ(refusal([](C c) { c.num_sequences = -1; }).substr(0, 20), "num_sequences: is -1");
  EXPECT_EQ(refusal([](C c) { c.num_heads = 0; }).substr(0, 15), "num_heads: is 0");
  EXPECT_EQ(refusal([](C c) { c.num_slots = -1; }).substr(0, 16), "num_slots: is -1");
  EXPECT_EQ(refusal([](C c) { c.num_tokens = 0; }), "num_tokens: is 0, must be 1 to 8");
  EXPECT_EQ(refusal([](C c) { c.width = 1; }), "width: is 1, must be 2 to 4");
  for (const double eps : {-1.0, double{NAN}, 1e39})
    EXPECT_EQ(refusal([&](C c) { c.norm_eps = eps; }).substr(0, 9), "norm_eps:");
  EXPECT_EQ(refusal([](C c) { c.dt_bias.dtype = DType::kBFloat16; }),
            "dt_bias: type is bf16, must be fp32");
  EXPECT_EQ(refusal([](C c) { c.state.dtype = DType::kFloat16; }),
            "state: type is fp16, must be fp32 or bf16");
  for (const std::size_t d : {0, 1})
    EXPECT_EQ(refusal([&](C c) { c.state.strides[d] += 1; }).substr(0, 24),
              "state: heads must be den");
  EXPECT_EQ(refusal([](C c) { c.state.data = static_cast<float*>(c.state.data) + 1; }).substr(0, 6),
            "state:");
  std::vector<int32_t> host = {1, 2, 3};
  EXPECT_EQ(refusal([&](C c) { c.y.data = host.data(); }).substr(0, 18), "y: is host memory,");
  EXPECT_EQ(refusal([&](C c) { c.q.state.data = host.data(); }).substr(0, 8), "q.state:");
  EXPECT_EQ(refusal([&](C c) {
              c.has_state = reinterpret_cast<const uint8_t*>(host.data());
            }).substr(0, 26),
            "has_state: is host memory,");
  EXPECT_EQ(refusal([&](C c) { c.slots = host.data(); }).substr(0, 22), "slots: is host memory,");
}

}  // namespace
}  // namespace kda::test
