#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""JAX: a prefill and its gradients, then tokens one by one with the state in place."""
# [readme]
import jax
import jax.numpy as jnp
from libkda import jax as kda

flags = dict(beta_mode="sigmoid", qk_l2norm=True)
keys = jax.random.split(jax.random.key(0), 5)
q, k, v, g = (jax.random.normal(key, (1, 1000, 4, 128), jnp.bfloat16) for key in keys[:4])
inputs = q, k, v, -jnp.abs(g), jax.random.normal(keys[4], (1, 1000, 4))

o, state = jax.jit(lambda *x: kda.forward(*x, **flags))(*inputs)
loss = lambda *x: jnp.square(kda.forward(*x, **flags)[0].astype(jnp.float32)).mean()
dq, dk, dv, dg, dbeta = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))(*inputs)

step = jax.jit(lambda state, *x: kda.decode(*x, state, **flags), donate_argnums=0)
for t in range(3):
    next_o, state = step(state, *(x[:, t:t + 1] for x in inputs))
# [readme]
assert o.dtype == jnp.bfloat16 and jnp.isfinite(o).all() and jnp.isfinite(next_o).all()
assert all(jnp.isfinite(x).all() and jnp.any(x) for x in (dq, dk, dv, dg, dbeta))
print("o", o.shape, "state", state.shape, "next", next_o.shape, "dg", dg.shape)
