// SPDX-License-Identifier: Apache-2.0
// Calls with a tail: tasks over (sequence, q/k head). A step reads S_0 and makes rows; a fold,
// every 16 tokens, reads and writes it.
#include <algorithm>
#include <numeric>

#include "core/convert.hpp"
#include "core/thread_pool.hpp"
#include "cpu/blocked/blocked.hpp"
#include "cpu/blocked/pass.hpp"
#include "cpu/blocked/tail_kernels.hpp"
#include "cpu/blocked/work.hpp"
#include "cpu/float_mode.hpp"
#include "cpu/tail_sequence.hpp"

namespace kda::cpu::blocked {
namespace {

constexpr std::size_t kKeyRowBytes = sizeof(float) * kRowStride;

constexpr int kAskFirst = 48;      ///< lines of a state asked for while the first row comes
constexpr int64_t kRowsAhead = 2;  ///< rows of the tail that are asked for before they are read

/// Rows that one step makes at most, in whole products with S_0.
int64_t most_new_rows(const Problem& p) {
  const int64_t rows = std::max(kTailBoundary, most_tail_tokens(*p.tail));
  return (rows + kReadRows - 1) / kReadRows * kReadRows;
}
int64_t padded_columns(const Problem& p) { return num_blocks(p.value_dim) * kBlockV; }

/// Memory of one thread. Rows are those of the tail, oldest first, then those that are made.
struct TailScratch {
  float* k;                   ///< [R, kRowStride]
  float* a;                   ///< [R, kRowStride]
  float* v_new;               ///< [R + kFoldRows, columns]
  float (*kgam)[kRowStride];  ///< [new rows]
  float (*qgam)[kRowStride];  ///< [new rows]
  float (*kend)[kRowStride];  ///< [kFoldRows]
  float *q, *decay, *keep;    ///< [kRowStride]
  float *v, *x, *y;           ///< v [columns], x and y [new rows, columns]
  float *N, *A;               ///< [new rows, R]
  float *diagonal, *beta;     ///< [new rows]
  int* before;                ///< [new rows, R]
  int* num_before;            ///< [new rows]
  float* state;               ///< [K, V] or [V, K], of split states
};

/// Carves memory from `at`; with null it counts bytes.
std::size_t carve(const Problem& p, char* at, TailScratch* s) {
  const auto R = static_cast<std::size_t>(p.tail->rows),
             columns = static_cast<std::size_t>(padded_columns(p)),
             made = static_cast<std::size_t>(most_new_rows(p));
  std::size_t used = 0;
  const auto take = [&]<class T>(T** target, std::size_t bytes) {
    *target = at ? reinterpret_cast<T*>(at + used) : nullptr;
    used += align_up(bytes);
  };
  take(&s->k, R * kKeyRowBytes), take(&s->a, R * kKeyRowBytes);
  take(&s->v_new, (R + kFoldRows) * columns * sizeof(float));
  take(&s->kgam, made * kKeyRowBytes), take(&s->qgam, made * kKeyRowBytes);
  take(&s->kend, kFoldRows * kKeyRowBytes);
  for (float** row : {&s->q, &s->decay, &s->keep}) take(row, kKeyRowBytes);
  take(&s->v, columns * sizeof(float));
  for (float** rows : {&s->x, &s->y}) take(rows, made * columns * sizeof(float));
  for (float** rows : {&s->N, &s->A}) take(rows, made * R * sizeof(float));
  for (float** row : {&s->diagonal, &s->beta}) take(row, made * sizeof(float));
  take(&s->before, made * R * sizeof(int)), take(&s->num_before, made * sizeof(int));
  const auto elements = static_cast<std::size_t>(p.key_dim * p.value_dim);
  take(&s->state, (has_split_states(p) ? elements : 0) * sizeof(float));
  return used;
}

class Sequence : public TailSequence<Sequence> {
 public:
  Sequence(const Kernels& kernels, const stage::Call& call, int64_t n, int64_t q_head,
           const TailScratch& scratch)
      : TailSequence(call, n, q_head),
        kernels_(kernels),
        tail_kernels_(*kernels.tail),
        s_(scratch) {}

