/* SPDX-License-Identifier: Apache-2.0
 *
 * C ABI of libkda: Kimi Delta Attention forward, backward and decode. Per sequence and value head,
 * with a state S [K, V]:
 *
 *   S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T
 *   o_t = scale * S_t^T q_t
 *
 * Meaning of every field: include/kda/problem.hpp and docs/operation.md; the names are the same.
 *
 * CUDA plans take device pointers everywhere (also A_log, dt_bias, indices and cu_seqlens), launch
 * on the problem's stream and neither allocate nor synchronise.
 *
 * Rules
 * - Structs begin with struct_size: set it to sizeof(the struct), or call the *_init function.
 *   Later versions only append fields; a zero field means its default. Enumerations only grow. A
 *   smaller struct is an older caller's: what it lacks has its default. A larger one is a newer
 *   caller's: it is refused if a field that this version does not know is not zero.
 * - What is given counts: a pointer (or num_slots, or a scale) that is not zero is used whether its
 *   has_ or present flag is set or not. The flags are for plans that are made without the pointer.
 *   A call that gives what its plan was made without is refused.
 * - No function prints, exits, throws, or keeps a pointer after it returns (but a plan is a copy).
 * - Every call is thread safe; a plan may be used by many threads at once with own workspaces.
 * - On failure nothing has been written to the caller's tensors, and kda_last_error() of the same
 *   thread names the argument, what was given and what is accepted.
 */
#ifndef KDA_KDA_H_
#define KDA_KDA_H_

#include <stddef.h>
#include <stdint.h>

#include "kda/version.h"

#if defined(__GNUC__)
#define KDA_API __attribute__((visibility("default")))
#else
#define KDA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kda_status {
  KDA_OK = 0,
  KDA_INVALID_ARGUMENT = 1,
  KDA_UNSUPPORTED = 2,
  KDA_UNAVAILABLE = 3,
  KDA_OUT_OF_MEMORY = 4,
  KDA_OUT_OF_RESOURCES = 5,
  KDA_INTERNAL = 6,
  KDA_DEVICE_ERROR = 7
} kda_status;

typedef enum kda_dtype {
  KDA_FP32 = 0,
  KDA_BF16 = 1,
  KDA_FP16 = 2,
  KDA_INT32 = 3,
  KDA_INT64 = 4,
  KDA_FP64 = 5, /* wherever a floating type may be; "oracle" alone computes it, on the CPU */
  KDA_INT16 = 6 /* tail.rest alone */
} kda_dtype;

typedef enum kda_gate_mode {
  KDA_GATE_LOG = 0,
  KDA_GATE_SOFTPLUS = 1,
  KDA_GATE_BOUNDED = 2
} kda_gate_mode;
typedef enum kda_beta_mode {
  KDA_BETA_PLAIN = 0,
  KDA_BETA_SIGMOID = 1,
  KDA_BETA_SIGMOID2 = 2
} kda_beta_mode;
typedef enum kda_head_map {
  KDA_HEADS_GROUPED = 0, /* value head j reads q/k head j / (HV / H) */
  KDA_HEADS_TILED = 1    /* j % H */
} kda_head_map;
typedef enum kda_state_layout { KDA_STATE_KV = 0, KDA_STATE_VK = 1 } kda_state_layout;
typedef enum kda_operation { KDA_FORWARD = 0, KDA_DECODE = 1 } kda_operation;
typedef enum kda_device_kind { KDA_CPU = 0, KDA_CUDA = 1 } kda_device_kind;
typedef enum kda_context_parallel {
  KDA_CP_AUTO = 0,
  KDA_CP_OFF = 1,
  KDA_CP_FIXED = 2,
  KDA_CP_FLASHKDA = 3,
  KDA_CP_CULA = 4
} kda_context_parallel;
typedef enum kda_intra_form {
  KDA_INTRA_AUTO = 0,
  KDA_INTRA_TENSOR = 1,
  KDA_INTRA_TOKEN = 2
} kda_intra_form;

/* A tensor. `data` may be null while planning. DLPack's strides are the same (elements); a null
 * DLTensor.strides means row-major. A tensor whose dtype, strides and alignment are all 0 was never
 * described, and is refused (one fp32 element for all: set the alignment). */
