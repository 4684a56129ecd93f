// SPDX-License-Identifier: Apache-2.0
// Maps of spans, and their fold, on the CPU (equations: kda/span.hpp).
#include <algorithm>
#include <cstring>
#include <vector>

#include "core/thread_pool.hpp"
#include "cpu/blocked/blocked.hpp"
#include "cpu/blocked/pass.hpp"
#include "cpu/float_mode.hpp"

namespace kda::cpu::blocked {
namespace {

/// Tokens whose qt are made before they meet d_o: a multiple of kGroupTokens.
constexpr int64_t kPieceTokens = 64;

/// Rows of a transposed matrix, padded as Group's are: equal columns would fall into one set.
constexpr int64_t padded_rows(int64_t rows) { return rows + 16; }

struct AdjointScratch {
  float* Qt;       ///< [kPieceTokens, K]
  float* columns;  ///< its transpose, [K, padded_rows(kPieceTokens)]
  float* d_o;      ///< [kPieceTokens, kBlockV]
  float* D;        ///< [blocks of V, K, kBlockV]

  static int64_t floats(const Problem& p) {
    return (kPieceTokens + padded_rows(kPieceTokens)) * p.key_dim + kPieceTokens * kBlockV +
           num_blocks(p.value_dim) * p.key_dim * kBlockV;
  }
  AdjointScratch(const Problem& p, float* memory)
      : Qt(memory),
        columns(Qt + kPieceTokens * p.key_dim),
        d_o(columns + padded_rows(kPieceTokens) * p.key_dim),
        D(d_o + kPieceTokens * kBlockV) {}
};

void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to,
               int64_t to_stride) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
}

Pass map_pass(int64_t begin, int64_t end, int64_t head, int64_t columns) {
  Pass pass;
  pass.begin = begin;
  pass.end = end;
  pass.head = head;
  pass.num_columns = pass.last_column = columns;
  return pass;
}

void offset_of(const Kernels& kernels, const stage::SpanMapsCall& args, int64_t n, int64_t head,
               const ThreadScratch& scratch) {
  const stage::Call& call = args.call;
  const Problem& p = call.problem;
  const int64_t begin = call.sequences.begin(n);
  Pass pass = map_pass(begin, call.sequences.end(n), head, p.value_dim);
  pass.state_in = initial_ref(call, n, head);
  pass.state_out = dense_ref(p, args.maps.B, n, head, p.value_dim);
  if (pass.begin < pass.end) pass.v = row_source(p, p.v, call.tensors.v, begin, head);
  run_pass(kernels, call, pass, scratch);
}

void transition_of(const Kernels& kernels, const stage::SpanMapsCall& args, int64_t n, int64_t head,
                   const ThreadScratch& scratch) {
  const stage::Call& call = args.call;
  const Problem& p = call.problem;
  Pass pass = map_pass(call.sequences.begin(n), call.sequences.end(n), head, p.key_dim);
  pass.identity_start = true;
  pass.state_out = dense_ref(p, args.maps.M, n, head, p.key_dim);
  run_pass(kernels, call, pass, scratch);
}

/// D += Qt^T d_o of tokens [begin, end), at most kPieceTokens.
void add_piece(const Kernels& kernels, const stage::SpanMapsCall& args, int64_t begin, int64_t end,
               int64_t head, const AdjointScratch& adjoint) {
  const Problem& p = args.call.problem;
  const int64_t row = p.num_value_heads * p.value_dim;
  const int64_t size = dtype_size(args.maps.d_o_dtype);
  const auto* d_o = static_cast<const char*>(args.maps.d_o);
  const int64_t count = end - begin;
  transpose(adjoint.Qt, p.key_dim, count, p.key_dim, adjoint.columns, padded_rows(kPieceTokens));
  for (int64_t column = 0; column < p.value_dim; column += kBlockV) {
    const int width = static_cast<int>(std::min<int64_t>(kBlockV, p.value_dim - column));
    for (int64_t i = 0; i < count; ++i)
      kernels.load_row(d_o + ((begin + i) * row + head * p.value_dim + column) * size,
                       args.maps.d_o_dtype, width, kBlockV, adjoint.d_o + i * kBlockV);
    kernels.matmul_block(adjoint.columns, padded_rows(kPieceTokens), static_cast<int>(p.key_dim),
                         static_cast<int>(count), adjoint.d_o, adjoint.D + column * p.key_dim);
  }
}

/// M and D of one span and head. M is carried through its place in memory from piece to piece.
void adjoint_of(const Kernels& kernels, const stage::SpanMapsCall& args, int64_t n, int64_t head,
                const ThreadScratch& scratch, const AdjointScratch& adjoint) {
  const stage::Call& call = args.call;
  const Problem& p = call.problem;
  const StateRef M = dense_ref(p, args.maps.M, n, head, p.key_dim);
  const int64_t first = call.sequences.begin(n), last = call.sequences.end(n);
  const int64_t blocks = num_blocks(p.value_dim);
  std::memset(adjoint.D, 0, sizeof(float) * static_cast<std::size_t>(blocks * p.key_dim * kBlockV));
  int64_t token = first;
  do {
    Pass pass = map_pass(token, std::min(token + kPieceTokens, last), head, p.key_dim);
    pass.identity_start = token == first;
    if (!pass.identity_start) pass.state_in = M;
    pass.state_out = M;
    pass.out = {reinterpret_cast<char*>(adjoint.Qt),
                p.key_dim * static_cast<int64_t>(sizeof(float)), DType::kFloat32};
    run_pass(kernels, call, pass, scratch);
    add_piece(kernels, args, pass.begin, pass.end, head, adjoint);
    token = pass.end;
  } while (token < last);
  float* D = args.maps.D + (n * p.num_value_heads + head) * p.key_dim * p.value_dim;
  for (int64_t column = 0; column < p.value_dim; column += kBlockV) {
    const auto width = static_cast<std::size_t>(std::min<int64_t>(kBlockV, p.value_dim - column));
    for (int64_t d = 0; d < p.key_dim; ++d)
      std::memcpy(D + d * p.value_dim + column, adjoint.D + column * p.key_dim + d * kBlockV,
                  sizeof(float) * width);
  }
}