  void fold_head(int64_t head, int64_t end) {
    const PrepareArgs prepare = mode_args(call_, head);
    const int64_t rows = end - at().folded;
    ahead_ = whole_state(head);
    ask_first_rows(head, rows);
    for (int64_t i = 0; i < rows; ++i) load_row(head, i, rows, prepare);
    const StateRef in = state(at().source, head), out = state(at().slot, head);
    if (!tail_.split) return fold_rows(prepare, rows, head, in, out);
    join_state(head);
    const StateRef all = joined();
    remake_rows(prepare, rows, head, all);
    fold_rows(prepare, rows, head, all, all);
    split_state(head);
  }

  void remake_head(int64_t head) {
    const PrepareArgs prepare = mode_args(call_, head);
    const int64_t rows = at().sure();
    ahead_ = {};
    for (int64_t i = 0; i < rows; ++i) load_row(head, i, rows, prepare);
    remake_rows(prepare, rows, head, state(at().slot, head));
    for (int64_t i = 0; i < rows; ++i) store_v_new(i, at().folded + i, head);
  }

  void step_head(int64_t token, int64_t count, int64_t head) {
    if (count == 0) return;
    const PrepareArgs prepare = prepare_args(call_, token, head);
    const int64_t sure = at().sure();
    ahead_ = whole_state(head);
    ask_first_rows(head, sure);
    for (int64_t i = 0; i < sure; ++i) {
      load_row(head, i, sure, prepare);
      tail_kernels_.decay(prepare, gates_of(head, i), s_.a + i * kRowStride, &ahead_);
    }
    for (int64_t i = 0; i < count; ++i) make_operands(prepare, sure, i);
    read_state(count, state(at().source, head));
    for (int64_t i = 0; i < count; ++i) make_row(token, sure, i, head);
  }

  void ring_head(int64_t token, bool flush, int64_t head) {
    const PrepareArgs prepare = prepare_args(call_, token, head), made = made_rows(prepare);
    const int64_t filled = at().position;
    const StateRef S_0 = state(at().slot, head);
    ahead_ = whole_state(head);
    ask_first_rows(head, filled);
    for (int64_t i = 0; i < filled; ++i) {
      load_row(head, i, filled, made);
      tail_kernels_.decay(made, gates_of(head, i), s_.a + i * kRowStride, &ahead_);
    }
    make_operands(prepare, filled, 0);
    read_state(1, S_0);
    solve_row(0, filled, at_bytes(t_.v, p_.v, row_offset(p_, p_.v, token, head)));
    store_output(token, head, s_.y);
    tail_kernels_.log_decay(prepare, prepare.g.data, s_.q);
    flush ? fold_ring(made, filled + 1, head, S_0) : append_made_row(filled, head);
  }

  void zero_outputs(int64_t begin, int64_t end, int64_t head) {
    std::fill_n(s_.y, columns(), 0.0f);
    for (int64_t token = begin; token < end; ++token) store_output(token, head, s_.y);
  }

 private:
  // ---- rings

  /// How rows of a ring are read.
  PrepareArgs made_rows(const PrepareArgs& tokens) const {
    PrepareArgs made = tokens;
    made.k.dtype = tail_.k.dtype;
    made.g.dtype = DType::kFloat32;
    made.gate_mode = GateMode::kLog;
    made.dt_bias = nullptr;
    made.qk_l2norm = false;
    return made;
  }

  /// Folds all rows, of which the last one is the token's, with its log decays in s_.q.
  void fold_ring(const PrepareArgs& made, int64_t rows, int64_t head, const StateRef& S_0) {
    for (int64_t first = 0; first < rows; first += kFoldRows) {
      const int64_t count = std::min<int64_t>(rows - first, kFoldRows);
      const char* gates[kFoldRows];
      for (int64_t i = 0; i < count; ++i)
        gates[i] =
            first + i + 1 < rows ? gates_of(head, first + i) : reinterpret_cast<const char*>(s_.q);
      fold_rows(made, first, count, gates, S_0, S_0);
    }
  }

  void append_made_row(int64_t i, int64_t head) {
    const auto put = [&](const float* from, const TensorDesc& desc, void* base, int64_t of_head,
                         int64_t size) {
      kernels_.store_row(from, desc.dtype, static_cast<int>(size), row(desc, base, of_head, i));
    };
    put(s_.k + i * kRowStride, tail_.k, t_.tail.k, q_head_, p_.key_dim);
    put(s_.q, tail_.g, t_.tail.g, head, p_.key_dim);
    put(s_.v_new + i * columns(), tail_.v_new, t_.tail.v_new, head, p_.value_dim);
  }

