// SPDX-License-Identifier: Apache-2.0
#include "cuda/decode/decode.cuh"
#include "cuda/head_gates/head_gates.hpp"

namespace kda::cuda::head_gates {
namespace {

using Args = HeadGates<DecodeArgs>;

/// As of decode.cu, with fewer kernels: K up to 64 takes that of 128, and 256 reads states element
/// by element.
Status launch_128(const Args& args, const Launch& where) {
  using decode::launch;
  if (!decode::has_vectors(args)) return launch<128, Access::kScalar, false>(args, where);
  // One gate is a word of its own in fp32 only.
  const bool words = args.gate_step == 0 ? args.g.type == Element::kFloat32 : args.g.whole_words;
  if (words && decode::is_dense<128>(args))
    return args.target.vk ? launch<128, Access::kVectorsVK, true>(args, where)
                          : launch<128, Access::kVectorsKV, true>(args, where);
  return args.target.vk ? launch<128, Access::kVectorsVK, false>(args, where)
                        : launch<128, Access::kVectorsKV, false>(args, where);
}

}  // namespace

Status launch_decode(const Args& args, const Launch& where) {
  if (args.shape.K <= 128) return launch_128(args, where);
  return decode::launch<256, Access::kScalar, false>(args, where);
}

}  // namespace kda::cuda::head_gates
