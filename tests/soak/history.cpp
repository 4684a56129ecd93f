// SPDX-License-Identifier: Apache-2.0
#include "soak/history.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "check/tolerances.hpp"
#include "core/convert.hpp"
#include "core/layout.hpp"
#include "cpu/oracle/oracle.hpp"

namespace kda::soak {
namespace {

namespace oracle = cpu::oracle;

constexpr int64_t kRows = 4;  // most rows of a call, and those of one in a graph
constexpr double kBf16Rounding = 0x1p-9;

template <class T, std::size_t kCount>
T pick(check::Random& random, const T (&values)[kCount]) {
  return values[static_cast<std::size_t>(random.below(static_cast<int64_t>(kCount)))];
}

double norm(const std::vector<double>& x) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  return std::sqrt(sum);
}

uint64_t mixed(uint64_t seed, int64_t number) {
  check::Random mixer(seed * 0x2545f4914f6cdd1du + static_cast<uint64_t>(number));
  return mixer.next();
}

/// Row-major but for `pad` more elements a token.
TensorDesc padded(DType dtype, int64_t tokens, int64_t heads, int64_t size, int64_t pad) {
  const int64_t row = heads * size + pad;
  TensorDesc desc;
  desc.dtype = dtype;
  desc.strides = {tokens * row, row, size, 1};
  const int64_t bytes = dtype_size(dtype);
  while (desc.alignment > bytes && (row * bytes | size * bytes) % desc.alignment != 0)
    desc.alignment /= 2;
  return desc;
}

}  // namespace

History::History(uint64_t seed, int64_t number) : random_(mixed(seed, number)) {
  Problem& p = base_;
  const bool gpu = test::on_cuda();
  static constexpr int64_t kSmall[] = {8, 16, 16, 20, 24, 32, 33, 64},
                           kOfGpu[] = {32, 64, 64, 72, 128};
  p.num_heads = 1 + random_.below(2);
  p.num_value_heads = p.num_heads * (1 + random_.below(2));
  p.key_dim = gpu ? pick(random_, kOfGpu) : pick(random_, kSmall);
  p.value_dim = random_.chance(0.5) ? p.key_dim
                : gpu               ? pick(random_, kOfGpu)
                                    : pick(random_, kSmall);
  if (random_.chance(gpu ? 0.2 : 0.02)) p.key_dim = p.value_dim = 128;
  if (test::emulated()) p.num_heads = p.num_value_heads = 1;
  static constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kBFloat16,
                                     DType::kFloat16};
  p.q.dtype = p.k.dtype = p.v.dtype = pick(random_, kTypes);
  // As FLA has them, or each its own.
  g_type_ = random_.chance(0.7) ? p.q.dtype : pick(random_, kTypes);
  beta_type_ = random_.chance(0.7) ? p.q.dtype : pick(random_, kTypes);
  o_type_ = random_.chance(0.7) ? p.q.dtype : pick(random_, kTypes);
  p.gate_mode = static_cast<GateMode>(random_.below(3));
  p.beta_mode = static_cast<BetaMode>(random_.below(3));
  p.qk_l2norm = random_.chance(0.7);
  if (p.gate_mode != GateMode::kLog) {
    A_log_.resize(static_cast<std::size_t>(p.num_value_heads));
    dt_bias_.resize(static_cast<std::size_t>(p.num_value_heads * p.key_dim));
    for (float& x : A_log_) x = static_cast<float>(random_.uniform(-1, 1));
    for (float& x : dt_bias_) x = static_cast<float>(random_.uniform(-2, 1));
    p.A_log = contiguous(DType::kFloat32, {p.num_value_heads});
    p.dt_bias = contiguous(DType::kFloat32, {p.num_value_heads, p.key_dim});
    p.dt_bias->alignment = p.A_log->alignment = 4;
  }
  p.batch_invariant = random_.chance(0.2);
  p.state_layout = static_cast<StateLayout>(random_.below(2));
  p.first_slot = random_.chance(0.6) ? random_.below(3) : 0;
  p.state_index_columns = random_.chance(0.3) ? 1 : 2 + random_.below(3);

  StateDesc pool;
  pool.indexed = true;
  pool.num_slots = p.first_slot + 6 * p.state_index_columns + 6;
  pool.tensor.dtype = random_.chance(0.6) ? DType::kFloat32 : DType::kBFloat16;
  state_elements_ = p.num_value_heads * p.key_dim * p.value_dim;
  const int64_t columns = p.state_layout == StateLayout::kKV ? p.value_dim : p.key_dim;
  pool.tensor.strides = {state_elements_ + 8 * random_.below(3), p.key_dim * p.value_dim, columns,
                         1};
  pool.tensor.alignment = dtype_size(pool.tensor.dtype);
  while (
      pool.tensor.alignment < 16 &&
      std::all_of(pool.tensor.strides.begin(), pool.tensor.strides.end() - 1, [&](int64_t stride) {
        return stride * dtype_size(pool.tensor.dtype) % (2 * pool.tensor.alignment) == 0;
      }))
    pool.tensor.alignment *= 2;
  p.initial_state = pool;
  pool_ = Memory(static_cast<std::size_t>(pool.num_slots * pool.tensor.strides[0] *
                                          dtype_size(pool.tensor.dtype)));
  pool_.upload();
  for (int64_t slot = p.first_slot; slot < pool.num_slots; ++slot)
    free_.push_back(static_cast<int32_t>(slot));
  backends_ = test::backends();
  graph_has_trees_ = random_.chance(0.5);
  graph_has_drafts_ = random_.chance(0.5);
}

