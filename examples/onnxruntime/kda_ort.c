/* SPDX-License-Identifier: Apache-2.0
 * ONNX Runtime's LinearAttention on libkda: a library of custom ops that takes the place of the op
 * of com.microsoft and of the one of ONNX itself (opset 27). A model stays as it is; see README.md.
 *
 *   query, key  [B, T, H K]              output         [B, T, HV V]
 *   value       [B, T, HV V]             present_state  [B, HV, K, V]
 *   past_state  [B, HV, K, V], optional
 *   decay       [B, T, HV K], or [B, T, HV]: one gate a head
 *   beta        [B, T, HV], or [B, T, 1]: one for all heads
 *
 * H is the attribute q_num_heads, HV kv_num_heads, a multiple of H. */
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../one_thread.h"
#include "kda/kda.h"
#include "ort_api.h"

enum { QUERY, KEY, VALUE, PAST_STATE, DECAY, BETA, NUM_INPUTS };
static const char* const input_names[] = {"query", "key", "value", "past_state", "decay", "beta"};

/* An op of one domain and one pair of types. */
typedef struct {
  OrtCustomOp op; /* first: ONNX Runtime hands the address of this back */
  int start_version;
  ONNXTensorElementDataType type, state_type;
} typed_op;

typedef struct {
  const OrtApi* api;
  int64_t heads, value_heads;
  float scale;
  kda_dtype dtype, state_dtype;
} kernel;

typedef struct {
  int present;
  size_t rank;
  int64_t dims[8];
  void* data;
} input;

/* ---- errors ------------------------------------------------------------------------------- */

static OrtStatus* refuse(const OrtApi* api, const char* format, ...) {
  char message[512];
  va_list arguments;
  va_start(arguments, format);
  const int start = snprintf(message, sizeof message, "LinearAttention on libkda: ");
  vsnprintf(message + start, sizeof message - (size_t)start, format, arguments);
  va_end(arguments);
  return api->CreateStatus(ORT_INVALID_ARGUMENT, message);
}
#define TRY(call)                        \
  do {                                   \
    OrtStatus* const status_ = (call);   \
    if (status_ != NULL) return status_; \
  } while (0)

/* "[2, 30, 512]" */
static const char* shape_text(char* text, size_t size, const int64_t* dims, size_t rank) {
  size_t used = (size_t)snprintf(text, size, "[");
  for (size_t i = 0; i < rank && used < size; ++i)
    used += (size_t)snprintf(text + used, size - used, "%s%lld", i ? ", " : "", (long long)dims[i]);
  if (used < size) snprintf(text + used, size - used, "]");
  return text;
}

static OrtStatus* expect_shape(const OrtApi* api, const char* name, const input* in, size_t rank,
                               const int64_t* dims) {
  if (in->rank == rank && memcmp(in->dims, dims, rank * sizeof *dims) == 0) return NULL;
  char given[160], wanted[160];
  return refuse(api, "%s: shape %s is not %s", name,
                shape_text(given, sizeof given, in->dims, in->rank),
                shape_text(wanted, sizeof wanted, dims, rank));
}

/* ---- a node's kernel ------------------------------------------------------------------------ */

/* Whether the node has the attribute; `status` is that of the call that asked for it. */
static int found(const OrtApi* api, OrtStatus* status) {
  if (status != NULL) api->ReleaseStatus(status);
  return status == NULL;
}

static OrtStatus* read_attributes(const OrtApi* api, const OrtKernelInfo* info, kernel* k) {
  char rule[64] = "gated_delta";
  size_t size = sizeof rule;
  const int has_rule =
      found(api, api->KernelInfoGetAttribute_string(info, "update_rule", rule, &size));
  if (!has_rule && size > sizeof rule)
    snprintf(rule, sizeof rule, "a name of %zu characters", size);
  if (strcmp(rule, "gated_delta") != 0)
    return refuse(api, "update_rule: %s is not gated_delta, the only rule of KDA", rule);
  if (!found(api, api->KernelInfoGetAttribute_int64(info, "q_num_heads", &k->heads)))
    return refuse(api, "q_num_heads: is missing");
  if (!found(api, api->KernelInfoGetAttribute_int64(info, "kv_num_heads", &k->value_heads)))
    return refuse(api, "kv_num_heads: is missing");
  if (k->heads < 1 || k->heads > INT_MAX)
    return refuse(api, "q_num_heads: %lld is not in 1 to %d", (long long)k->heads, INT_MAX);
  if (k->value_heads < 1 || k->value_heads > INT_MAX)
    return refuse(api, "kv_num_heads: %lld is not in 1 to %d", (long long)k->value_heads, INT_MAX);
  if (k->value_heads % k->heads != 0)
    return refuse(
        api,
        "q_num_heads: kv_num_heads = %lld is no multiple of %lld; query heads cannot share a state",
        (long long)k->value_heads, (long long)k->heads);
  int64_t window = 0;
  if (found(api, api->KernelInfoGetAttribute_int64(info, "state_window", &window)) && window != 0)
    return refuse(api, "state_window: %lld is not 0; states of earlier tokens are not kept",
                  (long long)window);
  if (!found(api, api->KernelInfoGetAttribute_float(info, "scale", &k->scale))) k->scale = 0;
  return NULL;
}

