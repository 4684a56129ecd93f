// SPDX-License-Identifier: Apache-2.0
// Maps of spans of sequences, and states folded over them, in the C ABI.
#include <cstddef>
#include <span>
#include <vector>

#include "capi/handles.hpp"
#include "capi/structs.hpp"

using namespace kda::capi;

extern "C" {

namespace {

kda::Status read_maps(const kda_maps* given, kda::SpanMaps* maps) {
  kda_maps m{};
  m.d_o_dtype = KDA_FP32;
  KDA_RETURN_IF_ERROR(read_struct(given, "maps", &m));
  *maps = {.M = m.M,
           .B = m.B,
           .D = m.D,
           .d_o = m.d_o,
           .d_o_dtype = static_cast<kda::DType>(m.d_o_dtype)};
  return {};
}

}  // namespace

kda_status kda_span_maps(const kda_plan* plan, const kda_problem* problem, const kda_maps* maps,
                         void* workspace, size_t workspace_bytes) {
  return guarded_call([&] {
    GivenProblem c;
    KDA_RETURN_IF_ERROR(read_call(plan, problem, &c));
    kda::SpanMaps all;
    KDA_RETURN_IF_ERROR(read_maps(maps, &all));
    return kda::span_maps(*plan->plan, tensors_of(c), all, workspace, workspace_bytes);
  });
}

kda_status kda_span_begin(const kda_plan* plan, const kda_problem* problem, const kda_maps* maps,
                          void* workspace, size_t workspace_bytes) {
  return guarded_call([&] {
    GivenProblem c;
    KDA_RETURN_IF_ERROR(read_call(plan, problem, &c));
    kda::SpanMaps all;
    KDA_RETURN_IF_ERROR(read_maps(maps, &all));
    return kda::span_begin(*plan->plan, tensors_of(c), all, workspace, workspace_bytes, c.stream);
  });
}

kda_status kda_span_finish(const kda_plan* plan, const kda_problem* problem, const float* states_in,
                           void* workspace, size_t workspace_bytes) {
  return guarded_call([&] {
    GivenProblem c;
    KDA_RETURN_IF_ERROR(read_call(plan, problem, &c));
    return kda::span_finish(*plan->plan, tensors_of(c), states_in, workspace, workspace_bytes,
                            c.stream);
  });
}

kda_status kda_fold_states(const kda_fold* fold) {
  return guarded_call([&] {
    kda_fold f{};
    KDA_RETURN_IF_ERROR(read_struct(fold, "fold", &f));
    if (f.num_steps < 0) return kda::invalid("num_steps = ", f.num_steps, " is negative");
    if (f.num_steps > 0 && !f.steps) return kda::invalid("steps: pointer is null");
    if (f.device_kind != KDA_CPU && f.device_kind != KDA_CUDA)
      return kda::invalid("device_kind: value ", f.device_kind, " is unknown");
    const std::span given(f.steps, static_cast<std::size_t>(f.num_steps));
    std::vector<kda::FoldStep> steps;
    steps.reserve(given.size());
    for (const auto& [start, map, store] : given) steps.push_back({start, map, store});
    return kda::fold_states({.num_value_heads = f.num_value_heads,
                             .key_dim = f.key_dim,
                             .value_dim = f.value_dim,
                             .num_maps = f.num_maps,
                             .map_stride = f.map_stride,
                             .M = f.M,
                             .A = f.A,
                             .transposed = f.transposed != 0,
                             .num_starts = f.num_starts,
                             .starts = f.starts,
                             .num_states = f.num_states,
                             .states = f.states,
                             .steps = steps,
                             .num_threads = f.num_threads,
                             .maps_per_row = f.maps_per_row,
                             .row_stride = f.row_stride,
                             .device = static_cast<kda::DeviceKind>(f.device_kind),
                             .device_steps = reinterpret_cast<const kda::FoldStep*>(f.device_steps),
                             .stream = f.stream});
  });
}

}  // extern "C"
