// SPDX-License-Identifier: Apache-2.0
// Stage "backward": the adjoint of the recurrence. Token by token, from the last one, with dS the
// gradient of the state after the token (of the last token: d_final_state), S' = Diag(exp g) S the
// decayed state before it, e = v - S'^T k, v_new = beta e and S = S' + k v_new^T:
//   dq = scale S d_o                 dS += scale q d_o^T
//   dv_new = dS^T k                  dbeta = dv_new . e          dv = beta dv_new
//   dk = dS v_new - S' dv            dS' = dS - k dv^T
//   dg = rowsum_V(S' * dS')          dS <- Diag(exp g) dS'
// then through the L2 norm, the gate and the sigmoid (x = g + dt_bias, a = exp(A_log), s =
// sigmoid):
//   norm, y = x r:  dx = r (dy - y (y . dy))
//   sigmoid:        draw = c s(raw) s(-raw) dbeta
//   bounded:        dI = lower_bound s(a x) s(-a x) dg;  draw = a dI;  dA_log = sum a x dI
//   softplus:       draw = -a s(x) dg;                   dA_log = sum g dg
//   ddt_bias = sum over tokens of draw
// A term with a factor 0 is 0 also where the other factor is infinite (gates at +-inf).
#pragma once

#include "kda/backward.hpp"
#include "stage/forward.hpp"

namespace kda::stage {

/// Blocks of Plan::saved.
inline constexpr const char* kKeptStates = "kept_states";
/// plan_id() of the forward that wrote them. Of plans for the CPU.
inline constexpr const char* kKeptMark = "kept_mark";

struct Backward {
  Call call;  ///< of the forward problem; `tensors` has its inputs
  const Gradients& gradients;
  const GradientTensors& tensors;
  /// fp32 [states, HV, K, V]: the state after every `kept_every` tokens of a sequence, floor(length
  /// / kept_every) of them, sequences in order. Null where there are none.
  const float* kept_every_states = nullptr;
  /// A multiple of kKeptStateMultiple. 0: the forward has kept nothing.
  int64_t kept_every = 0;
};

}  // namespace kda::stage
