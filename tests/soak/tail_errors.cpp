// SPDX-License-Identifier: Apache-2.0
#include "soak/tail_errors.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <future>
#include <string>
#include <vector>

#include "check/generate.hpp"
#include "core/convert.hpp"
#include "core/layout.hpp"
#include "cpu/oracle/oracle.hpp"
#include "kda/kda.hpp"

namespace kda::soak {
namespace {

namespace oracle = cpu::oracle;

constexpr int64_t kHeads = 2, kDim = 128, kWindow = 64;

struct Regime {
  const char* name;
  check::Regime gates;
  bool decays = true;
  double beta = 0;             ///< the mean of its logit; -4: thousands of tokens are remembered
  bool half_channels = false;  ///< of a head are strong
};
constexpr Regime kRegimes[] = {
    {"no decay", check::Regime::kLog, false},
    {"slow", check::Regime::kSlow},
    {"trained", check::Regime::kTrained},
    {"softplus trained", check::Regime::kTrainedSoftplus},
    {"mixed", check::Regime::kSlow, true, 0, true},
    {"strong", check::Regime::kStrong},
    {"no decay, long memory", check::Regime::kLog, false, -4},
    {"slow, long memory", check::Regime::kSlow, true, -4},
};

/// Most that errors of o and of states may be.
struct Marks {
  double o, state;
};

struct Errors {
  std::vector<double> o, state;  ///< of each window, of its worst head

  static double worst(const std::vector<double>& errors) {
    return *std::max_element(errors.begin(), errors.end());
  }
  static double median(std::vector<double> errors) {
    const auto middle = errors.begin() + static_cast<std::ptrdiff_t>(errors.size() / 2);
    std::nth_element(errors.begin(), middle, errors.end());
    return *middle;
  }
  /// The median of the last tenth, over that of the first.
  double growth() const {
    const auto tenth = static_cast<std::ptrdiff_t>(std::max<std::size_t>(o.size() / 10, 1));
    return median({o.end() - tenth, o.end()}) / median({o.begin(), o.begin() + tenth});
  }
};

double relative_error(const std::vector<double>& found, const std::vector<double>& truth) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    error += (found[i] - truth[i]) * (found[i] - truth[i]);
    norm += truth[i] * truth[i];
  }
  return std::sqrt(error / norm);
}

/// A pool of one slot with its tail.
class Pool {
 public:
  Pool(const check::Inputs& inputs, DType dtype, bool split) {
    Problem p = inputs.problem;
    p.operation = Operation::kDecode;
    p.num_tokens = 1;
    p.o = contiguous(DType::kFloat32, {1, 1, kHeads, kDim});
    p.initial_state = states(p, dtype, 1, true);
    p.initial_state_mask = true;
    p.tail = tails(p, kTailBoundary);
    if (split) p.tail->split = split_states(p, kTailBoundary);
    step_ = plan_of(p);
    p.num_tokens = 0;
    p.tail->settle = true;
    settle_ = plan_of(p);
    const int64_t rows = kHeads * kTailBoundary, elements = kHeads * kDim * kDim;
    for (auto& [buffer, bytes] : {std::pair{&pool_, elements * 4},
                                  {&rest_, elements * 2},
                                  {&k_, rows * kDim * 4},
                                  {&g_, rows * kDim * 4},
                                  {&v_, rows * kDim * 4},
                                  {&v_new_, rows * kDim * 4},
                                  {&beta_, rows * 4},
                                  {&folded_, kHeads * 4}})
      *buffer = io::Buffer(static_cast<std::size_t>(bytes));
  }

  /// Token i of the inputs, that of position `position`, to `o`.
  void step(const check::Inputs& inputs, int64_t i, int64_t position, float* o) {
    const Problem& p = inputs.problem;
    Tensors t = inputs.tensors();
    const auto at = [&](const void*& base, const TensorDesc& desc) {
      base = at_bytes(base, desc, i * desc.strides[1]);
    };
    at(t.q, p.q), at(t.k, p.k), at(t.v, p.v), at(t.g, p.g), at(t.beta, p.beta);
    t.o = o;
    call(step_, t, position);
  }
  void settle(const check::Inputs& inputs, int64_t position) {
    call(settle_, inputs.tensors(), position);
  }
  std::vector<double> state(int64_t head) const {
    std::vector<double> S;
    for (int64_t i = head * kDim * kDim; i < (head + 1) * kDim * kDim; ++i) {
      const auto at = static_cast<std::size_t>(i);
      S.push_back(step_.problem.tail->split
                      ? join_float(pool_.as<uint16_t>()[at], rest_.as<int16_t>()[at])
                      : load_double(pool_.data(), step_.problem.initial_state->tensor.dtype, i));
    }
    return S;
  }

 private:
  static Plan plan_of(const Problem& p) {
    Plan plan;
    throw_if_error(make_plan(p, {}, cpu_facts(), {}, &plan));
    return plan;
  }
  void call(const Plan& plan, Tensors t, int64_t position) {
    const int32_t slot = 0, positions = static_cast<int32_t>(position);
    const uint8_t has_state = position > 0;
    t.initial_state = pool_.data();
    t.initial_state_indices = &slot;
    t.initial_state_mask = &has_state;
    t.tail = {.k = k_.data(),
              .g = g_.data(),
              .v_new = v_new_.as<float>(),
              .folded = folded_.as<int32_t>(),
              .positions = &positions,
              .rest = rest_.as<int16_t>(),
              .v = v_.data(),
              .beta = beta_.data()};
    throw_if_error(workspace_.reserve(plan.workspace_bytes));
    throw_if_error(run(plan, t, workspace_.data(), workspace_.size()));
  }

