/* SPDX-License-Identifier: Apache-2.0
 * Forward in C: one sequence of 1,000 tokens, 2 heads. */
#include <stdio.h>
#include <stdlib.h>

#include "kda/kda.h"

int main(void) {
  /* [readme] */
  enum { T = 1000, H = 2, D = 128 };
  float* data = calloc(T * H * D, sizeof(float));
  float* o = calloc(T * H * D, sizeof(float));
  for (int i = 0; i < T * H * D; ++i) data[i] = -0.01f;

  kda_problem problem;
  kda_problem_init(&problem);
  problem.num_tokens = T;
  problem.num_heads = problem.num_value_heads = H;
  problem.beta_mode = KDA_BETA_SIGMOID;
  problem.qk_l2norm = 1;
  const kda_rows rows = {data, data, data, data, data, o}; /* q, k, v, g, beta, o */
  kda_status status = kda_tokens(&problem, KDA_FP32, &rows);
  if (status == KDA_OK) status = kda_call(&problem, NULL); /* plans once for all such calls */
  if (status != KDA_OK) fprintf(stderr, "%s\n", kda_last_error());
  /* [readme] */
  printf("%s, o[last] = %g\n", kda_status_name(status), (double)o[T * H * D - 1]);
  const int good = status == KDA_OK && o[T * H * D - 1] < 0;
  free(data);
  free(o);
  return good ? 0 : 1;
}
