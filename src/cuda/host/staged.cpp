// SPDX-License-Identifier: Apache-2.0
// Backend cuda.sm80.staged: chunk_intra for all chunks at once, then chunk_delta_h.
#include "core/text.hpp"
#include "cuda/host/rows.hpp"
#include "cuda/host/views.hpp"
#include "cuda/launch/built.hpp"
#include "cuda/staged/chunk_delta_h.hpp"
#include "cuda/staged/chunk_delta_h_sm90.hpp"
#include "cuda/staged/chunk_intra.hpp"
#include "plan/ledger.hpp"

namespace kda::cuda::staged {
namespace {

namespace block = plan::block;

Factors factors_of(const stage::Call& call) {
  const auto find = [&](const char* name) {
    return plan::find_block(*call.plan, call.workspace, name);
  };
  const int64_t tiles = most_chunks(*call.plan) * call.problem.num_value_heads;
  const int64_t Kp = call.problem.key_dim <= 64 ? 64 : 128;
  Factors factors;
  factors.w = find(block::kFactorW);
  factors.u = find(block::kFactorU);
  factors.kg = find(block::kFactorKg);
  factors.qg = find(block::kFactorQg);
  factors.Aqk = find(block::kFactorAqk);
  factors.gamma = static_cast<float*>(find(block::kFactorScalars));
  factors.beta = factors.gamma + tiles * Kp;
  factors.diag = factors.beta + tiles * 64;
  return factors;
}

/// `auto` is the tensor form: faster at every shape measured (docs/performance.md).
bool by_tokens(const stage::Call& call) {
  return call.plan->options.intra_form == IntraForm::kToken;
}

bool is_half(const Problem& p) { return p.q.dtype == DType::kFloat16; }

ChunkIntraArgs intra_args(const stage::Call& call, const Maps& maps, const Factors& factors) {
  ChunkIntraArgs args;
  set_inputs(call, maps, &args);
  args.num_chunks = most_chunks(*call.plan);
  args.factors = factors;
  return args;
}

Status chunk_intra(const stage::Call& call, const Maps& maps) {
  return launch_chunk_intra(intra_args(call, maps, factors_of(call)), is_half(call.problem),
                            by_tokens(call), {call.stream});
}

/// Narrow tiles of V while that gives idle SMs work. The values do not depend on it.
bool narrow(const stage::Call& call, int64_t spans, int64_t columns) {
  const int64_t blocks = spans * call.problem.num_value_heads * ((columns + 63) / 64);
  return 2 * blocks <= call.plan->device.num_sms;
}

ChainArgs delta_args(const stage::Call& call, const Maps& maps) {
  ChainArgs args;
  args.shape = shape_of(call.problem);
  args.map = maps.map;
  args.factors = factors_of(call);
  set_outputs(call, maps, &args);
  return args;
}

/// The serial uses of chunk_delta_h, on `columns` columns of state of each span.
Status launch_chain(const stage::Call& call, const ChainArgs& args, ChainUse use, int64_t spans,
                    int64_t columns) {
  const bool half = is_half(call.problem);
  if (sm90::kBuilt && call.plan->device.compute_capability == 90)
    return sm90::launch_chunk_delta_h(args, use, half, call.plan->device.num_sms, {call.stream});
  return launch_chunk_delta_h(args, use, half, narrow(call, spans, columns), {call.stream});
}

}  // namespace

Status forward(const stage::Forward& f) {
  const stage::Call& call = f.call;
  Maps maps;
  KDA_RETURN_IF_ERROR(make_maps(call, f.segments, f.prepared, &maps));
  if (!f.prepared) KDA_RETURN_IF_ERROR(chunk_intra(call, maps));
  ChainArgs args = delta_args(call, maps);
  args.states_in = f.states_in;
  const int64_t spans = f.segments.empty() ? call.problem.num_sequences : maps.map.num_spans;
  return launch_chain(call, args, ChainUse::kForward, spans, call.problem.value_dim);
}

Status segment_scan(const stage::SegmentScan& scan) {
  const stage::Call& call = scan.call;
  Maps maps;
  KDA_RETURN_IF_ERROR(make_maps(call, scan.segments, false, &maps));
  KDA_RETURN_IF_ERROR(chunk_intra(call, maps));
  ChainArgs args = delta_args(call, maps);
  args.M = scan.M;
  args.B = scan.B;
  args.skip_last = scan.skip_last;
  const Problem& p = call.problem;
  return launch_chain(call, args, ChainUse::kScan, maps.map.num_spans, p.value_dim + p.key_dim);
}

/// One stage on the caller's buffers. Segments of the plan are of no concern here.
Status chunk(const stage::Chunk& c) {
  const stage::Call& call = c.call;
  const StageTensors& s = c.stages;
  const Factors factors{s.w, s.u, s.kg, s.qg, s.Aqk, s.T, s.gamma, s.beta, s.diag};
  const bool half = is_half(call.problem);
  const Launch launch{call.stream};
  Maps maps;
  KDA_RETURN_IF_ERROR(make_maps(call, {}, false, &maps));
  if (c.which == stage::ChunkStage::kIntra)
    return launch_chunk_intra(intra_args(call, maps, factors), half, by_tokens(call), launch);
  if (c.which == stage::ChunkStage::kRecomputeWU)
    return launch_recompute_w_u(intra_args(call, maps, factors), half, launch);
  ChainArgs args = delta_args(call, maps);
  args.factors = factors;
  args.h = s.h;
  args.vn = s.vn;
  args.num_chunks = most_chunks(*call.plan);
  const bool outputs = c.which == stage::ChunkStage::kO;
  return launch_chunk_delta_h(args, outputs ? ChainUse::kOutputs : ChainUse::kStates, half,
                              narrow(call, call.problem.num_sequences, call.problem.value_dim),
                              launch);
}

}  // namespace kda::cuda::staged
