// SPDX-License-Identifier: Apache-2.0
// Where a call runs: options of its device, the current stream. libtorch_cuda is asked only if it
// is loaded, so that the same library serves a torch without CUDA.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include <map>
#include <mutex>
#include <optional>

#include "describe.hpp"

namespace kda_torch {

inline kda_plan_options cuda_options(int32_t ordinal) {
  static std::mutex mutex;
  static std::map<int32_t, kda_plan_options> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(ordinal);
  if (found != known.end()) return found->second;
  kda_plan_options options;
  kda_plan_options_init(&options);
  check(kda_plan_options_cuda(&options, ordinal));
  return known.emplace(ordinal, options).first->second;
}

inline kda_plan_options options_for(const Tensor& x) {
  if (!x.defined()) refuse("q must be a tensor, got None");
  if (x.is_cuda()) return cuda_options(x.get_device_index());
  if (!x.is_cpu()) refuse("q must be on the CPU or on a CUDA device, got ", device_text(x));
  kda_plan_options options;
  kda_plan_options_init(&options);
  uint32_t threads = 0;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  options.num_threads = static_cast<int32_t>(threads);
  return options;
}

/// Makes the device of `x` current for its lifetime; nothing for a CPU tensor.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& x) {
    if (x.is_cuda()) guard_.emplace(x.get_device_index());
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

inline void* current_stream(const Tensor& x) {
  if (!x.is_cuda()) return nullptr;
  using Function = int32_t (*)(int32_t, void**);
  static const auto function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return reinterpret_cast<Function>(library ? dlsym(library, "aoti_torch_get_current_cuda_stream")
                                              : nullptr);
  }();
  if (!function) fail("this torch has no CUDA streams (libtorch_cuda.so)");
  void* stream = nullptr;
  if (function(x.get_device_index(), &stream) != 0) fail("no current CUDA stream");
  return stream;
}

}  // namespace kda_torch
