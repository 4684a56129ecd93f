// SPDX-License-Identifier: Apache-2.0
#include "soak/tail_history.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/convert.hpp"
#include "core/layout.hpp"
#include "cpu/oracle/oracle.hpp"
#include "plan/ledger.hpp"

namespace kda::soak {
namespace {

namespace oracle = cpu::oracle;

constexpr int64_t kSlots = 12;
constexpr int64_t kMostRows = 4;  ///< of a call

template <class T, std::size_t kCount>
T pick(check::Random& random, const T (&values)[kCount]) {
  return values[static_cast<std::size_t>(random.below(static_cast<int64_t>(kCount)))];
}

int64_t slot_elements(const TensorDesc& desc) { return desc.strides[0]; }

}  // namespace

TailHistory::TailHistory(uint64_t seed, int64_t number)
    : random_(seed * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(number)) {
  Problem& p = base_;
  static constexpr int64_t kSizes[] = {8, 16, 16, 20, 33, 64};
  static constexpr DType kTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  p.num_heads = 1 + random_.below(2);
  p.num_value_heads = p.num_heads * (1 + random_.below(2));
  p.key_dim = pick(random_, kSizes), p.value_dim = pick(random_, kSizes);
  // Kernels of their own on a GPU.
  if (test::on_cuda() && random_.chance(0.5))
    p.key_dim = p.value_dim = random_.chance(0.5) ? 64 : 128;
  p.head_map = static_cast<HeadMap>(random_.below(2));
  p.q.dtype = p.v.dtype = p.beta.dtype = pick(random_, kTypes);
  p.k.dtype = pick(random_, kTypes), p.g.dtype = pick(random_, kTypes);
  p.gate_mode = static_cast<GateMode>(random_.below(3));
  p.beta_mode = static_cast<BetaMode>(random_.below(3));
  p.qk_l2norm = random_.chance(0.7);
  if (p.gate_mode != GateMode::kLog) {
    A_log_.resize(static_cast<std::size_t>(p.num_value_heads));
    dt_bias_.resize(static_cast<std::size_t>(p.num_value_heads * p.key_dim));
    for (float& x : A_log_) x = static_cast<float>(random_.uniform(-1, 1));
    for (float& x : dt_bias_) x = static_cast<float>(random_.uniform(-4, 1));
    p.A_log = contiguous(DType::kFloat32, {p.num_value_heads});
    p.dt_bias = contiguous(DType::kFloat32, {p.num_value_heads, p.key_dim});
    p.A_log->alignment = p.dt_bias->alignment = 4;
  }
  p.state_layout = static_cast<StateLayout>(random_.below(2));
  p.first_slot = random_.below(3);
  if (random_.chance(0.3)) p.g = head_gates(p.g.dtype, 1, 1, p.num_value_heads);
  if (p.dt_bias && has_head_gate(p) && random_.chance(0.5)) {
    p.dt_bias = head_bias(DType::kFloat32, p.num_value_heads);
    dt_bias_.resize(static_cast<std::size_t>(p.num_value_heads));
  }
  const DType states_in = random_.chance(0.4) ? DType::kBFloat16 : DType::kFloat32;
  p.initial_state = states(p, states_in, kSlots, true);
  p.tail = tails(p, 16 + random_.below(20));
  const bool split = states_in == DType::kBFloat16 && random_.chance(0.6);
  if (split) p.tail->split = split_states(p, p.tail->rows);
  backend_ = pick(random_, {std::string("blocked"), std::string("blocked"), std::string("oracle")});
  if (test::on_cuda()) backend_ = random_.chance(0.5) ? "recurrent" : "";
  // Folds round a state of bf16. Tensor cores take 16-bit operands.
  if (states_in == DType::kBFloat16 && !split) limit_ = 5e-2;
  if (test::on_cuda() && backend_.empty()) limit_ = 5e-2;
  // A token reads the bf16 part of a split state, so o is rounded. The state has all bits.
  if (split && limit_ < 5e-2) limit_ = 3e-2;
  state_limit_ = split && !(test::on_cuda() && backend_.empty()) ? 1e-5 : limit_;
  const auto filled = [](int64_t bytes) {
    io::Buffer buffer(static_cast<std::size_t>(bytes));
    buffer.fill(0xff);
    return buffer;
  };
  pool_ = filled(kSlots * slot_elements(p.initial_state->tensor) * dtype_size(states_in));
  tail_k_ = filled(kSlots * slot_elements(p.tail->k) * dtype_size(p.k.dtype));
  tail_g_ = filled(kSlots * slot_elements(p.tail->g) * dtype_size(p.g.dtype));
  v_new_ = filled(kSlots * slot_elements(p.tail->v_new) * 4);
  folded_ = filled(kSlots * p.num_value_heads * 4);  // -1
  const SplitDesc parts = p.tail->split.value_or(SplitDesc{});
  const auto of_split = [&](const TensorDesc& desc) {
    return filled(split ? kSlots * slot_elements(desc) * dtype_size(desc.dtype) : 0);
  };
  rest_ = of_split(parts.rest), tail_v_ = of_split(parts.v), tail_beta_ = of_split(parts.beta);
  for (int64_t slot = p.first_slot; slot < kSlots; ++slot)
    free_.push_back(static_cast<int32_t>(slot));
}

std::string TailHistory::describe() const {
  const Problem& p = base_;
  return fmt::format(
      "tail of {} rows, {}, states {}, K={} V={} H={} HV={} {} k {} g {}{}{} {} {} beta {} "
      "l2norm={} first_slot={}",
      p.tail->rows, backend_, p.tail->split ? "split" : dtype_name(p.initial_state->tensor.dtype),
      p.key_dim, p.value_dim, p.num_heads, p.num_value_heads, dtype_name(p.q.dtype),
      dtype_name(p.k.dtype), dtype_name(p.g.dtype), has_head_gate(p) ? " a head" : "",
      has_head_bias(p) ? " and its bias" : "", state_layout_name(p.state_layout),
      gate_mode_name(p.gate_mode), beta_mode_name(p.beta_mode), p.qk_l2norm, p.first_slot);
}

// ---- requests and slots

TailHistory::Request* TailHistory::idle_request() {
  std::vector<Request*> idle;
  for (const auto& request : requests_)
    if (!request->busy) idle.push_back(request.get());
  if (idle.empty()) return nullptr;
  Request* request =
      idle[static_cast<std::size_t>(random_.below(static_cast<int64_t>(idle.size())))];
  request->busy = true;
  return request;
}

int32_t TailHistory::take_slot() {
  const auto at = random_.below(static_cast<int64_t>(free_.size()));
  const int32_t slot = free_[static_cast<std::size_t>(at)];
  free_.erase(free_.begin() + at);
  return slot;
}

TailHistory::Request* TailHistory::new_request() {
  if (free_.size() < 3) return nullptr;
  auto request = std::make_unique<Request>();
  request->slot = take_slot();
  request->states.resize(static_cast<std::size_t>(base_.num_value_heads));
  request->busy = true;
  requests_.push_back(std::move(request));
  return requests_.back().get();
}

bool TailHistory::is_source(int32_t slot) const {
  return std::any_of(requests_.begin(), requests_.end(),
                     [&](const auto& request) { return request->source == slot; });
}

/// A freed slot keeps its state or gets NaN, and keeps its words or gets those of no tail: a later
/// owner, which starts from zero, must not see any of it.
void TailHistory::release(int32_t slot) {
  free_.push_back(slot);
  const bool poisons = random_.chance(0.5);
  for (io::Buffer* buffer : {&pool_, &rest_}) {
    const std::size_t bytes = buffer->size() / static_cast<std::size_t>(kSlots);
    if (poisons) std::memset(buffer->data() + static_cast<std::size_t>(slot) * bytes, 0xff, bytes);
  }
  if (random_.chance(0.5))
    std::fill_n(folded_.as<int32_t>() + slot * base_.num_value_heads, base_.num_value_heads, -1);
}

void TailHistory::evict() {
  for (auto at = requests_.begin(); at != requests_.end(); ++at) {
    if (is_source((*at)->slot)) continue;
    release((*at)->slot);
    requests_.erase(at);
    ++counts_["evictions"];
    return;
  }
}

/// A request whose tail is empty lends its boundary state; it rests as long as somebody reads it.
void TailHistory::fork() {
  if (free_.size() < 3) return;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    const Request parent = *requests_[i];
    const int32_t folded = folded_.as<int32_t>()[parent.slot * base_.num_value_heads];
    if (parent.is_new || parent.source >= 0 || parent.position != folded) continue;
    auto child = std::make_unique<Request>(parent);
    child->slot = take_slot();
    child->source = parent.slot;
    requests_.push_back(std::move(child));
    ++counts_["forks"];
    return;
  }
}

