// SPDX-License-Identifier: Apache-2.0
// The portable chains in a build for Hopper alone, whose own chains serve every device that it is
// for.
#include "core/text.hpp"
#include "cuda/staged/backward/chunk_delta_h_errors.hpp"
#include "cuda/staged/backward/reverse.hpp"
#include "cuda/staged/chunk_delta_h.hpp"

namespace kda::cuda {
namespace {

Status not_built(const char* kernel) {
  return {StatusCode::kUnavailable,
          cat("cuda: this build, for compute capability 9.0 alone, has no ", kernel)};
}

}  // namespace

Status launch_chunk_delta_h(const ChainArgs&, ChainUse, bool, bool, const Launch&) {
  return not_built("chunk_delta_h");
}

Status launch_chunk_delta_h_errors(const ChainArgs&, bool, const Launch&) {
  return not_built("chunk_delta_h");
}

Status launch_chunk_reverse(const ReverseArgs&, bool, const Launch&) {
  return not_built("chunk_reverse");
}

}  // namespace kda::cuda
