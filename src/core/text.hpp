// SPDX-License-Identifier: Apache-2.0
// Message building: cat("v: HV = ", 6) -> "v: HV = 6".
#pragma once

#include <charconv>
#include <concepts>
#include <string>
#include <string_view>

#include "core/return_if_error.hpp"
#include "kda/status.hpp"

namespace kda {

inline void append(std::string& out, std::string_view part) { out += part; }
inline void append(std::string& out, char part) { out += part; }
/// Numbers as a stream has them: six digits of those that are not whole. (Without a stream: a plan
/// has several texts, and making streams was a good part of its time.)
template <class Number>
requires std::integral<Number> || std::floating_point<Number>
void append(std::string& out, Number part) {
  char digits[32];
  std::to_chars_result end;
  if constexpr (std::integral<Number>)
    end = std::to_chars(digits, digits + sizeof digits, part);
  else
    end = std::to_chars(digits, digits + sizeof digits, part, std::chars_format::general, 6);
  out.append(digits, end.ptr);
}

template <class... Parts>
std::string cat(const Parts&... parts) {
  std::string out;
  (append(out, parts), ...);
  return out;
}

template <class... Parts>
Status invalid(const Parts&... parts) {
  return Status(StatusCode::kInvalidArgument, cat(parts...));
}

}  // namespace kda
