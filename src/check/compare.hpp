// SPDX-License-Identifier: Apache-2.0
// compare(): outputs against the float64 oracle, head by head (metric: docs/accuracy.md).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "check/inputs.hpp"
#include "cpu/oracle/oracle.hpp"

namespace kda::check {

/// Errors of one tensor of one head.
struct HeadError {
  int64_t sequence = 0;
  int64_t head = 0;
  double error = 0;      ///< |x - ref| / max(|ref|, 1e-3 magnitude); infinite for a NaN or Inf
  double tolerance = 0;  ///< finite
  /// The largest |ref|, where the type that it is stored in cannot hold it; NaN where float64
  /// overflows too; else 0. Nothing can be compared then: the error is infinite, unless
  /// CompareOptions say otherwise.
  double overflow = 0;

  bool within() const { return error <= tolerance; }
};

struct Comparison {
  std::vector<HeadError> o;
  std::vector<HeadError> final_state;

  bool within() const;
  const HeadError* worst_o() const;
  const HeadError* worst_final_state() const;
};

double median_error(const std::vector<HeadError>& errors);
double largest_error(const std::vector<HeadError>& errors);
/// Nearest to or farthest past its tolerance, which is not always the largest; null if there are
/// none.
const HeadError* worst_error(const std::vector<HeadError>& errors);

struct CompareOptions {
  bool marginal = false;  ///< inputs that amplify errors; see tolerances.hpp
  /// Where a reference overflows its type, the infinity that storing it gives is right: for
  /// problems made at random.
  bool infinities = false;
  /// Type of the operands of matrix products, if they are rounded: operands_of().
  std::optional<DType> operands;
  int32_t num_threads = 1;
  /// The oracle's results by sequence and value head: of an earlier comparison of the same inputs,
  /// or empty, for the next one. Null: nothing is kept.
  std::vector<cpu::oracle::HeadResult>* truths = nullptr;
  std::function<void(int64_t done, int64_t total)> progress;  ///< from any thread
};

/// bf16 or fp16 for plans whose matrix products round their operands, else nothing.
std::optional<DType> operands_of(const Plan& plan);

/// Runs the oracle on `inputs` and compares what `outputs` holds.
Comparison compare(const Inputs& inputs, const Problem& run_problem, const Outputs& outputs,
                   const CompareOptions& options = {});

double norm(const std::vector<double>& x);

/// |x - ref| / max(|ref|, 1e-3 |magnitude|) over one head.
double relative_error(const std::vector<double>& x, const std::vector<double>& ref,
                      const std::vector<double>& magnitude);

/// Error of one head's values and what is allowed: their reference, its magnitude, the type that
/// they were stored in, and the tokens that they come from. Sequence and head stay 0.
HeadError judge(const std::vector<double>& x, const std::vector<double>& ref,
                const std::vector<double>& magnitude, DType stored, int64_t tokens,
                const CompareOptions& options);

/// Near-reflecting steps with next to no decay between equal keys (tolerances.hpp).
bool is_marginal(const Inputs& inputs);

}  // namespace kda::check
