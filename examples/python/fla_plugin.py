#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""FLA's own function, served by libkda: one import more."""
# [readme]
import torch
import libkda.fla  # registers with FLA's backend registry; disable() and enable() switch it
from fla.ops.kda import chunk_kda

q, k, v, g = (torch.randn(1, 100, 2, 64) for _ in range(4))  # CPU tensors: FLA alone has no CPU kernel
with torch.inference_mode():
    o, _ = chunk_kda(q, k, v, -g.abs(), torch.rand(1, 100, 2), use_qk_l2norm_in_kernel=True)
print(libkda.fla.last_path())  # libkda: chunk_kda
# [readme]
assert libkda.fla.last_path() == "libkda: chunk_kda" and o.shape == v.shape
