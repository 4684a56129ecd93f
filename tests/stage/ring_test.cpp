// SPDX-License-Identifier: Apache-2.0
// Decode with a ring: rows that others have made are read, and rows and states are left as others
// read them. The truth is one recurrence of the whole sequence in float64.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>

#include "core/convert.hpp"
#include "core/layout.hpp"
#include "cpu/oracle/oracle.hpp"
#include "kda/call.hpp"
#include "plan/ledger.hpp"
#include "support/harness.hpp"

namespace kda {
namespace {

namespace oracle = cpu::oracle;
using Vector = std::vector<double>;

constexpr int64_t kTokens = 60, kHeads = 2, kApart = 5;  // tokens between the sequences

struct Sizes {
  int64_t K = 128, V = 128, HV = 4, R = 16;
  DType dtype = DType::kBFloat16, states = DType::kFloat32, rows = DType::kFloat32;
  StateLayout layout = StateLayout::kVK;
};

/// Sequences of a pool: number n has its next token at `at` + kApart n of one sequence, and has
/// counts[n] rows of those in front of it. The last one has no slot.
struct Rings {
  Sizes sizes;
  check::Inputs inputs;
  /// One for each value head, with the state of every token: copies share it.
  std::vector<std::shared_ptr<const oracle::HeadResult>> truth;
  std::vector<int32_t> slots = {3, 1, 4, 0}, counts, flush = {0, 0, 0, 0};
  io::Buffer pool, k, g, v_new;
  int64_t at = 20, num_slots = 5;
  std::string backend;
  std::function<void(Problem*)> change = [](Problem*) {};
  int32_t flags = 0;
  bool gpu = false;  ///< a plan for one, and no more
  std::string planned;

  explicit Rings(const Sizes& of, const std::vector<int32_t>& rows = {5, 0, 14, 9})
      : sizes(of), counts(rows) {
    check::GenerateOptions options = test::shape(kTokens, kHeads, sizes.K, sizes.V);
    options.num_value_heads = sizes.HV;
    options.dtype = sizes.dtype;
    options.regime = check::Regime::kTrainedSoftplus;
    inputs = check::generate(options);
    inputs.problem.state_layout = sizes.layout;
    inputs.problem.qk_l2norm = true;
    const auto made = [](int64_t elements, DType dtype) {
      io::Buffer buffer(static_cast<std::size_t>(elements * dtype_size(dtype)));
      buffer.fill(0xff);
      return buffer;
    };
    pool = made(num_slots * sizes.HV * sizes.K * sizes.V, sizes.states);
    k = made(num_slots * kHeads * sizes.R * sizes.K, sizes.rows);
    g = made(num_slots * sizes.HV * sizes.R * sizes.K, DType::kFloat32);
    v_new = made(num_slots * sizes.HV * sizes.R * sizes.V, sizes.rows);
    for (int64_t head = 0; head < sizes.HV; ++head)
      truth.push_back(std::make_shared<const oracle::HeadResult>(
          oracle::run_head(inputs.problem, inputs.tensors(), {0, kTokens}, head, {},
                           /*keep_states=*/true)));
    for (std::size_t n = 0; n + 1 < slots.size(); ++n) {
      const int64_t first = token(n) - counts[n];
      for (int64_t head = 0; head < sizes.HV; ++head)
        oracle::store_state(inputs.problem, pool_desc(), pool.data(), slots[n], head,
                            state_behind(first - 1, head).data());
      for (int64_t i = 0; i < counts[n]; ++i) put_rows(slots[n], i, first + i);
    }
  }

  int64_t token(std::size_t n) const { return at + kApart * static_cast<int64_t>(n); }
  StateDesc pool_desc() const { return states(inputs.problem, sizes.states, num_slots, true); }
  Vector state_behind(int64_t t, int64_t head) const {
    const auto size = static_cast<std::ptrdiff_t>(sizes.K * sizes.V);
    const auto first = truth[static_cast<std::size_t>(head)]->token_states.begin() + t * size;
    return {first, first + size};
  }
  Vector key(int64_t t, int64_t head) const {
    const Problem& p = inputs.problem;
    Vector x = oracle::load_row(p, p.k, inputs.k.data(), t, head, sizes.K);
    oracle::l2_normalize(x);
    return x;
  }
  Vector log_decay(int64_t t, int64_t head) const {
    return oracle::log_decay(inputs.problem, inputs.tensors(), t, head);
  }
  Vector value(int64_t t, int64_t head) const {
    const auto first = truth[static_cast<std::size_t>(head)]->v_new.begin() + t * sizes.V;
    return {first, first + sizes.V};
  }

