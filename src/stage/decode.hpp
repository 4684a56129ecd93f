// SPDX-License-Identifier: Apache-2.0
// Stage "decode": a few tokens a sequence, one read and one write of a state (one write a token
// with state_index_columns S > 1). With a final_state of its own the states are those of forward:
//   sequence n reads initial_state (absent, masked or no slot: zeros), writes final_state
//   S > 1: without a slot it is skipped; the state after token t goes to slot [n, t] of final_state
// In place:
//   sequence n reads slot idx[n, num_accepted[n] - 1]; without a slot it is skipped
//   S = 1: writes the state after the last token to the slot that was read
//   S > 1: writes the state after token t to slot idx[n, t]; none skips that write
#pragma once

#include "stage/call.hpp"

namespace kda::stage {

struct Decode {
  Call call;
};

}  // namespace kda::stage
