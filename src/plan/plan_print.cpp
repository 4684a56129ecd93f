// SPDX-License-Identifier: Apache-2.0
// A Plan as text and as JSON.
#include <algorithm>
#include <cmath>
#include <iomanip>
#include <map>
#include <sstream>

#include "core/json_writer.hpp"
#include "core/layout.hpp"
#include "core/text.hpp"
#include "kda/plan.hpp"
#include "plan/builder.hpp"

namespace kda {

const char* plan::keep_name(KeepPolicy policy) {
  static constexpr const char* kNames[] = {"nothing", "states", "chunks"};
  return kNames[static_cast<std::size_t>(policy)];
}

namespace {

constexpr std::size_t kMaxListedSegments = 24;

const char* policy_name(SegmentPolicy policy) {
  static constexpr const char* kNames[] = {"auto", "off", "fixed", "flashkda", "cula"};
  return kNames[static_cast<std::size_t>(policy)];
}

const char* method_name(SegmentMethod method) {
  return method == SegmentMethod::kOnePass ? "one_pass" : "scan_merge_forward";
}

const char* form_name(IntraForm form) {
  static constexpr const char* kNames[] = {"auto", "tensor", "token"};
  return kNames[static_cast<std::size_t>(form)];
}

/// Segments of each sequence that has more than one.
std::map<int64_t, int64_t> split_sequences(const Plan& plan) {
  std::map<int64_t, int64_t> counts;
  for (const Segment& segment : plan.segments) ++counts[segment.sequence];
  std::erase_if(counts, [](const auto& entry) { return entry.second < 2; });
  return counts;
}

std::string human_bytes(std::size_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit < 4) {
    value /= 1024;
    ++unit;
  }
  std::ostringstream out;
  out.exceptions(std::ios::badbit);
  out << std::fixed << std::setprecision(unit == 0 ? 0 : 1) << value << ' ' << kUnits[unit];
  return out.str();
}

std::string tail_line(const Problem& p) {
  if (!p.tail) return {};
  std::ostringstream out;
  out.exceptions(std::ios::badbit);
  if (p.tail->ring) {
    out << "ring            " << p.tail->rows << " rows a slot, k " << dtype_name(p.tail->k.dtype)
        << ", v_new " << dtype_name(p.tail->v_new.dtype) << "\n";
    return out.str();
  }
  out << "tail            " << p.tail->rows << " rows a slot, boundary states "
      << (p.tail->split ? "split in bf16 and 16 bits" : dtype_name(p.initial_state->tensor.dtype))
      << " every " << kTailBoundary << " tokens" << (p.tail->settle ? ", settled" : "") << "\n";
  return out.str();
}

void print_problem(const Plan& plan, std::ostream& out) {
  const Problem& p = plan.problem;
  out << "problem         " << operation_name(p.operation) << "  B=" << p.batch
      << " T=" << p.num_tokens << " N=" << p.num_sequences << " H=" << p.num_heads
      << " HV=" << p.num_value_heads << " K=" << p.key_dim << " V=" << p.value_dim
      << (p.head_map == HeadMap::kTiled ? ", q/k heads tiled" : "") << "\n"
      << "gates           " << gate_mode_name(p.gate_mode)
      << (has_head_gate(p) ? ", one a head" : "") << ", beta " << beta_mode_name(p.beta_mode)
      << (p.qk_l2norm ? ", q/k L2 norm" : "") << "\n"
      << tail_line(p) << "device          " << plan.device.name << "\n"
      << "implementation  "
      << (plan.implementation.empty() ? "none in this build" : plan.implementation) << "\n"
      << "chunk           " << plan.chunk_size << " tokens";
  if (plan.lengths_known) out << ", " << plan.chunk_offsets.back() << " chunks";
  out << "\n";
}

void print_segments(const Plan& plan, std::ostream& out) {
  out << "context parallel " << (plan.segmented || plan.device_cut.on ? "on" : "off") << " (policy "
      << policy_name(plan.requested.context_parallel) << ")";
  if (plan.segmented) {
    const auto split = split_sequences(plan);
    int64_t most = 0;
    for (const auto& [sequence, count] : split) most = std::max(most, count);
    out << ", " << plan.segments.size() << " segments, " << most << " in the longest, "
        << method_name(plan.resolved.segment_method) << (plan.early_exit ? ", early exit" : "");
  }
  if (plan.device_cut.on)
    out << ", by lengths on the device, at most " << plan.device_cut.most_behind
        << " segments behind first ones";
  out << "\n";
  if (plan.num_v_splits > 1) out << "V split         " << plan.num_v_splits << "\n";
}

void print_blocks(const char* what, const std::vector<WorkspaceBlock>& blocks, std::size_t bytes,
                  std::ostream& out) {
  out << std::left << std::setw(16) << what << std::right << human_bytes(bytes) << "\n";
  for (const WorkspaceBlock& entry : blocks)
    out << "  " << std::left << std::setw(22) << entry.name << std::right << std::setw(12)
        << human_bytes(entry.bytes) << "\n";
}

/// The clock and memory of another card, which its predictions have in place of an H200's.
std::string card_text(const DeviceFacts& device) {
  if (device.compute_capability / 10 == 9) return {};
  return cat(", at ", device.gigahertz, " GHz and ",
             std::llround(device.memory_bytes_per_second * 1e-9), " GB/s");
}

void print_explanation(const Plan& plan, std::ostream& out) {
  out << "\nwhy\n";
  for (const std::string& reason : plan.reasons) out << "  - " << reason << "\n";
  for (const Candidate& row : plan.candidates)
    out << "  - " << row.name << ": " << (row.chosen ? "chosen" : row.reason) << "\n";
  if (!plan.kernels.empty()) out << "\nkernels\n";
  for (const KernelChoice& choice : plan.kernels) {
    out << "  " << std::left << std::setw(20) << choice.stage << "  " << choice.kernel;
    out << (choice.why.empty() ? "" : ": ") << choice.why << std::right << "\n";
  }
  if (plan.cost.serial_us > 0) {
    out << "\npredicted (constants of an H200" << card_text(plan.device) << ")\n"
        << std::fixed << std::setprecision(1) << "  roofline   " << plan.cost.roofline_us << " us\n"
        << "  serial     " << plan.cost.serial_us << " us\n";
    if (plan.cost.segmented_us > 0) out << "  segmented  " << plan.cost.segmented_us << " us\n";
    if (plan.cost.fused_us > 0) out << "  fused      " << plan.cost.fused_us << " us\n";
  }
  if (plan.segmented) {
    out << "\nsegments (sequence: tokens)\n";
    for (std::size_t i = 0; i < std::min(plan.segments.size(), kMaxListedSegments); ++i)
      out << "  " << plan.segments[i].sequence << ": [" << plan.segments[i].begin << ", "
          << plan.segments[i].end << ")\n";
    if (plan.segments.size() > kMaxListedSegments)
      out << "  ... " << plan.segments.size() - kMaxListedSegments << " more\n";
  }
}

}  // namespace

