// SPDX-License-Identifier: Apache-2.0
// Plans of the calls made so far: a plan depends on shapes, types and lengths, not on pointers.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "describe.hpp"

namespace kda_torch {

class PlanCache {
 public:
  using Plan = std::shared_ptr<kda_plan>;

  /// `lengths`: cu_seqlens on the host, empty to plan from bounds.
  Plan find(const kda_problem& problem, const kda_plan_options& options,
            const std::vector<int64_t>& cu_seqlens) {
    std::string key = key_of(problem, options, cu_seqlens);
    {
      const std::lock_guard lock(mutex_);
      const auto found = plans_.find(key);
      if (found != plans_.end()) {
        recent_.splice(recent_.begin(), recent_, found->second.second);
        return found->second.first;
      }
    }
    kda_plan* raw = nullptr;
    check(kda_plan_create(&problem, cu_seqlens.empty() ? nullptr : cu_seqlens.data(), &options,
                          &raw));
    Plan plan(raw, kda_plan_destroy);
    const std::lock_guard lock(mutex_);
    if (plans_.count(key) == 0) {
      recent_.push_front(key);
      plans_.emplace(std::move(key), Entry{plan, recent_.begin()});
      if (plans_.size() > kMost) {
        plans_.erase(recent_.back());
        recent_.pop_back();
      }
    }
    return plan;
  }

 private:
  static constexpr std::size_t kMost = 256;
  using Entry = std::pair<Plan, std::list<std::string>::iterator>;

  static std::string key_of(kda_problem problem, const kda_plan_options& options,
                            const std::vector<int64_t>& cu_seqlens) {
    for (kda_tensor* t : {&problem.q, &problem.k, &problem.v, &problem.g, &problem.beta, &problem.o,
                          &problem.A_log, &problem.dt_bias, &problem.initial_state.tensor,
                          &problem.final_state.tensor, &problem.checkpoints.tensor})
      t->data = nullptr;
    for (kda_state* s : {&problem.initial_state, &problem.final_state, &problem.checkpoints})
      s->indices = nullptr;
    problem.cu_seqlens = problem.stream = nullptr;
    problem.initial_state_mask = nullptr;
    problem.num_accepted_tokens = nullptr;
    std::string key(reinterpret_cast<const char*>(&problem), sizeof(problem));
    key.append(reinterpret_cast<const char*>(&options), sizeof(options));
    key.append(reinterpret_cast<const char*>(cu_seqlens.data()),
               cu_seqlens.size() * sizeof(int64_t));
    return key;
  }

  std::mutex mutex_;
  std::list<std::string> recent_;
  std::unordered_map<std::string, Entry> plans_;
};

}  // namespace kda_torch
