// SPDX-License-Identifier: Apache-2.0
// Calls with a tail: the same bits for every cut of a sequence, states that fold, forks, what is
// refused. Random histories are in tests/soak/tail_history.cpp.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "core/convert.hpp"
#include "core/layout.hpp"
#include "cpu/oracle/oracle.hpp"
#include "kda/call.hpp"
#include "plan/ledger.hpp"
#include "support/harness.hpp"

namespace kda {
namespace {

namespace oracle = cpu::oracle;

constexpr int64_t kTokens = 70, kHeads = 2, kValueHeads = 4, kKey = 33, kValue = 40, kSlots = 5;
constexpr int64_t kRows = 20;      // R: up to 5 tokens a decode
constexpr int64_t kManyRows = 47;  // up to 32

/// As the type of a pool: bf16, split.
constexpr DType kSplit = DType::kInt16;

/// Sizes and types of a sequence: those that fast kernels of a GPU serve, and others.
struct Sizes {
  int64_t K = kKey, V = kValue;
  DType dtype = DType::kFloat32;
  check::Regime regime = check::Regime::kNeedle;
  bool head_gates = false;  ///< and one bias a head
  int64_t rows = kRows, slots = kSlots;
  int64_t heads = kHeads;  ///< of q and k
};

/// A pool, its tails, and one call on them.
struct World {
  check::Inputs inputs;  ///< one sequence of kTokens
  int64_t K, V, R, num_slots;
  io::Buffer pool, k, g, v_new, rest, v, beta;  ///< the last three of split states
  std::vector<int32_t> folded;
  std::vector<int32_t> slots = {2}, positions = {0}, sources, parents, accepted;
  std::vector<uint8_t> mask = {1};
  std::vector<int64_t> lengths;  ///< cu_seqlens, which the plan does not know; empty: none
  std::function<void(Problem*)> change = [](Problem*) {};
  std::string backend;
  std::string of_forward;  ///< the backend of a forward; empty: `backend`
  bool on_cpu = false;     ///< where others are on a GPU
  int32_t num_sms = 0;     ///< plan for a GPU of so few; 0: of all
  DType out = DType::kFloat32;
  std::vector<std::vector<int32_t>> folded_after;  ///< of pieces
  int32_t flags = 0;                               ///< device_flags of the last call on a GPU

  explicit World(StateLayout layout = StateLayout::kKV, DType states = DType::kFloat32,
                 const Sizes& sizes = {})
      : K(sizes.K), V(sizes.V), R(sizes.rows), num_slots(sizes.slots) {
    check::GenerateOptions options = test::shape(kTokens, sizes.heads, K, V);
    options.num_value_heads = kValueHeads;
    options.dtype = sizes.dtype;
    options.regime = sizes.regime;
    options.head_gates = sizes.head_gates;
    inputs = check::generate(options);
    if (sizes.head_gates) give_one_bias();
    inputs.problem.state_layout = layout;
    split = states == kSplit;
    state_dtype = split ? DType::kBFloat16 : states;
    const auto made = [](int64_t elements, DType dtype = DType::kFloat32) {
      io::Buffer buffer(static_cast<std::size_t>(elements * dtype_size(dtype)));
      buffer.fill(0xff);
      return buffer;
    };
    pool = made(num_slots * kValueHeads * K * V, state_dtype);
    k = made(num_slots * sizes.heads * R * K), g = made(num_slots * kValueHeads * R * K);
    v_new = made(num_slots * kValueHeads * R * V);
    rest = made(num_slots * kValueHeads * K * V, DType::kInt16);
    v = v_new, beta = made(num_slots * kValueHeads * R);
    folded.assign(num_slots * kValueHeads, -1);
  }

  void give_one_bias() {
    inputs.dt_bias = io::Buffer(kValueHeads * 4);
    for (int64_t head = 0; head < kValueHeads; ++head)
      inputs.dt_bias.as<float>()[head] = 0.25f * static_cast<float>(head) - 0.5f;
    inputs.problem.dt_bias = head_bias(DType::kFloat32, kValueHeads);
  }

  /// Tokens [begin, end) of the sequence for each slot, into `o` [N, end - begin, HV, V].
  Status call(Operation operation, int64_t begin, int64_t end, std::vector<float>* o) {
    check::Inputs part = test::slice(inputs, begin, end);
    Problem p = part.problem;
    const auto N = static_cast<int64_t>(slots.size());
    p.operation = operation;
    p.num_sequences = p.batch = N;
    // The same tokens in every row of the batch.
    for (TensorDesc* desc : {&p.q, &p.k, &p.v, &p.g, &p.beta}) desc->strides[0] = 0;
    p.num_tokens = end - begin;
    p.o = contiguous(out, {N, end - begin, kValueHeads, V});
    if (!lengths.empty()) p.cu_seqlens = DType::kInt64, p.batch = 1;
    p.initial_state = states(p, state_dtype, num_slots, true);
    p.initial_state_mask = true;
    p.tail = tails(p, R);
    if (split) p.tail->split = split_states(p, R);
    p.tail->sources = !sources.empty();
    p.tail->accepted_columns = static_cast<int64_t>(accepted.size()) / N;
    if (!parents.empty()) {
      p.token_parents = true;
      p.state_index_columns = static_cast<int64_t>(parents.size()) / N;
    }
    change(&p);
    Plan plan;
    const bool other = operation == Operation::kForward && !of_forward.empty();
    DeviceFacts device = on_cpu ? cpu_facts() : test::device_of(backend);
    if (num_sms > 0) device.num_sms = num_sms;
    KDA_RETURN_IF_ERROR(
        make_plan_from_bounds(p, device, test::with_backend(other ? of_forward : backend), &plan));
    io::Buffer workspace(plan.workspace_bytes);
    workspace.fill(0xff);
    o->assign(static_cast<std::size_t>(N * (end - begin) * kValueHeads * V), NAN);
    io::Buffer rows(o->size() * static_cast<std::size_t>(dtype_size(out)));
    rows.fill(0xff);
    Tensors t = part.tensors();
    t.o = rows.data();
    t.cu_seqlens = lengths.data();
    t.initial_state = pool.data();
    t.initial_state_indices = slots.data();
    t.initial_state_mask = mask.data();
    t.token_parents = parents.data();
    t.tail = {k.data(),       g.data(),        v_new.as<float>(),  folded.data(), positions.data(),
              sources.data(), accepted.data(), rest.as<int16_t>(), v.data(),      beta.data()};
    KDA_RETURN_IF_ERROR(check::run_and_wait(plan, t, workspace.data(), workspace.size()));
    for (std::size_t i = 0; i < o->size(); ++i)
      (*o)[i] = static_cast<float>(load_double(rows.data(), out, static_cast<int64_t>(i)));
    if (const void* word = plan::find_block(plan, workspace.data(), "device_flags"))
      flags = *static_cast<const int32_t*>(word);
    return {};
  }

  Status settle() {
    const auto before = change;
    change = [&](Problem* p) { p->tail->settle = true; };
    std::vector<float> none;
    const Status status = call(Operation::kDecode, 0, 0, &none);
    change = before;
    return status;
  }

  std::vector<double> state(int64_t slot, int64_t head) const {
    const Problem p = inputs.problem;
    if (!split)
      return oracle::load_state(p, states(p, state_dtype, num_slots, true), pool.data(), slot,
                                head);
    io::Buffer joined(static_cast<std::size_t>(num_slots * kValueHeads * K * V) * 4);
    for (int64_t i = 0; i < num_slots * kValueHeads * K * V; ++i)
      joined.as<float>()[i] = join_float(pool.as<uint16_t>()[i], rest.as<int16_t>()[i]);
    return oracle::load_state(p, states(p, DType::kFloat32, num_slots, true), joined.data(), slot,
                              head);
  }
  /// All that calls write but o and `folded`.
  std::vector<io::Buffer World::*> written() const {
    std::vector<io::Buffer World::*> all = {&World::pool, &World::k, &World::g, &World::v_new};
    if (split) all.insert(all.end(), {&World::rest, &World::v, &World::beta});
    return all;
  }

  /// Bytes of a slot.
  std::size_t slot_bytes(io::Buffer World::*of) const {
    return (this->*of).size() / static_cast<std::size_t>(num_slots);
  }

