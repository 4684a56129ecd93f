// SPDX-License-Identifier: Apache-2.0
// Checks of the calls around KDA, which have no plan: include/kda/short_conv.hpp,
// include/kda/gated_rms_norm.hpp and include/kda/fused_decode.hpp. What lies on a device is not
// read.
#pragma once

#include <span>

#include "core/text.hpp"
#include "core/views.hpp"
#include "kda/fused_decode.hpp"
#include "kda/gated_rms_norm.hpp"
#include "kda/short_conv.hpp"

namespace kda {

/// Where the memory of a call has to be.
struct Memory {
  /// Null: nothing is asked.
  Status (*pointer)(const char* name, const void* pointer) = nullptr;

  Status check(const char* name, const void* given) const {
    return pointer ? pointer(name, given) : Status{};
  }
  Status check_each(std::span<const NamedView> views) const {
    KDA_RETURN_IF_ERROR(kda::check_each(views));
    for (const NamedView& given : views) KDA_RETURN_IF_ERROR(check(given.name, given.view->data));
    return {};
  }
};

Status check_short_conv(const ShortConv& call, const Memory& memory);
Status check_short_conv_backward(const ShortConv& call, const ShortConvGradients& gradients,
                                 const Memory& memory);
Status check_gated_rms_norm(const GatedRmsNorm& call, const Memory& memory);
Status check_gated_rms_norm_backward(const GatedRmsNorm& call,
                                     const GatedRmsNormGradients& gradients, const Memory& memory);
Status check_fused_decode(const FusedDecode& call, const Memory& memory);
/// kUnsupported where no kernel has the whole of a step that check_fused_decode() has passed.
Status decline_fused_decode(const FusedDecode& call);

}  // namespace kda
