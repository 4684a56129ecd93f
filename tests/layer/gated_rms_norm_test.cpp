// SPDX-License-Identifier: Apache-2.0
// The gated RMS norm and its gradients against loops in float64, for every option.
#include "kda/gated_rms_norm.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "support/layer_targets.hpp"
#include "support/strided_array.hpp"

namespace kda::test {
namespace {

struct Options {
  Shape shape = {2, 3, 2, 5};
  Activation activation = Activation::kSigmoid;
  bool gate = true, weight = true;
  DType x = DType::kFloat32, g = DType::kFloat32, w = DType::kFloat32, y = DType::kFloat32;
  std::array<int, 4> order = {0, 1, 2, 3};
  int64_t gap = 0;
  double eps = 1e-5;
  int32_t threads = 1;
};

struct Case {
  Options o;
  StridedArray x, gate, weight, y, dy, dx, dgate, dweight;

  explicit Case(const Options& options) : o(options) {
    x = StridedArray(o.x, o.shape, o.order, o.gap);
    gate = StridedArray(o.g, o.shape, o.order, o.gap);
    weight = StridedArray(o.w, {o.shape[3], 1, 1, 1});
    y = StridedArray(o.y, o.shape, o.order, o.gap);
    dy = y, dx = x, dgate = gate, dweight = weight;
    check::Random random(3);
    for (StridedArray* array : {&x, &gate, &weight, &dy}) array->randomize(random);
  }

  GatedRmsNorm call() {
    GatedRmsNorm call{.rows = {o.shape[0], o.shape[1], o.shape[2]}, .channels = o.shape[3]};
    call.eps = o.eps, call.activation = o.activation, call.num_threads = o.threads;
    call.x = x.view(), call.y = y.view();
    if (o.gate) call.gate = gate.view();
    if (o.weight) call.weight = weight.view();
    return call;
  }
  GatedRmsNormGradients gradients() {
    GatedRmsNormGradients g{.dy = dy.view(), .dx = dx.view()};
    if (o.gate) g.dgate = dgate.view();
    if (o.weight) g.dweight = dweight.view();
    return g;
  }