  Plan step_, settle_;
  Workspace workspace_;
  io::Buffer pool_, rest_, k_, g_, v_, v_new_, beta_, folded_;
};

/// Tokens of a regime, a window after the other, with the parameters of its first one.
class Tokens {
 public:
  explicit Tokens(const Regime& regime) : regime_(regime), random_(7) {
    check::GenerateOptions options;
    options.num_tokens = kWindow;
    options.num_heads = options.num_value_heads = kHeads;
    options.key_dim = options.value_dim = kDim;
    options.regime = regime.gates;
    inputs_ = check::generate(options);
    if (!regime.half_channels) return;
    for (int64_t i = 0; i < kHeads * kDim; i += 2)
      inputs_.dt_bias.as<float>()[i] = static_cast<float>(random_.uniform());
  }
  const check::Inputs& next() {
    const double gate = !regime_.decays                                    ? 0
                        : regime_.gates == check::Regime::kTrainedSoftplus ? 1.8
                        : regime_.gates == check::Regime::kStrong          ? 1
                                                                           : 0.5;
    const int64_t rows = kWindow * kHeads;
    fill(&inputs_.q, rows * kDim, 1, 0), fill(&inputs_.k, rows * kDim, 1, 0);
    fill(&inputs_.v, rows * kDim, 1, 0), fill(&inputs_.g, rows * kDim, gate, 0);
    fill(&inputs_.beta, rows, 1, regime_.beta);
    return inputs_;
  }

 private:
  void fill(io::Buffer* buffer, int64_t count, double scale, double offset) {
    for (int64_t i = 0; i < count; ++i)
      store_double(buffer->data(), inputs_.problem.q.dtype, i, scale * random_.normal() + offset);
  }

  const Regime& regime_;
  check::Random random_;
  check::Inputs inputs_;
};

struct Format {
  const char* name;
  DType dtype;
  bool split;
  Marks marks;
};
constexpr Format kFormats[] = {{"fp32", DType::kFloat32, false, {1e-5, 1e-5}},
                               {"bf16", DType::kBFloat16, false, {5e-2, 5e-2}},
                               {"split", DType::kBFloat16, true, {2.5e-3, 1e-5}}};

/// One window of every pool, against the recurrence that goes on in `truth`.
void measure_window(const check::Inputs& inputs, int64_t begin,
                    std::vector<std::vector<double>>* truth, std::vector<Pool>* pools,
                    std::vector<Errors>* errors) {
  std::vector<std::vector<double>> expected;
  for (int64_t head = 0; head < kHeads; ++head) {
    std::vector<double>& S = (*truth)[static_cast<std::size_t>(head)];
    oracle::HeadResult result =
        oracle::run_head(inputs.problem, inputs.tensors(), {0, kWindow}, head, S);
    expected.push_back(std::move(result.o));
    S = std::move(result.state);
  }
  std::vector<float> o(static_cast<std::size_t>(kWindow * kHeads * kDim));
  for (std::size_t f = 0; f < pools->size(); ++f) {
    Pool& pool = (*pools)[f];
    for (int64_t i = 0; i < kWindow; ++i)
      pool.step(inputs, i, begin + i, o.data() + i * kHeads * kDim);
    pool.settle(inputs, begin + kWindow);
    double of_o = 0, of_state = 0;
    for (int64_t head = 0; head < kHeads; ++head) {
      std::vector<double> found;
      for (int64_t i = 0; i < kWindow; ++i)
        for (int64_t c = 0; c < kDim; ++c)
          found.push_back(o[static_cast<std::size_t>((i * kHeads + head) * kDim + c)]);
      of_o = std::max(of_o, relative_error(found, expected[static_cast<std::size_t>(head)]));
      of_state = std::max(
          of_state, relative_error(pool.state(head), (*truth)[static_cast<std::size_t>(head)]));
    }
    (*errors)[f].o.push_back(of_o), (*errors)[f].state.push_back(of_state);
  }
}

struct Measured {
  std::string lines;
  bool right = true;  ///< within the marks
};

Measured measure_regime(const Regime& regime, int64_t tokens) {
  Tokens stream(regime);
  std::vector<Pool> pools;
  for (const Format& format : kFormats)
    pools.emplace_back(stream.next(), format.dtype, format.split);
  std::vector<Errors> errors(pools.size());
  std::vector<std::vector<double>> truth(kHeads);
  for (int64_t at = 0; at < tokens; at += kWindow)
    measure_window(stream.next(), at, &truth, &pools, &errors);
  Measured measured;
  for (std::size_t f = 0; f < pools.size(); ++f) {
    const Format& format = kFormats[f];
    const Errors& e = errors[f];
    const double o = Errors::worst(e.o), state = Errors::worst(e.state);
    const bool within = o <= format.marks.o && state <= format.marks.state;
    measured.lines +=
        fmt::format("| {} | {} | {:.1e} | {:.1e} | {:.2f} | {:.1e} |{}\n", regime.name, format.name,
                    Errors::median(e.o), o, e.growth(), state, within ? "" : " above its mark");
    measured.right &= within;
  }
  return measured;
}

}  // namespace

bool measure_tail_errors(int64_t tokens) {
  fmt::print("| regime | states | o, median | worst | last tenth over first | state, worst |\n");
  fmt::print("|---|---|---|---|---|---|\n");
  std::vector<std::future<Measured>> regimes;
  for (const Regime& regime : kRegimes)
    regimes.push_back(std::async(std::launch::async,
                                 [&regime, tokens] { return measure_regime(regime, tokens); }));
  bool right = true;
  for (auto& regime : regimes) {
    const Measured measured = regime.get();
    fmt::print("{}", measured.lines);
    right &= measured.right;
  }
  return right;
}

}  // namespace kda::soak
