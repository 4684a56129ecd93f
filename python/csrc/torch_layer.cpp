// SPDX-License-Identifier: Apache-2.0
// The operators around KDA in its layer: libkda::short_conv, short_conv_update and gated_rms_norm,
// each with a twin ..._into that writes to a tensor of the caller's; short_conv_backward and
// gated_rms_norm_backward; and libkda::fused_decode. What
// they compute: include/kda/short_conv.hpp, gated_rms_norm.hpp and fused_decode.hpp; derivatives:
// python/libkda/_binding/layer_ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <utility>

#include "describe.hpp"
#include "device.hpp"
#include "memory.hpp"
#include "plans.hpp"

namespace kda_torch {
namespace {

using MaybeTensor = std::optional<Tensor>;

constexpr Types kElements = {"float32, bfloat16 or float16",
                             {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half}};

int32_t threads() {
  uint32_t count = 0;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&count));
  return static_cast<int32_t>(count);
}

const Tensor& expect_device(const Tensor& x) {
  if (!x.defined()) refuse("x must be a tensor, got None");
  if (!x.is_cpu() && !x.is_cuda())
    refuse("x must be on the CPU or on a CUDA device, got ", device_text(x));
  expect(x, x, "x", kElements, "x");
  return x;
}

/// Where a call runs; expect() has looked at its pointers. `x` has the device that is current.
template <class Call>
void set_place(Call* call, const Tensor& x) {
  call->num_threads = threads();
  if (!x.is_cuda()) return;
  call->device = KDA_CUDA;
  call->trusted = 1;
  call->stream = current_stream(x);
}

/// run() with the memory that a backward needs for the gradients of weights, if it makes any.
template <class Call, class Run>
void with_sums(Call* call, bool sums, const Tensor& x, kda_status (*bytes_of)(const Call*, size_t*),
               const Run& run) {
  size_t needed = 0;
  if (sums) check(bytes_of(call, &needed));
  with_workspace(needed, x, [&](void* workspace, size_t bytes) {
    call->workspace = workspace, call->workspace_bytes = bytes;
    check(run());
  });
}

/// A tensor as the C ABI has it.
kda_tensor tensor_of(const Tensor& x) {
  kda_tensor target{};
  target.data = const_cast<void*>(x.const_data_ptr());
  target.dtype = dtype_of(x);
  target.alignment = static_cast<int64_t>(x.element_size());  // of a described tensor: not 0
  const auto strides = x.strides();
  for (size_t d = 0; d < strides.size() && d < 4; ++d) target.strides[d] = strides[d];
  return target;
}

kda_tensor tensor_of(const Tensor& x, const Tensor& first, const char* name,
                     std::initializer_list<int64_t> shape, const char* sources) {
  expect(x, first, name, kElements, "x");
  expect_shape(x, name, shape, sources);
  return tensor_of(x);
}

// ---- short convolution --------------------------------------------------------------------------

/// Everything but y and states.
kda_short_conv_call conv_of(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                            const MaybeTensor& cu_seqlens, bool silu) {
  if (x.dim() != 3) refuse("x must have shape [B, T, D], got ", x.dim(), " dimensions");
  kda_short_conv_call call{};
  call.struct_size = sizeof(call);
  call.batch = x.size(0), call.num_tokens = x.size(1), call.channels = x.size(2);
  call.x = tensor_of(x);
  expect(weight, x, "weight", kElements, "x");
  if (weight.dim() != 2 || weight.size(0) != call.channels)
    refuse("weight must have shape [", call.channels, ", W] (sizes of x), got ",
           shape_text(weight.sizes().begin(), weight.sizes().end()));
  if (weight.size(1) < 2 || weight.size(1) > 4)
    refuse("weight must have 2 to 4 taps, got ", weight.size(1));
  call.weight = tensor_of(weight);
  call.width = static_cast<int32_t>(weight.size(1));
  if (bias) call.bias = tensor_of(*bias, x, "bias", {call.channels}, "x");
  call.activation = silu ? KDA_ACTIVATION_SILU : KDA_ACTIVATION_NONE;
  call.num_sequences = call.batch;
  if (cu_seqlens) {
    expect(*cu_seqlens, x, "cu_seqlens", kLengths, "x");
    if (cu_seqlens->dim() != 1 || cu_seqlens->size(0) < 1 || !cu_seqlens->is_contiguous())
      refuse("cu_seqlens must have shape [N + 1] and be contiguous");
    if (call.batch != 1) refuse("x must have B = 1 with cu_seqlens, got ", call.batch);
    call.cu_seqlens = cu_seqlens->const_data_ptr();
    call.cu_seqlens_dtype = dtype_of(*cu_seqlens);
    call.num_sequences = cu_seqlens->size(0) - 1;
  }
  set_place(&call, x);
  return call;
}

