// SPDX-License-Identifier: Apache-2.0
#include "tools/kda/bench_gpu.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>

#include "check/backward.hpp"
#include "check/device.hpp"
#include "core/layout.hpp"
#include "core/text.hpp"
#include "registry/rows.hpp"
#include "run/run_rows.hpp"

namespace kda::tools {
namespace {

/// The bytes of a copy that flushes the L2 cache: eight times its size, at most 256 MiB.
std::size_t flush_bytes() { return std::min(std::size_t{256} << 20, 8 * check::l2_cache_bytes()); }

constexpr int64_t kGeneratedTokens = 256;
constexpr int kRepeats = 15;

/// Inputs of any length from a few hundred random tokens, repeated: values do not change times.
check::Inputs long_inputs(check::GenerateOptions options) {
  const check::GenerateOptions whole = options;
  int64_t total = options.num_tokens * options.batch;
  if (!options.seq_lens.empty()) {
    total = 0;
    for (const int64_t length : options.seq_lens) total += length;
  }
  options.seq_lens.clear();
  options.batch = 1;
  options.num_tokens = std::min(total, kGeneratedTokens);
  check::Inputs inputs = check::generate(options);
  Problem& p = inputs.problem;
  const int64_t have = p.num_tokens;
  const auto repeat = [&](io::Buffer& buffer) {
    const std::size_t row = buffer.size() / static_cast<std::size_t>(std::max<int64_t>(have, 1));
    io::Buffer longer(row * static_cast<std::size_t>(total));
    for (std::size_t done = 0; done < longer.size(); done += buffer.size())
      std::memcpy(longer.data() + done, buffer.data(),
                  std::min(buffer.size(), longer.size() - done));
    buffer = longer;
  };
  for (io::Buffer* buffer : {&inputs.q, &inputs.k, &inputs.v, &inputs.g, &inputs.beta})
    repeat(*buffer);
  p.batch = whole.seq_lens.empty() ? whole.batch : 1;
  p.num_tokens = total / p.batch;
  p.num_sequences = p.batch;
  const int64_t T = p.num_tokens, H = p.num_heads, HV = p.num_value_heads;
  const auto shape = [&](TensorDesc& desc, int64_t heads, int64_t size) {
    desc = contiguous(desc.dtype, {p.batch, T, heads, size});
  };
  shape(p.q, H, p.key_dim);
  shape(p.k, H, p.key_dim);
  shape(p.v, HV, p.value_dim);
  if (whole.head_gates)
    p.g = head_gates(p.g.dtype, p.batch, T, HV);
  else
    shape(p.g, HV, p.key_dim);
  p.beta = contiguous(p.beta.dtype, {p.batch, T, HV});
  if (!whole.seq_lens.empty()) {
    p.cu_seqlens = DType::kInt64;
    p.num_sequences = static_cast<int64_t>(whole.seq_lens.size());
    inputs.cu_seqlens = {0};
    for (const int64_t length : whole.seq_lens)
      inputs.cu_seqlens.push_back(inputs.cu_seqlens.back() + length);
  }
  return inputs;
}

Tensors with_saved(Tensors tensors, const check::DeviceBuffer& saved) {
  tensors.saved = saved.size() > 0 ? saved.data() : nullptr;
  tensors.saved_bytes = saved.size();
  return tensors;
}

double total_bytes(const check::Inputs& inputs, const check::Outputs& outputs) {
  double bytes = 0;
  for (const io::Buffer* buffer : {&inputs.q, &inputs.k, &inputs.v, &inputs.g, &inputs.beta})
    bytes += static_cast<double>(buffer->size());
  return bytes + static_cast<double>(outputs.o.size() + outputs.final_state.size());
}

}  // namespace

struct GpuBench::Flush {
  std::size_t bytes = flush_bytes();
  check::DeviceBuffer from{bytes}, to{bytes};
};

struct GpuBench::Case {
  std::string name;
  check::Inputs inputs;
  check::Outputs outputs;
  Tensors tensors() const {
    Tensors t = inputs.tensors();
    const_cast<check::Outputs&>(outputs).attach(&t);
    return t;
  }
};

GpuBench::GpuBench(const DeviceFacts& device) : device_(device), flush_(new Flush) {
  flush_->from.fill(1);
  const auto copy = [&] { check::copy_on_device(flush_->from, &flush_->to, flush_->bytes); };
  copy();
  double best = 1e30;
  for (int i = 0; i < kRepeats; ++i) best = std::min(best, check::time_on_device(copy, 4));
  copy_rate_ = 2.0 * static_cast<double>(flush_->bytes) / (best * 1e-6);
}
GpuBench::~GpuBench() { delete flush_; }

Timing GpuBench::time(const std::function<void()>& call) {
  call();
  std::vector<double> samples;
  for (int i = 0; i < kRepeats; ++i) {
    check::copy_on_device(flush_->from, &flush_->to, flush_->bytes);
    samples.push_back(1e-6 * check::time_on_device(call));
  }
  std::sort(samples.begin(), samples.end());
  return {samples[samples.size() / 2], samples.front(), samples.back(), kRepeats};
}

double GpuBench::copy_seconds(double bytes) {
  if (bytes >= 2.0 * static_cast<double>(flush_->bytes)) return bytes / copy_rate_;
  const auto half = static_cast<std::size_t>(bytes / 2);
  return time([&] { check::copy_on_device(flush_->from, &flush_->to, half); }).median;
}

GpuRow GpuBench::time_run(const Case& c, const std::string& what, const PlanOptions& options,
                          bool bounds) {
  const Problem& p = c.inputs.problem;
  Plan plan;
  throw_if_error(bounds ? make_plan_from_bounds(p, device_, options, &plan)
                        : make_plan(p, c.inputs.cu_seqlens, device_, options, &plan));
  return time_plan(c, what, plan, [&](const Tensors& tensors, check::DeviceBuffer& workspace) {
    return run(plan, tensors, workspace.data(), workspace.size());
  });
}

template <class RunPlan>
GpuRow GpuBench::time_plan(const Case& c, const std::string& what, const Plan& plan,
                           RunPlan&& run_plan) {
  Tensors host = c.tensors();
  if (!plan.lengths_known) host.cu_seqlens = c.inputs.cu_seqlens.data();
  check::DeviceTensors copies(plan, host);
  check::DeviceBuffer workspace(plan.workspace_bytes), saved(plan.saved_bytes);
  const Tensors tensors = with_saved(copies.tensors(), saved);
  GpuRow row{c.name, what, plan.implementation, {}, total_bytes(c.inputs, c.outputs), 0, 0};
  row.segments = static_cast<int64_t>(plan.segments.size());
  row.bytes += static_cast<double>(saved.size());
  row.timing = time([&] { throw_if_error(run_plan(tensors, workspace)); });
  return row;
}

std::vector<GpuRow> GpuBench::time_launches(const Case& c, const PlanOptions& options) {
  PlanOptions off = options;
  off.context_parallel = SegmentPolicy::kOff;
  std::vector<GpuRow> rows = {time_run(c, "off", off)};
  Plan plan;
  throw_if_error(make_plan(c.inputs.problem, c.inputs.cu_seqlens, device_, options, &plan));
  if (plan.segmented && plan.resolved.segment_method == SegmentMethod::kOnePass) {
    // The backend's row without its last stages: what they would make is missing, the time is not.
    registry::ForwardRow part = *registry::find_row(registry::forward_rows(), plan.implementation);
    const registry::ForwardRow* const list[] = {&part};
    const auto time_part = [&](const char* what) {
      rows.push_back(
          time_plan(c, what, plan, [&](const Tensors& tensors, check::DeviceBuffer& workspace) {
            return run_rows::forward(list, plan, tensors, workspace.data(), workspace.size(),
                                     nullptr);
          }));
    };
    const auto merge = part.segments->merge;
    part.segments->correct = [](const stage::SegmentCorrect&) { return Status(); };
    part.segments->merge = [](const stage::SegmentMerge&) { return Status(); };
    time_part("to segment_scan");
    part.segments->merge = merge;
    time_part("to segment_merge");
  }
  rows.push_back(time_run(c, "all", options));
  return rows;
}

/// All gradients, from d_o, for a forward that keeps what `options` say.
GpuRow GpuBench::time_backward(const Case& c, const std::string& what, const PlanOptions& options,
                               bool bounds) {
  Plan forward;
  PlanOptions segments;
  segments.keep = options.keep;
  segments.context_parallel = options.context_parallel;
  segments.num_segments = options.num_segments;
  const Problem& p = c.inputs.problem;
  throw_if_error(bounds ? make_plan_from_bounds(p, device_, segments, &forward)
                        : make_plan(p, c.inputs.cu_seqlens, device_, segments, &forward));
  check::GradientBuffers gradients = check::make_gradients(
      c.inputs, {.d_final_state = false, .d_o_dtype = c.inputs.problem.v.dtype});
  BackwardPlan plan;
  throw_if_error(make_backward_plan(forward, gradients.gradients, options, &plan));
  check::DeviceBuffer saved(forward.saved_bytes);
  if (saved.size() > 0) {
    check::DeviceTensors with_outputs(forward, c.tensors());
    check::DeviceBuffer room(forward.workspace_bytes);
    throw_if_error(
        run(forward, with_saved(with_outputs.tensors(), saved), room.data(), room.size()));
    check::synchronize_device();
  }
  Tensors host = c.inputs.tensors();
  if (bounds) host.cu_seqlens = c.inputs.cu_seqlens.data();
  check::DeviceTensors copies(plan.plan, host);
  check::DeviceGradients outputs(plan, gradients.tensors());
  check::DeviceBuffer workspace(plan.plan.workspace_bytes);
  const Tensors tensors = with_saved(copies.tensors(), saved);
  GpuRow row{c.name, what, plan.plan.implementation, {}, total_bytes(c.inputs, {}), 0, 0};
  row.segments = static_cast<int64_t>(plan.plan.segments.size());
  for (const io::Buffer* buffer : {&gradients.d_o, &gradients.dq, &gradients.dk, &gradients.dv,
                                   &gradients.dg, &gradients.dbeta})
    row.bytes += static_cast<double>(buffer->size());
  row.bytes += static_cast<double>(saved.size());
  row.timing = time([&] {
    throw_if_error(backward(plan, tensors, outputs.tensors(), workspace.data(), workspace.size()));
  });
  return row;
}

namespace {

/// Tails of the pool of `problem` on a GPU, and where its sequences stand. Rows are zeros: a key of
/// 0 is as fast as any other.
class DeviceTails {
 public:
  explicit DeviceTails(const Problem& p)
      : k_(bytes(p.tail->k, *p.tail)),
        g_(bytes(p.tail->g, *p.tail)),
        v_new_(bytes(p.tail->v_new, *p.tail)),
        folded_(static_cast<std::size_t>(p.tail->num_slots * p.num_value_heads) * 4),
        on_device_(static_cast<std::size_t>(p.num_sequences) * 4) {
    if (const auto& split = p.tail->split) {
      rest_ = check::DeviceBuffer(bytes(split->rest, *p.tail));
      v_ = check::DeviceBuffer(bytes(split->v, *p.tail));
      beta_ = check::DeviceBuffer(bytes(split->beta, *p.tail));
      for (check::DeviceBuffer* buffer : {&rest_, &v_, &beta_}) buffer->fill(0);
    }
    for (check::DeviceBuffer* buffer : {&k_, &g_, &v_new_}) buffer->fill(0);
  }
  /// All tails are those of boundary states at position 0.
  void begin() { folded_.fill(0); }
  TailTensors tensors() const {
    return {.k = k_.data(),
            .g = g_.data(),
            .v_new = static_cast<float*>(v_new_.data()),
            .folded = static_cast<int32_t*>(folded_.data()),
            .positions = static_cast<const int32_t*>(on_device_.data()),
            .rest = static_cast<int16_t*>(rest_.data()),
            .v = v_.data(),
            .beta = beta_.data()};
  }
  /// One number a sequence, from `position`.
  void set_positions(int64_t count, const std::function<int64_t(int64_t)>& position) {
    positions_.resize(static_cast<std::size_t>(count));
    for (int64_t n = 0; n < count; ++n)
      positions_[static_cast<std::size_t>(n)] = static_cast<int32_t>(position(n));
    on_device_.upload(positions_.data(), positions_.size() * 4);
  }
  int64_t position(int64_t n) const { return positions_[static_cast<std::size_t>(n)]; }

