// SPDX-License-Identifier: Apache-2.0
// Where tests of the layer's operations run: the kernels of each instruction set, and a GPU where
// KDA_TEST_DEVICE=cuda asks for it. Calls are on host memory; those for a GPU are copied there and
// back, with the bytes between the elements.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "check/device.hpp"
#include "cpu/blocked/kernels.hpp"
#include "cpu/layer/layer.hpp"
#include "support/harness.hpp"
#include "support/strided_array.hpp"

namespace kda::test {

/// Copies of host memory on the current device, by their first byte.
class DeviceCopies {
 public:
  /// The view of the copy; one that has been made serves again.
  TensorView operator()(const TensorView& host, const Shape& shape) {
    if (!host.data) return host;
    int64_t last = 0;
    for (std::size_t d = 0; d < 4; ++d) {
      if (shape[d] == 0) return at(host, 1);
      if (shape[d] > 1) last += host.strides[d] * (shape[d] - 1);
    }
    return at(host, static_cast<std::size_t>((last + 1) * dtype_size(host.dtype)));
  }
  template <class T>
  const T* operator()(const T* host, int64_t count) {
    if (!host) return nullptr;
    const TensorView view{const_cast<void*>(static_cast<const void*>(host))};
    return static_cast<const T*>(at(view, static_cast<std::size_t>(count) * sizeof(T)).data);
  }
  void* workspace(std::size_t bytes) {
    workspace_ = check::DeviceBuffer(bytes);
    workspace_.fill(0xff);
    return workspace_.data();
  }
  /// What is on the device comes back.
  void download() {
    check::synchronize_device();
    for (auto& [host, copy] : copies_) copy.download(host, copy.size());
  }

 private:
  TensorView at(const TensorView& host, std::size_t bytes) {
    auto& copy = copies_[host.data];
    if (copy.size() < bytes) {
      copy = check::DeviceBuffer(bytes);
      copy.upload(host.data, bytes);
    }
    TensorView view = host;
    view.data = copy.data();
    return view;
  }
  std::map<void*, check::DeviceBuffer> copies_;
  check::DeviceBuffer workspace_;
};

inline ShortConv on_device(const ShortConv& call, DeviceCopies& copies) {
  ShortConv made = call;
  const Shape rows = {call.batch, call.num_tokens, call.channels, 1};
  const int64_t N = call.cu_seqlens ? call.num_sequences : call.batch;
  made.device = DeviceKind::kCuda;
  made.x = copies(call.x, rows), made.y = copies(call.y, rows);
  made.weight = copies(call.weight, {call.channels, call.width, 1, 1});
  made.bias = copies(call.bias, {call.channels, 1, 1, 1});
  if (call.cu_seqlens) {
    const int64_t bytes = (N + 1) * dtype_size(call.cu_seqlens_dtype);
    made.cu_seqlens = copies(static_cast<const char*>(call.cu_seqlens), bytes);
  }
  for (auto state : {&ShortConv::initial_state, &ShortConv::final_state}) {
    const ConvState& given = call.*state;
    (made.*state).tensor =
        copies(given.tensor, {given.num_slots, call.channels, call.state_width, 1});
    (made.*state).indices = copies(given.indices, N);
  }
  made.has_state = copies(call.has_state, N);
  return made;
}

inline GatedRmsNorm on_device(const GatedRmsNorm& call, DeviceCopies& copies) {
  GatedRmsNorm made = call;
  const Shape rows = {call.rows[0], call.rows[1], call.rows[2], call.channels};
  made.device = DeviceKind::kCuda;
  made.x = copies(call.x, rows), made.y = copies(call.y, rows), made.gate = copies(call.gate, rows);
  made.weight = copies(call.weight, {call.channels, 1, 1, 1});
  return made;
}

/// Null: a GPU.
using LayerTarget = const cpu::blocked::Kernels*;

inline Status run_on(LayerTarget target, const ShortConv& call) {
  if (target) return cpu::layer::short_conv(*target->layer, call);
  DeviceCopies copies;
  const Status status = short_conv(on_device(call, copies));
  copies.download();
  return status;
}
inline Status run_on(LayerTarget target, const ShortConv& call, const ShortConvGradients& g) {
  if (target) return cpu::layer::short_conv_backward(*target->layer, call, g);
  DeviceCopies copies;
  ShortConv made = on_device(call, copies);
  made.workspace_bytes = short_conv_backward_workspace(made);
  made.workspace = copies.workspace(made.workspace_bytes);
  const Shape rows = {call.batch, call.num_tokens, call.channels, 1};
  const Shape states = {call.cu_seqlens ? call.num_sequences : call.batch, call.channels,
                        call.state_width, 1};
  const Status status = short_conv_backward(
      made, {copies(g.dy, rows), copies(g.d_final_state, states), copies(g.dx, rows),
             copies(g.dweight, {call.channels, call.width, 1, 1}),
             copies(g.dbias, {call.channels, 1, 1, 1}), copies(g.d_initial_state, states)});
  copies.download();
  return status;
}
inline Status run_on(LayerTarget target, const GatedRmsNorm& call) {
  if (target) return cpu::layer::gated_rms_norm(*target->layer, call);
  DeviceCopies copies;
  const Status status = gated_rms_norm(on_device(call, copies));
  copies.download();
  return status;
}
inline Status run_on(LayerTarget target, const GatedRmsNorm& call, const GatedRmsNormGradients& g) {
  if (target) return cpu::layer::gated_rms_norm_backward(*target->layer, call, g);
  DeviceCopies copies;
  GatedRmsNorm made = on_device(call, copies);
  made.workspace_bytes = gated_rms_norm_backward_workspace(made);
  made.workspace = copies.workspace(made.workspace_bytes);
  const Shape rows = {call.rows[0], call.rows[1], call.rows[2], call.channels};
  const Status status =
      gated_rms_norm_backward(made, {copies(g.dy, rows), copies(g.dx, rows), copies(g.dgate, rows),
                                     copies(g.dweight, {call.channels, 1, 1, 1})});
  copies.download();
  return status;
}

inline std::vector<LayerTarget> layer_targets() {
  using namespace cpu::blocked;
  std::vector<LayerTarget> targets = {portable_kernels()};
  if (avx2_kernels() && cpu_has_avx2()) targets.push_back(avx2_kernels());
  if (avx512_kernels() && cpu_has_avx512()) targets.push_back(avx512_kernels());
  if (on_cuda()) targets.push_back(nullptr);
  return targets;
}

class LayerTest : public testing::TestWithParam<LayerTarget> {
 protected:
  LayerTarget target() const { return GetParam(); }
};

inline std::string target_name(const testing::TestParamInfo<LayerTarget>& entry) {
  return entry.param ? entry.param->name : "cuda";
}

}  // namespace kda::test
