// SPDX-License-Identifier: Apache-2.0
// kda inspect: how long each head remembers, and what the planner makes of it.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cpu/oracle/oracle.hpp"
#include "stage/segment_scan.hpp"
#include "tools/kda/commands.hpp"
#include "tools/kda/flags.hpp"
#include "tools/kda/options.hpp"
#include "tools/kda/print.hpp"
#include "tools/kda/report.hpp"
#include "tools/kda/svg.hpp"

namespace kda::tools {
namespace {

constexpr double kForgotten = 24 * 0.6931471805599453;  // 2^-24: nothing left in fp32
constexpr double kHalf = 0.6931471805599453;
constexpr double kForever = 1e9;  // tokens; longer memories are shown as this
constexpr std::size_t kMaxLines = 16;

/// Decay of one value head over the tokens of the file.
struct HeadMemory {
  std::vector<double> rate;  ///< [K] mean -log decay a token, ascending: slowest channel first
  double fastest_token = 0;  ///< most negative log decay of any token and channel
};

HeadMemory measure_head(const Problem& p, const Tensors& tensors, int64_t head) {
  HeadMemory memory;
  memory.rate.assign(static_cast<std::size_t>(p.key_dim), 0);
  const int64_t tokens = p.batch * p.num_tokens;
  for (int64_t token = 0; token < tokens; ++token) {
    const std::vector<double> g = cpu::oracle::log_decay(p, tensors, token, head);
    for (std::size_t d = 0; d < g.size(); ++d) {
      memory.rate[d] -= g[d] / static_cast<double>(tokens);
      memory.fastest_token = std::min(memory.fastest_token, g[d]);
    }
  }
  std::sort(memory.rate.begin(), memory.rate.end());
  return memory;
}

double quantile(const std::vector<double>& sorted, double share) {
  if (sorted.empty()) return 0;
  const auto last = static_cast<double>(sorted.size() - 1);
  return sorted[static_cast<std::size_t>(std::lround(share * last))];
}

double tokens_until(double log_decay, double rate) {
  return rate > 0 ? std::clamp(log_decay / rate, 1.0, kForever) : kForever;
}

std::string show_tokens(double tokens) {
  if (tokens >= kForever) return "never";
  return fmt::format("{:.0f}", tokens);
}

Chart memory_chart(const std::vector<HeadMemory>& heads) {
  Chart chart;
  chart.title = "How long each head remembers";
  chart.x_label = "channels, fastest first";
  chart.y_label = "tokens until half is forgotten";
  chart.x_first = "fastest";
  chart.x_last = "slowest";
  for (std::size_t h = 0; h < std::min(heads.size(), kMaxLines); ++h) {
    Series line{fmt::format("head {}", h), {}};
    for (auto rate = heads[h].rate.rbegin(); rate != heads[h].rate.rend(); ++rate)
      line.y.push_back(*rate > 0 ? std::clamp(kHalf / *rate, 0.01, kForever) : kForever);
    chart.series.push_back(std::move(line));
  }
  return chart;
}

struct InspectCommand {
  RunFlags flags;
  std::string plot;
  bool json = false;

  void operator()() const {
    std::optional<io::OutputFile> figure;
    if (!plot.empty()) figure.emplace(plot);
    const check::Inputs inputs = flags.load();
    const Problem& p = inputs.problem;
    const Tensors tensors = inputs.tensors();
    std::vector<HeadMemory> heads;
    Progress progress("heads");
    for (int64_t head = 0; head < p.num_value_heads; ++head) {
      heads.push_back(measure_head(p, tensors, head));
      progress.update(head + 1, p.num_value_heads);
    }
    std::string report = json ? to_json(inputs, heads) : to_text(inputs, heads);
    if (!figure) return print_report(report);
    figure->write(render_svg(memory_chart(heads)));
    figure->commit();
    if (!json) report += fmt::format("\nfigure: {}\n", figure->label());
    print_report(report, figure->is_stdout());
  }

  /// A GPU has no plan for fp64.
  Status plan_for(const check::Inputs& inputs, const DeviceFacts& device, Plan* plan) const {
    Status status =
        make_plan(inputs.problem, inputs.cu_seqlens, device, flags.schedule.plan_options(), plan);
    if (status.code() != StatusCode::kUnsupported) throw_if_error(status);
    return status;
  }

