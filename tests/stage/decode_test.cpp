// SPDX-License-Identifier: Apache-2.0
// Decode against the oracle: token counts, layouts, state types, slots, vLLM's state a token.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "core/convert.hpp"
#include "core/layout.hpp"
#include "cpu/oracle/oracle.hpp"
#include "support/harness.hpp"

namespace kda {
namespace {

using check::Inputs;
namespace oracle = cpu::oracle;

struct Decode {
  Inputs inputs;
  io::Buffer pool;
  std::vector<int32_t> indices, accepted;
  const uint8_t* mask = nullptr;
  check::Outputs outputs;

  Problem& problem() { return inputs.problem; }
};

struct DecodeShape {
  int64_t sequences = 3, tokens = 1, heads = 2, K = 32, V = 48, slots = 5;
  int64_t columns = 1;
  std::vector<int64_t> lengths;  // packed, in the place of `sequences` and `tokens`
  StateLayout layout = StateLayout::kKV;
  DType state_dtype = DType::kFloat32;
  DType dtype = DType::kFloat32;
};

/// The first normals of one sequence of random numbers, which are made once.
const std::vector<float>& normals(int64_t count) {
  static check::Random random(5);
  static std::vector<float> values;
  while (static_cast<int64_t>(values.size()) < count)
    values.push_back(static_cast<float>(random.normal()));
  return values;
}

Decode make_decode(const DecodeShape& s) {
  Decode d;
  check::GenerateOptions options = test::shape(s.tokens, s.heads, s.K, s.V);
  options.batch = s.lengths.empty() ? s.sequences : 1;
  options.seq_lens = s.lengths;
  options.dtype = s.dtype;
  options.seed = static_cast<uint64_t>(s.tokens * 100 + s.K);
  d.inputs = check::generate(options);
  Problem& p = d.problem();
  p.operation = Operation::kDecode;
  p.state_layout = s.layout;
  p.state_index_columns = s.columns;
  StateDesc pool;
  pool.num_slots = s.slots;
  pool.indexed = true;
  p.initial_state = pool;
  const Shape shape = state_shape(p, pool);
  p.initial_state->tensor = contiguous(s.state_dtype, {shape[0], shape[1], shape[2], shape[3]});
  const int64_t elems = s.slots * s.heads * s.K * s.V;
  d.pool = io::Buffer(static_cast<std::size_t>(elems * dtype_size(s.state_dtype)));
  const float* values = normals(elems).data();
  for (int64_t i = 0; i < elems; ++i) store_element(d.pool.data(), s.state_dtype, i, values[i]);
  d.outputs = check::make_outputs(&p, s.dtype);
  return d;
}

Status run_decode(Decode* d, const std::string& backend = "") {
  Plan plan;
  if (Status status = make_plan(d->problem(), d->inputs.cu_seqlens, test::device_of(backend),
                                test::with_backend(backend), &plan);
      !status.ok())
    return status;
  io::Buffer workspace(plan.workspace_bytes);
  workspace.fill(0xff);
  Tensors tensors = d->inputs.tensors();
  d->outputs.attach(&tensors);
  tensors.initial_state = d->pool.data();
  tensors.initial_state_indices = d->indices.data();
  tensors.num_accepted_tokens = d->accepted.data();
  tensors.initial_state_mask = d->mask;
  return check::run_and_wait(plan, tensors, workspace.data(), workspace.size());
}

/// Error of one value relative to the norm of the oracle's.
double distance(const std::vector<double>& x, const std::vector<double>& ref) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    error += (x[i] - ref[i]) * (x[i] - ref[i]);
    norm += ref[i] * ref[i];
  }
  return std::sqrt(error / norm);
}

std::vector<double> output_rows(Decode& d, int64_t n, int64_t head) {
  const Problem& p = d.problem();
  std::vector<double> rows;
  for (int64_t t = 0; t < p.num_tokens; ++t)
    for (int64_t c = 0; c < p.value_dim; ++c)
      rows.push_back(load_element(d.outputs.o.data(), p.o.dtype,
                                  row_offset(p, p.o, n * p.num_tokens + t, head) + c));
  return rows;
}

