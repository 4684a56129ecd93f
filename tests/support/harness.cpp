// SPDX-License-Identifier: Apache-2.0
#include "support/harness.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "core/convert.hpp"
#include "core/layout.hpp"

namespace kda::test {

io::Buffer spread_tensor(const io::Buffer& source, TensorDesc* desc, const Shape& shape,
                         const std::array<int64_t, 4>& strides) {
  const int64_t size = dtype_size(desc->dtype);
  int64_t extent = 1;
  for (std::size_t d = 0; d < 4; ++d) extent += strides[d] * std::max<int64_t>(shape[d] - 1, 0);
  io::Buffer target(static_cast<std::size_t>(extent * size));
  target.fill(0xff);
  const std::byte* from = source.data();
  for (int64_t a = 0; a < shape[0]; ++a)
    for (int64_t b = 0; b < shape[1]; ++b)
      for (int64_t c = 0; c < shape[2]; ++c)
        for (int64_t d = 0; d < shape[3]; ++d) {
          const int64_t at = a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3];
          std::memcpy(target.data() + at * size, from, static_cast<std::size_t>(size));
          from += size;
        }
  desc->strides = strides;
  desc->alignment = size;
  return target;
}

void pad_tensor(io::Buffer* buffer, TensorDesc* desc, const Shape& shape, int64_t unit) {
  const int64_t head = shape[3] + 3 * unit;
  const int64_t token = shape[2] * head + 5 * unit;
  *buffer = spread_tensor(*buffer, desc, shape, {shape[1] * token + 7 * unit, token, head, 1});
  desc->alignment = unit * dtype_size(desc->dtype);
}

DeviceFacts device_for(const RunOptions& options) {
  DeviceFacts facts = device_of(options.plan.backend);
  if (options.num_sms > 0) facts.num_sms = options.num_sms;
  return facts;
}

Result run_inputs(const check::Inputs& inputs, const RunOptions& options) {
  Result result;
  result.problem = inputs.problem;
  if (options.final_state && !result.problem.final_state) check::want_final_state(&result.problem);
  if (!options.final_state) result.problem.final_state.reset();
  result.outputs = check::make_outputs(&result.problem, options.out_dtype);
  const DeviceFacts facts = device_for(options);
  throw_if_error(
      options.from_bounds
          ? make_plan_from_bounds(result.problem, facts, options.plan, &result.plan)
          : make_plan(result.problem, inputs.cu_seqlens, facts, options.plan, &result.plan));
  io::Buffer workspace(result.plan.workspace_bytes);
  workspace.fill(0xff);
  Tensors tensors = inputs.tensors();
  if (options.from_bounds) tensors.cu_seqlens = inputs.cu_seqlens.data();
  result.outputs.attach(&tensors);
  throw_if_error(check::run_and_wait(result.plan, tensors, workspace.data(), workspace.size()));
  return result;
}

PlanOptions fixed_segments(int64_t count, SegmentMethod method) {
  PlanOptions options;
  options.context_parallel = SegmentPolicy::kFixed;
  options.num_segments = count;
  options.segment_method = method;
  return options;
}

PlanOptions with_backend(const std::string& name) {
  PlanOptions options;
  options.backend = name;
  return options;
}

PlanOptions with_threads(int32_t threads) {
  PlanOptions options;
  options.num_threads = threads;
  return options;
}

bool emulated() { return device().name.starts_with("emulated"); }

bool on_cuda() {
  const char* name = std::getenv("KDA_TEST_DEVICE");
  return name && std::string(name) == "cuda";
}

DeviceFacts device() {
  DeviceFacts facts = cpu_facts();
  if (on_cuda()) throw_if_error(cuda_device_facts(0, &facts));
  return facts;
}

DeviceFacts device_of(const std::string& backend) {
  return backend == "oracle" ? cpu_facts() : device();
}

std::vector<std::string> names_that_serve_all(std::span<const registry::Head* const> rows) {
  const DeviceKind kind = on_cuda() ? DeviceKind::kCuda : DeviceKind::kCpu;
  std::vector<std::string> names;
  for (const registry::Head* row : rows) {
    const bool reference = row->float64;  // the oracle
    if (row->device == kind && !row->decline && !row->unavailable() && !reference)
      names.emplace_back(row->name);
  }
  return names;
}

std::vector<std::string> backends() {
  std::vector<std::string> names = names_that_serve_all(registry::heads(Operation::kForward));
  if (on_cuda()) names.insert(names.begin(), "");
  return names;
}

bool same_bits(const io::Buffer& a, const io::Buffer& b) {
  if (a.size() != b.size()) return false;
  return a.size() == 0 || std::memcmp(a.data(), b.data(), a.size()) == 0;
}

