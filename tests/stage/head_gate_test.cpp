// SPDX-License-Identifier: Apache-2.0
// One gate a head (Gated DeltaNet: g with an innermost stride of 0) and q/k heads that are tiled
// over the value heads, on every backend that serves them.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "core/convert.hpp"
#include "core/layout.hpp"
#include "support/backward.hpp"
#include "support/gpu.hpp"

namespace kda {
namespace {

using check::Inputs;
using check::Regime;

struct Sizes {
  std::vector<int64_t> lengths{0, 1, 37, 70};
  int64_t H = 2, HV = 6, K = 40, V = 24;
  Regime regime = Regime::kLog;
  DType dtype = DType::kFloat32;
};

Inputs one_gate_a_head(const Sizes& s = {}) {
  check::GenerateOptions options = test::shape(0, s.H, s.K, s.V);
  options.num_value_heads = s.HV;
  options.seq_lens = s.lengths;
  options.regime = s.regime;
  options.dtype = s.dtype;
  options.initial_state = true;
  options.seed = static_cast<uint64_t>(s.K);
  Inputs inputs = check::generate(options);
  test::keep_one_gate(&inputs);
  return inputs;
}

/// S = exp(g) S;  S += beta k (v - S^T k)^T;  o = scale S^T q, with gate log and plain beta.
struct Recurrence {
  std::vector<double> o, states;  // [T, HV, V], [N, HV, K, V]

  explicit Recurrence(const Inputs& inputs) {
    const Problem& p = inputs.problem;
    const int64_t H = p.num_heads, HV = p.num_value_heads, K = p.key_dim, V = p.value_dim;
    o.resize(static_cast<std::size_t>(p.num_tokens * HV * V));
    states.resize(static_cast<std::size_t>(p.num_sequences * HV * K * V));
    for (int64_t n = 0; n < p.num_sequences; ++n)
      for (int64_t head = 0; head < HV; ++head) {
        const int64_t q_head = p.head_map == HeadMap::kTiled ? head % H : head / (HV / H);
        double* S = states.data() + (n * HV + head) * K * V;
        for (int64_t i = 0; i < K * V; ++i)
          S[i] = inputs.initial_state.as<float>()[(n * HV + head) * K * V + i];
        for (int64_t t = inputs.cu_seqlens[static_cast<std::size_t>(n)];
             t < inputs.cu_seqlens[static_cast<std::size_t>(n) + 1]; ++t)
          step(inputs, t, head, q_head, S);
      }
  }

  static std::vector<double> row(const io::Buffer& x, DType type, int64_t at, int64_t size,
                                 bool normalize) {
    std::vector<double> values;
    double sum = 1e-6;
    for (int64_t i = 0; i < size; ++i) {
      values.push_back(load_double(x.data(), type, at * size + i));
      sum += values.back() * values.back();
    }
    for (double& value : values) value *= normalize ? 1 / std::sqrt(sum) : 1;
    return values;
  }

  void step(const Inputs& inputs, int64_t t, int64_t head, int64_t q_head, double* S) {
    const Problem& p = inputs.problem;
    const int64_t HV = p.num_value_heads, K = p.key_dim, V = p.value_dim;
    const int64_t qk = t * p.num_heads + q_head;
    const std::vector<double> q = row(inputs.q, p.q.dtype, qk, K, p.qk_l2norm);
    const std::vector<double> k = row(inputs.k, p.k.dtype, qk, K, p.qk_l2norm);
    const std::vector<double> v = row(inputs.v, p.v.dtype, t * HV + head, V, false);
    const double decay = std::exp(load_double(inputs.g.data(), p.g.dtype, t * HV + head));
    const double beta = load_double(inputs.beta.data(), p.beta.dtype, t * HV + head);
    for (int64_t c = 0; c < V; ++c) {
      const auto at = [&](int64_t d) -> double& { return S[d * V + c]; };
      double read = 0, out = 0;
      for (int64_t d = 0; d < K; ++d) read += (at(d) *= decay) * k[static_cast<std::size_t>(d)];
      const double error = beta * (v[static_cast<std::size_t>(c)] - read);
      for (int64_t d = 0; d < K; ++d)
        out += (at(d) += k[static_cast<std::size_t>(d)] * error) * q[static_cast<std::size_t>(d)];
      o[static_cast<std::size_t>((t * HV + head) * V + c)] = effective_scale(p) * out;
    }
  }
};

double distance(const io::Buffer& x, const std::vector<double>& reference,
                DType type = DType::kFloat32) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    const double difference = load_double(x.data(), type, static_cast<int64_t>(i)) - reference[i];
    error += difference * difference;
    norm += reference[i] * reference[i];
  }
  return std::sqrt(error / norm);
}

