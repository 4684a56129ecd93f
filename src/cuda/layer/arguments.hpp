// SPDX-License-Identifier: Apache-2.0
// Arguments of the kernels around KDA: plain structs, filled by src/cuda/layer/launches.cpp.
#pragma once

#include "core/host_device.hpp"
#include "cuda/launch/launch.hpp"
#include "cuda/tile/arguments.hpp"

namespace kda::cuda::layer {

/// [.., .., ..], strides in elements; those of dimensions of size 1 are 0.
struct View {
  void* base = nullptr;  ///< null: none
  int64_t strides[4] = {};
  Element type = Element::kFloat32;
  bool wide = false;  ///< what a thread has of its channels may be read as one vector
};

/// Inputs before the tokens, [slots, D, S].
struct ConvStates {
  View view;
  int64_t num_slots = 0;
  const int32_t* indices = nullptr;  ///< null: sequence n has slot n
  int64_t first_slot = 0;            ///< an index below it means none
};

/// Tokens in runs of `run`, each for the threads of some blocks. Rows of the batch are sequences,
/// or packed sequences lie in one row; a sequence's states belong to the run that it begins in.
struct Runs {
  int64_t num_sequences = 0, num_tokens = 0;  ///< N, T
  const void* lengths = nullptr;              ///< [N + 1], looked at by the kernel alone
  bool wide_lengths = false;                  ///< int64
  int64_t run = 1, runs = 1;                  ///< tokens of a run, runs of a row
};

struct ShortConvArgs {
  Runs runs;
  int64_t channels = 0;
  int32_t width = 4, silu = 0;
  View x, y;                ///< [row, token, channel]
  View weight;              ///< [channel, tap]
  View bias;                ///< [channel] or none
  bool dense_taps = false;  ///< four taps a channel, as a vector
  ConvStates initial, final_state;
  int64_t state_width = 0;
  const uint8_t* has_state = nullptr;
};

struct ShortConvBackwardArgs {
  ShortConvArgs forward;    ///< without y and final_state
  View dy, dx;              ///< or none
  View d_final, d_initial;  ///< [sequence, channel, entry] or none
  float* parts =
      nullptr;  ///< [runs of all rows, width + 1, D]: sums for dweight and dbias, or null
};

struct NormArgs {
  int64_t rows = 0;  ///< below 2^31
  Divisor heads, tokens;
  int32_t channels = 0, activation = 0;
  float eps = 0;
  View x, y, gate;     ///< [batch, token, head], channels side by side; gate or none
  View weight;         ///< [channel] or none
  int64_t groups = 1;  ///< of rows: row r is of group r mod groups
};

struct NormBackwardArgs {
  NormArgs forward;        ///< without y
  View dy, dx, dgate;      ///< dx, dgate or none
  float* parts = nullptr;  ///< [blocks, D], of long rows [groups, D]: sums for dweight
};

/// Columns of `parts` added up in fp64, in one order: column j D + c is dweight[c, j], behind the
/// taps dbias[c].
struct SumArgs {
  const float* parts = nullptr;  ///< [num_parts, (taps + 1 with dbias) D]
  int64_t num_parts = 0, columns = 0;
  int64_t row = 0;  ///< columns of `parts`
  int64_t channels = 0, taps = 1;
  View dweight, dbias;
};

/// A head's channels of q, k or v and its convolution.
struct DecodePart {
  View x;       ///< [sequence, token, channel]
  View weight;  ///< [channel, tap]
  View bias;    ///< [channel] or none
  View state;   ///< [slot, channel, entry]
};

/// include/kda/fused_decode.hpp
struct FusedDecodeArgs {
  int64_t num_sequences = 0;
  int32_t num_tokens = 1, width = 4;
  Divisor heads;
  DecodePart parts[3];  ///< q, k, v
  int64_t state_width = 3;
  View g, beta;  ///< [sequence, token, head, channel]
  GateView gate;
  StateView states;  ///< indices are the slots, mask is has_state
  bool norm = true;
  float norm_eps = 0;
  Activation activation = Activation::kSigmoid;
  View norm_weight;     ///< [channel] or none
  View output_gate, y;  ///< [sequence, token, head, channel]; output_gate or none
  uint32_t ahead = 0;   ///< how many blocks on is the one whose state a block prefetches
};

/// Channels that a thread has where they may be read as vectors (`wide`; the convolution: and its
/// width is 4); else one, but of the norm's forward as many.
inline constexpr int kWideForward = 8, kWideBackward = 4;

/// Threads of a block of the norm's kernels, and lanes of a row: a power of two.
inline constexpr int kNormThreads = 128;
KDA_HOST_DEVICE_INLINE int lanes_of(int vector, int64_t channels) {
  int lanes = 1;
  while (lanes < 32 && lanes * vector < channels) lanes *= 2;
  return lanes;
}

Status launch_short_conv(const ShortConvArgs& args, bool wide, const Launch& launch);
Status launch_short_conv_backward(const ShortConvBackwardArgs& args, bool wide,
                                  const Launch& launch);
Status launch_norm(const NormArgs& args, bool wide, const Launch& launch);
Status launch_norm_backward(const NormBackwardArgs& args, bool wide, const Launch& launch);
Status launch_fused_decode(const FusedDecodeArgs& args, const Launch& launch);
Status launch_sum(const SumArgs& args, const Launch& launch);

}  // namespace kda::cuda::layer
