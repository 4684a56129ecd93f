// SPDX-License-Identifier: Apache-2.0
// kda bench: median, spread, rates, and the share of what the machine can do.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <sstream>

#include "bench_cases.hpp"
#include "core/text.hpp"
#include "tools/kda/bench_report.hpp"
#include "tools/kda/commands.hpp"
#include "tools/kda/flags.hpp"
#include "tools/kda/options.hpp"
#include "tools/kda/print.hpp"
#include "tools/kda/report.hpp"

namespace kda::tools {
namespace {

/// The files of --json and --csv, opened before anything is timed.
class BenchFiles {
 public:
  BenchFiles(const std::string& json, const std::string& csv) {
    if (!json.empty()) json_.emplace(json);
    if (!csv.empty()) csv_.emplace(csv);
    if (json_ && csv_ && json_->same_target(*csv_))
      throw Error(invalid("--csv: '", csv, "' is the file of --json too"));
  }
  void finish(const std::string& text, const std::string& json,
              const std::vector<std::vector<std::string>>& table) {
    if (json_) json_->write(json);
    if (csv_) csv_->write(format_csv(table));
    if (json_) json_->commit();
    if (csv_) csv_->commit();
    print_report(text + format_table(table),
                 (json_ && json_->is_stdout()) || (csv_ && csv_->is_stdout()));
  }

 private:
  std::optional<io::OutputFile> json_, csv_;
};

struct BenchCommand {
  std::string command;  ///< as it was given
  std::string what, set, json_path, csv_path;
  std::vector<std::string> case_texts;
  int64_t group_size = 0;
  int64_t milliseconds = 0;  ///< 0: not given
  bool head_gates = false;
  std::string head_map;
  bool tail = false;
  std::string states = "fp32";
  ScheduleFlags schedule;

  void operator()() {
    const DeviceFacts device = schedule.device_facts();
    const bool on_gpu = device.kind == DeviceKind::kCuda;
    if (tail && what != "decode" && !(on_gpu && (what == "forward" || what == "verify")))
      throw Error(invalid("--tail: belongs to decode, on a GPU to forward and verify too, not to ",
                          what, on_gpu ? "" : " on a CPU"));
    if (on_gpu) return run_gpu(device);
    if (what == "recompute-wu")
      throw Error(Status(StatusCode::kUnavailable,
                         "recompute-wu: a stage of the CUDA pipeline (--device cuda); the CPU "
                         "backend never forms w and u"));
    if (what == "lengths")
      throw Error(Status(StatusCode::kUnavailable,
                         "lengths: where they are makes a difference on a GPU (--device cuda)"));
    if (what == "verify")
      throw Error(Status(StatusCode::kUnavailable,
                         "verify: drafts are timed on a GPU (--device cuda), a CPU's as decode"));
    if (what == "launches")
      throw Error(Status(StatusCode::kUnavailable,
                         "launches: a CPU has none; they are those of a GPU (--device cuda)"));
    const std::vector<std::string> texts = cases();
    for (const std::string& text : texts) case_options(text);
    BenchFiles files(json_path, csv_path);
    CpuBench bench(what, device, schedule.plan_options(),
                   milliseconds > 0 ? 1e-3 * static_cast<double>(milliseconds) : 0.5);
    if (tail) bench.with_tails(parse_boundary_states(states));
    std::vector<CpuRow> rows;
    for (const std::string& text : texts) {
      check::Inputs inputs = make_inputs(text);
      rows.push_back(bench.measure(text, inputs));
    }
    const CpuBenchHead head{what, command, bench.implementation(), bench.num_threads(),
                            bench.machine_rates()};
    files.finish(cpu_text(head), cpu_json(rows, head), cpu_table(rows, head.rates));
  }

  std::vector<std::string> cases(bool gpu = false) const {
    if (!case_texts.empty()) return case_texts;
    const std::string name = !set.empty()                 ? set
                             : what == "decode"           ? "decode"
                             : what == "context-parallel" ? "cula"
                             : what == "lengths"          ? "lengths"
                             : what == "launches"         ? "short"
                             : what == "verify"           ? "verify"
                             : gpu                        ? "cudnn10"
                                                          : "cpu";
    for (const CaseFile& file : kCaseFiles)
      if (name == file.name) return lines(file.text);
    return {};  // --set takes no other name
  }

  static std::vector<std::string> set_names() {
    std::vector<std::string> names;
    for (const CaseFile& file : kCaseFiles) names.emplace_back(file.name);
    return names;
  }

  static std::vector<std::string> lines(const std::string& text) {
    std::vector<std::string> found;
    std::istringstream stream(text);
    for (std::string line; std::getline(stream, line);)
      if (!line.empty() && line[0] != '#') found.push_back(line);
    return found;
  }

