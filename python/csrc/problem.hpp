// SPDX-License-Identifier: Apache-2.0
// The arguments that all operators share, as the C ABI describes a problem.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "describe.hpp"
#include "memory.hpp"

namespace kda_torch {

using MaybeTensor = std::optional<Tensor>;

/// Options that all operators share, as kda.h numbers them.
struct Modes {
  int64_t gate_mode, beta_mode;
  double lower_bound, scale;
  bool l2norm, state_v_first;
};

inline int32_t mode_of(const char* name, int64_t value, int64_t last) {
  if (value < 0 || value > last) refuse(name, " must be 0 to ", last, ", got ", value);
  return static_cast<int32_t>(value);
}

/// Gates of tokens whose `sizes` the first three are: a gate a channel, or one a head, which is of
/// three dimensions.
inline void describe_gates(kda_tensor* target, const Tensor& x, const Tensor& q, const char* name,
                           const std::array<int64_t, 3>& sizes, int64_t K) {
  expect(x, q, name, kRows);
  if (x.dim() != 3) return describe(target, x, q, name, kRows, {sizes[0], sizes[1], sizes[2], K});
  describe(target, x, q, name, kRows, {sizes[0], sizes[1], sizes[2]});
  target->strides[3] = 0;
  target->alignment = static_cast<int64_t>(x.element_size());
}

/// g or its gradient: [B, T, HV, K], or one gate a head, [B, T, HV].
inline void describe_gates(kda_tensor* target, const Tensor& x, const Tensor& q, const char* name,
                           const kda_problem& p) {
  describe_gates(target, x, q, name, {p.batch, p.num_tokens, p.num_value_heads}, p.key_dim);
}

/// dt_bias or its gradient: HV * K elements, or HV beside one gate a head.
inline void describe_bias(kda_tensor* target, const Tensor& x, const Tensor& q, const char* name,
                          const kda_problem& p) {
  const int64_t HV = p.num_value_heads, K = p.key_dim;
  if (K == 1 || p.g.strides[3] != 0 || x.numel() != HV)
    return describe_parameter(target, x, q, name, {HV, K});
  describe_parameter(target, x, q, name, {HV, 1});
  target->strides[1] = 0;
}

/// Before anything is asked of its shape.
inline void expect_rows(const Tensor& x, const Tensor& q, const char* name) {
  expect(x, q, name, kRows);
  if (x.dim() != 4) refuse(name, " must have 4 dimensions, got ", x.dim());
}

/// Everything but the output, states and lengths.
inline kda_problem problem_of(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                              const Tensor& beta, const MaybeTensor& A_log,
                              const MaybeTensor& dt_bias, const Modes& modes) {
  expect_rows(q, q, "q"), expect_rows(v, q, "v");
  kda_problem p;
  kda_problem_init(&p);
  const int64_t B = q.size(0), T = q.size(1), H = q.size(2), K = q.size(3);
  const int64_t HV = v.size(2), V = v.size(3);
  p.batch = p.num_sequences = B;
  p.num_tokens = T;
  p.num_heads = H;
  p.num_value_heads = HV;
  p.key_dim = K;
  p.value_dim = V;
  describe(&p.q, q, q, "q", kRows, {B, T, H, K});
  describe(&p.k, k, q, "k", kRows, {B, T, H, K});
  describe(&p.v, v, q, "v", kRows, {B, T, HV, V});
  describe_gates(&p.g, g, q, "g", p);
  describe(&p.beta, beta, q, "beta", kRows, {B, T, HV});
  if (A_log) describe_parameter(&p.A_log, *A_log, q, "A_log", {HV});
  if (dt_bias) describe_bias(&p.dt_bias, *dt_bias, q, "dt_bias", p);
  p.gate_mode = mode_of("gate_mode", modes.gate_mode, KDA_GATE_BOUNDED);
  p.beta_mode = mode_of("beta_mode", modes.beta_mode, KDA_BETA_SIGMOID2);
  p.state_layout = modes.state_v_first ? KDA_STATE_VK : KDA_STATE_KV;
  p.lower_bound = modes.lower_bound;
  p.scale = modes.scale;
  p.has_scale = 1;
  p.qk_l2norm = modes.l2norm;
  p.trusted = 1;  // expect() has looked
  return p;
}

/// Whether q/k heads are tiled over the value heads.
inline void set_head_map(kda_problem* p, int64_t head_map) {
  p->head_map = mode_of("head_map", head_map, KDA_HEADS_TILED);
}

inline std::vector<int64_t> values_of(const Tensor& host, const char* name, int64_t count) {
  const void* data = dense_pointer(host, host, name, kLengths, {count});
  if (dtype_of(host) == KDA_INT64) {
    const auto* values = static_cast<const int64_t*>(data);
    return {values, values + count};
  }
  const auto* values = static_cast<const int32_t*>(data);
  return {values, values + count};
}

/// Lengths that stand for those of a GPU: errors name what the caller gave.
inline void check_hint(const std::vector<int64_t>& hint, int64_t tokens) {
  if (hint.front() != 0)
    refuse("cu_seqlens_cpu: starts with ", hint.front(), ", must start with 0");
  if (hint.back() != tokens)
    refuse("cu_seqlens_cpu: ends with ", hint.back(), ", must end with T = ", tokens);
  for (size_t n = 0; n + 1 < hint.size(); ++n)
    if (hint[n + 1] < hint[n])
      refuse("cu_seqlens_cpu: entry ", n + 1, " = ", hint[n + 1], " is below entry ", n, " = ",
             hint[n]);
}

/// cu_seqlens as kernels read it, and its copy on the host if there is one.
inline std::vector<int64_t> set_lengths(kda_problem* p, const Tensor& q,
                                        const MaybeTensor& cu_seqlens,
                                        const MaybeTensor& cu_seqlens_cpu) {
  if (!cu_seqlens) {
    if (cu_seqlens_cpu) refuse("cu_seqlens_cpu is given without cu_seqlens");
    return {};
  }
  const Tensor& cu = *cu_seqlens;
  if (cu.dim() != 1 || cu.size(0) == 0)
    refuse("cu_seqlens must have shape [N + 1], got ",
           shape_text(cu.sizes().begin(), cu.sizes().end()));
  p->cu_seqlens = dense_pointer(cu, q, "cu_seqlens", kLengths, {cu.size(0)});
  p->num_sequences = cu.size(0) - 1;
  p->has_cu_seqlens = 1;
  p->cu_seqlens_dtype = dtype_of(cu);
  std::vector<int64_t> lengths;
  if (q.is_cpu()) lengths = values_of(cu, "cu_seqlens", cu.size(0));
  if (!cu_seqlens_cpu) return lengths;
  if (!cu_seqlens_cpu->is_cpu())
    refuse("cu_seqlens_cpu must be on the CPU, got ", device_text(*cu_seqlens_cpu));
  std::vector<int64_t> hint = values_of(*cu_seqlens_cpu, "cu_seqlens_cpu", cu.size(0));
  for (size_t n = 0; n < lengths.size(); ++n)
    if (lengths[n] != hint[n])
      refuse("cu_seqlens_cpu: entry ", n, " = ", hint[n], " is ", lengths[n], " in cu_seqlens");
  if (lengths.empty()) check_hint(hint, q.size(1));
  return hint;
}

/// Which sequences start from their initial state; the others start from zero.
inline void set_mask(kda_problem* p, const Tensor& q, const MaybeTensor& has_state) {
  if (!has_state) return;
  if (!p->initial_state.present) refuse("has_state is given without initial_state");
  p->initial_state_mask = static_cast<const uint8_t*>(
      dense_pointer(*has_state, q, "has_state", kMasks, {p->num_sequences}));
  p->has_initial_state_mask = 1;
}

inline void set_output(kda_problem* p, const Tensor& o, const Tensor& q) {
  describe(&p->o, o, q, "o", kRows, {p->batch, p->num_tokens, p->num_value_heads, p->value_dim});
}

/// The output of a forward, new, of the type of v.
inline Tensor new_output(kda_problem* p, const Tensor& q, const Tensor& v) {
  const Tensor o = new_tensor<4>(
      "o", v, {p->batch, p->num_tokens, p->num_value_heads, p->value_dim}, dtype_number(v));
  set_output(p, o, q);
  return o;
}

/// The final states, new, fp32 or fp64 where that is computed in; without slots where none are
/// wanted.
inline Tensor new_final_state(kda_problem* p, const Tensor& q, bool state_v_first, bool wanted) {
  const int64_t HV = p->num_value_heads, K = p->key_dim, V = p->value_dim;
  const Tensor state = new_tensor<4>(
      "final_state", q,
      {wanted ? p->num_sequences : 0, HV, state_v_first ? V : K, state_v_first ? K : V},
      computes_in_float64(q) ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32());
  if (wanted) describe_state(&p->final_state, state, q, "final_state", state_v_first, *p);
  return state;
}

/// Where sequences start from.
inline void set_initial_state(kda_problem* p, const Tensor& q, const MaybeTensor& initial_state,
                              const MaybeTensor& has_state, bool state_v_first) {
  if (initial_state)
    describe_state(&p->initial_state, *initial_state, q, "initial_state", state_v_first, *p);
  set_mask(p, q, has_state);
}

}  // namespace kda_torch
