// SPDX-License-Identifier: Apache-2.0
// Backend cuda.smxx.recurrent, and what both backends share: decode, the merge of segments.
#include "cuda/smxx/recurrent.hpp"
#include "core/text.hpp"
#include "cuda/host/rows.hpp"
#include "cuda/host/views.hpp"
#include "cuda/sm90/decode.hpp"
#include "cuda/smxx/decode.hpp"
#include "cuda/smxx/segment_merge.hpp"

namespace kda::cuda {
namespace {

RecurrentArgs recurrent_args(const stage::Call& call, const Maps& maps) {
  const Problem& p = call.problem;
  const Tensors& t = call.tensors;
  RecurrentArgs args;
  args.shape = shape_of(p);
  args.map = maps.map;
  args.q = row_view(p.q, t.q);
  args.k = row_view(p.k, t.k);
  args.v = row_view(p.v, t.v);
  args.g = row_view(p.g, t.g);
  args.beta = row_view(p.beta, t.beta);
  args.o = row_view(p.o, t.o);
  args.gate = gate_view(p, t);
  args.initial = state_view(p, p.initial_state, t.initial_state, t.initial_state_indices,
                            p.initial_state_mask ? t.initial_state_mask : nullptr);
  args.final_state = state_view(p, p.final_state, t.final_state, t.final_state_indices, nullptr);
  args.checkpoints = state_view(p, p.checkpoints, t.checkpoints, t.checkpoint_indices, nullptr);
  args.checkpoint_every = p.checkpoint_every;
  args.flags = maps.flags;
  args.accumulate_flags = maps.accumulate_flags;
  return args;
}

}  // namespace

namespace recurrent {

Status forward(const stage::Forward& f) {
  Maps maps;
  KDA_RETURN_IF_ERROR(make_maps(f.call, f.segments, f.prepared, &maps));
  RecurrentArgs args = recurrent_args(f.call, maps);
  args.states_in = span_states(f.call.problem, f.states_in, f.call.problem.value_dim);
  return launch_recurrent(args, {f.call.stream});
}

Status decode(const stage::Decode& d) {
  Maps maps;
  KDA_RETURN_IF_ERROR(make_maps(d.call, {}, false, &maps));
  const Problem& p = d.call.problem;
  const Tensors& t = d.call.tensors;
  DecodeArgs args;
  args.shape = shape_of(p);
  args.map = maps.map;
  args.q = row_view(p.q, t.q);
  args.k = row_view(p.k, t.k);
  args.v = row_view(p.v, t.v);
  args.g = row_view(p.g, t.g);
  args.beta = row_view(p.beta, t.beta);
  args.o = row_view(p.o, t.o);
  args.gate = gate_view(p, t);
  args.pool = state_view(p, p.initial_state, t.initial_state, t.initial_state_indices, nullptr);
  args.index_columns = p.state_index_columns;
  args.num_accepted = p.num_accepted_tokens ? t.num_accepted_tokens : nullptr;
  args.flags = maps.flags;
  args.accumulate_flags = maps.accumulate_flags;
  const DeviceFacts& device = d.call.plan->device;
  if (decode_sm90_serves(args, device.compute_capability))
    return launch_decode_sm90(args, device.num_sms, {d.call.stream});
  return launch_decode(args, {d.call.stream});
}

Status segment_scan(const stage::SegmentScan& scan) {
  Maps maps;
  KDA_RETURN_IF_ERROR(make_maps(scan.call, scan.segments, false, &maps));
  RecurrentArgs args = recurrent_args(scan.call, maps);
  const Problem& p = scan.call.problem;
  args.M = span_states(p, scan.M, p.key_dim);
  args.B = span_states(p, scan.B, p.value_dim);
  args.skip_last = scan.skip_last;
  args.initial = args.final_state = args.checkpoints = {};
  args.flags = nullptr;
  return launch_recurrent(args, {scan.call.stream});
}

}  // namespace recurrent

Status segment_merge(const stage::SegmentMerge& merge) {
  const stage::Call& call = merge.call;
  Maps maps;
  KDA_RETURN_IF_ERROR(make_maps(call, merge.segments, merge.prepared, &maps));
  const Problem& p = call.problem;
  const Tensors& t = call.tensors;
  SegmentMergeArgs args;
  args.shape = shape_of(p);
  args.map = maps.map;
  args.segment_offsets = maps.segment_offsets;
  args.initial = state_view(p, p.initial_state, t.initial_state, t.initial_state_indices,
                            p.initial_state_mask ? t.initial_state_mask : nullptr);
  args.M = merge.M;
  args.B = merge.B;
  args.states_in = merge.states_in;
  return launch_segment_merge(args, {call.stream});
}

}  // namespace kda::cuda