/// Betas as a recurrence has them, in place of raw ones.
void make_betas_plain(Inputs* inputs) {
  Problem& p = inputs->problem;
  if (p.beta_mode == BetaMode::kPlain) return;
  p.beta_mode = BetaMode::kPlain;
  for (int64_t i = 0; i < p.batch * p.num_tokens * p.num_value_heads; ++i) {
    const double raw = load_double(inputs->beta.data(), p.beta.dtype, i);
    store_element(inputs->beta.data(), p.beta.dtype, i,
                  static_cast<float>(1 / (1 + std::exp(-raw))));
  }
}

TEST(HeadGate, IsTheRecurrenceOfOneDecayAHead) {
  for (const HeadMap map : {HeadMap::kGrouped, HeadMap::kTiled}) {
    Inputs inputs = one_gate_a_head();
    inputs.problem.head_map = map;
    ASSERT_EQ(inputs.problem.gate_mode, GateMode::kLog);
    make_betas_plain(&inputs);
    const Recurrence truth(inputs);
    std::vector<std::string> names = test::backends();
    names.emplace_back("oracle");
    for (const std::string& backend : names)
      for (const bool segments : {false, true}) {
        PlanOptions plan = segments ? test::fixed_segments(2) : PlanOptions{};
        plan.backend = backend;
        const test::Result result = test::run_inputs(inputs, {.plan = plan});
        EXPECT_LT(distance(result.outputs.o, truth.o), 2e-6) << backend << head_map_name(map);
        EXPECT_LT(distance(result.outputs.final_state, truth.states), 2e-6)
            << backend << head_map_name(map);
      }
  }
}

/// Sizes, gates and types of every way to load a gate.
std::vector<Sizes> many_sizes(const std::vector<int64_t>& dims) {
  std::vector<Sizes> all;
  for (const int64_t K : dims)
    for (const Regime regime : {Regime::kLog, Regime::kSoftplus, Regime::kTrained}) {
      Sizes s;
      s.lengths = {21, 3};
      s.K = K;
      s.V = 32;
      s.HV = 4;
      s.regime = regime;
      s.dtype = regime == Regime::kLog ? DType::kFloat32
                : K % 3 == 0           ? DType::kFloat16
                                       : DType::kBFloat16;
      all.push_back(s);
    }
  return all;
}

TEST(HeadGate, HasTheBitsOfGatesWrittenOut) {
  for (const Sizes& s : many_sizes({2, 7, 40, 64, 100, 128, 256})) {
    Inputs inputs = one_gate_a_head(s);
    for (const std::string& backend :
         test::names_that_serve_all(registry::heads(Operation::kForward))) {
      const PlanOptions plan = test::with_backend(backend);
      const test::Result one = test::run_inputs(inputs, {.plan = plan});
      const test::Result each = test::run_inputs(test::with_gates_expanded(inputs), {.plan = plan});
      EXPECT_TRUE(test::same_bits(one.outputs.o, each.outputs.o)) << backend << " " << s.K;
      EXPECT_TRUE(test::same_bits(one.outputs.final_state, each.outputs.final_state))
          << backend << " " << s.K;
    }
  }
}

TEST(HeadGate, MayBeAColumnOfAProjection) {
  Inputs inputs = one_gate_a_head();
  const test::Result dense = test::run_inputs(inputs);
  Problem& p = inputs.problem;
  inputs.g =
      test::spread_tensor(inputs.g, &p.g, beta_shape(p), {0, p.num_value_heads * 3 + 2, 3, 0});
  EXPECT_TRUE(test::same_bits(test::run_inputs(inputs).outputs.o, dense.outputs.o));
}

/// One bias a head, and the same bias in every channel.
struct Biases {
  Inputs one, each;
};
Biases one_bias_a_head(const Sizes& s) {
  Inputs each = one_gate_a_head(s), one = each;
  test::keep_one_bias(&one);
  for (int64_t head = 0; head < s.HV; ++head)
    std::fill_n(each.dt_bias.as<float>() + head * s.K, s.K, one.dt_bias.as<float>()[head]);
  return {one, each};
}

/// Sizes with a bias, of vectors and not.
std::vector<Sizes> sizes_with_bias() {
  std::vector<Sizes> all = many_sizes({7, 64, 128});
  std::erase_if(all, [](const Sizes& s) { return s.regime == Regime::kLog; });
  return all;
}

