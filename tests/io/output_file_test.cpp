// SPDX-License-Identifier: Apache-2.0
// What becomes of an existing output, a link, a device, and of everything when something fails.
#include "io/output_file.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>
#include <vector>

#include "kda/status.hpp"
#include "support/temporary_folder.hpp"

namespace {

std::mutex calls_mutex;          // a test has writers on several threads
std::vector<std::string> calls;  // of the two below, in order
int fail_fsync_with = 0;

void note_call(const char* name) {
  const std::lock_guard lock(calls_mutex);
  calls.emplace_back(name);
}

}  // namespace

// In place of the C library's, to see them and to make them fail.
extern "C" int fsync(int descriptor) {
  struct stat found = {};
  ::fstat(descriptor, &found);
  note_call(S_ISDIR(found.st_mode) ? "sync folder" : "sync file");
  if (fail_fsync_with != 0) {
    errno = fail_fsync_with;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}
extern "C" int renameat(int from_folder, const char* from, int to_folder, const char* to) noexcept {
  note_call("rename");
  return static_cast<int>(::syscall(SYS_renameat2, from_folder, from, to_folder, to, 0));
}

namespace kda::io {
namespace {

namespace fs = std::filesystem;

class OutputFiles : public test::TemporaryFolder {
 protected:
  OutputFiles() {
    calls.clear();
    fail_fsync_with = 0;
  }

  mode_t mode_of(const std::string& name) const {
    struct stat found = {};
    EXPECT_EQ(::stat(path(name).c_str(), &found), 0);
    return found.st_mode & 07777;
  }
  /// The error of writing `path`, empty for none.
  static std::string error_of(const std::string& path) {
    try {
      write_file(path, "new");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kInvalidArgument);
      return error.what();
    }
    return "";
  }
};

void expect_has(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST_F(OutputFiles, NewFilesGetTheModeOfTheUmask) {
  const mode_t before = ::umask(027);
  write_file(path("x"), "new");
  ::umask(before);
  EXPECT_EQ(read("x"), "new");
  EXPECT_EQ(mode_of("x"), 0640u);
  EXPECT_EQ(count_files(), 1u);
}

TEST_F(OutputFiles, ReplacedFilesKeepTheirMode) {
  for (const mode_t mode : {0600, 0640, 0755, 0666}) {
    std::ofstream(path("x")) << "old and longer";
    ASSERT_EQ(::chmod(path("x").c_str(), mode), 0);
    write_file(path("x"), "new");
    EXPECT_EQ(read("x"), "new");
    EXPECT_EQ(mode_of("x"), mode);
  }
  EXPECT_EQ(count_files(), 1u);
}

TEST_F(OutputFiles, ReplacedFilesKeepTheirOwner) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root gives files away";
  std::ofstream(path("x")) << "old";
  ASSERT_EQ(::chown(path("x").c_str(), 12345, 23456), 0);
  write_file(path("x"), "new");
  struct stat found = {};
  ASSERT_EQ(::stat(path("x").c_str(), &found), 0);
  EXPECT_EQ(found.st_uid, 12345u);
  EXPECT_EQ(found.st_gid, 23456u);
}

TEST_F(OutputFiles, DataAreOnDiskBeforeTheRenameAndTheFolderAfter) {
  write_file(path("x"), "new");
  EXPECT_EQ(calls, (std::vector<std::string>{"sync file", "rename", "sync folder"}));
}

TEST_F(OutputFiles, AFailingSyncLeavesTheOldFile) {
  std::ofstream(path("x")) << "old";
  fail_fsync_with = EIO;
  expect_has(error_of(path("x")), "x: writing failed (Input/output error)");
  EXPECT_EQ(read("x"), "old");
  EXPECT_EQ(count_files(), 1u);
  fail_fsync_with = EINVAL;  // file systems that cannot
  EXPECT_EQ(error_of(path("x")), "");
  EXPECT_EQ(read("x"), "new");
}

TEST_F(OutputFiles, NotCommittedNothingIsLeft) {
  std::ofstream(path("x")) << "old";
  for (const char* name : {"x", "y"}) {
    OutputFile out(path(name));
    out.write("new");
    EXPECT_EQ(count_files(), 2u);
  }
  EXPECT_EQ(read("x"), "old");
  EXPECT_EQ(count_files(), 1u);
}

TEST_F(OutputFiles, LinksAreFollowed) {
  fs::create_directory(path("d"));
  std::ofstream(path("d/target")) << "old";
  ::chmod(path("d/target").c_str(), 0600);
  fs::create_symlink("d/target", path("l"));
  fs::create_symlink(path("l"), path("ll"));
  write_file(path("ll"), "new");
  EXPECT_EQ(read("d/target"), "new");
  EXPECT_EQ(mode_of("d/target"), 0600u);
  EXPECT_TRUE(fs::is_symlink(path("l")));
  EXPECT_TRUE(fs::is_symlink(path("ll")));
  fs::create_symlink("d/later", path("dangling"));
  write_file(path("dangling"), "new");
  EXPECT_EQ(read("d/later"), "new");
  EXPECT_TRUE(fs::is_symlink(path("dangling")));
  fs::create_symlink("loop", path("loop"));
  expect_has(error_of(path("loop")), "symbolic links");
  fs::create_symlink("no/folder", path("lost"));
  expect_has(error_of(path("lost")), "lost: its folder cannot be opened");
}

TEST_F(OutputFiles, LongNamesAreWritten) {
  const std::string longest(255, 'n');
  write_file(path(longest), "new");
  EXPECT_EQ(read(longest), "new");
  EXPECT_EQ(count_files(), 1u);
}

TEST_F(OutputFiles, WhatCannotBeWrittenIsFoundAtOnce) {
  std::ofstream(path("file")) << "old";
  fs::create_directory(path("d"));
  const std::pair<std::string, const char*> rows[] = {
      {"", "empty path"},
      {path("no/such/x"), "its folder cannot be opened (No such file or directory)"},
      {path("no/"), "its folder cannot be opened"},
      {path("file/x"), "cannot be written (Not a directory)"},
      {path("file/"), "cannot be written (Not a directory)"},
      {path("d"), "is a folder"},
      {path("d/"), "is a folder"},
      {".", "is a folder"},
      {path(std::string(256, 'n')), "File name too long"},
      {"/dev/full/x", "Not a directory"},
      {"/proc/x", "its folder takes no new file"},
      {"/dev/fd/999", "cannot be written (Bad file descriptor)"},
  };
  for (const auto& [where, reason] : rows) {
    try {
      const OutputFile out(where);
      ADD_FAILURE() << where;
    } catch (const Error& error) {
      expect_has(error.what(), where);
      expect_has(error.what(), reason);
    }
  }
  EXPECT_EQ(count_files(), 2u);
}

/// As somebody who is not root: the child's exit code is 0 if `body` holds there.
template <class Body>
void as_nobody(Body body) {
  const pid_t child = ::fork();
  if (child == 0) {
    const bool good = (::geteuid() != 0 || ::seteuid(65534) == 0) && body();
    ::_exit(good ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST_F(OutputFiles, ReadOnlyFilesAndFoldersAreRefused) {
  std::ofstream(path("x")) << "old";
  ::chmod(path("x").c_str(), 0444);
  ::chmod(folder_.c_str(), 0777);
  as_nobody([&] { return error_of(path("x")).find("Permission denied") != std::string::npos; });
  ::chmod(folder_.c_str(), 0555);
  as_nobody([&] { return error_of(path("y")).find("Permission denied") != std::string::npos; });
  ::chmod(folder_.c_str(), 0755);
  EXPECT_EQ(read("x"), "old");
  EXPECT_EQ(count_files(), 1u);
}

TEST_F(OutputFiles, AGroupThatCannotBeKeptGetsNoMoreThanEverybody) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs a file of somebody else";
  std::ofstream(path("x")) << "old";
  ASSERT_EQ(::chown(path("x").c_str(), 12345, 23456), 0);
  ::chmod(path("x").c_str(), 0662);
  ::chmod(folder_.c_str(), 0777);
  as_nobody([&] { return error_of(path("x")).empty(); });
  EXPECT_EQ(read("x"), "new");
  EXPECT_EQ(mode_of("x"), 0622u);
}

TEST_F(OutputFiles, FoldersThatCannotBeReadAreWritten) {
  ::chmod(folder_.c_str(), 0733);
  as_nobody([&] { return error_of(path("x")).empty(); });
  EXPECT_EQ(read("x"), "new");
}

TEST_F(OutputFiles, DevicesAreWrittenThrough) {
  write_file("/dev/null", "new");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  fs::create_symlink("/dev/null", path("l"));
  write_file(path("l"), "new");
  EXPECT_TRUE(fs::is_symlink(path("l")));
  expect_has(error_of("/dev/full"), "/dev/full: writing failed (No space left on device)");
  if (::mknod(path("n").c_str(), S_IFCHR | 0666, makedev(1, 3)) == 0) {
    error_of(path("n"));  // a mount may forbid devices
    EXPECT_TRUE(fs::is_character_file(path("n")));
  }
  if (::mknod(path("b").c_str(), S_IFBLK | 0666, makedev(7, 200)) == 0) {
    expect_has(error_of(path("b")), "is a block device");
    EXPECT_TRUE(fs::is_block_file(path("b")));
  }
  EXPECT_EQ(calls, std::vector<std::string>{});
}

TEST_F(OutputFiles, PipesAreWrittenThrough) {
  ASSERT_EQ(::mkfifo(path("p").c_str(), 0600), 0);
  const std::string sent(300'000, 'z');  // more than a pipe holds
  std::string got;
  std::thread reader([&] { got = read("p"); });
  write_file(path("p"), sent);
  reader.join();
  EXPECT_EQ(got, sent);
  EXPECT_TRUE(fs::is_fifo(path("p")));
}

TEST_F(OutputFiles, NonBlockingPipesAreWaitedFor) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_NONBLOCK), 0);
  const std::string sent(300'000, 'z');
  std::thread writer([&] {
    write_file("/dev/fd/" + std::to_string(ends[1]), sent);
    ::close(ends[1]);
  });
  std::string got;
  for (char chunk[4096];;) {
    const ssize_t more = ::read(ends[0], chunk, sizeof chunk);
    if (more == 0) break;
    if (more > 0) got.append(chunk, static_cast<std::size_t>(more));
  }
  writer.join();
  ::close(ends[0]);
  EXPECT_EQ(got, sent);
}

TEST_F(OutputFiles, DescriptorsAreWrittenWhereTheyStand) {
  const int descriptor = ::open(path("x").c_str(), O_RDWR | O_CREAT | O_APPEND, 0600);
  ASSERT_EQ(::write(descriptor, "one ", 4), 4);
  for (const std::string folder : {"/dev/fd/", "/proc/self/fd/"})
    write_file(folder + std::to_string(descriptor), "two ");
  ::close(descriptor);
  EXPECT_EQ(read("x"), "one two two ");
  const int reader = ::open(path("x").c_str(), O_RDONLY);
  expect_has(error_of("/dev/fd/" + std::to_string(reader)), "is not open for writing");
  ::close(reader);
}

TEST_F(OutputFiles, TheStandardOutputHasThreeNames) {
  for (const char* name : {"-", "/dev/stdout", "/dev/fd/1"}) {
    const OutputFile out(name);
    EXPECT_TRUE(out.is_stdout()) << name;
  }
  EXPECT_EQ(OutputFile("-").label(), "standard output");
  EXPECT_FALSE(OutputFile("/dev/null").is_stdout());
}

TEST_F(OutputFiles, WritersOfOnePathDoNotMix) {
  constexpr int kWriters = 8;
  std::vector<std::thread> writers;
  for (int i = 0; i < kWriters; ++i)
    writers.emplace_back([this, i] {
      OutputFile out(path("x"));
      for (int part = 0; part < 100; ++part)
        out.write(std::string(1000, static_cast<char>('a' + i)));
      out.commit();
    });
  for (std::thread& writer : writers) writer.join();
  const std::string text = read("x");
  EXPECT_EQ(text, std::string(100'000, text[0]));
  EXPECT_EQ(count_files(), 1u);
}

TEST_F(OutputFiles, SameTargets) {
  fs::create_symlink("x", path("l"));
  const OutputFile x(path("x")), l(path("l")), y(path("y")), out("-"), again("/dev/stdout");
  EXPECT_TRUE(x.same_target(l));
  EXPECT_TRUE(out.same_target(again));
  EXPECT_FALSE(x.same_target(y));
  EXPECT_FALSE(x.same_target(out));
}

TEST_F(OutputFiles, WhatBecomesAPipeMeanwhileIsNotReplaced) {
  OutputFile out(path("x"));
  ASSERT_EQ(::mkfifo(path("x").c_str(), 0600), 0);
  EXPECT_THROW(out.commit(), Error);
  EXPECT_TRUE(fs::is_fifo(path("x")));
}

TEST_F(OutputFiles, MoreFilesAtOnceThanSignalsCanRemove) {
  std::vector<std::unique_ptr<OutputFile>> files;
  for (int i = 0; i < 20; ++i)
    files.push_back(std::make_unique<OutputFile>(path(std::to_string(i))));
  for (auto& file : files) file->commit();
  EXPECT_EQ(count_files(), 20u);
}

TEST_F(OutputFiles, SignalsLeaveNoTemporary) {
  std::ofstream(path("x")) << "old";
  for (const int signal : {SIGHUP, SIGINT, SIGQUIT, SIGPIPE, SIGTERM, SIGXCPU, SIGXFSZ}) {
    const pid_t child = ::fork();
    if (child == 0) {
      const rlimit no_core = {0, 0};
      ::setrlimit(RLIMIT_CORE, &no_core);
      OutputFile first(path("x")), second(path("y"));
      first.write("new");
      ::raise(signal);
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal) << ::strsignal(signal);
    EXPECT_EQ(count_files(), 1u) << ::strsignal(signal);
    EXPECT_EQ(read("x"), "old");
  }
}

TEST_F(OutputFiles, SignalsThatAreIgnoredStayIgnored) {
  const auto before = std::signal(SIGHUP, SIG_IGN);
  {
    OutputFile out(path("x"));
    ::raise(SIGHUP);
    out.write("new");
    out.commit();
  }
  EXPECT_EQ(std::signal(SIGHUP, before), SIG_IGN);
  EXPECT_EQ(read("x"), "new");
  struct sigaction now = {};
  ::sigaction(SIGTERM, nullptr, &now);
  EXPECT_EQ(now.sa_handler, SIG_DFL);
}

TEST_F(OutputFiles, ALimitOnTheSizeIsAnErrorWhereItsSignalIsIgnored) {
  std::ofstream(path("x")) << "old";
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {10'000, 10'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      write_file(path("x"), std::string(20'000, 'z'));
    } catch (const Error& error) {
      ::_exit(std::string(error.what()).find("File too large") == std::string::npos ? 2 : 0);
    }
    ::_exit(1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(read("x"), "old");
  EXPECT_EQ(count_files(), 1u);
}

}  // namespace
}  // namespace kda::io
