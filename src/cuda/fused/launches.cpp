// SPDX-License-Identifier: Apache-2.0
// Backend cuda.sm90.fused: everything in one kernel. Segments go through it too: from zero, and
// their transitions as chains of their own (stage/segment_scan.hpp).
#include "cuda/fused/launches.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <random>
#include <vector>

#include "core/text.hpp"
#include "cuda/common/common.hpp"
#include "cuda/fused/cost.hpp"
#include "cuda/fused/device_cut.hpp"
#include "cuda/fused/fused_prefill.hpp"
#include "cuda/fused/kernels.hpp"
#include "cuda/fused/segment_correct.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/views.hpp"
#include "cuda/segments/launches.hpp"
#include "cuda/segments/segment_compose.hpp"
#include "cuda/segments/segment_merge_sm90.hpp"
#include "cuda/staged/backward/backend.hpp"
#include "cuda/tile/chunk.hpp"
#include "plan/ledger.hpp"

namespace kda::cuda::fused {
namespace {

using sm90::FusedPrefillArgs;
using sm90::FusedState;
using sm90::WorkUnit;

Status not_built() {
  return Status(StatusCode::kUnavailable, "cuda.sm90.fused: this build has no kernels of sm_90a");
}

/// The units of a launch, each with the cost of those before it (fused/scheduler.cuh).
class Schedule {
 public:
  void add(const Segment& segment, int64_t number, FusedState state) {
    units_.push_back({{segment.sequence, segment.begin, segment.end}, number, state, before_});
    before_ += (segment.end - segment.begin + kChunk - 1) / kChunk + sm90::kWorkUnitCost;
  }
  int64_t size() const { return static_cast<int64_t>(units_.size()); }
  /// Adds one more, which only says where the schedule ends.
  const std::vector<WorkUnit>& close() {
    units_.push_back({{}, 0, FusedState::kGiven, before_});
    return units_;
  }

