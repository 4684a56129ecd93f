// SPDX-License-Identifier: Apache-2.0
// kda check: run, then compare with the float64 oracle.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "check/compare.hpp"
#include "tools/kda/commands.hpp"
#include "tools/kda/execute.hpp"
#include "tools/kda/flags.hpp"
#include "tools/kda/options.hpp"
#include "tools/kda/print.hpp"
#include "tools/kda/report.hpp"

namespace kda::tools {
namespace {

/// Errors over heads, a row an output or gradient, and what overflows below.
class ErrorTable {
 public:
  explicit ErrorTable(std::vector<std::string> names) : rows_{std::move(names)} {
    for (const char* column :
         {"median error", "largest error", "worst error", "tolerance", "worst at", "verdict"})
      rows_.front().emplace_back(column);
  }

  void add(std::vector<std::string> row, const std::vector<check::HeadError>& errors) {
    const check::HeadError* worst = check::worst_error(errors);
    if (!worst) return;
    if (worst->overflow != 0) note_overflow(row.front(), *worst);
    for (const double error : {check::median_error(errors), check::largest_error(errors),
                               worst->error, worst->tolerance})
      row.push_back(format_error(error));
    row.push_back(fmt::format("sequence {}, head {}", worst->sequence, worst->head));
    row.emplace_back(worst->within() ? "within" : "OUTSIDE");
    rows_.push_back(std::move(row));
  }

  std::string text() const { return format_table(rows_) + notes_; }

 private:
  void note_overflow(const std::string& name, const check::HeadError& head) {
    notes_ += fmt::format(
        "{} overflows: the reference of sequence {}, head {} {}, there is nothing to compare\n",
        name, head.sequence, head.head,
        std::isfinite(head.overflow)
            ? fmt::format("reaches {:.3g}, which its type cannot hold", head.overflow)
            : std::string("leaves the range of float64"));
  }

  std::vector<std::vector<std::string>> rows_;
  std::string notes_;
};

struct CheckCommand {
  RunFlags flags;
  bool json = false, backward = false;

  int operator()() {
    check::GradientBuffers gradients;
    check::Inputs inputs = flags.load(backward ? &gradients : nullptr);
    if (const std::string where = check::describe_nan(inputs); !where.empty())
      throw Error(invalid(flags.input,
                          ": NaN among the inputs, there is nothing to compare with: ", where));
    if (backward) return check_backward(inputs, &gradients);
    const Execution execution =
        execute(&inputs, flags.output_dtype(inputs.problem), flags.schedule.device_facts(),
                flags.schedule.plan_options());
    check::CompareOptions options;
    options.marginal = check::is_marginal(inputs);
    options.operands = check::operands_of(execution.plan);
    options.num_threads = execution.plan.num_threads;
    Progress progress("oracle");
    options.progress = [&](int64_t done, int64_t total) { progress.update(done, total); };
    const check::Comparison result =
        check::compare(inputs, inputs.problem, execution.outputs, options);
    const bool good = result.within();
    print_report(json ? to_json(execution, result) : to_table(inputs.problem, execution, result));
    return good ? kExitGood : kExitOutsideTolerance;
  }

  int check_backward(const check::Inputs& inputs, check::GradientBuffers* gradients) const {
    const BackwardExecution execution = execute_backward(inputs, flags.schedule.device_facts(),
                                                         flags.schedule.plan_options(), gradients);
    Progress progress("oracle");
    check::CompareOptions options;
    options.marginal = check::is_marginal(inputs);
    options.operands = check::operands_of(execution.plan.plan);
    options.num_threads = execution.plan.plan.num_threads;
    options.progress = [&](int64_t done, int64_t total) { progress.update(done, total); };
    const check::GradientComparison result = check::compare_gradients(inputs, *gradients, options);
    ErrorTable table({"gradient"});
    nlohmann::ordered_json report = {{"implementation", execution.plan.plan.implementation},
                                     {"seconds", execution.seconds},
                                     {"within", result.within()}};
    for (const auto& [name, errors] : result.errors) {
      report[name] = summary(errors);
      table.add({name}, errors);
    }
    print_report(json ? json_text(report)
                      : fmt::format("{} in {}, against the adjoint of the float64 recurrence\n{}",
                                    execution.plan.plan.implementation,
                                    format_seconds(execution.seconds), table.text()));
    return result.within() ? kExitGood : kExitOutsideTolerance;
  }

  static std::string to_table(const Problem& p, const Execution& execution,
                              const check::Comparison& result) {
    ErrorTable table({"output", "dtype"});
    table.add({"o", dtype_name(p.o.dtype)}, result.o);
    if (p.final_state)
      table.add({"final_state", dtype_name(p.final_state->tensor.dtype)}, result.final_state);
    return fmt::format("{} in {}, against the float64 recurrence\n{}",
                       execution.plan.implementation, format_seconds(execution.seconds),
                       table.text());
  }

  static nlohmann::ordered_json summary(const std::vector<check::HeadError>& errors) {
    const check::HeadError* worst = check::worst_error(errors);
    if (!worst) return nullptr;
    nlohmann::ordered_json heads = nlohmann::ordered_json::array();
    for (const check::HeadError& entry : errors) {
      heads.push_back({{"sequence", entry.sequence},
                       {"head", entry.head},
                       {"error", entry.error},
                       {"tolerance", entry.tolerance}});
      if (entry.overflow != 0) heads.back()["overflow"] = entry.overflow;
    }
    return {{"median", check::median_error(errors)},
            {"largest", check::largest_error(errors)},
            {"worst", worst->error},
            {"tolerance", worst->tolerance},
            {"heads", heads}};
  }

  static std::string to_json(const Execution& execution, const check::Comparison& result) {
    return json_text({{"implementation", execution.plan.implementation},
                      {"seconds", execution.seconds},
                      {"within", result.within()},
                      {"o", summary(result.o)},
                      {"final_state", summary(result.final_state)}});
  }
};

}  // namespace

void add_check(CLI::App& app, ExitSlot& exit_code) {
  auto* sub = app.add_subcommand("check", "Run a file and compare with the float64 oracle");
  auto command = std::make_shared<CheckCommand>();
  command->flags.add_to(*sub);
  add_switch(*sub, "--json", &command->json, "Report as JSON");
  add_switch(*sub, "--backward", &command->backward,
             "Check the gradients, from do and d_final_state of the file");
  sub->footer(R"(Errors are |x - ref| / max(|ref|, 1e-3 magnitude) per sequence and head
(docs/accuracy.md), each with a tolerance of its own; the worst is nearest to it, or farthest past it.
Exit code 1 if one is outside its tolerance or a result overflows its type, 2 if an input has a NaN.
Examples:
  kda check data/kda_layer.safetensors
  kda check x.safetensors --out-dtype fp32 --backend avx2)");
  sub->callback([command, &exit_code] { exit_code = (*command)(); });
}

}  // namespace kda::tools