/// The columns [column, column + kBlockV) of a dense state, as a block; and back.
void read_block(const float* state, int64_t rows, int64_t columns, int64_t column, float* block) {
  const int64_t width = std::min<int64_t>(kBlockV, columns - column);
  std::memset(block, 0, sizeof(float) * static_cast<std::size_t>(rows * kBlockV));
  for (int64_t d = 0; d < rows; ++d)
    std::copy_n(state + d * columns + column, width, block + d * kBlockV);
}
void write_block(const float* block, int64_t rows, int64_t columns, int64_t column, float* state) {
  const int64_t width = std::min<int64_t>(kBlockV, columns - column);
  for (int64_t d = 0; d < rows; ++d)
    std::copy_n(block + d * kBlockV, width, state + d * columns + column);
}

/// Floats from M, and from A, to those of map `i`.
int64_t map_offset(const StateFold& fold, int64_t i) {
  if (fold.maps_per_row == 0) return i * fold.map_stride;
  return i / fold.maps_per_row * fold.row_stride + i % fold.maps_per_row * fold.map_stride;
}

/// All columns of one head: a map is read, and transposed, once.
void fold_head(const Kernels& kernels, const StateFold& fold, int64_t head, float* memory) {
  const int64_t K = fold.key_dim, V = fold.value_dim, heads = fold.num_value_heads;
  const int64_t blocks = num_blocks(V), block_floats = K * kBlockV;
  float* state = memory;
  float* next = state + blocks * block_floats;
  float* flipped = next + block_floats;
  for (const FoldStep& step : fold.steps) {
    const float* start =
        step.start >= 0 ? fold.starts + (step.start * heads + head) * K * V : nullptr;
    const int64_t offset = step.map >= 0 ? map_offset(fold, step.map) : 0;
    const float* M = step.map >= 0 ? fold.M + offset + head * K * K : nullptr;
    if (M && fold.transposed) {
      transpose(M, K, K, K, flipped, padded_rows(K));
      M = flipped;
    }
    for (int64_t b = 0; b < blocks; ++b) {
      float* block = state + b * block_floats;
      const int64_t column = b * kBlockV;
      if (start)
        read_block(start, K, V, column, block);
      else if (step.start == FoldStep::kZero)
        std::memset(block, 0, sizeof(float) * static_cast<std::size_t>(block_floats));
      if (M) {
        read_block(fold.A + offset + head * K * V, K, V, column, next);
        kernels.matmul_block(M, fold.transposed ? padded_rows(K) : K, static_cast<int>(K),
                             static_cast<int>(K), block, next);
        std::copy_n(next, block_floats, block);
      }
      if (step.store >= 0)
        write_block(block, K, V, column, fold.states + (step.store * heads + head) * K * V);
    }
  }
}

}  // namespace

Status span_maps(const Kernels& kernels, const stage::SpanMapsCall& args) {
  const Problem& p = args.call.problem;
  const int64_t heads = p.num_value_heads;
  const auto floats = static_cast<std::size_t>(args.maps.D ? AdjointScratch::floats(p) : 0);
  std::vector<float> memory(floats * static_cast<std::size_t>(args.call.num_threads));
  auto task = [&](int64_t idx, int32_t slot) {
    const FloatMode mode;
    const int64_t n = idx / 2 / heads, head = idx / 2 % heads;
    const ThreadScratch scratch = thread_scratch(args.call, slot);
    if (idx % 2 == 0) {
      if (args.maps.B) offset_of(kernels, args, n, head, scratch);
    } else if (args.maps.D) {
      const AdjointScratch adjoint(p, memory.data() + static_cast<std::size_t>(slot) * floats);
      adjoint_of(kernels, args, n, head, scratch, adjoint);
    } else if (args.maps.M) {
      transition_of(kernels, args, n, head, scratch);
    }
  };
  return parallel_tasks(args.call.sequences.count() * heads * 2, args.call.num_threads, task);
}

Status fold_states(const Kernels& kernels, const StateFold& fold) {
  const int32_t threads = fold.num_threads > 0 ? fold.num_threads : default_num_threads();
  const int64_t K = fold.key_dim;
  const auto floats = static_cast<std::size_t>((num_blocks(fold.value_dim) + 1) * K * kBlockV +
                                               (fold.transposed ? K * padded_rows(K) : 0));
  std::vector<float> memory(floats * static_cast<std::size_t>(threads));
  auto task = [&](int64_t head, int32_t slot) {
    const FloatMode mode;
    fold_head(kernels, fold, head, memory.data() + static_cast<std::size_t>(slot) * floats);
  };
  return parallel_tasks(fold.num_value_heads, threads, task);
}

}  // namespace kda::cpu::blocked
