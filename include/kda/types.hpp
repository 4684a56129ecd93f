// SPDX-License-Identifier: Apache-2.0
// Enumerations of the operation. Values are part of the C ABI: lists only grow.
#pragma once

#include <cstdint>

namespace kda {

enum class DType : int32_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat64 = 5,  ///< computed by backend oracle alone, on the CPU
  kInt16 = 6,    ///< the lower plane of split states (SplitDesc)
};

/// How `g` becomes the log decay, all in fp32, x = g + dt_bias, a = exp(A_log).
enum class GateMode : int32_t {
  kLog = 0,       ///< g is the natural-log decay itself; positive values are computed, not refused
  kSoftplus = 1,  ///< -a softplus(x); A_log required, dt_bias optional
  kBounded = 2,   ///< lower_bound sigmoid(a x); A_log optional (a = 1), dt_bias optional
};

/// How `beta` becomes the step size of the delta rule.
enum class BetaMode : int32_t {
  kPlain = 0,     ///< as given
  kSigmoid = 1,   ///< sigmoid(beta)
  kSigmoid2 = 2,  ///< 2 sigmoid(beta): negative eigenvalues allowed
};

/// Which q/k head a value head j reads, of H q/k heads and HV value heads.
enum class HeadMap : int32_t {
  kGrouped = 0,  ///< j / (HV / H): neighbours share one
  kTiled = 1,    ///< j % H: those H apart share one
};

/// Memory order of a state: [.., K, V] or [.., V, K].
enum class StateLayout : int32_t { kKV = 0, kVK = 1 };

/// A function that a short convolution's output or the gate of a norm goes through.
enum class Activation : int32_t {
  kNone = 0,     ///< x
  kSilu = 1,     ///< x sigmoid(x), also called swish
  kSigmoid = 2,  ///< sigmoid(x)
};

enum class DeviceKind : int32_t { kCpu = 0, kCuda = 1 };

/// Bits of the workspace block "device_flags" after a CUDA call (see run()).
enum MetadataFlag : int32_t {
  /// cu_seqlens decreases or leaves 0..T: clamped; or it does not begin with 0 and end with T: rows
  /// of no sequence are 0 (docs/planning.md)
  kBadSequences = 1,
  kBadInitialIndex = 2,  ///< initial_state_indices too large: starts from zero, or skipped
  kBadFinalIndex = 4,    ///< final_state_indices too large: state not stored
  /// checkpoint_indices too large, or of a sequence of at least checkpoint_every tokens an entry of
  /// checkpoint_offsets that is no checkpoint of it: checkpoint not stored
  kBadCheckpointIndex = 8,
  kBadAcceptedTokens = 16,  ///< num_accepted_tokens out of 1..S: sequence skipped
  /// more tokens than index columns: the rest is left out; with a tail, more than it takes or than
  /// token_parents has columns: sequence skipped
  kTooManyDecodeTokens = 32,
  kBadTokenParents = 64,  ///< token_parents[n, t] not below t, or without a slot: as if negative
  /// positions, sources, accepted_rows or tail.folded do not fit each other: a head whose word does
  /// not fit is skipped, with the others all heads of the sequence. Nobody looks for slots
  /// or sources that two sequences have
  kBadTail = 128,
};

/// Bytes of one element.
int64_t dtype_size(DType dtype) noexcept;
/// "fp32", "bf16", "fp16", "int32", "int64", "fp64", "int16"
const char* dtype_name(DType dtype) noexcept;
const char* gate_mode_name(GateMode mode) noexcept;           ///< "log", "softplus", "bounded"
const char* beta_mode_name(BetaMode mode) noexcept;           ///< "plain", "sigmoid", "sigmoid2"
const char* head_map_name(HeadMap map) noexcept;              ///< "grouped", "tiled"
const char* state_layout_name(StateLayout layout) noexcept;   ///< "kv", "vk"
const char* activation_name(Activation activation) noexcept;  ///< "none", "silu", "sigmoid"
const char* device_kind_name(DeviceKind kind) noexcept;       ///< "cpu", "cuda"

}  // namespace kda
