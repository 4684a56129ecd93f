// SPDX-License-Identifier: Apache-2.0
// One bias a head for kernels that read a bias a channel: the rows [HV, K] of the block kHeadBias.
// A backward has the bias there, and where it is done with that the gradient of each channel.
#pragma once

#include "cuda/launch/launch.hpp"
#include "cuda/tile/arguments.hpp"

namespace kda::stage {
struct Backward;
struct Call;
}  // namespace kda::stage

namespace kda::cuda {

struct HeadBiasArgs {
  float* rows = nullptr;  ///< [HV, K], dense
  float* bias = nullptr;  ///< [HV]; read by one kernel, written by the other
  int64_t stride = 0;     ///< elements of bias from head to head
  int64_t heads = 0;      ///< HV
  int64_t channels = 0;   ///< K
};

Status launch_expand_bias(const HeadBiasArgs& args, const Launch& launch);
Status launch_sum_bias(const HeadBiasArgs& args, const Launch& launch);

/// Fills the rows of a call that needs them, and points `gate` to them.
Status expand_bias(const stage::Call& call, GateView* gate);
/// The gradient of one bias a head, from rows that hold that of each channel.
Status sum_bias(const stage::Backward& b);

}  // namespace kda::cuda
