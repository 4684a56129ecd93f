// SPDX-License-Identifier: Apache-2.0
// Random problems and gradients against the oracle's adjoint: sizes, types, gates, strides, kept
// states, segments.
#include <fmt/core.h>

#include <algorithm>
#include <mutex>

#include "check/tolerances.hpp"
#include "core/convert.hpp"
#include "core/layout.hpp"
#include "fuzz/fuzz.hpp"
#include "support/backward.hpp"
#include "support/padded.hpp"

namespace kda::fuzz {
namespace {

using check::Inputs;
using check::Random;

/// The adjoint costs the oracle some five times its forward.
constexpr double kWorkOfACase = 2e6;
constexpr double kWorkOfALargeCase = 1e8;  // one in 50

/// Errors of fp32 gradients of cases that are not marginal, and the cases that are excepted.
struct Totals {
  std::mutex mutex;
  std::map<std::string, std::vector<double>> by_name;
  std::map<std::string, double> staged_worst;  ///< over all heads of a problem
  int64_t few_channels = 0, cancelled = 0, staged = 0;

  void add_staged(const check::GradientComparison& comparison) {
    const std::lock_guard lock(mutex);
    ++staged;
    for (const auto& [name, error] : comparison.all_heads)
      staged_worst[name] = std::max(staged_worst[name], error);
  }
  void add(const check::GradientComparison& comparison, bool fp32) {
    const std::lock_guard lock(mutex);
    few_channels += comparison.few_channels;
    cancelled += !comparison.few_channels && comparison.cancelled;
    for (const auto& [name, heads] : comparison.errors)
      for (const check::HeadError& head : heads)
        if (fp32) by_name[name].push_back(head.error);
  }
};

/// Some cases: gates in fp32, one gate a head, tiled heads. By numbers of their own, so that the
/// other cases of a seed stay.
void vary_gates(const Options& options, int64_t index, Inputs* inputs) {
  Problem& p = inputs->problem;
  Random random = random_of(options, index ^ int64_t{1} << 40);
  if (random.chance(0.25) && p.g.dtype != DType::kFloat32 && !options.gdn) {
    const auto count = static_cast<int64_t>(inputs->g.size() / 2);
    io::Buffer gates(inputs->g.size() * 2);
    for (int64_t i = 0; i < count; ++i)
      gates.as<float>()[i] = static_cast<float>(load_double(inputs->g.data(), p.g.dtype, i));
    inputs->g = std::move(gates);
    const Shape shape = g_shape(p);
    p.g = contiguous(DType::kFloat32, {shape[0], shape[1], shape[2], shape[3]});
  }
  if (random.chance(0.25) && p.key_dim > 1 && !options.fp16 && !options.gdn) {
    test::keep_one_gate(inputs);
    if (p.dt_bias && index % 2 == 0) test::keep_one_bias(inputs);
  }
  if (random.chance(0.1)) p.head_map = HeadMap::kTiled;
}

/// The nearest that fp16 rows may be on Hopper.
void fit_fp16(check::GenerateOptions* o) {
  using check::Regime;
  if (o->regime == Regime::kLog || o->regime == Regime::kNeedle || o->regime == Regime::kEqualKeys)
    o->regime = Regime::kTrainedSoftplus;
  o->key_dim = o->value_dim = 128;
  o->dtype = DType::kFloat16;
  // dg of one token without a state is 0, where Hopper's chunk_grad has fp32's rounding.
  o->initial_state = true;
}
void fit_fp16(Problem* p) {
  p->lower_bound = std::max(p->lower_bound, -5.0);
  if (p->scale && std::abs(*p->scale) < 0x1p-8) p->scale.reset();
}
/// dq and dk in the type of q and k.
void fit_rows(DType type, check::GradientBuffers* buffers) {
  Gradients& g = buffers->gradients;
  for (const auto& [desc, buffer] :
       {std::pair{&g.dq, &buffers->dq}, std::pair{&g.dk, &buffers->dk}}) {
    if ((*desc)->dtype == DType::kFloat32) {
      *buffer = io::Buffer(buffer->size() / 2);
      buffer->fill(0xff);
    }
    (*desc)->dtype = type;
  }
}

std::string run_case(const Options& options, int64_t index, Totals* totals, Digest* digest) {
  Random random = random_of(options, index);
  check::GenerateOptions shape = random_shape(random);
  if (options.tensor_cores) {
    fit_tensor_cores(&shape, options.hard);
    shape.dtype = DType::kBFloat16;
  }
  if (options.fp16) fit_fp16(&shape);
  if (options.gdn) fit_gdn(&shape);
  const bool own_rows = options.fp16 || options.gdn,
             of_tensor_cores = options.tensor_cores || own_rows;
  limit_work(&shape, index % 50 == 0 ? kWorkOfALargeCase : kWorkOfACase);
  Inputs inputs = check::generate(shape);
  const bool behind = add_rows_behind(options, index, &inputs);
  if (!behind) vary_gates(options, index, &inputs);
  vary_options(&inputs, random, of_tensor_cores ? 8 : 1, !options.fp16);
  if (options.fp16) fit_fp16(&inputs.problem);
  check::GradientOptions wanted;
  wanted.seed = random.next();
  wanted.d_o = random.chance(0.9);
  wanted.d_final_state = !wanted.d_o || random.chance(0.5);
  wanted.d_o_dtype = of_tensor_cores || random.chance(0.5) ? shape.dtype : DType::kFloat32;
  if (random.chance(0.5)) wanted.out_dtype = DType::kFloat32;
  check::GradientBuffers buffers = check::make_gradients(inputs, wanted);
  if (own_rows) fit_rows(shape.dtype, &buffers);
  if (options.fp16) buffers.gradients.d_initial_state.reset();
  const bool strided = random.chance(0.25) && !own_rows;
  if (strided) test::restride_gradients(inputs.problem, &buffers, options.tensor_cores ? 8 : 1);
  test::BackwardRun run;
  const auto backends = test::backward_backends();
  if (options.gdn && test::on_cuda()) run.backend = "gdn";
  if (random.chance(0.4) && !of_tensor_cores)
    run.backend =
        backends[static_cast<std::size_t>(random.below(static_cast<int64_t>(backends.size())))];
  if (random.chance(0.5)) run.kept_every = 64 * (1 + random.below(4));
  if (test::on_cuda() && random.chance(0.4)) run.segments = 2 + random.below(7);
  if (options.gdn) run.num_sms = static_cast<int32_t>(1 + random.below(8));  // units of a block
  run.from_bounds = behind;
  test::BackwardCall call(inputs, buffers.gradients, run);
  throw_if_error(call.run(&buffers));
  digest->add(index, test::gradient_outputs(buffers));
  const int64_t tokens = inputs.problem.batch * inputs.problem.num_tokens;
  if (options.unwritten) leave_last_row(tokens, &buffers.dv);
  if (behind) {
    const auto found = test::gradient_outputs(buffers);
    for (std::size_t i = 0; i < 5 && !strided; ++i)  // those of tokens
      if (!test::rows_are_zero(*found[i], tokens, inputs.cu_seqlens.back(), tokens))
        return fmt::format("{}: rows of {} behind the last sequence are not 0",
                           call.plan.plan.implementation, check::kGradientNames[i]);
    inputs = test::without_rows_behind(inputs);
  }
  const bool marginal = check::is_marginal(inputs);
  const std::optional<DType> operands = check::operands_of(call.plan.plan);
  const check::GradientComparison comparison = check::compare_gradients(
      inputs, buffers, {.marginal = marginal, .infinities = true, .operands = operands});
  if (operands)
    totals->add_staged(comparison);
  else if (!marginal)
    totals->add(comparison, buffers.gradients.dq->dtype == DType::kFloat32);
  if (comparison.within()) return "";
  std::string failure = fmt::format(
      "{} {} T={} N={} H={} HV={}{} K={} V={} {} {} {}{} norm={} beta={} kept={} "
      "segments={}:",
      call.plan.plan.implementation, check::regime_name(shape.regime), inputs.problem.num_tokens,
      inputs.problem.num_sequences, shape.num_heads, shape.num_value_heads,
      inputs.problem.head_map == HeadMap::kTiled ? " tiled" : "", shape.key_dim, shape.value_dim,
      dtype_name(shape.dtype), gate_mode_name(inputs.problem.gate_mode),
      dtype_name(inputs.problem.g.dtype), has_head_gate(inputs.problem) ? " a head" : "",
      inputs.problem.qk_l2norm, beta_mode_name(inputs.problem.beta_mode), run.kept_every,
      call.plan.plan.segments.size());
  for (const auto& [name, heads] : comparison.errors) {
    const check::HeadError* worst = check::worst_error(heads);
    if (worst->error > worst->tolerance)
      failure += fmt::format(" {} {:.2e} of {:.2e}", name, worst->error, worst->tolerance);
  }
  return failure;
}

}  // namespace

Report fuzz_backward(const Options& options) {
  Totals totals;
  Digest digest;
  Report report =
      run_cases(options, [&](int64_t index) { return run_case(options, index, &totals, &digest); });
  report.digest = digest.value();
  for (auto& [name, errors] : totals.by_name) {
    const double median = quantile(errors, 0.5);
    report.figures["fp32_" + name + "_median"] = median;
    report.figures["fp32_" + name + "_worst"] = quantile(errors, 1);
    if (median > check::kFp32Median)
      report.failures.push_back(fmt::format("the median error of {} is {:.1e}, above {:.0e}", name,
                                            median, check::kFp32Median));
  }
  const int64_t excepted = totals.few_channels + totals.cancelled;
  if (static_cast<double>(excepted) > check::kMostExcepted * static_cast<double>(options.count) + 1)
    report.failures.push_back(
        fmt::format("{} of {} cases are excepted ({} with K of 1 or 2, {} with terms that cancel), "
                    "above {:.0f}%",
                    excepted, options.count, totals.few_channels, totals.cancelled,
                    100 * check::kMostExcepted));
  for (const auto& [name, worst] : totals.staged_worst)
    report.figures["staged_" + name + "_worst"] = worst;
  report.figures["excepted_few_channels"] = static_cast<double>(totals.few_channels);
  report.figures["excepted_cancelled"] = static_cast<double>(totals.cancelled);
  for (const auto& [name, value] : report.figures)
    report.summary += fmt::format("{}{} {:.2e}", report.summary.empty() ? "" : ", ", name, value);
  report.figures["staged"] = static_cast<double>(totals.staged);
  if (test::on_cuda())
    report.summary += fmt::format(", {} of {} on the staged kernels", totals.staged, options.count);
  if ((options.tensor_cores || options.fp16 || options.gdn) && options.count >= 10 &&
      test::on_cuda() && totals.staged < options.count)
    report.failures.push_back(fmt::format("only {} problems were staged", totals.staged));
  return report;
}

}  // namespace kda::fuzz