void keep_one_gate(check::Inputs* inputs) {
  Problem& p = inputs->problem;
  const Shape shape = beta_shape(p);
  const auto size = static_cast<std::size_t>(dtype_size(p.g.dtype));
  const auto rows = static_cast<std::size_t>(shape[0] * shape[1] * shape[2]);
  const auto row = size * static_cast<std::size_t>(p.key_dim);
  io::Buffer gates(rows * size);
  for (std::size_t i = 0; i < rows; ++i)
    std::memcpy(gates.data() + i * size, inputs->g.data() + i * row, size);
  inputs->g = std::move(gates);
  p.g = head_gates(p.g.dtype, shape[0], shape[1], shape[2]);
}

void keep_one_bias(check::Inputs* inputs) {
  Problem& p = inputs->problem;
  const auto HV = static_cast<std::size_t>(p.num_value_heads);
  io::Buffer biases(HV * sizeof(float));
  for (std::size_t head = 0; head < HV; ++head)
    biases.as<float>()[head] =
        inputs->dt_bias.as<float>()[head * static_cast<std::size_t>(p.key_dim)];
  inputs->dt_bias = std::move(biases);
  p.dt_bias = head_bias(DType::kFloat32, p.num_value_heads);
}

check::Inputs with_gates_expanded(const check::Inputs& inputs) {
  check::Inputs expanded = inputs;
  Problem& p = expanded.problem;
  const Shape shape = g_shape(p);
  const auto size = static_cast<std::size_t>(dtype_size(p.g.dtype));
  const auto K = static_cast<std::size_t>(p.key_dim);
  const auto rows = static_cast<std::size_t>(shape[0] * shape[1] * shape[2]);
  expanded.g = io::Buffer(rows * K * size);
  for (std::size_t i = 0; i < rows * K; ++i)
    std::memcpy(expanded.g.data() + i * size, inputs.g.data() + i / K * size, size);
  p.g = contiguous(p.g.dtype, {shape[0], shape[1], shape[2], shape[3]});
  return expanded;
}

void restride(check::Inputs* inputs, int64_t unit) {
  Problem& p = inputs->problem;
  pad_tensor(&inputs->q, &p.q, qk_shape(p), unit);
  pad_tensor(&inputs->k, &p.k, qk_shape(p), unit);
  pad_tensor(&inputs->v, &p.v, v_shape(p), unit);
  const Shape beta = beta_shape(p);
  const std::array<int64_t, 4> spread{beta[1] * (beta[2] * 3 + 2) + 1, beta[2] * 3 + 2, 3, 0};
  if (has_head_gate(p))
    inputs->g = spread_tensor(inputs->g, &p.g, beta, spread);
  else
    pad_tensor(&inputs->g, &p.g, g_shape(p), unit);
  inputs->beta = spread_tensor(inputs->beta, &p.beta, beta, spread);
  if (has_head_bias(p))
    inputs->dt_bias =
        spread_tensor(inputs->dt_bias, &*p.dt_bias, {p.num_value_heads, 1, 1, 1}, {3, 0, 0, 0});
  else if (p.dt_bias)
    inputs->dt_bias =
        spread_tensor(inputs->dt_bias, &*p.dt_bias, bias_shape(p), {p.key_dim + 9, 1, 0, 0});
  if (p.initial_state) {
    const Shape shape = state_shape(p, *p.initial_state);
    const int64_t row = shape[3] + 2, head = shape[2] * row + 6;
    inputs->initial_state = spread_tensor(inputs->initial_state, &p.initial_state->tensor, shape,
                                          {shape[1] * head + 10, head, row, 1});
  }
}

std::size_t row_bytes(const TensorDesc& desc, int64_t heads, int64_t size) {
  return static_cast<std::size_t>(heads * size * dtype_size(desc.dtype));
}

namespace {

/// Elements of g of a token and head.
int64_t gate_channels(const Problem& p) { return has_head_gate(p) ? 1 : p.key_dim; }

}  // namespace

check::Inputs slice(const check::Inputs& inputs, int64_t begin, int64_t end) {
  check::Inputs part = inputs;
  Problem& p = part.problem;
  const auto cut = [&](io::Buffer& buffer, const TensorDesc& desc, int64_t heads, int64_t size) {
    const std::size_t row = row_bytes(desc, heads, size);
    io::Buffer copy(static_cast<std::size_t>(end - begin) * row);
    std::memcpy(copy.data(), buffer.data() + static_cast<std::size_t>(begin) * row, copy.size());
    buffer = copy;
  };
  cut(part.q, p.q, p.num_heads, p.key_dim);
  cut(part.k, p.k, p.num_heads, p.key_dim);
  cut(part.v, p.v, p.num_value_heads, p.value_dim);
  cut(part.g, p.g, p.num_value_heads, gate_channels(p));
  cut(part.beta, p.beta, p.num_value_heads, 1);
  part.cu_seqlens.clear();
  p.cu_seqlens.reset();
  p.num_sequences = 1;
  p.num_tokens = end - begin;
  if (p.initial_state && !p.initial_state->indexed) p.initial_state->num_slots = 1;
  return part;
}

