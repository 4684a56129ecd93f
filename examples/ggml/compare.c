/* SPDX-License-Identifier: Apache-2.0
 * compare [--json FILE]: kda_ggml beside ggml's own operation. Values with 1 to 3 threads, then
 * what is refused, then least times in turns. Returns how many comparisons failed. */
#include <ggml-cpu.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kda/kda.h"
#include "kda_ggml.h"

enum { D = 128, THREADS = 2 };
typedef struct ggml_tensor tensor;
typedef struct {
  int64_t tokens, heads, value_heads, sequences, gates; /* gates: D a head, or 1 */
} shape;
typedef struct {
  tensor *q, *k, *v, *g, *beta, *state;
} inputs;
typedef tensor* operation(struct ggml_context*, const inputs*);

static tensor* libkdas(struct ggml_context* c, const inputs* x) {
  return kda_ggml(c, x->q, x->k, x->v, x->g, x->beta, x->state);
}
static tensor* ggmls(struct ggml_context* c, const inputs* x) {
  return ggml_gated_delta_net(c, x->q, x->k, x->v, x->g, x->beta, x->state, 1);
}

static struct ggml_context* context(void) {
  return ggml_init((struct ggml_init_params){(size_t)1 << 29, NULL, false});
}

static tensor* uniform(struct ggml_context* c, int64_t a, int64_t b, int64_t t, int64_t n,
                       float middle, float size) {
  tensor* x = ggml_new_tensor_4d(c, GGML_TYPE_F32, a, b, t, n);
  for (int64_t i = 0; i < ggml_nelements(x); ++i)
    ((float*)x->data)[i] = middle + size * (2.f * (float)rand() / (float)RAND_MAX - 1);
  return x;
}

/* q and k are views of the same rows, as behind a projection; their length is about 1. */
static inputs make(struct ggml_context* c, shape s) {
  const float norm = 1.7f / sqrtf(D);
  tensor* both = uniform(c, D, 2 * s.heads, s.tokens, s.sequences, 0, norm);
  tensor* part[2];
  for (int i = 0; i < 2; ++i)
    part[i] = ggml_view_4d(c, both, D, s.heads, s.tokens, s.sequences, both->nb[1], both->nb[2],
                           both->nb[3], (size_t)(i * s.heads) * both->nb[1]);
  return (inputs){part[0],
                  part[1],
                  uniform(c, D, s.value_heads, s.tokens, s.sequences, 0, 1),
                  uniform(c, s.gates, s.value_heads, s.tokens, s.sequences, -.6f, .5f),
                  uniform(c, 1, s.value_heads, s.tokens, s.sequences, .5f, .5f),
                  uniform(c, D, D, s.value_heads, s.sequences, 0, .1f)};
}

typedef struct {
  struct ggml_cgraph* graph;
  struct ggml_cplan plan;
  struct ggml_threadpool* pool;
  tensor* result;
} runner;

static runner runner_of(struct ggml_context* c, operation* op, const inputs* x, int threads) {
  runner r = {.graph = ggml_new_graph(c), .result = op(c, x)};
  ggml_build_forward_expand(r.graph, r.result);
  struct ggml_threadpool_params parameters = ggml_threadpool_params_default(threads);
  r.pool = ggml_threadpool_new(&parameters);
  r.plan = ggml_graph_plan(r.graph, threads, r.pool);
  r.plan.work_data = malloc(r.plan.work_size + 64);
  return r;
}
static void destroy(runner* r) {
  ggml_threadpool_free(r->pool);
  free(r->plan.work_data);
}

static double distance(const tensor* a, const tensor* b) {
  const float *x = a->data, *y = b->data;
  double apart = 0, size = 0;
  for (int64_t i = 0; i < ggml_nelements(a); ++i)
    apart += pow(x[i] - y[i], 2), size += pow(y[i], 2);
  return ggml_nelements(a) == ggml_nelements(b) ? sqrt(apart / size) : INFINITY;
}

static int compare_values(shape s) {
  int failed = 0;
  struct ggml_context* c = context();
  const inputs x = make(c, s);
  runner theirs = runner_of(c, ggmls, &x, 1);
  ggml_graph_compute(theirs.graph, &theirs.plan);
  tensor* first = NULL;
  for (int threads = 1; threads <= 3; ++threads) {
    runner r = runner_of(c, libkdas, &x, threads);
    memset(r.result->data, 0xff, ggml_nbytes(r.result)); /* NaN */
    ggml_graph_compute(r.graph, &r.plan);
    const double apart = distance(r.result, theirs.result);
    const int same = !first || memcmp(first->data, r.result->data, ggml_nbytes(first)) == 0;
    if (!first) first = r.result;
    if (!(apart < 1e-6) || !same) {
      printf("%lld tokens, %lld and %lld heads, %d threads: %.0e apart%s\n", (long long)s.tokens,
             (long long)s.heads, (long long)s.value_heads, threads, apart,
             same ? "" : ", other bits than with one thread");
      ++failed;
    }
    destroy(&r);
  }
  destroy(&theirs);
  ggml_free(c);
  return failed;
}

/* Whether a child that calls kda_ggml says `words` and is aborted. */
static int refuses(const inputs* x, struct ggml_context* c, const char* words) {
  int ends[2];
  char said[4096] = "";
  if (pipe(ends) != 0) return 0;
  fflush(NULL);
  const pid_t child = fork();
  if (child == 0) {
    setenv("GGML_NO_BACKTRACE", "1", 1);
    dup2(ends[1], STDERR_FILENO);
    kda_ggml(c, x->q, x->k, x->v, x->g, x->beta, x->state);
    _exit(0);
  }
  close(ends[1]);
  for (ssize_t n, used = 0; (n = read(ends[0], said + used, sizeof said - 1 - (size_t)used)) > 0;)
    used += n;
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  const int fine = WIFSIGNALED(status) && strstr(said, words) != NULL;
  if (!fine) printf("not refused with \"%s\": %s\n", words, said);
  return fine;
}