std::vector<io::Buffer*> TailHistory::of_slots() {
  return {&pool_, &tail_k_, &tail_g_, &v_new_, &folded_, &rest_, &tail_v_, &tail_beta_};
}

/// A slot, its tail and its word, to another slot.
void TailHistory::copy() {
  Request* parent = free_.size() < 3 ? nullptr : idle_request();
  if (!parent) return;
  parent->busy = false;
  if (parent->is_new) return;
  auto child = std::make_unique<Request>(*parent);
  child->slot = take_slot();
  const auto duplicate = [&](io::Buffer& buffer) {
    const std::size_t bytes = buffer.size() / static_cast<std::size_t>(kSlots);
    std::memcpy(buffer.data() + static_cast<std::size_t>(child->slot) * bytes,
                buffer.data() + static_cast<std::size_t>(parent->slot) * bytes, bytes);
  };
  for (io::Buffer* buffer : of_slots()) duplicate(*buffer);
  requests_.push_back(std::move(child));
  ++counts_["copies"];
}

// ---- calls

void TailHistory::fill(io::Buffer* buffer, DType dtype, int64_t count, double scale,
                       double offset) {
  *buffer = io::Buffer(static_cast<std::size_t>(count * dtype_size(dtype)));
  for (int64_t i = 0; i < count; ++i)
    store_element(buffer->data(), dtype, i, static_cast<float>(scale * random_.normal() + offset));
}