TEST(Decode, EveryTokenCountLayoutAndType) {
  for (const std::string& backend : test::backends())
    for (int64_t tokens = 1; tokens <= 8; ++tokens)
      for (const StateLayout layout : {StateLayout::kKV, StateLayout::kVK})
        for (const DType state_dtype : {DType::kFloat32, DType::kBFloat16})
          // Odd sizes, then those of the dense kernels.
          for (const auto& [K, V] : {std::pair{32, 1}, std::pair{32, 48}, std::pair{77, 131},
                                     std::pair{64, 64}, std::pair{128, 128}}) {
            DecodeShape s;
            s.tokens = tokens;
            s.layout = layout;
            s.state_dtype = state_dtype;
            s.K = K;
            s.V = V;
            Decode d = make_decode(s);
            d.indices = {4, 0, 2};
            const io::Buffer before = d.pool;
            ASSERT_TRUE(run_decode(&d, backend).ok());
            const Problem& p = d.problem();
            const double state_limit = state_dtype == DType::kBFloat16 ? 0x1p-8 : 2e-6;
            for (int64_t n = 0; n < 3; ++n)
              for (int64_t head = 0; head < s.heads; ++head) {
                const int64_t at = d.indices[static_cast<std::size_t>(n)];
                const oracle::HeadResult truth = oracle::run_head(
                    p, d.inputs.tensors(), {n * tokens, (n + 1) * tokens}, head,
                    oracle::load_state(p, *p.initial_state, before.data(), at, head));
                ASSERT_LT(distance(output_rows(d, n, head), truth.o), 3e-5)
                    << backend << " tokens " << tokens << " V " << V;
                ASSERT_LT(distance(oracle::load_state(p, *p.initial_state, d.pool.data(), at, head),
                                   truth.state),
                          state_limit);
              }
            for (const int64_t unused : {1, 3}) {
              const std::size_t bytes = before.size() / 5;
              ASSERT_EQ(
                  std::memcmp(before.data() + static_cast<std::size_t>(unused) * bytes,
                              d.pool.data() + static_cast<std::size_t>(unused) * bytes, bytes),
                  0);
            }
          }
}

/// Rows of 128 elements of 16 bits, `pad` more apart: from whole words or not.
io::Buffer spread_rows(const io::Buffer& rows, int64_t pad, TensorDesc* desc) {
  constexpr std::size_t kRow = 128 * 2;
  const std::size_t step = kRow + static_cast<std::size_t>(pad) * 2, count = rows.size() / kRow;
  io::Buffer spread(count * step);
  spread.fill(0xff);
  for (std::size_t i = 0; i < count; ++i)
    std::memcpy(spread.data() + i * step, rows.data() + i * kRow, kRow);
  for (int dim = 0; dim < 3; ++dim)
    desc->strides[static_cast<std::size_t>(dim)] +=
        desc->strides[static_cast<std::size_t>(dim)] / 128 * pad;
  desc->alignment = pad % 2 == 0 ? 4 : 2;
  return spread;
}

TEST(Decode, RowsOfSixteenBitsAtAnyStride) {
  for (const std::string& backend : test::backends())
    for (const StateLayout layout : {StateLayout::kKV, StateLayout::kVK})
      for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
        DecodeShape s{.tokens = 3, .K = 128, .V = 128, .layout = layout, .dtype = dtype};
        Decode dense = make_decode(s);
        dense.indices = {4, 0, 2};
        for (const int64_t pad : {1, 2}) {
          Decode d = make_decode(s);
          d.indices = dense.indices;
          Problem& p = d.problem();
          d.inputs.q = spread_rows(d.inputs.q, pad, &p.q);
          d.inputs.k = spread_rows(d.inputs.k, pad, &p.k);
          d.inputs.v = spread_rows(d.inputs.v, pad, &p.v);
          if (pad == 1) {
            ASSERT_TRUE(run_decode(&dense, backend).ok());
          }
          ASSERT_TRUE(run_decode(&d, backend).ok());
          for (int64_t n = 0; n < s.sequences; ++n)
            for (int64_t head = 0; head < s.heads; ++head)
              ASSERT_LT(distance(output_rows(d, n, head), output_rows(dense, n, head)), 1e-4)
                  << backend << " pad " << pad;
          for (std::size_t i = 0; i < d.pool.size() / 4; ++i)
            ASSERT_NEAR(d.pool.as<float>()[i], dense.pool.as<float>()[i], 1e-5)
                << backend << " pad " << pad;
        }
      }
}

