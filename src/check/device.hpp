// SPDX-License-Identifier: Apache-2.0
// Device memory for tools and tests: calls on host memory that run wherever the plan says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "kda/backward.hpp"
#include "kda/kda.hpp"

namespace kda::check {

/// Owned memory of the current CUDA device. Every function throws kda::Error.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::size_t bytes);
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  // Trivial only in a build without CUDA.
  ~DeviceBuffer();  // NOLINT(performance-trivially-destructible)

  void* data() const { return data_; }
  std::size_t size() const { return size_; }
  void fill(unsigned char byte);
  void upload(const void* source, std::size_t bytes);
  void download(void* target, std::size_t bytes) const;

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

/// The tensors of a problem in device memory, copied from host pointers. Pointers that are equal on
/// the host are equal on the device. On the CPU `tensors()` are the host's own.
class DeviceTensors {
 public:
  DeviceTensors(const Plan& plan, const Tensors& host);
  DeviceTensors(const DeviceTensors&) = delete;
  DeviceTensors& operator=(const DeviceTensors&) = delete;
  ~DeviceTensors();

  const Tensors& tensors() const;
  /// Copies every output (o, states, checkpoints, the pool of decode) back to the host pointers.
  void download();

 private:
  struct Memory;
  Memory* memory_;
};

/// The gradients of a backward likewise; those that go out are copied in too, so that gaps between
/// their rows stay.
class DeviceGradients {
 public:
  DeviceGradients(const BackwardPlan& plan, const GradientTensors& host);
  DeviceGradients(const DeviceGradients&) = delete;
  DeviceGradients& operator=(const DeviceGradients&) = delete;
  ~DeviceGradients();

  const GradientTensors& tensors() const;
  void download();

 private:
  struct Memory;
  Memory* memory_;
};

/// run() for host tensors and workspace, on the plan's device, waiting for the end. On CUDA the
/// workspace lives on the device, filled with 0xff first, with guard bytes behind it that must
/// survive; its contents come back to `workspace`.
Status run_and_wait(const Plan& plan, const Tensors& host, void* workspace,
                    std::size_t workspace_bytes);

/// backward() likewise; what the forward has kept is host memory too.
Status run_backward_and_wait(const BackwardPlan& plan, const Tensors& host,
                             const GradientTensors& gradients, void* workspace,
                             std::size_t workspace_bytes);

/// The stage calls likewise. Buffers of `segments` are host memory, copied in and out.
using StageCall = Status (*)(const Plan&, const Tensors&, const SegmentTensors&, void*, std::size_t,
                             void*) noexcept;
Status run_stage_and_wait(StageCall stage, const Plan& plan, const Tensors& host,
                          const SegmentTensors& segments, void* workspace,
                          std::size_t workspace_bytes);

void synchronize_device();

/// Microseconds a call on the default stream: events around a burst of `burst` calls.
double time_on_device(const std::function<void()>& call, int burst = 1);

/// Bytes of the L2 cache of the current device.
std::size_t l2_cache_bytes();

/// Copies `bytes` from one buffer to another on the default stream.
void copy_on_device(const DeviceBuffer& from, DeviceBuffer* to, std::size_t bytes);

}  // namespace kda::check