  DType state_dtype;
  bool split;
};

bool same_states(const World& a, const World& b) {
  return std::memcmp(a.pool.data(), b.pool.data(), a.pool.size()) == 0 &&
         std::memcmp(a.rest.data(), b.rest.data(), a.rest.size()) == 0;
}

/// Pieces of a sequence: how many of its tokens, and by which operation; drafts that are rejected
/// come behind those of a decode. A decode without tokens settles.
struct Piece {
  Operation operation;
  int64_t tokens, rejected = 0;
};
constexpr Operation kPrefill = Operation::kForward, kStep = Operation::kDecode;

/// o of the whole sequence; the pool is settled then.
std::vector<float> play(World* world, const std::vector<Piece>& pieces) {
  std::vector<float> all, o;
  int64_t at = 0;
  for (const Piece& piece : pieces) {
    world->mask[0] = at > 0;
    world->positions[0] = static_cast<int32_t>(at);
    const int64_t tokens = piece.tokens + piece.rejected;
    const Status status = piece.operation == kStep && tokens == 0
                              ? world->settle()
                              : world->call(piece.operation, at, at + tokens, &o);
    EXPECT_TRUE(status.ok()) << status.message();
    if (!status.ok()) return all;
    EXPECT_EQ(world->flags, 0);
    world->folded_after.push_back(world->folded);
    all.insert(all.end(), o.begin(), o.begin() + piece.tokens * kValueHeads * world->V);
    at += piece.tokens;
  }
  world->positions[0] = static_cast<int32_t>(at);
  world->mask[0] = 1;
  EXPECT_TRUE(world->settle().ok());
  return all;
}

/// A sequence of so many tokens in slot 2.
void begin(World* world, int64_t tokens) {
  std::vector<float> o;
  world->mask[0] = 0;
  ASSERT_TRUE(world->call(kPrefill, 0, tokens, &o).ok());
  world->mask[0] = 1, world->positions[0] = static_cast<int32_t>(tokens);
}

/// Implementations of the device that have tails.
std::vector<std::string> backends_with_tails() {
  return test::on_cuda() ? std::vector<std::string>{"recurrent"} : test::backends();
}

std::vector<Piece> repeated(int64_t count, Piece piece) {
  return std::vector<Piece>(static_cast<std::size_t>(count), piece);
}

/// |x - y| / |y|
template <class T, class U>
double distance(const std::vector<T>& x, const std::vector<U>& y) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double apart = x[i] - y[i], of_y = y[i];
    difference += apart * apart, size += of_y * of_y;
  }
  return std::sqrt(difference / size);
}

/// `fresh`: a world in front of its first call. Inputs take longer to make than to copy.
void expect_same_bits_for_every_cut(const World& fresh) {
  World steps = fresh;
  const std::string& backend = fresh.backend;
  const std::vector<float> expected = play(&steps, repeated(65, {kStep, 1}));
  std::vector<std::vector<Piece>> cuts = {
      {{kPrefill, 65}},
      {{kPrefill, 7}, {kPrefill, 20}, {kStep, 1}, {kPrefill, 5}, {kPrefill, 32}},
      repeated(65, {kStep, 1, 4}),
      // Drafts up to a boundary.
      {{kPrefill, 27}, {kStep, 5}, {kStep, 3, 2}, {kPrefill, 11}, {kStep, 2, 3}, {kPrefill, 17}}};
  if (fresh.R == kManyRows)  // several batches of tokens, full ones and others
    cuts.push_back({{kStep, 16, 16},
                    {kStep, 9, 8},
                    {kStep, 7, 3},
                    {kStep, 3},
                    {kStep, 13},
                    {kStep, 16, 6},
                    {kStep, 1, 2}});
  for (const std::vector<Piece>& cut : cuts) {
    // A GPU has other roundings in front of a boundary: PrefillsOnAGpuEndInTailsAsOnACpu.
    if (test::on_cuda() && cut[0].operation == kPrefill) continue;
    World world = fresh;
    ASSERT_EQ(play(&world, cut), expected) << backend;
    ASSERT_TRUE(same_states(world, steps));
    ASSERT_EQ(world.folded, steps.folded);
  }
  const bool in_bf16 = fresh.state_dtype == DType::kBFloat16 && !fresh.split;
  const double bound = in_bf16 ? 2e-2 : 1e-5;
  // Accepted drafts behind a boundary have read the state in front of it: roundings differ. Those
  // of split states make the same state all the same.
  World across = fresh;
  ASSERT_LT(distance(play(&across, repeated(13, {kStep, 5})), expected), in_bf16       ? bound
                                                                         : fresh.split ? 3e-3
                                                                                       : 1e-6);
  if (fresh.split) {
    ASSERT_TRUE(same_states(across, steps)) << backend;
  }
  // And it is the recurrence.
  const check::Inputs part = test::slice(steps.inputs, 0, 65);
  for (int64_t head = 0; head < kValueHeads; ++head) {
    const oracle::HeadResult truth =
        oracle::run_head(part.problem, part.tensors(), {0, 65}, head, {});
    ASSERT_LT(distance(steps.state(2, head), truth.state), bound);
  }
}

void expect_same_bits_for_every_cut(StateLayout layout, DType states, const Sizes& sizes) {
  World fresh(layout, states, sizes);
  for (const std::string& backend : backends_with_tails()) {
    fresh.backend = backend;
    expect_same_bits_for_every_cut(fresh);
  }
}

TEST(Tail, CutsOfASequenceHaveTheSameBits) {
  const Sizes one_gate{20, 16, DType::kBFloat16, check::Regime::kSoftplus, true};
  for (const StateLayout layout : {StateLayout::kKV, StateLayout::kVK})
    for (const DType states : {DType::kFloat32, DType::kBFloat16, kSplit})
      expect_same_bits_for_every_cut(layout, states, {});
  expect_same_bits_for_every_cut(StateLayout::kKV, DType::kFloat32, one_gate);
  expect_same_bits_for_every_cut(StateLayout::kVK, kSplit, one_gate);
}

TEST(Tail, TheOracleAgrees) {
  if (test::on_cuda()) GTEST_SKIP() << "its calls are on host memory";
  // Drafts across a boundary among them.
  const std::vector<Piece> cut = {{kPrefill, 27}, {kStep, 5}, {kStep, 3, 2}, {kPrefill, 11},
                                  {kStep, 5},     {kStep, 1}, {kPrefill, 16}};
  const Sizes one_gate{20, 16, DType::kBFloat16, check::Regime::kSoftplus, true};
  const struct {
    StateLayout layout;
    DType states;
    double bound;
    Sizes sizes;
  } cases[] = {{StateLayout::kKV, DType::kFloat32, 1e-5, {}},
               {StateLayout::kVK, DType::kBFloat16, 3e-2, {}},
               {StateLayout::kKV, kSplit, 5e-3, {}},
               {StateLayout::kVK, kSplit, 5e-3, one_gate}};
  for (const auto& x : cases) {
    World fast(x.layout, x.states, x.sizes), oracle(x.layout, x.states, x.sizes);
    oracle.backend = "oracle";
    EXPECT_LT(distance(play(&fast, cut), play(&oracle, cut)), x.bound);
    EXPECT_EQ(fast.folded, oracle.folded);
    for (int64_t head = 0; head < kValueHeads; ++head)
      EXPECT_LT(distance(fast.state(2, head), oracle.state(2, head)), x.bound);
  }
}

TEST(Tail, CutsOfSizesWithoutAFastKernelHaveTheSameBits) {
  const Sizes large{256, 33}, odd{36, 160};  // blocks of 2 warps and of 8
  for (const Sizes& sizes : {large, odd})
    for (const DType states : {DType::kFloat32, kSplit})
      expect_same_bits_for_every_cut(StateLayout::kVK, states, sizes);
}

TEST(Tail, FastKernelsHaveTheSameBitsForEveryCut) {
  using check::Regime;
  const Sizes wide{128, 128, DType::kBFloat16, Regime::kTrained, false, kManyRows};
  const Sizes wide_gate{128, 128, DType::kBFloat16, Regime::kSoftplus, true, kManyRows};
  const Sizes narrow{64, 64, DType::kFloat16, Regime::kTrainedSoftplus};
  const Sizes one_gate{64, 64, DType::kBFloat16, Regime::kSoftplus, true};
  const struct {
    StateLayout layout;
    DType states;
    const Sizes& sizes;
  } cases[] = {{StateLayout::kKV, DType::kFloat32, wide},
               {StateLayout::kVK, DType::kBFloat16, narrow},
               {StateLayout::kKV, DType::kBFloat16, one_gate},
               {StateLayout::kVK, DType::kFloat32, one_gate},
               {StateLayout::kVK, DType::kFloat32, wide_gate},
               {StateLayout::kVK, DType::kBFloat16, wide},
               {StateLayout::kKV, kSplit, wide},
               {StateLayout::kVK, kSplit, narrow}};
  for (const auto& x : cases) expect_same_bits_for_every_cut(x.layout, x.states, x.sizes);
}

