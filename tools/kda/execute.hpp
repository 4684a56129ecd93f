// SPDX-License-Identifier: Apache-2.0
// Plan, allocate, run: what `kda run`, `check` and `bench` do with inputs.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "check/backward.hpp"
#include "check/inputs.hpp"
#include "cpu/blocked/kernels.hpp"
#include "kda/kda.hpp"

namespace kda::tools {

struct Execution {
  Plan plan;
  check::Outputs outputs;
  double seconds = 0;  ///< of one run
};

/// Plans and runs `inputs` once. Throws kda::Error.
Execution execute(check::Inputs* inputs, DType out_dtype, const DeviceFacts& device,
                  const PlanOptions& options);

struct BackwardExecution {
  BackwardPlan plan;
  double seconds = 0;  ///< of one run
};

/// Plans and runs the backward of `inputs` once, for a forward that keeps nothing. Throws
/// kda::Error.
BackwardExecution execute_backward(const check::Inputs& inputs, const DeviceFacts& device,
                                   const PlanOptions& options, check::GradientBuffers* gradients);

/// Seconds of repeated calls: one warm-up, then at least `min_repeats` and `min_seconds`.
struct Timing {
  double median = 0, fastest = 0, slowest = 0;
  int repeats = 0;
};
Timing time_calls(const std::function<void()>& call, double min_seconds = 0.5, int min_repeats = 7);

/// The same of two calls that take turns, so that both meet the same machine: at least min_repeats
/// turns, and min_seconds of the two together.
std::pair<Timing, Timing> time_pairs(const std::function<void()>& first,
                                     const std::function<void()>& second, double min_seconds = 0.5,
                                     int min_repeats = 7);

/// Peak rate of `threads` threads: fp32 multiply-adds a second, from chains in registers, in at
/// least `min_seconds`.
double measure_fma_rate(const cpu::blocked::Kernels& kernels, int32_t threads,
                        double min_seconds = 0.3);

double seconds_since_start();

/// Turns the problem into a decode in place on an fp32 pool of zeros, a slot per sequence.
void make_decode(check::Inputs* inputs);

/// How a pool stores the states in front of tails.
enum class BoundaryStates { kFp32, kBf16, kSplit };
BoundaryStates parse_boundary_states(const std::string& text);
/// Gives a problem with a pool in fp32 such boundary states, with indices, and tails of `rows`
/// rows.
void add_tails(Problem* problem, int64_t rows, BoundaryStates states);
/// Bytes that a step reads of boundary states and that a fold reads and writes beside these, of
/// those of an fp32 state.
struct StateShares {
  double step, fold;
};
StateShares state_shares(const Problem& problem);

/// Multiply-adds of one token and value head: docs/performance.md.
double multiply_adds(const Problem& problem);

}  // namespace kda::tools
