// SPDX-License-Identifier: Apache-2.0
// Backend cuda.sm80.fused: everything in one kernel, on any card from sm_80 on.
#include "cuda/fused/portable/launches.hpp"

#include "core/text.hpp"
#include "cuda/fused/kernels.hpp"
#include "cuda/fused/launches.hpp"
#include "cuda/fused/portable/cost.hpp"
#include "cuda/fused/portable/portable_prefill.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/device.hpp"
#include "cuda/launch/views.hpp"
#include "plan/ledger.hpp"

namespace kda::cuda::fused::portable {

Status forward(const stage::Forward& f) {
  const stage::Call& call = f.call;
  const Problem& p = call.problem;
  SequenceMaps maps;
  KDA_RETURN_IF_ERROR(make_sequence_maps(call, f.segments, f.prepared, &maps));
  sm90::PortableArgs args;
  set_inputs(call, maps, &args);
  set_outputs(call, maps, &args);
  args.fp16_operands = has_fp16_operands(p);
  args.clusters = blocks_of(p, call.plan->device);
  KDA_RETURN_IF_ERROR(most_shared_bytes(&args.shared_bytes));
  args.handoff_states = static_cast<float*>(
      static_cast<void*>(plan::find_block(*call.plan, call.workspace, block::kHandoffStates)));
  args.handoff_flags = static_cast<uint64_t*>(
      static_cast<void*>(plan::find_block(*call.plan, call.workspace, block::kHandoffFlags)));
  args.handoff_epoch = new_handoff_epoch();
  return sm90::launch_portable_prefill(args, launch_after(call, maps));
}

}  // namespace kda::cuda::fused::portable
