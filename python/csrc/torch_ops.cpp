// SPDX-License-Identifier: Apache-2.0
// The operators libkda::forward, forward_into and update on PyTorch's stable ABI (2.10 and later):
// one library for every Python and every torch. Meaning of the arguments: include/kda/problem.hpp;
// what users call: python/libkda/kda.py.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "describe.hpp"
#include "device.hpp"
#include "plan_cache.hpp"

namespace kda_torch {
namespace {

using MaybeTensor = std::optional<Tensor>;

/// Options that both operators share, as kda.h numbers them.
struct Modes {
  int64_t gate_mode, beta_mode;
  double lower_bound, scale;
  bool l2norm, state_v_first;
};

/// An uninitialised contiguous tensor where `like` is, without a way through the dispatcher.
template <size_t kRank>
Tensor new_tensor(const Tensor& like, const std::array<int64_t, kRank>& shape, int32_t dtype) {
  std::array<int64_t, kRank> strides;
  int64_t stride = 1;
  for (size_t d = kRank; d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(shape[d], 1);
  }
  int32_t device_type = 0;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(kRank, shape.data(), strides.data(), dtype,
                                                  device_type, like.get_device_index(), &handle));
  return Tensor(handle);
}

void expect_beside(const Tensor& x, const Tensor& q, const char* name) {
  STD_TORCH_CHECK(x.is_cuda() == q.is_cuda() && x.get_device_index() == q.get_device_index(),
                  "libkda: ", name, " must be on the device of q");
}

/// Everything but states and lengths.
kda_problem problem_of(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                       const Tensor& beta, const Tensor& o, const MaybeTensor& A_log,
                       const MaybeTensor& dt_bias, const Modes& modes) {
  STD_TORCH_CHECK(q.dim() == 4 && v.dim() == 4, "libkda: q and v must have four dimensions");
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
  describe(&p.q, q, "q", {B, T, H, K});
  describe(&p.k, k, "k", {B, T, H, K});
  describe(&p.v, v, "v", {B, T, HV, V});
  describe(&p.g, g, "g", {B, T, HV, K});
  describe(&p.beta, beta, "beta", {B, T, HV});
  describe(&p.o, o, "o", {B, T, HV, V});
  expect_beside(k, q, "k"), expect_beside(v, q, "v"), expect_beside(g, q, "g");
  expect_beside(beta, q, "beta"), expect_beside(o, q, "o");
  if (A_log) {
    describe_parameter(&p.A_log, *A_log, "A_log", {HV});
    expect_beside(*A_log, q, "A_log");
  }
  if (dt_bias) {
    describe_parameter(&p.dt_bias, *dt_bias, "dt_bias", {HV, K});
    expect_beside(*dt_bias, q, "dt_bias");
  }
  p.gate_mode = static_cast<int32_t>(modes.gate_mode);
  p.beta_mode = static_cast<int32_t>(modes.beta_mode);
  p.state_layout = modes.state_v_first ? KDA_STATE_VK : KDA_STATE_KV;
  p.lower_bound = modes.lower_bound;
  p.scale = modes.scale;
  p.has_scale = 1;
  p.qk_l2norm = modes.l2norm;
  p.trusted = 1;  // expect_beside() has looked
  return p;
}

/// cu_seqlens as kernels read it, and its copy on the host if there is one.
std::vector<int64_t> set_lengths(kda_problem* p, const Tensor& q, const MaybeTensor& cu_seqlens,
                                 const MaybeTensor& cu_seqlens_cpu) {
  if (!cu_seqlens) return {};
  const Tensor& cu = *cu_seqlens;
  STD_TORCH_CHECK(cu.dim() == 1 && cu.size(0) > 0 && cu.is_contiguous(),
                  "libkda: cu_seqlens must be contiguous, of shape [N + 1]");
  expect_beside(cu, q, "cu_seqlens");
  p->num_sequences = cu.size(0) - 1;
  p->has_cu_seqlens = 1;
  p->cu_seqlens_dtype = dtype_of(cu, "cu_seqlens");
  p->cu_seqlens = cu.const_data_ptr();
  const Tensor* host = cu_seqlens_cpu ? &*cu_seqlens_cpu : q.is_cpu() ? &cu : nullptr;
  if (!host) return {};
  STD_TORCH_CHECK(host->is_cpu() && host->is_contiguous(),
                  "libkda: cu_seqlens_cpu must be a contiguous CPU tensor");
  expect_shape(*host, "cu_seqlens_cpu", {cu.size(0)});
  const int64_t count = host->size(0);
  if (dtype_of(*host, "cu_seqlens_cpu") == KDA_INT64) {
    const auto* data = static_cast<const int64_t*>(host->const_data_ptr());
    return {data, data + count};
  }
  STD_TORCH_CHECK(host->scalar_type() == ScalarType::Int,
                  "libkda: cu_seqlens_cpu must be int32 or int64");
  const auto* data = static_cast<const int32_t*>(host->const_data_ptr());
  return {data, data + count};
}

void run(kda_problem* problem, const Tensor& q, const std::vector<int64_t>& cu_seqlens) {
  static PlanCache cache;
  const OnDevice on_device(q);
  problem->stream = current_stream(q);
  const PlanCache::Plan plan = cache.find(*problem, options_for(q), cu_seqlens);
  const size_t bytes = kda_plan_workspace_bytes(plan.get());
  if (bytes == 0) return check(kda_run(plan.get(), problem, nullptr, 0));
  const Tensor memory =
      new_tensor<1>(q, {static_cast<int64_t>(bytes) + 64}, aoti_torch_dtype_uint8());
  const auto start = reinterpret_cast<uintptr_t>(memory.const_data_ptr());
  check(kda_run(plan.get(), problem, reinterpret_cast<void*>((start + 63) / 64 * 64), bytes));
}

/// Whether the decode kernel takes every sequence. Lengths that the host does not know may be any:
/// then it computes all tokens.
bool few_tokens(const std::vector<int64_t>& cu_seqlens) {
  constexpr int64_t kMost = 8;
  for (size_t n = 0; n + 1 < cu_seqlens.size(); ++n)
    if (cu_seqlens[n + 1] - cu_seqlens[n] > kMost) return false;
  return true;
}

/// `p` with its outputs described: initial states and whether decode serves it are all that lacks.
void run_forward(kda_problem* p, const Tensor& q, const std::vector<int64_t>& lengths,
                 const MaybeTensor& initial_state, bool state_v_first, bool decode) {
  if (initial_state) {
    describe_state(&p->initial_state, *initial_state, "initial_state", state_v_first,
                   p->num_value_heads, p->key_dim, p->value_dim);
    expect_beside(*initial_state, q, "initial_state");
  }
  if (decode && few_tokens(lengths)) p->operation = KDA_DECODE;
  run(p, q, lengths);
}

std::tuple<Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta,
                                   MaybeTensor A_log, MaybeTensor dt_bias,
                                   MaybeTensor initial_state, MaybeTensor cu_seqlens,
                                   MaybeTensor cu_seqlens_cpu, int64_t gate_mode, int64_t beta_mode,
                                   double lower_bound, double scale, bool l2norm,
                                   bool state_v_first, bool output_final_state, bool decode) {
  const Modes modes{gate_mode, beta_mode, lower_bound, scale, l2norm, state_v_first};
  int32_t v_dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(v.get(), &v_dtype));
  STD_TORCH_CHECK(v.dim() == 4, "libkda: q and v must have four dimensions");
  const Tensor o = new_tensor<4>(v, {v.size(0), v.size(1), v.size(2), v.size(3)}, v_dtype);
  kda_problem p = problem_of(q, k, v, g, beta, o, A_log, dt_bias, modes);
  const std::vector<int64_t> lengths = set_lengths(&p, q, cu_seqlens, cu_seqlens_cpu);
  const int64_t HV = p.num_value_heads, K = p.key_dim, V = p.value_dim;
  const int64_t slots = output_final_state ? p.num_sequences : 0;
  const Tensor final_state = new_tensor<4>(
      q, {slots, HV, state_v_first ? V : K, state_v_first ? K : V}, aoti_torch_dtype_float32());
  if (output_final_state)
    describe_state(&p.final_state, final_state, "final_state", state_v_first, HV, K, V);
  run_forward(&p, q, lengths, initial_state, state_v_first, decode);
  return {o, final_state};
}

