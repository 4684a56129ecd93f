// SPDX-License-Identifier: Apache-2.0
// The kernel table of one instruction set. Included last by kernels_<isa>.cpp, after its
// simd_*.hpp.
#pragma once

#include "cpu/blocked/backward_prepare.hpp"
#include "cpu/blocked/backward_sweep.hpp"
#include "cpu/blocked/decode.hpp"
#include "cpu/blocked/kernels.hpp"
#include "cpu/blocked/prepare.hpp"
#include "cpu/blocked/rows.hpp"
#include "cpu/blocked/sweep.hpp"
#include "cpu/blocked/tail_rows.hpp"
#include "cpu/layer/norm_kernels.hpp"
#include "cpu/layer/short_conv_kernels.hpp"

namespace kda::cpu::blocked::KDA_ISA {

// Rounding makes every step of a chain necessary: the compiler cannot fold the loop.
static int64_t peak_fma(int64_t iterations) {
  constexpr int kChains = 12;  // > 2 pipes x 4 cycles of latency, and fits 16 registers
  volatile float start = 0.5f;
  const F factor = set1(start);
  const F addend = set1(start);
  F sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = set1(static_cast<float>(i));
  for (int64_t n = 0; n < iterations; ++n) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sum[i] = fma(sum[i], factor, addend);
  }
  F total = sum[0];
  for (int i = 1; i < kChains; ++i) total = total + sum[i];
  volatile float sink = reduce_add(total);
  static_cast<void>(sink);
  return iterations * kChains * kWidth;
}

static constexpr BackwardKernels kBackwardKernels = {
    backward_clear,     backward_prepare, backward_advance, backward_rebuild, backward_reverse,
    backward_gradients, load_tiles,       store_tiles,      backward_add_row, backward_scale_row,
    undo_norm,          undo_gate,        step_slope};

static constexpr TailKernels kTailKernels = {
    tail_key,    tail_token,   tail_beta,    tail_decay, tail_log_decay,
    tail_scores, tail_read_kv, tail_read_vk, tail_solve, tail_fold};

static constexpr layer::Kernels kLayerKernels = {
    load_tile, store_tile,    convolve, convolve_slopes, convolve_sums,
    norm,      norm_backward, kWidth,   norm_narrow,     norm_narrow_backward};

static constexpr Kernels make_kernels(const char* name) {
  return {name,     prepare,   sweep,    matmul_block,      decode_kv,     decode_vk,
          load_row, store_row, peak_fma, &kBackwardKernels, &kTailKernels, &kLayerKernels};
}

}  // namespace kda::cpu::blocked::KDA_ISA
