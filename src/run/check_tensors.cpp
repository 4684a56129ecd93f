// SPDX-License-Identifier: Apache-2.0
#include "run/check_tensors.hpp"

#include <algorithm>
#include <array>
#include <string_view>
#include <tuple>

#include "core/convert.hpp"
#include "core/footprint.hpp"
#include "core/layout.hpp"
#include "core/lengths.hpp"
#include "core/modes.hpp"
#include "core/text.hpp"
#include "core/views.hpp"
#include "run/slots.hpp"
#include "run/tail.hpp"

namespace kda {
namespace {

struct Entry {
  const char* name = "";
  const TensorDesc* desc = nullptr;
  Shape shape = {};
  const void* pointer = nullptr;
  bool output = false;
};

Entry state_entry(const Problem& p, const std::optional<StateDesc>& state, const void* pointer,
                  bool output) {
  if (!state) return {};
  return {"", &state->tensor, state_shape(p, *state), pointer, output};
}

/// Every tensor that a call may have, in the order in which they are checked. `entry` gives all but
/// the name; without a descriptor the problem has none.
struct TensorRow {
  const char* name;
  Entry (*entry)(const Problem& p, const Tensors& t);
};
using P = const Problem&;
using T = const Tensors&;
constexpr TensorRow kTensors[] = {
    {"q",
     [](P p, T t) {
       return Entry{"", &p.q, qk_shape(p), t.q, false};
     }},
    {"k",
     [](P p, T t) {
       return Entry{"", &p.k, qk_shape(p), t.k, false};
     }},
    {"v",
     [](P p, T t) {
       return Entry{"", &p.v, v_shape(p), t.v, false};
     }},
    {"g",
     [](P p, T t) {
       return Entry{"", &p.g, g_shape(p), t.g, false};
     }},
    {"beta",
     [](P p, T t) {
       return Entry{"", &p.beta, beta_shape(p), t.beta, false};
     }},
    {"o",
     [](P p, T t) {
       return Entry{"", &p.o, v_shape(p), t.o, true};
     }},
    {"A_log",
     [](P p, T t) {
       return Entry{
           "", p.A_log ? &*p.A_log : nullptr, {p.num_value_heads, 1, 1, 1}, t.A_log, false};
     }},
    {"dt_bias",
     [](P p, T t) {
       return Entry{"", p.dt_bias ? &*p.dt_bias : nullptr, bias_shape(p), t.dt_bias, false};
     }},
    {"initial_state",
     [](P p, T t) { return state_entry(p, p.initial_state, t.initial_state, in_place(p)); }},
    {"final_state", [](P p, T t) { return state_entry(p, p.final_state, t.final_state, true); }},
    {"checkpoints", [](P p, T t) { return state_entry(p, p.checkpoints, t.checkpoints, true); }},
};

/// Tensors of a tail, where the problem has one.
constexpr TensorRow kTailTensors[] = {
    {"tail.k",
     [](P p, T t) {
       return Entry{"", &p.tail->k, tail_k_shape(p, *p.tail), t.tail.k, true};
     }},
    {"tail.g",
     [](P p, T t) {
       return Entry{"", &p.tail->g, tail_g_shape(p, *p.tail), t.tail.g, true};
     }},
    {"tail.v_new",
     [](P p, T t) {
       return Entry{"", &p.tail->v_new, tail_v_new_shape(p, *p.tail), t.tail.v_new, true};
     }},
    {"tail.folded",
     [](P p, T t) {
       return Entry{"", p.tail->ring ? nullptr : &p.tail->folded, tail_folded_shape(p, *p.tail),
                    t.tail.folded, true};
     }},
};

/// Tensors that split their boundary states, where the tail has them.
constexpr TensorRow kSplitTensors[] = {
    {"tail.rest",
     [](P p, T t) {
       return Entry{"", &p.tail->split->rest, state_shape(p, *p.initial_state), t.tail.rest, true};
     }},
    {"tail.v",
     [](P p, T t) {
       return Entry{"", &p.tail->split->v, tail_v_new_shape(p, *p.tail), t.tail.v, true};
     }},
    {"tail.beta",
     [](P p, T t) {
       return Entry{"", &p.tail->split->beta, tail_beta_shape(p, *p.tail), t.tail.beta, true};
     }},
};

Footprint footprint(const Entry& entry) {
  return footprint(entry.pointer, entry.desc->dtype, entry.shape, entry.desc->strides);
}

Status check_pointer(const Entry& entry) {
  const bool empty =
      std::any_of(entry.shape.begin(), entry.shape.end(), [](int64_t count) { return count == 0; });
  if (empty) return {};
  if (!entry.pointer) return invalid(entry.name, ": pointer is null");
  const auto address = reinterpret_cast<std::uintptr_t>(entry.pointer);
  if (address % static_cast<std::uintptr_t>(entry.desc->alignment) != 0)
    return invalid(entry.name, ": pointer is not aligned to the stated ", entry.desc->alignment,
                   " bytes");
  return {};
}

constexpr std::size_t kNumGradients = 10;

class Checker {
 public:
  Checker(const Plan& plan, const Tensors& tensors, const stage::Sequences& sequences,
          void* workspace, const registry::DeviceChecks* device, const GradientCheck* backward)
      : plan_(plan),
        p_(plan.problem),
        t_(tensors),
        sequences_(sequences),
        workspace_(workspace),
        device_(device),
        backward_(backward) {}

