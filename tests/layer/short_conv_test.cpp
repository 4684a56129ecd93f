// SPDX-License-Identifier: Apache-2.0
// The short convolution and its gradients against loops in float64, for every option.
#include "kda/short_conv.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>

#include "support/layer_targets.hpp"
#include "support/strided_array.hpp"

namespace kda::test {
namespace {

constexpr std::array<int, 4> kChannelsLast = {0, 1, 2, 3}, kChannelsFirst = {0, 2, 1, 3};
constexpr std::array<int, 4> kBatchInnermost = {1, 2, 0, 3};  // neither is 1

struct Options {
  std::vector<int64_t> lengths = {5};  // of rows of a batch if all are equal and !packed
  bool packed = false;
  int64_t channels = 3;
  int64_t width = 4;
  bool silu = true, bias = true;
  DType x = DType::kFloat32, weight = DType::kFloat32, y = DType::kFloat32;
  std::array<int, 4> x_order = kChannelsLast, y_order = kChannelsLast;
  int64_t gap = 0;
  int64_t state_width = 4;  // 0: no states
  DType state = DType::kFloat32;
  std::array<int, 4> state_order = kChannelsLast;
  std::vector<int32_t> initial_slots, final_slots;  // else one a sequence
  int64_t num_slots = 0, first_slot = 0;
  std::vector<uint8_t> has_state;
  bool in_place = false;
  bool int32_lengths = false;
  int32_t threads = 1;
};

/// A call with all that it points to.
struct Case {
  Options o;
  int64_t N = 0, B = 1, T = 0;
  StridedArray x, y, weight, bias, initial, final;
  std::vector<int64_t> cu_seqlens{0};
  std::vector<int32_t> cu_seqlens32;

  explicit Case(const Options& options, uint64_t seed = 1) : o(options) {
    N = static_cast<int64_t>(o.lengths.size());
    for (const int64_t length : o.lengths) cu_seqlens.push_back(cu_seqlens.back() + length);
    cu_seqlens32.assign(cu_seqlens.begin(), cu_seqlens.end());
    T = o.packed ? cu_seqlens.back() : o.lengths.front();
    B = o.packed ? 1 : N;
    x = StridedArray(o.x, {B, T, o.channels, 1}, o.x_order, o.gap);
    y = StridedArray(o.y, {B, T, o.channels, 1}, o.y_order, o.gap);
    weight = StridedArray(o.weight, {o.channels, o.width, 1, 1});
    bias = StridedArray(o.weight, {o.channels, 1, 1, 1});
    const int64_t slots = o.num_slots ? o.num_slots : N;
    initial = StridedArray(o.state, {slots, o.channels, o.state_width, 1}, o.state_order, o.gap);
    final = initial;
    check::Random random(seed);
    for (StridedArray* array : {&x, &weight, &bias, &initial}) array->randomize(random);
  }

  ShortConv call() {
    ShortConv call{.batch = B, .num_tokens = T, .channels = o.channels, .width = o.width};
    call.activation = o.silu ? Activation::kSilu : Activation::kNone;
    call.x = x.view(), call.y = y.view(), call.weight = weight.view();
    if (o.bias) call.bias = bias.view();
    if (o.packed) {
      call.cu_seqlens = o.int32_lengths ? static_cast<const void*>(cu_seqlens32.data())
                                        : static_cast<const void*>(cu_seqlens.data());
      call.cu_seqlens_dtype = o.int32_lengths ? DType::kInt32 : DType::kInt64;
      call.num_sequences = N;
    }
    if (o.state_width > 0) {
      const auto slots_of = [](const std::vector<int32_t>& slots) {
        return slots.empty() ? nullptr : slots.data();
      };
      call.state_width = o.state_width;
      call.initial_state = {initial.view(), initial.shape()[0], slots_of(o.initial_slots)};
      call.final_state = {o.in_place ? initial.view() : final.view(), final.shape()[0],
                          slots_of(o.in_place ? o.initial_slots : o.final_slots)};
      if (!o.has_state.empty()) call.has_state = o.has_state.data();
      call.first_slot = o.first_slot;
    }
    call.num_threads = o.threads;
    return call;
  }