typedef struct kda_tensor {
  void* data;
  int32_t dtype;    /* kda_dtype */
  int32_t reserved; /* 0 */
  /* elements, outermost first; the innermost of the tensor's rank is 1, or of g 0: one gate a head
   */
  int64_t strides[4];
  int64_t alignment; /* bytes, power of two; 0: the largest up to 16 that the strides keep */
} kda_tensor;

/* A buffer of states [num_slots, HV, K, V] or [num_slots, HV, V, K]. All zero: the problem has
 * none. */
typedef struct kda_state {
  kda_tensor tensor;
  int64_t num_slots;
  /* With `indexed`: slot of each sequence; below first_slot: none. Where decode writes, it is
   * [num_sequences, state_index_columns]. */
  const int32_t* indices;
  int32_t present; /* 1: there is such a buffer, though nothing else says so yet */
  int32_t indexed; /* 1: `indices` picks the slots, though it may be null yet */
} kda_state;

/* Tails of a pool of boundary states (docs/design/decode.md, "Tails"): R rows a slot, of the tokens
 * since the state. The row of position p is p mod R. */
typedef struct kda_tail {
  size_t struct_size;
  kda_tensor k;      /* [num_slots, H, R, K], of the type of the problem's k */
  kda_tensor g;      /* [num_slots, HV, R, K], of the type of g; one gate a head: last stride 0 */
  kda_tensor v_new;  /* [num_slots, HV, R, V], fp32 */
  kda_tensor folded; /* [num_slots, HV], int32: tokens in front of the state; -1: no tail */
  int64_t num_slots; /* that of initial_state */
  int64_t rows;      /* R, 16..256: a decode takes up to R - 15 tokens a sequence */
  const int32_t* positions; /* [num_sequences]: sure tokens before the call */
  /* [num_sequences]: slots to read states from until the first fold; -1 from then on: a source that
   * goes on would begin the tail anew. */
  const int32_t* sources;
  const int32_t* accepted_rows; /* [num_sequences, accepted_columns]: rows of a tree that stay */
  int64_t accepted_columns;     /* 0: none */
  int32_t has_sources;
  int32_t settle; /* decode, 1: all rows are folded first; without tokens states are plain then */
  /* Split states, or all zero: an fp32 number is its bf16, rounded to nearest with ties away from
   * zero, in initial_state, and 16 bits in `rest`; as integers (bf16 << 16) + rest. Tokens read
   * bf16 alone, folds read and write both. */
  kda_tensor rest; /* as initial_state, KDA_INT16 */
  kda_tensor v;    /* [num_slots, HV, R, V], of the type of the problem's v */
  kda_tensor beta; /* [num_slots, HV, R], of the type of beta */
  /* A ring, of a decode of one token a sequence: rows are made, as engines keep them beside their
   * states. k is normalised where qk_l2norm says so, g has log decays, one a channel, in fp32; k
   * and v_new are fp32, bf16 or fp16; R is 1..256. positions[n] rows lie in front of the token,
   * from row 0 on, and the caller counts them; `folded` is not looked at. A token with R - 1 rows
   * in front, or whose word of `flush` is not 0, is folded with all of them into the state and
   * leaves no row: the next one has none in front. */
  int32_t ring;
  int32_t has_flush;
  const int32_t* flush; /* [num_sequences], or null */
} kda_tail;