TEST(Decode, NegativeSlotTouchesNothing) {
  Decode d = make_decode({});
  d.indices = {1, -1, 3};
  const io::Buffer before = d.pool;
  ASSERT_TRUE(run_decode(&d).ok());
  const Problem& p = d.problem();
  const std::size_t row = test::row_bytes(p.o, p.num_value_heads, p.value_dim);
  for (std::size_t i = 0; i < row; ++i)
    ASSERT_EQ(d.outputs.o.as<unsigned char>()[row + i], 0xff) << "outputs of a skipped sequence";
  const std::size_t state = before.size() / 5;
  for (const std::size_t unused : {0, 2, 4})
    EXPECT_EQ(std::memcmp(before.data() + unused * state, d.pool.data() + unused * state, state),
              0);
}

/// With zero_skipped: outputs of a sequence without a slot are 0 and nothing else changes, in rows
/// that lie apart neither.
TEST(Decode, ZeroesOutputsOfSkippedSequences) {
  std::vector<std::string> backends = test::backends();
  backends.emplace_back("oracle");
  for (const std::string& backend : backends)
    for (const StateLayout layout : {StateLayout::kKV, StateLayout::kVK})
      for (const auto& [K, V] : {std::pair{32, 48}, std::pair{77, 131}, std::pair{128, 128}}) {
        DecodeShape s{.tokens = 3, .K = K, .V = V, .layout = layout, .dtype = DType::kBFloat16};
        Decode left = make_decode(s), zeroed = make_decode(s);
        for (Decode* d : {&left, &zeroed}) {
          d->indices = {1, -1, 3};
          Problem& p = d->problem();
          for (std::size_t dim = 0; dim < 3; ++dim) p.o.strides[dim] += p.o.strides[dim] / V * 8;
          d->outputs.o = io::Buffer(static_cast<std::size_t>(p.o.strides[0] * s.sequences * 2));
          d->outputs.o.fill(0xff);
        }
        zeroed.problem().zero_skipped = true;
        ASSERT_TRUE(run_decode(&left, backend).ok());
        ASSERT_TRUE(run_decode(&zeroed, backend).ok());
        const Problem& p = left.problem();
        for (int64_t t = s.tokens; t < 2 * s.tokens; ++t)
          for (int64_t head = 0; head < s.heads; ++head)
            std::memset(left.outputs.o.data() + row_offset(p, p.o, t, head) * 2, 0,
                        static_cast<std::size_t>(V) * 2);
        EXPECT_TRUE(test::same_bits(left.outputs.o, zeroed.outputs.o)) << backend << " V " << V;
        EXPECT_TRUE(test::same_bits(left.pool, zeroed.pool)) << backend << " V " << V;
      }
}

