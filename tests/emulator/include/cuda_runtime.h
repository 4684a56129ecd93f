// SPDX-License-Identifier: Apache-2.0
// The part of the runtime's header that a host compiler can take, for kernels on the emulator.
#pragma once
#include <cuda_runtime_api.h>
#include <vector_functions.h>
#include <vector_types.h>
