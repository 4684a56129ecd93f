// SPDX-License-Identifier: Apache-2.0
#include "cuda/decode/decode.cuh"

namespace kda::cuda {
namespace {

template <int kK>
Status launch(const DecodeArgs& args, const Launch& where) {
  if (!decode::has_vectors(args)) return decode::launch<kK, Access::kScalar, false>(args, where);
  const bool dense = decode::is_dense<kK>(args);
  if (args.target.vk)
    return dense ? decode::launch_dense<kK, Access::kVectorsVK>(args, where)
                 : decode::launch<kK, Access::kVectorsVK, false>(args, where);
  return dense ? decode::launch_dense<kK, Access::kVectorsKV>(args, where)
               : decode::launch<kK, Access::kVectorsKV, false>(args, where);
}

}  // namespace

Status launch_decode(const DecodeArgs& args, const Launch& where) {
  if (args.shape.K <= 64) return launch<64>(args, where);
  if (args.shape.K <= 128) return launch<128>(args, where);
  return launch<256>(args, where);
}

}  // namespace kda::cuda
