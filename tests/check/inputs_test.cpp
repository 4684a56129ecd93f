// SPDX-License-Identifier: Apache-2.0
// Files to problems and back: metadata, overrides, shapes, and what is refused.
#include "check/inputs.hpp"

#include <gtest/gtest.h>

#include <limits>

#include "support/harness.hpp"

namespace kda::check {
namespace {

io::SafetensorsFile sample(Regime regime = Regime::kSoftplus) {
  GenerateOptions options = test::shape(0, 2, 8, 4);
  options.seq_lens = {3, 4};
  options.num_value_heads = 4;
  options.regime = regime;
  options.initial_state = true;
  return file_from_inputs(generate(options));
}

std::string error_of(const io::SafetensorsFile& file, const Overrides& overrides = {}) {
  try {
    inputs_from_file(file, overrides);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
    return error.what();
  }
  return "";
}

TEST(InputsFromFile, RoundTrip) {
  for (int r = 0; r < kNumRegimes; ++r) {
    const io::SafetensorsFile file = sample(static_cast<Regime>(r));
    const Inputs inputs = inputs_from_file(file);
    const io::SafetensorsFile again = file_from_inputs(inputs);
    EXPECT_EQ(file.metadata, again.metadata);
    ASSERT_EQ(file.tensors.size(), again.tensors.size());
    for (const auto& [name, tensor] : file.tensors)
      EXPECT_TRUE(test::same_bits(tensor.data, again.tensors.at(name).data)) << name;
    EXPECT_EQ(inputs.cu_seqlens, (std::vector<int64_t>{0, 3, 7}));
  }
}

TEST(InputsFromFile, FilesOfStridedTensorsAreRowMajor) {
  const io::SafetensorsFile file = sample();
  Inputs inputs = inputs_from_file(file);
  test::restride(&inputs, 2);
  const io::SafetensorsFile again = file_from_inputs(inputs);
  for (const auto& [name, tensor] : file.tensors)
    EXPECT_TRUE(test::same_bits(tensor.data, again.tensors.at(name).data)) << name;
}

TEST(InputsFromFile, DefaultsWithoutMetadata) {
  io::SafetensorsFile file = sample(Regime::kLog);
  file.metadata.clear();
  const Problem p = inputs_from_file(file).problem;
  EXPECT_EQ(p.gate_mode, GateMode::kLog);
  EXPECT_EQ(p.lower_bound, -5);
  EXPECT_EQ(p.beta_mode, BetaMode::kPlain);
  EXPECT_FALSE(p.qk_l2norm);
  EXPECT_FALSE(p.scale.has_value());
  EXPECT_EQ(p.state_layout, StateLayout::kKV);
}

TEST(InputsFromFile, FlagsOverrideMetadata) {
  io::SafetensorsFile file = sample();
  file.metadata["scale"] = "0.25";
  file.metadata["ignored"] = "whatever";
  EXPECT_EQ(inputs_from_file(file).problem.scale, 0.25);
  Overrides flags;
  flags.gate = "bounded";
  flags.lower_bound = -2;
  flags.beta = "sigmoid2";
  flags.scale = 3;
  flags.qk_l2norm = false;
  const Problem p = inputs_from_file(file, flags).problem;
  EXPECT_EQ(p.gate_mode, GateMode::kBounded);
  EXPECT_EQ(p.lower_bound, -2);
  EXPECT_EQ(p.beta_mode, BetaMode::kSigmoid2);
  EXPECT_EQ(p.scale, 3);
  EXPECT_FALSE(p.qk_l2norm);
}

TEST(InputsFromFile, AcceptsFlatDtBiasAndInt32Lengths) {
  io::SafetensorsFile file = sample();
  file.tensors["dt_bias"].shape = {32};
  io::Buffer narrow(12);
  const int32_t offsets[] = {0, 3, 7};
  std::memcpy(narrow.data(), offsets, 12);
  file.tensors["cu_seqlens"] = {DType::kInt32, {3}, narrow};
  EXPECT_EQ(inputs_from_file(file).problem.cu_seqlens, DType::kInt32);
}

TEST(InputsFromFile, GateLogIgnoresParametersOfOtherGates) {
  Overrides flags;
  flags.gate = "log";
  EXPECT_FALSE(inputs_from_file(sample(), flags).problem.A_log.has_value());
}

TEST(InputsFromFile, RefusesWithTheReason) {
  using Change = void (*)(io::SafetensorsFile&);
  const struct {
    const char* message;
    Change change;
  } rows[] = {
      {"q: the file has no such tensor", [](auto& f) { f.tensors.erase("q"); }},
      {"k: the file has no such tensor", [](auto& f) { f.tensors.erase("k"); }},
      {"v: the file has no such tensor", [](auto& f) { f.tensors.erase("v"); }},
      {"g: the file has no such tensor", [](auto& f) { f.tensors.erase("g"); }},
      {"beta: the file has no such tensor", [](auto& f) { f.tensors.erase("beta"); }},
      {"q: shape [7, 16] does not have 4",
       [](auto& f) {
         f.tensors["q"].shape = {7, 16};
       }},
      {"beta: shape [28] does not have 3", [](auto& f) { f.tensors["beta"].shape = {28}; }},
      {"k: shape",
       [](auto& f) {
         f.tensors["k"].shape = {1, 7, 1, 16};
       }},
      {"v: shape",
       [](auto& f) {
         f.tensors["v"].shape = {7, 1, 4, 4};
       }},
      {"g: shape",
       [](auto& f) {
         f.tensors["g"].shape = {1, 7, 8, 4};
       }},
      {"beta: shape",
       [](auto& f) {
         f.tensors["beta"].shape = {1, 4, 7};
       }},
      {"A_log: shape",
       [](auto& f) {
         f.tensors["A_log"].shape = {2, 2};
       }},
      {"A_log: required", [](auto& f) { f.tensors.erase("A_log"); }},
      {"A_log: dtype", [](auto& f) { f.tensors["A_log"].dtype = DType::kInt32; }},
      {"dt_bias: shape",
       [](auto& f) {
         f.tensors["dt_bias"].shape = {8, 4};
       }},
      {"dt_bias: shape [31]", [](auto& f) { f.tensors["dt_bias"].shape = {31}; }},
      {"initial_state: shape", [](auto& f) { f.tensors["initial_state"].shape[0] = 1; }},
      {"initial_state: dtype", [](auto& f) { f.tensors["initial_state"].dtype = DType::kInt32; }},
      {"q: dtype int32", [](auto& f) { f.tensors["q"].dtype = DType::kInt32; }},
      {"cu_seqlens: dtype", [](auto& f) { f.tensors["cu_seqlens"].dtype = DType::kFloat32; }},
      {"cu_seqlens: shape",
       [](auto& f) {
         f.tensors["cu_seqlens"].shape = {1, 3};
       }},
      {"cu_seqlens: shape", [](auto& f) { f.tensors["cu_seqlens"].shape = {0}; }},
      {"gate: 'tanh'", [](auto& f) { f.metadata["gate"] = "tanh"; }},
      {"beta: ''", [](auto& f) { f.metadata["beta"] = ""; }},
      {"state_layout: 'nope'", [](auto& f) { f.metadata["state_layout"] = "nope"; }},
      {"lower_bound 'x'", [](auto& f) { f.metadata["lower_bound"] = "x"; }},
      {"scale '1e'", [](auto& f) { f.metadata["scale"] = "1e"; }},
      {"scale 'inf' is not a finite", [](auto& f) { f.metadata["scale"] = "inf"; }},
      {"scale '' is not a number", [](auto& f) { f.metadata["scale"] = ""; }},
      {"scale '010'", [](auto& f) { f.metadata["scale"] = "010"; }},
      {"scale '1e39' is outside the range of fp32", [](auto& f) { f.metadata["scale"] = "1e39"; }},
      {"scale '1e-50' is outside the range of fp32",
       [](auto& f) { f.metadata["scale"] = "1e-50"; }},
      {"scale '1e999' is outside", [](auto& f) { f.metadata["scale"] = "1e999"; }},
      {"lower_bound '-1e39' is outside", [](auto& f) { f.metadata["lower_bound"] = "-1e39"; }},
      {"lower_bound 'nan' is not a finite", [](auto& f) { f.metadata["lower_bound"] = "nan"; }},
      {"__metadata__: gate: 'tanh' is not one of log",
       [](auto& f) { f.metadata["gate"] = "tanh"; }},
      {"A_log: 89 of head 2 is too large",
       [](auto& f) { f.tensors["A_log"].data.template as<float>()[2] = 89; }},
      {"num_value_heads: HV = 4611686018427387904",
       [](auto& f) {
         f.tensors["q"].shape[1] = f.tensors["k"].shape[1] = 0;
         f.tensors["v"].shape = {1, 0, int64_t{1} << 62, 4};
         f.tensors["g"].shape = {1, 0, int64_t{1} << 62, 8};
         f.tensors["beta"].shape = {1, 0, int64_t{1} << 62};
       }},
      {"qk_l2norm 'yes'", [](auto& f) { f.metadata["qk_l2norm"] = "yes"; }},
  };
  for (const auto& row : rows) {
    io::SafetensorsFile file = sample();
    row.change(file);
    const std::string message = error_of(file);
    EXPECT_NE(message.find(row.message), std::string::npos)
        << "wanted '" << row.message << "', got '" << message << "'";
  }
  Overrides flags;
  flags.gate = "bounded";
  flags.lower_bound = 1;
  EXPECT_NE(error_of(sample(), flags).find("lower_bound: 1"), std::string::npos);
}

TEST(InputsFromFile, MetadataKeepEveryDigit) {
  Inputs inputs = inputs_from_file(sample());
  inputs.problem.gate_mode = GateMode::kBounded;
  inputs.problem.scale = 0.1 + 0.2;
  inputs.problem.lower_bound = -1.0 / 3;
  const Problem again = inputs_from_file(file_from_inputs(inputs)).problem;
  EXPECT_EQ(again.scale, inputs.problem.scale);
  EXPECT_EQ(again.lower_bound, inputs.problem.lower_bound);
}

TEST(InputsFromFile, ALogOfTheLargestExponentialIsTaken) {
  io::SafetensorsFile file = sample();
  file.tensors["A_log"].data.as<float>()[1] = 88.7f;
  EXPECT_EQ(error_of(file), "");
}

TEST(DescribeNan, NamesEveryInputAndTheFirstIndex) {
  EXPECT_EQ(describe_nan(inputs_from_file(sample())), "");
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::pair<const char*, const char*> rows[] = {
      {"q", "q[0, 0, 0, 5]"},    {"k", "k[0, 0, 0, 5]"},
      {"v", "v[0, 0, 1, 1]"},    {"g", "g[0, 0, 0, 5]"},
      {"beta", "beta[0, 1, 1]"}, {"dt_bias", "dt_bias[0, 5]"},
      {"A_log", "A_log[3]"},     {"initial_state", "initial_state[0, 0, 1, 1]"},
  };
  io::SafetensorsFile all = sample();
  std::string list;
  for (const auto& [name, where] : rows) {
    io::SafetensorsFile file = sample();
    const int at = std::string(name) == "A_log" ? 3 : 5;
    for (io::SafetensorsFile* changed : {&file, &all})
      changed->tensors[name].data.as<float>()[at] = nan;
    EXPECT_EQ(describe_nan(inputs_from_file(file)), where);
  }
  for (const char* where : {"q[", ", k[", ", v[", ", g[", ", beta[", ", A_log[", ", dt_bias["})
    EXPECT_NE(describe_nan(inputs_from_file(all)).find(where), std::string::npos) << where;
  // Whatever the strides are.
  Inputs strided = inputs_from_file(sample());
  strided.v.as<float>()[17] = nan;
  const std::string packed = describe_nan(strided);
  EXPECT_EQ(packed, "v[0, 1, 0, 1]");
  test::restride(&strided);
  EXPECT_EQ(describe_nan(strided), packed);
}

TEST(Outputs, StartPoisoned) {
  Problem p = generate(test::shape(4, 1, 8, 8)).problem;
  want_final_state(&p);
  const Outputs outputs = make_outputs(&p, DType::kBFloat16);
  EXPECT_EQ(outputs.o.size(), 4u * 8 * 2);
  EXPECT_EQ(outputs.o.as<uint16_t>()[0], 0xffff);
  EXPECT_EQ(outputs.final_state.size(), 8u * 8 * 4);
  const io::SafetensorsFile file = file_from_outputs(p, outputs);
  EXPECT_EQ(file.tensors.at("o").shape, (std::vector<int64_t>{1, 4, 1, 8}));
  EXPECT_EQ(file.tensors.at("final_state").shape, (std::vector<int64_t>{1, 1, 8, 8}));
}

TEST(ParseDType, Names) {
  EXPECT_EQ(parse_dtype("bf16"), DType::kBFloat16);
  EXPECT_THROW(parse_dtype("int32"), Error);
}

}  // namespace
}  // namespace kda::check
