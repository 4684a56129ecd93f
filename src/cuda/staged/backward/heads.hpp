// SPDX-License-Identifier: Apache-2.0
// A group of heads as a problem of its own, whose tensors begin further on.
#pragma once

#include <algorithm>

#include "cuda/recurrent/backward/backward.hpp"
#include "cuda/tile/head_gates.hpp"

namespace kda::cuda::staged {

/// Some q/k heads with their value heads.
struct Heads {
  int64_t first_head, first_value_head;
  Shape shape;

  static RowView rows(RowView view, int64_t head) {
    if (view.base)
      view.base = static_cast<char*>(view.base) +
                  head * view.stride_h * (view.type == Element::kFloat32 ? 4 : 2);
    return view;
  }
  RowView qk(const RowView& view) const { return rows(view, first_head); }
  RowView values(const RowView& view) const { return rows(view, first_value_head); }
  StateView states(StateView view) const {
    if (view.base)
      view.base =
          static_cast<char*>(view.base) + first_value_head * view.stride_head * (view.bf16 ? 2 : 4);
    return view;
  }
  /// A tensor with one number or row a value head.
  template <class T>
  T* parameter(T* base, int64_t stride) const {
    return base ? base + first_value_head * stride : nullptr;
  }
  GateView gate(GateView view) const {
    view.A_log = parameter(view.A_log, view.stride_A);
    view.dt_bias = parameter(view.dt_bias, view.stride_dt);
    return view;
  }

  /// The members of set_inputs() (launch/views.hpp).
  template <class Args>
  Args inputs_of(Args args) const {
    args.shape = shape;
    for (RowView* view : {&args.q, &args.k}) *view = qk(*view);
    for (RowView* view : {&args.v, &args.g, &args.beta}) *view = values(*view);
    args.gate = gate(args.gate);
    return args;
  }
  /// BackwardArgs.
  template <class Args>
  Args of(const Args& all) const {
    Args args = inputs_of(all);
    for (RowView* view : {&args.dq, &args.dk}) *view = qk(*view);
    for (RowView* view : {&args.d_o, &args.dv, &args.dg, &args.dbeta}) *view = values(*view);
    for (StateView* view : {&args.initial, &args.d_final, &args.d_initial}) *view = states(*view);
    args.dA_log = parameter(args.dA_log, args.stride_dA);
    args.ddt_bias = parameter(args.ddt_bias, args.stride_ddt);
    return args;
  }
};

/// The q/k heads from `first` on: `heads` of them, or fewer at the end.
inline Heads heads_at(const Shape& all, int64_t first, int64_t heads) {
  const int64_t of_each = all.HV / all.H;
  Heads group{first, first * of_each, all};
  group.shape.H = std::min(heads, all.H - first);
  group.shape.HV = group.shape.H * of_each;
  group.shape.heads = Divisor(group.shape.HV);
  return group;
}

}  // namespace kda::cuda::staged