/// Where the number of sequences comes from.
const char* sources_of(const kda_short_conv_call& call) {
  return call.cu_seqlens ? "x, cu_seqlens" : "x";
}

/// [slots, D, S] with S inputs that the convolution needs, or more.
void describe_states(kda_state* target, kda_short_conv_call* call, const Tensor& x,
                     const Tensor& states, const char* name, int64_t slots) {
  expect(states, x, name, kElements, "x");
  if (states.dim() != 3)
    refuse(name, " must have shape [slots, D, S], got ", states.dim(), " dimensions");
  expect_shape(states, name, {slots, call->channels, states.size(2)}, sources_of(*call));
  if (states.size(2) < call->width - 1)
    refuse(name, " must hold at least ", call->width - 1, " inputs (taps of weight), got ",
           states.size(2));
  target->tensor = tensor_of(states);
  target->num_slots = slots;
  call->state_width = states.size(2);
}

Tensor new_like(const char* name, const Tensor& x) {
  const auto sizes = x.sizes();
  return new_tensor(name, x, {sizes.data(), sizes.size()}, dtype_number(x));
}

/// A tensor of the caller's that the outputs go to.
kda_tensor out_of(const Tensor& out, const Tensor& x, const kda_short_conv_call& call) {
  return tensor_of(out, x, "out", {call.batch, call.num_tokens, call.channels}, "x");
}

/// Computes a call that has its y, and returns the final state.
Tensor run_conv(kda_short_conv_call call, const Tensor& x, const MaybeTensor& initial_state,
                int64_t state_width) {
  const int64_t N = call.num_sequences;
  if (initial_state)
    describe_states(&call.initial_state, &call, x, *initial_state, "initial_state", N);
  if (state_width != 0 && initial_state && state_width != call.state_width)
    refuse("state_width must be that of initial_state, ", call.state_width, ", got ", state_width);
  if (state_width < 0) refuse("state_width must not be negative, got ", state_width);
  const bool wanted = state_width != 0;
  const Tensor final_state =
      new_tensor<3>("final_state", x, {wanted ? N : 0, call.channels, state_width},
                    dtype_number(initial_state ? *initial_state : x));
  if (wanted) describe_states(&call.final_state, &call, x, final_state, "final_state", N);
  check(kda_short_conv(&call));
  return final_state;
}

std::tuple<Tensor, Tensor> short_conv(Tensor x, Tensor weight, MaybeTensor bias,
                                      MaybeTensor initial_state, MaybeTensor cu_seqlens, bool silu,
                                      int64_t state_width) {
  const OnDevice on_device(expect_device(x));
  kda_short_conv_call call = conv_of(x, weight, bias, cu_seqlens, silu);
  const Tensor y = new_like("y", x);
  call.y = tensor_of(y);
  return {y, run_conv(call, x, initial_state, state_width)};
}

Tensor short_conv_into(Tensor x, Tensor weight, MaybeTensor bias, MaybeTensor initial_state,
                       MaybeTensor cu_seqlens, bool silu, int64_t state_width, Tensor out) {
  const OnDevice on_device(expect_device(x));
  kda_short_conv_call call = conv_of(x, weight, bias, cu_seqlens, silu);
  call.y = out_of(out, x, call);
  return run_conv(call, x, initial_state, state_width);
}

