// SPDX-License-Identifier: Apache-2.0
// Random problems against the oracle: sizes, types, gates, strides, segments.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <mutex>

#include "check/tolerances.hpp"
#include "core/convert.hpp"
#include "core/text.hpp"
#include "fuzz/fuzz.hpp"
#include "support/padded.hpp"

namespace kda::fuzz {
namespace {

using check::Inputs;
using check::Random;
using check::Regime;

/// Oracle work of a run: the sum of T HV K V stays below this for 2,000 cases.
constexpr double kWorkOfACase = 4e10 / 2000;
constexpr double kWorkOfALargeCase = 4e8;  // one in 50

template <std::size_t kCount>
int64_t pick(Random& random, const std::array<int64_t, kCount>& values) {
  return values[static_cast<std::size_t>(random.below(kCount))];
}

int64_t random_length(Random& random) {
  static constexpr std::array<int64_t, 24> kLengths = {0,  1,   2,   7,   8,    9,    15,   16,
                                                       17, 31,  32,  33,  63,   64,   65,   127,
                                                       97, 211, 257, 509, 1021, 2039, 4093, 4096};
  return random.chance(0.7) ? pick(random, kLengths) : random.below(600);
}

int64_t random_dim(Random& random) {
  static constexpr std::array<int64_t, 12> kDims = {1,  2,   3,   16,  32,  60,
                                                    64, 100, 127, 128, 200, 256};
  return random.chance(0.7) ? pick(random, kDims) : 1 + random.below(256);
}

}  // namespace

check::GenerateOptions random_shape(Random& random) {
  check::GenerateOptions options;
  options.num_heads = 1 + random.below(3);
  options.num_value_heads = options.num_heads * (1 + random.below(3));
  options.key_dim = random_dim(random);
  options.value_dim = random_dim(random);
  options.regime = static_cast<Regime>(random.below(check::kNumRegimes));
  options.seed = random.next();
  options.initial_state = random.chance(0.5);
  if (random.chance(0.4)) {
    const int64_t count = 1 + random.below(5);
    for (int64_t n = 0; n < count; ++n) options.seq_lens.push_back(random_length(random));
  } else {
    options.batch = 1 + random.below(2);
    options.num_tokens = random_length(random);
  }
  static constexpr std::array<DType, 3> kTypes = {DType::kFloat32, DType::kBFloat16,
                                                  DType::kFloat16};
  options.dtype = kTypes[static_cast<std::size_t>(random.below(3))];
  return options;
}

void fit_tensor_cores(check::GenerateOptions* o, bool hard) {
  if (o->regime == Regime::kEqualKeys && !hard) o->regime = Regime::kStrong;
  o->key_dim = (std::clamp<int64_t>(o->key_dim, hard ? 8 : 32, 128) + 7) / 8 * 8;
  o->value_dim = (o->value_dim + 7) / 8 * 8;
  if (o->dtype == DType::kFloat32) o->dtype = o->seed % 2 ? DType::kBFloat16 : DType::kFloat16;
}

void fit_gdn(check::GenerateOptions* o) {
  fit_tensor_cores(o, /*hard=*/false);
  o->dtype = DType::kBFloat16;
  o->head_gates = true;
}

namespace {

/// The nearest that the fused kernel takes.
void fit_fused(check::GenerateOptions* o) {
  if (o->regime == Regime::kEqualKeys) o->regime = Regime::kStrong;
  o->key_dim = o->value_dim = o->key_dim <= 64 ? 64 : 128;
  const bool log = o->regime == Regime::kLog || o->regime == Regime::kNeedle;
  if (log || o->dtype == DType::kFloat32) o->dtype = DType::kBFloat16;
}

double work_of(const check::GenerateOptions& o) {
  double tokens = static_cast<double>(o.batch * o.num_tokens);
  for (const int64_t length : o.seq_lens) tokens += static_cast<double>(length);
  return tokens * static_cast<double>(o.num_value_heads * o.key_dim * o.value_dim);
}

}  // namespace

void limit_work(check::GenerateOptions* o, double limit) {
  while (work_of(*o) > limit) {
    if (o->num_value_heads > o->num_heads) {
      o->num_value_heads = o->num_heads;
    } else if (o->num_heads > 1) {
      o->num_heads = o->num_value_heads = 1;
    } else {
      o->num_tokens = o->num_tokens * 2 / 3;
      for (int64_t& length : o->seq_lens) length = length * 2 / 3;
    }
  }
}

namespace {

void fill(io::Buffer& buffer, DType dtype, const std::function<double()>& value) {
  const int64_t count = static_cast<int64_t>(buffer.size()) / dtype_size(dtype);
  for (int64_t i = 0; i < count; ++i)
    store_element(buffer.data(), dtype, i, static_cast<float>(value()));
}

}  // namespace

void vary_options(Inputs* inputs, Random& random, int64_t unit, bool plain) {
  Problem& p = inputs->problem;
  if (random.chance(0.2)) p.state_layout = StateLayout::kVK;
  if (p.initial_state && p.state_layout == StateLayout::kVK)
    p.initial_state->tensor =
        contiguous(DType::kFloat32, {p.num_sequences, p.num_value_heads, p.value_dim, p.key_dim});
  if (random.chance(0.2)) p.scale = random.uniform(-1, 1);
  if (random.chance(0.15) && plain) {  // steps of exactly 0, 1 and 2
    p.beta_mode = BetaMode::kPlain;
    fill(inputs->beta, p.beta.dtype, [&] {
      return random.chance(0.5) ? random.uniform() : static_cast<double>(random.below(3));
    });
  }
  if (random.chance(0.15) && plain) {
    p.qk_l2norm = false;
    const double size = 1 / std::sqrt(static_cast<double>(p.key_dim));
    fill(inputs->k, p.k.dtype, [&] { return random.uniform(-size, size); });
  }
  if (random.chance(0.15)) {  // zero keys and queries here and there
    const int64_t rows = p.batch * p.num_tokens * p.num_heads;
    for (int64_t row = 0; row < rows; ++row)
      if (random.chance(0.2))
        for (int64_t d = 0; d < p.key_dim; ++d) {
          store_element(inputs->k.data(), p.k.dtype, row * p.key_dim + d, 0);
          if (row % 2) store_element(inputs->q.data(), p.q.dtype, row * p.key_dim + d, 0);
        }
  }
  if (p.gate_mode == GateMode::kBounded && random.chance(0.3)) {
    if (random.chance(0.5)) p.A_log.reset();
    if (random.chance(0.5)) p.dt_bias.reset();
    p.lower_bound = -random.log_uniform(1e-3, 50);
  }
  if (random.chance(0.25)) test::restride(inputs, unit);
}

bool add_rows_behind(const Options& options, int64_t index, Inputs* inputs) {
  Random random = random_of(options, ~index);
  if (!test::on_cuda() || inputs->problem.num_sequences < 2 || !inputs->problem.cu_seqlens ||
      random.chance(0.7))
    return false;
  *inputs = test::with_rows_behind(*inputs);
  return true;
}

void leave_last_row(int64_t rows, io::Buffer* buffer) {
  if (rows == 0) throw Error(Status(StatusCode::kInternal, "there is no row to leave"));
  const std::size_t row = buffer->size() / static_cast<std::size_t>(rows);
  std::memset(buffer->data() + buffer->size() - row, 0xff, row);
}

namespace {

/// Errors of the fp32 cases, for the medians of the report.
struct Totals {
  std::mutex mutex;
  std::vector<double> fp32_o, fp32_state, bf16_o;
  int64_t staged = 0;