typedef struct kda_problem {
  size_t struct_size;
  int32_t operation; /* kda_operation */
  int32_t gate_mode; /* kda_gate_mode */
  int32_t beta_mode; /* kda_beta_mode */
  int32_t state_layout;
  int64_t batch;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t num_value_heads;
  int64_t key_dim;
  int64_t value_dim;
  int64_t num_sequences;
  kda_tensor q, k, v, g, beta, o;
  kda_tensor A_log;   /* fp32 [HV]; data null and strides[0] = 0: none */
  kda_tensor dt_bias; /* fp32 [HV, K]; data null and strides[0] = 0: none. Beside one gate a head
                         the innermost stride may be 0: [HV], one bias a head */
  double lower_bound; /* of KDA_GATE_BOUNDED */
  double scale;       /* 0 without has_scale: K^-1/2 */
  int32_t has_scale;
  int32_t qk_l2norm;
  int32_t has_cu_seqlens;
  int32_t cu_seqlens_dtype; /* KDA_INT32 or KDA_INT64 */
  const void* cu_seqlens;   /* run: of plans made from bounds; else null, or the plan's lengths */
  kda_state initial_state;  /* decode without final_state: the pool, updated in place */
  kda_state final_state;
  kda_state checkpoints;
  const uint8_t* initial_state_mask;  /* [num_sequences] */
  const int32_t* num_accepted_tokens; /* [num_sequences] */
  int32_t has_initial_state_mask;
  int32_t has_num_accepted_tokens;
  int64_t checkpoint_every;
  int64_t state_index_columns; /* 0 counts as 1 */
  int32_t batch_invariant;
  int32_t trusted; /* run, CUDA: 1 vouches that pointers and stream belong to the current device */
  void* stream; /* run: cudaStream_t of the current device, null the default one; unused on a CPU */
  /* 1: o is 0 where decode in place computes no token, and of a forward in the rows of sequences
   * without a slot of initial_state, which must be indexed; 0: left alone, and computed. */
  int32_t zero_skipped;
  int32_t reserved; /* 0 */
  /* An index below it, and so any negative one, means none; 1 where slot 0 is a null block. Above 0
   * it implies zero_skipped of decode. */
  int64_t first_slot;
  /* run, backward: what a plan with options.keep saves; kda_plan_saved_bytes, aligned to 64. */
  void* saved;
  size_t saved_bytes;
  int32_t head_map;             /* kda_head_map */
  int32_t reserved2;            /* 0 */
  const int32_t* token_parents; /* decode, [num_sequences, state_index_columns]: a tree of drafts */
  int32_t has_token_parents;
  int32_t has_checkpoint_offsets;
  const int32_t* checkpoint_offsets; /* [num_sequences]; checkpoints.indices is, too */
  const kda_tail* tail; /* initial_state has boundary states, written by folds; null: no tail */
} kda_problem;

typedef struct kda_plan_options {
  size_t struct_size;
  int32_t device_kind;        /* kda_device_kind */
  int32_t num_sms;            /* CUDA only; 0: 132 */
  int32_t context_parallel;   /* kda_context_parallel */
  int32_t one_pass;           /* join segments by correction; KDA_CP_AUTO decides itself */
  int64_t num_segments;       /* of KDA_CP_FIXED */
  int32_t num_threads;        /* 0: OMP_NUM_THREADS, else the cores of this process */
  int32_t compute_capability; /* CUDA only: 10 major + minor; 0: 90 */
  const char* backend;        /* null or "": the best available */
  int32_t intra_form;         /* kda_intra_form */
  /* States that a forward keeps for its backward. 0: none. n, a multiple of 64 (KDA_KEEP_DEFAULT):
   * the fp32 state after every n tokens, on a CPU. KDA_KEEP_CHUNKS: states before chunks of 64
   * tokens and errors, in bf16, on a Hopper GPU; the CPU takes it as KDA_KEEP_DEFAULT. A plan that
   * cannot keep has no implementation. */
  int32_t keep;
  /* States before sequences come between kda_span_begin and kda_span_finish; of a backward, the
   * gradients behind them between kda_span_backward_begin and kda_span_backward_finish. */
  int32_t spans;
  int32_t reserved; /* 0 */
  /* Bytes that segments may take in the workspace of a plan from bounds, on top of a run of whole
   * sequences; with more such a plan never cuts. By tokens and heads, never by lengths. 0: 1 GiB;
   * KDA_NEVER_CUT: no such plan cuts. */
  int64_t most_cut_bytes;
  /* CUDA only: rate of a large copy, and clock under load; 0: of a card that is sold with that
   * compute capability, the rate by its multiprocessors. */
  double memory_bytes_per_second;
  double gigahertz;
} kda_plan_options;
#define KDA_KEEP_DEFAULT 2048
#define KDA_KEEP_CHUNKS (-1)
#define KDA_NEVER_CUT (-1)

typedef struct kda_plan kda_plan; /* opaque */

/* fp32 buffers in the kv layout, one entry a segment of the plan. */
typedef struct kda_segments {
  size_t struct_size;
  float* M;         /* [NSEG, HV, K, K] */
  float* B;         /* [NSEG, HV, K, V] */
  float* states_in; /* [NSEG, HV, K, V] */
} kda_segments;

