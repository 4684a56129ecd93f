// SPDX-License-Identifier: Apache-2.0
// chunk_grad_sm90.cu for fp16 rows and operands, with sums over tokens in tf32 and gates in rows of
// device memory: the place of tiles of gates is taken by pairs.
#include "cuda/staged/backward/grad_sm90/kernel.cuh"

namespace kda::cuda::sm90 {
namespace {

template <GateMode kMode>
Status launch_fp16(const grad::Args& args, int64_t num_sms, const Launch& where) {
  const int64_t units = units_of(args);
  return args.shape.HV > args.shape.H
             ? launch<kMode, Heads::kGrouped, GradGates::kRows, __half>(args, units, num_sms, where)
             : launch<kMode, Heads::kOne, GradGates::kRows, __half>(args, units, num_sms, where);
}

}  // namespace

Status launch_grad_fp16(const grad::Args& args, int64_t num_sms, const Launch& where) {
  return args.gate.gate_mode == GateMode::kBounded
             ? launch_fp16<GateMode::kBounded>(args, num_sms, where)
             : launch_fp16<GateMode::kSoftplus>(args, num_sms, where);
}

}  // namespace kda::cuda::sm90
