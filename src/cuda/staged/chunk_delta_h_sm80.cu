// SPDX-License-Identifier: Apache-2.0
#include "cuda/staged/chunk_delta_h.hpp"

#include "cuda/staged/chunk_delta_h_sm80.cuh"

namespace kda::cuda {
namespace {

template <class T, int kK>
Status launch_states(const ChainArgs& args, bool narrow, const Launch& where) {
  return narrow ? launch<T, kK, 2, ChainUse::kStates>(args, where)
                : launch<T, kK, 4, ChainUse::kStates>(args, where);
}

template <class T, int kK>
Status launch_outputs(const ChainArgs& args, const Launch& where) {
  return launch<T, kK, 4, ChainUse::kOutputs>(args, where);
}

}  // namespace

Status launch_chunk_states(const ChainArgs& args, bool fp16, bool narrow, const Launch& where) {
  if (args.shape.K <= 64)
    return fp16 ? launch_states<__half, 64>(args, narrow, where)
                : launch_states<__nv_bfloat16, 64>(args, narrow, where);
  return fp16 ? launch_states<__half, 128>(args, narrow, where)
              : launch_states<__nv_bfloat16, 128>(args, narrow, where);
}

Status launch_chunk_outputs(const ChainArgs& args, bool fp16, const Launch& where) {
  if (args.shape.K <= 64)
    return fp16 ? launch_outputs<__half, 64>(args, where)
                : launch_outputs<__nv_bfloat16, 64>(args, where);
  return fp16 ? launch_outputs<__half, 128>(args, where)
              : launch_outputs<__nv_bfloat16, 128>(args, where);
}

}  // namespace kda::cuda