 private:
  static std::size_t bytes(const TensorDesc& desc, const TailDesc& tail) {
    return static_cast<std::size_t>(tail.num_slots * desc.strides[0] * dtype_size(desc.dtype));
  }
  check::DeviceBuffer k_, g_, v_new_, folded_, on_device_, rest_, v_, beta_;
  std::vector<int32_t> positions_;
};

/// Bytes of a row of a tail, in all heads.
double row_bytes(const Problem& p) {
  const int64_t gates = p.num_value_heads * (has_head_gate(p) ? 1 : p.key_dim);
  return static_cast<double>(p.num_heads * p.key_dim * dtype_size(p.k.dtype) +
                             gates * dtype_size(p.g.dtype) +
                             p.num_value_heads * p.value_dim * dtype_size(DType::kFloat32));
}

/// Bytes of what a row has beside split states.
double split_row_bytes(const Problem& p) {
  if (!p.tail->split) return 0;
  return static_cast<double>(p.num_value_heads *
                             (p.value_dim * dtype_size(p.v.dtype) + dtype_size(p.beta.dtype)));
}

/// How many of the S tokens of a verify stay: 3 in 4.
int32_t kept_of(int64_t S) { return static_cast<int32_t>(std::max<int64_t>(1, S * 3 / 4)); }

/// The mean of them all: a sequence is folded in some.
Timing mean_of(const std::vector<double>& seconds) {
  double sum = 0;
  for (const double x : seconds) sum += x;
  const auto [least, most] = std::minmax_element(seconds.begin(), seconds.end());
  const auto count = static_cast<double>(seconds.size());
  return {sum / count, *least, *most, static_cast<int>(seconds.size())};
}

}  // namespace

GpuRow GpuBench::time_decode(Case c, const PlanOptions& options) {
  Problem& p = c.inputs.problem;
  if (tails_ == BoundaryStates::kBf16) {
    p.initial_state = states(p, DType::kBFloat16, p.num_sequences);
    c.inputs.initial_state = io::Buffer(c.inputs.initial_state.size() / 2);
  }
  GpuRow row = time_run(c, "decode", options);
  row.bytes += 2.0 * static_cast<double>(c.inputs.initial_state.size());
  return row;
}

std::vector<GpuRow> GpuBench::time_slots_of_drafts(Case c, const PlanOptions& options) {
  Problem& p = c.inputs.problem;
  const int64_t N = p.num_sequences, S = p.num_tokens;
  const DType type = tails_ == BoundaryStates::kBf16 ? DType::kBFloat16 : DType::kFloat32;
  p.initial_state = states(p, type, N * S, /*indexed=*/true);
  p.state_index_columns = S;
  p.num_accepted_tokens = true;
  if (!supported(p, device_).ok()) return {};
  const std::size_t of_states =
      type == DType::kBFloat16 ? c.inputs.initial_state.size() / 2 : c.inputs.initial_state.size();
  c.inputs.initial_state = io::Buffer(of_states * static_cast<std::size_t>(S));
  std::vector<int32_t> slots(static_cast<std::size_t>(N * S));
  std::iota(slots.begin(), slots.end(), 0);
  const std::vector<int32_t> accepted(static_cast<std::size_t>(N), kept_of(S));
  Plan plan;
  throw_if_error(make_plan(p, {}, device_, options, &plan));
  Tensors host = c.tensors();
  host.initial_state_indices = slots.data();
  host.num_accepted_tokens = accepted.data();
  check::DeviceTensors copies(plan, host);
  check::DeviceBuffer workspace(plan.workspace_bytes);
  GpuRow row{c.name, "verify, a slot a token", plan.implementation, {}, 0, 0, 0};
  row.bytes = total_bytes(c.inputs, c.outputs);
  row.bytes += static_cast<double>(of_states) * static_cast<double>(1 + S);
  row.timing = time(
      [&] { throw_if_error(run(plan, copies.tensors(), workspace.data(), workspace.size())); });
  return {row};
}

std::vector<GpuRow> GpuBench::time_verify(const Case& c, const check::GenerateOptions& of,
                                          const PlanOptions& options) {
  check::GenerateOptions one = of;
  one.num_tokens = 1;
  Case single{c.name, long_inputs(one), {}};
  make_decode(&single.inputs);
  single.outputs = check::make_outputs(&single.inputs.problem, single.inputs.problem.v.dtype);
  std::vector<GpuRow> rows = {time_decode(std::move(single), options)};
  rows.front().what = "decode of one token";
  std::ranges::copy(time_slots_of_drafts(c, options), std::back_inserter(rows));
  if (tails_)
    std::ranges::copy(time_tails(c, "verify, tail", kept_of(c.inputs.problem.num_tokens), options),
                      std::back_inserter(rows));
  return rows;
}

std::vector<GpuRow> GpuBench::time_tails(const Case& c, const std::string& what, int64_t kept,
                                         const PlanOptions& options) {
  Case tailed = c;
  Problem& p = tailed.inputs.problem;
  const int64_t N = p.num_sequences, S = p.num_tokens;
  add_tails(&p, kTailBoundary + S - 1, *tails_);
  Plan plan;
  throw_if_error(make_plan(p, {}, device_, options, &plan));
  std::vector<int32_t> slots;
  for (int64_t n = 0; n < N; ++n) slots.push_back(static_cast<int32_t>(n));
  Tensors host = tailed.tensors();
  host.initial_state_indices = slots.data();
  check::DeviceTensors copies(plan, host);
  check::DeviceBuffer workspace(plan.workspace_bytes);
  DeviceTails rows(p);
  Tensors tensors = copies.tensors();
  tensors.tail = rows.tensors();
  const auto step = [&] {
    check::copy_on_device(flush_->from, &flush_->to, flush_->bytes);
    return 1e-6 * check::time_on_device([&] {
             throw_if_error(run(plan, tensors, workspace.data(), workspace.size()));
           });
  };
  check::Random random(1);
  rows.begin();
  rows.set_positions(N, [&](int64_t) { return random.below(kTailBoundary); });
  std::vector<double> mixed, all_fold;
  for (int64_t i = -2; i < 2 * kTailBoundary; ++i) {  // the first ones are not timed
    const double time = step();
    if (i >= 0) mixed.push_back(time);
    rows.set_positions(N, [&](int64_t n) { return rows.position(n) + kept; });
  }
  rows.set_positions(N, [](int64_t) { return kTailBoundary; });
  for (int i = 0; i < kRepeats; ++i) {
    rows.begin();
    all_fold.push_back(step());
  }
  const auto row = [&](const std::string& of, const std::vector<double>& seconds, double of_states,
                       double of_rows, double of_split_rows) {
    GpuRow made{c.name, of, plan.implementation, mean_of(seconds), total_bytes(c.inputs, c.outputs),
                0,      0};
    made.bytes +=
        of_states * static_cast<double>(c.inputs.initial_state.size()) +
        static_cast<double>(N) * (of_rows * row_bytes(p) + of_split_rows * split_row_bytes(p));
    return made;
  };
  // S_0 is read once, and written by a fold every 16 tokens. A step reads its sure rows, and writes
  // those of its tokens.
  const auto tokens = static_cast<double>(S);
  const double sure = tokens + (kTailBoundary - 1) / 2.0;
  const StateShares shares = state_shares(p);
  const double folds = static_cast<double>(kept) / kTailBoundary;
  return {row(what, mixed, shares.step + shares.fold * folds, sure + tokens, 2 * tokens),
          row(what + ", all fold", all_fold, shares.step + shares.fold, kTailBoundary + tokens,
              kTailBoundary + tokens)};
}

/// A prefill of a pool, from zero, which ends in tails. The forward inside is planned from bounds.
GpuRow GpuBench::time_tail_forward(const Case& c, const PlanOptions& options) {
  Case tailed = c;
  Problem& p = tailed.inputs.problem;
  const int64_t N = p.num_sequences;
  p.initial_state = states(p, DType::kFloat32, N);
  add_tails(&p, kTailBoundary, *tails_);
  p.initial_state_mask = true;
  p.final_state.reset();
  Plan plan;
  throw_if_error(make_plan(p, c.inputs.cu_seqlens, device_, options, &plan));
  std::vector<int32_t> slots(static_cast<std::size_t>(N));
  std::iota(slots.begin(), slots.end(), 0);
  const std::vector<uint8_t> from_zero(slots.size(), 0);
  io::Buffer pool(slots.size() *
                  static_cast<std::size_t>(p.num_value_heads * p.key_dim * p.value_dim) *
                  sizeof(float));
  Tensors host = tailed.tensors();
  host.initial_state = pool.data();
  host.initial_state_indices = slots.data();
  host.initial_state_mask = from_zero.data();
  check::DeviceTensors copies(plan, host);
  check::DeviceBuffer workspace(plan.workspace_bytes);
  DeviceTails rows(p);
  rows.set_positions(N, [](int64_t) { return 0; });
  Tensors tensors = copies.tensors();
  tensors.tail = rows.tensors();
  GpuRow row{c.name, "forward, tail", plan.implementation, {}, total_bytes(c.inputs, c.outputs), 0,
             0};
  row.timing =
      time([&] { throw_if_error(run(plan, tensors, workspace.data(), workspace.size())); });
  return row;
}

/// Lengths on the host, on the device alone, and there without a cut: forwards, then backwards.
std::vector<GpuRow> GpuBench::time_lengths(const Case& c, const PlanOptions& options) {
  if (!c.inputs.problem.cu_seqlens)
    throw Error(invalid("lengths: '", c.name, "' has no --seq-lens"));
  PlanOptions uncut = options;
  uncut.context_parallel = SegmentPolicy::kOff;
  return {time_run(c, "on the host", options),
          time_run(c, "on the device", options, true),
          time_run(c, "on the device, not cut", uncut, true),
          time_backward(c, "backward, on the host", options),
          time_backward(c, "backward, on the device", options, true),
          time_backward(c, "backward, on the device, not cut", uncut, true)};
}

/// A forward and its backward; where a forward can keep states and errors of chunks, both once
/// more, unless a backend of the backward is asked for.
std::vector<GpuRow> GpuBench::time_both(const Case& c, const PlanOptions& options) {
  std::vector<GpuRow> rows = {time_run(c, "forward", {}), time_backward(c, "backward", options)};
  if (!options.backend.empty()) return rows;
  PlanOptions keep = options;
  keep.keep = KeepPolicy::kChunks;
  Plan plan;
  throw_if_error(make_plan(c.inputs.problem, c.inputs.cu_seqlens, device_, keep, &plan));
  if (plan.implementation.empty()) return rows;
  PlanOptions forward;
  forward.keep = keep.keep;
  rows.push_back(time_run(c, "forward, keep", forward));
  rows.push_back(time_backward(c, "backward, keep", keep));
  return rows;
}

std::vector<GpuRow> GpuBench::measure(const std::string& what, const std::string& name,
                                      const check::GenerateOptions& options,
                                      const PlanOptions& plan_options, bool batch_invariant) {
  Case c{name, long_inputs(options), {}};
  Problem& p = c.inputs.problem;
  p.batch_invariant = batch_invariant;
  if (what == "decode" || what == "verify") {
    make_decode(&c.inputs);
    c.outputs = check::make_outputs(&p, p.v.dtype);
    if (what == "verify") return time_verify(c, options, plan_options);
    std::vector<GpuRow> rows = {time_decode(c, plan_options)};
    if (tails_)
      std::ranges::copy(time_tails(c, "tail", p.num_tokens, plan_options),
                        std::back_inserter(rows));
    return rows;
  }
  check::want_final_state(&p);
  c.outputs = check::make_outputs(&p, p.v.dtype);
  if (what == "forward") {
    std::vector<GpuRow> rows = {time_run(c, what, plan_options)};
    if (tails_) rows.push_back(time_tail_forward(c, plan_options));
    return rows;
  }
  if (what == "lengths") return time_lengths(c, plan_options);
  if (what == "launches") return time_launches(c, plan_options);
  if (what == "backward") return time_both(c, plan_options);
  PlanOptions off = plan_options;
  off.context_parallel = SegmentPolicy::kOff;
  if (what == "context-parallel") return {time_run(c, "off", off), time_run(c, "on", plan_options)};

  Plan plan;
  throw_if_error(make_plan(p, c.inputs.cu_seqlens, device_, off, &plan));
  if (plan.implementation == "cuda.sm90.fused" && off.backend.empty()) {  // stages can serve it too
    off.backend = "staged";
    throw_if_error(make_plan(p, c.inputs.cu_seqlens, device_, off, &plan));
  }
  StageSizes sizes;
  throw_if_error(stage_sizes(plan, &sizes));
  check::DeviceTensors copies(plan, c.tensors());
  check::DeviceBuffer workspace(plan.workspace_bytes), w(sizes.w), u(sizes.u), kg(sizes.kg),
      qg(sizes.qg), Aqk(sizes.Aqk), T(sizes.T), gamma(sizes.gamma), beta(sizes.beta),
      diag(sizes.diag), h(sizes.h), vn(sizes.vn);
  const auto floats = [](const check::DeviceBuffer& buffer) {
    return static_cast<float*>(buffer.data());
  };
  StageTensors s{.w = w.data(),
                 .u = u.data(),
                 .kg = kg.data(),
                 .qg = qg.data(),
                 .Aqk = Aqk.data(),
                 .T = T.data(),
                 .gamma = floats(gamma),
                 .beta = floats(beta),
                 .diag = floats(diag),
                 .h = h.data(),
                 .vn = vn.data()};
  const auto call = [&](auto stage, const StageTensors& buffers) {
    return [&, stage, buffers] {
      throw_if_error(
          stage(plan, copies.tensors(), buffers, workspace.data(), workspace.size(), nullptr));
    };
  };
  const auto bytes = [](std::initializer_list<std::size_t> parts) {
    double sum = 0;
    for (const std::size_t part : parts) sum += static_cast<double>(part);
    return sum;
  };
  const auto& in = c.inputs;
  const double raw = bytes({in.q.size(), in.k.size(), in.v.size(), in.g.size(), in.beta.size()});
  std::vector<GpuRow> rows;
  const auto add = [&](const char* label, auto stage, const StageTensors& buffers, double moved) {
    GpuRow row{name, label, plan.implementation, {}, moved, 0, 0};
    row.timing = time(call(stage, buffers));
    rows.push_back(row);
  };
  call(chunk_intra, s)();
  StageTensors bare = s;
  bare.kg = bare.qg = nullptr;
  const double factors =
      bytes({sizes.w, sizes.u, sizes.Aqk, sizes.T, sizes.gamma, sizes.beta, sizes.diag});
  if (what == "intra") {
    add("chunk_intra: w u Aqk T", chunk_intra, bare, raw + factors);
    add("chunk_intra: w u kg qg Aqk T", chunk_intra, s,
        raw + factors + bytes({sizes.kg, sizes.qg}));
  } else if (what == "recompute-wu") {
    // T' is read on and below the diagonal blocks, q only for qg.
    const double both =
        bytes({in.k.size(), in.v.size(), in.g.size(), sizes.T / 8 * 5, sizes.w, sizes.u});
    add("recompute_w_u: w u", recompute_w_u, bare, both);
    add("recompute_w_u: w u kg qg", recompute_w_u, s,
        both + bytes({in.q.size(), sizes.kg, sizes.qg}));
  } else {  // delta-h
    add("chunk_delta_h: h vn", chunk_delta_h, s,
        bytes({sizes.w, sizes.u, sizes.kg, sizes.gamma, sizes.beta, sizes.h, sizes.vn}));
    add("chunk_o: o", chunk_o, s,
        bytes({sizes.qg, sizes.Aqk, sizes.diag, sizes.h, sizes.vn, c.outputs.o.size()}));
  }
  return rows;
}

}  // namespace kda::tools
