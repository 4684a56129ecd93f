// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "core/text.hpp"

namespace kda::io {
namespace {

using nlohmann::json;

constexpr std::size_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr int kMaxDepth = 127;                     // that of the format's own reader
constexpr const char* kMetadata = "__metadata__";

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(invalid(parts...));
}

/// Every type of the format; those with a DType can be loaded.
struct DTypeRow {
  const char* name;
  uint64_t bits;
  std::optional<DType> dtype;
};
constexpr DTypeRow kDTypes[] = {{"F32", 32, DType::kFloat32},
                                {"BF16", 16, DType::kBFloat16},
                                {"F16", 16, DType::kFloat16},
                                {"I32", 32, DType::kInt32},
                                {"I64", 64, DType::kInt64},
                                {"BOOL", 8, {}},
                                {"F4", 4, {}},
                                {"F6_E2M3", 6, {}},
                                {"F6_E3M2", 6, {}},
                                {"U8", 8, {}},
                                {"I8", 8, {}},
                                {"F8_E5M2", 8, {}},
                                {"F8_E4M3", 8, {}},
                                {"F8_E8M0", 8, {}},
                                {"F8_E4M3FNUZ", 8, {}},
                                {"F8_E5M2FNUZ", 8, {}},
                                {"I16", 16, {}},
                                {"U16", 16, {}},
                                {"U32", 32, {}},
                                {"C64", 64, {}},
                                {"F64", 64, DType::kFloat64},
                                {"U64", 64, {}}};

/// A tensor as the header has it.
struct Entry {
  std::string name;
  uint64_t begin = 0, end = 0;
  const DTypeRow* type = nullptr;
  bool wanted = false;
  std::vector<int64_t> shape;  ///< kept where the tensor is wanted
};

struct Header {
  std::vector<Entry> entries;
  std::map<std::string, std::string> metadata;
};

/// Reads a header in one pass; nlohmann::json calls it for every token. (A tree of a million
/// entries would take gigabytes.)
class HeaderReader {
 public:
  HeaderReader(Header* header, const std::vector<std::string>& wanted)
      : header_(header), wanted_(wanted) {}

  bool null() { return scalar("null"); }
  bool boolean(bool) { return scalar("a boolean"); }
  bool number_integer(int64_t) { return scalar("a negative number"); }
  bool number_float(double, const std::string&) {
    return scalar("a number with a fraction or an exponent");
  }
  bool binary(json::binary_t&) { return scalar("binary"); }

  bool number_unsigned(uint64_t value) {
    if (depth_ != 3 || field_ == Field::kOther) return scalar("a number");
    if (field_ == Field::kOffsets) {
      if (num_offsets_ < 2) (num_offsets_ == 0 ? entry().begin : entry().end) = value;
      ++num_offsets_;
    } else {
      if (value > INT64_MAX || __builtin_mul_overflow(elements_, value, &elements_) ||
          elements_ > INT64_MAX)
        fail(entry().name, ": shape is too large");
      if (entry().wanted) entry().shape.push_back(static_cast<int64_t>(value));
    }
    return true;
  }

  bool string(std::string& value) {
    if (in_metadata_ && depth_ == 2) {
      if (!header_->metadata.emplace(key_, value).second)
        fail(kMetadata, ": key '", key_, "' is there twice");
      return true;
    }
    if (depth_ != 2 || field_ != Field::kDType) return scalar("a string");
    for (const DTypeRow& row : kDTypes)
      if (value == row.name) entry().type = &row;
    if (!entry().type) fail_dtype(entry().name, value);
    return true;
  }

  bool start_object(std::size_t) {
    if (depth_ == 1 && !in_metadata_) {
      header_->entries.push_back({});
      entry().name = key_;
      entry().wanted =
          wanted_.empty() || std::find(wanted_.begin(), wanted_.end(), key_) != wanted_.end();
      seen_[0] = seen_[1] = seen_[2] = false;
      field_ = Field::kOther;
      elements_ = 1;
      num_offsets_ = 0;
    } else if (depth_ >= 2) {
      scalar("an object");
    }
    return deeper();
  }
  bool key(std::string& name) {
    key_ = name;
    if (depth_ == 1) {
      in_metadata_ = name == kMetadata;
      if (in_metadata_ && std::exchange(has_metadata_, true)) fail(kMetadata, ": is there twice");
    } else if (depth_ == 2 && !in_metadata_) {
      field_ = Field::kOther;
      for (int i = 0; i < 3; ++i)
        if (name == kFields[i]) {
          field_ = static_cast<Field>(i);
          if (std::exchange(seen_[i], true)) fail(entry().name, ": '", name, "' is there twice");
        }
    }
    return true;
  }
  bool end_object() {
    --depth_;
    if (depth_ == 1 && !in_metadata_) finish_entry();
    return true;
  }

