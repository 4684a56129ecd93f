// SPDX-License-Identifier: Apache-2.0
// Backend cuda.smxx.recurrent, and what both backends share: decode, the merge of segments.
#include "cuda/recurrent/launches.hpp"

#include "cuda/recurrent/recurrent.hpp"
#include "cuda/recurrent/tails.hpp"

#include "core/layout.hpp"
#include "core/text.hpp"
#include "cuda/decode/decode.hpp"
#include "cuda/decode/drafts.hpp"
#include "cuda/decode/head_gates.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/head_bias.hpp"
#include "cuda/launch/views.hpp"
#include "cuda/recurrent/head_gates.hpp"
#include "plan/ledger.hpp"

namespace kda::cuda {
namespace {

RecurrentArgs recurrent_args(const stage::Call& call, const SequenceMaps& maps) {
  RecurrentArgs args;
  set_inputs(call, maps, &args);
  set_outputs(call, maps, &args);
  return args;
}

Status launch(const Problem& p, const RecurrentArgs& args, void* stream) {
  if (needs_head_gates(p)) return head_gates::launch_recurrent(with_head_gates(p, args), {stream});
  return launch_recurrent(args, {stream});
}

/// Maps of packed sequences whose lengths the kernel reads itself.
SequenceMaps one_row(const stage::Call& call) {
  SequenceMaps maps;
  maps.map.num_sequences = call.problem.num_sequences;
  maps.map.num_tokens = call.problem.num_tokens;
  maps.flags =
      static_cast<int32_t*>(plan::find_block(*call.plan, call.workspace, block::kDeviceFlags));
  return maps;
}

}  // namespace

namespace recurrent {

Status forward(const stage::Forward& f) {
  SequenceMaps maps;
  KDA_RETURN_IF_ERROR(make_sequence_maps(f.call, f.segments, f.prepared, &maps));
  RecurrentArgs args = recurrent_args(f.call, maps);
  args.states_in = span_states(f.call.problem, f.states_in, f.call.problem.value_dim);
  return launch(f.call.problem, args, f.call.stream);
}

Status make_decode_args(const stage::Call& call, DecodeArgs* args) {
  const Plan& plan = *call.plan;
  const Problem& p = call.problem;
  const Tensors& t = call.tensors;
  SequenceMaps maps;
  if (p.cu_seqlens && !plan.lengths_known) {
    args->lengths = t.cu_seqlens;
    args->wide_lengths = p.cu_seqlens == DType::kInt64;
    maps = one_row(call);
  } else {
    KDA_RETURN_IF_ERROR(make_sequence_maps(call, {}, false, &maps));
  }
  set_inputs(call, maps, args);
  args->o = row_view(p.o, t.o);
  args->initial = initial_view(p, t);
  args->in_place = !p.final_state;
  args->target = args->in_place
                     ? args->initial
                     : state_view(p, p.final_state, t.final_state, t.final_state_indices, nullptr);
  args->index_columns = p.state_index_columns;
  args->zero_skipped = zeroes_skipped(p);
  args->num_accepted = p.num_accepted_tokens ? t.num_accepted_tokens : nullptr;
  args->flags = maps.flags;
  args->ahead = static_cast<uint32_t>(plan.device.num_sms);
  return {};
}

Status decode(const stage::Decode& d) {
  const Plan& plan = *d.call.plan;
  const Problem& p = d.call.problem;
  const Tensors& t = d.call.tensors;
  DecodeArgs args;
  KDA_RETURN_IF_ERROR(make_decode_args(d.call, &args));
  const Launch where{d.call.stream, plan.device.compute_capability >= 90};
  // Behind a launch that writes the bias: not early.
  const Launch behind{where.stream, where.pdl && !has_head_bias(p)};
  if (p.tail || decodes_drafts(p)) KDA_RETURN_IF_ERROR(expand_bias(d.call, &args.gate));
  if (p.tail) return tail_decode(d.call, args, behind);
  if (decodes_drafts(p)) {
    // A pool without slots may have no memory, and is a pool all the same: nobody reads from here.
    if (p.initial_state && !args.initial.base)
      args.initial.base = const_cast<int32_t*>(t.initial_state_indices);
    return drafts::launch_decode(
        {with_head_gates(p, args), p.token_parents ? t.token_parents : nullptr}, behind);
  }
  if (needs_head_gates(p)) return head_gates::launch_decode(with_head_gates(p, args), where);
  return launch_decode(args, where);
}

Status segment_scan(const stage::SegmentScan& scan) {
  SequenceMaps maps;
  KDA_RETURN_IF_ERROR(make_sequence_maps(scan.call, scan.segments, false, &maps));
  RecurrentArgs args = recurrent_args(scan.call, maps);
  const Problem& p = scan.call.problem;
  args.M = span_states(p, scan.M, p.key_dim);
  args.B = span_states(p, scan.B, p.value_dim);
  args.skip_last = scan.skip_last;
  args.initial = args.final_state = args.checkpoints = {};
  args.flags = nullptr;
  return launch(p, args, scan.call.stream);
}

}  // namespace recurrent

}  // namespace kda::cuda
