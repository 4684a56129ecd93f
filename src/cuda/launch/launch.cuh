// SPDX-License-Identifier: Apache-2.0
// Launching a kernel, for the files that have one.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "core/return_if_error.hpp"
#include "cuda/launch/launch.hpp"
#include "kda/types.hpp"

namespace kda::cuda {

/// Bytes that every GPU from sm_80 on gives a block: 99 KB (sm_86, sm_89, sm_120).
inline constexpr int kMostShared = 99 * 1024;

/// Calls run() with a gate mode as a constant of the compiler.
template <class Run>
Status for_gate_mode(const char* kernel, GateMode mode, Run&& run) {
  switch (mode) {
    case GateMode::kLog: return run(std::integral_constant<GateMode, GateMode::kLog>{});
    case GateMode::kSoftplus: return run(std::integral_constant<GateMode, GateMode::kSoftplus>{});
    case GateMode::kBounded: return run(std::integral_constant<GateMode, GateMode::kBounded>{});
  }
  return unknown_gate_mode(kernel);
}

/// Dynamic shared memory that a kernel has without asking: of 48 KB, less at most 16 KB that it
/// declares itself where it takes both.
constexpr int kUnaskedSharedBytes = 32 * 1024;

/// Launches `kernel` on `blocks` blocks; nothing for 0 blocks. More shared memory is asked for on
/// every launch: the attribute belongs to the current device, and setting it is cheap.
template <class Args>
Status launch_kernel(const char* name, void (*kernel)(Args), int64_t blocks, int threads,
                     int shared_bytes, const Launch& launch, const Args& args) {
  if (blocks == 0) return {};
  if constexpr (requires { args.gate.gate_mode; })  // kernels that look at the mode themselves
    KDA_RETURN_IF_ERROR(for_gate_mode(name, args.gate.gate_mode, [](auto) { return Status(); }));
  if (blocks > INT32_MAX)
    return launch_status(cudaErrorInvalidConfiguration, name, blocks, threads, shared_bytes);
  cudaError_t error = cudaSuccess;
  if (shared_bytes > kUnaskedSharedBytes)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = static_cast<cudaStream_t>(launch.stream);
    cudaLaunchAttribute pdl{};
    pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    pdl.val.programmaticStreamSerializationAllowed = 1;
    if (launch.pdl) config.attrs = &pdl, config.numAttrs = 1;
    error = cudaLaunchKernelEx(&config, kernel, args);
  }
  if (error != cudaSuccess) cudaGetLastError();  // not ours to leave behind
  return launch_status(error, name, blocks, threads, shared_bytes);
}

}  // namespace kda::cuda
