// SPDX-License-Identifier: Apache-2.0
// Which kernels calls launch, over random problems of every kind: golden texts, and what plans say
// of them. The emulated GPU records launches without running them, so that sizes are those of
// users.
#include <gtest/gtest.h>

#include <fstream>
#include <random>
#include <set>
#include <sstream>

#include "core/text.hpp"
#include "cuda/gdn/chain_sm90.hpp"
#include "emulator/recording.hpp"
#include "kda/backward.hpp"
#include "kda/run.hpp"
#include "kda/span.hpp"
#include "support/harness.hpp"

namespace kda {
namespace {

/// Choices of a problem, the same on every machine.
class Choices {
 public:
  explicit Choices(uint64_t seed) : random_(seed) {}
  template <class T>
  T of(std::initializer_list<T> values) {
    return values.begin()[random_() % values.size()];
  }
  bool one_in(uint64_t times) { return random_() % times == 0; }

 private:
  std::mt19937_64 random_;
};

/// Where tensors would be: each at an address of its own, far from the others.
class Addresses {
 public:
  void* next() { return reinterpret_cast<void*>(at_ += uintptr_t{1} << 36); }
  float* floats() { return static_cast<float*>(next()); }
  int32_t* indices() { return static_cast<int32_t*>(next()); }

 private:
  uintptr_t at_ = uintptr_t{1} << 40;
};

/// Rows [B, T, heads, columns], `gap` elements behind each head.
TensorDesc rows(DType dtype, const Problem& p, int64_t heads, int64_t columns, int64_t gap = 0) {
  TensorDesc desc = contiguous(dtype, {p.batch, p.num_tokens, heads, columns + gap});
  desc.strides[3] = 1;
  return desc;
}

struct Case {
  Problem problem;
  std::vector<int64_t> cu_seqlens;
  PlanOptions options;
  DeviceFacts device;
  Gradients gradients;
  bool spans = false, wants_D = false, from_final = false;
  std::string text;
};

Case random_case(Choices& c, int32_t capability) {
  Case x;
  Problem& p = x.problem;
  const int64_t size = c.of<int64_t>({128, 128, 128, 64, 64, 96});
  p.key_dim = size;
  p.value_dim = c.one_in(6) ? c.of<int64_t>({64, 128, 256}) : size;
  p.num_heads = c.of<int64_t>({1, 2, 4, 8, 16, 64});
  p.num_value_heads = p.num_heads * c.of<int64_t>({1, 1, 1, 2, 4, 8});
  p.num_tokens = c.of<int64_t>({64, 100, 1024, 4096, 8192, 32768});
  p.num_sequences = p.batch = c.one_in(4) ? 3 : 1;
  if (c.one_in(4)) {
    p.batch = 1;
    p.num_sequences = 2;
    p.cu_seqlens = DType::kInt64;
    x.cu_seqlens = {0, p.num_tokens / 4, p.num_tokens};
  }
  const int64_t H = p.num_heads, HV = p.num_value_heads, K = p.key_dim, V = p.value_dim;
  const DType type = c.one_in(6) ? c.of({DType::kFloat16, DType::kFloat32}) : DType::kBFloat16;
  const int64_t gap = c.one_in(5) ? 8 : 0;
  p.q = p.k = rows(type, p, H, K, gap);
  p.v = p.o = rows(type, p, HV, V, gap);
  p.beta = contiguous(c.one_in(2) ? type : DType::kFloat32, {p.batch, p.num_tokens, HV});
  p.gate_mode = c.of({GateMode::kLog, GateMode::kSoftplus, GateMode::kBounded});
  const DType gates = c.one_in(3) ? DType::kFloat32 : type;
  const bool one_a_head = c.one_in(6);
  p.g = one_a_head ? head_gates(gates, p.batch, p.num_tokens, HV)
                   : rows(gates, p, HV, K, c.one_in(8) ? 4 : gap);
  if (HV > H && c.one_in(6)) p.head_map = HeadMap::kTiled;
  if (p.gate_mode != GateMode::kLog) {
    p.A_log = contiguous(DType::kFloat32, {HV});
    if (c.one_in(2)) p.dt_bias = contiguous(DType::kFloat32, {HV, K});
  }
  p.beta_mode = c.one_in(3) ? BetaMode::kPlain : BetaMode::kSigmoid;
  p.qk_l2norm = !c.one_in(3);
  if (c.one_in(4)) p.scale = c.of({0.0, 1.0, 0x1p-8, 0x1p-9, 16.0, 17.0});
  const StateDesc states{contiguous(DType::kFloat32, {p.num_sequences, HV, K, V}), p.num_sequences,
                         false};
  x.spans = c.one_in(6);
  if (c.one_in(2)) p.initial_state = states;
  if (c.one_in(2)) p.final_state = states;
  x.options.context_parallel = c.of(
      {SegmentPolicy::kAuto, SegmentPolicy::kAuto, SegmentPolicy::kOff, SegmentPolicy::kFixed});
  if (x.options.context_parallel == SegmentPolicy::kFixed) x.options.num_segments = 4;
  if (c.one_in(4)) x.options.backend = c.of({"sm80.staged", "recurrent"});
  if (c.one_in(6)) x.options.intra_form = IntraForm::kToken;
  if (c.one_in(4)) x.options.keep = KeepPolicy::kChunks;
  x.device = gpu_facts(c.of({8, 78, 132, 132}), capability);

  Gradients& g = x.gradients;
  const auto row_type = [&] { return c.one_in(5) ? DType::kFloat32 : DType::kBFloat16; };
  const auto row_gap = [&]() -> int64_t { return c.one_in(8) ? c.of<int64_t>({1, 8}) : 0; };
  if (!c.one_in(8)) g.d_o = rows(c.one_in(12) ? DType::kFloat32 : DType::kBFloat16, p, HV, V, gap);
  if (!g.d_o || c.one_in(3)) g.d_final_state = states.tensor;
  const bool few = c.one_in(6);
  if (!few || c.one_in(4)) g.dq = rows(row_type(), p, H, K, row_gap());
  if (!few || c.one_in(4)) g.dk = rows(row_type(), p, H, K, row_gap());
  if (!few || c.one_in(2)) g.dv = rows(row_type(), p, HV, V, row_gap());
  if (!few || c.one_in(4)) g.dg = rows(row_type(), p, HV, K, row_gap());
  if (!few || c.one_in(4)) g.dbeta = contiguous(DType::kFloat32, {p.batch, p.num_tokens, HV});
  if (p.A_log && !few) g.dA_log = contiguous(DType::kFloat32, {HV});
  if (p.dt_bias && !few) g.ddt_bias = contiguous(DType::kFloat32, {HV, K});
  if (p.initial_state && c.one_in(2)) g.d_initial_state = states.tensor;
  if (few && !g.dv && !g.dq && !g.dk && !g.dg && !g.dbeta && !g.d_initial_state)
    g.dv = rows(DType::kBFloat16, p, HV, V);
  x.wants_D = x.spans && c.one_in(2);
  x.from_final = x.wants_D && g.d_final_state && c.one_in(2);
  return x;
}

std::string row_text(const char* name, const std::optional<TensorDesc>& desc, int64_t columns) {
  if (!desc) return "";
  return cat(" ", name, ":", dtype_name(desc->dtype),
             desc->strides[2] != columns ? cat("+", desc->strides[2] - columns) : "");
}

std::string text_of(const Case& x) {
  const Problem& p = x.problem;
  const Gradients& g = x.gradients;
  std::string text = cat(
      "B=", p.batch, " N=", p.num_sequences, " T=", p.num_tokens, " H=", p.num_heads,
      " HV=", p.num_value_heads, " K=", p.key_dim, " V=", p.value_dim, " ",
      gate_mode_name(p.gate_mode), has_head_gate(p) ? " head-gate" : "",
      p.head_map == HeadMap::kTiled ? " tiled" : "", row_text("q", p.q, p.key_dim),
      row_text("g", p.g, has_head_gate(p) ? 1 : p.key_dim), " beta:", beta_mode_name(p.beta_mode),
      p.qk_l2norm ? " norm" : "", p.dt_bias ? " dt_bias" : "");
  if (p.scale) text += cat(" scale=", *p.scale);
  text +=
      cat(p.initial_state ? " S0" : "", p.final_state ? " S1" : "",
          x.options.keep == KeepPolicy::kChunks ? " keep" : "",
          x.options.intra_form == IntraForm::kToken ? " tokens" : "",
          " policy=", static_cast<int>(x.options.context_parallel), " backend=", x.options.backend,
          " SMs=", x.device.num_sms, " |", row_text("d_o", g.d_o, p.value_dim));
  text += cat(g.d_final_state ? " dS1" : "", row_text("dq", g.dq, p.key_dim),
              row_text("dk", g.dk, p.key_dim), row_text("dv", g.dv, p.value_dim),
              row_text("dg", g.dg, p.key_dim), g.dbeta ? " dbeta" : "", g.dA_log ? " dA_log" : "",
              g.ddt_bias ? " ddt_bias" : "", g.d_initial_state ? " dS0" : "",
              x.spans ? " spans" : "", x.wants_D ? " D" : "", x.from_final ? " from-final" : "");
  return text;
}

Tensors tensors_of(const Problem& p, const Plan& plan, Addresses& at) {
  Tensors t;
  t.q = at.next(), t.k = at.next(), t.v = at.next(), t.g = at.next(), t.beta = at.next();
  t.o = at.next();
  if (p.A_log) t.A_log = at.next();
  if (p.dt_bias) t.dt_bias = at.next();
  if (p.initial_state) t.initial_state = at.next();
  if (p.final_state) t.final_state = at.next();
  if (plan.saved_bytes > 0) t.saved = at.next(), t.saved_bytes = plan.saved_bytes;
  return t;
}

GradientTensors gradients_of(const Gradients& g, Addresses& at) {
  GradientTensors t;
  if (g.d_o) t.d_o = at.next();
  if (g.d_final_state) t.d_final_state = at.next();
  if (g.dq) t.dq = at.next();
  if (g.dk) t.dk = at.next();
  if (g.dv) t.dv = at.next();
  if (g.dg) t.dg = at.next();
  if (g.dbeta) t.dbeta = at.next();
  if (g.dA_log) t.dA_log = at.next();
  if (g.ddt_bias) t.ddt_bias = at.next();
  if (g.d_initial_state) t.d_initial_state = at.next();
  return t;
}

/// "name blocks x threads (shared bytes)" of each launch, those in a row that are equal once.
std::string text_of(const std::vector<emulator::Launched>& launches) {
  std::string text, last;
  int64_t times = 0;
  const auto flush = [&] {
    if (times > 0) text += cat("\n    ", last, times > 1 ? cat(", ", times, " times") : "");
    times = 0;
  };
  for (const emulator::Launched& launch : launches) {
    std::string line = cat(launch.kernel, " ", launch.blocks, " x ", launch.threads, " (",
                           launch.shared_bytes, ")");
    if (line != last) flush();
    last = std::move(line);
    ++times;
  }
  flush();
  return text;
}

template <class Call>
std::vector<emulator::Launched> launches_of(Call&& call) {
  emulator::Recording recording;
  throw_if_error(call());
  return recording.launches;
}

class Launches : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!test::on_cuda()) GTEST_SKIP() << "no emulated GPU";
    DeviceFacts facts;
    throw_if_error(cuda_device_facts(0, &facts));
    capability_ = facts.compute_capability;
  }

  /// Calls see(case, what, plan, launches) for each call of each problem.
  template <class See>
  void for_each(See&& see) const {
    Choices choices(7);
    for (int i = 0; i < 400; ++i) {
      const Case x = random_case(choices, capability_);
      x.spans ? run_spans(x, see) : run_whole(x, see);
    }
  }

  template <class See>
  void run_whole(const Case& x, See&& see) const {
    Plan forward;
    if (!make_plan(x.problem, x.cu_seqlens, x.device, x.options, &forward).ok() ||
        forward.implementation.empty())
      return;  // a backend that was asked for declines it
    Addresses at;
    const Tensors tensors = tensors_of(x.problem, forward, at);
    void* workspace = at.next();
    see(x, "forward", forward,
        launches_of([&] { return run(forward, tensors, workspace, forward.workspace_bytes); }));
    BackwardPlan plan;
    if (!make_backward_plan(forward, x.gradients, backward_options(x), &plan).ok()) return;
    const GradientTensors gradients = gradients_of(x.gradients, at);
    see(x, "backward", plan.plan, launches_of([&] {
          return backward(plan, tensors, gradients, workspace, plan.plan.workspace_bytes);
        }));
  }

 private:
  static PlanOptions backward_options(const Case& x) {
    PlanOptions options;
    options.backend = x.options.backend;
    return options;
  }

  template <class See>
  void run_spans(const Case& x, See&& see) const {
    PlanOptions options = x.options;
    options.keep = KeepPolicy::kNothing;
    Addresses at;
    Problem p = x.problem;
    Plan forward;
    if (!make_plan(p, x.cu_seqlens, x.device, options, &forward).ok()) return;
    if (forward.implementation.empty()) return;
    const Tensors tensors = tensors_of(p, forward, at);
    void* workspace = at.next();
    const GradientTensors gradients = gradients_of(x.gradients, at);
    BackwardPlan plan;
    PlanOptions spans = backward_options(x);
    spans.spans = true;
    if (make_backward_plan(forward, x.gradients, spans, &plan).ok()) {
      const SpanGradients maps{x.wants_D ? at.floats() : nullptr, x.from_final};
      see(x, "first half", plan.plan, launches_of([&] {
            return span_backward_begin(plan, tensors, gradients, maps, workspace,
                                       plan.plan.workspace_bytes);
          }));
      see(x, "second half", plan.plan, launches_of([&] {
            return span_backward_finish(plan, tensors, gradients, workspace,
                                        plan.plan.workspace_bytes);
          }));
    }
    p.initial_state.reset();
    options.spans = true;
    if (!make_plan(p, x.cu_seqlens, x.device, options, &forward).ok()) return;
    if (forward.implementation.empty()) return;
    Addresses more;
    const Tensors given = tensors_of(p, forward, more);
    const SpanMaps maps{.M = more.floats(), .B = more.floats()};
    see(x, "first half of the forward", forward, launches_of([&] {
          return span_begin(forward, given, maps, workspace, forward.workspace_bytes);
        }));
    see(x, "second half of the forward", forward, launches_of([&] {
          return span_finish(forward, given, more.floats(), workspace, forward.workspace_bytes);
        }));
  }

 protected:
  int32_t capability_ = 0;
};