/// forward() into tensors of the caller, of any strides that kernels write; `checkpoints` has the
/// state after every `checkpoint_every` tokens of each sequence.
void forward_into(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor o,
                  MaybeTensor final_state, MaybeTensor checkpoints, MaybeTensor A_log,
                  MaybeTensor dt_bias, MaybeTensor initial_state, MaybeTensor cu_seqlens,
                  MaybeTensor cu_seqlens_cpu, int64_t gate_mode, int64_t beta_mode,
                  double lower_bound, double scale, bool l2norm, bool state_v_first,
                  int64_t checkpoint_every, bool decode) {
  const Modes modes{gate_mode, beta_mode, lower_bound, scale, l2norm, state_v_first};
  kda_problem p = problem_of(q, k, v, g, beta, o, A_log, dt_bias, modes);
  const std::vector<int64_t> lengths = set_lengths(&p, q, cu_seqlens, cu_seqlens_cpu);
  const auto describe_output = [&](kda_state* target, const MaybeTensor& x, const char* name) {
    if (!x) return;
    describe_state(target, *x, name, state_v_first, p.num_value_heads, p.key_dim, p.value_dim);
    expect_beside(*x, q, name);
  };
  describe_output(&p.final_state, final_state, "final_state");
  describe_output(&p.checkpoints, checkpoints, "checkpoints");
  p.checkpoint_every = checkpoint_every;
  run_forward(&p, q, lengths, initial_state, state_v_first, decode && final_state && !checkpoints);
}

