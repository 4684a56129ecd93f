// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm80/chunk_delta_h.hpp"

#include <type_traits>

#include "cuda/host/launch.cuh"
#include "cuda/ptx/ptx.cuh"
#include "cuda/tile/chunk_map.cuh"
#include "cuda/tile/metadata.cuh"
#include "cuda/tile/swizzle.cuh"

namespace kda::cuda {
namespace {

/// Operands of one chunk. Each buffer is filled again for the next chunk as soon as its last reader
/// is done, so a copy has most of a chunk's time to arrive. 16-byte pieces are swizzled by row.
template <class T, int kK>
struct Shared {
  T w[kChunk * kK], qg[kChunk * kK], kg[kChunk * kK];
  T u[kChunk * kVTile], Aqk[kChunk * kChunk];
  float gamma[kK], beta[kChunk], diag[kChunk];
};

/// Forward: what the warps of the chain hand to those of the outputs, registers as they stand.
template <class T, int kK, int kWarps>
struct ForwardShared : Shared<T, kK> {
  uint4 states[kWarps][kK / 16][32];      // S^T before the chunk, rounded
  float4 errors[kWarps][kChunk / 8][32];  // vn^T
};

enum Barrier : int { kBlockBarrier, kChainGroup, kOutputGroup, kGiven, kTaken };

/// A warp holds S^T of 16 columns of V: rows v of the accumulators, all of K in their columns. An
/// accumulator pair of columns, rounded, is an A operand as it stands: nothing is exchanged.
template <class T, int kK, int kWarps, DeltaUse kUse>
struct Kernel {
  using S =
      std::conditional_t<kUse == DeltaUse::kForward, ForwardShared<T, kK, kWarps>, Shared<T, kK>>;
  static constexpr bool kForward = kUse == DeltaUse::kForward;
  static constexpr int kThreads = kWarps * 32;  // of a group: forward has two
  static constexpr int kTiles = kK / 8;         // n8 tiles of S^T
  static constexpr int kSteps = kK / 16;        // k16 steps over channels
  static constexpr int kTokenTiles = kChunk / 8;

  const ChunkDeltaHArgs& a;
  S& s;
  const int tid, warp, lane;

  int64_t head, unit;
  Span span;
  bool transition;  // columns of M instead of B
  int column;       // first state column of this warp: of V, or of K for M
  int u_tile;       // tile of u that holds this block's columns, and where they begin in it
  int u_column;
  int64_t chunk0;
  int num_chunks;
  int64_t checkpoint;  // next one

  float state[kTiles][4];

  __device__ int64_t tile(int chunk) const { return (chunk0 + chunk) * a.shape.HV + head; }

  // ---- copies ----------------------------------------------------------------------------------

  /// kBytes to shared memory, in order: tiles lie in the workspace as they are used here.
  template <int kBytes>
  __device__ void copy(void* target, const void* source, int64_t index) const {
    const char* from = static_cast<const char*>(source) + index * kBytes + tid * 16;
    const uint32_t to = ptx::shared_address(target) + tid * 16;
    constexpr int kRound = kThreads * 16;
#pragma unroll
    for (int at = 0; at + kRound <= kBytes; at += kRound) ptx::cp_async<16>(to + at, from + at);
    constexpr int kDone = kBytes / kRound * kRound;
    if (kDone < kBytes && tid * 16 < kBytes - kDone) ptx::cp_async<16>(to + kDone, from + kDone);
  }
  __device__ int64_t v_tiles() const { return (a.shape.V + kVTile - 1) / kVTile; }

