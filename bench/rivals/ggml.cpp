// SPDX-License-Identifier: Apache-2.0
// kda_ggml [--json F] [--busy N]: decode of a few heads beside ggml's own operation,
// ggml_gated_delta_net, on the same inputs. The two take turns in blocks: threads of one that still
// poll would slow the other.
#include <fmt/core.h>
#include <ggml-cpu.h>
#include <ggml.h>
#include <sched.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <thread>

#include "check/generate.hpp"
#include "tools/kda/execute.hpp"
#include "tools/kda/print.hpp"
#include "tools/kda/report.hpp"

namespace kda::rivals {
namespace {

constexpr int64_t kDim = 128;
/// Threads of either library are asleep after this.
constexpr auto kRest = std::chrono::milliseconds(20);
constexpr double kUntimedSeconds = 0.002;

/// Keeps this process to two of its cores, where `count` others compute as long as it lives.
void share_two_cores(int count) {
  cpu_set_t all, two;
  CPU_ZERO(&two);
  if (sched_getaffinity(0, sizeof all, &all) != 0)
    throw std::runtime_error("no list of this process's cores");
  for (std::size_t core = 0; core < CPU_SETSIZE && CPU_COUNT(&two) < 2; ++core)
    if (CPU_ISSET(core, &all)) CPU_SET(core, &two);
  if (sched_setaffinity(0, sizeof two, &two) != 0)
    throw std::runtime_error("this process cannot choose cores");
  for (int i = 0; i < count; ++i) {
    const pid_t child = fork();
    if (child < 0) throw std::runtime_error("no process to compute beside this one");
    if (child > 0) continue;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (volatile bool always = true; always;) continue;
  }
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// A token a sequence: fp32, log gates, plain beta, states of its own. q and k are as they are
/// read.
check::Inputs make_inputs(int64_t batch, int64_t heads) {
  check::GenerateOptions options;
  options.batch = batch;
  options.num_tokens = 1;
  options.num_heads = options.num_value_heads = heads;
  options.dtype = DType::kFloat32;
  options.regime = check::Regime::kLog;
  check::Inputs inputs = check::generate(options);
  inputs.problem.qk_l2norm = false;
  inputs.problem.beta_mode = BetaMode::kPlain;
  for (io::Buffer* rows : {&inputs.q, &inputs.k})
    for (int64_t i = 0; i < batch * heads * kDim; ++i) rows->as<float>()[i] *= 0.1f;
  tools::make_decode(&inputs);
  return inputs;
}

class Libkda {
 public:
  Libkda(check::Inputs& inputs, int32_t threads) : inputs_(inputs) {
    PlanOptions options;
    options.num_threads = threads;
    outputs_ = check::make_outputs(&inputs.problem, DType::kFloat32);
    throw_if_error(make_plan(inputs.problem, {}, cpu_facts(), options, &plan_));
    workspace_ = io::Buffer(plan_.workspace_bytes);
    tensors_ = inputs.tensors();
    outputs_.attach(&tensors_);
  }
  void call() { throw_if_error(run(plan_, tensors_, workspace_.data(), workspace_.size())); }
  const float* o() const { return outputs_.o.as<float>(); }
  /// S[k, v] of a sequence's head.
  float state(int64_t index, int64_t k, int64_t v) const {
    return inputs_.initial_state.as<float>()[(index * kDim + k) * kDim + v];
  }
  const std::string& implementation() const { return plan_.implementation; }

 private:
  check::Inputs& inputs_;
  check::Outputs outputs_;
  Plan plan_;
  io::Buffer workspace_;
  Tensors tensors_;
};

class Ggml {
 public:
  Ggml(const check::Inputs& inputs, int32_t threads)
      : heads_(inputs.problem.num_value_heads), batch_(inputs.problem.batch) {
    const auto state_bytes =
        static_cast<std::size_t>(batch_ * heads_ * kDim * kDim) * sizeof(float);
    context_.reset(ggml_init({3 * state_bytes + (std::size_t{1} << 24), nullptr, false}));
    ggml_tensor* state =
        ggml_new_tensor_4d(context_.get(), GGML_TYPE_F32, kDim, kDim, heads_, batch_);
    std::memset(state->data, 0, state_bytes);
    result_ = ggml_gated_delta_net(context_.get(), tensor(kDim, inputs.q), tensor(kDim, inputs.k),
                                   tensor(kDim, inputs.v), tensor(kDim, inputs.g),
                                   tensor(1, inputs.beta), state, 1);
    graph_ = ggml_new_graph(context_.get());
    ggml_build_forward_expand(graph_, result_);
    ggml_threadpool_params params = ggml_threadpool_params_default(threads);
    pool_.reset(ggml_threadpool_new(&params));
    plan_ = ggml_graph_plan(graph_, threads, pool_.get());
    work_.resize(plan_.work_size + 64);
    plan_.work_data = work_.data();
  }
  void call() { ggml_graph_compute(graph_, &plan_); }
  const float* o() const { return static_cast<const float*>(result_->data); }
  float state(int64_t index, int64_t k, int64_t v) const {
    return o()[batch_ * heads_ * kDim + (index * kDim + v) * kDim + k];
  }

 private:
  template <auto kFree>
  struct Free {
    template <class T>
    void operator()(T* object) const {
      kFree(object);
    }
  };

  ggml_tensor* tensor(int64_t width, const io::Buffer& values) {
    ggml_tensor* made = ggml_new_tensor_4d(context_.get(), GGML_TYPE_F32, width, heads_, 1, batch_);
    std::memcpy(made->data, values.data(), ggml_nbytes(made));
    return made;
  }

  int64_t heads_, batch_;
  std::unique_ptr<ggml_context, Free<ggml_free>> context_;
  std::unique_ptr<ggml_threadpool, Free<ggml_threadpool_free>> pool_;
  ggml_tensor* result_ = nullptr;
  ggml_cgraph* graph_ = nullptr;
  ggml_cplan plan_{};
  std::vector<uint8_t> work_;
};

/// Relative L2 between the outputs and states after the first call of each, from states of zeros.
double difference(const Libkda& ours, const Ggml& theirs, int64_t heads) {
  double error = 0, size = 0;
  const auto add = [&](double a, double b) { error += (a - b) * (a - b), size += b * b; };
  for (int64_t i = 0; i < heads * kDim; ++i) add(ours.o()[i], theirs.o()[i]);
  for (int64_t i = 0; i < heads * kDim * kDim; ++i) {
    const int64_t head = i / (kDim * kDim), k = i / kDim % kDim, v = i % kDim;
    add(ours.state(head, k, v), theirs.state(head, k, v));
  }
  return std::sqrt(error / size);
}

template <class Side>
double block(Side& side, double seconds) {
  std::this_thread::sleep_for(kRest);
  tools::time_calls([&] { side.call(); }, kUntimedSeconds, 1);
  return tools::time_calls([&] { side.call(); }, seconds).median;
}

nlohmann::ordered_json measure(int64_t batch, int64_t heads, int32_t threads, int blocks) {
  constexpr double kBlockSeconds = 0.02;
  check::Inputs inputs = make_inputs(batch, heads);
  Libkda ours(inputs, threads);
  Ggml theirs(inputs, threads);
  ours.call(), theirs.call();
  const double apart = difference(ours, theirs, batch * heads);
  std::vector<double> of_ours, of_theirs;
  for (int i = 0; i < blocks; ++i) {
    of_ours.push_back(block(ours, kBlockSeconds));
    of_theirs.push_back(block(theirs, kBlockSeconds));
  }
  return {{"implementation", ours.implementation()},
          {"batch", batch},
          {"heads", heads},
          {"threads", threads},
          {"median_s", median(of_ours)},
          {"fastest_s", *std::min_element(of_ours.begin(), of_ours.end())},
          {"ggml_median_s", median(of_theirs)},
          {"ggml_fastest_s", *std::min_element(of_theirs.begin(), of_theirs.end())},
          {"of_ggml", median(of_ours) / median(of_theirs)},
          {"difference", apart}};
}

}  // namespace
}  // namespace kda::rivals

int main(int argc, char** argv) {
  using namespace kda;
  std::string json_path;
  int blocks = 15, busy = 0;
  CLI::App app{"Decode of a few heads beside ggml's own operation, on the same inputs in one run"};
  app.add_option("--json", json_path);
  app.add_option("--blocks", blocks, "Turns of each library in a row")->capture_default_str();
  app.add_option("--busy", busy, "Processes that compute on the same two cores")
      ->check(CLI::Range(0, 64))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  double load = 0;
  getloadavg(&load, 1);
  if (busy > 0) rivals::share_two_cores(busy);
  nlohmann::ordered_json json = {{"what", "decode beside ggml"}};
  json.update(tools::provenance(tools::command_text(argc, argv)));
  json.update({{"ggml", ggml_version()},
               {"blocks", blocks},
               {"busy", busy},
               {"load", load},
               {"rows", nlohmann::ordered_json::array()}});
  std::vector<std::vector<std::string>> table = {
      {"batch", "heads", "threads", "libkda", "ggml", "libkda / ggml", "fastest", "difference"}};
  for (const int64_t batch : {1, 8})
    for (const int64_t heads : {1, 4, 32})
      for (const int32_t threads : {1, 2}) {
        const nlohmann::ordered_json row = rivals::measure(batch, heads, threads, blocks);
        const auto number = [&](const char* name) { return row[name].get<double>(); };
        table.push_back({fmt::to_string(batch), fmt::to_string(heads), fmt::to_string(threads),
                         tools::format_seconds(number("median_s")),
                         tools::format_seconds(number("ggml_median_s")),
                         fmt::format("{:.2f}", number("of_ggml")),
                         fmt::format("{:.2f}", number("fastest_s") / number("ggml_fastest_s")),
                         tools::format_error(number("difference"))});
        json["rows"].push_back(row);
      }
  fmt::print("A token a sequence, K = V = 128, fp32; ggml {}\n\n{}", ggml_version(),
             tools::format_table(table));
  if (!json_path.empty()) io::write_file(json_path, json.dump(2) + "\n");
}