static int compare_refusals(void) {
  struct ggml_context* c = context();
  const inputs x = make(c, (shape){5, 2, 4, 1, D});
  inputs bad[6] = {x, x, x, x, x, x};
  bad[0].q = uniform(c, D, 3, 5, 1, 0, 1), bad[1].k = uniform(c, D, 2, 4, 1, 0, 1);
  bad[2].v = ggml_new_tensor_4d(c, GGML_TYPE_F16, D, 4, 5, 1);
  bad[3].g = uniform(c, 2, 4, 5, 1, 0, 1), bad[4].beta = uniform(c, 1, 2, 5, 1, 0, 1);
  bad[5].state = uniform(c, D, D, 4, 2, 0, 1);
  const char* words[] = {"q: f32 [128, 3, 5, 1] is not",  "k: f32 [128, 2, 4, 1] is not",
                         "v: f16 [128, 4, 5, 1] is not",  "g: f32 [2, 4, 5, 1] is not",
                         "beta: f32 [1, 2, 5, 1] is not", "state: f32 [128, 128, 4, 2] is not"};
  int failed = 0;
  for (int i = 0; i < 6; ++i) failed += !refuses(&bad[i], c, words[i]);
  ggml_free(c);
  return failed;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* The least of each one's times, in blocks that take turns, each after a rest: threads of one that
 * still poll would slow the other. */
static void compare_times(shape s, FILE* json, int last) {
  double best[2] = {INFINITY, INFINITY};
  struct ggml_context* c = context();
  const inputs x = make(c, s);
  const int calls = s.tokens > 8 ? 2 : 50;
  for (int round = 0; round < 12; ++round)
    for (int which = 0; which < 2; ++which) {
      struct ggml_context* own = context();
      runner r = runner_of(own, which ? libkdas : ggmls, &x, THREADS);
      for (int i = 0; i < calls + 1; ++i) {
        const double start = now();
        ggml_graph_compute(r.graph, &r.plan);
        if (i > 0) best[which] = fmin(best[which], now() - start);
      }
      destroy(&r);
      ggml_free(own);
      nanosleep(&(struct timespec){0, 5000000}, NULL);
    }
  printf(
      "%4lld tokens, %2lld q/k and %2lld value heads, %lld sequences, %s: ggml %.3f ms, libkda "
      "%.3f ms, %.2fx\n",
      (long long)s.tokens, (long long)s.heads, (long long)s.value_heads, (long long)s.sequences,
      s.gates == 1 ? "one gate a head" : "KDA", best[0], best[1], best[0] / best[1]);
  fflush(stdout);
  if (json)
    fprintf(json,
            "  {\"tokens\": %lld, \"heads\": %lld, \"value_heads\": %lld, \"sequences\": %lld, "
            "\"gates_a_head\": %lld, \"ggml_ms\": %.4f, \"libkda_ms\": %.4f, "
            "\"times_as_fast\": %.3f}%s\n",
            (long long)s.tokens, (long long)s.heads, (long long)s.value_heads,
            (long long)s.sequences, (long long)s.gates, best[0], best[1], best[0] / best[1],
            last ? "" : ",");
  ggml_free(c);
}

static void cpu_name(char* name, size_t size) {
  FILE* file = fopen("/proc/cpuinfo", "r");
  char line[256];
  snprintf(name, size, "a CPU");
  while (file && fgets(line, sizeof line, file))
    if (sscanf(line, "model name : %127[^\n]", name) == 1) break;
  if (file) fclose(file);
}

int main(int argc, char** argv) {
  const shape values[] = {{70, 3, 3, 2, D}, {40, 2, 6, 2, 1}, {1, 4, 4, 3, D}, {1, 2, 6, 2, 1},
                          {5, 2, 4, 1, D},  {9, 1, 1, 1, 1},  {33, 5, 5, 1, D}};
  const shape times[] = {{1000, 4, 4, 1, D}, {512, 32, 32, 1, D}, {512, 16, 32, 1, 1},
                         {1, 32, 32, 1, D},  {1, 32, 32, 8, D},   {1, 16, 32, 8, 1},
                         {4, 32, 32, 1, D}};
  double load = 0; /* of the machine, before this program's own */
  getloadavg(&load, 1);
  int failed = compare_refusals();
  for (size_t i = 0; i < sizeof values / sizeof *values; ++i) failed += compare_values(values[i]);
  printf("values and refusals: %d failed\n", failed);
  FILE* json = argc == 3 && strcmp(argv[1], "--json") == 0 ? fopen(argv[2], "w") : NULL;
  char cpu[128], date[16];
  const time_t today = time(NULL);
  cpu_name(cpu, sizeof cpu);
  strftime(date, sizeof date, "%Y-%m-%d", gmtime(&today));
  if (json)
    fprintf(json,
            "{\n \"command\": \"./dev bench-ggml\",\n \"date\": \"%s\",\n \"cpu\": \"%s\",\n "
            "\"load\": %.1f,\n \"libkda\": \"%s\",\n \"ggml\": \"%s\",\n \"threads\": %d,\n "
            "\"rows\": [\n",
            date, cpu, load, kda_version(), ggml_version(), THREADS);
  const int count = (int)(sizeof times / sizeof *times);
  for (int i = 0; i < count; ++i) compare_times(times[i], json, i + 1 == count);
  if (json) fprintf(json, " ]\n}\n"), fclose(json);
  return failed;
}
