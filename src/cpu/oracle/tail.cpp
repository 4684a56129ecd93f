// SPDX-License-Identifier: Apache-2.0
#include "cpu/oracle/tail.hpp"

#include <cmath>
#include <utility>
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
    if (tail_.split) return fold_split_head(head, end);
    store_state(p_, *p_.initial_state, t_.initial_state, at().slot, head,
                state_before(head, end).data());
  }

  void remake_head(int64_t head) {
    Vector S = load_state(p_, *p_.initial_state, t_.initial_state, at().slot, head);
    for (int64_t i = at().folded; i < at().position; ++i) {
      auto* v_new = static_cast<float*>(row(tail_.v_new, t_.tail.v_new, head, i));
      for (const double value : advance(head, i, &S)) *v_new++ = static_cast<float>(value);
    }
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

  void ring_head(int64_t token, bool flush, int64_t head) {
    const int64_t position = at().position;
    const Span span{token, token + 1};
    const HeadResult result = run_head(p_, t_, span, head, state_before(head, position));
    store_outputs(call_, span, head, result.o);
    if (flush)
      return store_state(p_, *p_.initial_state, t_.initial_state, at().slot, head,
                         result.state.data());
    Vector k = values(p_.k, at_bytes(t_.k, p_.k, row_offset(p_, p_.k, token, q_head_)), p_.key_dim);
    if (p_.qk_l2norm) l2_normalize(k);
    const auto put = [&](const TensorDesc& desc, void* base, int64_t of_head, const Vector& x) {
      void* to = row(desc, base, of_head, position);
      for (std::size_t i = 0; i < x.size(); ++i)
        store_double(to, desc.dtype, static_cast<int64_t>(i), x[i]);
    };
    put(tail_.k, t_.tail.k, q_head_, k),
        put(tail_.g, t_.tail.g, head, log_decay(p_, t_, token, head));
    put(tail_.v_new, t_.tail.v_new, head, result.v_new);
  }

  void zero_outputs(int64_t begin, int64_t end, int64_t head) {
    store_outputs(call_, {begin, end}, head,
                  Vector(static_cast<std::size_t>((end - begin) * p_.value_dim)));
  }

 private:
  Vector ring_row(const TensorDesc& desc, const void* base, int64_t head, int64_t position,
                  int64_t size) const {
    return values(desc, row(desc, base, head, position), size);
  }
  static Vector values(const TensorDesc& desc, const void* first, int64_t size) {
    Vector x;
    for (int64_t i = 0; i < size; ++i)
      x.push_back(load_double(first, desc.dtype, desc.strides[3] == 0 ? 0 : i));
    return x;
  }

  Vector key(int64_t position) const {
    Vector k = ring_row(tail_.k, t_.tail.k, q_head_, position, p_.key_dim);
    if (p_.qk_l2norm && !tail_.ring) l2_normalize(k);
    return k;
  }
  void decay(int64_t head, int64_t position, Vector* S) const {
    Vector g = ring_row(tail_.g, t_.tail.g, head, position, p_.key_dim);
    if (!tail_.ring) g = log_decay(p_, t_, std::move(g), head);
    for (double& x : g) x = std::exp(x);  // not for each element of a row of S
    const auto V = static_cast<std::size_t>(p_.value_dim);
    for (std::size_t i = 0; i < S->size(); ++i) (*S)[i] *= g[i / V];
  }
  static void add_product(const Vector& k, const Vector& v_new, Vector* S) {
    const std::size_t V = v_new.size();
    for (std::size_t i = 0; i < S->size(); ++i) (*S)[i] += k[i / V] * v_new[i % V];
  }

  /// The state of a head in front of the token of `position`.
  Vector state_before(int64_t head, int64_t position) const {
    Vector S = load_state(p_, *p_.initial_state, t_.initial_state, at().source, head);
    for (int64_t i = at().folded; i < position; ++i) {
      decay(head, i, &S);
      add_product(key(i), ring_row(tail_.v_new, t_.tail.v_new, head, i, p_.value_dim), &S);
    }
    return S;
  }

  /// S becomes the state behind a row, whose v_new is made from v and beta.
  Vector advance(int64_t head, int64_t position, Vector* S) const {
    decay(head, position, S);
    const Vector k = key(position);
    Vector v_new = ring_row(tail_.split->v, t_.tail.v, head, position, p_.value_dim);
    const std::size_t V = v_new.size();
    for (std::size_t i = 0; i < S->size(); ++i) v_new[i % V] -= (*S)[i] * k[i / V];
    const double beta = step_size(
        p_,
        load_double(row(tail_.split->beta, static_cast<const void*>(t_.tail.beta), head, position),
                    p_.beta.dtype, 0));
    for (double& x : v_new) x *= beta;
    add_product(k, v_new, S);
    return v_new;
  }

  /// visit(i, at of the pool, at of rest) for each element of a state [K, V].
  template <class Visit>
  void each_element(int64_t slot, int64_t head, Visit&& visit) const {
    const StateDesc &pool = *p_.initial_state, rest{tail_.split->rest, pool.num_slots, true};
    const bool kv = p_.state_layout == StateLayout::kKV;
    for (int64_t d = 0; d < p_.key_dim; ++d)
      for (int64_t c = 0; c < p_.value_dim; ++c) {
        const auto at = [&](const StateDesc& desc) {
          return state_offset(desc, slot, head) + (kv ? d : c) * desc.tensor.strides[2] +
                 (kv ? c : d);
        };
        visit(static_cast<std::size_t>(d * p_.value_dim + c), at(pool), at(rest));
      }
  }

  void fold_split_head(int64_t head, int64_t end) {
    auto* const bf16 = static_cast<uint16_t*>(t_.initial_state);
    Vector S(static_cast<std::size_t>(p_.key_dim * p_.value_dim));
    each_element(at().source, head, [&](std::size_t i, int64_t in_pool, int64_t in_rest) {
      S[i] = static_cast<double>(join_float(bf16[in_pool], t_.tail.rest[in_rest]));
    });
    for (int64_t i = at().folded; i < end; ++i) advance(head, i, &S);
    each_element(at().slot, head, [&](std::size_t i, int64_t in_pool, int64_t in_rest) {
      const SplitNumber number = split_float(static_cast<float>(S[i]));
      bf16[in_pool] = number.bf16, t_.tail.rest[in_rest] = number.rest;
    });
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
