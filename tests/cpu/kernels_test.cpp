// SPDX-License-Identifier: Apache-2.0
// Kernel tables of every instruction set this machine runs: rows, gates, small matrices.
#include "cpu/blocked/kernels.hpp"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <memory>
#include <string>

#include "check/generate.hpp"
#include "core/convert.hpp"
#include "cpu/blocked/blocked.hpp"
#include "cpu/float_mode.hpp"
#include "io/buffer.hpp"

namespace kda::cpu::blocked {
namespace {

class KernelsTest : public testing::TestWithParam<const Kernels*> {
 protected:
  const Kernels& kernels() const { return *GetParam(); }
};

std::vector<const Kernels*> runnable() {
  std::vector<const Kernels*> tables = {portable_kernels()};
  if (avx2_kernels() && cpu_has_avx2()) tables.push_back(avx2_kernels());
  if (avx512_kernels() && cpu_has_avx512()) tables.push_back(avx512_kernels());
  return tables;
}

INSTANTIATE_TEST_SUITE_P(Isa, KernelsTest, testing::ValuesIn(runnable()),
                         [](const auto& entry) { return std::string(entry.param->name); });

TEST_P(KernelsTest, RowsConvertLikeTheScalarCode) {
  const FloatMode mode;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    // Every 16-bit pattern there and back; NaNs stay NaN.
    std::vector<uint16_t> bits(0x10000), back(0x10000);
    for (uint32_t i = 0; i < 0x10000; ++i) bits[i] = static_cast<uint16_t>(i);
    std::vector<float> values(0x10000);
    kernels().load_row(bits.data(), dtype, 0x10000, 0x10000, values.data());
    kernels().store_row(values.data(), dtype, 0x10000, back.data());
    for (uint32_t i = 0; i < 0x10000; ++i) {
      const float expected = load_element(bits.data(), dtype, i);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(values[i]));
        ASSERT_TRUE(std::isnan(load_element(back.data(), dtype, i)));
      } else if (std::fabs(expected) == 0 || std::fabs(expected) >= 0x1p-126f) {
        ASSERT_EQ(values[i], expected) << i;
        ASSERT_EQ(back[i], bits[i]) << i;
      }
    }
  }
}

TEST_P(KernelsTest, RowsRoundLikeTheScalarCode) {
  check::Random random(7);
  std::vector<float> values(4099);
  for (float& value : values)
    value = static_cast<float>(random.normal() * std::exp2(random.uniform(-20, 15)));
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    std::vector<uint32_t> stored(4099), expected(4099);
    kernels().store_row(values.data(), dtype, 4099, stored.data());
    for (int64_t i = 0; i < 4099; ++i)
      store_element(expected.data(), dtype, i, values[static_cast<std::size_t>(i)]);
    EXPECT_EQ(stored, expected) << dtype_name(dtype);
  }
}

TEST_P(KernelsTest, RowsOfEveryLengthStayInside) {
  for (int count = 0; count <= 40; ++count) {
    std::vector<float> source(40, 3.0f), target(60, -1.0f);
    kernels().load_row(source.data(), DType::kFloat32, count, count + 5, target.data());
    for (int i = 0; i < 60; ++i)
      ASSERT_EQ(target[static_cast<std::size_t>(i)], i < count ? 3 : i < count + 5 ? 0 : -1);
    kernels().store_row(source.data(), DType::kFloat32, count, target.data() + 10);
    for (int i = std::max(10 + count, count + 5); i < 60; ++i)
      ASSERT_EQ(target[static_cast<std::size_t>(i)], -1);
  }
}