  void count(const Plan& plan) {
    const std::lock_guard lock(mutex);
    staged += plan.implementation.find("staged") != std::string::npos;
  }
  void add(const check::Comparison& comparison, const Inputs& inputs, DType out) {
    const std::lock_guard lock(mutex);
    const bool fp32 = inputs.problem.v.dtype == DType::kFloat32 && out == DType::kFloat32;
    const std::vector<int64_t> offsets = inputs.offsets();
    for (const check::HeadError& entry : comparison.o) {
      const auto n = static_cast<std::size_t>(entry.sequence);
      const int64_t values = (offsets[n + 1] - offsets[n]) * inputs.problem.value_dim;
      if (fp32 && values >= check::kFewValues) fp32_o.push_back(entry.error);
      if (out == DType::kBFloat16 && values >= check::kManyValues) bf16_o.push_back(entry.error);
    }
    const int64_t state_values = inputs.problem.key_dim * inputs.problem.value_dim;
    for (const check::HeadError& entry : comparison.final_state)
      if (fp32 && state_values >= check::kFewValues) fp32_state.push_back(entry.error);
  }
};

}  // namespace

double quantile(std::vector<double>& values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(share * static_cast<double>(values.size() - 1))];
}

namespace {

PlanOptions random_plan(Random& random, bool any_backend) {
  PlanOptions options;
  if (random.chance(0.3)) {
    options = test::fixed_segments(2 + random.below(31), random.chance(0.5)
                                                             ? SegmentMethod::kOnePass
                                                             : SegmentMethod::kScanMergeForward);
  }
  const std::vector<std::string> backends = test::backends();
  if (random.chance(0.4) && any_backend)
    options.backend =
        backends[static_cast<std::size_t>(random.below(static_cast<int64_t>(backends.size())))];
  if (test::on_cuda() && random.chance(0.4)) options.intra_form = IntraForm::kToken;
  options.num_threads = 1;
  return options;
}

std::string run_case(const Options& options, int64_t index, Totals* totals, Digest* digest) {
  Random random = random_of(options, index);
  check::GenerateOptions shape = random_shape(random);
  if (options.tensor_cores) fit_tensor_cores(&shape, options.hard);
  if (options.fused) fit_fused(&shape);
  if (options.gdn) fit_gdn(&shape);
  limit_work(&shape, index % 50 == 0 ? kWorkOfALargeCase : kWorkOfACase / 2);
  Inputs inputs = check::generate(shape);
  const bool behind = add_rows_behind(options, index, &inputs);
  const bool fused_fp16 = options.fused && shape.dtype == DType::kFloat16;
  vary_options(&inputs, random, options.fused || options.gdn ? 8 : 1, !fused_fp16);
  if (!options.dump.empty()) io::write_safetensors(options.dump, check::file_from_inputs(inputs));
  test::RunOptions run;
  run.plan = random_plan(random, !options.tensor_cores);
  if (options.fused) {
    const bool hopper =
        supported(inputs.problem, test::device(), test::with_backend("sm90.fused")).ok();
    if (!hopper) run.plan = {};  // the portable form has no segments
    run.plan.backend = "fused";
    run.num_sms = static_cast<int32_t>(2 + random.below(20));  // streams are cut between clusters
  }
  if (options.gdn) {
    run.plan = {};
    if (random.chance(0.5)) run.plan = test::fixed_segments(2 + random.below(7));
    run.plan.backend = "gdn";
    inputs.problem.batch_invariant = random.chance(0.3);      // transitions of every head
    run.num_sms = static_cast<int32_t>(1 + random.below(8));  // blocks of 64 and of 128 columns
    if (random.chance(0.5)) inputs.problem.head_map = HeadMap::kTiled;
  }
  run.out_dtype = options.fused || random.chance(0.7) ? shape.dtype : DType::kFloat32;
  run.from_bounds = behind;
  test::Result result = test::run_inputs(inputs, run);
  totals->count(result.plan);
  const int64_t tokens = inputs.problem.batch * inputs.problem.num_tokens;
  if (options.unwritten) leave_last_row(tokens, &result.outputs.o);
  if (behind) {
    if (!test::rows_are_zero(result.outputs.o, tokens, inputs.cu_seqlens.back(), tokens))
      return fmt::format("{}: rows of o behind the last sequence are not 0",
                         result.plan.implementation);
    inputs = test::without_rows_behind(inputs);
  }
  const bool marginal = check::is_marginal(inputs);
  digest->add(index, {&result.outputs.o, &result.outputs.final_state});
  const check::Comparison comparison = check::compare(
      inputs, result.problem, result.outputs,
      {.marginal = marginal, .infinities = true, .operands = check::operands_of(result.plan)});
  if (!marginal) totals->add(comparison, inputs, run.out_dtype);
  if (comparison.within()) return "";
  const check::HeadError* o = comparison.worst_o();
  const check::HeadError* state = comparison.worst_final_state();
  return fmt::format(
      "{} T={} N={} K={} V={} {} {} segments={}: o {:.2e} of {:.2e}, final_state "
      "{:.2e} of {:.2e}",
      check::regime_name(shape.regime), inputs.problem.num_tokens, inputs.problem.num_sequences,
      shape.key_dim, shape.value_dim, dtype_name(shape.dtype), result.plan.implementation,
      result.plan.segments.size(), o->error, o->tolerance, state->error, state->tolerance);
}

}  // namespace

