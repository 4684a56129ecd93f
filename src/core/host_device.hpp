// SPDX-License-Identifier: Apache-2.0
// Functions that the host has too: for its own arithmetic, or for tests.
#pragma once

#ifdef __CUDACC__
#define KDA_HOST_DEVICE __host__ __device__
#define KDA_HOST_DEVICE_INLINE __host__ __device__ __forceinline__
#else
#define KDA_HOST_DEVICE
#define KDA_HOST_DEVICE_INLINE inline
#endif