/// decay of one token for every raw gate in `raw`, read back from prepare().
std::vector<double> decays(const Kernels& kernels, const std::vector<float>& raw, GateMode mode,
                           float factor, float bound) {
  const FloatMode float_mode;
  auto group = std::make_unique<Group>();
  std::vector<double> result;
  std::vector<float> ones(256, 1.0f);
  for (std::size_t at = 0; at < raw.size(); at += 256) {
    PrepareArgs args;
    args.key_dim = static_cast<int>(std::min<std::size_t>(256, raw.size() - at));
    args.num_tokens = 1;
    args.q = args.k = args.beta = {reinterpret_cast<const char*>(ones.data()), 0, DType::kFloat32};
    args.g = {reinterpret_cast<const char*>(raw.data() + at), 0, DType::kFloat32};
    args.gate_mode = mode;
    args.gate_factor = factor;
    args.lower_bound = bound;
    kernels.prepare(args, *group);
    for (int d = 0; d < args.key_dim; ++d) {
      uint32_t keep;
      std::memcpy(&keep, &group->keep[0][d], 4);
      result.push_back(group->decay[0][d] + (keep ? 1.0 : 0.0));
    }
  }
  return result;
}

TEST_P(KernelsTest, ExponentialIsAccurate) {
  std::vector<float> raw;
  for (float x = -87; x < 88; x += 0.0037f) raw.push_back(x);
  for (float x = 1e-9f; x < 1; x *= 1.01f) raw.push_back(-x);
  const std::vector<double> got = decays(kernels(), raw, GateMode::kLog, 1, -5);
  double worst = 0;
  for (std::size_t i = 0; i < raw.size(); ++i) {
    const double expected = std::exp(static_cast<double>(raw[i]));
    worst = std::max(worst, std::fabs(got[i] - expected) / expected);
  }
  EXPECT_LT(worst, 1.5e-7);
}

TEST_P(KernelsTest, SlowDecaysKeepTheirDigits) {
  // 1 - decay of slow gates to relative accuracy: fp32 near 1 alone would lose it.
  std::vector<float> raw;
  for (float x = 1e-9f; x < 0.5f; x *= 1.03f) raw.push_back(-x);
  const std::vector<double> got = decays(kernels(), raw, GateMode::kLog, 1, -5);
  for (std::size_t i = 0; i < raw.size(); ++i) {
    const double expected = std::expm1(static_cast<double>(raw[i]));
    ASSERT_NEAR((got[i] - 1) / expected, 1, 4e-7) << raw[i];
  }
}

TEST_P(KernelsTest, ExtremeGates) {
  const std::vector<float> raw = {-88,    -103,    -104, -1000, -INFINITY,
                                  -3e38f, -1e-45f, 0,    -0.0f, 88.5f};
  const std::vector<double> got = decays(kernels(), raw, GateMode::kLog, 1, -5);
  for (std::size_t i = 0; i < 6; ++i) EXPECT_NEAR(got[i], 0, 1e-37) << raw[i];
  for (std::size_t i = 6; i < 9; ++i) EXPECT_EQ(got[i], 1) << raw[i];
  EXPECT_NEAR(got[9] / std::exp(88.5), 1, 1e-6);
}

TEST_P(KernelsTest, GatesFollowTheirFormulas) {
  std::vector<float> raw;
  for (float x = -30; x < 30; x += 0.013f) raw.push_back(x);
  raw.insert(raw.end(), {-200, -1000, 200, 1000});
  for (const float factor : {0.3f, 1.0f, 7.0f}) {
    const std::vector<double> bounded = decays(kernels(), raw, GateMode::kBounded, factor, -5);
    const std::vector<double> softplus = decays(kernels(), raw, GateMode::kSoftplus, factor, -5);
    for (std::size_t i = 0; i < raw.size(); ++i) {
      const double x = raw[i];
      const double g = -5 / (1 + std::exp(-factor * x));
      ASSERT_NEAR(bounded[i] / std::exp(g), 1, 1e-6) << x;
      if (g > -0.1 && g < -1e-9) {
        // A double holds 1 - decay to 1e-16 only.
        ASSERT_NEAR((bounded[i] - 1) / std::expm1(g), 1, 2e-6 + 3e-16 / std::fabs(g)) << x;
      }
      const double s =
          -static_cast<double>(factor) * (std::fmax(x, 0.0) + std::log1p(std::exp(-std::fabs(x))));
      if (s > -80) {
        ASSERT_NEAR(softplus[i] / std::exp(s), 1, 1e-5) << x;
      }
    }
  }
}