std::string History::describe() const {
  const Problem& p = base_;
  return fmt::format(
      "K={} V={} H={} HV={} {} states {} {} {} beta {} l2norm={} first_slot={} columns={}",
      p.key_dim, p.value_dim, p.num_heads, p.num_value_heads, dtype_name(p.q.dtype),
      dtype_name(p.initial_state->tensor.dtype), state_layout_name(p.state_layout),
      gate_mode_name(p.gate_mode), beta_mode_name(p.beta_mode), p.qk_l2norm, p.first_slot,
      p.state_index_columns);
}

// ---- requests and slots

/// An index that names no slot.
int32_t History::none() {
  if (base_.first_slot > 0 && random_.chance(0.7))
    return static_cast<int32_t>(random_.below(base_.first_slot));
  return random_.chance(0.5) ? -1 : static_cast<int32_t>(-1 - random_.below(1 << 30));
}

int64_t History::some_tokens(int64_t most) {
  const int64_t tokens = random_.chance(0.7)   ? random_.below(21)
                         : random_.chance(0.8) ? random_.below(70)
                                               : random_.below(150);
  return std::min(tokens, most);
}

/// A request that is not in the call yet, or null.
History::Request* History::idle_request() {
  std::vector<Request*> idle;
  for (const auto& request : requests_)
    if (!request->busy) idle.push_back(request.get());
  if (idle.empty()) return nullptr;
  Request* request =
      idle[static_cast<std::size_t>(random_.below(static_cast<int64_t>(idle.size())))];
  request->busy = true;
  return request;
}

/// In slots that others may have left their states in; null if there is no room.
History::Request* History::new_request() {
  const auto wanted = static_cast<std::size_t>(base_.state_index_columns);
  if (free_.size() < wanted + 2) return nullptr;
  auto request = std::make_unique<Request>();
  for (std::size_t i = 0; i < wanted; ++i) {
    const auto at = static_cast<std::ptrdiff_t>(random_.below(static_cast<int64_t>(free_.size())));
    request->slots.push_back(free_[static_cast<std::size_t>(at)]);
    free_.erase(free_.begin() + at);
  }
  request->busy = true;
  requests_.push_back(std::move(request));
  return requests_.back().get();
}

/// Frees a request's slots or a checkpoint's; what lies there stays, or becomes NaN.
void History::evict() {
  std::vector<int32_t> slots;
  if (!saved_.empty() && random_.chance(0.5)) {
    slots.push_back(saved_.front());
    saved_.erase(saved_.begin());
  } else if (!requests_.empty()) {
    const auto at =
        static_cast<std::ptrdiff_t>(random_.below(static_cast<int64_t>(requests_.size())));
    slots = requests_[static_cast<std::size_t>(at)]->slots;
    requests_.erase(requests_.begin() + at);
  }
  const StateDesc& pool = *base_.initial_state;
  const bool poison = random_.chance(0.5);
  for (const int32_t slot : slots) {
    truth_.erase(slot);
    free_.push_back(slot);
    if (poison)
      std::memset(at_bytes(pool_.host().data(), pool.tensor, slot * pool.tensor.strides[0]), 0xff,
                  static_cast<std::size_t>(state_elements_ * dtype_size(pool.tensor.dtype)));
  }
  if (poison) pool_.upload();
}

