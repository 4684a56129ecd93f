// SPDX-License-Identifier: Apache-2.0
// backward(): tasks over (run of sequences, q/k head); a task takes the value heads of its group in
// order, so that dq and dk are sums in a fixed order.
//
// A sequence goes from its last window to its first. Of a window, the states are made forward from
// the one at its start: the errors E of all tokens and the state every 64 tokens are kept in the
// thread's scratch. Then, from right to left, the states of 64 tokens are made once more from E, in
// the cache, and used up by their chunks.
#include <algorithm>
#include <cstring>

#include "core/convert.hpp"
#include "core/text.hpp"
#include "core/thread_pool.hpp"
#include "cpu/blocked/backward_kernels.hpp"
#include "cpu/blocked/blocked.hpp"
#include "cpu/blocked/pass.hpp"
#include "cpu/float_mode.hpp"

namespace kda::cpu::blocked {
namespace {

constexpr int64_t kSpanChunks = 4;  ///< chunks whose states and factors are in the cache together
constexpr int64_t kSpanTokens = kSpanChunks * kBackwardChunk;
/// Tokens of a window where the forward has kept no states.
constexpr int64_t kWindowTokens = 4096;
/// Sums for dA_log and ddt_bias are kept for so many runs of sequences at most.
constexpr int64_t kMaxRuns = 1024;

static_assert(kMaxRows == kMaxHeadDim);
static_assert(kKeptStateMultiple % kSpanTokens == 0 && kWindowTokens % kSpanTokens == 0);

constexpr std::size_t align_up(std::size_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}
std::size_t floats(int64_t count) { return align_up(static_cast<std::size_t>(count) * 4); }

/// Sizes that follow from a problem.
struct Sizes {
  int64_t padded;         ///< rows of K
  int64_t blocks;         ///< of value columns
  int64_t state;          ///< floats of a state: blocks of [padded, kBlockV]
  int64_t group;          ///< value heads of a q/k head
  int64_t window;         ///< tokens
  int64_t inner_windows;  ///< starts of windows to be made; 0 where the forward has kept them
  int64_t runs;           ///< of sequences

  Sizes(const Problem& p, int64_t kept_every)
      : padded((p.key_dim + kRowsPadded - 1) / kRowsPadded * kRowsPadded),
        blocks(num_blocks(p.value_dim)),
        state(blocks * padded * kBlockV),
        group(p.num_value_heads / p.num_heads),
        window(kept_every > 0 ? kept_every : kWindowTokens),
        inner_windows(0),
        runs(std::min(p.num_sequences, kMaxRuns)) {
    const int64_t longest = std::max<int64_t>(p.num_tokens, 1);
    window = std::min(window, (longest + kSpanTokens - 1) / kSpanTokens * kSpanTokens);
    if (kept_every == 0) inner_windows = (longest - 1) / window;
  }

  std::size_t sums_bytes(const Problem& p) const {
    return align_up(static_cast<std::size_t>(runs * p.num_value_heads * (p.key_dim + 1)) *
                    sizeof(double));
  }
};

/// Memory of one thread, carved from the call's scratch.
struct Scratch {
  BackwardChunk* chunks;  ///< [kSpanChunks]
  BackwardSums* sums;
  BackwardRows* rows;
  float* tile;         ///< [16, kBlockV] v, later d_o
  float* dv;           ///< [16, kBlockV]
  float* row;          ///< [kRowStride]
  float* ddt_bias;     ///< [kRowStride] of a chunk
  float* dA_log;       ///< [kRowStride] of a chunk, by channel
  float* states;       ///< [kSpanChunks + 1] states
  float* d_states;     ///< [group]
  float* span_states;  ///< [window / kSpanTokens]
  float* starts;       ///< [group, inner_windows]
  float* errors;       ///< [window / 16, blocks, 16, kBlockV]
  float* dq;           ///< [window, padded] of the heads of the group so far; null for one head
  float* dk;