/* "0.2.0" */
KDA_API const char* kda_version(void);
KDA_API const char* kda_status_name(kda_status status);
/* Message of the last failed call of this thread; "" if there was none. */
KDA_API const char* kda_last_error(void);

/* Zeroes the struct and sets struct_size and the defaults: one head of K = V = 128, gate log. No
 * tensor is described yet. A program calls it through the macro, which passes the size of the
 * struct that the program was compiled with: never more is written. The function of that name
 * serves programs that were built before first_slot was there. */
KDA_API void kda_problem_init(kda_problem* problem);
KDA_API void kda_problem_init_size(kda_problem* problem, size_t struct_size);
#define kda_problem_init(problem) kda_problem_init_size((problem), sizeof(kda_problem))
KDA_API void kda_plan_options_init(
    kda_plan_options* options); /* likewise, before spans was there */
KDA_API void kda_plan_options_init_size(kda_plan_options* options, size_t struct_size);
#define kda_plan_options_init(options) \
  kda_plan_options_init_size((options), sizeof(kda_plan_options))
/* Sets device_kind, num_sms, compute_capability, memory_bytes_per_second and gigahertz to those of
 * a CUDA device of this machine. KDA_UNAVAILABLE, with the reason, if there is none. */
KDA_API kda_status kda_plan_options_cuda(kda_plan_options* options, int32_t ordinal);
/* Fills strides (row-major), dtype and alignment of a tensor of up to 4 dimensions. */
KDA_API kda_status kda_tensor_contiguous(kda_tensor* tensor, void* data, kda_dtype dtype,
                                         int32_t rank, const int64_t* shape);

KDA_API kda_status kda_validate(const kda_problem* problem);
/* KDA_OK if an implementation of this build serves the problem; else kda_last_error() says why
 * each declines. `options` may be null; its device, backend and keep are read. With keep and
 * without a backend KDA_UNSUPPORTED also says that keeping is slower than keeping nothing; a plan
 * that is asked to keep does so all the same. */
KDA_API kda_status kda_supported(const kda_problem* problem, const kda_plan_options* options);

/* `cu_seqlens`: host, [num_sequences + 1]; null plans from bounds if the problem has cu_seqlens.
 * `options` may be null. The plan copies what it needs; free it with kda_plan_destroy. */
KDA_API kda_status kda_plan_create(const kda_problem* problem, const int64_t* cu_seqlens,
                                   const kda_plan_options* options, kda_plan** plan);
KDA_API void kda_plan_destroy(kda_plan* plan);

/* Plans of the calls made so far, the `most_plans` (0: 256) that were asked for last.
 * kda_plan_cache_find is kda_plan_create with such a memory: what it gives is the caller's, freed
 * with kda_plan_destroy, and outlives the cache. Of a tensor's data only its alignment counts, and
 * that only where `alignment` is 0. Thread safe, but for destroy. */
typedef struct kda_plan_cache kda_plan_cache; /* opaque */
KDA_API kda_status kda_plan_cache_create(size_t most_plans, kda_plan_cache** cache);
KDA_API void kda_plan_cache_destroy(kda_plan_cache* cache);
KDA_API kda_status kda_plan_cache_find(kda_plan_cache* cache, const kda_problem* problem,
                                       const int64_t* cu_seqlens, const kda_plan_options* options,
                                       kda_plan** plan);

KDA_API size_t kda_plan_workspace_bytes(const kda_plan* plan); /* align the workspace to 64 */
KDA_API size_t kda_plan_saved_bytes(const kda_plan* plan);     /* 0: it keeps nothing */
KDA_API int64_t kda_plan_num_segments(const kda_plan* plan);   /* 0: not segmented */
/* The plan as JSON, made by the first call; valid as long as the plan. "" if memory ran out. */
KDA_API const char* kda_plan_json(const kda_plan* plan);
KDA_API const char* kda_plan_implementation(const kda_plan* plan); /* "" if none can run it */

/* `problem` gives the pointers; its shapes, types and options must be those of the plan. Rows of
 * outputs and gradients that no sequence of a device's cu_seqlens has become 0. */
