// SPDX-License-Identifier: Apache-2.0
#include "core/thread_pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

#include "core/guard.hpp"
#include "core/text.hpp"

namespace kda {
namespace {

constexpr int32_t kMaxThreads = 1024;

using Clock = std::chrono::steady_clock;
/// How long an idle thread looks for work before it sleeps: to wake it takes as long again.
constexpr Clock::duration kPollTime = std::chrono::microseconds(50);
/// A core that comes back later than this from sched_yield() has run somebody else.
constexpr Clock::duration kYieldTime = std::chrono::microseconds(5);
/// For so long after that short jobs ask nobody: a worker without a core holds up its caller.
constexpr Clock::duration kCrowdedTime = std::chrono::milliseconds(10);
/// Work that a thread must have of its own, if it is awake.
constexpr double kWorthSharing = 5;  // us

void pause_briefly() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

enum class Found { kYes, kNothing, kCrowd };

/// Looks for some 50 us whether `done()` holds, and gives up at once where another thread wants
/// this core.
template <class Done>
Found poll(Done&& done) {
  constexpr int kLooks = 32;
  if (done()) return Found::kYes;
  const Clock::time_point end = Clock::now() + kPollTime;
  for (;;) {
    for (int look = 0; look < kLooks; ++look) {
      if (done()) return Found::kYes;
      pause_briefly();
    }
    const Clock::time_point before = Clock::now();
    if (before > end) return Found::kNothing;
    sched_yield();
    if (Clock::now() - before > kYieldTime) return Found::kCrowd;
  }
}

/// std::condition_variable::wait is a symbol of GCC 12's library, which manylinux_2_34 lacks.
void wait_on(std::condition_variable& condition, std::unique_lock<std::mutex>& lock) {
  pthread_cond_wait(condition.native_handle(), lock.mutex()->native_handle());
}

/// A call in progress; lives on the caller's stack, linked into the pool while it has room.
struct Job {
  TaskFn fn;
  void* context;
  int64_t num_tasks;
  int32_t max_threads;
  std::atomic<int64_t> next_task{0};
  int32_t num_joined = 1;               // slots handed out; the caller has slot 0  (pool mutex)
  std::atomic<int32_t> num_working{0};  // workers that have not yet left (changed under the mutex)
  std::condition_variable left{};
  Job* next = nullptr;  //                                                          (pool mutex)

  void work(int32_t slot) {
    for (int64_t task; (task = next_task.fetch_add(1, std::memory_order_relaxed)) < num_tasks;)
      fn(context, task, slot);
  }
};

class ThreadPool {
 public:
  static ThreadPool& instance() {
    static const bool registered = (pthread_atfork(&before_fork, &in_parent, &in_child), true);
    static_cast<void>(registered);
    return *current();
  }

  /// `microseconds`: of all of the job.
  Status run(Job& job, double microseconds) {
    int64_t to_wake = std::min<int64_t>(job.max_threads, job.num_tasks) - 1;
    {
      std::lock_guard lock(mutex_);
      if (microseconds < kWorthWaking && !worth_sharing_now()) {
        to_wake = 0;
      } else {
        KDA_RETURN_IF_ERROR(start_workers(to_wake));
        job.next = jobs_;
        jobs_ = &job;
        num_posted_.fetch_add(1, std::memory_order_relaxed);
        to_wake = std::min(to_wake - num_polling_, num_sleeping_);
      }
    }
    for (; to_wake > 0; --to_wake) wake_.notify_one();
    job.work(0);
    const auto all_left = [&] { return job.num_working.load(std::memory_order_acquire) == 0; };
    const Found found = poll(all_left);
    std::unique_lock lock(mutex_);  // also waits for the last worker to be done with the job
    if (found == Found::kCrowd) note_crowd();
    unlink(job);
    while (!all_left()) wait_on(job.left, lock);
    return {};
  }

 private:
  // Never destroyed: workers may outlive main().
  static ThreadPool*& current() {
    static ThreadPool* pool = new ThreadPool();
    return pool;
  }

