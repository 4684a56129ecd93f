// SPDX-License-Identifier: Apache-2.0
// `kda bench` on the CPU: times of the operation and of its stages.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "check/inputs.hpp"
#include "tools/kda/execute.hpp"

namespace kda::tools {

/// A measured case.
struct CpuRow {
  std::string name;
  Timing timing;
  double tokens = 0;         ///< per call
  double multiply_adds = 0;  ///< per call; 0: not compute bound
  double bytes = 0;          ///< per call; 0: not memory bound
  std::vector<std::pair<std::string, std::string>> extra;
};

/// What this machine can do with so many threads.
struct MachineRates {
  double fma_per_second = 0;
  double bytes_per_second = 0;  ///< measured for decode alone
};

/// What `kda bench WHAT` measures.
class CpuBench {
 public:
  /// Each case is timed for at least `min_seconds`.
  CpuBench(std::string what, const DeviceFacts& device, const PlanOptions& options,
           double min_seconds)
      : what_(std::move(what)), device_(device), options_(options), min_seconds_(min_seconds) {}

  /// Times decode with tails of random length in the place of decode, which is timed beside it.
  void with_tails(BoundaryStates states) { tails_ = states; }

  CpuRow measure(const std::string& name, check::Inputs& inputs);

  // The cases so far ran on this backend; all run on one.
  const std::string& implementation() const { return implementation_; }
  int32_t num_threads() const { return num_threads_; }
  MachineRates machine_rates() const;

 private:
  void measure_forward(check::Inputs& inputs, CpuRow* row);
  void measure_backward(check::Inputs& inputs, CpuRow* row);
  void measure_states(check::Inputs& inputs, CpuRow* row);
  void measure_intra(check::Inputs& inputs, CpuRow* row);
  void measure_decode(check::Inputs& inputs, CpuRow* row);
  void measure_tails(check::Inputs& inputs, CpuRow* row);
  void measure_context_parallel(check::Inputs& inputs, CpuRow* row);
  Plan make_plan_of(const check::Inputs& inputs, const PlanOptions& options);
  Timing time_plan(check::Inputs& inputs, const PlanOptions& options, Plan* plan);

  std::string what_;
  std::optional<BoundaryStates> tails_;
  DeviceFacts device_;
  PlanOptions options_;
  double min_seconds_;
  std::string implementation_;
  int32_t num_threads_ = 1;
};

}  // namespace kda::tools