/// Slots below first_slot are those of no sequence, whoever and however many hold them: as if -1
/// and zero_skipped were given.
TEST(Decode, SlotsBelowTheFirstOneMeanNone) {
  std::vector<std::string> backends = test::backends();
  backends.emplace_back("oracle");
  for (const std::string& backend : backends)
    for (const int64_t columns : {1, 3})
      for (const auto& [K, V] : {std::pair{32, 48}, std::pair{77, 131}, std::pair{128, 128}}) {
        DecodeShape s{.sequences = 6, .tokens = 3, .K = K, .V = V, .slots = 9, .columns = columns};
        Decode null_block = make_decode(s), none = make_decode(s);
        if (columns == 1) {
          null_block.indices = {2, 0, 1, INT32_MIN, 8, 0};
          none.indices = {-1, -1, -1, -1, 8, -1};
        } else {  // started from column 1; some states are not stored
          null_block.indices = {3, 4, 2, 0, 0, 0, 7, 1, 5, 8, 6, -9, 1, 1, 1, -2, -3, -4};
          none.indices = {3, 4, -1, -1, -1, -1, 7, -1, 5, 8, 6, -1, -1, -1, -1, -1, -1, -1};
        }
        const int64_t first = 3;
        for (Decode* d : {&null_block, &none}) {
          d->problem().num_accepted_tokens = columns > 1;
          d->accepted = {2, 1, 1, 2, 1, 3};
        }
        null_block.problem().first_slot = first;
        none.problem().zero_skipped = true;
        const io::Buffer before = null_block.pool;
        ASSERT_TRUE(run_decode(&null_block, backend).ok());
        ASSERT_TRUE(run_decode(&none, backend).ok());
        EXPECT_TRUE(test::same_bits(null_block.outputs.o, none.outputs.o)) << backend << " " << V;
        EXPECT_TRUE(test::same_bits(null_block.pool, none.pool)) << backend << " " << V;
        EXPECT_FALSE(test::same_bits(null_block.pool, before)) << backend << " " << V;
        EXPECT_EQ(std::memcmp(before.data(), null_block.pool.data(), before.size() / 9 * first), 0);
      }
}

TEST(Decode, OracleBackendAgreesOnSkipsAndPlainSlots) {
  DecodeShape s;
  s.slots = 3;
  for (const bool indexed : {true, false}) {
    Decode fast = make_decode(s), truth = make_decode(s);
    for (Decode* d : {&fast, &truth}) {
      d->problem().initial_state->indexed = indexed;
      d->indices = {2, -1, 0};
    }
    ASSERT_TRUE(run_decode(&fast).ok());
    ASSERT_TRUE(run_decode(&truth, "oracle").ok());
    for (std::size_t i = 0; i < fast.pool.size() / 4; ++i)
      ASSERT_NEAR(fast.pool.as<float>()[i], truth.pool.as<float>()[i], 1e-5);
  }
}

TEST(Decode, WithoutIndicesEachSequenceHasItsSlot) {
  DecodeShape s;
  s.slots = 3;
  Decode indexed = make_decode(s);
  indexed.indices = {0, 1, 2};
  Decode plain = make_decode(s);
  plain.problem().initial_state->indexed = false;
  ASSERT_TRUE(run_decode(&indexed).ok());
  ASSERT_TRUE(run_decode(&plain).ok());
  EXPECT_TRUE(test::same_bits(indexed.pool, plain.pool));
  EXPECT_TRUE(test::same_bits(indexed.outputs.o, plain.outputs.o));
}

TEST(Decode, PackedSequencesOfDifferentLengths) {
  check::GenerateOptions options = test::shape(0, 1, 16, 16);
  options.seq_lens = {3, 0, 8, 1};
  Decode d;
  d.inputs = check::generate(options);
  Problem& p = d.problem();
  p.operation = Operation::kDecode;
  StateDesc pool;
  pool.num_slots = 4;
  pool.tensor = contiguous(DType::kFloat32, {4, 1, 16, 16});
  p.initial_state = pool;
  d.pool = io::Buffer(4 * 16 * 16 * 4);
  d.pool.fill(0);
  d.outputs = check::make_outputs(&p, DType::kFloat32);
  ASSERT_TRUE(run_decode(&d).ok());
  for (std::size_t n = 0; n < 4; ++n) {
    const oracle::HeadResult truth = oracle::run_head(
        p, d.inputs.tensors(), {d.inputs.cu_seqlens[n], d.inputs.cu_seqlens[n + 1]}, 0, {});
    for (std::size_t i = 0; i < 256; ++i)
      ASSERT_NEAR(d.pool.as<float>()[n * 256 + i], truth.state[i], 1e-5);
  }
}