KDA_API kda_status kda_run(const kda_plan* plan, const kda_problem* problem, void* workspace,
                           size_t workspace_bytes);

/* Calls without a plan of the caller's: the last 256 plans of all threads are remembered. */

/* On the CPU, in a workspace that the thread keeps: as much as its largest call has needed, until
 * the thread ends. `cu_seqlens` as of kda_plan_create. */
KDA_API kda_status kda_call(const kda_problem* problem, const int64_t* cu_seqlens);
/* On the device of `options` (kda_plan_options_cuda; null: the CPU). With `workspace` null nothing
 * runs: *workspace_bytes becomes what the call takes, never 0. Else it runs in `workspace`, memory
 * of the device of *workspace_bytes bytes, aligned to 64, which is the call's until its stream has
 * done it. No device memory is allocated. */
KDA_API kda_status kda_call_on(const kda_problem* problem, const int64_t* cu_seqlens,
                               const kda_plan_options* options, void* workspace,
                               size_t* workspace_bytes);

/* Describes q, k, v, g, beta and o: dense, of one type, of the sizes that the problem has. Other
 * tensors of the problem stay. A pointer may be null while planning. */
typedef struct kda_rows {
  const void *q, *k; /* [B, T, H, K] */
  const void* v;     /* [B, T, HV, V] */
  const void* g;     /* [B, T, HV, K] */
  const void* beta;  /* [B, T, HV] */
  void* o;           /* [B, T, HV, V] */
} kda_rows;
KDA_API kda_status kda_tokens(kda_problem* problem, kda_dtype dtype, const kda_rows* rows);
/* Describes a buffer of states of the sizes and the layout that the problem has, dense: `state` is
 * its initial_state, final_state or checkpoints. `indices` null: state n is that of sequence n. */
KDA_API kda_status kda_states(const kda_problem* problem, kda_state* state, void* data,
                              kda_dtype dtype, int64_t num_slots, const int32_t* indices);

/* Zeroes the struct and sets struct_size. */
KDA_API void kda_tail_init_size(kda_tail* tail, size_t struct_size);
#define kda_tail_init(tail) kda_tail_init_size((tail), sizeof(kda_tail))
/* Describes a tail of `rows` rows, dense, for the sizes, types and slots that the problem has:
 * after its tokens and its initial_state. `data` may be null while planning. Other fields of the
 * tail stay. */
typedef struct kda_tail_data {
  void *k, *g;
  float* v_new;
  int32_t* folded; /* -1 in each word before the first call */
} kda_tail_data;
KDA_API kda_status kda_tails(const kda_problem* problem, kda_tail* tail, int64_t rows,
                             const kda_tail_data* data);
/* Describes what splits the states of a bf16 pool, dense: after kda_tails(). */
typedef struct kda_split_data {
  int16_t* rest;
  void *v, *beta;
} kda_split_data;
KDA_API kda_status kda_split_states(const kda_problem* problem, kda_tail* tail,
                                    const kda_split_data* data);

/* Gradients (include/kda/backward.hpp). A tensor that is all zero is absent: of d_o and
 * d_final_state at least one is there, of the others those that are wanted. */
typedef struct kda_gradients {
  size_t struct_size;
  kda_tensor d_o;             /* in: [B, T, HV, V] */
  kda_tensor d_final_state;   /* in: [N, HV, K, V] or [N, HV, V, K], fp32 or bf16 */
  kda_tensor dq, dk;          /* [B, T, H, K] */
  kda_tensor dv;              /* [B, T, HV, V] */
  kda_tensor dg;              /* [B, T, HV, K]; an innermost stride of 0, as of g: summed over K */
  kda_tensor dbeta;           /* [B, T, HV] */
  kda_tensor dA_log;          /* [HV] fp32 */
  kda_tensor ddt_bias;        /* [HV, K] fp32; of one bias a head also [HV], innermost stride 0 */
  kda_tensor d_initial_state; /* [N, HV, K, V] or [N, HV, V, K], fp32 or bf16, dense */
} kda_gradients;
typedef struct kda_backward_plan kda_backward_plan; /* opaque */

/* The backward of a forward's plan, for its device, lengths and what it keeps. Of `options` (may be
 * null) backend, num_threads and spans count; segments are asked for as the forward was asked. */