/// Makes maps of sequences, or checkpoints' places: no stage of a plan.
bool is_helper(const std::string& kernel) {
  return kernel == "upload" || kernel == "sequence_map" || kernel == "checkpoint_places";
}

/// Names of kernels, each once.
template <class Rows, class Name>
std::set<std::string> names_of(const Rows& rows, Name&& name) {
  std::set<std::string> names;
  for (const auto& row : rows)
    if (!is_helper(name(row))) names.insert(name(row));
  return names;
}

/// A plan of two halves lists the kernels of both.
TEST_F(Launches, AreThoseThatThePlanLists) {
  std::set<std::string> earlier;
  for_each([&](const Case& x, const char* what, const Plan& plan,
               const std::vector<emulator::Launched>& launches) {
    const auto listed =
        names_of(plan.kernels, [](const KernelChoice& choice) { return choice.kernel; });
    auto launched =
        names_of(launches, [](const emulator::Launched& launch) { return launch.kernel; });
    if (std::string(what).starts_with("first half")) {
      earlier = launched;
      return;
    }
    if (std::string(what).starts_with("second half")) launched.merge(earlier);
    EXPECT_EQ(listed, launched) << text_of(x) << "\n" << what << "\n" << plan.to_text(true);
  });
}

/// Backwards that may cut, and those that do not, from bounds; the zeros behind all are no stage.
TEST_F(Launches, OfBackwardsWithLengthsOnTheDeviceAreThoseThatThePlanLists) {
  Choices choices(19);
  int cut = 0, both_chains = 0;
  for (int i = 0; i < 400; ++i) {
    Case x = random_case(choices, capability_);
    Problem& p = x.problem;
    if (!p.cu_seqlens || x.spans) continue;
    Plan forward;
    BackwardPlan plan;
    if (!make_plan_from_bounds(p, x.device, x.options, &forward).ok()) continue;
    if (forward.implementation.empty()) continue;
    if (!make_backward_plan(forward, x.gradients, {}, &plan).ok()) continue;
    Addresses at;
    Tensors tensors = tensors_of(p, forward, at);
    tensors.cu_seqlens = at.next();
    const GradientTensors gradients = gradients_of(x.gradients, at);
    const auto launches = launches_of(
        [&] { return backward(plan, tensors, gradients, at.next(), plan.plan.workspace_bytes); });
    const auto listed =
        names_of(plan.plan.kernels, [](const KernelChoice& choice) { return choice.kernel; });
    auto launched =
        names_of(launches, [](const emulator::Launched& launch) { return launch.kernel; });
    launched.erase("zero_rows");
    EXPECT_EQ(listed, launched) << text_of(x) << "\n" << plan.to_text(true);
    EXPECT_EQ(launched.count("backward_cut"), plan.plan.device_cut.on ? 1U : 0U) << text_of(x);
    cut += plan.plan.device_cut.on ? 1 : 0;
    both_chains += launched.count("backward_chains") > 0 && launched.count("backward_chains_fp16");
  }
  EXPECT_GE(cut, 5);
  EXPECT_GE(both_chains, capability_ == 90 ? 2 : 0);
}