/// Up to R = 32 a GPU has a kernel of one token, which settles too. Its bits are those of a larger
/// tail, which it does not serve.
void expect_steps_as_of_more_rows(StateLayout layout, DType states, Sizes sizes,
                                  const std::vector<Piece>& cut) {
  World world(layout, states, sizes);
  sizes.rows = kManyRows;
  World more(layout, states, sizes);
  world.backend = more.backend = "recurrent";
  ASSERT_EQ(play(&world, cut), play(&more, cut)) << world.R;
  ASSERT_EQ(world.folded_after, more.folded_after);
  ASSERT_TRUE(same_states(world, more)) << world.R;
}

TEST(Tail, StepsOfAGpuHaveTheBitsOfALargerTail) {
  if (!test::on_cuda()) GTEST_SKIP() << "a CPU has one implementation of all R";
  using check::Regime;
  // A token's row takes the place of the oldest one; rows of two groups.
  const std::vector<Piece> full = {{kPrefill, 30}, {kStep, 1}, {kStep, 1},    {kStep, 1},
                                   {kStep, 0},     {kStep, 1}, {kPrefill, 15}};
  // All rows in three groups, settled or in front of a forward's boundary; two beside others.
  const std::vector<Piece> filled = {{kPrefill, 15}, {kStep, 0}, {kStep, 1},
                                     {kStep, 9},     {kStep, 5}, {kStep, 9}};
  std::vector<Piece> settled = filled, prefilled = filled;
  settled.insert(
      settled.end(),
      {{kStep, 0}, {kStep, 7}, {kStep, 0}, {kStep, 9}, {kStep, 6}, {kStep, 8}, {kStep, 1}});
  prefilled.insert(prefilled.end(), {{kPrefill, 14}, {kStep, 1}});
  constexpr DType kFloat = DType::kFloat32, kHalf = DType::kBFloat16;
  constexpr StateLayout kKV = StateLayout::kKV, kVK = StateLayout::kVK;
  const Sizes halves{128, 128, kHalf, Regime::kTrained, false, 16};
  const Sizes one_gate{128, 128, kHalf, Regime::kSoftplus, true, 16, kSlots, kValueHeads};
  const Sizes odd{128, 128, DType::kFloat16, Regime::kSoftplus, true, 24};
  const Sizes floats{128, 128, kFloat, Regime::kNeedle, false, 24, kSlots, kValueHeads};
  const Sizes most{128, 128, kHalf, Regime::kTrained, false, 32};
  expect_steps_as_of_more_rows(kVK, kFloat, halves, full);
  expect_steps_as_of_more_rows(kKV, kSplit, one_gate, full);
  expect_steps_as_of_more_rows(kVK, kHalf, odd, settled);
  expect_steps_as_of_more_rows(kKV, kFloat, floats, prefilled);
  expect_steps_as_of_more_rows(kKV, kHalf, most, settled);
}

/// Lengths that the device alone knows, of at most one token: a new sequence, a new one without a
/// token, one without a slot, and one that reads the state of its source.
TEST(Tail, StepsOfAPackHaveTheBitsOfALargerTail) {
  if (!test::on_cuda()) GTEST_SKIP() << "a CPU has one implementation of all R";
  constexpr std::ptrdiff_t kToken = kValueHeads * 128;
  std::vector<float> all[2];
  std::vector<World> worlds;
  for (const int64_t rows : {int64_t{16}, kManyRows}) {
    const Sizes wide{128, 128, DType::kBFloat16, check::Regime::kTrained, false, rows};
    World& world = worlds.emplace_back(StateLayout::kVK, DType::kFloat32, wide);
    world.backend = "recurrent";
    begin(&world, 16);
    world.slots = {3, 1, -1, 4}, world.positions = {5, 32, 0, 16}, world.sources = {-1, -1, -1, 2};
    world.lengths = {0, 1, 1, 2, 3}, world.mask = {0, 0, 0, 1};
    world.change = [](Problem* p) { p->zero_skipped = true; };
    for (const int64_t at : {0, 3}) {
      std::vector<float> o;
      ASSERT_TRUE(world.call(kStep, at, at + 3, &o).ok());
      EXPECT_EQ(world.flags, 0);
      EXPECT_TRUE(
          std::all_of(o.begin() + kToken, o.begin() + 2 * kToken, [](float x) { return x == 0; }));
      std::vector<float>& expected = all[worlds.size() - 1];
      expected.insert(expected.end(), o.begin(), o.begin() + 3 * kToken);
      world.mask = {1, 1, 0, 1}, ++world.positions[0], ++world.positions[3];
    }
    world.lengths.clear();
    ASSERT_TRUE(world.settle().ok());
  }
  EXPECT_EQ(all[0], all[1]);
  EXPECT_EQ(worlds[0].folded, worlds[1].folded);
  EXPECT_TRUE(same_states(worlds[0], worlds[1]));
}

/// A GPU takes a forward up to the boundary where it ends, and decodes what is behind it. With
/// split states it reads all bits in front of a boundary, a CPU bf16.
void expect_prefills_as_on_a_cpu(const std::string& backend, StateLayout layout, DType states,
                                 const Sizes& sizes, double bound) {
  const double of_o = states == kSplit ? std::max(bound, 4e-3) : bound;
  // Boundaries that no call ends at; tails that a plain state begins, of 16 rows and more that no
  // boundary divides; calls without tokens.
  const std::vector<std::vector<Piece>> cuts = {
      {{kPrefill, 65}},
      {{kPrefill, 7}, {kPrefill, 20}, {kStep, 1}, {kPrefill, 5}, {kPrefill, 16}, {kPrefill, 16}},
      {{kPrefill, 5},
       {kStep, 0},
       {kPrefill, 3},
       {kStep, 3, 2},
       {kStep, 4},
       {kStep, 5},
       {kStep, 1},
       {kPrefill, 0},
       {kPrefill, 6},
       {kStep, 5},
       {kPrefill, 33}},
      {{kPrefill, 37},
       {kStep, 0},
       {kStep, 5},
       {kStep, 5},
       {kStep, 5},
       {kPrefill, 1},
       {kPrefill, 12}}};
  for (const std::vector<Piece>& cut : cuts) {
    World world(layout, states, sizes);
    world.out = sizes.dtype;
    World cpu = world;
    world.backend = "recurrent", world.of_forward = backend;
    cpu.on_cpu = true;
    const std::vector<float> o = play(&world, cut), expected = play(&cpu, cut);
    ASSERT_EQ(o.size(), expected.size());
    ASSERT_LT(distance(o, expected), of_o) << backend;
    ASSERT_EQ(world.folded_after, cpu.folded_after) << backend;
    ASSERT_EQ(world.folded, cpu.folded);
    for (int64_t head = 0; head < kValueHeads; ++head)
      ASSERT_LT(distance(world.state(2, head), cpu.state(2, head)), bound) << backend;
  }
}

TEST(Tail, PrefillsOnAGpuEndInTailsAsOnACpu) {
  if (!test::on_cuda()) GTEST_SKIP() << "CutsOfASequenceHaveTheSameBits has those of a CPU";
  using check::Regime;
  constexpr StateLayout kKV = StateLayout::kKV, kVK = StateLayout::kVK;
  constexpr DType kFloat = DType::kFloat32, kHalf = DType::kBFloat16;
  expect_prefills_as_on_a_cpu("recurrent", kKV, kFloat, {}, 1e-5);
  expect_prefills_as_on_a_cpu("recurrent", kVK, kHalf,
                              {20, 16, DType::kBFloat16, Regime::kSoftplus, true}, 2e-2);
  const Sizes wide{128, 128, DType::kBFloat16, Regime::kTrained};
  const Sizes one_gate{64, 64, DType::kBFloat16, Regime::kSoftplus, true};
  expect_prefills_as_on_a_cpu("recurrent", kVK, kSplit, {}, 1e-5);
  expect_prefills_as_on_a_cpu("recurrent", kKV, kSplit, one_gate, 1e-5);
  expect_prefills_as_on_a_cpu("staged", kVK, kHalf, {64, 64, kHalf, Regime::kTrained}, 2e-2);
  const bool hopper = test::device().compute_capability == 90;
  expect_prefills_as_on_a_cpu(hopper ? "sm90.fused" : "sm80.fused", kKV, kFloat, wide, 2e-2);
  expect_prefills_as_on_a_cpu(hopper ? "sm90.fused" : "sm80.fused", kKV, kSplit, wide, 2e-2);
  if (hopper) expect_prefills_as_on_a_cpu("gdn", kKV, kFloat, one_gate, 2e-2);
}

