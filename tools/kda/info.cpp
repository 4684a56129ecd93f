// SPDX-License-Identifier: Apache-2.0
// kda info: version, processor, implementations.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "core/thread_pool.hpp"
#include "cpu/blocked/kernels.hpp"
#include "kda/plan.hpp"
#include "kda/version.h"
#include "tools/kda/commands.hpp"
#include "tools/kda/options.hpp"
#include "tools/kda/print.hpp"
#include "tools/kda/report.hpp"

namespace kda::tools {
namespace {

/// The GPUs, or why there are none.
struct Gpus {
  std::vector<DeviceFacts> facts;
  std::string problem;
};

Gpus find_gpus() {
  Gpus gpus;
  const int32_t count = cuda_device_count();
  DeviceFacts facts;
  if (const Status status = cuda_device_facts(0, &facts); !status.ok())
    gpus.problem = status.message();
  for (int32_t i = 0; i < count; ++i)
    if (cuda_device_facts(i, &facts).ok()) gpus.facts.push_back(facts);
  return gpus;
}

void print_info(bool json) {
  const std::vector<Candidate> rows = implementations();
  const Gpus gpus = find_gpus();
  if (json) {
    nlohmann::ordered_json report = {
        {"version", KDA_VERSION_STRING},           {"threads", default_num_threads()},
        {"avx2", cpu::blocked::cpu_has_avx2()},    {"avx512", cpu::blocked::cpu_has_avx512()},
        {"gpus", nlohmann::ordered_json::array()}, {"cuda_unavailable", gpus.problem}};
    for (const DeviceFacts& gpu : gpus.facts)
      report["gpus"].push_back({{"name", gpu.name},
                                {"compute_capability", gpu.compute_capability},
                                {"num_sms", gpu.num_sms}});
    for (const Candidate& row : rows)
      report["implementations"].push_back(
          {{"name", row.name}, {"available", row.chosen}, {"reason", row.reason}});
    return print_report(json_text(report));
  }
  std::string cuda = gpus.problem;
  for (const DeviceFacts& gpu : gpus.facts) cuda += (cuda.empty() ? "" : "; ") + gpu.name;
  std::vector<std::vector<std::string>> table = {{"implementation", "available", "why not"}};
  for (const Candidate& row : rows)
    table.push_back({row.name, row.chosen ? "yes" : "no", row.reason});
  print_report(fmt::format(
      "kda {}\n\ncpu   {} threads, AVX2+FMA {}, AVX-512 {}\ncuda  {}\n\n{}", KDA_VERSION_STRING,
      default_num_threads(), cpu::blocked::cpu_has_avx2() ? "yes" : "no",
      cpu::blocked::cpu_has_avx512() ? "yes" : "no", cuda, format_table(table)));
}

}  // namespace

void add_info(CLI::App& app) {
  auto* sub = app.add_subcommand("info", "Version, processor, implementations and why not");
  auto json = std::make_shared<bool>(false);
  add_switch(*sub, "--json", json.get(), "Report as JSON");
  sub->footer(
      "Names in the first column are what --backend takes, whole or in part.\n"
      "Examples:\n  kda info\n  kda info --json");
  sub->callback([json] { print_info(*json); });
}

}  // namespace kda::tools
