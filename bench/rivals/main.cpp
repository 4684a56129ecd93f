// SPDX-License-Identifier: Apache-2.0
// kda_rivals [--threads N] [--tokens T] [--json F]: the blocked backend beside the other methods,
// on the same inputs in one run; every method's outputs are compared first.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "check/generate.hpp"
#include "core/thread_pool.hpp"
#include "cpu/blocked/kernels.hpp"
#include "rivals/methods.hpp"
#include "tools/kda/execute.hpp"
#include "tools/kda/print.hpp"
#include "tools/kda/report.hpp"

namespace kda::rivals {
namespace {

constexpr int64_t kHeads = 4;

struct Row {
  std::string method, isa;
  tools::Timing timing;
  double difference;  ///< relative L2 from the oracle's outputs
};

class Comparison {
 public:
  Comparison(int64_t tokens, int32_t threads) : tokens_(tokens), threads_(threads) {
    check::GenerateOptions options;
    options.num_tokens = tokens;
    options.num_heads = options.num_value_heads = kHeads;
    options.dtype = DType::kFloat32;
    options.regime = check::Regime::kLog;
    inputs_ = check::generate(options);
    // The rivals have neither norms nor a sigmoid: do both beforehand, for everyone.
    Problem& p = inputs_.problem;
    p.qk_l2norm = false;
    p.beta_mode = BetaMode::kPlain;
    for (io::Buffer* rows : {&inputs_.q, &inputs_.k}) normalize(rows->as<float>());
    for (int64_t i = 0; i < tokens * kHeads; ++i) {
      float& beta = inputs_.beta.as<float>()[i];
      beta = 1 / (1 + std::exp(-beta));
    }
    truth_ = run_library("oracle", nullptr);
  }

  void add_library(const std::string& isa) {
    Row row{"libkda, chunks of 8", isa, {}, 0};
    row.difference = distance(run_library("blocked." + isa, &row.timing));
    rows_.push_back(row);
  }

  void add_method(const char* name, const char* isa, void (*method)(const Head&)) {
    std::vector<float> o(truth_.size());
    io::Buffer states(kHeads * kDim * (kDim + 1) * sizeof(float));
    auto task = [&](int64_t head, int32_t) { method(make_head(head, o, states)); };
    Row row{name, isa, {}, 0};
    row.timing = tools::time_calls([&] {
      std::memset(states.data(), 0, states.size());
      throw_if_error(parallel_tasks(kHeads, threads_, task));
    });
    row.difference = distance(o);
    rows_.push_back(row);
  }

  void report(const std::string& json_path, const std::string& command) const {
    const double macs = static_cast<double>(tokens_ * kHeads) * 59477;
    nlohmann::ordered_json json = {{"what", "rivals"}};
    json.update(tools::provenance(command));
    json.update({{"tokens", tokens_},
                 {"heads", kHeads},
                 {"threads", threads_},
                 {"rows", nlohmann::ordered_json::array()}});
    std::vector<std::vector<std::string>> table = {
        {"method", "instructions", "median", "ns/token/head", "% of peak", "libkda is", "error"}};
    for (const Row& row : rows_) {
      const double peak = peak_of(row.isa);
      const double per_token = row.timing.median / static_cast<double>(tokens_ * kHeads);
      const double ratio = row.timing.median / library_median(row.isa);
      table.push_back({row.method, row.isa, tools::format_seconds(row.timing.median),
                       fmt::format("{:.0f}", per_token * 1e9 * threads_),
                       fmt::format("{:.1f}", 100 * macs / row.timing.median / peak),
                       fmt::format("{:.2f}x", ratio), tools::format_error(row.difference)});
      json["rows"].push_back({{"method", row.method},
                              {"isa", row.isa},
                              {"median_s", row.timing.median},
                              {"peak_percent", 100 * macs / row.timing.median / peak},
                              {"libkda_speedup", ratio},
                              {"error", row.difference}});
    }
    fmt::print(
        "T = {}, H = {}, K = V = 128, fp32, log gates, {} threads; % of this instruction "
        "set's measured peak\n\n{}",
        tokens_, kHeads, threads_, tools::format_table(table));
    if (!json_path.empty()) io::write_file(json_path, json.dump(2) + "\n");
  }

