// SPDX-License-Identifier: Apache-2.0
// Good files survive the round trip; every kind of bad file is refused with the reason.
#include "io/safetensors.hpp"

#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "kda/status.hpp"

namespace kda::io {
namespace {

std::string file_bytes(const std::string& header, std::size_t payload = 0) {
  std::string bytes(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(header.size() >> (8 * i) & 0xff);
  return bytes + header + std::string(payload, 'x');
}

std::string error_of(const std::string& bytes) {
  try {
    parse_safetensors(bytes.data(), bytes.size());
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
    return error.what();
  }
  return "";
}

struct BadFile {
  const char* name;
  std::string bytes;
  const char* message;
};

std::vector<BadFile> bad_files() {
  const auto entry = [](const std::string& body, std::size_t payload = 16) {
    return file_bytes("{\"q\":" + body + "}", payload);
  };
  return {
      {"empty", "", "too few"},
      {"seven_bytes", std::string(7, 'a'), "too few"},
      {"no_header", std::string(8, '\0'), "not valid JSON"},
      {"length_past_end", file_bytes("{}").substr(0, 9), "only 1 follow"},
      {"length_is_text", "PK\3\4abcdefgh", "limit"},
      {"length_max", std::string(8, '\xff') + "{}", "limit"},
      {"not_json", file_bytes("hello"), "not valid JSON"},
      {"truncated_json", file_bytes("{\"q\":"), "not valid JSON"},
      {"array_header", file_bytes("[]"), "not a JSON object"},
      {"number_header", file_bytes("3"), "not a JSON object"},
      {"bad_utf8", file_bytes("{\"\xff\":1}"), "not valid JSON"},
      {"deep", file_bytes("{\"q\":" + std::string(200, '[') + std::string(200, ']') + "}"),
       "nested deeper"},
      {"entry_is_number", entry("3"), "not an object"},
      {"entry_is_list", entry("[]"), "not an object"},
      {"no_offsets", entry(R"({"dtype":"F32","shape":[4]})"), "no 'data_offsets'"},
      {"no_shape", entry(R"({"dtype":"F32","data_offsets":[0,16]})"), "no 'shape'"},
      {"no_dtype", entry(R"({"shape":[4],"data_offsets":[0,16]})"), "no 'dtype'"},
      {"offsets_scalar", entry(R"({"dtype":"F32","shape":[4],"data_offsets":16})"), "pair"},
      {"offsets_three", entry(R"({"dtype":"F32","shape":[4],"data_offsets":[0,8,16]})"), "pair"},
      {"offsets_negative", entry(R"({"dtype":"F32","shape":[4],"data_offsets":[-1,16]})"),
       "non-negative"},
      {"offsets_text", entry(R"({"dtype":"F32","shape":[4],"data_offsets":["0","16"]})"),
       "non-negative"},
      {"offsets_float", entry(R"({"dtype":"F32","shape":[4],"data_offsets":[0.5,16]})"),
       "non-negative"},
      {"offsets_reversed", entry(R"({"dtype":"F32","shape":[4],"data_offsets":[16,0]})"), "leave"},
      {"offsets_past_end", entry(R"({"dtype":"F32","shape":[8],"data_offsets":[0,32]})"), "leave"},
      {"offsets_huge",
       entry(R"({"dtype":"F32","shape":[4],"data_offsets":[0,18446744073709551615]})"), "leave"},
      {"shape_scalar", entry(R"({"dtype":"F32","shape":4,"data_offsets":[0,16]})"), "list"},
      {"shape_negative", entry(R"({"dtype":"F32","shape":[-4],"data_offsets":[0,16]})"),
       "non-negative"},
      {"shape_float", entry(R"({"dtype":"F32","shape":[4.0],"data_offsets":[0,16]})"),
       "non-negative"},
      {"shape_nine", entry(R"({"dtype":"F32","shape":[1,1,1,1,1,1,1,1,4],"data_offsets":[0,16]})"),
       "list"},
      {"shape_overflow",
       entry(R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,16]})"),
       "too large"},
      {"shape_mismatch", entry(R"({"dtype":"F32","shape":[5],"data_offsets":[0,16]})"),
       "needs 20 bytes"},
      {"dtype_unknown", entry(R"({"dtype":"F8","shape":[4],"data_offsets":[0,16]})"), "not F32"},
      {"dtype_number", entry(R"({"dtype":32,"shape":[4],"data_offsets":[0,16]})"), "not F32"},
      {"dtype_lower", entry(R"({"dtype":"f32","shape":[4],"data_offsets":[0,16]})"), "not F32"},
      {"overlap",
       file_bytes(R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},)"
                  R"("b":{"dtype":"F32","shape":[4],"data_offsets":[8,24]}})",
                  24),
       "overlap"},
      {"metadata_list", file_bytes(R"({"__metadata__":[]})"), "not an object"},
      {"metadata_number", file_bytes(R"({"__metadata__":{"a":1}})"), "not a string"},
  };
}

