// SPDX-License-Identifier: Apache-2.0
// Gated DeltaNet's kernels of Hopper: their formulas, the factors of chunks against float64, and
// forwards against the oracle; what they decline.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <thread>

#include "cuda/gdn/chunk_form.hpp"
#include "cuda/gdn/inputs.hpp"
#include "cuda/gdn/made_cut.hpp"
#include "support/gpu.hpp"
#include "support/graph.hpp"
#include "support/length_tables.hpp"
#include "support/padded.hpp"

#include "cuda/gdn/cost.hpp"
#include "cuda/gdn/factors.hpp"
#include "cuda/launch/blocks.hpp"
#include "cuda/tile/swizzle.hpp"
#include "plan/ledger.hpp"
#include "stage/buffers.hpp"

namespace kda {
namespace {

using check::Inputs;
using test::gdn::ChunkFactors;
using test::gdn::Gates;
using test::gdn::kChunk;
using Doubles = std::vector<double>;

constexpr const char* kName = "cuda.sm90.gdn";

std::vector<int64_t> up_to(int64_t most) {
  std::vector<int64_t> lengths(static_cast<std::size_t>(most));
  std::iota(lengths.begin(), lengths.end(), 1);
  return lengths;
}

Doubles start_of(const Inputs& inputs, int64_t n, int64_t head) {
  if (!inputs.problem.initial_state) return {};
  return cpu::oracle::load_state(inputs.problem, *inputs.problem.initial_state,
                                 inputs.initial_state.data(), n, head);
}

double distance(const Doubles& x, const Doubles& reference) {
  double error = 0, size = 0;
  for (std::size_t i = 0; i < reference.size(); ++i)
    error += std::pow(x[i] - reference[i], 2), size += std::pow(reference[i], 2);
  return size > 0 ? std::sqrt(error / size) : std::sqrt(error);
}

// ---- the formulas, on any machine

TEST(ChunkForm, IsTheRecurrence) {
  for (const Gates gates : test::gdn::kAllGates)
    for (const HeadMap map : {HeadMap::kGrouped, HeadMap::kTiled}) {
      const Inputs inputs = test::gdn::inputs_of({.lengths = {130, 0, 64, 37},
                                                  .H = 2,
                                                  .HV = 6,
                                                  .K = 16,
                                                  .V = 8,
                                                  .gates = gates,
                                                  .map = map});
      for (int64_t n = 0; n < inputs.problem.num_sequences; ++n)
        for (int64_t head = 0; head < inputs.problem.num_value_heads; ++head) {
          const auto at = static_cast<std::size_t>(n);
          const cpu::oracle::Span span{inputs.cu_seqlens[at], inputs.cu_seqlens[at + 1]};
          const Doubles start = start_of(inputs, n, head);
          const test::gdn::ChunkForm form(inputs, span, head, start);
          const cpu::oracle::HeadResult truth =
              cpu::oracle::run_head(inputs.problem, inputs.tensors(), span, head, start);
          ASSERT_EQ(form.o.size(), truth.o.size());
          EXPECT_LT(distance(form.o, truth.o), 1e-11) << test::gdn::name_of(gates) << head;
          EXPECT_LT(distance(form.state, truth.state), 1e-11) << test::gdn::name_of(gates) << head;
        }
    }
}

// ---- the kernels

class Gdn : public test::HopperTest {};

test::RunOptions on_gdn(DType out = DType::kBFloat16) {
  return {.plan = test::with_backend(kName), .out_dtype = out};
}

void expect_within(const Inputs& inputs, const std::string& what,
                   test::RunOptions options = on_gdn()) {
  test::expect_within(inputs, options, kName, what);
}

/// With every sequence cut into so many segments; exact ones have their transitions whatever the
/// gates are.
struct Cut {
  int64_t segments = 2;
  bool exact = false;
};
std::string text_of(const Cut& cut) {
  return std::to_string(cut.segments) + (cut.exact ? " exact segments" : " segments");
}
test::RunOptions in_segments(int64_t count, DType out = DType::kBFloat16) {
  test::RunOptions options{.plan = test::fixed_segments(count), .out_dtype = out};
  options.plan.backend = kName;
  return options;
}
Inputs with(Inputs inputs, const Cut& cut) {
  inputs.problem.batch_invariant = cut.exact;
  return inputs;
}
void expect_within(const Inputs& inputs, const std::string& what, const Cut& cut) {
  expect_within(with(inputs, cut), what + ", " + text_of(cut), in_segments(cut.segments));
}

/// The workspace after a run.
class Workspace {
 public:
  explicit Workspace(const Inputs& inputs, const test::RunOptions& options = on_gdn())
      : call_(inputs, options), bytes_(call_.workspace.size()) {
    throw_if_error(call_.run());
    check::synchronize_device();
    call_.workspace.download(bytes_.data(), bytes_.size());
  }
  const cuda::gdn::Numbers& numbers(int64_t tile) {
    return static_cast<const cuda::gdn::Numbers*>(find(cuda::block::kGdnNumbers))[tile];
  }
  double inverse(int64_t tile, int64_t i, int64_t j) {
    return square(cuda::block::kGdnInverse, tile, i, j);
  }
  double scores(int64_t tile, int64_t i, int64_t j) {
    return square(cuda::block::kGdnScores, tile, i, j);
  }
  /// Element of what lies behind a segment and value head, [HV, K, columns] a segment.
  Doubles matrix(const stage::BufferSpec& spec, int64_t segment, int64_t head, int64_t columns) {
    const Problem& p = call_.problem;
    const auto size = static_cast<std::size_t>(p.key_dim * columns);
    const float* from = static_cast<const float*>(find(spec.name)) +
                        (segment * p.num_value_heads + head) * p.key_dim * columns;
    return {from, from + size};
  }

 private:
  const void* find(const char* name) { return plan::find_block(call_.plan, bytes_.data(), name); }
  double square(const char* name, int64_t tile, int64_t i, int64_t j) {
    const int at = cuda::swizzled(static_cast<int>(i), static_cast<int>(j / 8));
    return load_double(find(name), DType::kBFloat16, tile * cuda::gdn::kSquare + at + j % 8);
  }

