// SPDX-License-Identifier: Apache-2.0
#include "check/backward.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <string_view>

#include "check/generate.hpp"
#include "check/tolerances.hpp"
#include "core/convert.hpp"
#include "core/layout.hpp"
#include "core/text.hpp"
#include "core/thread_pool.hpp"
#include "cpu/oracle/backward.hpp"

namespace kda::check {
namespace {

namespace oracle = cpu::oracle;

int64_t count_of(const Shape& shape) { return shape[0] * shape[1] * shape[2] * shape[3]; }

io::Buffer filled(int64_t count, DType dtype) {
  io::Buffer buffer(static_cast<std::size_t>(count * dtype_size(dtype)));
  buffer.fill(0xff);
  return buffer;
}

io::Buffer normals(int64_t count, DType dtype, Random& random) {
  io::Buffer buffer = filled(count, dtype);
  for (int64_t i = 0; i < count; ++i) store_double(buffer.data(), dtype, i, random.normal());
  return buffer;
}

TensorDesc row_major(DType dtype, const Shape& shape) {
  return contiguous(dtype, {shape[0], shape[1], shape[2], shape[3]});
}

StateDesc dense_states(const Problem& p, const TensorDesc& tensor) {
  return {tensor, p.num_sequences, false};
}

double one_head_bound(std::string_view name, bool fp16) {
  for (const GradientBound& bound : kBf16Gradients)
    if (name == bound.name) return bound.one_head * (fp16 ? kFp16RowsShare : 1);
  return 0;
}

/// Sums over channels of a gradient [L, size].
oracle::Gradient sums_of_rows(const oracle::Gradient& rows, int64_t size) {
  oracle::Gradient sums;
  sums.resize(rows.value.size() / static_cast<std::size_t>(size));
  for (std::size_t i = 0; i < rows.value.size(); ++i) {
    sums.value[i / static_cast<std::size_t>(size)] += rows.value[i];
    sums.magnitude[i / static_cast<std::size_t>(size)] += rows.magnitude[i];
  }
  return sums;
}

void add(const oracle::Gradient& from, oracle::Gradient* to) {
  if (to->value.empty()) to->resize(from.value.size());
  for (std::size_t i = 0; i < from.value.size(); ++i) {
    to->value[i] += from.value[i];
    to->magnitude[i] += from.magnitude[i];
  }
}

}  // namespace

GradientTensors GradientBuffers::tensors() {
  return {d_o.data(), d_final_state.data(), dq.data(),     dk.data(),       dv.data(),
          dg.data(),  dbeta.data(),         dA_log.data(), ddt_bias.data(), d_initial_state.data()};
}

GradientBuffers make_gradients(const Inputs& inputs, const GradientOptions& options) {
  const Problem& p = inputs.problem;
  Random random(options.seed ^ 0x6772616469656e74u);
  GradientBuffers buffers;
  Gradients& g = buffers.gradients;
  const StateDesc states{{}, p.num_sequences, false};
  if (options.d_o) {
    g.d_o = row_major(options.d_o_dtype, v_shape(p));
    buffers.d_o = normals(count_of(v_shape(p)), options.d_o_dtype, random);
  }
  if (options.d_final_state) {
    g.d_final_state = row_major(state_type(p), state_shape(p, states));
    buffers.d_final_state = normals(count_of(state_shape(p, states)), state_type(p), random);
  }
  const auto want = [&](std::optional<TensorDesc>& desc, io::Buffer& buffer, DType dtype,
                        const Shape& shape) {
    desc = row_major(dtype, shape);
    buffer = filled(count_of(shape), dtype);
  };
  const auto type = [&](const TensorDesc& input) {
    return options.out_dtype.value_or(input.dtype);
  };
  want(g.dq, buffers.dq, type(p.q), qk_shape(p));
  want(g.dk, buffers.dk, type(p.k), qk_shape(p));
  want(g.dv, buffers.dv, type(p.v), v_shape(p));
  want(g.dg, buffers.dg, type(p.g), has_head_gate(p) ? beta_shape(p) : g_shape(p));
  if (has_head_gate(p)) g.dg = head_gates(type(p.g), p.batch, p.num_tokens, p.num_value_heads);
  want(g.dbeta, buffers.dbeta, type(p.beta), beta_shape(p));
  g.dbeta->strides = {p.num_tokens * p.num_value_heads, p.num_value_heads, 1, 0};
  if (p.A_log) {
    want(g.dA_log, buffers.dA_log, p.A_log->dtype, {p.num_value_heads, 1, 1, 1});
    g.dA_log->strides = {1, 0, 0, 0};
  }
  if (p.dt_bias) {
    want(g.ddt_bias, buffers.ddt_bias, p.dt_bias->dtype,
         has_head_bias(p) ? Shape{p.num_value_heads, 1, 1, 1} : bias_shape(p));
    g.ddt_bias->strides = {p.key_dim, 1, 0, 0};
    if (has_head_bias(p)) g.ddt_bias = head_bias(p.dt_bias->dtype, p.num_value_heads);
  }
  if (p.initial_state)
    want(g.d_initial_state, buffers.d_initial_state, state_type(p), state_shape(p, states));
  return buffers;
}

namespace {

std::vector<int64_t> dims(const Shape& shape, std::size_t rank) {
  return {shape.begin(), shape.begin() + static_cast<std::ptrdiff_t>(rank)};
}

std::string text_of(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += cat(i ? ", " : "", shape[i]);
  return text + "]";
}

/// A tensor of the file that has to have this shape; false: there is none of the name.
bool take(const io::SafetensorsFile& file, const char* name, const Shape& shape,
          std::optional<TensorDesc>* desc, io::Buffer* buffer) {
  const auto found = file.tensors.find(name);
  if (found == file.tensors.end()) return false;
  const io::FileTensor& tensor = found->second;
  if (tensor.shape != dims(shape, 4))
    throw Error(
        invalid(name, ": shape ", text_of(tensor.shape), " is not ", text_of(dims(shape, 4))));
  *desc = row_major(tensor.dtype, shape);
  *buffer = tensor.data;
  return true;
}

}  // namespace

void add_gradients_to_file(const Problem& p, const GradientBuffers& buffers,
                           io::SafetensorsFile* file) {
  const Gradients& g = buffers.gradients;
  if (g.d_o) file->tensors["do"] = {g.d_o->dtype, dims(v_shape(p), 4), buffers.d_o};
  if (g.d_final_state)
    file->tensors["d_final_state"] = {g.d_final_state->dtype,
                                      dims(state_shape(p, dense_states(p, {})), 4),
                                      buffers.d_final_state};
}

GradientBuffers gradients_from_file(const io::SafetensorsFile& file, const Inputs& inputs,
                                    std::optional<DType> out_dtype) {
  const Problem& p = inputs.problem;
  GradientBuffers buffers =
      make_gradients(inputs, {.d_o = false, .d_final_state = false, .out_dtype = out_dtype});
  Gradients& g = buffers.gradients;
  const bool has_do = take(file, "do", v_shape(p), &g.d_o, &buffers.d_o);
  const bool has_state = take(file, "d_final_state", state_shape(p, dense_states(p, {})),
                              &g.d_final_state, &buffers.d_final_state);
  if (!has_do && !has_state)
    throw Error(invalid("do, d_final_state: the file has neither (kda gen --gradients adds them)"));
  return buffers;
}

io::SafetensorsFile file_from_gradients(const Problem& p, const GradientBuffers& buffers) {
  const Gradients& g = buffers.gradients;
  io::SafetensorsFile file;
  const auto put = [&](const char* name, const std::optional<TensorDesc>& desc,
                       const io::Buffer& buffer, const std::vector<int64_t>& shape) {
    if (desc) file.tensors[name] = {desc->dtype, shape, buffer};
  };
  put("dq", g.dq, buffers.dq, dims(qk_shape(p), 4));
  put("dk", g.dk, buffers.dk, dims(qk_shape(p), 4));
  put("dv", g.dv, buffers.dv, dims(v_shape(p), 4));
  put("dg", g.dg, buffers.dg, dims(g_shape(p), g.dg && is_a_head(p, *g.dg) ? 3 : 4));
  put("dbeta", g.dbeta, buffers.dbeta, dims(beta_shape(p), 3));
  put("dA_log", g.dA_log, buffers.dA_log, {p.num_value_heads});
  put("ddt_bias", g.ddt_bias, buffers.ddt_bias,
      dims(bias_shape(p), g.ddt_bias && is_bias_a_head(p, *g.ddt_bias) ? 1 : 2));
  put("d_initial_state", g.d_initial_state, buffers.d_initial_state,
      dims(state_shape(p, dense_states(p, {})), 4));
  file.metadata["state_layout"] = state_layout_name(p.state_layout);
  return file;
}

bool GradientComparison::within() const {
  return std::all_of(errors.begin(), errors.end(), [](const auto& entry) {
    return std::all_of(entry.second.begin(), entry.second.end(),
                       [](const HeadError& head) { return head.within(); });
  });
}

const HeadError* GradientComparison::worst(const std::string& name) const {
  const auto found = errors.find(name);
  return found == errors.end() ? nullptr : worst_error(found->second);
}

GradientComparison compare_gradients(const Inputs& inputs, const GradientBuffers& buffers,
                                     const CompareOptions& options,
                                     std::vector<oracle::HeadGradients>* truths) {
  const Problem& p = inputs.problem;
  const Gradients& g = buffers.gradients;
  const Tensors tensors = inputs.tensors();
  const std::vector<int64_t> offsets = inputs.offsets();
  const auto span_of = [&](int64_t n) {
    const auto i = static_cast<std::size_t>(n);
    return oracle::Span{offsets[i], offsets[i + 1]};
  };
  const int64_t total = p.num_sequences * p.num_value_heads;
  std::vector<oracle::HeadGradients> found;
  std::vector<oracle::HeadGradients>& truth = truths ? *truths : found;
  const bool known = !truth.empty();
  truth.resize(static_cast<std::size_t>(total));
  std::vector<double> d_final_norms(static_cast<std::size_t>(total));
  std::atomic<int64_t> done{0};
  auto run_oracle = [&](int64_t idx, int32_t) {
    const int64_t n = idx / p.num_value_heads;
    const int64_t head = idx % p.num_value_heads;
    std::vector<double> initial, d_o, d_final;
    if (g.d_final_state)
      d_final = oracle::load_state(p, dense_states(p, *g.d_final_state),
                                   buffers.d_final_state.data(), n, head);
    d_final_norms[static_cast<std::size_t>(idx)] = norm(d_final);
    if (known) return;
    if (p.initial_state)
      initial = oracle::load_state(p, *p.initial_state, tensors.initial_state, n, head);
    if (g.d_o)
      d_o = oracle::load_rows(p, *g.d_o, buffers.d_o.data(), span_of(n), head, p.value_dim);
    truth[static_cast<std::size_t>(idx)] =
        oracle::backward_head(p, tensors, span_of(n), head, initial, d_o, d_final);
    if (options.progress) options.progress(++done, total);
  };
  throw_if_error(parallel_tasks(total, options.num_threads, run_oracle));

  GradientComparison result;
  struct Sums {
    double error = 0, reference = 0;  // of squares
  };
  std::map<std::string, Sums> sums;
  CompareOptions of_fp32 = options;  // what operands add is said below
  of_fp32.operands.reset();
  const auto add_error = [&](const char* name, int64_t n, int64_t head, const TensorDesc& desc,
                             const std::vector<double>& values, const oracle::Gradient& reference,
                             bool decayed = false) {
    const oracle::Span span = span_of(n);
    HeadError entry = judge(values, reference.value, reference.magnitude, desc.dtype,
                            span.end - span.begin, of_fp32);
    entry.sequence = n;
    entry.head = head;
    const double left = norm(reference.value) / norm(reference.magnitude);
    Sums& sum = sums[name];
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double difference = values[i] - reference.value[i];
      sum.error += difference * difference;
      sum.reference += reference.value[i] * reference.value[i];
    }
    if (options.operands) {
      entry.tolerance += gradient_operand_tolerance(
          one_head_bound(name, *options.operands == DType::kFloat16), left,
          static_cast<int64_t>(values.size()), options.marginal, decayed);
    } else if (p.key_dim <= kFewChannels) {
      result.few_channels |= entry.error > entry.tolerance;
      entry.tolerance += kFewChannelsGradient;
    } else if (left < kCancelled) {
      result.cancelled |= entry.error > entry.tolerance;
      entry.tolerance += kCancelledRounding / std::max(left, kCancellation);
    }
    result.errors[name].push_back(entry);
  };
  const auto judge_rows = [&](const char* name, const std::optional<TensorDesc>& desc,
                              const io::Buffer& buffer, int64_t n, int64_t head, int64_t size,
                              const oracle::Gradient& reference) {
    if (desc)
      add_error(name, n, head, *desc,
                oracle::load_rows(p, *desc, buffer.data(), span_of(n), head, size), reference);
  };
  std::vector<oracle::Gradient> dA_log(static_cast<std::size_t>(p.num_value_heads));
  std::vector<oracle::Gradient> ddt_bias(static_cast<std::size_t>(p.num_value_heads));
  for (int64_t n = 0; n < p.num_sequences; ++n) {
    oracle::Gradient dq, dk;
    for (int64_t idx = 0; idx < p.num_value_heads; ++idx) {
      const int64_t q_head = idx / group_size(p), j = idx % group_size(p);
      const int64_t head = value_head_of(p, q_head, j);
      const auto at = static_cast<std::size_t>(n * p.num_value_heads + head);
      const oracle::HeadGradients& r = truth[at];
      judge_rows("dv", g.dv, buffers.dv, n, head, p.value_dim, r.dv);
      if (g.dg && is_a_head(p, *g.dg))
        judge_rows("dg", g.dg, buffers.dg, n, head, 1, sums_of_rows(r.dg, p.key_dim));
      else
        judge_rows("dg", g.dg, buffers.dg, n, head, p.key_dim, r.dg);
      judge_rows("dbeta", g.dbeta, buffers.dbeta, n, head, 1, r.dbeta);
      if (g.d_initial_state)
        add_error("d_initial_state", n, head, *g.d_initial_state,
                  oracle::load_state(p, dense_states(p, *g.d_initial_state),
                                     buffers.d_initial_state.data(), n, head),
                  r.d_initial_state, norm(r.d_initial_state.value) < kDecayed * d_final_norms[at]);
      add(r.dA_log, &dA_log[static_cast<std::size_t>(head)]);
      add(r.ddt_bias, &ddt_bias[static_cast<std::size_t>(head)]);
      add(r.dq, &dq);
      add(r.dk, &dk);
      if (j < group_size(p) - 1) continue;
      judge_rows("dq", g.dq, buffers.dq, n, q_head, p.key_dim, dq);
      judge_rows("dk", g.dk, buffers.dk, n, q_head, p.key_dim, dk);
      dq = dk = {};
    }
  }
  for (int64_t head = 0; head < p.num_value_heads && p.num_sequences > 0; ++head) {
    const auto at = static_cast<std::size_t>(head);
    const auto parameters = [&](const char* name, const std::optional<TensorDesc>& desc,
                                const io::Buffer& buffer, int64_t size,
                                const oracle::Gradient& reference) {
      if (!desc) return;
      std::vector<double> values;
      for (int64_t d = 0; d < size; ++d)
        values.push_back(load_double(buffer.data(), desc->dtype, head * desc->strides[0] + d));
      add_error(name, 0, head, *desc, values, reference);
    };
    parameters("dA_log", g.dA_log, buffers.dA_log, 1, dA_log[at]);
    if (g.ddt_bias && is_bias_a_head(p, *g.ddt_bias))
      parameters("ddt_bias", g.ddt_bias, buffers.ddt_bias, 1,
                 sums_of_rows(ddt_bias[at], p.key_dim));
    else
      parameters("ddt_bias", g.ddt_bias, buffers.ddt_bias, p.key_dim, ddt_bias[at]);
  }
  for (const auto& [name, sum] : sums)
    result.all_heads[name] = sum.reference > 0 ? std::sqrt(sum.error / sum.reference) : 0;
  return result;
}

}  // namespace kda::check