 private:
  std::vector<WorkUnit> units_;
  int64_t before_ = 0;
};

bool begins_sequence(std::span<const Segment> segments, std::size_t n) {
  return n == 0 || segments[n].sequence != segments[n - 1].sequence;
}
bool ends_sequence(std::span<const Segment> segments, std::size_t n) {
  return n + 1 == segments.size() || begins_sequence(segments, n + 1);
}

/// From zero, then the transitions. With outputs first segments run from their initial state and
/// have no transition; the others are counted without them. A sequence in one segment runs as it
/// would in a forward.
Schedule scan_schedule(const stage::SegmentScan& scan) {
  const auto& segments = scan.segments;
  const bool outputs = scan.Qt != nullptr;
  const auto runs = [&](std::size_t n) { return !scan.skip_last || !ends_sequence(segments, n); };
  const auto number = [&](std::size_t n) {
    return static_cast<int64_t>(n) - (outputs ? segments[n].sequence + 1 : 0);
  };
  const auto state = [&](std::size_t n) {
    if (!outputs || !begins_sequence(segments, n)) return FusedState::kZero;
    return ends_sequence(segments, n) ? FusedState::kWhole : FusedState::kFirst;
  };
  Schedule schedule;
  for (std::size_t n = 0; n < segments.size(); ++n)
    if (runs(n)) schedule.add(segments[n], number(n), state(n));
  for (std::size_t n = 0; n < segments.size(); ++n)
    if (runs(n) && !(outputs && begins_sequence(segments, n)))
      schedule.add(segments[n], number(n), FusedState::kTransition);
  return schedule;
}

template <class T>
T* find(const stage::Call& call, const char* name) {
  return static_cast<T*>(plan::find_block(*call.plan, call.workspace, name));
}

/// Where a call with segments has, in the workspace, how many segments lie before each sequence
/// without the first ones of sequences, [N + 1]; the units follow.
int64_t* offsets_behind_first(const stage::Call& call) {
  return find<int64_t>(call, block::kSegmentUnits);
}
WorkUnit* units_of(const stage::Call& call) {
  return reinterpret_cast<WorkUnit*>(offsets_behind_first(call) + call.problem.num_sequences + 1);
}

/// The cut that a kernel of the call makes; null: the plan has made it.
CutHeader* cut_of(const stage::Call& call) {
  return call.plan->device_cut.on ? find<CutHeader>(call, block::kDeviceCut) : nullptr;
}

/// Where transitions that may exit early say at which token they did; null if none may.
int64_t* exit_tokens_of(const stage::Call& call) {
  return call.plan->early_exit || call.plan->device_cut.on
             ? find<int64_t>(call, stage::kExitToken.name)
             : nullptr;
}

/// The most segments that a sequence has behind its first one.
int64_t most_behind_first(const Plan& plan) {
  int64_t most = 0;
  for (std::size_t n = 0; n + 1 < plan.segment_offsets.size(); ++n)
    most = std::max(most, plan.segment_offsets[n + 1] - plan.segment_offsets[n] - 1);
  return most;
}

/// Offsets of segments behind first ones, then the units.
std::vector<int64_t> words_of(const stage::Call& call, const std::vector<WorkUnit>& units) {
  std::vector<int64_t> words = call.plan->segment_offsets;
  for (std::size_t n = 0; n < words.size(); ++n) words[n] -= static_cast<int64_t>(n);
  const auto* first = reinterpret_cast<const int64_t*>(units.data());
  words.insert(words.end(), first, first + units.size() * sm90::kWorkUnitWords);
  return words;
}

}  // namespace

/// Returns what a workspace does not hold by chance, and no launch of this process had before: the
/// steps of a counter from anywhere, mixed one to one (Steele, Lea and Flood, 2014).
uint64_t new_handoff_epoch() {
  static std::atomic<uint64_t> counter = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  uint64_t x = counter.fetch_add(0x9e3779b97f4a7c15, std::memory_order_relaxed);
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

namespace {

/// Qt is times 2 to this, up to 16: all of fp16's bits of what is not far below.
int qt_exponent(const Problem& p) { return 3 - std::ilogb(effective_scale(p)); }

/// A checkpoint a sequence, at an offset that only the device knows, is no multiple of anything.
template <class Args>
void set_offsets(const stage::Call& call, Args* args) {
  if (!call.problem.checkpoint_offsets) return;
  args->checkpoint_offsets = call.tensors.checkpoint_offsets;
  // 32 bits, since a division of 64 is long. No offset is a multiple of one that has more.
  args->checkpoint_multiple =
      static_cast<uint32_t>(std::min<int64_t>(call.problem.checkpoint_every, UINT32_MAX));
  args->checkpoint_M = find<float>(call, block::kCheckpointM);
  args->checkpoint_B = find<float>(call, block::kCheckpointB);
}

/// Sets what a call writes.
void set_results(const stage::Call& call, const SequenceMaps& maps, FusedPrefillArgs* args) {
  set_outputs(call, maps, args);
  set_offsets(call, args);
  if (args->checkpoint_offsets) args->checkpoint_every = INT64_MAX;
}

/// Sets the members that each launch has, of so many chains.
void set_launch(const stage::Call& call, int64_t chains, FusedPrefillArgs* args) {
  const Problem& p = call.problem;
  args->clusters = sm90::fused_clusters(chains, call.plan->device.num_sms, p.key_dim);
  const Kernels kernels = kernels_of(*call.plan);
  args->fp16_operands = kernels.fp16_operands;
  args->head_gate = kernels.head_gate;
  args->tiled = p.head_map == HeadMap::kTiled;
  args->handoff_states = find<float>(call, block::kHandoffStates);
  args->handoff_flags = find<uint64_t>(call, block::kHandoffFlags);
  args->handoff_epoch = new_handoff_epoch();
}

Status launch(const stage::Call& call, const SequenceMaps& maps, sm90::FusedWords words,
              FusedPrefillArgs* args) {
  if constexpr (sm90::kBuilt)
    return sm90::launch_fused_prefill(*args, words, cut_of(call), launch_after(call, maps));
  return not_built();
}

/// An empty schedule: each sequence as it is. `apart`: transitions at its end that the scheduler
/// does not spread over clusters.
Status launch_schedule(const stage::Call& call, const SequenceMaps& maps, Schedule schedule,
                       int64_t apart, FusedPrefillArgs* args) {
  std::vector<int64_t> words;
  if ((args->num_units = schedule.size()) > 0) {
    args->units = units_of(call);
    args->num_scheduled = args->num_units - apart;
    words = words_of(call, schedule.close());
  }
  const int64_t units = args->units ? args->num_units : call.problem.num_sequences;
  set_launch(call, units * call.problem.num_value_heads, args);
  return launch(call, maps, words, args);
}

/// A schedule that only the device knows: as many clusters as fit.
Status launch_device_cut(const stage::Call& call, const SequenceMaps& maps,
                         FusedPrefillArgs* args) {
  args->units = units_of(call);
  set_launch(call, INT64_MAX, args);
  return launch(call, maps, {}, args);
}

/// Rows of no sequence get zeros from the kernel that makes the maps.
WrittenTensor outputs_of(const stage::Call& call) {
  const Problem& p = call.problem;
  const auto& strides = p.o.strides;
  return {call.tensors.o, 0,
          strides[1],     strides[2],
          strides[3],     p.num_value_heads,
          p.value_dim,    static_cast<int32_t>(dtype_size(p.o.dtype))};
}

/// Makes the maps and the cut where only the device knows the lengths.
Status cut_on_device(const stage::Call& call, SequenceMaps* maps) {
  const Plan& plan = *call.plan;
  const Problem& p = call.problem;
  KDA_RETURN_IF_ERROR(make_sequence_maps(call, {}, /*prepared=*/true, maps));
  maps->launched = true;
  sm90::DeviceCutArgs args;
  args.map = sequence_map_args(call, *maps, outputs_of(call));
  args.model = model_from_bounds(p, plan.device, check_tokens_of(p));
  args.guess = sm90::guess_of(plan.device_cut);
  args.cut = cut_of(call);
  args.offsets_behind = offsets_behind_first(call);
  args.units = units_of(call);
  if constexpr (sm90::kBuilt) return sm90::launch_device_cut(args, {call.stream, true});
  return not_built();
}

/// The maps of a scan. Neither a scan with outputs nor a kernel after it reads maps of segments,
/// nor other ones but for what it flags.
Status make_scan_maps(const stage::SegmentScan& scan, SequenceMaps* maps) {
  const stage::Call& call = scan.call;
  if (call.plan->device_cut.on) return cut_on_device(call, maps);
  const std::span<const Segment> mapped = scan.Qt ? std::span<const Segment>() : scan.segments;
  const bool unread = scan.Qt && !find<int32_t>(call, block::kDeviceFlags);
  return make_sequence_maps(call, mapped, unread, maps);
}

/// A forward that keeps states before chunks and errors for its backward.
Status keep(const stage::Call& call) {
  SequenceMaps maps;
  KDA_RETURN_IF_ERROR(make_sequence_maps(call, {}, false, &maps, outputs_of(call)));
  sm90::KeepArgs args;
  set_inputs(call, maps, &args);
  set_results(call, maps, &args);
  set_launch(call, call.problem.num_sequences * call.problem.num_value_heads, &args);
  args.h = plan::find_block(call.plan->saved, call.tensors.saved, block::kKeptChunkStates);
  args.vn = plan::find_block(call.plan->saved, call.tensors.saved, block::kKeptErrors);
  args.num_chunks = most_chunks(*call.plan);
  args.group_heads = staged::kept_group_heads(*call.plan);
  if constexpr (sm90::kBuilt) return sm90::launch_fused_keep(args, launch_after(call, maps));
  return not_built();
}

}  // namespace

Status forward(const stage::Forward& f) {
  if (kernels_of(*f.call.plan).keeps) return keep(f.call);
  SequenceMaps maps;
  KDA_RETURN_IF_ERROR(
      make_sequence_maps(f.call, f.segments, f.prepared, &maps, outputs_of(f.call)));
  FusedPrefillArgs args;
  set_inputs(f.call, maps, &args);
  set_results(f.call, maps, &args);
  Schedule schedule;
  for (std::size_t n = 0; n < f.segments.size(); ++n)
    schedule.add(f.segments[n], static_cast<int64_t>(n), FusedState::kGiven);
  args.states_in = f.states_in;
  return launch_schedule(f.call, maps, std::move(schedule), 0, &args);
}

Status segment_scan(const stage::SegmentScan& scan) {
  const stage::Call& call = scan.call;
  SequenceMaps maps;
  KDA_RETURN_IF_ERROR(make_scan_maps(scan, &maps));
  FusedPrefillArgs args;
  set_inputs(call, maps, &args);
  set_results(call, maps, &args);
  if (!scan.Qt) {  // a forward from start states has outputs and checkpoints, and flags them
    args.o.base = nullptr;
    args.checkpoints = {};
    args.checkpoint_offsets = nullptr;
  }
  args.Qt = scan.Qt;
  args.M = scan.M;
  args.B = scan.B;
  args.residual = find<uint32_t>(call, block::kOutputResidual);
  args.residual_step = static_cast<uint64_t>(call.problem.num_value_heads) *
                       sm90::residual_bytes(call.problem.value_dim);
  args.Qt_scale_bits = static_cast<uint32_t>(127 + qt_exponent(call.problem)) << 23;
  args.starts = find<float>(call, stage::kSegmentStates.name);
  args.exit_tokens = exit_tokens_of(call);
  if (call.plan->device_cut.on) return launch_device_cut(call, maps, &args);
  const int64_t behind = static_cast<int64_t>(scan.segments.size()) - call.problem.num_sequences;
  return launch_schedule(call, maps, scan_schedule(scan), scan.Qt && args.exit_tokens ? behind : 0,
                         &args);
}

/// After a scan with outputs, which has written the start states of second segments: nothing to do
/// where no sequence has a third.
Status merge_behind_first(const stage::SegmentMerge& merge) {
  const stage::Call& call = merge.call;
  sm90::BegunMergeArgs args;
  args.begun = true;
  args.cut = cut_of(call);
  args.most_segments = most_behind_first(*call.plan);
  if (!args.cut && args.most_segments < 2) return {};
  SequenceMaps maps;
  KDA_RETURN_IF_ERROR(make_sequence_maps(call, {}, true, &maps));
  args.shape = shape_of(call.problem);
  args.map = maps.map;
  args.segment_offsets = offsets_behind_first(call);
  args.M = merge.M;
  args.B = merge.B;
  args.states_in = merge.states_in;
  const Launch where{call.stream, true};
  if constexpr (sm90::kBuilt)
    return args.cut ? sm90::launch_walking_merge(args, call.plan->device.num_sms, where)
                    : sm90::launch_segment_merge(args, where);
  return not_built();
}

Status segment_merge(const stage::SegmentMerge& merge) {
  return merge.rows == stage::SegmentRows::kBehindFirst ? merge_behind_first(merge)
                                                        : cuda::segment_merge(merge);
}

Status segment_correct(const stage::SegmentCorrect& correct) {
  const stage::Call& call = correct.call;
  const Problem& p = call.problem;
  SequenceMaps maps;
  KDA_RETURN_IF_ERROR(make_sequence_maps(call, {}, true, &maps));
  sm90::SegmentCorrectArgs args;
  args.shape = shape_of(p);
  args.map = maps.map;
  args.o = row_view(p.o, call.tensors.o);
  args.fp16_operands = kernels_of(*call.plan).fp16_operands;
  args.Qt = correct.Qt;
  args.qt_exponent = qt_exponent(p);
  args.residual = find<uint32_t>(call, block::kOutputResidual);
  args.M = correct.M;
  args.B = correct.B;
  args.states_in = correct.states_in;
  args.offsets = offsets_behind_first(call);
  args.exit_tokens = exit_tokens_of(call);
  args.final_state =
      state_view(p, p.final_state, call.tensors.final_state, call.tensors.final_state_indices, {});
  args.checkpoints =
      state_view(p, p.checkpoints, call.tensors.checkpoints, call.tensors.checkpoint_indices, {});
  set_offsets(call, &args);
  const auto segments = static_cast<int64_t>(correct.segments.size());
  args.cut = cut_of(call);
  args.units = units_of(call) + segments;  // those of transitions
  args.num_units = segments - p.num_sequences;
  for (std::size_t n = 0; n < correct.segments.size(); ++n)
    if (!begins_sequence(correct.segments, n))
      args.longest = std::max(args.longest, correct.segments[n].end - correct.segments[n].begin);
  if constexpr (sm90::kBuilt)
    return sm90::launch_segment_correct(args, call.plan->device.num_sms, {call.stream, true});
  return not_built();
}

Status span_begin(const stage::SpanMapsCall& span) {
  const stage::Call& call = span.call;
  auto* M = find<float>(call, stage::kSegmentM.name);
  auto* B = find<float>(call, stage::kSegmentB.name);
  KDA_RETURN_IF_ERROR(segment_scan({.call = call,
                                    .segments = call.plan->segments,
                                    .M = M,
                                    .B = B,
                                    .rows = stage::SegmentRows::kBehindFirst,
                                    .Qt = find<void>(call, stage::kTransitionOutput.name),
                                    .exit_token = exit_tokens_of(call)}));
  SegmentComposeArgs args;
  args.shape = shape_of(call.problem);
  args.num_sequences = call.problem.num_sequences;
  args.offsets = offsets_behind_first(call);
  args.M = M, args.B = B;
  args.M_out = span.maps.M, args.B_out = span.maps.B;
  if constexpr (sm90::kBuilt) return launch_segment_compose(args, {call.stream, true});
  return not_built();
}

Status span_finish(const stage::SpanFinish& finish) {
  const stage::Call& call = finish.call;
  const Problem& p = call.problem;
  const auto& segments = call.plan->segments;
  auto* M = find<float>(call, stage::kSegmentM.name);
  auto* B = find<float>(call, stage::kSegmentB.name);
  auto* states = find<float>(call, stage::kSegmentStates.name);
  constexpr auto kRows = stage::SegmentRows::kBehindFirst;
  SegmentPlaceArgs place;
  place.num_sequences = p.num_sequences;
  place.state_floats = p.num_value_heads * p.key_dim * p.value_dim;
  place.offsets = offsets_behind_first(call);
  place.starts = finish.states_in;
  place.states_in = states;
  if constexpr (!sm90::kBuilt) return not_built();
  KDA_RETURN_IF_ERROR(launch_segment_place(place, {call.stream, true}));
  KDA_RETURN_IF_ERROR(segment_merge(
      {.call = call, .segments = segments, .M = M, .B = B, .states_in = states, .rows = kRows}));
  return segment_correct({.call = call,
                          .segments = segments,
                          .M = M,
                          .B = B,
                          .states_in = states,
                          .rows = kRows,
                          .Qt = find<void>(call, stage::kTransitionOutput.name),
                          .exit_token = exit_tokens_of(call)});
}

}  // namespace kda::cuda::fused