KDA_API kda_status kda_backward_plan_create(const kda_plan* forward, const kda_gradients* gradients,
                                            const kda_plan_options* options,
                                            kda_backward_plan** plan);
KDA_API void kda_backward_plan_destroy(kda_backward_plan* plan);
KDA_API size_t kda_backward_plan_workspace_bytes(const kda_backward_plan* plan);
/* `problem`: that of the forward, its inputs unchanged, with `saved` if the plan keeps something;
 * outputs are not looked at. `gradients`: the pointers; shapes and types are the plan's. */
KDA_API kda_status kda_backward(const kda_backward_plan* plan, const kda_problem* problem,
                                const kda_gradients* gradients, void* workspace,
                                size_t workspace_bytes);

/* The maps of spans of longer sequences, and their fold (include/kda/span.hpp):
 *   S_out = M S_in + B,  dS_in = M^T dS_out + D,  each sequence of the problem a span.
 * Dense fp32 buffers in the kv layout; null: not wanted. D needs M, and d_o. kda_span_maps is for
 * the CPU. */
typedef struct kda_maps {
  size_t struct_size;
  float* M;          /* [N, HV, K, K] */
  float* B;          /* [N, HV, K, V]; with initial states M S_in + B */
  float* D;          /* [N, HV, K, V] */
  const void* d_o;   /* [B, T, HV, V], dense */
  int32_t d_o_dtype; /* KDA_FP32, KDA_BF16 or KDA_FP16 */
} kda_maps;
/* `plan`, `problem` and `workspace` as of kda_run; outputs are not written. */
KDA_API kda_status kda_span_maps(const kda_plan* plan, const kda_problem* problem,
                                 const kda_maps* maps, void* workspace, size_t workspace_bytes);

/* The forward of spans in two phases, on a GPU, with a plan whose options say `spans`
 * (include/kda/span.hpp): M and B of `maps`, then o and final states from `states_in`
 * [N, HV, K, V]. In between `workspace` and o stay as they are. */
KDA_API kda_status kda_span_begin(const kda_plan* plan, const kda_problem* problem,
                                  const kda_maps* maps, void* workspace, size_t workspace_bytes);
KDA_API kda_status kda_span_finish(const kda_plan* plan, const kda_problem* problem,
                                   const float* states_in, void* workspace, size_t workspace_bytes);

/* The backward of spans in two phases, on a GPU, with a backward plan whose options say `spans`
 * (include/kda/span.hpp). `D` [N, HV, K, V], the gradients of the states before the spans as long
 * as none come from behind, or with `from_final` from d_final_state; null: not wanted. The second
 * half reads d_final_state, and writes the gradients. */
KDA_API kda_status kda_span_backward_begin(const kda_backward_plan* plan,
                                           const kda_problem* problem,
                                           const kda_gradients* gradients, float* D,
                                           int32_t from_final, void* workspace,
                                           size_t workspace_bytes);
KDA_API kda_status kda_span_backward_finish(const kda_backward_plan* plan,
                                            const kda_problem* problem,
                                            const kda_gradients* gradients, void* workspace,
                                            size_t workspace_bytes);

/* One step: S = starts[start]; S = M[map] S + A[map]; states[store] = S. */
typedef struct kda_fold_step {
  int64_t start; /* KDA_FOLD_NONE: goes on from S; KDA_FOLD_ZERO: from zero */
  int64_t map;   /* or KDA_FOLD_NONE */
  int64_t store; /* or KDA_FOLD_NONE */
} kda_fold_step;
#define KDA_FOLD_NONE (-1)
#define KDA_FOLD_ZERO (-2)

