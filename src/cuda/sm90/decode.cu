// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/decode.hpp"

#include <algorithm>

#include "cuda/host/launch.cuh"
#include "cuda/ptx/bulk.cuh"
#include "cuda/ptx/ptx.cuh"
#include "cuda/tile/decode_token.cuh"
#include "cuda/tile/metadata.cuh"
#include "cuda/tile/state_io.cuh"

namespace kda::cuda {
namespace {

constexpr int kConsumerWarps = 8;
constexpr int kConsumers = 32 * kConsumerWarps;
constexpr int kThreads = kConsumers + 32;
constexpr int kTokens = 4;  // prepared ahead

template <int kK>
constexpr int kStates = kK == 128 ? 3 : 6;  // in shared memory: 192 KB, 96 KB
template <int kK>
constexpr int kBlocksPerSm = kK == 128 ? 1 : 2;

enum class Step : int32_t { kFirst, kNext, kEnd };  // first token of a unit, a later one, no more

/// A token as the producer hands it on.
template <int kK>
struct alignas(16) Entry {
  DecodeToken<kK> token;
  float v[kK];
  float beta;
  Step step;
  int64_t o_at;       // offset of its row of o
  int64_t target_at;  // offset of the state to write, or -1
};

template <int kK>
struct alignas(128) Shared {
  float states[kStates<kK>][kK * kK];  // as the pool has them: fp32, or bf16 in the first half
  Entry<kK> entries[kTokens];
  float read[2][kConsumerWarps][kK];  // partial S^T k, by parity of the token
  float out[2][kConsumerWarps][kK];   // partial S^T q
  uint64_t state_full[kStates<kK>], state_empty[kStates<kK>];
  uint64_t entry_full[kTokens], entry_empty[kTokens];
};

/// Position in a ring of kSize, with the parity of its round.
template <int kSize>
struct Ring {
  int at = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++at == kSize) at = 0, parity ^= 1;
  }
};

template <int kK>
struct Producer {
  const DecodeArgs& a;
  Shared<kK>& s;
  const int lane;
  unsigned unit;  // of all sequences and heads
  int64_t sequence = 0, head = 0, begin = 0, source = -1;
  int64_t tokens = 0, t = 0;
  Ring<kStates<kK>> state;
  Ring<kTokens> entry;
  RawQK<kK> qk;
  RawGates<kK> gates;
  float v[kK / 32], beta = 0;

  /// Moves to the next sequence and head with something to do; false: there is none.
  __device__ bool next_unit() {
    const auto HV = static_cast<unsigned>(a.shape.HV);
    for (; unit < a.map.num_sequences * HV; unit += gridDim.x) {
      sequence = unit / HV;
      head = unit % HV;
      const Span span = sequence_span(a.map, sequence);
      begin = span.begin;
      tokens = min(span.end - span.begin, most_tokens(a));
      source = source_slot(a, sequence);
      if (source >= 0 && tokens > 0) return true;
    }
    return false;
  }

  __device__ int64_t state_at(int64_t slot) const {
    return slot * a.pool.stride_slot + head * a.pool.stride_head;
  }

  __device__ void fetch_state() {
    const uint32_t bytes = kK * kK * (a.pool.bf16 ? 2 : 4);
    const uint32_t full = ptx::shared_address(&s.state_full[state.at]);
    ptx::barrier_wait(ptx::shared_address(&s.state_empty[state.at]), state.parity ^ 1);
    if (lane == 0) {
      const char* from =
          static_cast<const char*>(a.pool.base) + state_at(source) * (a.pool.bf16 ? 2 : 4);
      ptx::barrier_arrive_expect(full, bytes);
      ptx::bulk_load(ptx::shared_address(s.states[state.at]), from, bytes, full);
    }
    state.advance();
  }

  __device__ void load_token() {
    const int64_t n = sequence, token = begin + t;
    const int64_t q_head = static_cast<unsigned>(head) /
                           (static_cast<unsigned>(a.shape.HV) / static_cast<unsigned>(a.shape.H));
    qk.load(a, n, token, q_head);
    gates.load(a, n, token, head);
    load_lane(a.v, row_offset(a.v, a.map, n, token, head), kK, v);
    beta = load_element(a.beta.base, a.beta.type, row_offset(a.beta, a.map, n, token, head));
  }

  __device__ void publish(Step step) {
    Entry<kK>& e = s.entries[entry.at];
    ptx::barrier_wait(ptx::shared_address(&s.entry_empty[entry.at]), entry.parity ^ 1);
    if (step != Step::kEnd) {
      qk.prepare(a, e.token);
      gates.prepare(a, head, e.token);
#pragma unroll
      for (int i = 0; i < kK / 32; ++i) e.v[lane + 32 * i] = v[i];
    }
    if (lane == 0) {
      e.step = step;
      if (step != Step::kEnd) {
        e.beta = beta_value(a.gate, beta);
        e.o_at = row_offset(a.o, a.map, sequence, begin + t, head);
        const int64_t slot = target_slot(a, sequence, t, t + 1 == tokens, source);
        e.target_at = slot < 0 ? -1 : state_at(slot);
      }
    }
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(ptx::shared_address(&s.entry_full[entry.at]));
    entry.advance();
  }

