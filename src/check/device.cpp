// SPDX-License-Identifier: Apache-2.0
#include "check/device.hpp"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "core/layout.hpp"
#include "core/text.hpp"
#include "stage/sequences.hpp"

#ifdef KDA_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace kda::check {
namespace {

#ifdef KDA_WITH_CUDA
void expect(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw Error(Status(
      error == cudaErrorMemoryAllocation ? StatusCode::kOutOfMemory : StatusCode::kDeviceError,
      cat(call, ": ", cudaGetErrorString(error))));
}
#else
[[noreturn]] void no_cuda() {
  throw Error(Status(StatusCode::kUnavailable, "cuda: this build has no CUDA"));
}
#endif

}  // namespace

#ifdef KDA_WITH_CUDA
DeviceBuffer::DeviceBuffer(std::size_t bytes) : size_(bytes) {
  expect(cudaMalloc(&data_, std::max<std::size_t>(bytes, 1)), "cudaMalloc");
}
DeviceBuffer::~DeviceBuffer() { cudaFree(data_); }
void DeviceBuffer::fill(unsigned char byte) {
  expect(cudaMemset(data_, byte, size_), "cudaMemset");
}
void DeviceBuffer::upload(const void* source, std::size_t bytes) {
  expect(cudaMemcpy(data_, source, bytes, cudaMemcpyHostToDevice), "cudaMemcpy to the device");
}
void DeviceBuffer::download(void* target, std::size_t bytes) const {
  expect(cudaMemcpy(target, data_, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy from the device");
}
void copy_on_device(const DeviceBuffer& from, DeviceBuffer* to, std::size_t bytes) {
  expect(cudaMemcpyAsync(to->data(), from.data(), bytes, cudaMemcpyDeviceToDevice, nullptr),
         "cudaMemcpyAsync");
}
std::size_t l2_cache_bytes() {
  int device = 0, bytes = 0;
  expect(cudaGetDevice(&device), "cudaGetDevice");
  expect(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device), "cudaDeviceGetAttribute");
  return static_cast<std::size_t>(bytes);
}
void synchronize_device() { expect(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }
double time_on_device(const std::function<void()>& call, int burst) {
  struct Event {
    cudaEvent_t event{};
    Event() { expect(cudaEventCreate(&event), "cudaEventCreate"); }
    ~Event() { cudaEventDestroy(event); }
  } start, stop;
  expect(cudaEventRecord(start.event), "cudaEventRecord");
  for (int i = 0; i < burst; ++i) call();
  expect(cudaEventRecord(stop.event), "cudaEventRecord");
  expect(cudaEventSynchronize(stop.event), "cudaEventSynchronize");
  float milliseconds = 0;
  expect(cudaEventElapsedTime(&milliseconds, start.event, stop.event), "cudaEventElapsedTime");
  return milliseconds * 1e3 / burst;
}
#else
DeviceBuffer::DeviceBuffer(std::size_t) { no_cuda(); }
DeviceBuffer::~DeviceBuffer() = default;
void DeviceBuffer::fill(unsigned char) { no_cuda(); }
void DeviceBuffer::upload(const void*, std::size_t) { no_cuda(); }
void DeviceBuffer::download(void*, std::size_t) const { no_cuda(); }
void copy_on_device(const DeviceBuffer&, DeviceBuffer*, std::size_t) { no_cuda(); }
std::size_t l2_cache_bytes() { no_cuda(); }
void synchronize_device() { no_cuda(); }
double time_on_device(const std::function<void()>&, int) { no_cuda(); }
#endif

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

namespace {

/// Bytes from a tensor's first element to its last.
std::size_t extent(const TensorDesc& desc, const Shape& shape) {
  int64_t last = 0;
  for (std::size_t d = 0; d < 4; ++d) {
    if (shape[d] == 0) return 0;
    if (shape[d] > 1) last += desc.strides[d] * (shape[d] - 1);
  }
  return static_cast<std::size_t>((last + 1) * dtype_size(desc.dtype));
}

std::size_t state_extent(const Problem& p, const std::optional<StateDesc>& state) {
  return state ? extent(state->tensor, state_shape(p, *state)) : 0;
}

int64_t total_checkpoints(const Plan& plan, const void* cu_seqlens) {
  const Problem& p = plan.problem;
  const stage::Sequences sequences(p, plan.cu_seqlens, cu_seqlens);
  int64_t total = 0;
  for (int64_t n = 0; n < p.num_sequences; ++n) total += num_checkpoints(p, sequences.length(n));
  return total;
}

/// Pieces of host memory and their copies on the device.
struct Copies {
  struct Piece {
    DeviceBuffer buffer;
    std::size_t bytes = 0;
    void* host = nullptr;
    bool output = false;
  };
  std::map<const void*, Piece> pieces;

  /// Registers host memory; a pointer given twice keeps the larger size. What is not registered,
  /// the problem does not have.
  void add(const void* host, std::size_t bytes, bool output = false) {
    if (!host) return;
    Piece& piece = pieces[host];
    piece.host = const_cast<void*>(host);
    piece.bytes = std::max(piece.bytes, bytes);
    piece.output |= output;
  }
  void upload() {
    for (auto& [host, piece] : pieces) {
      piece.buffer = DeviceBuffer(piece.bytes);
      piece.buffer.upload(host, piece.bytes);
    }
  }
  template <class T>
  void replace(T*& pointer) const {
    const auto found = pieces.find(pointer);
    pointer = found == pieces.end() ? nullptr : static_cast<T*>(found->second.buffer.data());
  }
  void download() {
    for (auto& [host, piece] : pieces)
      if (piece.output) piece.buffer.download(piece.host, piece.bytes);
  }
};

void add_tail(const Problem& p, const TailTensors& host, Copies* copies) {
  const TailDesc& tail = *p.tail;
  copies->add(host.k, extent(tail.k, tail_k_shape(p, tail)), true);
  copies->add(host.g, extent(tail.g, tail_g_shape(p, tail)), true);
  copies->add(host.v_new, extent(tail.v_new, tail_v_new_shape(p, tail)), true);
  if (!tail.ring) copies->add(host.folded, extent(tail.folded, tail_folded_shape(p, tail)), true);
  if (const auto& split = tail.split) {
    copies->add(host.rest, extent(split->rest, state_shape(p, *p.initial_state)), true);
    copies->add(host.v, extent(split->v, tail_v_new_shape(p, tail)), true);
    copies->add(host.beta, extent(split->beta, tail_beta_shape(p, tail)), true);
  }
  const auto integers = static_cast<std::size_t>(p.num_sequences) * sizeof(int32_t);
  copies->add(host.positions, integers);
  if (tail.sources) copies->add(host.sources, integers);
  if (tail.flush) copies->add(host.flush, integers);
  copies->add(host.accepted_rows, integers * static_cast<std::size_t>(tail.accepted_columns));
}

}  // namespace

struct DeviceTensors::Memory : Copies {
  Tensors tensors;
};

DeviceTensors::DeviceTensors(const Plan& plan, const Tensors& host) : memory_(new Memory) {
  memory_->tensors = host;
  if (plan.device.kind == DeviceKind::kCpu) return;
  const Problem& p = plan.problem;
  Memory& m = *memory_;
  const auto N = static_cast<std::size_t>(p.num_sequences);
  try {
    m.add(host.q, extent(p.q, qk_shape(p)));
    m.add(host.k, extent(p.k, qk_shape(p)));
    m.add(host.v, extent(p.v, v_shape(p)));
    m.add(host.g, extent(p.g, g_shape(p)));
    m.add(host.beta, extent(p.beta, beta_shape(p)));
    m.add(host.o, extent(p.o, v_shape(p)), true);
    if (p.A_log) m.add(host.A_log, extent(*p.A_log, {p.num_value_heads, 1, 1, 1}));
    if (p.dt_bias) m.add(host.dt_bias, extent(*p.dt_bias, bias_shape(p)));
    if (p.cu_seqlens)
      m.add(host.cu_seqlens, (N + 1) * static_cast<std::size_t>(dtype_size(*p.cu_seqlens)));
    m.add(host.initial_state, state_extent(p, p.initial_state), in_place(p));
    m.add(host.final_state, state_extent(p, p.final_state), true);
    m.add(host.checkpoints, state_extent(p, p.checkpoints), true);
    const auto columns = static_cast<std::size_t>(p.state_index_columns);
    m.add(host.initial_state_indices,
          N * static_cast<std::size_t>(initial_columns(p)) * sizeof(int32_t));
    m.add(host.initial_state_mask, N);
    m.add(host.num_accepted_tokens, N * sizeof(int32_t));
    if (p.token_parents) m.add(host.token_parents, N * columns * sizeof(int32_t));
    m.add(host.final_state_indices, N * columns * sizeof(int32_t));
    if (p.checkpoint_offsets) m.add(host.checkpoint_offsets, N * sizeof(int32_t));
    if (host.checkpoint_indices && p.checkpoint_offsets)
      m.add(host.checkpoint_indices, N * sizeof(int32_t));
    else if (host.checkpoint_indices)
      m.add(host.checkpoint_indices,
            static_cast<std::size_t>(total_checkpoints(plan, host.cu_seqlens)) * sizeof(int32_t));
    m.add(host.saved, plan.saved_bytes, true);
    if (p.tail) add_tail(p, host.tail, &m);
    m.upload();
  } catch (...) {
    delete memory_;
    throw;
  }
  Tensors& t = m.tensors;
  for (const void** pointer :
       {&t.q, &t.k, &t.v, &t.g, &t.beta, &t.A_log, &t.dt_bias, &t.cu_seqlens})
    m.replace(*pointer);
  for (void** pointer : {&t.o, &t.initial_state, &t.final_state, &t.checkpoints, &t.saved})
    m.replace(*pointer);
  for (const int32_t** pointer :
       {&t.initial_state_indices, &t.num_accepted_tokens, &t.token_parents, &t.final_state_indices,
        &t.checkpoint_indices, &t.checkpoint_offsets})
    m.replace(*pointer);
  m.replace(t.initial_state_mask);
  for (void** pointer : {&t.tail.k, &t.tail.g, &t.tail.v, &t.tail.beta}) m.replace(*pointer);
  m.replace(t.tail.v_new), m.replace(t.tail.folded), m.replace(t.tail.rest);
  for (const int32_t** pointer :
       {&t.tail.positions, &t.tail.sources, &t.tail.accepted_rows, &t.tail.flush})
    m.replace(*pointer);
}

DeviceTensors::~DeviceTensors() { delete memory_; }
const Tensors& DeviceTensors::tensors() const { return memory_->tensors; }
void DeviceTensors::download() { memory_->download(); }

struct DeviceGradients::Memory : Copies {
  GradientTensors tensors;
};

DeviceGradients::DeviceGradients(const BackwardPlan& plan, const GradientTensors& host)
    : memory_(new Memory) {
  memory_->tensors = host;
  if (plan.plan.device.kind == DeviceKind::kCpu) return;
  const Problem& p = plan.plan.problem;
  const Gradients& g = plan.gradients;
  Memory& m = *memory_;
  const auto add = [&](const void* pointer, const std::optional<TensorDesc>& desc,
                       const Shape& shape, bool output = true) {
    if (desc) m.add(pointer, extent(*desc, shape), output);
  };
  const Shape states = state_shape(p, {{}, p.num_sequences, false});
  try {
    add(host.d_o, g.d_o, v_shape(p), false);
    add(host.d_final_state, g.d_final_state, states, false);
    add(host.dq, g.dq, qk_shape(p));
    add(host.dk, g.dk, qk_shape(p));
    add(host.dv, g.dv, v_shape(p));
    add(host.dg, g.dg, g_shape(p));
    add(host.dbeta, g.dbeta, beta_shape(p));
    add(host.dA_log, g.dA_log, {p.num_value_heads, 1, 1, 1});
    add(host.ddt_bias, g.ddt_bias, bias_shape(p));
    add(host.d_initial_state, g.d_initial_state, states);
    m.upload();
  } catch (...) {
    delete memory_;
    throw;
  }
  GradientTensors& t = m.tensors;
  for (const void** pointer : {&t.d_o, &t.d_final_state}) m.replace(*pointer);
  for (void** pointer :
       {&t.dq, &t.dk, &t.dv, &t.dg, &t.dbeta, &t.dA_log, &t.ddt_bias, &t.d_initial_state})
    m.replace(*pointer);
}

DeviceGradients::~DeviceGradients() { delete memory_; }
const GradientTensors& DeviceGradients::tensors() const { return memory_->tensors; }
void DeviceGradients::download() { memory_->download(); }

namespace {

constexpr std::size_t kGuardBytes = 4096;
constexpr unsigned char kGuard = 0x5a;

/// The device side of a workspace.
class GuardedWorkspace {
 public:
  explicit GuardedWorkspace(std::size_t bytes) : bytes_(bytes), memory_(bytes + kGuardBytes) {
    memory_.fill(kGuard);
    std::vector<unsigned char> nan(bytes, 0xff);
    if (bytes > 0) memory_.upload(nan.data(), bytes);
  }
  void* data() const { return memory_.data(); }
  void download(void* target) const {
    std::vector<unsigned char> all(memory_.size());
    memory_.download(all.data(), all.size());
    for (std::size_t i = bytes_; i < all.size(); ++i)
      if (all[i] != kGuard)
        throw Error(Status(StatusCode::kInternal,
                           cat("byte ", i - bytes_, " behind the workspace was written")));
    std::copy_n(all.data(), bytes_, static_cast<unsigned char*>(target));
  }

 private:
  std::size_t bytes_;
  DeviceBuffer memory_;
};

}  // namespace

Status run_and_wait(const Plan& plan, const Tensors& host, void* workspace,
                    std::size_t workspace_bytes) {
  if (plan.device.kind == DeviceKind::kCpu) return run(plan, host, workspace, workspace_bytes);
  DeviceTensors device(plan, host);
  GuardedWorkspace memory(workspace_bytes);
  if (Status status = run(plan, device.tensors(), memory.data(), workspace_bytes); !status.ok())
    return status;
  synchronize_device();
  device.download();
  memory.download(workspace);
  return {};
}

Status run_backward_and_wait(const BackwardPlan& plan, const Tensors& host,
                             const GradientTensors& gradients, void* workspace,
                             std::size_t workspace_bytes) {
  if (plan.plan.device.kind == DeviceKind::kCpu)
    return backward(plan, host, gradients, workspace, workspace_bytes);
  DeviceTensors inputs(plan.plan, host);
  DeviceGradients outputs(plan, gradients);
  GuardedWorkspace memory(workspace_bytes);
  if (Status status =
          backward(plan, inputs.tensors(), outputs.tensors(), memory.data(), workspace_bytes);
      !status.ok())
    return status;
  synchronize_device();
  outputs.download();
  memory.download(workspace);
  return {};
}

Status run_stage_and_wait(StageCall stage, const Plan& plan, const Tensors& host,
                          const SegmentTensors& segments, void* workspace,
                          std::size_t workspace_bytes) {
  if (plan.device.kind == DeviceKind::kCpu)
    return stage(plan, host, segments, workspace, workspace_bytes, nullptr);
  const Problem& p = plan.problem;
  const std::size_t count = plan.segments.size() * static_cast<std::size_t>(p.num_value_heads);
  const std::size_t square = count * static_cast<std::size_t>(p.key_dim * p.key_dim) * 4;
  const std::size_t state = count * static_cast<std::size_t>(p.key_dim * p.value_dim) * 4;
  DeviceTensors device(plan, host);
  GuardedWorkspace memory(workspace_bytes);
  DeviceBuffer M(square), B(state), states(state);
  SegmentTensors on_device;
  const auto move_in = [](float* from, DeviceBuffer& to, std::size_t bytes, float*& pointer) {
    if (!from) return;
    to.upload(from, bytes);
    pointer = static_cast<float*>(to.data());
  };
  move_in(segments.M, M, square, on_device.M);
  move_in(segments.B, B, state, on_device.B);
  move_in(segments.states_in, states, state, on_device.states_in);
  if (Status status =
          stage(plan, device.tensors(), on_device, memory.data(), workspace_bytes, nullptr);
      !status.ok())
    return status;
  synchronize_device();
  device.download();
  if (segments.M) M.download(segments.M, square);
  if (segments.B) B.download(segments.B, state);
  if (segments.states_in) states.download(segments.states_in, state);
  memory.download(workspace);
  return {};
}

}  // namespace kda::check
