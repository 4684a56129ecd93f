// SPDX-License-Identifier: Apache-2.0
// clang-format off
// The backward of cuda.sm80.staged, and of cuda.sm90.staged for rows in fp16, from a checked call to its kernels. Start here; docs/design/backward_hopper.md
// and backward_portable.md say why. kernels.hpp decides which kernels run (`kda plan --backward --device cuda --explain` prints them);
// arguments.hpp makes what each is given; this file is the order in which they run.
//
// Words: of a chunk of 64 tokens and a value head, each [64, .] or [K, V]
//   S0, dS            state before the chunk, gradient of the state behind it (blocks h and dh, transposed)
//   w, u, kg, qg,     factors of the chunk (tile/factors.hpp): E = u - w S0, u = T' v; kg and qg are decayed
//   Aqk, T', gamma    keys and queries, Aqk the scores, T' the inverse, gamma the decay of the chunk
//   E                 errors: what the state gets wrong of v; beta E is what a forward calls vn
//   dZ                gradient of Z = v - (what the state says): dZ = T'^T X (reverse.hpp). It is dv
//   D                 of a segment: gradient before it if that behind it is zero
//   group             q/k heads with their value heads, as many as the workspace holds
//   fallback          what a fast kernel could not finish in its range, done by a second launch
//
// A layer's call on Hopper in bf16, K = V = 128, gates softplus or bounded, q and k normalised, beta a sigmoid,
// all gradients but d_initial_state. With 8,192 tokens and 64 heads that is one group, not cut: five launches,
// in the words of `kda plan`. Bytes are of a token and value head; what both blocks of a chunk and direction
// (64 columns of V each) read is counted once, the directions apart.
//
//   launch                     reads                                      writes               B read + written
//   chunk_intra_fp16           q, k, g, beta                              w, kg, qg, Aqk, T',         770 + 1040
//                                                                         gamma, beta, diag
//   backward_chains_fp16       w, kg, T', v, beta, gamma                  S0, E                       908 +  768
//     both directions in one:  w, kg, qg, Aqk, T', d_o, beta, gamma, diag dS, dZ                     1296 +  768
//   chunk_grad_sm90            q, k, g, beta, d_o, S0, E, dS, dZ          dq, dk, dg, dv, dbeta,     2562 + 1042
//                                                                         sums of a chunk
//   chunk_grad_sm90, fallback  two words a chunk and value head, then     gradients of chunks whose decays or betas
//                              as chunk_grad_sm90                         were out of its range
//   backward_parameters        sums of chunks                             dA_log, ddt_bias              16 +    0
//
// A call without flags (chunk_kda() alone: log gates, plain beta, no norm): four launches, the chains in bf16
//   chunk_intra                q, k, v, g, beta                           w, u, kg, qg, Aqk, T',     1026 + 1296
//                                                                         gamma, beta, diag
//   backward_chains            w, u, kg, beta, gamma                      S0, E                       780 +  768
//     both directions in one:  as above                                   dS, dZ                     1296 +  768
//   chunk_grad_sm90, and its   as above                                   as above, without sums     2562 + 1026
//   fallback
//
// Also launched, and when
//   chunk_grad_sm90, fp16        rows in fp16, in place of both launches of chunk_grad_sm90: S0, E, dS, dZ come in fp16
//                                with a power of two for 16 columns of V; sums over tokens are in tf32
//   upload                       first: a map of packed sequences or of segments, from lengths on the host
//   sequence_map, zero_rows      first and last, where only the GPU knows the lengths (zero_rows: run/run.cpp)
//   chunk_intra, fallback        behind fp16 chains alone, where d_initial_state is wanted, gates are logarithms, or
//   backward_chains, fallback    the call is in two phases: chains that fp16 could not finish, with bf16 factors
//   backward_chains              no fp16: K, V other than 128, no norm, plain beta, an extreme scale, segments
//   segment_sequences            segments, once a call: each as a sequence
//   backward_cut                 behind sequence_map, where only the GPU knows the lengths of sequences that may gain
//                                by a cut: it cuts. Then kernels of whole sequences and of segments are both launched,
//                                and those of one family have nothing to do
//   segment_scan_sm90, d_chains  segments: M, B; then D
//   both_merges                  segments, one phase: states before them and dS behind them
//   segment_merge_sm90,          the same in two phases, where they cannot be at once
//   reverse_merge
//   chunk_grad_sm90,             in place of chunk_grad_sm90: g or dg of fp32, of fp16 or of rows not aligned to 16
//   gates by rows                bytes, tiled heads
//   chunk_grad_sm90,             in place of chunk_grad_sm90: one gate a head, and dg too
//   a gate a head
//   chunk_grad,                  Hopper's chunk_grad does not serve: other sizes than K = V = 128, or 64 with one value
//   backward_gradients           head a q/k head, too few chunks, q, k, d_o, dq or dk not of bf16 rows aligned to 16
//                                bytes
//   chunk_delta_h, chunk_reverse other GPUs: chains as a launch a direction; with chunk_intra, segment_scan,
//                                segment_merge, reverse_merge, chunk_grad, backward_gradients
// Without gradients that tokens have from states (dq, dk, dg, dbeta and those of parameters) chunk_grad and what
// is behind it do not run, nor the chains of S0 and E. What a forward has kept, S0 and E, is not made again.
// clang-format on
#include "cuda/staged/backward/launches.hpp"