  __device__ void copy_w(int chunk) const {
    if (chunk < num_chunks) {
      copy<sizeof(s.w)>(s.w, a.factors.w, tile(chunk));
      if (!transition) copy<sizeof(s.u)>(s.u, a.factors.u, tile(chunk) * v_tiles() + u_tile);
      copy<sizeof(s.beta)>(s.beta, a.factors.beta, tile(chunk));
    }
    ptx::cp_async_commit();
  }
  __device__ void copy_q(int chunk) const {
    if (chunk < num_chunks) copy<sizeof(s.qg)>(s.qg, a.factors.qg, tile(chunk));
    ptx::cp_async_commit();
  }
  __device__ void copy_k(int chunk) const {
    if (chunk < num_chunks) {
      copy<sizeof(s.kg)>(s.kg, a.factors.kg, tile(chunk));
      copy<sizeof(s.gamma)>(s.gamma, a.factors.gamma, tile(chunk));
    }
    ptx::cp_async_commit();
  }
  __device__ void copy_A(int chunk) const {
    if (chunk < num_chunks) {
      copy<sizeof(s.Aqk)>(s.Aqk, a.factors.Aqk, tile(chunk));
      copy<sizeof(s.diag)>(s.diag, a.factors.diag, tile(chunk));
    }
    ptx::cp_async_commit();
  }

  /// The large tiles of a chunk to L2: what is copied next then comes from there.
  __device__ void prefetch(int chunk) const {
    if (chunk >= num_chunks) return;
    const auto lines = [&](const void* base, int64_t bytes, int64_t index) {
      const char* from = static_cast<const char*>(base) + index * bytes;
      for (int64_t at = tid * 128; at < bytes; at += kThreads * 128) ptx::prefetch_l2(from + at);
    };
    lines(a.factors.w, sizeof(s.w), tile(chunk));
    lines(a.factors.kg, sizeof(s.kg), tile(chunk));
    lines(a.factors.qg, sizeof(s.qg), tile(chunk));
    lines(a.factors.u, sizeof(s.u), tile(chunk) * v_tiles() + u_tile);
    lines(a.factors.Aqk, sizeof(s.Aqk), tile(chunk));
  }

  // ---- states ----------------------------------------------------------------------------------

  /// visit(accumulator, k, v) for the elements of this lane that exist.
  template <class Visit>
  __device__ __forceinline__ void for_each_state(Visit&& visit) {
    const int columns = transition ? a.shape.K : a.shape.V;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int k = n * 8 + lane % 4 * 2 + i % 2;
        const int v = column + lane / 4 + i / 2 * 8;
        if (k < a.shape.K && v < columns) visit(state[n][i], k, v);
      }
  }

