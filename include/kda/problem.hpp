// SPDX-License-Identifier: Apache-2.0
// Problem: everything that a plan must know about one operation, apart from the lengths of the
// sequences and the pointers. A plain value; validate() says whether it is legal.
//
// Wherever a floating type is named, fp64 is allowed too, in any mix. Backend oracle alone computes
// such problems, on the CPU, in float64 throughout; every other one declines them.
//
// Per sequence and value head, with S [K, V] and t = 1..T (docs/operation.md):
//   S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T
//   o_t = scale * S_t^T q_t
#pragma once

#include <cstdint>
#include <optional>

#include "kda/status.hpp"
#include "kda/tensor.hpp"
#include "kda/types.hpp"

namespace kda {

inline constexpr int64_t kMaxHeadDim = 256;  ///< largest K and V
/// Most tokens a sequence in one decode call, where the host knows the lengths: forward is faster
/// for more. Lengths that only a device knows are not looked at; all tokens are computed.
inline constexpr int64_t kMaxDecodeTokens = 8;
inline constexpr int64_t kCheckpointMultiple = 16;

enum class Operation : int32_t {
  kForward = 0,  ///< any number of tokens; chunked
  kDecode = 1,   ///< 1..8 tokens a sequence, one read and one write of the state
};
const char* operation_name(Operation operation) noexcept;  ///< "forward", "decode"

/// A buffer of states, [num_slots, HV, K, V] (kv) or [num_slots, HV, V, K] (vk), fp32 or bf16.
struct StateDesc {
  TensorDesc tensor;
  int64_t num_slots = 0;
  /// false: sequence n (or checkpoint c) uses slot n (c), and num_slots must be that count.
  /// true: an int32 index array picks the slot. An index below Problem::first_slot, and so any
  /// negative one, means none; any number of sequences may have none.
  bool indexed = false;
};

/// Tails are folded up to multiples of so many tokens.
inline constexpr int64_t kTailBoundary = 16;
inline constexpr int64_t kMaxTailRows = 256;

/// Splits the boundary states of a bf16 pool: an fp32 number is its bf16, rounded to nearest with
/// ties away from zero, in initial_state, and 16 bits in `rest`. As integers, number = (bf16 << 16)
/// + rest. Tokens read bf16 alone, folds read and write all bits. So a fold makes v_new anew from
/// all bits, which takes v and beta of its rows.
struct SplitDesc {
  TensorDesc rest;  ///< [num_slots, HV, K, V], or [.., V, K], as initial_state; int16
  TensorDesc v;     ///< [num_slots, HV, R, V]  rows of Problem::v as they came in, of its type
  TensorDesc beta;  ///< [num_slots, HV, R]  likewise of beta
};

/// Tails of a pool of boundary states (docs/design/decode.md, "Tails"). A slot has a boundary state
/// S_0, and rows of the tokens since then: the row of position p is p mod R.
struct TailDesc {
  TensorDesc k;           ///< [num_slots, H, R, K]  rows of Problem::k as they came in, of its type
  TensorDesc g;           ///< [num_slots, HV, R, K]  likewise of g; one gate a head: last stride 0
  TensorDesc v_new;       ///< [num_slots, HV, R, V]  fp32
  TensorDesc folded;      ///< [num_slots, HV]  int32, tokens in front of S_0, equal in all heads
  int64_t num_slots = 0;  ///< that of initial_state
  int64_t rows = kTailBoundary;  ///< R, 16..256: a decode takes up to R - 15 tokens a sequence
  bool sources = false;          ///< int32 [N]: slots to read S_0 from until the first fold
  int64_t accepted_columns = 0;  ///< of accepted_rows, int32 [N, accepted_columns]; 0: none
  /// Decode: all rows are folded first, not those up to a multiple of 16 alone. Without tokens that
  /// leaves plain states.
  bool settle = false;
  /// Rows are made, as in the rings that engines keep beside their states: keys are normalised
  /// where qk_l2norm says so, g has log decays, one a channel, in fp32, k and v_new are fp32, bf16
  /// or fp16. positions[n] rows lie in front of the token, from row 0 on; who calls counts them,
  /// and `folded` is not there. Decode, of one token a sequence without cu_seqlens. A token behind
  /// R - 1 rows, or whose word of `flush` is not 0, is folded with all of them into S_0 behind it,
  /// and leaves no row: the next one has none in front. R is 1..256.
  bool ring = false;
  bool flush = false;              ///< of a ring: int32 [N]
  std::optional<SplitDesc> split;  ///< absent: boundary states are what initial_state has
};

struct Problem {
  Operation operation = Operation::kForward;

  int64_t batch = 1;            ///< B; must be 1 with cu_seqlens
  int64_t num_tokens = 0;       ///< T, a row of the batch (all sequences together with cu_seqlens)
  int64_t num_heads = 1;        ///< H, heads of q and k
  int64_t num_value_heads = 1;  ///< HV, a multiple of H; head_map says who reads which
  int64_t key_dim = 128;        ///< K, 1..256
  int64_t value_dim = 128;      ///< V, 1..256
  int64_t num_sequences = 1;    ///< N; equals B without cu_seqlens

  TensorDesc q;  ///< [B, T, H, K]   bf16, fp16 or fp32
  TensorDesc k;  ///< [B, T, H, K]
  TensorDesc v;  ///< [B, T, HV, V]
  /// [B, T, HV, K]  raw gate or log decay, see gate_mode. An innermost stride of 0 is one gate a
  /// head, [B, T, HV] in memory (Gated DeltaNet).
  TensorDesc g;
  TensorDesc beta;  ///< [B, T, HV]
  TensorDesc o;     ///< [B, T, HV, V]  output

