// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/text.hpp"

namespace kda::io {
namespace {

using nlohmann::json;

constexpr std::size_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr const char* kMetadata = "__metadata__";

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(invalid(parts...));
}

struct DTypeName {
  const char* name;
  DType dtype;
};
constexpr DTypeName kDTypes[] = {{"F32", DType::kFloat32},
                                 {"BF16", DType::kBFloat16},
                                 {"F16", DType::kFloat16},
                                 {"I32", DType::kInt32},
                                 {"I64", DType::kInt64}};

bool is_wanted(const std::vector<std::string>& wanted, const std::string& name) {
  return wanted.empty() || std::find(wanted.begin(), wanted.end(), name) != wanted.end();
}

/// Depth of the header's JSON is at most 3: refuse deeper ones before they cost anything.
bool keep_shallow(int depth, json::parse_event_t, json&) {
  if (depth > 4) fail("file: header is nested deeper than a safetensors header can be");
  return true;
}

json parse_header(const char* bytes, std::size_t size) {
  if (size < kLengthBytes) fail("file: ", size, " bytes are too few for a safetensors file");
  uint64_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    length |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  if (length > kMaxHeaderBytes)
    fail("file: header of ", length, " bytes is above the limit of ", kMaxHeaderBytes,
         " (is this a safetensors file?)");
  if (length > size - kLengthBytes)
    fail("file: header of ", length, " bytes, but only ", size - kLengthBytes, " follow");
  try {
    json header = json::parse(bytes + kLengthBytes, bytes + kLengthBytes + length, keep_shallow);
    if (!header.is_object()) fail("file: header is not a JSON object");
    return header;
  } catch (const json::exception& error) {
    fail("file: header is not valid JSON (", error.what(), ")");
  }
}

uint64_t read_unsigned(const json& value, const std::string& name, const char* what) {
  if (!value.is_number_unsigned()) fail(name, ": ", what, " is not a non-negative integer");
  return value.get<uint64_t>();
}

struct Extent {
  std::string name;
  uint64_t begin;
  uint64_t end;
};

const json& member(const json& entry, const std::string& name, const char* key) {
  const auto found = entry.find(key);
  if (found == entry.end()) fail(name, ": header entry has no '", key, "'");
  return *found;
}

Extent read_extent(const std::string& name, const json& entry, uint64_t payload) {
  const json& offsets = member(entry, name, "data_offsets");
  if (!offsets.is_array() || offsets.size() != 2)
    fail(name, ": data_offsets is not a pair of numbers");
  Extent extent{name, read_unsigned(offsets[0], name, "data_offsets"),
                read_unsigned(offsets[1], name, "data_offsets")};
  if (extent.begin > extent.end || extent.end > payload)
    fail(name, ": data_offsets [", extent.begin, ", ", extent.end, "] leave the ", payload,
         " bytes of data");
  return extent;
}

void check_overlaps(std::vector<Extent>& extents) {
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < extents.size(); ++i)
    if (extents[i].begin < extents[i - 1].end)
      fail(extents[i].name, ": its data overlap those of ", extents[i - 1].name);
}

uint64_t read_shape(const std::string& name, const json& entry, std::vector<int64_t>* shape) {
  const json& dims = member(entry, name, "shape");
  if (!dims.is_array() || dims.size() > 8) fail(name, ": shape is not a list of up to 8 numbers");
  uint64_t elements = 1;
  for (const json& dim : dims) {
    const uint64_t extent = read_unsigned(dim, name, "shape");
    if (extent > (uint64_t{1} << 48) || __builtin_mul_overflow(elements, extent, &elements) ||
        elements > (uint64_t{1} << 56))
      fail(name, ": shape is too large");
    shape->push_back(static_cast<int64_t>(extent));
  }
  return elements;
}

FileTensor read_tensor(const std::string& name, const json& entry, const Extent& extent,
                       const char* payload) {
  FileTensor tensor;
  const uint64_t elements = read_shape(name, entry, &tensor.shape);
  const json& type = member(entry, name, "dtype");
  const DTypeName* found = nullptr;
  for (const DTypeName& row : kDTypes)
    if (type.is_string() && type.get_ref<const std::string&>() == row.name) found = &row;
  if (!found) fail(name, ": dtype ", type.dump(), " is not F32, BF16, F16, I32 or I64");
  tensor.dtype = found->dtype;
  const uint64_t bytes = elements * static_cast<uint64_t>(dtype_size(tensor.dtype));
  if (bytes != extent.end - extent.begin)
    fail(name, ": shape needs ", bytes, " bytes, data_offsets give ", extent.end - extent.begin);
  tensor.data = Buffer(bytes);
  if (bytes > 0) std::memcpy(tensor.data.data(), payload + extent.begin, bytes);
  return tensor;
}

