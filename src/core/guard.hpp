// SPDX-License-Identifier: Apache-2.0
// guarded(): turns whatever escapes from `body` into a Status; the API never throws.
#pragma once

#include <new>
#include <system_error>

#include "kda/status.hpp"

namespace kda {

template <class Body>
Status guarded(Body&& body) noexcept {
  // Literals short enough for the small-string buffer: building them cannot allocate.
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kOutOfMemory, "out of memory");
  } catch (const std::system_error&) {
    return Status(StatusCode::kOutOfResources, "thread failed");
  } catch (...) {
    return Status(StatusCode::kInternal, "internal error");
  }
}

}  // namespace kda
