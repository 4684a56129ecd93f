// SPDX-License-Identifier: Apache-2.0
// kda bench: median, spread, rates, and the share of what the machine can do.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>

#include "bench_cases.hpp"
#include "core/text.hpp"
#include "core/thread_pool.hpp"
#include "cpu/blocked/blocked.hpp"
#include "cpu/blocked/pass.hpp"
#include "cpu/float_mode.hpp"
#include "kda/commands.hpp"
#include "kda/execute.hpp"
#include "kda/flags.hpp"
#include "kda/gpu_bench.hpp"
#include "kda/options.hpp"
#include "kda/print.hpp"
#include "kda/report.hpp"
#include "kda/version.h"

namespace kda::tools {
namespace {

namespace blocked = cpu::blocked;

constexpr double kMinSeconds = 0.5;

/// A measured row: what the table, the CSV and the JSON show.
struct Row {
  std::string name;
  Timing timing;
  double tokens = 0;         ///< per call
  double multiply_adds = 0;  ///< per call; 0: not compute bound
  double bytes = 0;          ///< per call; 0: not memory bound
  std::vector<std::pair<std::string, std::string>> extra;
};

/// What this machine can do with `threads` threads.
struct MachineRates {
  double fma_per_second = 0;
  double bytes_per_second = 0;
};

/// Reads and writes every byte of a buffer beyond the caches, in place as decode does.
double measure_memory_rate(int32_t threads) {
  constexpr std::size_t kFloats = std::size_t{64} << 20;
  constexpr int64_t kPieces = 256;
  io::Buffer buffer(kFloats * sizeof(float));
  buffer.fill(0);
  auto task = [&](int64_t idx, int32_t) {
    float* piece = buffer.as<float>() + static_cast<std::size_t>(idx) * (kFloats / kPieces);
    for (std::size_t i = 0; i < kFloats / kPieces; ++i) piece[i] = piece[i] * 0.5f + 1.0f;
  };
  const Timing timing =
      time_calls([&] { throw_if_error(parallel_tasks(kPieces, threads, task)); }, 0.5, 5);
  return 2.0 * static_cast<double>(buffer.size()) / timing.fastest;
}

const blocked::Kernels& kernels_named(const std::string& implementation) {
  for (const blocked::Kernels* kernels :
       {blocked::avx512_kernels(), blocked::avx2_kernels(), blocked::portable_kernels()})
    if (kernels && implementation == cat("cpu.blocked.", kernels->name)) return *kernels;
  return blocked::best_kernels();
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  return "unknown";
}

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
  std::string what, set, json_path, csv_path;
  std::vector<std::string> case_texts;
  int64_t group_size = 0;
  ScheduleFlags schedule;

  void operator()() {
    const DeviceFacts device = schedule.device_facts();
    if (device.kind == DeviceKind::kCuda) return run_gpu(device);
    if (what == "recompute-wu")
      throw Error(Status(StatusCode::kUnavailable,
                         "recompute-wu: a stage of the CUDA pipeline (--device cuda); the CPU "
                         "backend never forms w and u"));
    const std::vector<std::string> texts = cases();
    for (const std::string& text : texts) case_options(text);
    BenchFiles files(json_path, csv_path);
    std::vector<Row> rows;
    for (const std::string& text : texts) rows.push_back(measure(text, device));
    report(rows, files);
  }

