/* SPDX-License-Identifier: Apache-2.0
 * Memory that nobody has written holds NaN: a library for LD_PRELOAD, which nan_memory.py builds.
 * Every byte that the C library hands out is 0xff, a NaN in fp16, bf16, fp32 and fp64. So is what
 * torch's CPU allocator, NumPy and libkda get of it. The operators of libkda take their tensors,
 * outputs and workspaces alike, from aoti_torch_empty_strided(): those on a GPU are filled there,
 * on the current stream, in a graph too. (torch.empty on a GPU: nan_memory.py.) */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern void* __libc_malloc(size_t);
extern void* __libc_memalign(size_t, size_t);

static int fills_malloc = 0; /* else aligned memory alone, as torch takes it for tensors */

__attribute__((constructor)) static void read_switch(void) {
  const char* value = getenv("KDA_NAN_MEMORY");
  fills_malloc = value && strcmp(value, "1") == 0;
}

static void* filled(void* memory, size_t bytes) {
  return memory ? memset(memory, 0xff, bytes) : NULL;
}

void* malloc(size_t bytes) {
  void* memory = __libc_malloc(bytes);
  return fills_malloc ? filled(memory, bytes) : memory;
}
void* memalign(size_t alignment, size_t bytes) {
  return filled(__libc_memalign(alignment, bytes), bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }
int posix_memalign(void** memory, size_t alignment, size_t bytes) {
  if (alignment < sizeof(void*) || (alignment & (alignment - 1)) != 0) return EINVAL;
  *memory = memalign(alignment, bytes);
  return *memory ? 0 : ENOMEM;
}

/* ---- tensors of libkda on a GPU -------------------------------------------------------------- */

static int64_t filled_on_a_gpu = 0;

/* How many tensors of libkda's operators have been filled on a GPU. */
int64_t kda_nan_memory_tensors(void) { return __atomic_load_n(&filled_on_a_gpu, __ATOMIC_RELAXED); }

static void* function_of(const char* library, const char* name) {
  void* loaded = dlopen(library, RTLD_NOLOAD | RTLD_LAZY);
  void* found = loaded ? dlsym(loaded, name) : NULL;
  if (found) return found;
  fprintf(stderr, "nan_memory: no %s in %s\n", name, library);
  abort();
}

static void expect(int failed, const char* call) {
  if (!failed) return;
  fprintf(stderr, "nan_memory: %s failed\n", call);
  abort();
}

#define TORCH "libtorch_cpu.so"
#define TORCH_CUDA "libtorch_cuda.so"

/* The driver's calls want a context, which a thread that calls CUDA for the first time has not. */
static void have_a_context(int32_t device) {
  int (*get)(void**) = function_of("libcuda.so.1", "cuCtxGetCurrent");
  int (*retain)(void**, int) = function_of("libcuda.so.1", "cuDevicePrimaryCtxRetain");
  int (*set)(void*) = function_of("libcuda.so.1", "cuCtxSetCurrent");
  void* context = NULL;
  expect(get(&context), "cuCtxGetCurrent");
  if (context) return;
  expect(retain(&context, device), "cuDevicePrimaryCtxRetain");
  expect(set(context), "cuCtxSetCurrent");
}

static void fill_on_a_gpu(void* tensor, int32_t device) {
  int32_t (*data_of)(void*, void**) = function_of(TORCH, "aoti_torch_get_data_ptr");
  int32_t (*bytes_of)(void*, int64_t*) = function_of(TORCH, "aoti_torch_get_storage_size");
  int32_t (*stream_of)(int32_t, void**) =
      function_of(TORCH_CUDA, "aoti_torch_get_current_cuda_stream");
  int32_t (*begin)(int32_t, void**) = function_of(TORCH_CUDA, "aoti_torch_create_cuda_guard");
  int32_t (*end)(void*) = function_of(TORCH_CUDA, "aoti_torch_delete_cuda_guard");
  int (*fill)(uintptr_t, unsigned char, size_t, void*) =
      function_of("libcuda.so.1", "cuMemsetD8Async");
  void *data = NULL, *stream = NULL, *guard = NULL;
  int64_t bytes = 0;
  expect(data_of(tensor, &data), "aoti_torch_get_data_ptr");
  expect(bytes_of(tensor, &bytes), "aoti_torch_get_storage_size");
  if (bytes == 0) return;
  expect(begin(device, &guard), "aoti_torch_create_cuda_guard");
  have_a_context(device);
  expect(stream_of(device, &stream), "aoti_torch_get_current_cuda_stream");
  expect(fill((uintptr_t)data, 0xff, (size_t)bytes, stream), "cuMemsetD8Async");
  expect(end(guard), "aoti_torch_delete_cuda_guard");
  __atomic_add_fetch(&filled_on_a_gpu, 1, __ATOMIC_RELAXED);
}

int32_t aoti_torch_empty_strided(int64_t dimensions, const int64_t* sizes, const int64_t* strides,
                                 int32_t type, int32_t device_type, int32_t device, void** tensor) {
  static int32_t (*torchs)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t,
                           void**) = NULL;
  if (!torchs) torchs = function_of(TORCH, "aoti_torch_empty_strided");
  const int32_t error = torchs(dimensions, sizes, strides, type, device_type, device, tensor);
  const int32_t kCuda = 1;
  if (!error && device_type == kCuda) fill_on_a_gpu(*tensor, device);
  return error;
}
