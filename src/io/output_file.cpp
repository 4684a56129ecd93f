// SPDX-License-Identifier: Apache-2.0
#include "io/output_file.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "core/text.hpp"

namespace kda::io {
namespace {

constexpr int kMaxLinks = 40;  // as the kernel follows
constexpr int kMaxNames = 100;
constexpr int kSignals[] = {SIGHUP, SIGINT, SIGQUIT, SIGPIPE, SIGTERM, SIGXCPU, SIGXFSZ};

struct Slot {
  std::atomic<int> folder{-1};
  char name[64] = {};
};

/// Temporaries that a signal removes: storage of a fixed place, which a handler may read.
class Temporaries {
 public:
  /// Room for the temporary `name` of `folder`; -1 if there is none left.
  static int add(int folder, const std::string& name) {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < std::size(slots_); ++i) {
      Slot& slot = slots_[i];
      if (slot.folder.load() >= 0) continue;
      std::snprintf(slot.name, sizeof slot.name, "%s", name.c_str());
      slot.folder.store(folder);
      if (++count_ == 1) catch_signals();
      return static_cast<int>(i);
    }
    return -1;
  }
  static void remove(int slot) {
    if (slot < 0) return;
    const std::lock_guard lock(mutex_);
    slots_[slot].folder.store(-1);
    if (--count_ == 0) restore_signals();
  }

 private:
  static void catch_signals() {
    for (std::size_t i = 0; i < std::size(kSignals); ++i) {
      struct sigaction now = {};
      now.sa_handler = &on_signal;
      sigfillset(&now.sa_mask);
      ::sigaction(kSignals[i], nullptr, &before_[i]);
      // A signal that the process ignores or handles itself does not end it here.
      if (before_[i].sa_handler == SIG_DFL) ::sigaction(kSignals[i], &now, nullptr);
    }
  }
  static void restore_signals() {
    for (std::size_t i = 0; i < std::size(kSignals); ++i)
      if (before_[i].sa_handler == SIG_DFL) ::sigaction(kSignals[i], &before_[i], nullptr);
  }
  /// Removes the temporaries, then ends the process as the signal does.
  static void on_signal(int signal) {
    for (Slot& slot : slots_)
      if (const int folder = slot.folder.load(); folder >= 0) ::unlinkat(folder, slot.name, 0);
    struct sigaction standard = {};
    standard.sa_handler = SIG_DFL;
    ::sigaction(signal, &standard, nullptr);
    ::raise(signal);
  }

  static inline std::mutex mutex_;
  static inline Slot slots_[16];
  static inline int count_ = 0;
  static inline struct sigaction before_[std::size(kSignals)];
};

/// N of /dev/fd/N or /proc/self/fd/N, else -1.
int descriptor_of(const std::string& path) {
  for (const std::string& folder :
       {std::string("/dev/fd/"), std::string("/proc/self/fd/"), cat("/proc/", ::getpid(), "/fd/")})
    if (path.rfind(folder, 0) == 0) {
      int number = -1;
      const char* end = path.data() + path.size();
      const auto [at, error] = std::from_chars(path.data() + folder.size(), end, number);
      if (error == std::errc() && at == end) return number;
    }
  return -1;
}

std::string folder_of(const std::string& path) { return path.substr(0, path.rfind('/') + 1); }

/// A name that no other process has, also none of another container.
std::string temporary_name() {
  uint64_t random = 0;
  if (::getrandom(&random, sizeof random, 0) != sizeof random)
    random = static_cast<uint64_t>(::getpid());
  char name[40];
  std::snprintf(name, sizeof name, ".kda-%016llx.tmp", static_cast<unsigned long long>(random));
  return name;
}

bool cannot_sync(int error) { return error == EINVAL || error == ENOTSUP || error == EROFS; }

}  // namespace

OutputFile::OutputFile(const std::string& path) : label_(path == "-" ? "standard output" : path) {
  try {
    open(path);
  } catch (...) {
    if (folder_ >= 0) ::close(folder_);
    throw;
  }
}

void OutputFile::open(const std::string& path) {
  if (path.empty()) throw Error(invalid("'': an empty path is no file"));
  if (path == "-") return open_descriptor(STDOUT_FILENO);
  std::string target = path;
  char text[PATH_MAX];
  for (int links = 0;; ++links) {
    if (const int number = descriptor_of(target); number >= 0) return open_descriptor(number);
    const ssize_t size = ::readlink(target.c_str(), text, sizeof text);
    if (size < 0) return open_target(target);
    if (links == kMaxLinks) fail("cannot be written", ELOOP);
    const std::string next(text, static_cast<std::size_t>(size));
    target = next.rfind('/', 0) == 0 ? next : cat(folder_of(target), next);
  }
}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlinkat(folder_, temporary_.c_str(), 0);
  Temporaries::remove(slot_);
  if (folder_ >= 0) ::close(folder_);
}

void OutputFile::fail(const char* what, int error) const {
  throw Error(invalid(label_, ": ", what, " (", std::strerror(error), ")"));
}

