// SPDX-License-Identifier: Apache-2.0
#include "plan/builder.hpp"

#include <algorithm>

#include "core/text.hpp"
#include "plan/ledger.hpp"

namespace kda::plan {
namespace {

constexpr std::size_t kMaxReasons = 9;

}  // namespace

void PlanBuilder::fail(Status status) {
  if (status_.ok()) status_ = std::move(status);
}

Workload PlanBuilder::workload_of(std::size_t first, std::size_t last) const {
  return plan::workload_of(
      plan_->problem, std::span<const int64_t>(plan_->cu_seqlens).subspan(first, last - first + 1),
      plan_->device);
}

Workload PlanBuilder::workload() const {
  return plan::workload_of(plan_->problem, plan_->cu_seqlens, plan_->device);
}

Partition PlanBuilder::apply_policy(const Workload& work, const SegmentRules& rules,
                                    CostEstimate* cost) const {
  switch (plan_->requested.context_parallel) {
    case SegmentPolicy::kOff: break;
    case SegmentPolicy::kFixed: return fixed_partition(work, plan_->requested.num_segments);
    case SegmentPolicy::kFlashKda: return flashkda_partition(work);
    case SegmentPolicy::kCula: return cula_partition(work);
    case SegmentPolicy::kAuto: return rules.automatic(work, cost);
  }
  return uncut("off: asked for");
}

/// Cuts sequence n into segments of whole chunks.
void PlanBuilder::cut_sequence(std::size_t n, const Partition& partition, int64_t unit) {
  const int64_t begin = plan_->cu_seqlens[n];
  const int64_t end = plan_->cu_seqlens[n + 1];
  const bool fixed = plan_->requested.context_parallel == SegmentPolicy::kFixed;
  // An empty segment in front: what is behind the first one does not wait for the initial state.
  const bool spans = plan_->requested.spans;
  int64_t count = partition.on ? num_segments_of(partition, end - begin,
                                                 fixed ? plan_->requested.num_segments : 0)
                               : 1;
  const int64_t chunk = count > 1 ? std::max(partition.chunk_tokens, unit) : partition.chunk_tokens;
  const int64_t chunks = ceil_div(end - begin, chunk);
  if (count > 1) count = std::min(count, chunks);
  const int64_t first = spans ? 0 : partition.first_chunks;
  const auto boundary = [&](int64_t s) {
    return s == count ? end : begin + chunks_before(s, count, chunks, first) * chunk;
  };
  plan_->segment_offsets.push_back(static_cast<int64_t>(plan_->segments.size()));
  if (spans) plan_->segments.push_back({static_cast<int64_t>(n), begin, begin});
  for (int64_t s = 0; s < count; ++s)
    plan_->segments.push_back({static_cast<int64_t>(n), boundary(s), boundary(s + 1)});
  plan_->segmented |= count > 1 || spans;
}

void PlanBuilder::cut(const SegmentRules& rules) {
  if (!plan_->lengths_known) return;
  const std::size_t N = plan_->cu_seqlens.size() - 1;
  const bool alone = plan_->problem.batch_invariant && N > 0;
  Partition partition;
  if (alone) {
    reason("batch_invariant: each sequence is planned as if it were alone");
  } else {
    partition = N == 0 ? uncut("no sequences") : apply_policy(workload(), rules, &plan_->cost);
    plan_->reasons = partition.reasons;
    plan_->early_exit = partition.early_exit;
  }
  for (std::size_t n = 0; n < N; ++n) {
    if (alone) {
      CostEstimate cost;
      partition = apply_policy(workload_of(n, n + 1), rules, &cost);
      if (plan_->reasons.size() < kMaxReasons)
        for (const std::string& text : partition.reasons) reason(cat("sequence ", n, ": ", text));
    }
    plan_->segment_chunks = std::max(plan_->segment_chunks, partition.segment_chunks);
    cut_sequence(n, partition, rules.unit);
    if (static_cast<int64_t>(plan_->segments.size()) > kMaxSegments && plan_->segmented)
      return fail(invalid("context_parallel: more than ", kMaxSegments, " segments"));
  }
  plan_->segment_offsets.push_back(static_cast<int64_t>(plan_->segments.size()));
  if (!plan_->segmented) drop_segments();
}

void PlanBuilder::join(const std::string& declined) {
  if (!plan_->segmented || plan_->requested.segment_method != SegmentMethod::kOnePass) return;
  if (declined.empty()) return;
  reason(cat("one pass declined: ", declined));
  set_segment_method(SegmentMethod::kScanMergeForward);
}

void PlanBuilder::drop_segments() {
  plan_->segmented = plan_->early_exit = false;
  plan_->segments.clear();
  plan_->segment_offsets.clear();
  plan_->segment_chunks = 0;
}

void PlanBuilder::check_name(std::string_view name) {
  const auto same = [&](const WorkspaceBlock& entry) { return entry.name == name; };
  if (std::any_of(plan_->workspace.begin(), plan_->workspace.end(), same) ||
      std::any_of(plan_->saved.begin(), plan_->saved.end(), same))
    fail(Status(StatusCode::kInternal, cat(head_.name, ": block ", name, " is booked twice")));
}

void PlanBuilder::book(std::string_view name, std::size_t count, std::size_t size) {
  check_name(name);
  if (!add_block(plan_->workspace, plan_->workspace_bytes, name, count, size))
    fail(invalid("workspace: more than 2^62 bytes"));
}

void PlanBuilder::save(std::string_view name, std::size_t count, std::size_t size) {
  check_name(name);
  if (!add_block(plan_->saved, plan_->saved_bytes, name, count, size))
    fail(invalid("saved: more than 2^62 bytes"));
}

void list_forward(PlanBuilder& builder) {
  const Problem& p = builder.problem();
  builder.stage("forward", p.num_sequences * p.num_value_heads * builder.plan().num_v_splits,
                "one (sequence, value head, V part) a task");
}

void list_scan_merge_forward(PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  const int64_t heads = plan.problem.num_value_heads;
  const auto segments = static_cast<int64_t>(plan.segments.size());
  builder.stage("segment_scan", 2 * segments * heads,
                "B and M of every segment but the last of its sequence");
  builder.stage("segment_merge", plan.problem.num_sequences * heads, "start states, in order");
  builder.stage("forward", segments * heads * plan.num_v_splits,
                "every segment from its start state");
}

void list_decode(PlanBuilder& builder) {
  const Problem& p = builder.problem();
  builder.stage("decode", p.num_sequences * p.num_value_heads, "one (sequence, value head) a task");
}

void note_one_intra_form(PlanBuilder& builder) {
  if (builder.plan().lengths_known && builder.requested().intra_form != IntraForm::kAuto)
    builder.reason(cat("intra_form: ", builder.name(), " has one form"));
}

void save_states(PlanBuilder& builder) {
  const Plan& plan = builder.plan();
  const Problem& p = plan.problem;
  const int64_t every = kept_every(plan);
  if (every == 0) return;
  if (plan.requested.keep == KeepPolicy::kChunks)
    builder.reason("keep: the CPU keeps states and makes the errors again");
  int64_t count = p.batch * p.num_tokens / every;  // at most, without lengths
  if (plan.lengths_known) {
    count = 0;
    for (std::size_t n = 0; n + 1 < plan.cu_seqlens.size(); ++n)
      count += (plan.cu_seqlens[n + 1] - plan.cu_seqlens[n]) / every;
  }
  builder.save(stage::kKeptMark, 1, sizeof(uint64_t));
  builder.save(stage::kKeptStates, static_cast<std::size_t>(count * p.num_value_heads),
               static_cast<std::size_t>(p.key_dim * p.value_dim) * sizeof(float));
}

void book_segments(PlanBuilder& builder, std::size_t rows) {
  const stage::DimValues dims = stage::dims_of(builder.problem());
  for (const stage::BufferSpec* spec :
       {&stage::kSegmentM, &stage::kSegmentB, &stage::kSegmentStates})
    builder.book(spec->name, rows, stage::entry_bytes(*spec, dims));
}

}  // namespace kda::plan