#include <cuda_runtime_api.h>

#include "core/text.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/launch/head_bias.hpp"
#include "cuda/recurrent/backward/gradients.hpp"
#include "cuda/segments/launches.hpp"
#include "cuda/staged/backward/arguments.hpp"
#include "cuda/staged/backward/both_merges_sm90.hpp"
#include "cuda/staged/backward/chains_sm90.hpp"
#include "cuda/staged/backward/chunk_delta_h_errors.hpp"
#include "cuda/staged/backward/chunk_grad.hpp"
#include "cuda/staged/backward/chunk_grad_sm90.hpp"
#include "cuda/staged/backward/chunk_intra_fp16_sm90.hpp"
#include "cuda/staged/backward/finish.hpp"
#include "cuda/staged/backward/reverse.hpp"
#include "cuda/staged/backward/reverse_merge.hpp"
#include "cuda/staged/backward/sizes.hpp"
#include "cuda/staged/launches.hpp"
#include "plan/ledger.hpp"

namespace kda::cuda::staged {
namespace {

using Chains = BackwardKernels::Chains;
using Grad = BackwardKernels::Grad;

/// Where the launches of a call go.
struct Stream {
  Launch after;  ///< begins when all before it has ended
  Launch early;  ///< on Hopper begins before that, and waits for it itself (ptx/pdl.cuh)
};

// ---- steps: a launch, or the few that do one thing ---------------------------------------------

Status run_intra(const Group& group, const Stream& on) {
  const HeadGates<ChunkIntraArgs> args = intra_arguments(group);
  if (sm90::kBuilt && group.kernels.chains == Chains::kWgmmaFp16)
    return sm90::launch_chunk_intra_fp16(args, group.kernels.fp16_rows, on.after);
  return launch_chunk_intra(args, /*half=*/false, /*tokens=*/false, on.after);
}

Status run_scan(const Group& group, const Stream& on) {
  ChainKernel kernel = group.kernels.scan;
  kernel.narrow = group.args.shape.HV <= group.kernels.narrow_scan_heads;
  return launch_chain(scan_arguments(group), ChainUse::kScan, kernel, on.after);
}

Status run_states_merge(const Group& group, const Stream& on) {
  return launch_merge(states_arguments(group), group.kernels.merge_hopper, on.after);
}

Status run_d_states_merge(const Group& group, const StateView& d_final, const Stream& on) {
  return launch_reverse_merge(d_states_arguments(group, d_final), on.after);
}

Status run_merges(const Group& group, const Stream& on) {
  if (sm90::kBuilt && group.kernels.one_merge)
    return sm90::launch_both_merges(states_arguments(group),
                                    d_states_arguments(group, group.args.d_final), on.early);
  KDA_RETURN_IF_ERROR(run_states_merge(group, on));
  return run_d_states_merge(group, group.args.d_final, on);
}

/// Chains with fp16 factors, then those again that these could not finish: chains with positive log
/// gates, and d_initial_state, or D, where next to nothing reached it.
Status run_fp16_chains(const Group& group, const ChainArgs* errors, const ReverseArgs& reverse,
                       const Stream& on) {
  uint32_t* fallback = group.kernels.may_fall_back ? group.blocks.fallback : nullptr;
  KDA_RETURN_IF_ERROR(sm90::launch_fp16_chains(errors, reverse, group.args.v, fallback, on.early));
  if (!fallback) return {};
  KDA_RETURN_IF_ERROR(
      sm90::launch_fallback_chunk_intra(intra_arguments(group), fallback, on.after));
  return sm90::launch_fallback_chains(errors, reverse, fallback, on.after);
}

/// Errors from left to right, null: not wanted, and dS from right to left. Neither needs anything
/// of the other.
Status run_chains(const Group& group, const ChainArgs* errors, const ReverseArgs& reverse,
                  const Stream& on) {
  if (sm90::kBuilt && group.kernels.fp16_rows)
    return sm90::launch_fp16_row_chains(errors, reverse, group.args.v, group.blocks.scales,
                                        on.early);
  if (sm90::kBuilt && group.kernels.chains == Chains::kWgmmaFp16)
    return run_fp16_chains(group, errors, reverse, on);
  if (sm90::kBuilt && group.kernels.chains == Chains::kWgmma)
    return sm90::launch_chains(errors, &reverse, on.early);
  const bool narrow = group.args.shape.HV <= group.kernels.narrow_heads;
  if (errors) KDA_RETURN_IF_ERROR(launch_chunk_delta_h_errors(*errors, narrow, on.after));
  return launch_chunk_reverse(reverse, narrow, on.after);
}

/// The chains from right to left once more, in the second phase. Chains that the first phase has
/// made again have bf16 factors by now: what fp16 gives here is made again, whatever it is. Chains
/// that fp16 cannot finish now had their states and errors from other factors.
Status run_chains_again(const Group& group, const ReverseArgs& reverse, const Stream& on) {
  if (!sm90::kBuilt || group.kernels.chains != Chains::kWgmmaFp16)
    return run_chains(group, nullptr, reverse, on);
  const Blocks& blocks = group.blocks;
  KDA_RETURN_IF_ERROR(
      sm90::launch_fp16_chains(nullptr, reverse, group.args.v, blocks.fallback_2, on.after));
  KDA_RETURN_IF_ERROR(
      sm90::launch_fallback_chunk_intra(intra_arguments(group), blocks.fallback_2, on.after));
  const ChainArgs errors = errors_arguments(group);
  KDA_RETURN_IF_ERROR(sm90::launch_fallback_chains(&errors, reverse, blocks.fallback_2, on.after));
  return sm90::launch_fallback_chains(nullptr, reverse, blocks.fallback, on.after);
}

Status run_grad(const Group& group, const Stream& on) {
  if (group.kernels.grad == Grad::kNone) return {};
  if (sm90::kBuilt && group.kernels.grad == Grad::kHopper)
    return sm90::launch_chunk_grad(grad_arguments(group), group.kernels.grad_gates,
                                   group.plan.device.num_sms, on.early);
  KDA_RETURN_IF_ERROR(launch_chunk_grad(portable_grad_arguments(group), on.after));
  return launch_finish_gradients(group.args, on.after);
}

Status run_parameters(const Group& group, const Stream& on) {
  return group.kernels.parameters ? launch_parameters(parameter_arguments(group), on.early)
                                  : Status{};
}

/// Chains of states and errors, or null. (Only the first group flags bad metadata.)
const ChainArgs* wanted(const Group& group, const ChainArgs& errors) {
  return group.kernels.grad != Grad::kNone || group.args.flags ? &errors : nullptr;
}

// ---- the launches of a group, in order ---------------------------------------------------------

Status run_both_chains(const Group& group, const Stream& on) {
  const ChainArgs errors = errors_arguments(group);
  return run_chains(group, wanted(group, errors), reverse_arguments(group), on);
}

Status run_whole(const Group& group, const Stream& on) {
  KDA_RETURN_IF_ERROR(run_intra(group, on));
  KDA_RETURN_IF_ERROR(run_both_chains(group, on));
  KDA_RETURN_IF_ERROR(run_grad(group, on));
  return run_parameters(group, on);
}

Status run_segment_chains(const Group& group, const Stream& on) {
  KDA_RETURN_IF_ERROR(run_scan(group, on));
  KDA_RETURN_IF_ERROR(run_chains(group, nullptr, segments_d_arguments(group), on));
  KDA_RETURN_IF_ERROR(run_merges(group, on));
  return run_both_chains(group, on);
}

Status run_segmented(const Group& group, const Stream& on) {
  KDA_RETURN_IF_ERROR(run_intra(group, on));
  KDA_RETURN_IF_ERROR(run_segment_chains(group, on));
  KDA_RETURN_IF_ERROR(run_grad(group, on));
  return run_parameters(group, on);
}

/// The device cuts, or does not: chains of whole sequences and those of segments, of which one
/// family has nothing to do. Where both read the same factors these are made once.
Status run_device_cut(const Group& group, const CutMaps& maps, const Stream& on) {
  const CutFamilies of(group, maps);
  if (of.whole.kernels.chains == of.cut.kernels.chains) {
    KDA_RETURN_IF_ERROR(run_intra(group, on));
  } else {
    KDA_RETURN_IF_ERROR(run_intra(of.whole, on));
    KDA_RETURN_IF_ERROR(run_intra(of.cut, on));
  }
  KDA_RETURN_IF_ERROR(run_both_chains(of.whole, on));
  KDA_RETURN_IF_ERROR(run_segment_chains(of.cut, on));
  KDA_RETURN_IF_ERROR(run_grad(group, on));
  return run_parameters(group, on);
}

/// The first of two phases: all that does not wait for dS behind the sequences.
Status run_first_phase(const Group& group, const SpanGradients& spans, const Stream& on) {
  const ChainArgs errors = errors_arguments(group);
  KDA_RETURN_IF_ERROR(run_intra(group, on));
  if (group.segments.count == 0)
    return run_chains(group, wanted(group, errors), sequences_d_arguments(group, spans), on);
  KDA_RETURN_IF_ERROR(run_scan(group, on));
  KDA_RETURN_IF_ERROR(run_states_merge(group, on));
  KDA_RETURN_IF_ERROR(run_chains(group, wanted(group, errors), segments_d_arguments(group), on));
  if (!spans.D) return {};
  return run_d_states_merge(group, spans.from_final ? group.args.d_final : StateView{}, on);
}

/// The second phase, once dS behind the sequences is there.
Status run_second_phase(const Group& group, const Stream& on) {
  if (group.segments.count > 0)
    KDA_RETURN_IF_ERROR(run_d_states_merge(group, group.args.d_final, on));
  KDA_RETURN_IF_ERROR(run_chains_again(group, reverse_arguments(group), on));
  KDA_RETURN_IF_ERROR(run_grad(group, on));
  return run_parameters(group, on);
}

// ---- all groups --------------------------------------------------------------------------------

/// Calls run(group, stream) for each group. `prepared`: an earlier call has made the maps.
template <class Run>
Status for_groups(const stage::Backward& b, bool prepared, Run&& run) {
  const Plan& plan = *b.call.plan;
  const BackwardKernels kernels = kernels_of(plan, b.gradients);
  SequenceMaps maps;
  KDA_RETURN_IF_ERROR(make_sequence_maps(b.call, plan.segments, prepared, &maps));
  BackwardArgs given;
  KDA_RETURN_IF_ERROR(set_gradients(b, maps, &given));
  HeadGates<BackwardArgs> all = with_head_gates(b, given);
  const SegmentBlocks segments = segments_of(b.call, maps);
  if (plan.device_cut.on)
    KDA_RETURN_IF_ERROR(
        launch_backward_cut(cut_arguments(b.call, maps.map, all.initial), {b.call.stream}));
  else if (segments.count > 0 && !prepared)
    KDA_RETURN_IF_ERROR(launch_segment_sequences(
        sequences_arguments(maps.map, all.initial, segments), {b.call.stream}));
  all.sizes.pieces = pieces_of(b.call.problem);
  all.rows = static_cast<float*>(plan::find_block(plan, b.call.workspace, block::kFactorsThenRows));
  const Stream on{{b.call.stream}, {b.call.stream, kernels.on_hopper()}};
  const HeadGroups groups = groups_of(plan);
  for (int64_t first = 0; first < all.shape.H; first += groups.heads) {
    KDA_RETURN_IF_ERROR(run(group_at(b.call, all, kernels, segments, first, groups.heads), on));
    all.flags = nullptr;  // the first group has set them
  }
  return {};
}

/// All groups of the phase that ends with gradients.
template <class Run>
Status finish_groups(const stage::Backward& b, bool prepared, Run&& run) {
  KDA_RETURN_IF_ERROR(for_groups(b, prepared, run));
  return sum_bias(b);
}

/// D of sequences: dS before their empty first segments.
Status copy_d(const Group& group, float* D, const Stream& on) {
  const Shape& shape = group.args.shape;
  const int64_t floats = int64_t{shape.HV} * shape.K * shape.V;
  for (int64_t n = 0; n < group.plan.problem.num_sequences; ++n) {
    const int64_t first = group.plan.segment_offsets[static_cast<std::size_t>(n)];
    KDA_RETURN_IF_ERROR(call_status(
        cudaMemcpyAsync(D + n * floats, group.segments.d_states + first * floats,
                        static_cast<std::size_t>(floats) * sizeof(float), cudaMemcpyDeviceToDevice,
                        static_cast<cudaStream_t>(on.after.stream)),
        "cudaMemcpyAsync"));
  }
  return {};
}

}  // namespace

Status backward(const stage::Backward& b) {
  const CutMaps maps = cut_maps_of(b.call);
  return finish_groups(b, false, [&](const Group& group, const Stream& on) {
    if (maps.units > 0) return run_device_cut(group, maps, on);
    return group.segments.count > 0 ? run_segmented(group, on) : run_whole(group, on);
  });
}

Status span_backward_begin(const stage::SpanBackwardBegin& begin) {
  const SpanGradients& spans = begin.spans;
  return for_groups(begin.backward, false, [&](const Group& group, const Stream& on) {
    KDA_RETURN_IF_ERROR(run_first_phase(group, spans, on));
    return spans.D && group.segments.count > 0 ? copy_d(group, spans.D, on) : Status{};
  });
}

Status span_backward_finish(const stage::Backward& b) {
  return finish_groups(b, true, run_second_phase);
}

}  // namespace kda::cuda::staged
