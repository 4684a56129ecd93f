// SPDX-License-Identifier: Apache-2.0
#include "cuda/recurrent/head_gates.hpp"
#include "cuda/recurrent/recurrent.cuh"

namespace kda::cuda::head_gates {
namespace {

using Args = HeadGates<RecurrentArgs>;

/// States are read and written once: element by element, which serves every layout.
template <int kK, int kBV>
Status launch(const Args& args, const Launch& where) {
  return recurrent::launch<kBV>(recurrent::recurrent_kernel<kK, kBV, Access::kScalar, Args>, args,
                                where);
}

}  // namespace

Status launch_recurrent(const Args& args, const Launch& where) {
  if (args.shape.K <= 64) return launch<64, 128>(args, where);
  if (args.shape.K <= 128) return launch<128, 128>(args, where);
  return launch<256, 64>(args, where);
}

}  // namespace kda::cuda::head_gates
