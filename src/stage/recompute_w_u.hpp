// SPDX-License-Identifier: Apache-2.0
// Stage "recompute_w_u": w, u and, where they are not null, kg, qg again from the inputs and a
// stored T (equations: stage/chunk_intra.hpp). Nothing else is written.
#pragma once

#include "kda/stages.hpp"
#include "stage/call.hpp"

namespace kda::stage {

struct RecomputeWU {
  Call call;
  const StageTensors& buffers;
};

}  // namespace kda::stage
