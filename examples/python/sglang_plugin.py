#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""SGLang's KDA on libkda: what SGLang does in each of its processes, and a call that it makes, without SGLang."""
# [readme]
import os
import torch
import libkda.sglang

os.environ["LIBKDA_SGLANG"] = "1"  # or LIBKDA_SGLANG=1 in front of `python -m sglang.launch_server`
libkda.sglang.register()  # SGLang's plugin system calls it

H, D = 4, 128
pool = torch.zeros(8, H, D, D)  # SGLang's states; slot 0 is nobody's, -1 that of padded rows
q, k, v = torch.randn(1, 100, 3 * H * D).unflatten(-1, (3, H, D)).unbind(2)  # rows of the convolution
with torch.inference_mode():  # prompts of 60 and 40 tokens
    o = libkda.sglang.extend(
        None, q, k, v, torch.randn(1, 100, H, D), torch.randn(1, 100, H), ssm_states=pool, lower_bound=-5.0,
        cache_indices=torch.tensor([5, 3, -1]), query_start_loc=torch.tensor([0, 60, 100, 100]), beta_is_raw=True,
        A_log=torch.zeros(1, 1, H, 1), dt_bias=torch.zeros(H * D))
print(libkda.sglang.places())  # with SGLang: the names that libkda's methods have taken
# [readme]
assert o.any() and pool[[3, 5]].any() and not pool[[0, 1, 2, 4, 6, 7]].any()
