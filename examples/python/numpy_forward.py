#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""NumPy, without torch: prefill, then token by token."""
# [readme]
import numpy as np
from libkda import arrays

rng = np.random.default_rng(0)
q, k, v, g = (rng.standard_normal((1, 1000, 4, 128), dtype=np.float32) for _ in range(4))
beta = rng.standard_normal((1, 1000, 4), dtype=np.float32)
o, state = arrays.forward(q, k, v, g, beta, gate_mode="bounded", beta_mode="sigmoid", qk_l2norm=True,
                          output_final_state=True)
for t in range(3):  # three more tokens; the state is updated in place
    token = (x[:, t:t + 1] for x in (q, k, v, g, beta))
    o_t = arrays.decode(*token, state, gate_mode="bounded", beta_mode="sigmoid", qk_l2norm=True)
# [readme]
print("o", o.shape, "state", state.shape, "next token", o_t.shape)
assert np.isfinite(o).all() and np.isfinite(o_t).all() and np.isfinite(state).all()