  check::GenerateOptions case_options(const std::string& text) const {
    CLI::App parser;
    GenerateFlags flags;
    flags.add_to(parser);
    const std::string where = cat("--case: '", text, "': ");
    check::GenerateOptions options;
    try {
      parser.parse(text);
      options = flags.resolve();
    } catch (const CLI::ParseError& error) {
      throw Error(invalid(where, error.what()));
    } catch (const Error& error) {
      throw Error(invalid(where, error.what()));
    }
    options.head_gates |= head_gates;
    if (!head_map.empty()) options.head_map = check::parse_head_map(head_map);
    if (group_size > 0) options.num_value_heads = options.num_heads * group_size;
    if (options.num_value_heads > kMaxHeads)
      throw Error(invalid(where, "--group-size: ", group_size, " makes more than ", kMaxHeads,
                          " value heads"));
    return options;
  }

  check::Inputs make_inputs(const std::string& text) const {
    check::Inputs inputs = check::generate(case_options(text));
    inputs.problem.batch_invariant = schedule.batch_invariant;
    return inputs;
  }

  void run_gpu(const DeviceFacts& device) {
    if (milliseconds > 0)
      throw Error(invalid("--milliseconds: ", milliseconds,
                          " is how long a CPU is timed; a GPU has a number of calls"));
    const std::vector<std::string> texts = cases(/*gpu=*/true);
    for (const std::string& text : texts) case_options(text);
    BenchFiles files(json_path, csv_path);
    GpuBench bench(device);
    if (tail) bench.with_tails(parse_boundary_states(states));
    std::vector<GpuRow> rows;
    Progress progress("bench");
    for (const std::string& text : texts) {
      for (GpuRow& row : bench.measure(what, text, case_options(text), schedule.plan_options(),
                                       schedule.batch_invariant)) {
        row.copy = bench.copy_seconds(row.bytes);
        rows.push_back(std::move(row));
      }
      progress.update(static_cast<int64_t>(&text - texts.data()) + 1,
                      static_cast<int64_t>(texts.size()));
    }
    const double copy_rate = bench.copy_rate();
    files.finish(
        gpu_text(device, copy_rate), gpu_json(rows, what, device, copy_rate),
        what == "context-parallel" ? segments_table(rows, copy_rate) : gpu_table(rows, copy_rate));
  }
};

}  // namespace

void add_bench(CLI::App& app, const std::string& command) {
  auto* sub = app.add_subcommand("bench", "Time the operation or one of its stages");
  auto c = std::make_shared<BenchCommand>();
  c->command = command;
  add_choice(*sub, "what", &c->what,
             {"forward", "backward", "decode", "intra", "recompute-wu", "delta-h",
              "context-parallel", "lengths", "launches", "verify"},
             "What to time")
      ->required();
  auto* set = add_choice(*sub, "--set", &c->set, BenchCommand::set_names(),
                         "A named set of cases (bench/cases)");
  const auto add_case = [c](const std::string& text) {
    c->case_texts.push_back(text);
    return std::string();
  };
  auto* tail = add_switch(*sub, "--tail", &c->tail,
                          "Time decode with tails of random length, on a GPU verify and a forward "
                          "that ends in tails too, and the same without tails beside it");
  add_choice(*sub, "--boundary-states", &c->states, {"fp32", "bf16", "split"},
             "What the pool has in front of a tail; split: bf16, and 16 bits that folds read")
      ->needs(tail)
      ->default_str(c->states);
  add_values(*sub, "--case", "FLAGS", add_case, "One case as flags of kda gen; may be repeated")
      ->excludes(set);
  add_switch(*sub, "--head-gates", &c->head_gates,
             "In every case one gate a head in fp32, without dt_bias (Gated DeltaNet)");
  add_head_map(*sub, &c->head_map);
  add_whole<int64_t>(*sub, "--group-size", &c->group_size, 1, 64,
                     "Value heads a q/k head, in every case");
  add_whole<int64_t>(*sub, "--milliseconds", &c->milliseconds, 1, 600'000,
                     "On a CPU: each case is timed for at least so long (500)");
  c->schedule.add_to(*sub);
  add_path(*sub, "--json", &c->json_path, "Also write the rows to this file");
  add_path(*sub, "--csv", &c->csv_path, "Also write the table to this file");
  sub->footer(cat(
      R"(forward: the whole operation; backward: all its gradients; intra: gates, norms, in-chunk scores; delta-h: the state
recurrence without outputs; context-parallel: segments on against off; decode: bandwidth; lengths: cu_seqlens on
the host, on the GPU alone, and there without a cut; launches: of a forward in segments, the time after each one;
verify: a sure token and drafts, of which 3 in 4 stay, with a slot a token and with --tail, beside a decode of one token.
GFLOP/s count the multiply-adds of the chunked form at chunk 16 (docs/performance.md).
On a GPU: % of copy is of the rate of a large copy; "as many copied" is what copying as many
bytes takes, timed the same way.
)",
      kOutputHelp, R"(
Examples:
  kda bench forward
  kda bench forward --case "--tokens 4096 --heads 4 --dtype fp32 --regime log" --threads 2
  kda bench decode --json decode.json)"));
  sub->callback([c] { (*c)(); });
}

}  // namespace kda::tools
