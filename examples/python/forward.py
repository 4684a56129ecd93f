#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prefill, then decode token by token, with torch: FLA's functions under another name."""
# [readme]
import torch
from libkda import chunk_kda, fused_recurrent_kda

device = "cuda" if torch.cuda.is_available() else "cpu"  # "cpu" too if libkda was built without nvcc
B, T, H, D = 1, 1000, 4, 128
q, k, v, g = (torch.randn(B, T, H, D, device=device, dtype=torch.bfloat16) for _ in range(4))
beta = torch.randn(B, T, H, device=device, dtype=torch.bfloat16)
flags = dict(use_gate_in_kernel=True, A_log=torch.zeros(H, device=device), lower_bound=-5.0,
             use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, output_final_state=True)
o, state = chunk_kda(q, k, v, g, beta, **flags)
for t in range(3):  # three more tokens, from the state
    token = (x[:, t:t + 1] for x in (q, k, v, g, beta))
    o_t, state = fused_recurrent_kda(*token, initial_state=state, **flags)
print("o", tuple(o.shape), "state", tuple(state.shape), "next token", tuple(o_t.shape), "on", o.device)
# [readme]
