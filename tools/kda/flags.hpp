// SPDX-License-Identifier: Apache-2.0
// Flags that several subcommands share, and their meaning.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check/backward.hpp"
#include "check/generate.hpp"
#include "check/inputs.hpp"
#include "kda/kda.hpp"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace kda::tools {

/// What --dtype and its like take.
inline const std::vector<std::string> kFloatTypes = {"fp32", "bf16", "fp16", "fp64"};

/// "off", "auto", "flashkda", "cula" or a number of segments.
void parse_context_parallel(const std::string& text, PlanOptions* options);

/// "4096,64K,10x1K" -> 4096, 65536, 1024 ten times.
std::vector<int64_t> parse_lengths(const std::string& text);

inline constexpr int64_t kMaxHeads = 65535;  // as validate() has it

/// Options of several subcommands; defaults are what the targets have.
CLI::Option* add_context_parallel(CLI::App& command, std::string* target);
CLI::Option* add_seq_lens(CLI::App& command, std::vector<int64_t>* target);
CLI::Option* add_threads(CLI::App& command, int32_t* target);
CLI::Option* add_heads(CLI::App& command, int64_t* target);
CLI::Option* add_value_heads(CLI::App& command, int64_t* target);
CLI::Option* add_head_map(CLI::App& command, std::string* target);
CLI::Option* add_head_dim(CLI::App& command, const char* name, const char* symbol, int64_t* target);

/// Throws kda::Error, which names `name`, unless value heads are a multiple of heads.
void check_multiple(const char* name, int64_t value_heads, int64_t heads);

/// Flags of how to run: device, backend, schedule.
struct ScheduleFlags {
  std::string device = "auto";
  std::string backend;
  std::string context_parallel = "auto";
  std::string segment_method = "scan-merge-forward";
  std::string intra_form = "auto";
  bool batch_invariant = false;
  int32_t num_threads = 0;

  void add_to(CLI::App& command);
  /// All but --device.
  void add_options_to(CLI::App& command);
  DeviceFacts device_facts() const;  ///< throws kda::Error (kUnavailable) for a missing device
  PlanOptions plan_options() const;

 private:
  bool has_backend(DeviceKind kind) const;
};

/// Options of the operation: what `kda run` overrides in a file, and `kda plan` asks for.
struct OperationFlags {
  std::string gate, beta, state_layout, out_dtype, head_map;
  double lower_bound = 0, scale = 0;
  bool qk_l2norm = false, no_qk_l2norm = false, head_gates = false;

  void add_to(CLI::App& command);
  check::Overrides overrides() const;  ///< those that were given
  DType output_dtype(const Problem& problem) const;

 private:
  CLI::App* command_ = nullptr;
};

/// Flags of `kda run` and `kda check`: input file, overrides of its metadata, schedule.
struct RunFlags {
  std::string input;
  OperationFlags operation;
  ScheduleFlags schedule;

  void add_to(CLI::App& command);
  /// The file as a problem with outputs asked for. `gradients`: also what a backward starts from.
  check::Inputs load(check::GradientBuffers* gradients = nullptr) const;
  DType output_dtype(const Problem& problem) const { return operation.output_dtype(problem); }
};

/// Flags of `kda gen`, also the format of bench/cases/*.txt.
struct GenerateFlags {
  std::string dtype = "bf16", regime = "trained", head_map = "grouped";
  check::GenerateOptions options;

  void add_to(CLI::App& command);
  check::GenerateOptions resolve() const;
};

}  // namespace kda::tools
