// SPDX-License-Identifier: Apache-2.0
#include "cuda/staged/backward/chunk_delta_h_errors.hpp"

#include "cuda/staged/chunk_delta_h_sm80.cuh"

namespace kda::cuda {
namespace {

template <int kK>
Status launch_width(const ChainArgs& args, bool narrow, const Launch& where) {
  return narrow ? launch<__nv_bfloat16, kK, 2, ChainUse::kErrors>(args, where)
                : launch<__nv_bfloat16, kK, 4, ChainUse::kErrors>(args, where);
}

}  // namespace

Status launch_chunk_delta_h_errors(const ChainArgs& args, bool narrow, const Launch& where) {
  return args.shape.K <= 64 ? launch_width<64>(args, narrow, where)
                            : launch_width<128>(args, narrow, where);
}

}  // namespace kda::cuda
