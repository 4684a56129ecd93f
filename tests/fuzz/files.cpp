// SPDX-License-Identifier: Apache-2.0
// Damaged safetensors files: read or refused, never a crash (run under the sanitizers too).
#include "core/text.hpp"
#include "fuzz/fuzz.hpp"
#include "io/safetensors.hpp"

namespace kda::fuzz {
namespace {

using check::Random;

std::string build(const std::string& header, std::size_t payload) {
  std::string bytes(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  return bytes + header + std::string(payload, '\1');
}

std::size_t header_length(const std::string& bytes) {
  std::size_t length = 0;
  for (std::size_t i = 0; i < 8; ++i)
    length |= static_cast<std::size_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  return length;
}

/// A header in the right grammar with values that may be anything.
std::string random_header(Random& random) {
  static const char* kTypes[] = {"F32", "BF16", "F16", "I32", "I64", "U8", "f32", ""};
  static const char* kNames[] = {
      "q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "initial_state", "x"};
  const auto number = [&]() -> std::string {
    switch (random.below(6)) {
      case 0: return "-1";
      case 1: return "18446744073709551615";
      case 2: return "1e3";
      case 3: return "4294967296";
      default: return std::to_string(random.below(64));
    }
  };
  std::string header = "{";
  const int64_t count = random.below(6);
  for (int64_t i = 0; i < count; ++i) {
    header += cat(i ? "," : "", "\"", kNames[random.below(10)], "\":{\"dtype\":\"",
                  kTypes[random.below(8)], "\",\"shape\":[");
    const int64_t rank = random.below(5);
    for (int64_t d = 0; d < rank; ++d) header += cat(d ? "," : "", number());
    header += cat("],\"data_offsets\":[", number(), ",", number(), "]}");
  }
  if (random.chance(0.3)) header += cat(count ? "," : "", R"("__metadata__":{"gate":"bounded"})");
  return header + "}";
}

std::string damage(std::string bytes, Random& random) {
  const int64_t edits = 1 + random.below(8);
  for (int64_t i = 0; i < edits && !bytes.empty(); ++i) {
    const auto at = static_cast<std::size_t>(random.below(static_cast<int64_t>(bytes.size())));
    switch (random.below(4)) {
      case 0: bytes[at] = static_cast<char>(random.next()); break;
      case 1: bytes.erase(at, 1 + static_cast<std::size_t>(random.below(16))); break;
      case 2: bytes.insert(at, 1 + static_cast<std::size_t>(random.below(9)), bytes[at]); break;
      default: bytes.resize(at); break;
    }
  }
  return bytes;
}

std::string good_file(Random& random) {
  check::GenerateOptions options = test::shape(random.below(4), 1, 1 + random.below(3), 2);
  options.regime = static_cast<check::Regime>(random.below(check::kNumRegimes));
  const io::SafetensorsFile file = check::file_from_inputs(check::generate(options));
  std::string header = "{", payload;
  for (const auto& [name, tensor] : file.tensors) {
    header += cat(header.size() > 1 ? "," : "", "\"", name, "\":{\"dtype\":\"F32\",\"shape\":[");
    for (std::size_t d = 0; d < tensor.shape.size(); ++d)
      header += cat(d ? "," : "", tensor.shape[d]);
    header +=
        cat("],\"data_offsets\":[", payload.size(), ",", payload.size() + tensor.data.size(), "]}");
    payload.append(tensor.data.as<char>(), tensor.data.size());
  }
  std::string bytes = build(header + "}", 0);
  return bytes + payload;
}

std::string run_case(const Options& options, int64_t index) {
  Random random = random_of(options, index);
  std::string bytes =
      index % 2 ? good_file(random)
                : build(random_header(random), static_cast<std::size_t>(random.below(256)));
  if (random.chance(0.8)) bytes = damage(std::move(bytes), random);
  try {
    const io::SafetensorsFile file = io::parse_safetensors(bytes.data(), bytes.size());
    std::size_t covered = 8 + header_length(bytes);
    for (const auto& [name, tensor] : file.tensors) {
      if (tensor.data.size() !=
          static_cast<std::size_t>(tensor.num_elements() * dtype_size(tensor.dtype)))
        return cat(name, ": size and shape disagree");
      covered += tensor.data.size();
    }
    if (covered != bytes.size()) return "bytes that belong to no tensor were taken";
    check::inputs_from_file(file);
  } catch (const Error& error) {
    if (error.code() != StatusCode::kInvalidArgument || std::string(error.what()).empty())
      return "refused without a reason";
  }
  return "";
}

}  // namespace

Report fuzz_files(const Options& options) {
  return run_cases(options, [&](int64_t index) { return run_case(options, index); });
}

}  // namespace kda::fuzz
