// SPDX-License-Identifier: Apache-2.0
// Launches of cuda.smxx.recurrent, from checked calls: the functions of its rows.
#pragma once

#include "stage/decode.hpp"
#include "stage/forward.hpp"
#include "stage/segment_scan.hpp"

namespace kda::cuda::recurrent {

/// Whether decode stores states of tokens beside those that it reads, or its tokens are a tree:
/// cuda/decode/drafts.cu does that.
inline bool decodes_drafts(const Problem& p) {
  return p.state_index_columns > 1 && (p.final_state || p.token_parents);
}

Status forward(const stage::Forward& args);
Status decode(const stage::Decode& args);
Status segment_scan(const stage::SegmentScan& args);

}  // namespace kda::cuda::recurrent
