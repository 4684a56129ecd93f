// SPDX-License-Identifier: Apache-2.0
// NaN and Inf in one sequence, head or padding change no bit anywhere else, and bytes that do not
// belong to a tensor are neither read nor written.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "support/harness.hpp"

namespace kda {
namespace {

using check::Inputs;

const float kPoisons[] = {std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity(), -3e38f};

TEST(Isolation, AcrossSequencesAndHeads) {
  check::GenerateOptions options = test::shape(0, 2, 24, 40);
  options.num_value_heads = 4;
  options.seq_lens = {30, 41, 20};
  const Inputs inputs = check::generate(options);
  const test::Result clean = test::run_inputs(inputs, {.plan = test::with_threads(1)});
  for (const float poison : kPoisons) {
    // q/k head 1 of sequence 1, hence value heads 2 and 3 of it.
    Inputs bad = inputs;
    for (int64_t t = 35; t < 71; ++t)
      for (int64_t d = 0; d < 24; ++d) {
        bad.q.as<float>()[(t * 2 + 1) * 24 + d] = poison;
        bad.k.as<float>()[(t * 2 + 1) * 24 + d] = poison;
      }
    const test::Result dirty = test::run_inputs(bad, {.plan = test::with_threads(1)});
    const auto* before = clean.outputs.o.as<uint32_t>();
    const auto* after = dirty.outputs.o.as<uint32_t>();
    for (int64_t t = 0; t < 91; ++t)
      for (int64_t h = 0; h < 4; ++h)
        for (int64_t c = 0; c < 40; ++c) {
          if (t >= 35 && t < 71 && h >= 2) continue;
          ASSERT_EQ(before[(t * 4 + h) * 40 + c], after[(t * 4 + h) * 40 + c])
              << "token " << t << " head " << h;
        }
    for (int64_t n = 0; n < 3; ++n)
      for (int64_t h = 0; h < 4; ++h) {
        if (n == 1 && h >= 2) continue;
        const std::size_t at = static_cast<std::size_t>((n * 4 + h) * 24 * 40);
        ASSERT_EQ(std::memcmp(clean.outputs.final_state.as<float>() + at,
                              dirty.outputs.final_state.as<float>() + at, 24 * 40 * 4),
                  0);
      }
  }
}

TEST(Isolation, PaddingIsNeverRead) {
  // restride() fills the gaps between rows with NaN; odd sizes leave partial vectors everywhere.
  for (const std::string& backend : test::backends())
    for (const int64_t size : {1, 5, 19, 33}) {
      Inputs inputs = check::generate(test::shape(21, 2, size, size));
      const test::RunOptions run{.plan = test::with_backend(backend)};
      const test::Result dense = test::run_inputs(inputs, run);
      test::restride(&inputs);
      const test::Result padded = test::run_inputs(inputs, run);
      EXPECT_TRUE(test::same_bits(dense.outputs.o, padded.outputs.o)) << backend << size;
    }
}

TEST(Isolation, StridedOutputsKeepTheirGaps) {
  const Inputs inputs = check::generate(test::shape(19, 3, 16, 21));
  Problem p = inputs.problem;
  p.o = contiguous(DType::kFloat32, {1, 19, 3, 21});
  const test::Result dense = test::run_inputs(inputs);
  p.o.strides = {0, 3 * 25 + 4, 25, 1};
  p.o.alignment = 4;
  check::want_final_state(&p);
  p.final_state->tensor.strides = {3 * 500, 500, 27, 1};
  p.final_state->tensor.alignment = 4;
  io::Buffer o(19 * (3 * 25 + 4) * 4), state(3 * 500 * 4);
  o.fill(0xab);
  state.fill(0xab);
  Plan plan;
  ASSERT_TRUE(make_plan(p, {}, test::device(), {}, &plan).ok());
  io::Buffer workspace(plan.workspace_bytes);
  Tensors tensors = inputs.tensors();
  tensors.o = o.data();
  tensors.final_state = state.data();
  ASSERT_TRUE(check::run_and_wait(plan, tensors, workspace.data(), workspace.size()).ok());
  std::vector<bool> written(o.size() / 4);
  for (int64_t t = 0; t < 19; ++t)
    for (int64_t h = 0; h < 3; ++h)
      for (int64_t c = 0; c < 21; ++c) {
        const int64_t at = t * 79 + h * 25 + c;
        written[static_cast<std::size_t>(at)] = true;
        ASSERT_EQ(o.as<float>()[at], dense.outputs.o.as<float>()[(t * 3 + h) * 21 + c]);
      }
  for (std::size_t i = 0; i < written.size(); ++i) {
    if (!written[i]) {
      ASSERT_EQ(o.as<uint32_t>()[i], 0xababababu) << i;
    }
  }
  for (int64_t h = 0; h < 3; ++h)
    for (int64_t d = 0; d < 18; ++d)
      for (int64_t c = 0; c < 27; ++c) {
        const int64_t at = h * 500 + d * 27 + c;
        if (at >= (h + 1) * 500) continue;
        if (d < 16 && c < 21) {
          ASSERT_EQ(state.as<float>()[at],
                    dense.outputs.final_state.as<float>()[(h * 16 + d) * 21 + c]);
        } else {
          ASSERT_EQ(state.as<uint32_t>()[at], 0xababababu);
        }
      }
}

TEST(Isolation, NaNInOneColumnStaysInIt) {
  Inputs inputs = check::generate(test::shape(40, 1, 16, 40));
  const test::Result clean = test::run_inputs(inputs);
  inputs.v.as<float>()[10 * 40 + 7] = NAN;
  const test::Result dirty = test::run_inputs(inputs);
  for (int64_t t = 0; t < 40; ++t)
    for (int64_t c = 0; c < 40; ++c) {
      const float before = clean.outputs.o.as<float>()[t * 40 + c];
      const float after = dirty.outputs.o.as<float>()[t * 40 + c];
      if (c == 7 && t >= 10) {
        ASSERT_TRUE(std::isnan(after));
      } else if (c != 7 || t < 8) {
        ASSERT_EQ(before, after) << t << " " << c;
      }
    }
}

TEST(Isolation, LastByteOfEveryTensor) {
  // Exactly sized heap buffers: the address sanitizer sees any read or write past them.
  for (const std::string& backend : test::backends())
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      check::GenerateOptions options = test::shape(9, 1, 13, 11);
      options.dtype = dtype;
      options.regime = check::Regime::kSoftplus;
      const Inputs inputs = check::generate(options);
      std::vector<std::vector<char>> copies;
      const auto exact = [&](const io::Buffer& buffer) {
        const char* bytes = buffer.as<char>();
        copies.emplace_back(bytes, bytes + buffer.size());
        return copies.back().data();
      };
      copies.reserve(16);
      Problem p = inputs.problem;
      for (TensorDesc* desc : {&p.q, &p.k, &p.v, &p.g, &p.beta, &p.o})
        desc->alignment = dtype_size(dtype);
      p.o = contiguous(dtype, {1, 9, 1, 11});
      p.o.alignment = dtype_size(dtype);
      Tensors t;
      t.q = exact(inputs.q);
      t.k = exact(inputs.k);
      t.v = exact(inputs.v);
      t.g = exact(inputs.g);
      t.beta = exact(inputs.beta);
      t.A_log = reinterpret_cast<const float*>(exact(inputs.A_log));
      t.dt_bias = reinterpret_cast<const float*>(exact(inputs.dt_bias));
      t.o = exact(io::Buffer(static_cast<std::size_t>(9 * 11 * dtype_size(dtype))));
      Plan plan;
      ASSERT_TRUE(make_plan(p, {}, test::device(), test::with_backend(backend), &plan).ok());
      io::Buffer workspace(plan.workspace_bytes);
      ASSERT_TRUE(check::run_and_wait(plan, t, workspace.data(), workspace.size()).ok());
    }
}

}  // namespace
}  // namespace kda