TEST(Tail, PartsOfSplitStatesHaveAllBits) {
  const auto expect = [](float x) {
    const SplitNumber parts = split_float(x);
    const float joined = join_float(parts.bf16, parts.rest), rounded = bf16_to_float(parts.bf16);
    EXPECT_EQ(__builtin_bit_cast(uint32_t, joined), __builtin_bit_cast(uint32_t, x)) << x;
    if (std::isfinite(rounded)) {
      EXPECT_LE(std::fabs(rounded - x), std::ldexp(std::fabs(x), -8));
    }
  };
  check::Random random(1);
  for (int i = 0; i < 100000; ++i)
    expect(
        static_cast<float>(std::ldexp(random.normal(), static_cast<int>(random.below(40)) - 20)));
  for (const float x : {0.0f, -0.0f, 1.0f, 1.00390625f, -1.00390625f, 3.3e38f, INFINITY, -INFINITY})
    expect(x);
  // A tie goes away from zero.
  EXPECT_EQ(bf16_to_float(split_float(1.00390625f).bf16), 1.0078125f);
  const SplitNumber nan = split_float(__builtin_bit_cast(float, 0xffffffffu));
  EXPECT_TRUE(std::isnan(bf16_to_float(nan.bf16)) && std::isnan(join_float(nan.bf16, nan.rest)));
}

/// A tree whose accepted rows lie on both sides of a boundary: rows behind a fold follow from the
/// new bf16, so that states and later tokens are those of single steps.
TEST(Tail, RowsBehindAFoldOfSplitStatesAreMadeAnew) {
  for (const std::string& backend : backends_with_tails())
    for (const Sizes& sizes : {Sizes{}, Sizes{64, 64, DType::kBFloat16, check::Regime::kTrained}}) {
      World tree(StateLayout::kKV, kSplit, sizes);
      tree.backend = backend;
      World steps = tree;
      std::vector<float> o, expected;
      tree.mask = steps.mask = {0};
      for (int64_t at = 0; at < 20; ++at, steps.mask = {1}) {
        steps.positions = {static_cast<int32_t>(at)};
        ASSERT_TRUE(steps.call(kStep, at, at + 1, &expected).ok());
      }
      for (int64_t at = 0; at < 15; at += 3, tree.mask = {1}) {
        tree.positions = {static_cast<int32_t>(at)};
        ASSERT_TRUE(tree.call(kStep, at, at + 3, &o).ok());
      }
      tree.positions = {15};
      tree.parents = {-1, 0, 1, 2, 3};
      ASSERT_TRUE(tree.call(kStep, 15, 20, &o).ok());
      tree.parents.clear();
      tree.positions = steps.positions = {20}, tree.accepted = {0, 1, 2, 3, 4};
      ASSERT_TRUE(tree.call(kStep, 20, 21, &o).ok());
      ASSERT_TRUE(steps.call(kStep, 20, 21, &expected).ok());
      EXPECT_TRUE(same_states(tree, steps)) << backend;
      EXPECT_LT(distance(o, expected), 1e-6) << backend;
      tree.positions = steps.positions = {21}, tree.accepted.clear();
      ASSERT_TRUE(tree.settle().ok() && steps.settle().ok());
      EXPECT_TRUE(same_states(tree, steps)) << backend;
    }
}

/// Verifies of a sure token and 31 drafts, each of which keeps some of them: along the path of a
/// tree, or of a chain without `parents`. The oracle has the same calls.
void expect_verifies_of_32_rows(const std::string& backend, DType states, const Sizes& sizes,
                                const std::vector<int32_t>& parents,
                                const std::vector<int32_t>& path) {
  const double bound = states == kSplit ? 5e-3 : 1e-5;
  World world(StateLayout::kKV, states, sizes);
  World truth = world;
  world.backend = backend;
  truth.backend = "oracle", truth.on_cpu = true;
  std::vector<float> o, expected;
  int64_t at = 7;
  begin(&world, at), begin(&truth, at);
  const auto call = [&](int64_t tokens, std::size_t kept) {
    for (World* w : {&world, &truth}) {
      w->positions = {static_cast<int32_t>(at)};
      w->parents = tokens > 1 ? parents : std::vector<int32_t>();
      ASSERT_TRUE(w->call(kStep, at % 30, at % 30 + tokens, w == &world ? &o : &expected).ok());
      w->accepted.clear();
      if (!w->parents.empty())
        w->accepted.assign(path.begin(), path.begin() + static_cast<std::ptrdiff_t>(kept));
    }
    ASSERT_EQ(world.flags, 0);
    ASSERT_LT(distance(o, expected), bound) << backend << " at " << at;
    ASSERT_EQ(world.folded, truth.folded);
    at += static_cast<int64_t>(kept);
  };
  for (const std::size_t kept : {path.size(), path.size() / 2, path.size()}) call(32, kept);
  call(1, 1);
  for (World* w : {&world, &truth}) {
    w->positions = {static_cast<int32_t>(at)};
    ASSERT_TRUE(w->settle().ok());
  }
  for (int64_t head = 0; head < kValueHeads; ++head)
    EXPECT_LT(distance(world.state(2, head), truth.state(2, head)), bound) << backend;
  const std::string refused = "a tail of R = 47 rows takes 1..32 tokens a sequence, got 33";
  EXPECT_NE(world.call(kStep, 0, 33, &o).message().find(refused), std::string::npos);
}

TEST(Tail, VerifiesOf32Rows) {
  std::vector<int32_t> chain(32), tree(32);
  std::iota(chain.begin(), chain.end(), 0);
  for (int32_t t = 0; t < 32; ++t) tree[static_cast<std::size_t>(t)] = (t - 1) / 2;
  const std::vector<int32_t> path = {0, 2, 6, 14, 30};
  const Sizes odd{20, 16, DType::kFloat32, check::Regime::kTrained, false, kManyRows};
  const Sizes fast{64, 64, DType::kBFloat16, check::Regime::kTrained, false, kManyRows};
  const Sizes wide{128, 128, DType::kBFloat16, check::Regime::kTrained, false, kManyRows};
  for (const std::string& backend : backends_with_tails()) {
    expect_verifies_of_32_rows(backend, DType::kFloat32, odd, {}, chain);
    expect_verifies_of_32_rows(backend, DType::kFloat32, odd, tree, path);
    expect_verifies_of_32_rows(backend, DType::kFloat32, fast, tree, path);
    if (test::on_cuda()) expect_verifies_of_32_rows(backend, DType::kFloat32, wide, {}, chain);
    expect_verifies_of_32_rows(backend, DType::kFloat32, wide, tree, path);
    expect_verifies_of_32_rows(backend, kSplit, fast, {}, chain);
  }
}

/// More heads than threads that look at them, and more that fold than blocks: sequences that begin
/// at different positions fold in different calls. A CPU has the same calls.
TEST(Tail, EveryHeadOfManySequencesIsFolded) {
  if (!test::on_cuda()) GTEST_SKIP() << "a CPU folds without blocks that share heads";
  constexpr int64_t kSequences = 40, kTogether = 5;
  World world(StateLayout::kVK, kSplit,
              {8, 8, DType::kFloat32, check::Regime::kTrained, false, kRows, kSequences});
  world.slots.resize(kSequences), world.positions.resize(kSequences);
  world.mask.assign(kSequences, 0);
  std::iota(world.slots.begin(), world.slots.end(), 0);
  for (int64_t n = 0; n < kSequences; ++n)
    world.positions[static_cast<std::size_t>(n)] = static_cast<int32_t>(3 * n % 16);
  World truth = world;
  world.num_sms = 1;
  truth.on_cpu = true;
  std::vector<float> o, expected;
  bool folded_apart = false;
  for (int64_t at = 0; at < 45; at += kTogether)
    for (World* w : {&world, &truth}) {
      ASSERT_TRUE(w->call(kStep, at, at + kTogether, w == &world ? &o : &expected).ok());
      w->mask.assign(kSequences, 1);
      for (int32_t& position : w->positions) position += kTogether;
      if (w == &world) continue;
      ASSERT_EQ(world.folded, truth.folded);
      ASSERT_LT(distance(o, expected), 5e-3) << at;
      folded_apart |= truth.folded.front() != truth.folded.back();
    }
  EXPECT_TRUE(folded_apart);
  for (int64_t n = 0; n < kSequences; ++n)
    for (int64_t head = 0; head < kValueHeads; ++head)
      ASSERT_LT(distance(world.state(n, head), truth.state(n, head)), 1e-5) << n;
}