  __device__ void load_start() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) state[n][i] = 0;
    if constexpr (kUse == DeltaUse::kScan) {
      if (transition) for_each_state([&](float& x, int k, int v) { x = k == v ? 1.0f : 0.0f; });
      return;
    }
    if (a.states_in) {
      const float* from = a.states_in + (unit * a.shape.HV + head) * a.shape.K * a.shape.V;
      for_each_state([&](float& x, int k, int v) { x = from[k * a.shape.V + v]; });
      return;
    }
    const int64_t slot = state_slot(a.initial, span.sequence);
    if (slot < 0) return;
    for_each_state([&](float& x, int k, int v) {
      x = load_state_bits(a.initial, state_offset(a.initial, slot, head, k, v));
    });
    if (a.initial.bf16) for_each_state([](float& x, int, int) { x = widen_state(x); });
  }

  __device__ void store_to(const StateView& view, int64_t slot) {
    if (slot < 0) return;
    // Opaque, so that no addresses of this rare path are kept in registers over the loop.
    const int64_t base =
        ptx::opaque(state_offset(view, slot, head, lane % 4 * 2, column + lane / 4));
    const int64_t k_step = view.vk ? 1 : view.stride_row, v_step = view.vk ? view.stride_row : 1;
    for_each_state([&](float& x, int k, int v) {
      store_state(view, base + (k - lane % 4 * 2) * k_step + (v - column - lane / 4) * v_step, x);
    });
  }

  __device__ void store_end() {
    if constexpr (kUse == DeltaUse::kScan) {
      const int columns = transition ? a.shape.K : a.shape.V;
      float* to = (transition ? a.M : a.B) + (unit * a.shape.HV + head) * a.shape.K * columns;
      for_each_state([&](float& x, int k, int v) { to[k * columns + v] = x; });
    } else if (a.final_state.base && span.end == sequence_span(a.map, span.sequence).end) {
      store_to(a.final_state, state_slot(a.final_state, span.sequence));
    }
  }

  // ---- one chunk -------------------------------------------------------------------------------

  /// acc += S^T x^T for a [64 tokens, kK] tile x: columns of the result are tokens.
  __device__ __forceinline__ void read_state(const uint32_t (&rounded)[kSteps][4], const T* x,
                                             float (&acc)[kTokenTiles][4]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int n = 0; n < kTokenTiles; n += 2) {
        uint32_t b[4];  // 16 tokens x 16 channels
        const int row = n * 8 + lane % 8 + lane / 16 * 8;
        ptx::ldmatrix_x4(b, ptx::shared_address(x + swizzled<kK>(row, step * 2 + lane / 8 % 2)));
        ptx::mma_16816<T>(acc[n], rounded[step], b[0], b[1]);
        ptx::mma_16816<T>(acc[n + 1], rounded[step], b[2], b[3]);
      }
  }

  /// vn^T = beta (u^T - P), in place of P = (w S)^T.
  __device__ __forceinline__ void prediction_error(float (&p)[kTokenTiles][4]) const {
#pragma unroll
    for (int n = 0; n < kTokenTiles; n += 2) {
      uint32_t u[4] = {};  // tokens n*8..+7 and +8..15, columns 0..7 and 8..15 of this warp
      if (!transition) {
        const int row = n * 8 + lane % 8 + lane / 16 * 8;
        const int piece = (u_column + warp * 16) / 8 + lane / 8 % 2;
        ptx::ldmatrix_x4_trans(u, ptx::shared_address(s.u + swizzled<kVTile>(row, piece)));
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 beta =
            *reinterpret_cast<const float2*>(&s.beta[(n + half) * 8 + lane % 4 * 2]);
        const float2 low = ptx::unpack<T>(u[2 * half]), high = ptx::unpack<T>(u[2 * half + 1]);
        float(&x)[4] = p[n + half];
        x[0] = beta.x * (low.x - x[0]);
        x[1] = beta.y * (low.y - x[1]);
        x[2] = beta.x * (high.x - x[2]);
        x[3] = beta.y * (high.y - x[3]);
      }
    }
  }

  __device__ __forceinline__ static void round_pairs(const float (&x)[4], const float (&y)[4],
                                                     uint32_t (&out)[4]) {
    out[0] = ptx::pack<T>(x[0], x[1]);
    out[1] = ptx::pack<T>(x[2], x[3]);
    out[2] = ptx::pack<T>(y[0], y[1]);
    out[3] = ptx::pack<T>(y[2], y[3]);
  }

  /// What round_pairs() left of a pair.
  __device__ __forceinline__ static uint32_t rest(float x, float y, uint32_t rounded) {
    const float2 kept = ptx::unpack<T>(rounded);
    return ptx::pack<T>(x - kept.x, y - kept.y);
  }

  /// acc += x y for 8 tiles, whose products do not wait for each other.
  __device__ __forceinline__ static void multiply_pairs(float (*acc)[4], const uint32_t (&x)[4],
                                                        const uint32_t (&y)[4][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::mma_16816<T>(acc[2 * i], x, y[i][0], y[i][1]);
      ptx::mma_16816<T>(acc[2 * i + 1], x, y[i][2], y[i][3]);
    }
  }

  /// S^T = S^T gamma + vn^T kg. With bf16 vn comes in two parts: errors of the state stay in it.
  __device__ __forceinline__ void update_state(const float (&error)[kTokenTiles][4],
                                               const uint32_t (&vn)[4][4]) {
    constexpr bool kTwoParts = std::is_same_v<T, __nv_bfloat16>;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float2 gamma = *reinterpret_cast<const float2*>(&s.gamma[n * 8 + lane % 4 * 2]);
      state[n][0] *= gamma.x, state[n][1] *= gamma.y;
      state[n][2] *= gamma.x, state[n][3] *= gamma.y;
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint32_t low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* x = error[2 * step + i / 2] + i % 2 * 2;
        low[i] = rest(x[0], x[1], vn[step][i]);
      }
