// SPDX-License-Identifier: Apache-2.0
#include "cuda/recurrent/head_gates.hpp"
#include "cuda/recurrent/recurrent.cuh"

namespace kda::cuda {
namespace {

using recurrent::recurrent_kernel;

Access access_of(const RecurrentArgs& a) {
  bool kv = a.shape.K % 4 == 0 && a.shape.V % 4 == 0;
  bool vk = kv;
  for (const StateView* view :
       {&a.initial, &a.final_state, &a.checkpoints, &a.states_in, &a.M, &a.B}) {
    if (!view->base) continue;
    kv = kv && view->vectors && !view->vk;
    vk = vk && view->vectors && view->vk;
  }
  return kv ? Access::kVectorsKV : vk ? Access::kVectorsVK : Access::kScalar;
}

/// States without vectors take the kernels of head_gates.cu, which serve every layout.
template <int kK, int kBV>
Status launch(const RecurrentArgs& args, const Launch& where) {
  const auto run = [&](auto kernel) { return recurrent::launch<kBV>(kernel, args, where); };
  switch (access_of(args)) {
    case Access::kVectorsKV:
      return run(recurrent_kernel<kK, kBV, Access::kVectorsKV, RecurrentArgs>);
    case Access::kVectorsVK:
      return run(recurrent_kernel<kK, kBV, Access::kVectorsVK, RecurrentArgs>);
    case Access::kScalar: break;
  }
  return head_gates::launch_recurrent({args}, where);
}

}  // namespace

Status launch_recurrent(const RecurrentArgs& args, const Launch& where) {
  if (args.shape.K <= 64) return launch<64, 128>(args, where);
  if (args.shape.K <= 128) return launch<128, 128>(args, where);
  return launch<256, 64>(args, where);
}

}  // namespace kda::cuda