  // ---- folds

  /// Folds rows that have been loaded, from the first one on.
  void fold_rows(const PrepareArgs& prepare, int64_t rows, int64_t head, const StateRef& in,
                 const StateRef& out) {
    const char* gates[kFoldRows];
    for (int64_t i = 0; i < rows; ++i) gates[i] = gates_of(head, i);
    fold_rows(prepare, 0, rows, gates, in, out);
  }
  /// Nothing is loaded behind them any more.
  void fold_rows(const PrepareArgs& prepare, int64_t first, int64_t rows, const char* const* gates,
                 const StateRef& in, const StateRef& out) {
    if (rows < kFoldRows)
      std::fill_n(s_.v_new + (first + rows) * columns(), (kFoldRows - rows) * columns(), 0.0f);
    TailFold fold;
    fold.k = s_.k + first * kRowStride;
    fold.g = gates;
    fold.v_new = s_.v_new + first * columns();
    fold.rows = static_cast<int>(rows);
    fold.value_dim = static_cast<int>(p_.value_dim);
    fold.state_in = in.data;
    fold.state_out = out.data;
    fold.row_stride_bytes_in = in.row_stride_bytes;
    fold.row_stride_bytes_out = out.row_stride_bytes;
    fold.dtype = in.dtype;
    fold.transposed = in.transposed;
    fold.ahead = &ahead_;
    fold.kend = s_.kend;
    fold.decay = s_.decay;
    fold.keep = s_.keep;
    tail_kernels_.fold(fold, prepare);
  }

  int64_t columns() const { return padded_columns(p_); }
  StateRef state(int64_t slot, int64_t head) const {
    return state_ref(p_, *p_.initial_state, t_.initial_state, slot, head);
  }

  // ---- split states

  bool transposed() const { return p_.state_layout == StateLayout::kVK; }
  int64_t state_rows() const { return transposed() ? p_.value_dim : p_.key_dim; }
  int64_t state_columns() const { return transposed() ? p_.key_dim : p_.value_dim; }
  /// All bits of a state, in fp32.
  StateRef joined() const {
    return {reinterpret_cast<char*>(s_.state), DType::kFloat32,
            state_columns() * dtype_size(DType::kFloat32), transposed()};
  }
  /// Row i of the two parts of a state.
  uint16_t* bf16_row(int64_t slot, int64_t head, int64_t i) const {
    const StateRef ref = state(slot, head);
    return reinterpret_cast<uint16_t*>(ref.data + i * ref.row_stride_bytes);
  }
  int16_t* rest_row(int64_t slot, int64_t head, int64_t i) const {
    const auto& strides = tail_.split->rest.strides;
    return t_.tail.rest + slot * strides[0] + head * strides[1] + i * strides[2];
  }
  void join_state(int64_t head) {
    float* x = s_.state;
    for (int64_t i = 0; i < state_rows(); ++i) {
      const uint16_t* bf16 = bf16_row(at().source, head, i);
      const int16_t* rest = rest_row(at().source, head, i);
      for (int64_t c = 0; c < state_columns(); ++c) *x++ = join_float(bf16[c], rest[c]);
    }
  }
  void split_state(int64_t head) {
    const float* x = s_.state;
    for (int64_t i = 0; i < state_rows(); ++i) {
      uint16_t* bf16 = bf16_row(at().slot, head, i);
      int16_t* rest = rest_row(at().slot, head, i);
      for (int64_t c = 0; c < state_columns(); ++c) {
        const SplitNumber number = split_float(*x++);
        bf16[c] = number.bf16, rest[c] = number.rest;
      }
    }
  }

  /// v_new of rows, which follow each other from a state, from v and beta. Keys have been loaded.
  void remake_rows(const PrepareArgs& prepare, int64_t rows, int64_t head, const StateRef& from) {
    std::fill_n(s_.q, kRowStride, 0.0f);
    for (int64_t i = 0; i < rows; ++i) {
      tail_kernels_.decay(prepare, gates_of(head, i), s_.a + i * kRowStride, &ahead_);
      PrepareArgs with_beta = prepare;
      with_beta.beta.data = static_cast<const char*>(
          row(tail_.split->beta, static_cast<const void*>(t_.tail.beta), head, at().folded + i));
      with_beta.beta.dtype = p_.beta.dtype;
      s_.beta[i] = tail_kernels_.beta(with_beta, 0);
      s_.diagonal[i] = 0;
      s_.num_before[i] = static_cast<int>(i);
      std::iota(s_.before + i * tail_.rows, s_.before + i * tail_.rows + i, 0);
      make_scores(i, i);
    }
    read_state(rows, from);
    for (int64_t i = 0; i < rows; ++i)
      solve_row(i, i,
                row(tail_.split->v, static_cast<const void*>(t_.tail.v), head, at().folded + i));
  }

