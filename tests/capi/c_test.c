/* SPDX-License-Identifier: Apache-2.0
 * The header in C and the shared library's symbols: one token worked out by hand. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kda/kda.h"

static int fail(const char* what) {
  fprintf(stderr, "c_test: %s (%s)\n", what, kda_last_error());
  return 1;
}

int main(void) {
  /* K = V = 1: S = beta k v = 0.5 * 2 * 3 = 3, o = S q = 12. */
  float q = 4, k = 2, v = 3, g = -1, beta = 0.5f, o = 0, state = 0;
  const int64_t one[] = {1, 1, 1, 1};
  kda_problem problem;
  kda_plan* plan = NULL;
  void* workspace = NULL;
  kda_problem_init(&problem);
  problem.num_tokens = 1;
  problem.key_dim = problem.value_dim = 1;
  problem.has_scale = 1;
  problem.scale = 1;
  kda_tensor_contiguous(&problem.q, &q, KDA_FP32, 4, one);
  kda_tensor_contiguous(&problem.k, &k, KDA_FP32, 4, one);
  kda_tensor_contiguous(&problem.v, &v, KDA_FP32, 4, one);
  kda_tensor_contiguous(&problem.g, &g, KDA_FP32, 4, one);
  kda_tensor_contiguous(&problem.beta, &beta, KDA_FP32, 3, one);
  kda_tensor_contiguous(&problem.o, &o, KDA_FP32, 4, one);
  kda_tensor_contiguous(&problem.final_state.tensor, &state, KDA_FP32, 4, one);
  problem.final_state.present = 1;
  problem.final_state.num_slots = 1;
  if (kda_plan_create(&problem, NULL, NULL, &plan) != KDA_OK) return fail("plan");
  workspace = aligned_alloc(64, (kda_plan_workspace_bytes(plan) + 63) / 64 * 64);
  if (kda_run(plan, &problem, workspace, kda_plan_workspace_bytes(plan)) != KDA_OK)
    return fail("run");
  if (fabsf(o - 12) > 1e-5f || fabsf(state - 3) > 1e-6f) return fail("wrong numbers");
  if (kda_run(plan, &problem, workspace, 1) != KDA_INVALID_ARGUMENT) return fail("small workspace");
  if (strstr(kda_last_error(), "workspace") == NULL) return fail("message");
  kda_plan_destroy(plan);
  free(workspace);
  printf("c_test: libkda %s, good\n", kda_version());
  return 0;
}