#pragma unroll
      for (int n0 = 0; n0 < kTiles; n0 += 8) {
        uint32_t b[4][4];  // 16 tokens x 16 channels each, transposed
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int piece = n0 + 2 * i + lane / 16;
          ptx::ldmatrix_x4_trans(
              b[i], ptx::shared_address(s.kg + swizzled<kK>(step * 16 + lane % 16, piece)));
        }
        multiply_pairs(state + n0, vn[step], b);
        if constexpr (kTwoParts) multiply_pairs(state + n0, low, b);
      }
    }
  }

  /// o^T += vn^T Aqk^T; the diagonal of Aqk in fp32 on the accumulators.
  __device__ __forceinline__ void inner_outputs(const float (&error)[kTokenTiles][4],
                                                const uint32_t (&vn)[4][4],
                                                float (&o)[kTokenTiles][4]) const {
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      const float2 diag = *reinterpret_cast<const float2*>(&s.diag[n * 8 + lane % 4 * 2]);
      o[n][0] += diag.x * error[n][0], o[n][1] += diag.y * error[n][1];
      o[n][2] += diag.x * error[n][2], o[n][3] += diag.y * error[n][3];
    }
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int n = step * 2; n < kTokenTiles; n += 2) {  // strictly lower: columns <= rows
        uint32_t b[4];
        const int row = n * 8 + lane % 8 + lane / 16 * 8;
        ptx::ldmatrix_x4(
            b, ptx::shared_address(s.Aqk + swizzled<kChunk>(row, step * 2 + lane / 8 % 2)));
        ptx::mma_16816<T>(o[n], vn[step], b[0], b[1]);
        ptx::mma_16816<T>(o[n + 1], vn[step], b[2], b[3]);
      }
  }

  __device__ void store_outputs(int chunk, const float (&o)[kTokenTiles][4]) const {
    const int64_t token0 = span.begin + chunk * kChunk;
    const int64_t base = row_offset(a.o, a.map, span.sequence, token0, head);
    const int count = static_cast<int>(min(static_cast<int64_t>(kChunk), span.end - token0));
    if (a.o.type == Element::kFloat32) {
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = n * 8 + lane % 4 * 2 + i % 2;
          const int v = column + lane / 4 + i / 2 * 8;
          if (token < count && v < a.shape.V)
            static_cast<float*>(a.o.base)[base + token * a.o.stride_t + v] = o[n][i];
        }
      return;
    }
    const bool bf16 = a.o.type == Element::kBFloat16;
    uint16_t* row = static_cast<uint16_t*>(a.o.base) + base + lane / 4 * a.o.stride_t;
    const int64_t step = 8 * a.o.stride_t;
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n, row += step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float x = o[n][2 * half], y = o[n][2 * half + 1];
        const uint32_t pair =
            ptx::transpose_8x8(bf16 ? ptx::pack<__nv_bfloat16>(x, y) : ptx::pack<__half>(x, y));
        const int v = column + half * 8 + lane % 4 * 2;
        if (n * 8 + lane / 4 < count && v < a.shape.V) *reinterpret_cast<uint32_t*>(row + v) = pair;
      }
    }
  }

  // ---- S^T at the start of each chunk and vn, between chunk_delta_h and chunk_o
  // ---------------------

  /// visit(pair of elements in a register, where it is stored) for the A operands of S^T.
  template <class Visit>
  __device__ void for_each_stored_state(int chunk, uint32_t (&rounded)[kSteps][4],
                                        Visit&& visit) const {
    T* h = static_cast<T*>(a.h) + (tile(chunk) * v_tiles() + u_tile) * kVTile * kK;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int v = u_column + warp * 16 + lane / 4 + i % 2 * 8;
        visit(rounded[step][i],
              reinterpret_cast<uint32_t*>(h + swizzled<kK>(v, step * 2 + i / 2) + lane % 4 * 2));
      }
  }
  /// The same for vn^T; in memory vn has tokens as rows.
  template <class Visit>
  __device__ void for_each_stored_error(int chunk, uint32_t (&vn)[4][4], Visit&& visit) const {
    T* to = static_cast<T*>(a.vn) + (tile(chunk) * v_tiles() + u_tile) * kChunk * kVTile;
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = step * 16 + i / 2 * 8 + lane / 4;
        const int piece = (u_column + warp * 16) / 8 + i % 2;
        visit(vn[step][i],
              reinterpret_cast<uint32_t*>(to + swizzled<kVTile>(token, piece) + lane % 4 * 2));
      }
  }

  /// chunk_o: the outputs of one chunk from its stored state and errors.
  __device__ void run_outputs() {
    copy_q(0);
    copy_A(0);
    uint32_t rounded[kSteps][4], vn[4][4];
    for_each_stored_state(0, rounded, [](uint32_t& pair, const uint32_t* at) { pair = *at; });
    for_each_stored_error(
        0, vn, [](uint32_t& pair, const uint32_t* at) { pair = ptx::transpose_8x8(*at); });
    float error[kTokenTiles][4];
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 pair = ptx::unpack<T>(vn[n / 2][n % 2 * 2 + half]);
        error[n][2 * half] = pair.x;
        error[n][2 * half + 1] = pair.y;
      }
    float o[kTokenTiles][4] = {};
    ptx::cp_async_wait<0>();
    __syncthreads();
    read_state(rounded, s.qg, o);
    inner_outputs(error, vn, o);
    store_outputs(0, o);
  }

  /// The chain of chunks: state to state, and what the outputs need of each.
  __device__ void run_chain() {
    copy_w(0);
    copy_k(0);
    load_start();
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      uint32_t rounded[kSteps][4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
        round_pairs(state[2 * step], state[2 * step + 1], rounded[step]);
      if constexpr (kUse == DeltaUse::kStates)
        for_each_stored_state(chunk, rounded, [](uint32_t& pair, uint32_t* at) { *at = pair; });
      if constexpr (kForward) {
        if (chunk > 0) ptx::named_sync<2 * kThreads>(kTaken);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
          s.states[warp][step][lane] = {rounded[step][0], rounded[step][1], rounded[step][2],
                                        rounded[step][3]};
      }
      float error[kTokenTiles][4] = {};
      if (chunk == 0)
        ptx::cp_async_wait<1>();
      else
        ptx::cp_async_wait<0>();
      ptx::named_sync<kThreads>(kChainGroup);  // w, u are here; kg of the last chunk is free
      if (chunk > 0) copy_k(chunk);
      read_state(rounded, s.w, error);
      prediction_error(error);
      if constexpr (kForward) {
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n)
          s.errors[warp][n][lane] = {error[n][0], error[n][1], error[n][2], error[n][3]};
        __threadfence_block();
        ptx::named_arrive<2 * kThreads>(kGiven);
      }
      uint32_t vn[4][4];
#pragma unroll
      for (int step = 0; step < 4; ++step)
        round_pairs(error[2 * step], error[2 * step + 1], vn[step]);
      if constexpr (kUse == DeltaUse::kStates)
        for_each_stored_error(chunk, vn,
                              [](uint32_t& pair, uint32_t* at) { *at = ptx::transpose_8x8(pair); });
      ptx::cp_async_wait<0>();
      ptx::named_sync<kThreads>(kChainGroup);  // kg is here; w, u are free
      copy_w(chunk + 1);
      update_state(error, vn);
      if (kUse != DeltaUse::kScan && a.checkpoints.base) {
        const int64_t done = min(span.end, span.begin + (chunk + 1) * kChunk) -
                             sequence_span(a.map, span.sequence).begin;
        if (done % a.checkpoint_every == 0)
          store_to(a.checkpoints, state_slot(a.checkpoints, checkpoint++));
      }
    }
    if (kForward && num_chunks > 0) ptx::named_sync<2 * kThreads>(kTaken);
    ptx::cp_async_wait<0>();
    store_end();
  }

  /// Forward, beside the chain: the outputs of each chunk.
  __device__ void run_chain_outputs() {
    copy_q(0);
    copy_A(0);
    prefetch(1);
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      prefetch(chunk + 2);
      ptx::named_sync<2 * kThreads>(kGiven);
      uint32_t rounded[kSteps][4], vn[4][4];
      float error[kTokenTiles][4], o[kTokenTiles][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint4 x = s.states[warp][step][lane];
        rounded[step][0] = x.x, rounded[step][1] = x.y, rounded[step][2] = x.z,
        rounded[step][3] = x.w;
      }
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        const float4 x = s.errors[warp][n][lane];
        error[n][0] = x.x, error[n][1] = x.y, error[n][2] = x.z, error[n][3] = x.w;
      }
      ptx::named_arrive<2 * kThreads>(kTaken);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        round_pairs(error[2 * step], error[2 * step + 1], vn[step]);
      ptx::cp_async_wait<1>();
      ptx::named_sync<kThreads>(kOutputGroup);  // qg is here
      read_state(rounded, s.qg, o);
      ptx::cp_async_wait<0>();
      ptx::named_sync<kThreads>(kOutputGroup);  // Aqk is here; qg is free
      copy_q(chunk + 1);
      inner_outputs(error, vn, o);
      ptx::named_sync<kThreads>(kOutputGroup);  // Aqk is free
      copy_A(chunk + 1);
      store_outputs(chunk, o);
    }
    ptx::cp_async_wait<0>();
  }
};

