// SPDX-License-Identifier: Apache-2.0
// A build without CUDA: plans for GPUs can be made, nothing runs on one.
#include "core/text.hpp"
#include "cuda/host/device.hpp"
#include "cuda/host/fused.hpp"
#include "cuda/host/rows.hpp"

namespace kda::cuda {
namespace {

constexpr const char* kReason = "this build has no CUDA (KDA_CUDA=OFF or no nvcc)";
Status unavailable_status() { return Status(StatusCode::kUnavailable, cat("cuda: ", kReason)); }

}  // namespace

const char* unavailable() noexcept { return kReason; }
bool built() noexcept { return false; }
Status check_device(const Plan&, bool, const void*, void*) { return unavailable_status(); }
Status check_pointer(const char*, const void*) { return unavailable_status(); }

namespace fused {
Status forward(const stage::Forward&) { return unavailable_status(); }
Status segment_scan(const stage::SegmentScan&) { return unavailable_status(); }
Status segment_merge(const stage::SegmentMerge&) { return unavailable_status(); }
Status segment_correct(const stage::SegmentCorrect&) { return unavailable_status(); }
}  // namespace fused
namespace staged {
Status forward(const stage::Forward&) { return unavailable_status(); }
Status segment_scan(const stage::SegmentScan&) { return unavailable_status(); }
Status chunk(const stage::Chunk&) { return unavailable_status(); }
}  // namespace staged
namespace recurrent {
Status forward(const stage::Forward&) { return unavailable_status(); }
Status decode(const stage::Decode&) { return unavailable_status(); }
Status segment_scan(const stage::SegmentScan&) { return unavailable_status(); }
}  // namespace recurrent
Status segment_merge(const stage::SegmentMerge&) { return unavailable_status(); }

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