/// A GPU has a kernel of its own for one token of each sequence and many states of bf16.
TEST(Decode, OneTokenOfBf16StatesHasTheBitsOfAPack) {
  for (const std::string& backend : test::backends())
    for (const StateLayout layout : {StateLayout::kKV, StateLayout::kVK}) {
      DecodeShape s;
      s.K = s.V = 128;
      s.heads = test::on_cuda() ? 86 : 3;  // a GPU packs 256 states and more
      s.layout = layout;
      s.state_dtype = s.dtype = DType::kBFloat16;
      Decode rows = make_decode(s);
      s.lengths = {1, 1, 1};
      Decode pack = make_decode(s);
      pack.inputs.q = rows.inputs.q, pack.inputs.k = rows.inputs.k, pack.inputs.v = rows.inputs.v;
      pack.inputs.g = rows.inputs.g, pack.inputs.beta = rows.inputs.beta;
      rows.indices = pack.indices = {4, 0, 2};
      const io::Buffer before = rows.pool;
      Decode apart = rows;  // rows of 8 bytes, not of 16
      apart.pool = spread_rows(rows.pool, 4, &apart.problem().initial_state->tensor);
      apart.problem().initial_state->tensor.alignment = 8;
      ASSERT_TRUE(run_decode(&rows, backend).ok());
      ASSERT_TRUE(run_decode(&pack, backend).ok());
      ASSERT_TRUE(run_decode(&apart, backend).ok());
      const auto equal = [](const io::Buffer& x, const io::Buffer& y) {
        return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size()) == 0;
      };
      EXPECT_FALSE(equal(rows.pool, before));
      EXPECT_TRUE(equal(rows.pool, pack.pool)) << backend;
      EXPECT_TRUE(equal(rows.outputs.o, pack.outputs.o)) << backend;
      EXPECT_TRUE(equal(rows.outputs.o, apart.outputs.o)) << backend;
    }
}

/// Gates of 16 bits lie two a word.
TEST(Decode, OneGateAHeadHasTheBitsOfTheSameGateInFp32) {
  for (const std::string& backend : test::backends())
    for (const int64_t tokens : {1, 3}) {
      DecodeShape s;
      s.K = s.V = 128;
      s.tokens = tokens;
      s.heads = 3;
      s.dtype = DType::kBFloat16;
      Decode narrow = make_decode(s);
      test::keep_one_gate(&narrow.inputs);
      Decode wide = narrow;
      const int64_t count = s.sequences * tokens * s.heads;
      wide.inputs.g = io::Buffer(static_cast<std::size_t>(count) * 4);
      for (int64_t i = 0; i < count; ++i)
        wide.inputs.g.as<float>()[i] =
            static_cast<float>(load_element(narrow.inputs.g.data(), DType::kBFloat16, i));
      wide.problem().g = head_gates(DType::kFloat32, s.sequences, tokens, s.heads);
      narrow.indices = wide.indices = {4, 0, 2};
      ASSERT_TRUE(run_decode(&narrow, backend).ok());
      ASSERT_TRUE(run_decode(&wide, backend).ok());
      EXPECT_EQ(std::memcmp(narrow.pool.data(), wide.pool.data(), wide.pool.size()), 0) << backend;
      EXPECT_EQ(std::memcmp(narrow.outputs.o.data(), wide.outputs.o.data(), wide.outputs.o.size()),
                0)
          << backend;
    }
}

/// vLLM's speculative form: read the state of the last accepted token, store one a token.
TEST(Decode, StoresAStateAToken) {
  for (const StateLayout layout : {StateLayout::kKV, StateLayout::kVK}) {
    DecodeShape s;
    s.sequences = 2;
    s.tokens = 3;
    s.columns = 4;
    s.slots = 9;
    s.layout = layout;
    Decode d = make_decode(s);
    d.problem().num_accepted_tokens = true;
    d.indices = {0, 1, 2, 3, 4, 5, -1, 8};
    d.accepted = {2, 1};
    const io::Buffer before = d.pool;
    Decode truth = make_decode(s);
    truth.problem().num_accepted_tokens = true;
    truth.indices = d.indices;
    truth.accepted = d.accepted;
    ASSERT_TRUE(run_decode(&d).ok());
    ASSERT_TRUE(run_decode(&truth, "oracle").ok());
    for (std::size_t i = 0; i < d.pool.size() / 4; ++i)
      ASSERT_NEAR(d.pool.as<float>()[i], truth.pool.as<float>()[i], 2e-5) << i;
    for (std::size_t i = 0; i < d.outputs.o.size() / 4; ++i)
      ASSERT_NEAR(d.outputs.o.as<float>()[i], truth.outputs.o.as<float>()[i], 2e-5) << i;
    const Problem& p = d.problem();
    // Sequence 0 started from slot 1 (2 accepted) and stored its first token in slot 0.
    const oracle::HeadResult first =
        oracle::run_head(p, d.inputs.tensors(), {0, 1}, 0,
                         oracle::load_state(p, *p.initial_state, before.data(), 1, 0));
    const std::vector<double> stored = oracle::load_state(p, *p.initial_state, d.pool.data(), 0, 0);
    EXPECT_LT(distance(stored, first.state), 1e-6);
    // Slots 3, 6, 7 and 8 were nobody's.
    const std::size_t state = before.size() / 9;
    for (const std::size_t unused : {3, 6, 7, 8})
      EXPECT_EQ(std::memcmp(before.data() + unused * state, d.pool.data() + unused * state, state),
                0);
  }
}

