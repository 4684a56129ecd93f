// SPDX-License-Identifier: Apache-2.0
// The fold on a GPU: the bits of the CPU's.
#include <gtest/gtest.h>

#include "cpu/blocked/kernels.hpp"
#include "support/fold.hpp"
#include "support/gpu.hpp"

namespace kda {
namespace {

using test::Floats;
using test::FoldCase;

class FoldOnGpu : public test::GpuTest {};

/// All of a fold in device memory.
class Uploaded {
 public:
  explicit Uploaded(const FoldCase& c)
      : fold(c.fold),
        maps_(upload(c.maps)),
        starts_(upload(c.starts)),
        states_(upload(c.states)),
        steps_(upload(c.steps)) {
    fold.A = at(maps_) + (fold.A - fold.M);
    fold.M = at(maps_), fold.starts = at(starts_), fold.states = at(states_);
    fold.device = DeviceKind::kCuda;
    fold.device_steps = static_cast<const FoldStep*>(steps_.data());
  }
  Floats states() const {
    Floats values(states_.size() / sizeof(float));
    states_.download(values.data(), states_.size());
    return values;
  }
  StateFold fold;

 private:
  template <class T>
  static check::DeviceBuffer upload(const std::vector<T>& values) {
    check::DeviceBuffer buffer(values.size() * sizeof(T));
    buffer.upload(values.data(), buffer.size());
    return buffer;
  }
  static float* at(const check::DeviceBuffer& buffer) { return static_cast<float*>(buffer.data()); }

  check::DeviceBuffer maps_, starts_, states_, steps_;
};

TEST_F(FoldOnGpu, HasTheBitsOfTheCpu) {
  for (const auto& [K, V] : {std::pair{128, 128}, {64, 64}, {33, 50}, {1, 3}, {256, 16}, {12, 256}})
    for (const bool transposed : {false, true})
      for (const int64_t per_row : {0, 1, 3}) {
        FoldCase c(K, V, transposed);
        if (per_row > 0) c.put_in_rows(per_row, K % 4 == 0 ? 4 : 1);
        const Uploaded gpu(c);
        throw_if_error(fold_states(gpu.fold));
        ASSERT_TRUE(fold_states(c.fold).ok());
        const Floats found = gpu.states();
        if (cpu::blocked::cpu_has_avx2()) {
          EXPECT_TRUE(test::same_bits(found, c.states)) << K << " " << V << " " << per_row;
        } else {  // its multiply-adds round twice
          for (std::size_t i = 0; i < found.size(); ++i)
            if (!std::isnan(c.states[i])) {
              ASSERT_NEAR(found[i], c.states[i], 1e-5) << K << " " << V << " " << i;
            }
        }
      }
}

TEST_F(FoldOnGpu, AnotherTableReadsNothingOutside) {
  const FoldCase c(16, 16, false);
  Uploaded gpu(c);
  FoldCase other = c;
  other.steps[1].map = 4, other.steps[3].store = 1000;
  const Uploaded wrong(other);
  gpu.fold.device_steps = wrong.fold.device_steps;
  throw_if_error(fold_states(gpu.fold));
  const Floats states = gpu.states();
  const std::size_t size = 3 * 16 * 16;
  EXPECT_FALSE(std::isnan(states[0]));
  EXPECT_TRUE(
      std::all_of(states.begin() + size, states.end(), [](float x) { return std::isnan(x); }));
}

TEST_F(FoldOnGpu, NamesWhatCannotBeUsed) {
  const FoldCase c(16, 16, false);
  const Uploaded gpu(c);
  StateFold fold = gpu.fold;
  fold.device_steps = nullptr;
  EXPECT_EQ(fold_states(fold).message(), "device_steps: pointer is null");
  fold = gpu.fold;
  fold.M = c.maps.data();
  EXPECT_EQ(fold_states(fold).message().substr(0, 18), "M: is host memory,");
}

TEST(FoldWithoutGpu, SaysWhy) {
  if (test::on_cuda()) GTEST_SKIP() << "it tests a machine without a GPU";
  FoldCase c(16, 16, false);
  c.fold.device = DeviceKind::kCuda;
  EXPECT_FALSE(fold_states(c.fold).ok());
  EXPECT_TRUE(std::isnan(c.states[0]));
}

}  // namespace
}  // namespace kda