  bool start_array(std::size_t) {
    const bool list = depth_ == 2 && !in_metadata_ && field_ != Field::kDType;
    if (!list) scalar("a list");
    return deeper();
  }
  bool end_array() {
    --depth_;
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const json::exception& error) {
    fail("file: header is not valid JSON (", error.what(), ")");
  }

 private:
  enum class Field { kDType, kShape, kOffsets, kOther };
  static constexpr const char* kFields[3] = {"dtype", "shape", "data_offsets"};

  Entry& entry() { return header_->entries.back(); }

  /// A value where none of its kind may be; nothing where any may be.
  bool scalar(const char* what) {
    if (depth_ == 0) fail("file: header is not a JSON object");
    if (in_metadata_ && depth_ == 1) fail(kMetadata, ": is not an object");
    if (in_metadata_) fail(kMetadata, ": value of '", key_, "' is not a string");
    if (depth_ == 1) fail(key_, ": header entry is not an object");
    switch (field_) {
      case Field::kDType: fail(entry().name, ": dtype is ", what, ", not a name like F32");
      case Field::kShape:
        if (depth_ == 2) fail(entry().name, ": shape is not a list of numbers");
        fail(entry().name, ": shape has ", what, ", which is not a non-negative integer");
      case Field::kOffsets:
        if (depth_ == 2) fail(entry().name, ": data_offsets is not a pair of numbers");
        fail(entry().name, ": data_offsets has ", what, ", which is not a non-negative integer");
      case Field::kOther: break;
    }
    return true;
  }

  [[noreturn]] static void fail_dtype(const std::string& name, const std::string& found) {
    std::string known;
    for (const DTypeRow& row : kDTypes) known += cat(known.empty() ? "" : ", ", row.name);
    fail(name, ": dtype '", found, "' is not one of ", known);
  }

  bool deeper() {
    if (++depth_ > kMaxDepth)
      fail("file: header is nested deeper than a safetensors header can be");
    return true;
  }

  void finish_entry() {
    Entry& e = entry();
    for (int i = 0; i < 3; ++i)
      if (!seen_[i]) fail(e.name, ": header entry has no '", kFields[i], "'");
    if (num_offsets_ != 2) fail(e.name, ": data_offsets is not a pair of numbers");
    uint64_t bits = 0;
    if (__builtin_mul_overflow(elements_, e.type->bits, &bits))
      fail(e.name, ": shape is too large");
    if (bits % 8 != 0)
      fail(e.name, ": shape needs ", bits, " bits of ", e.type->name, ", no whole bytes");
    if (e.begin > e.end)
      fail(e.name, ": data_offsets [", e.begin, ", ", e.end, "] end before they begin");
    if (bits / 8 != e.end - e.begin)
      fail(e.name, ": shape needs ", bits / 8, " bytes, data_offsets give ", e.end - e.begin);
  }

  Header* header_;
  const std::vector<std::string>& wanted_;
  int depth_ = 0;
  std::string key_;
  bool in_metadata_ = false, has_metadata_ = false;
  // The entry that is being read.
  Field field_ = Field::kOther;
  bool seen_[3] = {};
  uint64_t elements_ = 1;
  int num_offsets_ = 0;
};

void check_names(const std::vector<Entry>& entries) {
  std::vector<std::string_view> names;
  names.reserve(entries.size());
  for (const Entry& entry : entries) names.push_back(entry.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) fail(*twice, ": is there twice");
}

/// Tensors follow each other from the first byte of the data on. Returns where the last one ends.
uint64_t check_layout(std::vector<Entry>& entries) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  const Entry* before = nullptr;
  for (const Entry& entry : entries) {
    const uint64_t end = before ? before->end : 0;
    if (entry.begin < end) fail(entry.name, ": its data overlap those of ", before->name);
    if (entry.begin > end)
      fail(entry.name, ": its data begin at byte ", entry.begin, ", after a hole from ", end);
    before = &entry;
  }
  return before ? before->end : 0;
}

