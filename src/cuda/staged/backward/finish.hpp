// SPDX-License-Identifier: Apache-2.0
// Stage backward_gradients of the staged backward: from the rows of chunk_grad to what the caller
// gets. Value heads of a q/k head are added up in order; then back through the L2 norm, y = x r:
// dx = r (dy - x r^2 (x . dy)), and through gates and step sizes (stage/backward.hpp). The sums for
// A_log and dt_bias over every 64 tokens go to `sums`.
#pragma once

#include "cuda/recurrent/backward/backward.hpp"
#include "cuda/tile/head_gates.hpp"

namespace kda::cuda {

/// Reads q, k, g, beta, gate, rows; writes dq, dk, dg, dbeta, sums. q, k, and g of a gate a
/// channel, have rows that begin at multiples of two elements; K is a multiple of 4 and at most
/// 128.
Status launch_finish_gradients(const HeadGates<BackwardArgs>& args, const Launch& launch);

}  // namespace kda::cuda