TEST(Safetensors, BadFilesAreRefusedWithTheReason) {
  for (const BadFile& file : bad_files()) {
    const std::string message = error_of(file.bytes);
    EXPECT_NE(message.find(file.message), std::string::npos) << file.name << ": " << message;
  }
}

SafetensorsFile sample() {
  SafetensorsFile file;
  file.metadata = {{"gate", "log"}, {"note", "anything \"quoted\""}};
  for (const DType dtype :
       {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt32, DType::kInt64}) {
    FileTensor tensor{dtype, {2, 3}, Buffer(static_cast<std::size_t>(6 * dtype_size(dtype)))};
    for (std::size_t i = 0; i < tensor.data.size(); ++i)
      tensor.data.data()[i] = static_cast<std::byte>(i * 7);
    file.tensors[dtype_name(dtype)] = tensor;
  }
  file.tensors["empty"] = {DType::kFloat32, {0, 4}, Buffer(0)};
  return file;
}

class TemporaryFolder : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("kda_io_" + std::to_string(::testing::UnitTest::GetInstance()->random_seed()) +
               std::to_string(reinterpret_cast<std::uintptr_t>(this)));
    std::filesystem::create_directory(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string path(const char* name) const { return (folder_ / name).string(); }
  std::size_t count_files() const {
    std::size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      static_cast<void>(entry);
      ++count;
    }
    return count;
  }
  std::filesystem::path folder_;
};
using SafetensorsFiles = TemporaryFolder;

TEST_F(SafetensorsFiles, RoundTrip) {
  const SafetensorsFile before = sample();
  write_safetensors(path("x"), before);
  const SafetensorsFile after = read_safetensors(path("x"));
  EXPECT_EQ(before.metadata, after.metadata);
  ASSERT_EQ(before.tensors.size(), after.tensors.size());
  for (const auto& [name, tensor] : before.tensors) {
    const FileTensor& other = after.tensors.at(name);
    EXPECT_EQ(tensor.dtype, other.dtype);
    EXPECT_EQ(tensor.shape, other.shape);
    EXPECT_EQ(tensor.num_elements(), other.num_elements());
    ASSERT_EQ(tensor.data.size(), other.data.size());
    EXPECT_EQ(std::memcmp(tensor.data.data(), other.data.data(), tensor.data.size()), 0);
  }
  EXPECT_EQ(count_files(), 1u);
}

TEST_F(SafetensorsFiles, EveryHeaderLengthRoundTrips) {
  // Names of growing length move the header's end through every residue of its padding.
  for (std::size_t length = 1; length <= 130; ++length) {
    SafetensorsFile file;
    file.tensors[std::string(length, 'n')] = {DType::kInt32, {1}, Buffer(4)};
    file.tensors.begin()->second.data.fill(0x5a);
    write_safetensors(path("x"), file);
    const SafetensorsFile back = read_safetensors(path("x"));
    ASSERT_EQ(back.tensors.at(std::string(length, 'n')).data.as<int32_t>()[0], 0x5a5a5a5a);
  }
}

TEST_F(SafetensorsFiles, EmptyFileHasAHeader) {
  write_safetensors(path("x"), {});
  EXPECT_TRUE(read_safetensors(path("x")).tensors.empty());
}

TEST_F(SafetensorsFiles, OnlyWantedTensorsAreLoaded) {
  write_safetensors(path("x"), sample());
  EXPECT_EQ(read_safetensors(path("x"), {"bf16", "nothing"}).tensors.size(), 1u);
}

TEST_F(SafetensorsFiles, MissingAndUnreadablePaths) {
  EXPECT_THROW(read_safetensors(path("none")), Error);
  EXPECT_THROW(read_safetensors(folder_.string()), Error);
  EXPECT_THROW(write_safetensors(path("no/such/folder/x"), sample()), Error);
  EXPECT_EQ(count_files(), 0u);
}

TEST_F(SafetensorsFiles, FailedReplacementLeavesNoTemporary) {
  std::filesystem::create_directory(path("x"));
  EXPECT_THROW(write_file_atomically(path("x"), "text"), Error);
  EXPECT_EQ(count_files(), 1u);
  EXPECT_THROW(write_file_atomically("/dev/full/x", "text"), Error);
}

TEST_F(SafetensorsFiles, ReplacesAnOlderFile) {
  write_file_atomically(path("x"), "old");
  write_file_atomically(path("x"), "new");
  std::ifstream stream(path("x"));
  std::string text;
  stream >> text;
  EXPECT_EQ(text, "new");
}

}  // namespace
}  // namespace kda::io