  test::OnDevice call_;
  io::Buffer bytes_;
};

/// Expects a square of the kernel to be that of float64 up to two roundings: of an entry to bf16,
/// and of products to tf32, which is relative to the largest entry.
void expect_square(const ChunkFactors& truth, const Doubles& square,
                   const std::function<double(int64_t, int64_t)>& of_kernel,
                   const std::string& what) {
  double largest = 0;
  for (const double x : square) largest = std::max(largest, std::abs(x));
  double error = 0, size = 0;
  for (int64_t i = 0; i < kChunk; ++i)
    for (int64_t j = 0; j < kChunk; ++j) {
      const bool inside = i < truth.tokens && j < i;
      const double x = of_kernel(i, j);
      const double y = inside ? square[ChunkFactors::at(i, j, truth.tokens)] : 0;
      ASSERT_LE(std::abs(x - y), 0x1p-8 * std::abs(y) + 0x1p-10 * largest) << what << i << " " << j;
      ASSERT_TRUE(inside || x == 0) << what << i << " " << j;
      error += (x - y) * (x - y), size += y * y;
    }
  const double rounding = truth.tokens > 16 ? 2.6e-3 : 0x1p-8;  // few do not average
  EXPECT_LE(std::sqrt(error), rounding * std::sqrt(size)) << what;
}

void expect_numbers(const ChunkFactors& truth, const cuda::gdn::Numbers& numbers,
                    const std::string& what) {
  // The exponent of a decay is rounded; what is below 2^-126 is 0.
  const auto near = [&](float x, double y) {
    const double size = std::abs(y), exponent = size > 0 ? std::abs(std::log2(size)) : 0;
    return std::abs(x - y) <= (3e-6 + 1e-7 * exponent) * size + 1e-34;
  };
  for (std::size_t i = 0; i < static_cast<std::size_t>(truth.tokens); ++i) {
    EXPECT_TRUE(near(numbers.row_k[i], truth.row_k[i])) << what << i;
    EXPECT_TRUE(near(numbers.row_q[i], truth.row_q[i])) << what << i;
    EXPECT_TRUE(near(numbers.col_k[i], truth.col_k[i])) << what << i;
    EXPECT_NEAR(numbers.diag[i], truth.diag[i], 1e-6) << what << i;
  }
  for (std::size_t i = static_cast<std::size_t>(truth.tokens); i < kChunk; ++i)
    EXPECT_EQ(numbers.col_k[i], 0) << what << i;
  EXPECT_TRUE(near(numbers.last, truth.last)) << what;
  const double bound = double{numbers.log2_decay} + numbers.log2_growth[0] + numbers.log2_growth[1];
  if (std::isinf(truth.log2_bound))
    EXPECT_LT(bound, -1e5) << what;
  else
    EXPECT_NEAR(bound, truth.log2_bound, 1e-4 + 1e-6 * std::abs(truth.log2_bound)) << what;
}

void expect_factors(const Inputs& inputs, const std::string& name) {
  const Problem& p = inputs.problem;
  Workspace factors(inputs);
  int64_t chunk = 0;
  for (std::size_t n = 0; n + 1 < inputs.cu_seqlens.size(); ++n)
    for (int64_t begin = inputs.cu_seqlens[n]; begin < inputs.cu_seqlens[n + 1]; begin += kChunk) {
      for (int64_t head = 0; head < p.num_value_heads; ++head) {
        const int64_t end = std::min(begin + kChunk, inputs.cu_seqlens[n + 1]);
        const ChunkFactors truth(inputs, {begin, end}, head);
        const int64_t tile = chunk * p.num_value_heads + head;
        const std::string what = name + ", " + std::to_string(truth.tokens) + " tokens, head " +
                                 std::to_string(head) + ": ";
        expect_square(
            truth, truth.inverse, [&](int64_t i, int64_t j) { return factors.inverse(tile, i, j); },
            what + "T' ");
        expect_square(
            truth, truth.scores, [&](int64_t i, int64_t j) { return factors.scores(tile, i, j); },
            what + "A ");
        expect_numbers(truth, factors.numbers(tile), what);
      }
      ++chunk;
    }
}
void expect_factors(const test::gdn::Options& options) {
  expect_factors(test::gdn::inputs_of(options), test::gdn::name_of(options.gates));
}

TEST_F(Gdn, FactorsOfEveryGate) {
  for (const Gates gates : test::gdn::kAllGates)
    expect_factors({.lengths = {64, 30}, .HV = 2, .K = 128, .gates = gates});
}

TEST_F(Gdn, FactorsOfKeysThatAreNotNormalised) {
  expect_factors(test::gdn::growing(Gates::kFirst, 1.2, 1.5), "long keys");
}

TEST_F(Gdn, FactorsOfEveryGroupOfHeads) {
  for (const int64_t group : {1, 2, 3, 4, 6})
    for (const HeadMap map : {HeadMap::kGrouped, HeadMap::kTiled})
      expect_factors({.lengths = {5, 70}, .H = 2, .HV = 2 * group, .K = 96, .map = map});
}

TEST_F(Gdn, FactorsOfGatesOfEveryType) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
    for (const Gates gates : {Gates::kTrained, Gates::kBounded, Gates::kPositive})
      expect_factors({.lengths = {33}, .gates = gates, .gate = type});
}

// ---- forwards

/// Errors over every `step`-th head.
class HeadErrors {
 public:
  explicit HeadErrors(const Inputs& inputs, int64_t step = 1) : inputs_(inputs) {
    for (int64_t n = 0; n < inputs.problem.num_sequences; ++n)
      for (int64_t head = 0; head < inputs.problem.num_value_heads; head += step)
        heads_.push_back({n, head, {}, {}});
    for_each([&](Head& h) {
      h.truth = cpu::oracle::run_head(inputs.problem, inputs.tensors(), span(h), h.head,
                                      start_of(inputs, h.sequence, h.head));
    });
  }

  /// The error of ChunkForm's state with operands in bf16 beside the one in float64.
  double state_in_bf16() {
    for_each([&](Head& h) {
      h.in_bf16 =
          test::gdn::ChunkForm(inputs_, span(h), h.head, start_of(inputs_, h.sequence, h.head),
                               test::gdn::Operands::kBFloat16)
              .state;
    });
    Doubles states, true_states;
    for (const Head& h : heads_) append(states, h.in_bf16), append(true_states, h.truth.state);
    return distance(states, true_states);
  }

  test::WorstErrors of(const test::Result& result) const {
    Doubles o, true_o, states, true_states;
    for (const Head& h : heads_) {
      append(o, cpu::oracle::load_rows(result.problem, result.problem.o, result.outputs.o.data(),
                                       span(h), h.head, inputs_.problem.value_dim));
      append(states,
             cpu::oracle::load_state(result.problem, *result.problem.final_state,
                                     result.outputs.final_state.data(), h.sequence, h.head));
      append(true_o, h.truth.o);
      append(true_states, h.truth.state);
    }
    return {distance(o, true_o), distance(states, true_states)};
  }

 private:
  struct Head {
    int64_t sequence, head;
    cpu::oracle::HeadResult truth;
    Doubles in_bf16;  // the state
  };
  static void append(Doubles& to, const Doubles& x) { to.insert(to.end(), x.begin(), x.end()); }
  /// On all cores.
  template <class Visit>
  void for_each(Visit&& visit) {
    std::atomic<std::size_t> next = 0;
    const auto work = [&] {
      for (std::size_t i; (i = next++) < heads_.size();) visit(heads_[i]);
    };
    std::vector<std::jthread> threads;
    for (int32_t i = 1; i < test::oracle_threads(); ++i) threads.emplace_back(work);
    work();
  }
  cpu::oracle::Span span(const Head& h) const {
    const auto at = static_cast<std::size_t>(h.sequence);
    return {inputs_.offsets()[at], inputs_.offsets()[at + 1]};
  }

