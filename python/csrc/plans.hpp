// SPDX-License-Identifier: Apache-2.0
// The plans of forwards and backwards, from the caches of this process.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "describe.hpp"
#include "plan_cache.hpp"

namespace kda_torch {

using ForwardPlan = std::shared_ptr<kda_plan>;
using BackwardPlan = std::shared_ptr<kda_backward_plan>;

/// What a plan depends on but lengths; no padding that is not zero (kda_problem_init).
struct ForwardShape {
  kda_problem problem;
  kda_plan_options options;
};
struct TailShape {
  ForwardShape forward;
  kda_tail tail;
};
struct BackwardShape {
  ForwardShape forward;
  kda_gradients gradients;
};

inline ForwardShape shape_of(const kda_problem& given, const kda_plan_options& options) {
  ForwardShape shape;
  std::memcpy(&shape.problem, &given, sizeof(given));
  std::memcpy(&shape.options, &options, sizeof(options));
  kda_problem& problem = shape.problem;
  for (kda_tensor* t : {&problem.q, &problem.k, &problem.v, &problem.g, &problem.beta, &problem.o,
                        &problem.A_log, &problem.dt_bias, &problem.initial_state.tensor,
                        &problem.final_state.tensor, &problem.checkpoints.tensor})
    t->data = nullptr;
  for (kda_state* s : {&problem.initial_state, &problem.final_state, &problem.checkpoints})
    s->indices = nullptr;
  problem.cu_seqlens = problem.stream = problem.saved = nullptr;
  problem.saved_bytes = 0;
  problem.initial_state_mask = nullptr;
  problem.num_accepted_tokens = nullptr;
  problem.token_parents = problem.checkpoint_offsets = nullptr;
  problem.tail = nullptr;  // TailShape has it by value
  return shape;
}

inline TailShape shape_of(const kda_problem& given, const kda_tail& tail,
                          const kda_plan_options& options) {
  TailShape shape;
  shape.forward = shape_of(given, options);
  std::memcpy(&shape.tail, &tail, sizeof(tail));
  for (kda_tensor* t : {&shape.tail.k, &shape.tail.g, &shape.tail.v_new, &shape.tail.folded,
                        &shape.tail.rest, &shape.tail.v, &shape.tail.beta})
    t->data = nullptr;
  shape.tail.positions = shape.tail.sources = shape.tail.accepted_rows = shape.tail.flush = nullptr;
  return shape;
}

inline kda_gradients shape_of(const kda_gradients& given) {
  kda_gradients shape;
  std::memcpy(&shape, &given, sizeof(given));
  for (kda_tensor* t :
       {&shape.d_o, &shape.d_final_state, &shape.dq, &shape.dk, &shape.dv, &shape.dg, &shape.dbeta,
        &shape.dA_log, &shape.ddt_bias, &shape.d_initial_state})
    t->data = nullptr;
  return shape;
}

/// `cu_seqlens`: on the host, empty to plan from bounds. `pool`: for the words of an error.
inline ForwardPlan forward_plan(const kda_problem& problem, const kda_plan_options& options,
                                const std::vector<int64_t>& cu_seqlens,
                                States pool = States::kOwn) {
  const auto make = [&] {
    kda_plan* raw = nullptr;
    check(
        kda_plan_create(&problem, cu_seqlens.empty() ? nullptr : cu_seqlens.data(), &options, &raw),
        pool);
    return ForwardPlan(raw, kda_plan_destroy);
  };
  if (problem.tail) {
    static PlanCache<TailShape, kda_plan> with_tails;
    return with_tails.find(shape_of(problem, *problem.tail, options), cu_seqlens, make);
  }
  static PlanCache<ForwardShape, kda_plan> cache;
  return cache.find(shape_of(problem, options), cu_seqlens, make);
}

/// The backward of what forward_plan() makes of the same arguments; of spans, where `options` say
/// so, of an ordinary forward.
inline BackwardPlan backward_plan(const kda_problem& problem, const kda_gradients& gradients,
                                  const kda_plan_options& options,
                                  const std::vector<int64_t>& cu_seqlens) {
  static PlanCache<BackwardShape, kda_backward_plan> cache;
  BackwardShape shape;
  shape.forward = shape_of(problem, options);
  shape.gradients = shape_of(gradients);
  return cache.find(shape, cu_seqlens, [&] {
    kda_plan_options of_forward = options;
    of_forward.spans = 0;
    const ForwardPlan forward = forward_plan(problem, of_forward, cu_seqlens);
    kda_backward_plan* raw = nullptr;
    kda_status status = kda_backward_plan_create(forward.get(), &gradients, &options, &raw);
    if (status == KDA_UNAVAILABLE && options.backend) {  // it has no such backward: the best one
      kda_plan_options any = options;
      any.backend = nullptr;
      status = kda_backward_plan_create(forward.get(), &gradients, &any, &raw);
    }
    check(status);
    return BackwardPlan(raw, kda_backward_plan_destroy);
  });
}

}  // namespace kda_torch
