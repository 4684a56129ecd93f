// SPDX-License-Identifier: Apache-2.0
// kda_fuzz accuracy|backward|causality|files|problems --seed S --first I --count N
#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

#include "core/thread_pool.hpp"
#include "fuzz/fuzz.hpp"
#include "support/arguments.hpp"
#include "tools/kda/report.hpp"

namespace kda::fuzz {

Report run_cases(const Options& options, const std::function<std::string(int64_t)>& body) {
  Report report;
  std::mutex mutex;
  auto task = [&](int64_t idx, int32_t) {
    std::string failure;
    try {
      failure = body(options.first + idx);
    } catch (const std::exception& error) {
      failure = error.what();
    }
    if (failure.empty()) return;
    const std::lock_guard lock(mutex);
    report.failures.push_back(
        fmt::format("--first {} --count 1: {}", options.first + idx, failure));
  };
  throw_if_error(parallel_tasks(options.count, options.num_threads, task));
  return report;
}

}  // namespace kda::fuzz

int main(int argc, char** argv) {
  using kda::fuzz::Options;
  using kda::fuzz::Report;
  const std::map<std::string, Report (*)(const Options&)> fuzzers = {
      {"accuracy", kda::fuzz::fuzz_accuracy},
      {"backward", kda::fuzz::fuzz_backward},
      {"causality", kda::fuzz::fuzz_causality},
      {"files", kda::fuzz::fuzz_files},
      {"problems", kda::fuzz::fuzz_problems}};
  std::string what, json;
  Options options;
  bool digest = false;
  const kda::test::Argument which = {
      "what", "accuracy, backward, causality, files or problems", true,
      [&](const std::string& word) { return what = word, fuzzers.contains(word); }};
  const auto ends = kda::test::parse_arguments(
      argc, argv, "Random cases against the oracle and the contract",
      {which, kda::test::whole("--seed", &options.seed, "other seeds, other cases"),
       kda::test::whole("--first", &options.first, "number of the first case"),
       kda::test::whole("--count", &options.count, "how many cases"),
       kda::test::whole("--threads", &options.num_threads, "that run cases"),
       kda::test::text("--json", &json, "write the figures of the summary to this file"),
       kda::test::flag("--tensor-cores", &options.tensor_cores,
                       "accuracy, backward (bf16): 16-bit problems, K = 32..128, K and V multiples "
                       "of 8, no equal keys"),
       kda::test::flag("--fp16", &options.fp16,
                       "backward: fp16 rows, K = V = 128, on cuda.sm90.staged"),
       kda::test::flag(
           "--fused", &options.fused,
           "accuracy: 16-bit problems, K = V = 64 or 128, on cuda.sm90.fused or cuda.sm80.fused"),
       kda::test::flag("--gdn", &options.gdn,
                       "accuracy, backward: one gate a head, bf16, K up to 128, on cuda.sm90.gdn"),
       kda::test::flag("--hard", &options.hard,
                       "with --tensor-cores: K from 8, and equal keys; some exceed the tolerance "
                       "(docs/accuracy.md)"),
       kda::test::flag("--unwritten", &options.unwritten,
                       "accuracy, backward: leave a row of o or dv as it was before the call, as a "
                       "broken kernel would; every case must fail"),
       kda::test::flag(
           "--digest", &digest,
           "accuracy, backward, problems: print a hash of all outputs, equal for builds that "
           "agree to the bit"),
       kda::test::text("--dump", &options.dump,
                       "accuracy, --count 1: also write the inputs to a file")});
  if (ends) return *ends;

  const std::string flags = std::string(options.tensor_cores ? " --tensor-cores" : "") +
                            (options.fp16 ? " --fp16" : "") + (options.fused ? " --fused" : "") +
                            (options.gdn ? " --gdn" : "") + (options.hard ? " --hard" : "");
  fmt::print("kda_fuzz {}{} --seed {} --first {} --count {}\n", what, flags, options.seed,
             options.first, options.count);
  const Report report = fuzzers.at(what)(options);
  for (std::size_t i = 0; i < std::min<std::size_t>(report.failures.size(), 20); ++i)
    fmt::print("FAILED  kda_fuzz {}{} --seed {} {}\n", what, flags, options.seed,
               report.failures[i]);
  if (!json.empty()) {
    nlohmann::ordered_json figures = {{"what", what}};
    figures.update(kda::tools::provenance(kda::tools::command_text(argc, argv)));
    figures.update({{"seed", options.seed}, {"first", options.first}, {"count", options.count}});
    for (const auto& [name, value] : report.figures) figures[name] = value;
    kda::io::write_file(json, figures.dump(2) + "\n");
  }
  if (digest) fmt::print("digest {:016x}\n", report.digest);
  fmt::print("{}{}{} cases, {} failed\n", report.summary, report.summary.empty() ? "" : "\n",
             options.count, report.failures.size());
  if (options.unwritten) {
    const auto cases = std::ranges::count_if(
        report.failures, [](const std::string& text) { return text.starts_with("--first"); });
    return cases == options.count ? 0 : 1;
  }
  return report.failures.empty() ? 0 : 1;
}
