// SPDX-License-Identifier: Apache-2.0
// The C ABI for C++17: owners of its plans and memory, and exceptions in place of statuses. It is
// over kda.h alone and links libkda_c; a C++20 program has the whole API in kda.hpp.
//
//   kda::c::Problem problem;                       // a kda_problem with its defaults
//   problem.num_tokens = 1000;
//   problem.tokens(KDA_FP32, {q, k, v, g, beta, o});
//   kda::c::call(problem);                         // on the CPU
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>

#include "kda/kda.h"

namespace kda::c {

/// A call of kda.h that failed, with the text of kda_last_error().
class Error : public std::runtime_error {
 public:
  explicit Error(kda_status status) : std::runtime_error(kda_last_error()), status_(status) {}
  kda_status status() const noexcept { return status_; }

 private:
  kda_status status_;
};

/// Throws Error unless `status` is KDA_OK.
inline void check(kda_status status) {
  if (status != KDA_OK) throw Error(status);
}

struct Problem : kda_problem {
  Problem() noexcept { kda_problem_init(this); }

  /// Calls kda_tokens(): after the sizes are set.
  void tokens(kda_dtype dtype, const kda_rows& rows) { check(kda_tokens(this, dtype, &rows)); }
  /// Calls kda_states() for this problem's initial_state, final_state or checkpoints.
  void states(kda_state kda_problem::*state, void* data, kda_dtype dtype, int64_t num_slots,
              const int32_t* indices = nullptr) {
    check(kda_states(this, &(this->*state), data, dtype, num_slots, indices));
  }
};

/// Tails of the problem's pool (docs/design/decode.md); a problem points to its own.
struct Tail : kda_tail {
  Tail() noexcept { kda_tail_init(this); }
  /// Calls kda_tails(): after the problem's tokens and its initial_state.
  void describe(const kda_problem& problem, int64_t num_rows, const kda_tail_data& data) {
    check(kda_tails(&problem, this, num_rows, &data));
  }
  /// Calls kda_split_states(): after describe(), for a pool of bf16.
  void split(const kda_problem& problem, const kda_split_data& data) {
    check(kda_split_states(&problem, this, &data));
  }
};

struct PlanOptions : kda_plan_options {
  PlanOptions() noexcept { kda_plan_options_init(this); }
  /// Returns those of a CUDA device of this machine. Error with KDA_UNAVAILABLE if there is none.
  static PlanOptions cuda(int32_t ordinal = 0) {
    PlanOptions options;
    check(kda_plan_options_cuda(&options, ordinal));
    return options;
  }
};

/// Host memory, aligned to 64 bytes, that grows to the most that it was asked for.
class Workspace {
 public:
  /// Makes room for so many bytes; what it held is lost where it grows. std::bad_alloc.
  void reserve(std::size_t bytes) {
    if (bytes <= size_) return;
    memory_.reset();
    size_ = 0;
    if (bytes > static_cast<std::size_t>(PTRDIFF_MAX) - 64) throw std::bad_alloc();
    const std::size_t rounded = (bytes + 63) / 64 * 64;
    memory_.reset(std::aligned_alloc(64, rounded));
    if (!memory_) throw std::bad_alloc();
    size_ = rounded;
  }
  void* data() const noexcept { return memory_.get(); }
  std::size_t size() const noexcept { return memory_ ? size_ : 0; }

 private:
  struct Free {
    void operator()(void* memory) const noexcept { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
  std::size_t size_ = 0;
};

class Plan {
 public:
  /// Calls kda_plan_create().
  explicit Plan(const kda_problem& problem, const int64_t* cu_seqlens = nullptr,
                const kda_plan_options* options = nullptr) {
    kda_plan* made = nullptr;
    check(kda_plan_create(&problem, cu_seqlens, options, &made));
    plan_.reset(made);
  }
  /// Takes over a plan of the C ABI.
  explicit Plan(kda_plan* plan) noexcept : plan_(plan) {}

  std::size_t workspace_bytes() const noexcept { return kda_plan_workspace_bytes(get()); }
  std::size_t saved_bytes() const noexcept { return kda_plan_saved_bytes(get()); }
  const char* implementation() const noexcept { return kda_plan_implementation(get()); }
  const char* json() const noexcept { return kda_plan_json(get()); }
  kda_plan* get() const noexcept { return plan_.get(); }

  /// Calls kda_run(), in memory of the plan's device.
  void run(const kda_problem& problem, void* workspace, std::size_t workspace_bytes) const {
    check(kda_run(get(), &problem, workspace, workspace_bytes));
  }
  /// On the CPU.
  void run(const kda_problem& problem, Workspace& workspace) const {
    workspace.reserve(workspace_bytes());
    run(problem, workspace.data(), workspace.size());
  }

 private:
  struct Destroy {
    void operator()(kda_plan* plan) const noexcept { kda_plan_destroy(plan); }
  };
  std::unique_ptr<kda_plan, Destroy> plan_;
};

class BackwardPlan {
 public:
  /// Calls kda_backward_plan_create().
  BackwardPlan(const Plan& forward, const kda_gradients& gradients,
               const kda_plan_options* options = nullptr) {
    kda_backward_plan* made = nullptr;
    check(kda_backward_plan_create(forward.get(), &gradients, options, &made));
    plan_.reset(made);
  }

  std::size_t workspace_bytes() const noexcept { return kda_backward_plan_workspace_bytes(get()); }
  kda_backward_plan* get() const noexcept { return plan_.get(); }

  /// Calls kda_backward(), in memory of the plan's device.
  void run(const kda_problem& problem, const kda_gradients& gradients, void* workspace,
           std::size_t workspace_bytes) const {
    check(kda_backward(get(), &problem, &gradients, workspace, workspace_bytes));
  }
  /// On the CPU.
  void run(const kda_problem& problem, const kda_gradients& gradients, Workspace& workspace) const {
    workspace.reserve(workspace_bytes());
    run(problem, gradients, workspace.data(), workspace.size());
  }

 private:
  struct Destroy {
    void operator()(kda_backward_plan* plan) const noexcept { kda_backward_plan_destroy(plan); }
  };
  std::unique_ptr<kda_backward_plan, Destroy> plan_;
};

/// Calls kda_call(): on the CPU, with a remembered plan and the thread's workspace.
inline void call(const kda_problem& problem, const int64_t* cu_seqlens = nullptr) {
  check(kda_call(&problem, cu_seqlens));
}
/// Returns the bytes that call_on() takes.
inline std::size_t workspace_bytes(const kda_problem& problem, const kda_plan_options& options,
                                   const int64_t* cu_seqlens = nullptr) {
  std::size_t bytes = 0;
  check(kda_call_on(&problem, cu_seqlens, &options, nullptr, &bytes));
  return bytes;
}
/// Calls kda_call_on() in memory of the caller.
inline void call_on(const kda_problem& problem, const kda_plan_options& options, void* workspace,
                    std::size_t workspace_bytes, const int64_t* cu_seqlens = nullptr) {
  if (!workspace) throw std::invalid_argument("workspace: is null");
  check(kda_call_on(&problem, cu_seqlens, &options, workspace, &workspace_bytes));
}

}  // namespace kda::c