/// Bytes from a file or from memory.
class Source {
 public:
  virtual ~Source() = default;
  /// Fewer than `size` only at the end.
  virtual std::size_t read(char* to, std::size_t size) = 0;
  virtual std::size_t skip(std::size_t size) = 0;
  /// Bytes up to the end, where that is known.
  virtual std::optional<uint64_t> left() const = 0;
};

class MemorySource : public Source {
 public:
  MemorySource(const char* bytes, std::size_t size) : bytes_(bytes), size_(size) {}
  std::size_t read(char* to, std::size_t size) override {
    const char* from = bytes_;
    const std::size_t got = skip(size);
    if (got > 0) std::memcpy(to, from, got);
    return got;
  }
  std::size_t skip(std::size_t size) override {
    const std::size_t got = std::min(size, size_);
    bytes_ += got;
    size_ -= got;
    return got;
  }
  std::optional<uint64_t> left() const override { return size_; }

 private:
  const char* bytes_;
  std::size_t size_;
};

class FileSource : public Source {
 public:
  explicit FileSource(const std::string& path) {
    descriptor_ = path == "-" ? ::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 0)
                              : ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY);
    if (descriptor_ < 0) fail("cannot be read (", std::strerror(errno), ")");
    struct stat found = {};
    if (::fstat(descriptor_, &found) == 0 && S_ISDIR(found.st_mode)) {
      ::close(descriptor_);
      fail("is a folder");
    }
    if (!S_ISREG(found.st_mode)) return;
    const off_t at = ::lseek(descriptor_, 0, SEEK_CUR);
    left_ = static_cast<uint64_t>(std::max<off_t>(found.st_size - at, 0));
  }
  ~FileSource() override { ::close(descriptor_); }
  FileSource(const FileSource&) = delete;
  FileSource& operator=(const FileSource&) = delete;

  std::size_t read(char* to, std::size_t size) override {
    std::size_t got = 0;
    while (got < size) {
      const ssize_t more = ::read(descriptor_, to + got, size - got);
      if (more < 0 && errno == EINTR) continue;
      if (more < 0) fail("cannot be read (", std::strerror(errno), ")");
      if (more == 0) break;
      got += static_cast<std::size_t>(more);
    }
    if (left_) *left_ -= std::min<uint64_t>(*left_, got);
    return got;
  }
  std::size_t skip(std::size_t size) override {
    if (left_ && *left_ >= size) {
      ::lseek(descriptor_, static_cast<off_t>(size), SEEK_CUR);
      *left_ -= size;
      return size;
    }
    std::vector<char> scratch(std::min<std::size_t>(size, 1 << 20));
    std::size_t done = 0;
    while (done < size) {
      const std::size_t got = read(scratch.data(), std::min(size - done, scratch.size()));
      if (got == 0) break;
      done += got;
    }
    return done;
  }
  std::optional<uint64_t> left() const override { return left_; }

 private:
  int descriptor_ = -1;
  std::optional<uint64_t> left_;  ///< bytes of a regular file
};

Header read_header(Source& source, const std::vector<std::string>& wanted) {
  unsigned char prefix[kLengthBytes];
  const std::size_t got = source.read(reinterpret_cast<char*>(prefix), kLengthBytes);
  if (got < kLengthBytes) fail("file: ", got, " bytes are too few for a safetensors file");
  uint64_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    length |= static_cast<uint64_t>(prefix[i]) << (8 * i);
  if (length > kMaxHeaderBytes)
    fail("file: header of ", length, " bytes is above the limit of ", kMaxHeaderBytes,
         " (is this a safetensors file?)");
  std::string text(length, '\0');
  if (const std::size_t have = source.read(text.data(), length); have < length)
    fail("file: header of ", length, " bytes, but only ", have, " follow");
  // The parser would skip a byte order mark and end at a NUL.
  if (text.rfind("\xef\xbb\xbf", 0) == 0)
    fail("file: header begins with a byte order mark, not with {");
  if (const std::size_t at = text.find('\0'); at != std::string::npos)
    fail("file: header has a NUL at byte ", at, " (padding must be spaces)");
  Header header;
  HeaderReader reader(&header, wanted);
  json::sax_parse(text, &reader);
  return header;
}

