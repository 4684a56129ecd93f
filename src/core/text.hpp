// SPDX-License-Identifier: Apache-2.0
// Message building: cat("v: HV = ", 6) -> "v: HV = 6".
#pragma once

#include <sstream>
#include <string>

#include "kda/status.hpp"

namespace kda {

template <class... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream out;
  out.exceptions(std::ios::badbit);  // a stream would swallow bad_alloc and lose the text
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
Status invalid(const Parts&... parts) {
  return Status(StatusCode::kInvalidArgument, cat(parts...));
}

}  // namespace kda

/// Returns from the enclosing function unless the status is ok.
#define KDA_RETURN_IF_ERROR(expression)                                                  \
  do {                                                                                   \
    if (::kda::Status kda_status_ = (expression); !kda_status_.ok()) return kda_status_; \
  } while (false)