// ---- calls

Problem History::problem_for(Operation operation, const std::vector<Row>& rows, bool packed) {
  Problem p = base_;
  p.operation = operation;
  p.num_sequences = static_cast<int64_t>(rows.size());
  int64_t tokens = 0;
  for (const Row& row : rows) tokens += row.tokens;
  p.batch = packed ? 1 : p.num_sequences;
  p.num_tokens = packed ? tokens : rows.empty() ? 0 : rows.front().tokens;
  if (packed) p.cu_seqlens = random_.chance(0.5) ? DType::kInt32 : DType::kInt64;
  const int64_t T = p.num_tokens, H = p.num_heads, HV = p.num_value_heads;
  const auto pad = [&] { return random_.chance(0.3) ? 8 * (1 + random_.below(3)) : 0; };
  p.q = padded(base_.q.dtype, T, H, p.key_dim, pad());
  p.k = padded(base_.k.dtype, T, H, p.key_dim, pad());
  p.v = padded(base_.v.dtype, T, HV, p.value_dim, pad());
  p.g = padded(g_type_, T, HV, p.key_dim, pad());
  p.o = padded(o_type_, T, HV, p.value_dim, pad());
  p.beta = padded(beta_type_, T, HV, 1, pad());
  p.beta.strides = {p.beta.strides[0], p.beta.strides[1], 1, 1};
  if (random_.chance(0.2)) p.scale = random_.uniform(-1, 1);
  if (operation == Operation::kForward) p.state_index_columns = 1;
  return p;
}

double History::gate() {
  if (base_.gate_mode != GateMode::kLog) return 1.5 * normal();
  if (random_.chance(0.01))
    return random_.chance(0.5) ? -std::numeric_limits<double>::infinity() : 0;
  return -0.3 * std::exp(normal());
}
double History::step_size() {
  return base_.beta_mode == BetaMode::kPlain ? random_.uniform() : normal();
}

/// `normalise`: rows no longer than 1, as errors are not to grow.
void History::fill_rows(io::Buffer* buffer, const TensorDesc& desc, int64_t heads, int64_t size,
                        double (History::*element)(), bool normalise) {
  buffer->fill(0xff);
  const int64_t step = desc.strides[1];
  const int64_t tokens =
      (static_cast<int64_t>(buffer->size()) / dtype_size(desc.dtype) + step - 1) / step;
  std::vector<double> row(static_cast<std::size_t>(size));
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t h = 0; h < heads; ++h) {
      for (double& x : row) x = (this->*element)();
      const double factor = normalise ? 0.99 / std::max(norm(row), 1e-3) : 1;
      for (int64_t i = 0; i < size; ++i)
        store_element(buffer->data(), desc.dtype, t * step + h * desc.strides[2] + i,
                      static_cast<float>(row[static_cast<std::size_t>(i)] * factor));
    }
}

void History::fill_inputs(Call* call) {
  const Problem& p = call->problem();
  const bool normalise = !p.qk_l2norm;
  fill_rows(&call->input(Call::kQ), p.q, p.num_heads, p.key_dim, &History::normal, normalise);
  fill_rows(&call->input(Call::kK), p.k, p.num_heads, p.key_dim, &History::normal, normalise);
  fill_rows(&call->input(Call::kV), p.v, p.num_value_heads, p.value_dim, &History::normal, false);
  fill_rows(&call->input(Call::kG), p.g, p.num_value_heads, p.key_dim, &History::gate, false);
  fill_rows(&call->input(Call::kBeta), p.beta, p.num_value_heads, 1, &History::step_size, false);
  if (p.A_log) std::copy(A_log_.begin(), A_log_.end(), call->input(Call::kALog).as<float>());
  if (p.dt_bias)
    std::copy(dt_bias_.begin(), dt_bias_.end(), call->input(Call::kDtBias).as<float>());
}

