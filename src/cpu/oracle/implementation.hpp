// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "stage/implementation.hpp"

namespace kda::cpu::oracle {

/// Registry row of the float64 reference; the only implementation that allocates while it runs.
extern const stage::Implementation kOracle;

}  // namespace kda::cpu::oracle
