// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kda/status.hpp"

/// Returns from the enclosing function unless the status is ok.
#define KDA_RETURN_IF_ERROR(expression)                                                  \
  do {                                                                                   \
    if (::kda::Status kda_status_ = (expression); !kda_status_.ok()) return kda_status_; \
  } while (false)
