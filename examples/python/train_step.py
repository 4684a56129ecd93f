#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Training steps with torch: gradients of everything that goes into chunk_kda."""
# [readme]
import torch
from libkda import chunk_kda

B, T, H, D = 2, 300, 2, 64
layer = torch.nn.Linear(128, 4 * H * D + H, bias=False)  # q, k, v, raw gates, beta logits
A_log, dt_bias = torch.nn.Parameter(torch.zeros(H)), torch.nn.Parameter(torch.zeros(H * D))
optimizer = torch.optim.AdamW([*layer.parameters(), A_log, dt_bias], lr=1e-3)
x, target = torch.randn(B, T, 128), torch.randn(B, T, H, D)

for step in range(5):
    q, k, v, g, beta = layer(x).split([H * D] * 4 + [H], dim=-1)
    q, k, v, g = (t.unflatten(-1, (H, D)) for t in (q, k, v, g))
    o, _ = chunk_kda(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, lower_bound=-5.0, use_gate_in_kernel=True,
                     use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    loss = torch.nn.functional.mse_loss(o, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    # [readme]
    print(f"step {step}: loss {loss.item():.6f}, |dA_log| {A_log.grad.norm().item():.2e}")