static kda_dtype dtype_of(ONNXTensorElementDataType type) {
  if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) return KDA_FP32;
  return type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 ? KDA_FP16 : KDA_BF16;
}

static OrtStatus* create(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info,
                         void** out) {
  const typed_op* typed = (const typed_op*)op;
  kernel made = {
      .api = api, .dtype = dtype_of(typed->type), .state_dtype = dtype_of(typed->state_type)};
  if (made.state_dtype == KDA_FP16)
    return refuse(api, "past_state: is float16; libkda has states in float32 and bfloat16");
  TRY(read_attributes(api, info, &made));
  kernel* k = malloc(sizeof *k);
  if (k == NULL) return refuse(api, "out of memory");
  *k = made;
  *out = k;
  return NULL;
}

/* ---- a call -----------------------------------------------------------------------------------
 */

static OrtStatus* read_input(const OrtApi* api, const OrtKernelContext* context, size_t index,
                             input* in) {
  const OrtValue* value = NULL;
  TRY(api->KernelContext_GetInput(context, index, &value));
  if (value == NULL) return NULL;
  OrtTensorTypeAndShapeInfo* info = NULL;
  TRY(api->GetTensorTypeAndShape(value, &info));
  OrtStatus* status = api->GetDimensionsCount(info, &in->rank);
  if (status == NULL && in->rank > 4)
    status = refuse(api, "%s: has %zu dimensions, more than 4", input_names[index], in->rank);
  if (status == NULL) status = api->GetDimensions(info, in->dims, in->rank);
  api->ReleaseTensorTypeAndShapeInfo(info);
  if (status == NULL) status = api->GetTensorMutableData((OrtValue*)value, &in->data);
  in->present = 1;
  return status;
}

/* The sizes of the problem, from shapes that fit together. */
static OrtStatus* check_inputs(const kernel* k, const input* in, kda_problem* p) {
  const OrtApi* api = k->api;
  const int64_t H = k->heads, HV = k->value_heads;
  for (int i = 0; i < NUM_INPUTS; ++i)
    if (i != PAST_STATE && !in[i].present) return refuse(api, "%s: is missing", input_names[i]);
  const struct {
    int index;
    const char* attribute;
    int64_t heads;
  } rows[] = {{QUERY, "q_num_heads", H}, {VALUE, "kv_num_heads", HV}};
  for (int i = 0; i < 2; ++i) {
    const input* x = &in[rows[i].index];
    char given[160];
    if (x->rank != 3 || x->dims[2] < 1 || x->dims[2] % rows[i].heads != 0)
      return refuse(api, "%s: shape %s is not [B, T, a multiple of %s = %lld]",
                    input_names[rows[i].index], shape_text(given, sizeof given, x->dims, x->rank),
                    rows[i].attribute, (long long)rows[i].heads);
  }
  const int64_t B = in[QUERY].dims[0], T = in[QUERY].dims[1], K = in[QUERY].dims[2] / H,
                V = in[VALUE].dims[2] / HV;
  const int64_t of_key[] = {B, T, H * K}, of_value[] = {B, T, HV * V}, of_state[] = {B, HV, K, V},
                of_decay[] = {B, T, HV * K}, of_head[] = {B, T, HV}, of_token[] = {B, T, 1};
  TRY(expect_shape(api, "key", &in[KEY], 3, of_key));
  TRY(expect_shape(api, "value", &in[VALUE], 3, of_value));
  if (in[PAST_STATE].present) TRY(expect_shape(api, "past_state", &in[PAST_STATE], 4, of_state));
  const int decay_a_head = in[DECAY].rank == 3 && in[DECAY].dims[2] == HV;
  TRY(expect_shape(api, "decay", &in[DECAY], 3, decay_a_head ? of_head : of_decay));
  const int beta_a_token = in[BETA].rank == 3 && in[BETA].dims[2] == 1;
  TRY(expect_shape(api, "beta", &in[BETA], 3, beta_a_token ? of_token : of_head));
  p->batch = p->num_sequences = B, p->num_tokens = T, p->num_heads = H, p->num_value_heads = HV;
  p->key_dim = K, p->value_dim = V, p->scale = k->scale;
  return NULL;
}

