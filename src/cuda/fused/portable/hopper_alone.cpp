// SPDX-License-Identifier: Apache-2.0
// The portable fused forward in a build for Hopper alone, which has the one of fused/ for it.
#include "cuda/fused/portable/portable_prefill.hpp"

namespace kda::cuda {

Status sm90::launch_portable_prefill(const PortableArgs&, Launch) {
  return {StatusCode::kUnavailable,
          "cuda: this build, for compute capability 9.0 alone, has no portable fused forward"};
}

}  // namespace kda::cuda
