// SPDX-License-Identifier: Apache-2.0
// The tables of the layer's kernels that this machine runs, for tests with one as parameter.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cpu/blocked/kernels.hpp"
#include "cpu/layer/layer.hpp"

namespace kda::test {

inline std::vector<const cpu::blocked::Kernels*> runnable_tables() {
  using namespace cpu::blocked;
  std::vector<const Kernels*> tables = {portable_kernels()};
  if (avx2_kernels() && cpu_has_avx2()) tables.push_back(avx2_kernels());
  if (avx512_kernels() && cpu_has_avx512()) tables.push_back(avx512_kernels());
  return tables;
}

class LayerTest : public testing::TestWithParam<const cpu::blocked::Kernels*> {
 protected:
  const cpu::layer::Kernels& kernels() const { return *GetParam()->layer; }
};

inline std::string table_name(const testing::TestParamInfo<const cpu::blocked::Kernels*>& entry) {
  return entry.param->name;
}

}  // namespace kda::test
