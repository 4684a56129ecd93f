// SPDX-License-Identifier: Apache-2.0
// What the host launches, without running it: a test sees which kernels a plan takes, of any size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace emulator {

/// A launch, as the host asked for it.
struct Launched {
  std::string kernel;  ///< the name that launch_kernel() got
  int64_t blocks = 0;
  int64_t threads = 0;
  std::size_t shared_bytes = 0;
};

/// While it lives, launches and copies of this thread are kept and not run, and every pointer is
/// device memory. There is one at a time.
class Recording {
 public:
  Recording();
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  std::vector<Launched> launches;
};

/// The one of this thread, or null.
Recording* recording();

}  // namespace emulator