  /// Takes everything from `at` on; returns the bytes taken.
  std::size_t carve(const Sizes& s, char* at) {
    std::size_t taken = 0;
    const auto take = [&](std::size_t bytes) {
      char* place = at ? at + taken : nullptr;
      taken += align_up(bytes);
      return place;
    };
    const auto take_floats = [&](int64_t count) {
      return reinterpret_cast<float*>(take(floats(count)));
    };
    chunks = reinterpret_cast<BackwardChunk*>(take(kSpanChunks * sizeof(BackwardChunk)));
    sums = reinterpret_cast<BackwardSums*>(take(sizeof(BackwardSums)));
    rows = reinterpret_cast<BackwardRows*>(take(sizeof(BackwardRows)));
    tile = take_floats(kBackwardChunk * kBlockV);
    dv = take_floats(kBackwardChunk * kBlockV);
    row = take_floats(kRowStride);
    ddt_bias = take_floats(kRowStride);
    dA_log = take_floats(kRowStride);
    states = take_floats((kSpanChunks + 1) * s.state);
    d_states = take_floats(s.group * s.state);
    span_states = take_floats(s.window / kSpanTokens * s.state);
    starts = take_floats(s.group * s.inner_windows * s.state);
    errors = take_floats(s.window * s.blocks * kBlockV);
    const int64_t group_rows = s.group > 1 ? s.window * s.padded : 0;
    dq = take_floats(group_rows);
    dk = take_floats(group_rows);
    return taken;
  }
};

std::size_t per_thread_bytes(const Sizes& sizes) { return Scratch().carve(sizes, nullptr); }

StateDesc state_desc(const TensorDesc& tensor, int64_t count) { return {tensor, count, false}; }

/// One (sequence, q/k head).
class GroupBackward {
 public:
  GroupBackward(const Kernels& kernels, const stage::Backward& args, const Sizes& sizes,
                const Scratch& scratch, int64_t n, int64_t q_head, double* parameter_sums)
      : kernels_(kernels),
        inner_(*kernels.backward),
        args_(args),
        p_(args.call.problem),
        sizes_(sizes),
        scratch_(scratch),
        n_(n),
        first_head_(q_head * sizes.group),
        begin_(args.call.sequences.begin(n)),
        length_(args.call.sequences.length(n)),
        parameter_sums_(parameter_sums) {}

  void run() {
    for (int64_t j = 0; j < sizes_.group; ++j) load_state(d_final_ref(j), d_state(j));
    const int64_t windows = (length_ + sizes_.window - 1) / sizes_.window;
    if (!args_.kept_states && windows > 1)
      for (int64_t j = 0; j < sizes_.group; ++j) make_starts(j, windows);
    for (int64_t w = windows - 1; w >= 0; --w)
      for (int64_t j = 0; j < sizes_.group; ++j) run_window(w, j);
    for (int64_t j = 0; j < sizes_.group; ++j) store_d_initial_state(j);
  }

 private:
  float* d_state(int64_t j) const { return scratch_.d_states + j * sizes_.state; }
  float* state(int64_t c) const { return scratch_.states + c * sizes_.state; }
  float* start(int64_t j, int64_t w) const {  // of window w >= 1
    return scratch_.starts + (j * sizes_.inner_windows + w - 1) * sizes_.state;
  }
  /// E of one chunk, counted from the window's start.
  float* errors(int64_t chunk) const {
    return scratch_.errors + chunk * sizes_.blocks * kBackwardChunk * kBlockV;
  }
  std::size_t state_bytes() const { return static_cast<std::size_t>(sizes_.state) * sizeof(float); }
  int64_t block_floats() const { return sizes_.padded * kBlockV; }
  int width(int64_t block) const {
    return static_cast<int>(std::min<int64_t>(kBlockV, p_.value_dim - block * kBlockV));
  }

  StateRef d_final_ref(int64_t j) const {
    const auto& desc = args_.gradients.d_final_state;
    if (!desc) return {};
    return state_ref(p_, state_desc(*desc, p_.num_sequences),
                     const_cast<void*>(args_.tensors.d_final_state), n_, first_head_ + j);
  }

  void load_state(const StateRef& ref, float* to) const {
    std::memset(to, 0, state_bytes());
    if (!ref.data) return;
    for (int64_t b = 0; b < sizes_.blocks; ++b)
      load_block(kernels_, p_, ref, b * kBlockV, p_.value_dim, scratch_.row,
                 to + b * block_floats());
  }

  /// A sequence that starts from no state has no gradient of one.
  void store_d_initial_state(int64_t j) const {
    const auto& desc = args_.gradients.d_initial_state;
    if (!desc) return;
    if (!initial_ref(args_.call, n_, first_head_ + j).data)
      std::memset(d_state(j), 0, state_bytes());
    const StateRef ref = state_ref(p_, state_desc(*desc, p_.num_sequences),
                                   args_.tensors.d_initial_state, n_, first_head_ + j);
    for (int64_t b = 0; b < sizes_.blocks; ++b)
      store_block(kernels_, p_, d_state(j) + b * block_floats(), b * kBlockV, p_.value_dim,
                  scratch_.row, ref);
  }

