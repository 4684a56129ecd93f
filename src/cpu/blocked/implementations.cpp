// SPDX-License-Identifier: Apache-2.0
// Registry rows of the blocked backend: the same stages over three kernel tables.
#include "cpu/blocked/blocked.hpp"

namespace kda::cpu::blocked {
namespace {

using KernelsFn = const Kernels* (*)() noexcept;
using SupportFn = bool (*)() noexcept;

bool always() noexcept { return true; }

// The CPU backend serves every problem that validate() accepts.
std::string decline_nothing(const Problem&) { return {}; }

template <KernelsFn kKernels, SupportFn kSupported>
const char* unavailable() noexcept {
  if (!kKernels()) return "not built for this processor family";
  return kSupported() ? nullptr : "this CPU lacks the instruction set";
}

template <KernelsFn kKernels>
Status forward_with(const stage::Forward& args) {
  return forward(*kKernels(), args);
}
template <KernelsFn kKernels>
Status decode_with(const stage::Decode& args) {
  return decode(*kKernels(), args);
}
template <KernelsFn kKernels>
Status segment_scan_with(const stage::SegmentScan& args) {
  return segment_scan(*kKernels(), args);
}
template <KernelsFn kKernels>
Status segment_merge_with(const stage::SegmentMerge& args) {
  return segment_merge(*kKernels(), args);
}
template <KernelsFn kKernels>
Status segment_correct_with(const stage::SegmentCorrect& args) {
  return segment_correct(*kKernels(), args);
}

template <KernelsFn kKernels, SupportFn kSupported>
constexpr stage::Implementation row(const char* name) {
  return {name,
          DeviceKind::kCpu,
          kChunk,
          unavailable<kKernels, kSupported>,
          decline_nothing,
          scratch_bytes,
          forward_with<kKernels>,
          decode_with<kKernels>,
          segment_scan_with<kKernels>,
          segment_merge_with<kKernels>,
          segment_correct_with<kKernels>};
}

}  // namespace

const stage::Implementation kAvx512 = row<avx512_kernels, cpu_has_avx512>("cpu.blocked.avx512");
const stage::Implementation kAvx2 = row<avx2_kernels, cpu_has_avx2>("cpu.blocked.avx2");
const stage::Implementation kPortable = row<portable_kernels, always>("cpu.blocked.portable");

const Kernels& best_kernels() noexcept {
  if (avx512_kernels() && cpu_has_avx512()) return *avx512_kernels();
  if (avx2_kernels() && cpu_has_avx2()) return *avx2_kernels();
  return *portable_kernels();
}

}  // namespace kda::cpu::blocked
