// SPDX-License-Identifier: Apache-2.0
// What the emulated GPU is.
#pragma once

namespace emulator {

/// Its compute capability: 90, or what KDA_EMULATED_CAPABILITY says.
int capability();
/// Bytes of shared memory that a block may have there.
int most_shared_bytes();

}  // namespace emulator