  PrepareArgs inputs(int64_t token, int64_t j) const {
    PrepareArgs args = prepare_args(args_.call, begin_ + token, first_head_ + j);
    args.num_tokens = static_cast<int>(std::min<int64_t>(kBackwardChunk, length_ - token));
    return args;
  }

  /// Rows of one block of columns of a [B, T, HV, V] tensor; zero rows past `count`, all zero
  /// without `base`.
  void load_tile(const TensorDesc* desc, const void* base, int64_t token, int count, int64_t j,
                 int64_t block) const {
    std::memset(scratch_.tile, 0, sizeof(float) * kBackwardChunk * kBlockV);
    if (!desc) return;
    const RowSource rows = row_source(p_, *desc, base, begin_ + token, first_head_ + j);
    const char* first = rows.data + block * kBlockV * dtype_size(rows.dtype);
    for (int i = 0; i < count; ++i)
      kernels_.load_row(first + i * rows.token_stride_bytes, rows.dtype, width(block), kBlockV,
                        scratch_.tile + i * kBlockV);
  }

  /// Moves `to` forward over the chunk at `token`, whose errors go to `errors`.
  void advance(int64_t token, int64_t j, float* to, float* errors) const {
    const PrepareArgs args = inputs(token, j);
    BackwardChunk& chunk = scratch_.chunks[0];
    inner_.prepare(args, /*keys_only=*/true, chunk);
    for (int64_t b = 0; b < sizes_.blocks; ++b) {
      load_tile(&p_.v, args_.call.tensors.v, token, args.num_tokens, j, b);
      inner_.advance(chunk, scratch_.tile, to + b * block_floats(),
                     errors + b * kBackwardChunk * kBlockV);
    }
  }

  /// The states at the starts of windows 1 .. windows - 1.
  void make_starts(int64_t j, int64_t windows) const {
    float* running = state(0);
    load_state(initial_ref(args_.call, n_, first_head_ + j), running);
    for (int64_t token = 0; token < (windows - 1) * sizes_.window; token += kBackwardChunk) {
      advance(token, j, running, errors(0));
      const int64_t done = token + kBackwardChunk;
      if (done % sizes_.window == 0)
        std::memcpy(start(j, done / sizes_.window), running, state_bytes());
    }
  }

  /// Index of the sequence's first kept state.
  int64_t first_kept() const {
    int64_t index = 0;
    for (int64_t i = 0; i < n_; ++i) index += args_.call.sequences.length(i) / args_.kept_every;
    return index;
  }

  void load_start(int64_t w, int64_t j, float* to) const {
    const int64_t head = first_head_ + j;
    if (w == 0)
      load_state(initial_ref(args_.call, n_, head), to);
    else if (args_.kept_states)
      load_state(
          dense_ref(p_, args_.kept_states, first_kept() + w * sizes_.window / args_.kept_every - 1,
                    head, p_.value_dim),
          to);
    else
      std::memcpy(to, start(j, w), state_bytes());
  }

  void run_window(int64_t w, int64_t j) {
    const int64_t begin = w * sizes_.window;
    const int64_t end = std::min(begin + sizes_.window, length_);
    float* running = state(0);
    load_start(w, j, running);
    for (int64_t token = begin; token < end; token += kBackwardChunk) {
      const int64_t since = token - begin;
      if (since % kSpanTokens == 0)
        std::memcpy(scratch_.span_states + since / kSpanTokens * sizes_.state, running,
                    state_bytes());
      advance(token, j, running, errors(since / kBackwardChunk));
    }
    for (int64_t span = (end - begin - 1) / kSpanTokens; span >= 0; --span)
      run_span(begin, span, end, j);
  }

