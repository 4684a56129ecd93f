// SPDX-License-Identifier: Apache-2.0
#include "kda/plan_cache.hpp"

#include <algorithm>
#include <bit>
#include <list>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/guard.hpp"
#include "core/text.hpp"

namespace kda {
namespace {

/// All that a plan depends on, as words: equal keys, equal plans.
class Key {
 public:
  Key(const Problem& p, const DeviceFacts& device, const PlanOptions& options,
      const std::span<const int64_t>* cu_seqlens) {
    words_.reserve(160);
    add(p);
    add(device.kind, device.compute_capability, device.num_sms, device.memory_bytes_per_second,
        device.gigahertz);
    add(options.context_parallel, options.num_segments, options.segment_method, options.intra_form,
        options.num_threads, options.keep, options.kept_state_every, options.spans,
        options.most_cut_bytes);
    add_text(device.name);
    add_text(options.backend);
    add(cu_seqlens != nullptr);
    if (cu_seqlens) words_.insert(words_.end(), cu_seqlens->begin(), cu_seqlens->end());
  }
  /// The bytes.
  std::string_view text() const {
    return {reinterpret_cast<const char*>(words_.data()), words_.size() * sizeof(int64_t)};
  }

 private:
  template <class... Values>
  void add(const Values&... values) {
    (add_one(values), ...);
  }
  template <class Value>
  requires std::integral<Value> || std::is_enum_v<Value>
  void add_one(Value value) { words_.push_back(static_cast<int64_t>(value)); }
  void add_one(double value) { words_.push_back(std::bit_cast<int64_t>(value)); }
  void add_one(const TensorDesc& desc) {
    add(desc.dtype, desc.alignment, desc.strides[0], desc.strides[1], desc.strides[2],
        desc.strides[3]);
  }
  void add_one(const StateDesc& state) { add(state.tensor, state.num_slots, state.indexed); }
  void add_one(const TailDesc& tail) {
    add(tail.k, tail.g, tail.v_new, tail.folded, tail.num_slots, tail.rows, tail.sources,
        tail.accepted_columns, tail.settle, tail.ring, tail.flush, tail.split);
  }
  void add_one(const SplitDesc& split) { add(split.rest, split.v, split.beta); }
  template <class Value>
  void add_one(const std::optional<Value>& value) {
    add(value.has_value());
    if (value) add(*value);
  }
  void add_text(const std::string& text) {
    add(text.size());
    words_.resize(words_.size() + (text.size() + 7) / 8);
    std::copy(text.begin(), text.end(),
              reinterpret_cast<char*>(words_.data() + words_.size() - (text.size() + 7) / 8));
  }
  // A new field of Problem belongs here (and its test in tests/plan/plan_cache_test.cpp).
  void add_one(const Problem& p) {
    add(p.operation, p.batch, p.num_tokens, p.num_heads, p.num_value_heads, p.key_dim, p.value_dim,
        p.num_sequences, p.head_map, p.q, p.k, p.v, p.g, p.beta, p.o, p.gate_mode, p.lower_bound,
        p.A_log, p.dt_bias, p.beta_mode, p.qk_l2norm, p.scale, p.cu_seqlens, p.state_layout,
        p.initial_state, p.initial_state_mask, p.final_state, p.checkpoints, p.checkpoint_every,
        p.checkpoint_offsets, p.first_slot, p.state_index_columns, p.num_accepted_tokens,
        p.token_parents, p.zero_skipped, p.tail, p.batch_invariant);
  }

  std::vector<int64_t> words_;
};

}  // namespace

struct PlanCache::Plans {
  using Found = std::shared_ptr<const Plan>;
  struct Entry {
    std::string key;
    Found plan;
  };
  using Entries = std::list<Entry>;

  explicit Plans(std::size_t most) : most_plans(most) {}

  /// Null: not there. The layers of a model ask for the same plan in turn: it stays in front.
  Found find(std::string_view key) {
    const std::lock_guard lock(mutex);
    if (!recent.empty() && recent.front().key == key) return recent.front().plan;
    const auto found = by_key.find(key);
    if (found == by_key.end()) return nullptr;
    recent.splice(recent.begin(), recent, found->second);
    return recent.front().plan;
  }

  /// Two threads may have made the same plan: the first one stays.
  void add(std::string_view key, const Found& plan) {
    const std::lock_guard lock(mutex);
    if (most_plans == 0 || by_key.count(key) > 0) return;
    recent.push_front({std::string(key), plan});
    try {
      by_key.emplace(recent.front().key, recent.begin());
    } catch (...) {
      recent.pop_front();
      throw;
    }
    if (by_key.size() <= most_plans) return;
    by_key.erase(recent.back().key);
    recent.pop_back();
  }

  template <class Make>
  Status find_or_make(const Key& key, Found* plan, Make&& make) {
    if (!plan) return invalid("plan: is null");
    if (Found found = find(key.text())) {
      *plan = std::move(found);
      return {};
    }
    auto made = std::make_shared<Plan>();
    KDA_RETURN_IF_ERROR(make(made.get()));
    add(key.text(), made);
    *plan = std::move(made);
    return {};
  }

  const std::size_t most_plans;
  mutable std::mutex mutex;
  Entries recent;                                                  // the last one asked for first
  std::unordered_map<std::string_view, Entries::iterator> by_key;  // keys are those of `recent`
};

PlanCache::PlanCache(std::size_t most_plans) : plans_(std::make_unique<Plans>(most_plans)) {}
PlanCache::~PlanCache() = default;

Status PlanCache::find(const Problem& problem, std::span<const int64_t> cu_seqlens,
                       const DeviceFacts& device, const PlanOptions& options,
                       std::shared_ptr<const Plan>* plan) noexcept {
  return guarded([&] {
    return plans_->find_or_make(Key(problem, device, options, &cu_seqlens), plan, [&](Plan* made) {
      return make_plan(problem, cu_seqlens, device, options, made);
    });
  });
}

Status PlanCache::find_from_bounds(const Problem& problem, const DeviceFacts& device,
                                   const PlanOptions& options,
                                   std::shared_ptr<const Plan>* plan) noexcept {
  return guarded([&] {
    return plans_->find_or_make(Key(problem, device, options, nullptr), plan, [&](Plan* made) {
      return make_plan_from_bounds(problem, device, options, made);
    });
  });
}

std::size_t PlanCache::size() const noexcept {
  const std::lock_guard lock(plans_->mutex);
  return plans_->recent.size();
}

}  // namespace kda