typedef struct kda_fold {
  size_t struct_size;
  int64_t num_value_heads, key_dim, value_dim;
  int64_t num_maps, map_stride; /* floats from one entry of M, and of A, to the next */
  const float* M;               /* [num_maps, HV, K, K] */
  const float* A;               /* [num_maps, HV, K, V]: B, or D */
  int64_t num_starts;
  const float* starts; /* [num_starts, HV, K, V] */
  int64_t num_states;
  float* states; /* [num_states, HV, K, V] */
  int64_t num_steps;
  const kda_fold_step* steps;
  int32_t transposed;  /* M^T in the place of M */
  int32_t num_threads; /* 0: OMP_NUM_THREADS, else the cores of this process */
  /* Behind here 0 is what callers had before these were there. */
  int64_t maps_per_row;              /* 0: all maps are map_stride apart */
  int64_t row_stride;                /* floats from one row of maps to the next */
  int32_t device_kind;               /* KDA_CPU, or KDA_CUDA: pointers of the current device */
  const kda_fold_step* device_steps; /* KDA_CUDA: `steps` in its memory */
  void* stream;                      /* cudaStream_t */
} kda_fold;
/* The steps in their order, in fp32, for each head. On a GPU it is asynchronous, and no two steps
 * store in one place. */
KDA_API kda_status kda_fold_states(const kda_fold* fold);

KDA_API kda_status kda_segment_scan(const kda_plan* plan, const kda_problem* problem,
                                    const kda_segments* segments, void* workspace,
                                    size_t workspace_bytes);
KDA_API kda_status kda_segment_merge(const kda_plan* plan, const kda_problem* problem,
                                     const kda_segments* segments, void* workspace,
                                     size_t workspace_bytes);
KDA_API kda_status kda_segment_forward(const kda_plan* plan, const kda_problem* problem,
                                       const kda_segments* segments, void* workspace,
                                       size_t workspace_bytes);

/* Stages of the chunked forward on device buffers of the caller (include/kda/stages.hpp has their
 * layouts), for plans with the option backend = "staged". kda_stage_sizes sets each pointer's size
 * in bytes in the struct of the same names. */
typedef struct kda_stages {
  size_t struct_size;
  void *w, *u, *kg, *qg, *Aqk, *T;
  float *gamma, *beta, *diag;
  void *h, *vn;
} kda_stages;
typedef struct kda_stage_bytes {
  size_t struct_size;
  size_t w, u, kg, qg, Aqk, T, gamma, beta, diag, h, vn;
} kda_stage_bytes;
/* The names of the buffers in the order of both structs, with spaces between them: for bindings. */
KDA_API const char* kda_stage_buffers(void);
KDA_API kda_status kda_stage_sizes(const kda_plan* plan, kda_stage_bytes* bytes);
KDA_API kda_status kda_chunk_intra(const kda_plan* plan, const kda_problem* problem,
                                   const kda_stages* stages, void* workspace,
                                   size_t workspace_bytes);
KDA_API kda_status kda_recompute_w_u(const kda_plan* plan, const kda_problem* problem,
                                     const kda_stages* stages, void* workspace,
                                     size_t workspace_bytes);
KDA_API kda_status kda_chunk_delta_h(const kda_plan* plan, const kda_problem* problem,
                                     const kda_stages* stages, void* workspace,
                                     size_t workspace_bytes);
KDA_API kda_status kda_chunk_o(const kda_plan* plan, const kda_problem* problem,
                               const kda_stages* stages, void* workspace, size_t workspace_bytes);

/* The operations around KDA in its layer: include/kda/short_conv.hpp and
 * include/kda/gated_rms_norm.hpp say what they compute and what every field means. They need no
 * plan; a backward on CUDA needs a workspace. A tensor whose data is null is none; its alignment is
 * not looked at: every pointer is aligned to an element. `present` and `indexed` of a state are not
 * looked at either. */
typedef enum kda_activation {
  KDA_ACTIVATION_NONE = 0,
  KDA_ACTIVATION_SILU = 1,
  KDA_ACTIVATION_SIGMOID = 2
} kda_activation;

typedef struct kda_short_conv_call {
  size_t struct_size;
  int64_t batch; /* 1 with cu_seqlens */
  int64_t num_tokens;
  int64_t channels;
  int32_t width;          /* 2 to 4 */
  int32_t activation;     /* kda_activation: none or silu */
  kda_tensor x, y;        /* [B, T, D] */
  kda_tensor weight;      /* [D, W] */
  kda_tensor bias;        /* [D] */
  const void* cu_seqlens; /* [num_sequences + 1] */
  int32_t cu_seqlens_dtype;
  int32_t num_threads; /* 0: OMP_NUM_THREADS, else the cores of this process */
  int64_t num_sequences;
  int64_t state_width;                  /* S */
  kda_state initial_state, final_state; /* [num_slots, D, S] */
  const uint8_t* has_state;             /* [N] */
  int64_t first_slot;
  int32_t device;  /* kda_device_kind: where all of the memory is */
  int32_t trusted; /* CUDA: 1 vouches that pointers and stream belong to the current device */
  void* stream;    /* CUDA: cudaStream_t of the current device */
  void* workspace; /* of a backward on CUDA, in device memory */
  size_t workspace_bytes;
} kda_short_conv_call;

