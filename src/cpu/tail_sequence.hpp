// SPDX-License-Identifier: Apache-2.0
// The course of a call with a tail for one sequence and q/k head, whose value heads share its keys:
// all that copies rows, and the order of folds and rows. A backend computes.
#pragma once

#include <cstring>

#include "core/tail.hpp"
#include "stage/call.hpp"

namespace kda::cpu {

/// `Backend` has
///   fold_head(head, end)            S_0 of `source` becomes that in front of position `end`, in
///                                   `slot`
///   remake_head(head)               v_new of the rows that split states have left behind a fold
///   step_head(token, count, head)   o and rows of v_new, at `position`, of tokens behind all rows
///   zero_outputs(begin, end, head)  o of tokens that are skipped
///   ring_head(token, flush, head)   of a ring: o of the token, and its row, or with `flush` S_0
///                                   behind it
template <class Backend>
class TailSequence {
 public:
  TailSequence(const stage::Call& call, int64_t n, int64_t q_head)
      : call_(call),
        p_(call.problem),
        t_(call.tensors),
        tail_(*call.problem.tail),
        n_(n),
        q_head_(q_head),
        start_(tail_start(p_, t_, n, value_head_of(p_, q_head, 0))) {}

  void run() {
    const int64_t begin = call_.sequences.begin(n_), end = call_.sequences.end(n_);
    if (start_.slot < 0) return skip(begin, end);
    if (tail_.ring) return run_ring(begin);
    if (start_.source < 0) start_from_zero();
    set_folded(start_.folded);
    move_accepted();
    if (p_.operation == Operation::kDecode) {
      const int64_t count = computed_tokens(p_, t_.token_parents, n_, end - begin);
      fold(fold_target(p_, start_));
      step(begin, count);
      return skip(begin + count, end);
    }
    fold(fold_target_behind(start_.folded, start_.position));
    for (int64_t token = begin; token < end;) {
      const int64_t count = tail_block(p_, start_.folded, start_.position, end - token);
      step(token, count);
      token += count;
      fold(fold_target_behind(start_.folded, start_.position));
    }
  }

 protected:
  const TailStart& at() const { return start_; }
  const void* row(const TensorDesc& desc, const void* base, int64_t head, int64_t position) const {
    return at_bytes(base, desc, tail_row(p_, desc, start_.slot, head, position));
  }
  void* row(const TensorDesc& desc, void* base, int64_t head, int64_t position) const {
    return at_bytes(base, desc, tail_row(p_, desc, start_.slot, head, position));
  }
  /// The token of the same call that token i follows; -1: the newest sure row.
  int64_t parent(int64_t i) const {
    return p_.token_parents && i > 0 ? t_.token_parents[n_ * p_.state_index_columns + i] : i - 1;
  }

  const stage::Call& call_;
  const Problem& p_;
  const Tensors& t_;
  const TailDesc& tail_;
  const int64_t n_, q_head_;

 private:
  Backend& backend() { return static_cast<Backend&>(*this); }

  template <class Body>
  void each_head(Body&& body) {
    for (int64_t j = 0; j < group_size(p_); ++j) body(value_head_of(p_, q_head_, j));
  }

  /// Heads write the same row of a shared key, which none of them reads.
  void run_ring(int64_t token) {
    const bool flush = start_.position == tail_.rows - 1 || (tail_.flush && t_.tail.flush[n_] != 0);
    each_head([&](int64_t head) { backend().ring_head(token, flush, head); });
  }

  /// S_0 is written: no later call knows that it was zero.
  void start_from_zero() {
    clear_states(p_.initial_state->tensor, t_.initial_state);
    if (tail_.split) clear_states(tail_.split->rest, t_.tail.rest);
    start_.source = start_.slot;
  }
  void clear_states(const TensorDesc& states, void* base) {
    const Shape shape = state_shape(p_, *p_.initial_state);
    const auto bytes = static_cast<std::size_t>(shape[3] * dtype_size(states.dtype));
    each_head([&](int64_t head) {
      const int64_t first = start_.slot * states.strides[0] + head * states.strides[1];
      for (int64_t i = 0; i < shape[2]; ++i)
        std::memset(at_bytes(base, states, first + i * states.strides[2]), 0, bytes);
    });
  }

