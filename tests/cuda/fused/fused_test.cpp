// SPDX-License-Identifier: Apache-2.0
// The fused kernel, of Hopper or the portable one as the GPU is: every regime, type of gate,
// length, state option and layout in which it serves, against the oracle; what it declines.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "check/tolerances.hpp"
#include "core/convert.hpp"
#include "plan/ledger.hpp"
#include "stage/buffers.hpp"
#include "support/backward.hpp"
#include "support/gpu.hpp"

namespace kda {
namespace {

using check::Inputs;
using check::Regime;

constexpr float kFastALog = 2.5f;  // exp(2.5) log(1 + exp(0)): 12 powers of two a token

/// Nothing cut: where the planner cuts depends on the number of SMs and on the batch.
test::RunOptions run_on_fused(DType dtype) {
  test::RunOptions run{.plan = test::with_backend("fused"), .out_dtype = dtype};
  run.plan.context_parallel = SegmentPolicy::kOff;
  return run;
}
constexpr SegmentMethod kMethods[] = {SegmentMethod::kScanMergeForward, SegmentMethod::kOnePass};

test::RunOptions run_in_segments(int64_t count, SegmentMethod method, DType dtype) {
  test::RunOptions run = run_on_fused(dtype);
  run.plan.context_parallel = SegmentPolicy::kFixed;
  run.plan.num_segments = count;
  run.plan.segment_method = method;
  return run;
}

/// The row that serves as "fused" on this GPU.
const std::string& fused_row() {
  static const std::string name = [] {
    Plan plan;
    throw_if_error(make_plan(check::generate(test::shape16(1, 1, 64, 64)).problem, {},
                             test::device(), test::with_backend("fused"), &plan));
    return plan.implementation;
  }();
  return name;
}
bool is_portable() { return fused_row() == "cuda.sm80.fused"; }

/// The type of q, k, v, g, beta and o, and K, which V equals.
struct Kind {
  int64_t K;
  DType dtype;
};

class Fused : public test::GpuTest, public ::testing::WithParamInterface<Kind> {
 protected:
  check::GenerateOptions shape_of(int64_t tokens, int64_t heads) const {
    return test::shape16(tokens, heads, K, K, dtype);
  }
  test::RunOptions on_fused() const { return run_on_fused(dtype); }
  test::RunOptions in_segments(int64_t count, SegmentMethod method) const {
    return run_in_segments(count, method, dtype);
  }
  std::vector<test::RunOptions> whole_and_in_segments() const {
    if (is_portable()) return {on_fused()};
    return {on_fused(), in_segments(2, SegmentMethod::kScanMergeForward),
            in_segments(3, SegmentMethod::kOnePass)};
  }
  void expect_within(const Inputs& inputs, const std::string& what) const {
    test::expect_within(inputs, on_fused(), fused_row(), what);
  }
  /// Where o is beyond its type.
  void expect_states_within(const Inputs& inputs, const std::string& what) const {
    const test::Result result = test::run_inputs(inputs, on_fused());
    const check::Comparison comparison = check::compare(
        inputs, result.problem, result.outputs, {.operands = check::operands_of(result.plan)});
    const check::HeadError* state = comparison.worst_final_state();
    ASSERT_NE(state, nullptr) << what;
    EXPECT_LE(state->error, state->tolerance) << what;
  }

  // Inputs in fp16 need gates that the call computes, as narrow as they are, and hold less.
  std::vector<Regime> regimes() const {
    std::vector<Regime> all;
    for (int i = 0; i < check::kNumRegimes; ++i)
      if (const auto regime = static_cast<Regime>(i);
          !fp16 || (regime != Regime::kLog && regime != Regime::kNeedle))
        all.push_back(regime);
    return all;
  }
  std::vector<bool> gates_in_fp32() const {
    return fp16 ? std::vector<bool>{false} : std::vector<bool>{false, true};
  }
  float held(float by) const { return fp16 && by != 0 ? std::clamp(by, 1e-4f, 1e4f) : by; }

  /// Has a head forget fast: the kernel goes through its runs in another way.
  void make_fast(Inputs* inputs, int64_t head) const {
    inputs->A_log.as<float>()[head] = kFastALog;
    for (int64_t i = 0; i < K; i += 5) inputs->dt_bias.as<float>()[head * K + i] = 0;
  }
  /// Softplus gates; of heads that forget fast, or of others.
  Inputs softplus_gates(check::GenerateOptions options, bool fast) const {
    options.regime = Regime::kTrainedSoftplus;
    Inputs inputs = check::generate(options);
    for (int64_t head = 0; fast && head < inputs.problem.num_value_heads; ++head)
      make_fast(&inputs, head);
    return inputs;
  }
  void expect_as_exact_in_segments(const Inputs& inputs, const std::string& what) const {
    std::vector<cpu::oracle::HeadResult> truths;
    const double whole =
        test::worst_errors(inputs, test::run_inputs(inputs, on_fused()), &truths).o;
    for (const int64_t count : {2, 5}) {
      const test::Result result =
          test::run_inputs(inputs, in_segments(count, SegmentMethod::kOnePass));
      ASSERT_EQ(result.plan.resolved.segment_method, SegmentMethod::kOnePass);
      EXPECT_LE(test::worst_errors(inputs, result, &truths).o, check::kSegmented16BitRatio * whole)
          << what << ", " << count << " segments";
    }
  }

