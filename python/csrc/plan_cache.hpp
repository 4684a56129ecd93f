// SPDX-License-Identifier: Apache-2.0
// Plans of the calls made so far: a plan depends on shapes, types and lengths, not on pointers.
#pragma once

#include <cstdint>
#include <cstring>
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
            const std::vector<int64_t>& cu_seqlens, bool pool) {
    const Shape shape = shape_of(problem, options);
    thread_local Last last;  // the layers of a model ask for the same again
    if (last.plan && last.cu_seqlens == cu_seqlens &&
        std::memcmp(&last.shape, &shape, sizeof(shape)) == 0)
      return last.plan;
    last = {shape, cu_seqlens, find_or_make(shape, problem, cu_seqlens, pool)};
    return last.plan;
  }

 private:
  static constexpr std::size_t kMost = 256;
  using Entry = std::pair<Plan, std::list<std::string>::iterator>;

  /// What a plan depends on but lengths; no padding that is not zero (kda_problem_init).
  struct Shape {
    kda_problem problem;
    kda_plan_options options;
  };
  struct Last {
    Shape shape;
    std::vector<int64_t> cu_seqlens;
    Plan plan;
  };

  static Shape shape_of(const kda_problem& given, const kda_plan_options& options) {
    Shape shape;
    std::memcpy(&shape.problem, &given, sizeof(given));
    std::memcpy(&shape.options, &options, sizeof(options));
    kda_problem& problem = shape.problem;
    for (kda_tensor* t : {&problem.q, &problem.k, &problem.v, &problem.g, &problem.beta, &problem.o,
                          &problem.A_log, &problem.dt_bias, &problem.initial_state.tensor,
                          &problem.final_state.tensor, &problem.checkpoints.tensor})
      t->data = nullptr;
    for (kda_state* s : {&problem.initial_state, &problem.final_state, &problem.checkpoints})
      s->indices = nullptr;
    problem.cu_seqlens = problem.stream = nullptr;
    problem.initial_state_mask = nullptr;
    problem.num_accepted_tokens = nullptr;
    return shape;
  }

  Plan find_or_make(const Shape& shape, const kda_problem& problem,
                    const std::vector<int64_t>& cu_seqlens, bool pool) {
    std::string key(reinterpret_cast<const char*>(&shape), sizeof(shape));
    key.append(reinterpret_cast<const char*>(cu_seqlens.data()),
               cu_seqlens.size() * sizeof(int64_t));
    {
      const std::lock_guard lock(mutex_);
      const auto found = plans_.find(key);
      if (found != plans_.end()) {
        recent_.splice(recent_.begin(), recent_, found->second.second);
        return found->second.first;
      }
    }
    kda_plan* raw = nullptr;
    check(kda_plan_create(&problem, cu_seqlens.empty() ? nullptr : cu_seqlens.data(),
                          &shape.options, &raw),
          pool);
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

  std::mutex mutex_;
  std::list<std::string> recent_;
  std::unordered_map<std::string, Entry> plans_;
};

}  // namespace kda_torch