check::Inputs only_sequence(const check::Inputs& inputs, std::size_t n) {
  check::Inputs alone = slice(inputs, inputs.cu_seqlens[n], inputs.cu_seqlens[n + 1]);
  if (!inputs.problem.initial_state) return alone;
  const std::size_t bytes =
      inputs.initial_state.size() / static_cast<std::size_t>(inputs.problem.num_sequences);
  alone.initial_state = io::Buffer(bytes);
  std::memcpy(alone.initial_state.data(), inputs.initial_state.data() + n * bytes, bytes);
  return alone;
}

bool same_bits_alone(const check::Inputs& inputs, const RunOptions& options) {
  const Result batch = run_inputs(inputs, options);
  const auto N = static_cast<std::size_t>(inputs.problem.num_sequences);
  const std::size_t row =
      batch.outputs.o.size() / static_cast<std::size_t>(inputs.problem.num_tokens);
  const std::size_t state = batch.outputs.final_state.size() / N;
  for (std::size_t n = 0; n < N; ++n) {
    const check::Outputs alone = run_inputs(only_sequence(inputs, n), options).outputs;
    const std::size_t first = static_cast<std::size_t>(inputs.cu_seqlens[n]);
    if (std::memcmp(batch.outputs.o.data() + first * row, alone.o.data(), alone.o.size()) != 0 ||
        alone.final_state.size() != state ||
        std::memcmp(batch.outputs.final_state.data() + n * state, alone.final_state.data(),
                    state) != 0)
      return false;
  }
  return true;
}

void scramble_from(check::Inputs* inputs, int64_t token, uint64_t seed) {
  check::Random random(seed);
  const Problem& p = inputs->problem;
  const auto change = [&](io::Buffer& buffer, DType dtype, int64_t row) {
    const int64_t count = static_cast<int64_t>(buffer.size()) / dtype_size(dtype);
    for (int64_t i = token * row; i < count; ++i)
      store_element(buffer.data(), dtype, i, static_cast<float>(3 * random.normal()));
  };
  change(inputs->q, p.q.dtype, p.num_heads * p.key_dim);
  change(inputs->k, p.k.dtype, p.num_heads * p.key_dim);
  change(inputs->v, p.v.dtype, p.num_value_heads * p.value_dim);
  change(inputs->g, p.g.dtype, p.num_value_heads * gate_channels(p));
  change(inputs->beta, p.beta.dtype, p.num_value_heads);
}

void poison_rows(check::Inputs* inputs, int64_t begin, int64_t end) {
  const Problem& p = inputs->problem;
  const float values[] = {NAN, INFINITY, -1e38f};
  const auto poison = [&](io::Buffer& buffer, DType dtype, int64_t row) {
    for (int64_t i = begin * row; i < end * row; ++i)
      store_element(buffer.data(), dtype, i, values[i % 3]);
  };
  poison(inputs->q, p.q.dtype, p.num_heads * p.key_dim);
  poison(inputs->k, p.k.dtype, p.num_heads * p.key_dim);
  poison(inputs->v, p.v.dtype, p.num_value_heads * p.value_dim);
  poison(inputs->g, p.g.dtype, p.num_value_heads * gate_channels(p));
  poison(inputs->beta, p.beta.dtype, p.num_value_heads);
}

check::GenerateOptions shape(int64_t tokens, int64_t heads, int64_t key_dim, int64_t value_dim) {
  check::GenerateOptions options;
  options.num_tokens = tokens;
  options.num_heads = options.num_value_heads = heads;
  options.key_dim = key_dim;
  options.value_dim = value_dim;
  options.dtype = DType::kFloat32;
  return options;
}

WorstErrors worst_errors(const check::Inputs& inputs, const Result& result,
                         std::vector<cpu::oracle::HeadResult>* truths) {
  const check::Comparison comparison =
      check::compare(inputs, result.problem, result.outputs, {.num_threads = 2, .truths = truths});
  WorstErrors worst;
  for (const check::HeadError& entry : comparison.o) worst.o = std::max(worst.o, entry.error);
  for (const check::HeadError& entry : comparison.final_state)
    worst.final_state = std::max(worst.final_state, entry.error);
  return worst;
}

}  // namespace kda::test