struct Across {
  StateLayout layout;
  DType in, out;
  int64_t tokens, K, V;
};

/// Runs a decode from a pool to a final_state and compares it with the oracle: sequence 0 starts
/// from slot 4, 1 from none, 2 from slot 0, 3 is masked; final states go to slots 2, 0, none, 1.
void expect_across(const std::string& backend, const Across& a, bool initial) {
  DecodeShape s{.sequences = 4, .tokens = a.tokens, .K = a.K, .V = a.V};
  s.layout = a.layout;
  s.state_dtype = a.in;
  Decode d = make_decode(s);
  Problem& p = d.problem();
  const int32_t final_slots[] = {2, 0, -1, 1};
  const uint8_t mask[] = {1, 1, 1, 0};
  d.indices = {4, -1, 0, 3};
  StateDesc target;
  target.num_slots = 3;
  target.indexed = true;
  const Shape shape = state_shape(p, target);
  target.tensor = contiguous(a.out, {shape[0], shape[1], shape[2], shape[3]});
  p.final_state = target;
  p.initial_state_mask = initial;
  if (!initial) p.initial_state.reset();
  io::Buffer final_state(static_cast<std::size_t>(3 * s.heads * a.K * a.V * dtype_size(a.out)));
  final_state.fill(0xff);
  const io::Buffer before = d.pool;
  Tensors t = d.inputs.tensors();
  d.outputs.attach(&t);
  t.initial_state = initial ? d.pool.data() : nullptr;
  t.initial_state_indices = d.indices.data();
  t.initial_state_mask = initial ? mask : nullptr;
  t.final_state = final_state.data();
  t.final_state_indices = final_slots;
  Plan plan;
  ASSERT_TRUE(make_plan(p, {}, test::device_of(backend), test::with_backend(backend), &plan).ok());
  io::Buffer workspace(plan.workspace_bytes);
  workspace.fill(0xff);
  const Status status = check::run_and_wait(plan, t, workspace.data(), workspace.size());
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(test::same_bits(before, d.pool)) << "the initial states are read only";
  for (int64_t n = 0; n < 4; ++n)
    for (int64_t head = 0; head < s.heads; ++head) {
      const auto at = static_cast<std::size_t>(n);
      const bool zero = !initial || d.indices[at] < 0 || mask[at] == 0;
      const oracle::HeadResult truth = oracle::run_head(
          p, t, {n * a.tokens, (n + 1) * a.tokens}, head,
          zero ? std::vector<double>{}
               : oracle::load_state(p, *p.initial_state, before.data(), d.indices[at], head));
      ASSERT_LT(distance(output_rows(d, n, head), truth.o), 3e-5) << backend << " sequence " << n;
      if (final_slots[at] < 0) continue;
      ASSERT_LT(distance(oracle::load_state(p, target, final_state.data(), final_slots[at], head),
                         truth.state),
                a.out == DType::kBFloat16 ? 0x1p-8 : 2e-6)
          << backend << " sequence " << n;
    }
}