  // ---- rows

  const char* gates_of(int64_t head, int64_t i) const {
    return static_cast<const char*>(
        row(tail_.g, static_cast<const void*>(t_.tail.g), head, at().folded + i));
  }

  const char* key_of(int64_t i) const {
    return static_cast<const char*>(
        row(tail_.k, static_cast<const void*>(t_.tail.k), q_head_, at().folded + i));
  }
  const char* v_new_of(int64_t head, int64_t i) const {
    return static_cast<const char*>(
        row(tail_.v_new, static_cast<const void*>(t_.tail.v_new), head, at().folded + i));
  }

  void ask_first_rows(int64_t head, int64_t count) {
    for (int64_t i = 0; i < std::min(count, kRowsAhead); ++i) ask_row(head, i);
    ask(ahead_, kAskFirst);
  }

  /// Key and v_new of row i of `count`.
  void load_row(int64_t head, int64_t i, int64_t count, const PrepareArgs& prepare) {
    if (i + kRowsAhead < count) ask_row(head, i + kRowsAhead);
    tail_kernels_.key(prepare, key_of(i), s_.k + i * kRowStride);
    kernels_.load_row(v_new_of(head, i), tail_.v_new.dtype, static_cast<int>(p_.value_dim),
                      static_cast<int>(columns()), s_.v_new + i * columns());
  }

  /// Asks for row i, which is read some rows later.
  void ask_row(int64_t head, int64_t i) const {
    const auto ask = [](const char* data, int64_t bytes) {
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(data + at);
    };
    ask(key_of(i), p_.key_dim * dtype_size(tail_.k.dtype));
    ask(gates_of(head, i), has_head_gate(p_) ? 1 : p_.key_dim * dtype_size(tail_.g.dtype));
    ask(v_new_of(head, i), p_.value_dim * dtype_size(tail_.v_new.dtype));
  }

  /// The boundary state, to be asked for while rows are made; nothing where it has gaps.
  Ahead whole_state(int64_t head) const {
    const StateRef in = state(at().source, head);
    const int64_t rows = in.transposed ? p_.value_dim : p_.key_dim;
    const int64_t bytes = (in.transposed ? p_.key_dim : p_.value_dim) * dtype_size(in.dtype);
    if (in.row_stride_bytes != bytes) return {};
    const int64_t stream = rows * bytes / kReadStreams;
    return {in.data, in.data + stream, stream};
  }

  /// The rows that new token i follows, oldest first.
  int list_before(int64_t sure, int64_t i, int* before) const {
    int64_t count = sure;
    for (int64_t at = parent(i); at >= 0; at = parent(at)) ++count;
    int64_t place = count;
    for (int64_t at = parent(i); at >= 0; at = parent(at))
      before[--place] = static_cast<int>(sure + at);
    for (int64_t j = 0; j < sure; ++j) before[j] = static_cast<int>(j);
    return static_cast<int>(count);
  }

  /// All of new token i that needs neither S_0 nor v_new. Its parents come before it.
  void make_operands(const PrepareArgs& prepare, int64_t sure, int64_t i) {
    const int64_t R = tail_.rows, at = sure + i;
    const int token = static_cast<int>(i);
    s_.diagonal[i] = tail_kernels_.token(prepare, token, s_.q, s_.k + at * kRowStride);
    s_.beta[i] = tail_kernels_.beta(prepare, token);
    tail_kernels_.decay(prepare, prepare.g.data + i * prepare.g.token_stride_bytes,
                        s_.a + at * kRowStride, &ahead_);
    s_.num_before[i] = list_before(sure, i, s_.before + i * R);
    make_scores(i, at);
  }

