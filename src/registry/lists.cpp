// SPDX-License-Identifier: Apache-2.0
// The rows of this build, an operation a list: best first, the reference last.
#include <array>

#include "cpu/blocked/blocked.hpp"
#include "cpu/layer/layer.hpp"
#include "cpu/oracle/implementation.hpp"
#include "cuda/rows.hpp"
#include "registry/rows.hpp"

namespace kda::registry {
namespace {

constexpr std::array<const ForwardRow*, 9> kForward = {
    &cpu::blocked::kAvx512Forward,    &cpu::blocked::kAvx2Forward, &cpu::blocked::kPortableForward,
    &cpu::oracle::kForward,           &cuda::gdn::kForward,        &cuda::fused::kForward,
    &cuda::fused::portable::kForward, &cuda::staged::kForward,     &cuda::recurrent::kForward};

constexpr std::array<const DecodeRow*, 5> kDecode = {
    &cpu::blocked::kAvx512Decode, &cpu::blocked::kAvx2Decode, &cpu::blocked::kPortableDecode,
    &cpu::oracle::kDecode, &cuda::recurrent::kDecode};

constexpr std::array<const BackwardRow*, 8> kBackward = {
    &cpu::blocked::kAvx512Backward, &cpu::blocked::kAvx2Backward, &cpu::blocked::kPortableBackward,
    &cpu::oracle::kBackward,        &cuda::gdn::kBackward,        &cuda::staged::kFp16Backward,
    &cuda::staged::kBackward,       &cuda::recurrent::kBackward};

constexpr std::array<const LayerRow*, 2> kLayer = {&cpu::layer::kLayer, &cuda::layer::kLayer};

template <class Row, std::size_t kCount>
constexpr std::array<const Head*, kCount> heads_of(const std::array<const Row*, kCount>& rows) {
  std::array<const Head*, kCount> heads = {};
  for (std::size_t i = 0; i < kCount; ++i) heads[i] = &rows[i]->head;
  return heads;
}

}  // namespace

std::span<const ForwardRow* const> forward_rows() noexcept { return kForward; }
std::span<const DecodeRow* const> decode_rows() noexcept { return kDecode; }
std::span<const BackwardRow* const> backward_rows() noexcept { return kBackward; }

std::span<const Head* const> heads(Operation operation) noexcept {
  static constexpr auto kForwardHeads = heads_of(kForward);
  static constexpr auto kDecodeHeads = heads_of(kDecode);
  switch (operation) {
    case Operation::kForward: return kForwardHeads;
    case Operation::kDecode: return kDecodeHeads;
  }
  return {};
}

std::span<const Head* const> backward_heads() noexcept {
  static constexpr auto kHeads = heads_of(kBackward);
  return kHeads;
}

const TailForward* tail_forward(DeviceKind device) noexcept {
  for (const DecodeRow* row : kDecode)
    if (row->head.device == device && row->tail_forward) return row->tail_forward;
  return nullptr;
}

const LayerRow* layer_row(DeviceKind device) noexcept {
  for (const LayerRow* row : kLayer)
    if (row->device == device) return row;
  return nullptr;
}

}  // namespace kda::registry