Problem TailHistory::problem_of(Operation operation, const std::vector<int64_t>& lengths) {
  Problem p = base_;
  p.operation = operation;
  p.num_sequences = static_cast<int64_t>(lengths.size()) - 1;
  p.num_tokens = lengths.back();
  p.cu_seqlens = DType::kInt64;
  const int64_t T = p.num_tokens, H = p.num_heads, HV = p.num_value_heads;
  p.q = contiguous(p.q.dtype, {1, T, H, p.key_dim});
  p.k = contiguous(p.k.dtype, {1, T, H, p.key_dim});
  p.v = contiguous(p.v.dtype, {1, T, HV, p.value_dim});
  p.g = has_head_gate(base_) ? head_gates(p.g.dtype, 1, T, HV)
                             : contiguous(p.g.dtype, {1, T, HV, p.key_dim});
  p.beta = contiguous(p.beta.dtype, {1, T, HV});
  p.o = contiguous(DType::kFloat32, {1, T, HV, p.value_dim});
  // Keys of about one keep |I - beta k k^T| near 1 where they are not normalised.
  const double key = p.qk_l2norm ? 1 : 0.7 / std::sqrt(static_cast<double>(p.key_dim));
  fill(&q_, p.q.dtype, T * H * p.key_dim, 1, 0);
  fill(&k_, p.k.dtype, T * H * p.key_dim, key, 0);
  fill(&v_, p.v.dtype, T * HV * p.value_dim, 1, 0);
  fill(&beta_, p.beta.dtype, T * HV, p.beta_mode == BetaMode::kPlain ? 0.1 : 1, 0.4);
  const bool log = p.gate_mode == GateMode::kLog;
  const int64_t gates = T * HV * (has_head_gate(base_) ? 1 : p.key_dim);
  fill(&g_, p.g.dtype, gates, log ? 0.1 : 1, 0);
  for (int64_t i = 0; log && i < gates; ++i) {
    const double x = -std::fabs(load_double(g_.data(), p.g.dtype, i));
    const double forgets = random_.chance(0.003) ? -INFINITY : x;
    store_element(g_.data(), p.g.dtype, i, static_cast<float>(forgets));
  }
  o_ = io::Buffer(static_cast<std::size_t>(T * HV * p.value_dim) * 4);
  o_.fill(0xff);
  return p;
}

