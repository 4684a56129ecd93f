// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/zero_rows.hpp"

#include "core/layout.hpp"
#include "core/text.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/launch/views.hpp"
#include "plan/ledger.hpp"
#include "registry/rows.hpp"

namespace kda::cuda {

namespace {

Status set_lengths(const stage::Call& call, ZeroRowsArgs* args) {
  const Problem& p = call.problem;
  if (!p.cu_seqlens) return {};
  if (call.plan->lengths_known) {  // the call's own may be null
    SequenceMaps maps;
    KDA_RETURN_IF_ERROR(make_sequence_maps(call, {}, /*prepared=*/false, &maps));
    args->lengths = maps.map.cu_seqlens, args->wide_lengths = 1;
    return {};
  }
  // A map is clamped: with wrong offsets too it says which rows the kernels have taken.
  const void* map = plan::find_block(*call.plan, call.workspace, block::kSequenceMap);
  args->lengths = map ? map : call.tensors.cu_seqlens;
  args->wide_lengths = map || p.cu_seqlens == DType::kInt64;
  return {};
}

}  // namespace

Status zero_rows(const stage::Call& call, std::span<const registry::WrittenRows> written) {
  const Problem& p = call.problem;
  ZeroRowsArgs args;
  KDA_RETURN_IF_ERROR(set_lengths(call, &args));
  args.num_sequences = p.num_sequences;
  args.num_tokens = p.num_tokens;
  if (zeroes_without_slot(p)) args.states = initial_view(p, call.tensors);
  for (const registry::WrittenRows& rows : written) {
    const TensorDesc& desc = rows.desc;
    args.add({rows.data, p.batch > 1 ? desc.strides[0] : 0, desc.strides[1], desc.strides[2],
              desc.strides[3], rows.heads, rows.size,
              static_cast<int32_t>(dtype_size(desc.dtype))});
  }
  const DeviceFacts& device = call.plan->device;
  return launch_zero_rows(args, 2 * device.num_sms, {call.stream, device.compute_capability >= 90});
}

Status zero_rows_without_slot(const stage::Call& call,
                              std::span<const registry::WrittenRows> written) {
  return zeroes_without_slot(call.problem) ? zero_rows(call, written) : Status{};
}

}  // namespace kda::cuda