  int64_t row(int64_t n) const { return o.packed ? 0 : n; }
  int64_t begin(int64_t n) const { return o.packed ? cu_seqlens[static_cast<std::size_t>(n)] : 0; }
  int64_t length(int64_t n) const { return o.lengths[static_cast<std::size_t>(n)]; }
  int64_t slot(const std::vector<int32_t>& slots, int64_t n) const {
    if (o.state_width == 0) return -1;
    const int64_t slot = slots.empty() ? n : slots[static_cast<std::size_t>(n)];
    return slots.empty() || slot >= o.first_slot ? slot : -1;
  }
  int64_t initial_slot(int64_t n) const {
    if (!o.has_state.empty() && !o.has_state[static_cast<std::size_t>(n)]) return -1;
    return slot(o.initial_slots, n);
  }
  /// u: input t of a sequence, those below 0 from `states`.
  double input(const StridedArray& states, int64_t n, int64_t t, int64_t d) const {
    if (t >= 0) return x.get({row(n), begin(n) + t, d, 0});
    const int64_t from = initial_slot(n);
    return from < 0 || t < -o.state_width ? 0 : states.get({from, d, o.state_width + t, 0});
  }
  double sum(const StridedArray& states, int64_t n, int64_t t, int64_t d) const {
    double p = o.bias ? bias.get({d, 0, 0, 0}) : 0;
    for (int64_t j = 0; j < o.width; ++j)
      p += weight.get({d, j, 0, 0}) * input(states, n, t - o.width + 1 + j, d);
    return p;
  }
};

void expect_near(double found, double expected, double magnitude, DType dtype, const char* what) {
  const double bound = 1.01 * rounding_of(dtype) * std::fabs(expected) + 6e-7 * magnitude + 1e-37;
  ASSERT_LE(std::fabs(found - expected), bound) << what << ": " << found << " for " << expected;
}

void expect_forward(LayerTarget target, const Options& options) {
  Case c(options);
  const StridedArray before = c.initial;
  const Status status = run_on(target, c.call());
  ASSERT_TRUE(status.ok()) << status.message();
  for (int64_t n = 0; n < c.N; ++n)
    for (int64_t d = 0; d < c.o.channels; ++d) {
      for (int64_t t = 0; t < c.length(n); ++t) {
        const double p = c.sum(before, n, t, d);
        ASSERT_NO_FATAL_FAILURE(expect_near(c.y.get({c.row(n), c.begin(n) + t, d, 0}),
                                            c.o.silu ? p * sigmoid(p) : p, 10, c.o.y, "y"));
      }
      const int64_t slot = c.slot(c.o.final_slots, n);
      if (slot < 0) continue;
      StridedArray& final = c.o.in_place ? c.initial : c.final;
      for (int64_t s = 0; s < c.o.state_width; ++s) {
        const double expected = c.input(before, n, c.length(n) - c.o.state_width + s, d);
        ASSERT_NO_FATAL_FAILURE(
            expect_near(final.get({slot, d, s, 0}), expected, 0, c.o.state, "final_state"));
        final.set({slot, d, s, 0}, 0);  // so that what is left must be untouched
      }
    }
  EXPECT_TRUE(c.y.gaps_are_untouched());
  // Slots that no sequence has are as they were.
  StridedArray& final = c.o.in_place ? c.initial : c.final;
  for (int64_t slot = 0; slot < final.shape()[0]; ++slot) {
    bool written = false;
    for (int64_t n = 0; n < c.N; ++n) written |= c.slot(c.o.final_slots, n) == slot;
    for (int64_t s = 0; !written && s < c.o.state_width; ++s) {
      if (c.o.in_place)
        ASSERT_EQ(final.get({slot, 0, s, 0}), before.get({slot, 0, s, 0}));
      else
        ASSERT_TRUE(std::isnan(final.get({slot, 0, s, 0})));
    }
  }
}

class ShortConvTest : public LayerTest {};
INSTANTIATE_TEST_SUITE_P(On, ShortConvTest, testing::ValuesIn(layer_targets()), target_name);

std::vector<Options> every_width_and_option() {
  std::vector<Options> all;
  for (const int64_t width : {2, 3, 4})
    for (const bool silu : {false, true})
      for (const bool bias : {false, true})
        for (const int64_t state_width : {int64_t{0}, width - 1, width, width + 40})
          all.push_back({.lengths = {37, 37},
                         .channels = 21,
                         .width = width,
                         .silu = silu,
                         .bias = bias,
                         .state_width = state_width});
  return all;
}

TEST_P(ShortConvTest, EveryWidthAndOption) {
  for (const Options& options : every_width_and_option())
    ASSERT_NO_FATAL_FAILURE(expect_forward(target(), options));
}

TEST_P(ShortConvTest, EverySize) {
  for (const int64_t channels : {1, 2, 15, 16, 17, 65, 256, 257})
    for (const int64_t length : {0, 1, 2, 3, 4, 15, 16, 17, 33})
      ASSERT_NO_FATAL_FAILURE(
          expect_forward(target(), {.lengths = {length, length}, .channels = channels}));
}

TEST_P(ShortConvTest, OneChannelInPieces) {
  for (const int64_t width : {2, 3, 4})
    for (const int64_t length : {47, 48, 49, 80, 1000, 4096 + 31, 8200})
      for (const bool packed : {false, true})
        ASSERT_NO_FATAL_FAILURE(expect_forward(
            target(),
            {.lengths = {length, length}, .packed = packed, .channels = 1, .width = width}));
}

TEST_P(ShortConvTest, EveryTypeAndLayout) {
  const DType types[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  const std::array<int, 4> orders[] = {kChannelsLast, kChannelsFirst, kBatchInnermost};
  for (int i = 0; i < 3; ++i)
    for (const auto& x_order : orders)
      for (const auto& y_order : orders)
        for (const int64_t gap : {0, 3}) {
          const auto type = [&](int shift) { return types[(i + shift) % 3]; };
          Options o{.lengths = {50, 50},
                    .channels = 70,
                    .x = type(0),
                    .weight = type(1),
                    .y = type(i),
                    .x_order = x_order,
                    .y_order = y_order,
                    .gap = gap,
                    .state = type(2),
                    .state_order = y_order};
          ASSERT_NO_FATAL_FAILURE(expect_forward(target(), o));
        }
}

TEST_P(ShortConvTest, PackedSequences) {
  for (const bool int32_lengths : {false, true})
    ASSERT_NO_FATAL_FAILURE(expect_forward(target(), {.lengths = {0, 3, 1, 0, 40, 2, 0},
                                                      .packed = true,
                                                      .channels = 19,
                                                      .int32_lengths = int32_lengths}));
  ASSERT_NO_FATAL_FAILURE(
      expect_forward(target(), {.lengths = {0, 0}, .packed = true, .channels = 19}));
}

TEST_P(ShortConvTest, PoolsOfStates) {
  // Null slots are below 1; two sequences share a null slot, and two begin from one slot.
  Options o{.lengths = {2, 9, 1, 33, 0}, .packed = true, .channels = 19};
  o.initial_slots = {3, 0, 3, -5, 2};
  o.final_slots = {6, 0, 0, 5, 1};
  o.num_slots = 8, o.first_slot = 1, o.gap = 5;
  ASSERT_NO_FATAL_FAILURE(expect_forward(target(), o));
  o.first_slot = 0;
  o.initial_slots[1] = o.initial_slots[2] = -1;
  o.final_slots[1] = o.final_slots[2] = -1;
  o.has_state = {1, 1, 0, 1, 0};
  ASSERT_NO_FATAL_FAILURE(expect_forward(target(), o));
}

TEST_P(ShortConvTest, StatesInPlace) {
  for (const int64_t state_width : {3, 4, 70}) {
    Options o{.lengths = {1, 0, 2, 1, 50}, .packed = true, .channels = 33};
    o.state_width = state_width, o.in_place = true;
    ASSERT_NO_FATAL_FAILURE(expect_forward(target(), o));
    o.initial_slots = o.final_slots = {5, 2, 0, -1, 4};
    o.num_slots = 7;
    o.has_state = {1, 1, 0, 1, 1};
    ASSERT_NO_FATAL_FAILURE(expect_forward(target(), o));
  }
}

TEST_P(ShortConvTest, TokensOneByOneAreTheWhole) {
  Options o{.lengths = {11}, .channels = 40};
  Case whole(o);
  whole.initial.each([&](const Shape& i) { whole.initial.set(i, 0); });
  ASSERT_TRUE(run_on(target(), whole.call()).ok());
  o.lengths = {1}, o.in_place = true;
  Case step(o);
  step.initial.each([&](const Shape& i) { step.initial.set(i, 0); });
  step.weight = whole.weight, step.bias = whole.bias;
  for (int64_t t = 0; t < 11; ++t) {
    for (int64_t d = 0; d < 40; ++d) step.x.set({0, 0, d, 0}, whole.x.get({0, t, d, 0}));
    ASSERT_TRUE(run_on(target(), step.call()).ok());
    for (int64_t d = 0; d < 40; ++d) ASSERT_EQ(step.y.get({0, 0, d, 0}), whole.y.get({0, t, d, 0}));
  }
  EXPECT_EQ(step.initial, whole.final);
}

TEST_P(ShortConvTest, ThreadsAndNeighboursDoNotMatter) {
  Options o{.lengths = {300, 100, 7}, .packed = true, .channels = 500};
  Case one(o);
  ASSERT_TRUE(run_on(target(), one.call()).ok());
  for (const int32_t threads : {2, 3, 8}) {
    o.threads = threads;
    Case many(o);
    ASSERT_TRUE(run_on(target(), many.call()).ok());
    EXPECT_EQ(many.y, one.y);
    EXPECT_EQ(many.final, one.final);
  }
  o.lengths = {300};
  Case alone(o);
  alone.x.each([&](const Shape& i) { alone.x.set(i, one.x.get(i)); });
  alone.weight = one.weight, alone.bias = one.bias;
  alone.initial.each([&](const Shape& i) { alone.initial.set(i, one.initial.get(i)); });
  ASSERT_TRUE(run_on(target(), alone.call()).ok());
  alone.y.each([&](const Shape& i) { ASSERT_EQ(alone.y.get(i), one.y.get(i)); });
}

TEST_P(ShortConvTest, ExtremeValues) {
  Options o{.lengths = {6}, .channels = 1, .width = 2, .bias = false, .state_width = 0};
  Case c(o);
  c.weight.set({0, 0, 0, 0}, 0), c.weight.set({0, 1, 0, 0}, 1);
  const double values[] = {1e30, -1e30, INFINITY, -100, 88.5, NAN};
  for (int64_t t = 0; t < 6; ++t) c.x.set({0, t, 0, 0}, values[t]);
  o.width = 2;
  ASSERT_TRUE(run_on(target(), c.call()).ok());
  const auto y = [&](int64_t t) { return c.y.get({0, t, 0, 0}); };
  EXPECT_FLOAT_EQ(static_cast<float>(y(0)), 1e30f);
  EXPECT_EQ(y(1), 0);
  EXPECT_TRUE(std::isinf(y(2)));
  EXPECT_TRUE(std::isnan(y(3)));  // 0 * inf of the tap before
  EXPECT_FLOAT_EQ(static_cast<float>(y(4)), 88.5f);
  EXPECT_TRUE(std::isnan(y(5)));
}

// ---- gradients ----------------------------------------------------------------------------------

struct Upstream {
  StridedArray dy, d_final, dx, dweight, dbias, d_initial;
  bool has_dy = true, has_d_final = true;

  explicit Upstream(const Case& c) {
    const Options& o = c.o;
    dy = StridedArray(o.y, c.y.shape(), o.y_order, o.gap);
    d_final = StridedArray(o.state, {c.N, o.channels, o.state_width, 1}, o.state_order, o.gap);
    dx = StridedArray(o.x, c.x.shape(), o.x_order, o.gap);
    dweight = StridedArray(o.weight, c.weight.shape());
    dbias = StridedArray(o.weight, c.bias.shape());
    d_initial = StridedArray(o.state, d_final.shape(), o.state_order, o.gap);
    check::Random random(5);
    dy.randomize(random), d_final.randomize(random);
  }
  ShortConvGradients gradients(const Options& o) {
    ShortConvGradients g{.dx = dx.view(), .dweight = dweight.view()};
    if (has_dy) g.dy = dy.view();
    if (o.bias) g.dbias = dbias.view();
    if (o.state_width > 0) g.d_initial_state = d_initial.view();
    if (o.state_width > 0 && has_d_final) g.d_final_state = d_final.view();
    return g;
  }
};

void expect_backward(LayerTarget target, const Options& options, bool has_dy = true,
                     bool has_d_final = true) {
  Case c(options);
  Upstream u(c);
  u.has_dy = has_dy, u.has_d_final = has_d_final && c.o.state_width > 0;
  ShortConv call = c.call();
  call.final_state = {}, call.y = {};
  const Status status = run_on(target, call, u.gradients(c.o));
  ASSERT_TRUE(status.ok()) << status.message();
  const int64_t S = c.o.state_width, W = c.o.width;
  for (int64_t d = 0; d < c.o.channels; ++d) {
    std::vector<double> dweight(static_cast<std::size_t>(W)), sums(dweight.size());
    double dbias = 0, size = 0;
    for (int64_t n = 0; n < c.N; ++n) {
      const int64_t L = c.length(n);
      // Gradient of input t at t + S (or t + W).
      const int64_t front = std::max(S, W);
      std::vector<double> du(static_cast<std::size_t>(front + L));
      for (int64_t t = 0; t < L && u.has_dy; ++t) {
        const double p = c.sum(c.initial, n, t, d), s = sigmoid(p);
        const double slope =
            u.dy.get({c.row(n), c.begin(n) + t, d, 0}) * (c.o.silu ? s * (1 + p * (1 - s)) : 1);
        for (int64_t j = 0; j < W; ++j) {
          const int64_t from = t - W + 1 + j;
          du[static_cast<std::size_t>(front + from)] += slope * c.weight.get({d, j, 0, 0});
          dweight[static_cast<std::size_t>(j)] += slope * c.input(c.initial, n, from, d);
          size += std::fabs(slope * c.input(c.initial, n, from, d));
        }
        dbias += slope;
        size += std::fabs(slope);
      }
      for (int64_t s = 0; s < S && u.has_d_final; ++s)
        du[static_cast<std::size_t>(front + L - S + s)] += u.d_final.get({n, d, s, 0});
      for (int64_t t = 0; t < L; ++t)
        ASSERT_NO_FATAL_FAILURE(expect_near(u.dx.get({c.row(n), c.begin(n) + t, d, 0}),
                                            du[static_cast<std::size_t>(front + t)], 10, c.o.x,
                                            "dx"));
      for (int64_t s = 0; s < S; ++s)
        ASSERT_NO_FATAL_FAILURE(
            expect_near(u.d_initial.get({n, d, s, 0}),
                        c.initial_slot(n) < 0 ? 0 : du[static_cast<std::size_t>(front - S + s)], 10,
                        c.o.state, "d_initial_state"));
    }
    for (int64_t j = 0; j < W; ++j)
      ASSERT_NO_FATAL_FAILURE(expect_near(u.dweight.get({d, j, 0, 0}),
                                          dweight[static_cast<std::size_t>(j)], size, c.o.weight,
                                          "dweight"));
    if (c.o.bias) {
      ASSERT_NO_FATAL_FAILURE(
          expect_near(u.dbias.get({d, 0, 0, 0}), dbias, size, c.o.weight, "dbias"));
    }
  }
  EXPECT_TRUE(u.dx.gaps_are_untouched());
  EXPECT_TRUE(u.d_initial.gaps_are_untouched());
}

TEST_P(ShortConvTest, GradientsOfEveryWidthAndOption) {
  for (const Options& options : every_width_and_option())
    ASSERT_NO_FATAL_FAILURE(expect_backward(target(), options));
}

TEST_P(ShortConvTest, GradientsOfEverySize) {
  for (const int64_t channels : {1, 16, 17, 257})
    for (const int64_t length : {0, 1, 2, 3, 4, 16, 17, 35})
      ASSERT_NO_FATAL_FAILURE(
          expect_backward(target(), {.lengths = {length, length}, .channels = channels}));
}

TEST_P(ShortConvTest, GradientsOfEveryTypeAndLayout) {
  const DType types[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  for (int i = 0; i < 3; ++i)
    for (const auto& x_order : {kChannelsLast, kChannelsFirst})
      for (const auto& y_order : {kChannelsLast, kChannelsFirst, kBatchInnermost}) {
        const auto type = [&](int shift) { return types[(i + shift) % 3]; };
        ASSERT_NO_FATAL_FAILURE(expect_backward(target(), {.lengths = {50, 50},
                                                           .channels = 70,
                                                           .x = type(0),
                                                           .weight = type(1),
                                                           .y = type(i),
                                                           .x_order = x_order,
                                                           .y_order = y_order,
                                                           .gap = 3,
                                                           .state = type(2),
                                                           .state_order = x_order}));
      }
}

TEST_P(ShortConvTest, GradientsOfPackedSequences) {
  Options o{.lengths = {0, 3, 1, 0, 40, 2}, .packed = true, .channels = 19};
  ASSERT_NO_FATAL_FAILURE(expect_backward(target(), o));
  ASSERT_NO_FATAL_FAILURE(expect_backward(target(), o, false, true));
  ASSERT_NO_FATAL_FAILURE(expect_backward(target(), o, true, false));
  ASSERT_NO_FATAL_FAILURE(expect_backward(target(), o, false, false));
  o.has_state = {1, 1, 0, 0, 1, 1};
  ASSERT_NO_FATAL_FAILURE(expect_backward(target(), o));
}

TEST_P(ShortConvTest, GradientsDoNotDependOnThreads) {
  Options o{.lengths = {300, 100}, .packed = true, .channels = 500};
  Case c(o);
  Upstream one(c), many(c);
  ShortConv call = c.call();
  call.final_state = {};
  ASSERT_TRUE(run_on(target(), call, one.gradients(o)).ok());
  call.num_threads = 5;
  ASSERT_TRUE(run_on(target(), call, many.gradients(o)).ok());
  EXPECT_EQ(one.dx, many.dx);
  EXPECT_EQ(one.dweight, many.dweight);
  EXPECT_EQ(one.d_initial, many.d_initial);
}

// ---- what only a GPU sees -----------------------------------------------------------------------

class ShortConvOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_cuda()) GTEST_SKIP() << "needs KDA_TEST_DEVICE=cuda and a GPU";
  }
};

TEST_F(ShortConvOnGpu, SlotsBeyondThePoolAreNone) {
  Options o{.lengths = {4, 3, 1}, .packed = true, .channels = 24};
  o.num_slots = 5;
  o.initial_slots = {7, 2, 1 << 30}, o.final_slots = {3, 5, 9};
  Case c(o), none(o);
  none.o.initial_slots = {-1, 2, -1}, none.o.final_slots = {3, -1, -1};
  ASSERT_TRUE(run_on(nullptr, c.call()).ok());
  ASSERT_TRUE(run_on(nullptr, none.call()).ok());
  EXPECT_EQ(c.y, none.y);
  EXPECT_EQ(c.final, none.final);
}

TEST_F(ShortConvOnGpu, BadLengthsStayInside) {
  for (const std::vector<int64_t>& bad : {std::vector<int64_t>{0, 90, 3, 9},
                                          {5, 2, -7, 4},
                                          {-1, INT64_MAX, INT64_MIN, 9},
                                          {9, 9, 9, 0}}) {
    Case c({.lengths = {4, 3, 2}, .packed = true, .channels = 8, .gap = 3});
    c.cu_seqlens = bad;
    ASSERT_TRUE(run_on(nullptr, c.call()).ok());
    EXPECT_TRUE(c.y.gaps_are_untouched());
    Upstream u(c);
    ShortConv call = c.call();
    call.final_state = {}, call.y = {};
    ASSERT_TRUE(run_on(nullptr, call, u.gradients(c.o)).ok());
    EXPECT_TRUE(u.dx.gaps_are_untouched());
  }
}

/// Tokens behind the last sequence and before the first one: zeros, and NaN there reaches no sum.
TEST_F(ShortConvOnGpu, RowsOfNoSequenceAreZero) {
  for (const bool in_channels : {false, true})
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      Options o{.lengths = {3, 0, 20, 7}, .packed = true, .channels = 24, .gap = 3};
      o.x = o.y = dtype;
      if (in_channels) o.x_order = o.y_order = kChannelsFirst;
      Case c(o);
      c.cu_seqlens = {2, 3, 3, 23, 23};
      const auto of_none = [&](int64_t t) { return t < 2 || t >= 23; };
      Upstream u(c);
      for (int64_t t = 0; t < c.T; ++t)
        for (int64_t d = 0; d < o.channels && of_none(t); ++d)
          for (StridedArray* array : {&c.x, &c.y, &u.dy, &u.dx}) array->set({0, t, d, 0}, NAN);
      ASSERT_TRUE(run_on(nullptr, c.call()).ok());
      ShortConv call = c.call();
      call.final_state = {}, call.y = {};
      ASSERT_TRUE(run_on(nullptr, call, u.gradients(c.o)).ok());
      for (int64_t d = 0; d < o.channels; ++d) {
        for (int64_t t = 0; t < c.T; ++t)
          for (const StridedArray* array : {&c.y, &u.dx}) {
            const double value = array->get({0, t, d, 0});
            ASSERT_TRUE(of_none(t) ? value == 0 : std::isfinite(value)) << "token " << t;
          }
        for (int64_t j = 0; j < o.width; ++j)
          ASSERT_TRUE(std::isfinite(u.dweight.get({d, j, 0, 0})));
      }
      EXPECT_TRUE(c.y.gaps_are_untouched());
      EXPECT_TRUE(u.dx.gaps_are_untouched());
    }
}

