#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times of libkda.jax on a CPU beside libkda.arrays in place, beside jax.pure_callback around libkda.arrays, and beside
a scan in JAX: forward, gradients, decode and vmap, in milliseconds. The methods take turns; the medians count. In a
forward and its gradients callback and scan come after the turns of the others: they give memory back to the system, and
whoever came next would have to ask for pages again.

    PYTHONPATH=FOLDER_WITH_JAX bench/jax_bench.py [--seconds 2] [--only TEXT] [--before FOLDER] [--json FILE]
"""
import argparse
import functools
import importlib
import importlib.util
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from libkda import __version__, arrays
from libkda import jax as kda
from report import evidence

FLAGS = dict(beta_mode="sigmoid", qk_l2norm=True)
D = 128


def inputs(B, T, H):
    """q, k, v, g, beta, states."""
    keys = jax.random.split(jax.random.key(0), 6)
    row = lambda key, *shape: jax.random.normal(key, shape, jnp.float32)
    return [*(row(key, B, T, H, D) for key in keys[:3]), -jnp.abs(row(keys[3], B, T, H, D)), row(keys[4], B, T, H),
            row(keys[5], B, H, D, D)]


def ffi(q, k, v, g, beta, s):
    return kda.forward(q, k, v, g, beta, initial_state=s, **FLAGS)


def callback(q, k, v, g, beta, s, around=arrays):
    call = lambda *x: around.forward(*x[:5], initial_state=x[5], output_final_state=True, **FLAGS)
    return jax.pure_callback(call, (v, s), q, k, v, g, beta, s)


def scan(q, k, v, g, beta, s):
    norm = lambda x: x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6)

    def step(S, x):
        q, k, v, g, b = x
        S = S * jnp.exp(g)[..., None]
        e = (v - jnp.einsum("bhkv,bhk->bhv", S, k)) * b[..., None]
        S = S + k[..., None] * e[..., None, :]
        return S, jnp.einsum("bhkv,bhk->bhv", S, q) * D ** -0.5
    s, o = jax.lax.scan(step, s, tuple(jnp.moveaxis(x, 1, 0) for x in (norm(q), norm(k), v, g, jax.nn.sigmoid(beta))))
    return jnp.moveaxis(o, 0, 1), s


def arrays_of(folder):
    """libkda.arrays of the package in `folder`, beside those of this version."""
    package = pathlib.Path(folder) / "libkda"
    spec = importlib.util.spec_from_file_location("libkda_before", package / "__init__.py",
                                                  submodule_search_locations=[str(package)])
    sys.modules["libkda_before"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return importlib.import_module("libkda_before.arrays")


def in_place(x):
    """libkda.arrays on outputs that are there."""
    host = [np.array(y) for y in x]
    o, final = np.empty_like(host[2]), np.empty_like(host[5])
    return lambda: arrays.forward(*host[:5], initial_state=host[5], o=o, final_state=final, **FLAGS)


def own_backward(x, d_o, d_s):
    host, d_o, d_s = [np.array(y) for y in x], np.array(d_o), np.array(d_s)

    def run():
        o, final = arrays.forward(*host[:5], initial_state=host[5], output_final_state=True, **FLAGS)
        return arrays.backward(*host[:5], initial_state=host[5], d_o=d_o, d_final_state=d_s, **FLAGS)
    return run


def medians(seconds, **methods):
    """The median of each method's times, in ms: all in turns, until `seconds` have gone by for each."""
    for f in methods.values():
        jax.block_until_ready(f())
    times, end = {name: [] for name in methods}, time.perf_counter() + seconds * len(methods)
    while time.perf_counter() < end or len(times[next(iter(times))]) < 3:
        for name, f in methods.items():
            start = time.perf_counter()
            jax.block_until_ready(f())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) * 1e3 for name, found in times.items()}


def forward_row(seconds, T, H):
    x = inputs(1, T, H)
    served, called = jax.jit(ffi), jax.jit(callback)
    return medians(seconds, arrays=in_place(x), ffi=lambda: served(*x)) | medians(seconds, callback=lambda: called(*x))