TEST(Decode, FromOneBufferToAnother) {
  constexpr DType kFp32 = DType::kFloat32, kBf16 = DType::kBFloat16;
  for (const std::string& backend : test::backends())
    for (const StateLayout layout : {StateLayout::kKV, StateLayout::kVK})
      for (const auto& [in, out] :
           {std::pair{kFp32, kFp32}, std::pair{kBf16, kFp32}, std::pair{kFp32, kBf16}})
        for (const auto& [tokens, K, V] :
             {std::tuple{1, 77, 131}, std::tuple{1, 128, 128}, std::tuple{3, 64, 64}})
          for (const bool initial : {true, false})
            expect_across(backend, {layout, in, out, tokens, K, V}, initial);
}

TEST(Decode, AcrossBuffersEmptySequencesKeepTheirState) {
  for (const std::string& backend : test::backends())
    for (const bool initial : {true, false}) {
      check::GenerateOptions options = test::shape(0, 1, 16, 16);
      options.seq_lens = {3, 0, 1};
      options.initial_state = initial;
      Inputs inputs = check::generate(options);
      inputs.problem.operation = Operation::kDecode;
      const test::Result got = test::run_inputs(inputs, {.plan = test::with_backend(backend)});
      for (int i = 256; i < 512; ++i)
        ASSERT_EQ(got.outputs.final_state.as<float>()[i],
                  initial ? inputs.initial_state.as<float>()[i] : 0.0f)
            << backend;
    }
}

TEST(Decode, InPlaceAMaskedSequenceStartsFromZero) {
  for (const std::string& backend : test::backends()) {
    DecodeShape s;
    s.slots = 3;
    Decode d = make_decode(s);
    d.indices = {2, 0, 1};
    d.problem().initial_state_mask = true;
    const uint8_t mask[] = {1, 0, 1};
    d.mask = mask;
    Decode zeroed = make_decode(s);
    zeroed.indices = d.indices;
    std::memset(zeroed.pool.as<char>(), 0, zeroed.pool.size() / 3);  // slot 0, of sequence 1
    ASSERT_TRUE(run_decode(&d, backend).ok());
    ASSERT_TRUE(run_decode(&zeroed, backend).ok());
    EXPECT_TRUE(test::same_bits(d.pool, zeroed.pool)) << backend;
    EXPECT_TRUE(test::same_bits(d.outputs.o, zeroed.outputs.o)) << backend;
  }
}

/// An empty sequence has its initial state behind it; the mask makes that zero. A state a token
/// stores none.
TEST(Decode, InPlaceAnEmptyMaskedSequenceIsZero) {
  for (const std::string& backend : test::backends())
    for (const StateLayout layout : {StateLayout::kKV, StateLayout::kVK})
      for (const DType state_dtype : {DType::kFloat32, DType::kBFloat16})
        for (const auto& [K, V] : {std::pair{77, 131}, std::pair{64, 64}, std::pair{128, 128}})
          for (const std::vector<int64_t>& lengths :
               {std::vector<int64_t>{2, 0, 0, 1},
                std::vector<int64_t>{}})  // or rows without tokens
            for (const int64_t columns : {1, 2}) {
              DecodeShape s;
              s.sequences = 4, s.tokens = 0, s.lengths = lengths, s.slots = 9, s.columns = columns;
              s.layout = layout, s.state_dtype = state_dtype, s.K = K, s.V = V;
              Decode d = make_decode(s);
              d.problem().initial_state_mask = true;
              const uint8_t mask[] = {1, 0, 1, 1};
              d.mask = mask;
              d.indices = columns == 1 ? std::vector<int32_t>{4, 3, 0, 2}
                                       : std::vector<int32_t>{4, 5, 3, 6, 0, 7, 2, 8};
              d.accepted.assign(4, 1);
              const io::Buffer before = d.pool;
              ASSERT_TRUE(run_decode(&d, backend).ok());
              const std::size_t slot = before.size() / 9;
              const auto unchanged = [&](std::size_t i) {
                return std::memcmp(d.pool.as<char>() + i * slot, before.as<char>() + i * slot,
                                   slot) == 0;
              };
              const std::vector<char> zeros(slot);
              EXPECT_TRUE(columns == 1
                              ? std::memcmp(d.pool.as<char>() + 3 * slot, zeros.data(), slot) == 0
                              : unchanged(3) && unchanged(6))
                  << backend;
              EXPECT_TRUE(unchanged(0) && unchanged(1)) << backend;
              EXPECT_EQ(unchanged(4), lengths.empty()) << backend;
            }
}

