// SPDX-License-Identifier: Apache-2.0
// safetensors files: 8 bytes of header length (little endian), a JSON header, then the tensors.
// Reading refuses what the format's own reader refuses, and duplicate names; errors are kda::Error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "io/buffer.hpp"
#include "io/output_file.hpp"
#include "kda/types.hpp"

namespace kda::io {

struct FileTensor {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;
  Buffer data;

  int64_t num_elements() const;
};

struct SafetensorsFile {
  std::map<std::string, FileTensor> tensors;
  std::map<std::string, std::string> metadata;  ///< __metadata__
};

/// Only tensors named in `wanted` are loaded (all if empty); the whole header is checked. `path`
/// may be a pipe or a device, which are read from their beginning to their end, or `-` for the
/// standard input.
SafetensorsFile read_safetensors(const std::string& path,
                                 const std::vector<std::string>& wanted = {});
/// Reads a file in memory (fuzzing).
SafetensorsFile parse_safetensors(const char* bytes, std::size_t size,
                                  const std::vector<std::string>& wanted = {});

/// Writes a whole file; the caller commits it.
void write_safetensors(OutputFile& out, const SafetensorsFile& file);
/// Writes and commits.
void write_safetensors(const std::string& path, const SafetensorsFile& file);

}  // namespace kda::io