  const int64_t K = GetParam().K;
  const DType dtype = GetParam().dtype;
  const bool fp16 = dtype == DType::kFloat16;
  const std::size_t state_bytes = static_cast<std::size_t>(K * K * 4);
};
/// Gates that come as logarithms, or are wider than q.
class FusedBf16 : public Fused {};
/// The portable form has no segments.
class FusedSegments : public Fused {
 protected:
  void SetUp() override {
    Fused::SetUp();
    if (!IsSkipped() && is_portable()) GTEST_SKIP() << fused_row() << " has no segments";
  }
};

std::string name_of(const ::testing::TestParamInfo<Kind>& info) {
  return "K" + std::to_string(info.param.K);
}
const auto kBf16 = ::testing::Values(Kind{64, DType::kBFloat16}, Kind{128, DType::kBFloat16});
const auto kFp16 = ::testing::Values(Kind{64, DType::kFloat16}, Kind{128, DType::kFloat16});
INSTANTIATE_TEST_SUITE_P(Bf16, Fused, kBf16, name_of);
INSTANTIATE_TEST_SUITE_P(Bf16, FusedBf16, kBf16, name_of);
INSTANTIATE_TEST_SUITE_P(Fp16, Fused, kFp16, name_of);
INSTANTIATE_TEST_SUITE_P(Bf16, FusedSegments, kBf16, name_of);
INSTANTIATE_TEST_SUITE_P(Fp16, FusedSegments, kFp16, name_of);

check::GenerateOptions shape128(int64_t tokens, int64_t heads) {
  return test::shape16(tokens, heads, 128, 128);
}
bool same_tokens(const test::Result& a, const test::Result& b, int64_t from, int64_t to,
                 std::size_t row) {
  const std::size_t at = static_cast<std::size_t>(from) * row;
  return std::memcmp(a.outputs.o.data() + at, b.outputs.o.data() + at,
                     static_cast<std::size_t>(to - from) * row) == 0;
}

/// Gates in fp32.
void widen_gates(Inputs* inputs) {
  const int64_t count = static_cast<int64_t>(inputs->g.size()) / 2;
  io::Buffer wide(inputs->g.size() * 2);
  for (int64_t i = 0; i < count; ++i)
    store_element(wide.data(), DType::kFloat32, i,
                  load_element(inputs->g.data(), DType::kBFloat16, i));
  inputs->g = wide;
  inputs->problem.g.dtype = DType::kFloat32;
}

void fill(io::Buffer* tensor, float value) {
  for (std::size_t i = 0; i < tensor->size() / sizeof(float); ++i) tensor->as<float>()[i] = value;
}

TEST_P(Fused, EveryRegimeAndTypeOfGate) {
  for (const Regime regime : regimes())
    for (const bool wide : gates_in_fp32()) {
      check::GenerateOptions options = shape_of(test::long_case(1000), 2);
      options.regime = regime;
      options.seed = static_cast<uint64_t>(regime);
      Inputs inputs = check::generate(options);
      if (wide) widen_gates(&inputs);
      expect_within(inputs, std::string(check::regime_name(options.regime)) +
                                (wide ? ", gates in fp32" : ", gates in bf16"));
    }
}

TEST_P(Fused, LengthsAroundRunsAndTheRing) {
  for (const int64_t T :
       {1, 2, 15, 16, 17, 31, 32, 33, 47, 63, 65, 112, 113, 127, 128, 129, 144, 145, 255, 257, 271})
    expect_within(check::generate(shape_of(T, 2)), "T " + std::to_string(T));
}

TEST_P(Fused, GroupedPackedStrided) {
  check::GenerateOptions options = shape_of(0, 2);
  options.num_value_heads = 6;
  options.seq_lens = {0, 70, 1, 0, 64, 200, 0};
  expect_within(check::generate(options), "packed, grouped");
  options = shape_of(100, 2);
  options.batch = 3;
  Inputs inputs = check::generate(options);
  const test::Result dense = test::run_inputs(inputs, on_fused());
  test::restride(&inputs, 8);
  const test::Result strided = test::run_inputs(inputs, on_fused());
  EXPECT_TRUE(test::same_bits(dense.outputs.o, strided.outputs.o));
  EXPECT_TRUE(test::same_bits(dense.outputs.final_state, strided.outputs.final_state));
}

TEST_P(Fused, LengthsOnTheDeviceAlone) {
  check::GenerateOptions options = shape_of(0, 2);
  options.seq_lens = {70, 1, 0, 200};
  const Inputs inputs = check::generate(options);
  test::RunOptions run = on_fused();
  const test::Result known = test::run_inputs(inputs, run);
  run.from_bounds = true;
  const test::Result unknown = test::run_inputs(inputs, run);
  EXPECT_TRUE(test::same_bits(known.outputs.o, unknown.outputs.o));
  EXPECT_TRUE(test::same_bits(known.outputs.final_state, unknown.outputs.final_state));
}

TEST_P(Fused, StateLayoutsTypesAndCheckpoints) {
  for (const StateLayout layout : {StateLayout::kKV, StateLayout::kVK})
    for (const DType of_states : {DType::kFloat32, DType::kBFloat16})
      for (const int64_t every : {16, 48}) {
        Inputs inputs = check::generate(shape_of(150, 2));
        Problem& p = inputs.problem;
        const auto states = [&](int64_t n) { return contiguous(of_states, {n, 2, K, K}); };
        p.state_layout = layout;
        p.initial_state->tensor = states(1);
        const int64_t count = 2 * K * K;
        io::Buffer start(static_cast<std::size_t>(count * dtype_size(of_states)));
        for (int64_t i = 0; i < count; ++i)
          store_element(start.data(), of_states, i, 0.1f * inputs.initial_state.as<float>()[i]);
        inputs.initial_state = start;
        p.checkpoints = StateDesc{.tensor = states(150 / every), .num_slots = 150 / every};
        p.checkpoint_every = every;
        check::want_final_state(&p);
        p.final_state->tensor = states(1);
        expect_within(inputs, "layout and type");
        const test::Result whole = test::run_inputs(inputs, on_fused());
        Inputs prefix = inputs;
        prefix.problem.checkpoints.reset();
        prefix.problem.checkpoint_every = 0;
        prefix.problem.num_tokens = 2 * every;
        const test::Result there = test::run_inputs(prefix, on_fused());
        EXPECT_EQ(std::memcmp(whole.outputs.checkpoints.data() + start.size(),
                              there.outputs.final_state.data(), start.size()),
                  0)
            << every;
      }
}

TEST_P(Fused, CheckpointsOfPackedSequences) {
  check::GenerateOptions options = shape_of(0, 1);
  options.seq_lens = {70, 20, 0, 50};  // 4, 1, 0 and 3 checkpoints
  Inputs inputs = check::generate(options);
  inputs.problem.checkpoints =
      StateDesc{.tensor = contiguous(DType::kFloat32, {8, 1, K, K}), .num_slots = 8};
  inputs.problem.checkpoint_every = 16;
  const test::Result batch = test::run_inputs(inputs, on_fused());
  std::size_t done = 0;
  for (std::size_t n = 0; n < 4; ++n) {
    const int64_t count = (inputs.cu_seqlens[n + 1] - inputs.cu_seqlens[n]) / 16;
    if (count == 0) continue;
    Inputs alone = test::only_sequence(inputs, n);
    alone.problem.checkpoints->tensor = contiguous(DType::kFloat32, {count, 1, K, K});
    alone.problem.checkpoints->num_slots = count;
    const test::Result single = test::run_inputs(alone, on_fused());
    EXPECT_EQ(std::memcmp(batch.outputs.checkpoints.data() + done * state_bytes,
                          single.outputs.checkpoints.data(),
                          static_cast<std::size_t>(count) * state_bytes),
              0)
        << n;
    done += static_cast<std::size_t>(count);
  }
  EXPECT_EQ(done, 8u);
}

TEST_P(Fused, ResumesAtEveryRunWithTheSameBits) {
  const Inputs inputs = check::generate(shape_of(160, 2));
  const test::Result whole = test::run_inputs(inputs, on_fused());
  const std::size_t row = 2 * K * 2;
  for (int64_t cut = 16; cut < 160; cut += test::emulated() ? 48 : 16) {
    Inputs head = inputs;
    head.problem.num_tokens = cut;
    const test::Result first = test::run_inputs(head, on_fused());
    Inputs tail = test::slice(inputs, cut, 160);
    tail.initial_state = first.outputs.final_state;
    const test::Result second = test::run_inputs(tail, on_fused());
    EXPECT_TRUE(test::same_bits(whole.outputs.final_state, second.outputs.final_state)) << cut;
    EXPECT_EQ(std::memcmp(whole.outputs.o.data() + static_cast<std::size_t>(cut) * row,
                          second.outputs.o.data(), second.outputs.o.size()),
              0)
        << cut;
  }
}

/// Inputs of which v goes from 2^-20 to 2^20 and back.
Inputs with_values_of_any_size(const check::GenerateOptions& options) {
  Inputs inputs = check::generate(options);
  const Problem& p = inputs.problem;
  const int64_t row = p.num_value_heads * p.value_dim;
  test::scale_by(&inputs.v, p.v.dtype, [row](int64_t i) {
    constexpr int kExponents[] = {0, -20, 12, 20, -3};
    return std::exp2(kExponents[i / row / 16 % 5]);
  });
  return inputs;
}

/// Rollouts rest on it (python/libkda/rollout.py). With gates in fp32 operands are bf16, and a
/// state is all that a piece takes over.
TEST_P(FusedBf16, PiecesOf16HaveTheBitsOfOneRunWithGatesInFp32) {
  const int64_t tokens = 103, row = K * 2;
  for (const Regime regime : regimes()) {
    check::GenerateOptions options = shape_of(tokens, 1);
    options.regime = regime;
    Inputs inputs = with_values_of_any_size(options);
    widen_gates(&inputs);
    const test::Result whole = test::run_inputs(inputs, on_fused());
    io::Buffer state = inputs.initial_state;
    for (int64_t begin = 0; begin < tokens; begin += 16) {
      Inputs piece = test::slice(inputs, begin, std::min(begin + 16, tokens));
      piece.initial_state = state;
      const test::Result result = test::run_inputs(piece, on_fused());
      state = result.outputs.final_state;
      EXPECT_EQ(std::memcmp(whole.outputs.o.data() + begin * row, result.outputs.o.data(),
                            result.outputs.o.size()),
                0)
          << check::regime_name(regime) << " " << begin;
    }
    EXPECT_TRUE(test::same_bits(whole.outputs.final_state, state)) << check::regime_name(regime);
  }
}

TEST_P(Fused, EqualBitsInEveryRun) {
  check::GenerateOptions options = shape_of(test::long_case(2000), 4);
  options.regime = Regime::kSoftplus;
  const Inputs inputs = check::generate(options);
  for (const test::RunOptions& run : whole_and_in_segments()) {
    const test::Result first = test::run_inputs(inputs, run);
    for (int i = 0; i < (test::emulated() ? 1 : 50); ++i) {
      const test::Result again = test::run_inputs(inputs, run);
      ASSERT_TRUE(test::same_bits(first.outputs.o, again.outputs.o)) << i;
      ASSERT_TRUE(test::same_bits(first.outputs.final_state, again.outputs.final_state)) << i;
    }
  }
}

TEST_P(FusedBf16, RowsOnBothSidesOfTheAnchorsRange) {
  expect_within(test::paced(K, K, dtype), "paced");
}

TEST_P(FusedBf16, RunsThatLeaveTheAnchorsRangeAndComeBack) {
  for (const float down : {-52.0f, -62.0f, -66.0f})
    expect_within(test::falls_and_grows(K, K, down), "down " + std::to_string(down));
}

/// Scores of softplus gates have 216 powers of two in fp16, 144 in bf16: totals of a run on both
/// sides of each, all in one channel or spread over all.
TEST_P(Fused, SoftplusGatesOnBothSidesOfTheAnchorsRange) {
  check::GenerateOptions options = shape_of(96, 2);
  options.regime = Regime::kTrainedSoftplus;
  Inputs inputs = check::generate(options);
  fill(&inputs.A_log, 0);
  fill(&inputs.dt_bias, 0);
  for (const float total : {60.0f, 79.0f, 98.0f, 102.0f, 148.0f, 151.0f, 400.0f})
    for (const int64_t step : {int64_t{1}, K}) {
      Inputs changed = inputs;
      for (int64_t i = 0; i < 96 * 2 * K; i += step)
        store_element(changed.g.data(), dtype, i, total / 16);
      const std::string what = std::to_string(total) + " every " + std::to_string(step);
      expect_within(changed, what);
      if (fp16) continue;
      widen_gates(&changed);
      expect_within(changed, what + ", in fp32");
    }
}

/// exp(A_log) from 0 to infinity, raw gates beyond what exp() holds.
TEST_P(Fused, SoftplusGatesOfAnySize) {
  check::GenerateOptions options = shape_of(80, 2);
  options.regime = Regime::kTrainedSoftplus;
  const Inputs inputs = check::generate(options);
  for (const float A_log : {-200.0f, -30.0f, -8.0f, 0.0f, 5.0f, 80.0f})
    for (const float raw : {-500.0f, -60.0f, 60.0f, 100.0f, 3e4f}) {
      Inputs changed = inputs;
      changed.A_log.as<float>()[1] = A_log;
      for (int64_t i = 0; i < 80 * 2 * K; i += 37) store_element(changed.g.data(), dtype, i, raw);
      expect_within(changed, "A_log " + std::to_string(A_log) + ", g " + std::to_string(raw));
    }
}

/// Decays so slow that an error of a token's would add up over all of them.
TEST_P(Fused, SlowSoftplusGatesAddUp) {
  const int64_t tokens = test::long_case(12000);
  check::GenerateOptions options = shape_of(tokens, 2);
  options.regime = Regime::kTrainedSoftplus;
  options.initial_state = true;
  Inputs inputs = check::generate(options);
  fill(&inputs.A_log, 2);  // exp(2) log(1 + exp(x)) = 1 / tokens
  fill(&inputs.dt_bias, static_cast<float>(-2 - std::log(static_cast<double>(tokens))));
  inputs.dt_bias.as<float>()[K] = 3;  // so the second head forgets fast
  for (int64_t i = 0; i < tokens * 2 * K; ++i) {
    store_element(inputs.g.data(), dtype, i, 0);
    store_element(inputs.v.data(), dtype, i, 0);
  }
  for (int64_t i = 0; i < tokens * 2; ++i) store_element(inputs.beta.data(), dtype, i, -40);
  const test::Result result = test::run_inputs(inputs, on_fused());
  double off = 0;
  for (int64_t i = 0; i < 2 * K * K; ++i) {
    if (i / K == K) continue;  // that channel
    const double start = inputs.initial_state.as<float>()[i];
    off = std::max(off, std::abs(result.outputs.final_state.as<float>()[i] / start - std::exp(-1)));
  }
  test::note("slow softplus gates", off, 0);
  EXPECT_LE(off, 1e-4);  // 2^-22 a run
}

/// What follows a token may put its run out of the anchored form's range, or not.
TEST_P(FusedBf16, CausalToTheBitWhereRowsLeaveTheAnchorsRange) {
  const Inputs inputs = test::paced(K, K, dtype);
  const test::Result before = test::run_inputs(inputs, on_fused());
  for (int64_t cut = 0; cut <= 140; cut += test::emulated() ? 9 : 1)
    for (const float gate : {-0.01f, -30.0f}) {
      Inputs changed = inputs;
      for (int64_t i = cut * K; i < 140 * K; ++i) store_element(changed.g.data(), dtype, i, gate);
      const test::Result after = test::run_inputs(changed, on_fused());
      ASSERT_TRUE(same_tokens(before, after, 0, cut, K * 2)) << cut << " gate " << gate;
    }
}

TEST_P(Fused, CausalToTheBitAtEveryToken) {
  check::GenerateOptions options = shape_of(140, 1);
  options.regime = Regime::kTrained;
  const Inputs inputs = check::generate(options);
  for (const test::RunOptions& run : whole_and_in_segments()) {
    const test::Result before = test::run_inputs(inputs, run);
    for (int64_t cut = 0; cut <= 140; cut += test::emulated() ? 9 : 1) {
      Inputs changed = inputs;
      test::scramble_from(&changed, cut, static_cast<uint64_t>(cut));
      const test::Result after = test::run_inputs(changed, run);
      ASSERT_TRUE(same_tokens(before, after, 0, cut, K * 2)) << cut;
    }
  }
}

void multiply(io::Buffer* tensor, DType dtype, int64_t begin, int64_t end, float by) {
  for (int64_t i = begin; i < end; ++i)
    store_element(tensor->data(), dtype, i, load_element(tensor->data(), dtype, i) * by);
}

/// Gates and sigmoids that bound all factors: operands are fp16, which does not hold any number.
TEST_P(Fused, ValuesAndStatesOfAnySize) {
  const Inputs inputs = check::generate(shape_of(140, 2));
  for (const float by : {1e-30f, 1e-9f, 1e-3f, 7.0f, 100.0f, 1e4f, 1e12f, 1e28f})
    for (const bool state : {false, true}) {
      Inputs changed = inputs;
      multiply(&changed.v, dtype, 0, 140 * 2 * K, held(by));
      if (state) multiply(&changed.initial_state, DType::kFloat32, 0, 2 * K * K, by);
      const std::string what = "v by " + std::to_string(by) + (state ? ", the state too" : "");
      fp16&& state&& by > 1e4f ? expect_states_within(changed, what) : expect_within(changed, what);
    }
}

TEST_P(Fused, NormsOfAnySize) {
  const check::GenerateOptions options = shape_of(100, 2);
  for (const Inputs& inputs : {check::generate(options), softplus_gates(options, true)})
    for (const float by : {0.0f, 1e-12f, 1e-3f, 0.03f, 1e3f, 1e15f})
      for (const bool q : {false, true}) {
        Inputs changed = inputs;
        multiply(q ? &changed.q : &changed.k, dtype, 37 * 2 * K, 51 * 2 * K, held(by));
        expect_within(changed, std::string(q ? "q by " : "k by ") + std::to_string(by));
      }
}

TEST_P(Fused, CausalToTheBitWhereValuesJump) {
  const Inputs inputs = check::generate(shape_of(70, 1));
  const test::Result before = test::run_inputs(inputs, on_fused());
  for (const float by : {30.0f, 1e3f, 1e9f, 1e30f})
    for (int64_t cut = 0; cut <= 70; cut += test::emulated() ? 9 : 1) {
      Inputs changed = inputs;
      multiply(&changed.v, dtype, cut * K, 70 * K, held(by));
      const test::Result after = test::run_inputs(changed, on_fused());
      ASSERT_TRUE(same_tokens(before, after, 0, cut, K * 2)) << cut << " by " << by;
      if (cut % 27 == 0) expect_within(changed, "from " + std::to_string(cut));
    }
}

/// Norms that operands in fp16 cannot take as they are have runs made again.
TEST_P(Fused, CausalToTheBitWhereNormsJump) {
  const check::GenerateOptions options = shape_of(70, 1);
  for (const Inputs& inputs : {check::generate(options), softplus_gates(options, true)}) {
    const test::Result before = test::run_inputs(inputs, on_fused());
    for (const float by : {1e-6f, 0.02f, 1e4f})
      for (const bool q : {false, true})
        for (int64_t cut = 0; cut <= 70; cut += test::emulated() ? 9 : 1) {
          Inputs changed = inputs;
          multiply(q ? &changed.q : &changed.k, dtype, cut * K, 70 * K, held(by));
          const test::Result after = test::run_inputs(changed, on_fused());
          ASSERT_TRUE(same_tokens(before, after, 0, cut, K * 2))
              << cut << (q ? " q by " : " k by ") << by;
        }
  }
}

/// So have softplus gates whose exponentials, or products of them, leave fp32.
TEST_P(Fused, CausalToTheBitWhereSoftplusGatesJump) {
  for (const float A_log : {-5.0f, 0.0f, kFastALog, 6.0f}) {
    Inputs inputs = softplus_gates(shape_of(70, 1), A_log == kFastALog);
    fill(&inputs.A_log, A_log);
    const test::Result before = test::run_inputs(inputs, on_fused());
    for (const float gate : {15.0f, 40.0f, 200.0f})
      for (int64_t cut = 0; cut <= 70; cut += test::emulated() ? 9 : 1) {
        Inputs changed = inputs;
        for (int64_t i = cut * K; i < 70 * K; i += 3)
          store_element(changed.g.data(), dtype, i, gate);
        const test::Result after = test::run_inputs(changed, on_fused());
        ASSERT_TRUE(same_tokens(before, after, 0, cut, K * 2))
            << cut << " A_log " << A_log << " gate " << gate;
      }
  }
}

/// Relative error of elements [begin, end) of x; `exact` is fp32.
double relative_error(const io::Buffer& x, DType dtype, const io::Buffer& exact, int64_t begin,
                      int64_t end) {
  double off = 0, all = 0;
  for (int64_t i = begin; i < end; ++i) {
    const double truth = load_element(exact.data(), DType::kFloat32, i);
    const double lack = load_element(x.data(), dtype, i) - truth;
    off += lack * lack, all += truth * truth;
  }
  return std::sqrt(off / all);
}
test::Result run_oracle(const Inputs& inputs) {
  return test::run_inputs(inputs, {.plan = test::with_backend("oracle")});
}

/// Each token's own error, once a chunk has gone by: outputs behind a jump down are small beside
/// those before it.
TEST_P(Fused, SmallValuesBehindLargeOnes) {
  check::GenerateOptions options = shape_of(200, 1);
  options.regime = Regime::kStrong;
  Inputs inputs = check::generate(options);
  constexpr int64_t kCut = 90;
  multiply(&inputs.v, dtype, 0, kCut * K, held(1e6f));
  multiply(&inputs.v, dtype, kCut * K, 200 * K, fp16 ? 1e-2f : 1e-6f);
  const test::Result result = test::run_inputs(inputs, on_fused()), exact = run_oracle(inputs);
  for (int64_t token = kCut + 80; token < 200; ++token)
    ASSERT_LE(relative_error(result.outputs.o, dtype, exact.outputs.o, token * K, (token + 1) * K),
              2e-2)
        << token;
}

/// What operands in fp16 are for: with those in bf16 slow gates have 3.5e-3 and 2e-3. Gates in fp32
/// leave no room for them.
TEST_P(Fused, ErrorsOfOperandsInFp16) {
  const int64_t tokens = test::long_case(1000);
  const auto expect_errors = [&](const Inputs& inputs, double o, double state,
                                 const std::string& what) {
    const test::Result result = test::run_inputs(inputs, on_fused()), exact = run_oracle(inputs);
    const double of_o = relative_error(result.outputs.o, dtype, exact.outputs.o, 0, tokens * 2 * K);
    const double of_state = relative_error(result.outputs.final_state, DType::kFloat32,
                                           exact.outputs.final_state, 0, 2 * K * K);
    test::note(what, of_o, of_state);
    EXPECT_LE(of_o, o) << what;
    EXPECT_LE(of_state, state) << what;
  };
  for (const Regime regime : {Regime::kStrong, Regime::kSlow, Regime::kTrained, Regime::kSoftplus,
                              Regime::kTrainedSoftplus}) {
    check::GenerateOptions options = shape_of(tokens, 2);
    options.regime = regime;
    Inputs inputs = check::generate(options);
    const std::string name = check::regime_name(regime);
    if (fp16) {
      expect_errors(inputs, 6e-4, 5e-4, name);
      continue;
    }
    expect_errors(inputs, 2.2e-3, 1e-3, name);
    widen_gates(&inputs);
    expect_errors(inputs, 4.2e-3, 3.2e-3, name + ", gates in fp32");
  }
}

TEST_P(Fused, PoisonInOneSequenceReachesNoOther) {
  check::GenerateOptions options = shape_of(0, 2);
  options.num_value_heads = 4;
  options.seq_lens = {70, 90, 150};
  const Inputs inputs = check::generate(options);
  Inputs poisoned = inputs;
  test::poison_rows(&poisoned, 70, 160);
  for (const test::RunOptions& run : whole_and_in_segments()) {
    const test::Result clean = test::run_inputs(inputs, run);
    const test::Result after = test::run_inputs(poisoned, run);
    const std::size_t row = 4 * K * 2, state = 4 * state_bytes;
    EXPECT_TRUE(same_tokens(clean, after, 0, 70, row));
    EXPECT_TRUE(same_tokens(clean, after, 160, 310, row));
    for (const std::size_t n : {std::size_t{0}, std::size_t{2}})
      EXPECT_EQ(std::memcmp(clean.outputs.final_state.data() + n * state,
                            after.outputs.final_state.data() + n * state, state),
                0);
  }
}

/// Strong gates forget all but that: also where what they would correct is multiplied by zeros.
TEST_P(Fused, SegmentsKeepWhatIsNotANumber) {
  check::GenerateOptions options = shape_of(700, 1);
  options.regime = Regime::kStrong;
  options.initial_state = true;
  Inputs inputs = check::generate(options);
  const float infinity = std::numeric_limits<float>::infinity();
  std::memcpy(inputs.initial_state.data() + 5 * sizeof(float), &infinity, sizeof(float));
  for (const test::RunOptions& run : whole_and_in_segments()) {
    const test::Result result = test::run_inputs(inputs, run);
    for (int64_t i = 0; i < 700 * K; ++i)
      ASSERT_EQ(std::isnan(load_element(result.outputs.o.data(), dtype, i)), i % K == 5) << i / K;
  }
}

TEST_P(Fused, AloneEqualsInABatch) {
  check::GenerateOptions options = shape_of(0, 2);
  options.seq_lens = {test::long_case(1300), 65, test::long_case(700)};
  for (const Regime regime : {Regime::kTrained, Regime::kSoftplus}) {
    options.regime = regime;
    EXPECT_TRUE(test::same_bits_alone(check::generate(options), on_fused()))
        << check::regime_name(regime);
  }
}

/// Fewer clusters than streams: a cluster goes through some of them, and streams are cut.
TEST_P(Fused, EqualBitsOnAnyNumberOfSms) {
  check::GenerateOptions packed = shape_of(0, 1);
  packed.num_value_heads = 3;
  packed.seq_lens = {70, 200, 1, 0, 64, test::long_case(2000), 0, 33};
  check::GenerateOptions dense = shape_of(200, 3);
  dense.batch = 5;
  for (const bool checkpoints : {false, true})
    for (const check::GenerateOptions& options : {packed, dense}) {
      Inputs inputs = check::generate(options);
      if (checkpoints) {
        inputs = softplus_gates(options, false);
        make_fast(&inputs, 1);  // one of three heads
        int64_t count = 0;
        for (int64_t n = 0; n < inputs.problem.num_sequences; ++n)
          count +=
              (inputs.cu_seqlens.empty() ? 200
                                         : inputs.cu_seqlens[static_cast<std::size_t>(n) + 1] -
                                               inputs.cu_seqlens[static_cast<std::size_t>(n)]) /
              48;
        inputs.problem.checkpoints =
            StateDesc{.tensor = contiguous(DType::kFloat32, {count, 3, K, K}), .num_slots = count};
        inputs.problem.checkpoint_every = 48;
      }
      test::RunOptions run = on_fused();
      run.num_sms = 1000;  // a cluster each
      const test::Result each = test::run_inputs(inputs, run);
      const std::vector<int32_t> cards =
          test::emulated() ? std::vector{4, 14} : std::vector{2, 4, 6, 10, 14, 22, 40};
      for (const int32_t sms : cards) {
        run.num_sms = sms;
        const test::Result shared = test::run_inputs(inputs, run);
        EXPECT_TRUE(test::same_bits(each.outputs.o, shared.outputs.o)) << sms;
        EXPECT_TRUE(test::same_bits(each.outputs.final_state, shared.outputs.final_state)) << sms;
        EXPECT_TRUE(test::same_bits(each.outputs.checkpoints, shared.outputs.checkpoints)) << sms;
      }
    }
}

TEST_P(FusedSegments, EqualBitsOfSegmentsOnAnyNumberOfSms) {
  const Inputs inputs = check::generate(shape_of(1500, 2));
  test::RunOptions run = in_segments(3, SegmentMethod::kOnePass);
  run.num_sms = 1000;
  const test::Result each = test::run_inputs(inputs, run);
  for (const int32_t sms : {4, 14}) {  // with 4, clusters hand on and a block corrects 192 tokens
    run.num_sms = sms;
    const test::Result shared = test::run_inputs(inputs, run);
    EXPECT_TRUE(test::same_bits(each.outputs.o, shared.outputs.o)) << sms;
    EXPECT_TRUE(test::same_bits(each.outputs.final_state, shared.outputs.final_state)) << sms;
  }
}

TEST(FusedPlan, KeepsStatesBetweenShares) {
  const auto workspace = [](int64_t K, int32_t num_sms, int32_t capability = 90) {
    check::GenerateOptions options = test::shape16(70, 3, K, K);
    options.batch = 5;
    const Inputs inputs = check::generate(options);
    Plan plan;
    EXPECT_TRUE(make_plan(inputs.problem, {}, gpu_facts(num_sms, capability),
                          test::with_backend("fused"), &plan)
                    .ok());
    return plan.workspace_bytes;
  };
  // Clusters of two SMs, or of one, for 15 streams; with 14 of them: states, what scales them for
  // each thread, and words that they are there.
  EXPECT_EQ(workspace(128, 30), 0u);
  EXPECT_EQ(workspace(128, 28), 14 * (128 * 128 * 4 + 2 * 2 * 128 * 4 + 64));
  EXPECT_EQ(workspace(64, 15), 0u);
  EXPECT_EQ(workspace(64, 14), 14 * (64 * 64 * 4 + 2 * 128 * 4 + 32));
  // The portable form has blocks of their own for 64 columns of V.
  EXPECT_EQ(workspace(128, 30, 80), 0u);
  EXPECT_EQ(workspace(128, 28, 80), 28 * (64 * 128 * 4 + 2 * 128 * 4 + 32));
  EXPECT_EQ(workspace(64, 14, 120), 14 * (64 * 64 * 4 + 2 * 128 * 4 + 32));
}

/// So that none has the key of a graph's launch when that runs again.
TEST_P(Fused, WordsBetweenSharesAreClearedByTheirReaders) {
  test::RunOptions run = on_fused();
  run.num_sms = static_cast<int32_t>(K / 64 * 3);  // 3 clusters for 4 heads
  test::OnDevice call(check::generate(shape_of(600, 4)), run);
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(call.run().ok());
    check::synchronize_device();
    std::vector<unsigned char> workspace(call.workspace.size());
    call.workspace.download(workspace.data(), workspace.size());
    int cleared = 0;
    for (const WorkspaceBlock& block : call.plan.workspace)
      if (block.name == "handoff_flags")
        for (std::size_t at = 0; at < block.bytes; at += sizeof(uint64_t)) {
          uint64_t word = 0;
          std::memcpy(&word, workspace.data() + block.offset + at, sizeof(word));
          ASSERT_TRUE(word == 0 || word == ~uint64_t{0}) << "a key is left, or half of one";
          cleared += word == 0;
        }
    // 4 warps for each 64 columns of V of each state that is handed on: 2 by clusters, and at
    // K = V = 128 4 by the 6 blocks of the portable form.
    EXPECT_EQ(cleared, 2 * K / 64 * 4);
  }
}

TEST_P(FusedSegments, SegmentsInEveryRegime) {
  std::size_t turn = 0;
  for (const Regime regime : regimes()) {
    check::GenerateOptions options = shape_of(0, 1);
    options.num_value_heads = 2;
    options.seq_lens = {test::long_case(1500), 40, 0, test::long_case(700)};
    options.regime = regime;
    options.initial_state = true;
    const Inputs inputs = check::generate(options);
    for (const SegmentMethod method : kMethods)
      for (const int64_t count : test::in_turn<int64_t>(turn++, {2, 3, 16}))
        test::expect_within(inputs, in_segments(count, method), "cuda.sm90.fused",
                            std::string(check::regime_name(options.regime)) + " in " +
                                std::to_string(count) + " segments");
  }
}

/// Outputs of segments are rounded once, when they are corrected, whatever the size of v, of states
/// and of the scale; sequences begin at any token.
TEST_P(FusedSegments, SegmentsAreAsExactAsOneRun) {
  std::size_t turn = 0;
  for (const Regime regime : {Regime::kStrong, Regime::kSlow, Regime::kTrainedSoftplus})
    for (const auto& [by, scale] : test::in_turn<std::pair<float, double>>(
             turn++, {{1.0f, 0.0}, {0x1p20f, 0x1p-12}, {0x1p-30f, 0x1p10}})) {
      check::GenerateOptions options = shape_of(0, 1);
      options.num_value_heads = 2;
      options.seq_lens = {23, test::long_case(900), 340};
      options.regime = regime;
      options.initial_state = true;
      Inputs inputs = check::generate(options);
      multiply(&inputs.v, dtype, 0, static_cast<int64_t>(inputs.v.size()) / 2, held(by));
      multiply(&inputs.initial_state, DType::kFloat32, 0,
               static_cast<int64_t>(inputs.initial_state.size()) / 4, by);
      if (scale > 0) inputs.problem.scale = scale;
      expect_as_exact_in_segments(
          inputs, std::string(check::regime_name(regime)) + ", v by " + std::to_string(by));
    }
}

TEST_P(FusedSegments, SegmentsOfBatchesAreAsExactAsOneRun) {
  check::GenerateOptions options = shape_of(test::long_case(406), 1);
  options.batch = 5;
  options.regime = Regime::kSlow;
  expect_as_exact_in_segments(check::generate(options), "a batch");
}

TEST_P(FusedSegments, SegmentsBehindStatesOfZerosOrNext) {
  for (const float by : {0.0f, 0x1p-125f}) {
    check::GenerateOptions options = shape_of(300, 1);
    options.regime = Regime::kSlow;
    options.initial_state = true;
    Inputs inputs = check::generate(options);
    multiply(&inputs.v, dtype, 0, 192 * K, 0);
    multiply(&inputs.initial_state, DType::kFloat32, 0, K * K, by);
    for (const int64_t count : {2, 5})
      test::expect_within(inputs, in_segments(count, SegmentMethod::kOnePass), "cuda.sm90.fused",
                          "a state that is nothing");
  }
}

/// Tokens at which the transitions of the segments behind first ones stopped, [segments, HV].
std::vector<int64_t> stops_of(test::OnDevice& call) {
  std::vector<unsigned char> workspace(call.workspace.size());
  call.workspace.download(workspace.data(), workspace.size());
  const auto* tokens = static_cast<const int64_t*>(
      plan::find_block(call.plan, workspace.data(), stage::kExitToken.name));
  const auto behind = static_cast<int64_t>(call.plan.segments.size()) - call.problem.num_sequences;
  return {tokens, tokens + behind * call.problem.num_value_heads};
}

/// The first of two heads has strong gates: that is seen after the first 1,024 tokens, before the
/// third. The gates of the other one let it run on.
TEST_P(FusedSegments, TransitionsStopWhereTheyAreSmall) {
  check::GenerateOptions options = shape_of(0, 1);
  options.num_value_heads = 2;
  options.seq_lens = {40, 6200};
  if (!test::emulated()) options.seq_lens = {40, 10300, 0, 4200};
  options.initial_state = true;
  options.regime = Regime::kMixed;
  const Inputs inputs = check::generate(options);
  const test::RunOptions run = in_segments(2, SegmentMethod::kOnePass);
  test::expect_within(inputs, run, "cuda.sm90.fused", "transitions that stop");
  test::OnDevice call(inputs, run);
  ASSERT_TRUE(call.plan.early_exit);
  ASSERT_TRUE(call.run().ok());
  check::synchronize_device();
  const std::vector<int64_t> stops = stops_of(call);
  std::size_t n = 0;
  for (const Segment& segment : call.plan.segments) {
    if (segment.begin == call.plan.cu_seqlens[static_cast<std::size_t>(segment.sequence)]) continue;
    ASSERT_LT(n + 1, stops.size());
    EXPECT_EQ(stops[n++], segment.begin + 2048);
    EXPECT_GE(stops[n++], std::min(segment.end, segment.begin + 4096));
  }
  EXPECT_EQ(n, stops.size());
}

/// Rounded to multiples of fp16's least number, a transition that is not looked at would run on.
TEST_P(FusedBf16, TransitionsStopAsSoonInFp16) {
  if (is_portable()) GTEST_SKIP() << fused_row() << " has no segments";
  check::GenerateOptions options = shape_of(0, 1);
  options.num_value_heads = 2;
  options.seq_lens = {test::emulated() ? 12900 : 17000};
  Inputs inputs = check::generate(options);
  const auto stops = [&] {
    test::OnDevice call(inputs, in_segments(2, SegmentMethod::kOnePass));
    EXPECT_TRUE(call.plan.early_exit);
    EXPECT_TRUE(call.run().ok());
    check::synchronize_device();
    return stops_of(call);
  };
  const std::vector<int64_t> in_fp16 = stops();
  widen_gates(&inputs);
  EXPECT_EQ(in_fp16, stops());
}

/// A state that is not finite reaches all outputs behind it, also where its transition is small.
TEST_P(FusedSegments, StatesThatAreNotFinitePassTransitionsThatStop) {
  constexpr int64_t kTokens = 5000;
  check::GenerateOptions options = shape_of(kTokens, 1);
  options.regime = Regime::kStrong;
  Inputs inputs = check::generate(options);
  constexpr int64_t kToken = 100, kColumn = 5;
  store_element(inputs.v.data(), dtype, kToken * K + kColumn,
                std::numeric_limits<float>::infinity());
  const test::Result result = test::run_inputs(inputs, in_segments(2, SegmentMethod::kOnePass));
  ASSERT_TRUE(result.plan.early_exit);
  for (int64_t token = kToken + 1; token < kTokens; ++token)
    for (const int64_t column : {kColumn, kColumn + 1})
      ASSERT_EQ(std::isnan(load_element(result.outputs.o.data(), dtype, token * K + column)),
                column == kColumn)
          << "token " << token << ", column " << column;
}

TEST_P(FusedSegments, SegmentsWhereThePlannerWantsThem) {
  check::GenerateOptions options = shape_of(2048, 1);
  options.initial_state = true;
  test::RunOptions run = on_fused();
  run.plan.context_parallel = SegmentPolicy::kAuto;
  for (const Regime regime : {Regime::kTrained, Regime::kStructured}) {
    options.regime = regime;
    const Inputs inputs = check::generate(options);
    const Plan plan = test::run_inputs(inputs, run).plan;
    EXPECT_TRUE(plan.segmented);
    EXPECT_EQ(plan.resolved.segment_method, SegmentMethod::kOnePass);
    test::expect_within(inputs, run, "cuda.sm90.fused", "segments of the planner");
  }
}

TEST_P(FusedSegments, SegmentsOfBatchesWithoutStates) {
  check::GenerateOptions options = shape_of(test::long_case(400), 2);
  options.batch = 3;
  for (const SegmentMethod method : kMethods)
    test::expect_within(check::generate(options), in_segments(3, method), "cuda.sm90.fused",
                        "batch in segments");
}

/// 16 sequences of three segments are 80 units, of which 41 at most come in kernel parameters.
TEST_P(FusedSegments, MoreSegmentsThanComeWithTheKernel) {
  check::GenerateOptions options = shape_of(0, 1);
  options.seq_lens.assign(16, 130);
  options.initial_state = true;
  for (const SegmentMethod method : kMethods)
    test::expect_within(check::generate(options), in_segments(3, method), "cuda.sm90.fused",
                        "many segments");
}

TEST_P(FusedSegments, FinalStatesOfSegmentsInEveryLayoutAndType) {
  for (const auto layout : {StateLayout::kKV, StateLayout::kVK})
    for (const DType of_states : {DType::kFloat32, DType::kBFloat16}) {
      Inputs inputs = check::generate(shape_of(300, 2));
      Problem& p = inputs.problem;
      p.state_layout = layout;
      check::want_final_state(&p);
      p.final_state->tensor = contiguous(of_states, {1, 2, K, K});
      test::expect_within(inputs, in_segments(3, SegmentMethod::kOnePass), "cuda.sm90.fused",
                          "final states of segments");
    }
}

/// The stage calls know all segments, those of a one-pass plan too.
TEST_P(FusedSegments, StageCallsAreTheTwoPassForm) {
  check::GenerateOptions options = shape_of(0, 2);
  options.seq_lens = {300, 70, 64};
  options.initial_state = true;
  const Inputs inputs = check::generate(options);
  const test::Result whole =
      test::run_inputs(inputs, in_segments(3, SegmentMethod::kScanMergeForward));
  test::OnDevice call(inputs, in_segments(3, SegmentMethod::kOnePass));
  ASSERT_EQ(call.plan.resolved.segment_method, SegmentMethod::kOnePass);
  const std::size_t bytes = call.plan.segments.size() * 2 * state_bytes;
  check::DeviceBuffer M(bytes), B(bytes), states(bytes);
  const SegmentTensors all{static_cast<float*>(M.data()), static_cast<float*>(B.data()),
                           static_cast<float*>(states.data())};
  for (const auto stage : {segment_scan, segment_merge, segment_forward})
    throw_if_error(stage(call.plan, call.memory->tensors(), all, call.workspace.data(),
                         call.workspace.size(), nullptr));
  call.read();
  EXPECT_TRUE(test::same_bits(whole.outputs.o, call.outputs.o));
  EXPECT_TRUE(test::same_bits(whole.outputs.final_state, call.outputs.final_state));
}

TEST_P(FusedSegments, TwoPassSegmentsAreBitEqualOnceTheStateIsForgotten) {
  check::GenerateOptions options = shape_of(test::long_case(2048), 2);
  options.regime = Regime::kStrong;
  const Inputs inputs = check::generate(options);
  const test::Result serial = test::run_inputs(inputs, on_fused());
  const test::Result cut =
      test::run_inputs(inputs, in_segments(4, SegmentMethod::kScanMergeForward));
  EXPECT_TRUE(test::same_bits(serial.outputs.o, cut.outputs.o));
  EXPECT_TRUE(test::same_bits(serial.outputs.final_state, cut.outputs.final_state));
}

TEST(FusedPlan, SaysWhyItDeclines) {
  const DeviceFacts h200 = gpu_facts(132, 90);
  const auto reason = [&](const check::GenerateOptions& options, const DeviceFacts& device) {
    const Inputs inputs = check::generate(options);
    Plan plan;
    return make_plan(inputs.problem, inputs.cu_seqlens, device,
                     test::with_backend("cuda.sm90.fused"), &plan)
        .message();
  };
  EXPECT_EQ(reason(shape128(70, 1), h200), "");
  EXPECT_NE(reason(test::shape16(70, 1, 64, 128), h200)
                .find("K = 64, V = 128; needs 64 for both, or 128"),
            std::string::npos);
  EXPECT_EQ(reason(test::shape16(70, 1, 128, 128, DType::kFloat16), h200), "");
  check::GenerateOptions options = test::shape16(70, 1, 128, 128, DType::kFloat16);
  options.regime = Regime::kLog;
  EXPECT_NE(reason(options, h200).find("q is fp16, for which it needs gates and beta of the call"),
            std::string::npos);
  EXPECT_NE(reason(test::shape16(70, 1, 128, 128, DType::kFloat32), h200)
                .find("q is fp32; needs bf16 or fp16"),
            std::string::npos);
  EXPECT_NE(reason(shape128(70, 1), gpu_facts(148, 100)).find("is for compute capability 90"),
            std::string::npos);
  EXPECT_NE(reason(shape128(70, 1), gpu_facts(108, 80)).find("needs compute capability 90"),
            std::string::npos);
}

TEST(FusedPlan, ThePortableRowSaysWhatItServes) {
  const auto plan_of = [](const check::GenerateOptions& options, const DeviceFacts& device,
                          PlanOptions asked, Plan* plan) {
    const Inputs inputs = check::generate(options);
    asked.backend = "cuda.sm80.fused";
    return make_plan(inputs.problem, inputs.cu_seqlens, device, asked, plan);
  };
  Plan plan;
  for (const int32_t capability : {80, 86, 89, 100, 120}) {
    const DeviceFacts device = gpu_facts(100, capability);
    ASSERT_TRUE(plan_of(shape128(70, 2), device, {}, &plan).ok()) << capability;
    EXPECT_FALSE(plan.segmented);
    EXPECT_EQ(plan.kernels.front().kernel, "portable_prefill_fp16");
    EXPECT_GT(plan.cost.fused_us, 0) << capability;
    const Inputs inputs = check::generate(shape128(70, 2));
    ASSERT_TRUE(make_plan(inputs.problem, {}, device, {}, &plan).ok());
    EXPECT_EQ(plan.implementation, "cuda.sm80.staged") << "two heads leave it idle";
  }
  const auto reason = [&](const check::GenerateOptions& options, int32_t capability,
                          const PlanOptions& asked = {}) {
    return plan_of(options, gpu_facts(100, capability), asked, &plan).message();
  };
  const auto has = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(reason(shape128(70, 1), 90), "none of it for Hopper"));
  EXPECT_TRUE(has(reason(shape128(70, 1), 75), "needs compute capability 80"));
  check::GenerateOptions head_gates = shape128(70, 2);
  head_gates.regime = Regime::kLog;
  head_gates.head_gates = true;
  EXPECT_TRUE(has(reason(head_gates, 80), "g has one gate a head; needs a gate a channel"));
  EXPECT_TRUE(has(reason(test::shape16(70, 1, 64, 128), 86), "needs 64 for both, or 128"));
  EXPECT_TRUE(has(reason(shape128(700, 1), 80, test::fixed_segments(2)),
                  "context_parallel asks for segments; it has none"));
  PlanOptions asked;
  asked.spans = true;
  EXPECT_TRUE(has(reason(shape128(700, 1), 80, asked), "spans ask for segments; it has none"));
  asked = {};
  asked.intra_form = IntraForm::kToken;
  EXPECT_TRUE(has(reason(shape128(700, 1), 80, asked), "intra_form asks for a form of stages"));
  asked = {};
  asked.keep = KeepPolicy::kChunks;
  EXPECT_TRUE(has(reason(shape128(700, 1), 80, asked), "keeps nothing for a backward"));
}

