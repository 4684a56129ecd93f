// SPDX-License-Identifier: Apache-2.0
// Stages "span_maps" and "fold_states" (equations: kda/span.hpp).
#pragma once

#include "kda/span.hpp"
#include "stage/call.hpp"

namespace kda::stage {

struct SpanMapsCall {
  Call call;
  const SpanMaps& maps;
};

}  // namespace kda::stage