  // The child has none of the workers, and a condition variable with waiters that no longer exist
  // can block for ever: it gets a pool of its own.
  static void before_fork() { current()->mutex_.lock(); }
  static void in_parent() { current()->mutex_.unlock(); }
  static void in_child() { current() = new ThreadPool(); }

  Status start_workers(int64_t wanted) {
    for (; num_workers_ < wanted; ++num_workers_) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error& error) {
        return Status(StatusCode::kOutOfResources,
                      cat("num_threads: the system starts no more than ", num_workers_ + 1, " of ",
                          wanted + 1, " threads (", error.code().message(),
                          "); ask for fewer, or set OMP_NUM_THREADS"));
      }
    }
    return {};
  }

  /// Whether a short job should ask others. They are awake if jobs come close after one another.
  bool worth_sharing_now() {
    const Clock::time_point now = Clock::now();
    const bool follows = now - last_short_job_ < kPollTime;
    last_short_job_ = now;
    return now > crowded_until_ && (num_polling_ > 0 || follows);
  }

  void note_crowd() { crowded_until_ = Clock::now() + kCrowdedTime; }

  Job* find_open_job() const {
    Job* job = jobs_;
    while (job && (job->num_joined >= job->max_threads ||
                   job->next_task.load(std::memory_order_relaxed) >= job->num_tasks))
      job = job->next;
    return job;
  }

  void unlink(Job& job) {
    Job** link = &jobs_;
    while (*link && *link != &job) link = &(*link)->next;
    if (*link) *link = job.next;
  }

  /// Polls for a job, then looks under the lock: none that was posted meanwhile is missed.
  Job* wait_for_job(std::unique_lock<std::mutex>& lock) {
    ++num_polling_;
    const int64_t seen = num_posted_.load(std::memory_order_relaxed);
    lock.unlock();
    const Found found = poll([&] { return num_posted_.load(std::memory_order_relaxed) != seen; });
    lock.lock();
    --num_polling_;
    if (found == Found::kCrowd) note_crowd();
    Job* job = find_open_job();
    for (; !job; job = find_open_job()) {
      ++num_sleeping_;
      wait_on(wake_, lock);
      --num_sleeping_;
    }
    return job;
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      Job* job = find_open_job();
      if (!job) job = wait_for_job(lock);
      const int32_t slot = job->num_joined++;
      job->num_working.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      job->work(slot);
      lock.lock();
      if (job->num_working.fetch_sub(1, std::memory_order_release) == 1) job->left.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int64_t> num_posted_{0};  // jobs so far; pollers watch it
  Job* jobs_ = nullptr;
  int64_t num_workers_ = 0;
  int64_t num_polling_ = 0;
  int64_t num_sleeping_ = 0;
  Clock::time_point last_short_job_{};
  Clock::time_point crowded_until_{};
};

}  // namespace

int32_t usable_cores() noexcept {
  cpu_set_t cores;
  if (sched_getaffinity(getpid(), sizeof cores, &cores) == 0) return CPU_COUNT(&cores);
  return static_cast<int32_t>(std::thread::hardware_concurrency());  // too many for a cpu_set_t
}

int32_t default_num_threads() noexcept {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    const long value = std::strtol(text, nullptr, 10);
    if (value >= 1) return static_cast<int32_t>(std::min<long>(value, kMaxThreads));
  }
  static const int32_t cores = usable_cores();  // once: plans stay as they are
  return std::clamp(cores, 1, 256);
}

Status parallel_for(int64_t num_tasks, int32_t max_threads, TaskFn fn, void* context,
                    double microseconds) noexcept {
  const double worth = std::min<double>(microseconds / kWorthSharing, kMaxThreads);
  max_threads = std::min(max_threads, static_cast<int32_t>(worth));
  if (num_tasks <= 1 || max_threads <= 1) {
    for (int64_t task = 0; task < num_tasks; ++task) fn(context, task, 0);
    return {};
  }
  return guarded([&] {
    Job job{fn, context, num_tasks, max_threads};
    return ThreadPool::instance().run(job, microseconds);
  });
}

}  // namespace kda