  Status run() {
    if (device_) return run_device();
    KDA_RETURN_IF_ERROR(check_lengths());
    collect();
    for (std::size_t i = 0; i < count_; ++i) KDA_RETURN_IF_ERROR(check_pointer(entries_[i]));
    KDA_RETURN_IF_ERROR(check_indices());
    KDA_RETURN_IF_ERROR(check_rates());
    KDA_RETURN_IF_ERROR(check_aliasing());
    if (p_.tail) KDA_RETURN_IF_ERROR(check_tail(p_, t_, sequences_));
    return check_slots(plan_, t_, sequences_, workspace_);
  }

 private:
  /// Device memory: where it lies is checked here, what it holds by the kernels (MetadataFlag).
  Status run_device() {
    collect();
    for (std::size_t i = 0; i < count_; ++i) {
      KDA_RETURN_IF_ERROR(check_pointer(entries_[i]));
      KDA_RETURN_IF_ERROR(check_memory(entries_[i].name, entries_[i].pointer));
    }
    if (plan_.saved_bytes > 0) KDA_RETURN_IF_ERROR(check_memory("saved", t_.saved));
    const int64_t N = p_.num_sequences;
    const auto check_array = [&](const char* name, bool needed, const void* pointer) -> Status {
      if (!needed) return {};
      if (!pointer) return invalid(name, ": pointer is null");
      return check_memory(name, pointer);
    };
    KDA_RETURN_IF_ERROR(
        check_array("cu_seqlens", p_.cu_seqlens && !plan_.lengths_known, t_.cu_seqlens));
    const auto indexed = [&](const std::optional<StateDesc>& state) {
      return N > 0 && state && state->indexed;
    };
    KDA_RETURN_IF_ERROR(
        check_array("initial_state_indices", indexed(p_.initial_state), t_.initial_state_indices));
    KDA_RETURN_IF_ERROR(
        check_array("final_state_indices", indexed(p_.final_state), t_.final_state_indices));
    // With offsets each sequence has an entry; else there are as many as checkpoints, maybe none.
    const bool has_indices = p_.checkpoint_offsets || (p_.checkpoints && p_.checkpoints->num_slots);
    KDA_RETURN_IF_ERROR(check_array("checkpoint_indices", indexed(p_.checkpoints) && has_indices,
                                    t_.checkpoint_indices));
    KDA_RETURN_IF_ERROR(
        check_array("checkpoint_offsets", N > 0 && p_.checkpoint_offsets, t_.checkpoint_offsets));
    KDA_RETURN_IF_ERROR(
        check_array("initial_state_mask", N > 0 && p_.initial_state_mask, t_.initial_state_mask));
    KDA_RETURN_IF_ERROR(check_array("num_accepted_tokens", N > 0 && p_.num_accepted_tokens,
                                    t_.num_accepted_tokens));
    KDA_RETURN_IF_ERROR(check_array("token_parents", N > 0 && p_.token_parents, t_.token_parents));
    for (const TailArray& array : tail_arrays())
      KDA_RETURN_IF_ERROR(check_array(array.name, array.needed, array.pointer));
    return check_aliasing();
  }

  Status check_memory(const char* name, const void* pointer) const {
    return t_.trusted ? Status{} : device_->pointer(name, pointer);
  }

