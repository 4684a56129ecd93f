// SPDX-License-Identifier: Apache-2.0
#include "cuda/decode/decode.cuh"
#include "cuda/decode/head_gates.hpp"

namespace kda::cuda::head_gates {
namespace {

using Args = HeadGates<DecodeArgs>;

/// Kernels for dense buffers are those of kK = 128 alone. The others serve decode.cu too.
template <int kK>
Status launch(const Args& args, const Launch& where) {
  if (!decode::has_vectors(args))  // one kernel for sizes up to 128
    return decode::launch<(kK < 128 ? 128 : kK), Access::kScalar, false>(args, where);
  if constexpr (kK == 128)
    if (decode::is_dense<kK>(args))
      return args.target.vk ? decode::launch_dense<kK, Access::kVectorsVK>(args, where)
                            : decode::launch_dense<kK, Access::kVectorsKV>(args, where);
  return args.target.vk ? decode::launch<kK, Access::kVectorsVK, false>(args, where)
                        : decode::launch<kK, Access::kVectorsKV, false>(args, where);
}

}  // namespace

Status launch_decode(const Args& args, const Launch& where) {
  if (args.shape.K <= 64) return launch<64>(args, where);
  if (args.shape.K <= 128) return launch<128>(args, where);
  return launch<256>(args, where);
}

}  // namespace kda::cuda::head_gates
