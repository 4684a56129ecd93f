// SPDX-License-Identifier: Apache-2.0
// Gradients in float64 through make_plan(), run() and backward(), as any caller gets them, against
// differences of the loss that run() itself gives: every option, every input. And the oracle's rows
// for the other types.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "core/convert.hpp"
#include "support/backward.hpp"

namespace kda {
namespace {

using check::GradientBuffers;
using check::Inputs;

constexpr double kMostError = 1e-9;  // relative L2 over a tensor
/// Smaller norms count as this one: a difference of losses near 10 is only right to 1e-11.
constexpr double kLeastNorm = 1e-2;

Inputs make_inputs(check::Regime regime, uint64_t seed = 1,
                   const std::vector<int64_t>& lengths = {3, 0, 4}) {
  check::GenerateOptions options = test::shape(0, 1, 5, 3);
  options.seq_lens = lengths;
  options.num_value_heads = 2;
  options.regime = regime;
  options.dtype = DType::kFloat64;
  options.initial_state = true;
  options.seed = seed;
  return check::generate(options);
}

/// What a call has beside its inputs.
struct Extras {
  std::vector<int32_t> slots;  ///< of the initial states in a pool; empty: dense
  std::vector<uint8_t> mask;
  test::BackwardRun run() const {
    return {.state_indices = slots.empty() ? nullptr : slots.data(),
            .state_mask = mask.empty() ? nullptr : mask.data()};
  }
};

double dot(const TensorDesc& a, const io::Buffer& x, const TensorDesc& b, const io::Buffer& y,
           const Shape& shape) {
  double sum = 0;
  for (int64_t i = 0; i < shape[0]; ++i)
    for (int64_t j = 0; j < shape[1]; ++j)
      for (int64_t k = 0; k < shape[2]; ++k)
        for (int64_t l = 0; l < shape[3]; ++l) {
          const auto at = [&](const TensorDesc& desc) {
            const auto& s = desc.strides;
            return i * s[0] + j * s[1] + k * s[2] + l * s[3];
          };
          sum += load_double(x.data(), a.dtype, at(a)) * load_double(y.data(), b.dtype, at(b));
        }
  return sum;
}

/// sum d_o . o + sum d_final_state . final_state of a run whose outputs are fp64.
class Loss {
 public:
  Loss(const Inputs& inputs, const GradientBuffers& buffers, const Extras& extras)
      : inputs_(inputs), buffers_(buffers), p_(inputs.problem) {
    check::want_final_state(&p_);
    outputs_ = check::make_outputs(&p_, DType::kFloat64);
    throw_if_error(make_plan(p_, inputs.cu_seqlens, cpu_facts(), {}, &plan_));
    EXPECT_EQ(plan_.implementation, "cpu.oracle");
    workspace_ = io::Buffer(plan_.workspace_bytes);
    tensors_ = inputs.tensors();
    tensors_.initial_state_indices = extras.run().state_indices;
    tensors_.initial_state_mask = extras.run().state_mask;
    outputs_.attach(&tensors_);
  }

  double operator()() {
    throw_if_error(run(plan_, tensors_, workspace_.data(), workspace_.size()));
    const Gradients& g = buffers_.gradients;
    double loss = 0;
    if (g.d_o) loss += dot(*g.d_o, buffers_.d_o, p_.o, outputs_.o, v_shape(p_));
    if (g.d_final_state)
      loss += dot(*g.d_final_state, buffers_.d_final_state, p_.final_state->tensor,
                  outputs_.final_state, state_shape(p_, *p_.final_state));
    return loss;
  }

