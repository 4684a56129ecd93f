/* SPDX-License-Identifier: Apache-2.0
 * A program in C99: a call in a line, and one token worked out by hand. */
#include <kda/kda.h>
#include <stdio.h>

int main(void) {
  /* K = V = 1: S = beta k v = 0.5 * 2 * 3 = 3, o = S q = 12. */
  float q = 4, k = 2, v = 3, g = -1, beta = 0.5f, o = 0, state = 0;
  kda_rows rows;
  kda_problem problem;
  kda_problem_init(&problem);
  problem.num_tokens = problem.key_dim = problem.value_dim = 1;
  rows.q = &q;
  rows.k = &k;
  rows.v = &v;
  rows.g = &g;
  rows.beta = &beta;
  rows.o = &o;
  if (kda_tokens(&problem, KDA_FP32, &rows) != KDA_OK ||
      kda_states(&problem, &problem.final_state, &state, KDA_FP32, 1, NULL) != KDA_OK ||
      kda_call(&problem, NULL) != KDA_OK) {
    fprintf(stderr, "%s\n", kda_last_error());
    return 1;
  }
  printf("C consumer: libkda %s, o = %g\n", kda_version(), (double)o);
  return o > 11.99f && o < 12.01f && state > 2.99f && state < 3.01f ? 0 : 1;
}
