// SPDX-License-Identifier: Apache-2.0
#include "tools/kda/bench_cpu.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <tuple>

#include "core/text.hpp"
#include "core/thread_pool.hpp"
#include "cpu/blocked/blocked.hpp"
#include "cpu/blocked/pass.hpp"
#include "cpu/float_mode.hpp"
#include "tools/kda/flags.hpp"
#include "tools/kda/print.hpp"

namespace kda::tools {
namespace {

namespace blocked = cpu::blocked;

/// Reads and writes every byte of a buffer beyond the caches, in place as decode does.
double measure_memory_rate(int32_t threads, double min_seconds) {
  constexpr std::size_t kFloats = std::size_t{64} << 20;
  constexpr int64_t kPieces = 256;
  io::Buffer buffer(kFloats * sizeof(float));
  buffer.fill(0);
  auto task = [&](int64_t idx, int32_t) {
    float* piece = buffer.as<float>() + static_cast<std::size_t>(idx) * (kFloats / kPieces);
    for (std::size_t i = 0; i < kFloats / kPieces; ++i) piece[i] = piece[i] * 0.5f + 1.0f;
  };
  const Timing timing =
      time_calls([&] { throw_if_error(parallel_tasks(kPieces, threads, task)); }, min_seconds, 5);
  return 2.0 * static_cast<double>(buffer.size()) / timing.fastest;
}

const blocked::Kernels& kernels_named(const std::string& implementation) {
  for (const blocked::Kernels* kernels :
       {blocked::avx512_kernels(), blocked::avx2_kernels(), blocked::portable_kernels()})
    if (kernels && implementation == cat("cpu.blocked.", kernels->name)) return *kernels;
  return blocked::best_kernels();
}

double tokens_of(const Problem& p) { return static_cast<double>(p.batch * p.num_tokens); }

double forward_multiply_adds(const Problem& p) {
  return tokens_of(p) * static_cast<double>(p.num_value_heads) * multiply_adds(p);
}

/// Multiply-adds of one token and value head, in chunks of 16: nine products with a state;
/// scores and pairs of tokens.
double backward_multiply_adds(double K, double V) { return 9 * K * V + 16 * (3.5 * V + 5 * K); }

/// The call of a stage of the blocked backend on its own, with its scratch.
struct StageCall {
  StageCall(const check::Inputs& inputs, const Plan& plan)
      : scratch(blocked::scratch_bytes(inputs.problem, plan.num_threads)),
        tensors(inputs.tensors()),
        call{inputs.problem, tensors, stage::Sequences(inputs.problem, plan.cu_seqlens, nullptr),
             plan.num_threads, scratch.data()} {
    if (plan.implementation.find(".blocked.") == std::string::npos)
      throw Error(Status(StatusCode::kUnsupported,
                         cat("backend: ", plan.implementation, " has no such stage to measure")));
  }

