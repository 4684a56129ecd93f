// SPDX-License-Identifier: Apache-2.0
// OutputFile: where a command writes what it made. A regular file is replaced at once or not at
// all; what is no regular file is written through.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>

namespace kda::io {

/// An output that is opened before its content is computed, so that a path that cannot be written
/// is found first. Not committed, it leaves nothing behind and an older file as it was.
///
/// - A new file gets the mode that the umask gives. An existing one is replaced by a rename and
///   keeps its mode and, where that is allowed, its owner; it must be writable.
/// - A symbolic link is followed: its target is written.
/// - Character devices and pipes are written through as they are; a pipe waits for its reader.
///   `-` and `/dev/stdout` are the standard output, `/dev/fd/N` is the open descriptor N.
/// - Folders and block devices are refused.
///
/// Data are on disk before the rename, and the folder after it. Until then they are in a temporary
/// of its own name in the target's folder; SIGHUP, SIGINT, SIGQUIT, SIGPIPE, SIGTERM, SIGXCPU and
/// SIGXFSZ remove it before they end the process. Every error is a kda::Error that names the path.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(const void* data, std::size_t size);
  void write(const std::string& bytes) { write(bytes.data(), bytes.size()); }
  /// Puts the content in place.
  void commit();

  /// The path as given, `standard output` for `-`.
  const std::string& label() const { return label_; }
  bool is_stdout() const { return is_stdout_; }
  /// Whether both replace the same file or are the standard output.
  bool same_target(const OutputFile& other) const;

 private:
  void open(const std::string& path);
  void open_descriptor(int descriptor);
  void open_target(const std::string& target);
  void open_temporary();
  void keep_mode();
  void sync_folder();
  [[noreturn]] void fail(const char* what, int error) const;

  std::string label_;
  std::string name_;       ///< of the target in its folder; empty: written through
  std::string temporary_;  ///< name in the same folder; empty: there is none
  int folder_ = -1;
  int descriptor_ = -1;
  int slot_ = -1;  ///< of the temporaries that signals remove
  bool is_stdout_ = false;
  bool replaces_ = false;  ///< the target existed; mode_, owner_ and group_ are its
  mode_t mode_ = 0;
  uid_t owner_ = 0;
  gid_t group_ = 0;
};

/// Writes `bytes` as an OutputFile.
void write_file(const std::string& path, const std::string& bytes);

}  // namespace kda::io