/* Describes the tensors of all heads; `o` and `state` are the outputs. */
static kda_status describe(const kernel* k, const input* in, void* o, void* state, kda_problem* p) {
  const int64_t T = p->num_tokens, HV = p->num_value_heads;
  const kda_rows rows = {in[QUERY].data, in[KEY].data,  in[VALUE].data,
                         in[DECAY].data, in[BETA].data, o};
  kda_status status = kda_tokens(p, k->dtype, &rows);
  if (status == KDA_OK && in[PAST_STATE].present)
    status = kda_states(p, &p->initial_state, in[PAST_STATE].data, k->state_dtype, p->batch, NULL);
  if (status == KDA_OK)
    status = kda_states(p, &p->final_state, state, k->state_dtype, p->batch, NULL);
  if (in[DECAY].dims[2] == HV) /* one gate a head; for K = 1 the same strides */
    p->g.strides[0] = T * HV, p->g.strides[1] = HV, p->g.strides[2] = 1,
    p->g.strides[3] = p->key_dim == 1;
  if (in[BETA].dims[2] == 1) p->beta.strides[0] = T, p->beta.strides[1] = 1, p->beta.strides[2] = 0;
  /* A short step is a decode, which reads and writes states once. */
  p->operation = in[PAST_STATE].present && T <= 8 ? KDA_DECODE : KDA_FORWARD;
  return status;
}

typedef struct {
  kda_problem whole;
  int64_t head_parts, batch_parts;
  atomic_flag failed;
  char error[400]; /* of the first part that failed */
} job;

static void skip(kda_tensor* x, int dim, int64_t count) {
  const int64_t size = x->dtype == KDA_FP32 ? 4 : 2;
  if (x->data != NULL) x->data = (char*)x->data + count * x->strides[dim] * size;
}

/* The problem of one part: some batches, some q/k heads with their value heads. */
static kda_problem part_of(const job* work, int64_t index) {
  kda_problem p = work->whole;
  const int64_t i = index % work->head_parts, j = index / work->head_parts;
  const int64_t H = p.num_heads, group = p.num_value_heads / H, B = p.batch;
  const int64_t head = H * i / work->head_parts, heads = H * (i + 1) / work->head_parts - head;
  const int64_t batch = B * j / work->batch_parts,
                batches = B * (j + 1) / work->batch_parts - batch;
  kda_tensor* const rows[] = {&p.q, &p.k, &p.v, &p.g, &p.beta, &p.o};
  for (int t = 0; t < 6; ++t)
    skip(rows[t], 0, batch), skip(rows[t], 2, t < 2 ? head : head * group);
  kda_state* const states[] = {&p.initial_state, &p.final_state};
  for (int s = 0; s < 2; ++s) {
    if (!states[s]->present) continue;
    skip(&states[s]->tensor, 0, batch), skip(&states[s]->tensor, 1, head * group);
    states[s]->num_slots = batches;
  }
  p.batch = p.num_sequences = batches, p.num_heads = heads, p.num_value_heads = heads * group;
  return p;
}