/// It is written out in front, and its gradient is added up behind, where kernels read a bias a
/// channel.
TEST_F(Launches, OfOneBiasAHeadAreThoseThatThePlanLists) {
  Choices choices(13);
  int expanded = 0, summed = 0;
  for (int i = 0; i < 60; ++i) {
    Case x = random_case(choices, capability_);
    Problem& p = x.problem;
    if (!p.A_log) continue;
    p.g = head_gates(p.g.dtype, p.batch, p.num_tokens, p.num_value_heads);
    p.dt_bias = head_bias(DType::kFloat32, p.num_value_heads);
    if (x.gradients.dg) x.gradients.dg = p.g;
    x.gradients.ddt_bias = p.dt_bias;
    run_whole(x, [&](const Case&, const char* what, const Plan& plan,
                     const std::vector<emulator::Launched>& launches) {
      const auto listed =
          names_of(plan.kernels, [](const KernelChoice& choice) { return choice.kernel; });
      const auto launched =
          names_of(launches, [](const emulator::Launched& launch) { return launch.kernel; });
      EXPECT_EQ(listed, launched) << text_of(x) << "\n" << what << "\n" << plan.to_text(true);
      expanded += static_cast<int>(launched.count("expand_bias"));
      summed += static_cast<int>(launched.count("sum_bias"));
    });
  }
  EXPECT_GT(expanded, 10);
  EXPECT_GT(summed, 5);
}

