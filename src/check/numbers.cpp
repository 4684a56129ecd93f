// SPDX-License-Identifier: Apache-2.0
#include "check/numbers.hpp"

#include <cctype>
#include <cmath>
#include <limits>

namespace kda::check {

bool has_leading_zero(std::string_view text) {
  if (!text.empty() && text[0] == '-') text.remove_prefix(1);
  return text.size() > 1 && text[0] == '0' &&
         std::isdigit(static_cast<unsigned char>(text[1])) != 0;
}

const char* parse_real(std::string_view text, double* value) {
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, *value);
  constexpr const char* kRange = "is outside the range of fp32, 0 and magnitudes 1.2e-38..3.4e38";
  if (at != end || text.empty() || has_leading_zero(text)) return "is not a number";
  if (error == std::errc::result_out_of_range) return kRange;
  if (error != std::errc()) return "is not a number";
  if (!std::isfinite(*value)) return "is not a finite number";
  const float single = static_cast<float>(*value);
  if (std::isinf(single)) return kRange;
  if (*value != 0 && std::abs(single) < std::numeric_limits<float>::min()) return kRange;
  return nullptr;
}

std::string write_real(double value) {
  char digits[32];
  return {digits, std::to_chars(digits, digits + sizeof digits, value).ptr};
}

}  // namespace kda::check
