// SPDX-License-Identifier: Apache-2.0
// The emulated GPU has a compute capability, and the shared memory of cards of that capability.
#pragma once

namespace emulator {

/// Its compute capability: 90, or what KDA_EMULATED_CAPABILITY says.
int capability();
/// Bytes of shared memory that a block may have there.
int most_shared_bytes();

}  // namespace emulator