  /// Only for plans from bounds: host lengths were checked by make_plan().
  Status check_lengths() {
    if (!p_.cu_seqlens) return {};
    if (plan_.lengths_known) return check_known_lengths();
    if (!t_.cu_seqlens) return invalid("cu_seqlens: pointer is null");
    const int64_t N = p_.num_sequences;
    KDA_RETURN_IF_ERROR(
        kda::check_lengths(N, p_.num_tokens, [&](int64_t n) { return sequences_.begin(n); }));
    for (int64_t n = 0; p_.operation == Operation::kDecode && n < N; ++n)
      if (sequences_.length(n) > decode_limit())
        return invalid("cu_seqlens: decode takes at most ", decode_limit(),
                       " tokens a sequence, sequence ", n, " has ", sequences_.length(n));
    const int64_t expected = total_checkpoints(p_, sequences_);
    if (p_.checkpoints && !p_.checkpoints->indexed && p_.checkpoints->num_slots != expected)
      return invalid("checkpoints: num_slots = ", p_.checkpoints->num_slots,
                     " is not the number of checkpoints ", expected);
    return {};
  }

  /// Lengths that are given all the same must be the plan's.
  Status check_known_lengths() const {
    if (!t_.cu_seqlens) return {};
    const stage::Sequences given(p_, {}, t_.cu_seqlens);
    for (int64_t n = 0; n <= p_.num_sequences; ++n)
      if (given.begin(n) != sequences_.begin(n))
        return invalid("cu_seqlens: entry ", n, " = ", given.begin(n),
                       ", but the plan was made for ", sequences_.begin(n));
    return {};
  }

  int64_t decode_limit() const {
    const int64_t most = most_decode_tokens(p_);
    return has_token_columns(p_) ? std::min(p_.state_index_columns, most) : most;
  }

  void collect() {
    for (const TensorRow& row : kTensors) add(row);
    if (p_.tail)
      for (const TensorRow& row : kTailTensors) add(row);
    if (has_split_states(p_))
      for (const TensorRow& row : kSplitTensors) add(row);
    if (backward_) collect_gradients();
  }

  void add(const TensorRow& row) {
    Entry& entry = entries_[count_];
    entry = row.entry(p_, t_);
    entry.name = row.name;
    if (entry.desc && !(backward_ && entry.output)) ++count_;
  }

  void collect_gradients() {
    const Gradients& g = backward_->gradients;
    const GradientTensors& t = backward_->tensors;
    const auto add = [&](const char* name, const std::optional<TensorDesc>& desc,
                         const Shape& shape, const void* pointer, bool output = true) {
      if (desc) entries_[count_++] = {name, &*desc, shape, pointer, output};
    };
    const Shape states = state_shape(p_, {{}, p_.num_sequences, false});
    add("d_o", g.d_o, v_shape(p_), t.d_o, false);
    add("d_final_state", g.d_final_state, states, t.d_final_state, false);
    add("dq", g.dq, qk_shape(p_), t.dq);
    add("dk", g.dk, qk_shape(p_), t.dk);
    add("dv", g.dv, v_shape(p_), t.dv);
    add("dg", g.dg, g_shape(p_), t.dg);
    add("dbeta", g.dbeta, beta_shape(p_), t.dbeta);
    add("dA_log", g.dA_log, {p_.num_value_heads, 1, 1, 1}, t.dA_log);
    add("ddt_bias", g.ddt_bias, bias_shape(p_), t.ddt_bias);
    add("d_initial_state", g.d_initial_state, states, t.d_initial_state);
  }

  Status check_indices() {
    const int64_t N = p_.num_sequences;
    const int64_t S = p_.state_index_columns;
    if (p_.initial_state_mask && N > 0 && !t_.initial_state_mask)
      return invalid("initial_state_mask: pointer is null");
    if (p_.initial_state && p_.initial_state->indexed)
      KDA_RETURN_IF_ERROR(check_index("initial_state_indices", t_.initial_state_indices,
                                      N * initial_columns(p_), p_.initial_state->num_slots));
    if (p_.final_state && p_.final_state->indexed)
      KDA_RETURN_IF_ERROR(check_index("final_state_indices", t_.final_state_indices,
                                      N * final_columns(p_), p_.final_state->num_slots));
    if (p_.checkpoints && p_.checkpoints->indexed)
      KDA_RETURN_IF_ERROR(check_index("checkpoint_indices", t_.checkpoint_indices,
                                      num_checkpoint_indices(p_, sequences_),
                                      p_.checkpoints->num_slots));
    KDA_RETURN_IF_ERROR(check_offsets());
    const bool accepted = p_.num_accepted_tokens && N > 0;
    if (accepted && !t_.num_accepted_tokens) return invalid("num_accepted_tokens: pointer is null");
    for (int64_t n = 0; accepted && n < N; ++n)
      if (t_.num_accepted_tokens[n] < 1 || t_.num_accepted_tokens[n] > S)
        return invalid("num_accepted_tokens: entry ", n, " = ", t_.num_accepted_tokens[n],
                       " is outside 1..", S);
    KDA_RETURN_IF_ERROR(check_tail_arrays());
    return check_parents();
  }