TEST(HeadBias, HasTheBitsOfBiasesWrittenOut) {
  for (const Sizes& s : sizes_with_bias()) {
    auto [one, each] = one_bias_a_head(s);
    for (const bool strided : {false, true}) {
      if (strided) test::restride(&one, 1), test::restride(&each, 1);
      for (const std::string& backend :
           test::names_that_serve_all(registry::heads(Operation::kForward))) {
        const PlanOptions plan = test::with_backend(backend);
        const test::Result a = test::run_inputs(one, {.plan = plan});
        const test::Result b = test::run_inputs(each, {.plan = plan});
        EXPECT_TRUE(test::same_bits(a.outputs.o, b.outputs.o)) << backend << " " << s.K;
        EXPECT_TRUE(test::same_bits(a.outputs.final_state, b.outputs.final_state)) << backend;
      }
    }
  }
}

/// With the oracle's gradients, and equal to those of biases written out but for the bias: there it
/// is the sum over channels, or channel by channel as well.
void expect_bias_gradients(const Sizes& s, const std::vector<std::string>& backends,
                           DType d_o = DType::kFloat32) {
  const auto [one, each] = one_bias_a_head(s);
  for (const std::string& backend : backends) {
    check::GradientBuffers sums = check::make_gradients(one, {.d_o_dtype = d_o});
    check::GradientBuffers expected = check::make_gradients(each, {.d_o_dtype = d_o});
    ASSERT_EQ(sums.ddt_bias.size(), static_cast<std::size_t>(s.HV) * 4);
    check::GradientBuffers by_channel = expected;
    test::run_backward(one, &sums, {.backend = backend});
    test::run_backward(one, &by_channel, {.backend = backend});
    test::run_backward(each, &expected, {.backend = backend});
    EXPECT_TRUE(test::same_bits(by_channel.ddt_bias, expected.ddt_bias)) << backend;
    const std::pair<const io::Buffer*, const io::Buffer*> same[] = {
        {&sums.dq, &expected.dq}, {&sums.dg, &expected.dg}, {&sums.dA_log, &expected.dA_log}};
    for (const auto& [a, b] : same) EXPECT_TRUE(test::same_bits(*a, *b)) << backend << " " << s.K;
    for (int64_t head = 0; head < s.HV; ++head) {
      double sum = 0, magnitude = 0;
      for (int64_t d = 0; d < s.K; ++d) {
        const double x = load_double(expected.ddt_bias.data(), DType::kFloat32, head * s.K + d);
        sum += x, magnitude += std::fabs(x);
      }
      EXPECT_NEAR(sums.ddt_bias.as<float>()[head], sum, 1e-6 * magnitude) << backend << " " << s.K;
    }
  }
}

TEST(HeadBias, GradientIsTheSumOverChannels) {
  std::vector<std::string> names = test::backward_backends();
  names.emplace_back("oracle");
  for (Sizes s : sizes_with_bias()) {
    s.lengths = {17, 3};
    if (s.K < 128) expect_bias_gradients(s, names);
  }
}

TEST(HeadBias, GradientIsWithinTheOracles) {
  Sizes s;
  s.lengths = {0, 1, 37};
  s.regime = Regime::kSoftplus;
  const Inputs inputs = one_bias_a_head(s).one;
  check::GradientBuffers buffers = check::make_gradients(inputs);
  test::run_backward(inputs, &buffers, {});
  const check::GradientComparison comparison = check::compare_gradients(inputs, buffers, {});
  const check::HeadError* worst = comparison.worst("ddt_bias");
  ASSERT_NE(worst, nullptr);
  EXPECT_LE(worst->error, worst->tolerance);
}

struct Decoded {
  io::Buffer pool, o;
};

