/* SPDX-License-Identifier: Apache-2.0
 * Calls of libkda from threads of another library's pool: kda_call on the thread that calls, alone.
 * Plans are remembered, and each thread keeps its workspace until it ends. */
#ifndef KDA_EXAMPLES_ONE_THREAD_H_
#define KDA_EXAMPLES_ONE_THREAD_H_

#include <stdlib.h>
#include <threads.h>

#include "kda/kda.h"

static struct {
  once_flag once;
  kda_plan_cache* plans;
  tss_t workspaces;
  int ready;
} one_thread = {.once = ONCE_FLAG_INIT};

static void prepare_one_thread(void) {
  one_thread.ready = kda_plan_cache_create(0, &one_thread.plans) == KDA_OK &&
                     tss_create(&one_thread.workspaces, free) == thrd_success;
}

/* At least so many bytes that the thread keeps, or null. In front of them is their number. */
static void* workspace_of_thread(size_t bytes) {
  enum { HEADER = 64 };
  size_t* kept = tss_get(one_thread.workspaces);
  if (kept == NULL || *kept < bytes) {
    free(kept);
    const size_t size = (bytes + HEADER - 1) / HEADER * HEADER;
    kept = aligned_alloc(HEADER, HEADER + size);
    tss_set(one_thread.workspaces, kept);
    if (kept == NULL) return NULL;
    *kept = size;
  }
  return (char*)kept + HEADER;
}

/* Null, or what went wrong: valid until the thread's next call. */
static const char* call_on_one_thread(const kda_problem* problem) {
  call_once(&one_thread.once, prepare_one_thread);
  if (!one_thread.ready) return "out of memory";
  kda_plan_options options;
  kda_plan_options_init(&options);
  options.num_threads = 1;
  kda_plan* plan = NULL;
  if (kda_plan_cache_find(one_thread.plans, problem, NULL, &options, &plan) != KDA_OK)
    return kda_last_error();
  const size_t bytes = kda_plan_workspace_bytes(plan);
  void* workspace = workspace_of_thread(bytes);
  const int ran = workspace != NULL && kda_run(plan, problem, workspace, bytes) == KDA_OK;
  kda_plan_destroy(plan);
  if (ran) return NULL;
  return workspace == NULL ? "out of memory" : kda_last_error();
}

#endif