  /// The integers of a tail.
  struct TailArray {
    const char* name;
    bool needed;
    const int32_t* pointer;
  };
  std::array<TailArray, 4> tail_arrays() const {
    const bool needed = p_.tail && p_.num_sequences > 0;
    return {{{"positions", needed, t_.tail.positions},
             {"sources", needed && p_.tail->sources, t_.tail.sources},
             {"accepted_rows", needed && p_.tail->accepted_columns > 0, t_.tail.accepted_rows},
             {"flush", needed && p_.tail->flush, t_.tail.flush}}};
  }
  Status check_tail_arrays() const {
    for (const TailArray& array : tail_arrays())
      if (array.needed && !array.pointer) return invalid(array.name, ": pointer is null");
    return {};
  }

  Status check_offsets() const {
    const int64_t N = p_.num_sequences;
    if (!p_.checkpoint_offsets || N == 0) return {};
    if (!t_.checkpoint_offsets) return invalid("checkpoint_offsets: pointer is null");
    for (int64_t n = 0; n < N; ++n) {
      const int64_t offset = t_.checkpoint_offsets[n];
      if (state_slot(p_, *p_.checkpoints, t_.checkpoint_indices, n) < 0) continue;
      if (offset > 0 && offset % p_.checkpoint_every != 0)
        return invalid("checkpoint_offsets: entry ", n, " = ", offset, " is not a multiple of ",
                       p_.checkpoint_every);
      if (offset > sequences_.length(n))
        return invalid("checkpoint_offsets: entry ", n, " = ", offset, " is above ",
                       sequences_.length(n), ", the length of its sequence");
    }
    return {};
  }

  Status check_parents() const {
    const int64_t N = p_.num_sequences, S = p_.state_index_columns;
    if (!p_.token_parents || N == 0) return {};
    if (!t_.token_parents) return invalid("token_parents: pointer is null");
    const StateDesc& stored = p_.final_state ? *p_.final_state : *p_.initial_state;
    const int32_t* slots = p_.final_state ? t_.final_state_indices : t_.initial_state_indices;
    for (int64_t n = 0; n < N; ++n)
      for (int64_t t = 1; t < sequences_.length(n) && !is_skipped(p_, t_, n); ++t) {
        const int64_t parent = t_.token_parents[n * S + t];
        if (parent < 0) break;
        if (parent >= t)
          return invalid("token_parents: entry ", n, ", ", t, " = ", parent, " is not below ", t);
        if (!p_.tail && parent != t - 1 && state_slot(p_, stored, slots, n * S + parent) < 0)
          return invalid("token_parents: entry ", n, ", ", t, " = ", parent,
                         ", a token whose state has no slot");
      }
    return {};
  }

  Status check_rates() const {
    if (!p_.A_log) return {};
    return kda::check_rates(p_.gate_mode, t_.A_log, p_.A_log->dtype, p_.A_log->strides[0],
                            p_.num_value_heads);
  }

  Status check_aliasing() {
    for (std::size_t i = 0; i < count_; ++i) {
      if (!entries_[i].output || !entries_[i].pointer) continue;
      const Footprint out = footprint(entries_[i]);
      for (std::size_t j = 0; j < count_; ++j) {
        const bool seen = entries_[j].output && j <= i;
        if (seen || !entries_[j].pointer || pooled(entries_[i], entries_[j])) continue;
        if (overlap(out, footprint(entries_[j])))
          return invalid(entries_[i].name, ": overlaps ", entries_[j].name, " in memory");
      }
    }
    return check_arrays();
  }

