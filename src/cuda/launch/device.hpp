// SPDX-License-Identifier: Apache-2.0
// The CUDA devices of this machine, and the checks that come before a first launch. Builds without
// CUDA have the same functions; they say so.
#pragma once

#include "kda/plan.hpp"
#include "kda/status.hpp"

namespace kda::cuda {

/// Null if a CUDA device can be used here, else why not. Asks the driver once.
const char* unavailable() noexcept;

/// Whether this build has CUDA kernels; looks at no device.
bool built() noexcept;

/// The current device is one that `plan` was made for; `stream` and `workspace` belong to it, which
/// a trusted caller vouches for.
Status check_device(const Plan& plan, bool trusted, const void* workspace, void* stream);

/// Bytes of shared memory that a block of the current device may have.
Status most_shared_bytes(int* bytes);

/// `stream` belongs to the current device.
Status check_stream(void* stream);

/// `pointer` (may be null) is memory of the current device; `name` is for the message.
Status check_pointer(const char* name, const void* pointer);

}  // namespace kda::cuda