std::string TailHistory::run(const Problem& p, const Tensors& tensors,
                             const std::vector<int64_t>& lengths) {
  PlanOptions options;
  options.backend = backend_;
  options.num_threads = 1 + static_cast<int32_t>(random_.below(2));
  Plan plan;
  const DeviceFacts device = test::device();
  throw_if_error(random_.chance(0.5) ? make_plan(p, lengths, device, options, &plan)
                                     : make_plan_from_bounds(p, device, options, &plan));
  io::Buffer workspace(plan.workspace_bytes);
  workspace.fill(0xff);
  const Status status = check::run_and_wait(plan, tensors, workspace.data(), workspace.size());
  if (!status.ok()) return status.message();
  const void* flags = plan::find_block(plan, workspace.data(), "device_flags");
  if (flags && *static_cast<const int32_t*>(flags) != 0)
    return fmt::format("device_flags {}", *static_cast<const int32_t*>(flags));
  return "";
}

std::string TailHistory::play(const char* what, Operation operation, std::vector<Row> rows,
                              bool trees) {
  if (rows.empty()) return "";
  const auto N = rows.size();
  std::vector<int64_t> lengths = {0};
  int64_t columns = 1, most_accepted = 0;
  for (const Row& row : rows) {
    lengths.push_back(lengths.back() + row.tokens);
    columns = std::max(columns, row.tokens);
    if (row.request)
      most_accepted = std::max(most_accepted, static_cast<int64_t>(row.request->accepted.size()));
  }
  Problem p = problem_of(operation, lengths);
  p.initial_state_mask = true;
  p.tail->sources = random_.chance(0.3);
  std::vector<int32_t> slots(N), positions(N), sources(N, -1), parents, accepted;
  std::vector<uint8_t> mask(N, 1);
  if (trees) {
    p.token_parents = true, p.state_index_columns = columns;
    parents.assign(N * static_cast<std::size_t>(columns), -1);
  }
  if (operation == Operation::kDecode) {
    p.tail->accepted_columns = most_accepted;
    accepted.assign(N * static_cast<std::size_t>(most_accepted), -1);
  }
  for (std::size_t n = 0; n < N; ++n) {
    const Row& row = rows[n];
    slots[n] = row.request ? row.request->slot : static_cast<int32_t>(base_.first_slot - 1);
    positions[n] = row.request ? static_cast<int32_t>(row.request->position) : 12345;
    for (std::size_t i = 0; trees && i < static_cast<std::size_t>(row.tokens); ++i)
      parents[n * static_cast<std::size_t>(columns) + i] =
          row.parents.empty() ? static_cast<int32_t>(i) - 1 : row.parents[i];
    if (!row.request) continue;
    mask[n] = row.request->is_new ? 0 : 1;
    sources[n] = row.request->source;
    if (row.request->source >= 0) p.tail->sources = true;
    if (!accepted.empty())
      std::copy(row.request->accepted.begin(), row.request->accepted.end(),
                accepted.begin() +
                    static_cast<std::ptrdiff_t>(n * static_cast<std::size_t>(most_accepted)));
  }
  Tensors t;
  t.q = q_.data(), t.k = k_.data(), t.v = v_.data(), t.g = g_.data(), t.beta = beta_.data();
  t.A_log = A_log_.data(), t.dt_bias = dt_bias_.data();
  t.o = o_.data();
  t.cu_seqlens = lengths.data();
  t.initial_state = pool_.data();
  t.initial_state_indices = slots.data();
  t.initial_state_mask = mask.data();
  t.token_parents = parents.data();
  t.tail = {tail_k_.data(),   tail_g_.data(),   v_new_.as<float>(), folded_.as<int32_t>(),
            positions.data(), sources.data(),   accepted.data(),    rest_.as<int16_t>(),
            tail_v_.data(),   tail_beta_.data()};
  const io::Buffer pool_before = pool_, v_new_before = v_new_, rest_before = rest_;
  if (std::string failure = run(p, t, lengths); !failure.empty())
    return fmt::format("{}: {}", what, failure);
  ++counts_[what];
  for (int64_t slot = 0; slot < kSlots; ++slot) {
    if (std::find(slots.begin(), slots.end(), slot) != slots.end() && slot >= p.first_slot)
      continue;
    const auto same = [&](const io::Buffer& before, const io::Buffer& after) {
      const std::size_t bytes = after.size() / static_cast<std::size_t>(kSlots);
      const std::size_t at = static_cast<std::size_t>(slot) * bytes;
      return std::memcmp(before.data() + at, after.data() + at, bytes) == 0;
    };
    if (!same(pool_before, pool_) || !same(v_new_before, v_new_) || !same(rest_before, rest_))
      return fmt::format("{}: slot {} was written, which nobody has", what, slot);
  }
  for (std::size_t n = 0; n < N; ++n)
    if (std::string failure = compare(p, t, rows[n], n, lengths[n], operation); !failure.empty())
      return fmt::format("{}: {}", what, failure);
  return "";
}

