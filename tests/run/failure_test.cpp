// SPDX-License-Identifier: Apache-2.0
// Failure injection: every allocation and every thread start made to fail once. The call returns
// a status, leaks nothing (sanitizers), and the next call works.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "core/text.hpp"
#include "kda/kda.h"
#include "support/harness.hpp"

namespace {

// Fails the n-th allocation of this thread after arming; -1: never.
thread_local int64_t allocations_left = -1;
thread_local int64_t allocations_seen = 0;

bool should_fail() {
  ++allocations_seen;
  return allocations_left >= 0 && allocations_left-- == 0;
}

std::atomic<int> thread_starts_left{-1};

}  // namespace

// Not inlined: the compiler would take free() and malloc() for mismatched.
[[gnu::noinline]] void* operator new(std::size_t size) {
  void* memory = should_fail() ? nullptr : std::malloc(size ? size : 1);
  if (!memory) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define KDA_TEST_THREAD_FAILURE 1
// Interposes the C library's; the sanitizers need theirs for themselves.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto real = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (thread_starts_left >= 0 && thread_starts_left-- == 0) return EAGAIN;
  return real(thread, attributes, start, argument);
}
#endif

namespace kda {
namespace {

/// A whole use of the library: plan with reasons and segments, run, print.
Status use_library(const check::Inputs& inputs, Tensors tensors, io::Buffer* workspace,
                   const Problem& problem) {
  Plan plan;
  PlanOptions options = test::fixed_segments(3);
  options.num_threads = 1;
  if (Status status = make_plan(problem, inputs.cu_seqlens, cpu_facts(), options, &plan);
      !status.ok())
    return status;
  if (Status status = supported(problem, gpu_facts(132)); status.code() == StatusCode::kOutOfMemory)
    return status;
  return run(plan, tensors, workspace->data(), workspace->size());
}

TEST(FailureInjection, EveryAllocationOfPlanAndRun) {
  check::GenerateOptions shape = test::shape(0, 1, 8, 8);
  shape.seq_lens = {200, 0, 70};
  const check::Inputs inputs = check::generate(shape);
  Problem problem = inputs.problem;
  check::want_final_state(&problem);
  check::Outputs outputs = check::make_outputs(&problem, DType::kFloat32);
  Tensors tensors = inputs.tensors();
  outputs.attach(&tensors);
  io::Buffer workspace(std::size_t{8} << 20);

  allocations_seen = 0;
  ASSERT_TRUE(use_library(inputs, tensors, &workspace, problem).ok());
  const int64_t total = allocations_seen;
  ASSERT_GT(total, 10);
  for (int64_t n = 0; n < total; ++n) {
    allocations_left = n;
    const Status status = use_library(inputs, tensors, &workspace, problem);
    allocations_left = -1;
    ASSERT_EQ(status.code(), StatusCode::kOutOfMemory) << "allocation " << n << " of " << total;
    ASSERT_TRUE(use_library(inputs, tensors, &workspace, problem).ok());
  }
}

TEST(FailureInjection, RunAllocatesNothing) {
  const check::Inputs inputs = check::generate(test::shape(100, 2, 16, 16));
  Problem problem = inputs.problem;
  check::Outputs outputs = check::make_outputs(&problem, DType::kFloat32);
  Tensors tensors = inputs.tensors();
  outputs.attach(&tensors);
  Plan plan;
  ASSERT_TRUE(make_plan(problem, {}, cpu_facts(), test::with_threads(2), &plan).ok());
  io::Buffer workspace(plan.workspace_bytes);
  ASSERT_TRUE(run(plan, tensors, workspace.data(), workspace.size()).ok());  // starts the pool
  allocations_seen = 0;
  ASSERT_TRUE(run(plan, tensors, workspace.data(), workspace.size()).ok());
  EXPECT_EQ(allocations_seen, 0);
}

TEST(FailureInjection, EveryAllocationOfTheCAbi) {
  kda_problem problem;
  kda_problem_init(&problem);
  problem.num_tokens = 100;
  problem.key_dim = problem.value_dim = 8;
  std::vector<float> data(100 * 8, 0.1f), o(100 * 8);
  const int64_t rows[] = {1, 100, 1, 8}, scalars[] = {1, 100, 1};
  for (kda_tensor* tensor : {&problem.q, &problem.k, &problem.v, &problem.g})
    ASSERT_EQ(kda_tensor_contiguous(tensor, data.data(), KDA_FP32, 4, rows), KDA_OK);
  ASSERT_EQ(kda_tensor_contiguous(&problem.o, o.data(), KDA_FP32, 4, rows), KDA_OK);
  ASSERT_EQ(kda_tensor_contiguous(&problem.beta, data.data(), KDA_FP32, 3, scalars), KDA_OK);
  kda_plan* plan = nullptr;
  allocations_seen = 0;
  ASSERT_EQ(kda_plan_create(&problem, nullptr, nullptr, &plan), KDA_OK);
  kda_plan_destroy(plan);
  const int64_t total = allocations_seen;
  for (int64_t n = 0; n < total; ++n) {
    allocations_left = n;
    const kda_status status = kda_plan_create(&problem, nullptr, nullptr, &plan);
    allocations_left = -1;
    ASSERT_EQ(status, KDA_OUT_OF_MEMORY) << n;
    ASSERT_EQ(plan, nullptr);
    ASSERT_STREQ(kda_last_error(), "out of memory");
  }
}

#if KDA_TEST_THREAD_FAILURE
TEST(FailureInjection, EveryThreadStart) {
  const check::Inputs inputs = check::generate(test::shape(256, 8, 64, 64));
  const test::Result expected = test::run_inputs(inputs, {.plan = test::with_threads(1)});
  test::run_inputs(inputs, {.plan = test::with_threads(2)});
  // Each round wants one thread more than any before, which must be started.
  for (int32_t threads = 3; threads <= 8; ++threads) {
    thread_starts_left = 0;
    try {
      test::run_inputs(inputs, {.plan = test::with_threads(threads)});
      ADD_FAILURE() << "a failed thread start went unnoticed";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), StatusCode::kOutOfResources);
      const std::string message = error.what();
      EXPECT_NE(message.find(cat("num_threads: the system starts no more than ", threads - 1,
                                 " of ", threads, " threads (Resource temporarily unavailable)")),
                std::string::npos)
          << message;
    }
    thread_starts_left = -1;
    const test::Result after = test::run_inputs(inputs, {.plan = test::with_threads(threads)});
    EXPECT_TRUE(test::same_bits(expected.outputs.o, after.outputs.o));
  }
}
#endif

}  // namespace
}  // namespace kda
