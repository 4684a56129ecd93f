// SPDX-License-Identifier: Apache-2.0
// Calls with a tail on a GPU (docs/design/decode.md, "Tails"): a decode, and a forward around one
// without a tail.
#pragma once

#include "cuda/decode/decode.hpp"
#include "cuda/launch/launch.hpp"
#include "registry/rows.hpp"

namespace kda::cuda::recurrent {

// tail_plan.cpp, in every build

/// Whether states and rows lie without gaps, at multiples of 16 bytes: fast kernels need that.
bool in_vectors(const Problem& p);
/// Books and lists what tail_decode() launches.
void plan_tail_decode(plan::PlanBuilder& builder);
std::string decline_tail_decode(const registry::Request& request);
extern const registry::TailForward kTailForward;

// tails.cpp

/// `base`: of make_decode_args(), its bias a channel.
Status tail_decode(const stage::Call& call, const DecodeArgs& base, const Launch& where);
Status tail_forward(const stage::Call& call,
                    const std::function<Status(const stage::Call& inner)>& forward);

// launches.cpp

/// Fills the arguments of kernels of decode, and makes the maps of a call.
Status make_decode_args(const stage::Call& call, DecodeArgs* args);

}  // namespace kda::cuda::recurrent
