#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""vLLM's KDA on libkda: what vLLM does in each of its processes, and a call that its layers make, without vLLM."""
# [readme]
import os
import torch
import libkda.vllm

os.environ["LIBKDA_VLLM"] = "1"  # or LIBKDA_VLLM=1 in front of `vllm serve`
libkda.vllm.register()  # vLLM's plugin system calls it

H, D = 4, 128
pool = torch.zeros(8, H, D, D)  # vLLM's states; slot 0 is that of padded rows
qkv, gate, beta = torch.randn(3, 3 * H * D), torch.randn(1, 3, H, D), torch.randn(1, 3, H)
with torch.inference_mode():  # a decode step of Kimi-Linear: two requests, and a row of padding
    o, _ = libkda.vllm.fused_recurrent_kda_packed_decode(
        qkv, gate, beta, torch.zeros(H), torch.zeros(H * D), -5.0, pool, torch.tensor([5, 3, 0]))
print(libkda.vllm.places())  # with vLLM: the names that libkda's functions have taken
# [readme]
assert o[0, :2].any() and not o[0, 2].any() and pool[[3, 5]].any() and not pool[[0, 1]].any()