/// `drafts`: the states behind all tokens go to a buffer of their own, which is returned.
Decoded decode_in_place(const Inputs& inputs, int64_t tokens, StateLayout layout, DType state,
                        const std::string& backend, bool drafts = false) {
  Problem p = inputs.problem;
  p.operation = Operation::kDecode;
  p.batch = p.num_sequences = p.num_tokens / tokens;
  p.num_tokens = tokens;
  p.cu_seqlens.reset();
  for (TensorDesc* desc : {&p.q, &p.k, &p.v, &p.g, &p.beta})
    desc->strides[0] = tokens * desc->strides[1];
  StateDesc pool;
  pool.num_slots = p.num_sequences;
  p.state_layout = layout;
  const Shape shape = state_shape(p, pool);
  pool.tensor = contiguous(state, {shape[0], shape[1], shape[2], shape[3]});
  p.initial_state = pool;
  std::vector<int32_t> slots(static_cast<std::size_t>(drafts ? p.batch * tokens : 0));
  std::iota(slots.begin(), slots.end(), 0);
  if (drafts) {
    p.state_index_columns = tokens;
    p.final_state = StateDesc{pool.tensor, p.batch * tokens, true};
  }
  check::Outputs outputs = check::make_outputs(&p, DType::kFloat32);
  const int64_t elems = shape[0] * shape[1] * shape[2] * shape[3];
  Decoded result;
  result.pool = io::Buffer(static_cast<std::size_t>(elems * dtype_size(state)));
  for (int64_t i = 0; i < elems; ++i)
    store_element(result.pool.data(), state, i, static_cast<float>(i % 251) / 512 - 0.25f);
  Plan plan;
  throw_if_error(make_plan(p, {}, test::device_of(backend), test::with_backend(backend), &plan));
  io::Buffer workspace(plan.workspace_bytes);
  workspace.fill(0xff);
  Tensors tensors = inputs.tensors();
  outputs.attach(&tensors);
  tensors.initial_state = result.pool.data();
  tensors.final_state_indices = drafts ? slots.data() : nullptr;
  throw_if_error(check::run_and_wait(plan, tensors, workspace.data(), workspace.size()));
  result.o = outputs.o;
  if (drafts) result.pool = outputs.final_state;
  return result;
}

TEST(HeadGate, DecodeHasTheBitsOfGatesWrittenOut) {
  for (const int64_t K : {7, 64, 128, 256})
    for (const StateLayout layout : {StateLayout::kKV, StateLayout::kVK})
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        Sizes s;
        s.K = s.V = K;
        s.HV = 4;
        s.lengths = {6};
        s.dtype = dtype;
        s.regime = dtype == DType::kFloat32 ? Regime::kLog : Regime::kSoftplus;
        const Inputs inputs = one_gate_a_head(s);
        for (const std::string& backend :
             test::names_that_serve_all(registry::heads(Operation::kDecode)))
          for (const int64_t tokens : {1, 2}) {
            const Decoded one = decode_in_place(inputs, tokens, layout, dtype, backend);
            const Decoded each =
                decode_in_place(test::with_gates_expanded(inputs), tokens, layout, dtype, backend);
            // Kernels for a gate a channel may add in another order: tests/stage/decode_test.cpp
            // has what they must be close to.
            EXPECT_TRUE(test::same_bits(one.o, each.o)) << backend << " " << K;
            EXPECT_TRUE(test::same_bits(one.pool, each.pool)) << backend << " " << K;
          }
      }
}

TEST(HeadBias, DecodeHasTheBitsOfBiasesWrittenOut) {
  for (Sizes s : sizes_with_bias()) {
    s.V = s.K;
    s.lengths = {6};
    const auto [one, each] = one_bias_a_head(s);
    for (const std::string& backend :
         test::names_that_serve_all(registry::heads(Operation::kDecode))) {
      for (const bool drafts : {false, true}) {
        const auto decode = [&, &backend = backend](const Inputs& inputs) {
          return decode_in_place(inputs, drafts ? 2 : 1, StateLayout::kVK, DType::kFloat32, backend,
                                 drafts);
        };
        const Decoded a = decode(one), b = decode(each);
        EXPECT_TRUE(test::same_bits(a.o, b.o)) << backend << " " << s.K << drafts;
        EXPECT_TRUE(test::same_bits(a.pool, b.pool)) << backend << " " << s.K << drafts;
      }
    }
  }
}

/// Value heads of `inputs`, tiled over the q/k heads, in the order in which they are grouped.
void group_heads(Inputs* inputs) {
  Problem& p = inputs->problem;
  const Problem tiled = p;
  const auto reorder = [&](io::Buffer* x, int64_t rows, std::size_t bytes) {
    io::Buffer sorted(x->size());
    const int64_t HV = p.num_value_heads, group = group_size(p);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t head = 0; head < HV; ++head)
        std::memcpy(sorted.data() + static_cast<std::size_t>(row * HV + head) * bytes,
                    x->data() + static_cast<std::size_t>(
                                    row * HV + value_head_of(tiled, head / group, head % group)) *
                                    bytes,
                    bytes);
    *x = std::move(sorted);
  };
  const auto size = [](const TensorDesc& desc) {
    return static_cast<std::size_t>(dtype_size(desc.dtype));
  };
  const auto K = static_cast<std::size_t>(p.key_dim), V = static_cast<std::size_t>(p.value_dim);
  const int64_t tokens = p.batch * p.num_tokens;
  reorder(&inputs->v, tokens, V * size(p.v));
  reorder(&inputs->g, tokens, (has_head_gate(p) ? 1 : K) * size(p.g));
  reorder(&inputs->beta, tokens, size(p.beta));
  reorder(&inputs->initial_state, p.num_sequences, K * V * 4);
  if (p.A_log) reorder(&inputs->A_log, 1, 4);
  if (p.dt_bias) reorder(&inputs->dt_bias, 1, K * 4);
  p.head_map = HeadMap::kGrouped;
}