  const Inputs& inputs_;
  std::vector<Head> heads_;
};

/// Bounds of relative errors over all heads, with o in bf16. Each is 1.15 times the error of the
/// chunk form (docs/design/gdn.md) computed in float64 from operands that are rounded to bf16, for
/// 1,000 tokens of K = V = 128. A bound of states is at least 0.4e-3.
struct Bound {
  Gates gates;
  double o, state;
};
constexpr Bound kBounds[] = {{Gates::kFirst, 3.22e-3, 0.45e-3},
                             {Gates::kTrained, 3.22e-3, 0.83e-3},
                             {Gates::kStrong, 1.96e-3, 0.4e-3},
                             {Gates::kZero, 3.22e-3, 1.61e-3},
                             {Gates::kNeedle, 3.21e-3, 0.49e-3}};

/// K = V = 128.
Inputs with_bound(const Bound& bound, int64_t tokens, int64_t H, int64_t HV) {
  return test::gdn::inputs_of(
      {.lengths = {tokens}, .H = H, .HV = HV, .K = 128, .V = 128, .gates = bound.gates});
}

void expect_below(const test::WorstErrors& errors, double o, double state,
                  const std::string& what) {
  test::note(what, errors.o, errors.final_state);
  EXPECT_LE(errors.o, o) << what;
  EXPECT_LE(errors.final_state, state) << what;
}

TEST_F(Gdn, ErrorsOfOperandsInBf16) {
  const int64_t H = test::emulated() ? 1 : 2;
  for (const Bound& bound : kBounds) {
    const Inputs inputs = with_bound(bound, test::long_case(1000), H, 2 * H);
    expect_below(HeadErrors(inputs).of(test::run_inputs(inputs, on_gdn())), bound.o, bound.state,
                 test::gdn::name_of(bound.gates));
  }
}

/// Steps of about 1.95.
Inputs equal_keys(int64_t tokens, int64_t H, int64_t HV) {
  Inputs inputs = test::gdn::inputs_of({.lengths = {tokens},
                                        .H = H,
                                        .HV = HV,
                                        .K = 128,
                                        .V = 128,
                                        .gates = Gates::kSlow,
                                        .equal_keys = true});
  check::Random random(5);
  for (int64_t i = 0; i < HV * tokens; ++i)
    store_double(inputs.beta.data(), inputs.problem.beta.dtype, i, 4 + random.normal());
  return inputs;
}

constexpr Bound kEqualKeys = {Gates::kSlow, 95e-3, 47e-3};

TEST_F(Gdn, EqualKeysAndStepsNearTwo) {
  const Inputs inputs = equal_keys(test::long_case(1000), 1, 2);
  expect_below(HeadErrors(inputs).of(test::run_inputs(inputs, on_gdn())), kEqualKeys.o,
               kEqualKeys.state, "equal keys");
}

/// 8,192 tokens of 16/32 heads, whole and cut; every second value head is looked at, which is one a
/// q/k head. Outputs have the same bounds. Errors of states are those of the slowest heads that are
/// drawn, here of others: their bound is 1.15 times what operands in bf16 cost the same heads. With
/// equal keys and steps near 2 a single rounding is felt for long, so that one draw says less.
TEST_F(Gdn, ErrorsAtTheSizeOfALayer) {
  if (test::emulated()) GTEST_SKIP() << "8,192 tokens of 32 heads take minutes on the emulator";
  const auto expect = [](const Inputs& inputs, const Bound& bound, double factor,
                         const std::string& name) {
    HeadErrors errors(inputs, 2);
    const double state = std::max(factor * errors.state_in_bf16(), 0.4e-3);
    test::note(name + ", bounds", bound.o, state);
    expect_below(errors.of(test::run_inputs(inputs, on_gdn())), bound.o, state, name);
    expect_below(errors.of(test::run_inputs(inputs, in_segments(4))), bound.o, state,
                 name + ", 4 segments");
  };
  for (const Bound& bound : kBounds)
    expect(with_bound(bound, 8192, 16, 32), bound, 1.15, test::gdn::name_of(bound.gates));
  expect(equal_keys(8192, 16, 32), kEqualKeys, 1.5, "equal keys");
}

TEST_F(Gdn, EveryGate) {
  for (const Gates gates : test::gdn::kAllGates)
    expect_within(test::gdn::inputs_of({.lengths = {100}, .gates = gates}),
                  test::gdn::name_of(gates));
}

TEST_F(Gdn, OneBiasAHead) {
  expect_within(test::gdn::inputs_of({.lengths = {100}, .bias = true}), "dt_bias [HV]");
}

TEST_F(Gdn, TailsOfEveryLength) {
  expect_within(test::gdn::inputs_of({.lengths = up_to(64), .HV = 1}), "1 to 64 tokens");
}

TEST_F(Gdn, EverySize) {
  std::size_t turn = 0;
  for (const int64_t K : {64, 96, 128, 40})
    for (const int64_t V : test::in_turn<int64_t>(turn++, {128, 256, 192, 72, 64}))
      expect_within(test::gdn::inputs_of({.lengths = {70, 64}, .HV = 1, .K = K, .V = V}),
                    "K = " + std::to_string(K) + ", V = " + std::to_string(V));
  expect_within(test::gdn::inputs_of({.lengths = {65}, .HV = 1, .K = 64, .V = 256}), "V = 256");
}

TEST_F(Gdn, EveryGroupOfHeads) {
  for (const int64_t group : {1, 2, 3, 4, 8})
    for (const HeadMap map : {HeadMap::kGrouped, HeadMap::kTiled})
      expect_within(test::gdn::inputs_of({.lengths = {66}, .H = 2, .HV = 2 * group, .map = map}),
                    std::to_string(group) + " value heads a q/k head");
}

TEST_F(Gdn, StepsOfZeroAndTwo) {
  for (const double beta : {0.0, 2.0}) {
    Inputs inputs = test::gdn::inputs_of({.lengths = {90}});
    test::gdn::set_betas(&inputs, beta);
    expect_within(inputs, "beta = " + std::to_string(beta));
  }
}

/// Two warpgroups share operands where one each would be too many blocks.
TEST_F(Gdn, WidthsOfBlocksHaveTheSameBits) {
  for (const int64_t K : {64, 128}) {
    const Inputs inputs = test::gdn::inputs_of({.lengths = {140}, .K = K, .V = 128});
    test::RunOptions wide = on_gdn();
    wide.num_sms = 2;
    const test::Result a = test::run_inputs(inputs, on_gdn()), b = test::run_inputs(inputs, wide);
    EXPECT_TRUE(test::same_bits(a.outputs.o, b.outputs.o));
    EXPECT_TRUE(test::same_bits(a.outputs.final_state, b.outputs.final_state));
    expect_within(inputs, "two warpgroups", wide);
  }
}

TEST_F(Gdn, TypesScaleAndRowsThatAreNormalised) {
  for (const DType out : {DType::kFloat32, DType::kFloat16, DType::kBFloat16})
    for (const bool l2norm : {true, false}) {
      Inputs inputs = test::gdn::inputs_of({.lengths = {80}, .gates = Gates::kTrained});
      Problem& p = inputs.problem;
      p.scale = -0.3;
      p.qk_l2norm = l2norm;
      for (int64_t i = 0; !l2norm && i < p.num_tokens * p.num_heads * p.key_dim; ++i)
        for (io::Buffer* rows : {&inputs.q, &inputs.k})
          store_double(rows->data(), p.q.dtype, i,
                       load_double(rows->data(), p.q.dtype, i) / std::sqrt(p.key_dim));
      expect_within(inputs, std::string(dtype_name(out)) + (l2norm ? "" : ", rows as they are"),
                    on_gdn(out));
    }
}

TEST_F(Gdn, RowsWithGaps) {
  Inputs inputs = test::gdn::inputs_of({.lengths = {70, 3}, .H = 2, .HV = 4, .K = 72, .V = 72});
  const test::Result dense = test::run_inputs(inputs, on_gdn());
  Problem& p = inputs.problem;
  test::pad_tensor(&inputs.q, &p.q, qk_shape(p), 8);
  test::pad_tensor(&inputs.k, &p.k, qk_shape(p), 8);
  test::pad_tensor(&inputs.v, &p.v, v_shape(p), 8);
  for (auto [rows, desc] : {std::pair{&inputs.g, &p.g}, std::pair{&inputs.beta, &p.beta}})
    *rows = test::spread_tensor(*rows, desc, beta_shape(p), {0, 3 * p.num_value_heads + 2, 3, 0});
  const test::Result spread = test::run_inputs(inputs, on_gdn());
  EXPECT_EQ(spread.plan.implementation, kName);
  EXPECT_TRUE(test::same_bits(dense.outputs.o, spread.outputs.o));
  EXPECT_TRUE(test::same_bits(dense.outputs.final_state, spread.outputs.final_state));
}

/// One row a sequence, without cu_seqlens.
TEST_F(Gdn, BatchesHaveTheBitsOfPackedSequences) {
  Inputs inputs = test::gdn::inputs_of({.lengths = {90, 90, 90}});
  const test::Result packed = test::run_inputs(inputs, on_gdn());
  Problem& p = inputs.problem;
  p.cu_seqlens.reset();
  inputs.cu_seqlens.clear();
  p.batch = 3, p.num_tokens = 90;
  for (TensorDesc* desc : {&p.q, &p.k, &p.v, &p.g, &p.beta})
    desc->strides[0] = 90 * desc->strides[1];
  const test::Result batch = test::run_inputs(inputs, on_gdn());
  EXPECT_TRUE(test::same_bits(packed.outputs.o, batch.outputs.o));
  EXPECT_TRUE(test::same_bits(packed.outputs.final_state, batch.outputs.final_state));
}

TEST_F(Gdn, SequencesDoNotKnowOfEachOther) {
  EXPECT_TRUE(test::same_bits_alone(test::gdn::inputs_of({.lengths = {64, 0, 1, 100}}), on_gdn()));
}

TEST_F(Gdn, NothingDependsOnLaterTokens) {
  const Inputs inputs = test::gdn::inputs_of({.lengths = {100}});
  for (const test::RunOptions& options : {on_gdn(), in_segments(2)}) {
    const test::Result before = test::run_inputs(inputs, options);
    const std::size_t row = before.outputs.o.size() / 100;
    for (const int64_t cut : {1, 17, 40, 64, 99}) {
      Inputs changed = inputs;
      test::scramble_from(&changed, cut, static_cast<uint64_t>(cut));
      const test::Result after = test::run_inputs(changed, options);
      EXPECT_EQ(std::memcmp(before.outputs.o.data(), after.outputs.o.data(),
                            static_cast<std::size_t>(cut) * row),
                0)
          << cut;
    }
  }
}

/// Lengths that only the device knows; tokens of no sequence hold NaN, and their outputs are 0.
TEST_F(Gdn, LengthsOnTheDeviceAlone) {
  const Inputs whole = test::gdn::inputs_of({.lengths = {70, 0, 30, 40}});
  const Inputs padded = test::with_rows_behind(whole);
  for (const test::RunOptions& options : {on_gdn(), in_segments(2)}) {
    test::RunOptions from_bounds = options;
    from_bounds.from_bounds = true;
    const test::Result result = test::run_inputs(padded, from_bounds);
    EXPECT_EQ(result.plan.implementation, kName);
    EXPECT_TRUE(test::rows_are_zero(result.outputs.o, 140, 100, 140));
    const test::Result known = test::run_inputs(whole, options);
    EXPECT_EQ(std::memcmp(known.outputs.o.data(), result.outputs.o.data(),
                          known.outputs.o.size() / 140 * 100),
              0);
  }
}

// ---- segments

TEST_F(Gdn, SegmentsOfEveryGate) {
  std::size_t turn = 0;
  for (const Gates gates : test::gdn::kAllGates)
    for (const Cut& cut : test::in_turn<Cut>(turn++, {{2}, {2, true}, {3}, {5, true}, {9}}))
      expect_within(test::gdn::inputs_of({.lengths = {330, 0, 70, 1}, .HV = 1, .gates = gates}),
                    test::gdn::name_of(gates), cut);
}

TEST_F(Gdn, SegmentsOfEverySize) {
  std::size_t turn = 0;
  for (const int64_t K : {64, 96, 128, 40})
    for (const int64_t V : test::in_turn<int64_t>(turn++, {128, 256, 192, 72, 64}))
      for (const bool exact : {false, true})
        expect_within(test::gdn::inputs_of({.lengths = {135, 64}, .HV = 1, .K = K, .V = V}),
                      "K = " + std::to_string(K) + ", V = " + std::to_string(V), {2, exact});
}

TEST_F(Gdn, SegmentsOfStepsOfZeroAndTwo) {
  for (const Gates gates : {Gates::kFirst, Gates::kZero})
    for (const double beta : {0.0, 2.0})
      for (const Cut& cut : {Cut{2}, Cut{4, true}}) {
        // Nothing is written: what is left of the initial state has no digits but in exact
        // segments.
        if (beta == 0 && gates == Gates::kFirst && !cut.exact) continue;
        Inputs inputs = test::gdn::inputs_of({.lengths = {200}, .gates = gates});
        test::gdn::set_betas(&inputs, beta);
        expect_within(inputs, "beta = " + std::to_string(beta), cut);
      }
}

TEST_F(Gdn, SegmentsOfKeysThatAreNotNormalised) {
  for (const Gates gates : {Gates::kFirst, Gates::kZero, Gates::kNeedle, Gates::kStrong})
    for (const Cut& cut : {Cut{2}, Cut{3, true}}) {
      expect_within(test::gdn::growing(gates, 1, 0.9), test::gdn::name_of(gates), cut);
      expect_within(test::gdn::growing(gates, 1.2, 1.5), test::gdn::name_of(gates), cut);
    }
}

/// A chunk forgets by 2^-20 what chunks in front of it have made grow: within its segment, and in
/// the one before.
TEST_F(Gdn, SegmentsOfChunksThatGrow) {
  for (const int64_t growing : {2, 3})  // chunks of segments of three
    expect_within(test::gdn::chunks_that_grow(growing),
                  "grows for " + std::to_string(growing) + " chunks", Cut{3});
}

double norm(const Doubles& x) {
  double squares = 0;
  for (const double y : x) squares += y * y;
  return std::sqrt(squares);
}

/// M and B of the oracle: M is the end of a start at the identity with v = 0.
struct Maps {
  Doubles M, B;
  Maps(const Inputs& inputs, cpu::oracle::Span span, int64_t head) {
    const Problem& p = inputs.problem;
    const auto K = static_cast<std::size_t>(p.key_dim), V = static_cast<std::size_t>(p.value_dim);
    B = cpu::oracle::run_head(p, inputs.tensors(), span, head, Doubles(K * V)).state;
    if (K != V) throw Error(Status(StatusCode::kInternal, "the identity is a state of K = V"));
    Inputs without_v = inputs;
    without_v.v.fill(0);
    Doubles identity(K * K);
    for (std::size_t i = 0; i < K; ++i) identity[i * K + i] = 1;
    M = cpu::oracle::run_head(p, without_v.tensors(), span, head, identity).state;
  }
};

/// Heads that forget, and those that do not: M is 0 where the bound says that it is small, and only
/// there; B has all that its segment leaves.
TEST_F(Gdn, TransitionsAreDroppedWhereGatesBoundThem) {
  for (const Gates gates : {Gates::kTrained, Gates::kZero, Gates::kStrong, Gates::kNeedle})
    for (const bool exact : {false, true}) {
      if (exact && gates != Gates::kTrained) continue;
      const Inputs inputs =
          with(test::gdn::inputs_of({.lengths = {390}, .HV = 4, .gates = gates}), {2, exact});
      Workspace workspace(inputs, in_segments(2));
      constexpr int64_t kEnd = 192;
      for (int64_t head = 0; head < 4; ++head) {
        const std::string what = std::string(test::gdn::name_of(gates)) + std::to_string(head);
        double bound = 0;
        bool forgotten = false;
        for (int64_t begin = kEnd; begin > 0 && !forgotten; begin -= kChunk) {
          bound += ChunkFactors(inputs, {begin - kChunk, begin}, head).log2_bound;
          forgotten = bound <= -20 && !exact;
        }
        const Maps truth(inputs, {0, kEnd}, head);
        const Doubles M = workspace.matrix(stage::kSegmentM, 0, head, 64);
        const Doubles B = workspace.matrix(stage::kSegmentB, 0, head, 64);
        if (forgotten) {
          EXPECT_EQ(norm(M), 0) << what;
          EXPECT_LE(norm(truth.M), 8 * 0x1p-20) << what;
        } else if (norm(truth.M) > 1e-30) {  // fp32 has its digits
          EXPECT_LE(distance(M, truth.M), 4e-3) << what;
        }
        EXPECT_LE(distance(B, truth.B), 4e-3) << what;
      }
    }
}

/// More chunks than a warp looks at in one turn.
TEST_F(Gdn, HeadsThatForgetSlowly) {
  constexpr int64_t kChunks = 40;
  Inputs inputs = test::gdn::inputs_of(
      {.lengths = {2 * kChunks * kChunk}, .gates = Gates::kZero, .initial_state = false});
  for (int64_t i = 0; i < inputs.problem.num_tokens; ++i)
    for (const int64_t head : {0, 1})  // 2^-20 after 35 chunks; after 44, which there are not
      store_double(inputs.g.data(), inputs.problem.g.dtype, 2 * i + head,
                   head == 0 ? -0.0062 : -0.005);
  Workspace workspace(inputs, in_segments(2)), exact(with(inputs, {2, true}), in_segments(2));
  for (const int64_t head : {0, 1}) {
    const auto both = [&](const stage::BufferSpec& spec) {
      return std::pair{workspace.matrix(spec, 0, head, 64), exact.matrix(spec, 0, head, 64)};
    };
    const auto [M, true_M] = both(stage::kSegmentM);
    const auto [B, true_B] = both(stage::kSegmentB);
    EXPECT_GT(norm(true_M), 0);
    EXPECT_EQ(distance(M, true_M), head == 0 ? 1 : 0);
    EXPECT_LE(distance(B, true_B), 2e-3);  // other states round otherwise
    EXPECT_EQ(distance(B, true_B) == 0, head == 1);
  }
}

/// The bits depend on the cut alone. The number of SMs chooses blocks of 64 or 128 columns and
/// changes none.
TEST_F(Gdn, SegmentsHaveEqualBitsOnAnyNumberOfSms) {
  const Inputs inputs = test::gdn::inputs_of({.lengths = {200}, .K = 64, .V = 128});
  test::RunOptions few = in_segments(3);
  few.num_sms = 2;
  const test::Result a = test::run_inputs(inputs, in_segments(3)),
                     b = test::run_inputs(inputs, few);
  EXPECT_TRUE(test::same_bits(a.outputs.o, b.outputs.o));
  EXPECT_TRUE(test::same_bits(a.outputs.final_state, b.outputs.final_state));
}

TEST_F(Gdn, SegmentsOfSequencesDoNotKnowOfEachOther) {
  EXPECT_TRUE(test::same_bits_alone(
      test::gdn::inputs_of({.lengths = {150, 0, 1, 130}, .gates = Gates::kTrained}),
      in_segments(2)));
}

/// First segments run from their initial states, as whole sequences do.
TEST_F(Gdn, FirstSegmentsHaveTheBitsOfWholeSequences) {
  const Inputs inputs = test::gdn::inputs_of({.lengths = {260}, .gates = Gates::kSlow});
  const test::Result whole = test::run_inputs(inputs, on_gdn());
  const test::Result cut = test::run_inputs(inputs, in_segments(2));
  ASSERT_EQ(cut.plan.segments.size(), 2U);
  const auto end = static_cast<std::size_t>(cut.plan.segments[0].end);
  EXPECT_EQ(
      std::memcmp(whole.outputs.o.data(), cut.outputs.o.data(), whole.outputs.o.size() / 260 * end),
      0);
}

// ---- segments of lengths that only the device knows

/// A run of `inputs` with their lengths on the host, and one without.
struct BothLengths {
  test::Result host, device;
  BothLengths(const Inputs& inputs, test::RunOptions options) {
    host = test::run_inputs(inputs, options);
    options.from_bounds = true;
    device = test::run_inputs(inputs, options);
  }
  void expect_same(const std::string& what) const {
    EXPECT_EQ(device.plan.implementation, kName) << what;
    EXPECT_TRUE(device.plan.device_cut.on) << what;
    EXPECT_TRUE(test::same_bits(host.outputs.o, device.outputs.o)) << what;
    EXPECT_TRUE(test::same_bits(host.outputs.final_state, device.outputs.final_state)) << what;
  }
};

TEST_F(Gdn, SegmentsMadeOnTheDeviceHaveTheBitsOfHostLengths) {
  const auto expect = [](const test::gdn::Options& options, bool cut, const std::string& what,
                         int32_t num_sms = 0) {
    test::RunOptions run = in_segments(3);
    run.num_sms = num_sms;
    const BothLengths both(test::gdn::inputs_of(options), run);
    EXPECT_EQ(both.host.plan.segmented, cut) << what;
    both.expect_same(what);
  };
  expect({.lengths = {0, 330, 70, 1}}, true, "cut");
  expect({.lengths = {0, 64, 30, 1}}, false, "whole");
  expect({.lengths = {135, 64}, .K = 96, .V = 72, .gates = Gates::kZero}, true, "K 96, V 72");
  // Whatever the number of SMs makes of the width of blocks; with 12 and 24 either has a launch.
  for (const int32_t sms : {2, 12, 24})
    expect({.lengths = {200, 0}, .HV = 3, .V = 128, .gates = Gates::kTrained}, true, "wide", sms);
  expect({.lengths = {40, 64}, .HV = 3, .V = 128}, false, "whole, wide", 12);
  expect({.lengths = {130}, .gates = Gates::kNeedle, .initial_state = false}, true, "no states");
}

/// The planner's cuts, by predicted times.
TEST_F(Gdn, CutsThatGainOnTheDeviceHaveTheBitsOfHostLengths) {
  if (test::emulated()) GTEST_SKIP() << "16,384 tokens take minutes on the emulator";
  const auto expect = [](std::vector<int64_t> lengths, Gates gates, bool cut) {
    const BothLengths both(
        test::gdn::inputs_of(
            {.lengths = std::move(lengths), .H = 2, .HV = 8, .K = 128, .V = 128, .gates = gates}),
        on_gdn());
    EXPECT_EQ(both.host.plan.segmented, cut);
    both.expect_same(test::gdn::name_of(gates));
  };
  expect({16384}, Gates::kTrained, true);
  expect({9000, 0, 3000, 4384}, Gates::kZero, true);
  expect({4096, 4096, 4096, 4096}, Gates::kTrained, false);
}

/// The word of bad metadata, after a run.
int32_t flags_of(const test::OnDevice& call) {
  io::Buffer bytes(call.workspace.size());
  call.workspace.download(bytes.data(), bytes.size());
  return *static_cast<const int32_t*>(
      static_cast<void*>(plan::find_block(call.plan, bytes.data(), cuda::block::kDeviceFlags)));
}

/// Offsets that go back or leave the tokens are clamped before they are cut, and flagged as in a
/// call without a cut.
TEST_F(Gdn, OffsetsThatGoBackAreClampedAndFlagged) {
  constexpr int64_t kFar = int64_t{1} << 40;
  const std::vector<int64_t> given[] = {{0, 170, 20, kFar}, {-kFar, -1, 140, 3}};
  const std::vector<int64_t> clamped[] = {{0, 170, 170, 200}, {0, 0, 140, 140}};
  for (int i = 0; i < 2; ++i) {
    Inputs inputs = test::gdn::inputs_of({.lengths = {clamped[i].back(), 0, 0}});
    for (const test::RunOptions& options : {on_gdn(), in_segments(3)}) {
      inputs.cu_seqlens = clamped[i];
      const test::Result host = test::run_inputs(inputs, options);
      test::RunOptions from_bounds = options;
      from_bounds.from_bounds = true;
      for (const bool wrong : {false, true}) {
        if (wrong) inputs.cu_seqlens = given[i];
        test::OnDevice call(inputs, from_bounds);
        EXPECT_EQ(call.plan.device_cut.on, host.plan.segmented);
        throw_if_error(call.run());
        call.read();
        EXPECT_EQ(flags_of(call), wrong ? kBadSequences : 0) << i;
        EXPECT_TRUE(test::same_bits(host.outputs.o, call.outputs.o)) << i;
        EXPECT_TRUE(test::same_bits(host.outputs.final_state, call.outputs.final_state)) << i;
      }
    }
  }
}

#ifdef KDA_WITH_CUDA

/// One graph, other lengths at each replay: cut, whole, and with sequences without tokens.
TEST_F(Gdn, OneGraphServesManyTables) {
  constexpr int64_t kTokens = 300;
  Inputs inputs = test::gdn::inputs_of({.lengths = {kTokens, 0, 0}, .gates = Gates::kTrained});
  test::RunOptions options = in_segments(3);
  options.from_bounds = true;
  test::OnDevice call(inputs, options);
  ASSERT_TRUE(call.plan.device_cut.on);
  const test::Stream stream;
  const test::Graph graph(stream, [&] { EXPECT_TRUE(call.run(stream.stream).ok()); });
  options.from_bounds = false;
  for (const auto& [first, second] :
       {std::pair{kTokens, kTokens}, {64, 100}, {0, 10}, {130, 130}}) {
    inputs.cu_seqlens = {0, first, second, kTokens};
    test::replace_lengths(call.memory->tensors(), inputs.cu_seqlens);
    graph.launch(stream);
    call.read();
    const test::Result host = test::run_inputs(inputs, options);
    EXPECT_TRUE(test::same_bits(host.outputs.o, call.outputs.o)) << first;
    EXPECT_TRUE(test::same_bits(host.outputs.final_state, call.outputs.final_state)) << first;
  }
}

#endif

Plan plan_of(const test::Table& table, bool from_bounds) {
  Problem p = table.problem();
  p.g = head_gates(DType::kBFloat16, 1, p.num_tokens, p.num_value_heads);
  const DeviceFacts facts = gpu_facts(table.sms);
  PlanOptions options = table.segments > 0 ? test::fixed_segments(table.segments) : PlanOptions{};
  options.backend = kName;
  options.most_cut_bytes = INT64_MAX;
  Plan plan;
  throw_if_error(from_bounds ? make_plan_from_bounds(p, facts, options, &plan)
                             : make_plan(p, table.cu_seqlens, facts, options, &plan));
  return plan;
}

#ifdef KDA_WITH_SM90A

TEST_F(Gdn, AKernelFindsThePlannersCut) {
  test::gdn::expect_the_planners_cuts(
      31, test::num_tables(test::emulated() ? 200 : 5000), plan_of,
      [](const Plan& plan) { return cuda::gdn::model_from_bounds(plan.problem, plan.device); });
}

#endif

// ---- states

/// States in slots of a pool of this type and layout; sequence 1 has none to begin with, sequence 2
/// is masked. Slots below first_slot are none.
struct Pool {
  static constexpr int64_t kSlots = 6;
  Inputs inputs;
  io::Buffer pool, checkpoints;
  check::Outputs outputs;

