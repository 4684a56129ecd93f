// SPDX-License-Identifier: Apache-2.0
#include "check/compare.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "check/tolerances.hpp"
#include "core/convert.hpp"
#include "core/layout.hpp"
#include "core/thread_pool.hpp"
#include "cpu/oracle/oracle.hpp"

namespace kda::check {
namespace {

namespace oracle = cpu::oracle;

/// Below this a norm is fp32's underflow, not a result.
constexpr double kUnderflow = 1e-30;

/// `value` once it was stored.
double as_stored(double value, DType stored) {
  uint64_t bits = 0;
  store_double(&bits, stored, 0, value);
  return load_double(&bits, stored, 0);
}

/// The largest |ref|, if the type has no finite number for it; NaN where float64 overflows; else 0.
double overflow_of(const std::vector<double>& ref, const std::vector<double>& magnitude,
                   DType stored) {
  if (!std::isfinite(norm(magnitude))) return std::numeric_limits<double>::quiet_NaN();
  double largest = 0;
  for (const double value : ref) {
    if (std::isnan(value)) return value;
    largest = std::max(largest, std::abs(value));
  }
  return std::isfinite(as_stored(largest, stored)) ? 0 : largest;
}

/// Error that storing the exact result costs.
double rounding_error(const std::vector<double>& ref, const std::vector<double>& magnitude,
                      DType stored) {
  if (dtype_size(stored) > 2) return 0;
  std::vector<double> rounded;
  rounded.reserve(ref.size());
  for (const double value : ref) rounded.push_back(as_stored(value, stored));
  return relative_error(rounded, ref, magnitude);
}

constexpr double kInfinite = std::numeric_limits<double>::infinity();

/// Error and tolerance of values that fit into their type.
std::pair<double, double> error_of(const std::vector<double>& x, const std::vector<double>& ref,
                                   const std::vector<double>& magnitude, DType stored,
                                   int64_t tokens, const CompareOptions& options) {
  return {relative_error(x, ref, magnitude),
          forward_tolerance(rounding_error(ref, magnitude, stored),
                            static_cast<int64_t>(ref.size()), tokens, options.marginal)};
}

/// Compares where some overflow: each must be the infinity that storing it gives.
std::pair<double, double> error_beside_infinities(const std::vector<double>& x,
                                                  const std::vector<double>& ref,
                                                  const std::vector<double>& magnitude,
                                                  DType stored, int64_t tokens,
                                                  const CompareOptions& options) {
  std::vector<double> values, references, magnitudes;
  bool right = true;
  for (std::size_t i = 0; i < ref.size(); ++i) {
    const double infinity = as_stored(ref[i], stored);
    if (!std::isfinite(infinity)) {
      right = right && x[i] == infinity;
      continue;
    }
    values.push_back(x[i]);
    references.push_back(ref[i]);
    magnitudes.push_back(magnitude[i]);
  }
  auto [error, tolerance] = error_of(values, references, magnitudes, stored, tokens, options);
  return {right ? error : kInfinite, tolerance};
}

}  // namespace

double norm(const std::vector<double>& x) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  return std::sqrt(sum);
}

double relative_error(const std::vector<double>& x, const std::vector<double>& ref,
                      const std::vector<double>& magnitude) {
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (!std::isfinite(x[i])) return kInfinite;
    sum += (x[i] - ref[i]) * (x[i] - ref[i]);
  }
  const double floor = kUnderflow * std::sqrt(static_cast<double>(x.size() + 1));
  return std::sqrt(sum) / std::max({norm(ref), kCancellation * norm(magnitude), floor});
}

HeadError judge(const std::vector<double>& x, const std::vector<double>& ref,
                const std::vector<double>& magnitude, DType stored, int64_t tokens,
                const CompareOptions& options) {
  const auto values = static_cast<int64_t>(ref.size());
  HeadError entry;
  entry.overflow = overflow_of(ref, magnitude, stored);
  if (entry.overflow == 0)
    std::tie(entry.error, entry.tolerance) = error_of(x, ref, magnitude, stored, tokens, options);
  else if (options.infinities && std::isfinite(entry.overflow))
    std::tie(entry.error, entry.tolerance) =
        error_beside_infinities(x, ref, magnitude, stored, tokens, options);
  else
    entry = {.error = kInfinite,
             .tolerance = forward_tolerance(0, values, tokens, options.marginal),
             .overflow = entry.overflow};
  if (options.operands)
    entry.tolerance +=
        operand_tolerance(*options.operands == DType::kFloat16, values, options.marginal);
  return entry;
}