/// Threads of a block: forward has a second group of warps, for the outputs.
template <int kWarps, DeltaUse kUse>
constexpr int kBlockThreads = kWarps * 32 * (kUse == DeltaUse::kForward ? 2 : 1);

template <class T, int kK, int kWarps, DeltaUse kUse>
__global__ void __launch_bounds__(kBlockThreads<kWarps, kUse>)
    chunk_delta_h_kernel(const __grid_constant__ ChunkDeltaHArgs a) {
  constexpr int kColumns = kWarps * 16;
  const int tid = threadIdx.x % (kWarps * 32);
  if (kUse != DeltaUse::kScan && kUse != DeltaUse::kOutputs && blockIdx.x == 0 && a.flags) {
    const int64_t checkpoints =
        a.checkpoints.base ? checkpoints_before(a.map, a.checkpoint_every, a.map.num_sequences) : 0;
    write_metadata_flags({a.flags, a.accumulate_flags, a.map, 1, checkpoints}, a.initial,
                         a.final_state, a.checkpoints);
    __syncthreads();
  }
  const int v_blocks = (a.shape.V + kColumns - 1) / kColumns;
  const int k_blocks = kUse == DeltaUse::kScan ? (a.shape.K + kColumns - 1) / kColumns : 0;
  const int blocks = v_blocks + k_blocks;
  int block = static_cast<int>(blockIdx.x % static_cast<unsigned>(blocks));
  using K = Kernel<T, kK, kWarps, kUse>;
  K kernel{a, *reinterpret_cast<typename K::S*>(ptx::dynamic_shared()), tid, tid / 32, tid % 32};
  const auto HV = static_cast<unsigned>(a.shape.HV);
  kernel.head = blockIdx.x / static_cast<unsigned>(blocks) % HV;
  kernel.unit = blockIdx.x / static_cast<unsigned>(blocks) / HV;
  if constexpr (kUse == DeltaUse::kOutputs) {
    const ChunkTokens chunk = chunk_tokens(a.map, kernel.unit);
    if (chunk.count == 0) return;
    kernel.span = {chunk.sequence, chunk.begin, chunk.begin + chunk.count};
  } else {
    kernel.span = span_of(a.map, kernel.unit);
  }
  if (kUse == DeltaUse::kScan && a.skip_last &&
      kernel.span.end == sequence_span(a.map, kernel.span.sequence).end)
    return;
  kernel.transition = kUse == DeltaUse::kScan && block >= v_blocks;
  if (kernel.transition) block -= v_blocks;
  kernel.u_tile = block * kColumns / kVTile;
  kernel.u_column = block * kColumns % kVTile;
  kernel.column = block * kColumns + kernel.warp * 16;
  kernel.chunk0 = kUse == DeltaUse::kOutputs ? kernel.unit : first_chunk(a.map, kernel.span);
  kernel.num_chunks = static_cast<int>(chunks_of(kernel.span.end - kernel.span.begin));
  if constexpr (kUse == DeltaUse::kOutputs) {
    kernel.run_outputs();
    return;
  }
  if (kUse != DeltaUse::kScan && a.checkpoints.base)
    kernel.checkpoint =
        checkpoints_before(a.map, a.checkpoint_every, kernel.span.sequence) +
        (kernel.span.begin - sequence_span(a.map, kernel.span.sequence).begin) / a.checkpoint_every;
  if (threadIdx.x < kWarps * 32)
    kernel.run_chain();
  else if constexpr (kUse == DeltaUse::kForward)
    kernel.run_chain_outputs();
}

