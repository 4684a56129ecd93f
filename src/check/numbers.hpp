// SPDX-License-Identifier: Apache-2.0
// Numbers as texts of files and of the command line: decimal, whole, nothing around them.
#pragma once

#include <charconv>
#include <concepts>
#include <string>
#include <string_view>

namespace kda::check {

/// Whether digits begin with a zero that another one follows: some programs read octal then.
bool has_leading_zero(std::string_view text);

/// Decimal digits, for signed types after a `-` too. False for anything else, also for digits that
/// leave the range of Integer.
template <std::integral Integer>
bool parse_whole(std::string_view text, Integer* value) {
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, *value);
  return error == std::errc() && at == end && !has_leading_zero(text);
}

/// A finite decimal number that fp32 holds: 0, or of a magnitude in 1.2e-38..3.4e38. Returns null,
/// or what is wrong with it, to be put behind the text.
const char* parse_real(std::string_view text, double* value);

/// The shortest text that parse_real() reads back.
std::string write_real(double value);

}  // namespace kda::check
