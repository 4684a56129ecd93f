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
#include "cpu/blocked/backward_scratch.hpp"
#include "cpu/blocked/blocked.hpp"
#include "cpu/blocked/pass.hpp"
#include "cpu/blocked/work.hpp"
#include "cpu/float_mode.hpp"

namespace kda::cpu::blocked {
namespace {

StateDesc state_desc(const TensorDesc& tensor, int64_t count) { return {tensor, count, false}; }

/// One output at the first token of a sequence; null: not wanted.
RowSink row_sink(const Problem& p, const std::optional<TensorDesc>& desc, void* base, int64_t token,
                 int64_t head) {
  if (!desc) return {};
  return {at_bytes(base, *desc, row_offset(p, *desc, token, head)),
          desc->strides[1] * dtype_size(desc->dtype), desc->dtype};
}

/// The tensors of one value head, at the first token of a sequence.
struct HeadRows {
  PrepareArgs inputs;
  RowSource v, d_o;
  RowSink dq, dk, dv, dg, dbeta;

  HeadRows(const stage::Backward& args, int64_t token, int64_t head)
      : inputs(prepare_args(args.call, token, head)) {
    const Problem& p = args.call.problem;
    const Gradients& g = args.gradients;
    const int64_t q_head = q_head_of(p, head);
    v = row_source(p, p.v, args.call.tensors.v, token, head);
    if (g.d_o) d_o = row_source(p, *g.d_o, args.tensors.d_o, token, head);
    dq = row_sink(p, g.dq, args.tensors.dq, token, q_head);
    dk = row_sink(p, g.dk, args.tensors.dk, token, q_head);
    dv = row_sink(p, g.dv, args.tensors.dv, token, head);
    dg = row_sink(p, g.dg, args.tensors.dg, token, head);
    dbeta = row_sink(p, g.dbeta, args.tensors.dbeta, token, head);
  }
};

template <class Rows>
Rows from_token(Rows rows, int64_t token) {
  rows.data += token * rows.token_stride_bytes;
  return rows;
}

/// One (sequence, q/k head).
class GroupBackward {
 public:
  GroupBackward(const Kernels& kernels, const stage::Backward& args, const BackwardSizes& sizes,
                const BackwardScratch& scratch, int64_t n, int64_t q_head, double* parameter_sums)
      : kernels_(kernels),
        inner_(*kernels.backward),
        args_(args),
        p_(args.call.problem),
        sizes_(sizes),
        scratch_(scratch),
        n_(n),
        q_head_(q_head),
        begin_(args.call.sequences.begin(n)),
        length_(args.call.sequences.length(n)),
        value_dim_(static_cast<int>(p_.value_dim)),
        parameter_sums_(parameter_sums) {}

  void run() {
    for (int64_t j = 0; j < sizes_.group; ++j) load_state(d_final_ref(j), d_state(j));
    const int64_t windows = (length_ + sizes_.window - 1) / sizes_.window;
    if (args_.kept_every == 0 && windows > 1)
      for (int64_t j = 0; j < sizes_.group; ++j) make_starts(j, windows);
    for (int64_t w = windows - 1; w >= 0; --w)
      for (int64_t j = 0; j < sizes_.group; ++j) run_window(w, j);
    for (int64_t j = 0; j < sizes_.group; ++j) store_d_initial_state(j);
  }

 private:
  int64_t head_of(int64_t j) const { return value_head_of(p_, q_head_, j); }
  float* d_state(int64_t j) const { return scratch_.d_states + j * sizes_.state; }
  float* state(int64_t c) const { return scratch_.states + c * sizes_.state; }
  float* start(int64_t j, int64_t w) const {  // of window w >= 1
    return scratch_.starts + (j * sizes_.inner_windows + w - 1) * sizes_.state;
  }
  /// E of one chunk, counted from the window's start.
  float* errors(int64_t chunk) const {
    return scratch_.errors + chunk * sizes_.blocks * kTileFloats;
  }
  std::size_t state_bytes() const { return static_cast<std::size_t>(sizes_.state) * sizeof(float); }
  int64_t block_floats() const { return sizes_.padded * kBlockV; }

