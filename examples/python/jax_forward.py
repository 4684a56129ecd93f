#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""JAX on a CPU, under jit: prefill, then a token more."""
# [readme]
import jax
import jax.numpy as jnp
from libkda import arrays

def kda(q, k, v, g, beta, state):
    call = lambda *x: arrays.forward(*x[:5], initial_state=x[5], beta_mode="sigmoid", qk_l2norm=True,
                                     output_final_state=True)
    return jax.pure_callback(call, (v, state), q, k, v, g, beta, state)

keys = jax.random.split(jax.random.key(0), 5)
q, k, v, g = (jax.random.normal(key, (1, 1000, 4, 128), jnp.bfloat16) for key in keys[:4])
beta, state = jax.random.normal(keys[4], (1, 1000, 4)), jnp.zeros((1, 4, 128, 128))
o, state = jax.jit(kda)(q, k, v, -jnp.abs(g), beta, state)
next_o, state = jax.jit(kda)(*(x[:, -1:] for x in (q, k, v, -jnp.abs(g), beta)), state)
# [readme]
assert o.dtype == jnp.bfloat16 and jnp.isfinite(o).all() and jnp.isfinite(next_o).all()
print("o", o.shape, "state", state.shape, "next", next_o.shape)
