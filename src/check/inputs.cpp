// SPDX-License-Identifier: Apache-2.0
#include "check/inputs.hpp"

#include <cmath>
#include <cstring>

#include "check/numbers.hpp"
#include "core/convert.hpp"
#include "core/layout.hpp"
#include "core/text.hpp"

namespace kda::check {
namespace {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(invalid(parts...));
}

template <class Enum>
struct Named {
  const char* name;
  Enum value;
};

template <class Enum, std::size_t kCount>
Enum parse_name(const char* what, const std::string& text, const Named<Enum> (&names)[kCount]) {
  std::string accepted;
  for (const auto& row : names) {
    if (text == row.name) return row.value;
    accepted += cat(accepted.empty() ? "" : ", ", row.name);
  }
  fail(what, ": '", text, "' is not one of ", accepted);
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += cat(i ? ", " : "", shape[i]);
  return text + "]";
}

/// The index of element `at`, counted row-major.
std::string index_text(int64_t at, std::vector<int64_t> shape) {
  for (std::size_t d = shape.size(); d-- > 0;) {
    const int64_t extent = shape[d];
    shape[d] = at % extent;
    at /= extent;
  }
  return shape_text(shape);
}

const io::FileTensor& required(const io::SafetensorsFile& file, const char* name,
                               std::size_t rank) {
  const auto found = file.tensors.find(name);
  if (found == file.tensors.end()) fail(name, ": the file has no such tensor, it is required");
  if (found->second.shape.size() != rank)
    fail(name, ": shape ", shape_text(found->second.shape), " does not have ", rank, " dimensions");
  return found->second;
}

const io::FileTensor* optional_tensor(const io::SafetensorsFile& file, const char* name) {
  const auto found = file.tensors.find(name);
  return found == file.tensors.end() ? nullptr : &found->second;
}

void expect_shape(const char* name, const io::FileTensor& tensor,
                  const std::vector<int64_t>& expected) {
  if (tensor.shape != expected)
    fail(name, ": shape ", shape_text(tensor.shape), ", expected ", shape_text(expected));
}

TensorDesc dense(const io::FileTensor& tensor, std::initializer_list<int64_t> shape) {
  return contiguous(tensor.dtype, shape);
}

double parse_number(const char* name, const std::string& text) {
  double value = 0;
  if (const char* fault = parse_real(text, &value))
    fail("__metadata__: ", name, " '", text, "' ", fault);
  return value;
}

bool parse_bool(const char* name, const std::string& text) {
  if (text == "0" || text == "1") return text == "1";
  fail("__metadata__: ", name, " '", text, "' is not 0 or 1");
}

/// The flag if given, else the metadata, else nothing; errors of the latter say so.
template <class Parse>
auto setting(const io::SafetensorsFile& file, const char* name,
             const std::optional<std::string>& flag, Parse parse)
    -> std::optional<decltype(parse(*flag))> {
  if (flag) return parse(*flag);
  const auto found = file.metadata.find(name);
  if (found == file.metadata.end()) return std::nullopt;
  try {
    return parse(found->second);
  } catch (const Error& error) {
    fail("__metadata__: ", error.what());
  }
}

void read_options(const io::SafetensorsFile& file, const Overrides& flags, Problem* p) {
  if (const auto gate = setting(file, "gate", flags.gate, parse_gate)) p->gate_mode = *gate;
  if (const auto beta = setting(file, "beta", flags.beta, parse_beta)) p->beta_mode = *beta;
  if (const auto layout = setting(file, "state_layout", flags.state_layout, parse_state_layout))
    p->state_layout = *layout;
  if (const auto map = setting(file, "head_map", flags.head_map, parse_head_map))
    p->head_map = *map;
  const auto metadata = [&](const char* name) -> const std::string* {
    const auto found = file.metadata.find(name);
    return found == file.metadata.end() ? nullptr : &found->second;
  };
  if (const std::string* text = metadata("lower_bound"))
    p->lower_bound = parse_number("lower_bound", *text);
  if (const std::string* text = metadata("scale")) p->scale = parse_number("scale", *text);
  if (const std::string* text = metadata("qk_l2norm"))
    p->qk_l2norm = parse_bool("qk_l2norm", *text);
  apply(flags, p);
}

void read_lengths(const io::SafetensorsFile& file, Inputs* inputs) {
  Problem& p = inputs->problem;
  const io::FileTensor* cu = optional_tensor(file, "cu_seqlens");
  if (!cu) return;
  if (cu->dtype != DType::kInt32 && cu->dtype != DType::kInt64)
    fail("cu_seqlens: dtype ", dtype_name(cu->dtype), " is not int32 or int64");
  if (cu->shape.size() != 1 || cu->shape[0] < 1)
    fail("cu_seqlens: shape ", shape_text(cu->shape), " is not [N + 1]");
  p.cu_seqlens = cu->dtype;
  p.num_sequences = cu->shape[0] - 1;
  for (int64_t i = 0; i < cu->shape[0]; ++i)
    inputs->cu_seqlens.push_back(cu->dtype == DType::kInt64 ? cu->data.as<int64_t>()[i]
                                                            : cu->data.as<int32_t>()[i]);
}

/// Refuses what validate() does, before sizes are multiplied: without tokens a file may claim any.
void check_sizes(const Problem& p) {
  const auto check = [](const char* name, int64_t size, int64_t most) {
    if (size > most) fail(name, " = ", size, " is above ", most);
  };
  check("batch: B", p.batch, int64_t{1} << 24);
  check("num_tokens: T", p.num_tokens, INT32_MAX);
  check("num_heads: H", p.num_heads, 65535);
  check("num_value_heads: HV", p.num_value_heads, 65535);
  check("key_dim: K", p.key_dim, kMaxHeadDim);
  check("value_dim: V", p.value_dim, kMaxHeadDim);
}

/// The first of each row of `size` equal elements; the rows have this shape.
io::Buffer first_of_rows(const io::FileTensor& g, const std::vector<int64_t>& rows, int64_t size) {
  const int64_t bytes = dtype_size(g.dtype), count = g.num_elements() / std::max<int64_t>(size, 1);
  io::Buffer first(static_cast<std::size_t>(count * bytes));
  for (int64_t i = 0; i < count; ++i) {
    const std::byte* row = g.data.data() + i * size * bytes;
    for (int64_t d = 1; d < size; ++d)
      if (std::memcmp(row, row + d * bytes, static_cast<std::size_t>(bytes)) != 0)
        fail("g: --head-gates needs channels that are equal, those of ", index_text(i, rows),
             " are ", load_double(row, g.dtype, 0), " and ", load_double(row, g.dtype, d));
    std::memcpy(first.data() + i * bytes, row, static_cast<std::size_t>(bytes));
  }
  return first;
}

/// g [B, T, HV, K], or one gate a head [B, T, HV].
void read_gates(const io::SafetensorsFile& file, bool head_gates_asked, Inputs* inputs) {
  Problem& p = inputs->problem;
  const std::vector<int64_t> rows = {p.batch, p.num_tokens, p.num_value_heads};
  const io::FileTensor* one = optional_tensor(file, "g");
  const bool a_head = one && one->shape.size() == 3;
  const io::FileTensor& g = required(file, "g", a_head ? 3 : 4);
  if (a_head)
    expect_shape("g", g, rows);
  else
    expect_shape("g", g, {p.batch, p.num_tokens, p.num_value_heads, p.key_dim});
  if (a_head || head_gates_asked)
    p.g = head_gates(g.dtype, p.batch, p.num_tokens, p.num_value_heads);
  else
    p.g = dense(g, {p.batch, p.num_tokens, p.num_value_heads, p.key_dim});
  inputs->g = !a_head && head_gates_asked ? first_of_rows(g, rows, p.key_dim) : g.data;
}

/// The gates use exp(A_log) in fp32.
void check_a_log(const io::FileTensor& A_log) {
  for (int64_t head = 0; head < A_log.num_elements(); ++head)
    if (const double value = load_double(A_log.data.data(), A_log.dtype, head);
        std::isinf(std::exp(static_cast<float>(value))))
      fail("A_log: ", value, " of head ", head, " is too large, exp(A_log) is not finite in fp32");
}

void read_gate_parameters(const io::SafetensorsFile& file, Inputs* inputs) {
  Problem& p = inputs->problem;
  if (p.gate_mode == GateMode::kLog) return;  // a file may carry them for another --gate
  if (const io::FileTensor* A_log = optional_tensor(file, "A_log")) {
    expect_shape("A_log", *A_log, {p.num_value_heads});
    p.A_log = dense(*A_log, {p.num_value_heads});
    inputs->A_log = A_log->data;
    if (A_log->dtype == DType::kFloat32 || A_log->dtype == DType::kFloat64) check_a_log(*A_log);
  }
  if (const io::FileTensor* bias = optional_tensor(file, "dt_bias")) {
    const bool a_head = has_head_gate(p) && bias->shape == std::vector<int64_t>{p.num_value_heads};
    if (bias->shape.size() == 1 && !a_head)
      expect_shape("dt_bias", *bias, {p.num_value_heads * p.key_dim});
    else if (!a_head)
      expect_shape("dt_bias", *bias, {p.num_value_heads, p.key_dim});
    p.dt_bias = a_head ? head_bias(bias->dtype, p.num_value_heads)
                       : dense(*bias, {p.num_value_heads, p.key_dim});
    inputs->dt_bias = bias->data;
  }
}

void read_initial_state(const io::SafetensorsFile& file, Inputs* inputs) {
  Problem& p = inputs->problem;
  const io::FileTensor* state = optional_tensor(file, "initial_state");
  if (!state) return;
  StateDesc desc;
  desc.num_slots = p.num_sequences;
  const Shape shape = state_shape(p, desc);
  expect_shape("initial_state", *state, {shape.begin(), shape.end()});
  desc.tensor = dense(*state, {shape[0], shape[1], shape[2], shape[3]});
  p.initial_state = desc;
  inputs->initial_state = state->data;
}

}  // namespace

