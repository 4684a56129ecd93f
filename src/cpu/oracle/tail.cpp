// SPDX-License-Identifier: Apache-2.0
#include "cpu/oracle/tail.hpp"

#include <cmath>
#include <vector>

#include "core/convert.hpp"
#include "cpu/oracle/oracle.hpp"
#include "cpu/plan.hpp"
#include "cpu/tail_sequence.hpp"

namespace kda::cpu::oracle {
namespace {

using Vector = std::vector<double>;

class Sequence : public TailSequence<Sequence> {
 public:
  using TailSequence::TailSequence;

  void fold_head(int64_t head, int64_t end) {
    store_state(p_, *p_.initial_state, t_.initial_state, at().slot, head,
                state_before(head, end).data());
  }

  void step_head(int64_t token, int64_t count, int64_t head) {
    const Vector before = state_before(head, at().position);
    std::vector<HeadResult> results;
    for (int64_t i = 0; i < count; ++i) {
      const Span span{token + i, token + i + 1};
      const Vector& start =
          parent(i) < 0 ? before : results[static_cast<std::size_t>(parent(i))].state;
      results.push_back(run_head(p_, t_, span, head, start));
      store_outputs(call_, span, head, results.back().o);
      auto* v_new = static_cast<float*>(row(tail_.v_new, t_.tail.v_new, head, at().position + i));
      for (const double value : results.back().v_new) *v_new++ = static_cast<float>(value);
    }
  }

  void zero_outputs(int64_t begin, int64_t end, int64_t head) {
    store_outputs(call_, {begin, end}, head,
                  Vector(static_cast<std::size_t>((end - begin) * p_.value_dim)));
  }

 private:
  Vector ring_row(const TensorDesc& desc, const void* base, int64_t head, int64_t position,
                  int64_t size) const {
    const void* first = row(desc, base, head, position);
    Vector values;
    for (int64_t i = 0; i < size; ++i)
      values.push_back(load_double(first, desc.dtype, desc.strides[3] == 0 ? 0 : i));
    return values;
  }

  /// The state of a head in front of the token of `position`.
  Vector state_before(int64_t head, int64_t position) const {
    const auto K = static_cast<std::size_t>(p_.key_dim), V = static_cast<std::size_t>(p_.value_dim);
    Vector S = load_state(p_, *p_.initial_state, t_.initial_state, at().source, head);
    for (int64_t i = at().folded; i < position; ++i) {
      Vector k = ring_row(tail_.k, t_.tail.k, q_head_, i, p_.key_dim);
      if (p_.qk_l2norm) l2_normalize(k);
      const Vector g = log_decay(p_, t_, ring_row(tail_.g, t_.tail.g, head, i, p_.key_dim), head);
      const Vector v_new = ring_row(tail_.v_new, t_.tail.v_new, head, i, p_.value_dim);
      for (std::size_t d = 0; d < K; ++d)
        for (std::size_t c = 0; c < V; ++c)
          S[d * V + c] = std::exp(g[d]) * S[d * V + c] + k[d] * v_new[c];
    }
    return S;
  }
};

}  // namespace

void plan_tail(plan::PlanBuilder& builder) {
  list_tail(builder);
  book_slot_marks(builder);
}

Status tail_call(const stage::Call& call) {
  for (int64_t n = 0; n < call.sequences.count(); ++n)
    for (int64_t q_head = 0; q_head < call.problem.num_heads; ++q_head)
      Sequence(call, n, q_head).run();
  return {};
}

}  // namespace kda::cpu::oracle
