// SPDX-License-Identifier: Apache-2.0
// Decode of drafts: states a token in a buffer of their own, and trees, against the recurrence in
// float64 along each token's ancestors.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>

#include "core/convert.hpp"
#include "core/layout.hpp"
#include "cpu/oracle/oracle.hpp"
#include "plan/ledger.hpp"
#include "support/harness.hpp"

namespace kda {
namespace {

namespace oracle = cpu::oracle;

constexpr int64_t kSequences = 4, kTokens = 6, kPool = 7, kDrafts = kSequences * kTokens + 3;

struct Shapes {
  int64_t K = 32, V = 48, heads = 2, shared = 1;  ///< shared: value heads of a q/k head
  StateLayout layout = StateLayout::kKV;
  DType pool = DType::kFloat32, drafts = DType::kFloat32, rows = DType::kFloat32;
  bool one_gate = false;  ///< a head
  HeadMap map = HeadMap::kGrouped;
};

/// Four sequences of six tokens: from slots 5 and 2, one without a slot, one that is masked.
struct Drafts {
  check::Inputs inputs;
  io::Buffer pool, drafts;
  std::vector<int32_t> from = {5, 2, -1, 0}, to, accepted, parents;
  std::vector<uint8_t> mask = {1, 1, 1, 0};
  check::Outputs outputs;
  std::string message;
  int32_t flags = 0;