/// A request's first tokens, more of them, a start from a checkpoint or from another request's
/// state, tokens whose state nobody keeps, or padding.
Row History::forward_row(int64_t tokens) {
  Row row;
  row.tokens = tokens;
  row.read = {none()};
  row.write = none();
  const double kind = random_.uniform();
  if (kind < 0.3) {
    if (Request* request = idle_request()) {
      row.read = {request->slot()};
      if (random_.chance(0.2))
        request->current = static_cast<std::size_t>(random_.below(base_.state_index_columns));
      row.write = request->slot();
    }
    return row;
  }
  if (kind < 0.4) return row;
  Request* source = kind < 0.6 && !requests_.empty() ? idle_request() : nullptr;
  if (source) row.read = {source->slot()};
  if (!source && kind < 0.7 && !saved_.empty())
    row.read = {
        saved_[static_cast<std::size_t>(random_.below(static_cast<int64_t>(saved_.size())))]};
  if (kind < 0.45) return row;
  if (Request* request = new_request()) {
    row.write = request->slot();
    if (is_none(row.read[0]) &&
        random_.chance(0.5)) {  // a new request whose slot holds an old state
      row.read = {request->slot()};
      row.has_state = false;
    }
    // Without tokens, and from none, it begins with zeros.
  }
  return row;
}

std::string History::forward() {
  const bool packed = random_.chance(0.7);
  const int64_t most = test::emulated() ? 24 : 150;
  const int64_t same = some_tokens(most);
  std::vector<Row> rows;
  const int64_t count = random_.chance(0.02) ? 0 : 1 + random_.below(kRows);
  int64_t longest = 0;
  for (int64_t n = 0; n < count; ++n) {
    rows.push_back(forward_row(packed ? some_tokens(most) : same));
    longest = std::max(longest, rows.back().tokens);
  }
  // Decode from one slot to another is a forward of a few tokens.
  const bool across = longest <= kMaxDecodeTokens && random_.chance(0.4);
  Problem p = problem_for(across ? Operation::kDecode : Operation::kForward, rows, packed);
  p.state_index_columns = 1;
  p.final_state = p.initial_state;
  if (!across && random_.chance(0.4)) {
    p.checkpoints = p.initial_state;
    p.checkpoint_every = int64_t{16} << random_.below(3);
    p.checkpoint_offsets = random_.chance(0.5);
    for (Row& row : rows) {
      const int64_t places = row.tokens / p.checkpoint_every;
      row.offset = p.checkpoint_every * (random_.below(places + 2) - 1);
      if (row.offset > row.tokens) row.offset = 0;
      for (int64_t c = 0; c < (p.checkpoint_offsets ? 1 : places); ++c) {
        row.checkpoints.push_back(none());
        const bool due = !p.checkpoint_offsets || row.offset > 0;
        if (!due || free_.size() < 3 || random_.chance(0.5)) continue;
        row.checkpoints.back() = free_.back();
        saved_.push_back(free_.back());
        free_.pop_back();
      }
    }
  }
  const bool masked =
      std::any_of(rows.begin(), rows.end(), [](const Row& row) { return !row.has_state; });
  p.initial_state_mask = masked || random_.chance(0.2);
  std::vector<int64_t> lengths = {0};
  for (const Row& row : rows) lengths.push_back(lengths.back() + row.tokens);
  PlanOptions options;
  if (!across && random_.chance(0.15))
    options =
        test::fixed_segments(2 + random_.below(2), static_cast<SegmentMethod>(random_.below(2)));
  else if (random_.chance(0.3))
    options.backend =
        backends_[static_cast<std::size_t>(random_.below(static_cast<int64_t>(backends_.size())))];
  options.num_threads = static_cast<int32_t>(1 + random_.below(2));
  const bool bounds =
      packed && options.context_parallel != SegmentPolicy::kFixed && random_.chance(0.3);
  Call call(p, lengths, bounds, options, &pool_);
  return play(across                 ? "decode across"
              : p.checkpoint_offsets ? "forward with checkpoints at offsets"
              : p.checkpoints        ? "forward with checkpoints"
                                     : "forward",
              &call, rows, false);
}

/// In place, a slot a sequence.
std::string History::decode() {
  const bool in_graph = random_.chance(0.5), packed = !in_graph && random_.chance(0.5);
  std::vector<Row> rows(static_cast<std::size_t>(in_graph ? kRows : 1 + random_.below(kRows)));
  const int64_t same = in_graph ? 1 : 1 + random_.below(3);
  for (Row& row : rows) {
    row.tokens = packed ? random_.below(4) : same;
    row.read = {none()};
    Request* request = random_.chance(0.8) ? idle_request() : nullptr;
    if (!request && (request = new_request())) row.has_state = false;
    if (request) row.read = {request->slot()};
  }
  if (in_graph && decode_graph_) return play("decode", decode_graph_.get(), rows, true);
  Problem p = problem_for(Operation::kDecode, rows, packed);
  p.state_index_columns = 1;
  p.initial_state_mask = true;
  p.zero_skipped = random_.chance(0.5);
  std::vector<int64_t> lengths = {0};
  for (const Row& row : rows) lengths.push_back(lengths.back() + row.tokens);
  PlanOptions options;
  options.num_threads = static_cast<int32_t>(1 + random_.below(2));
  auto call = std::make_unique<Call>(p, lengths, random_.chance(0.5), options, &pool_);
  if (!in_graph) return play("decode", call.get(), rows, false);
  decode_graph_ = std::move(call);
  return play("decode", decode_graph_.get(), rows, true);
}