  io::Buffer scratch;
  Tensors tensors;
  stage::Call call;
};

template <class Task>
Timing time_tasks(int64_t count, int32_t num_threads, double min_seconds, Task& task) {
  return time_calls([&] { throw_if_error(parallel_tasks(count, num_threads, task)); }, min_seconds);
}

}  // namespace

CpuRow CpuBench::measure(const std::string& name, check::Inputs& inputs) {
  CpuRow row;
  row.name = name;
  row.tokens = tokens_of(inputs.problem);
  if (what_ == "decode")
    tails_ ? measure_tails(inputs, &row) : measure_decode(inputs, &row);
  else if (what_ == "context-parallel")
    measure_context_parallel(inputs, &row);
  else if (what_ == "backward")
    measure_backward(inputs, &row);
  else if (what_ == "intra")
    measure_intra(inputs, &row);
  else if (what_ == "delta-h")
    measure_states(inputs, &row);
  else
    measure_forward(inputs, &row);
  return row;
}

MachineRates CpuBench::machine_rates() const {
  MachineRates rates;
  rates.fma_per_second =
      measure_fma_rate(kernels_named(implementation_), num_threads_, std::min(0.3, min_seconds_));
  if (what_ == "decode") rates.bytes_per_second = measure_memory_rate(num_threads_, min_seconds_);
  return rates;
}

Plan CpuBench::make_plan_of(const check::Inputs& inputs, const PlanOptions& options) {
  Plan plan;
  throw_if_error(make_plan(inputs.problem, inputs.cu_seqlens, device_, options, &plan));
  implementation_ = plan.implementation;
  num_threads_ = plan.num_threads;
  return plan;
}

Timing CpuBench::time_plan(check::Inputs& inputs, const PlanOptions& options, Plan* plan) {
  check::want_final_state(&inputs.problem);
  check::Outputs outputs = check::make_outputs(&inputs.problem, inputs.problem.v.dtype);
  *plan = make_plan_of(inputs, options);
  io::Buffer workspace(plan->workspace_bytes);
  Tensors tensors = inputs.tensors();
  outputs.attach(&tensors);
  return time_calls(
      [&] { throw_if_error(run(*plan, tensors, workspace.data(), workspace.size())); },
      min_seconds_);
}

void CpuBench::measure_forward(check::Inputs& inputs, CpuRow* row) {
  Plan plan;
  row->timing = time_plan(inputs, options_, &plan);
  row->multiply_adds = forward_multiply_adds(inputs.problem);
}

/// All gradients, from d_o, for a forward that keeps states.
void CpuBench::measure_backward(check::Inputs& inputs, CpuRow* row) {
  const Problem& p = inputs.problem;
  PlanOptions options = options_;
  options.keep = KeepPolicy::kStates;
  check::Outputs outputs = check::make_outputs(&inputs.problem, p.v.dtype);
  const Plan forward = make_plan_of(inputs, options);
  check::GradientBuffers gradients =
      check::make_gradients(inputs, {.d_final_state = false, .d_o_dtype = p.v.dtype});
  BackwardPlan plan;
  throw_if_error(make_backward_plan(forward, gradients.gradients, options_, &plan));
  io::Buffer saved(forward.saved_bytes);
  io::Buffer workspace(std::max(forward.workspace_bytes, plan.plan.workspace_bytes));
  Tensors tensors = inputs.tensors();
  outputs.attach(&tensors);
  tensors.saved = saved.data();
  tensors.saved_bytes = saved.size();
  Timing forward_timing;
  std::tie(forward_timing, row->timing) =
      time_pairs([&] { throw_if_error(run(forward, tensors, workspace.data(), workspace.size())); },
                 [&] {
                   throw_if_error(backward(plan, tensors, gradients.tensors(), workspace.data(),
                                           workspace.size()));
                 },
                 min_seconds_);
  const auto K = static_cast<double>(p.key_dim), V = static_cast<double>(p.value_dim);
  row->multiply_adds =
      tokens_of(p) * static_cast<double>(p.num_value_heads) * backward_multiply_adds(K, V);
  row->extra = {{"forward", format_seconds(forward_timing.median)},
                {"of forward", fmt::format("{:.2f}x", row->timing.median / forward_timing.median)},
                {"workspace", format_megabytes(plan.plan.workspace_bytes)},
                {"kept", format_megabytes(saved.size())}};
}

/// The state recurrence alone, without outputs: B of each whole sequence.
void CpuBench::measure_states(check::Inputs& inputs, CpuRow* row) {
  const Problem& p = inputs.problem;
  const Plan plan = make_plan_of(inputs, options_);
  const StageCall stage(inputs, plan);
  const stage::Call& call = stage.call;
  const int64_t states = p.num_sequences * p.num_value_heads;
  io::Buffer B(static_cast<std::size_t>(states * p.key_dim * p.value_dim) * sizeof(float));
  const blocked::Kernels& kernels = kernels_named(plan.implementation);
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
      pass.v = blocked::row_source(p, p.v, call.tensors.v, pass.begin, pass.head);
    blocked::run_pass(kernels, call, pass, blocked::thread_scratch(call, slot));
  };
  row->timing = time_tasks(states, plan.num_threads, min_seconds_, task);
  row->multiply_adds = row->tokens * static_cast<double>(p.num_value_heads) * 2 *
                       static_cast<double>(p.key_dim * p.value_dim);
}

/// Gates, norms and in-chunk scores alone (prepare() of the blocked backend).
void CpuBench::measure_intra(check::Inputs& inputs, CpuRow* row) {
  const Problem& p = inputs.problem;
  const Plan plan = make_plan_of(inputs, options_);
  const StageCall stage(inputs, plan);
  const stage::Call& call = stage.call;
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
  row->timing =
      time_tasks(p.num_sequences * p.num_value_heads, plan.num_threads, min_seconds_, task);
}

void CpuBench::measure_decode(check::Inputs& inputs, CpuRow* row) {
  Problem& p = inputs.problem;
  check::Outputs outputs = check::make_outputs(&p, p.v.dtype);
  make_decode(&inputs);
  const Plan plan = make_plan_of(inputs, options_);
  io::Buffer workspace(plan.workspace_bytes);
  Tensors tensors = inputs.tensors();
  outputs.attach(&tensors);
  row->bytes = 2.0 * static_cast<double>(inputs.initial_state.size());
  row->timing =
      time_calls([&] { throw_if_error(run(plan, tensors, workspace.data(), workspace.size())); },
                 min_seconds_);
}