template <class T, int kK, int kWarps, DeltaUse kUse>
Status launch(const ChunkDeltaHArgs& args, const Launch& where) {
  constexpr int kColumns = kWarps * 16;
  const auto blocks_of = [](int64_t columns) { return (columns + kColumns - 1) / kColumns; };
  const int64_t spans = kUse == DeltaUse::kOutputs ? args.num_chunks
                        : args.map.segments        ? args.map.num_spans
                                                   : args.map.num_sequences;
  const int64_t blocks =
      spans * args.shape.HV *
      (blocks_of(args.shape.V) + (kUse == DeltaUse::kScan ? blocks_of(args.shape.K) : 0));
  constexpr int kShared = sizeof(typename Kernel<T, kK, kWarps, kUse>::S);
  static_assert(kShared <= kMostShared);
  return launch_kernel("chunk_delta_h", chunk_delta_h_kernel<T, kK, kWarps, kUse>, blocks,
                       kBlockThreads<kWarps, kUse>, kShared, where, args);
}

template <class T, int kK, int kWarps>
Status launch_use(const ChunkDeltaHArgs& args, DeltaUse use, const Launch& where) {
  switch (use) {
    case DeltaUse::kForward: return launch<T, kK, kWarps, DeltaUse::kForward>(args, where);
    case DeltaUse::kScan: return launch<T, kK, kWarps, DeltaUse::kScan>(args, where);
    case DeltaUse::kStates: return launch<T, kK, kWarps, DeltaUse::kStates>(args, where);
    case DeltaUse::kOutputs: break;
  }
  return launch<T, kK, 4, DeltaUse::kOutputs>(args, where);
}

template <class T, int kK>
Status launch_width(const ChunkDeltaHArgs& args, DeltaUse use, bool narrow, const Launch& where) {
  return narrow ? launch_use<T, kK, 2>(args, use, where) : launch_use<T, kK, 4>(args, use, where);
}

}  // namespace

Status launch_chunk_delta_h(const ChunkDeltaHArgs& args, DeltaUse use, bool half, bool narrow,
                            const Launch& where) {
  if (args.shape.K <= 64)
    return half ? launch_width<__half, 64>(args, use, narrow, where)
                : launch_width<__nv_bfloat16, 64>(args, use, narrow, where);
  return half ? launch_width<__half, 128>(args, use, narrow, where)
              : launch_width<__nv_bfloat16, 128>(args, use, narrow, where);
}

}  // namespace kda::cuda
