// SPDX-License-Identifier: Apache-2.0
// JsonWriter: indented JSON into a string. The library's own, because it must survive a failed
// allocation, which a document tree's destructor does not; the tools parse with a JSON library.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace kda {

class JsonWriter {
 public:
  JsonWriter& begin_object() { return open('{'); }
  JsonWriter& end_object() { return close('}'); }
  JsonWriter& begin_array() { return open('['); }
  JsonWriter& end_array() { return close(']'); }

  JsonWriter& key(std::string_view name) {
    separate();
    quote(name);
    text_ += ": ";
    after_key_ = true;
    return *this;
  }

  JsonWriter& value(std::string_view text) {
    separate();
    quote(text);
    return *this;
  }
  JsonWriter& value(const char* text) { return value(std::string_view(text)); }
  JsonWriter& value(bool truth) { return raw(truth ? "true" : "false"); }
  JsonWriter& value(int64_t number) { return raw(std::to_string(number)); }
  JsonWriter& value(int32_t number) { return raw(std::to_string(number)); }
  JsonWriter& value(std::size_t number) { return raw(std::to_string(number)); }
  JsonWriter& value(double number) {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%.17g", number);
    return raw(digits);
  }
  JsonWriter& null() { return raw("null"); }

  template <class T>
  JsonWriter& member(std::string_view name, const T& content) {
    return key(name).value(content);
  }

  std::string take() { return std::move(text_); }

 private:
  JsonWriter& raw(std::string_view text) {
    separate();
    text_ += text;
    return *this;
  }

  JsonWriter& open(char bracket) {
    separate();
    text_ += bracket;
    ++depth_;
    first_ = true;
    return *this;
  }

  JsonWriter& close(char bracket) {
    --depth_;
    if (!first_) new_line();
    first_ = false;
    text_ += bracket;
    return *this;
  }

  /// Comma and new line before the next member, but not after a key.
  void separate() {
    if (after_key_) {
      after_key_ = false;
      return;
    }
    if (depth_ == 0) return;
    if (!first_) text_ += ',';
    first_ = false;
    new_line();
  }

  void new_line() {
    text_ += '\n';
    text_.append(2 * depth_, ' ');
  }

  void quote(std::string_view text) {
    text_ += '"';
    for (const char c : text) {
      if (c == '"' || c == '\\') text_ += '\\';
      if (static_cast<unsigned char>(c) < 0x20) {
        char escaped[8];
        std::snprintf(escaped, sizeof(escaped), "\\u%04x", c);
        text_ += escaped;
      } else {
        text_ += c;
      }
    }
    text_ += '"';
  }

  std::string text_;
  std::size_t depth_ = 0;
  bool first_ = true;
  bool after_key_ = false;
};

}  // namespace kda
