#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two packed sequences over the processes of torchrun, or in one: `torchrun --nproc-per-node 2 context_parallel.py`."""
# [readme]
import os
import torch
from libkda import chunk_kda, context_parallel

if "RANK" in os.environ:  # torchrun has started this process; on GPUs "cpu:gloo,cuda:nccl"
    torch.distributed.init_process_group("gloo")
cu_seqlens, H, D = [0, 300, 1000], 4, 64
context = context_parallel.zigzag(cu_seqlens)  # of the whole, the same on every rank; a group of processes follows
torch.manual_seed(0)
whole = [torch.randn(1, cu_seqlens[-1], n) for n in (3 * H * D, H * D, H)]  # q, k and v; gates; step sizes
x, g, beta = (context.take(t) for t in whole)  # or whatever loads the tokens of this rank
weight, state = torch.randn(3 * H * D, 4), torch.zeros(2, H, D, D)

x = context_parallel.causal_conv1d(x, weight, context=context, activation="silu")
q, k, v, g = (t.unflatten(-1, (H, D)) for t in (*x.chunk(3, dim=-1), g))
o, final_state = chunk_kda(q, k, v, g, beta, A_log=torch.zeros(H), use_gate_in_kernel=True,
                           use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, initial_state=state,
                           output_final_state=True, cp_context=context)  # states of sequences in context.ends
# [readme]
print(f"rank {context.rank} of {context.ranks}: o {tuple(o.shape)}, sum of squares {o.square().sum():.4f}, "
      f"final states of {context.ends}")
if context.ranks > 1:
    torch.distributed.destroy_process_group()