  Pool(DType type, StateLayout layout) {
    inputs = test::gdn::inputs_of({.lengths = {70, 5, 0, 130}, .K = 64, .V = 72});
    Problem& p = inputs.problem;
    p.state_layout = layout;
    StateDesc desc;
    desc.num_slots = kSlots;
    desc.indexed = true;
    const Shape shape = state_shape(p, desc);
    desc.tensor = contiguous(type, {shape[0], shape[1], shape[2], shape[3]});
    p.initial_state = p.final_state = p.checkpoints = desc;
    p.initial_state_mask = true;
    p.checkpoint_every = 64;
    outputs = check::make_outputs(&p, DType::kBFloat16);
    pool = io::Buffer(outputs.final_state.size());
    for (int64_t i = 0; i < kSlots * shape[1] * shape[2] * shape[3]; ++i)
      store_double(pool.data(), type, i, 0.01 * static_cast<double>(i % 61 - 30));
  }
  void run(PlanOptions options, bool from_bounds = false) {
    const int32_t from[] = {4, -1, 0, 2}, to[] = {4, 0, 5, -1}, marks[] = {3, 1, 5};
    const uint8_t mask[] = {1, 1, 0, 1};
    Plan plan;
    const DeviceFacts facts = test::device_of(options.backend);
    throw_if_error(from_bounds
                       ? make_plan_from_bounds(inputs.problem, facts, options, &plan)
                       : make_plan(inputs.problem, inputs.cu_seqlens, facts, options, &plan));
    EXPECT_EQ(plan.device_cut.on, from_bounds);
    io::Buffer workspace(plan.workspace_bytes);
    workspace.fill(0xff);
    Tensors t = inputs.tensors();
    if (from_bounds) t.cu_seqlens = inputs.cu_seqlens.data();
    outputs.attach(&t);
    t.initial_state = t.final_state = pool.data();
    t.initial_state_indices = from;
    t.final_state_indices = to;
    t.checkpoint_indices = marks;
    t.initial_state_mask = mask;
    throw_if_error(check::run_and_wait(plan, t, workspace.data(), workspace.size()));
  }
};

/// Beside those of the oracle, which leaves the same slots alone.
TEST_F(Gdn, PoolsMasksAndCheckpoints) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16})
    for (const StateLayout layout : {StateLayout::kKV, StateLayout::kVK}) {
      Pool truth(type, layout);
      truth.outputs.checkpoints.fill(0);
      truth.run(test::with_backend("oracle"));
      const auto values = [](const io::Buffer& buffer, DType of) {
        Doubles x;
        for (int64_t i = 0; i < static_cast<int64_t>(buffer.size()) / dtype_size(of); ++i)
          x.push_back(load_double(buffer.data(), of, i));
        return x;
      };
      const auto close = [&](const io::Buffer& a, const io::Buffer& b, DType of) {
        return distance(values(a, of), values(b, of));
      };
      for (const PlanOptions& options : {on_gdn().plan, in_segments(3).plan}) {
        Pool mine(type, layout);
        mine.outputs.checkpoints.fill(0);
        mine.run(options);
        EXPECT_LE(close(mine.outputs.o, truth.outputs.o, DType::kBFloat16), 5e-3);
        EXPECT_LE(close(mine.pool, truth.pool, type), 3e-3);
        EXPECT_LE(close(mine.outputs.checkpoints, truth.outputs.checkpoints, type), 3e-3);
      }
    }
}

