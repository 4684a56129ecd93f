/* SPDX-License-Identifier: Apache-2.0
 * A server's two steps in C, on a pool of states: the prompts of two requests into their slots,
 * then tokens of both, in place. What comes out is compared with forwards of all tokens. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kda/kda.h"

enum { T = 96, FIRST = 60, STEPS = 3, H = 4, D = 128, ROW = H * D, SLOTS = 8, REQUESTS = 2 };

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

/* A problem of [batch, tokens], with the options of the layer. */
static kda_problem of_tokens(int64_t batch, int64_t tokens, const kda_rows* rows) {
  kda_problem problem;
  kda_problem_init(&problem);
  problem.batch = problem.num_sequences = batch;
  problem.num_tokens = tokens;
  problem.num_heads = problem.num_value_heads = H;
  problem.beta_mode = KDA_BETA_SIGMOID;
  problem.qk_l2norm = 1;
  check(kda_tokens(&problem, KDA_FP32, rows));
  return problem;
}

static kda_rows from_token(const kda_rows* x, int64_t t) {
  const kda_rows rows = {(const float*)x->q + t * ROW,  (const float*)x->k + t * ROW,
                         (const float*)x->v + t * ROW,  (const float*)x->g + t * ROW,
                         (const float*)x->beta + t * H, (float*)x->o + t * ROW};
  return rows;
}

/* Two requests of 60 and 36 tokens, one after the other. The last three of each are decoded. */
int main(void) {
  float *q = waves(T * ROW, .7f, 0), *k = waves(T * ROW, 1.3f, 0), *v = waves(T * ROW, .9f, 0);
  float *g = waves(T * ROW, .3f, -1.5f), *beta = waves(T * H, .5f, 0);
  float *o = waves(T * ROW, 0, 0), *expected = waves(T * ROW, 0, 0);
  float* pool = calloc((size_t)SLOTS * H * D * D, sizeof(float));
  const kda_rows rows = {q, k, v, g, beta, o}, truth = {q, k, v, g, beta, expected};
  const int64_t ends[] = {0, FIRST, T};
  const int32_t slots[] = {5, 2, 0}; /* the third row of a decode is padding, and has no slot */

  for (int n = 0; n < REQUESTS; ++n) {
    const kda_rows prompt = from_token(&rows, ends[n]);
    kda_problem prefill = of_tokens(1, ends[n + 1] - ends[n] - STEPS, &prompt);
    check(kda_states(&prefill, &prefill.final_state, pool, KDA_FP32, SLOTS, slots + n));
    check(kda_call(&prefill, NULL));
  }

  /* A token of each request, gathered to [3, 1, H, D]. */
  float row[5][3 * ROW], step_o[3 * ROW];
  const kda_rows step_rows = {row[0], row[1], row[2], row[3], row[4], step_o};
  kda_problem step = of_tokens(REQUESTS + 1, 1, &step_rows);
  step.operation = KDA_DECODE;
  step.first_slot = 1; /* slot 0 is nobody's: that of padded rows */
  check(kda_states(&step, &step.initial_state, pool, KDA_FP32, SLOTS, slots));
  for (int64_t s = 0; s < STEPS; ++s) {
    memset(row, 0, sizeof(row));
    for (int n = 0; n < REQUESTS; ++n) {
      const kda_rows token = from_token(&rows, ends[n + 1] - STEPS + s);
      const void* const from[] = {token.q, token.k, token.v, token.g};
      for (int i = 0; i < 4; ++i) memcpy(row[i] + n * ROW, from[i], sizeof(float) * ROW);
      memcpy(row[4] + n * H, token.beta, sizeof(float) * H);
    }
    check(kda_call(&step, NULL));
    for (int n = 0; n < REQUESTS; ++n)
      memcpy(from_token(&rows, ends[n + 1] - STEPS + s).o, step_o + n * ROW, sizeof(float) * ROW);
  }

  kda_problem whole = of_tokens(1, T, &truth);
  whole.num_sequences = REQUESTS;
  whole.has_cu_seqlens = 1;
  check(kda_call(&whole, ends));
  double error = 0, norm = 0;
  for (int i = 0; i < T * ROW; ++i) {
    error += pow(o[i] - expected[i], 2);
    norm += pow(expected[i], 2);
  }
  printf("two requests in a pool: relative error %.1e\n", sqrt(error / norm));
  float* const all[] = {q, k, v, g, beta, o, expected, pool};
  for (int i = 0; i < 8; ++i) free(all[i]);
  return norm > 0 && error < 1e-10 * norm ? 0 : 1;
}
