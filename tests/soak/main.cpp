// SPDX-License-Identifier: Apache-2.0
// kda_soak --seed S --first H --steps N: plays histories H, H + 1, ... of kHistorySteps steps each
// on the CPU, or with KDA_TEST_DEVICE=cuda on a GPU (history.hpp). With --tail-errors it prints a
// table of errors instead (tail_errors.hpp).
#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "io/output_file.hpp"
#include "soak/history.hpp"
#include "soak/tail_errors.hpp"
#include "soak/tail_history.hpp"
#include "support/arguments.hpp"

namespace {

constexpr int64_t kHistorySteps = 100;

struct Played {
  int64_t steps = 0;
  std::string failure, of;
  std::map<std::string, int64_t> counts;
};

/// Up to `most` steps of a history, until one fails.
template <class History>
Played play(uint64_t seed, int64_t number, int64_t most) {
  History history(seed, number);
  Played played;
  for (; played.steps < most && played.failure.empty(); ++played.steps) {
    try {
      played.failure = history.step();
    } catch (const std::exception& error) {
      played.failure = error.what();
    }
  }
  played.of = history.describe();
  played.counts = history.counts();
  return played;
}

/// Every third history has tails.
bool has_tails(int64_t number) { return number % 3 == 2; }

}  // namespace

int main(int argc, char** argv) {
  uint64_t seed = 1;
  int64_t first = 0, steps = 1000, error_tokens = 0;
  std::string json;
  const auto ends = kda::test::parse_arguments(
      argc, argv,
      "Random histories of requests on a pool of states, against the oracle's state machine",
      {kda::test::whole("--seed", &seed, "other seeds, other histories"),
       kda::test::whole("--first", &first, "number of the first history"),
       kda::test::whole("--steps", &steps, "in all; a history has 100"),
       kda::test::whole("--tail-errors", &error_tokens,
                        "no histories: errors of so many tokens with tails, on the CPU"),
       kda::test::text("--json", &json, "write what was played to this file")});
  if (ends) return *ends;
  if (error_tokens > 0) return kda::soak::measure_tail_errors(error_tokens) ? 0 : 1;
  fmt::print("kda_soak --seed {} --first {} --steps {}\n", seed, first, steps);

  std::map<std::string, int64_t> counts;
  std::string failure;
  int64_t done = 0;
  for (int64_t number = first; done < steps && failure.empty(); ++number) {
    const int64_t most = std::min(kHistorySteps, steps - done);
    const Played played = has_tails(number) ? play<kda::soak::TailHistory>(seed, number, most)
                                            : play<kda::soak::History>(seed, number, most);
    done += played.steps;
    failure = played.failure;
    if (!failure.empty())
      fmt::print("FAILED  kda_soak --seed {} --first {} --steps {}: {} ({})\n", seed, number,
                 played.steps, failure, played.of);
    for (const auto& [what, count] : played.counts)
      counts[has_tails(number) ? "tails: " + what : what] += count;
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