  void measure_peak(const cpu::blocked::Kernels& kernels) {
    peaks_.emplace_back(kernels.name, tools::measure_fma_rate(kernels, threads_));
  }

 private:
  void normalize(float* rows) const {
    for (int64_t r = 0; r < tokens_ * kHeads; ++r, rows += kDim) {
      double sum = 1e-6;
      for (int d = 0; d < kDim; ++d) sum += static_cast<double>(rows[d]) * rows[d];
      for (int d = 0; d < kDim; ++d) rows[d] /= static_cast<float>(std::sqrt(sum));
    }
  }

  std::vector<float> run_library(const std::string& backend, tools::Timing* timing) {
    PlanOptions options;
    options.backend = backend;
    options.num_threads = threads_;
    Problem p = inputs_.problem;
    check::Outputs outputs = check::make_outputs(&p, DType::kFloat32);
    Plan plan;
    throw_if_error(make_plan(p, {}, cpu_facts(), options, &plan));
    io::Buffer workspace(plan.workspace_bytes);
    Tensors tensors = inputs_.tensors();
    outputs.attach(&tensors);
    const auto call = [&] {
      throw_if_error(run(plan, tensors, workspace.data(), workspace.size()));
    };
    timing ? static_cast<void>(*timing = tools::time_calls(call)) : call();
    const auto* o = outputs.o.as<float>();
    return {o, o + tokens_ * kHeads * kDim};
  }

  Head make_head(int64_t head, std::vector<float>& o, io::Buffer& states) const {
    const int64_t at = head * kDim;
    return {inputs_.q.as<float>() + at,
            inputs_.k.as<float>() + at,
            inputs_.v.as<float>() + at,
            inputs_.g.as<float>() + at,
            inputs_.beta.as<float>() + head,
            o.data() + at,
            kHeads * kDim,
            kHeads,
            tokens_,
            static_cast<float>(effective_scale(inputs_.problem)),
            kDim,
            states.as<float>() + head * kDim * (kDim + 1),
            states.as<float>() + head * kDim * (kDim + 1) + kDim * kDim};
  }

  double distance(const std::vector<float>& o) const {
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < o.size(); ++i) {
      error += std::pow(static_cast<double>(o[i]) - truth_[i], 2);
      norm += std::pow(static_cast<double>(truth_[i]), 2);
    }
    return std::sqrt(error / norm);
  }

  double library_median(const std::string& isa) const {
    for (const Row& row : rows_)
      if (row.isa == isa && row.method.rfind("libkda", 0) == 0) return row.timing.median;
    return 1;
  }

  double peak_of(const std::string& isa) const {
    for (const auto& [name, peak] : peaks_)
      if (name == isa) return peak;
    return 1;
  }

  int64_t tokens_;
  int32_t threads_;
  check::Inputs inputs_;
  std::vector<float> truth_;
  std::vector<Row> rows_;
  std::vector<std::pair<std::string, double>> peaks_;
};

}  // namespace
}  // namespace kda::rivals

int main(int argc, char** argv) {
  using namespace kda;
  int64_t tokens = 4096;
  int32_t threads = 2;
  std::string json;
  CLI::App app{"The blocked CPU backend beside other methods, on the same inputs in one run"};
  app.add_option("--tokens", tokens)->capture_default_str();
  app.add_option("--threads", threads)->capture_default_str();
  app.add_option("--json", json);
  CLI11_PARSE(app, argc, argv);
  rivals::Comparison comparison(tokens, threads);
  const auto add = [&](const cpu::blocked::Kernels* kernels, bool runs, rivals::Methods methods) {
    if (!kernels || !runs) return;
    comparison.measure_peak(*kernels);
    comparison.add_library(kernels->name);
    comparison.add_method("fused token sweep", methods.isa, methods.fused_sweep);
    comparison.add_method("ggml: separate sweeps", methods.isa, methods.separate_sweeps);
  };
  add(cpu::blocked::avx512_kernels(), cpu::blocked::cpu_has_avx512(), rivals::avx512_methods());
  add(cpu::blocked::avx2_kernels(), cpu::blocked::cpu_has_avx2(), rivals::avx2_methods());
  add(cpu::blocked::portable_kernels(), true, rivals::portable_methods());
  comparison.report(json, tools::command_text(argc, argv));
}
