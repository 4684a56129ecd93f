// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime functions that libkda and its tests call, for one emulated GPU in host memory.
#include <cuda_runtime_api.h>

#include "card.hpp"
#include "emulator.hpp"
#include "recording.hpp"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

std::mutex mutex;
std::map<const char*, std::size_t> allocations;

thread_local emulator::Recording* current_recording = nullptr;

bool is_device_memory(const void* pointer) {
  if (current_recording) return true;
  const std::lock_guard lock(mutex);
  const auto* p = static_cast<const char*>(pointer);
  auto next = allocations.upper_bound(p);
  if (next == allocations.begin()) return false;
  --next;
  return p < next->first + next->second;
}

}  // namespace

namespace emulator {

int capability() {
  const char* asked = std::getenv("KDA_EMULATED_CAPABILITY");
  return asked ? std::atoi(asked) : 90;
}
int most_shared_bytes() {
  switch (capability()) {
    case 80: return 163 * 1024;
    case 90: return 227 * 1024;
    default: return 99 * 1024;
  }
}

Recording::Recording() { current_recording = this; }
Recording::~Recording() { current_recording = nullptr; }
Recording* recording() { return current_recording; }

}  // namespace emulator

extern "C" {

/// The GPU is there for who asks for it: the other tests of this build run as on any machine.
cudaError_t cudaGetDeviceCount(int* count) {
  const char* device = std::getenv("KDA_TEST_DEVICE");
  *count = device && std::strcmp(device, "cuda") == 0;
  return *count ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaDriverGetVersion(int* version) {
  int count = 0;
  cudaGetDeviceCount(&count);
  return *version = 13000 * count, cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorEmulated"; }
const char* cudaGetErrorString(cudaError_t) { return "the emulator refused"; }

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrL2CacheSize: return *value = 1 << 20, cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return *value = emulator::most_shared_bytes(), cudaSuccess;
    default: return cudaErrorInvalidValue;
  }
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "emulated GPU");
  properties->major = emulator::capability() / 10;
  properties->minor = emulator::capability() % 10;
  properties->multiProcessorCount = 8;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  const std::lock_guard lock(mutex);
  *pointer = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  allocations[static_cast<char*>(*pointer)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  const std::lock_guard lock(mutex);
  allocations.erase(static_cast<char*>(pointer));
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const std::lock_guard lock(mutex);
  *free = *total = size_t{1} << 40;
  for (const auto& [base, bytes] : allocations) *free -= bytes;
  return cudaSuccess;
}
cudaError_t cudaMemset(void* target, int value, size_t bytes) {
  return std::memset(target, value, bytes), cudaSuccess;
}
cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind) {
  if (!current_recording) std::memcpy(target, source, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t) {
  return cudaMemcpy(target, source, bytes, kind);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {};
  attributes->type = is_device_memory(pointer) ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return *stream = nullptr, cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetDevice(cudaStream_t, int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return *event = nullptr, cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  return *ms = 1, cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  return emulator::begin_capture(), cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  *graph = reinterpret_cast<cudaGraph_t>(new emulator::Graph(emulator::end_capture()));
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  return *count = reinterpret_cast<emulator::Graph*>(graph)->size(), cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t) {
  for (const auto& kernel : *reinterpret_cast<emulator::Graph*>(executable)) kernel();
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<emulator::Graph*>(graph);
  return cudaSuccess;
}

}  // extern "C"
