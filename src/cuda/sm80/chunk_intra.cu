// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/chunk_intra.hpp"

#include "cuda/host/launch.cuh"
#include "cuda/ptx/ptx.cuh"
#include "cuda/tile/chunk_map.cuh"
#include "cuda/tile/swizzle.cuh"
#include "cuda/tile/warp.cuh"

namespace kda::cuda {
namespace {

constexpr int kRun = 16;  // tokens of a thread
constexpr int kRuns = kChunk / kRun;
constexpr int kBlock = 16;                 // diagonal block of the inverse
constexpr int kScoreStride = kChunk + 4;   // of L and T', fp32
constexpr int kSquareStride = kChunk + 8;  // of Aqk and T', 16 bit

/// Operands of one dyadic level: decayed q and k rows, and the k columns that they meet.
template <class T, int kStride>
struct Level {
  T rows[64][kStride];
  T columns[32][kStride];
};

/// Shared memory of one chunk and head: three of them on an SM hide each other's barriers. Rows are
/// padded by 16 bytes against bank conflicts.
template <class T, int kK>
struct Shared {
  static constexpr int kStride = kK + 8;
  T q[kChunk][kStride];  // raw; later a tile of v
  T k[kChunk][kStride];  // raw; later Kgam
  union {
    Level<T, kStride> level;
    float decay[kChunk][kK];  // token form: of each token
    struct {
      union {
        float N[kChunk][kScoreStride];  // L = N diag(beta), then T' in place
        T v[kChunk][kStride];           // recompute: a tile of v
      };
      T A[kChunk][kSquareStride];  // Aqk, then T' in 16 bits
    } after;
  };
  float totals[kRuns][kK];        // decay over each run
  float decay_before[kRuns][kK];  // over all runs before it
  float decay_after[kRuns][kK];   // over all runs after it
  alignas(16) float q_norm[kChunk], k_norm[kChunk];
  float k_beta[kChunk], beta[kChunk], diag[kChunk];
};

/// Elementwise work is a thread's own: one channel pair of one run of 16 tokens, whose decays it
/// keeps. All factors are running products of decays: no difference of sums, one exponential a
/// token and channel. Indices are functions of the thread: in registers they made others spill.
template <class T, int kK>
struct Kernel {
  using S = Shared<T, kK>;
  static constexpr int kStride = S::kStride;
  static constexpr int kPairs = kK / 2;
  static constexpr int kThreads = kPairs * kRuns;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kVectors = kK / 8;  // 16-byte pieces of a row
  static constexpr int kSteps = kK / 16;   // k16 steps of an mma

  const ChunkIntraArgs& a;
  S& s;
  const ChunkTokens& chunk;
  const int head;
  const int tid;

  __device__ int warp() const { return tid / 32; }
  __device__ int lane() const { return tid % 32; }
  __device__ int run() const { return tid / kPairs; }          // of this thread's tokens
  __device__ int channel() const { return tid % kPairs * 2; }  // first of its pair

  float2 decay[kRun];  // of each token; 1 past the sequence

  __device__ static int64_t tile() { return blockIdx.x; }  // chunk and head
  __device__ T* tile_of(void* base, int64_t elements) const {
    return static_cast<T*>(base) + tile() * elements;
  }

  // ---- inputs ----------------------------------------------------------------------------------

  /// Rows of a [.., size] tensor to shared memory, zeros past the sequence and past `size`.
  __device__ void load_rows(T (*target)[kStride], const RowView& view, int view_head, int column0,
                            int size) const {
    constexpr int kRowStep = kThreads / kVectors;
    const int row0 = tid / kVectors, c = tid % kVectors * 8;
    const bool inside = column0 + c < size;
    const T* source = static_cast<const T*>(view.base) + chunk_offset(view, chunk, view_head) +
                      row0 * view.stride_t + column0 + c;
    uint32_t address = ptx::shared_address(&target[row0][c]);
#pragma unroll
    for (int row = row0, i = 0; i < kChunk / kRowStep; ++i, row += kRowStep) {
      ptx::cp_async<16>(address, source, inside && row < chunk.count);
      source += kRowStep * view.stride_t;
      address += kRowStep * kStride * sizeof(T);
    }
    ptx::cp_async_commit();
  }

