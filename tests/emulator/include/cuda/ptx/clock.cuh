// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace kda::cuda::ptx {

inline unsigned nsmid() { return 1; }
inline void wait_cycles(int64_t) {}

}  // namespace kda::cuda::ptx
