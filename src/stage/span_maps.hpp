// SPDX-License-Identifier: Apache-2.0
// Stages "span_maps" and "fold_states", "span_begin" and "span_finish" (equations: kda/span.hpp).
#pragma once

#include "kda/span.hpp"
#include "stage/call.hpp"

namespace kda::stage {

struct SpanMapsCall {
  Call call;
  const SpanMaps& maps;
};

struct SpanFinish {
  Call call;
  const float* states_in;  ///< [N, HV, K, V]
};

}  // namespace kda::stage