  /// That no output lies over integers that kernels read while they write it.
  Status check_arrays() const {
    const int64_t N = p_.num_sequences, S = p_.state_index_columns;
    const auto indexed = [](const std::optional<StateDesc>& state) {
      return state && state->indexed;
    };
    // How many checkpoints there are only the lengths say.
    const int64_t checkpoints = p_.checkpoint_offsets ? N
                                : plan_.lengths_known || device_ == nullptr
                                    ? total_checkpoints(p_, sequences_)
                                    : 0;
    const NamedArray arrays[] = {
        {"cu_seqlens", p_.cu_seqlens ? t_.cu_seqlens : nullptr,
         p_.cu_seqlens ? (N + 1) * dtype_size(*p_.cu_seqlens) : 0},
        {"initial_state_indices", indexed(p_.initial_state) ? t_.initial_state_indices : nullptr,
         N * initial_columns(p_) * 4},
        {"final_state_indices", indexed(p_.final_state) ? t_.final_state_indices : nullptr,
         N * final_columns(p_) * 4},
        {"checkpoint_indices", indexed(p_.checkpoints) ? t_.checkpoint_indices : nullptr,
         checkpoints * 4},
        {"checkpoint_offsets", p_.checkpoint_offsets ? t_.checkpoint_offsets : nullptr, N * 4},
        {"initial_state_mask", p_.initial_state_mask ? t_.initial_state_mask : nullptr, N},
        {"num_accepted_tokens", p_.num_accepted_tokens ? t_.num_accepted_tokens : nullptr, N * 4},
        {"token_parents", p_.token_parents ? t_.token_parents : nullptr, N * S * 4},
        {"positions", p_.tail ? t_.tail.positions : nullptr, N * 4},
        {"sources", p_.tail && p_.tail->sources ? t_.tail.sources : nullptr, N * 4},
        {"flush", p_.tail && p_.tail->flush ? t_.tail.flush : nullptr, N * 4},
        {"accepted_rows", p_.tail && p_.tail->accepted_columns ? t_.tail.accepted_rows : nullptr,
         p_.tail ? N * p_.tail->accepted_columns * 4 : 0}};
    for (std::size_t i = 0; i < count_; ++i) {
      if (!entries_[i].output || !entries_[i].pointer) continue;
      const Footprint out = footprint(entries_[i]);
      if (const NamedArray* array = first_overlap(out, arrays))
        return invalid(entries_[i].name, ": overlaps ", array->name, " in memory");
    }
    return {};
  }

  /// State buffers may be one pool; then slots are checked instead of ranges.
  bool pooled(const Entry& a, const Entry& b) const {
    const StateDesc* first = state_of(a.name);
    const StateDesc* second = state_of(b.name);
    return first && second && same_pool(*first, a.pointer, *second, b.pointer);
  }
  const StateDesc* state_of(std::string_view name) const {
    if (name == "initial_state") return &*p_.initial_state;
    if (name == "final_state") return &*p_.final_state;
    return name == "checkpoints" ? &*p_.checkpoints : nullptr;
  }

  const Plan& plan_;
  const Problem& p_;
  const Tensors& t_;
  const stage::Sequences& sequences_;
  void* workspace_;
  const registry::DeviceChecks* device_;  ///< null: host memory
  const GradientCheck* backward_;         ///< null: not a backward
  /// The first count_ are set. A backward has no tail.
  std::array<Entry, std::size(kTensors) + kNumGradients> entries_;
  static_assert(std::size(kTailTensors) + std::size(kSplitTensors) <= kNumGradients);
  std::size_t count_ = 0;
};

/// Memory of the caller that the plan sizes.
Status check_sized(const char* name, const void* pointer, std::size_t bytes, std::size_t needed) {
  if (needed == 0) return {};
  if (!pointer) return invalid(name, ": is null, needs ", needed, " bytes");
  if (bytes < needed) return invalid(name, ": has ", bytes, " bytes, needs ", needed);
  if (reinterpret_cast<std::uintptr_t>(pointer) % kWorkspaceAlignment != 0)
    return invalid(name, ": is not aligned to ", kWorkspaceAlignment, " bytes");
  return {};
}

}  // namespace

Status check_workspace(const Plan& plan, const void* workspace, std::size_t workspace_bytes) {
  return check_sized("workspace", workspace, workspace_bytes, plan.workspace_bytes);
}

Status check_saved(const Plan& plan, const Tensors& tensors, const void* workspace) {
  KDA_RETURN_IF_ERROR(check_sized("saved", tensors.saved, tensors.saved_bytes, plan.saved_bytes));
  const auto saved = reinterpret_cast<std::uintptr_t>(tensors.saved);
  const auto scratch = reinterpret_cast<std::uintptr_t>(workspace);
  if (saved < scratch + plan.workspace_bytes && scratch < saved + plan.saved_bytes)
    return invalid("saved: overlaps the workspace");
  return {};
}

Status check_tensors(const Plan& plan, const Tensors& tensors, const stage::Sequences& sequences,
                     void* workspace, const registry::DeviceChecks* device,
                     const GradientCheck* backward) {
  return Checker(plan, tensors, sequences, workspace, device, backward).run();
}

}  // namespace kda
