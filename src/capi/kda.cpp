// SPDX-License-Identifier: Apache-2.0
// The C ABI over the C++ API: conversion of structs, nothing else. Catches everything.
#include "kda/kda.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <string>

#include "core/guard.hpp"
#include "core/layout.hpp"
#include "core/text.hpp"
#include "kda/kda.hpp"
#include "stage/buffers.hpp"

struct kda_plan_cache {
  kda::PlanCache plans;
};

struct kda_plan {
  std::shared_ptr<const kda::Plan> plan;
  // Made when it is first asked for.
  mutable std::once_flag json_made;
  mutable std::string json;
};

struct kda_backward_plan {
  kda::BackwardPlan plan;
  kda::Problem forward;
};

namespace kda::capi {
namespace {

thread_local Status last_error;

kda_status report(Status status) noexcept {
  const auto code = static_cast<kda_status>(status.code());
  if (!status.ok()) last_error = std::move(status);
  return code;
}

template <class Body>
kda_status guarded_call(Body&& body) noexcept {
  return report(guarded(std::forward<Body>(body)));
}

constexpr std::size_t kLargestStruct = 1 << 16;  // what a struct_size can be at all

/// Copies a caller's struct over a current default. An older version's is smaller: the rest keeps
/// its defaults. A newer one's is larger: what this version does not know must be zero.
template <class Struct>
Status read_struct(const Struct* given, const char* name, Struct* current) {
  if (!given) return invalid(name, ": is null");
  const std::size_t size = given->struct_size;
  if (size < sizeof(std::size_t) || size > kLargestStruct)
    return invalid(name, ": struct_size = ", size, " is no size of this struct (", sizeof(Struct),
                   "); set it to the sizeof of the struct");
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (size > sizeof(Struct) && std::any_of(bytes + sizeof(Struct), bytes + size,
                                           [](unsigned char byte) { return byte != 0; }))
    return invalid(name, ": struct_size = ", size,
                   " is of a newer version, and a field behind the ", sizeof(Struct),
                   " bytes of this one is set");
  std::memcpy(static_cast<void*>(current), given, std::min(size, sizeof(Struct)));
  return {};
}

int64_t natural_alignment(const TensorDesc& desc, const Shape& shape, int rank) {
  int64_t alignment = kDefaultAlignment;
  for (int dim = 0; dim + 1 < rank; ++dim) {
    const auto d = static_cast<std::size_t>(dim);
    if (shape[d] <= 1) continue;
    // Reduced first: the strides have not been checked for overflow yet.
    while (alignment > 1 && desc.strides[d] % alignment * dtype_size(desc.dtype) % alignment != 0)
      alignment /= 2;
  }
  return alignment;
}

bool is_described(const kda_tensor& given) {
  return given.dtype != 0 || given.alignment != 0 ||
         std::any_of(given.strides, given.strides + 4, [](int64_t stride) { return stride != 0; });
}

TensorDesc tensor_of(const kda_tensor& given, const Shape& shape, int rank) {
  TensorDesc desc;
  desc.dtype = static_cast<DType>(given.dtype);
  if (!is_described(given)) return desc;
  for (std::size_t i = 0; i < 4; ++i) desc.strides[i] = given.strides[i];
  desc.alignment = given.alignment;
  if (desc.alignment != 0) return desc;
  desc.alignment = natural_alignment(desc, shape, rank);
  // A planned pointer may be less aligned than its strides.
  while (desc.alignment > dtype_size(desc.dtype) &&
         reinterpret_cast<std::uintptr_t>(given.data) %
                 static_cast<std::uintptr_t>(desc.alignment) !=
             0)
    desc.alignment /= 2;
  return desc;
}

/// Whatever is given counts; the flags are for planning without data.
bool is_given(const kda_state& state) {
  return state.present || state.num_slots != 0 || state.tensor.data || state.indices;
}
bool is_given(const kda_tensor& parameter) { return parameter.data || parameter.strides[0] != 0; }
bool has_mask(const kda_problem& c) { return c.has_initial_state_mask || c.initial_state_mask; }
bool has_accepted(const kda_problem& c) {
  return c.has_num_accepted_tokens || c.num_accepted_tokens;
}

std::optional<StateDesc> state_of(const Problem& p, const kda_state& given) {
  if (!is_given(given)) return std::nullopt;
  StateDesc desc;
  desc.num_slots = given.num_slots;
  desc.indexed = given.indexed || given.indices;
  desc.tensor = tensor_of(given.tensor, state_shape(p, desc), 4);
  return desc;
}

Problem problem_of(const kda_problem& c) {
  Problem p;
  p.operation = static_cast<Operation>(c.operation);
  p.batch = c.batch;
  p.num_tokens = c.num_tokens;
  p.num_heads = c.num_heads;
  p.num_value_heads = c.num_value_heads;
  p.key_dim = c.key_dim;
  p.value_dim = c.value_dim;
  p.num_sequences = c.num_sequences;
  p.q = tensor_of(c.q, qk_shape(p), 4);
  p.k = tensor_of(c.k, qk_shape(p), 4);
  p.v = tensor_of(c.v, v_shape(p), 4);
  p.g = tensor_of(c.g, g_shape(p), 4);
  p.beta = tensor_of(c.beta, beta_shape(p), 3);
  p.o = tensor_of(c.o, v_shape(p), 4);
  p.gate_mode = static_cast<GateMode>(c.gate_mode);
  p.lower_bound = c.lower_bound;
  if (is_given(c.A_log)) p.A_log = tensor_of(c.A_log, {p.num_value_heads, 1, 1, 1}, 1);
  if (is_given(c.dt_bias))
    p.dt_bias = tensor_of(c.dt_bias, {p.num_value_heads, p.key_dim, 1, 1}, 2);
  p.beta_mode = static_cast<BetaMode>(c.beta_mode);
  p.qk_l2norm = c.qk_l2norm != 0;
  if (c.has_scale || c.scale != 0) p.scale = c.scale;
  if (c.has_cu_seqlens || c.cu_seqlens) p.cu_seqlens = static_cast<DType>(c.cu_seqlens_dtype);
  p.state_layout = static_cast<StateLayout>(c.state_layout);
  p.initial_state = state_of(p, c.initial_state);
  p.initial_state_mask = has_mask(c);
  p.final_state = state_of(p, c.final_state);
  p.checkpoints = state_of(p, c.checkpoints);
  p.checkpoint_every = c.checkpoint_every;
  p.state_index_columns = c.state_index_columns == 0 ? 1 : c.state_index_columns;
  p.num_accepted_tokens = has_accepted(c);
  p.zero_skipped = c.zero_skipped != 0;
  p.first_slot = c.first_slot;
  p.batch_invariant = c.batch_invariant != 0;
  return p;
}

Tensors tensors_of(const kda_problem& c) {
  Tensors t;
  t.q = c.q.data;
  t.k = c.k.data;
  t.v = c.v.data;
  t.g = c.g.data;
  t.beta = c.beta.data;
  t.o = c.o.data;
  t.A_log = c.A_log.data;
  t.dt_bias = c.dt_bias.data;
  t.cu_seqlens = c.cu_seqlens;
  t.initial_state = c.initial_state.tensor.data;
  t.initial_state_indices = c.initial_state.indices;
  t.initial_state_mask = c.initial_state_mask;
  t.num_accepted_tokens = c.num_accepted_tokens;
  t.final_state = c.final_state.tensor.data;
  t.final_state_indices = c.final_state.indices;
  t.checkpoints = c.checkpoints.tensor.data;
  t.checkpoint_indices = c.checkpoints.indices;
  t.saved = c.saved;
  t.saved_bytes = c.saved_bytes;
  t.trusted = c.trusted != 0;
  return t;
}

Status read_problem(const kda_problem* given, kda_problem* current) {
  kda_problem_init(current);
  return read_struct(given, "problem", current);
}

/// What a call gives beyond what its plan was made for would be left out without a word.
Status check_call(const Problem& planned, const kda_problem& c) {
  const auto unplanned = [](const char* name) {
    return invalid(name, ": given, but the plan was made without it");
  };
  const struct {
    const char* name;
    const char* indices;
    const kda_state& given;
    const std::optional<StateDesc>& state;
  } states[] = {{"initial_state", "initial_state_indices", c.initial_state, planned.initial_state},
                {"final_state", "final_state_indices", c.final_state, planned.final_state},
                {"checkpoints", "checkpoint_indices", c.checkpoints, planned.checkpoints}};
  for (const auto& row : states) {
    if (is_given(row.given) && !row.state) return unplanned(row.name);
    if (row.given.indices && !row.state->indexed) return unplanned(row.indices);
  }
  if (c.A_log.data && !planned.A_log) return unplanned("A_log");
  if (c.dt_bias.data && !planned.dt_bias) return unplanned("dt_bias");
  if (c.cu_seqlens && !planned.cu_seqlens) return unplanned("cu_seqlens");
  if (has_mask(c) && !planned.initial_state_mask) return unplanned("initial_state_mask");
  if (has_accepted(c) && !planned.num_accepted_tokens) return unplanned("num_accepted_tokens");
  return {};
}

Status read_call(const kda_plan* plan, const kda_problem* given, kda_problem* current) {
  if (!plan) return invalid("plan: is null");
  KDA_RETURN_IF_ERROR(read_problem(given, current));
  return check_call(plan->plan->problem, *current);
}

Status read_options(const kda_plan_options* given, DeviceFacts* device, PlanOptions* options) {
  kda_plan_options c;
  kda_plan_options_init(&c);
  if (given) KDA_RETURN_IF_ERROR(read_struct(given, "options", &c));
  if (c.device_kind != KDA_CPU && c.device_kind != KDA_CUDA)
    return invalid("device_kind: value ", c.device_kind, " is unknown");
  *device = c.device_kind == KDA_CUDA
                ? gpu_facts(c.num_sms == 0 ? 132 : c.num_sms,
                            c.compute_capability == 0 ? 90 : c.compute_capability)
                : cpu_facts();
  options->context_parallel = static_cast<SegmentPolicy>(c.context_parallel);
  options->segment_method = c.one_pass ? SegmentMethod::kOnePass : SegmentMethod::kScanMergeForward;
  options->intra_form = static_cast<IntraForm>(c.intra_form);
  options->num_segments = c.num_segments;
  options->num_threads = c.num_threads;
  if (c.backend) options->backend = c.backend;
  if (c.keep != 0)
    options->keep = c.keep == KDA_KEEP_CHUNKS ? KeepPolicy::kKeep : KeepPolicy::kStates;
  if (c.keep != KDA_KEEP_CHUNKS) options->kept_state_every = c.keep;
  return {};
}

/// `cache` null: a plan of its own.
Status create_plan(kda_plan_cache* cache, const kda_problem* problem, const int64_t* cu_seqlens,
                   const kda_plan_options* options, kda_plan** plan) {
  if (!plan) return invalid("plan: is null");
  *plan = nullptr;
  kda_problem c;
  KDA_RETURN_IF_ERROR(read_problem(problem, &c));
  DeviceFacts device;
  PlanOptions plan_options;
  KDA_RETURN_IF_ERROR(read_options(options, &device, &plan_options));
  const Problem p = problem_of(c);
  KDA_RETURN_IF_ERROR(validate(p));
  const bool bounds = p.cu_seqlens && !cu_seqlens;
  std::span<const int64_t> lengths;
  if (cu_seqlens) lengths = {cu_seqlens, static_cast<std::size_t>(p.num_sequences) + 1};
  auto made = std::make_unique<kda_plan>();
  if (cache) {
    KDA_RETURN_IF_ERROR(bounds ? cache->plans.find_from_bounds(p, device, plan_options, &made->plan)
                               : cache->plans.find(p, lengths, device, plan_options, &made->plan));
  } else {
    auto own = std::make_shared<Plan>();
    KDA_RETURN_IF_ERROR(bounds ? make_plan_from_bounds(p, device, plan_options, own.get())
                               : make_plan(p, lengths, device, plan_options, own.get()));
    made->plan = std::move(own);
  }
  *plan = made.release();
  return {};
}

/// All that a call of a backward has beside its problem.
struct GradientsOf {
  Gradients gradients;
  GradientTensors tensors;
};

GradientsOf gradients_of(const Problem& p, const kda_gradients& c) {
  const Shape states = state_shape(p, {{}, p.num_sequences, false});
  const auto desc = [](const kda_tensor& given, const Shape& shape,
                       int rank) -> std::optional<TensorDesc> {
    if (!given.data && !is_described(given)) return std::nullopt;
    return tensor_of(given, shape, rank);
  };
  GradientsOf all;
  all.gradients = {.d_o = desc(c.d_o, v_shape(p), 4),
                   .d_final_state = desc(c.d_final_state, states, 4),
                   .dq = desc(c.dq, qk_shape(p), 4),
                   .dk = desc(c.dk, qk_shape(p), 4),
                   .dv = desc(c.dv, v_shape(p), 4),
                   .dg = desc(c.dg, g_shape(p), 4),
                   .dbeta = desc(c.dbeta, beta_shape(p), 3),
                   .dA_log = desc(c.dA_log, {p.num_value_heads, 1, 1, 1}, 1),
                   .ddt_bias = desc(c.ddt_bias, {p.num_value_heads, p.key_dim, 1, 1}, 2),
                   .d_initial_state = desc(c.d_initial_state, states, 4)};
  all.tensors = {.d_o = c.d_o.data,
                 .d_final_state = c.d_final_state.data,
                 .dq = c.dq.data,
                 .dk = c.dk.data,
                 .dv = c.dv.data,
                 .dg = c.dg.data,
                 .dbeta = c.dbeta.data,
                 .dA_log = c.dA_log.data,
                 .ddt_bias = c.ddt_bias.data,
                 .d_initial_state = c.d_initial_state.data};
  return all;
}

/// A call must not give gradients that its plan was made without.
Status check_gradients(const Gradients& planned, const kda_gradients& c) {
  const struct {
    const char* name;
    const kda_tensor& given;
    const std::optional<TensorDesc>& planned;
  } rows[] = {{"d_o", c.d_o, planned.d_o},
              {"d_final_state", c.d_final_state, planned.d_final_state},
              {"dq", c.dq, planned.dq},
              {"dk", c.dk, planned.dk},
              {"dv", c.dv, planned.dv},
              {"dg", c.dg, planned.dg},
              {"dbeta", c.dbeta, planned.dbeta},
              {"dA_log", c.dA_log, planned.dA_log},
              {"ddt_bias", c.ddt_bias, planned.ddt_bias},
              {"d_initial_state", c.d_initial_state, planned.d_initial_state}};
  for (const auto& row : rows)
    if (row.given.data && !row.planned)
      return invalid(row.name, ": given, but the plan was made without it");
  return {};
}

using StageFn = Status (*)(const Plan&, const Tensors&, const SegmentTensors&, void*, std::size_t,
                           void*) noexcept;

kda_status run_stage(StageFn stage, const kda_plan* plan, const kda_problem* problem,
                     const kda_segments* segments, void* workspace,
                     std::size_t workspace_bytes) noexcept {
  return guarded_call([&] {
    kda_problem c;
    KDA_RETURN_IF_ERROR(read_call(plan, problem, &c));
    kda_segments s{};
    KDA_RETURN_IF_ERROR(read_struct(segments, "segments", &s));
    return stage(*plan->plan, tensors_of(c), {s.M, s.B, s.states_in}, workspace, workspace_bytes,
                 c.stream);
  });
}

// kda_stages and kda_stage_bytes list the buffers in the order of stage::kChunkBuffers.
constexpr std::size_t kNumBuffers = stage::kChunkBuffers.size();
static_assert(sizeof(kda_stages) == sizeof(std::size_t) + kNumBuffers * sizeof(void*));
static_assert(sizeof(kda_stage_bytes) == (1 + kNumBuffers) * sizeof(std::size_t));
static_assert(sizeof(StageTensors) == kNumBuffers * sizeof(void*));

StageTensors stage_tensors_of(const kda_stages& c) {
  StageTensors tensors;
  std::memcpy(static_cast<void*>(&tensors),
              reinterpret_cast<const unsigned char*>(&c) + offsetof(kda_stages, w),
              sizeof(tensors));
  return tensors;
}

/// struct_size and the bytes of each buffer, as kda_stage_bytes has them.
std::array<std::size_t, 1 + kNumBuffers> stage_bytes_of(std::size_t struct_size,
                                                        const StageSizes& sizes) {
  std::array<std::size_t, 1 + kNumBuffers> bytes = {struct_size};
  for (std::size_t i = 0; i < kNumBuffers; ++i) bytes[1 + i] = sizes.*stage::kChunkBuffers[i].bytes;
  return bytes;
}

using ChunkStageFn = Status (*)(const Plan&, const Tensors&, const StageTensors&, void*,
                                std::size_t, void*) noexcept;

kda_status run_chunk_stage(ChunkStageFn stage, const kda_plan* plan, const kda_problem* problem,
                           const kda_stages* stages, void* workspace,
                           std::size_t workspace_bytes) noexcept {
  return guarded_call([&] {
    kda_problem c;
    KDA_RETURN_IF_ERROR(read_call(plan, problem, &c));
    kda_stages s{};
    KDA_RETURN_IF_ERROR(read_struct(stages, "stages", &s));
    return stage(*plan->plan, tensors_of(c), stage_tensors_of(s), workspace, workspace_bytes,
                 c.stream);
  });
}

// ---- the operations around KDA ------------------------------------------------------------------

TensorView view_of(const kda_tensor& given) {
  TensorView view{given.data, static_cast<DType>(given.dtype)};
  for (std::size_t i = 0; is_described(given) && i < 4; ++i) view.strides[i] = given.strides[i];
  return view;
}

ConvState conv_state_of(const kda_state& given) {
  return {view_of(given.tensor), given.num_slots, given.indices};
}

Status read_short_conv(const kda_short_conv_call* given, ShortConv* call) {
  kda_short_conv_call c{};
  KDA_RETURN_IF_ERROR(read_struct(given, "call", &c));
  *call = {.batch = c.batch,
           .num_tokens = c.num_tokens,
           .channels = c.channels,
           .width = c.width,
           .activation = static_cast<Activation>(c.activation),
           .x = view_of(c.x),
           .y = view_of(c.y),
           .weight = view_of(c.weight),
           .bias = view_of(c.bias),
           .cu_seqlens = c.cu_seqlens,
           .cu_seqlens_dtype = static_cast<DType>(c.cu_seqlens_dtype),
           .num_sequences = c.num_sequences,
           .state_width = c.state_width,
           .initial_state = conv_state_of(c.initial_state),
           .final_state = conv_state_of(c.final_state),
           .has_state = c.has_state,
           .first_slot = c.first_slot,
           .num_threads = c.num_threads};
  return {};
}

Status read_norm(const kda_gated_rms_norm_call* given, GatedRmsNorm* call) {
  kda_gated_rms_norm_call c{};
  KDA_RETURN_IF_ERROR(read_struct(given, "call", &c));
  *call = {.rows = {c.rows[0], c.rows[1], c.rows[2]},
           .channels = c.channels,
           .eps = c.eps,
           .activation = static_cast<Activation>(c.activation),
           .x = view_of(c.x),
           .y = view_of(c.y),
           .gate = view_of(c.gate),
           .weight = view_of(c.weight),
           .num_threads = c.num_threads};
  return {};
}

}  // namespace
}  // namespace kda::capi

