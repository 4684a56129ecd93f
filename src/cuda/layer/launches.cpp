// SPDX-License-Identifier: Apache-2.0
// The operations around KDA: from their calls, which are checked, to launches.
#include "cuda/layer/launches.hpp"

#include <cmath>
#include <utility>

#include "core/text.hpp"
#include "core/views.hpp"
#include "cuda/launch/zero_rows.hpp"
#include "cuda/layer/arguments.hpp"
#include "cuda/layer/sizes.hpp"

namespace kda::cuda::layer {
namespace {

constexpr int64_t kZeroBlocks = 256;  // two for each SM of a large GPU

/// Strides of dimensions of size 1 are never used, whatever they are.
View view_of(const TensorView& given, const kda::Shape& shape) {
  View view{given.data, {}, static_cast<Element>(static_cast<int32_t>(given.dtype))};
  for (std::size_t d = 0; d < 4; ++d) view.strides[d] = shape[d] == 1 ? 0 : given.strides[d];
  return view;
}

/// Whether the elements along the last of `rank` dimensions, of `channels`, may be read `vector` at
/// a time.
bool fits(const View& view, int rank, int64_t channels, int64_t vector) {
  if (!view.base) return true;
  const int64_t size = view.type == Element::kFloat32 ? 4 : 2;
  bool fits =
      channels % vector == 0 && view.strides[rank - 1] == (channels == 1 ? 0 : 1) &&
      reinterpret_cast<std::uintptr_t>(view.base) % std::min<int64_t>(16, vector * size) == 0;
  for (int d = 0; d + 1 < rank; ++d) fits = fits && view.strides[d] % vector == 0;
  return fits;
}

ShortConvArgs conv_args(const ShortConv& call) {
  ShortConvArgs a;
  const int64_t N = stage::num_sequences(call), D = call.channels;
  const kda::Shape rows = {call.batch, call.num_tokens, D, 1};
  const auto states = [&](const ConvState& given) {
    return ConvStates{view_of(given.tensor, {given.num_slots, D, call.state_width, 1}),
                      given.num_slots, given.indices, call.first_slot};
  };
  a.runs.num_sequences = N, a.runs.num_tokens = call.num_tokens;
  a.runs.lengths = call.cu_seqlens;
  a.runs.wide_lengths = call.cu_seqlens_dtype == DType::kInt64;
  a.channels = D;
  a.width = static_cast<int32_t>(call.width);
  a.silu = call.activation == Activation::kSilu;
  a.x = view_of(call.x, rows), a.y = view_of(call.y, rows);
  a.weight = view_of(call.weight, {D, call.width, 1, 1});
  a.bias = view_of(call.bias, {D, 1, 1, 1});
  a.initial = states(call.initial_state), a.final_state = states(call.final_state);
  a.state_width = call.state_width;
  a.has_state = call.has_state;
  return a;
}

/// Zeros in the rows of `written` [row, token, channel] that no sequence has, after the kernels of
/// a call.
Status zero_rows(const ShortConv& call, const View& written) {
  if (!call.cu_seqlens) return {};
  ZeroRowsArgs args;
  args.lengths = call.cu_seqlens;
  args.wide_lengths = call.cu_seqlens_dtype == DType::kInt64;
  args.num_sequences = call.num_sequences, args.num_tokens = call.num_tokens;
  args.add({.base = written.base,
            .stride_t = written.strides[1],
            .stride_c = written.strides[2],
            .size = call.channels,
            .bytes = written.type == Element::kFloat32 ? 4 : 2});
  return launch_zero_rows(args, kZeroBlocks, {call.stream});
}

void set_runs(const ShortConv& call, int64_t run, Runs* runs) {
  runs->run = run;
  runs->runs = runs_of(call, run);
}

NormArgs norm_args(const GatedRmsNorm& call) {
  NormArgs a;
  const kda::Shape rows = {call.rows[0], call.rows[1], call.rows[2], call.channels};
  a.rows = call.rows[0] * call.rows[1] * call.rows[2];
  a.tokens = Divisor(call.rows[1]), a.heads = Divisor(call.rows[2]);
  a.channels = static_cast<int32_t>(call.channels);
  a.activation = static_cast<int32_t>(call.activation);
  a.eps = static_cast<float>(call.eps);
  a.x = view_of(call.x, rows), a.y = view_of(call.y, rows), a.gate = view_of(call.gate, rows);
  a.weight = view_of(call.weight, {call.channels, 1, 1, 1});
  return a;
}

Status check_norm(const GatedRmsNorm& call) {
  const int64_t rows = call.rows[0] * call.rows[1] * call.rows[2];
  if (rows > INT32_MAX)
    return invalid("rows: their product is ", rows, ", must be below 2^31 on a GPU");
  if (call.channels > INT32_MAX)
    return invalid("channels: is ", call.channels, ", must be below 2^31 on a GPU");
  return {};
}

/// Whether each fits a thread of kWide channels.
template <int kWide>
bool all_fit(int64_t channels, std::initializer_list<const View*> views) {
  for (const View* view : views)
    if (!fits(*view, 4, channels, kWide)) return false;
  return true;
}

}  // namespace

/// Which of the views along channels a thread of `vector` of them reads as one.
void set_wide(int64_t vector, ShortConvArgs* a) {
  const int64_t D = a->channels;
  const auto along = [&](const View& view, int rank, int channel) {
    View turned = view;  // channels last
    std::swap(turned.strides[channel], turned.strides[rank - 1]);
    return fits(turned, rank, D, vector);
  };
  a->weight.wide = along(a->weight, 2, 0), a->bias.wide = along(a->bias, 1, 0);
  a->initial.view.wide = along(a->initial.view, 3, 1);
  a->final_state.view.wide = along(a->final_state.view, 3, 1);
  View taps = a->weight;  // all of a channel, then the next
  a->dense_taps = taps.strides[1] == 1 && (taps.strides[0] == 4 || D == 1) &&
                  fits({taps.base, {1}, taps.type}, 1, 4 * D, vector);
}

Status short_conv(const ShortConv& call) {
  ShortConvArgs a = conv_args(call);
  const bool wide = call.width == 4 && fits(a.x, 3, call.channels, kWideForward) &&
                    fits(a.y, 3, call.channels, kWideForward);
  if (wide) set_wide(kWideForward, &a);
  set_runs(call, forward_run(call, wide ? kWideForward : 1), &a.runs);
  KDA_RETURN_IF_ERROR(launch_short_conv(a, wide, {call.stream}));
  return zero_rows(call, a.y);
}

Status short_conv_backward(const ShortConv& call, const ShortConvGradients& g) {
  ShortConvBackwardArgs a{.forward = conv_args(call)};
  const int64_t N = stage::num_sequences(call), D = call.channels;
  const kda::Shape rows = {call.batch, call.num_tokens, D, 1}, states = {N, D, call.state_width, 1};
  a.forward.final_state = {}, a.forward.y = {};
  a.dy = view_of(g.dy, rows), a.dx = view_of(g.dx, rows);
  a.d_final = view_of(g.d_final_state, states), a.d_initial = view_of(g.d_initial_state, states);
  const bool sums = g.dweight.data || g.dbias.data;
  if (sums) a.parts = static_cast<float*>(call.workspace);
  const bool wide = call.width == 4 && fits(a.forward.x, 3, D, kWideBackward) &&
                    fits(a.dy, 3, D, kWideBackward) && fits(a.dx, 3, D, kWideBackward);
  if (wide) set_wide(kWideBackward, &a.forward);
  set_runs(call, backward_run(call), &a.forward.runs);
  KDA_RETURN_IF_ERROR(launch_short_conv_backward(a, wide, {call.stream}));
  KDA_RETURN_IF_ERROR(zero_rows(call, a.dx));
  if (!sums) return {};
  SumArgs sum;
  sum.parts = a.parts;
  sum.num_parts = (call.cu_seqlens ? 1 : call.batch) * a.forward.runs.runs;
  sum.row = (call.width + 1) * D;
  sum.columns = g.dbias.data ? sum.row : call.width * D;
  sum.channels = D, sum.taps = call.width;
  sum.dweight = view_of(g.dweight, {D, call.width, 1, 1});
  sum.dbias = view_of(g.dbias, {D, 1, 1, 1});
  return launch_sum(sum, {call.stream});
}

Status gated_rms_norm(const GatedRmsNorm& call) {
  KDA_RETURN_IF_ERROR(check_norm(call));
  NormArgs a = norm_args(call);
  a.groups = forward_groups(a.rows);
  const bool wide = all_fit<kWideForward>(call.channels, {&a.x, &a.y, &a.gate}) &&
                    fits(a.weight, 1, call.channels, kWideForward);
  return launch_norm(a, wide, {call.stream});
}

Status gated_rms_norm_backward(const GatedRmsNorm& call, const GatedRmsNormGradients& g) {
  KDA_RETURN_IF_ERROR(check_norm(call));
  NormBackwardArgs b{.forward = norm_args(call)};
  const kda::Shape rows = {call.rows[0], call.rows[1], call.rows[2], call.channels};
  b.forward.y = {};
  b.dy = view_of(g.dy, rows), b.dx = view_of(g.dx, rows), b.dgate = view_of(g.dgate, rows);
  if (g.dweight.data) b.parts = static_cast<float*>(call.workspace);
  b.forward.groups = norm_groups(call);
  const bool wide = all_fit<kWideForward>(
                        call.channels, {&b.forward.x, &b.forward.gate, &b.dy, &b.dx, &b.dgate}) &&
                    fits(b.forward.weight, 1, call.channels, kWideForward);
  KDA_RETURN_IF_ERROR(launch_norm_backward(b, wide, {call.stream}));
  if (!b.parts) return {};
  SumArgs sum;
  sum.parts = b.parts;
  const int vector = wide ? kWideForward : 1, lanes = lanes_of(vector, call.channels);
  const int64_t of_block = kNormThreads / lanes;
  sum.num_parts = lanes * vector < call.channels ? std::min(b.forward.groups, b.forward.rows)
                                                 : (b.forward.groups + of_block - 1) / of_block;
  if (b.forward.rows == 0) sum.num_parts = 0;
  sum.row = sum.columns = sum.channels = call.channels;
  sum.dweight = view_of(g.dweight, {call.channels, 1, 1, 1});
  return launch_sum(sum, {call.stream});
}

Status fused_decode(const FusedDecode& call) {
  FusedDecodeArgs a;
  const int64_t N = call.num_sequences, T = call.num_tokens, H = call.num_heads, D = call.head_dim;
  const kda::Shape heads = {N, T, H, D};
  const auto part = [&](const FusedDecode::Part& given) {
    return DecodePart{view_of(given.x, {N, T, H * D, 1}),
                      view_of(given.weight, {H * D, call.width, 1, 1}),
                      view_of(given.bias, {H * D, 1, 1, 1}),
                      view_of(given.state, {call.num_slots, H * D, call.state_width, 1})};
  };
  a.num_sequences = N, a.num_tokens = static_cast<int32_t>(T);
  a.width = static_cast<int32_t>(call.width);
  a.heads = Divisor(H);
  a.parts[0] = part(call.q), a.parts[1] = part(call.k), a.parts[2] = part(call.v);
  a.state_width = call.state_width;
  a.g = view_of(call.g, heads), a.beta = view_of(call.beta, {N, T, H, 1});
  a.gate.gate_mode = call.gate_mode, a.gate.beta_mode = call.beta_mode;
  a.gate.l2norm = call.qk_l2norm;
  a.gate.lower_bound = static_cast<float>(call.lower_bound);
  a.gate.scale =
      static_cast<float>(call.scale == 0 ? 1 / std::sqrt(static_cast<double>(D)) : call.scale);
  const View A_log = view_of(call.A_log, {H, 1, 1, 1}),
             dt_bias = view_of(call.dt_bias, {H * D, 1, 1, 1});
  a.gate.A_log = static_cast<const float*>(A_log.base), a.gate.stride_A = A_log.strides[0];
  a.gate.dt_bias = static_cast<const float*>(dt_bias.base), a.gate.stride_dt = dt_bias.strides[0];
  const View state = view_of(call.state, {call.num_slots, H, D, D});
  a.states = {.base = state.base,
              .stride_slot = state.strides[0],
              .stride_head = state.strides[1],
              .stride_row = D,
              .num_slots = call.num_slots,
              .indices = call.slots,
              .bf16 = call.state.dtype == DType::kBFloat16,
              .vk = call.state_layout == StateLayout::kVK,
              .vectors = 1};
  a.states.mask = call.has_state;
  a.states.first_slot = static_cast<int32_t>(std::clamp<int64_t>(call.first_slot, 0, INT32_MAX));
  a.norm = call.norm, a.norm_eps = static_cast<float>(call.norm_eps);
  a.activation = call.activation;
  a.norm_weight = view_of(call.norm_weight, {D, 1, 1, 1});
  a.output_gate = view_of(call.output_gate, heads), a.y = view_of(call.y, heads);
  a.ahead = 128;  // half of those that run at a time on a large GPU
  return launch_fused_decode(a, {call.stream});
}

}  // namespace kda::cuda::layer
