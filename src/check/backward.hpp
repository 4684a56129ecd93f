// SPDX-License-Identifier: Apache-2.0
// Gradients for tests and tools: random ones to start from, memory for those that come out, and the
// comparison with the float64 oracle.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "check/compare.hpp"
#include "check/inputs.hpp"
#include "cpu/oracle/backward.hpp"
#include "kda/backward.hpp"

namespace kda::check {

/// Names of the gradients that go out, as files and reports have them.
inline constexpr const char* kGradientNames[] = {"dq",    "dk",     "dv",       "dg",
                                                 "dbeta", "dA_log", "ddt_bias", "d_initial_state"};

/// Inputs of a backward, and room for its results; row-major.
struct GradientBuffers {
  Gradients gradients;
  io::Buffer d_o, d_final_state;
  io::Buffer dq, dk, dv, dg, dbeta, dA_log, ddt_bias, d_initial_state;

  GradientTensors tensors();
};

struct GradientOptions {
  uint64_t seed = 0;
  bool d_o = true;
  bool d_final_state = true;
  DType d_o_dtype = DType::kFloat32;
  /// The dtype of dq, dk, dv, dg and dbeta; absent: each that of its input. Gradients of parameters
  /// have the type of these, those of states state_type().
  std::optional<DType> out_dtype;
};

/// N(0, 1) for d_o and d_final_state; every gradient that the problem has, filled with 0xff
/// (NaN).
GradientBuffers make_gradients(const Inputs& inputs, const GradientOptions& options = {});

/// The tensors that a backward starts from, as a file has them: `do` and `d_final_state`.
void add_gradients_to_file(const Problem& problem, const GradientBuffers& buffers,
                           io::SafetensorsFile* file);
/// Reads what a file has of them, and makes room for every gradient that the problem has. Throws
/// kda::Error: a file with neither, wrong shapes or types.
GradientBuffers gradients_from_file(const io::SafetensorsFile& file, const Inputs& inputs,
                                    std::optional<DType> out_dtype = std::nullopt);
/// Output file: every gradient, under the names of kGradientNames.
io::SafetensorsFile file_from_gradients(const Problem& problem, const GradientBuffers& buffers);

/// Errors by gradient: of dq and dk per (sequence, q/k head), of dA_log and ddt_bias per value head
/// over all sequences (their `sequence` is 0), of others per (sequence, value head).
struct GradientComparison {
  std::map<std::string, std::vector<HeadError>> errors;
  /// |x - ref| / |ref| of all heads and sequences together; of zeros 0.
  std::map<std::string, double> all_heads;
  /// Whether some needs what few channels, or what cancelled terms may have more (tolerances.hpp).
  bool few_channels = false, cancelled = false;

  bool within() const;
  /// Nearest to or farthest past its tolerance; null if there are none of the name.
  const HeadError* worst(const std::string& name) const;
};

/// Runs the oracle and compares what `buffers` holds. Initial states are dense. `options.operands`:
/// of the backward. `truths`: what the oracle finds, kept for another comparison of the same
/// inputs; if it is not empty it is taken and the oracle is not run.
GradientComparison compare_gradients(const Inputs& inputs, const GradientBuffers& buffers,
                                     const CompareOptions& options = {},
                                     std::vector<cpu::oracle::HeadGradients>* truths = nullptr);

}  // namespace kda::check