  __device__ void run() {
    for (; next_unit(); unit += gridDim.x) {
      fetch_state();
      for (t = 0; t < tokens; ++t) {
        load_token();
        publish(t == 0 ? Step::kFirst : Step::kNext);
      }
    }
    publish(Step::kEnd);
  }
};

/// Eight warps hold one state: a warp has kK / 8 of its rows, a lane 4 elements of each of its own.
template <int kK, bool kVK>
struct Consumer {
  static constexpr int kRowLanes = kK / 4;
  static constexpr int kRows = kK / kConsumerWarps * kRowLanes / 32;
  static constexpr int kShare = kRowLanes / kRows;  // vk: lanes that end with the same sum

  const DecodeArgs& a;
  Shared<kK>& s;
  const int warp, lane;
  float S[kRows][4];

  __device__ int row(int r) const {
    return warp * (kK / kConsumerWarps) + lane / kRowLanes * kRows + r;
  }
  __device__ int first() const { return lane % kRowLanes * 4; }

  template <bool kBf16>
  __device__ void read_state(const float* state) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float4 x = load4<kBf16>(state, row(r) * kK + first());
      S[r][0] = x.x, S[r][1] = x.y, S[r][2] = x.z, S[r][3] = x.w;
    }
  }
  template <bool kBf16>
  __device__ void write_state(int64_t at) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      store4<kBf16>(a.pool.base, at + row(r) * kK + first(),
                    make_float4(S[r][0], S[r][1], S[r][2], S[r][3]));
  }

  __device__ static void spread(const float* from, float (&x)[4]) {
    const float4 y = *reinterpret_cast<const float4*>(from);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  }
  __device__ void store_output(const Entry<kK>& e, int column, float o) const {
    store_element(a.o.base, a.o.type, e.o_at + column, a.gate.scale * o);
  }

  // S' = decay S;  r = S'^T k;  vn = beta (v - r);  o = scale (S'^T q + (q.k) vn);  S = S' + k vn^T

  /// Rows are channels: sums over the rows of a warp, then over warps.
  __device__ void step_kv(const Entry<kK>& e, int parity) {
    float read[4] = {}, out[4] = {};
#pragma unroll
    for (int r = 0; r < kRows; r += 4) {
      float decay[4], k[4], q[4];
      spread(e.token.decay + row(r), decay);
      spread(e.token.k + row(r), k);
      spread(e.token.q + row(r), q);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          S[r + i][c] *= decay[i];
          read[c] = fmaf(S[r + i][c], k[i], read[c]);
          out[c] = fmaf(S[r + i][c], q[i], out[c]);
        }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      read[c] = sum_over(read[c], kRowLanes, 32);
      out[c] = sum_over(out[c], kRowLanes, 32);
    }
    if (lane < kRowLanes) {
      *reinterpret_cast<float4*>(&s.read[parity][warp][first()]) =
          make_float4(read[0], read[1], read[2], read[3]);
      *reinterpret_cast<float4*>(&s.out[parity][warp][first()]) =
          make_float4(out[0], out[1], out[2], out[3]);
    }
    ptx::named_sync<kConsumers>(1);
    float sum[4] = {}, v_new[4];
#pragma unroll
    for (int w = 0; w < kConsumerWarps; ++w) {
      float x[4];
      spread(&s.read[parity][w][first()], x);
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] += x[c];
    }
    spread(e.v + first(), v_new);
#pragma unroll
    for (int c = 0; c < 4; ++c) v_new[c] = e.beta * (v_new[c] - sum[c]);
#pragma unroll
    for (int r = 0; r < kRows; r += 4) {
      float k[4];
      spread(e.token.k + row(r), k);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) S[r + i][c] = fmaf(k[i], v_new[c], S[r + i][c]);
    }
    if (warp != 0 || lane >= kRowLanes) return;
    float o[4] = {};