/// Any parents that have a slot, now and then none.
void History::grow(Row* row) {
  row->parents = {static_cast<int32_t>(random_.below(9)) - 4};
  for (std::size_t t = 1; t < row->read.size(); ++t) {
    const auto parent = static_cast<std::size_t>(random_.below(static_cast<int64_t>(t)));
    const bool stored = parent + 1 == t || !is_none(row->read[parent]);
    row->parents.push_back(random_.chance(0.1) ? -1
                                               : static_cast<int32_t>(stored ? parent : t - 1));
  }
}

/// Tokens of a row that are computed.
int64_t History::tokens_of(const Row& row) {
  for (int64_t t = 1; !row.parents.empty() && t < row.tokens; ++t)
    if (row.parents[static_cast<std::size_t>(t)] < 0) return t;
  return row.tokens;
}

/// Drafts: a state a token, read from the last one accepted. The next call says how many were.
std::string History::verify() {
  const int64_t S = base_.state_index_columns, most = std::min(S, kMaxDecodeTokens);
  const bool in_graph = random_.chance(0.5), fits = !in_graph || !test::on_cuda();
  // In a graph the form is that of the history.
  const bool tree = in_graph ? graph_has_trees_ : random_.chance(0.5);
  const bool apart = in_graph ? graph_has_drafts_ : random_.chance(0.5);
  std::vector<Row> rows(static_cast<std::size_t>(in_graph ? kRows : 1 + random_.below(kRows)));
  // In a graph T is fixed. The CPU wants sequences to fill it; a GPU takes padding behind them.
  const int64_t T = in_graph ? kRows * most - 1 : 0;
  int64_t left = T;
  std::vector<Request*> requests;
  for (std::size_t n = 0; n < rows.size(); ++n) {
    Row& row = rows[n];
    const auto behind = static_cast<int64_t>(rows.size() - n - 1);
    const int64_t least = in_graph && fits ? std::max<int64_t>(0, left - behind * most) : 0;
    row.tokens = in_graph ? least + random_.below(std::min(most, left) - least + 1)
                          : random_.below(most + 1);
    left -= row.tokens;
    Request* request = random_.chance(0.8) ? idle_request() : nullptr;
    requests.push_back(request);
    for (std::size_t s = 0; s < static_cast<std::size_t>(S); ++s) {
      const bool stored = request && (s == request->current || !random_.chance(0.1));
      row.read.push_back(stored ? request->slots[s] : none());
    }
    if (request) row.accepted = static_cast<int32_t>(request->current) + 1;
    if (tree) grow(&row);
    if (!apart) continue;
    row.drafts = row.read;
    row.read = {request ? request->slot() : none()};
    row.has_state = !request || random_.chance(0.9);
  }
  Call* call = verify_graph_.get();
  std::unique_ptr<Call> own;
  if (!in_graph || !call) {
    std::vector<Row> planned = rows;
    if (in_graph) planned.front().tokens += left;
    Problem p = problem_for(Operation::kDecode, planned, true);
    p.num_accepted_tokens = !apart;
    p.token_parents = tree;
    if (apart) p.final_state = p.initial_state;
    p.initial_state_mask = apart;
    p.zero_skipped = random_.chance(0.5);
    std::vector<int64_t> lengths = {0};
    for (const Row& row : rows) lengths.push_back(lengths.back() + row.tokens);
    PlanOptions options;
    options.num_threads = static_cast<int32_t>(1 + random_.below(2));
    own = std::make_unique<Call>(p, lengths, in_graph || random_.chance(0.5), options, &pool_);
    call = own.get();
    if (in_graph) verify_graph_ = std::move(own);
  }
  std::string failure = play(tree    ? apart ? "verify a tree from another slot" : "verify a tree"
                             : apart ? "verify from another slot"
                                     : "verify",
                             call, rows, in_graph);
  for (std::size_t n = 0; n < rows.size(); ++n) {
    if (!requests[n]) continue;
    std::vector<std::size_t> stored;
    const int64_t computed = tokens_of(rows[n]);
    for (std::size_t t = 0; t < static_cast<std::size_t>(computed); ++t)
      if (!is_none((apart ? rows[n].drafts : rows[n].read)[t])) stored.push_back(t);
    const bool kept = static_cast<int64_t>(requests[n]->current) >= computed;
    if (stored.empty() || (kept && random_.chance(0.2))) continue;  // nothing was accepted
    requests[n]->current =
        stored[static_cast<std::size_t>(random_.below(static_cast<int64_t>(stored.size())))];
  }
  return failure;
}