/// Computes a call that has its y, in place in `states`.
void run_conv_update(kda_short_conv_call call, const Tensor& x, const Tensor& states,
                     const MaybeTensor& indices, const MaybeTensor& has_state, int64_t first_slot) {
  const int64_t N = call.num_sequences;
  const int64_t slots = indices && states.dim() > 0 ? states.size(0) : N;
  describe_states(&call.initial_state, &call, x, states, "states", slots);
  if (slots == 0 && N > 0) refuse("states has no slots");
  const auto pointer = [&](const Tensor& given, const char* name, const Types& types) {
    expect(given, x, name, types, "x");
    expect_shape(given, name, {N}, sources_of(call));
    if (!given.is_contiguous()) refuse(name, " must be contiguous");
    return given.const_data_ptr();
  };
  if (indices)
    call.initial_state.indices =
        static_cast<const int32_t*>(pointer(*indices, "indices", kIndices));
  if (has_state)
    call.has_state = static_cast<const uint8_t*>(pointer(*has_state, "has_state", kMasks));
  call.final_state = call.initial_state;
  call.first_slot = first_slot;
  check(kda_short_conv(&call), States::kPool);
}

Tensor short_conv_update(Tensor x, Tensor states, Tensor weight, MaybeTensor bias,
                         MaybeTensor cu_seqlens, MaybeTensor indices, MaybeTensor has_state,
                         bool silu, int64_t first_slot) {
  const OnDevice on_device(expect_device(x));
  kda_short_conv_call call = conv_of(x, weight, bias, cu_seqlens, silu);
  const Tensor y = new_like("y", x);
  call.y = tensor_of(y);
  run_conv_update(call, x, states, indices, has_state, first_slot);
  return y;
}

void short_conv_update_into(Tensor x, Tensor states, Tensor weight, MaybeTensor bias,
                            MaybeTensor cu_seqlens, MaybeTensor indices, MaybeTensor has_state,
                            bool silu, int64_t first_slot, Tensor out) {
  const OnDevice on_device(expect_device(x));
  kda_short_conv_call call = conv_of(x, weight, bias, cu_seqlens, silu);
  call.y = out_of(out, x, call);
  run_conv_update(call, x, states, indices, has_state, first_slot);
}

/// Bits of `wanted`, in the order of what a backward returns.
template <class Describe>
Tensor gradient(const char* name, const Tensor& like, const MaybeTensor& x, int64_t wanted, int bit,
                const Describe& describe) {
  if (!(wanted >> bit & 1)) return new_tensor<1>(name, like, {0}, dtype_number(x ? *x : like));
  if (!x) refuse("wanted: the ", name, ", which the forward has not");
  const Tensor made = new_like(name, *x);
  describe(tensor_of(made));
  return made;
}

