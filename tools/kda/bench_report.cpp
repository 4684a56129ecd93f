// SPDX-License-Identifier: Apache-2.0
#include "tools/kda/bench_report.hpp"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "core/text.hpp"
#include "kda/version.h"
#include "tools/kda/print.hpp"
#include "tools/kda/report.hpp"

namespace kda::tools {

std::string cpu_text(const CpuBenchHead& head) {
  const std::string rate =
      head.what == "decode"
          ? fmt::format("measured memory rate (read and write in place): {:.1f} GB/s",
                        head.rates.bytes_per_second * 1e-9)
          : fmt::format("measured peak fp32 rate: {:.1f} GFLOP/s",
                        2e-9 * head.rates.fma_per_second);
  return fmt::format("{}, {} threads, {}\n{}\n\n", head.implementation, head.num_threads,
                     cpu_model(), rate);
}

Table cpu_table(const std::vector<CpuRow>& rows, const MachineRates& rates) {
  Table table = {{"case", "median", "spread", "tokens/s"}};
  const bool compute = rows.front().multiply_adds > 0, memory = rows.front().bytes > 0;
  if (compute) table[0].insert(table[0].end(), {"GFLOP/s", "% of peak"});
  if (memory) table[0].insert(table[0].end(), {"GB/s", "% of memory"});
  for (const auto& [name, value] : rows.front().extra) table[0].push_back(name);
  for (const CpuRow& row : rows) {
    const Timing& t = row.timing;
    std::vector<std::string> cells = {
        row.name, format_seconds(t.median),
        fmt::format("-{:.0f}% +{:.0f}%", 100 * (1 - t.fastest / t.median),
                    100 * (t.slowest / t.median - 1)),
        format_count(row.tokens / t.median)};
    if (compute) {
      cells.push_back(fmt::format("{:.1f}", 2e-9 * row.multiply_adds / t.median));
      cells.push_back(
          fmt::format("{:.1f}", 100 * row.multiply_adds / t.median / rates.fma_per_second));
    }
    if (memory) {
      cells.push_back(fmt::format("{:.1f}", 1e-9 * row.bytes / t.median));
      cells.push_back(fmt::format("{:.1f}", 100 * row.bytes / t.median / rates.bytes_per_second));
    }
    for (const auto& [name, value] : row.extra) cells.push_back(value);
    table.push_back(cells);
  }
  return table;
}

std::string cpu_json(const std::vector<CpuRow>& rows, const CpuBenchHead& head) {
  nlohmann::ordered_json report = {{"what", head.what}};
  report.update(provenance(head.command));
  report.update({{"implementation", head.implementation},
                 {"threads", head.num_threads},
                 {"version", KDA_VERSION_STRING},
                 {"peak_fma_per_second", head.rates.fma_per_second},
                 {"memory_bytes_per_second", head.rates.bytes_per_second},
                 {"cases", nlohmann::ordered_json::array()}});
  for (const CpuRow& row : rows) {
    nlohmann::ordered_json entry = {{"case", row.name},
                                    {"median_s", row.timing.median},
                                    {"fastest_s", row.timing.fastest},
                                    {"slowest_s", row.timing.slowest},
                                    {"repeats", row.timing.repeats},
                                    {"tokens", row.tokens},
                                    {"multiply_adds", row.multiply_adds},
                                    {"bytes", row.bytes}};
    for (const auto& [name, value] : row.extra) entry[name] = value;
    report["cases"].push_back(entry);
  }
  return json_text(report);
}

std::string gpu_text(const DeviceFacts& device, double copy_rate) {
  return fmt::format("{}\ncopy: {:.0f} GB/s read and written\n\n", device.name, 1e-9 * copy_rate);
}

Table gpu_table(const std::vector<GpuRow>& rows, double copy_rate) {
  Table table = {
      {"case", "what", "median", "spread", "GB/s", "% of copy", "as many copied", "segments"}};
  for (const GpuRow& row : rows) {
    const Timing& t = row.timing;
    const double rate = row.bytes / t.median;
    table.push_back({row.name, row.what, format_seconds(t.median),
                     fmt::format("-{:.0f}% +{:.0f}%", 100 * (1 - t.fastest / t.median),
                                 100 * (t.slowest / t.median - 1)),
                     fmt::format("{:.0f}", 1e-9 * rate),
                     fmt::format("{:.0f}", 100 * rate / copy_rate), format_seconds(row.copy),
                     row.segments ? cat(row.segments) : ""});
  }
  return table;
}

Table segments_table(const std::vector<GpuRow>& rows, double copy_rate) {
  Table table = {{"case", "segments", "off", "on", "speedup", "% of roofline"}};
  for (std::size_t i = 0; i + 1 < rows.size(); i += 2) {
    const GpuRow &off = rows[i], &on = rows[i + 1];
    table.push_back({on.name, on.segments ? cat(on.segments) : "declined",
                     format_seconds(off.timing.median), format_seconds(on.timing.median),
                     fmt::format("{:.2f}x", off.timing.median / on.timing.median),
                     fmt::format("{:.0f}", 100 * on.bytes / on.timing.median / copy_rate)});
  }
  return table;
}

std::string gpu_json(const std::vector<GpuRow>& rows, const std::string& what,
                     const DeviceFacts& device, double copy_rate) {
  nlohmann::ordered_json report = {{"what", what},
                                   {"device", device.name},
                                   {"compute_capability", device.compute_capability},
                                   {"num_sms", device.num_sms},
                                   {"gigahertz", device.gigahertz},
                                   {"version", KDA_VERSION_STRING},
                                   {"copy_bytes_per_second", copy_rate},
                                   {"cases", nlohmann::ordered_json::array()}};
  for (const GpuRow& row : rows)
    report["cases"].push_back({{"case", row.name},
                               {"what", row.what},
                               {"implementation", row.implementation},
                               {"median_s", row.timing.median},
                               {"fastest_s", row.timing.fastest},
                               {"slowest_s", row.timing.slowest},
                               {"repeats", row.timing.repeats},
                               {"bytes", row.bytes},
                               {"copy_s", row.copy},
                               {"segments", row.segments}});
  return json_text(report);
}

}  // namespace kda::tools