/// A cut that a kernel makes leaves the slots of one that the host makes, bit for bit, and those
/// that are none alone. The oracle has these slots too.
TEST_F(Gdn, PoolsOfACutMadeOnTheDevice) {
  for (const int64_t first_slot : {0, 3}) {
    Pool host(DType::kFloat32, StateLayout::kVK);
    host.inputs.problem.first_slot = first_slot;
    host.outputs.checkpoints.fill(0);
    const Pool before = host;
    Pool device = before, truth = before;
    host.run(in_segments(3).plan);
    device.run(in_segments(3).plan, /*from_bounds=*/true);
    truth.run(test::with_backend("oracle"));
    EXPECT_TRUE(test::same_bits(host.outputs.o, device.outputs.o)) << first_slot;
    EXPECT_TRUE(test::same_bits(host.pool, device.pool)) << first_slot;
    EXPECT_TRUE(test::same_bits(host.outputs.checkpoints, device.outputs.checkpoints));
    const std::size_t slot = device.pool.size() / Pool::kSlots;
    for (std::size_t i = 0; i < Pool::kSlots; ++i) {
      const auto changed = [&](const Pool& pool) {
        return std::memcmp(pool.pool.data() + i * slot, before.pool.data() + i * slot, slot) != 0;
      };
      EXPECT_EQ(changed(device), changed(truth)) << first_slot << ", slot " << i;
    }
  }
}