  /// Scores of row `at` with those that it follows, as new row i. Its q is in s_.q.
  void make_scores(int64_t i, int64_t at) {
    const int64_t R = tail_.rows;
    TailScores scores;
    scores.k = s_.k;
    scores.a = s_.a;
    scores.q = s_.q;
    scores.row = static_cast<int>(at);
    scores.before = s_.before + i * R;
    scores.num_before = s_.num_before[i];
    scores.key_dim = static_cast<int>(p_.key_dim);
    scores.ahead = &ahead_;
    scores.decay = s_.decay;
    scores.N = s_.N + i * R;
    scores.A = s_.A + i * R;
    scores.kgam = s_.kgam[i];
    scores.qgam = s_.qgam[i];
    tail_kernels_.scores(scores);
  }

  void read_state(int64_t count, const StateRef& in) {
    TailRead read;
    read.key_dim = static_cast<int>(p_.key_dim);
    read.value_dim = static_cast<int>(p_.value_dim);
    read.state = in.data;
    read.row_stride_bytes = in.row_stride_bytes;
    read.dtype = in.dtype;
    if (count > 2)  // an instance of more rows reads them
      for (int64_t i = count; i % kReadRows != 0; ++i)
        for (auto* rows : {s_.kgam, s_.qgam}) std::fill_n(rows[i], kRowStride, 0.0f);
    for (int64_t first = 0; first < count; first += kReadRows) {
      read.kgam = s_.kgam + first;
      read.qgam = s_.qgam + first;
      read.rows = static_cast<int>(std::min<int64_t>(kReadRows, count - first));
      read.x = s_.x + first * columns();
      read.y = s_.y + first * columns();
      (in.transposed ? tail_kernels_.read_vk : tail_kernels_.read_kv)(read);
    }
  }

  void make_row(int64_t token, int64_t sure, int64_t i, int64_t head) {
    solve_row(i, sure + i, at_bytes(t_.v, p_.v, row_offset(p_, p_.v, token + i, head)));
    store_output(token + i, head, s_.y + i * columns());
    store_v_new(sure + i, at().position + i, head);
  }

  /// v_new of row `at`, and o, as new row i.
  void solve_row(int64_t i, int64_t at, const void* v) {
    const int padded = static_cast<int>(columns());
    kernels_.load_row(static_cast<const char*>(v), p_.v.dtype, static_cast<int>(p_.value_dim),
                      padded, s_.v);
    TailSolve solve;
    solve.N = s_.N + i * tail_.rows;
    solve.A = s_.A + i * tail_.rows;
    solve.diagonal = s_.diagonal[i];
    solve.beta = s_.beta[i];
    solve.before = s_.before + i * tail_.rows;
    solve.num_before = s_.num_before[i];
    solve.row = static_cast<int>(at);
    solve.columns = padded;
    solve.v = s_.v;
    solve.x = s_.x + i * padded;
    solve.y = s_.y + i * padded;
    solve.v_new = s_.v_new;
    tail_kernels_.solve(solve);
  }

  void store_v_new(int64_t i, int64_t position, int64_t head) {
    kernels_.store_row(s_.v_new + i * columns(), DType::kFloat32, static_cast<int>(p_.value_dim),
                       row(tail_.v_new, t_.tail.v_new, head, position));
  }

  void store_output(int64_t token, int64_t head, const float* o) {
    kernels_.store_row(o, p_.o.dtype, static_cast<int>(p_.value_dim),
                       at_bytes(t_.o, p_.o, row_offset(p_, p_.o, token, head)));
  }

  const Kernels& kernels_;
  const TailKernels& tail_kernels_;
  const TailScratch& s_;
  Ahead ahead_;
};

}  // namespace

std::size_t tail_scratch_bytes(const Problem& p, int32_t num_threads) {
  TailScratch none;
  return static_cast<std::size_t>(num_threads) * carve(p, nullptr, &none);
}

Status tail_call(const Kernels& kernels, const stage::Call& call) {
  const Problem& p = call.problem;
  const std::size_t bytes = tail_scratch_bytes(p, 1);
  auto task = [&](int64_t idx, int32_t thread) {
    const FloatMode mode;
    TailScratch scratch;
    carve(p, static_cast<char*>(call.scratch) + static_cast<std::size_t>(thread) * bytes, &scratch);
    Sequence(kernels, call, idx / p.num_heads, idx % p.num_heads, scratch).run();
  };
  return parallel_tasks(call.sequences.count() * p.num_heads, call.num_threads, task,
                        tail_microseconds(call));
}

}  // namespace kda::cpu::blocked