/// Gated DeltaNet's own kernels, where they are named, with and without gradients that tokens have
/// from states.
TEST_F(Launches, OfGatedDeltaNetsBackwardAreThoseThatThePlanLists) {
  if (capability_ != 90) GTEST_SKIP() << "kernels of Hopper alone";
  Choices choices(19);
  int served = 0, without_grad = 0;
  for (int i = 0; i < 60; ++i) {
    Case x = random_case(choices, capability_);
    Problem& p = x.problem;
    Gradients& g = x.gradients;
    const int64_t H = p.num_heads, HV = p.num_value_heads, K = p.key_dim, V = p.value_dim;
    p.q = p.k = rows(DType::kBFloat16, p, H, K, 0);
    p.v = p.o = rows(DType::kBFloat16, p, HV, V, 0);
    p.g = head_gates(p.g.dtype, p.batch, p.num_tokens, HV);
    if (p.dt_bias) p.dt_bias = head_bias(DType::kFloat32, HV);
    if (g.d_o) g.d_o = p.v;
    if (g.dq) g.dq = p.q;
    if (g.dk) g.dk = p.k;
    if (g.dg) g.dg = p.g;
    if (g.ddt_bias) g.ddt_bias = p.dt_bias;
    x.options = {};
    x.options.backend = "gdn";
    run_whole(x, [&](const Case&, const char* what, const Plan& plan,
                     const std::vector<emulator::Launched>& launches) {
      if (std::string(what) != "backward") return;
      ASSERT_EQ(plan.implementation, "cuda.sm90.gdn") << plan.to_text(true);
      const auto listed =
          names_of(plan.kernels, [](const KernelChoice& choice) { return choice.kernel; });
      const auto launched =
          names_of(launches, [](const emulator::Launched& launch) { return launch.kernel; });
      EXPECT_EQ(listed, launched) << text_of(x) << plan.to_text(true);
      ++served, without_grad += static_cast<int>(launched.count("gdn_chunk_grad_sm90") == 0);
    });
  }
  EXPECT_GT(served, 50);
  EXPECT_GT(without_grad, 1);
}