void expect_tiled_gradients_as_grouped(Sizes s, const std::vector<std::string>& backends) {
  s.regime = Regime::kTrained;
  for (const bool head_gate : {true, false}) {
    Inputs tiled = one_gate_a_head(s);
    if (!head_gate) tiled = test::with_gates_expanded(tiled);
    tiled.problem.head_map = HeadMap::kTiled;
    Inputs grouped = tiled;
    group_heads(&grouped);
    for (const std::string& backend : backends) {
      check::GradientBuffers a = check::make_gradients(tiled, {.d_o = false});
      check::GradientBuffers b = check::make_gradients(grouped, {.d_o = false});
      // The gradient of every final state is 1, so that the order of heads does not matter.
      for (check::GradientBuffers* buffers : {&a, &b})
        for (std::size_t i = 0; i < buffers->d_final_state.size() / 4; ++i)
          buffers->d_final_state.as<float>()[i] = 1;
      test::run_backward(tiled, &a, {.backend = backend});
      test::run_backward(grouped, &b, {.backend = backend});
      EXPECT_TRUE(test::same_bits(a.dq, b.dq)) << backend;
      EXPECT_TRUE(test::same_bits(a.dk, b.dk)) << backend;
      Inputs sorted = tiled;  // gradients have the shapes of what they are of
      sorted.v = a.dv;
      sorted.g = a.dg;
      sorted.beta = a.dbeta;
      sorted.initial_state = a.d_initial_state;
      sorted.A_log = a.dA_log;
      sorted.dt_bias = a.ddt_bias;
      group_heads(&sorted);
      EXPECT_TRUE(test::same_bits(sorted.v, b.dv)) << backend;
      EXPECT_TRUE(test::same_bits(sorted.g, b.dg)) << backend;
      EXPECT_TRUE(test::same_bits(sorted.beta, b.dbeta)) << backend;
      EXPECT_TRUE(test::same_bits(sorted.initial_state, b.d_initial_state)) << backend;
      EXPECT_TRUE(test::same_bits(sorted.A_log, b.dA_log)) << backend;
      EXPECT_TRUE(test::same_bits(sorted.dt_bias, b.ddt_bias)) << backend;
    }
  }
}

TEST(HeadGate, TiledHeadsHaveTheGradientsOfGroupedOnes) {
  expect_tiled_gradients_as_grouped({}, test::backward_backends());
}

TEST(HeadGate, GradientsAreWithinTheOracles) {
  for (const HeadMap map : {HeadMap::kGrouped, HeadMap::kTiled})
    for (const Regime regime : {Regime::kLog, Regime::kSoftplus, Regime::kTrained}) {
      Sizes s;
      s.regime = regime;
      Inputs inputs = one_gate_a_head(s);
      inputs.problem.head_map = map;
      std::vector<cpu::oracle::HeadGradients> truths;
      std::vector<std::string> names = test::backward_backends();
      names.emplace_back("oracle");
      for (const std::string& backend : names) {
        check::GradientBuffers buffers = check::make_gradients(inputs);
        ASSERT_EQ(buffers.dg.size(), inputs.g.size());  // the sum over channels
        test::run_backward(inputs, &buffers, {.backend = backend});
        const check::GradientComparison comparison =
            check::compare_gradients(inputs, buffers, {}, &truths);
        for (const auto& [name, errors] : comparison.errors) {
          const check::HeadError* worst = check::worst_error(errors);
          EXPECT_LE(worst->error, worst->tolerance) << backend << " " << name;
        }
      }
    }
}

/// dg may be wanted channel by channel too.
TEST(HeadGate, GradientsByChannelAreThoseOfGatesWrittenOut) {
  for (const Sizes& s : many_sizes({7, 64, 100})) {
    const Inputs inputs = one_gate_a_head(s), each = test::with_gates_expanded(inputs);
    for (const std::string& backend : test::backward_backends()) {
      check::GradientBuffers by_channel = test::gradients_in_fp32(each);
      check::GradientBuffers expected = test::gradients_in_fp32(each);
      check::GradientBuffers sums = test::gradients_in_fp32(inputs);
      test::run_backward(inputs, &by_channel, {.backend = backend});
      test::run_backward(each, &expected, {.backend = backend});
      test::run_backward(inputs, &sums, {.backend = backend});
      EXPECT_TRUE(test::same_gradients(by_channel, expected)) << backend << " " << s.K;
      EXPECT_TRUE(test::same_bits(sums.dk, expected.dk)) << backend << " " << s.K;
      const auto K = static_cast<std::size_t>(s.K);
      for (std::size_t row = 0; row < sums.dg.size() / 4; ++row) {
        double sum = 0, magnitude = 0;
        for (std::size_t d = 0; d < K; ++d) {
          sum += expected.dg.as<float>()[row * K + d];
          magnitude += std::fabs(expected.dg.as<float>()[row * K + d]);
        }
        ASSERT_NEAR(sums.dg.as<float>()[row], sum, 1e-6 * magnitude) << backend << " " << s.K;
      }
    }
  }
}