TEST_P(KernelsTest, MatmulBlockOfEveryHeight) {
  const FloatMode mode;
  check::Random random(3);
  for (const int rows : {1, 3, 8, 9, 17})
    for (const int depth : {1, 5, 64}) {
      std::vector<float> a(static_cast<std::size_t>(rows * depth)), block(64 * kBlockV),
          out(static_cast<std::size_t>(rows * kBlockV), 1.0f);
      for (float& x : a) x = static_cast<float>(random.normal());
      for (float& x : block) x = static_cast<float>(random.normal());
      kernels().matmul_block(a.data(), depth, rows, depth, block.data(), out.data());
      for (int r = 0; r < rows; ++r)
        for (int c = 0; c < kBlockV; ++c) {
          double sum = 1;
          for (int d = 0; d < depth; ++d)
            sum += static_cast<double>(a[static_cast<std::size_t>(r * depth + d)]) *
                   block[static_cast<std::size_t>(d * kBlockV + c)];
          ASSERT_NEAR(out[static_cast<std::size_t>(r * kBlockV + c)], sum, 1e-4);
        }
    }
}

TEST_P(KernelsTest, PeakRateCountsItsWork) {
  EXPECT_EQ(kernels().peak_fma(1000) % 1000, 0);
  EXPECT_GT(kernels().peak_fma(1000), 0);
}

TEST(CpuFeatures, BestTableIsRunnable) {
  EXPECT_NE(portable_kernels(), nullptr);
  EXPECT_TRUE(!cpu_has_avx512() || cpu_has_avx2());
}

#if defined(__x86_64__) && defined(__linux__)
/// Whatever the compiler's runtime says: the kernel's list is the truth.
TEST(CpuFeatures, AreThoseThatTheKernelLists) {
  std::ifstream file("/proc/cpuinfo");
  std::string line, flags;
  while (flags.empty() && std::getline(file, line))
    if (line.rfind("flags", 0) == 0) flags = line.substr(line.find(':') + 1) + " ";
  ASSERT_FALSE(flags.empty());
  const auto has = [&](std::initializer_list<const char*> names) {
    return std::all_of(names.begin(), names.end(), [&](const char* name) {
      return flags.find(" " + std::string(name) + " ") != std::string::npos;
    });
  };
  EXPECT_EQ(cpu_has_avx2(), has({"avx2", "fma", "f16c"}));
  EXPECT_EQ(cpu_has_avx512(),
            has({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"}));
}

/// CPUID leaves a virtual machine, for 8 us or more: it is asked once a process. The kernel can
/// make it a fault, on most processors.
TEST(CpuFeatures, AreAskedOnce) {
  constexpr int kSetCpuid = 0x1012;
  const bool asked = cpu_has_avx512();
  if (syscall(SYS_arch_prctl, kSetCpuid, 0) != 0) GTEST_SKIP() << "CPUID cannot be made a fault";
  const bool again = cpu_has_avx512() || cpu_has_avx2();
  const char* best = best_kernels().name;
  ASSERT_EQ(syscall(SYS_arch_prctl, kSetCpuid, 1), 0);
  EXPECT_TRUE(again || !asked);
  EXPECT_EQ(best, best_kernels().name);
}
#endif

TEST(FloatMode, RestoresTheCallersMode) {
  volatile float tiny = 1e-39f;
  {
    const FloatMode mode;
    volatile float product = tiny * 1.0f;
    EXPECT_EQ(product, 0.0f);
  }
  volatile float product = tiny * 1.0f;
  EXPECT_GT(product, 0.0f);
}

}  // namespace
}  // namespace kda::cpu::blocked
