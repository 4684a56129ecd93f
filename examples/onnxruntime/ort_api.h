/* SPDX-License-Identifier: Apache-2.0
 * As much of ONNX Runtime's C API, version 17, as a library of custom ops needs. The API is a table
 * of functions and the op a struct; both only grow at their ends, so later runtimes serve this one
 * too. The Python packages of ONNX Runtime have no headers. Where those of a release are installed,
 * include onnxruntime_c_api.h instead: the names are the same. */
#ifndef KDA_ORT_API_H_
#define KDA_ORT_API_H_

#include <stddef.h>
#include <stdint.h>

#define ORT_API_VERSION 17

typedef enum OrtErrorCode { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 } OrtErrorCode;
typedef enum ONNXTensorElementDataType {
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 = 10,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16 = 16
} ONNXTensorElementDataType;
typedef enum OrtCustomOpInputOutputCharacteristic {
  INPUT_OUTPUT_REQUIRED = 0,
  INPUT_OUTPUT_OPTIONAL = 1
} OrtCustomOpInputOutputCharacteristic;
typedef enum OrtMemType { OrtMemTypeDefault = 0 } OrtMemType;

typedef struct OrtStatus OrtStatus;
typedef struct OrtValue OrtValue;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtCustomOpDomain OrtCustomOpDomain;
typedef struct OrtKernelInfo OrtKernelInfo;
typedef struct OrtKernelContext OrtKernelContext;
typedef struct OrtCustomOp OrtCustomOp;

/* A function is where its number says; `unused_N` are those from number N on. */
typedef struct OrtApi {
  OrtStatus* (*CreateStatus)(OrtErrorCode code, const char* message); /* 0 */
  void* unused_1[25];
  OrtStatus* (*CreateCustomOpDomain)(const char* domain, OrtCustomOpDomain** out); /* 26 */
  OrtStatus* (*CustomOpDomain_Add)(OrtCustomOpDomain* domain, const OrtCustomOp* op);
  OrtStatus* (*AddCustomOpDomain)(OrtSessionOptions* options, OrtCustomOpDomain* domain);
  void* unused_29[22];
  OrtStatus* (*GetTensorMutableData)(OrtValue* value, void** out); /* 51 */
  void* unused_52[9];
  OrtStatus* (*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo* info, size_t* out); /* 61 */
  OrtStatus* (*GetDimensions)(const OrtTensorTypeAndShapeInfo* info, int64_t* dims, size_t count);
  void* unused_63[2];
  OrtStatus* (*GetTensorTypeAndShape)(const OrtValue* value, /* 65 */
                                      OrtTensorTypeAndShapeInfo** out);
  void* unused_66[19];
  OrtStatus* (*KernelInfoGetAttribute_float)(const OrtKernelInfo* info, const char* name, /* 85 */
                                             float* out);
  OrtStatus* (*KernelInfoGetAttribute_int64)(const OrtKernelInfo* info, const char* name,
                                             int64_t* out);
  OrtStatus* (*KernelInfoGetAttribute_string)(const OrtKernelInfo* info, const char* name,
                                              char* out, size_t* size);
  void* unused_88[2];
  OrtStatus* (*KernelContext_GetInput)(const OrtKernelContext* context, size_t index, /* 90 */
                                       const OrtValue** out);
  OrtStatus* (*KernelContext_GetOutput)(OrtKernelContext* context, size_t index,
                                        const int64_t* dims, size_t rank, OrtValue** out);
  void* unused_92[1];
  void (*ReleaseStatus)(OrtStatus* status); /* 93 */
  void* unused_94[5];
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo* info); /* 99 */
  void* unused_100[174];
  OrtStatus* (*KernelContext_ParallelFor)(const OrtKernelContext* context, /* 274 */
                                          void (*call)(void* data, size_t index), size_t total,
                                          size_t num_batch, void* data);
} OrtApi;
_Static_assert(offsetof(OrtApi, KernelContext_ParallelFor) == 274 * sizeof(void*),
               "a function is not where its number says");

typedef struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)(void);
} OrtApiBase;

struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info);
  const char* (*GetName)(const OrtCustomOp* op);
  const char* (*GetExecutionProviderType)(const OrtCustomOp* op);
  ONNXTensorElementDataType (*GetInputType)(const OrtCustomOp* op, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp* op);
  ONNXTensorElementDataType (*GetOutputType)(const OrtCustomOp* op, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp* op);
  void (*KernelCompute)(void* kernel, OrtKernelContext* context);
  void (*KernelDestroy)(void* kernel);
  OrtCustomOpInputOutputCharacteristic (*GetInputCharacteristic)(const OrtCustomOp* op,
                                                                 size_t index);
  OrtCustomOpInputOutputCharacteristic (*GetOutputCharacteristic)(const OrtCustomOp* op,
                                                                  size_t index);
  OrtMemType (*GetInputMemoryType)(const OrtCustomOp* op, size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp* op);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp* op);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp* op);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp* op);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info,
                               void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext* context);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp* op, void* context);
  int (*GetStartVersion)(const OrtCustomOp* op);
  int (*GetEndVersion)(const OrtCustomOp* op);
};

#endif
