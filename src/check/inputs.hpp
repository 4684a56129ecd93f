// SPDX-License-Identifier: Apache-2.0
// Inputs and Outputs: a Problem with the memory that it describes, as tests, benchmarks and the
// command line use it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "io/safetensors.hpp"
#include "kda/kda.hpp"

namespace kda::check {

struct Inputs {
  Problem problem;
  std::vector<int64_t> cu_seqlens;  ///< empty: the problem has none
  io::Buffer q, k, v, g, beta, A_log, dt_bias, initial_state;

  /// [N + 1] token offsets, also without cu_seqlens.
  std::vector<int64_t> offsets() const;
  /// Pointers to the inputs; outputs null.
  Tensors tensors() const;
};

struct Outputs {
  io::Buffer o;
  io::Buffer final_state;  ///< as problem.final_state says
  io::Buffer checkpoints;

  void attach(Tensors* tensors);
};

/// Row-major outputs for `problem`, every byte 0xff (NaN): what is not written shows. Sets
/// problem->o to `out_dtype`; allocates the states that the problem asks for.
Outputs make_outputs(Problem* problem, DType out_dtype);

/// The type of states that are made here: fp64 where v is, else fp32.
DType state_type(const Problem& problem);

/// Asks for the final state, one slot a sequence.
void want_final_state(Problem* problem);

/// Options that override a file's __metadata__; unset fields leave it alone.
struct Overrides {
  std::optional<std::string> gate, beta, state_layout, head_map;
  std::optional<double> lower_bound, scale;
  std::optional<bool> qk_l2norm;
  /// A g with a gate a channel is read as one gate a head; its channels must be equal.
  bool head_gates = false;
};

/// Sets what is given. Throws kda::Error.
void apply(const Overrides& overrides, Problem* problem);

/// The tensors and metadata of a safetensors file as a Problem (docs/files.md). Throws kda::Error.
Inputs inputs_from_file(const io::SafetensorsFile& file, const Overrides& overrides = {});

/// Which inputs have a NaN, each with the index of its first: "q[0, 3, 1, 7], beta[0, 3, 1]"; empty
/// if none has.
std::string describe_nan(const Inputs& inputs);

/// The inverse: tensors, row-major, and metadata that inputs_from_file() reads back.
io::SafetensorsFile file_from_inputs(const Inputs& inputs);

/// Output file: `o` and, if the problem has one, `final_state`.
io::SafetensorsFile file_from_outputs(const Problem& problem, const Outputs& outputs);

DType parse_dtype(const std::string& text);  ///< fp32, bf16, fp16, fp64
GateMode parse_gate(const std::string& text);
BetaMode parse_beta(const std::string& text);
StateLayout parse_state_layout(const std::string& text);
HeadMap parse_head_map(const std::string& text);

}  // namespace kda::check
