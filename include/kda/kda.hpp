// SPDX-License-Identifier: Apache-2.0
// The whole C++ API: validate -> plan -> run; and the operations around KDA in its layer.
#pragma once

#include "kda/backward.hpp"
#include "kda/fused_decode.hpp"
#include "kda/gated_rms_norm.hpp"
#include "kda/plan.hpp"
#include "kda/plan_cache.hpp"
#include "kda/problem.hpp"
#include "kda/run.hpp"
#include "kda/short_conv.hpp"
#include "kda/span.hpp"
#include "kda/stages.hpp"
#include "kda/status.hpp"
#include "kda/tensor.hpp"
#include "kda/types.hpp"
#include "kda/version.h"
#include "kda/workspace.hpp"