  StateRef d_final_ref(int64_t j) const {
    const auto& desc = args_.gradients.d_final_state;
    if (!desc) return {};
    return state_ref(p_, state_desc(*desc, p_.num_sequences),
                     const_cast<void*>(args_.tensors.d_final_state), n_, head_of(j));
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
    if (!initial_ref(args_.call, n_, head_of(j)).data) std::memset(d_state(j), 0, state_bytes());
    const StateRef ref = state_ref(p_, state_desc(*desc, p_.num_sequences),
                                   args_.tensors.d_initial_state, n_, head_of(j));
    for (int64_t b = 0; b < sizes_.blocks; ++b)
      store_block(kernels_, p_, d_state(j) + b * block_floats(), b * kBlockV, p_.value_dim,
                  scratch_.row, ref);
  }

  PrepareArgs inputs(const HeadRows& head, int64_t token) const {
    PrepareArgs args = head.inputs;
    args.q = from_token(args.q, token);
    args.k = from_token(args.k, token);
    args.g = from_token(args.g, token);
    args.beta = from_token(args.beta, token);
    args.num_tokens = tokens_at(token);
    return args;
  }
  int tokens_at(int64_t token) const {
    return static_cast<int>(std::min<int64_t>(kBackwardChunk, length_ - token));
  }

  /// Adds the cache lines of a chunk's rows, if there is one at `token`.
  template <class Rows>
  void add_lines(const Rows& rows, int64_t token, int64_t columns, LineList& lines) const {
    if (!rows.data || token < 0 || token >= length_) return;
    lines.add(from_token(rows, token).data, rows.token_stride_bytes, tokens_at(token),
              columns * dtype_size(rows.dtype));
  }

  int a_block(const LineQueue& lines) const {
    return static_cast<int>((lines.end - lines.next) / sizes_.blocks + 1);
  }

  /// Moves `to` forward over the chunk at `token`, whose errors go to `errors`.
  void advance(const HeadRows& head, int64_t token, float* to, float* errors) const {
    BackwardChunk& chunk = scratch_.chunks[0];
    inner_.prepare(inputs(head, token), /*keys_only=*/true, chunk);
    inner_.load_tiles(from_token(head.v, token), chunk.num_tokens, value_dim_, scratch_.tiles);
    LineList list(scratch_.lines);
    add_lines(head.inputs.k, token + kBackwardChunk, p_.key_dim, list);
    add_lines(head.inputs.g, token + kBackwardChunk, gate_columns(p_), list);
    add_lines(head.v, token + kBackwardChunk, p_.value_dim, list);
    LineQueue lines = list.queue();
    const int lines_a_block = a_block(lines);
    for (int64_t b = 0; b < sizes_.blocks; ++b)
      inner_.advance(chunk, scratch_.tiles + b * kTileFloats, to + b * block_floats(),
                     errors + b * kTileFloats, lines_a_block, lines);
  }

  /// The states at the starts of windows 1 .. windows - 1.
  void make_starts(int64_t j, int64_t windows) const {
    const HeadRows head(args_, begin_, head_of(j));
    float* running = state(0);
    load_state(initial_ref(args_.call, n_, head_of(j)), running);
    for (int64_t token = 0; token < (windows - 1) * sizes_.window; token += kBackwardChunk) {
      advance(head, token, running, errors(0));
      const int64_t done = token + kBackwardChunk;
      if (done % sizes_.window == 0)
        std::memcpy(start(j, done / sizes_.window), running, state_bytes());
    }
  }