namespace {

/// A pool of boundary states with tails of random length, and its calls, one after the other. Each
/// goes on from the one before, so that a sequence is folded every 16 tokens.
class TailSteps {
 public:
  TailSteps(const check::Inputs& inputs, const Plan& plan, const Tensors& tensors)
      : plan_(plan),
        tensors_(tensors),
        rows_(plan.problem, *plan.problem.tail),
        workspace_(plan.workspace_bytes) {
    const Problem& p = plan.problem;
    check::Random random(1);
    for (int64_t n = 0; n < p.num_sequences; ++n) {
      slots_.push_back(static_cast<int32_t>(n));
      positions_.push_back(static_cast<int32_t>(random.below(kTailBoundary)));
    }
    tensors_.initial_state = const_cast<std::byte*>(inputs.initial_state.data());
    tensors_.initial_state_indices = slots_.data();
    tensors_.tail = rows_.tensors(positions_.data());
  }
  void step() {
    throw_if_error(run(plan_, tensors_, workspace_.data(), workspace_.size()));
    for (int32_t& position : positions_) position += static_cast<int32_t>(plan_.problem.num_tokens);
  }

 private:
  /// Rows of zeros: a key of 0 is as fast as any other.
  struct Rows {
    Rows(const Problem& p, const TailDesc& tail)
        : k(bytes(tail.k, tail)),
          g(bytes(tail.g, tail)),
          v_new(bytes(tail.v_new, tail)),
          folded(static_cast<std::size_t>(tail.num_slots * p.num_value_heads)) {
      if (tail.split) {
        rest = io::Buffer(bytes(tail.split->rest, tail));
        v = io::Buffer(bytes(tail.split->v, tail));
        beta = io::Buffer(bytes(tail.split->beta, tail));
      }
      for (io::Buffer* buffer : {&k, &g, &v_new, &rest, &v, &beta}) buffer->fill(0);
    }
    static std::size_t bytes(const TensorDesc& desc, const TailDesc& tail) {
      return static_cast<std::size_t>(tail.num_slots * desc.strides[0] * dtype_size(desc.dtype));
    }
    TailTensors tensors(const int32_t* positions) {
      return {.k = k.data(),
              .g = g.data(),
              .v_new = v_new.as<float>(),
              .folded = folded.data(),
              .positions = positions,
              .rest = rest.as<int16_t>(),
              .v = v.data(),
              .beta = beta.data()};
    }
    io::Buffer k, g, v_new, rest, v, beta;
    std::vector<int32_t> folded;
  };

  const Plan& plan_;
  Tensors tensors_;
  Rows rows_;
  io::Buffer workspace_;
  std::vector<int32_t> slots_, positions_;
};

}  // namespace

/// 16 steps a timing, so that each sequence is folded in it, beside 16 of plain decode.
void CpuBench::measure_tails(check::Inputs& inputs, CpuRow* row) {
  Problem& p = inputs.problem;
  check::Outputs outputs = check::make_outputs(&p, p.v.dtype);
  make_decode(&inputs);
  const Plan plain = make_plan_of(inputs, options_);
  check::Inputs with_tail = inputs;
  Problem& tailed = with_tail.problem;
  add_tails(&tailed, kTailBoundary + p.num_tokens - 1, *tails_);
  const Plan plan = make_plan_of(with_tail, options_);
  Tensors tensors = inputs.tensors();
  outputs.attach(&tensors);
  TailSteps steps(with_tail, plan, tensors);
  io::Buffer workspace(plain.workspace_bytes);
  const auto repeat = [](auto&& step) {
    for (int64_t i = 0; i < kTailBoundary; ++i) step();
  };
  Timing plain_timing;
  std::tie(row->timing, plain_timing) = time_pairs(
      [&] { repeat([&] { steps.step(); }); },
      [&] {
        repeat([&] { throw_if_error(run(plain, tensors, workspace.data(), workspace.size())); });
      },
      min_seconds_);
  for (Timing* timing : {&row->timing, &plain_timing})
    for (double* seconds : {&timing->median, &timing->fastest, &timing->slowest})
      *seconds /= kTailBoundary;
  // A read of S_0, and a read and a write every 16 tokens. Rows are not counted.
  const double states = static_cast<double>(inputs.initial_state.size());
  const StateShares shares = state_shares(tailed);
  const double folds = static_cast<double>(p.num_tokens) / kTailBoundary;
  row->bytes = states * (shares.step + (shares.step + shares.fold) * folds);
  row->extra = {{"decode", format_seconds(plain_timing.median)},
                {"of decode", fmt::format("{:.2f}x", row->timing.median / plain_timing.median)}};
}

/// The same inputs with segments off and on.
void CpuBench::measure_context_parallel(check::Inputs& inputs, CpuRow* row) {
  PlanOptions on = options_, off = options_;
  off.context_parallel = SegmentPolicy::kOff;
  if (on.context_parallel == SegmentPolicy::kAuto)
    parse_context_parallel("cula", &on);  // auto is always off on a CPU
  Plan plan;
  const Timing serial = time_plan(inputs, off, &plan);
  row->timing = time_plan(inputs, on, &plan);
  row->multiply_adds = forward_multiply_adds(inputs.problem);
  row->extra = {{"segments", cat(plan.segments.size())},
                {"off", format_seconds(serial.median)},
                {"on / off", fmt::format("{:.2f}", row->timing.median / serial.median)}};
}

}  // namespace kda::tools