DType parse_dtype(const std::string& text) {
  return parse_name<DType>("dtype", text,
                           {{"fp32", DType::kFloat32},
                            {"bf16", DType::kBFloat16},
                            {"fp16", DType::kFloat16},
                            {"fp64", DType::kFloat64}});
}
GateMode parse_gate(const std::string& text) {
  return parse_name<GateMode>("gate", text,
                              {{"log", GateMode::kLog},
                               {"softplus", GateMode::kSoftplus},
                               {"bounded", GateMode::kBounded}});
}
BetaMode parse_beta(const std::string& text) {
  return parse_name<BetaMode>("beta", text,
                              {{"plain", BetaMode::kPlain},
                               {"sigmoid", BetaMode::kSigmoid},
                               {"sigmoid2", BetaMode::kSigmoid2}});
}
StateLayout parse_state_layout(const std::string& text) {
  return parse_name<StateLayout>("state_layout", text,
                                 {{"kv", StateLayout::kKV}, {"vk", StateLayout::kVK}});
}
HeadMap parse_head_map(const std::string& text) {
  return parse_name<HeadMap>("head_map", text,
                             {{"grouped", HeadMap::kGrouped}, {"tiled", HeadMap::kTiled}});
}

std::vector<int64_t> Inputs::offsets() const {
  if (!cu_seqlens.empty()) return cu_seqlens;
  std::vector<int64_t> offsets;
  for (int64_t n = 0; n <= problem.num_sequences; ++n) offsets.push_back(n * problem.num_tokens);
  return offsets;
}

