// SPDX-License-Identifier: Apache-2.0
// Launching kernels: a stream, and errors as a Status that names the call and the launch shape.
#pragma once

#include <cstdint>
#include <string>

#include "kda/status.hpp"

namespace kda::cuda {

struct Launch {
  void* stream = nullptr;  ///< cudaStream_t
  /// Begins before the kernel before it ends, and waits for it itself (from sm_90, ptx/pdl.cuh).
  bool pdl = false;
};

/// Ok, or the CUDA error of `call` as a message with the launch shape.
Status launch_status(int error, const char* kernel, int64_t blocks, int threads, int shared_bytes);
Status call_status(int error, const char* call);
/// The answer of every kernel to a gate mode that it has no formula for.
Status unknown_gate_mode(const char* kernel);

}  // namespace kda::cuda