def gradients_row(seconds, T, H):
    """A forward and all gradients; the greatest distance from libkda's own."""
    x = inputs(1, T, H)
    d_o, d_s = (jnp.cos(y) for y in ffi(*x))

    def gradients(f):
        def of(*x):
            return jax.vjp(f, *x)[1]((d_o, d_s))
        return jax.jit(of)
    mine, theirs = gradients(ffi), gradients(scan)
    own = own_backward(x, d_o, d_s)
    expected = own()
    expected = (*expected[:5], expected.d_initial_state)
    distance = max(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
                   for a, b in zip(mine(*x), expected))
    return medians(seconds, arrays=own, ffi=lambda: mine(*x)) | medians(seconds, scan=lambda: theirs(*x)) | {
        "distance": float(distance)}


def decode_row(seconds, B, H, before=None):
    x = inputs(B, 1, H)
    step = jax.jit(functools.partial(kda.decode, **FLAGS), donate_argnames="state")
    kept, called = jax.jit(functools.partial(kda.decode, **FLAGS)), jax.jit(callback)
    state = [x[5] + 0]

    def donated():
        o, state[0] = step(*x[:5], state[0])
        return o
    methods = dict(ffi=donated, not_donated=lambda: kept(*x), callback=lambda: called(*x))
    if before:
        older = jax.jit(functools.partial(callback, around=before))
        methods["callback_before"] = lambda: older(*x)
    return medians(seconds, **methods)


def loop_row(seconds, steps, H):
    """Steps of decode in one jit."""
    x = inputs(1, steps, H)

    def loop(step):
        token = lambda i, x: tuple(jax.lax.dynamic_slice_in_dim(y, i, 1, 1) for y in x)
        return jax.jit(lambda s, *x: jax.lax.fori_loop(0, steps, lambda i, s: step(*token(i, x), s)[1], s))
    mine, theirs = loop(functools.partial(kda.decode, **FLAGS)), loop(callback)
    return medians(seconds, ffi=lambda: mine(x[5], *x[:5]), callback=lambda: theirs(x[5], *x[:5]))


def vmap_row(seconds, entries, T, H):
    x = [jnp.stack([y] * entries) for y in inputs(1, T, H)]
    folded, alone = jax.jit(jax.vmap(ffi)), jax.jit(ffi)
    return medians(seconds, ffi=lambda: folded(*x),
                   single_calls=lambda: [alone(*(y[i] for y in x)) for i in range(entries)])


ROWS = {
    "forward, 1,000 tokens, 4 heads": lambda s, _: forward_row(s, 1000, 4),
    "forward, 4,096 tokens, 4 heads": lambda s, _: forward_row(s, 4096, 4),
    "forward and gradients, 1,000 tokens, 4 heads": lambda s, _: gradients_row(s, 1000, 4),
    "decode, batch 1, 4 heads": lambda s, before: decode_row(s, 1, 4, before),
    "decode, batch 8, 32 heads": lambda s, before: decode_row(s, 8, 32, before),
    "64 decode steps in one jit, 4 heads": lambda s, _: loop_row(s, 64, 4),
    "vmap of 8, 200 tokens, 4 heads": lambda s, _: vmap_row(s, 8, 200, 4),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2, help="for each method of each row")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name has it")
    parser.add_argument("--before", metavar="FOLDER", help="of an older libkda: decode has a callback around that one too")
    parser.add_argument("--json", metavar="FILE", help="where the rows are written")
    arguments = parser.parse_args()
    machine = evidence.machine()
    before = arrays_of(arguments.before) if arguments.before else None
    jax.config.update("jax_platforms", "cpu")
    print(f"libkda {__version__}, JAX {jax.__version__}, D = {D}, float32; medians in ms")
    rows = {}
    for name, measure in ROWS.items():
        if arguments.only not in name:
            continue
        rows[name] = row = measure(arguments.seconds, before)
        ratios = (f"{row['ffi'] / row[key]:.2f} of {key}" for key in ("arrays", "callback", "callback_before") if key in row)
        print(f"{name:46}", *(f"{key} {value:.3g}" for key, value in row.items()), *ratios, sep="  ", flush=True)
    if arguments.json:
        options = [f"--seconds {arguments.seconds:g}", *["--before FOLDER"] * bool(before)]
        evidence.write(arguments.json, {"command": " ".join(["bench/jax_bench.py", *options])} | machine | {
            "libkda": __version__, "jax": jax.__version__, "rows": rows})


if __name__ == "__main__":
    main()