 private:
  const Inputs& inputs_;
  const GradientBuffers& buffers_;
  Problem p_;
  Plan plan_;
  check::Outputs outputs_;
  io::Buffer workspace_;
  Tensors tensors_;
};

/// An input and its gradient. In a pool, sequence n has slot Extras::slots[n].
struct Tensor {
  const char* name;
  io::Buffer* value;
  TensorDesc desc;
  const io::Buffer* gradient;
  TensorDesc gradient_desc;
  Shape shape;
};

std::vector<Tensor> tensors_of(Inputs& in, GradientBuffers& b) {
  Problem& p = in.problem;
  Gradients& g = b.gradients;
  std::vector<Tensor> all = {{"q", &in.q, p.q, &b.dq, *g.dq, qk_shape(p)},
                             {"k", &in.k, p.k, &b.dk, *g.dk, qk_shape(p)},
                             {"v", &in.v, p.v, &b.dv, *g.dv, v_shape(p)},
                             {"g", &in.g, p.g, &b.dg, *g.dg, g_shape(p)},
                             {"beta", &in.beta, p.beta, &b.dbeta, *g.dbeta, beta_shape(p)}};
  for (Tensor& tensor : all) {  // beta has three dimensions
    if (tensor.value == &in.beta) tensor.desc.strides[3] = tensor.gradient_desc.strides[3] = 0;
  }
  const int64_t HV = p.num_value_heads, K = p.key_dim;
  const auto parameter = [](TensorDesc desc, std::size_t rank) {
    for (std::size_t d = rank; d < 4; ++d) desc.strides[d] = 0;
    return desc;
  };
  if (p.A_log)
    all.push_back({"A_log",
                   &in.A_log,
                   parameter(*p.A_log, 1),
                   &b.dA_log,
                   parameter(*g.dA_log, 1),
                   {HV, 1, 1, 1}});
  if (p.dt_bias)
    all.push_back({"dt_bias",
                   &in.dt_bias,
                   parameter(*p.dt_bias, 2),
                   &b.ddt_bias,
                   parameter(*g.ddt_bias, 2),
                   {HV, K, 1, 1}});
  if (p.initial_state)
    all.push_back({"initial_state", &in.initial_state, p.initial_state->tensor, &b.d_initial_state,
                   *g.d_initial_state, state_shape(p, {{}, p.num_sequences, false})});
  return all;
}

/// Fourth-order difference; its own error is below 1e-11 of these losses.
double derivative(Loss& loss, double* x) {
  constexpr double kStep = 1e-3;
  const double value = *x;
  const auto at = [&](double steps) {
    *x = value + steps * kStep;
    return loss();
  };
  const double slope = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * kStep);
  *x = value;
  return slope;
}

/// Every gradient of the call, element by element.
void gradcheck(Inputs& in, GradientBuffers& buffers, const std::string& what,
               const Extras& extras = {}) {
  test::BackwardCall call(in, buffers.gradients, extras.run());
  EXPECT_EQ(call.plan.plan.implementation, "cpu.oracle");
  ASSERT_TRUE(call.run(&buffers).ok()) << what;
  Loss loss(in, buffers, extras);
  for (const Tensor& tensor : tensors_of(in, buffers)) {
    ASSERT_EQ(tensor.desc.dtype, DType::kFloat64) << tensor.name;
    ASSERT_EQ(tensor.gradient_desc.dtype, DType::kFloat64) << tensor.name;
    const bool pool = tensor.value == &in.initial_state && !extras.slots.empty();
    double error = 0, size = 0;
    for (int64_t n = 0; n < tensor.shape[0]; ++n) {
      const int64_t slot = pool ? extras.slots[static_cast<std::size_t>(n)] : n;
      for (int64_t i = 0; i < tensor.shape[1]; ++i)
        for (int64_t j = 0; j < tensor.shape[2]; ++j)
          for (int64_t k = 0; k < tensor.shape[3]; ++k) {
            const auto& s = tensor.desc.strides;
            const auto& r = tensor.gradient_desc.strides;
            const double got =
                tensor.gradient->as<double>()[n * r[0] + i * r[1] + j * r[2] + k * r[3]];
            const double expected =
                slot < 0 ? 0
                         : derivative(loss, tensor.value->as<double>() + slot * s[0] + i * s[1] +
                                                j * s[2] + k * s[3]);
            error += (got - expected) * (got - expected);
            size += expected * expected;
          }
    }
    EXPECT_LE(std::sqrt(error), kMostError * std::max(std::sqrt(size), kLeastNorm))
        << what << ", " << tensor.name;
  }
}

void gradcheck(Inputs in, const std::string& what, const check::GradientOptions& options = {}) {
  check::GradientOptions wanted = options;
  wanted.d_o_dtype = DType::kFloat64;
  GradientBuffers buffers = check::make_gradients(in, wanted);
  gradcheck(in, buffers, what);
}

TEST(Gradcheck, EveryRegime) {
  for (int r = 0; r < check::kNumRegimes; ++r) {
    const auto regime = static_cast<check::Regime>(r);
    if (regime == check::Regime::kNeedle) continue;  // g = -inf
    gradcheck(make_inputs(regime), check::regime_name(regime));
  }
}

TEST(Gradcheck, EveryBetaModeWithAndWithoutTheNorm) {
  for (const bool norm : {false, true})
    for (const BetaMode beta : {BetaMode::kPlain, BetaMode::kSigmoid, BetaMode::kSigmoid2}) {
      Inputs in = make_inputs(check::Regime::kLog, 2);
      in.problem.qk_l2norm = norm;
      in.problem.beta_mode = beta;
      in.problem.scale = -0.7;
      in.beta.as<double>()[3] = 0;
      gradcheck(in, std::string(beta_mode_name(beta)) + (norm ? ", norm" : ""));
    }
}

TEST(Gradcheck, EveryGateWithAndWithoutItsParameters) {
  for (const bool A_log : {false, true})
    for (const bool dt_bias : {false, true}) {
      Inputs in = make_inputs(check::Regime::kStrong, 3);
      in.problem.lower_bound = -2;
      if (!A_log) in.problem.A_log.reset();
      if (!dt_bias) in.problem.dt_bias.reset();
      gradcheck(in, "bounded");
      if (!A_log) continue;
      in.problem.gate_mode = GateMode::kSoftplus;
      gradcheck(in, "softplus");
    }
}

TEST(Gradcheck, OneOfTheTwoGradientsThatComeIn) {
  gradcheck(make_inputs(check::Regime::kTrained, 4), "d_o alone", {.d_final_state = false});
  Inputs in = make_inputs(check::Regime::kTrained, 5);
  GradientBuffers buffers = check::make_gradients(in, {.d_o = false});
  test::run_backward(in, &buffers);
  for (const Tensor& tensor : tensors_of(in, buffers)) {
    if (std::string(tensor.name) != "q") continue;
    for (int64_t i = 0; i < 7 * 5; ++i) EXPECT_EQ(tensor.gradient->as<double>()[i], 0);
  }
}

TEST(Gradcheck, StatesTransposedInPoolsAndMasked) {
  Inputs in = make_inputs(check::Regime::kTrained, 6, {3, 2, 4});
  in.problem.state_layout = StateLayout::kVK;
  StateDesc pool;
  pool.num_slots = 5;
  pool.indexed = true;
  pool.tensor = contiguous(DType::kFloat64, {5, 2, 3, 5});
  in.problem.initial_state = pool;
  in.initial_state = io::Buffer(5 * 2 * 3 * 5 * sizeof(double));
  check::Random random(8);
  for (int64_t i = 0; i < 5 * 2 * 3 * 5; ++i) in.initial_state.as<double>()[i] = random.normal();
  GradientBuffers buffers = check::make_gradients(in, {.d_o_dtype = DType::kFloat64});
  gradcheck(in, buffers, "pool", {.slots = {4, -1, 1}, .mask = {}});
  in.problem.initial_state_mask = true;
  Extras masked{.slots = {4, 2, 1}, .mask = {1, 1, 0}};
  test::BackwardCall call(in, buffers.gradients, masked.run());
  ASSERT_TRUE(call.run(&buffers).ok());
  for (int64_t i = 0; i < 3 * 2 * 15; ++i)
    EXPECT_EQ(buffers.d_initial_state.as<double>()[i] == 0, i >= 2 * 2 * 15) << i;
}

TEST(Gradcheck, StridedInputsAndGradients) {
  Inputs in = make_inputs(check::Regime::kSoftplus, 7);
  test::restride(&in);
  GradientBuffers buffers = check::make_gradients(in, {.d_o_dtype = DType::kFloat64});
  test::restride_gradients(in.problem, &buffers);
  gradcheck(in, buffers, "strided");
}

TEST(Gradcheck, RowsOfABatch) {
  check::GenerateOptions options = test::shape(4, 2, 3, 2);
  options.batch = 2;
  options.num_value_heads = 6;
  options.dtype = DType::kFloat64;
  gradcheck(check::generate(options), "batch");
}

TEST(OracleRows, AreTheReferenceForEveryType) {
  // What the row gives is the reference, rounded once, whatever mix of types it is asked for.
  for (const DType type : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    check::GenerateOptions options = test::shape(0, 2, 12, 7);
    options.seq_lens = {70, 0, 19};
    options.num_value_heads = 6;
    options.dtype = type;
    options.initial_state = true;
    const Inputs in = check::generate(options);
    for (const std::optional<DType> out : {std::optional<DType>(), {DType::kFloat64}}) {
      GradientBuffers buffers = check::make_gradients(in, {.d_o_dtype = type, .out_dtype = out});
      test::run_backward(in, &buffers, {.backend = "oracle"});
      const check::GradientComparison result = check::compare_gradients(in, buffers);
      EXPECT_TRUE(result.within()) << dtype_name(type);
      const bool exact = out.has_value();
      for (const char* name : {"dq", "dk", "dv", "dg", "dbeta"})
        EXPECT_EQ(result.worst(name)->error == 0, exact) << name << " " << dtype_name(type);
      for (const char* name : {"dA_log", "ddt_bias", "d_initial_state"})
        EXPECT_LT(result.worst(name)->error, 1e-7) << name << " " << dtype_name(type);
    }
  }
}

TEST(OracleRows, TakeWhatABlockedForwardHasKept) {
  check::GenerateOptions options = test::shape(200, 1, 8, 8);
  options.initial_state = true;
  const Inputs in = check::generate(options);
  GradientBuffers alone = check::make_gradients(in), beside = check::make_gradients(in);
  test::run_backward(in, &alone, {.backend = "oracle", .kept_every = 64});
  PlanOptions keep;
  keep.keep = KeepPolicy::kStates;
  keep.kept_state_every = 64;
  Plan forward;
  ASSERT_TRUE(make_plan(in.problem, {}, cpu_facts(), keep, &forward).ok());
  ASSERT_NE(forward.implementation, "cpu.oracle");
  BackwardPlan plan;
  ASSERT_TRUE(
      make_backward_plan(forward, beside.gradients, test::with_backend("oracle"), &plan).ok());
  EXPECT_EQ(plan.plan.saved_bytes, 0u);
  ASSERT_TRUE(backward(plan, in.tensors(), beside.tensors(), nullptr, 0).ok());
  EXPECT_TRUE(test::same_gradients(alone, beside));
}

TEST(OracleRows, NoTokensNoGradients) {
  check::GenerateOptions options = test::shape(0, 1, 4, 4);
  options.seq_lens = {0, 0};
  const Inputs in = check::generate(options);
  GradientBuffers buffers = check::make_gradients(in);
  test::run_backward(in, &buffers, {.backend = "oracle"});
  EXPECT_EQ(buffers.dA_log.as<float>()[0], 0);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(buffers.ddt_bias.as<float>()[i], 0);
}

}  // namespace
}  // namespace kda