void OutputFile::open_descriptor(int descriptor) {
  const int flags = ::fcntl(descriptor, F_GETFL);
  if (flags < 0) fail("cannot be written", errno);
  if ((flags & O_ACCMODE) == O_RDONLY) fail("is not open for writing", EBADF);
  descriptor_ = ::fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (descriptor_ < 0) fail("cannot be written", errno);
  is_stdout_ = descriptor == STDOUT_FILENO;
}

void OutputFile::open_target(const std::string& target) {
  struct stat found = {};
  if (::stat(target.c_str(), &found) == 0) {
    if (S_ISDIR(found.st_mode)) throw Error(invalid(label_, ": is a folder"));
    if (S_ISBLK(found.st_mode))
      throw Error(invalid(label_, ": is a block device, whose content would be destroyed"));
    if (!S_ISREG(found.st_mode)) {
      descriptor_ = ::open(target.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
      if (descriptor_ < 0) fail("cannot be written", errno);
      return;
    }
    if (::faccessat(AT_FDCWD, target.c_str(), W_OK, AT_EACCESS) != 0)
      fail("cannot be written", errno);
    replaces_ = true;
    mode_ = found.st_mode & 0777;
    owner_ = found.st_uid;
    group_ = found.st_gid;
  } else if (errno != ENOENT) {
    fail("cannot be written", errno);
  }
  const std::string folder = folder_of(target);
  name_ = target.substr(folder.size());
  folder_ = ::open(folder.empty() ? "." : folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (folder_ < 0) fail("its folder cannot be opened", errno);
  if (name_.empty()) fail("cannot be written", ENOENT);
  open_temporary();
}

void OutputFile::open_temporary() {
  for (int i = 0; i < kMaxNames; ++i) {
    const std::string name = temporary_name();
    // Before the file is there: a signal between the two would leave it.
    slot_ = Temporaries::add(folder_, name);
    descriptor_ =
        ::openat(folder_, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                 replaces_ ? 0600 : 0666);
    const int error = errno;
    if (descriptor_ >= 0) {
      temporary_ = name;
      return;
    }
    Temporaries::remove(slot_);
    slot_ = -1;
    if (error != EEXIST) fail("its folder takes no new file", error);
  }
  fail("its folder takes no new file", EEXIST);
}

void OutputFile::write(const void* data, std::size_t size) {
  const char* at = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t written = ::write(descriptor_, at, size);
    if (written < 0 && errno == EAGAIN) {  // somebody made the pipe non-blocking
      pollfd ready = {descriptor_, POLLOUT, 0};
      ::poll(&ready, 1, -1);
    } else if (written < 0 && errno != EINTR) {
      fail("writing failed", errno);
    } else if (written > 0) {
      at += written;
      size -= static_cast<std::size_t>(written);
    }
  }
}

void OutputFile::keep_mode() {
  if (!replaces_) return;
  // Who may not give the file away gives its group no more than everybody.
  if (::fchown(descriptor_, owner_, group_) != 0 &&
      ::fchown(descriptor_, static_cast<uid_t>(-1), group_) != 0)
    mode_ &= static_cast<mode_t>(0707 | (mode_ & 07) << 3);
  if (::fchmod(descriptor_, mode_) != 0) fail("its mode cannot be kept", errno);
}

void OutputFile::commit() {
  const bool replace = !temporary_.empty();
  if (replace) {
    keep_mode();
    if (::fsync(descriptor_) != 0 && !cannot_sync(errno)) fail("writing failed", errno);
  }
  if (::close(std::exchange(descriptor_, -1)) != 0) fail("writing failed", errno);
  if (!replace) return;
  struct stat now = {};
  if (::fstatat(folder_, name_.c_str(), &now, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISREG(now.st_mode))
    throw Error(invalid(label_, ": is no regular file any more"));
  if (::renameat(folder_, temporary_.c_str(), folder_, name_.c_str()) != 0)
    fail("cannot be replaced", errno);
  temporary_.clear();
  Temporaries::remove(std::exchange(slot_, -1));
  sync_folder();
}

void OutputFile::sync_folder() {
  const int folder = ::openat(folder_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;  // it may be written but not read
  const int error = ::fsync(folder) == 0 ? 0 : errno;
  ::close(folder);
  if (error != 0 && !cannot_sync(error)) fail("its folder cannot be synced", error);
}

bool OutputFile::same_target(const OutputFile& other) const {
  if (is_stdout_ && other.is_stdout_) return true;
  if (name_.empty() || name_ != other.name_) return false;
  struct stat mine = {}, theirs = {};
  return ::fstat(folder_, &mine) == 0 && ::fstat(other.folder_, &theirs) == 0 &&
         mine.st_dev == theirs.st_dev && mine.st_ino == theirs.st_ino;
}

void write_file(const std::string& path, const std::string& bytes) {
  OutputFile out(path);
  out.write(bytes);
  out.commit();
}

}  // namespace kda::io