  /// 64 tokens of a window, whose states are made once more first.
  void run_span(int64_t begin, int64_t span, int64_t end, int64_t j) {
    const int64_t first = begin + span * kSpanTokens;
    const int64_t count =
        (std::min(first + kSpanTokens, end) - first + kBackwardChunk - 1) / kBackwardChunk;
    std::memcpy(state(0), scratch_.span_states + span * sizes_.state, state_bytes());
    for (int64_t c = 0; c < count; ++c) {
      inner_.prepare(inputs(first + c * kBackwardChunk, j), /*keys_only=*/false,
                     scratch_.chunks[c]);
      const float* from = errors(span * kSpanChunks + c);
      for (int64_t b = 0; b < sizes_.blocks && c + 1 < count; ++b)
        inner_.rebuild(scratch_.chunks[c], from + b * kBackwardChunk * kBlockV,
                       state(c) + b * block_floats(), state(c + 1) + b * block_floats());
    }
    for (int64_t c = count - 1; c >= 0; --c)
      run_chunk(first + c * kBackwardChunk, first + c * kBackwardChunk - begin, scratch_.chunks[c],
                state(c), errors(span * kSpanChunks + c), j);
  }

  /// `since`: the token counted from the window's start.
  void run_chunk(int64_t token, int64_t since, const BackwardChunk& chunk, const float* before,
                 const float* chunk_errors, int64_t j) {
    std::memset(scratch_.sums, 0, sizeof(BackwardSums));
    for (int64_t b = 0; b < sizes_.blocks; ++b) {
      load_tile(args_.gradients.d_o ? &*args_.gradients.d_o : nullptr, args_.tensors.d_o, token,
                chunk.num_tokens, j, b);
      inner_.reverse(chunk,
                     {before + b * block_floats(), d_state(j) + b * block_floats(),
                      chunk_errors + b * kBackwardChunk * kBlockV, scratch_.tile, scratch_.dv},
                     *scratch_.sums);
      store_dv(token, chunk.num_tokens, j, b);
    }
    inner_.gradients(chunk, *scratch_.sums, *scratch_.rows);
    finish_gates(token, chunk, j);
    finish_steps(token, chunk, j);
    finish_qk(token, since, chunk, j);
  }

  void store_dv(int64_t token, int count, int64_t j, int64_t block) const {
    const auto& desc = args_.gradients.dv;
    for (int i = 0; desc && i < count; ++i)
      kernels_.store_row(
          scratch_.dv + i * kBlockV, desc->dtype, width(block),
          at_bytes(args_.tensors.dv, *desc,
                   row_offset(p_, *desc, begin_ + token + i, first_head_ + j) + block * kBlockV));
  }

  /// Row i of a gradient of K channels.
  void store_row(const std::optional<TensorDesc>& desc, void* base, int64_t token, int64_t head,
                 const float* row) const {
    if (!desc) return;
    kernels_.store_row(row, desc->dtype, static_cast<int>(p_.key_dim),
                       at_bytes(base, *desc, row_offset(p_, *desc, begin_ + token, head)));
  }

  void finish_gates(int64_t token, const BackwardChunk& chunk, int64_t j) {
    const PrepareArgs args = inputs(token, j);
    std::memset(scratch_.ddt_bias, 0, kRowStride * sizeof(float));
    std::memset(scratch_.dA_log, 0, kRowStride * sizeof(float));
    for (int i = 0; i < chunk.num_tokens; ++i) {
      inner_.undo_gate(args, i, scratch_.rows->dg[i], scratch_.ddt_bias, scratch_.dA_log);
      store_row(args_.gradients.dg, args_.tensors.dg, token + i, first_head_ + j,
                scratch_.rows->dg[i]);
    }
    if (p_.gate_mode == GateMode::kLog) return;
    double* sums = parameter_sums_ + (first_head_ + j) * (p_.key_dim + 1);
    for (int64_t d = 0; d < p_.key_dim; ++d) {
      sums[d] += scratch_.ddt_bias[d];
      sums[p_.key_dim] += scratch_.dA_log[d];
    }
  }

  void finish_steps(int64_t token, const BackwardChunk& chunk, int64_t j) const {
    const auto& desc = args_.gradients.dbeta;
    if (!desc) return;
    const PrepareArgs args = inputs(token, j);
    for (int i = 0; i < chunk.num_tokens; ++i)
      store_element(args_.tensors.dbeta, desc->dtype,
                    row_offset(p_, *desc, begin_ + token + i, first_head_ + j),
                    scratch_.sums->d_beta[i] * inner_.step_slope(args, i));
  }

