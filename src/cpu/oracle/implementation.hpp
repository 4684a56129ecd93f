// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "registry/rows.hpp"

namespace kda::cpu::oracle {

/// Registry rows of the float64 reference; the only implementation that allocates while it runs.
extern const registry::ForwardRow kForward;
extern const registry::DecodeRow kDecode;
extern const registry::BackwardRow kBackward;

}  // namespace kda::cpu::oracle
