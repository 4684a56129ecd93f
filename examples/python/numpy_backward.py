#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""NumPy, without torch: the gradient of a loss, and a step along it."""
# [readme]
import numpy as np
from libkda import arrays

rng = np.random.default_rng(0)
q, k, v, g = (rng.standard_normal((1, 1000, 4, 128), dtype=np.float32) for _ in range(4))
beta = rng.standard_normal((1, 1000, 4), dtype=np.float32)
flags = dict(gate_mode="bounded", beta_mode="sigmoid", qk_l2norm=True)

kept = arrays.Kept(every=512)  # states that the backward need not compute again
o, _ = arrays.forward(q, k, v, g, beta, **flags, kept=kept)
found = arrays.backward(q, k, v, g, beta, **flags, d_o=o, kept=kept)  # of the loss |o|^2 / 2
v -= 1e3 * found.dv
# [readme]
after, _ = arrays.forward(q, k, v, g, beta, **flags)
print(f"|o|^2 / 2: {np.vdot(o, o) / 2:.1f}, after a step {np.vdot(after, after) / 2:.1f}")
assert np.vdot(after, after) < np.vdot(o, o)