/// Rows in fp16 of a layer, with and without gradients that tokens have from states.
TEST_F(Launches, OfFp16RowsAreThoseThatThePlanLists) {
  if (capability_ != 90) GTEST_SKIP() << "kernels of Hopper alone";
  Choices choices(17);
  int served = 0, without_grad = 0;
  for (int i = 0; i < 40; ++i) {
    Case x = random_case(choices, capability_);
    Problem& p = x.problem;
    Gradients& g = x.gradients;
    p.key_dim = p.value_dim = 128;
    p.q = p.k = rows(DType::kFloat16, p, p.num_heads, 128, 0);
    p.v = p.o = rows(DType::kFloat16, p, p.num_value_heads, 128, 0);
    p.g = rows(p.g.dtype, p, p.num_value_heads, 128, 0);
    p.initial_state.reset(), p.final_state.reset();
    p.A_log = contiguous(DType::kFloat32, {p.num_value_heads});
    p.dt_bias.reset(), p.scale.reset();
    p.gate_mode = i % 2 ? GateMode::kSoftplus : GateMode::kBounded;
    p.beta_mode = BetaMode::kSigmoid, p.qk_l2norm = true;
    g = {.d_o = p.o, .dv = i % 3 ? p.v : rows(DType::kFloat32, p, p.num_value_heads, 128, 0)};
    if (i % 4 > 0) g.dq = p.q, g.dk = p.k, g.dg = p.g, g.dA_log = p.A_log;
    x.options = {};
    run_whole(x, [&](const Case&, const char* what, const Plan& plan,
                     const std::vector<emulator::Launched>& launches) {
      if (std::string(what) != "backward") return;
      ASSERT_EQ(plan.implementation, "cuda.sm90.staged") << plan.to_text(true);
      const std::size_t count =
          names_of(plan.kernels, [](const KernelChoice& choice) { return choice.kernel; }).size();
      ASSERT_EQ(count, g.dq ? 4U : 2U) << plan.to_text(true);
      EXPECT_EQ(names_of(launches, [](const emulator::Launched& at) { return at.kernel; }).size(),
                count);
      ASSERT_GE(launches.size(), count);
      EXPECT_EQ(launches.back().kernel, plan.kernels.back().kernel);
      ++served, without_grad += !g.dq;
    });
  }
  EXPECT_EQ(served, 40);
  EXPECT_EQ(without_grad, 10);
}

