// SPDX-License-Identifier: Apache-2.0
// Options of a call's plan (libkda.Options): an operator is given one integer, their number here.
#pragma once

#include <deque>
#include <mutex>
#include <string>

#include "describe.hpp"

namespace kda_torch {

/// Fields of kda_plan_options and kda_problem.
struct CallOptions {
  int32_t context_parallel = KDA_CP_AUTO;
  int64_t num_segments = 0;
  int32_t intra_form = KDA_INTRA_AUTO;
  std::string backend;
  bool batch_invariant = false;
  int64_t most_cut_bytes = int64_t{1} << 30;

  bool operator==(const CallOptions&) const = default;

  void apply(kda_problem* problem, kda_plan_options* options) const {
    problem->batch_invariant = batch_invariant;
    // A decode step is cut by nobody.
    if (problem->operation == KDA_FORWARD) {
      options->context_parallel = context_parallel;
      options->num_segments = num_segments;
    }
    options->intra_form = intra_form;
    options->most_cut_bytes = most_cut_bytes == 0 ? KDA_NEVER_CUT : most_cut_bytes;
    options->backend = backend.empty() ? nullptr : backend.c_str();
  }
};

/// All options that this process has made. Number 0 has the defaults. What is in it stays where it
/// is: plans that are kept are found by the address of a backend's name.
class CallOptionsTable {
 public:
  int64_t number_of(const CallOptions& wanted) {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < made_.size(); ++i)
      if (made_[i] == wanted) return static_cast<int64_t>(i);
    made_.push_back(wanted);
    return static_cast<int64_t>(made_.size()) - 1;
  }
  const CallOptions& at(int64_t number) {
    const std::lock_guard lock(mutex_);
    if (number < 0 || number >= static_cast<int64_t>(made_.size()))
      refuse("options must be a number of libkda.Options, got ", number);
    return made_[static_cast<size_t>(number)];
  }

 private:
  std::mutex mutex_;
  std::deque<CallOptions> made_ = {{}};
};

inline CallOptionsTable call_options;

/// Sets the options of a call that was given `number`.
inline void apply_options(int64_t number, kda_problem* problem, kda_plan_options* options) {
  if (number != 0) call_options.at(number).apply(problem, options);
}

}  // namespace kda_torch
