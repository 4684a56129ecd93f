// SPDX-License-Identifier: Apache-2.0
// A CUDA stream and a graph of what was captured on it. Every function throws kda::Error.
#pragma once

#ifdef KDA_WITH_CUDA
#include <cuda_runtime.h>

#include <vector>

#include "core/text.hpp"
#include "kda/run.hpp"
#include "kda/status.hpp"

namespace kda::test {

inline void throw_if_cuda_error(cudaError_t error, const char* call) {
  if (error != cudaSuccess)
    throw Error(Status(StatusCode::kDeviceError, cat(call, ": ", cudaGetErrorString(error))));
}

struct Stream {
  cudaStream_t stream{};
  Stream() {
    throw_if_cuda_error(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "create stream");
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream); }
};

/// What `run` puts on `stream`, to be launched again and again.
struct Graph {
  cudaGraph_t graph{};
  cudaGraphExec_t executable{};

  template <class Run>
  Graph(const Stream& stream, Run&& run) {
    throw_if_cuda_error(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeGlobal),
                        "begin capture");
    run();
    throw_if_cuda_error(cudaStreamEndCapture(stream.stream, &graph), "end capture");
    throw_if_cuda_error(cudaGraphInstantiate(&executable, graph, 0), "instantiate graph");
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
  }
  void launch(const Stream& stream) const {
    throw_if_cuda_error(cudaGraphLaunch(executable, stream.stream), "launch graph");
  }
};

/// Writes over the lengths that a call reads on the device.
inline void replace_lengths(const Tensors& tensors, const std::vector<int64_t>& cu_seqlens) {
  throw_if_cuda_error(cudaMemcpy(const_cast<void*>(tensors.cu_seqlens), cu_seqlens.data(),
                                 cu_seqlens.size() * sizeof(int64_t), cudaMemcpyHostToDevice),
                      "copy lengths");
  throw_if_cuda_error(cudaDeviceSynchronize(), "wait for lengths");
}

}  // namespace kda::test
#endif
