// SPDX-License-Identifier: Apache-2.0
// Buffer: owned bytes, aligned to 64. One that does not fit into memory is a kda::Error with its
// size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "core/text.hpp"

namespace kda::io {

class Buffer {
 public:
  static constexpr std::size_t kAlignment = 64;

  Buffer() = default;
  explicit Buffer(std::size_t bytes) : data_(allocate(bytes)), size_(bytes) {}
  Buffer(const Buffer& other) : Buffer(other.size_) {
    if (size_ > 0) std::memcpy(data(), other.data(), size_);
  }
  Buffer(Buffer&& other) noexcept
      : data_(std::move(other.data_)), size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data_.get());
  }
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(data_.get());
  }
  std::size_t size() const { return size_; }
  void fill(unsigned char byte) {
    if (size_ > 0) std::memset(data(), byte, size_);
  }

 private:
  struct Release {
    void operator()(std::byte* data) const { std::free(data); }
  };
  static std::unique_ptr<std::byte[], Release> allocate(std::size_t bytes) {
    // At least one line, so that empty tensors have an address too.
    void* memory = bytes > SIZE_MAX - kAlignment
                       ? nullptr
                       : std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment);
    if (!memory)
      throw Error(Status(StatusCode::kOutOfMemory, cat(bytes, " bytes do not fit into memory")));
    return std::unique_ptr<std::byte[], Release>(static_cast<std::byte*>(memory));
  }

  std::unique_ptr<std::byte[], Release> data_;
  std::size_t size_ = 0;
};

}  // namespace kda::io
