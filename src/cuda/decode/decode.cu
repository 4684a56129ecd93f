// SPDX-License-Identifier: Apache-2.0
#include "cuda/decode/decode.cuh"
#include "cuda/decode/head_gates.hpp"

namespace kda::cuda {
namespace {

/// Dense buffers have kernels of their own. Others take those of head_gates.cu: the same code,
/// which also reads the step of a gate and how heads are shared.
template <int kK>
Status launch(const DecodeArgs& args, const Launch& where) {
  if (!decode::has_vectors(args) || !decode::is_dense<kK>(args))
    return head_gates::launch_decode({args}, where);
  return args.target.vk ? decode::launch_dense<kK, Access::kVectorsVK>(args, where)
                        : decode::launch_dense<kK, Access::kVectorsKV>(args, where);
}

}  // namespace

Status launch_decode(const DecodeArgs& args, const Launch& where) {
  if (args.shape.K <= 64) return launch<64>(args, where);
  if (args.shape.K <= 128) return launch<128>(args, where);
  return launch<256>(args, where);
}

}  // namespace kda::cuda
