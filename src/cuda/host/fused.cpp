// SPDX-License-Identifier: Apache-2.0
// Backend cuda.sm90.fused: everything in one kernel.
#include "cuda/host/fused.hpp"

#include "core/text.hpp"
#include "cuda/host/views.hpp"
#include "cuda/sm90/built.hpp"
#include "cuda/sm90/fused_prefill.hpp"
#include "plan/ledger.hpp"

namespace kda::cuda::fused {

Status forward(const stage::Forward& f) {
  const stage::Call& call = f.call;
  Maps maps;
  KDA_RETURN_IF_ERROR(make_maps(call, {}, f.prepared, &maps));
  sm90::FusedPrefillArgs args;
  set_inputs(call, maps, &args);
  set_outputs(call, maps, &args);
  const Problem& p = call.problem;
  args.shares = sm90::fused_shares(p.num_sequences * p.num_value_heads, call.plan->device.num_sms);
  args.handed =
      static_cast<float*>(plan::find_block(*call.plan, call.workspace, plan::block::kHandedStates));
  args.handed_flags = static_cast<uint32_t*>(
      plan::find_block(*call.plan, call.workspace, plan::block::kHandedFlags));
  if constexpr (sm90::kBuilt) return sm90::launch_fused_prefill(args, {call.stream});
  return Status(StatusCode::kUnavailable, "cuda.sm90.fused: this build has no kernels of sm_90a");
}

}  // namespace kda::cuda::fused
