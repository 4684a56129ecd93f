// SPDX-License-Identifier: Apache-2.0
// What `kda bench` says of its rows: tables and JSON.
#pragma once

#include <string>
#include <vector>

#include "tools/kda/bench_cpu.hpp"
#include "tools/kda/bench_gpu.hpp"

namespace kda::tools {

using Table = std::vector<std::vector<std::string>>;

/// Which benchmark ran, and on what.
struct CpuBenchHead {
  std::string what, command, implementation;
  int32_t num_threads = 1;
  MachineRates rates;
};

std::string cpu_text(const CpuBenchHead& head);
Table cpu_table(const std::vector<CpuRow>& rows, const MachineRates& rates);
std::string cpu_json(const std::vector<CpuRow>& rows, const CpuBenchHead& head);

std::string gpu_text(const DeviceFacts& device, double copy_rate);
Table gpu_table(const std::vector<GpuRow>& rows, double copy_rate);
/// One row a case from its two, without segments and with them. The roofline is what a copy of the
/// same bytes would take.
Table segments_table(const std::vector<GpuRow>& rows, double copy_rate);
std::string gpu_json(const std::vector<GpuRow>& rows, const std::string& what,
                     const DeviceFacts& device, double copy_rate);

}  // namespace kda::tools
