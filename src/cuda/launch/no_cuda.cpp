// SPDX-License-Identifier: Apache-2.0
// A build without CUDA: plans for GPUs can be made, nothing runs on one.
#include "core/text.hpp"
#include "cuda/launch/device.hpp"

namespace kda::cuda {
namespace {

constexpr const char* kReason = "this build has no CUDA (KDA_CUDA=OFF or no nvcc)";
Status unavailable_status() { return Status(StatusCode::kUnavailable, cat("cuda: ", kReason)); }

}  // namespace

const char* unavailable() noexcept { return kReason; }
bool built() noexcept { return false; }

}  // namespace kda::cuda

namespace kda {

Status cuda_device_facts(int32_t, DeviceFacts*) noexcept {
  try {
    return cuda::unavailable_status();
  } catch (...) {
    return Status(StatusCode::kOutOfMemory, {});
  }
}
int32_t cuda_device_count() noexcept { return 0; }

}  // namespace kda