  /// Gates of this thread's tokens and channels as they lie in memory; 0 past the sequence.
  template <class Pair>
  __device__ void load_gates(Pair (&raw)[kRun]) const {
    const int row0 = run() * kRun;
    const int64_t at = chunk_offset(a.g, chunk, head) + row0 * a.g.stride_t + channel();
    const char* source = static_cast<const char*>(a.g.base) + at * (sizeof(Pair) / 2);
    const int count = channel() < a.shape.K ? chunk.count - row0 : 0;
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      raw[i] = i < count ? *reinterpret_cast<const Pair*>(source) : Pair{};
      source += a.g.stride_t * static_cast<int64_t>(sizeof(Pair) / 2);
    }
  }
  /// All of them are asked for before the first is converted, which waits for it.
  __device__ void load_gates(float2 (&gates)[kRun]) const {
    if (a.g.type == Element::kFloat32) return load_gates<float2>(gates);
    uint32_t raw[kRun];
    load_gates<uint32_t>(raw);
    a.g.type == Element::kFloat16 ? unpack_all<__half>(raw, gates)
                                  : unpack_all<__nv_bfloat16>(raw, gates);
  }
  template <class E>
  __device__ static void unpack_all(const uint32_t (&raw)[kRun], float2 (&gates)[kRun]) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) gates[i] = ptx::unpack<E>(raw[i]);
  }

  /// Decay of a token: exp of the gate, with constants folded (docs/operation.md, gate modes 0 log,
  /// 1 softplus, 2 bounded). Nothing is clamped: a decay of 0 is a decay of 0.
  template <int kGateMode>
  __device__ static float decay_of(float raw, float bias, float rate, float lower_bound) {
    if constexpr (kGateMode == 2) {  // exp2(lb' / (1 + exp2(-rate' (raw + bias))))
      const float e = ptx::ex2(-rate * (raw + bias));
      return ptx::ex2(lower_bound * ptx::reciprocal(1.0f + e));
    } else {
      return ptx::ex2(log2_decay_fast<kGateMode>(raw, bias, rate));
    }
  }

  template <int kGateMode>
  __device__ void transform_gates(const float2 (&raw)[kRun], float2 bias, float rate) {
    const int count = channel() < a.shape.K ? chunk.count - run() * kRun : 0;
    const float bound = kGateMode == 2 ? a.gate.lower_bound * kLog2e : a.gate.lower_bound;
    const float slope = kGateMode == 2 ? rate * kLog2e : rate;
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      decay[i] = {decay_of<kGateMode>(raw[i].x, bias.x, slope, bound),
                  decay_of<kGateMode>(raw[i].y, bias.y, slope, bound)};
    if (count < kRun)  // masked after the transform: gate(0) is not 0
#pragma unroll
      for (int i = 0; i < kRun; ++i)
        if (i >= count) decay[i] = {1, 1};
    float2 product{1, 1};
#pragma unroll
    for (int i = 0; i < kRun; ++i) multiply(product, decay[i]);
    *reinterpret_cast<float2*>(&s.totals[run()][channel()]) = product;
  }

  /// Everything that the chunk needs from device memory but v, all on its way before any of it is
  /// waited for: converting a value waits for it.
  __device__ void load_inputs() {
    const unsigned group = static_cast<unsigned>(a.shape.HV) / static_cast<unsigned>(a.shape.H);
    const int q_head = static_cast<int>(static_cast<unsigned>(head) / group);
    load_rows(s.q, a.q, q_head, 0, a.shape.K);
    load_rows(s.k, a.k, q_head, 0, a.shape.K);
    uint32_t raw_beta = 0;
    if (tid < chunk.count)
      raw_beta = load_bits(a.beta.base, a.beta.type,
                           chunk_offset(a.beta, chunk, head) + tid * a.beta.stride_t);
    const float A_log = a.gate.A_log ? a.gate.A_log[head * a.gate.stride_A] : 0.0f;
    float2 raw[kRun], bias{0, 0};
    if (channel() < a.shape.K && a.gate.dt_bias) {
      const float* row = a.gate.dt_bias + head * a.gate.stride_dt + channel();
      bias = {row[0], row[1]};
    }
    load_gates(raw);
    const float rate = expf(A_log);
    if (a.gate.gate_mode == 0) transform_gates<0>(raw, bias, rate);
    if (a.gate.gate_mode == 1) transform_gates<1>(raw, bias, rate);
    if (a.gate.gate_mode == 2) transform_gates<2>(raw, bias, rate);
    if (tid < kChunk)
      s.beta[tid] = tid < chunk.count ? beta_value(a.gate, float_of(raw_beta, a.beta.type)) : 0.0f;
    ptx::cp_async_wait<0>();
    __syncthreads();
  }

  /// Row norms and the diagonal of Aqk, 8 rows at a time: diagonals of [q; k] k^T and of q q^T.
  __device__ void norms() const {
#pragma unroll
    for (int row0 = warp() * 8; row0 < kChunk; row0 += kWarps * 8) {
      const T(*half)[kStride] = lane() % 16 < 8 ? s.q : s.k;
      const uint32_t rows = ptx::shared_address(&half[row0 + lane() % 8][lane() / 16 * 8]);
      float with_k[4] = {}, with_q[4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t x[4];  // q and k of 8 channels, then of the next 8
        ptx::ldmatrix_x4(x, rows + step * 32);
        ptx::mma_16816<T>(with_k, x, x[1], x[3]);
        ptx::mma_16816<T>(with_q, x, x[0], x[2]);
      }
      const int r = lane() / 4;
      if (lane() % 4 != r / 2) continue;  // another lane has the diagonal
      const bool odd = r % 2;
      const float qq = odd ? with_q[1] : with_q[0], kk = odd ? with_k[3] : with_k[2];
      const float qk = odd ? with_k[1] : with_k[0];
      const int row = row0 + r;
      const float q_norm = a.gate.scale * (a.gate.l2norm ? rsqrtf(qq + 1e-6f) : 1.0f);
      const float k_norm = a.gate.l2norm ? rsqrtf(kk + 1e-6f) : 1.0f;
      s.q_norm[row] = q_norm;  // with the scale of the outputs
      s.k_norm[row] = k_norm;
      s.k_beta[row] = k_norm * s.beta[row];
      s.diag[row] = qk * q_norm * k_norm;
    }
  }

  /// Decays over the runs before and after each, for decayed_rows(); beside norms().
  __device__ void scan_totals() const {
    if (tid >= kK) return;
    const bool forward = tid < kK / 2;
    const int c = tid % (kK / 2) * 2;
    float2 product{1, 1};
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int r = forward ? i : kRuns - 1 - i;
      float* target = forward ? &s.decay_before[r][c] : &s.decay_after[r][c];
      *reinterpret_cast<float2*>(target) = product;
      multiply(product, *reinterpret_cast<const float2*>(&s.totals[r][c]));
    }
  }

  // ---- operands of the dyadic levels -----------------------------------------------------------

  __device__ float2 pair_of(const T (*source)[kStride], int token) const {
    return ptx::unpack<T>(*reinterpret_cast<const uint32_t*>(&source[token][channel()]));
  }
  __device__ void put(T (*target)[kStride], int row, float2 x, float2 factor) const {
    *reinterpret_cast<uint32_t*>(&target[row][channel()]) =
        ptx::pack<T>(x.x * factor.x, x.y * factor.y);
  }
  __device__ static void multiply(float2& x, float2 y) { x.x *= y.x, x.y *= y.y; }
  /// Four neighbours in shared memory, in one load.
  struct Four {
    float x[4];
    __device__ explicit Four(const float* from) {
      const float4 y = *reinterpret_cast<const float4*>(from);
      x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
    }
  };
  /// Decay over runs first .. end - 1, at most kMost.
  template <int kMost>
  __device__ float2 total(int first, int end) const {
    float2 product{1, 1};
#pragma unroll
    for (int i = 0; i < kMost; ++i)
      if (first + i < end)
        multiply(product, *reinterpret_cast<const float2*>(&s.totals[first + i][channel()]));
    return product;
  }

  /// All 16 tokens as rows of a level (q at `row0`, k `k_rows` below), decayed since `factor`
  /// before the run.
  __device__ void put_rows(Level<T, kStride>& level, int row0, int k_rows, float2 factor) const {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      multiply(factor, decay[i]);
      put(level.rows, row0 + i, pair_of(s.q, run() * kRun + i), factor);
      put(level.rows, k_rows + row0 + i, pair_of(s.k, run() * kRun + i), factor);
    }
  }
  /// All 16 tokens as columns, decayed until the end of the run, and by `factor` after it.
  __device__ void put_columns(Level<T, kStride>& level, int row0, float2 factor) const {
#pragma unroll
    for (int i = kRun - 1; i >= 0; --i) {
      put(level.columns, row0 + i, pair_of(s.k, run() * kRun + i), factor);
      multiply(factor, decay[i]);
    }
  }
  /// Level of h >= 16: pairs of runs of h tokens, rows from the second, columns from the first,
  /// decayed from and to the midpoint between them.
  template <int h>
  __device__ void coarse_operands(Level<T, kStride>& level) const {
    constexpr int kHalf = h / kRun;  // runs
    const int pair = run() / (2 * kHalf), within = run() % (2 * kHalf);
    const int middle = run() - within + kHalf;
    const int row0 = pair * h + within % kHalf * kRun;
    if (within >= kHalf)
      put_rows(level, row0, 32, total<kHalf - 1>(middle, run()));
    else
      put_columns(level, row0, total<kHalf - 1>(run() + 1, middle));
  }

  /// Levels of h <= 8, inside the run. For h = 1 the columns are k itself.
  template <int h>
  __device__ void fine_operands(Level<T, kStride>& level) const {
    const int row0 = run() * 16, column0 = run() * 8;
#pragma unroll
    for (int begin = 0; begin < kRun; begin += 2 * h) {
      float2 factor{1, 1};
#pragma unroll
      for (int i = 0; i < h; ++i) {
        const int token = begin + h + i, row = row0 + begin / 2 + i;
        multiply(factor, decay[token]);
        put(level.rows, row, pair_of(s.q, run() * kRun + token), factor);
        put(level.rows, 8 + row, pair_of(s.k, run() * kRun + token), factor);
      }
      if (h == 1) continue;
      factor = {1, 1};
#pragma unroll
      for (int i = h - 1; i >= 0; --i) {
        put(level.columns, column0 + begin / 2 + i, pair_of(s.k, run() * kRun + begin + i), factor);
        multiply(factor, decay[begin + i]);
      }
    }
  }

  // ---- scores ----------------------------------------------------------------------------------

  /// Accumulators of this warp's tiles of the levels: of the 16 of level 32, the 8 of level 16, and
  /// the 4 of each fine level (8 warps: four of them take levels 8 and 2, the others 4 and 1).
  static constexpr int kTiles32 = 16 / kWarps, kTiles16 = 8 / kWarps, kFine = 16 / kWarps;
  static constexpr int kPasses = 32 / kWarps;  // token form: of two tokens a warp
  struct Scores {
    float level32[kTiles32][4] = {};
    float level16[kTiles16][4] = {};
    float fine[kFine][1][4] = {};
    float token_q[kPasses] = {}, token_k[kPasses] = {};
  };
  __device__ bool takes_level(int which) const { return kWarps == 4 || warp() / 4 == which % 2; }
  __device__ static constexpr int slot_of(int which) { return kWarps == 4 ? which : which / 2; }

  /// acc += rows x columns^T: 16 rows, kTiles n8 tiles of columns.
  template <int kTiles>
  __device__ void multiply_rows(const T (*rows)[kStride], const T (*columns)[kStride],
                                float (&acc)[kTiles][4]) const {
    const uint32_t left = ptx::shared_address(&rows[lane() % 16][lane() / 16 * 8]);
    const uint32_t right = ptx::shared_address(&columns[lane() % 8][lane() / 8 * 8]);
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      uint32_t x[4], y[4];
      ptx::ldmatrix_x4(x, left + step * 32);
      ptx::ldmatrix_x4(y, left + step * 32 + 32);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        uint32_t b[4];  // 8 columns x 32 channels
        ptx::ldmatrix_x4(b, right + (n * 8 * kStride + step * 16) * sizeof(T));
        ptx::mma_16816<T>(acc[n], x, b[0], b[1]);
        ptx::mma_16816<T>(acc[n], y, b[2], b[3]);
      }
    }
  }

  /// Rows: q of 32 tokens, then k. Level 16 meets the columns of its own half.
  __device__ void products32(Scores& scores) const {
    constexpr int kSplit = kWarps / 4;  // warps that share 16 rows
    multiply_rows(s.level.rows + warp() / kSplit * 16,
                  s.level.columns + warp() % kSplit * (32 / kSplit), scores.level32);
  }
  __device__ void products16(Scores& scores) const {
    constexpr int kSplit = kWarps / 4;
    const int m = warp() / kSplit;
    multiply_rows(s.level.rows + m * 16,
                  s.level.columns + m % 2 * 16 + warp() % kSplit * (16 / kSplit), scores.level16);
  }

  /// Level `which` of the fine ones (8, 4, 2, 1): 16 rows of a block, q and k, and its 8 columns.
  template <int which>
  __device__ void fine_products(Scores& scores) const {
    if (!takes_level(which)) return;
    const int at = warp() % 4;
    float(&acc)[1][4] = scores.fine[slot_of(which)];
    if (which == 3)  // h = 1: every second row of k
      multiply_alternate(s.level.rows + at * 16, s.k + at * kBlock, acc);
    else
      multiply_rows(s.level.rows + at * 16, s.level.columns + at * 8, acc);
  }
  __device__ void multiply_alternate(const T (*rows)[kStride], const T (*k)[kStride],
                                     float (&acc)[1][4]) const {
    const uint32_t left = ptx::shared_address(&rows[lane() % 16][lane() / 16 * 8]);
    const uint32_t right = ptx::shared_address(&k[lane() % 8 * 2][lane() / 8 * 8]);
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
      uint32_t x[4], y[4], b[4];
      ptx::ldmatrix_x4(x, left + step * 32);
      ptx::ldmatrix_x4(y, left + step * 32 + 32);
      ptx::ldmatrix_x4(b, right + step * 32);
      ptx::mma_16816<T>(acc[0], x, b[0], b[1]);
      ptx::mma_16816<T>(acc[0], y, b[2], b[3]);
    }
  }

  // ---- the token form of the diagonal blocks ---------------------------------------------------

  __device__ void token_operands() const {
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      *reinterpret_cast<float2*>(&s.decay[run() * kRun + i][channel()]) = decay[i];
  }

  /// Token of half a warp in a pass: late and early rows of the blocks of 16 take turns, so that
  /// every warp has as many pairs.
  __device__ int token_of(int pass) const {
    const int slot = pass * kWarps + warp();
    const int row = slot / kBlock % 2 == 0 ? slot % kBlock : kBlock - 1 - slot % kBlock;
    return (slot / kBlock * 2 + lane() / 16) * kBlock + row;
  }

  /// This lane's channels of a row.
  static constexpr int kLaneChannels = kK / 16;
  __device__ void load_channels(const T* row, float (&x)[kLaneChannels]) const {
#pragma unroll
    for (int c = 0; c < kLaneChannels; c += 4) {
      const uint2 raw = *reinterpret_cast<const uint2*>(row + lane() % 16 * kLaneChannels + c);
      const float2 low = ptx::unpack<T>(raw.x), high = ptx::unpack<T>(raw.y);
      x[c] = low.x, x[c + 1] = low.y, x[c + 2] = high.x, x[c + 3] = high.y;
    }
  }

  /// Pair by pair in fp32, from a token back to the start of its block; lane j of 16 keeps column
  /// j.
  __device__ void token_products(Scores& scores) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int i = token_of(pass);
      float q[kLaneChannels], k[kLaneChannels], factor[kLaneChannels];
      load_channels(s.q[i], q);
      load_channels(s.k[i], k);
