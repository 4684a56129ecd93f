/* SPDX-License-Identifier: Apache-2.0
 * Decode in C: a prompt of 60 tokens, then 4 tokens one by one with the state in place. What comes
 * out is compared with a forward of all 64. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kda/kda.h"

enum { T = 64, PROMPT = 60, H = 4, D = 128, ROW = H * D };

static void check(kda_status status) {
  if (status == KDA_OK) return;
  fprintf(stderr, "%s: %s\n", kda_status_name(status), kda_last_error());
  exit(1);
}

static float* waves(int count, float pace, float shift) {
  float* x = malloc(sizeof(float) * (size_t)count);
  for (int i = 0; x && i < count; ++i) x[i] = shift + sinf(pace * (float)i);
  return x;
}

int main(void) {
  float *q = waves(T * ROW, .7f, 0), *k = waves(T * ROW, 1.3f, 0), *v = waves(T * ROW, .9f, 0);
  float *g = waves(T * ROW, .3f, -1.5f), *beta = waves(T * H, .5f, 0);
  float *o = waves(T * ROW, 0, 0), *expected = waves(T * ROW, 0, 0);
  float* state = calloc(H * D * D, sizeof(float));

  kda_problem problem;
  kda_problem_init(&problem);
  problem.num_heads = problem.num_value_heads = H;
  problem.beta_mode = KDA_BETA_SIGMOID;
  problem.qk_l2norm = 1;

  kda_problem prompt = problem;
  prompt.num_tokens = PROMPT;
  check(kda_tokens(&prompt, KDA_FP32, &(kda_rows){q, k, v, g, beta, o}));
  check(kda_states(&prompt, &prompt.final_state, state, KDA_FP32, 1, NULL));
  check(kda_call(&prompt, NULL));

  kda_problem step = problem;
  step.operation = KDA_DECODE; /* the state is read and written in place */
  step.num_tokens = 1;
  check(kda_states(&step, &step.initial_state, state, KDA_FP32, 1, NULL));
  for (int t = PROMPT; t < T; ++t) {
    const kda_rows token = {q + t * ROW, k + t * ROW,  v + t * ROW,
                            g + t * ROW, beta + t * H, o + t * ROW};
    check(kda_tokens(&step, KDA_FP32, &token));
    check(kda_call(&step, NULL));
  }

  kda_problem whole = problem;
  whole.num_tokens = T;
  check(kda_tokens(&whole, KDA_FP32, &(kda_rows){q, k, v, g, beta, expected}));
  check(kda_call(&whole, NULL));
  double error = 0, norm = 0;
  for (int i = 0; i < T * ROW; ++i) {
    error += pow(o[i] - expected[i], 2);
    norm += pow(expected[i], 2);
  }
  printf("decode after a prompt: relative error %.1e\n", sqrt(error / norm));
  float* const all[] = {q, k, v, g, beta, o, expected, state};
  for (int i = 0; i < 8; ++i) free(all[i]);
  return norm > 0 && error < 1e-10 * norm ? 0 : 1;
}