/// Lengths that the device alone knows, one of them 0, and a sequence without a slot: chains of the
/// size that has a kernel of its own, three calls of them, the last of which folds.
TEST(Tail, TokensOfAPackHaveTheBitsOfSteps) {
  const Sizes wide{128, 128, DType::kBFloat16, check::Regime::kTrained, false, kManyRows};
  const std::vector<int64_t> lengths = {1, 0, 9, 8, 8};  // no call passes a boundary inside
  const std::string backend = backends_with_tails().front();
  World pack(StateLayout::kVK, DType::kFloat32, wide);
  pack.backend = backend;
  World step = pack;
  pack.lengths = {0};
  for (const int64_t length : lengths) pack.lengths.push_back(pack.lengths.back() + length);
  pack.slots = {3, 2, -1, 4, 1}, pack.positions = {0, 0, 0, 24, 0}, pack.mask = {0, 0, 0, 0, 0};
  pack.change = [](Problem* p) { p->zero_skipped = true; };
  std::vector<float> all, o;
  for (int call = 0; call < 3; ++call) {
    ASSERT_TRUE(pack.call(kStep, 0, pack.lengths.back(), &all).ok());
    EXPECT_EQ(pack.flags, 0);
    for (std::size_t n = 0; n < lengths.size(); ++n) {
      auto found = all.begin() + pack.lengths[n] * kValueHeads * wide.V;
      step.slots = {pack.slots[n]};
      for (int64_t t = pack.lengths[n]; t < pack.lengths[n + 1]; ++t) {
        step.positions = {pack.positions[n]++}, step.mask = {pack.mask[n]}, pack.mask[n] = 1;
        if (pack.slots[n] < 0)
          o.assign(static_cast<std::size_t>(kValueHeads * wide.V), 0);
        else
          ASSERT_TRUE(step.call(kStep, t, t + 1, &o).ok());
        ASSERT_TRUE(std::equal(o.begin(), o.end(), found)) << backend << " " << n << " " << t;
        found += kValueHeads * wide.V;
      }
    }
  }
  for (const std::size_t n : {0, 3, 4}) {
    for (World* w : {&pack, &step}) w->lengths.clear(), w->change = [](Problem*) {};
    const World of_pack = pack;
    World one = of_pack;
    one.slots = step.slots = {of_pack.slots[n]};
    one.positions = step.positions = {of_pack.positions[n]}, one.mask = step.mask = {1};
    ASSERT_TRUE(one.settle().ok() && step.settle().ok());
    for (int64_t head = 0; head < kValueHeads; ++head)
      EXPECT_EQ(one.state(of_pack.slots[n], head), step.state(of_pack.slots[n], head));
  }
}

TEST(Tail, TokensBehindABoundaryHaveTheBitsOfSteps) {
  World steps, whole;
  std::vector<float> o, expected;
  begin(&steps, 32);
  begin(&whole, 45);
  for (int64_t at = 32; at < 45; ++at) {
    steps.positions[0] = static_cast<int32_t>(at);
    ASSERT_TRUE(steps.call(kStep, at, at + 1, &o).ok());
  }
  EXPECT_EQ(whole.folded, steps.folded);
  for (auto buffer : {&World::pool, &World::k, &World::g})
    EXPECT_EQ(std::memcmp((whole.*buffer).data(), (steps.*buffer).data(), (whole.*buffer).size()),
              0);
  // And so they go on.
  steps.positions = whole.positions = {45};
  ASSERT_TRUE(steps.call(kPrefill, 45, 47, &expected).ok());
  ASSERT_TRUE(whole.call(kPrefill, 45, 47, &o).ok());
  EXPECT_EQ(o, expected);
}

/// Rows of a batch with gaps are calls of their own on a GPU; a pack is one.
TEST(Tail, SequencesOfAPrefillHaveTheirOwnLengths) {
  for (const std::string& backend : backends_with_tails()) {
    World world;
    world.backend = backend;
    const std::vector<int64_t> lengths = {0, 21, 3, 16};
    std::vector<float> all, o;
    world.lengths = {0};
    for (const int64_t length : lengths) world.lengths.push_back(world.lengths.back() + length);
    world.slots = {3, -1, 4, 1}, world.positions = {0, 0, 9, 0}, world.mask = {0, 1, 0, 0};
    world.change = [](Problem* p) { p->zero_skipped = true; };
    ASSERT_TRUE(world.call(kPrefill, 0, 40, &all).ok());
    EXPECT_EQ(world.flags, 0);
    for (std::size_t n = 0; n < lengths.size(); ++n) {
      const auto first = all.begin() + world.lengths[n] * kValueHeads * kValue,
                 last = all.begin() + world.lengths[n + 1] * kValueHeads * kValue;
      if (world.slots[n] < 0) {
        EXPECT_TRUE(std::all_of(first, last, [](float x) { return x == 0; }));
        continue;
      }
      World single;
      single.backend = backend;
      single.slots = {world.slots[n]}, single.positions = {world.positions[n]}, single.mask = {0};
      ASSERT_TRUE(single.call(kPrefill, world.lengths[n], world.lengths[n + 1], &o).ok());
      EXPECT_TRUE(std::equal(first, last, o.begin(), o.end())) << backend << " " << n;
      const auto at = static_cast<std::size_t>(world.slots[n]) * kValueHeads;
      EXPECT_EQ(world.folded[at], single.folded[at]);
      const std::size_t bytes = world.slot_bytes(&World::pool);
      EXPECT_EQ(std::memcmp(world.pool.data() + at / kValueHeads * bytes,
                            single.pool.data() + at / kValueHeads * bytes, bytes),
                0);
    }
    // The same tokens in both rows of a batch, whose stride is 0.
    World rows, one;
    rows.backend = one.backend = backend;
    rows.slots = {2, 4}, rows.positions = {0, 0}, rows.mask = {0, 0}, one.mask = {0};
    ASSERT_TRUE(rows.call(kPrefill, 0, 37, &all).ok());
    ASSERT_TRUE(one.call(kPrefill, 0, 37, &o).ok());
    const auto size = static_cast<std::ptrdiff_t>(o.size());
    EXPECT_TRUE(std::equal(o.begin(), o.end(), all.begin(), all.begin() + size));
    EXPECT_TRUE(std::equal(o.begin(), o.end(), all.begin() + size));
    EXPECT_EQ(rows.folded[4 * kValueHeads], 32);
  }
}

TEST(Tail, StepsReadBoundaryStatesAndFoldEverySixteenTokens) {
  for (const DType states : {DType::kFloat32, kSplit}) {
    World world(StateLayout::kKV, states);
    std::vector<float> o;
    begin(&world, 19);
    EXPECT_EQ(world.folded[2 * kValueHeads], 16);
    for (int64_t at = 19; at < 34; ++at) {
      const World before = world;
      world.positions[0] = static_cast<int32_t>(at);
      ASSERT_TRUE(world.call(kStep, at, at + 1, &o).ok());
      const bool folds = at == 32;
      EXPECT_EQ(!same_states(before, world), folds) << at;
      EXPECT_EQ(world.folded[2 * kValueHeads], at < 32 ? 16 : 32);
    }
  }
}

void expect_children_read_the_state_of_their_source(DType states) {
  const World fresh(StateLayout::kKV, states);
  World world = fresh;
  std::vector<float> o, alone;
  begin(&world, 32);
  World single = world;
  world.slots = {3, 4}, world.sources = {2, 2}, world.mask = {1, 1};
  for (int64_t at = 32; at < 52; ++at) {
    world.positions.assign(2, static_cast<int32_t>(at));
    single.positions[0] = static_cast<int32_t>(at);
    ASSERT_TRUE(world.call(kStep, at, at + 1, &o).ok());
    ASSERT_TRUE(single.call(kStep, at, at + 1, &alone).ok());
    ASSERT_TRUE(std::equal(alone.begin(), alone.end(), o.begin()));
    ASSERT_TRUE(std::equal(alone.begin(), alone.end(),
                           o.begin() + static_cast<std::ptrdiff_t>(alone.size())));
  }
  EXPECT_EQ(world.folded[2 * kValueHeads], 32);
  EXPECT_EQ(world.folded[3 * kValueHeads], 48);
  // A prompt goes on from it too, with and without a boundary of its own.
  for (const int64_t end : {int64_t{40}, int64_t{59}}) {
    World child = fresh, whole = fresh;
    begin(&child, 32), begin(&whole, 32);
    const io::Buffer before = child.pool;
    child.slots = {3}, child.sources = {2}, child.positions = whole.positions = {32};
    ASSERT_TRUE(child.call(kPrefill, 32, end, &o).ok());
    ASSERT_TRUE(whole.call(kPrefill, 32, end, &alone).ok());
    EXPECT_EQ(o, alone);
    const std::size_t bytes = before.size() / kSlots;
    EXPECT_EQ(std::memcmp(before.data(), child.pool.data(), 3 * bytes), 0);
    // And a step behind it, whether or not the source is still named.
    child.positions = whole.positions = {static_cast<int32_t>(end)};
    if (end > 48) child.sources = {-1};
    ASSERT_TRUE(child.call(kStep, end, end + 1, &o).ok());
    ASSERT_TRUE(whole.call(kStep, end, end + 1, &alone).ok());
    EXPECT_EQ(o, alone);
  }
}