/// Lengths that only the device knows may be longer: all of their tokens are computed.
TEST(Decode, DeviceLengthsAreNotCut) {
  if (test::device().kind != DeviceKind::kCuda) GTEST_SKIP() << "the CPU knows all lengths";
  check::GenerateOptions options = test::shape(0, 2, 32, 32);
  options.seq_lens = {13, 0, 1, 9};
  options.initial_state = true;
  Inputs inputs = check::generate(options);
  const test::Result expected = test::run_inputs(inputs);
  inputs.problem.operation = Operation::kDecode;
  const test::Result got = test::run_inputs(inputs, {.from_bounds = true});
  for (std::size_t i = 0; i < got.outputs.o.size() / 4; ++i)
    ASSERT_NEAR(got.outputs.o.as<float>()[i], expected.outputs.o.as<float>()[i], 1e-5);
  for (std::size_t i = 0; i < got.outputs.final_state.size() / 4; ++i)
    ASSERT_NEAR(got.outputs.final_state.as<float>()[i], expected.outputs.final_state.as<float>()[i],
                1e-5);
}

TEST(Decode, FollowsForward) {
  // Prefill 40 tokens, decode 5 singly: as if 45 had been prefilled.
  const Inputs whole = check::generate(test::shape(45, 1, 32, 32));
  const test::Result expected = test::run_inputs(whole);
  Inputs prefix = whole;
  prefix.problem.num_tokens = 40;
  const test::Result start = test::run_inputs(prefix);
  io::Buffer state = start.outputs.final_state;
  for (int64_t token = 40; token < 45; ++token) {
    Decode d;
    d.inputs = whole;
    Problem& p = d.problem();
    p.operation = Operation::kDecode;
    p.num_tokens = 1;
    StateDesc pool;
    pool.num_slots = 1;
    pool.tensor = contiguous(DType::kFloat32, {1, 1, 32, 32});
    p.initial_state = pool;
    d.outputs = check::make_outputs(&p, DType::kFloat32);
    p.beta.alignment = 4;  // its pointer moves by one element a token
    Plan plan;
    ASSERT_TRUE(make_plan(p, {}, test::device(), {}, &plan).ok());
    io::Buffer workspace(plan.workspace_bytes);
    Tensors t = whole.tensors();
    t.q = whole.q.as<float>() + token * 32;
    t.k = whole.k.as<float>() + token * 32;
    t.v = whole.v.as<float>() + token * 32;
    t.g = whole.g.as<float>() + token * 32;
    t.beta = whole.beta.as<float>() + token;
    d.outputs.attach(&t);
    t.initial_state = state.data();
    ASSERT_TRUE(check::run_and_wait(plan, t, workspace.data(), workspace.size()).ok());
    for (int64_t c = 0; c < 32; ++c)
      ASSERT_NEAR(d.outputs.o.as<float>()[c], expected.outputs.o.as<float>()[token * 32 + c], 1e-6);
  }
  for (int i = 0; i < 32 * 32; ++i)
    ASSERT_NEAR(state.as<float>()[i], expected.outputs.final_state.as<float>()[i], 1e-6);
}

TEST(Decode, ThreadCountsGiveEqualBits) {
  Decode one = make_decode({.sequences = 5, .tokens = 2, .slots = 5});
  one.indices = {0, 1, 2, 3, 4};
  Decode many = one;
  setenv("OMP_NUM_THREADS", "1", 1);
  ASSERT_TRUE(run_decode(&one).ok());
  setenv("OMP_NUM_THREADS", "4", 1);
  ASSERT_TRUE(run_decode(&many).ok());
  unsetenv("OMP_NUM_THREADS");
  EXPECT_TRUE(test::same_bits(one.pool, many.pool));
  EXPECT_TRUE(test::same_bits(one.outputs.o, many.outputs.o));
}

}  // namespace
}  // namespace kda