Tensors Inputs::tensors() const {
  Tensors t;
  t.q = q.data();
  t.k = k.data();
  t.v = v.data();
  t.g = g.data();
  t.beta = beta.data();
  t.A_log = A_log.data();
  t.dt_bias = dt_bias.data();
  t.initial_state = const_cast<std::byte*>(initial_state.data());
  return t;
}

void Outputs::attach(Tensors* tensors) {
  tensors->o = o.data();
  tensors->final_state = final_state.data();
  tensors->checkpoints = checkpoints.data();
}

DType state_type(const Problem& p) {
  return p.v.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

void want_final_state(Problem* p) {
  StateDesc desc;
  desc.num_slots = p->num_sequences;
  const Shape shape = state_shape(*p, desc);
  desc.tensor = contiguous(state_type(*p), {shape[0], shape[1], shape[2], shape[3]});
  p->final_state = desc;
}

Outputs make_outputs(Problem* p, DType out_dtype) {
  p->o = contiguous(out_dtype, {p->batch, p->num_tokens, p->num_value_heads, p->value_dim});
  Outputs outputs;
  const auto poisoned = [](int64_t elements, DType dtype) {
    io::Buffer buffer(static_cast<std::size_t>(elements * dtype_size(dtype)));
    buffer.fill(0xff);
    return buffer;
  };
  outputs.o = poisoned(p->batch * p->num_tokens * p->num_value_heads * p->value_dim, out_dtype);
  const int64_t state = p->num_value_heads * p->key_dim * p->value_dim;
  if (p->final_state)
    outputs.final_state = poisoned(p->final_state->num_slots * state, p->final_state->tensor.dtype);
  if (p->checkpoints)
    outputs.checkpoints = poisoned(p->checkpoints->num_slots * state, p->checkpoints->tensor.dtype);
  return outputs;
}

void apply(const Overrides& overrides, Problem* p) {
  if (overrides.gate) p->gate_mode = parse_gate(*overrides.gate);
  if (overrides.beta) p->beta_mode = parse_beta(*overrides.beta);
  if (overrides.state_layout) p->state_layout = parse_state_layout(*overrides.state_layout);
  if (overrides.head_map) p->head_map = parse_head_map(*overrides.head_map);
  if (overrides.lower_bound) p->lower_bound = *overrides.lower_bound;
  if (overrides.scale) p->scale = *overrides.scale;
  if (overrides.qk_l2norm) p->qk_l2norm = *overrides.qk_l2norm;
}

Inputs inputs_from_file(const io::SafetensorsFile& file, const Overrides& overrides) {
  Inputs inputs;
  Problem& p = inputs.problem;
  const io::FileTensor& q = required(file, "q", 4);
  const io::FileTensor& k = required(file, "k", 4);
  const io::FileTensor& v = required(file, "v", 4);
  const io::FileTensor& beta = required(file, "beta", 3);
  p.batch = q.shape[0];
  p.num_tokens = q.shape[1];
  p.num_heads = q.shape[2];
  p.key_dim = q.shape[3];
  p.num_value_heads = v.shape[2];
  p.value_dim = v.shape[3];
  check_sizes(p);
  expect_shape("k", k, q.shape);
  expect_shape("v", v, {p.batch, p.num_tokens, p.num_value_heads, p.value_dim});
  expect_shape("beta", beta, {p.batch, p.num_tokens, p.num_value_heads});
  p.q = dense(q, {p.batch, p.num_tokens, p.num_heads, p.key_dim});
  p.k = dense(k, {p.batch, p.num_tokens, p.num_heads, p.key_dim});
  p.v = dense(v, {p.batch, p.num_tokens, p.num_value_heads, p.value_dim});
  p.beta = dense(beta, {p.batch, p.num_tokens, p.num_value_heads});
  p.o = contiguous(v.dtype, {p.batch, p.num_tokens, p.num_value_heads, p.value_dim});
  p.num_sequences = p.batch;
  read_gates(file, overrides.head_gates, &inputs);
  read_options(file, overrides, &p);
  read_lengths(file, &inputs);
  read_gate_parameters(file, &inputs);
  read_initial_state(file, &inputs);
  inputs.q = q.data;
  inputs.k = k.data;
  inputs.v = v.data;
  inputs.beta = beta.data;
  throw_if_error(validate(p));
  return inputs;
}

namespace {

/// The index of the first NaN of a tensor with these dimensions, else nothing.
std::string find_nan(const TensorDesc& desc, const std::vector<int64_t>& shape,
                     const io::Buffer& from) {
  int64_t left = 1;
  for (const int64_t extent : shape) left *= extent;
  std::vector<int64_t> at(shape.size(), 0);
  for (int64_t element = 0; left > 0; --left) {
    if (std::isnan(load_double(from.data(), desc.dtype, element))) return shape_text(at);
    for (std::size_t d = shape.size(); d-- > 0;) {
      element += desc.strides[d];
      if (++at[d] < shape[d]) break;
      element -= desc.strides[d] * shape[d];
      at[d] = 0;
    }
  }
  return "";
}

/// The dimensions of g in memory, and of dt_bias.
std::vector<int64_t> gate_dims(const Problem& p) {
  std::vector<int64_t> shape = {p.batch, p.num_tokens, p.num_value_heads};
  if (!has_head_gate(p)) shape.push_back(p.key_dim);
  return shape;
}
std::vector<int64_t> bias_dims(const Problem& p) {
  if (has_head_bias(p)) return {p.num_value_heads};
  return {p.num_value_heads, p.key_dim};
}

}  // namespace

std::string describe_nan(const Inputs& inputs) {
  const Problem& p = inputs.problem;
  const int64_t B = p.batch, T = p.num_tokens, H = p.num_heads, HV = p.num_value_heads;
  std::string text;
  const auto look = [&](const char* name, const TensorDesc& desc, const std::vector<int64_t>& shape,
                        const io::Buffer& from) {
    if (const std::string at = find_nan(desc, shape, from); !at.empty())
      text += cat(text.empty() ? "" : ", ", name, at);
  };
  look("q", p.q, {B, T, H, p.key_dim}, inputs.q);
  look("k", p.k, {B, T, H, p.key_dim}, inputs.k);
  look("v", p.v, {B, T, HV, p.value_dim}, inputs.v);
  look("g", p.g, gate_dims(p), inputs.g);
  look("beta", p.beta, {B, T, HV}, inputs.beta);
  if (p.A_log) look("A_log", *p.A_log, {HV}, inputs.A_log);
  if (p.dt_bias) look("dt_bias", *p.dt_bias, bias_dims(p), inputs.dt_bias);
  if (p.initial_state) {
    const Shape shape = state_shape(p, *p.initial_state);
    look("initial_state", p.initial_state->tensor, {shape.begin(), shape.end()},
         inputs.initial_state);
  }
  return text;
}

namespace {

bool is_dense(const TensorDesc& desc, const std::vector<int64_t>& shape) {
  int64_t stride = 1;
  for (std::size_t d = shape.size(); d-- > 0; stride *= shape[d])
    if (desc.strides[d] != stride) return false;
  return true;
}

/// In row-major order, whatever its strides are.
io::FileTensor packed(const TensorDesc& desc, const std::vector<int64_t>& shape,
                      const io::Buffer& from) {
  if (is_dense(desc, shape)) return {desc.dtype, shape, from};
  io::FileTensor tensor{desc.dtype, shape, {}};
  const int64_t count = tensor.num_elements(), size = dtype_size(desc.dtype);
  tensor.data = io::Buffer(static_cast<std::size_t>(count * size));
  for (int64_t n = 0; n < count; ++n) {
    int64_t rest = n, at = 0;
    for (std::size_t d = shape.size(); d-- > 0; rest /= tensor.shape[d])
      at += rest % tensor.shape[d] * desc.strides[d];
    std::memcpy(tensor.data.data() + n * size, from.data() + at * size,
                static_cast<std::size_t>(size));
  }
  return tensor;
}

}  // namespace

io::SafetensorsFile file_from_inputs(const Inputs& inputs) {
  const Problem& p = inputs.problem;
  io::SafetensorsFile file;
  const int64_t B = p.batch, T = p.num_tokens, H = p.num_heads, HV = p.num_value_heads;
  file.tensors["q"] = packed(p.q, {B, T, H, p.key_dim}, inputs.q);
  file.tensors["k"] = packed(p.k, {B, T, H, p.key_dim}, inputs.k);
  file.tensors["v"] = packed(p.v, {B, T, HV, p.value_dim}, inputs.v);
  file.tensors["g"] = packed(p.g, gate_dims(p), inputs.g);
  file.tensors["beta"] = packed(p.beta, {B, T, HV}, inputs.beta);
  if (p.A_log) file.tensors["A_log"] = packed(*p.A_log, {HV}, inputs.A_log);
  if (p.dt_bias) file.tensors["dt_bias"] = packed(*p.dt_bias, bias_dims(p), inputs.dt_bias);
  if (p.initial_state) {
    const Shape shape = state_shape(p, *p.initial_state);
    file.tensors["initial_state"] = packed(
        p.initial_state->tensor, {shape[0], shape[1], shape[2], shape[3]}, inputs.initial_state);
  }
  if (p.cu_seqlens) {
    io::Buffer offsets(inputs.cu_seqlens.size() * sizeof(int64_t));
    std::memcpy(offsets.data(), inputs.cu_seqlens.data(), offsets.size());
    file.tensors["cu_seqlens"] = {
        DType::kInt64, {static_cast<int64_t>(inputs.cu_seqlens.size())}, offsets};
  }
  file.metadata = {{"gate", gate_mode_name(p.gate_mode)},
                   {"beta", beta_mode_name(p.beta_mode)},
                   {"qk_l2norm", p.qk_l2norm ? "1" : "0"},
                   {"state_layout", state_layout_name(p.state_layout)}};
  if (p.head_map != HeadMap::kGrouped) file.metadata["head_map"] = head_map_name(p.head_map);
  if (p.gate_mode == GateMode::kBounded) file.metadata["lower_bound"] = write_real(p.lower_bound);
  if (p.scale) file.metadata["scale"] = write_real(*p.scale);
  return file;
}

io::SafetensorsFile file_from_outputs(const Problem& p, const Outputs& outputs) {
  io::SafetensorsFile file;
  file.tensors["o"] = {
      p.o.dtype, {p.batch, p.num_tokens, p.num_value_heads, p.value_dim}, outputs.o};
  if (p.final_state) {
    const Shape shape = state_shape(p, *p.final_state);
    file.tensors["final_state"] = {
        p.final_state->tensor.dtype, {shape.begin(), shape.end()}, outputs.final_state};
  }
  file.metadata["state_layout"] = state_layout_name(p.state_layout);
  return file;
}

}  // namespace kda::check