TEST(Tail, ChildrenReadTheStateOfTheirSource) {
  expect_children_read_the_state_of_their_source(DType::kFloat32);
  expect_children_read_the_state_of_their_source(kSplit);
}

TEST(Tail, WrongUseIsRefusedByNameAndNothingIsWritten) {
  if (test::on_cuda()) GTEST_SKIP() << "a GPU flags it: WrongUseIsFlaggedAndSkippedOnAGpu";
  using Change = std::function<void(World*)>;
  const auto of_problem = [](std::function<void(Problem*)> change) {
    return [change](World* world) { world->change = change; };
  };
  const struct {
    const char* text;
    Change change;
    int64_t tokens = 1;
    Operation operation = kStep;
  } rows[] = {
      {"tail.folded: slot 1 of sequence 0 has -1, no tail was begun there",
       [](World* w) { w->slots = {1}; }},
      {"tail.folded: slot 2 of sequence 0 has 16 in head 0 and 0 in head 3",
       [](World* w) { w->folded[2 * kValueHeads + 3] = 0; }},
      {"tail.folded: slot 2 of sequence 0 has 16 in head 0 and -1 in head 3",
       [](World* w) {
         std::fill_n(w->folded.begin() + kValueHeads, kValueHeads, 16);
         w->folded[2 * kValueHeads + 3] = -1, w->sources = {1};
       }},
      {"positions: entry 0 = 2147483647 and 1 tokens are beyond int32",
       [](World* w) { w->positions = {INT32_MAX}; }},
      {"state_index_columns: S = 1 is below the 2 tokens of sequence 0",
       of_problem([](Problem* p) { p->token_parents = true; }), 2},
      {"positions: entry 0 = 15 is below 16, the tokens that slot 2 has folded",
       [](World* w) { w->positions = {15}; }},
      {"positions: entry 0 = 37 is 21 tokens behind the boundary of slot 2, at 16, and the tail "
       "has R = 20 rows",
       [](World* w) { w->positions = {37}; }},
      {"positions: entry 0 = -1 is negative", [](World* w) { w->positions = {-1}; }},
      {"num_tokens: a tail of R = 20 rows takes 1..5 tokens a sequence, got 6", [](World*) {}, 6},
      {"sources: entry 0 = 5 is outside 0..4", [](World* w) { w->sources = {5}; }},
      {"tail.folded: source slot 1 of sequence 0 has -1", [](World* w) { w->sources = {1}; }},
      {"sources: slot 2 of sequence 1 would be written by another while it is read",
       [](World* w) {
         w->slots = {2, 3}, w->positions = {19, 16}, w->sources = {-1, 2}, w->mask = {1, 1};
       }},
      {"initial_state_indices: slot 2 would be written twice",
       [](World* w) {
         w->slots = {2, 2}, w->positions = {19, 19}, w->mask = {1, 1};
       }},
      {"accepted_rows: entry 0, 1 = 0 is not above 0",
       [](World* w) {
         w->accepted = {0, 0, -1};
       }},
      {"accepted_rows: sequence 0 has 4, more than the sure rows of its tail, 3",
       [](World* w) {
         w->accepted = {0, 1, 2, 3};
       }},
      {"accepted_rows: entry 0, 1 = 19 is beyond the rows of the tail, R = 20",
       [](World* w) {
         w->accepted = {0, 19};
       }},
      {"accepted_rows: belongs to decode", [](World* w) { w->accepted = {0}; }, 1, kPrefill},
      {"tail.settle: belongs to decode", of_problem([](Problem* p) { p->tail->settle = true; }), 1,
       kPrefill},
      {"tail.k: dtype bf16 is not that of k, fp32",
       of_problem([](Problem* p) { p->tail->k.dtype = DType::kBFloat16; })},
      {"tail.g: dtype fp16 is not that of g, fp32",
       of_problem([](Problem* p) { p->tail->g.dtype = DType::kFloat16; })},
      {"tail.g: innermost stride 0, but g has a gate a channel",
       of_problem([](Problem* p) { p->tail->g.strides[3] = 0; })},
      {"tail.v_new: dtype bf16 is not fp32",
       of_problem([](Problem* p) { p->tail->v_new.dtype = DType::kBFloat16; })},
      {"tail.folded: dtype int64 is not int32",
       of_problem([](Problem* p) { p->tail->folded.dtype = DType::kInt64; })},
      {"tail: num_slots = 4 is not the 5 of initial_state",
       of_problem([](Problem* p) { p->tail->num_slots = 4; })},
      {"tail: R = 15 is outside 16..256", of_problem([](Problem* p) { p->tail->rows = 15; })},
      {"initial_state: a tail needs the pool", of_problem([](Problem* p) {
         p->initial_state->indexed = false, p->initial_state->num_slots = 1;
       })},
      {"num_accepted_tokens: is not taken with a tail",
       of_problem([](Problem* p) { p->num_accepted_tokens = true; })},
      {"final_state: is not taken with a tail",
       of_problem([](Problem* p) { p->final_state = p->initial_state; })},
      {"state_index_columns: S = 2, but with a tail",
       of_problem([](Problem* p) { p->state_index_columns = 2; })},
      {"initial_state: dtype fp32 is not bf16, which split states have beside tail.rest",
       of_problem([](Problem* p) { p->initial_state->tensor.dtype = DType::kFloat32; })},
      {"tail.rest: dtype bf16 is not int16",
       of_problem([](Problem* p) { p->tail->split->rest.dtype = DType::kBFloat16; })},
      {"tail.v: dtype bf16 is not that of v, fp32",
       of_problem([](Problem* p) { p->tail->split->v.dtype = DType::kBFloat16; })},
      {"tail.beta: dtype fp16 is not that of beta, fp32",
       of_problem([](Problem* p) { p->tail->split->beta.dtype = DType::kFloat16; })},
      {"tail.rest: stride 0 makes elements of this output overlap",
       of_problem([](Problem* p) { p->tail->split->rest.strides[1] = 0; })},
      {"tail.rest: was never described",
       of_problem([](Problem* p) { p->tail->split->rest.strides.fill(kUnsetStride); })}};
  World begun(StateLayout::kKV, kSplit);
  std::vector<float> o;
  begun.mask[0] = 0;
  ASSERT_TRUE(begun.call(kPrefill, 0, 19, &o).ok());
  begun.mask[0] = 1, begun.positions[0] = 19;
  for (const auto& row : rows) {
    World world = begun;
    row.change(&world);
    const std::vector<int32_t> folded = world.folded;
    const Status status = world.call(row.operation, 19, 19 + row.tokens, &o);
    EXPECT_NE(status.message().find(row.text), std::string::npos) << row.text << "\n"
                                                                  << status.message();
    for (auto buffer : begun.written())
      EXPECT_EQ(std::memcmp((world.*buffer).data(), (begun.*buffer).data(), (begun.*buffer).size()),
                0);
    EXPECT_EQ(world.folded, folded);
    for (const float x : o) EXPECT_TRUE(std::isnan(x)) << row.text;
  }
}

