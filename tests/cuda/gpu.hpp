// SPDX-License-Identifier: Apache-2.0
// What tests of the CUDA backends share. They run with KDA_TEST_DEVICE=cuda (./dev gpu-test) and
// are skipped elsewhere.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <thread>

#include "support/harness.hpp"

namespace kda::test {

class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_cuda()) GTEST_SKIP() << "needs KDA_TEST_DEVICE=cuda and a GPU";
  }
};

inline int32_t oracle_threads() {
  return static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
}

/// With KDA_TEST_VERBOSE=1 prints the errors of a case.
inline void note(const std::string& what, double o, double state) {
  if (std::getenv("KDA_TEST_VERBOSE"))
    std::printf("  %-28s o %.2e  final state %.2e\n", what.c_str(), o, state);
}

}  // namespace kda::test