  void load_start(int64_t w, int64_t j, float* to) const {
    const int64_t head = head_of(j);
    if (w == 0)
      load_state(initial_ref(args_.call, n_, head), to);
    else if (args_.kept_every > 0)
      load_state(dense_ref(p_, args_.kept_every_states,
                           args_.call.sequences.states_before(n_, args_.kept_every) + w - 1, head,
                           p_.value_dim),
                 to);
    else
      std::memcpy(to, start(j, w), state_bytes());
  }

  void run_window(int64_t w, int64_t j) {
    const HeadRows head(args_, begin_, head_of(j));
    const int64_t begin = w * sizes_.window;
    const int64_t end = std::min(begin + sizes_.window, length_);
    float* running = state(0);
    load_start(w, j, running);
    for (int64_t token = begin; token < end; token += kBackwardChunk) {
      const int64_t since = token - begin;
      if (since % kSpanTokens == 0)
        std::memcpy(scratch_.span_states + since / kSpanTokens * sizes_.state, running,
                    state_bytes());
      advance(head, token, running, errors(since / kBackwardChunk));
    }
    for (int64_t span = (end - begin - 1) / kSpanTokens; span >= 0; --span)
      run_span(head, begin, span, end, j);
  }

  /// 64 tokens of a window, whose states are made once more first.
  void run_span(const HeadRows& head, int64_t begin, int64_t span, int64_t end, int64_t j) {
    const int64_t first = begin + span * kSpanTokens;
    const int64_t count =
        (std::min(first + kSpanTokens, end) - first + kBackwardChunk - 1) / kBackwardChunk;
    const auto before = [&](int64_t c) {
      return c == 0 ? scratch_.span_states + span * sizes_.state : state(c);
    };
    for (int64_t c = 0; c < count; ++c) {
      inner_.prepare(inputs(head, first + c * kBackwardChunk), /*keys_only=*/false,
                     scratch_.chunks[c]);
      const float* from = errors(span * kSpanChunks + c);
      for (int64_t b = 0; b < sizes_.blocks && c + 1 < count; ++b)
        inner_.rebuild(scratch_.chunks[c], from + b * kTileFloats, before(c) + b * block_floats(),
                       state(c + 1) + b * block_floats());
    }
    for (int64_t c = count - 1; c >= 0; --c)
      run_chunk(head, first + c * kBackwardChunk, first + c * kBackwardChunk - begin,
                scratch_.chunks[c], before(c), errors(span * kSpanChunks + c), j);
  }

  /// The outputs of the chunk at `token`, d_o of the one before it and the other inputs of that one
  /// span before it.
  LineQueue lines_around(const HeadRows& head, int64_t token) const {
    LineList lines(scratch_.lines);
    add_lines(head.dv, token, p_.value_dim, lines);
    add_lines(head.d_o, token - kBackwardChunk, p_.value_dim, lines);
    add_lines(head.dg, token, sums_gates() ? 1 : p_.key_dim, lines);
    for (const RowSink* rows : {&head.dq, &head.dk}) add_lines(*rows, token, p_.key_dim, lines);
    for (const RowSource* rows : {&head.inputs.q, &head.inputs.k})
      add_lines(*rows, token - kSpanTokens, p_.key_dim, lines);
    add_lines(head.inputs.g, token - kSpanTokens, gate_columns(p_), lines);
    return lines.queue();
  }

