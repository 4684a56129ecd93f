#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet, one gate a head, with the arguments that Qwen3-Next passes."""
# [readme]
import torch
from libkda import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

device = "cuda" if torch.cuda.is_available() else "cpu"
B, T, H, HV, D = 1, 200, 2, 4, 64  # value heads 0 and 1 read q/k head 0
q, k = (torch.randn(B, T, H, D, device=device, dtype=torch.bfloat16) for _ in "qk")
v = torch.randn(B, T, HV, D, device=device, dtype=torch.bfloat16)
g = -torch.rand(B, T, HV, device=device)  # the log decay of a head, for all of its channels
beta = torch.rand(B, T, HV, device=device, dtype=torch.bfloat16)
flags = dict(use_qk_l2norm_in_kernel=True, output_final_state=True)

with torch.inference_mode():
    o, state = chunk_gated_delta_rule(q, k, v, g, beta, **flags)
    token = dict(q=q[:, -1:], k=k[:, -1:], v=v[:, -1:], g=g[:, -1:], beta=beta[:, -1:])
    o_t, state = fused_recurrent_gated_delta_rule(**token, initial_state=state, **flags)
# [readme]

assert torch.isfinite(o).all() and torch.isfinite(o_t).all()
print("gated delta net", tuple(o.shape), tuple(state.shape))