std::map<std::string, std::string> read_metadata(const json& entry) {
  if (!entry.is_object()) fail(kMetadata, ": is not an object");
  std::map<std::string, std::string> metadata;
  for (const auto& [key, value] : entry.items()) {
    if (!value.is_string()) fail(kMetadata, ": value of '", key, "' is not a string");
    metadata[key] = value.get<std::string>();
  }
  return metadata;
}

std::string header_bytes(const SafetensorsFile& file) {
  nlohmann::ordered_json header;
  if (!file.metadata.empty()) header[kMetadata] = file.metadata;
  uint64_t offset = 0;
  for (const auto& [name, tensor] : file.tensors) {
    const char* type = nullptr;
    for (const DTypeName& row : kDTypes)
      if (row.dtype == tensor.dtype) type = row.name;
    header[name] = {{"dtype", type},
                    {"shape", tensor.shape},
                    {"data_offsets", {offset, offset + tensor.data.size()}}};
    offset += tensor.data.size();
  }
  std::string text = file.metadata.empty() && file.tensors.empty() ? "{}" : header.dump();
  // Spaces, so that the data start 64-byte aligned.
  text.resize((text.size() + kLengthBytes + 63) / 64 * 64 - kLengthBytes, ' ');
  std::string bytes(kLengthBytes, '\0');
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    bytes[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  return bytes + text;
}

/// A temporary beside `path` that is removed unless it is renamed.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& path)
      : path_(path), temporary_(cat(path, ".tmp.", ::getpid())) {
    stream_.open(temporary_, std::ios::binary | std::ios::trunc);
    if (!stream_) fail(path_, ": cannot be written (", std::strerror(errno), ")");
  }
  ~TemporaryFile() {
    if (!renamed_) std::remove(temporary_.c_str());
  }
  void write(const void* data, std::size_t size) {
    stream_.write(static_cast<const char*>(data), static_cast<std::streamsize>(size));
  }
  void commit() {
    stream_.close();
    if (!stream_) fail(path_, ": writing failed (", std::strerror(errno), ")");
    if (std::rename(temporary_.c_str(), path_.c_str()) != 0)
      fail(path_, ": cannot be replaced (", std::strerror(errno), ")");
    renamed_ = true;
  }

 private:
  std::string path_;
  std::string temporary_;
  std::ofstream stream_;
  bool renamed_ = false;
};

}  // namespace

int64_t FileTensor::num_elements() const {
  int64_t count = 1;
  for (const int64_t extent : shape) count *= extent;
  return count;
}

SafetensorsFile parse_safetensors(const char* bytes, std::size_t size,
                                  const std::vector<std::string>& wanted) {
  const json header = parse_header(bytes, size);
  uint64_t length = 0;
  for (std::size_t i = 0; i < kLengthBytes; ++i)
    length |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  const char* payload = bytes + kLengthBytes + length;
  const uint64_t payload_bytes = size - kLengthBytes - length;

  SafetensorsFile file;
  std::vector<Extent> extents;
  for (const auto& [name, entry] : header.items()) {
    if (name == kMetadata) {
      file.metadata = read_metadata(entry);
      continue;
    }
    if (!entry.is_object()) fail(name, ": header entry is not an object");
    const Extent extent = read_extent(name, entry, payload_bytes);
    if (extent.begin < extent.end) extents.push_back(extent);
    if (is_wanted(wanted, name)) file.tensors[name] = read_tensor(name, entry, extent, payload);
  }
  check_overlaps(extents);
  return file;
}

SafetensorsFile read_safetensors(const std::string& path, const std::vector<std::string>& wanted) {
  std::error_code error_code;
  const std::uintmax_t size = std::filesystem::file_size(path, error_code);
  if (error_code) fail(path, ": cannot be read (", error_code.message(), ")");
  std::ifstream stream(path, std::ios::binary);
  if (!stream) fail(path, ": cannot be read (", std::strerror(errno), ")");
  Buffer bytes(size);
  stream.read(bytes.as<char>(), static_cast<std::streamsize>(size));
  if (static_cast<std::uintmax_t>(stream.gcount()) != size) fail(path, ": ends early");
  try {
    return parse_safetensors(bytes.as<char>(), bytes.size(), wanted);
  } catch (const Error& error) {
    throw Error(Status(error.code(), cat(path, ": ", error.what())));
  }
}

void write_safetensors(const std::string& path, const SafetensorsFile& file) {
  const std::string header = header_bytes(file);
  TemporaryFile out(path);
  out.write(header.data(), header.size());
  for (const auto& [name, tensor] : file.tensors) out.write(tensor.data.data(), tensor.data.size());
  out.commit();
}

void write_file_atomically(const std::string& path, const std::string& bytes) {
  TemporaryFile out(path);
  out.write(bytes.data(), bytes.size());
  out.commit();
}

}  // namespace kda::io