static void part(void* data, size_t index) {
  job* work = data;
  const kda_problem p = part_of(work, (int64_t)index);
  const char* error = call_on_one_thread(&p); /* ONNX Runtime has the threads */
  if (error != NULL && !atomic_flag_test_and_set(&work->failed))
    snprintf(work->error, sizeof work->error, "%s", error);
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Parts last long enough, some 20 us, to be worth another thread. */
static void divide(job* work) {
  const kda_problem* p = &work->whole;
  const int64_t states = p->batch * p->num_value_heads * p->num_tokens * p->key_dim * p->value_dim;
  const int64_t worth = 1 + states / (8 * 128 * 128);
  work->head_parts = smaller(p->num_heads, worth);
  work->batch_parts = smaller(p->batch, 1 + (worth - 1) / work->head_parts);
}

static OrtStatus* compute(void* self, OrtKernelContext* context) {
  const kernel* k = self;
  const OrtApi* api = k->api;
  input in[NUM_INPUTS] = {0};
  job work = {.failed = ATOMIC_FLAG_INIT};
  kda_problem* p = &work.whole;
  kda_problem_init(p);
  for (size_t i = 0; i < NUM_INPUTS; ++i) TRY(read_input(api, context, i, &in[i]));
  TRY(check_inputs(k, in, p));
  const int64_t of_o[] = {p->batch, p->num_tokens, p->num_value_heads * p->value_dim};
  const int64_t of_state[] = {p->batch, p->num_value_heads, p->key_dim, p->value_dim};
  OrtValue *output = NULL, *present = NULL;
  void *o = NULL, *state = NULL;
  TRY(api->KernelContext_GetOutput(context, 0, of_o, 3, &output));
  TRY(api->KernelContext_GetOutput(context, 1, of_state, 4, &present));
  TRY(api->GetTensorMutableData(output, &o));
  TRY(api->GetTensorMutableData(present, &state));
  if (describe(k, in, o, state, p) != KDA_OK) return refuse(api, "%s", kda_last_error());
  divide(&work);
  const int64_t parts = work.head_parts * work.batch_parts;
  if (parts == 1)
    part(&work, 0);
  else
    TRY(api->KernelContext_ParallelFor(context, part, (size_t)parts, 0, &work));
  return work.error[0] ? refuse(api, "%s", work.error) : NULL;
}

/* ---- the ops ------------------------------------------------------------------------------------
 */

static const char* name(const OrtCustomOp* op) { return (void)op, "LinearAttention"; }
static const char* provider(const OrtCustomOp* op) { return (void)op, "CPUExecutionProvider"; }
static ONNXTensorElementDataType input_type(const OrtCustomOp* op, size_t index) {
  const typed_op* typed = (const typed_op*)op;
  return index == PAST_STATE ? typed->state_type : typed->type;
}
static ONNXTensorElementDataType output_type(const OrtCustomOp* op, size_t index) {
  const typed_op* typed = (const typed_op*)op;
  return index == 1 ? typed->state_type : typed->type;
}
static size_t num_inputs(const OrtCustomOp* op) { return (void)op, NUM_INPUTS; }
static size_t num_outputs(const OrtCustomOp* op) { return (void)op, 2; }
static OrtCustomOpInputOutputCharacteristic optional_input(const OrtCustomOp* op, size_t index) {
  return (void)op, index < PAST_STATE ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
}
static OrtCustomOpInputOutputCharacteristic required_output(const OrtCustomOp* op, size_t index) {
  return (void)op, (void)index, INPUT_OUTPUT_REQUIRED;
}
static OrtMemType memory(const OrtCustomOp* op, size_t index) {
  return (void)op, (void)index, OrtMemTypeDefault;
}
static int start_version(const OrtCustomOp* op) { return ((const typed_op*)op)->start_version; }
static int end_version(const OrtCustomOp* op) { return (void)op, INT_MAX; }

static const OrtCustomOp functions = {
    .version = ORT_API_VERSION,
    .GetName = name,
    .GetExecutionProviderType = provider,
    .GetInputType = input_type,
    .GetInputTypeCount = num_inputs,
    .GetOutputType = output_type,
    .GetOutputTypeCount = num_outputs,
    .KernelDestroy = free,
    .GetInputCharacteristic = optional_input,
    .GetOutputCharacteristic = required_output,
    .GetInputMemoryType = memory,
    .CreateKernelV2 = create,
    .KernelComputeV2 = compute,
    .GetStartVersion = start_version,
    .GetEndVersion = end_version,
};

#define NUM_TYPES 5
static const struct {
  ONNXTensorElementDataType type, state_type;
} types[NUM_TYPES] = {
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16}, /* refused */
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16},
};
#define NUM_DOMAINS 2
static const struct {
  const char* name;
  int start_version;
} domains[NUM_DOMAINS] = {{"com.microsoft", 1}, {"", 27}};
static typed_op ops[NUM_DOMAINS][NUM_TYPES];
static once_flag ops_once = ONCE_FLAG_INIT;

static void make_ops(void) {
  for (int i = 0; i < NUM_DOMAINS; ++i)
    for (int j = 0; j < NUM_TYPES; ++j)
      ops[i][j] =
          (typed_op){functions, domains[i].start_version, types[j].type, types[j].state_type};
}

/* ONNX Runtime calls it for SessionOptions.register_custom_ops_library. */
__attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                    const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(ORT_API_VERSION);
  if (api == NULL)
    return base->GetApi(1)->CreateStatus(ORT_FAIL, "libkda needs ONNX Runtime 1.17 or later");
  call_once(&ops_once, make_ops);
  for (int i = 0; i < NUM_DOMAINS; ++i) {
    OrtCustomOpDomain* domain = NULL;
    TRY(api->CreateCustomOpDomain(domains[i].name, &domain));
    for (int j = 0; j < NUM_TYPES; ++j) TRY(api->CustomOpDomain_Add(domain, &ops[i][j].op));
    TRY(api->AddCustomOpDomain(options, domain));
  }
  return NULL;
}
