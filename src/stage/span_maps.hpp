// SPDX-License-Identifier: Apache-2.0
// Stages "span_maps" and "fold_states", "span_begin" and "span_finish", and those of a backward
// (equations: kda/span.hpp).
#pragma once

#include "kda/span.hpp"
#include "stage/backward.hpp"
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

struct SpanBackwardBegin {
  const Backward& backward;
  const SpanGradients& spans;
};

}  // namespace kda::stage
