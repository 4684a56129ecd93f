#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A program written for FlashKDA, served by libkda, on CPU tensors too."""
# [readme]
import torch
import libkda.compat.flash_kda

libkda.compat.flash_kda.install()  # before anything imports flash_kda
import flash_kda  # noqa: E402

q, k, v, g = (torch.randn(1, 100, 2, 64) for _ in range(4))
beta, A_log, dt_bias = torch.randn(1, 100, 2), torch.zeros(2), torch.zeros(2, 64)
out, final_state = torch.empty_like(v), torch.empty(1, 2, 64, 64)
with torch.inference_mode():
    flash_kda.fwd(q, k, v, g, beta, 64 ** -0.5, out, A_log, dt_bias, -5.0, final_state=final_state)
# [readme]
assert flash_kda is libkda.compat.flash_kda and out.isfinite().all() and final_state.isfinite().all()
print("out", tuple(out.shape), "final state", tuple(final_state.shape))