  std::vector<std::string> cases(bool gpu = false) const {
    if (!case_texts.empty()) return case_texts;
    const std::string name = !set.empty()                 ? set
                             : what == "decode"           ? "decode"
                             : what == "context-parallel" ? "cula"
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

  Row measure(const std::string& text, const DeviceFacts& device) {
    check::Inputs inputs = make_inputs(text);
    if (what == "decode") return measure_decode(text, inputs, device);
    if (what == "context-parallel") return measure_context_parallel(text, inputs, device);
    if (what == "intra") return measure_intra(text, inputs, device);
    return measure_forward(text, inputs, device, /*outputs=*/what == "forward");
  }

  Timing time_plan(check::Inputs& inputs, const DeviceFacts& device, const PlanOptions& options,
                   Plan* plan) {
    check::want_final_state(&inputs.problem);
    check::Outputs outputs = check::make_outputs(&inputs.problem, inputs.problem.v.dtype);
    throw_if_error(make_plan(inputs.problem, inputs.cu_seqlens, device, options, plan));
    io::Buffer workspace(plan->workspace_bytes);
    Tensors tensors = inputs.tensors();
    outputs.attach(&tensors);
    return time_calls(
        [&] { throw_if_error(run(*plan, tensors, workspace.data(), workspace.size())); },
        kMinSeconds);
  }

  void run_gpu(const DeviceFacts& device) {
    const std::vector<std::string> texts = cases(/*gpu=*/true);
    for (const std::string& text : texts) case_options(text);
    BenchFiles files(json_path, csv_path);
    GpuBench bench(device);
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
    const auto table = what == "context-parallel" ? segments_table(rows, bench.copy_rate())
                                                  : gpu_table(rows, bench.copy_rate());
    files.finish(fmt::format("{}\ncopy: {:.0f} GB/s read and written\n\n", device.name,
                             1e-9 * bench.copy_rate()),
                 gpu_json(rows, device, bench.copy_rate()), table);
  }

  static std::vector<std::vector<std::string>> gpu_table(const std::vector<GpuRow>& rows,
                                                         double copy_rate) {
    std::vector<std::vector<std::string>> table = {
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

  /// One row a case from its two, without segments and with them. The roofline is what a copy of
  /// the same bytes would take.
  static std::vector<std::vector<std::string>> segments_table(const std::vector<GpuRow>& rows,
                                                              double copy_rate) {
    std::vector<std::vector<std::string>> table = {
        {"case", "segments", "off", "on", "speedup", "% of roofline"}};
    for (std::size_t i = 0; i + 1 < rows.size(); i += 2) {
      const GpuRow &off = rows[i], &on = rows[i + 1];
      table.push_back({on.name, on.segments ? cat(on.segments) : "declined",
                       format_seconds(off.timing.median), format_seconds(on.timing.median),
                       fmt::format("{:.2f}x", off.timing.median / on.timing.median),
                       fmt::format("{:.0f}", 100 * on.bytes / on.timing.median / copy_rate)});
    }
    return table;
  }

  std::string gpu_json(const std::vector<GpuRow>& rows, const DeviceFacts& device,
                       double copy_rate) const {
    nlohmann::ordered_json report = {{"what", what},
                                     {"device", device.name},
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

  static double tokens_of(const Problem& p) { return static_cast<double>(p.batch * p.num_tokens); }

  Row measure_forward(const std::string& text, check::Inputs& inputs, const DeviceFacts& device,
                      bool outputs) {
    Row row;
    Plan plan;
    row.name = text;
    const Problem& p = inputs.problem;
    row.tokens = tokens_of(p);
    const double heads = static_cast<double>(p.num_value_heads);
    if (outputs) {
      row.timing = time_plan(inputs, device, schedule.plan_options(), &plan);
      row.multiply_adds = row.tokens * heads * multiply_adds(p);
    } else {  // delta-h: states of one segment a sequence, without outputs
      row.timing = time_states(inputs, device, &plan);
      row.multiply_adds = row.tokens * heads * 2 * static_cast<double>(p.key_dim * p.value_dim);
    }
    implementation_ = plan.implementation;
    threads_ = plan.num_threads;
    return row;
  }

  /// The state recurrence alone: B of each whole sequence.
  Timing time_states(check::Inputs& inputs, const DeviceFacts& device, Plan* plan) {
    const Problem& p = inputs.problem;
    throw_if_error(make_plan(p, inputs.cu_seqlens, device, schedule.plan_options(), plan));
    io::Buffer scratch(blocked::scratch_bytes(p, plan->num_threads));
    const std::size_t states = static_cast<std::size_t>(p.num_sequences * p.num_value_heads);
    io::Buffer B(states * static_cast<std::size_t>(p.key_dim * p.value_dim) * sizeof(float));
    const Tensors tensors = inputs.tensors();
    const stage::Call call{p, tensors, stage::Sequences(p, plan->cu_seqlens, nullptr),
                           plan->num_threads, scratch.data()};
    const blocked::Kernels& kernels = kernels_named(plan->implementation);
    auto task = [&](int64_t idx, int32_t slot) {
      const cpu::FloatMode mode;
      blocked::Pass pass;
      const int64_t n = idx / p.num_value_heads;
      pass.head = idx % p.num_value_heads;
      pass.begin = call.sequences.begin(n);
      pass.end = call.sequences.end(n);
      pass.num_columns = pass.last_column = p.value_dim;
      pass.state_out = blocked::dense_ref(p, B.as<float>(), n, pass.head, p.value_dim);
      if (pass.begin < pass.end)
        pass.v = blocked::row_source(p, p.v, tensors.v, pass.begin, pass.head);
      blocked::run_pass(kernels, call, pass, blocked::thread_scratch(call, slot));
    };
    return time_calls(
        [&] {
          throw_if_error(parallel_tasks(static_cast<int64_t>(states), plan->num_threads, task));
        },
        kMinSeconds);
  }

  /// Gates, norms and in-chunk scores alone (prepare() of the blocked backend).
  Row measure_intra(const std::string& text, check::Inputs& inputs, const DeviceFacts& device) {
    Row row;
    Plan plan;
    row.name = text;
    const Problem& p = inputs.problem;
    row.tokens = tokens_of(p);
    throw_if_error(make_plan(p, inputs.cu_seqlens, device, schedule.plan_options(), &plan));
    io::Buffer scratch(blocked::scratch_bytes(p, plan.num_threads));
    const Tensors tensors = inputs.tensors();
    const stage::Call call{p, tensors, stage::Sequences(p, plan.cu_seqlens, nullptr),
                           plan.num_threads, scratch.data()};
    const blocked::Kernels& kernels = kernels_named(plan.implementation);
    auto task = [&](int64_t idx, int32_t slot) {
      const cpu::FloatMode mode;
      const int64_t n = idx / p.num_value_heads;
      for (int64_t t = call.sequences.begin(n); t < call.sequences.end(n);
           t += blocked::kGroupTokens) {
        blocked::PrepareArgs args = blocked::prepare_args(call, t, idx % p.num_value_heads);
        args.num_tokens =
            static_cast<int>(std::min<int64_t>(blocked::kGroupTokens, call.sequences.end(n) - t));
        kernels.prepare(args, *blocked::thread_scratch(call, slot).group);
      }
    };
    row.timing = time_calls(
        [&] {
          throw_if_error(
              parallel_tasks(p.num_sequences * p.num_value_heads, plan.num_threads, task));
        },
        kMinSeconds);
    implementation_ = plan.implementation;
    threads_ = plan.num_threads;
    return row;
  }

  Row measure_decode(const std::string& text, check::Inputs& inputs, const DeviceFacts& device) {
    Problem& p = inputs.problem;
    check::Outputs outputs = check::make_outputs(&p, p.v.dtype);
    p.operation = Operation::kDecode;
    StateDesc pool;
    pool.num_slots = p.num_sequences;
    pool.tensor =
        contiguous(DType::kFloat32, {p.num_sequences, p.num_value_heads, p.key_dim, p.value_dim});
    p.initial_state = pool;
    const auto states =
        static_cast<std::size_t>(p.num_sequences * p.num_value_heads * p.key_dim * p.value_dim);
    inputs.initial_state = io::Buffer(states * sizeof(float));
    inputs.initial_state.fill(0);
    Plan plan;
    throw_if_error(make_plan(p, inputs.cu_seqlens, device, schedule.plan_options(), &plan));
    io::Buffer workspace(plan.workspace_bytes);
    Tensors tensors = inputs.tensors();
    outputs.attach(&tensors);
    Row row;
    row.name = text;
    row.tokens = tokens_of(p);
    row.bytes = 2.0 * static_cast<double>(inputs.initial_state.size());
    row.timing =
        time_calls([&] { throw_if_error(run(plan, tensors, workspace.data(), workspace.size())); },
                   kMinSeconds);
    implementation_ = plan.implementation;
    threads_ = plan.num_threads;
    return row;
  }

  /// The same inputs with segments off and on.
  Row measure_context_parallel(const std::string& text, check::Inputs& inputs,
                               const DeviceFacts& device) {
    PlanOptions options = schedule.plan_options();
    PlanOptions off = options;
    off.context_parallel = SegmentPolicy::kOff;
    if (options.context_parallel == SegmentPolicy::kAuto)
      parse_context_parallel("cula", &options);  // auto is always off on a CPU
    Plan plan;
    Row row;
    row.name = text;
    row.tokens = tokens_of(inputs.problem);
    const Timing serial = time_plan(inputs, device, off, &plan);
    row.timing = time_plan(inputs, device, options, &plan);
    row.multiply_adds = row.tokens * static_cast<double>(inputs.problem.num_value_heads) *
                        multiply_adds(inputs.problem);
    row.extra = {{"segments", cat(plan.segments.size())},
                 {"off", format_seconds(serial.median)},
                 {"on / off", fmt::format("{:.2f}", row.timing.median / serial.median)}};
    implementation_ = plan.implementation;
    threads_ = plan.num_threads;
    return row;
  }

  void report(const std::vector<Row>& rows, BenchFiles& files) const {
    MachineRates rates;
    rates.fma_per_second = measure_fma_rate(kernels_named(implementation_), threads_);
    if (what == "decode") rates.bytes_per_second = measure_memory_rate(threads_);
    const auto table = make_table(rows, rates);
    std::string text = fmt::format("{}, {} threads, {}\n", implementation_, threads_, cpu_model());
    if (what == "decode")
      text += fmt::format("measured memory rate (read and write in place): {:.1f} GB/s\n\n",
                          rates.bytes_per_second * 1e-9);
    else
      text +=
          fmt::format("measured peak fp32 rate: {:.1f} GFLOP/s\n\n", 2e-9 * rates.fma_per_second);
    files.finish(text, make_json(rows, rates), table);
  }

  std::vector<std::vector<std::string>> make_table(const std::vector<Row>& rows,
                                                   const MachineRates& rates) const {
    std::vector<std::vector<std::string>> table = {{"case", "median", "spread", "tokens/s"}};
    const bool compute = rows.front().multiply_adds > 0, memory = rows.front().bytes > 0;
    if (compute) table[0].insert(table[0].end(), {"GFLOP/s", "% of peak"});
    if (memory) table[0].insert(table[0].end(), {"GB/s", "% of memory"});
    for (const auto& [name, value] : rows.front().extra) table[0].push_back(name);
    for (const Row& row : rows) {
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

  std::string make_json(const std::vector<Row>& rows, const MachineRates& rates) const {
    nlohmann::ordered_json report = {{"what", what},
                                     {"implementation", implementation_},
                                     {"threads", threads_},
                                     {"cpu", cpu_model()},
                                     {"version", KDA_VERSION_STRING},
                                     {"peak_fma_per_second", rates.fma_per_second},
                                     {"memory_bytes_per_second", rates.bytes_per_second},
                                     {"cases", nlohmann::ordered_json::array()}};
    for (const Row& row : rows) {
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

 private:
  std::string implementation_;
  int32_t threads_ = 1;
};

}  // namespace

void add_bench(CLI::App& app) {
  auto* sub = app.add_subcommand("bench", "Time the operation or one of its stages");
  auto c = std::make_shared<BenchCommand>();
  add_choice(*sub, "what", &c->what,
             {"forward", "decode", "intra", "recompute-wu", "delta-h", "context-parallel"},
             "What to time")
      ->required();
  auto* set = add_choice(*sub, "--set", &c->set, BenchCommand::set_names(),
                         "A named set of cases (bench/cases)");
  const auto add_case = [c](const std::string& text) {
    c->case_texts.push_back(text);
    return std::string();
  };
  add_values(*sub, "--case", "FLAGS", add_case, "One case as flags of kda gen; may be repeated")
      ->excludes(set);
  add_whole<int64_t>(*sub, "--group-size", &c->group_size, 1, 64,
                     "Value heads a q/k head, in every case");
  c->schedule.add_to(*sub);
  add_path(*sub, "--json", &c->json_path, "Also write the rows to this file");
  add_path(*sub, "--csv", &c->csv_path, "Also write the table to this file");
  sub->footer(cat(
      R"(forward: the whole operation; intra: gates, norms, in-chunk scores; delta-h: the state
recurrence without outputs; context-parallel: segments on against off; decode: bandwidth.
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