/// A GPU flags wrong numbers that the host cannot see. It skips that sequence and serves the
/// others.
TEST(Tail, WrongUseIsFlaggedAndSkippedOnAGpu) {
  if (!test::on_cuda()) GTEST_SKIP() << "a CPU refuses it, as another test here shows";
  using Change = std::function<void(World*)>;
  const struct {
    const char* what;
    int32_t flag;
    Change change;
  } rows[] = {
      {"a slot without a tail", kBadTail,
       [](World* w) { std::fill_n(w->folded.begin() + 2 * kValueHeads, kValueHeads, -1); }},
      {"a position behind the boundary", kBadTail, [](World* w) { w->positions[0] = 15; }},
      {"a position beyond the rows", kBadTail, [](World* w) { w->positions[0] = 37; }},
      {"a negative position", kBadTail, [](World* w) { w->positions[0] = -1, w->mask[0] = 0; }},
      {"a source that is not there", kBadTail,
       [](World* w) {
         w->sources = {kSlots, -1};
       }},
      {"a source without a tail", kBadTail,
       [](World* w) {
         w->sources = {1, -1};
       }},
      {"a source that is ahead", kBadTail,
       [](World* w) {
         w->sources = {1, -1};
         std::fill_n(w->folded.begin() + kValueHeads, kValueHeads, 18);
       }},
      {"a slot that is not there", kBadInitialIndex, [](World* w) { w->slots[0] = kSlots; }},
      {"accepted rows that do not ascend", kBadTail,
       [](World* w) { w->accepted = {0, 0, -1, -1, -1, -1}; }},
      {"more accepted rows than sure ones", kBadTail,
       [](World* w) { w->accepted = {0, 1, 2, 3, -1, -1, -1, -1}; }},
      {"accepted rows beyond the tail", kBadTail, [](World* w) {
         w->accepted = {0, 19, -1, -1};
       }}};
  World begun(StateLayout::kKV, kSplit);
  begin(&begun, 19);
  // Another sequence, at the same position.
  for (auto member : begun.written()) {
    const std::size_t bytes = begun.slot_bytes(member);
    std::byte* data = (begun.*member).data();
    std::memcpy(data + 3 * bytes, data + 2 * bytes, bytes);
  }
  std::fill_n(begun.folded.begin() + 3 * kValueHeads, kValueHeads, 16);
  begun.slots = {2, 3}, begun.positions = {19, 19}, begun.mask = {1, 1};
  std::vector<float> right, o;
  World untouched = begun;
  ASSERT_TRUE(untouched.call(kStep, 19, 20, &right).ok());
  ASSERT_EQ(untouched.flags, 0);
  const auto size = static_cast<std::ptrdiff_t>(right.size() / 2);
  ASSERT_TRUE(std::equal(right.begin(), right.begin() + size, right.begin() + size));
  for (const auto& row : rows) {
    World world = begun;
    row.change(&world);
    const std::vector<int32_t> folded = world.folded;
    ASSERT_TRUE(world.call(kStep, 19, 20, &o).ok()) << row.what;
    EXPECT_EQ(world.flags, row.flag) << row.what;
    for (std::ptrdiff_t i = 0; i < size; ++i) ASSERT_TRUE(std::isnan(o[i])) << row.what;
    EXPECT_TRUE(std::equal(right.begin() + size, right.end(), o.begin() + size)) << row.what;
    EXPECT_EQ(world.folded, folded) << row.what;
    for (auto buffer : begun.written()) {
      const std::size_t bytes = world.slot_bytes(buffer);
      EXPECT_EQ(std::memcmp((world.*buffer).data(), (begun.*buffer).data(), 3 * bytes), 0)
          << row.what;
    }
  }
  // The same of a prefill, of rows of a batch and of a pack; o of such a sequence is 0 on request.
  std::vector<float> prefilled;
  World untouched_prefill = begun;
  ASSERT_TRUE(untouched_prefill.call(kPrefill, 19, 36, &prefilled).ok());
  for (const auto& row : rows) {
    World world = begun;
    row.change(&world);
    if (!world.accepted.empty()) continue;  // all tokens of a forward are sure
    world.change = [](Problem* p) { p->zero_skipped = true; };
    ASSERT_TRUE(world.call(kPrefill, 19, 36, &o).ok()) << row.what;
    EXPECT_EQ(world.flags, row.flag) << row.what;
    for (std::size_t i = 0; i < o.size() / 2; ++i) ASSERT_EQ(o[i], 0) << row.what;
    EXPECT_TRUE(std::equal(o.begin() + static_cast<std::ptrdiff_t>(o.size() / 2), o.end(),
                           prefilled.begin()))
        << row.what;
    for (auto buffer : begun.written()) {
      const std::size_t bytes = world.slot_bytes(buffer);
      EXPECT_EQ(std::memcmp((world.*buffer).data(), (begun.*buffer).data(), 3 * bytes), 0)
          << row.what;
    }
  }
  World pack = begun;
  pack.lengths = {0, 17, 17, 19}, pack.slots = {2, 1, 3}, pack.positions = {19, 0, 19};
  pack.mask = {1, 1, 1};
  ASSERT_TRUE(pack.call(kPrefill, 19, 38, &o).ok());
  EXPECT_EQ(pack.flags, kBadTail);
  EXPECT_EQ(pack.folded[3 * kValueHeads], 16);
  EXPECT_TRUE(std::equal(o.begin(), o.begin() + 17 * size, prefilled.begin()));
  pack.lengths = {0, 17, 18, 17};
  ASSERT_TRUE(pack.call(kPrefill, 19, 38, &o).ok());
  EXPECT_NE(pack.flags & kBadSequences, 0);
  World beyond = begun;
  beyond.positions = {INT32_MAX, 19}, beyond.mask = {0, 1};
  ASSERT_TRUE(beyond.call(kPrefill, 19, 21, &o).ok());
  EXPECT_EQ(beyond.flags, kBadTail);
  // A head whose word does not fit is skipped alone by a decode, with the others by a forward.
  World heads = begun;
  heads.folded[2 * kValueHeads + 3] = -1;
  heads.change = [](Problem* p) { p->zero_skipped = true; };
  ASSERT_TRUE(heads.call(kPrefill, 19, 36, &o).ok());
  EXPECT_EQ(heads.flags, kBadTail);
  EXPECT_EQ(o[0], 0);
  World head = begun;
  head.folded[2 * kValueHeads + 3] = -1;
  ASSERT_TRUE(head.call(kStep, 19, 20, &o).ok());
  EXPECT_EQ(head.flags, kBadTail);
  EXPECT_TRUE(std::equal(right.begin(), right.begin() + 3 * kValue, o.begin()));
  EXPECT_TRUE(std::isnan(o[3 * kValue]));
  // A parent that is not in front of its token: the token is left out.
  World tree = begun;
  tree.parents = {-1, 0, 2, -1, 0, 1};
  ASSERT_TRUE(tree.call(kStep, 19, 22, &o).ok());
  EXPECT_EQ(tree.flags, kBadTokenParents);
  const std::ptrdiff_t token = kValueHeads * kValue;
  EXPECT_TRUE(std::equal(o.begin(), o.begin() + 2 * token, o.begin() + 3 * token));
  EXPECT_TRUE(std::isnan(o[2 * token]) && std::isfinite(o[5 * token]));
  // More tokens than a tail takes, of lengths that the device alone knows: none is computed.
  World packed = begun;
  packed.lengths = {0, 1, 7};
  ASSERT_TRUE(packed.call(kStep, 19, 26, &o).ok());
  EXPECT_EQ(packed.flags, kTooManyDecodeTokens);
  EXPECT_TRUE(std::equal(right.begin(), right.begin() + size, o.begin()));
  for (std::ptrdiff_t i = size; i < 7 * size; ++i) ASSERT_TRUE(std::isnan(o[i]));
  EXPECT_EQ(packed.folded, begun.folded);
}

