// SPDX-License-Identifier: Apache-2.0
#include "cuda/staged/chunk_delta_h.hpp"
#include "cuda/staged/chunk_delta_h_sm80.cuh"

namespace kda::cuda {
namespace {

template <class T, int kK, int kWarps>
Status launch_use(const ChainArgs& args, ChainUse use, const Launch& where) {
  if (use == ChainUse::kForward) return launch<T, kK, kWarps, ChainUse::kForward>(args, where);
  if (use == ChainUse::kScan) return launch<T, kK, kWarps, ChainUse::kScan>(args, where);
  return {StatusCode::kInternal, "chunk_delta_h has no such chain"};
}

template <class T, int kK>
Status launch_width(const ChainArgs& args, ChainUse use, bool narrow, const Launch& where) {
  return narrow ? launch_use<T, kK, 2>(args, use, where) : launch_use<T, kK, 4>(args, use, where);
}

}  // namespace

Status launch_chunk_delta_h(const ChainArgs& args, ChainUse use, bool fp16, bool narrow,
                            const Launch& where) {
  if (args.shape.K <= 64)
    return fp16 ? launch_width<__half, 64>(args, use, narrow, where)
                : launch_width<__nv_bfloat16, 64>(args, use, narrow, where);
  return fp16 ? launch_width<__half, 128>(args, use, narrow, where)
              : launch_width<__nv_bfloat16, 128>(args, use, narrow, where);
}

}  // namespace kda::cuda