  /// visit(buffer, type, first element, what it should have) of each row of a token.
  template <class Visit>
  void each_row(int64_t slot, int64_t i, int64_t t, Visit&& visit) {
    const auto at_row = [&](int64_t heads, int64_t head, int64_t size) {
      return ((slot * heads + head) * sizes.R + i) * size;
    };
    for (int64_t head = 0; head < kHeads; ++head)
      visit(k, sizes.rows, at_row(kHeads, head, sizes.K), key(t, head));
    for (int64_t head = 0; head < sizes.HV; ++head) {
      visit(g, DType::kFloat32, at_row(sizes.HV, head, sizes.K), log_decay(t, head));
      visit(v_new, sizes.rows, at_row(sizes.HV, head, sizes.V), value(t, head));
    }
  }
  void put_rows(int64_t slot, int64_t i, int64_t t) {
    each_row(slot, i, t, [](io::Buffer& of, DType dtype, int64_t first, const Vector& x) {
      for (std::size_t c = 0; c < x.size(); ++c)
        store_double(of.data(), dtype, first + static_cast<int64_t>(c), x[c]);
    });
  }

  Status step(std::vector<double>* o) {
    const auto N = static_cast<int64_t>(slots.size());
    check::Inputs part = test::slice(inputs, at, at + kApart * (N - 1) + 1);
    Problem p = part.problem;
    p.operation = Operation::kDecode;
    p.batch = p.num_sequences = N;
    for (TensorDesc* desc : {&p.q, &p.k, &p.v, &p.g, &p.beta})
      desc->strides[0] = kApart * desc->strides[1];
    p.num_tokens = 1;
    p.o = contiguous(DType::kFloat32, {N, 1, sizes.HV, sizes.V});
    p.first_slot = 1;
    p.initial_state = pool_desc();
    TailDesc& ring = p.tail.emplace(tails(p, sizes.R));
    ring.ring = ring.flush = true;
    ring.k = contiguous(sizes.rows, {num_slots, kHeads, sizes.R, sizes.K});
    ring.g = contiguous(DType::kFloat32, {num_slots, sizes.HV, sizes.R, sizes.K});
    ring.v_new = contiguous(sizes.rows, {num_slots, sizes.HV, sizes.R, sizes.V});
    change(&p);
    Plan plan;
    KDA_RETURN_IF_ERROR(make_plan_from_bounds(p,
                                              gpu ? gpu_facts(132, 90) : test::device_of(backend),
                                              test::with_backend(backend), &plan));
    planned = plan.to_text();
    if (gpu) return {};
    io::Buffer workspace(plan.workspace_bytes);
    workspace.fill(0xff);
    io::Buffer rows(static_cast<std::size_t>(N * sizes.HV * sizes.V) * 4);
    rows.fill(0xff);
    Tensors t = part.tensors();
    t.o = rows.data();
    t.initial_state = pool.data();
    t.initial_state_indices = slots.data();
    t.tail.k = k.data(), t.tail.g = g.data(), t.tail.v_new = v_new.data();
    t.tail.positions = counts.data(), t.tail.flush = flush.data();
    KDA_RETURN_IF_ERROR(check::run_and_wait(plan, t, workspace.data(), workspace.size()));
    o->clear();
    for (int64_t i = 0; i < N * sizes.HV * sizes.V; ++i)
      o->push_back(load_double(rows.data(), DType::kFloat32, i));
    if (const void* word = plan::find_block(plan, workspace.data(), "device_flags"))
      flags = *static_cast<const int32_t*>(word);
    return {};
  }
};

double distance(const double* x, const Vector& y) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    const double apart = x[i] - y[i];
    difference += apart * apart, size += y[i] * y[i];
  }
  return std::sqrt(difference / size);
}

std::vector<std::string> backends_with_rings() {
  if (test::on_cuda()) return {"recurrent"};
  std::vector<std::string> all = test::backends();
  all.push_back("oracle");
  return all;
}

/// Bytes of a slot.
std::vector<std::byte> slot_bytes(const io::Buffer& of, int64_t slot, int64_t slots) {
  const std::size_t size = of.size() / static_cast<std::size_t>(slots);
  const std::byte* first = of.data() + static_cast<std::size_t>(slot) * size;
  return {first, first + size};
}

