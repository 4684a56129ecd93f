// SPDX-License-Identifier: Apache-2.0
// Launches of the staged backward, from checked calls: the functions of its row.
#pragma once

#include "stage/backward.hpp"
#include "stage/span_maps.hpp"

namespace kda::cuda::staged {

Status backward(const stage::Backward& args);
Status span_backward_begin(const stage::SpanBackwardBegin& args);
Status span_backward_finish(const stage::Backward& args);

}  // namespace kda::cuda::staged