[[noreturn]] void fail_short(const Entry& entry, uint64_t payload) {
  fail(entry.name, ": data_offsets [", entry.begin, ", ", entry.end, "] leave the ", payload,
       " bytes of data");
}

FileTensor read_tensor(Source& source, const Entry& entry) {
  if (!entry.type->dtype)
    fail(entry.name, ": dtype ", entry.type->name, " is not F32, BF16, F16, F64, I32 or I64");
  FileTensor tensor{*entry.type->dtype, entry.shape, {}};
  const uint64_t bytes = entry.end - entry.begin;
  tensor.data = Buffer(bytes);
  if (const uint64_t got = source.read(tensor.data.as<char>(), bytes); got != bytes)
    fail_short(entry, entry.begin + got);
  return tensor;
}

SafetensorsFile read_file(Source& source, const std::vector<std::string>& wanted) {
  Header header = read_header(source, wanted);
  check_names(header.entries);
  const uint64_t end = check_layout(header.entries);
  const std::optional<uint64_t> left = source.left();
  if (left && *left < end) fail_short(header.entries.back(), *left);
  SafetensorsFile file;
  file.metadata = std::move(header.metadata);
  for (const Entry& entry : header.entries) {
    if (entry.wanted) {
      file.tensors.emplace(entry.name, read_tensor(source, entry));
    } else if (const uint64_t got = source.skip(entry.end - entry.begin);
               got != entry.end - entry.begin) {
      fail_short(entry, entry.begin + got);
    }
  }
  char more = 0;
  if (source.read(&more, 1) != 0) fail("file: bytes follow the ", end, " of its tensors");
  return file;
}

const char* name_of(DType dtype) {
  for (const DTypeRow& row : kDTypes)
    if (row.dtype == dtype) return row.name;
  return nullptr;
}

std::string header_bytes(const SafetensorsFile& file) {
  std::string text = "{";
  const auto add = [&](const std::string& name, const std::string& value) {
    text += cat(text.size() > 1 ? "," : "", json(name).dump(), ":", value);
  };
  if (!file.metadata.empty()) add(kMetadata, json(file.metadata).dump());
  uint64_t offset = 0;
  for (const auto& [name, tensor] : file.tensors) {
    add(name,
        cat(R"({"dtype":")", name_of(tensor.dtype), R"(","shape":)", json(tensor.shape).dump(),
            R"(,"data_offsets":[)", offset, ",", offset + tensor.data.size(), "]}"));
    offset += tensor.data.size();
  }
  text += "}";
  // Spaces, so that the data start 64-byte aligned.
  text.resize((text.size() + kLengthBytes + 63) / 64 * 64 - kLengthBytes, ' ');
  std::string bytes(kLengthBytes, '\0');
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    bytes[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  return bytes + text;
}

}  // namespace

int64_t FileTensor::num_elements() const {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

SafetensorsFile parse_safetensors(const char* bytes, std::size_t size,
                                  const std::vector<std::string>& wanted) {
  MemorySource source(bytes, size);
  return read_file(source, wanted);
}

SafetensorsFile read_safetensors(const std::string& path, const std::vector<std::string>& wanted) {
  try {
    FileSource source(path);
    return read_file(source, wanted);
  } catch (const Error& error) {
    throw Error(
        Status(error.code(), cat(path == "-" ? "standard input" : path, ": ", error.what())));
  }
}

void write_safetensors(OutputFile& out, const SafetensorsFile& file) {
  out.write(header_bytes(file));
  for (const auto& [name, tensor] : file.tensors) out.write(tensor.data.data(), tensor.data.size());
}

void write_safetensors(const std::string& path, const SafetensorsFile& file) {
  OutputFile out(path);
  write_safetensors(out, file);
  out.commit();
}

}  // namespace kda::io