TEST_F(Launches, OfGatedDeltaNetAreThoseThatThePlanLists) {
  if (capability_ != 90) GTEST_SKIP() << "kernels of Hopper alone";
  Choices choices(11);
  int served = 0, cut = 0, cut_on_device = 0;
  for (int i = 0; i < 80; ++i) {
    Case x = random_case(choices, capability_);
    Problem& p = x.problem;
    p.g = head_gates(DType::kFloat32, p.batch, p.num_tokens, p.num_value_heads);
    p.dt_bias.reset();
    x.options = test::with_backend("gdn");
    Plan plan;
    const Status planned = p.cu_seqlens && i % 2
                               ? make_plan_from_bounds(p, x.device, x.options, &plan)
                               : make_plan(p, x.cu_seqlens, x.device, x.options, &plan);
    if (!planned.ok()) continue;
    ++served;
    Addresses at;
    Tensors tensors = tensors_of(p, plan, at);
    if (p.cu_seqlens) tensors.cu_seqlens = at.next();
    auto launches =
        launches_of([&] { return run(plan, tensors, at.next(), plan.workspace_bytes); });
    std::erase_if(launches, [](const auto& launch) { return launch.kernel == "zero_rows"; });
    const std::size_t count = plan.kernels.size();
    ASSERT_GE(launches.size(), count);
    for (std::size_t n = 0; n < count; ++n)
      EXPECT_EQ(launches[launches.size() - count + n].kernel, plan.kernels[n].kernel) << text_of(x);
    const bool both =
        plan.device_cut.on &&
        cuda::gdn::has_both_widths(p.num_sequences, p.num_sequences + plan.device_cut.most_behind,
                                   p.num_value_heads, p.value_dim, x.device.num_sms);
    ASSERT_EQ(count, (plan.device_cut.on ? 5U
                      : plan.segmented   ? 4U
                                         : 2U) +
                         (both ? 1 : 0))
        << text_of(x);
    cut += plan.segmented, cut_on_device += plan.device_cut.on;
    EXPECT_EQ(plan.kernels.front().kernel, "gdn_intra_sm90");
    EXPECT_TRUE(!plan.device_cut.on || plan.kernels[1].kernel == "gdn_cut");
    EXPECT_EQ(plan.kernels.back().kernel, "gdn_chain_sm90");
    EXPECT_TRUE(!plan.segmented || plan.kernels[1].kernel == "gdn_scan_sm90");
  }
  EXPECT_GE(served, 30);
  EXPECT_GE(cut, 5);
  EXPECT_GE(cut_on_device, 1);
}