  HeadMap head_map = HeadMap::kGrouped;  ///< the q/k head of a value head

  GateMode gate_mode = GateMode::kLog;
  double lower_bound = -5.0;  ///< of GateMode::kBounded; -1e35..-1e-35
  /// [HV] fp32. The CPU refuses values above 70 (softplus) or 88 (bounded): exp(A_log) times what
  /// it multiplies would leave fp32. What a GPU makes of them: docs/operation.md.
  std::optional<TensorDesc> A_log;
  /// [HV, K] fp32; beside one gate a head its innermost stride may be 0: [HV], one bias a head.
  std::optional<TensorDesc> dt_bias;
  BetaMode beta_mode = BetaMode::kPlain;
  bool qk_l2norm = false;       ///< x * rsqrt(sum x^2 + 1e-6) over each row of q and k
  std::optional<double> scale;  ///< of the outputs; 0 or 1e-35..1e35 in size; default K^-1/2

  /// int32 or int64 [N + 1], first 0, last T; sequences are chunked from their own start. Where
  /// only a device knows it, the last may be below T: rows of o, dq, dk, dv, dg and dbeta behind it
  /// are 0.
  std::optional<DType> cu_seqlens;

  StateLayout state_layout = StateLayout::kKV;  ///< of every state of this problem
  std::optional<StateDesc> initial_state;       ///< absent: zeros
  bool initial_state_mask = false;              ///< uint8 [N]: 0 starts the sequence from zero
  std::optional<StateDesc> final_state;         ///< may be the pool of initial_state
  std::optional<StateDesc> checkpoints;         ///< forward only; see checkpoint_every
  /// Multiple of 16: the state after every so many tokens of a sequence; sequence n has
  /// floor(length / checkpoint_every) of them, sequences in order.
  int64_t checkpoint_every = 0;
  /// int32 [N]: one checkpoint a sequence, the state after its first checkpoint_offsets[n] tokens,
  /// a multiple of checkpoint_every up to its length; 0 or less: none. checkpoints must be indexed;
  /// its index array is [N] then, and where it names no slot the offset is not looked at.
  bool checkpoint_offsets = false;

  /// The first slot that an index array can name, at most the num_slots of each indexed buffer: 1
  /// where slot 0 is the null block of padded rows, as in vLLM. A sequence that has no slot starts
  /// from zero (initial_state_indices) or is not stored (final_state_indices,
  /// checkpoint_indices); decode in place skips it, and where first_slot is above 0 its outputs are
  /// 0, as with zero_skipped. States below first_slot are neither read nor written.
  int64_t first_slot = 0;

  /// Decode without final_state works in place, in the pool initial_state, and skips a sequence
  /// that has no slot. Columns of its index array [N, S]: 1: the final state is stored in its slot;
  /// that of a sequence without tokens is its initial state, zero where initial_state_mask is 0.
  /// S > 1: the state after token t is stored in slot [n, t] (none skips it), so that a sequence
  /// without tokens stores nothing, and the state is read from slot
  /// [n, num_accepted_tokens[n] - 1].
  /// Decode with final_state and S > 1, drafts that commit nothing: the state is read from the slot
  /// of initial_state that its index array [N] names, a sequence without one is skipped, and the
  /// state after token t goes to slot [n, t] of final_state, whose index array is [N, S]. No token
  /// changes initial_state, unless both are one pool and share a slot.
  int64_t state_index_columns = 1;
  bool num_accepted_tokens = false;  ///< int32 [N], values 1..S; absent: all 1; in place only
  /// S > 1: int32 [N, S], the drafts of a sequence are a tree. Token t > 0 follows token
  /// token_parents[n, t] < t in the place of token t - 1; the entry of token 0 is not looked at. A
  /// negative one ends the sequence before token t: no token from there on is computed, or stored.
  /// The state of a parent that is not token t - 1 is read from where it was stored, so that it
  /// needs a slot; in a buffer of bf16 it has been rounded.
  bool token_parents = false;
  /// Decode in place or with S > 1: o is 0 where no token of a sequence is computed, as of a
  /// skipped one. Else such rows of o are left alone. A first_slot above 0 implies it.
  /// Forward, whose initial_state must be indexed: o is 0 in the rows of a sequence that has no
  /// slot there; its other states are stored as without it. Such a forward has no backward.
  bool zero_skipped = false;

  /// A sequence's result depends on nothing but itself, bit for bit (the CPU is always so).
  bool batch_invariant = false;

  /// initial_state holds boundary states, in slots that are indexed, and is written by folds alone.
  /// Forward takes any number of tokens, all of them sure, and folds up to the last multiple of 16.
  /// Decode folds before its tokens, of which all but the first may be drafts: token_parents has
  /// state_index_columns columns then, and slots have one.
  std::optional<TailDesc> tail;
};

/// Checks all that can be known without pointers and lengths: sizes, overflow, strides, types,
/// combinations. The message names the first offending field.
Status validate(const Problem& problem) noexcept;

/// A dense buffer of `num_slots` states of the sizes and the layout of `problem`.
StateDesc states(const Problem& problem, DType dtype, int64_t num_slots,
                 bool indexed = false) noexcept;

/// A dense tail of `rows` rows for the sizes, the types and the slots of `problem`.
TailDesc tails(const Problem& problem, int64_t rows) noexcept;

/// A description of the tensors that split the states of `problem`, dense, for a tail of `rows`
/// rows.
SplitDesc split_states(const Problem& problem, int64_t rows) noexcept;

/// The scale in effect: problem.scale or K^-1/2.
double effective_scale(const Problem& problem) noexcept;

}  // namespace kda
