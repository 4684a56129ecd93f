// SPDX-License-Identifier: Apache-2.0
// The C ABI's short convolution and gated norm: the bits of the C++ calls, and errors.
#include <gtest/gtest.h>

#include "kda/kda.h"
#include "support/strided_array.hpp"

#include "kda/gated_rms_norm.hpp"
#include "kda/short_conv.hpp"

namespace kda::test {
namespace {

kda_tensor tensor_of(StridedArray& array) {
  const TensorView view = array.view();
  kda_tensor c{};
  c.data = view.data;
  c.dtype = static_cast<int32_t>(view.dtype);
  for (std::size_t i = 0; i < 4; ++i) c.strides[i] = view.strides[i];
  return c;
}

TEST(LayerInC, ShortConv) {
  constexpr int64_t kT = 9, kD = 7, kW = 3, kS = 4, kN = 2;
  check::Random random(1);
  StridedArray x(DType::kBFloat16, {1, kT, kD, 1}), weight(DType::kFloat32, {kD, kW, 1, 1});
  StridedArray bias(DType::kFloat16, {kD, 1, 1, 1}), pool(DType::kFloat32, {5, kD, kS, 1});
  StridedArray dy(DType::kFloat32, {1, kT, kD, 1}), states(DType::kFloat32, {kN, kD, kS, 1});
  for (StridedArray* array : {&x, &weight, &bias, &pool, &dy, &states}) array->randomize(random);
  StridedArray y(DType::kFloat32, {1, kT, kD, 1}), pool_in_c = pool, y_in_c = y;
  const int32_t lengths[] = {0, 4, kT}, slots[] = {3, 0};
  const uint8_t has_state[] = {1, 1};

  ShortConv call{.num_tokens = kT, .channels = kD, .width = kW, .activation = Activation::kSilu};
  call.x = x.view(), call.y = y.view(), call.weight = weight.view(), call.bias = bias.view();
  call.cu_seqlens = lengths, call.cu_seqlens_dtype = DType::kInt32, call.num_sequences = kN;
  call.state_width = kS, call.first_slot = 1, call.has_state = has_state;
  call.initial_state = call.final_state = {pool.view(), 5, slots};
  ASSERT_TRUE(short_conv(call).ok());

  kda_short_conv_call c{};
  c.struct_size = sizeof(c);
  c.batch = 1, c.num_tokens = kT, c.channels = kD, c.width = kW;
  c.activation = KDA_ACTIVATION_SILU;
  c.x = tensor_of(x), c.y = tensor_of(y_in_c), c.weight = tensor_of(weight);
  c.bias = tensor_of(bias);
  c.cu_seqlens = lengths, c.cu_seqlens_dtype = KDA_INT32, c.num_sequences = kN;
  c.state_width = kS, c.first_slot = 1, c.has_state = has_state;
  c.initial_state.tensor = tensor_of(pool_in_c);
  c.initial_state.num_slots = 5, c.initial_state.indices = slots;
  c.final_state = c.initial_state;
  ASSERT_EQ(kda_short_conv(&c), KDA_OK) << kda_last_error();
  EXPECT_EQ(y, y_in_c);
  EXPECT_EQ(pool, pool_in_c);

  StridedArray dx = x, dweight = weight, dbias = bias, d_states = states;
  StridedArray dx_in_c = x, dweight_in_c = weight, dbias_in_c = bias, d_states_in_c = states;
  call.initial_state = {states.view(), kN, nullptr};
  ASSERT_TRUE(short_conv_backward(call, {dy.view(), states.view(), dx.view(), dweight.view(),
                                         dbias.view(), d_states.view()})
                  .ok());
  c.initial_state.tensor = tensor_of(states);
  c.initial_state.num_slots = kN, c.initial_state.indices = nullptr;
  kda_short_conv_gradients g{sizeof(g),
                             tensor_of(dy),
                             tensor_of(states),
                             tensor_of(dx_in_c),
                             tensor_of(dweight_in_c),
                             tensor_of(dbias_in_c),
                             tensor_of(d_states_in_c)};
  ASSERT_EQ(kda_short_conv_backward(&c, &g), KDA_OK) << kda_last_error();
  EXPECT_EQ(dx, dx_in_c);
  EXPECT_EQ(dweight, dweight_in_c);
  EXPECT_EQ(dbias, dbias_in_c);
  EXPECT_EQ(d_states, d_states_in_c);

  c.width = 5;
  EXPECT_EQ(kda_short_conv(&c), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "width: is 5, must be 2 to 4");
  c.width = kW;
  c.x = {x.view().data, 0, 0, {}, 0};
  EXPECT_EQ(kda_short_conv(&c), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "x: stride of dimension 1 is not set");
  EXPECT_EQ(kda_short_conv(nullptr), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "call: is null");
  g.struct_size = 1;
  EXPECT_EQ(kda_short_conv_backward(&c, &g), KDA_INVALID_ARGUMENT);
}

TEST(LayerInC, GatedRmsNorm) {
  const Shape shape = {2, 3, 2, 20};
  check::Random random(2);
  StridedArray x(DType::kFloat32, shape), gate(DType::kBFloat16, shape), dy(DType::kFloat32, shape);
  StridedArray weight(DType::kFloat32, {20, 1, 1, 1}), y(DType::kFloat16, shape), y_in_c = y;
  for (StridedArray* array : {&x, &gate, &weight, &dy}) array->randomize(random);
  GatedRmsNorm call{.rows = {2, 3, 2}, .channels = 20, .eps = 1e-5};
  call.activation = Activation::kSilu;
  call.x = x.view(), call.y = y.view(), call.gate = gate.view(), call.weight = weight.view();
  ASSERT_TRUE(gated_rms_norm(call).ok());
  kda_gated_rms_norm_call c{};
  c.struct_size = sizeof(c);
  c.rows[0] = 2, c.rows[1] = 3, c.rows[2] = 2, c.channels = 20, c.eps = 1e-5;
  c.activation = KDA_ACTIVATION_SILU;
  c.x = tensor_of(x), c.y = tensor_of(y_in_c), c.gate = tensor_of(gate);
  c.weight = tensor_of(weight);
  ASSERT_EQ(kda_gated_rms_norm(&c), KDA_OK) << kda_last_error();
  EXPECT_EQ(y, y_in_c);

  StridedArray dx = x, dgate = gate, dweight = weight;
  StridedArray dx_in_c = x, dgate_in_c = gate, dweight_in_c = weight;
  ASSERT_TRUE(
      gated_rms_norm_backward(call, {dy.view(), dx.view(), dgate.view(), dweight.view()}).ok());
  const kda_gated_rms_norm_gradients g{sizeof(g), tensor_of(dy), tensor_of(dx_in_c),
                                       tensor_of(dgate_in_c), tensor_of(dweight_in_c)};
  ASSERT_EQ(kda_gated_rms_norm_backward(&c, &g), KDA_OK) << kda_last_error();
  EXPECT_EQ(dx, dx_in_c);
  EXPECT_EQ(dgate, dgate_in_c);
  EXPECT_EQ(dweight, dweight_in_c);

  c.eps = -1;
  EXPECT_EQ(kda_gated_rms_norm(&c), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "eps: is -1, must be finite in fp32 and not negative");
  EXPECT_EQ(kda_gated_rms_norm_backward(&c, nullptr), KDA_INVALID_ARGUMENT);
}

TEST(LayerInC, WorkspacesOfBackwards) {
  kda_short_conv_call conv{};
  conv.struct_size = sizeof(conv);
  conv.batch = 2, conv.num_tokens = 100, conv.channels = 24, conv.width = 4;
  std::size_t bytes = 7;
  ASSERT_EQ(kda_short_conv_backward_workspace(&conv, &bytes), KDA_OK);
  EXPECT_EQ(bytes, 0u);
  conv.device = KDA_CUDA;
  ASSERT_EQ(kda_short_conv_backward_workspace(&conv, &bytes), KDA_OK);
  EXPECT_GE(bytes, 2 * 5 * 24 * sizeof(float));
  EXPECT_EQ(kda_short_conv_backward_workspace(&conv, nullptr), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "bytes: is null");
  kda_gated_rms_norm_call norm{};
  norm.struct_size = sizeof(norm);
  norm.rows[0] = norm.rows[1] = norm.rows[2] = 3, norm.channels = 24;
  ASSERT_EQ(kda_gated_rms_norm_backward_workspace(&norm, &bytes), KDA_OK);
  EXPECT_EQ(bytes, 0u);
  norm.device = KDA_CUDA;
  ASSERT_EQ(kda_gated_rms_norm_backward_workspace(&norm, &bytes), KDA_OK);
  EXPECT_GE(bytes, 27 * 24 * sizeof(float));
}

TEST(LayerInC, FusedDecodeIsOfAGpu) {
  kda_fused_decode_call c{};
  c.struct_size = sizeof(c);
  EXPECT_EQ(kda_fused_decode(&c), KDA_INVALID_ARGUMENT);  // on a CPU a call is looked at too
  EXPECT_STREQ(kda_last_error(), "num_heads: is 0, must be 1 to 2^40");
  const std::vector<float> taps(static_cast<std::size_t>(128 * 4));
  c.num_tokens = c.num_heads = 1, c.head_dim = 128, c.width = 4, c.state_width = 3;
  for (kda_fused_decode_part* part : {&c.q, &c.k, &c.v}) {
    part->weight.data = const_cast<float*>(taps.data());
    part->weight.strides[0] = 4, part->weight.strides[1] = 1;
  }
  EXPECT_EQ(kda_fused_decode(&c), KDA_UNSUPPORTED);
  EXPECT_STREQ(kda_last_error(),
               "device: is the CPU, where a step is short_conv, decode and gated_rms_norm");
  c.head_dim = 64;  // what no device has in one kernel is said on all of them
  EXPECT_EQ(kda_fused_decode(&c), KDA_UNSUPPORTED);
  EXPECT_STREQ(kda_last_error(), "head_dim: is 64, one kernel has 128 alone");
  EXPECT_EQ(kda_fused_decode(nullptr), KDA_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace kda::test