TEST(Tail, PlansSayItAndGpusRefuseMoreRowsThanTheyHaveMemoryFor) {
  World world;
  Problem p = world.inputs.problem;
  p.initial_state = states(p, DType::kFloat32, kSlots, true);
  p.tail = tails(p, kRows);
  Plan plan;
  ASSERT_TRUE(make_plan(p, {}, cpu_facts(), {}, &plan).ok());
  EXPECT_NE(plan.to_text().find("tail            20 rows a slot, boundary states fp32 every 16"),
            std::string::npos);
  EXPECT_NE(plan.to_json().find("\"tail_rows\""), std::string::npos);
  Problem split = p;
  split.initial_state = states(p, DType::kBFloat16, kSlots, true);
  split.tail->split = split_states(split, kRows);
  ASSERT_TRUE(make_plan(split, {}, cpu_facts(), {}, &plan).ok());
  EXPECT_NE(plan.to_text().find("boundary states split in bf16 and 16 bits every 16"),
            std::string::npos);
  const DeviceFacts gpu = gpu_facts(132, 90);
  ASSERT_TRUE(make_plan(p, {}, gpu, {}, &plan).ok());
  EXPECT_TRUE(supported(p, gpu).ok());
  EXPECT_EQ(plan.implementation, "cuda.smxx.recurrent");
  std::vector<std::string> kernels;
  for (const KernelChoice& choice : plan.kernels)
    kernels.push_back(choice.stage + " " + choice.kernel);
  EXPECT_EQ(kernels,
            (std::vector<std::string>{"tail_fold tail_ends", "tail_fold tail", "forward recurrent",
                                      "tail_rows tail", "tail_rows append_keys"}));
  EXPECT_NE(plan.to_text().find("tokens behind that boundary, at most 15"), std::string::npos);
  const std::size_t of_fp32 = plan.workspace_bytes;
  ASSERT_TRUE(make_plan(split, {}, gpu, {}, &plan).ok());
  EXPECT_GE(plan.workspace_bytes, of_fp32 + kValueHeads * kKey * kValue * sizeof(float));
  for (const std::string kernel : {"fold_split", "join_states", "split_states"})
    EXPECT_EQ(std::count_if(plan.kernels.begin(), plan.kernels.end(),
                            [&](const KernelChoice& choice) { return choice.kernel == kernel; }),
              1)
        << kernel;
  PlanOptions oracle_only;
  oracle_only.backend = "oracle";
  EXPECT_EQ(make_plan(p, {}, gpu, oracle_only, &plan).code(), StatusCode::kUnavailable);
  p.tail = tails(p, 250);
  for (const Status& refused :
       {make_plan(p, {}, gpu_facts(132, 86), {}, &plan), supported(p, gpu_facts(132, 86))}) {
    EXPECT_EQ(refused.code(), StatusCode::kUnsupported);
    EXPECT_NE(refused.message().find("tail: R = 250 rows take"), std::string::npos)
        << refused.message();
  }
  p.tail = tails(p, kRows);
  p.operation = kStep, p.num_tokens = 1;
  ASSERT_TRUE(make_plan(p, {}, gpu, {}, &plan).ok());
  ASSERT_EQ(plan.kernels.size(), 2);
  EXPECT_EQ(plan.kernels[1].kernel, "append_keys");
  // K = V = 128 has kernels of one token, up to R = 32, and of three and more.
  const World wide(StateLayout::kVK, DType::kFloat32, {128, 128});
  const auto kernels_of = [&](Operation operation, int64_t tokens, int64_t rows) {
    Problem of = wide.inputs.problem;
    of.operation = operation, of.num_tokens = tokens;
    of.initial_state = states(of, DType::kFloat32, kSlots, true);
    of.tail = tails(of, rows);
    EXPECT_TRUE(make_plan(of, {}, gpu, {}, &plan).ok());
    std::string all;
    for (const KernelChoice& choice : plan.kernels)
      if (choice.stage != "forward") all += choice.kernel + " ";
    return all;
  };
  EXPECT_EQ(kernels_of(kStep, 1, 32), "step append_keys ");
  EXPECT_EQ(kernels_of(kStep, 1, 33), "tail append_keys ");
  EXPECT_EQ(kernels_of(kStep, 2, 32), "tail append_keys ");
  EXPECT_EQ(kernels_of(kStep, 3, 32), "verify append_keys ");
  EXPECT_EQ(kernels_of(kPrefill, 40, 32), "tail_ends step verify append_keys ");
  // Rows are in shared memory, of which older GPUs have less.
  p.tail = tails(p, 150);
  ASSERT_TRUE(make_plan(p, {}, gpu, {}, &plan).ok());
  for (const auto& [capability, most] :
       {std::pair{80, "166912"}, std::pair{86, "101376"}, std::pair{120, "101376"}}) {
    p.tail = tails(p, 250);
    const Status refused = make_plan(p, {}, gpu_facts(132, capability), {}, &plan);
    EXPECT_EQ(refused.code(), StatusCode::kUnsupported);
    for (const std::string part : {"tail: R = 250 rows and 1 tokens", most})
      EXPECT_NE(refused.message().find(part), std::string::npos) << refused.message();
  }
  // A pack needs room for its longest sequence, where the plan knows that.
  p.tail = tails(p, 186);
  p.cu_seqlens = DType::kInt64;
  p.num_sequences = p.num_tokens = 100;
  std::vector<int64_t> ends(101);
  std::iota(ends.begin(), ends.end(), 0);
  EXPECT_TRUE(make_plan(p, ends, gpu, {}, &plan).ok());
  const Status unknown = make_plan_from_bounds(p, gpu, {}, &plan);
  EXPECT_EQ(unknown.code(), StatusCode::kUnsupported);
  EXPECT_NE(unknown.message().find("R = 186 rows and up to 100 tokens a sequence, whose lengths "
                                   "are unknown, take"),
            std::string::npos)
      << unknown.message();
}

/// By alignment, size and trees; verify with more rows than fit in shared memory.
TEST(Tail, PlansListTheKernelThatDecodes) {
  const struct {
    const char* kernel;
    int64_t size, rows, tokens;
    bool tree;
    int64_t alignment;  // of k
  } cases[] = {{"tail", 128, 32, 1, false, 8}, {"tail", 64, 32, 1, false, 16},
               {"tail", 128, 32, 3, false, 8}, {"tail", 128, 32, 3, true, 16},
               {"step", 128, 16, 1, true, 16}, {"verify", 128, 200, 8, false, 16}};
  for (const auto& x : cases) {
    World world(StateLayout::kKV, DType::kFloat32, {x.size, x.size});
    Problem p = world.inputs.problem;
    p.operation = kStep, p.num_tokens = x.tokens;
    p.initial_state = states(p, DType::kFloat32, kSlots, true);
    p.tail = tails(p, x.rows);
    p.k.alignment = x.alignment;
    if (x.tree) p.token_parents = true, p.state_index_columns = x.tokens;
    Plan plan;
    const Status made = make_plan(p, {}, gpu_facts(132, 86), {}, &plan);
    ASSERT_TRUE(made.ok()) << made.message();
    EXPECT_EQ(plan.kernels[0].kernel, x.kernel) << x.rows << " rows, " << x.tokens << " tokens";
  }
}

TEST(Tail, InC) {
  if (test::on_cuda()) GTEST_SKIP() << "its calls are on host memory";
  World world(StateLayout::kVK, kSplit);
  std::vector<float> expected;
  world.mask[0] = 0;
  ASSERT_TRUE(world.call(kStep, 0, 3, &expected).ok());
  World other(StateLayout::kVK, kSplit);
  const check::Inputs part = test::slice(other.inputs, 0, 3);
  std::vector<float> o(expected.size(), NAN);
  c::Problem p;
  p.operation = KDA_DECODE;
  p.num_tokens = 3, p.num_heads = kHeads, p.num_value_heads = kValueHeads;
  p.key_dim = kKey, p.value_dim = kValue;
  p.gate_mode = static_cast<int32_t>(part.problem.gate_mode);
  p.beta_mode = static_cast<int32_t>(part.problem.beta_mode);
  p.qk_l2norm = part.problem.qk_l2norm;
  p.state_layout = KDA_STATE_VK;
  p.tokens(KDA_FP32, {part.q.data(), part.k.data(), part.v.data(), part.g.data(), part.beta.data(),
                      o.data()});
  p.states(&kda_problem::initial_state, other.pool.data(), KDA_BF16, kSlots, other.slots.data());
  const uint8_t fresh = 0;
  p.initial_state_mask = &fresh;
  c::Tail tail;
  tail.describe(p, kRows,
                {other.k.data(), other.g.data(), other.v_new.as<float>(), other.folded.data()});
  tail.split(p, {other.rest.as<int16_t>(), other.v.data(), other.beta.data()});
  tail.positions = other.positions.data();
  p.tail = &tail;
  c::call(p);
  EXPECT_EQ(o, expected);
  EXPECT_EQ(other.folded, world.folded);
  EXPECT_TRUE(same_states(other, world));
  // A field of a later version is refused where it is not zero.
  struct Newer : kda_tail {
    int64_t field = 1;
  } newer;
  static_cast<kda_tail&>(newer) = tail;
  newer.struct_size = sizeof(newer);
  p.tail = &newer;
  EXPECT_EQ(kda_call(&p, nullptr), KDA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kda_last_error()).find("tail: struct_size"), std::string::npos);
  // kda_split_states() needs a tail that kda_tails() has described.
  c::Tail early;
  EXPECT_EQ(kda_split_states(&p, &early, nullptr), KDA_INVALID_ARGUMENT);
  EXPECT_STREQ(kda_last_error(), "tail: rows = 0; call kda_tails first");
  // A plan for states that are not split.
  c::Tail whole = tail;
  whole.rest = whole.v = whole.beta = {};
  p.tail = &whole;
  const c::Plan of_whole(p);
  p.tail = &tail;
  c::Workspace memory;
  EXPECT_THROW(of_whole.run(p, memory), c::Error);
  EXPECT_STREQ(kda_last_error(), "tail.rest: given, but the plan was made without it");
  // A plan that was made without a tail.
  p.tail = nullptr;
  const c::Plan plain(p);
  p.tail = &tail;
  c::Workspace workspace;
  try {
    plain.run(p, workspace);
    FAIL();
  } catch (const c::Error& error) {
    EXPECT_STREQ(error.what(), "tail: given, but the plan was made without it");
  }
}

}  // namespace
}  // namespace kda