std::string History::step() {
  for (const auto& request : requests_) request->busy = false;
  while (random_.chance(0.08) || free_.size() < 4) evict();
  const double kind = random_.uniform();
  if (requests_.empty() || kind < 0.35) return forward();
  if (kind < 0.7 || base_.state_index_columns == 1) return decode();
  return verify();
}

// ---- comparison

std::string History::play(const char* what, Call* call, const std::vector<Row>& rows,
                          bool in_graph) {
  const std::string name = fmt::format("{}{}, {}", what,
                                       !in_graph         ? ""
                                       : test::on_cuda() ? " in a graph"
                                                         : " by a kept call",
                                       call->plan().implementation);
  ++counts_[name];
  fill_inputs(call);
  const io::Buffer before = pool_.host();
  call->run(rows, in_graph);
  const std::string failure = compare(*call, rows, before);
  return failure.empty() ? "" : fmt::format("{}: {}", name, failure);
}

/// A token's ancestors and itself.
std::vector<int64_t> History::path_to(const Row& row, int64_t token) {
  std::vector<int64_t> path;
  for (int64_t t = token; t >= 0;
       t = t == 0 || row.parents.empty() ? t - 1 : row.parents[static_cast<std::size_t>(t)])
    path.insert(path.begin(), t);
  return path;
}

std::vector<History::Store> History::stores_of(const Problem& p, const Row& row) const {
  std::vector<Store> stores;
  const auto add = [&](int32_t slot, int64_t tokens) {
    if (is_none(slot)) return;
    stores.push_back({slot, {}});
    for (int64_t t = 0; t < tokens; ++t) stores.back().path.push_back(t);
  };
  for (std::size_t c = 0; c < row.checkpoints.size(); ++c)
    add(row.checkpoints[c],
        p.checkpoint_offsets ? row.offset : (static_cast<int64_t>(c) + 1) * p.checkpoint_every);
  if (p.state_index_columns > 1)
    for (int64_t t = 0; t < tokens_of(row); ++t) {
      const int32_t slot = (p.final_state ? row.drafts : row.read)[static_cast<std::size_t>(t)];
      if (!is_none(slot)) stores.push_back({slot, path_to(row, t)});
    }
  else if (p.final_state)
    add(row.write, row.tokens);
  else if (row.tokens > 0 || !row.has_state)
    add(row.read[0], row.tokens);
  return stores;
}

namespace {

/// Whether o's rows of tokens [begin, end) are 0, or as they were before the call.
bool rows_are(const Call& call, int64_t begin, int64_t end, bool zero) {
  const Problem& p = call.problem();
  for (int64_t t = begin; t < end; ++t)
    for (int64_t h = 0; h < p.num_value_heads; ++h) {
      const auto* row = reinterpret_cast<const unsigned char*>(
          at_bytes(call.o().data(), p.o, row_offset(p, p.o, t, h)));
      const auto bytes = static_cast<std::size_t>(p.value_dim * dtype_size(p.o.dtype));
      if (!std::all_of(row, row + bytes, [&](unsigned char x) { return x == (zero ? 0 : 0xff); }))
        return false;
    }
  return true;
}

/// Some tokens of a call, one after the other, as a call of their own.
struct Tokens {
  Problem problem;
  Tensors tensors;
  std::array<io::Buffer, 5> rows;