/// One index a sequence, or [N, S] with one a token.
void set_indices(kda_state* state, kda_problem* p, const Tensor& indices, const Tensor& q) {
  STD_TORCH_CHECK(indices.scalar_type() == ScalarType::Int && indices.is_contiguous(),
                  "libkda: indices must be a contiguous int32 tensor");
  expect_beside(indices, q, "indices");
  const bool many = indices.dim() == 2;
  if (many)
    expect_shape(indices, "indices", {p->num_sequences, indices.size(1)});
  else
    expect_shape(indices, "indices", {p->num_sequences});
  p->state_index_columns = many ? indices.size(1) : 1;
  state->indices = static_cast<const int32_t*>(indices.const_data_ptr());
  state->indexed = 1;
}

void update(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor o, Tensor states,
            MaybeTensor indices, MaybeTensor num_accepted_tokens, MaybeTensor A_log,
            MaybeTensor dt_bias, MaybeTensor cu_seqlens, MaybeTensor cu_seqlens_cpu, bool decode,
            int64_t gate_mode, int64_t beta_mode, double lower_bound, double scale, bool l2norm,
            bool state_v_first, bool zero_skipped) {
  const Modes modes{gate_mode, beta_mode, lower_bound, scale, l2norm, state_v_first};
  kda_problem p = problem_of(q, k, v, g, beta, o, A_log, dt_bias, modes);
  const std::vector<int64_t> lengths = set_lengths(&p, q, cu_seqlens, cu_seqlens_cpu);
  const bool state_a_token = indices && indices->dim() == 2 && indices->size(1) > 1;
  decode = decode && (state_a_token || few_tokens(lengths));
  p.operation = decode ? KDA_DECODE : KDA_FORWARD;
  p.zero_skipped = decode && zero_skipped;  // a forward of lengths on the host skips nothing
  describe_state(&p.initial_state, states, "states", state_v_first, p.num_value_heads, p.key_dim,
                 p.value_dim);
  expect_beside(states, q, "states");
  if (indices) set_indices(&p.initial_state, &p, *indices, q);
  if (!decode) p.final_state = p.initial_state;
  if (num_accepted_tokens) {
    expect_shape(*num_accepted_tokens, "num_accepted_tokens", {p.num_sequences});
    expect_beside(*num_accepted_tokens, q, "num_accepted_tokens");
    STD_TORCH_CHECK(num_accepted_tokens->scalar_type() == ScalarType::Int,
                    "libkda: num_accepted_tokens must be int32");
    p.num_accepted_tokens = static_cast<const int32_t*>(num_accepted_tokens->const_data_ptr());
    p.has_num_accepted_tokens = 1;
  }
  run(&p, q, lengths);
}

}  // namespace
}  // namespace kda_torch

STABLE_TORCH_LIBRARY(libkda, m) {
  m.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? "
      "dt_bias, Tensor? initial_state, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, int gate_mode, "
      "int beta_mode, float lower_bound, float scale, bool l2norm, bool state_v_first, bool "
      "output_final_state, bool decode=False) -> (Tensor, Tensor)");
  m.def(
      "forward_into(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) o, Tensor(b!)? "
      "final_state, Tensor(c!)? checkpoints, Tensor? A_log, Tensor? dt_bias, Tensor? "
      "initial_state, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, int gate_mode, int beta_mode, "
      "float lower_bound, float scale, bool l2norm, bool state_v_first, int checkpoint_every=0, "
      "bool decode=False) -> ()");
  m.def(
      "update(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) o, Tensor(b!) "
      "states, Tensor? indices, Tensor? num_accepted_tokens, Tensor? A_log, Tensor? dt_bias, "
      "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, bool decode, int gate_mode, int beta_mode, "
      "float lower_bound, float scale, bool l2norm, bool state_v_first, bool zero_skipped=False) "
      "-> "
      "()");
}

STABLE_TORCH_LIBRARY_IMPL(libkda, CompositeExplicitAutograd, m) {
  m.impl("forward", TORCH_BOX(&kda_torch::forward));
  m.impl("forward_into", TORCH_BOX(&kda_torch::forward_into));
  m.impl("update", TORCH_BOX(&kda_torch::update));
}