  /// Adds the heads of the group up; the last one takes the sum through the norm.
  void finish_qk(int64_t token, int64_t since, const BackwardChunk& chunk, int64_t j) const {
    const int count = static_cast<int>(sizes_.padded);
    const PrepareArgs args = inputs(token, j);
    for (int i = 0; i < chunk.num_tokens; ++i) {
      float* dq = scratch_.rows->dq[i];
      float* dk = scratch_.rows->dk[i];
      if (sizes_.group > 1) {
        float* group_dq = scratch_.dq + (since + i) * sizes_.padded;
        float* group_dk = scratch_.dk + (since + i) * sizes_.padded;
        if (j > 0) {
          inner_.add_row(group_dq, count, dq);
          inner_.add_row(group_dk, count, dk);
        }
        if (j < sizes_.group - 1) {
          std::memcpy(group_dq, dq, sizeof(float) * static_cast<std::size_t>(count));
          std::memcpy(group_dk, dk, sizeof(float) * static_cast<std::size_t>(count));
          continue;
        }
      }
      if (p_.qk_l2norm) {
        const int key_dim = static_cast<int>(p_.key_dim);
        inner_.undo_norm(args.q, i, args.scale, key_dim, dq);
        inner_.undo_norm(args.k, i, 1, key_dim, dk);
      } else {
        inner_.scale_row(args.scale, count, dq);
      }
      const int64_t q_head = first_head_ / sizes_.group;
      store_row(args_.gradients.dq, args_.tensors.dq, token + i, q_head, dq);
      store_row(args_.gradients.dk, args_.tensors.dk, token + i, q_head, dk);
    }
  }

  const Kernels& kernels_;
  const BackwardKernels& inner_;
  const stage::Backward& args_;
  const Problem& p_;
  const Sizes& sizes_;
  const Scratch& scratch_;
  int64_t n_;
  int64_t first_head_;
  int64_t begin_;
  int64_t length_;
  double* parameter_sums_;  ///< [HV, K + 1]: ddt_bias, dA_log
};

/// dA_log and ddt_bias: the runs in order.
void store_parameters(const stage::Backward& args, const Sizes& sizes, const double* sums) {
  const Problem& p = args.call.problem;
  const int64_t count = p.key_dim + 1;
  const auto total = [&](int64_t head, int64_t channel) {
    double sum = 0;
    for (int64_t run = 0; run < sizes.runs; ++run)
      sum += sums[(run * p.num_value_heads + head) * count + channel];
    return static_cast<float>(sum);
  };
  for (int64_t head = 0; head < p.num_value_heads; ++head) {
    if (const auto& desc = args.gradients.dA_log)
      args.tensors.dA_log[head * desc->strides[0]] = total(head, p.key_dim);
    if (const auto& desc = args.gradients.ddt_bias)
      for (int64_t d = 0; d < p.key_dim; ++d)
        args.tensors.ddt_bias[head * desc->strides[0] + d] = total(head, d);
  }
}

}  // namespace

std::size_t backward_scratch_bytes(const Problem& problem, int64_t kept_every,
                                   int32_t num_threads) {
  const Sizes sizes(problem, kept_every);
  return sizes.sums_bytes(problem) +
         per_thread_bytes(sizes) * static_cast<std::size_t>(num_threads);
}

Status backward(const Kernels& kernels, const stage::Backward& args) {
  const stage::Call& call = args.call;
  const Problem& p = call.problem;
  const Sizes sizes(p, args.kept_states ? args.kept_every : 0);
  auto* sums = static_cast<double*>(call.scratch);
  std::memset(sums, 0, sizes.sums_bytes(p));
  char* threads = static_cast<char*>(call.scratch) + sizes.sums_bytes(p);
  const std::size_t bytes = per_thread_bytes(sizes);

  auto task = [&](int64_t idx, int32_t slot) {
    const FloatMode mode;
    Scratch scratch;
    scratch.carve(sizes, threads + static_cast<std::size_t>(slot) * bytes);
    const int64_t run = idx / p.num_heads;
    const int64_t last = (run + 1) * p.num_sequences / sizes.runs;
    for (int64_t n = run * p.num_sequences / sizes.runs; n < last; ++n)
      GroupBackward(kernels, args, sizes, scratch, n, idx % p.num_heads,
                    sums + run * p.num_value_heads * (p.key_dim + 1))
          .run();
  };
  KDA_RETURN_IF_ERROR(parallel_tasks(sizes.runs * p.num_heads, call.num_threads, task));
  store_parameters(args, sizes, sums);
  return {};
}

}  // namespace kda::cpu::blocked
