// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch/device.hpp"

#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "core/guard.hpp"
#include "core/text.hpp"
#include "cuda/launch/launch.hpp"
#include "plan/cards.hpp"

namespace kda::cuda {
namespace {

struct Devices {
  std::string problem;  ///< empty: usable
  std::vector<DeviceFacts> facts;
};

/// 0 where the driver does not know.
int attribute_of(cudaDeviceAttr attribute, int device) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess) return value;
  cudaGetLastError();
  return 0;
}

Devices ask_driver() {
  Devices devices;
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    cudaGetLastError();
    int driver = 0;
    cudaDriverGetVersion(&driver);
    if (driver == 0)
      devices.problem = "no CUDA driver on this machine";
    else if (error == cudaErrorInsufficientDriver)
      devices.problem = cat("the CUDA driver (", driver / 1000, ".", driver % 1000 / 10,
                            ") is older than this build's CUDA ", CUDART_VERSION / 1000, ".",
                            CUDART_VERSION % 1000 / 10);
    else
      devices.problem = cat("no CUDA device: ", cudaGetErrorString(error));
    return devices;
  }
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) {
      cudaGetLastError();
      continue;
    }
    DeviceFacts facts =
        gpu_facts(properties.multiProcessorCount, 10 * properties.major + properties.minor);
    plan::take_driver_rates({.clock_khz = attribute_of(cudaDevAttrClockRate, i),
                             .memory_clock_khz = attribute_of(cudaDevAttrMemoryClockRate, i),
                             .memory_bus_bits = attribute_of(cudaDevAttrGlobalMemoryBusWidth, i)},
                            &facts);
    facts.name =
        cat(properties.name, " (sm_", facts.compute_capability, ", ", facts.num_sms, " SMs)");
    devices.facts.push_back(std::move(facts));
  }
  if (devices.facts.empty()) devices.problem = "no CUDA device answers";
  return devices;
}

const Devices& devices() {
  static const Devices found = ask_driver();
  return found;
}

}  // namespace

Status launch_status(int error, const char* kernel, int64_t blocks, int threads, int shared_bytes) {
  if (error == cudaSuccess) return {};
  const auto code = static_cast<cudaError_t>(error);
  return Status(StatusCode::kDeviceError, cat("cudaLaunchKernelEx(", kernel, ") with ", blocks,
                                              " blocks of ", threads, " threads and ", shared_bytes,
                                              " bytes of shared memory: ", cudaGetErrorName(code),
                                              ", ", cudaGetErrorString(code)));
}

Status unknown_gate_mode(const char* kernel) {
  return Status(StatusCode::kUnsupported,
                cat("gate_mode: ", kernel, " has no kernel for its value"));
}

Status call_status(int error, const char* call) {
  if (error == cudaSuccess) return {};
  const auto code = static_cast<cudaError_t>(error);
  return Status(StatusCode::kDeviceError,
                cat(call, ": ", cudaGetErrorName(code), ", ", cudaGetErrorString(code)));
}

namespace {

/// A stream of another device is refused; one that is being captured into a graph must not be asked
/// (the capture would fail).
Status check_stream(cudaStream_t stream, int current) {
  if (!stream) return {};
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  KDA_RETURN_IF_ERROR(
      call_status(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing"));
  if (capture != cudaStreamCaptureStatusNone) return {};
  int owner = current;
  KDA_RETURN_IF_ERROR(call_status(cudaStreamGetDevice(stream, &owner), "cudaStreamGetDevice"));
  if (owner != current)
    return invalid("stream: belongs to device ", owner, ", the current device is ", current);
  return {};
}

}  // namespace

Status check_stream(void* stream) {
  int current = 0;
  KDA_RETURN_IF_ERROR(call_status(cudaGetDevice(&current), "cudaGetDevice"));
  return check_stream(static_cast<cudaStream_t>(stream), current);
}

bool built() noexcept { return true; }

const char* unavailable() noexcept {
  try {
    return devices().problem.empty() ? nullptr : devices().problem.c_str();
  } catch (...) {
    return "out of memory";
  }
}

Status most_shared_bytes(int* bytes) {
#ifdef KDA_SHARED_BYTES  // a build that stands for a card whose blocks have less
                         // (bench/beside_copy.cu)
  *bytes = KDA_SHARED_BYTES;
  return Status();
#else
  int current = 0;
  KDA_RETURN_IF_ERROR(call_status(cudaGetDevice(&current), "cudaGetDevice"));
  return call_status(
      cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, current),
      "cudaDeviceGetAttribute");
#endif
}

Status check_device(const Plan& plan, bool trusted, const void* workspace, void* stream) {
  int current = 0;
  KDA_RETURN_IF_ERROR(call_status(cudaGetDevice(&current), "cudaGetDevice"));
  const auto& all = devices().facts;
  if (current >= static_cast<int>(all.size()))
    return invalid("device: ", current, " is not one of the ", all.size(), " CUDA devices");
  const DeviceFacts& facts = all[static_cast<std::size_t>(current)];
  if (facts.compute_capability != plan.device.compute_capability)
    return invalid("plan: made for compute capability ", plan.device.compute_capability,
                   ", the current device ", current, " is ", facts.name);
  if (trusted) return {};
  KDA_RETURN_IF_ERROR(check_stream(static_cast<cudaStream_t>(stream), current));
  return check_pointer("workspace", workspace);
}

Status check_pointer(const char* name, const void* pointer) {
  if (!pointer) return {};
  cudaPointerAttributes attributes{};
  KDA_RETURN_IF_ERROR(
      call_status(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes"));
  int current = 0;
  KDA_RETURN_IF_ERROR(call_status(cudaGetDevice(&current), "cudaGetDevice"));
  if (attributes.type == cudaMemoryTypeManaged) return {};
  if (attributes.type != cudaMemoryTypeDevice)
    return invalid(name, ": is host memory, the plan runs on CUDA device ", current);
  if (attributes.device != current)
    return invalid(name, ": is memory of device ", attributes.device, ", the current device is ",
                   current);
  return {};
}

}  // namespace kda::cuda

namespace kda {

Status cuda_device_facts(int32_t ordinal, DeviceFacts* facts) noexcept {
  return guarded([&] {
    if (!facts) return invalid("facts: is null");
    if (const char* problem = cuda::unavailable())
      return Status(StatusCode::kUnavailable, cat("cuda: ", problem));
    const auto& all = cuda::devices().facts;
    if (ordinal < 0 || ordinal >= static_cast<int32_t>(all.size()))
      return Status(StatusCode::kUnavailable, cat("cuda: device ", ordinal, " is not one of the ",
                                                  all.size(), " of this machine"));
    *facts = all[static_cast<std::size_t>(ordinal)];
    return Status{};
  });
}

int32_t cuda_device_count() noexcept {
  return cuda::unavailable() ? 0 : static_cast<int32_t>(cuda::devices().facts.size());
}

}  // namespace kda