/// The portable form, which has one kernel, and a block at most for each 64 columns of V.
TEST_F(Launches, OfThePortableFusedForwardAreThoseThatThePlanLists) {
  if (capability_ == 90) GTEST_SKIP() << "Hopper has a form of its own";
  Choices choices(17);
  int served = 0;
  for (int i = 0; i < 120; ++i) {
    Case x = random_case(choices, capability_);
    x.options = test::with_backend("sm80.fused");
    Plan plan;
    if (!make_plan(x.problem, x.cu_seqlens, x.device, x.options, &plan).ok()) continue;
    ++served;
    Addresses at;
    const Tensors tensors = tensors_of(x.problem, plan, at);
    const auto launches =
        launches_of([&] { return run(plan, tensors, at.next(), plan.workspace_bytes); });
    ASSERT_EQ(plan.kernels.size(), 1U);
    ASSERT_FALSE(launches.empty());
    const emulator::Launched& launch = launches.back();
    EXPECT_EQ(launch.kernel, plan.kernels[0].kernel) << text_of(x);
    const int64_t chains =
        x.problem.num_sequences * x.problem.num_value_heads * (x.problem.value_dim / 64);
    EXPECT_EQ(launch.blocks, std::min<int64_t>(chains, x.device.num_sms)) << text_of(x);
    EXPECT_LE(launch.shared_bytes, 163U * 1024) << text_of(x);
  }
  EXPECT_GE(served, 5);
}

/// Golden launches: tests/plan/golden/launches_<capability>.txt; KDA_UPDATE_GOLDEN=1 writes them
/// anew.
TEST_F(Launches, AreThoseOfTheGoldenText) {
  std::string text;
  const Case* last = nullptr;
  std::string of_case;
  for_each([&](const Case& x, const char* what, const Plan& plan,
               const std::vector<emulator::Launched>& launches) {
    std::string now = text_of(x);
    if (&x != last || now != of_case) text += cat(now, "\n");
    last = &x, of_case = std::move(now);
    text += cat("  ", what, ", ", plan.implementation, text_of(launches), "\n");
  });
  const std::string path = cat(KDA_SOURCE_DIR, "/tests/plan/golden/launches_", capability_, ".txt");
  if (std::getenv("KDA_UPDATE_GOLDEN")) std::ofstream(path) << text;
  std::stringstream golden;
  golden << std::ifstream(path).rdbuf();
  EXPECT_EQ(text, golden.str()) << path;
}

}  // namespace
}  // namespace kda
