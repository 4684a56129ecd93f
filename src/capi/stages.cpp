// SPDX-License-Identifier: Apache-2.0
// Stages in the C ABI: segments, and the chunked forward on buffers of the caller.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string>

#include "capi/handles.hpp"
#include "capi/structs.hpp"
#include "stage/buffers.hpp"

namespace kda::capi {
namespace {

using StageFn = Status (*)(const Plan&, const Tensors&, const SegmentTensors&, void*, std::size_t,
                           void*) noexcept;

kda_status run_stage(StageFn stage, const kda_plan* plan, const kda_problem* problem,
                     const kda_segments* segments, void* workspace,
                     std::size_t workspace_bytes) noexcept {
  return guarded_call([&] {
    GivenProblem c;
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
    GivenProblem c;
    KDA_RETURN_IF_ERROR(read_call(plan, problem, &c));
    kda_stages s{};
    KDA_RETURN_IF_ERROR(read_struct(stages, "stages", &s));
    return stage(*plan->plan, tensors_of(c), stage_tensors_of(s), workspace, workspace_bytes,
                 c.stream);
  });
}

}  // namespace
}  // namespace kda::capi

using namespace kda::capi;

extern "C" {

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

}  // extern "C"