const HeadError* worst_error(const std::vector<HeadError>& errors) {
  const auto found =
      std::max_element(errors.begin(), errors.end(), [](const HeadError& a, const HeadError& b) {
        return a.error / a.tolerance < b.error / b.tolerance;
      });
  return found == errors.end() ? nullptr : &*found;
}

double largest_error(const std::vector<HeadError>& errors) {
  double largest = 0;
  for (const HeadError& entry : errors) largest = std::max(largest, entry.error);
  return largest;
}

double median_error(const std::vector<HeadError>& errors) {
  if (errors.empty()) return 0;
  std::vector<double> values;
  values.reserve(errors.size());
  for (const HeadError& entry : errors) values.push_back(entry.error);
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

bool Comparison::within() const {
  const auto good = [](const HeadError& entry) { return entry.within(); };
  return std::all_of(o.begin(), o.end(), good) &&
         std::all_of(final_state.begin(), final_state.end(), good);
}
const HeadError* Comparison::worst_o() const { return worst_error(o); }
const HeadError* Comparison::worst_final_state() const { return worst_error(final_state); }

Comparison compare(const Inputs& inputs, const Problem& p, const Outputs& outputs,
                   const CompareOptions& options) {
  const std::vector<int64_t> offsets = inputs.offsets();
  const int64_t total = p.num_sequences * p.num_value_heads;
  Comparison result;
  result.o.resize(static_cast<std::size_t>(total));
  if (p.final_state) result.final_state.resize(static_cast<std::size_t>(total));
  const Tensors tensors = inputs.tensors();
  std::atomic<int64_t> done{0};
  std::vector<oracle::HeadResult> own;
  std::vector<oracle::HeadResult>& truths = options.truths ? *options.truths : own;
  const bool known = !truths.empty();
  truths.resize(static_cast<std::size_t>(total));

  auto compare_head = [&](int64_t idx, int32_t) {
    const int64_t n = idx / p.num_value_heads;
    const int64_t head = idx % p.num_value_heads;
    const auto at = static_cast<std::size_t>(n);
    const oracle::Span span{offsets[at], offsets[at + 1]};
    oracle::HeadResult& truth = truths[static_cast<std::size_t>(idx)];
    if (!known) {
      std::vector<double> initial;
      if (p.initial_state)
        initial = oracle::load_state(p, *p.initial_state, tensors.initial_state, n, head);
      truth = oracle::run_head(p, tensors, span, head, initial);
    }
    const int64_t tokens = span.end - span.begin;
    HeadError& of_o = result.o[static_cast<std::size_t>(idx)];
    of_o = judge(oracle::load_rows(p, p.o, outputs.o.data(), span, head, p.value_dim), truth.o,
                 truth.o_magnitude, p.o.dtype, tokens, options);
    of_o.sequence = n, of_o.head = head;
    if (p.final_state) {
      const std::vector<double> state =
          oracle::load_state(p, *p.final_state, outputs.final_state.data(), n, head);
      HeadError& of_state = result.final_state[static_cast<std::size_t>(idx)];
      of_state = judge(state, truth.state, truth.state_magnitude, p.final_state->tensor.dtype,
                       tokens, options);
      of_state.sequence = n, of_state.head = head;
    }
    if (!options.truths) truth = {};  // memory of one head a thread
    if (options.progress) options.progress(++done, total);
  };
  throw_if_error(parallel_tasks(total, options.num_threads, compare_head));
  return result;
}

std::optional<DType> operands_of(const Plan& plan) {
  for (const char* name : {"staged", "fused", "gdn"})
    if (plan.implementation.find(name) != std::string::npos) return plan.problem.q.dtype;
  return std::nullopt;
}

bool is_marginal(const Inputs& inputs) {
  const Problem& p = inputs.problem;
  const Tensors tensors = inputs.tensors();
  const int64_t tokens = p.batch * p.num_tokens;
  for (int64_t head = 0; head < p.num_value_heads; ++head) {
    int64_t near_two = 0;
    for (int64_t token = 0; token < tokens; ++token)
      near_two += oracle::step_size(p, tensors, token, head) > 1.9;
    if (near_two * 2 > tokens) return true;
  }
  return false;
}

}  // namespace kda::check