  void set_folded(int64_t folded) {
    start_.folded = folded;
    each_head([&](int64_t head) {
      *tail_folded(p_, t_.tail, start_.slot, head) = static_cast<int32_t>(folded);
    });
  }

  std::size_t key_bytes() const {
    return static_cast<std::size_t>(p_.key_dim * dtype_size(tail_.k.dtype));
  }
  std::size_t gate_bytes() const {
    return static_cast<std::size_t>((has_head_gate(p_) ? 1 : p_.key_dim) *
                                    dtype_size(tail_.g.dtype));
  }

  std::size_t value_bytes() const {
    return static_cast<std::size_t>(p_.value_dim * dtype_size(p_.v.dtype));
  }
  std::size_t beta_bytes() const { return static_cast<std::size_t>(dtype_size(p_.beta.dtype)); }

  void move_accepted() {
    const int32_t* rows = t_.tail.accepted_rows + n_ * tail_.accepted_columns;
    const int64_t first = start_.first_accepted();
    for (int64_t i = 0; i < start_.accepted; ++i) {
      if (rows[i] == i) continue;
      const auto move = [&](const TensorDesc& desc, void* base, int64_t head, std::size_t bytes) {
        std::memcpy(row(desc, base, head, first + i), row(desc, base, head, first + rows[i]),
                    bytes);
      };
      move(tail_.k, t_.tail.k, q_head_, key_bytes());
      each_head([&](int64_t head) {
        move(tail_.g, t_.tail.g, head, gate_bytes());
        move(tail_.v_new, t_.tail.v_new, head,
             static_cast<std::size_t>(p_.value_dim) * sizeof(float));
        if (!tail_.split) return;
        move(tail_.split->v, t_.tail.v, head, value_bytes());
        move(tail_.split->beta, t_.tail.beta, head, beta_bytes());
      });
    }
  }

  void fold(int64_t target) {
    const bool folds = start_.folded < target;
    while (start_.folded < target) {
      const int64_t end = fold_end(start_.folded, target);
      each_head([&](int64_t head) { backend().fold_head(head, end); });
      start_.source = start_.slot;
      set_folded(end);
    }
    // They have read another bf16 than the tokens behind them will.
    if (folds && tail_.split && start_.sure() > 0)
      each_head([&](int64_t head) { backend().remake_head(head); });
    // A plain state is in its own slot, though there may be no row to fold.
    if (!tail_.settle || start_.source == start_.slot) return;
    each_head([&](int64_t head) { backend().fold_head(head, target); });
    start_.source = start_.slot;
  }

  /// Keys are shared, and come last: a row may be that of one that was folded just now.
  void step(int64_t token, int64_t count) {
    each_head([&](int64_t head) {
      backend().step_head(token, count, head);
      const auto append = [&](const TensorDesc& rows, void* base, const TensorDesc& desc,
                              const void* tokens, std::size_t bytes) {
        for (int64_t i = 0; i < count; ++i)
          std::memcpy(row(rows, base, head, start_.position + i),
                      at_bytes(tokens, desc, row_offset(p_, desc, token + i, head)), bytes);
      };
      append(tail_.g, t_.tail.g, p_.g, t_.g, gate_bytes());
      if (!tail_.split) return;
      append(tail_.split->v, t_.tail.v, p_.v, t_.v, value_bytes());
      append(tail_.split->beta, t_.tail.beta, p_.beta, t_.beta, beta_bytes());
    });
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(row(tail_.k, t_.tail.k, q_head_, start_.position + i),
                  at_bytes(t_.k, p_.k, row_offset(p_, p_.k, token + i, q_head_)), key_bytes());
    start_.position += count;
  }

  void skip(int64_t begin, int64_t end) {
    if (zeroes_skipped(p_))
      each_head([&](int64_t head) { backend().zero_outputs(begin, end, head); });
  }

  TailStart start_;
};

}  // namespace kda::cpu