// ---- the tensor cores

constexpr const char *kFused = "cuda.sm90.fused", *kStaged = "cuda.sm80.staged";

class HeadGateOnTensorCores : public test::GpuTest {
 protected:
  static bool has(const char* backend) {
    return backend == kStaged || test::device().compute_capability == 90;
  }
};

void make_gates_fp32(Inputs* inputs) {
  Problem& p = inputs->problem;
  const int64_t count = p.batch * p.num_tokens * p.num_value_heads;
  io::Buffer gates(static_cast<std::size_t>(count) * sizeof(float));
  for (int64_t i = 0; i < count; ++i)
    gates.as<float>()[i] = static_cast<float>(load_double(inputs->g.data(), p.g.dtype, i));
  inputs->g = std::move(gates);
  p.g = head_gates(DType::kFloat32, p.batch, p.num_tokens, p.num_value_heads);
}

/// As Qwen3-Next's layers: bf16, gates in fp32 as logarithms.
Sizes layer_sizes() {
  Sizes s;
  s.H = 2, s.HV = 4, s.K = s.V = 128;
  s.lengths = {0, 1, 37, 150};
  s.dtype = DType::kBFloat16;
  return s;
}
Inputs layer_inputs(const Sizes& s = layer_sizes()) {
  Inputs inputs = one_gate_a_head(s);
  make_gates_fp32(&inputs);
  return inputs;
}

test::Result run_on(const std::string& backend, const Inputs& inputs, PlanOptions plan = {}) {
  plan.backend = backend;
  test::Result result =
      test::run_inputs(inputs, {.plan = plan, .out_dtype = inputs.problem.q.dtype});
  EXPECT_EQ(result.plan.implementation, backend);
  return result;
}

/// The kernel of one gate a head, cut by lengths that the host knows or not.
TEST_F(HeadGateOnTensorCores, LengthsOnTheDeviceAlone) {
  if (test::device().compute_capability != 90) GTEST_SKIP() << "cuda.sm90.fused alone";
  Sizes s = layer_sizes();
  s.lengths = {1100, 60, 500};
  s.H = s.HV = 1;
  const Inputs inputs = layer_inputs(s);
  test::RunOptions run{.plan = test::with_backend("cuda.sm90.fused"),
                       .out_dtype = inputs.problem.q.dtype};
  run.num_sms = 32;
  const test::Result host = test::run_inputs(inputs, run);
  run.from_bounds = true;
  const test::Result device = test::run_inputs(inputs, run);
  EXPECT_TRUE(host.plan.segmented && device.plan.device_cut.on);
  EXPECT_TRUE(test::same_bits(host.outputs.o, device.outputs.o));
  EXPECT_TRUE(test::same_bits(host.outputs.final_state, device.outputs.final_state));
}

TEST_F(HeadGateOnTensorCores, IsTheRecurrenceOfOneDecayAHead) {
  for (const HeadMap map : {HeadMap::kGrouped, HeadMap::kTiled}) {
    Inputs inputs = layer_inputs();
    inputs.problem.head_map = map;
    make_betas_plain(&inputs);
    const Recurrence truth(inputs);
    for (const char* backend : {kFused, kStaged})
      for (const bool segments : {false, true}) {
        if (!has(backend)) continue;
        const test::Result result =
            run_on(backend, inputs, segments ? test::fixed_segments(2) : PlanOptions{});
        EXPECT_LT(distance(result.outputs.o, truth.o, DType::kBFloat16), 8e-3)
            << backend << head_map_name(map);
        EXPECT_LT(distance(result.outputs.final_state, truth.states), 8e-3)
            << backend << head_map_name(map);
      }
  }
}

void expect_bits_of_gates_written_out(const std::string& backend, const Inputs& inputs,
                                      const PlanOptions& plan = {}) {
  const test::Result one = run_on(backend, inputs, plan);
  const test::Result each = run_on(backend, test::with_gates_expanded(inputs), plan);
  EXPECT_TRUE(test::same_bits(one.outputs.o, each.outputs.o)) << backend;
  EXPECT_TRUE(test::same_bits(one.outputs.final_state, each.outputs.final_state)) << backend;
}