#pragma unroll
    for (int w = 0; w < kConsumerWarps; ++w) {
      float x[4];
      spread(&s.out[parity][w][first()], x);
#pragma unroll
      for (int c = 0; c < 4; ++c) o[c] += x[c];
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) store_output(e, first() + c, fmaf(e.token.qk, v_new[c], o[c]));
  }

  /// Rows are values: sums within a warp.
  __device__ void step_vk(const Entry<kK>& e) {
    float decay[4], k[4], q[4], read[kRows] = {}, out[kRows] = {};
    spread(e.token.decay + first(), decay);
    spread(e.token.k + first(), k);
    spread(e.token.q + first(), q);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        S[r][c] *= decay[c];
        read[r] = fmaf(S[r][c], k[c], read[r]);
        out[r] = fmaf(S[r][c], q[c], out[r]);
      }
    reduce_scatter<kRows, kRowLanes / 2>(read);
    reduce_scatter<kRows, kRowLanes / 2>(out);
    const int mine = row(lane % kRowLanes / kShare);
    const float v_new = e.beta * (e.v[mine] - read[0]);
    if (lane % kShare == 0) store_output(e, mine, fmaf(e.token.qk, v_new, out[0]));
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float v = __shfl_sync(~0u, v_new, lane / kRowLanes * kRowLanes + r * kShare);
#pragma unroll
      for (int c = 0; c < 4; ++c) S[r][c] = fmaf(k[c], v, S[r][c]);
    }
  }

  __device__ void arrive(uint64_t* barrier) const {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(ptx::shared_address(barrier));
  }

  __device__ void run() {
    Ring<kStates<kK>> state;
    Ring<kTokens> entry;
    for (int parity = 0;; parity ^= 1, entry.advance()) {
      ptx::barrier_wait(ptx::shared_address(&s.entry_full[entry.at]), entry.parity);
      const Entry<kK>& e = s.entries[entry.at];
      if (e.step == Step::kEnd) return;
      if (e.step == Step::kFirst) {
        ptx::barrier_wait(ptx::shared_address(&s.state_full[state.at]), state.parity);
        a.pool.bf16 ? read_state<true>(s.states[state.at]) : read_state<false>(s.states[state.at]);
        arrive(&s.state_empty[state.at]);
        state.advance();
      }
      if constexpr (kVK)
        step_vk(e);
      else
        step_kv(e, parity);
      const int64_t target_at = e.target_at;
      arrive(&s.entry_empty[entry.at]);
      if (target_at >= 0)
        a.pool.bf16 ? write_state<true>(target_at) : write_state<false>(target_at);
    }
  }
};

template <int kK, bool kVK>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<kK>)
    decode_sm90_kernel(const __grid_constant__ DecodeArgs a) {
#if KDA_BULK_COPIES
  auto& s = *reinterpret_cast<Shared<kK>*>(ptx::dynamic_shared());
  if (blockIdx.x == 0 && a.flags)
    write_metadata_flags(
        {a.flags, a.accumulate_flags, a.map, a.index_columns, 0, a.num_accepted, most_tokens(a)},
        a.pool, {}, {});
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStates<kK>; ++i) {
      ptx::barrier_init(ptx::shared_address(&s.state_full[i]), 1);
      ptx::barrier_init(ptx::shared_address(&s.state_empty[i]), kConsumerWarps);
    }
    for (int i = 0; i < kTokens; ++i) {
      ptx::barrier_init(ptx::shared_address(&s.entry_full[i]), 1);
      ptx::barrier_init(ptx::shared_address(&s.entry_empty[i]), kConsumerWarps);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == kConsumerWarps) {
    Producer<kK> producer{a, s, lane, blockIdx.x};
    producer.run();
  } else {
    Consumer<kK, kVK> consumer{a, s, warp, lane, {}};
    consumer.run();
  }
#endif
}

template <int kK>
Status launch(const DecodeArgs& args, int num_sms, const Launch& where) {
  const int64_t units = args.map.num_sequences * args.shape.HV;
  // Units are counted in 32 bits: past them, launch_kernel() refuses as for any other grid.
  const int64_t blocks =
      units > INT32_MAX ? units : std::min(units, int64_t{kBlocksPerSm<kK>} * num_sms);
  const auto run = [&](auto kernel) {
    return launch_kernel("decode_sm90", kernel, blocks, kThreads, sizeof(Shared<kK>), where, args);
  };
  return args.pool.vk ? run(decode_sm90_kernel<kK, true>) : run(decode_sm90_kernel<kK, false>);
}

}  // namespace

bool decode_sm90_serves(const DecodeArgs& args, int compute_capability) {
  const StateView& pool = args.pool;
  const int64_t K = args.shape.K, sixteen_bytes = pool.bf16 ? 8 : 4;
  return compute_capability >= 90 && compute_capability < 120 && (K == 64 || K == 128) &&
         args.shape.V == K && pool.stride_row == K && pool.stride_head % sixteen_bytes == 0 &&
         pool.stride_slot % sixteen_bytes == 0 && reinterpret_cast<uintptr_t>(pool.base) % 16 == 0;
}

Status launch_decode_sm90(const DecodeArgs& args, int num_sms, const Launch& where) {
  return args.shape.K == 64 ? launch<64>(args, num_sms, where) : launch<128>(args, num_sms, where);
}

}  // namespace kda::cuda
