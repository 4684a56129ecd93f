// SPDX-License-Identifier: Apache-2.0
#include "core/thread_pool.hpp"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>
#include <vector>

namespace kda {
namespace {

TEST(ThreadPool, RunsEveryTaskOnceWithinItsSlots) {
  for (const int32_t threads : {1, 2, 3, 8}) {
    std::vector<std::atomic<int>> runs(1000);
    std::atomic<int> bad_slots{0};
    auto task = [&](int64_t idx, int32_t slot) {
      ++runs[static_cast<std::size_t>(idx)];
      if (slot < 0 || slot >= threads) ++bad_slots;
    };
    ASSERT_TRUE(parallel_tasks(1000, threads, task).ok());
    for (const auto& count : runs) ASSERT_EQ(count, 1);
    EXPECT_EQ(bad_slots, 0);
  }
}

TEST(ThreadPool, NoTasks) {
  auto task = [](int64_t, int32_t) { FAIL(); };
  EXPECT_TRUE(parallel_tasks(0, 4, task).ok());
}

TEST(ThreadPool, SlotsAreUniqueWhileRunning) {
  std::atomic<int> in_slot[4] = {};
  std::atomic<int> collisions{0};
  auto task = [&](int64_t, int32_t slot) {
    if (++in_slot[slot] > 1) ++collisions;
    std::this_thread::yield();
    --in_slot[slot];
  };
  for (int round = 0; round < 50; ++round) ASSERT_TRUE(parallel_tasks(64, 4, task).ok());
  EXPECT_EQ(collisions, 0);
}

TEST(ThreadPool, ManyCallersAtOnce) {
  std::atomic<int64_t> total{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 16; ++c)
    callers.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        std::atomic<int64_t> sum{0};
        auto task = [&](int64_t idx, int32_t) { sum += idx; };
        if (parallel_tasks(100, 3, task).ok() && sum == 4950) total += sum;
      }
    });
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total, 16 * 20 * 4950);
}

/// Whether every task of a job of so much work ran on this thread. Each gives others time to come.
bool runs_alone(double microseconds) {
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<bool> alone{true};
  auto task = [&](int64_t, int32_t) {
    if (std::this_thread::get_id() != caller) alone = false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  };
  EXPECT_TRUE(parallel_tasks(10, 2, task, microseconds).ok());
  return alone;
}

TEST(ThreadPool, ShortJobsStayOnTheirThread) {
  EXPECT_FALSE(runs_alone(kLongWork));
  EXPECT_FALSE(runs_alone(kWorthWaking));
  EXPECT_TRUE(runs_alone(9));  // two threads would have less than 5 us each
  // A longer one wakes nobody either, if none came shortly before it.
  int alone = 0;
  for (int i = 0; i < 10; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    alone += runs_alone(kWorthWaking - 1) ? 1 : 0;
  }
  EXPECT_GT(alone, 0);  // not all: a worker that lost its core may still be looking
}

#if !defined(__SANITIZE_THREAD__)  // the sanitizer's runtime does not survive threads after fork
TEST(ThreadPool, WorksInAForkedChild) {
  auto task = [](int64_t, int32_t) {};
  ASSERT_TRUE(parallel_tasks(100, 4, task).ok());
  const pid_t child = fork();
  if (child == 0) {
    std::atomic<int64_t> sum{0};
    auto add = [&](int64_t idx, int32_t) { sum += idx; };
    const bool good = parallel_tasks(100, 4, add).ok() && sum == 4950;
    _exit(good ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(parallel_tasks(100, 4, task).ok());
}

/// In a process of its own, which keeps to one core.
TEST(ThreadPool, CountsTheCoresThatTheProcessMayUse) {
  cpu_set_t all, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof all, &all), 0);
  EXPECT_EQ(usable_cores(), CPU_COUNT(&all));
  std::size_t core = 0;
  while (!CPU_ISSET(core, &all)) ++core;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  const pid_t child = fork();
  if (child == 0) _exit(sched_setaffinity(0, sizeof one, &one) == 0 && usable_cores() == 1 ? 0 : 1);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}
#endif

TEST(ThreadPool, HonoursOmpNumThreads) {
  setenv("OMP_NUM_THREADS", "3", 1);
  EXPECT_EQ(default_num_threads(), 3);
  setenv("OMP_NUM_THREADS", "100000", 1);
  EXPECT_LE(default_num_threads(), 1024);
  setenv("OMP_NUM_THREADS", "nonsense", 1);
  EXPECT_GE(default_num_threads(), 1);
  unsetenv("OMP_NUM_THREADS");
  EXPECT_GE(default_num_threads(), 1);
}

}  // namespace
}  // namespace kda