TEST(FusedPlan, DoesNotCutWhereTheScaleWouldLeaveFp16) {
  for (const double scale : {0.0, 0x1p-25, -0x1p-25, 0x1p25, 0x1p-24, -0x1p24})
    for (const bool half : {true, false}) {
      Inputs inputs = check::generate(shape128(4096, 1));
      if (!half) widen_gates(&inputs);
      inputs.problem.scale = scale;
      Plan plan;
      ASSERT_TRUE(make_plan(inputs.problem, inputs.cu_seqlens, gpu_facts(132, 90),
                            run_in_segments(4, SegmentMethod::kOnePass, DType::kBFloat16).plan,
                            &plan)
                      .ok());
      const bool fits = std::abs(scale) >= 0x1p-24 && std::abs(scale) <= 0x1p24;
      EXPECT_EQ(plan.resolved.segment_method == SegmentMethod::kOnePass, fits || !half)
          << scale << (half ? ", fp16" : ", bf16");
    }
}

TEST(FusedPlan, RunsWhereItIsAskedFor) {
  const Inputs inputs = check::generate(shape128(70, 1));
  PlanOptions segments = test::fixed_segments(2);
  Plan plan;
  ASSERT_TRUE(
      make_plan(inputs.problem, inputs.cu_seqlens, gpu_facts(132, 90), segments, &plan).ok());
  EXPECT_EQ(plan.implementation, "cuda.sm80.staged");
  segments.backend = "fused";
  ASSERT_TRUE(
      make_plan(inputs.problem, inputs.cu_seqlens, gpu_facts(132, 90), segments, &plan).ok());
  EXPECT_EQ(plan.implementation, "cuda.sm90.fused");
  EXPECT_TRUE(plan.segmented);
  ASSERT_TRUE(make_plan(inputs.problem, inputs.cu_seqlens, gpu_facts(132, 90),
                        test::with_backend("fused"), &plan)
                  .ok());
  EXPECT_EQ(plan.implementation, "cuda.sm90.fused");
  EXPECT_EQ(plan.workspace_bytes, 0u);  // no factors in device memory
}

}  // namespace
}  // namespace kda
