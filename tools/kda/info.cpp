// SPDX-License-Identifier: Apache-2.0
// kda info: version, processor, implementations.
#include <fmt/core.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "core/thread_pool.hpp"
#include "cpu/blocked/kernels.hpp"
#include "kda/commands.hpp"
#include "kda/plan.hpp"
#include "kda/print.hpp"
#include "kda/version.h"

namespace kda::tools {
namespace {

constexpr const char* kNoCuda = "this build has no CUDA implementation";

void print_info(bool json) {
  const std::vector<Candidate> rows = implementations();
  if (json) {
    nlohmann::ordered_json report = {
        {"version", KDA_VERSION_STRING},           {"threads", default_num_threads()},
        {"avx2", cpu::blocked::cpu_has_avx2()},    {"avx512", cpu::blocked::cpu_has_avx512()},
        {"gpus", nlohmann::ordered_json::array()}, {"cuda_unavailable", kNoCuda}};
    for (const Candidate& row : rows)
      report["implementations"].push_back(
          {{"name", row.name}, {"available", row.chosen}, {"reason", row.reason}});
    fmt::print("{}\n", report.dump(2));
    return;
  }
  fmt::print("kda {}\n\ncpu   {} threads, AVX2+FMA {}, AVX-512 {}\ncuda  {}\n\n",
             KDA_VERSION_STRING, default_num_threads(), cpu::blocked::cpu_has_avx2() ? "yes" : "no",
             cpu::blocked::cpu_has_avx512() ? "yes" : "no", kNoCuda);
  std::vector<std::vector<std::string>> table = {{"implementation", "available", "why not"}};
  for (const Candidate& row : rows)
    table.push_back({row.name, row.chosen ? "yes" : "no", row.reason});
  fmt::print("{}", format_table(table));
}

}  // namespace

void add_info(CLI::App& app) {
  auto* sub = app.add_subcommand("info", "Version, processor, implementations and why not");
  auto json = std::make_shared<bool>(false);
  sub->add_flag("--json", *json, "Report as JSON");
  sub->footer(
      "Names in the first column are what --backend takes, whole or in part.\n"
      "Examples:\n  kda info\n  kda info --json");
  sub->callback([json] { print_info(*json); });
}

}  // namespace kda::tools
