// SPDX-License-Identifier: Apache-2.0
// kda_soak --seed S --first H --steps N: plays histories H, H + 1, ... of kHistorySteps steps each
// on the CPU, or with KDA_TEST_DEVICE=cuda on a GPU (history.hpp).
#include <fmt/core.h>

#include <map>
#include <nlohmann/json.hpp>

#include "io/output_file.hpp"
#include "soak/history.hpp"
#include "support/arguments.hpp"

namespace {
constexpr int64_t kHistorySteps = 100;
}

int main(int argc, char** argv) {
  uint64_t seed = 1;
  int64_t first = 0, steps = 1000;
  std::string json;
  const auto ends = kda::test::parse_arguments(
      argc, argv,
      "Random histories of requests on a pool of states, against the oracle's state machine",
      {kda::test::whole("--seed", &seed, "other seeds, other histories"),
       kda::test::whole("--first", &first, "number of the first history"),
       kda::test::whole("--steps", &steps, "in all; a history has 100"),
       kda::test::text("--json", &json, "write what was played to this file")});
  if (ends) return *ends;
  fmt::print("kda_soak --seed {} --first {} --steps {}\n", seed, first, steps);

  std::map<std::string, int64_t> counts;
  std::string failure;
  int64_t done = 0;
  for (int64_t number = first; done < steps && failure.empty(); ++number) {
    kda::soak::History history(seed, number);
    int64_t step = 0;
    for (; step < kHistorySteps && done < steps && failure.empty(); ++step, ++done) {
      try {
        failure = history.step();
      } catch (const std::exception& error) {
        failure = error.what();
      }
    }
    if (!failure.empty())
      fmt::print("FAILED  kda_soak --seed {} --first {} --steps {}: {} ({})\n", seed, number, step,
                 failure, history.describe());
    for (const auto& [what, count] : history.counts()) counts[what] += count;
  }
  for (const auto& [what, count] : counts) fmt::print("{:8} {}\n", count, what);
  if (!json.empty()) {
    nlohmann::ordered_json figures = {{"seed", seed},
                                      {"first", first},
                                      {"steps", done},
                                      {"played", counts},
                                      {"failure", failure}};
    kda::io::write_file(json, figures.dump(2) + "\n");
  }
  fmt::print("{} steps, {} failed\n", done, failure.empty() ? 0 : 1);
  return failure.empty() ? 0 : 1;
}