/// Every type of a gate, and every mode.
TEST_F(HeadGateOnTensorCores, StagedHasTheBitsOfGatesWrittenOut) {
  for (const int64_t K : {40, 128})
    for (const Regime regime : {Regime::kLog, Regime::kSoftplus, Regime::kTrained})
      for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
        Sizes s = layer_sizes();
        s.lengths = {70, 3};
        s.K = s.V = K;
        s.regime = regime;
        s.dtype = dtype;
        Inputs inputs = one_gate_a_head(s);
        expect_bits_of_gates_written_out(kStaged, inputs);
        make_gates_fp32(&inputs);
        PlanOptions by_tokens;
        by_tokens.intra_form = IntraForm::kToken;
        expect_bits_of_gates_written_out(kStaged, inputs, by_tokens);
      }
}

/// Gates near 0, gates that take every row out of range, and such as are positive.
TEST_F(HeadGateOnTensorCores, FusedHasTheBitsOfGatesWrittenOut) {
  if (!has(kFused)) GTEST_SKIP() << "needs a GPU of compute capability 9.0";
  for (const float factor : {1.0f, 1e-3f, 60.0f, -0.02f}) {
    Inputs inputs = layer_inputs();
    for (std::size_t i = 0; i < inputs.g.size() / 4; ++i) inputs.g.as<float>()[i] *= factor;
    expect_bits_of_gates_written_out(kFused, inputs);
    expect_bits_of_gates_written_out(kFused, inputs,
                                     test::fixed_segments(3, SegmentMethod::kOnePass));
  }
}

TEST_F(HeadGateOnTensorCores, MayBeAColumnOfAProjection) {
  const Inputs dense = layer_inputs();
  Inputs inputs = dense;
  Problem& p = inputs.problem;
  inputs.g =
      test::spread_tensor(inputs.g, &p.g, beta_shape(p), {0, p.num_value_heads * 3 + 2, 3, 0});
  for (const char* backend : {kFused, kStaged})
    if (has(backend)) {
      EXPECT_TRUE(
          test::same_bits(run_on(backend, inputs).outputs.o, run_on(backend, dense).outputs.o))
          << backend;
    }
}

TEST_F(HeadGateOnTensorCores, TiledHeadsHaveTheGradientsOfGroupedOnes) {
  Sizes s;
  s.dtype = DType::kBFloat16;
  expect_tiled_gradients_as_grouped(s, {kStaged});
  s.K = s.V = 128;
  expect_tiled_gradients_as_grouped(s, {kStaged});
}

/// Gates in bf16 and in fp32, chains in fp16 and in bf16 on Hopper, segments.
TEST_F(HeadGateOnTensorCores, GradientsAreWithinTheOracles) {
  for (const HeadMap map : {HeadMap::kGrouped, HeadMap::kTiled})
    for (const Regime regime : {Regime::kLog, Regime::kSoftplus, Regime::kTrained}) {
      Sizes s = layer_sizes();
      s.lengths = {5, 130};
      if (regime == Regime::kSoftplus) s.K = 72, s.V = 40;
      s.regime = regime;
      Inputs inputs = regime == Regime::kLog ? layer_inputs(s) : one_gate_a_head(s);
      inputs.problem.head_map = map;
      check::GradientBuffers buffers =
          check::make_gradients(inputs, {.d_o_dtype = DType::kBFloat16});
      ASSERT_EQ(buffers.dg.size(), inputs.g.size());  // the sum over channels
      test::BackwardRun run;
      run.backend = kStaged;
      run.segments = regime == Regime::kTrained ? 2 : 0;
      test::BackwardCall call(inputs, buffers.gradients, run);
      throw_if_error(call.run(&buffers));
      const check::GradientComparison comparison = check::compare_gradients(
          inputs, buffers,
          {.operands = check::operands_of(call.plan.plan), .num_threads = test::oracle_threads()});
      for (const auto& [name, errors] : comparison.errors) {
        const check::HeadError* worst = check::worst_error(errors);
        EXPECT_LE(worst->error, worst->tolerance)
            << name << " " << check::regime_name(regime) << head_map_name(map);
      }
    }
}