void expect_wanted(int64_t wanted, int64_t count) {
  if (wanted <= 0 || wanted >= int64_t{1} << count)
    refuse("wanted must have bits 0 to ", count - 1, ", at least one of them, got ", wanted);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> short_conv_backward(
    MaybeTensor d_y, MaybeTensor d_final_state, Tensor x, Tensor weight, MaybeTensor bias,
    MaybeTensor initial_state, MaybeTensor cu_seqlens, bool silu, int64_t wanted) {
  const OnDevice on_device(expect_device(x));
  kda_short_conv_call call = conv_of(x, weight, bias, cu_seqlens, silu);
  const int64_t N = call.num_sequences;
  expect_wanted(wanted, 4);
  kda_short_conv_gradients g{};
  g.struct_size = sizeof(g);
  if (initial_state)
    describe_states(&call.initial_state, &call, x, *initial_state, "initial_state", N);
  if (d_final_state) {
    const int64_t width = call.state_width;
    kda_state described{};
    describe_states(&described, &call, x, *d_final_state, "d_final_state", N);
    if (initial_state && width != call.state_width)
      refuse("d_final_state must have the width of initial_state, ", width);
    g.d_final_state = described.tensor;
  }
  if (d_y) g.dy = tensor_of(*d_y, x, "d_y", {call.batch, call.num_tokens, call.channels}, "x");
  const Tensor dx =
      gradient("gradient of x", x, x, wanted, 0, [&](const kda_tensor& made) { g.dx = made; });
  const Tensor dweight = gradient("gradient of weight", x, weight, wanted, 1,
                                  [&](const kda_tensor& made) { g.dweight = made; });
  const Tensor dbias = gradient("gradient of bias", x, bias, wanted, 2,
                                [&](const kda_tensor& made) { g.dbias = made; });
  const Tensor d_state = gradient("gradient of initial_state", x, initial_state, wanted, 3,
                                  [&](const kda_tensor& made) { g.d_initial_state = made; });
  with_sums(&call, g.dweight.data || g.dbias.data, x, kda_short_conv_backward_workspace,
            [&] { return kda_short_conv_backward(&call, &g); });
  return {dx, dweight, dbias, d_state};
}

// ---- gated RMS norm -----------------------------------------------------------------------------

/// The last dimension is D, those before it are rows.
kda_tensor rows_of(const Tensor& x) {
  kda_tensor target = tensor_of(x);
  const auto strides = x.strides();
  for (size_t d = 0; d < 4; ++d) {
    const size_t missing = 4 - strides.size();
    target.strides[d] = d < missing ? 0 : strides[d - missing];
  }
  return target;
}

void expect_same_shape(const Tensor& x, const char* name, const Tensor& like) {
  expect(x, like, name, kElements, "x");
  const auto sizes = x.sizes(), expected = like.sizes();
  if (sizes.size() != expected.size() || !std::equal(sizes.begin(), sizes.end(), expected.begin()))
    refuse(name, " must have the shape of x, ", shape_text(expected.begin(), expected.end()),
           ", got ", shape_text(sizes.begin(), sizes.end()));
}

kda_gated_rms_norm_call norm_of(const Tensor& x, const MaybeTensor& gate, const MaybeTensor& weight,
                                double eps, int64_t activation) {
  if (x.dim() < 1 || x.dim() > 4) refuse("x must have 1 to 4 dimensions, got ", x.dim());
  kda_gated_rms_norm_call call{};
  call.struct_size = sizeof(call);
  const auto sizes = x.sizes();
  for (size_t d = 0; d < 3; ++d) {
    const size_t missing = 4 - sizes.size();
    call.rows[d] = d < missing ? 1 : sizes[d - missing];
  }
  call.channels = sizes[sizes.size() - 1];
  call.eps = eps;
  if (activation < KDA_ACTIVATION_NONE || activation > KDA_ACTIVATION_SIGMOID)
    refuse("activation must be 0 to 2, got ", activation);
  call.activation = static_cast<int32_t>(activation);
  set_place(&call, x);
  call.x = rows_of(x);
  if (gate) {
    expect_same_shape(*gate, "gate", x);
    call.gate = rows_of(*gate);
  }
  if (weight) call.weight = tensor_of(*weight, x, "weight", {call.channels}, "x");
  return call;
}

Tensor gated_rms_norm(Tensor x, MaybeTensor gate, MaybeTensor weight, double eps,
                      int64_t activation) {
  const OnDevice on_device(expect_device(x));
  kda_gated_rms_norm_call call = norm_of(x, gate, weight, eps, activation);
  const Tensor y = new_like("y", x);
  call.y = rows_of(y);
  check(kda_gated_rms_norm(&call));
  return y;
}

void gated_rms_norm_into(Tensor x, MaybeTensor gate, MaybeTensor weight, double eps,
                         int64_t activation, Tensor out) {
  const OnDevice on_device(expect_device(x));
  kda_gated_rms_norm_call call = norm_of(x, gate, weight, eps, activation);
  expect_same_shape(out, "out", x);
  call.y = rows_of(out);
  check(kda_gated_rms_norm(&call));
}

std::tuple<Tensor, Tensor, Tensor> gated_rms_norm_backward(Tensor d_y, Tensor x, MaybeTensor gate,
                                                           MaybeTensor weight, double eps,
                                                           int64_t activation, int64_t wanted) {
  const OnDevice on_device(expect_device(x));
  kda_gated_rms_norm_call call = norm_of(x, gate, weight, eps, activation);
  expect_wanted(wanted, 3);
  expect_same_shape(d_y, "d_y", x);
  kda_gated_rms_norm_gradients g{};
  g.struct_size = sizeof(g);
  // A gradient may be one number for all.
  if (d_y.strides()[static_cast<size_t>(d_y.dim()) - 1] != 1) d_y = torch::stable::contiguous(d_y);
  g.dy = rows_of(d_y);
  Tensor dx = gradient("gradient of x", x, x, wanted, 0, [](const kda_tensor&) {});
  Tensor dgate = gradient("gradient of gate", x, gate, wanted, 1, [](const kda_tensor&) {});
  const Tensor dweight = gradient("gradient of weight", x, weight, wanted, 2,
                                  [&](const kda_tensor& made) { g.dweight = made; });
  if (wanted & 1) g.dx = rows_of(dx);
  if (wanted & 2) g.dgate = rows_of(dgate);
  with_sums(&call, g.dweight.data != nullptr, x, kda_gated_rms_norm_backward_workspace,
            [&] { return kda_gated_rms_norm_backward(&call, &g); });
  return {dx, dgate, dweight};
}

// ---- decode step ----------------------------------------------------------------------------

/// `x` [.., 3 H D] or the like from channel `first` on.
kda_tensor from_channel(const kda_tensor& x, const Tensor& of, int64_t first, size_t dim) {
  kda_tensor moved = x;
  moved.data =
      static_cast<char*>(x.data) + first * x.strides[dim] * static_cast<int64_t>(of.element_size());
  return moved;
}

/// A tensor whose rows kernels read: `x`, or a dense copy of it.
Tensor with_dense_rows(const Tensor& x) {
  const auto sizes = x.sizes(), strides = x.strides();
  const size_t last = sizes.size() - 1;
  return strides[last] == 1 || sizes[last] == 1 ? x : torch::stable::contiguous(x);
}

/// The step that `call` describes where no kernel has it whole: three convolutions, decode and the
/// norm, with fp32 between them. kda_fused_decode() has looked at the call. What may still fail,
/// memory and the plan, comes before anything is written.
class StepByStep {
 public:
  StepByStep(const kda_fused_decode_call& call, const Tensor& x, const Tensor& raw_g,
             const Tensor& state, const MaybeTensor& output_gate, const MaybeTensor& norm_weight,
             const Tensor& out)
      : call_(call), x_(x), state_(state), g_(with_dense_rows(raw_g)), out_(out) {
    for (Tensor& row : qkv_) row = new_rows("rows of a convolution");
    if (output_gate) gate_ = with_dense_rows(*output_gate);
    if (norm_weight) norm_weight_ = with_dense_rows(*norm_weight);
    y_ = call.norm ? new_rows("y") : with_dense_rows(out);
    if (call.norm && !writes_out_rows()) normed_ = new_rows("y");
  }

  void run() {
    kda_problem p = problem();
    const ForwardPlan plan = forward_plan(p, options_for(x_), {}, States::kPool);
    with_workspace(kda_plan_workspace_bytes(plan.get()), x_, [&](void* workspace, size_t bytes) {
      for (size_t part = 0; part < 3; ++part)
        convolve(*std::array{&call_.q, &call_.k, &call_.v}[part], qkv_[part]);
      check(kda_run(plan.get(), &p, workspace, bytes), States::kPool);
    });
    if (call_.norm) norm();
    Tensor out = out_;
    const Tensor& result = call_.norm ? (normed_ ? *normed_ : out_) : y_;
    if (result.const_data_ptr() != out.const_data_ptr()) torch::stable::copy_(out, result);
  }

 private:
  Tensor new_rows(const char* name) const {
    return new_tensor<4>(name, x_,
                         {call_.num_sequences, call_.num_tokens, call_.num_heads, call_.head_dim},
                         aoti_torch_dtype_float32());
  }
  bool writes_out_rows() const { return out_.strides()[3] == 1 || call_.head_dim == 1; }

  kda_state state_of(const kda_tensor& tensor) const {
    kda_state state{};
    state.tensor = tensor;
    state.indices = call_.slots, state.indexed = call_.slots != nullptr;
    state.num_slots = call_.num_slots, state.present = 1;
    return state;
  }

  void convolve(const kda_fused_decode_part& part, const Tensor& y) const {
    kda_short_conv_call c{};
    c.struct_size = sizeof(c);
    c.batch = c.num_sequences = call_.num_sequences, c.num_tokens = call_.num_tokens;
    c.channels = call_.num_heads * call_.head_dim;
    c.width = static_cast<int32_t>(call_.width), c.state_width = call_.state_width;
    c.x = part.x, c.weight = part.weight, c.bias = part.bias;
    c.y = tensor_of(y);
    c.y.strides[2] = 1;  // heads and channels are one dimension
    c.initial_state = c.final_state = state_of(part.state);
    c.has_state = call_.has_state, c.first_slot = call_.first_slot;
    c.activation = KDA_ACTIVATION_SILU;
    set_place(&c, x_);
    check(kda_short_conv(&c), States::kPool);
  }

  kda_problem problem() const {
    kda_problem p;
    kda_problem_init(&p);
    const int64_t N = call_.num_sequences, T = call_.num_tokens, H = call_.num_heads,
                  D = call_.head_dim;
    p.operation = KDA_DECODE;
    p.batch = p.num_sequences = N, p.num_tokens = T;
    p.num_heads = p.num_value_heads = H, p.key_dim = p.value_dim = D;
    const auto rows = [&](kda_tensor* target, const Tensor& tensor, const char* name) {
      describe(target, tensor, x_, name, kRows, {N, T, H, D});
    };
    rows(&p.q, qkv_[0], "q"), rows(&p.k, qkv_[1], "k"), rows(&p.v, qkv_[2], "v");
    rows(&p.g, g_, "raw_g"), rows(&p.o, y_, "out");
    p.beta = call_.beta, p.A_log = call_.A_log, p.dt_bias = call_.dt_bias;
    if (p.dt_bias.data) p.dt_bias.strides[0] = D, p.dt_bias.strides[1] = 1;  // [H D] as [H, D]
    p.gate_mode = call_.gate_mode, p.beta_mode = call_.beta_mode;
    p.lower_bound = call_.lower_bound, p.scale = call_.scale, p.has_scale = 1;
    p.qk_l2norm = call_.qk_l2norm, p.state_layout = call_.state_layout;
    describe_state(&p.initial_state, state_, x_, "state", call_.state_layout == KDA_STATE_VK, p);
    p.initial_state.indices = call_.slots, p.initial_state.indexed = call_.slots != nullptr;
    p.initial_state.num_slots = call_.num_slots;
    p.first_slot = call_.first_slot, p.zero_skipped = 1;
    if (call_.has_state) p.initial_state_mask = call_.has_state, p.has_initial_state_mask = 1;
    if (x_.is_cuda()) p.stream = call_.stream;
    p.trusted = 1;
    return p;
  }

  void norm() const {
    kda_gated_rms_norm_call c{};
    c.struct_size = sizeof(c);
    c.rows[0] = call_.num_sequences, c.rows[1] = call_.num_tokens, c.rows[2] = call_.num_heads;
    c.channels = call_.head_dim;
    c.eps = call_.norm_eps, c.activation = call_.activation;
    c.x = rows_of(y_), c.y = rows_of(normed_ ? *normed_ : out_);
    if (gate_) c.gate = rows_of(*gate_);
    if (norm_weight_) c.weight = tensor_of(*norm_weight_);
    set_place(&c, x_);
    check(kda_gated_rms_norm(&c));
  }

  const kda_fused_decode_call& call_;
  const Tensor &x_, &state_;
  std::array<Tensor, 3> qkv_;
  Tensor g_, y_, out_;
  MaybeTensor gate_, norm_weight_, normed_;
};

void fused_decode(Tensor x, Tensor weight, MaybeTensor bias, Tensor conv_state, Tensor raw_g,
                  Tensor raw_beta, MaybeTensor A_log, MaybeTensor dt_bias,
                  MaybeTensor state_indices, Tensor state, Tensor out, MaybeTensor output_gate,
                  MaybeTensor norm_weight, MaybeTensor has_state, int64_t gate_mode,
                  int64_t beta_mode, double lower_bound, double scale, bool l2norm, double norm_eps,
                  int64_t activation, int64_t first_slot, bool state_v_first) {
  const OnDevice on_device(expect_device(x));
  kda_fused_decode_call call{};
  call.struct_size = sizeof(call);
  if (x.dim() != 3 || raw_g.dim() != 4 || weight.dim() != 3 || conv_state.dim() != 3)
    refuse(
        "x must have shape [N, T, 3 H D], weight [3, W, H D], conv_state [slots, 3 H D, S] and "
        "raw_g [N, T, H, D]");
  const int64_t N = x.size(0), T = x.size(1), H = raw_g.size(2), D = raw_g.size(3);
  const int64_t W = weight.size(1), slots = conv_state.size(0), S = conv_state.size(2);
  constexpr const char* kSources = "x, raw_g, weight, conv_state";
  call.num_sequences = N, call.num_tokens = T, call.num_heads = H, call.head_dim = D;
  call.width = W, call.state_width = S;
  call.num_slots = state_indices ? slots : std::min(slots, N);  // slot n of sequence n
  const kda_tensor rows = tensor_of(x, x, "x", {N, T, 3 * H * D}, kSources);
  const kda_tensor taps = tensor_of(weight, x, "weight", {3, W, H * D}, kSources);
  const kda_tensor states = tensor_of(conv_state, x, "conv_state", {slots, 3 * H * D, S}, kSources);
  kda_tensor biases{};
  if (bias) biases = tensor_of(*bias, x, "bias", {3 * H * D}, kSources);
  int64_t part = 0;
  for (kda_fused_decode_part* target : {&call.q, &call.k, &call.v}) {
    const int64_t first = part * H * D;
    target->x = from_channel(rows, x, first, 2);
    target->weight = from_channel(taps, weight, part, 0);
    std::swap(target->weight.strides[0], target->weight.strides[2]);  // [H D, W]
    target->state = from_channel(states, conv_state, first, 1);
    if (bias) target->bias = from_channel(biases, *bias, first, 0);
    ++part;
  }
  call.g = tensor_of(raw_g, x, "raw_g", {N, T, H, D}, kSources);
  call.beta = tensor_of(raw_beta, x, "raw_beta", {N, T, H}, kSources);
  call.gate_mode = static_cast<int32_t>(gate_mode),
  call.beta_mode = static_cast<int32_t>(beta_mode);
  call.lower_bound = lower_bound, call.scale = scale, call.qk_l2norm = l2norm;
  if (A_log) describe_parameter(&call.A_log, *A_log, x, "A_log", {H});
  if (dt_bias) describe_parameter(&call.dt_bias, *dt_bias, x, "dt_bias", {H * D});
  call.state = tensor_of(state, x, "state", {slots, H, D, D}, kSources);
  call.state_layout = state_v_first ? KDA_STATE_VK : KDA_STATE_KV;
  if (state_indices)
    call.slots = static_cast<const int32_t*>(
        dense_pointer(*state_indices, x, "state_indices", kIndices, {N}));
  if (has_state)
    call.has_state =
        static_cast<const uint8_t*>(dense_pointer(*has_state, x, "has_state", kMasks, {N}));
  call.first_slot = first_slot;
  call.norm = norm_weight.has_value(), call.norm_eps = norm_eps;
  call.activation = static_cast<int32_t>(activation);
  if (norm_weight) call.norm_weight = tensor_of(*norm_weight, x, "norm_weight", {D}, kSources);
  if (output_gate)
    call.output_gate = tensor_of(*output_gate, x, "output_gate", {N, T, H, D}, kSources);
  call.y = tensor_of(out, x, "out", {N, T, H, D}, kSources);
  if (scale == 0) refuse("scale must not be 0, which stands for the default in C");
  if (output_gate && !norm_weight) refuse("output_gate needs norm_weight");
  if (x.is_cuda()) call.device = KDA_CUDA, call.stream = current_stream(x), call.trusted = 1;
  const kda_status status = kda_fused_decode(&call);
  if (status != KDA_UNSUPPORTED) return check(status);
  StepByStep(call, x, raw_g, state, output_gate, norm_weight, out).run();
}

}  // namespace
}  // namespace kda_torch

