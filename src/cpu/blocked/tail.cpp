// SPDX-License-Identifier: Apache-2.0
// Calls with a tail: tasks over (sequence, q/k head). A step reads S_0 and makes rows; a fold,
// every 16 tokens, reads and writes it.
#include <algorithm>

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
    const char* gates[kFoldRows];
    ahead_ = whole_state(head);
    ask_first_rows(head, rows);
    for (int64_t i = 0; i < rows; ++i) {
      load_row(head, i, rows, prepare);
      gates[i] = gates_of(head, i);
    }
    std::fill_n(s_.v_new + rows * columns(), (kFoldRows - rows) * columns(), 0.0f);
    const StateRef in = state(at().source, head), out = state(at().slot, head);
    TailFold fold;
    fold.k = s_.k;
    fold.g = gates;
    fold.v_new = s_.v_new;
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
    read_state(count, head);
    for (int64_t i = 0; i < count; ++i) make_row(token, sure, i, head);
  }

  void zero_outputs(int64_t begin, int64_t end, int64_t head) {
    std::fill_n(s_.y, columns(), 0.0f);
    for (int64_t token = begin; token < end; ++token) store_output(token, head, s_.y);
  }

 private:
  int64_t columns() const { return padded_columns(p_); }
  StateRef state(int64_t slot, int64_t head) const {
    return state_ref(p_, *p_.initial_state, t_.initial_state, slot, head);
  }
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
    kernels_.load_row(v_new_of(head, i), DType::kFloat32, static_cast<int>(p_.value_dim),
                      static_cast<int>(columns()), s_.v_new + i * columns());
  }

  /// Asks for row i, which is read some rows later.
  void ask_row(int64_t head, int64_t i) const {
    const auto ask = [](const char* data, int64_t bytes) {
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(data + at);
    };
    ask(key_of(i), p_.key_dim * dtype_size(tail_.k.dtype));
    ask(gates_of(head, i), has_head_gate(p_) ? 1 : p_.key_dim * dtype_size(tail_.g.dtype));
    ask(v_new_of(head, i), p_.value_dim * dtype_size(DType::kFloat32));
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

  void read_state(int64_t count, int64_t head) {
    const StateRef in = state(at().source, head);
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
    const int V = static_cast<int>(p_.value_dim), padded = static_cast<int>(columns());
    kernels_.load_row(at_bytes(t_.v, p_.v, row_offset(p_, p_.v, token + i, head)), p_.v.dtype, V,
                      padded, s_.v);
    TailSolve solve;
    solve.N = s_.N + i * tail_.rows;
    solve.A = s_.A + i * tail_.rows;
    solve.diagonal = s_.diagonal[i];
    solve.beta = s_.beta[i];
    solve.before = s_.before + i * tail_.rows;
    solve.num_before = s_.num_before[i];
    solve.row = static_cast<int>(sure + i);
    solve.columns = padded;
    solve.v = s_.v;
    solve.x = s_.x + i * padded;
    solve.y = s_.y + i * padded;
    solve.v_new = s_.v_new;
    tail_kernels_.solve(solve);
    store_output(token + i, head, solve.y);
    kernels_.store_row(s_.v_new + (sure + i) * padded, DType::kFloat32, V,
                       row(tail_.v_new, t_.tail.v_new, head, at().position + i));
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
