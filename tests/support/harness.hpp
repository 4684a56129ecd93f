// SPDX-License-Identifier: Apache-2.0
// What tests share: running inputs, strided copies, bitwise comparison.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "check/compare.hpp"
#include "check/device.hpp"
#include "check/generate.hpp"
#include "check/inputs.hpp"
#include "core/layout.hpp"
#include "kda/kda.hpp"
#include "registry/rows.hpp"

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
  bool from_bounds = false;  ///< the plan does not know cu_seqlens
  int32_t num_sms = 0;       ///< that the plan counts on; 0: those of the device
};

/// Plans and runs with NaN-filled outputs and workspace; throws kda::Error.
Result run_inputs(const check::Inputs& inputs, const RunOptions& options = {});

/// A plan with a fixed number of segments.
PlanOptions fixed_segments(int64_t count, SegmentMethod method = SegmentMethod::kScanMergeForward);
PlanOptions with_backend(const std::string& name);
PlanOptions with_threads(int32_t threads);

/// Where tests run: the CPU, or with KDA_TEST_DEVICE=cuda the first GPU.
DeviceFacts device();
bool on_cuda();
/// On the emulator (tests/emulator) everything takes a thousand times as long.
bool emulated();
/// Device on which `backend` runs: the oracle is always a CPU backend.
DeviceFacts device_of(const std::string& backend);

/// The same as `options` wants them.
DeviceFacts device_for(const RunOptions& options);

/// The backends of an operation on device() that this machine has and that decline no problem,
/// without the oracle.
std::vector<std::string> names_that_serve_all(std::span<const registry::Head* const> rows);

/// What to ask for as a backend so that every implementation of device() has its turn: on the CPU
/// the instruction sets of this machine; on CUDA the planner's choice, for those that decline some
/// problems, and those that decline none.
std::vector<std::string> backends();

bool same_bits(const io::Buffer& a, const io::Buffer& b);

/// Copies a [d0, d1, d2, d3] row-major tensor into one with the given strides, whose gaps are 0xff.
io::Buffer spread_tensor(const io::Buffer& source, TensorDesc* desc, const Shape& shape,
                         const std::array<int64_t, 4>& strides);
/// The same with a few elements, multiples of `unit`, between heads, tokens and rows of the batch.
void pad_tensor(io::Buffer* buffer, TensorDesc* desc, const Shape& shape, int64_t unit);

/// Replaces every input by a copy with padded strides; the gaps hold NaN. Token and head strides
/// grow by different multiples of `unit` elements; `beta` gets a strided innermost dimension.
void restride(check::Inputs* inputs, int64_t unit = 1);

/// One gate a head, that of channel 0, as [B, T, HV] in memory.
void keep_one_gate(check::Inputs* inputs);
/// One bias a head beside it, that of channel 0, as [HV] in memory.
void keep_one_bias(check::Inputs* inputs);
/// The same gates written out for every channel.
check::Inputs with_gates_expanded(const check::Inputs& inputs);

/// Tokens [begin, end) of a one-row problem.
check::Inputs slice(const check::Inputs& inputs, int64_t begin, int64_t end);

/// Sequence n of a packed problem, with its initial state.
check::Inputs only_sequence(const check::Inputs& inputs, std::size_t n);

/// Whether every sequence of a packed problem, run alone, has the bits that it has in the batch.
bool same_bits_alone(const check::Inputs& inputs, const RunOptions& options = {});

/// Other finite values in every tensor from `token` on (one row, dense).
void scramble_from(check::Inputs* inputs, int64_t token, uint64_t seed);

/// NaN, Inf and huge values in tokens [begin, end) of every tensor (one row, dense).
void poison_rows(check::Inputs* inputs, int64_t begin, int64_t end);

/// Row-major elements of one token of a [B, T, heads, size] tensor as bytes.
std::size_t row_bytes(const TensorDesc& desc, int64_t heads, int64_t size);

check::GenerateOptions shape(int64_t tokens, int64_t heads, int64_t key_dim = 64,
                             int64_t value_dim = 64);

/// max over heads of the errors of o and of the final state.
struct WorstErrors {
  double o = 0;
  double final_state = 0;
};
/// `truths`: as in check::CompareOptions.
WorstErrors worst_errors(const check::Inputs& inputs, const Result& result,
                         std::vector<cpu::oracle::HeadResult>* truths = nullptr);

}  // namespace kda::test