/// Checks o, the state and the rows of sequence n behind one step; `before`: its ring in front.
void expect_step(Rings& rings, const Rings& before, std::size_t n, bool flush,
                 const std::vector<double>& o, double bound) {
  const Sizes& sizes = rings.sizes;
  const int64_t t = rings.token(n), slot = rings.slots[n];
  for (int64_t head = 0; head < sizes.HV; ++head) {
    const Vector& all = rings.truth[static_cast<std::size_t>(head)]->o;
    const Vector expected(all.begin() + t * sizes.V, all.begin() + (t + 1) * sizes.V);
    ASSERT_LT(
        distance(&o[(n * static_cast<std::size_t>(sizes.HV) + static_cast<std::size_t>(head)) *
                    static_cast<std::size_t>(sizes.V)],
                 expected),
        bound)
        << "o of sequence " << n << " at " << t;
    if (!flush) continue;
    const Vector state =
        oracle::load_state(rings.inputs.problem, rings.pool_desc(), rings.pool.data(), slot, head);
    ASSERT_LT(distance(state.data(), rings.state_behind(t, head)), bound) << "state at " << t;
  }
  const auto same = [&](io::Buffer Rings::*of) {
    return slot_bytes(rings.*of, slot, rings.num_slots) ==
           slot_bytes(before.*of, slot, rings.num_slots);
  };
  if (flush) {
    ASSERT_TRUE(same(&Rings::k) && same(&Rings::g) && same(&Rings::v_new));
    return;
  }
  ASSERT_TRUE(same(&Rings::pool));
  constexpr io::Buffer Rings::*kRows[] = {&Rings::k, &Rings::g, &Rings::v_new};
  std::vector<std::vector<std::byte>> others;  // the slot's rows, with the new one as it was
  for (const auto rows : kRows) others.push_back(slot_bytes(rings.*rows, slot, rings.num_slots));
  rings.each_row(slot, rings.counts[n], t,
                 [&](io::Buffer& of, DType dtype, int64_t first, const Vector& x) {
                   Vector row;
                   for (std::size_t c = 0; c < x.size(); ++c)
                     row.push_back(load_double(of.data(), dtype, first + static_cast<int64_t>(c)));
                   ASSERT_LT(distance(row.data(), x), bound) << "a row of the token at " << t;
                   for (std::size_t i = 0; i < others.size(); ++i) {
                     if (&(rings.*kRows[i]) != &of) continue;
                     const std::size_t size = static_cast<std::size_t>(dtype_size(dtype)),
                                       at = static_cast<std::size_t>(first) * size;
                     std::memcpy(&others[i][at - static_cast<std::size_t>(slot) * others[i].size()],
                                 (before.*kRows[i]).data() + at, x.size() * size);
                   }
                 });
  for (std::size_t i = 0; i < others.size(); ++i)
    ASSERT_EQ(others[i], slot_bytes(before.*kRows[i], slot, rings.num_slots))
        << "other rows, at " << t;
}

void expect_steps(const std::string& backend, const Sizes& sizes, int steps, double bound,
                  const std::vector<int32_t>& counts = {5, 0, 14, 9}) {
  Rings rings(sizes, counts);
  rings.backend = backend;
  const auto N = rings.slots.size();
  for (int i = 0; i < steps; ++i, ++rings.at) {
    rings.flush[1] = i == 2;
    const Rings before = rings;
    std::vector<double> o;
    const Status status = rings.step(&o);
    ASSERT_TRUE(status.ok()) << status.message();
    ASSERT_EQ(rings.flags, 0);
    for (std::size_t n = 0; n + 1 < N; ++n) {
      const bool flush = rings.counts[n] == sizes.R - 1 || rings.flush[n] != 0;
      expect_step(rings, before, n, flush, o, bound);
      if (::testing::Test::HasFatalFailure()) return;
      rings.counts[n] = flush ? 0 : rings.counts[n] + 1;
    }
    for (std::size_t c = 0; c < static_cast<std::size_t>(sizes.HV * sizes.V); ++c)
      ASSERT_EQ(o[o.size() - 1 - c], 0.0);  // of the sequence without a slot
    for (const int64_t slot : {0, 2})
      for (const auto of : {&Rings::pool, &Rings::k, &Rings::g, &Rings::v_new})
        ASSERT_EQ(slot_bytes(rings.*of, slot, rings.num_slots),
                  slot_bytes(before.*of, slot, rings.num_slots));
  }
}

TEST(Ring, StepsGoOnFromRowsOfOthersAndLeaveRowsForThem) {
  constexpr DType kHalf = DType::kBFloat16, kFloat = DType::kFloat32;
  constexpr int steps = 12;  // each sequence folds
  const std::vector<std::string> backends = backends_with_rings();
  for (const std::string& backend : backends) {
    expect_steps(backend, {}, steps, 1e-5);
    if (backend != backends.front())
      continue;  // sizes and types are no matter of an instruction set
    expect_steps(backend, {.dtype = kFloat, .states = kHalf, .rows = kHalf}, steps, 3e-2);
    expect_steps(backend, {.HV = 2, .R = 21, .dtype = DType::kFloat16}, steps, 1e-5,
                 {15, 0, 19, 9});
    expect_steps(backend, {.HV = 2, .R = 1}, 3, 1e-5, {0, 0, 0, 0});  // folds each token
    if (test::on_cuda()) {  // PlansSayItAndGpusRefuseOtherSizes
      // A block takes more shared memory than it has unasked.
      expect_steps(backend, {.R = 64}, 3, 1e-5, {15, 0, 29, 9});
      continue;
    }
    expect_steps(backend, {33, 40, 4, 16, kFloat, kFloat, kFloat, StateLayout::kKV}, steps, 1e-5);
  }
}