  std::string to_text(const check::Inputs& inputs, const std::vector<HeadMemory>& heads) const {
    const Problem& p = inputs.problem;
    std::string text =
        fmt::format("{}: T={} N={} H={} HV={} K={} V={}, gate {}, beta {}{}\n\n", flags.input,
                    p.num_tokens, p.num_sequences, p.num_heads, p.num_value_heads, p.key_dim,
                    p.value_dim, gate_mode_name(p.gate_mode), beta_mode_name(p.beta_mode),
                    p.qk_l2norm ? ", q/k L2 norm" : "");
    std::vector<std::vector<std::string>> rows = {
        {"head", "log decay a token: p10", "median", "p90", "fastest token", "half-life: median",
         "slowest", "forgotten (2^-24): median", "slowest"}};
    for (std::size_t h = 0; h < heads.size(); ++h) {
      const std::vector<double>& rate = heads[h].rate;
      const double median = quantile(rate, 0.5), slowest = quantile(rate, 0);
      rows.push_back(
          {fmt::format("{}", h), fmt::format("{:.4f}", -quantile(rate, 0.1)),
           fmt::format("{:.4f}", -median), fmt::format("{:.4f}", -quantile(rate, 0.9)),
           fmt::format("{:.1f}", heads[h].fastest_token), show_tokens(tokens_until(kHalf, median)),
           show_tokens(tokens_until(kHalf, slowest)), show_tokens(tokens_until(kForgotten, median)),
           show_tokens(tokens_until(kForgotten, slowest))});
    }
    text += format_table(rows) +
            "\nhalf-life, forgotten: tokens until 1/2, 2^-24 of a channel is left\n\nplanner\n";
    for (const DeviceFacts& device : {cpu_facts(), gpu_facts(132)}) {
      Plan plan;
      const Status status = plan_for(inputs, device, &plan);
      text += fmt::format("  {:<18} ", device.name);
      text += status.ok() ? fmt::format("context parallel {}{}\n", plan.segmented ? "on" : "off",
                                        plan.reasons.empty() ? "" : ": " + plan.reasons.front())
                          : status.message() + "\n";
    }
    return text +
           fmt::format("  {:<18} {}\n", "transition M",
                       stage::transition_norm_never_grows(p)
                           ? "may be dropped once its measured norm is small"
                           : "is kept to the end: its norm is not proved to shrink with these "
                             "options");
  }

  std::string to_json(const check::Inputs& inputs, const std::vector<HeadMemory>& heads) const {
    const Problem& p = inputs.problem;
    nlohmann::ordered_json report = {{"input", flags.input},
                                     {"num_tokens", p.num_tokens},
                                     {"num_value_heads", p.num_value_heads},
                                     {"gate", gate_mode_name(p.gate_mode)},
                                     {"heads", nlohmann::ordered_json::array()}};
    for (const HeadMemory& head : heads) {
      const double median = quantile(head.rate, 0.5), slowest = quantile(head.rate, 0);
      nlohmann::ordered_json& row = report["heads"].emplace_back();
      row["log_decay_p10"] = -quantile(head.rate, 0.1);
      row["log_decay_median"] = -median;
      row["log_decay_p90"] = -quantile(head.rate, 0.9);
      row["log_decay_slowest"] = -slowest;
      row["fastest_token"] = head.fastest_token;
      if (!std::isfinite(head.fastest_token)) row["fastest_token"] = "-inf";
      row["half_life_median"] = tokens_until(kHalf, median);
      row["half_life_slowest"] = tokens_until(kHalf, slowest);
      row["forgotten_median"] = tokens_until(kForgotten, median);
      row["forgotten_slowest"] = tokens_until(kForgotten, slowest);
    }
    report["transition_may_be_dropped"] = stage::transition_norm_never_grows(p);
    Plan plan;
    if (plan_for(inputs, gpu_facts(132), &plan).ok())
      report["plan"] = nlohmann::ordered_json::parse(plan.to_json());
    else
      report["plan"] = nullptr;
    return json_text(report);
  }
};

}  // namespace

void add_inspect(CLI::App& app) {
  auto* sub = app.add_subcommand("inspect", "How long each head remembers");
  auto command = std::make_shared<InspectCommand>();
  command->flags.add_to(*sub);
  add_path(*sub, "--plot", &command->plot, "Write a figure (SVG) to this file");
  add_switch(*sub, "--json", &command->json, "Report as JSON");
  sub->footer(
      cat(kOutputHelp, "\nExamples:\n  kda inspect data/kda_layer.safetensors --plot memory.svg"));
  sub->callback([command] { (*command)(); });
}

}  // namespace kda::tools
