// SPDX-License-Identifier: Apache-2.0
// From a checked Call to what kernels are given.
#pragma once

#include <span>

#include "core/layout.hpp"
#include "cuda/launch/launch.hpp"
#include "cuda/launch/sequence_map.hpp"
#include "cuda/tile/arguments.hpp"
#include "cuda/tile/head_gates.hpp"
#include "stage/forward.hpp"

namespace kda::cuda {

RowView row_view(const TensorDesc& desc, const void* base);
StateView state_view(const Problem& p, const std::optional<StateDesc>& desc, void* base,
                     const int32_t* indices, const uint8_t* mask);
/// Dense fp32 states [spans, HV, K, columns] of segments.
StateView span_states(const Problem& p, const float* base, int64_t columns);
GateView gate_view(const Problem& p, const Tensors& t);
Shape shape_of(const Problem& p);
StateView initial_view(const Problem& p, const Tensors& t);

/// The maps of a call, uploaded or made on the device in the workspace.
struct SequenceMaps {
  SequenceMap map;
  const int64_t* segment_offsets = nullptr;
  int32_t* flags = nullptr;       ///< null: no device metadata to flag
  bool accumulate_flags = false;  ///< the map kernel has set the word
  bool launched = false;          ///< a kernel that writes them is under way
};

/// Launches what makes the maps: nothing for a plain batch; one kernel for cu_seqlens or segments
/// (a few for thousands of sequences). `prepared`: an earlier stage of this run() has made them.
/// `rest`: gets zeros in rows of no sequence where only the device knows the lengths.
Status make_sequence_maps(const stage::Call& call, std::span<const Segment> segments, bool prepared,
                          SequenceMaps* maps, const WrittenTensor& rest = {});

/// Arguments of a kernel that makes the maps of lengths that only the device knows; `maps` says
/// where they are.
SequenceMapArgs sequence_map_args(const stage::Call& call, const SequenceMaps& maps,
                                  const WrittenTensor& rest = {});

/// Launches a kernel that itself waits for those before it (ptx/pdl.cuh): with PDL behind one of
/// `maps`.
Launch launch_after(const stage::Call& call, const SequenceMaps& maps);

/// The members that kernels of tokens share: shape, map, q, k, v, g, beta, gate.
template <class Args>
void set_inputs(const stage::Call& call, const SequenceMaps& maps, Args* args) {
  const Problem& p = call.problem;
  const Tensors& t = call.tensors;
  args->shape = shape_of(p);
  args->map = maps.map;
  args->q = row_view(p.q, t.q);
  args->k = row_view(p.k, t.k);
  args->v = row_view(p.v, t.v);
  args->g = row_view(p.g, t.g);
  args->beta = row_view(p.beta, t.beta);
  args->gate = gate_view(p, t);
}

/// Whether a call is for the kernels of HeadGates arguments (head_gates.cu of each folder).
inline bool needs_head_gates(const Problem& p) {
  return has_head_gate(p) || p.head_map != HeadMap::kGrouped;
}

/// Their arguments.
template <class Args>
HeadGates<Args> with_head_gates(const Problem& p, const Args& args) {
  HeadGates<Args> with{args};
  with.gate_step = has_head_gate(p) ? 0 : 1;
  with.tiled = p.head_map == HeadMap::kTiled;
  with.one_bias = has_head_bias(p);
  return with;
}

/// Sets the outputs of a forward: o, initial and final states, checkpoints, flags.
template <class Args>
void set_outputs(const stage::Call& call, const SequenceMaps& maps, Args* args) {
  const Problem& p = call.problem;
  const Tensors& t = call.tensors;
  args->o = row_view(p.o, t.o);
  args->initial = initial_view(p, t);
  args->final_state = state_view(p, p.final_state, t.final_state, t.final_state_indices, nullptr);
  args->checkpoints = state_view(p, p.checkpoints, t.checkpoints, t.checkpoint_indices, nullptr);
  args->checkpoint_every = p.checkpoint_every;
  args->flags = maps.flags;
  args->accumulate_flags = maps.accumulate_flags;
}

}  // namespace kda::cuda
