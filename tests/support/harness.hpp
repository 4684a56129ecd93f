// SPDX-License-Identifier: Apache-2.0
// What tests share: running inputs, strided copies, bitwise comparison.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check/compare.hpp"
#include "check/generate.hpp"
#include "check/inputs.hpp"
#include "kda/kda.hpp"

namespace kda::test {

/// Outputs of one run; `problem` is what was planned.
struct Result {
  Problem problem;
  Plan plan;
  check::Outputs outputs;
};

struct RunOptions {
  PlanOptions plan;
  DType out_dtype = DType::kFloat32;
  bool final_state = true;
};

/// Plans and runs with NaN-filled outputs and workspace; throws kda::Error.
Result run_inputs(const check::Inputs& inputs, const RunOptions& options = {});

/// A plan with a fixed number of segments.
PlanOptions fixed_segments(int64_t count, SegmentMethod method = SegmentMethod::kScanMergeForward);
PlanOptions with_backend(const std::string& name);
PlanOptions with_threads(int32_t threads);

/// Names of the blocked implementations that this machine can run.
std::vector<std::string> blocked_backends();

bool same_bits(const io::Buffer& a, const io::Buffer& b);

/// Replaces every input by a copy with padded strides; the gaps hold NaN. Token and head strides
/// grow by different amounts; `beta` gets a strided innermost dimension.
void restride(check::Inputs* inputs);

/// Row-major elements of one token of a [B, T, heads, size] tensor as bytes.
std::size_t row_bytes(const TensorDesc& desc, int64_t heads, int64_t size);

check::GenerateOptions shape(int64_t tokens, int64_t heads, int64_t key_dim = 64,
                             int64_t value_dim = 64);

/// max over heads of the errors of o and of the final state.
struct WorstErrors {
  double o = 0;
  double final_state = 0;
};
WorstErrors worst_errors(const check::Inputs& inputs, const Result& result);

}  // namespace kda::test
