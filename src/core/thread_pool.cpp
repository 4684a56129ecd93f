// SPDX-License-Identifier: Apache-2.0
#include "core/thread_pool.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
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

/// A call in progress; lives on the caller's stack, linked into the pool while it has room.
struct Job {
  TaskFn fn;
  void* context;
  int64_t num_tasks;
  int32_t max_threads;
  std::atomic<int64_t> next_task{0};
  int32_t num_joined = 1;   // slots handed out; the caller has slot 0      (pool mutex)
  int32_t num_working = 0;  // workers that have not yet left               (pool mutex)
  std::condition_variable left{};
  Job* next = nullptr;  //                                                  (pool mutex)

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

  Status run(Job& job) {
    {
      std::lock_guard lock(mutex_);
      KDA_RETURN_IF_ERROR(start_workers(std::min<int64_t>(job.max_threads, job.num_tasks) - 1));
      job.next = jobs_;
      jobs_ = &job;
    }
    wake_.notify_all();
    job.work(0);
    std::unique_lock lock(mutex_);
    unlink(job);
    job.left.wait(lock, [&] { return job.num_working == 0; });
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

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      Job* job = find_open_job();
      if (!job) {
        wake_.wait(lock);
        continue;
      }
      const int32_t slot = job->num_joined++;
      ++job->num_working;
      lock.unlock();
      job->work(slot);
      lock.lock();
      if (--job->num_working == 0) job->left.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  Job* jobs_ = nullptr;
  int64_t num_workers_ = 0;
};

}  // namespace

int32_t default_num_threads() noexcept {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    const long value = std::strtol(text, nullptr, 10);
    if (value >= 1) return static_cast<int32_t>(std::min<long>(value, kMaxThreads));
  }
  static const unsigned cpus = std::thread::hardware_concurrency();  // reads a file: once
  return static_cast<int32_t>(std::clamp<unsigned>(cpus, 1, 256));
}

Status parallel_for(int64_t num_tasks, int32_t max_threads, TaskFn fn, void* context) noexcept {
  if (num_tasks <= 1 || max_threads <= 1) {
    for (int64_t task = 0; task < num_tasks; ++task) fn(context, task, 0);
    return {};
  }
  return guarded([&] {
    Job job{fn, context, num_tasks, std::min(max_threads, kMaxThreads)};
    return ThreadPool::instance().run(job);
  });
}

}  // namespace kda