  Tokens(const Problem& p, const Tensors& t, int64_t begin, const std::vector<int64_t>& path)
      : problem(p), tensors(t) {
    problem.batch = 1;
    problem.num_tokens = static_cast<int64_t>(path.size());
    problem.cu_seqlens.reset();
    const struct {
      TensorDesc& desc;
      const void*& data;
      int64_t heads, size;
    } inputs[] = {{problem.q, tensors.q, p.num_heads, p.key_dim},
                  {problem.k, tensors.k, p.num_heads, p.key_dim},
                  {problem.v, tensors.v, p.num_value_heads, p.value_dim},
                  {problem.g, tensors.g, p.num_value_heads, p.key_dim},
                  {problem.beta, tensors.beta, p.num_value_heads, 1}};
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto& [desc, data, heads, size] = inputs[i];
      const auto bytes = static_cast<std::size_t>(heads * size * dtype_size(desc.dtype));
      rows[i] = io::Buffer(path.size() * bytes);
      for (std::size_t n = 0; n < path.size(); ++n)
        std::memcpy(rows[i].data() + n * bytes,
                    at_bytes(data, desc, row_offset(p, desc, begin + path[n], 0)), bytes);
      desc.strides[1] = heads * size;
      data = rows[i].data();
    }
  }
  oracle::HeadResult run(int64_t head, const std::vector<double>& start, bool keep = false) const {
    return oracle::run_head(problem, tensors, {0, problem.num_tokens}, head, start, keep);
  }
};

/// What the largest decay leaves of an error.
double contraction(const Tokens& tokens, int64_t head) {
  const Problem& p = tokens.problem;
  double product = 1;
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    const std::vector<double> g = oracle::log_decay(p, tokens.tensors, token, head);
    product *= std::exp(*std::max_element(g.begin(), g.end()));
  }
  return product;
}

}  // namespace

std::string History::compare_row(const Call& call, const Row& row, int64_t begin,
                                 const io::Buffer& before,
                                 std::map<int32_t, std::vector<Truth>>* written) {
  const Problem& p = call.problem();
  const Tensors t = call.host_tensors();
  const StateDesc& pool = *base_.initial_state;
  const int64_t computed = tokens_of(row);
  const int32_t source = row.read[in_place(p) ? static_cast<std::size_t>(row.accepted) - 1 : 0];
  const bool skipped = skips_sequences(p) && is_none(source);
  if (skips_sequences(p) &&
      !rows_are(call, begin + (skipped ? 0 : computed), begin + row.tokens, zeroes_skipped(p)))
    return skipped ? "rows of o without a slot" : "rows of o behind the tree";
  if (skipped) return "";
  const bool from_zero = is_none(source) || !row.has_state;
  const check::CompareOptions options{.operands = check::operands_of(call.plan())};
  const bool rounds_each = pool.tensor.dtype == DType::kBFloat16 && p.state_index_columns > 1;
  const std::vector<Store> stores = stores_of(p, row);
  counts_["tokens"] += row.tokens;
  // The paths that outputs lie on, then those that end in another state.
  std::vector<std::vector<int64_t>> paths;
  for (int64_t last = row.parents.empty() ? computed - 1 : 0; last >= 0 && last < computed; ++last)
    paths.push_back(path_to(row, last));
  const std::size_t outputs = paths.size();
  for (const Store& store : stores)
    if (std::find(paths.begin(), paths.end(), store.path) == paths.end())
      paths.push_back(store.path);
  std::vector<Tokens> inputs;
  for (const auto& path : paths) inputs.emplace_back(p, t, begin, path);
  const auto scale_of = [](const std::vector<double>& ref, const std::vector<double>& magnitude) {
    return std::max({norm(ref), 1e-3 * norm(magnitude), 1e-30});
  };
  for (int64_t head = 0; head < p.num_value_heads; ++head) {
    const std::vector<double> start =
        from_zero ? std::vector<double>{}
                  : oracle::load_state(p, pool, before.data(), source, head);
    const Truth truth = from_zero ? Truth{} : truth_.at(source)[static_cast<std::size_t>(head)];
    std::vector<oracle::HeadResult> results;
    std::vector<double> rounded;  // what a path may lose where each of its states is stored in bf16
    for (const Tokens& tokens : inputs) {
      results.push_back(tokens.run(head, start, rounds_each));
      rounded.push_back(0);
      for (int64_t i = 0; rounds_each && i < tokens.problem.num_tokens; ++i) {
        const auto first = results.back().token_states.begin() + i * p.key_dim * p.value_dim;
        rounded.back() += kBf16Rounding * norm({first, first + p.key_dim * p.value_dim});
      }
    }
    for (std::size_t i = 0; i < outputs; ++i) {
      const auto length = static_cast<int64_t>(paths[i].size());
      const int64_t skip = row.parents.empty() ? 0 : length - 1;  // another path's
      std::vector<double> o;
      for (int64_t j = skip; j < length; ++j)
        for (int64_t c = 0; c < p.value_dim; ++c) {
          const int64_t token = begin + paths[i][static_cast<std::size_t>(j)];
          o.push_back(
              load_element(call.o().data(), p.o.dtype, row_offset(p, p.o, token, head) + c));
        }
      const auto from = skip * p.value_dim;
      const std::vector<double> ref(results[i].o.begin() + from, results[i].o.end()),
          magnitude(results[i].o_magnitude.begin() + from, results[i].o_magnitude.end());
      check::HeadError error = check::judge(o, ref, magnitude, p.o.dtype, length, options);
      // A first token's output is one number, q . k, times beta v: it may cancel.
      if (from_zero && length == 1) error.tolerance += check::kFp32FewValues;
      error.tolerance += std::sqrt(static_cast<double>(length - skip)) *
                         std::fabs(effective_scale(p)) * rounded[i] / scale_of(ref, magnitude);
      if (!(error.error <= error.tolerance))
        return fmt::format("o of head {}: {:.2e} of {:.2e}, {} tokens", head, error.error,
                           error.tolerance, length);
    }
    for (const auto& [slot, path] : stores) {
      const auto i =
          static_cast<std::size_t>(std::find(paths.begin(), paths.end(), path) - paths.begin());
      const oracle::HeadResult& there = results[i];
      const oracle::HeadResult chain = inputs[i].run(head, truth.S);
      const std::vector<double> stored =
          oracle::load_state(p, pool, pool_.host().data(), slot, head);
      const double scale = scale_of(there.state, there.state_magnitude);
      check::HeadError error =
          check::judge(stored, there.state, there.state_magnitude, pool.tensor.dtype,
                       static_cast<int64_t>(path.size()), options);
      error.tolerance += rounded[i] / scale;
      if (!(error.error <= error.tolerance))
        return fmt::format("slot {} of head {} after {} of {} tokens: {:.2e} of {:.2e}", slot, head,
                           path.size(), row.tokens, error.error, error.tolerance);
      const double bound = truth.bound * contraction(inputs[i], head) + error.tolerance * scale;
      double drift = 0;
      for (std::size_t j = 0; j < stored.size(); ++j)
        drift += (stored[j] - chain.state[j]) * (stored[j] - chain.state[j]);
      if (!(std::sqrt(drift) <= bound * (1 + 1e-9)))
        return fmt::format("slot {} of head {} is {:.2e} from the state machine's, {:.2e} allowed",
                           slot, head, std::sqrt(drift), bound);
      (*written)[slot].push_back({chain.state, bound});
      ++counts_["states compared"];
    }
  }
  return "";
}

