/* SPDX-License-Identifier: Apache-2.0
 * Forward in C: one sequence of 1,000 tokens, 2 heads. */
#include <stdio.h>
#include <stdlib.h>

#include "kda/kda.h"

int main(void) {
  /* [readme] */
  const int64_t rows[] = {1, 1000, 2, 128}, scalars[] = {1, 1000, 2};
  float* data = calloc(1000 * 2 * 128, sizeof(float));
  float* o = calloc(1000 * 2 * 128, sizeof(float));
  for (int i = 0; i < 1000 * 2 * 128; ++i) data[i] = -0.01f;

  kda_problem problem;
  kda_problem_init(&problem);
  problem.num_tokens = 1000;
  problem.num_heads = problem.num_value_heads = 2;
  problem.beta_mode = KDA_BETA_SIGMOID;
  problem.qk_l2norm = 1;
  kda_tensor_contiguous(&problem.q, data, KDA_FP32, 4, rows);
  kda_tensor_contiguous(&problem.k, data, KDA_FP32, 4, rows);
  kda_tensor_contiguous(&problem.v, data, KDA_FP32, 4, rows);
  kda_tensor_contiguous(&problem.g, data, KDA_FP32, 4, rows);
  kda_tensor_contiguous(&problem.beta, data, KDA_FP32, 3, scalars);
  kda_tensor_contiguous(&problem.o, o, KDA_FP32, 4, rows);

  kda_plan* plan = NULL;
  if (kda_plan_create(&problem, NULL, NULL, &plan) != KDA_OK) {
    fprintf(stderr, "%s\n", kda_last_error());
    return 1;
  }
  void* workspace = aligned_alloc(64, kda_plan_workspace_bytes(plan));
  kda_status status = kda_run(plan, &problem, workspace, kda_plan_workspace_bytes(plan));
  /* [readme] */
  printf("%s: %s, o[last] = %g\n", kda_plan_implementation(plan), kda_status_name(status),
         (double)o[1000 * 2 * 128 - 1]);
  kda_plan_destroy(plan);
  free(workspace);
  free(data);
  free(o);
  return status == KDA_OK ? 0 : 1;
}