  double factor(Shape i) const {
    double sum = 0;
    for (i[3] = 0; i[3] < o.shape[3]; ++i[3]) sum += x.get(i) * x.get(i);
    return 1 / std::sqrt(sum / static_cast<double>(o.shape[3]) + o.eps);
  }
  double weight_at(const Shape& i) const { return o.weight ? weight.get({i[3], 0, 0, 0}) : 1; }
  double act(const Shape& i) const {
    if (!o.gate) return 1;
    const double g = gate.get(i);
    if (o.activation == Activation::kNone) return g;
    return o.activation == Activation::kSilu ? g * sigmoid(g) : sigmoid(g);
  }
  double slope(const Shape& i) const {
    const double g = gate.get(i), s = sigmoid(g);
    if (o.activation == Activation::kNone) return 1;
    return o.activation == Activation::kSilu ? s * (1 + g * (1 - s)) : s * (1 - s);
  }
};

void expect_near(double found, double expected, double magnitude, DType dtype, const char* what) {
  const double bound = 1.01 * rounding_of(dtype) * std::fabs(expected) + 6e-7 * magnitude + 1e-7;
  ASSERT_LE(std::fabs(found - expected), bound) << what << ": " << found << " for " << expected;
}

void expect_right(LayerTarget target, const Options& options) {
  Case c(options);
  Status status = run_on(target, c.call());
  ASSERT_TRUE(status.ok()) << status.message();
  status = run_on(target, c.call(), c.gradients());
  ASSERT_TRUE(status.ok()) << status.message();
  const int64_t D = options.shape[3];
  std::vector<double> dweight(static_cast<std::size_t>(D)), size(dweight.size());
  double factor = 0, mean = 0;
  c.x.each([&](const Shape& i) {
    if (i[3] == 0) {  // a row begins
      factor = c.factor(i), mean = 0;
      for (Shape j = i; j[3] < D; ++j[3])
        mean +=
            c.dy.get(j) * c.weight_at(j) * c.act(j) * c.x.get(j) * factor / static_cast<double>(D);
    }
    const double n = c.x.get(i) * factor;
    ASSERT_NO_FATAL_FAILURE(expect_near(c.y.get(i), n * c.weight_at(i) * c.act(i), 4, c.o.y, "y"));
    const double dn = c.dy.get(i) * c.weight_at(i) * c.act(i);
    ASSERT_NO_FATAL_FAILURE(expect_near(c.dx.get(i), (dn - n * mean) * factor,
                                        (std::fabs(dn) + std::fabs(n * mean)) * factor, c.o.x,
                                        "dx"));
    if (c.o.gate) {
      ASSERT_NO_FATAL_FAILURE(expect_near(
          c.dgate.get(i), c.dy.get(i) * n * c.weight_at(i) * c.slope(i), 10, c.o.g, "dgate"));
    }
    const auto d = static_cast<std::size_t>(i[3]);
    dweight[d] += c.dy.get(i) * n * c.act(i);
    size[d] += std::fabs(c.dy.get(i) * n * c.act(i));
  });
  for (int64_t d = 0; d < D && c.o.weight; ++d)
    ASSERT_NO_FATAL_FAILURE(expect_near(c.dweight.get({d, 0, 0, 0}),
                                        dweight[static_cast<std::size_t>(d)],
                                        size[static_cast<std::size_t>(d)], c.o.w, "dweight"));
  EXPECT_TRUE(c.y.gaps_are_untouched());
  EXPECT_TRUE(c.dx.gaps_are_untouched());
  EXPECT_TRUE(c.dgate.gaps_are_untouched());
}

void expect_threads_do_not_matter(LayerTarget target, int64_t D) {
  Options o{.shape = {1, 3000, 1, D}};
  Case one(o);
  ASSERT_TRUE(run_on(target, one.call()).ok());
  ASSERT_TRUE(run_on(target, one.call(), one.gradients()).ok());
  for (const int32_t threads : {2, 3}) {
    o.threads = threads;
    Case many(o);
    ASSERT_TRUE(run_on(target, many.call()).ok());
    ASSERT_TRUE(run_on(target, many.call(), many.gradients()).ok());
    EXPECT_EQ(one.y, many.y);
    EXPECT_EQ(one.dx, many.dx);
    EXPECT_EQ(one.dgate, many.dgate);
    EXPECT_EQ(one.dweight, many.dweight);
  }
}

class GatedRmsNormTest : public LayerTest {};
INSTANTIATE_TEST_SUITE_P(On, GatedRmsNormTest, testing::ValuesIn(layer_targets()), target_name);

TEST_P(GatedRmsNormTest, EverySize) {
  for (const int64_t D : {1, 2, 3, 4, 7, 8, 15, 16, 17, 63, 128, 259})
    for (const int64_t rows : {3, 41})  // fewer than a vector has lanes, and more
      ASSERT_NO_FATAL_FAILURE(expect_right(target(), {.shape = {1, rows, 2, D}}));
  for (const Shape& shape : {Shape{0, 3, 2, 8}, Shape{1, 0, 2, 8}, Shape{7, 1, 100, 8}})
    ASSERT_NO_FATAL_FAILURE(expect_right(target(), {.shape = shape}));
}

TEST_P(GatedRmsNormTest, EveryOption) {
  for (const Activation activation : {Activation::kNone, Activation::kSilu, Activation::kSigmoid})
    for (const bool gate : {false, true})
      for (const bool weight : {false, true})
        for (const double eps : {0.0, 1e-6, 0.5})
          ASSERT_NO_FATAL_FAILURE(expect_right(
              target(), {.activation = activation, .gate = gate, .weight = weight, .eps = eps}));
}

TEST_P(GatedRmsNormTest, EveryTypeAndStride) {
  const DType types[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  for (const DType x : types)
    for (const DType g : types)
      for (const DType w : types)
        for (const DType y : types) {
          for (const int64_t D : {5, 37}) {
            Options o{.shape = {2, 11, 3, D}, .x = x, .g = g, .w = w, .y = y, .gap = 3};
            ASSERT_NO_FATAL_FAILURE(expect_right(target(), o));
            o.order = {2, 0, 1, 3};
            ASSERT_NO_FATAL_FAILURE(expect_right(target(), o));
          }
        }
}

TEST_P(GatedRmsNormTest, OtherRowsDoNotMatter) {
  for (const int64_t D : {1, 5, 20, 128, 320}) {
    Case all({.shape = {1, 40, 1, D}}), alone = all;
    ASSERT_TRUE(run_on(target(), all.call()).ok());
    for (int64_t row = 0; row < 40; ++row) {
      GatedRmsNorm call = alone.call();
      call.rows = {1, 1, 1};
      for (TensorView* view : {&call.x, &call.gate, &call.y})
        view->data = static_cast<float*>(view->data) + row * view->strides[1];
      ASSERT_TRUE(run_on(target(), call).ok());
    }
    EXPECT_EQ(all.y, alone.y) << D;
  }
}

/// Rows that can be read as vectors beside rows that cannot.
TEST_P(GatedRmsNormTest, WhereRowsLieDoesNotMatter) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
    for (const int64_t D : {8, 128, 320}) {
      Options o{.shape = {1, 40, 2, D}, .x = dtype, .y = dtype};
      Case dense(o);
      o.gap = 3;
      Case apart(o);
      ASSERT_TRUE(run_on(target(), dense.call()).ok());
      ASSERT_TRUE(run_on(target(), apart.call()).ok());
      dense.y.each([&](const Shape& i) { ASSERT_EQ(dense.y.get(i), apart.y.get(i)) << D; });
    }
}

TEST_P(GatedRmsNormTest, ThreadsDoNotMatter) {
  for (const int64_t D : {3, 40}) expect_threads_do_not_matter(target(), D);
}

TEST_P(GatedRmsNormTest, NaNOfAnInputStays) {
  for (const Activation activation : {Activation::kNone, Activation::kSilu, Activation::kSigmoid}) {
    Case c({.shape = {1, 1, 2, 4}, .activation = activation});
    c.gate.set({0, 0, 0, 1}, NAN);
    c.x.set({0, 0, 1, 2}, NAN);
    ASSERT_TRUE(run_on(target(), c.call()).ok());
    for (int64_t d = 0; d < 4; ++d) {
      EXPECT_EQ(std::isnan(c.y.get({0, 0, 0, d})), d == 1);
      EXPECT_TRUE(std::isnan(c.y.get({0, 0, 1, d})));
    }
  }
}

TEST(BadGatedRmsNorm, NamesTheArgument) {
  const auto refusal = [](const std::function<void(GatedRmsNorm&, GatedRmsNormGradients&)>& change,
                          bool backward = false) {
    Case c{Options{}};
    const StridedArray y = c.y, dx = c.dx;
    GatedRmsNorm call = c.call();
    GatedRmsNormGradients g = c.gradients();
    change(call, g);
    const Status status = backward ? gated_rms_norm_backward(call, g) : gated_rms_norm(call);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(c.y, y);
    EXPECT_EQ(c.dx, dx);
    return status.message();
  };
  using C = GatedRmsNorm&;
  using G = GatedRmsNormGradients&;
  EXPECT_EQ(refusal([](C c, G) { c.x.data = nullptr; }), "x: pointer is null");
  EXPECT_EQ(refusal([](C c, G) { c.y.data = nullptr; }), "y: pointer is null");
  EXPECT_EQ(refusal([](C c, G) { c.gate.dtype = DType::kInt64; }),
            "gate: type is int64, must be fp32, bf16 or fp16");
  EXPECT_EQ(refusal([](C c, G) { c.gate.strides[3] = 2; }),
            "gate: innermost stride is 2, must be 1");
  EXPECT_EQ(refusal([](C c, G) { c.weight.strides[0] = 2; }),
            "weight: innermost stride is 2, must be 1");
  EXPECT_EQ(refusal([](C c, G) { c.y.data = c.x.data; }), "y: overlaps x");
  EXPECT_EQ(refusal([](C c, G) { c.channels = 0; }), "channels: is 0, must be 1 to 2^40");
  EXPECT_EQ(refusal([](C c, G) { c.rows[1] = -1; }), "rows: is -1, must be 0 to 2^40");
  EXPECT_EQ(refusal([](C c, G) { c.eps = -1; }),
            "eps: is -1, must be finite in fp32 and not negative");
  EXPECT_EQ(refusal([](C c, G) { c.eps = NAN; }).substr(0, 4), "eps:");
  EXPECT_EQ(refusal([](C c, G) { c.activation = static_cast<Activation>(7); }),
            "activation: is 7, must be none, silu or sigmoid");
  EXPECT_EQ(refusal([](C c, G) { c.eps = 1e39; }).substr(0, 4), "eps:");
  EXPECT_EQ(refusal([](C c, G) { c.num_threads = -1; }).substr(0, 19), "num_threads: is -1,");
  EXPECT_EQ(refusal([](C c, G) { c.rows[0] = c.rows[1] = int64_t{1} << 40; }),
            "rows: their product is beyond 2^63");
  EXPECT_EQ(refusal([](C c, G) { c.rows[0] = c.channels = int64_t{1} << 40; }),
            "rows: with the channels their product is beyond 2^63");
  EXPECT_EQ(refusal([](C c, G) { c.device = static_cast<DeviceKind>(7); }).substr(0, 12),
            "device: is 7");
  EXPECT_EQ(refusal([](C c, G) { c.eps = -1; }, true).substr(0, 4), "eps:");
  EXPECT_EQ(refusal([](C, G g) { g.dy.data = nullptr; }, true), "dy: pointer is null");
  EXPECT_EQ(refusal([](C c, G) { c.gate.data = nullptr; }, true), "dgate: needs gate");
  EXPECT_EQ(refusal([](C c, G) { c.weight.data = nullptr; }, true), "dweight: needs weight");
  EXPECT_EQ(refusal([](C, G g) { g.dgate.data = g.dx.data; }, true), "dgate: overlaps dx");
}

}  // namespace
}  // namespace kda::test
