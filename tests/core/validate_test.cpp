// SPDX-License-Identifier: Apache-2.0
// validate() accepts what the contract allows. (What it refuses: tests/run/bad_calls_test.cpp.)
#include <gtest/gtest.h>

#include "support/harness.hpp"

namespace kda {
namespace {

Problem base() { return check::generate(test::shape(16, 2, 8, 8)).problem; }

TEST(Validate, AcceptsTheEdges) {
  for (const int64_t K : {1, 256})
    for (const int64_t V : {1, 256})
      EXPECT_TRUE(validate(check::generate(test::shape(3, 1, K, V)).problem).ok());
  Problem p = base();
  p.lower_bound = -1e-30;
  EXPECT_TRUE(validate(p).ok());
  p.lower_bound = -1e35;
  EXPECT_TRUE(validate(p).ok());
  p.scale = -1e35;
  EXPECT_TRUE(validate(p).ok());
  p.scale = 0;
  EXPECT_TRUE(validate(p).ok());
  p.batch_invariant = true;
  EXPECT_TRUE(validate(p).ok());
}

TEST(Validate, AcceptsBroadcastInputsAndStridedBeta) {
  Problem p = base();
  p.q.strides[2] = 0;  // every head reads the same q
  p.beta.strides = {0, 100, 7, 0};
  p.beta.alignment = 4;
  EXPECT_TRUE(validate(p).ok()) << validate(p).message();
}

TEST(Validate, AcceptsOneGateAHead) {
  Problem p = base();
  p.g = head_gates(DType::kFloat32, 1, 16, 2);
  EXPECT_TRUE(validate(p).ok()) << validate(p).message();
  BackwardProblem backward{p, {}};
  backward.gradients.d_o = p.o;
  backward.gradients.dg = p.g;  // the sum over channels
  EXPECT_TRUE(validate(backward).ok()) << validate(backward).message();
  backward.gradients.dg->strides[1] = 1;
  EXPECT_EQ(validate(backward).message(),
            "dg: stride 1 makes elements of this output overlap, needs at least 2");
  backward.gradients.dg = contiguous(DType::kFloat32, {1, 16, 2, 8});
  EXPECT_TRUE(validate(backward).ok()) << validate(backward).message();
}

TEST(Validate, AcceptsFloat64InAnyMix) {
  check::GenerateOptions options = test::shape(16, 2, 8, 8);
  options.dtype = DType::kFloat64;
  options.initial_state = true;
  Problem p = check::generate(options).problem;
  EXPECT_EQ(p.A_log->dtype, DType::kFloat64);
  EXPECT_EQ(p.initial_state->tensor.dtype, DType::kFloat64);
  EXPECT_TRUE(validate(p).ok()) << validate(p).message();
  p = base();
  p.g = contiguous(DType::kFloat64, {1, 16, 2, 8});
  p.dt_bias = contiguous(DType::kFloat64, {2, 8});
  EXPECT_TRUE(validate(p).ok()) << validate(p).message();
  p.g.alignment = 4;
  EXPECT_EQ(validate(p).message(), "g: alignment 4 is below the 8 bytes of fp64");
}

TEST(Validate, StridesOfSingleElementsAreNeverUsed) {
  Problem p = base();
  p.num_heads = p.num_value_heads = 1;
  p.q.strides = {-7, 8, -3, 1};
  p.A_log->strides[0] = -1;
  EXPECT_TRUE(validate(p).ok()) << validate(p).message();
}

TEST(Validate, TensorsWithoutElementsNeedNoDescription) {
  EXPECT_TRUE(validate(Problem{}).ok());
  Problem p = base();
  p.q = {};
  EXPECT_FALSE(validate(p).ok());
  p.num_tokens = 0;
  EXPECT_TRUE(validate(p).ok()) << validate(p).message();
}

TEST(Validate, ColumnsOfAcceptedRowsAreThoseOfATail) {
  Problem p = base();
  p.operation = Operation::kDecode;
  p.batch = p.num_sequences = 16;
  p.num_tokens = 1;
  p.q = p.k = p.v = p.g = p.o = contiguous(DType::kFloat32, {16, 1, 2, 8});
  p.beta = contiguous(DType::kFloat32, {16, 1, 2});
  p.initial_state = states(p, DType::kFloat32, 16, true);
  p.tail = tails(p, 20);
  p.tail->accepted_columns = 20;
  EXPECT_TRUE(validate(p).ok()) << validate(p).message();
  p.tail->accepted_columns = 21;
  EXPECT_EQ(validate(p).message(), "accepted_rows: columns = 21 is outside 0..20");
  p.tail->accepted_columns = -1;
  EXPECT_EQ(validate(p).message(), "accepted_rows: columns = -1 is outside 0..20");
}

TEST(Validate, SixteenHugeButLegalBytes) {
  Problem p = base();
  p.v.strides[1] = (int64_t{1} << 55);
  EXPECT_TRUE(validate(p).ok());
}

TEST(Validate, NamesAndSizes) {
  EXPECT_EQ(dtype_size(DType::kInt64), 8);
  EXPECT_EQ(dtype_size(DType::kFloat64), 8);
  EXPECT_STREQ(dtype_name(DType::kFloat64), "fp64");
  EXPECT_EQ(dtype_size(static_cast<DType>(99)), 0);
  EXPECT_STREQ(dtype_name(DType::kBFloat16), "bf16");
  EXPECT_STREQ(dtype_name(static_cast<DType>(-1)), "invalid");
  EXPECT_STREQ(gate_mode_name(GateMode::kSoftplus), "softplus");
  EXPECT_STREQ(beta_mode_name(BetaMode::kSigmoid2), "sigmoid2");
  EXPECT_STREQ(head_map_name(HeadMap::kTiled), "tiled");
  EXPECT_STREQ(state_layout_name(StateLayout::kVK), "vk");
  EXPECT_STREQ(device_kind_name(DeviceKind::kCuda), "cuda");
  EXPECT_STREQ(status_code_name(StatusCode::kOutOfMemory), "out of memory");
  EXPECT_STREQ(status_code_name(static_cast<StatusCode>(77)), "invalid");
}

TEST(Validate, ContiguousDescriptors) {
  const TensorDesc desc = contiguous(DType::kBFloat16, {2, 3, 5, 8});
  EXPECT_EQ(desc.strides, (std::array<int64_t, 4>{120, 40, 8, 1}));
  EXPECT_EQ(desc.alignment, 16);
  EXPECT_EQ(contiguous(DType::kBFloat16, {4, 3}).alignment, 2);
  EXPECT_EQ(contiguous(DType::kFloat32, {4, 6}).alignment, 8);
  EXPECT_EQ(contiguous(DType::kFloat32, {7}).alignment, 16);
}

TEST(Validate, ExceptionsAndCodes) {
  Problem p = base();
  p.key_dim = 257;
  try {
    throw_if_error(validate(p));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
    EXPECT_STREQ(error.what(), "key_dim: K = 257 is outside 1..256");
  }
  EXPECT_NO_THROW(throw_if_error(Status{}));
}

TEST(Validate, ScaleDefault) {
  Problem p = base();
  p.key_dim = 64;
  EXPECT_DOUBLE_EQ(effective_scale(p), 0.125);
  p.scale = 2;
  EXPECT_EQ(effective_scale(p), 2);
}

}  // namespace
}  // namespace kda
