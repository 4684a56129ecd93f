// SPDX-License-Identifier: Apache-2.0
// `kda bench` on a CUDA device: device times of the operation and of its stages, L2 cold.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "check/generate.hpp"
#include "tools/kda/execute.hpp"

namespace kda::tools {

/// One measured quantity of one case.
struct GpuRow {
  std::string name;  ///< the case
  std::string what;  ///< the stage or variant
  std::string implementation;
  Timing timing;     ///< seconds
  double bytes = 0;  ///< least that it must move
  double copy = 0;   ///< seconds that copying as many takes, timed the same way
  int64_t segments = 0;
};

/// What `kda bench WHAT` measures, for one case.
class GpuBench {
 public:
  explicit GpuBench(const DeviceFacts& device);
  ~GpuBench();
  GpuBench(const GpuBench&) = delete;
  GpuBench& operator=(const GpuBench&) = delete;

  /// Bytes a second of a large copy, read and written.
  double copy_rate() const { return copy_rate_; }
  /// Seconds of a copy that reads and writes so many bytes in all, L2 cold: a small one does not
  /// reach copy_rate().
  double copy_seconds(double bytes);

  /// Times decode with tails of random length beside decode, a forward that ends in tails beside
  /// one without.
  void with_tails(BoundaryStates states) { tails_ = states; }

  std::vector<GpuRow> measure(const std::string& what, const std::string& name,
                              const check::GenerateOptions& options, const PlanOptions& plan,
                              bool batch_invariant);

 private:
  struct Case;
  Timing time(const std::function<void()>& call);
  /// `bounds`: the plan does not know the lengths.
  GpuRow time_run(const Case& c, const std::string& what, const PlanOptions& options,
                  bool bounds = false);
  /// The time of run_plan(plan, tensors, workspace) of a forward.
  template <class RunPlan>
  GpuRow time_plan(const Case& c, const std::string& what, const Plan& plan, RunPlan&& run_plan);
  /// A forward without segments, and where one is cut and joined in one pass the times after each
  /// of its launches; the last row is the whole forward.
  std::vector<GpuRow> time_launches(const Case& c, const PlanOptions& options);
  /// On a pool in fp32, or in bf16 beside boundary states in bf16.
  GpuRow time_decode(Case c, const PlanOptions& options);
  /// Drafts whose states have a slot each, where the backend takes so many.
  std::vector<GpuRow> time_slots_of_drafts(Case c, const PlanOptions& options);
  /// A step of so many that lead every tail through a fold, and one in which all fold; `kept` of
  /// its tokens stay.
  std::vector<GpuRow> time_tails(const Case& c, const std::string& what, int64_t kept,
                                 const PlanOptions& options);
  /// A decode of one token, verify with a slot a token, verify with tails: of its tokens 3 in 4
  /// stay.
  std::vector<GpuRow> time_verify(const Case& c, const check::GenerateOptions& of,
                                  const PlanOptions& options);
  GpuRow time_tail_forward(const Case& c, const PlanOptions& options);
  std::vector<GpuRow> time_lengths(const Case& c, const PlanOptions& options);
  GpuRow time_backward(const Case& c, const std::string& what, const PlanOptions& options,
                       bool bounds = false);
  std::vector<GpuRow> time_both(const Case& c, const PlanOptions& options);

  DeviceFacts device_;
  struct Flush;
  Flush* flush_;
  std::optional<BoundaryStates> tails_;
  double copy_rate_ = 0;
};

}  // namespace kda::tools
