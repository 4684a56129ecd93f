// SPDX-License-Identifier: Apache-2.0
// A Plan as text and as JSON.
#include <algorithm>
#include <iomanip>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "kda/plan.hpp"

namespace kda {
namespace {

constexpr std::size_t kMaxListedSegments = 24;

const char* policy_name(ContextParallel policy) {
  static constexpr const char* kNames[] = {"auto", "off", "fixed", "flashkda", "cula"};
  return kNames[static_cast<std::size_t>(policy)];
}

const char* method_name(SegmentMethod method) {
  return method == SegmentMethod::kOnePass ? "one_pass" : "scan_merge_forward";
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
  out << std::fixed << std::setprecision(unit == 0 ? 0 : 1) << value << ' ' << kUnits[unit];
  return out.str();
}

void print_problem(const Plan& plan, std::ostream& out) {
  const Problem& p = plan.problem;
  out << "problem         " << (p.operation == Operation::kDecode ? "decode" : "forward")
      << "  B=" << p.batch << " T=" << p.num_tokens << " N=" << p.num_sequences
      << " H=" << p.num_heads << " HV=" << p.num_value_heads << " K=" << p.key_dim
      << " V=" << p.value_dim << "\n"
      << "gates           " << gate_mode_name(p.gate_mode) << ", beta "
      << beta_mode_name(p.beta_mode) << (p.qk_l2norm ? ", q/k L2 norm" : "") << "\n"
      << "device          " << plan.device.name << "\n"
      << "implementation  "
      << (plan.implementation.empty() ? "none in this build" : plan.implementation) << "\n"
      << "chunk           " << plan.chunk_size << " tokens\n";
}

void print_segments(const Plan& plan, std::ostream& out) {
  out << "context parallel " << (plan.segmented ? "on" : "off") << " (policy "
      << policy_name(plan.options.context_parallel) << ")";
  if (plan.segmented) {
    const auto split = split_sequences(plan);
    int64_t most = 0;
    for (const auto& [sequence, count] : split) most = std::max(most, count);
    out << ", " << plan.segments.size() << " segments, " << most << " in the longest, "
        << method_name(plan.options.segment_method);
  }
  out << "\n";
  if (plan.num_v_splits > 1) out << "V split         " << plan.num_v_splits << "\n";
}

void print_explanation(const Plan& plan, std::ostream& out) {
  out << "\nwhy\n";
  for (const std::string& reason : plan.reasons) out << "  - " << reason << "\n";
  for (const Candidate& row : plan.candidates)
    out << "  - " << row.name << ": " << (row.chosen ? "chosen" : row.reason) << "\n";
  if (plan.cost.serial_us > 0) {
    out << "\npredicted (K = V = 128 constants of an H200)\n" << std::fixed << std::setprecision(1)
        << "  roofline   " << plan.cost.roofline_us << " us\n"
        << "  serial     " << plan.cost.serial_us << " us\n";
    if (plan.cost.segmented_us > 0)
      out << "  segmented  " << plan.cost.segmented_us << " us\n";
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
  print_problem(*this, out);
  print_segments(*this, out);
  out << "stages\n";
  for (const StagePlan& stage : stages)
    out << "  " << std::left << std::setw(16) << stage.name << std::right << std::setw(8)
        << stage.num_tasks << " tasks  " << stage.what << "\n";
  out << "workspace       " << human_bytes(workspace_bytes) << "\n";
  for (const WorkspaceBlock& entry : workspace)
    out << "  " << std::left << std::setw(22) << entry.name << std::right << std::setw(12)
        << human_bytes(entry.bytes) << "\n";
  if (explain) print_explanation(*this, out);
  return out.str();
}

std::string Plan::to_json() const {
  using nlohmann::ordered_json;
  const Problem& p = problem;
  ordered_json json;
  json["problem"] = {{"operation", p.operation == Operation::kDecode ? "decode" : "forward"},
                     {"batch", p.batch},
                     {"num_tokens", p.num_tokens},
                     {"num_sequences", p.num_sequences},
                     {"num_heads", p.num_heads},
                     {"num_value_heads", p.num_value_heads},
                     {"key_dim", p.key_dim},
                     {"value_dim", p.value_dim},
                     {"gate", gate_mode_name(p.gate_mode)},
                     {"beta", beta_mode_name(p.beta_mode)},
                     {"qk_l2norm", p.qk_l2norm},
                     {"batch_invariant", p.batch_invariant}};
  json["device"] = {{"kind", device_kind_name(device.kind)},
                    {"name", device.name},
                    {"num_sms", device.num_sms}};
  json["implementation"] =
      implementation.empty() ? ordered_json(nullptr) : ordered_json(implementation);
  json["candidates"] = ordered_json::array();
  for (const Candidate& row : candidates)
    json["candidates"].push_back(
        {{"name", row.name}, {"chosen", row.chosen}, {"reason", row.reason}});
  json["chunk_size"] = chunk_size;
  json["num_v_splits"] = num_v_splits;
  json["num_threads"] = num_threads;
  json["context_parallel"] = {{"policy", policy_name(options.context_parallel)},
                              {"on", segmented},
                              {"method", method_name(options.segment_method)},
                              {"segment_chunks", segment_chunks},
                              {"num_segments", segments.size()},
                              {"reasons", reasons}};
  json["segments"] = ordered_json::array();
  for (const Segment& segment : segments)
    json["segments"].push_back(
        {{"sequence", segment.sequence}, {"begin", segment.begin}, {"end", segment.end}});
  json["segments_per_sequence"] = ordered_json::array();
  if (lengths_known) {
    std::vector<int64_t> counts(cu_seqlens.size() - 1, 1);
    for (const auto& [sequence, count] : split_sequences(*this))
      counts[static_cast<std::size_t>(sequence)] = count;
    json["segments_per_sequence"] = counts;
  }
  json["cost_us"] = {{"roofline", cost.roofline_us},
                     {"serial", cost.serial_us},
                     {"segmented", cost.segmented_us}};
  json["stages"] = ordered_json::array();
  for (const StagePlan& stage : stages)
    json["stages"].push_back({{"name", stage.name}, {"tasks", stage.num_tasks}, {"what", stage.what}});
  json["workspace_bytes"] = workspace_bytes;
  json["workspace"] = ordered_json::array();
  for (const WorkspaceBlock& entry : workspace)
    json["workspace"].push_back(
        {{"name", entry.name}, {"offset", entry.offset}, {"bytes", entry.bytes}});
  return json.dump(2);
}

}  // namespace kda
