/* SPDX-License-Identifier: Apache-2.0
 * Gradients in C: a forward that keeps states for its backward, and the backward; one of the
 * gradients is checked by a difference of losses. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kda/kda.h"

enum { T = 300, H = 2, K = 32, V = 32, TOKEN = 300 };

static float* zeros(int count) { return calloc((size_t)count, sizeof(float)); }

static float* waves(int count, double pace, double size) {
  float* values = zeros(count);
  for (int i = 0; i < count; ++i) values[i] = (float)(size * sin(pace * i));
  return values;
}

static void check(kda_status status) {
  if (status == KDA_OK) return;
  fprintf(stderr, "%s\n", kda_last_error());
  exit(1);
}

/* Whole lines of 64 bytes, which is what aligned_alloc takes. */
static void* aligned(size_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64); }

int main(void) {
  const int64_t of_keys[] = {1, T, H, K}, of_values[] = {1, T, H, V}, scalars[] = {1, T, H};
  float *q = waves(T * H * K, 0.7, 1), *k = waves(T * H * K, 1.3, 1), *v = waves(T * H * V, 0.9, 1);
  float *g = waves(T * H * K, 0.3, 2), *beta = waves(T * H, 0.5, 1), *o = zeros(T * H * V);
  float *d_o = waves(T * H * V, 0.2, 1), *dv = zeros(T * H * V), *dbeta = zeros(T * H);

  kda_problem problem;
  kda_problem_init(&problem);
  problem.num_tokens = T;
  problem.num_heads = problem.num_value_heads = H;
  problem.key_dim = K;
  problem.value_dim = V;
  problem.gate_mode = KDA_GATE_BOUNDED;
  problem.beta_mode = KDA_BETA_SIGMOID;
  problem.qk_l2norm = 1;
  kda_tensor_contiguous(&problem.q, q, KDA_FP32, 4, of_keys);
  kda_tensor_contiguous(&problem.k, k, KDA_FP32, 4, of_keys);
  kda_tensor_contiguous(&problem.v, v, KDA_FP32, 4, of_values);
  kda_tensor_contiguous(&problem.g, g, KDA_FP32, 4, of_keys);
  kda_tensor_contiguous(&problem.beta, beta, KDA_FP32, 3, scalars);
  kda_tensor_contiguous(&problem.o, o, KDA_FP32, 4, of_values);

  /* The forward keeps a state every 128 tokens, in memory of the caller. */
  kda_plan_options options;
  kda_plan_options_init(&options);
  options.keep = 128;
  kda_plan* forward = NULL;
  check(kda_plan_create(&problem, NULL, &options, &forward));
  problem.saved_bytes = kda_plan_saved_bytes(forward);
  problem.saved = aligned(problem.saved_bytes);
  void* room = aligned(kda_plan_workspace_bytes(forward));
  check(kda_run(forward, &problem, room, kda_plan_workspace_bytes(forward)));

  /* Gradients that are not described are not wanted. */
  kda_gradients gradients = {0};
  gradients.struct_size = sizeof(gradients);
  kda_tensor_contiguous(&gradients.d_o, d_o, KDA_FP32, 4, of_values);
  kda_tensor_contiguous(&gradients.dv, dv, KDA_FP32, 4, of_values);
  kda_tensor_contiguous(&gradients.dbeta, dbeta, KDA_FP32, 3, scalars);
  kda_backward_plan* backward = NULL;
  check(kda_backward_plan_create(forward, &gradients, NULL, &backward));
  const size_t workspace_bytes = kda_backward_plan_workspace_bytes(backward);
  void* workspace = aligned(workspace_bytes);
  check(kda_backward(backward, &problem, &gradients, workspace, workspace_bytes));

  double losses[2];
  for (int side = 0; side < 2; ++side) {
    beta[TOKEN] += side == 0 ? 0.01f : -0.02f;
    check(kda_run(forward, &problem, room, kda_plan_workspace_bytes(forward)));
    losses[side] = 0;
    for (int i = 0; i < T * H * V; ++i) losses[side] += (double)d_o[i] * o[i];
  }
  const double difference = (losses[0] - losses[1]) / 0.02;
  printf("dbeta[%d] = %.6f, by a difference %.6f\n", TOKEN, (double)dbeta[TOKEN], difference);

  kda_backward_plan_destroy(backward);
  kda_plan_destroy(forward);
  void* all[] = {q, k, v, g, beta, o, d_o, dv, dbeta, problem.saved, room, workspace};
  for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); ++i) free(all[i]);
  return fabs(difference - dbeta[TOKEN]) < 1e-2 * fabs(difference) ? 0 : 1;
}