std::string Plan::to_text(bool explain) const {
  std::ostringstream out;
  out.exceptions(std::ios::badbit);
  print_problem(*this, out);
  print_segments(*this, out);
  out << "stages\n";
  for (const StagePlan& stage : stages)
    out << "  " << std::left << std::setw(16) << stage.name << std::right << std::setw(8)
        << stage.num_tasks << " tasks  " << stage.what << "\n";
  print_blocks("workspace", workspace, workspace_bytes, out);
  if (saved_bytes > 0) print_blocks("saved", saved, saved_bytes, out);
  if (explain) print_explanation(*this, out);
  return out.str();
}

namespace {

void write_problem(const Problem& p, JsonWriter& json) {
  json.key("problem").begin_object();
  json.member("operation", operation_name(p.operation));
  json.member("batch", p.batch).member("num_tokens", p.num_tokens);
  json.member("num_sequences", p.num_sequences).member("num_heads", p.num_heads);
  json.member("num_value_heads", p.num_value_heads);
  json.member("key_dim", p.key_dim).member("value_dim", p.value_dim);
  json.member("head_map", head_map_name(p.head_map)).member("head_gate", has_head_gate(p));
  json.member("gate", gate_mode_name(p.gate_mode)).member("beta", beta_mode_name(p.beta_mode));
  if (p.tail)
    json.member("tail_rows", p.tail->rows)
        .member("settle", p.tail->settle)
        .member("ring", p.tail->ring)
        .member("split_states", has_split_states(p));
  json.member("qk_l2norm", p.qk_l2norm).member("batch_invariant", p.batch_invariant);
  json.end_object();
}

void write_device(const DeviceFacts& device, JsonWriter& json) {
  json.key("device").begin_object();
  json.member("kind", device_kind_name(device.kind)).member("name", device.name);
  json.member("num_sms", device.num_sms);
  json.member("memory_bytes_per_second", device.memory_bytes_per_second);
  json.member("gigahertz", device.gigahertz).end_object();
}

void write_implementation(const Plan& plan, JsonWriter& json) {
  json.key("implementation");
  plan.implementation.empty() ? json.null() : json.value(plan.implementation);
  json.key("candidates").begin_array();
  for (const Candidate& row : plan.candidates)
    json.begin_object()
        .member("name", row.name)
        .member("chosen", row.chosen)
        .member("reason", row.reason)
        .end_object();
  json.end_array();
}

void write_segments(const Plan& plan, JsonWriter& json) {
  json.key("context_parallel").begin_object();
  json.member("policy", policy_name(plan.requested.context_parallel));
  json.member("on", plan.segmented);
  json.member("method", method_name(plan.resolved.segment_method));
  json.member("early_exit", plan.early_exit);
  json.member("segment_chunks", plan.segment_chunks);
  json.member("num_segments", plan.segments.size());
  if (plan.device_cut.on)
    json.key("device_cut")
        .begin_object()
        .member("most_behind", plan.device_cut.most_behind)
        .end_object();
  json.key("reasons").begin_array();
  for (const std::string& reason : plan.reasons) json.value(reason);
  json.end_array().end_object();
  json.key("segments").begin_array();
  for (const Segment& segment : plan.segments)
    json.begin_object()
        .member("sequence", segment.sequence)
        .member("begin", segment.begin)
        .member("end", segment.end)
        .end_object();
  json.end_array();
  json.key("segments_per_sequence").begin_array();
  const auto split = split_sequences(plan);
  for (std::size_t n = 0; n + 1 < plan.cu_seqlens.size(); ++n) {
    const auto found = split.find(static_cast<int64_t>(n));
    json.value(found == split.end() ? int64_t{1} : found->second);
  }
  json.end_array();
}

void write_options(const char* key, const PlanOptions& options, JsonWriter& json) {
  json.key(key).begin_object();
  json.member("backend", options.backend);
  json.member("context_parallel", policy_name(options.context_parallel));
  json.member("num_segments", options.num_segments);
  json.member("segment_method", method_name(options.segment_method));
  json.member("intra_form", form_name(options.intra_form));
  json.member("num_threads", options.num_threads);
  json.member("keep", plan::keep_name(options.keep));
  json.member("kept_state_every", options.kept_state_every);
  if (options.spans) json.member("spans", true);
  if (options.most_cut_bytes != kMostCutBytes)
    json.member("most_cut_bytes", options.most_cut_bytes);
  json.end_object();
}

void write_blocks(const char* key, const std::vector<WorkspaceBlock>& blocks, JsonWriter& json) {
  json.key(key).begin_array();
  for (const WorkspaceBlock& entry : blocks)
    json.begin_object()
        .member("name", entry.name)
        .member("offset", entry.offset)
        .member("bytes", entry.bytes)
        .end_object();
  json.end_array();
}

void write_execution(const Plan& plan, JsonWriter& json) {
  json.key("cost_us").begin_object();
  json.member("roofline", plan.cost.roofline_us).member("serial", plan.cost.serial_us);
  json.member("segmented", plan.cost.segmented_us);
  json.member("fused", plan.cost.fused_us).end_object();
  json.key("stages").begin_array();
  for (const StagePlan& stage : plan.stages)
    json.begin_object()
        .member("name", stage.name)
        .member("tasks", stage.num_tasks)
        .member("what", stage.what)
        .end_object();
  json.end_array();
  json.key("kernels").begin_array();
  for (const KernelChoice& choice : plan.kernels)
    json.begin_object()
        .member("stage", choice.stage)
        .member("kernel", choice.kernel)
        .member("why", choice.why)
        .end_object();
  json.end_array();
  json.member("workspace_bytes", plan.workspace_bytes);
  write_blocks("workspace", plan.workspace, json);
  json.member("saved_bytes", plan.saved_bytes);
  write_blocks("saved", plan.saved, json);
}

}  // namespace

std::string Plan::to_json() const {
  JsonWriter json;
  json.begin_object();
  write_problem(problem, json);
  write_device(device, json);
  write_options("requested", requested, json);
  write_options("resolved", resolved, json);
  write_implementation(*this, json);
  json.member("chunk_size", chunk_size).member("num_v_splits", num_v_splits);
  json.member("num_threads", num_threads);
  json.key("chunk_offsets").begin_array();
  for (const int64_t offset : chunk_offsets) json.value(offset);
  json.end_array();
  write_segments(*this, json);
  write_execution(*this, json);
  return json.end_object().take();
}

}  // namespace kda