STABLE_TORCH_LIBRARY_FRAGMENT(libkda, m) {
  m.def(
      "short_conv(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? "
      "cu_seqlens, bool silu, int state_width) -> (Tensor, Tensor)");
  m.def(
      "short_conv_into(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? "
      "cu_seqlens, bool silu, int state_width, Tensor(a!) out) -> Tensor");
  m.def(
      "short_conv_update_into(Tensor x, Tensor(a!) states, Tensor weight, Tensor? bias, Tensor? "
      "cu_seqlens, Tensor? indices, Tensor? has_state, bool silu, int first_slot, Tensor(b!) out) "
      "-> ()");
  m.def(
      "gated_rms_norm_into(Tensor x, Tensor? gate, Tensor? weight, float eps, int activation, "
      "Tensor(a!) out) -> ()");
  m.def(
      "short_conv_update(Tensor x, Tensor(a!) states, Tensor weight, Tensor? bias, Tensor? "
      "cu_seqlens, Tensor? indices, Tensor? has_state, bool silu, int first_slot) -> Tensor");
  m.def(
      "short_conv_backward(Tensor? d_y, Tensor? d_final_state, Tensor x, Tensor weight, Tensor? "
      "bias, Tensor? initial_state, Tensor? cu_seqlens, bool silu, int wanted) -> (Tensor, Tensor, "
      "Tensor, Tensor)");
  m.def(
      "gated_rms_norm(Tensor x, Tensor? gate, Tensor? weight, float eps, int activation) -> "
      "Tensor");
  m.def(
      "gated_rms_norm_backward(Tensor d_y, Tensor x, Tensor? gate, Tensor? weight, float eps, int "
      "activation, int wanted) -> (Tensor, Tensor, Tensor)");
  m.def(
      "fused_decode(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) conv_state, Tensor raw_g, "
      "Tensor raw_beta, Tensor? A_log, Tensor? dt_bias, Tensor? state_indices, Tensor(b!) state, "
      "Tensor(c!) out, Tensor? output_gate, Tensor? norm_weight, Tensor? has_state, int gate_mode, "
      "int beta_mode, float lower_bound, float scale, bool l2norm, float norm_eps, int activation, "
      "int first_slot, bool state_v_first) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(libkda, CompositeExplicitAutograd, m) {
  m.impl("short_conv", TORCH_BOX(&kda_torch::short_conv));
  m.impl("short_conv_into", TORCH_BOX(&kda_torch::short_conv_into));
  m.impl("short_conv_update", TORCH_BOX(&kda_torch::short_conv_update));
  m.impl("short_conv_update_into", TORCH_BOX(&kda_torch::short_conv_update_into));
  m.impl("gated_rms_norm_into", TORCH_BOX(&kda_torch::gated_rms_norm_into));
  m.impl("short_conv_backward", TORCH_BOX(&kda_torch::short_conv_backward));
  m.impl("gated_rms_norm", TORCH_BOX(&kda_torch::gated_rms_norm));
  m.impl("gated_rms_norm_backward", TORCH_BOX(&kda_torch::gated_rms_norm_backward));
  m.impl("fused_decode", TORCH_BOX(&kda_torch::fused_decode));
}
