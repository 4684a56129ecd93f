#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""NumPy, without torch."""
# [readme]
import numpy as np
from libkda import arrays

rng = np.random.default_rng(0)
q, k, v, g = (rng.standard_normal((1, 1000, 4, 128), dtype=np.float32) for _ in range(4))
beta = rng.standard_normal((1, 1000, 4), dtype=np.float32)
o, state = arrays.forward(q, k, v, g, beta, gate_mode="bounded", beta_mode="sigmoid", qk_l2norm=True,
                          output_final_state=True)
# [readme]
print("o", o.shape, "state", state.shape)
assert np.isfinite(o).all() and np.isfinite(state).all()