typedef struct kda_short_conv_gradients {
  size_t struct_size;
  kda_tensor dy, d_final_state;
  kda_tensor dx, dweight, dbias, d_initial_state;
} kda_short_conv_gradients;

KDA_API kda_status kda_short_conv(const kda_short_conv_call* call);
KDA_API kda_status kda_short_conv_backward(const kda_short_conv_call* call,
                                           const kda_short_conv_gradients* gradients);
/* Bytes of the workspace of a backward that wants dweight or dbias; 0 on a CPU. */
KDA_API kda_status kda_short_conv_backward_workspace(const kda_short_conv_call* call,
                                                     size_t* bytes);

typedef struct kda_gated_rms_norm_call {
  size_t struct_size;
  int64_t rows[3];
  int64_t channels;
  double eps;
  int32_t activation; /* kda_activation */
  int32_t num_threads;
  kda_tensor x, y, gate; /* [rows, D] */
  kda_tensor weight;     /* [D] */
  int32_t device;        /* kda_device_kind: where all of the memory is */
  int32_t trusted;       /* CUDA: 1 vouches that pointers and stream belong to the current device */
  void* stream;          /* CUDA: cudaStream_t of the current device */
  void* workspace;       /* of a backward on CUDA, in device memory */
  size_t workspace_bytes;
} kda_gated_rms_norm_call;

typedef struct kda_gated_rms_norm_gradients {
  size_t struct_size;
  kda_tensor dy, dx, dgate, dweight;
} kda_gated_rms_norm_gradients;

KDA_API kda_status kda_gated_rms_norm(const kda_gated_rms_norm_call* call);
KDA_API kda_status kda_gated_rms_norm_backward(const kda_gated_rms_norm_call* call,
                                               const kda_gated_rms_norm_gradients* gradients);
KDA_API kda_status kda_gated_rms_norm_backward_workspace(const kda_gated_rms_norm_call* call,
                                                         size_t* bytes);

/* One decode step of a layer in one kernel, on CUDA: include/kda/fused_decode.hpp. */
typedef struct kda_fused_decode_part {
  kda_tensor x;      /* [N, T, H D] */
  kda_tensor weight; /* [H D, W] */
  kda_tensor bias;   /* [H D] or none */
  kda_tensor state;  /* [num_slots, H D, S] */
} kda_fused_decode_part;
typedef struct kda_fused_decode_call {
  size_t struct_size;
  int64_t num_sequences, num_tokens, num_heads, head_dim, width;
  kda_fused_decode_part q, k, v;
  int64_t state_width;
  kda_tensor g;    /* [N, T, H, D] */
  kda_tensor beta; /* [N, T, H] */
  int32_t gate_mode, beta_mode;
  double lower_bound, scale; /* scale 0: D^-1/2 */
  int32_t qk_l2norm;
  int32_t state_layout;
  kda_tensor A_log, dt_bias; /* [H], [H D] or none */
  kda_tensor state;          /* [num_slots, H, D, D] */
  int64_t num_slots;
  const int32_t* slots; /* [N] or null */
  int64_t first_slot;
  const uint8_t* has_state; /* [N] or null */
  double norm_eps;
  int32_t norm;
  int32_t activation;      /* kda_activation of the output gate */
  kda_tensor norm_weight;  /* [D] or none */
  kda_tensor output_gate;  /* [N, T, H, D] or none */
  kda_tensor y;            /* [N, T, H, D] */
  int32_t device, trusted; /* as in kda_short_conv_call */
  void* stream;
} kda_fused_decode_call;
KDA_API kda_status kda_fused_decode(const kda_fused_decode_call* call);

#ifdef __cplusplus
}
#endif

#endif /* KDA_KDA_H_ */