#pragma unroll
      for (int c = 0; c < kLaneChannels; ++c) factor[c] = 1;
#pragma unroll 1
      for (int j = i - 1; j >= i / kBlock * kBlock; --j) {
        const float* after = &s.decay[j + 1][lane() % 16 * kLaneChannels];
        float other[kLaneChannels], qk = 0, kk = 0;
        load_channels(s.k[j], other);
#pragma unroll
        for (int c = 0; c < kLaneChannels; ++c) {
          factor[c] *= after[c];
          const float decayed = factor[c] * other[c];
          qk = fmaf(q[c], decayed, qk);
          kk = fmaf(k[c], decayed, kk);
        }
#pragma unroll
        for (int offset = 1; offset < 16; offset *= 2) {
          qk += __shfl_xor_sync(~0u, qk, offset);
          kk += __shfl_xor_sync(~0u, kk, offset);
        }
        if (lane() % 16 == j % kBlock) scores.token_q[pass] = qk, scores.token_k[pass] = kk;
      }
    }
  }

  __device__ void store_tokens(const Scores& scores) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int i = token_of(pass), j = i / kBlock * kBlock + lane() % 16;
      if (j >= i) continue;
      s.after.A[i][j] = static_cast<T>(scores.token_q[pass] * (s.q_norm[i] * s.k_norm[j]));
      s.after.N[i][j] = scores.token_k[pass] * (s.k_norm[i] * s.k_beta[j]);
    }
  }

  // ---- scores in shared memory -----------------------------------------------------------------

  /// Neighbours j, j + 1 of row i: of Aqk, and of L.
  __device__ void put_A(int i, int j, float x, float y) const {
    const float2 k = *reinterpret_cast<const float2*>(&s.k_norm[j]);
    const float q = s.q_norm[i];
    *reinterpret_cast<uint32_t*>(&s.after.A[i][j]) = ptx::pack<T>(x * (q * k.x), y * (q * k.y));
  }
  __device__ void put_L(int i, int j, float x, float y) const {
    const float2 k = *reinterpret_cast<const float2*>(&s.k_beta[j]);
    const float k_i = s.k_norm[i];
    *reinterpret_cast<float2*>(&s.after.N[i][j]) = {x * (k_i * k.x), y * (k_i * k.y)};
  }

  /// Tile of a coarse level: rows of q (first 32) or of k.
  __device__ void store_coarse(const float (&acc)[4], bool q, int i, int j) const {
    if (q) {
      put_A(i, j, acc[0], acc[1]), put_A(i + 8, j, acc[2], acc[3]);
    } else {
      put_L(i, j, acc[0], acc[1]), put_L(i + 8, j, acc[2], acc[3]);
    }
  }
  /// Tile of level h: q and k rows of the same tokens; columns of other runs are dropped.
  template <int h>
  __device__ void store_fine(const float (&acc)[4], int at) const {
    const int r = lane() / 4, n = lane() % 4 * 2;
    const int i = at + r / h * 2 * h + h + r % h;
    if constexpr (h > 1) {
      if (n / h != r / h) return;
      const int j = at + n / h * 2 * h + n % h;
      put_A(i, j, acc[0], acc[1]);
      put_L(i, j, acc[2], acc[3]);
    } else {  // the column before the diagonal
      if (n != r && n + 1 != r) return;
      const float q = n == r ? acc[0] : acc[1], k = n == r ? acc[2] : acc[3];
      s.after.A[i][i - 1] = static_cast<T>(q * (s.q_norm[i] * s.k_norm[i - 1]));
      s.after.N[i][i - 1] = k * (s.k_norm[i] * s.k_beta[i - 1]);
    }
  }

  template <bool kTokens>
  __device__ void store_scores(const Scores& scores) const {
    constexpr int kSplit = kWarps / 4;
    const int m = warp() / kSplit;
#pragma unroll
    for (int n = 0; n < kTiles32; ++n)
      store_coarse(scores.level32[n], m < 2, 32 + m % 2 * 16 + lane() / 4,
                   warp() % kSplit * (32 / kSplit) + n * 8 + lane() % 4 * 2);
#pragma unroll
    for (int n = 0; n < kTiles16; ++n)
      store_coarse(scores.level16[n], m < 2, m % 2 * 32 + 16 + lane() / 4,
                   m % 2 * 32 + warp() % kSplit * (16 / kSplit) + n * 8 + lane() % 4 * 2);
    if constexpr (kTokens) {
      store_tokens(scores);
      return;
    }
    const int token = warp() % 4 * kBlock;
    if (takes_level(0)) store_fine<8>(scores.fine[slot_of(0)][0], token);
    if (takes_level(1)) store_fine<4>(scores.fine[slot_of(1)][0], token);
    if (takes_level(2)) store_fine<2>(scores.fine[slot_of(2)][0], token);
    if (takes_level(3)) store_fine<1>(scores.fine[slot_of(3)][0], token);
  }

  /// qg, kg to device memory; Kgam in place of k; gamma.
  __device__ void decayed_rows() const {
    const int piece = channel() / 8;
    const int64_t row0 = run() * kRun * kK + channel() % 8;
    T* qg = a.factors.qg ? tile_of(a.factors.qg, kChunk * kK) + row0 : nullptr;
    T* kg = a.factors.kg ? tile_of(a.factors.kg, kChunk * kK) + row0 : nullptr;
    const auto scaled = [](float2 x, float2 factor, float norm) {
      return ptx::pack<T>(x.x * (factor.x * norm), x.y * (factor.y * norm));
    };
    if (kg) {
      float2 factor = *reinterpret_cast<const float2*>(&s.decay_after[run()][channel()]);
#pragma unroll
      for (int i0 = kRun - 4; i0 >= 0; i0 -= 4) {
        const Four norms(&s.k_norm[run() * kRun + i0]);
#pragma unroll
        for (int i = 3; i >= 0; --i) {
          *reinterpret_cast<uint32_t*>(kg + swizzled<kK>(i0 + i, piece)) =
              scaled(pair_of(s.k, run() * kRun + i0 + i), factor, norms.x[i]);
          multiply(factor, decay[i0 + i]);
        }
      }
    }
    const float2 before = *reinterpret_cast<const float2*>(&s.decay_before[run()][channel()]);
    if (qg) {
      float2 factor = before;
#pragma unroll
      for (int i0 = 0; i0 < kRun; i0 += 4) {
        const Four norms(&s.q_norm[run() * kRun + i0]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          multiply(factor, decay[i0 + i]);
          *reinterpret_cast<uint32_t*>(qg + swizzled<kK>(i0 + i, piece)) =
              scaled(pair_of(s.q, run() * kRun + i0 + i), factor, norms.x[i]);
        }
      }
    }
    float2 factor = before;
#pragma unroll
    for (int i0 = 0; i0 < kRun; i0 += 4) {
      const Four norms(&s.k_norm[run() * kRun + i0]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = run() * kRun + i0 + i;
        multiply(factor, decay[i0 + i]);
        *reinterpret_cast<uint32_t*>(&s.k[token][channel()]) =
            scaled(pair_of(s.k, token), factor, norms.x[i]);
      }
    }
    if (run() == kRuns - 1 && a.factors.gamma)
      *reinterpret_cast<float2*>(a.factors.gamma + tile() * kK + channel()) = factor;
  }

  __device__ void store_scalars() const {
    if (tid >= kChunk) return;
    a.factors.beta[tile() * kChunk + tid] = s.beta[tid];
    a.factors.diag[tile() * kChunk + tid] = s.diag[tid];
  }

  __device__ void clear_squares() const {
    for (int i = tid; i < kChunk * kSquareStride / 8; i += kThreads)
      reinterpret_cast<uint4*>(&s.after.A[0][0])[i] = {0, 0, 0, 0};
  }

  // ---- inverse ---------------------------------------------------------------------------------

  /// Diagonal 16x16 block of T' = (I + L)^-1 by substitution in fp32, in place; a lane owns a
  /// column.
  __device__ void invert_diagonal(int at) const {
    const int j = lane() % kBlock;
    float column[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      float sum = i == j ? 1.0f : 0.0f;
#pragma unroll
      for (int m = 0; m < i; ++m) sum -= s.after.N[at + i][at + m] * column[m];
      column[i] = i < j ? 0.0f : sum;
    }
    __syncwarp();
    if (lane() < kBlock)
#pragma unroll
      for (int i = 0; i < kBlock; ++i) s.after.N[at + i][at + j] = column[i];
    __syncwarp();
  }

  /// T21 = -T22 L21 T11 for blocks of kSize at row0 = column0 + kSize, in place: rows of one m16
  /// tile, kTiles n8 tiles from `n0`. Products in tf32: every factor is bounded by 2. The k order
  /// of the second product is permuted so that the first one's accumulators are its A operand.
  template <int kSize, int kTiles>
  __device__ void merge_rows(int row0, int column0, int m, int n0, float (&out)[kTiles][4]) const {
    float y[kSize / 8][4] = {};  // rows m..m+15 of T22 L21
#pragma unroll
    for (int k = 0; k < kSize; k += 8) {
      if (k >= m + kBlock) continue;  // above the diagonal blocks nothing was written
      const int r = row0 + m + lane() / 4, c = row0 + k + lane() % 4;
      const uint32_t left[4] = {ptx::to_tf32(s.after.N[r][c]), ptx::to_tf32(s.after.N[r + 8][c]),
                                ptx::to_tf32(s.after.N[r][c + 4]),
                                ptx::to_tf32(s.after.N[r + 8][c + 4])};
#pragma unroll
      for (int n = 0; n < kSize / 8; ++n) {
        const int j = column0 + n * 8 + lane() / 4;
        ptx::mma_1688_tf32(y[n], left, ptx::to_tf32(s.after.N[row0 + k + lane() % 4][j]),
                           ptx::to_tf32(s.after.N[row0 + k + lane() % 4 + 4][j]));
      }
    }
#pragma unroll
    for (int k = 0; k < kSize / 8; ++k) {
      if (k * 8 < n0 / kBlock * kBlock) continue;
      const uint32_t left[4] = {ptx::to_tf32(-y[k][0]), ptx::to_tf32(-y[k][2]),
                                ptx::to_tf32(-y[k][1]), ptx::to_tf32(-y[k][3])};
      const int r = column0 + k * 8 + lane() % 4 * 2;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int j = column0 + n0 + n * 8 + lane() / 4;
        ptx::mma_1688_tf32(out[n], left, ptx::to_tf32(s.after.N[r][j]),
                           ptx::to_tf32(s.after.N[r + 1][j]));
      }
    }
  }

  template <int kTiles>
  __device__ void store_block(int row, int column, const float (&out)[kTiles][4]) const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int j = column + n * 8 + lane() % 4 * 2;
      s.after.N[row + lane() / 4][j] = out[n][0];
      s.after.N[row + lane() / 4][j + 1] = out[n][1];
      s.after.N[row + lane() / 4 + 8][j] = out[n][2];
      s.after.N[row + lane() / 4 + 8][j + 1] = out[n][3];
    }
  }

  /// 16x16 blocks by substitution, then pairs of them; warps 0..3.
  __device__ void invert_pairs() const {
    invert_diagonal(warp() * kBlock);
    ptx::named_sync<128>(1);
    if (warp() < 2) {
      float out[2][4] = {};
      merge_rows<16, 2>(warp() * 32 + 16, warp() * 32, 0, 0, out);
      __syncwarp();
      store_block(warp() * 32 + 16, warp() * 32, out);
    }
  }

  __device__ void invert_halves() const {  // 8 warps: 16x8 tiles
    float out[8 / kWarps][1][4] = {};
#pragma unroll
    for (int i = 0; i < 8 / kWarps; ++i) {
      const int at = warp() + i * kWarps;
      merge_rows<32, 1>(32, 0, at / 4 * 16, at % 4 * 8, out[i]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8 / kWarps; ++i) {
      const int at = warp() + i * kWarps;
      store_block(32 + at / 4 * 16, at % 4 * 8, out[i]);
    }
  }

  /// 64 x 64 tile in shared memory to device memory.
  template <int kCopiers>
  __device__ void copy_square(void* target, int thread) const {
    T* base = tile_of(target, kChunk * kChunk);
#pragma unroll
    for (int i = 0; i < kChunk * 8 / kCopiers; ++i) {
      const int row = thread / 8 + i * (kCopiers / 8), piece = thread % 8;
      *reinterpret_cast<uint4*>(base + swizzled<kChunk>(row, piece)) =
          *reinterpret_cast<const uint4*>(&s.after.A[row][piece * 8]);
    }
  }

  __device__ void round_inverse() const {
#pragma unroll
    for (int i = tid; i < kChunk * kChunk / 4; i += kThreads) {
      const int row = i / 16, c = i % 16 * 4;
      // Blocks above the diagonal were never written.
      const bool above = c / kBlock > row / kBlock;
      const float4 x =
          above ? float4{0, 0, 0, 0} : *reinterpret_cast<const float4*>(&s.after.N[row][c]);
      *reinterpret_cast<uint2*>(&s.after.A[row][c]) = {ptx::pack<T>(x.x, x.y),
                                                       ptx::pack<T>(x.z, x.w)};
    }
  }

  // ---- w and u ---------------------------------------------------------------------------------

  /// 16 columns of T' x source to a tile of kColumns columns; the source is overwritten. T' is
  /// lower triangular.
  template <int kColumns>
  __device__ void solve_columns(T (*source)[kStride], int column, T* target,
                                int target_column) const {
    float acc[4][2][4] = {};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t b[4];  // 16 tokens x 16 columns
      ptx::ldmatrix_x4_trans(
          b, ptx::shared_address(&source[step * 16 + lane() % 16][column + lane() / 16 * 8]));
#pragma unroll
      for (int m = step; m < 4; ++m) {
        uint32_t left[4];
        ptx::ldmatrix_x4(left, ptx::shared_address(
                                   &s.after.A[m * 16 + lane() % 16][step * 16 + lane() / 16 * 8]));
        ptx::mma_16816<T>(acc[m][0], left, b[0], b[1]);
        ptx::mma_16816<T>(acc[m][1], left, b[2], b[3]);
      }
    }
    // Through the columns of the source, which only this warp reads: pieces of 16 bytes.
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          *reinterpret_cast<uint32_t*>(
              &source[m * 16 + half * 8 + lane() / 4][column + n * 8 + lane() % 4 * 2]) =
              ptx::pack<T>(acc[m][n][2 * half], acc[m][n][2 * half + 1]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kChunk / 16; ++i) {
      const int row = lane() / 2 + i * 16;
      *reinterpret_cast<uint4*>(target + swizzled<kColumns>(row, target_column / 8 + lane() % 2)) =
          *reinterpret_cast<const uint4*>(&source[row][column + lane() % 2 * 8]);
    }
  }

  /// w from Kgam, then u from tiles of v, kK columns at a time; the first tile is on its way.
  __device__ void solve(T (*v)[kStride]) const {
    const int64_t u_tiles = (a.shape.V + kVTile - 1) / kVTile;
    T* w = tile_of(a.factors.w, kChunk * kK);
    T* u = tile_of(a.factors.u, u_tiles * kChunk * kVTile);
    const int c = warp() * 16;
    static_assert(kWarps * 16 == kK);
    __syncthreads();
    solve_columns<kK>(s.k, c, w, c);
    ptx::cp_async_wait<0>();
    __syncthreads();
    for (int column0 = 0; column0 < a.shape.V; column0 += kK) {
      if (column0 > 0) {
        __syncthreads();
        load_rows(v, a.v, head, column0, a.shape.V);
        ptx::cp_async_wait<0>();
        __syncthreads();
      }
      const int at = column0 + c;
      if (at / kVTile < u_tiles)
        solve_columns<kVTile>(v, c, u + at / kVTile * kChunk * kVTile, at % kVTile);
    }
  }

  template <bool kTokens>
  __device__ void intra() {
    load_inputs();
    norms();
    scan_totals();
    Scores scores;
    coarse_operands<32>(s.level);
    __syncthreads();
    products32(scores);
    __syncthreads();
    coarse_operands<16>(s.level);
    __syncthreads();
    products16(scores);
    __syncthreads();
    if constexpr (kTokens) {
      token_operands();
      __syncthreads();
      token_products(scores);
    } else {
      fine_operands<8>(s.level);
      __syncthreads();
      fine_products<0>(scores);
      __syncthreads();
      fine_operands<4>(s.level);
      __syncthreads();
      fine_products<1>(scores);
      __syncthreads();
      fine_operands<2>(s.level);
      __syncthreads();
      fine_products<2>(scores);
      __syncthreads();
      fine_operands<1>(s.level);
      __syncthreads();
      fine_products<3>(scores);
    }
    __syncthreads();  // the level gives way to squares
    clear_squares();
    store_scalars();
    __syncthreads();
    store_scores<kTokens>(scores);
    decayed_rows();
    __syncthreads();
    load_rows(s.q, a.v, head, 0, a.shape.V);
    if (warp() < 4) invert_pairs();
    if (kWarps == 4 || warp() >= 4) copy_square<128>(a.factors.Aqk, tid % 128);
    __syncthreads();
    invert_halves();
    __syncthreads();
    round_inverse();
    __syncthreads();
    if (a.factors.T) copy_square<kThreads>(a.factors.T, tid);
    solve(s.q);
  }

  __device__ void recompute() {
    load_rows(s.after.v, a.v, head, 0, a.shape.V);
    const T* stored = tile_of(a.factors.T, kChunk * kChunk);
#pragma unroll
    for (int i = 0; i < kChunk * 8 / kThreads; ++i) {
      const int row = tid / 8 + i * (kThreads / 8), piece = tid % 8;
      ptx::cp_async<16>(ptx::shared_address(&s.after.A[row][piece * 8]),
                        stored + swizzled<kChunk>(row, piece));
    }
    ptx::cp_async_commit();
    load_inputs();
    norms();
    scan_totals();
    __syncthreads();
    decayed_rows();
    solve(s.after.v);
  }
};

