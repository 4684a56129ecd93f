// SPDX-License-Identifier: Apache-2.0
// Plans of the calls made so far: a plan depends on shapes, types and lengths, not on pointers.
//
// The library has a cache of its own (kda_plan_cache_find), which reads and validates the problem
// before it looks: 2.5 us a call. A step of a model asks once a layer, so this one compares the C
// structs byte by byte, which takes 0.1 us, and it has plans of backwards too.
#pragma once

#include <cstdint>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace kda_torch {

/// `Shape`: what a plan depends on but lengths, compared byte by byte.
template <class Shape, class Plan>
class PlanCache {
 public:
  using Pointer = std::shared_ptr<Plan>;

  /// The plan that make() once made of the same `shape` and `cu_seqlens` (on the host, empty to
  /// plan from bounds).
  template <class Make>
  Pointer find(const Shape& shape, const std::vector<int64_t>& cu_seqlens, Make&& make) {
    thread_local Last last;  // the layers of a model ask for the same again
    if (last.plan && last.cu_seqlens == cu_seqlens &&
        std::memcmp(&last.shape, &shape, sizeof(shape)) == 0)
      return last.plan;
    last = {shape, cu_seqlens, find_or_make(shape, cu_seqlens, make)};
    return last.plan;
  }

 private:
  static constexpr std::size_t kMost = 256;
  using Entry = std::pair<Pointer, std::list<std::string>::iterator>;

  struct Last {
    Shape shape;
    std::vector<int64_t> cu_seqlens;
    Pointer plan;
  };

  template <class Make>
  Pointer find_or_make(const Shape& shape, const std::vector<int64_t>& cu_seqlens, Make&& make) {
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
    const Pointer plan = make();
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