TEST(Ring, WrongUseIsRefusedByNameAndNothingIsWritten) {
  const struct {
    const char* text;
    std::function<void(Problem*)> change;
  } cases[] = {
      {"tail.ring: a ring takes a decode of one token a sequence",
       [](Problem* p) { p->operation = Operation::kForward; }},
      {"tail.g: dtype bf16 is not fp32, which a ring has",
       [](Problem* p) { p->tail->g.dtype = DType::kBFloat16; }},
      {"tail.v_new: dtype int32 is not", [](Problem* p) { p->tail->v_new.dtype = DType::kInt32; }},
      {"tail: R = 257 is outside 1..256", [](Problem* p) { p->tail->rows = 257; }},
      {"sources: is not taken with a ring", [](Problem* p) { p->tail->sources = true; }},
      {"tail.settle: is not taken with a ring", [](Problem* p) { p->tail->settle = true; }},
      {"accepted_rows: is not taken with a ring",
       [](Problem* p) { p->tail->accepted_columns = 1; }},
      {"initial_state_mask: is not taken with a ring",
       [](Problem* p) { p->initial_state_mask = true; }},
      {"flush: belongs to a ring", [](Problem* p) { p->tail->ring = false; }},
      {"g: a ring has a gate a channel, got one gate a head",
       [](Problem* p) { p->g.strides[3] = 0; }},
  };
  Rings rings({});
  rings.backend = backends_with_rings()[0];
  const Rings before = rings;
  std::vector<double> o;
  for (const auto& x : cases) {
    rings.change = x.change;
    EXPECT_NE(rings.step(&o).message().find(x.text), std::string::npos) << x.text;
  }
  rings.change = [](Problem*) {};
  rings.counts[1] = 16;
  if (!test::on_cuda()) {
    EXPECT_NE(rings.step(&o).message().find("positions: entry 1 = 16 is outside 0..15"),
              std::string::npos);
  }
  for (const auto of : {&Rings::pool, &Rings::k, &Rings::g, &Rings::v_new})
    EXPECT_TRUE(test::same_bits(rings.*of, before.*of));
}

TEST(Ring, AGpuFlagsWrongCountsAndSkipsTheirSequences) {
  if (!test::on_cuda()) GTEST_SKIP() << "a CPU refuses them";
  Rings rings({});
  rings.counts[1] = -1, rings.counts[2] = 16;
  const Rings before = rings;
  std::vector<double> o;
  ASSERT_TRUE(rings.step(&o).ok());
  EXPECT_EQ(rings.flags, kBadTail);
  for (const std::size_t n : {1, 2})
    for (const auto of : {&Rings::pool, &Rings::k, &Rings::g, &Rings::v_new})
      EXPECT_EQ(slot_bytes(rings.*of, rings.slots[n], 5),
                slot_bytes(before.*of, rings.slots[n], 5));
  rings.counts[1] = rings.counts[2] = 1;  // the others have been computed
  expect_step(rings, before, 0, false, o, 1e-5);
}

TEST(Ring, PlansSayItAndGpusRefuseOtherSizes) {
  std::vector<double> o;
  Rings rings({});
  rings.gpu = true;
  ASSERT_TRUE(rings.step(&o).ok());
  EXPECT_NE(rings.planned.find("ring            16 rows a slot, k fp32, v_new fp32"),
            std::string::npos);
  const struct {
    Sizes sizes;
    std::function<void(Problem*)> change;
    const char* text;
  } cases[] = {
      {{.K = 64, .V = 64}, [](Problem*) {}, "a ring is for K = V = 128 there, got K = 64, V = 64"},
      {{.layout = StateLayout::kKV}, [](Problem*) {}, "a ring is for states [V, K] there"},
      {{}, [](Problem* p) { p->initial_state->tensor.alignment = 4; }, "states without gaps"},
      {{.R = 256}, [](Problem*) {}, "tail: R = 256 rows of a ring take"},
  };
  for (const auto& x : cases) {
    Rings other(x.sizes);
    other.gpu = true, other.change = x.change;
    const Status refused = other.step(&o);
    EXPECT_EQ(refused.code(), StatusCode::kUnsupported);
    EXPECT_NE(refused.message().find(x.text), std::string::npos) << refused.message();
  }
}

}  // namespace
}  // namespace kda