enum class Form { kTensor, kToken, kRecompute };

template <class T, int kK, Form kForm>
__global__ void __launch_bounds__(2 * kK, kK == 64 ? 5 : 3)
    chunk_intra_kernel(const __grid_constant__ ChunkIntraArgs a) {
  const auto HV = static_cast<unsigned>(a.shape.HV);
  const ChunkTokens chunk = chunk_tokens(a.map, blockIdx.x / HV);
  if (chunk.count == 0) return;
  const int tid = threadIdx.x;
  Kernel<T, kK> kernel{a,     *reinterpret_cast<Shared<T, kK>*>(ptx::dynamic_shared()),
                       chunk, static_cast<int>(blockIdx.x % HV),
                       tid,   {}};
  if constexpr (kForm == Form::kRecompute)
    kernel.recompute();
  else
    kernel.template intra<kForm == Form::kToken>();
}

template <Form kForm, class T, int kK>
Status launch(const ChunkIntraArgs& args, const Launch& where) {
  static_assert(sizeof(Shared<T, kK>) <= kMostShared);
  return launch_kernel(kForm == Form::kRecompute ? "recompute_w_u" : "chunk_intra",
                       chunk_intra_kernel<T, kK, kForm>, args.num_chunks * args.shape.HV,
                       Kernel<T, kK>::kThreads, sizeof(Shared<T, kK>), where, args);
}

template <Form kForm>
Status launch_any(const ChunkIntraArgs& args, bool half, const Launch& where) {
  if (args.shape.K <= 64)
    return half ? launch<kForm, __half, 64>(args, where)
                : launch<kForm, __nv_bfloat16, 64>(args, where);
  return half ? launch<kForm, __half, 128>(args, where)
              : launch<kForm, __nv_bfloat16, 128>(args, where);
}

}  // namespace

Status launch_chunk_intra(const ChunkIntraArgs& args, bool half, bool tokens, const Launch& where) {
  return tokens ? launch_any<Form::kToken>(args, half, where)
                : launch_any<Form::kTensor>(args, half, where);
}

Status launch_recompute_w_u(const ChunkIntraArgs& args, bool half, const Launch& where) {
  return launch_any<Form::kRecompute>(args, half, where);
}

}  // namespace kda::cuda