/// o against the recurrence, and which of the tokens stay.
std::string TailHistory::compare(const Problem& p, const Tensors& t, const Row& row, std::size_t n,
                                 int64_t begin, Operation operation) {
  Request* request = row.request;
  const auto heads = static_cast<std::size_t>(p.num_value_heads);
  std::vector<States> states(static_cast<std::size_t>(row.tokens), States(heads));
  for (int64_t i = 0; i < row.tokens; ++i)
    for (int64_t head = 0; head < p.num_value_heads; ++head) {
      std::vector<double> found;
      for (int64_t c = 0; c < p.value_dim; ++c)
        found.push_back(o_.as<float>()[row_offset(p, p.o, begin + i, head) + c]);
      if (!request) {  // zeros with a first_slot; else left alone, if not by a forward of a GPU
        const bool any = operation == Operation::kForward && test::on_cuda();
        const bool right = p.first_slot > 0 ? found[0] == 0 : any || std::isnan(found[0]);
        if (!right) return fmt::format("row {}: o of padding is {}", n, found[0]);
        continue;
      }
      const auto h = static_cast<std::size_t>(head);
      const int64_t parent =
          row.parents.empty() || i == 0 ? i - 1 : row.parents[static_cast<std::size_t>(i)];
      const std::vector<double>& start =
          parent < 0 ? request->states[h] : states[static_cast<std::size_t>(parent)][h];
      oracle::HeadResult truth = oracle::run_head(p, t, {begin + i, begin + i + 1}, head, start);
      double error = 0, norm = 0, magnitude = 0;
      for (std::size_t c = 0; c < found.size(); ++c) {
        error += (found[c] - truth.o[c]) * (found[c] - truth.o[c]);
        norm += truth.o[c] * truth.o[c];
        magnitude += truth.o_magnitude[c] * truth.o_magnitude[c];
      }
      error = std::sqrt(error) / std::max(std::sqrt(norm), 0.1 * std::sqrt(magnitude));
      if (!(error <= limit_))
        return fmt::format("row {}, position {}, head {}: error of o {:.1e}", n,
                           request->position + i, head, error);
      worst_ = std::max(worst_, error);
      states[static_cast<std::size_t>(i)][h] = std::move(truth.state);
    }
  if (!request) return "";
  counts_["tokens"] += row.tokens;
  request->is_new = request->busy = false;
  request->accepted.clear();
  if (folded_.as<int32_t>()[request->slot * p.num_value_heads] >
      (request->source < 0 ? INT32_MAX
                           : folded_.as<int32_t>()[request->source * p.num_value_heads]))
    request->source = -1;
  if (row.tokens == 0) return "";
  // The first token is sure; of the drafts a path from it is accepted.
  int64_t last = operation == Operation::kForward ? row.tokens - 1 : 0;
  std::vector<int32_t> path = {0};
  for (int64_t i = 1; operation == Operation::kDecode && i < row.tokens; ++i) {
    const int64_t parent = row.parents.empty() ? i - 1 : row.parents[static_cast<std::size_t>(i)];
    if (parent != last || random_.chance(0.3)) continue;
    last = i;
    path.push_back(static_cast<int32_t>(i));
  }
  request->position +=
      operation == Operation::kForward ? row.tokens : static_cast<int64_t>(path.size());
  if (!row.parents.empty()) request->accepted = path;
  request->states = states[static_cast<std::size_t>(last)];
  return "";
}