/// Slots that were not written, and what lies between slots.
std::string History::compare_untouched(const io::Buffer& before,
                                       const std::map<int32_t, std::vector<Truth>>& written) const {
  const TensorDesc& desc = base_.initial_state->tensor;
  const int64_t size = dtype_size(desc.dtype), step = desc.strides[0] * size,
                state = state_elements_ * size;
  for (int64_t slot = 0; slot < base_.initial_state->num_slots; ++slot) {
    const int64_t skip = written.contains(static_cast<int32_t>(slot)) ? state : 0;
    const int64_t at = slot * step + skip;
    if (std::memcmp(before.data() + at, pool_.host().data() + at,
                    static_cast<std::size_t>(step - skip)) != 0)
      return fmt::format("slot {} changed, though {}", slot,
                         skip ? "only its state was to be written" : "nobody writes it");
  }
  return "";
}

std::string History::compare(const Call& call, const std::vector<Row>& rows,
                             const io::Buffer& before) {
  std::map<int32_t, std::vector<Truth>> written;
  const Problem& p = call.problem();
  int64_t begin = 0;
  for (std::size_t n = 0; n < rows.size(); ++n) {
    std::string failure = compare_row(call, rows[n], begin, before, &written);
    if (!failure.empty()) return fmt::format("row {}: {}", n, failure);
    begin += rows[n].tokens;
  }
  if (!rows_are(call, begin, p.batch * p.num_tokens, true)) return "rows of o behind all sequences";
  std::string failure = compare_untouched(before, written);
  for (auto& [slot, heads] : written) truth_[slot] = std::move(heads);
  return failure;
}

}  // namespace kda::soak
