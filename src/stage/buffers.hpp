// SPDX-License-Identifier: Apache-2.0
// The one table of buffers: names, types and shapes of what stages hand on, and which stage reads
// or writes each. Sizes, checks, the workspace, the C ABI and its Python mirror follow from it.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include "kda/run.hpp"
#include "kda/stages.hpp"

namespace kda::stage {

/// Dimensions that a shape is written in. Numbers of 1 and more are themselves.
enum Dim : int16_t {
  kEnd = 0,    ///< no further dimension
  kDimK = -1,  ///< K
  kDimV = -2,
  kDimHV = -3,
  kDimRows = -4,    ///< of M, B and states_in: SegmentRows
  kDimTokens = -5,  ///< B T
  kDimTiles = -6,   ///< chunks of the batch, times HV
  kDimKp = -7,      ///< K rounded up to 64 or 128
  kDimVt = -8,      ///< 64-column tiles of V
};

enum class ElementType {
  kInput,  ///< that of q: bf16 or fp16
  kFloat,
  kInt64,
};

using Dims = std::array<int16_t, 4>;

struct BufferSpec {
  const char* name;
  ElementType type;
  Dims shape;
};

/// Numbers that the symbols of shapes stand for in one plan.
struct DimValues {
  std::size_t rows = 0, tokens = 0, tiles = 0;
  std::size_t K = 0, V = 0, HV = 0;

  std::size_t of(int16_t dim) const {
    switch (dim) {
      case kEnd: return 1;
      case kDimK: return K;
      case kDimV: return V;
      case kDimHV: return HV;
      case kDimRows: return rows;
      case kDimTokens: return tokens;
      case kDimTiles: return tiles;
      case kDimKp: return K <= 64 ? 64 : 128;
      case kDimVt: return (V + 63) / 64;
      default: return static_cast<std::size_t>(dim);
    }
  }
};

inline DimValues dims_of(const Problem& p) {
  return {.tokens = static_cast<std::size_t>(p.batch * p.num_tokens),
          .K = static_cast<std::size_t>(p.key_dim),
          .V = static_cast<std::size_t>(p.value_dim),
          .HV = static_cast<std::size_t>(p.num_value_heads)};
}

inline std::size_t element_bytes(ElementType type) {
  return type == ElementType::kInput ? 2 : type == ElementType::kFloat ? 4 : 8;
}

/// Bytes of one entry along the outermost dimension. Fits: no dimension inside is above 65,535.
inline std::size_t entry_bytes(const BufferSpec& spec, const DimValues& values) {
  std::size_t bytes = element_bytes(spec.type);
  for (std::size_t i = 1; i < spec.shape.size(); ++i) bytes *= values.of(spec.shape[i]);
  return bytes;
}

// -- Segments (stage/segment_scan.hpp, _merge, _correct); dense, in the kv layout

inline constexpr BufferSpec kSegmentM = {
    "segment_M", ElementType::kFloat, {kDimRows, kDimHV, kDimK, kDimK}};
inline constexpr BufferSpec kSegmentB = {
    "segment_B", ElementType::kFloat, {kDimRows, kDimHV, kDimK, kDimV}};
inline constexpr BufferSpec kSegmentStates = {
    "segment_states", ElementType::kFloat, {kDimRows, kDimHV, kDimK, kDimV}};
inline constexpr BufferSpec kOutputFromZero = {
    "output_from_zero", ElementType::kFloat, {kDimTokens, kDimHV, kDimV}};
/// Qt. The fused kernel's has rows of its own (cuda/launch/blocks.hpp).
inline constexpr BufferSpec kTransitionOutput = {
    "transition_output", ElementType::kFloat, {kDimTokens, kDimHV, kDimK}};
inline constexpr BufferSpec kExitToken = {"exit_token", ElementType::kInt64, {kDimRows, kDimHV}};

// -- Stages of the chunked forward (include/kda/stages.hpp)

enum ChunkStage : unsigned {
  kIntra = 1,
  kRecomputeWU = 2,
  kDeltaH = 4,
  kO = 8,
};

struct ChunkBuffer {
  BufferSpec spec;
  unsigned needed;  ///< by these ChunkStages; others take a null pointer
  std::size_t StageSizes::*bytes;
  std::string_view block;  ///< its name in the workspace of run(); empty: run() has none
};

/// In the order of StageTensors, kda_stages and kda_stage_bytes.
inline constexpr std::array<ChunkBuffer, 11> kChunkBuffers = {{
    {{"w", ElementType::kInput, {kDimTiles, 64, kDimKp}},
     kIntra | kRecomputeWU | kDeltaH,
     &StageSizes::w,
     "factor_w"},
    {{"u", ElementType::kInput, {kDimTiles, kDimVt, 64, 64}},
     kIntra | kRecomputeWU | kDeltaH,
     &StageSizes::u,
     "factor_u"},
    {{"kg", ElementType::kInput, {kDimTiles, 64, kDimKp}}, kDeltaH, &StageSizes::kg, "factor_kg"},
    {{"qg", ElementType::kInput, {kDimTiles, 64, kDimKp}}, kO, &StageSizes::qg, "factor_qg"},
    {{"Aqk", ElementType::kInput, {kDimTiles, 64, 64}},
     kIntra | kO,
     &StageSizes::Aqk,
     "factor_Aqk"},
    {{"T", ElementType::kInput, {kDimTiles, 64, 64}}, kRecomputeWU, &StageSizes::T, ""},
    {{"gamma", ElementType::kFloat, {kDimTiles, kDimKp}},
     kIntra | kDeltaH,
     &StageSizes::gamma,
     "factor_scalars"},
    {{"beta", ElementType::kFloat, {kDimTiles, 64}},
     kIntra | kDeltaH,
     &StageSizes::beta,
     "factor_scalars"},
    {{"diag", ElementType::kFloat, {kDimTiles, 64}},
     kIntra | kO,
     &StageSizes::diag,
     "factor_scalars"},
    {{"h", ElementType::kInput, {kDimTiles, kDimVt, 64, kDimKp}}, kDeltaH | kO, &StageSizes::h, ""},
    {{"vn", ElementType::kInput, {kDimTiles, kDimVt, 64, 64}}, kDeltaH | kO, &StageSizes::vn, ""},
}};

/// The pointers of `tensors`, in the order of kChunkBuffers.
using ChunkPointers = std::array<void*, kChunkBuffers.size()>;
static_assert(sizeof(StageTensors) == sizeof(ChunkPointers));

inline ChunkPointers chunk_pointers(const StageTensors& s) {
  return {s.w, s.u, s.kg, s.qg, s.Aqk, s.T, s.gamma, s.beta, s.diag, s.h, s.vn};
}

/// Bytes of every buffer, for `tiles` tiles.
inline StageSizes chunk_sizes(const Problem& p, std::size_t tiles) {
  DimValues values = dims_of(p);
  values.tiles = tiles;
  StageSizes sizes;
  sizes.tiles = tiles;
  for (const ChunkBuffer& buffer : kChunkBuffers)
    sizes.*buffer.bytes = tiles * entry_bytes(buffer.spec, values);
  return sizes;
}

}  // namespace kda::stage
