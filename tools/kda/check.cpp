// SPDX-License-Identifier: Apache-2.0
// kda check: run, then compare with the float64 oracle.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
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
    std::vector<std::vector<std::string>> rows = {
        {"gradient", "median error", "worst error", "tolerance", "worst at", "verdict"}};
    nlohmann::ordered_json report = {{"implementation", execution.plan.plan.implementation},
                                     {"seconds", execution.seconds},
                                     {"within", result.within()}};
    for (const auto& [name, errors] : result.errors) {
      const check::HeadError* worst = check::worst_error(errors);
      report[name] = summary(errors, worst);
      rows.push_back({name, format_error(check::median_error(errors)), format_error(worst->error),
                      format_error(worst->tolerance),
                      fmt::format("sequence {}, head {}", worst->sequence, worst->head),
                      worst->error <= worst->tolerance ? "within" : "OUTSIDE"});
    }
    print_report(json ? json_text(report)
                      : fmt::format("{} in {}, against the adjoint of the float64 recurrence\n{}",
                                    execution.plan.plan.implementation,
                                    format_seconds(execution.seconds), format_table(rows)));
    return result.within() ? kExitGood : kExitOutsideTolerance;
  }

  static std::string to_table(const Problem& p, const Execution& execution,
                              const check::Comparison& result) {
    std::vector<std::vector<std::string>> rows = {
        {"output", "dtype", "median error", "worst error", "tolerance", "worst at", "verdict"}};
    const auto add = [&](const char* name, DType dtype, const std::vector<check::HeadError>& errors,
                         const check::HeadError* worst) {
      if (!worst) return;
      rows.push_back({name, dtype_name(dtype), format_error(check::median_error(errors)),
                      format_error(worst->error), format_error(worst->tolerance),
                      fmt::format("sequence {}, head {}", worst->sequence, worst->head),
                      worst->error <= worst->tolerance ? "within" : "OUTSIDE"});
    };
    add("o", p.o.dtype, result.o, result.worst_o());
    if (p.final_state)
      add("final_state", p.final_state->tensor.dtype, result.final_state,
          result.worst_final_state());
    return fmt::format("{} in {}, against the float64 recurrence\n{}",
                       execution.plan.implementation, format_seconds(execution.seconds),
                       format_table(rows));
  }

  static nlohmann::ordered_json summary(const std::vector<check::HeadError>& errors,
                                        const check::HeadError* worst) {
    if (!worst) return nullptr;
    nlohmann::ordered_json heads = nlohmann::ordered_json::array();
    for (const check::HeadError& entry : errors)
      heads.push_back({{"sequence", entry.sequence},
                       {"head", entry.head},
                       {"error", entry.error},
                       {"tolerance", entry.tolerance}});
    return {{"median", check::median_error(errors)},
            {"worst", worst->error},
            {"tolerance", worst->tolerance},
            {"heads", heads}};
  }

  static std::string to_json(const Execution& execution, const check::Comparison& result) {
    return json_text({{"implementation", execution.plan.implementation},
                      {"seconds", execution.seconds},
                      {"within", result.within()},
                      {"o", summary(result.o, result.worst_o())},
                      {"final_state", summary(result.final_state, result.worst_final_state())}});
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
(docs/accuracy.md). Exit code 1 if one is outside its tolerance, 2 if an input has a NaN.
Examples:
  kda check data/kda_layer.safetensors
  kda check x.safetensors --out-dtype fp32 --backend avx2)");
  sub->callback([command, &exit_code] { exit_code = (*command)(); });
}

}  // namespace kda::tools