/// All bits of the state of a slot.
std::vector<double> TailHistory::state(int32_t slot, int64_t head) const {
  const Problem& p = base_;
  if (!p.tail->split) return oracle::load_state(p, *p.initial_state, pool_.data(), slot, head);
  const auto elements = static_cast<std::size_t>(kSlots * slot_elements(p.initial_state->tensor));
  io::Buffer joined(elements * sizeof(float));
  for (std::size_t i = 0; i < elements; ++i)
    joined.as<float>()[i] = join_float(pool_.as<uint16_t>()[i], rest_.as<int16_t>()[i]);
  return oracle::load_state(p, states(p, DType::kFloat32, kSlots, true), joined.data(), slot, head);
}

/// Folds all rows of a request, and compares its plain state.
std::string TailHistory::settle() {
  Request* request = idle_request();
  if (!request) return "";
  if (request->is_new || is_source(request->slot)) {
    request->busy = false;
    return "";
  }
  base_.tail->settle = true;
  Row row;
  row.request = request;
  const std::string failure = play("settles", Operation::kDecode, {row}, false);
  base_.tail->settle = false;
  if (!failure.empty()) return failure;
  const Problem& p = base_;
  request->source = -1;
  for (int64_t head = 0; head < p.num_value_heads; ++head) {
    if (folded_.as<int32_t>()[request->slot * p.num_value_heads + head] != request->position)
      return "settle: folded is not the position";
    const std::vector<double> found = state(request->slot, head);
    std::vector<double> truth = request->states[static_cast<std::size_t>(head)];
    truth.resize(found.size());  // an empty one is zero
    double error = 0, norm = 1e-12;
    for (std::size_t i = 0; i < found.size(); ++i) {
      error += (found[i] - truth[i]) * (found[i] - truth[i]);
      norm += truth[i] * truth[i];
    }
    if (!(std::sqrt(error / norm) <= state_limit_))
      return fmt::format("settle: head {}, error of the state {:.1e}", head,
                         std::sqrt(error / norm));
  }
  return "";
}

std::string TailHistory::step() {
  if (random_.chance(0.1)) evict();
  if (random_.chance(0.15)) fork();
  if (random_.chance(0.1)) copy();
  const double kind = random_.uniform();
  if (kind < 0.1) return settle();
  const bool forward = kind < 0.3;
  const bool trees = !forward && random_.chance(0.4);
  const int64_t most = most_tail_tokens(*base_.tail);
  std::vector<Row> rows;
  for (int64_t i = 0, count = 1 + random_.below(kMostRows); i < count; ++i) {
    Row row;
    const bool fresh = random_.chance(requests_.size() < 3 ? 0.8 : 0.2);
    if (!random_.chance(0.15)) row.request = fresh ? new_request() : idle_request();
    // Its rows are moved by a decode alone; a source rests.
    Request* request = row.request;
    if (request && ((forward && !request->accepted.empty()) || is_source(request->slot))) {
      request->busy = false;
      continue;
    }
    row.tokens = forward               ? random_.below(random_.chance(0.8) ? 24 : 70)
                 : random_.chance(0.5) ? 1
                                       : random_.below(most + 1);
    if (trees && row.tokens > 1)
      for (int64_t t = 0; t < row.tokens; ++t)
        row.parents.push_back(
            static_cast<int32_t>(t == 0 ? -1 : t - 1 - random_.below(std::min<int64_t>(t, 3))));
    rows.push_back(row);
  }
  const std::string failure = play(forward ? "prefills"
                                   : trees ? "trees"
                                           : "decodes",
                                   forward ? Operation::kForward : Operation::kDecode, rows, trees);
  for (const auto& request : requests_) request->busy = false;
  std::erase_if(requests_, [&](const auto& request) {
    if (!request->is_new) return false;
    free_.push_back(request->slot);
    return true;
  });
  return failure;
}

}  // namespace kda::soak