  Problem& problem() { return inputs.problem; }
};

StateDesc states(const Problem& p, DType dtype, int64_t slots, io::Buffer* buffer, uint64_t seed) {
  StateDesc desc;
  desc.num_slots = slots;
  desc.indexed = true;
  const Shape shape = state_shape(p, desc);
  desc.tensor = contiguous(dtype, {shape[0], shape[1], shape[2], shape[3]});
  const int64_t count = slots * shape[1] * shape[2] * shape[3];
  *buffer = io::Buffer(static_cast<std::size_t>(count * dtype_size(dtype)));
  check::Random random(seed);
  // As large as normal numbers, which took three quarters of these tests' time.
  for (int64_t i = 0; i < count; ++i)
    store_element(buffer->data(), dtype, i, static_cast<float>(random.uniform(-1.7, 1.7)));
  return desc;
}

Drafts make_drafts(const Shapes& s) {
  Drafts d;
  check::GenerateOptions options = test::shape(kTokens, s.heads, s.K, s.V);
  options.batch = kSequences;
  options.num_value_heads = s.heads * s.shared;
  options.dtype = s.rows;
  d.inputs = check::generate(options);
  Problem& p = d.problem();
  p.operation = Operation::kDecode;
  p.state_layout = s.layout;
  p.state_index_columns = kTokens;
  p.initial_state_mask = true;
  p.head_map = s.map;
  if (s.one_gate) {
    p.g.strides = {kTokens * s.heads * s.shared, s.heads * s.shared, 1, 0};
    p.g.alignment = dtype_size(s.rows);
  }
  p.initial_state = states(p, s.pool, kPool, &d.pool, 1);
  p.final_state = states(p, s.drafts, kDrafts, &d.drafts, 2);
  for (int32_t i = 0; i < kSequences * kTokens; ++i) d.to.push_back(i + 2);
  // A root with two branches; a chain; whatever a skipped row holds; roots of one token.
  d.parents = {-7, 0, 0, 1, 2, 1, 0, 0, 1, 2, 3, 4, 9, 9, -9, 9, 9, 9, 99, 0, 0, 0, 0, 0};
  d.outputs = check::make_outputs(&p, s.rows);
  d.outputs.o.fill(0xff);
  return d;
}

/// `known`: the plan has the lengths of packed sequences.
bool run(Drafts* d, const std::string& backend = "", bool known = true) {
  Plan plan;
  const DeviceFacts device = test::device_of(backend);
  const PlanOptions options = test::with_backend(backend);
  const auto& ends = d->inputs.cu_seqlens;
  const std::vector<int32_t> narrow(ends.begin(), ends.end());
  Status status = known ? make_plan(d->problem(), ends, device, options, &plan)
                        : make_plan_from_bounds(d->problem(), device, options, &plan);
  io::Buffer workspace(plan.workspace_bytes);
  if (status.ok()) {
    Tensors t = d->inputs.tensors();
    t.o = d->outputs.o.data();
    t.cu_seqlens = known ? nullptr : narrow.data();
    t.initial_state = d->pool.data();
    t.initial_state_indices = d->from.data();
    t.initial_state_mask = d->mask.data();
    t.num_accepted_tokens = d->accepted.data();
    t.token_parents = d->parents.data();
    t.final_state = d->drafts.data();
    t.final_state_indices = d->to.data();
    status = check::run_and_wait(plan, t, workspace.data(), workspace.size());
  }
  d->message = status.message();
  if (const void* flags = plan::find_block(plan, workspace.data(), "device_flags"))
    std::memcpy(&d->flags, flags, sizeof d->flags);
  return status.ok();
}

/// Slot of the state after token t, or -1.
int64_t slot_of(Drafts& d, int64_t n, int64_t t) {
  const Problem& p = d.problem();
  return in_place(p) ? state_slot(p, *p.initial_state, d.from.data(), n * kTokens + t)
                     : state_slot(p, *p.final_state, d.to.data(), n * kTokens + t);
}

double distance(const std::vector<double>& x, const std::vector<double>& ref) {
  double error = 0, norm = 1e-12;
  for (std::size_t i = 0; i < ref.size(); ++i) {
    error += (x[i] - ref[i]) * (x[i] - ref[i]);
    norm += ref[i] * ref[i];
  }
  return std::sqrt(error / norm);
}

bool row_is(Drafts& d, int64_t n, int64_t t, int64_t head, int byte) {
  const Problem& p = d.problem();
  const char* row = at_bytes(d.outputs.o.data(), p.o, row_offset(p, p.o, n * kTokens + t, head));
  for (int64_t i = 0; i < p.value_dim * dtype_size(p.o.dtype); ++i)
    if (static_cast<unsigned char>(row[i]) != byte) return false;
  return true;
}

/// `d` has run; `before`: all as it was. `computed`: tokens of each sequence.
void expect_right(Drafts& d, const Drafts& before, const std::vector<int64_t>& computed,
                  const std::string& what) {
  const Problem& p = d.problem();
  const Tensors t = d.inputs.tensors();
  const StateDesc& stored = in_place(p) ? *p.initial_state : *p.final_state;
  const io::Buffer& after = in_place(p) ? d.pool : d.drafts;
  const io::Buffer& was = in_place(p) ? before.pool : before.drafts;
  const double limit = stored.tensor.dtype == DType::kBFloat16 ? 0x1p-6 : 3e-5;
  std::map<int64_t, bool> written;
  for (int64_t n = 0; n < kSequences; ++n)
    for (int64_t head = 0; head < p.num_value_heads; ++head) {
      const auto at = static_cast<std::size_t>(n);
      const int64_t column = d.accepted.empty() ? 0 : d.accepted[at] - 1;
      const int64_t source =
          state_slot(p, *p.initial_state, d.from.data(), n * initial_columns(p) + column);
      std::vector<oracle::HeadResult> tokens;
      for (int64_t i = 0; i < computed[at]; ++i) {
        std::vector<double> start;
        if (i > 0) {
          const int64_t parent =
              p.token_parents ? d.parents[static_cast<std::size_t>(n * kTokens + i)] : i - 1;
          start = tokens[static_cast<std::size_t>(parent)].state;
        } else if (!p.initial_state_mask || d.mask[at]) {
          start = oracle::load_state(p, *p.initial_state, before.pool.data(), source, head);
        }
        const int64_t token = n * kTokens + i;
        tokens.push_back(oracle::run_head(p, t, {token, token + 1}, head, start));
        std::vector<double> o;
        for (int64_t c = 0; c < p.value_dim; ++c)
          o.push_back(
              load_element(d.outputs.o.data(), p.o.dtype, row_offset(p, p.o, token, head) + c));
        ASSERT_LT(distance(o, tokens.back().o), p.o.dtype == DType::kFloat32 ? limit : 0x1p-7)
            << what << " sequence " << n << " token " << i;
        const int64_t slot = slot_of(d, n, i);
        if (slot < 0) continue;
        written[slot] = true;
        ASSERT_LT(
            distance(oracle::load_state(p, stored, after.data(), slot, head), tokens.back().state),
            limit)
            << what << " sequence " << n << " token " << i;
      }
      for (int64_t i = computed[at]; i < kTokens; ++i)
        ASSERT_TRUE(row_is(d, n, i, head, zeroes_skipped(p) ? 0 : 0xff))
            << what << " sequence " << n << " token " << i;
    }
  const std::size_t bytes = was.size() / static_cast<std::size_t>(stored.num_slots);
  for (int64_t slot = 0; slot < stored.num_slots; ++slot) {
    const std::size_t from = static_cast<std::size_t>(slot) * bytes;
    if (!written[slot]) {
      ASSERT_EQ(std::memcmp(after.data() + from, was.data() + from, bytes), 0)
          << what << " slot " << slot;
    }
  }
  if (!in_place(p)) {
    EXPECT_TRUE(test::same_bits(d.pool, before.pool)) << what << ": the committed states";
  }
}

std::vector<std::string> all_backends() {
  std::vector<std::string> backends = test::backends();
  backends.emplace_back("oracle");
  return backends;
}

std::vector<Shapes> all_shapes() {
  constexpr DType kFp32 = DType::kFloat32, kBf16 = DType::kBFloat16;
  std::vector<Shapes> shapes;
  for (const StateLayout layout : {StateLayout::kKV, StateLayout::kVK}) {
    shapes.push_back({.layout = layout});
    shapes.push_back({.K = 77, .V = 131, .heads = 1, .layout = layout, .drafts = kBf16});
    shapes.push_back({.K = 128, .V = 128, .heads = 1, .layout = layout, .rows = kBf16});
    shapes.push_back({.K = 128, .V = 128, .layout = layout, .pool = kBf16, .one_gate = true});
  }
  shapes.push_back({.K = 128, .V = 128, .heads = 1, .pool = kBf16, .drafts = kBf16});
  shapes.push_back({.K = 256, .V = 64, .heads = 1, .pool = kFp32, .one_gate = true});
  shapes.push_back({.K = 128, .V = 128, .heads = 3, .rows = kBf16, .one_gate = true});
  shapes.push_back({.shared = 3});
  shapes.push_back({.shared = 3, .map = HeadMap::kTiled});
  shapes.push_back({.K = 128, .V = 128, .shared = 2, .one_gate = true, .map = HeadMap::kTiled});
  return shapes;
}

/// On every backend and shape, after `change`: the first `computed[n]` tokens of each sequence are
/// right, and no other place is written.
template <class Change>
void expect_right_everywhere(const std::vector<int64_t>& computed, const Change& change) {
  for (const std::string& backend : all_backends())
    for (const Shapes& s : all_shapes()) {
      Drafts d = make_drafts(s);
      change(s, d);
      const Drafts before = d;
      ASSERT_TRUE(run(&d, backend)) << d.message;
      expect_right(d, before, computed, backend);
    }
}

TEST(Drafts, AChainIntoABufferOfItsOwn) {
  expect_right_everywhere({6, 6, 0, 6}, [](const Shapes&, Drafts& d) {
    d.to[3] = -1;  // the next token goes on from it all the same
  });
}

TEST(Drafts, TreesIntoABufferOfTheirOwn) {
  expect_right_everywhere({4, 6, 0, 6}, [](const Shapes&, Drafts& d) {
    d.problem().token_parents = true;
    d.problem().zero_skipped = true;
    d.parents[4] = -1;  // shorter than the others
    d.to[9] = -1;       // in the chain, so that nobody reads it back
  });
}

/// From the accepted node of the tree before, into slots of the same pool.
TEST(Drafts, TreesInPlace) {
  expect_right_everywhere({6, 6, 0, 6}, [](const Shapes& s, Drafts& d) {
    Problem& p = d.problem();
    p.initial_state = states(p, s.pool, kDrafts, &d.pool, 3);
    p.final_state.reset();
    p.token_parents = p.num_accepted_tokens = true;
    p.first_slot = 2;  // implies zero_skipped
    d.from = d.to;
    for (const std::size_t i : {12, 14, 20}) d.from[i] = i == 12 ? 1 : -3;
    d.accepted = {3, 1, 1, 6};
  });
}

/// A chain by token_parents, one without them, and one in place have the same bits in fp32.
TEST(Drafts, AChainIsATreeToo) {
  for (const std::string& backend : all_backends())
    for (const StateLayout layout : {StateLayout::kKV, StateLayout::kVK}) {
      Drafts plain = make_drafts({.K = 128, .V = 128, .heads = 1, .layout = layout});
      Drafts tree = plain;
      tree.problem().token_parents = true;
      for (std::size_t i = 0; i < tree.parents.size(); ++i)
        tree.parents[i] = static_cast<int32_t>(i % kTokens) - 1;
      Drafts placed = plain;
      const Problem& p = plain.problem();
      placed.problem().initial_state = p.final_state;
      placed.problem().final_state.reset();
      const std::size_t state = plain.pool.size() / kPool;
      placed.from = plain.to;
      for (std::size_t n = 0; n < 4; ++n)
        if (plain.from[n] < 0)
          placed.from[n * kTokens] = -1;
        else
          std::memcpy(placed.drafts.data() + plain.to[n * kTokens] * state,
                      plain.pool.data() + plain.from[n] * state, state);
      std::swap(placed.pool, placed.drafts);
      ASSERT_TRUE(run(&plain, backend)) << plain.message;
      ASSERT_TRUE(run(&tree, backend)) << tree.message;
      ASSERT_TRUE(run(&placed, backend)) << placed.message;
      EXPECT_TRUE(test::same_bits(plain.drafts, tree.drafts)) << backend;
      EXPECT_TRUE(test::same_bits(plain.outputs.o, tree.outputs.o)) << backend;
      EXPECT_TRUE(test::same_bits(plain.drafts, placed.pool)) << backend;
      EXPECT_TRUE(test::same_bits(plain.outputs.o, placed.outputs.o)) << backend;
    }
}

TEST(Drafts, WithoutInitialStatesTheyStartFromZero) {
  for (const std::string& backend : all_backends()) {
    Drafts d = make_drafts({});
    Problem& p = d.problem();
    Drafts zero = d;
    zero.from = {0, 0, 0, 0};  // read only: any number of sequences may share a slot
    zero.mask = {0, 0, 0, 0};
    p.initial_state.reset();
    p.initial_state_mask = false;
    ASSERT_TRUE(run(&d, backend)) << d.message;
    ASSERT_TRUE(run(&zero, backend)) << zero.message;
    EXPECT_TRUE(test::same_bits(d.drafts, zero.drafts)) << backend;
    EXPECT_TRUE(test::same_bits(d.outputs.o, zero.outputs.o)) << backend;
  }
}

/// The first lengths[n] tokens of each row of `rows`, packed.
Drafts packed_from(const Drafts& rows, const std::vector<int64_t>& lengths) {
  Drafts d = rows;
  Problem& p = d.problem();
  p.batch = 1;
  p.cu_seqlens = DType::kInt32;
  auto& ends = d.inputs.cu_seqlens;
  ends = {0};
  for (const int64_t length : lengths) ends.push_back(ends.back() + length);
  p.num_tokens = ends.back();
  const std::pair<const io::Buffer*, io::Buffer*> buffers[] = {{&rows.inputs.q, &d.inputs.q},
                                                               {&rows.inputs.k, &d.inputs.k},
                                                               {&rows.inputs.v, &d.inputs.v},
                                                               {&rows.inputs.g, &d.inputs.g},
                                                               {&rows.inputs.beta, &d.inputs.beta}};
  for (const auto& [from, to] : buffers) {
    const std::size_t token = from->size() / (kSequences * kTokens);
    for (std::size_t n = 0; n < lengths.size(); ++n)
      std::memcpy(to->data() + static_cast<std::size_t>(ends[n]) * token,
                  from->data() + n * kTokens * token, static_cast<std::size_t>(lengths[n]) * token);
  }
  return d;
}

/// Lengths that the plan knows, and such as lie on the device alone.
TEST(Drafts, PackedSequencesOfDifferentLengths) {
  const std::vector<int64_t> lengths = {6, 4, 3, 1};
  for (const std::string& backend : all_backends())
    for (const int64_t K : {32, 128})
      for (const bool known : {true, false}) {
        Drafts rows = make_drafts({.K = K, .V = K});
        rows.problem().token_parents = true;
        rows.problem().zero_skipped = true;
        Drafts packed = packed_from(rows, lengths);
        for (std::size_t n = 0; n < lengths.size(); ++n)  // rows end where packed sequences do
          if (lengths[n] < kTokens)
            rows.parents[n * kTokens + static_cast<std::size_t>(lengths[n])] = -1;
        ASSERT_TRUE(run(&packed, backend, known)) << packed.message;
        EXPECT_EQ(packed.flags, 0) << backend;
        ASSERT_TRUE(run(&rows, backend)) << rows.message;
        EXPECT_TRUE(test::same_bits(rows.drafts, packed.drafts)) << backend << known;
        const std::size_t token = rows.outputs.o.size() / (kSequences * kTokens);
        for (std::size_t n = 0; n < lengths.size(); ++n)
          EXPECT_EQ(std::memcmp(rows.outputs.o.data() + n * kTokens * token,
                                packed.outputs.o.data() +
                                    static_cast<std::size_t>(packed.inputs.cu_seqlens[n]) * token,
                                static_cast<std::size_t>(lengths[n]) * token),
                    0)
              << backend << known << " sequence " << n;
      }
}

/// Every sequence is skipped, as one is whose slot is none; such a pool has no memory.
TEST(Drafts, APoolWithoutSlotsHasNoState) {
  for (const std::string& backend : all_backends())
    for (const bool tree : {true, false}) {
      Drafts d = make_drafts({});
      d.problem().token_parents = tree;
      d.problem().initial_state->num_slots = 0;
      d.from = {-1, -1, -1, -1};
      d.pool = io::Buffer();
      const Drafts before = d;
      ASSERT_TRUE(run(&d, backend)) << d.message;
      expect_right(d, before, {0, 0, 0, 0}, backend);
      d.problem().zero_skipped = true;
      ASSERT_TRUE(run(&d, backend)) << d.message;
      expect_right(d, before, {0, 0, 0, 0}, backend);
    }
}

/// What the CPU refuses a GPU takes as the end of the sequence, and flags.
TEST(Drafts, ParentsThatAreNotThere) {
  const struct {
    std::size_t entry;
    int32_t parent, slot;  ///< token_parents there; slot of that parent's state
    const char* message;
  } rows[] = {{3, 3, 5, "token_parents: entry 0, 3 = 3 is not below 3"},
              {3, INT32_MAX, 5, "token_parents: entry 0, 3 = 2147483647 is not below 3"},
              {3, 1, -1, "token_parents: entry 0, 3 = 1, a token whose state has no slot"}};
  for (const auto& row : rows) {
    Drafts d = make_drafts({});
    d.problem().token_parents = true;
    d.problem().zero_skipped = true;
    d.parents[row.entry] = row.parent;
    if (row.slot < 0) d.to[static_cast<std::size_t>(row.parent)] = row.slot;
    const Drafts before = d;
    const bool ran = run(&d);
    if (!test::on_cuda()) {
      EXPECT_FALSE(ran);
      EXPECT_EQ(d.message, row.message);
      continue;
    }
    ASSERT_TRUE(ran) << d.message;
    EXPECT_EQ(d.flags, kBadTokenParents);
    expect_right(d, before, {3, 6, 0, 6}, row.message);
  }
  Drafts good = make_drafts({});
  good.problem().token_parents = true;
  good.parents[3] = -1;
  ASSERT_TRUE(run(&good)) << good.message;
  EXPECT_EQ(good.flags, 0);
}

TEST(Drafts, SlotsBeyondTheBuffer) {
  Drafts d = make_drafts({});
  d.to[1] = kDrafts;
  const Drafts before = d;
  const bool ran = run(&d);
  if (!test::on_cuda()) {
    EXPECT_FALSE(ran);
    EXPECT_EQ(d.message.find("final_state_indices: entry 1 = 27 is outside"), 0u) << d.message;
    return;
  }
  ASSERT_TRUE(ran) << d.message;
  EXPECT_EQ(d.flags, kBadFinalIndex);
  d.to[1] = -1;
  expect_right(d, before, {6, 6, 0, 6}, "");
}

}  // namespace
}  // namespace kda