TEST_F(ShortConvOnGpu, NamesTheMemory) {
  Case c({.lengths = {4, 4}, .channels = 8});
  const auto refusal = [&](const std::function<void(ShortConv&)>& change) {
    DeviceCopies copies;
    ShortConv call = on_device(c.call(), copies);
    change(call);
    return short_conv(call).message();
  };
  EXPECT_EQ(refusal([](ShortConv&) {}), "");
  EXPECT_EQ(refusal([&](ShortConv& call) { call.x.data = c.x.view().data; }).substr(0, 18),
            "x: is host memory,");
  const uint8_t has_state[] = {1, 1};
  EXPECT_EQ(refusal([&](ShortConv& call) { call.has_state = has_state; }).substr(0, 26),
            "has_state: is host memory,");
  EXPECT_EQ(refusal([](ShortConv& call) { call.device = static_cast<DeviceKind>(5); }),
            "device: is 5, must be the CPU or CUDA");

  Upstream u(c);
  DeviceCopies copies;
  ShortConv call = on_device(c.call(), copies);
  call.final_state = {};
  const ShortConvGradients g{.dweight = copies(u.dweight.view(), u.dweight.shape())};
  const std::size_t needed = short_conv_backward_workspace(call);
  EXPECT_GT(needed, 0u);
  EXPECT_EQ(short_conv_backward(call, g).message().substr(0, 35),
            "workspace: pointer is null, needs " + std::to_string(needed).substr(0, 1));
  call.workspace = copies.workspace(needed + 4), call.workspace_bytes = needed - 1;
  EXPECT_EQ(short_conv_backward(call, g).message().substr(0, 14), "workspace: has");
  call.workspace = static_cast<char*>(call.workspace) + 1, call.workspace_bytes = needed;
  EXPECT_EQ(short_conv_backward(call, g).message(), "workspace: pointer is not aligned to 4 bytes");
  std::vector<float> host(needed);
  call.workspace = host.data();
  EXPECT_EQ(short_conv_backward(call, g).message().substr(0, 26), "workspace: is host memory,");
  const int32_t lengths[] = {0, 4, 8}, slots[] = {0, 1};
  EXPECT_EQ(refusal([&](ShortConv& bad) {
              bad.batch = 1, bad.num_tokens = 8, bad.num_sequences = 2;
              bad.cu_seqlens = lengths, bad.cu_seqlens_dtype = DType::kInt32;
            }).substr(0, 27),
            "cu_seqlens: is host memory,");
  for (const bool before : {true, false})
    EXPECT_EQ(refusal([&](ShortConv& bad) {
                (before ? bad.initial_state : bad.final_state).indices = slots;
              }).substr(0, 12),
              before ? "initial_stat" : "final_state_");
}

