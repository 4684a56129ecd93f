// SPDX-License-Identifier: Apache-2.0
// Launches of the operations around KDA, from checked calls: the functions of their row.
#pragma once

#include "kda/fused_decode.hpp"
#include "kda/gated_rms_norm.hpp"
#include "kda/short_conv.hpp"

namespace kda::cuda::layer {

Status short_conv(const ShortConv& call);
Status short_conv_backward(const ShortConv& call, const ShortConvGradients& gradients);
Status gated_rms_norm(const GatedRmsNorm& call);
Status gated_rms_norm_backward(const GatedRmsNorm& call, const GatedRmsNormGradients& gradients);
Status fused_decode(const FusedDecode& call);

}  // namespace kda::cuda::layer