/// Kernels of stages read a bias a channel: a launch in front writes it out, one behind adds up.
TEST_F(HeadGateOnTensorCores, OneBiasAHead) {
  Sizes s;
  s.lengths = {5, 70};
  s.dtype = DType::kBFloat16;
  s.regime = Regime::kTrained;
  const auto [one, each] = one_bias_a_head(s);
  for (const bool segments : {false, true}) {
    PlanOptions plan = segments ? test::fixed_segments(2) : PlanOptions{};
    plan.backend = kStaged;
    EXPECT_TRUE(test::same_bits(test::run_inputs(one, {.plan = plan}).outputs.o,
                                test::run_inputs(each, {.plan = plan}).outputs.o));
  }
  expect_bias_gradients(s, {kStaged}, DType::kBFloat16);
}

/// Gates in fp32; dq and dk in fp32, which Hopper's own chunk_grad leaves to the kernel of all
/// GPUs, and in bf16.
TEST_F(HeadGateOnTensorCores, GradientsByChannelAreThoseOfGatesWrittenOut) {
  for (const auto& [K, fp32] : {std::pair{40, true}, {128, true}, {128, false}}) {
    Sizes s = layer_sizes();
    s.lengths = {70, 3};
    s.K = s.V = K;
    const Inputs inputs = layer_inputs(s), each = test::with_gates_expanded(inputs);
    const auto buffers_of = [fp32 = fp32](const Inputs& of) {
      return fp32 ? test::gradients_in_fp32(of)
                  : check::make_gradients(of, {.d_o_dtype = DType::kBFloat16});
    };
    check::GradientBuffers by_channel = buffers_of(each);
    check::GradientBuffers expected = buffers_of(each);
    check::GradientBuffers sums = buffers_of(inputs);
    test::run_backward(inputs, &by_channel, {.backend = kStaged});
    test::run_backward(each, &expected, {.backend = kStaged});
    test::run_backward(inputs, &sums, {.backend = kStaged});
    EXPECT_TRUE(test::same_gradients(by_channel, expected)) << K;
    EXPECT_TRUE(test::same_bits(sums.dk, expected.dk)) << K;
    for (std::size_t row = 0; row < sums.dg.size() / 4; ++row) {
      double sum = 0, magnitude = 0;
      for (std::size_t d = row * static_cast<std::size_t>(K);
           d < (row + 1) * static_cast<std::size_t>(K); ++d) {
        sum += expected.dg.as<float>()[d];
        magnitude += std::fabs(expected.dg.as<float>()[d]);
      }
      ASSERT_NEAR(sums.dg.as<float>()[row], sum, 1e-6 * magnitude) << K;
    }
  }
}

std::string reason_of(const char* backend, const Problem& p) {
  Plan plan;
  throw_if_error(make_plan(p, {}, gpu_facts(132, 90), {}, &plan));
  for (const Candidate& row : plan.candidates)
    if (row.name == backend) return row.reason;
  return "no such backend";
}

Problem layer_problem(int64_t K = 128) {
  Sizes s = layer_sizes();
  s.K = s.V = K;
  s.lengths = {64};
  Problem p = layer_inputs(s).problem;
  p.cu_seqlens.reset();
  return p;
}

TEST(HeadGate, TensorCoresServe) {
  for (const HeadMap map : {HeadMap::kGrouped, HeadMap::kTiled}) {
    Problem p = layer_problem();
    p.head_map = map;
    EXPECT_EQ(reason_of(kFused, p), "");
    p.g = head_gates(DType::kBFloat16, p.batch, p.num_tokens, p.num_value_heads);
    p.g.alignment = 2;
    EXPECT_EQ(reason_of("cuda.sm90.gdn", p), "");
    EXPECT_EQ(reason_of(kStaged, p), "a better one serves");
  }
}

TEST(HeadGate, FusedDeclines) {
  Problem p = layer_problem();
  p.gate_mode = GateMode::kSoftplus;
  p.A_log = contiguous(DType::kFloat32, {p.num_value_heads});
  EXPECT_EQ(reason_of(kFused, p), "g has one gate a head, gate softplus; needs log");
  p = layer_problem();
  p.g = head_gates(DType::kBFloat16, p.batch, p.num_tokens, p.num_value_heads);
  EXPECT_EQ(reason_of(kFused, p), "g has one gate a head, in bf16; needs fp32");
  EXPECT_EQ(reason_of(kFused, layer_problem(64)), "g has one gate a head and K = 64; needs 128");
  p = layer_problem();
  p.head_map = HeadMap::kTiled;
  p.g = contiguous(DType::kFloat32, {p.batch, p.num_tokens, p.num_value_heads, p.key_dim});
  EXPECT_EQ(
      reason_of(kFused, p),
      "head_map is tiled; with a gate a channel its value heads of a q/k head are neighbours");
  EXPECT_EQ(reason_of(kStaged, p), "");
}

}  // namespace
}  // namespace kda