TEST_F(Gdn, SequencesWithoutTokensKeepTheirStates) {
  const Inputs inputs = test::gdn::inputs_of({.lengths = {0, 0}});
  const test::Result result = test::run_inputs(inputs, on_gdn());
  EXPECT_TRUE(test::same_bits(result.outputs.final_state, inputs.initial_state));
}

// ---- plans

bool has_block(const Plan& plan, std::string_view name) {
  return std::ranges::any_of(plan.workspace, [&](const auto& block) { return block.name == name; });
}

/// Plans of a layer with 2 q/k heads and 8 value heads.
Plan layer_plan(int64_t tokens, const PlanOptions& options = {}, bool batch_invariant = false) {
  Inputs inputs = test::gdn::inputs_of({.lengths = {1, 0}, .H = 2, .HV = 8, .K = 128, .V = 128});
  Problem& p = inputs.problem;
  p.num_tokens = tokens + 1;
  p.batch_invariant = batch_invariant;
  PlanOptions named = options;
  named.backend = kName;
  Plan plan;
  throw_if_error(
      make_plan(p, std::vector<int64_t>{0, tokens, tokens + 1}, gpu_facts(132), named, &plan));
  return plan;
}

TEST(GdnPlan, CutsWhatGains) {
  const Plan plan = layer_plan(65536);
  EXPECT_TRUE(plan.segmented && plan.early_exit);
  EXPECT_GE(plan.segments.size(), 8U);
  EXPECT_LT(plan.cost.segmented_us, 0.5 * plan.cost.serial_us);
  EXPECT_GT(plan.cost.segmented_us, plan.cost.roofline_us);
  EXPECT_TRUE(has_block(plan, cuda::block::kGdnForgotten));
  EXPECT_FALSE(layer_plan(1024).segmented);
  EXPECT_FALSE(layer_plan(0).segmented);
  PlanOptions off;
  off.context_parallel = SegmentPolicy::kOff;
  EXPECT_FALSE(layer_plan(65536, off).segmented);
}