using namespace kda::capi;

extern "C" {

const char* kda_version(void) { return KDA_VERSION_STRING; }

const char* kda_status_name(kda_status status) {
  return kda::status_code_name(static_cast<kda::StatusCode>(status));
}

const char* kda_last_error(void) { return last_error.message().c_str(); }

void(kda_problem_init)(kda_problem* problem) {
  kda_problem_init_size(problem, offsetof(kda_problem, first_slot));
}

void kda_problem_init_size(kda_problem* problem, size_t struct_size) {
  if (!problem || struct_size < sizeof(problem->struct_size)) return;
  kda_problem defaults{};
  defaults.struct_size = struct_size;
  defaults.batch = 1;
  defaults.num_heads = 1;
  defaults.num_value_heads = 1;
  defaults.num_sequences = 1;
  defaults.key_dim = 128;
  defaults.value_dim = 128;
  defaults.lower_bound = -5;
  defaults.state_index_columns = 1;
  defaults.cu_seqlens_dtype = KDA_INT32;
  std::memset(static_cast<void*>(problem), 0, struct_size);
  std::memcpy(static_cast<void*>(problem), &defaults, std::min(struct_size, sizeof(defaults)));
}

// It writes into structs of any caller, older ones too.
static_assert(sizeof(kda_plan_options) == 56, "a larger struct needs an init function with a size");
void kda_plan_options_init(kda_plan_options* options) {
  if (!options) return;
  std::memset(static_cast<void*>(options), 0, sizeof(*options));
  options->struct_size = sizeof(*options);
}

kda_status kda_plan_options_cuda(kda_plan_options* options, int32_t ordinal) {
  return guarded_call([&] {
    if (!options) return kda::invalid("options: is null");
    kda::DeviceFacts facts;
    KDA_RETURN_IF_ERROR(kda::cuda_device_facts(ordinal, &facts));
    options->device_kind = KDA_CUDA;
    options->num_sms = facts.num_sms;
    options->compute_capability = facts.compute_capability;
    return kda::Status{};
  });
}

kda_status kda_tensor_contiguous(kda_tensor* tensor, void* data, kda_dtype dtype, int32_t rank,
                                 const int64_t* shape) {
  return guarded_call([&] {
    if (!tensor) return kda::invalid("tensor: is null");
    if (!shape) return kda::invalid("shape: is null");
    if (rank < 1 || rank > 4) return kda::invalid("rank: ", rank, " is outside 1..4");
    std::memset(tensor, 0, sizeof(*tensor));
    tensor->data = data;
    tensor->dtype = dtype;
    int64_t stride = 1;
    for (int32_t dim = rank - 1; dim >= 0; --dim) {
      tensor->strides[dim] = stride;
      if (shape[dim] < 0) return kda::invalid("shape: dimension ", dim, " is negative");
      if (__builtin_mul_overflow(stride, shape[dim], &stride))
        return kda::invalid("shape: its size overflows");
      if (stride == 0) stride = 1;
    }
    return kda::Status{};
  });
}

kda_status kda_validate(const kda_problem* problem) {
  return guarded_call([&] {
    kda_problem c;
    KDA_RETURN_IF_ERROR(read_problem(problem, &c));
    return kda::validate(problem_of(c));
  });
}

kda_status kda_supported(const kda_problem* problem, const kda_plan_options* options) {
  return guarded_call([&] {
    kda_problem c;
    KDA_RETURN_IF_ERROR(read_problem(problem, &c));
    kda::DeviceFacts device;
    kda::PlanOptions unused;
    KDA_RETURN_IF_ERROR(read_options(options, &device, &unused));
    return kda::supported(problem_of(c), device);
  });
}

kda_status kda_plan_create(const kda_problem* problem, const int64_t* cu_seqlens,
                           const kda_plan_options* options, kda_plan** plan) {
  return guarded_call([&] { return create_plan(nullptr, problem, cu_seqlens, options, plan); });
}

kda_status kda_plan_cache_create(size_t most_plans, kda_plan_cache** cache) {
  return guarded_call([&] {
    if (!cache) return kda::invalid("cache: is null");
    *cache = nullptr;
    *cache = new kda_plan_cache{kda::PlanCache(most_plans == 0 ? 256 : most_plans)};
    return kda::Status{};
  });
}

void kda_plan_cache_destroy(kda_plan_cache* cache) { delete cache; }

kda_status kda_plan_cache_find(kda_plan_cache* cache, const kda_problem* problem,
                               const int64_t* cu_seqlens, const kda_plan_options* options,
                               kda_plan** plan) {
  return guarded_call([&] {
    if (!cache) return kda::invalid("cache: is null");
    return create_plan(cache, problem, cu_seqlens, options, plan);
  });
}

void kda_plan_destroy(kda_plan* plan) { delete plan; }

size_t kda_plan_workspace_bytes(const kda_plan* plan) {
  return plan ? plan->plan->workspace_bytes : 0;
}

int64_t kda_plan_num_segments(const kda_plan* plan) {
  return plan ? static_cast<int64_t>(plan->plan->segments.size()) : 0;
}

const char* kda_plan_json(const kda_plan* plan) {
  const kda_status status = guarded_call([&] {
    if (plan) std::call_once(plan->json_made, [&] { plan->json = plan->plan->to_json(); });
    return kda::Status{};
  });
  return plan && status == KDA_OK ? plan->json.c_str() : "";
}

const char* kda_plan_implementation(const kda_plan* plan) {
  return plan ? plan->plan->implementation.c_str() : "";
}

kda_status kda_run(const kda_plan* plan, const kda_problem* problem, void* workspace,
                   size_t workspace_bytes) {
  return guarded_call([&] {
    kda_problem c;
    KDA_RETURN_IF_ERROR(read_call(plan, problem, &c));
    return kda::run(*plan->plan, tensors_of(c), workspace, workspace_bytes, c.stream);
  });
}

size_t kda_plan_saved_bytes(const kda_plan* plan) { return plan ? plan->plan->saved_bytes : 0; }

kda_status kda_backward_plan_create(const kda_plan* forward, const kda_gradients* gradients,
                                    const kda_plan_options* options, kda_backward_plan** plan) {
  return guarded_call([&] {
    if (!plan) return kda::invalid("plan: is null");
    *plan = nullptr;
    if (!forward) return kda::invalid("forward: is null");
    kda_gradients c{};
    KDA_RETURN_IF_ERROR(read_struct(gradients, "gradients", &c));
    kda::DeviceFacts unused;
    kda::PlanOptions plan_options;
    KDA_RETURN_IF_ERROR(read_options(options, &unused, &plan_options));
    auto made = std::make_unique<kda_backward_plan>();
    made->forward = forward->plan->problem;
    KDA_RETURN_IF_ERROR(kda::make_backward_plan(
        *forward->plan, gradients_of(made->forward, c).gradients, plan_options, &made->plan));
    *plan = made.release();
    return kda::Status{};
  });
}

void kda_backward_plan_destroy(kda_backward_plan* plan) { delete plan; }

size_t kda_backward_plan_workspace_bytes(const kda_backward_plan* plan) {
  return plan ? plan->plan.plan.workspace_bytes : 0;
}

kda_status kda_backward(const kda_backward_plan* plan, const kda_problem* problem,
                        const kda_gradients* gradients, void* workspace, size_t workspace_bytes) {
  return guarded_call([&] {
    if (!plan) return kda::invalid("plan: is null");
    kda_problem c;
    KDA_RETURN_IF_ERROR(read_problem(problem, &c));
    KDA_RETURN_IF_ERROR(check_call(plan->forward, c));
    kda_gradients g{};
    KDA_RETURN_IF_ERROR(read_struct(gradients, "gradients", &g));
    KDA_RETURN_IF_ERROR(check_gradients(plan->plan.gradients, g));
    return kda::backward(plan->plan, tensors_of(c), gradients_of(plan->forward, g).tensors,
                         workspace, workspace_bytes, c.stream);
  });
}

kda_status kda_segment_scan(const kda_plan* plan, const kda_problem* problem,
                            const kda_segments* segments, void* workspace, size_t workspace_bytes) {
  return run_stage(kda::segment_scan, plan, problem, segments, workspace, workspace_bytes);
}

kda_status kda_segment_merge(const kda_plan* plan, const kda_problem* problem,
                             const kda_segments* segments, void* workspace,
                             size_t workspace_bytes) {
  return run_stage(kda::segment_merge, plan, problem, segments, workspace, workspace_bytes);
}

kda_status kda_segment_forward(const kda_plan* plan, const kda_problem* problem,
                               const kda_segments* segments, void* workspace,
                               size_t workspace_bytes) {
  return run_stage(kda::segment_forward, plan, problem, segments, workspace, workspace_bytes);
}

const char* kda_stage_buffers(void) {
  try {
    static const std::string names = [] {
      std::string all;
      for (const kda::stage::ChunkBuffer& buffer : kda::stage::kChunkBuffers)
        all += kda::cat(all.empty() ? "" : " ", buffer.spec.name);
      return all;
    }();
    return names.c_str();
  } catch (...) {  // out of memory
    return "";
  }
}

kda_status kda_stage_sizes(const kda_plan* plan, kda_stage_bytes* bytes) {
  return guarded_call([&] {
    if (!plan) return kda::invalid("plan: is null");
    if (!bytes) return kda::invalid("bytes: is null");
    const std::size_t size = bytes->struct_size;
    if (size < sizeof(size) || size > kLargestStruct)
      return kda::invalid("bytes: struct_size = ", size, " is no size of this struct (",
                          sizeof(kda_stage_bytes), ")");
    kda::StageSizes s;
    KDA_RETURN_IF_ERROR(kda::stage_sizes(*plan->plan, &s));
    const auto all = stage_bytes_of(size, s);
    std::memset(static_cast<void*>(bytes), 0, size);
    std::memcpy(static_cast<void*>(bytes), all.data(), std::min(size, sizeof(all)));
    return kda::Status{};
  });
}

kda_status kda_chunk_intra(const kda_plan* plan, const kda_problem* problem,
                           const kda_stages* stages, void* workspace, size_t workspace_bytes) {
  return run_chunk_stage(kda::chunk_intra, plan, problem, stages, workspace, workspace_bytes);
}

kda_status kda_recompute_w_u(const kda_plan* plan, const kda_problem* problem,
                             const kda_stages* stages, void* workspace, size_t workspace_bytes) {
  return run_chunk_stage(kda::recompute_w_u, plan, problem, stages, workspace, workspace_bytes);
}

kda_status kda_chunk_delta_h(const kda_plan* plan, const kda_problem* problem,
                             const kda_stages* stages, void* workspace, size_t workspace_bytes) {
  return run_chunk_stage(kda::chunk_delta_h, plan, problem, stages, workspace, workspace_bytes);
}

kda_status kda_chunk_o(const kda_plan* plan, const kda_problem* problem, const kda_stages* stages,
                       void* workspace, size_t workspace_bytes) {
  return run_chunk_stage(kda::chunk_o, plan, problem, stages, workspace, workspace_bytes);
}

kda_status kda_short_conv(const kda_short_conv_call* call) {
  return guarded_call([&] {
    kda::ShortConv conv;
    KDA_RETURN_IF_ERROR(read_short_conv(call, &conv));
    return kda::short_conv(conv);
  });
}

kda_status kda_short_conv_backward(const kda_short_conv_call* call,
                                   const kda_short_conv_gradients* gradients) {
  return guarded_call([&] {
    kda::ShortConv conv;
    KDA_RETURN_IF_ERROR(read_short_conv(call, &conv));
    kda_short_conv_gradients g{};
    KDA_RETURN_IF_ERROR(read_struct(gradients, "gradients", &g));
    return kda::short_conv_backward(conv, {.dy = view_of(g.dy),
                                           .d_final_state = view_of(g.d_final_state),
                                           .dx = view_of(g.dx),
                                           .dweight = view_of(g.dweight),
                                           .dbias = view_of(g.dbias),
                                           .d_initial_state = view_of(g.d_initial_state)});
  });
}

kda_status kda_gated_rms_norm(const kda_gated_rms_norm_call* call) {
  return guarded_call([&] {
    kda::GatedRmsNorm norm;
    KDA_RETURN_IF_ERROR(read_norm(call, &norm));
    return kda::gated_rms_norm(norm);
  });
}

kda_status kda_gated_rms_norm_backward(const kda_gated_rms_norm_call* call,
                                       const kda_gated_rms_norm_gradients* gradients) {
  return guarded_call([&] {
    kda::GatedRmsNorm norm;
    KDA_RETURN_IF_ERROR(read_norm(call, &norm));
    kda_gated_rms_norm_gradients g{};
    KDA_RETURN_IF_ERROR(read_struct(gradients, "gradients", &g));
    return kda::gated_rms_norm_backward(norm, {.dy = view_of(g.dy),
                                               .dx = view_of(g.dx),
                                               .dgate = view_of(g.dgate),
                                               .dweight = view_of(g.dweight)});
  });
}

}  // extern "C"
