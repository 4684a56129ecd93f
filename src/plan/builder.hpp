// SPDX-License-Identifier: Apache-2.0
// PlanBuilder: what a backend fills with its part of a plan (registry::Head::plan). The planner has
// checked the problem, the options and the lengths, and has chosen the backend.
//
//   void plan_forward(PlanBuilder& builder) {
//     builder.cut({.automatic = by_my_costs, .unit = kChunk});  // segments, by the policy asked
//     builder.join(why_not_in_one_pass(builder.problem()));     // their method
//     list_forward(builder);                                    // stages, a line each
//     builder.book("my_scratch", count, sizeof(float));         // blocks, each booked once
//   }
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "plan/partition.hpp"
#include "registry/rows.hpp"
#include "stage/backward.hpp"
#include "stage/buffers.hpp"

namespace kda::plan {

inline constexpr int64_t kMaxSegments = 1 << 20;  ///< of a plan

/// How a backend cuts sequences.
struct SegmentRules {
  /// SegmentPolicy::kAuto: the partition of a workload; its predicted times go to the estimate.
  std::function<Partition(const Workload&, CostEstimate*)> automatic;
  int64_t unit = 1;  ///< tokens: segments begin at multiples of it, whatever unit the policy has
};

/// A policy that does not leave it to the planner.
inline bool asks_for_segments(const PlanOptions& options) {
  return options.context_parallel != SegmentPolicy::kAuto &&
         options.context_parallel != SegmentPolicy::kOff;
}

class PlanBuilder {
 public:
  /// `gradients`: of a backward, else null.
  PlanBuilder(const registry::Head& head, const Gradients* gradients, Plan* plan)
      : head_(head), gradients_(gradients), plan_(plan) {}

  /// Returns what is planned so far.
  const Plan& plan() const { return *plan_; }
  const Problem& problem() const { return plan_->problem; }
  const PlanOptions& requested() const { return plan_->requested; }
  const char* name() const { return head_.name; }
  const Gradients* gradients() const { return gradients_; }

  /// All sequences. Without lengths (a plan from bounds) it has none.
  Workload workload() const;

  /// Cuts every sequence by the policy asked for: one decision for the batch, or with
  /// batch_invariant one for each sequence alone. Without lengths nothing is cut.
  void cut(const SegmentRules& rules);
  /// Joins segments in one pass where that was asked for and `declined` is empty; else it is the
  /// reason why not.
  void join(const std::string& declined);
  /// Runs sequences whole after all.
  void drop_segments();
  void set_segment_method(SegmentMethod method) { plan_->resolved.segment_method = method; }
  /// Lets a kernel of the call cut, into so many segments behind first ones at most. `whole`: the
  /// cut where one sequence has all tokens, if the kernel takes it.
  void cut_on_device(int64_t most_behind, const Partition& whole = {}) {
    plan_->device_cut = {true, most_behind, whole.first_chunks, whole.on ? whole.segment_chunks : 0,
                         whole.early_exit};
  }
  void set_early_exit(bool on) { plan_->early_exit = on; }
  void set_intra_form(IntraForm form) { plan_->resolved.intra_form = form; }
  void set_keep(KeepPolicy keep) { plan_->resolved.keep = keep; }
  void set_v_splits(int64_t splits) { plan_->num_v_splits = splits; }

  /// Why the schedule is what it is, one sentence.
  void reason(std::string text) { plan_->reasons.push_back(std::move(text)); }
  void predict(const CostEstimate& cost) { plan_->cost = cost; }
  /// One step of the execution; `what` is one line.
  void stage(const char* name, int64_t num_tasks, std::string what) {
    plan_->stages.push_back({name, num_tasks, std::move(what)});
  }

  /// A launch of that stage.
  void kernel(const char* stage, const char* name, std::string why = {}) {
    plan_->kernels.push_back({stage, name, std::move(why)});
  }

  /// A block of the workspace, of count * size bytes; nothing for 0. Its name is booked once.
  void book(std::string_view name, std::size_t count, std::size_t size);
  /// A block that the caller keeps between this call and a later one (Plan::saved).
  void save(std::string_view name, std::size_t count, std::size_t size);

  /// The first error: more segments than can be, a block booked twice, sizes that overflow.
  const Status& status() const { return status_; }

 private:
  Partition apply_policy(const Workload& work, const SegmentRules& rules, CostEstimate* cost) const;
  void cut_sequence(std::size_t n, const Partition& partition, int64_t unit);
  Workload workload_of(std::size_t first, std::size_t last) const;
  void fail(Status status);
  void check_name(std::string_view name);

  const registry::Head& head_;
  const Gradients* gradients_;
  Plan* plan_;
  Status status_;
};

// -- What several backends plan alike

/// "forward" of whole sequences.
void list_forward(PlanBuilder& builder);
/// "segment_scan", "segment_merge", "forward".
void list_scan_merge_forward(PlanBuilder& builder);
/// "decode".
void list_decode(PlanBuilder& builder);
/// The reason why intra_form is not heeded, where one was asked for.
void note_one_intra_form(PlanBuilder& builder);
/// "nothing", "states", "chunks"
const char* keep_name(KeepPolicy policy);
/// `bytes` divided by the tokens and value heads of the plan's problem.
double bytes_a_token(const Plan& plan, std::size_t bytes);
/// Books in `saved` what the policy `keep` says: a forward writes it, a backward reads it.
void save_states(PlanBuilder& builder);
/// Tokens between the states that KeepPolicy::kStates keeps; 0: none are.
inline int64_t kept_every(const Plan& plan) {
  return plan.resolved.keep == KeepPolicy::kStates ? plan.resolved.kept_state_every : 0;
}
/// M, B and states_in, for so many rows (stage::SegmentRows).
void book_segments(PlanBuilder& builder, std::size_t rows);

}  // namespace kda::plan