TEST(GdnPlan, KeepsTransitionsOfBatchInvariantCalls) {
  const Plan exact = layer_plan(65536, {}, /*batch_invariant=*/true);
  EXPECT_TRUE(exact.segmented);
  EXPECT_FALSE(exact.early_exit);
  EXPECT_FALSE(has_block(exact, cuda::block::kGdnForgotten));
  const Plan asked = layer_plan(1024, test::fixed_segments(3, SegmentMethod::kOnePass));
  EXPECT_TRUE(asked.segmented && asked.early_exit);
  EXPECT_EQ(asked.resolved.segment_method, SegmentMethod::kScanMergeForward);
}

TEST(GdnPlan, LetsAKernelCutFromBounds) {
  test::Table table;
  table.heads = 2, table.group = 4;
  table.add(60000), table.add(5536);
  const Plan bounds = plan_of(table, true), lengths = plan_of(table, false);
  ASSERT_TRUE(bounds.device_cut.on && bounds.early_exit);
  EXPECT_FALSE(bounds.segmented);
  EXPECT_EQ(bounds.device_cut.most_behind, 4 * 132 / 8);
  EXPECT_LE(static_cast<int64_t>(lengths.segments.size()), 2 + bounds.device_cut.most_behind);
  for (const char* name : {cuda::block::kDeviceCut, cuda::block::kGdnForgotten})
    EXPECT_TRUE(has_block(bounds, name)) << name;
  const std::string text = bounds.to_text(true);
  for (const char* part : {"at most 66 segments behind first ones", "gdn_cut", "gdn_merge_sm90"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
}

TEST(GdnPlan, CutsNothingFromBoundsAndSaysWhy) {
  test::Table table;
  table.heads = 2, table.group = 4;
  table.add(65536);
  const auto expect = [&](const char* reason, auto&& change) {
    Problem p = table.problem();
    p.g = head_gates(DType::kBFloat16, 1, p.num_tokens, p.num_value_heads);
    PlanOptions options = test::with_backend(kName);
    change(p, options);
    Plan plan;
    throw_if_error(make_plan_from_bounds(p, gpu_facts(132), options, &plan));
    EXPECT_FALSE(plan.device_cut.on);
    EXPECT_TRUE(plan.reasons.back().ends_with("nothing is cut"));
    ASSERT_GE(plan.reasons.size(), 2U);
    EXPECT_NE(plan.reasons[plan.reasons.size() - 2].find(reason), std::string::npos)
        << plan.to_text(true);
  };
  using P = SegmentPolicy;
  expect("off: asked for", [](Problem&, PlanOptions& o) { o.context_parallel = P::kOff; });
  expect("need lengths on the host",
         [](Problem&, PlanOptions& o) { o.context_parallel = P::kCula; });
  expect("no sequence can be cut", [](Problem&, PlanOptions& o) { o = test::fixed_segments(1); });
  expect("more than most_cut_bytes = 1048576",
         [](Problem&, PlanOptions& o) { o.most_cut_bytes = 1 << 20; });
  expect("batch_invariant: not cut", [](Problem& p, PlanOptions&) { p.batch_invariant = true; });
  table.heads = 16, table.group = 8;
  expect("no table of 65536 tokens gains by a cut", [](Problem&, PlanOptions&) {});
}

TEST(GdnPlan, RefusesCutsFromBoundsThatGainLittle) {
  test::gdn::expect_refusals_to_cost_little(41, cuda::gdn::model_from_bounds);
}

/// Why the backend does not serve, once it is named.
std::string refusal(const Problem& p, PlanOptions options = {}, int32_t capability = 90) {
  options.backend = kName;
  return std::string(supported(p, gpu_facts(132, capability), options).message());
}

TEST(GdnPlan, SaysWhatItDeclines) {
  const Problem good = test::gdn::inputs_of({.K = 128, .V = 128}).problem;
  EXPECT_EQ(refusal(good), "");
  const std::string begin = std::string("backend: ") + kName + " cannot serve: ";
  const auto expect = [&](const std::string& reason, auto&& change) {
    Problem p = good;
    change(p);
    EXPECT_EQ(refusal(p), begin + reason);
  };
  expect("g has a gate a channel; needs one gate a head", [](Problem& p) {
    p.g = contiguous(DType::kFloat32, {1, p.num_tokens, p.num_value_heads, p.key_dim});
  });
  expect("dt_bias has a bias a channel; needs one gate a head, with its bias", [](Problem& p) {
    p.dt_bias = contiguous(DType::kFloat32, {p.num_value_heads, p.key_dim});
  });
  expect("v is fp16; needs bf16", [](Problem& p) { p.v.dtype = DType::kFloat16; });
  expect("K = 136 is above 128", [](Problem& p) {
    p.key_dim = 136;
    p.q = p.k = contiguous(DType::kBFloat16, {1, p.num_tokens, p.num_heads, 136});
    p.initial_state.reset();
  });
  expect("V = 60 is not a multiple of 8", [](Problem& p) {
    p.value_dim = 60;
    p.v = p.o = contiguous(DType::kBFloat16, {1, p.num_tokens, p.num_value_heads, 60});
    p.initial_state.reset();
  });
  expect("checkpoint_every = 16 is not a multiple of the chunk 64", [](Problem& p) {
    p.checkpoints = p.initial_state;
    p.checkpoint_every = 16;
    p.checkpoints->num_slots = p.num_tokens / 16;
  });
  expect("k is aligned to 8 bytes, needs 16", [](Problem& p) { p.k.alignment = 8; });
}

TEST(GdnPlan, SaysWhichOptionsAndDevicesItDeclines) {
  const Inputs inputs = test::gdn::inputs_of({});
  const auto refused = [&](const PlanOptions& options, int32_t capability = 90) {
    PlanOptions named = options;
    named.backend = kName;
    Plan plan;
    return std::string(
        make_plan(inputs.problem, inputs.cu_seqlens, gpu_facts(132, capability), named, &plan)
            .message());
  };
  const std::string begin = std::string("backend: ") + kName + " cannot serve: ";
  PlanOptions form, keep;
  form.intra_form = IntraForm::kToken;
  keep.keep = KeepPolicy::kChunks;
  EXPECT_EQ(refused(form), begin + "intra_form asks for a form; it has one");
  EXPECT_EQ(refused(keep), begin + "keeps nothing for a backward");
  EXPECT_EQ(refused({}, 80), begin + "needs compute capability 90, sm_80, 132 SMs has 80");
  EXPECT_EQ(refused({}, 100), begin + "is for compute capability 90, sm_100, 132 SMs has 100");
}

}  // namespace
}  // namespace kda