// ---- bad calls ----------------------------------------------------------------------------------

/// The refusal of a good call that `change` makes bad, which has written nothing.
std::string refusal(const std::function<void(ShortConv&)>& change) {
  Options o{.lengths = {2, 3}, .packed = true};
  o.initial_slots = o.final_slots = {1, 2};
  o.num_slots = 4;
  Case c(o);
  const StridedArray y = c.y, final = c.final;
  ShortConv call = c.call();
  EXPECT_TRUE(short_conv(call).ok());
  c.y = y, c.final = final;
  call = c.call();
  change(call);
  const Status status = short_conv(call);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(c.y, y);
  EXPECT_EQ(c.final, final);
  return status.message();
}

TEST(BadShortConv, NamesTheArgument) {
  const auto starts = [](const std::string& text, const std::string& with) {
    EXPECT_EQ(text.substr(0, with.size()), with);
  };
  using C = ShortConv&;
  starts(refusal([](C c) { c.width = 5; }), "width: is 5, must be 2 to 4");
  starts(refusal([](C c) { c.width = 1; }), "width: is 1, must be 2 to 4");
  starts(refusal([](C c) { c.channels = 0; }), "channels: is 0");
  starts(refusal([](C c) { c.num_tokens = -1; }), "num_tokens: is -1");
  starts(refusal([](C c) { c.num_threads = -1; }), "num_threads: is -1");
  starts(refusal([](C c) { c.batch = 2; }), "batch: is 2, must be 1 with cu_seqlens");
  starts(refusal([](C c) { c.activation = Activation::kSigmoid; }), "activation: is sigmoid");
  starts(refusal([](C c) { c.x.data = nullptr; }), "x: pointer is null");
  starts(refusal([](C c) { c.y.data = nullptr; }), "y: pointer is null");
  starts(refusal([](C c) { c.weight.data = nullptr; }), "weight: pointer is null");
  starts(refusal([](C c) { c.x.dtype = DType::kFloat64; }), "x: type is fp64");
  starts(refusal([](C c) { c.x.strides[1] = -1; }), "x: stride of dimension 1 is -1");
  starts(refusal([](C c) { c.x.strides[1] = kUnsetStride; }), "x: stride of dimension 1 is not");
  starts(refusal([](C c) { c.x.strides[1] = INT64_MAX / 2; }), "x: reaches beyond 2^63");
  starts(refusal([](C c) { c.y.strides[1] = 1; }), "y: is written, and its elements overlap");
  starts(refusal([](C c) { c.x.data = static_cast<char*>(c.x.data) + 1; }), "x: pointer is not");
  starts(refusal([](C c) { c.y.data = c.x.data; }), "y: overlaps x");
  starts(refusal([](C c) { c.final_state.tensor.data = c.x.data; }), "final_state: overlaps x");
  starts(refusal([](C c) { c.state_width = 2; }), "state_width: is 2, must be at least width - 1");
  starts(refusal([](C c) { c.final_state.indices = nullptr; }), "final_state: has 4 slots");
  static const int64_t late[] = {1, 2, 5}, down[] = {0, 6, 5}, lacking[] = {0, 2, 4};
  starts(refusal([](C c) { c.cu_seqlens = late; }), "cu_seqlens: starts with 1");
  starts(refusal([](C c) { c.cu_seqlens = down; }), "cu_seqlens: entry 2 = 5 is below entry 1 = 6");
  starts(refusal([](C c) { c.cu_seqlens = lacking; }), "cu_seqlens: ends with 4, must end with T");
  starts(refusal([](C c) { c.cu_seqlens_dtype = DType::kFloat32; }), "cu_seqlens: type is fp32");
  static const int32_t far[] = {1, 4}, twice[] = {3, 3};
  starts(refusal([](C c) { c.initial_state.indices = far; }),
         "initial_state_indices: entry 1 = 4 is outside 0..3 (a negative one means none)");
  starts(refusal([](C c) { c.final_state.indices = twice; }), "final_state_indices: slot 3 would");
  // In place with other slots: one sequence would read what another writes.
  static const int32_t turned[] = {2, 1};
  starts(refusal([](C c) {
           c.final_state = c.initial_state;
           c.final_state.indices = turned;
         }),
         "final_state: overlaps initial_state");
  // In place as another type.
  starts(refusal([](C c) {
           c.final_state = c.initial_state;
           c.final_state.tensor.dtype = DType::kBFloat16;
         }),
         "final_state: overlaps initial_state");
  static const uint8_t mask[] = {1, 0};
  starts(refusal([](C c) {
           c.initial_state = {};
           c.has_state = mask;
         }),
         "has_state: needs initial_state");
  // Integers that lie under an output.
  starts(refusal([](C c) { c.final_state.indices = static_cast<const int32_t*>(c.y.data); }),
         "y: overlaps final_state_indices");
  starts(refusal([](C c) { c.has_state = static_cast<const uint8_t*>(c.final_state.tensor.data); }),
         "final_state: overlaps has_state");
  starts(refusal([](C c) { c.batch = -1; }), "batch: is -1");
  starts(refusal([](C c) { c.num_sequences = -1; }), "num_sequences: is -1");
  starts(refusal([](C c) { c.state_width = int64_t{1} << 41; }), "state_width: is 2199023255552");
  starts(refusal([](C c) { c.initial_state.num_slots = -1; }), "initial_state: is -1");
  starts(refusal([](C c) { c.batch = c.num_tokens = int64_t{1} << 40; }),
         "channels: batch x num_tokens x channels is beyond 2^63");
  starts(refusal([](C c) { c.batch = c.channels = int64_t{1} << 40; }),
         "channels: batch x num_tokens x channels is beyond 2^63");
  starts(refusal([](C c) { c.device = static_cast<DeviceKind>(7); }), "device: is 7");
}

