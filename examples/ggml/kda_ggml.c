/* SPDX-License-Identifier: Apache-2.0
 * ggml's gated delta net on libkda, as a custom op over kda.h. Value heads are divided over ggml's
 * own threads; libkda starts none. */
#include "kda_ggml.h"

#include <stdarg.h>
#include <stdio.h>

#include "../one_thread.h"
#include "kda/kda.h"

enum { Q, K, V, G, BETA, STATE, NUM_INPUTS };

/* From head `head` of [D or 1, heads, tokens, sequences] on, as libkda's [N, T, H, D]. */
static kda_tensor rows(const struct ggml_tensor* x, int64_t head) {
  const int64_t size = (int64_t)sizeof(float);
  kda_tensor t = {.dtype = KDA_FP32};
  if (x->data != NULL) t.data = (char*)x->data + (size_t)head * x->nb[1];
  t.strides[0] = (int64_t)x->nb[3] / size, t.strides[1] = (int64_t)x->nb[2] / size;
  t.strides[2] = (int64_t)x->nb[1] / size, t.strides[3] = x->ne[0] > 1;
  return t;
}

/* Value heads `head` to `head` + `heads`, which read as many q/k heads, from `head` % H on. */
static kda_problem problem_of(struct ggml_tensor* const* in, float* out, int64_t head,
                              int64_t heads) {
  const struct ggml_tensor* v = in[V];
  const int64_t D = v->ne[0], HV = v->ne[1], T = v->ne[2], N = v->ne[3];
  const int64_t qk_head = head % in[Q]->ne[1];
  kda_problem p;
  kda_problem_init(&p);
  p.operation = T <= 8 ? KDA_DECODE : KDA_FORWARD; /* a decode reads and writes states once */
  p.batch = p.num_sequences = N, p.num_tokens = T, p.num_heads = p.num_value_heads = heads;
  p.key_dim = p.value_dim = D, p.state_layout = KDA_STATE_VK;
  p.q = rows(in[Q], qk_head), p.k = rows(in[K], qk_head), p.v = rows(v, head);
  p.g = rows(in[G], head), p.beta = rows(in[BETA], head);
  p.beta.strides[3] = 0; /* it has three dimensions */
  p.o = (kda_tensor){out ? out + head * D : NULL, KDA_FP32, 0, {T * HV * D, HV * D, D, 1}, 0};
  const kda_tensor states = {.dtype = KDA_FP32, .strides = {HV * D * D, D * D, D, 1}};
  p.initial_state.tensor = p.final_state.tensor = states;
  p.initial_state.present = p.final_state.present = 1;
  p.initial_state.num_slots = p.final_state.num_slots = N;
  if (in[STATE]->data) p.initial_state.tensor.data = (float*)in[STATE]->data + head * D * D;
  if (out) p.final_state.tensor.data = out + N * T * HV * D + head * D * D;
  return p;
}

/* Thread `thread` of `threads`: its value heads, cut where q/k heads begin anew. */
static void compute(struct ggml_tensor* dst, int thread, int threads, void* unused) {
  (void)unused;
  const int64_t H = dst->src[Q]->ne[1], HV = dst->src[V]->ne[1];
  const int64_t end = HV * (thread + 1) / threads;
  for (int64_t head = HV * thread / threads; head < end;) {
    const int64_t of_tile = H - head % H, heads = of_tile < end - head ? of_tile : end - head;
    const kda_problem p = problem_of(dst->src, dst->data, head, heads);
    const char* error = call_on_one_thread(&p);
    if (error != NULL) GGML_ABORT("kda_ggml: %s", error);
    head += heads;
  }
}

static void expect(int fits, const char* name, const struct ggml_tensor* x, const char* wanted) {
  if (fits) return;
  GGML_ABORT("kda_ggml: %s: %s [%lld, %lld, %lld, %lld] is not %s", name, ggml_type_name(x->type),
             (long long)x->ne[0], (long long)x->ne[1], (long long)x->ne[2], (long long)x->ne[3],
             wanted);
}

static int is(const struct ggml_tensor* x, int64_t a, int64_t b, int64_t c, int64_t d) {
  return x->type == GGML_TYPE_F32 && x->ne[0] == a && x->ne[1] == b && x->ne[2] == c &&
         x->ne[3] == d;
}

struct ggml_tensor* kda_ggml(struct ggml_context* ctx, struct ggml_tensor* q, struct ggml_tensor* k,
                             struct ggml_tensor* v, struct ggml_tensor* g, struct ggml_tensor* beta,
                             struct ggml_tensor* state) {
  const int64_t D = v->ne[0], HV = v->ne[1], T = v->ne[2], N = v->ne[3], H = q->ne[1];
  expect(v->type == GGML_TYPE_F32 && v->nb[0] == sizeof(float), "v", v, "f32 with dense rows");
  expect(is(q, D, H, T, N) && HV % H == 0 && q->nb[0] == sizeof(float), "q", q,
         "f32 [D, H, tokens, sequences] as of v, with dense rows, H a divisor of v's heads");
  expect(is(k, D, H, T, N) && k->nb[0] == sizeof(float), "k", k, "f32 with the shape of q");
  expect((is(g, D, HV, T, N) || is(g, 1, HV, T, N)) && ggml_is_contiguous(g), "g", g,
         "f32 [D or 1, heads, tokens, sequences] as of v, dense");
  expect(is(beta, 1, HV, T, N) && ggml_is_contiguous(beta), "beta", beta,
         "f32 [1, heads, tokens, sequences] as of v, dense");
  expect(is(state, D, D, HV, N) && ggml_is_contiguous(state), "state", state,
         "f32 [D, D, heads, sequences] as of v, dense");
  struct ggml_tensor* inputs[NUM_INPUTS] = {q, k, v, g, beta, state};
  const kda_problem p = problem_of(inputs, NULL, 0, H);
  if (kda_supported(&p, NULL) != KDA_OK) GGML_ABORT("kda_ggml: %s", kda_last_error());
  return ggml_custom_4d(ctx, GGML_TYPE_F32, D * HV, T * N + D * N, 1, 1, inputs, NUM_INPUTS,
                        compute, GGML_N_TASKS_MAX, NULL);
}