Report fuzz_accuracy(const Options& options) {
  Totals totals;
  Digest digest;
  Report report =
      run_cases(options, [&](int64_t index) { return run_case(options, index, &totals, &digest); });
  report.digest = digest.value();
  report.figures = {{"fp32_o_median", quantile(totals.fp32_o, 0.5)},
                    {"fp32_o_worst", quantile(totals.fp32_o, 1)},
                    {"fp32_final_state_median", quantile(totals.fp32_state, 0.5)},
                    {"fp32_final_state_worst", quantile(totals.fp32_state, 1)},
                    {"bf16_o_median", quantile(totals.bf16_o, 0.5)},
                    {"bf16_o_worst", quantile(totals.bf16_o, 1)}};
  for (const auto& [name, value] : report.figures)
    report.summary += fmt::format("{}{} {:.2e}", report.summary.empty() ? "" : ", ", name, value);
  report.figures["staged"] = static_cast<double>(totals.staged);
  if (options.tensor_cores && options.count >= 10 && test::on_cuda() &&
      2 * totals.staged < options.count)
    report.failures.push_back(fmt::format("only {} problems were staged", totals.staged));
  if (std::max(report.figures["fp32_o_median"], report.figures["fp32_final_state_median"]) >
      check::kFp32Median)
    report.failures.push_back(fmt::format("the median error is above {:.0e}", check::kFp32Median));
  return report;
}

}  // namespace kda::fuzz