TEST(BadShortConv, Gradients) {
  const auto refusal_of = [](const std::function<void(ShortConv&, ShortConvGradients&)>& change) {
    Options o{.lengths = {4, 4}};
    Case c(o);
    Upstream u(c);
    ShortConv call = c.call();
    call.final_state = {};
    ShortConvGradients g = u.gradients(o);
    change(call, g);
    const StridedArray dx = u.dx;
    const Status status = short_conv_backward(call, g);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(u.dx, dx);
    return status.message();
  };
  using C = ShortConv&;
  using G = ShortConvGradients&;
  static const int32_t slots[] = {0, 1};
  EXPECT_EQ(refusal_of([](C c, G) { c.initial_state.indices = slots; }),
            "initial_state_indices: a backward has one state a sequence");
  EXPECT_EQ(refusal_of([](C c, G) { c.initial_state = {}; }),
            "d_initial_state: needs initial_state");
  EXPECT_EQ(refusal_of([](C c, G) { c.bias = {}; }), "dbias: needs bias");
  EXPECT_EQ(refusal_of([](C c, G g) { g.dx.data = c.x.data; }), "dx: overlaps x");
  EXPECT_EQ(refusal_of([](C, G g) { g.d_initial_state.data = g.d_final_state.data; }),
            "d_initial_state: overlaps d_final_state");
  EXPECT_EQ(refusal_of([](C, G g) { g.dy.dtype = DType::kInt32; }),
            "dy: type is int32, must be fp32, bf16 or fp16");
  EXPECT_EQ(refusal_of([](C c, G) { c.num_threads = -1; }).substr(0, 19), "num_threads: is -1,");
  EXPECT_EQ(refusal_of([](C c, G) { c.initial_state.num_slots = 3; }).substr(0, 24),
            "initial_state: has 3 slo");
  EXPECT_EQ(refusal_of([](C c, G) { c.state_width = 0; }).substr(0, 17), "state_width: is 0");
  static const uint8_t mask[] = {1, 0};
  EXPECT_EQ(refusal_of([](C c, G g) {
              c.initial_state = {}, g.d_initial_state = {};
              c.has_state = mask;
            }),
            "has_state: needs initial_state");
}

}  // namespace
}  // namespace kda::test