  /// `since`: the token counted from the window's start.
  void run_chunk(const HeadRows& head, int64_t token, int64_t since, const BackwardChunk& chunk,
                 const float* before, const float* chunk_errors, int64_t j) {
    const int count = chunk.num_tokens;
    const RowSource d_o = head.d_o.data ? from_token(head.d_o, token) : RowSource{};
    inner_.load_tiles(d_o, d_o.data ? count : 0, value_dim_, scratch_.tiles);
    inner_.clear(chunk, *scratch_.sums);
    LineQueue lines = lines_around(head, token);
    const int lines_a_block = a_block(lines);
    for (int64_t b = 0; b < sizes_.blocks; ++b)
      inner_.reverse(chunk,
                     {before + b * block_floats(), d_state(j) + b * block_floats(),
                      chunk_errors + b * kTileFloats, scratch_.tiles + b * kTileFloats,
                      scratch_.dv + b * kTileFloats, lines_a_block},
                     *scratch_.sums, lines);
    if (head.dv.data) {
      const RowSink dv = from_token(head.dv, token);
      inner_.store_tiles(scratch_.dv, count, value_dim_, dv.data, dv.token_stride_bytes, dv.dtype);
    }
    inner_.gradients(chunk, *scratch_.sums, *scratch_.rows);
    const PrepareArgs args = inputs(head, token);
    finish_gates(head, token, args, j);
    for (int i = 0; head.dbeta.data && i < count; ++i)
      store_element(from_token(head.dbeta, token + i).data, head.dbeta.dtype, 0,
                    scratch_.sums->d_beta[i] * inner_.step_slope(args, i));
    finish_qk(head, token, since, args, j);
  }

  /// Row of a gradient of K channels.
  void store_row(const RowSink& rows, int64_t token, const float* row) const {
    if (!rows.data) return;
    kernels_.store_row(row, rows.dtype, static_cast<int>(p_.key_dim), from_token(rows, token).data);
  }

  /// Whether dg is the sum over channels.
  bool sums_gates() const { return args_.gradients.dg && is_a_head(p_, *args_.gradients.dg); }

  void store_gate(const RowSink& rows, int64_t token, const float* row) const {
    if (!rows.data || !sums_gates()) return store_row(rows, token, row);
    double sum = 0;
    for (int64_t d = 0; d < p_.key_dim; ++d) sum += row[d];
    store_element(from_token(rows, token).data, rows.dtype, 0, static_cast<float>(sum));
  }

  void finish_gates(const HeadRows& head, int64_t token, const PrepareArgs& args, int64_t j) {
    std::memset(scratch_.ddt_bias, 0, kRowStride * sizeof(float));
    std::memset(scratch_.dA_log, 0, kRowStride * sizeof(float));
    for (int i = 0; i < args.num_tokens; ++i) {
      inner_.undo_gate(args, i, scratch_.rows->dg[i], scratch_.ddt_bias, scratch_.dA_log);
      store_gate(head.dg, token + i, scratch_.rows->dg[i]);
    }
    if (p_.gate_mode == GateMode::kLog) return;
    double* ddt_bias = parameter_sums_ + head_of(j) * 2 * p_.key_dim;
    double* dA_log = ddt_bias + p_.key_dim;
    for (int64_t d = 0; d < p_.key_dim; ++d) ddt_bias[d] += scratch_.ddt_bias[d];
    for (int64_t d = 0; d < p_.key_dim; ++d) dA_log[d] += scratch_.dA_log[d];
  }

  /// Adds the heads of the group up; the last one takes the sum through the norm.
  void finish_qk(const HeadRows& head, int64_t token, int64_t since, const PrepareArgs& args,
                 int64_t j) const {
    const int padded = static_cast<int>(sizes_.padded);
    const std::size_t bytes = sizeof(float) * static_cast<std::size_t>(padded);
    for (int i = 0; i < args.num_tokens; ++i) {
      float* dq = scratch_.rows->dq[i];
      float* dk = scratch_.rows->dk[i];
      float* group_dq = scratch_.dq + (since + i) * sizes_.padded;
      float* group_dk = scratch_.dk + (since + i) * sizes_.padded;
      if (j > 0) {
        inner_.add_row(group_dq, padded, dq);
        inner_.add_row(group_dk, padded, dk);
      }
      if (j < sizes_.group - 1) {
        std::memcpy(group_dq, dq, bytes);
        std::memcpy(group_dk, dk, bytes);
        continue;
      }
      if (p_.qk_l2norm) {
        inner_.undo_norm(args.q, i, args.scale, args.key_dim, dq);
        inner_.undo_norm(args.k, i, 1, args.key_dim, dk);
      } else {
        inner_.scale_row(args.scale, padded, dq);
      }
      store_row(head.dq, token + i, dq);
      store_row(head.dk, token + i, dk);
    }
  }

  const Kernels& kernels_;
  const BackwardKernels& inner_;
  const stage::Backward& args_;
  const Problem& p_;
  const BackwardSizes& sizes_;
  const BackwardScratch& scratch_;
  int64_t n_;
  int64_t q_head_;
  int64_t begin_;
  int64_t length_;
  int value_dim_;
  double* parameter_sums_;  ///< [HV, 2, K]: ddt_bias, and dA_log by channel
};

/// dA_log and ddt_bias: the runs in order.
void store_parameters(const stage::Backward& args, const BackwardSizes& sizes, const double* sums) {
  const Problem& p = args.call.problem;
  const auto total = [&](int64_t head, int64_t which, int64_t channel) {
    double sum = 0;
    for (int64_t run = 0; run < sizes.runs; ++run)
      sum += sums[((run * p.num_value_heads + head) * 2 + which) * p.key_dim + channel];
    return sum;
  };
  for (int64_t head = 0; head < p.num_value_heads; ++head) {
    const auto total_of_channels = [&](int64_t which) {
      double sum = 0;
      for (int64_t d = 0; d < p.key_dim; ++d) sum += total(head, which, d);
      return static_cast<float>(sum);
    };
    if (const auto& desc = args.gradients.ddt_bias) {
      float* to = static_cast<float*>(args.tensors.ddt_bias) + head * desc->strides[0];
      if (is_bias_a_head(p, *desc))
        *to = total_of_channels(0);
      else
        for (int64_t d = 0; d < p.key_dim; ++d) to[d] = static_cast<float>(total(head, 0, d));
    }
    if (const auto& desc = args.gradients.dA_log)
      static_cast<float*>(args.tensors.dA_log)[head * desc->strides[0]] = total_of_channels(1);
  }
}

}  // namespace

std::size_t backward_scratch_bytes(const Plan& plan, int64_t kept_every) {
  const BackwardSizes sizes(plan, kept_every);
  return sizes.sums_bytes(plan.problem) +
         per_thread_bytes(sizes) * static_cast<std::size_t>(plan.num_threads);
}

Status backward(const Kernels& kernels, const stage::Backward& args) {
  const stage::Call& call = args.call;
  const Problem& p = call.problem;
  const BackwardSizes sizes(*call.plan, args.kept_every);
  auto* sums = sizes.sums_bytes(p) == 0 ? nullptr : static_cast<double*>(call.scratch);
  if (sums) std::memset(sums, 0, sizes.sums_bytes(p));
  char* threads = static_cast<char*>(call.scratch) + sizes.sums_bytes(p);
  const std::size_t bytes = per_thread_bytes(sizes);

  auto task = [&](int64_t idx, int32_t slot) {
    const FloatMode mode;
    BackwardScratch scratch;
    scratch.carve(sizes, threads + static_cast<std::size_t>(slot) * bytes);
    const int64_t run = idx / p.num_heads;
    const int64_t last = (run + 1) * p.num_sequences / sizes.runs;
    for (int64_t n = run * p.num_sequences / sizes.runs; n < last; ++n)
      GroupBackward(kernels, args, sizes, scratch, n, idx % p.num_heads,
                    sums ? sums + run * p.num_value_heads * 2 * p.key_dim : nullptr)
          .run();
  };
  KDA_RETURN_IF_ERROR(parallel_tasks(sizes.runs * p.num_heads, call.num_threads, task,
                                     backward_microseconds(call)));
  store_parameters(args, sizes, sums);
  return {};
}

}  // namespace kda::cpu::blocked
