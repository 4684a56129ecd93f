# SPDX-License-Identifier: Apache-2.0
"""libkda.jax against a scan in JAX that JAX differentiates, and against libkda.arrays. On a GPU, with a JAX that has
CUDA: KDA_TEST_DEVICE=cuda python3 -m pytest --noconftest python/tests/test_jax.py"""
import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from libkda import arrays  # noqa: E402
from libkda import jax as kda  # noqa: E402

DEVICE = os.environ.get("KDA_TEST_DEVICE", "cpu")
jax.config.update("jax_platforms", DEVICE)
jax.config.update("jax_default_matmul_precision", "highest")  # of the reference
# Relative L2: fp32 arithmetic; 16-bit operands on a GPU. Gradients of a GPU are sums in another order.
ROUNDING = {"cpu": {"float32": 2e-6, "float16": 4e-4, "bfloat16": 4e-3},
            "cuda": {"float32": 3e-6, "float16": 1e-3, "bfloat16": 8e-3}}[DEVICE]
GRADIENTS = {"cpu": 5e-6, "cuda": 2e-5}[DEVICE]
FLAGS = dict(beta_mode="sigmoid", qk_l2norm=True)
on_the_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="host memory is what arrays read, and values are checked")


def reference(q, k, v, g, beta, s, A_log=None, dt_bias=None, bound=-5.0):
    """The recurrence, token by token."""
    if A_log is not None:
        g = bound * jax.nn.sigmoid(jnp.exp(A_log)[:, None] * (g + dt_bias))
    g = jnp.broadcast_to(g, (*v.shape[:3], q.shape[3]))
    norm = lambda x: x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    q, k = (jnp.repeat(norm(x), v.shape[2] // q.shape[2], axis=2) for x in (q, k))

    def step(S, x):
        q, k, v, g, b = x
        S = S * jnp.exp(g)[..., None]
        e = (v - jnp.einsum("bhkv,bhk->bhv", S, k)) * b[..., None]
        S = S + k[..., None] * e[..., None, :]
        return S, jnp.einsum("bhkv,bhk->bhv", S, q) * q.shape[-1] ** -0.5
    s, o = jax.lax.scan(step, s, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, jax.nn.sigmoid(beta))))
    return jnp.moveaxis(o, 0, 1), s


def inputs(seed=0, B=2, T=70, H=2, HV=4, K=32, V=48, dtype=jnp.float32):
    """q, k, v, g, beta, states; A_log, dt_bias."""
    keys = jax.random.split(jax.random.key(seed), 8)
    row = lambda key, *shape: jax.random.normal(key, shape, jnp.float32)
    x = [row(keys[0], B, T, H, K), row(keys[1], B, T, H, K), row(keys[2], B, T, HV, V),
         -jnp.abs(row(keys[3], B, T, HV, K)), row(keys[4], B, T, HV)]
    return ([*(y.astype(dtype) for y in x), row(keys[5], B, HV, K, V)], row(keys[6], HV) * 0.1,
            row(keys[7], HV, K) * 0.1)


def ours(q, k, v, g, beta, s, A_log=None, dt_bias=None, **more):
    return kda.forward(q, k, v, g, beta, initial_state=s, A_log=A_log, dt_bias=dt_bias,
                       gate_mode="log" if A_log is None else "bounded", **FLAGS, **more)


def error(a, b):
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    assert a.shape == b.shape and not np.isnan(a).any()
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def loss(f):
    def value(*x):
        o, s = f(*x)
        return (o.astype(jnp.float32) ** 2).sum() + (s * jnp.cos(jnp.arange(s.size).reshape(s.shape))).sum()
    return value


@pytest.mark.parametrize("gates", ["log", "bounded", "head", "head, bounded"])
def test_forward_and_every_gradient(gates):
    x, A_log, dt_bias = inputs()
    one_a_head = gates.startswith("head")
    if one_a_head:
        x[3], dt_bias = x[3][..., 0], dt_bias[:, 0]
    x = [*x, A_log, dt_bias] if "bounded" in gates else x

    def expected(q, k, v, g, beta, s, A_log=None, dt_bias=None):
        if one_a_head:
            g, dt_bias = g[..., None], None if dt_bias is None else dt_bias[:, None]
        return reference(q, k, v, g, beta, s, A_log, dt_bias)
    for a, b in zip(jax.jit(ours)(*x), expected(*x)):
        assert error(a, b) < ROUNDING["float32"]
    numbers = tuple(range(len(x)))
    for name, a, b in zip("q k v g beta state A_log dt_bias".split(), jax.jit(jax.grad(loss(ours), numbers))(*x),
                          jax.grad(loss(expected), numbers)(*x)):
        assert error(a, b) < GRADIENTS, name


@on_the_cpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_those_of_the_library(dtype):
    x, A_log, dt_bias = inputs(T=150, dtype=dtype)
    (o, s), pull = jax.vjp(ours, *x, A_log, dt_bias)
    d_o, d_s = jnp.cos(o), jnp.sin(s)
    host = [np.asarray(y) for y in (*x, A_log, dt_bias, d_o, d_s)]
    q, k, v, g, beta, state, A_log, dt_bias, d_o_host, d_s_host = host
    expected = arrays.backward(q, k, v, g, beta, initial_state=state, A_log=A_log, dt_bias=dt_bias, gate_mode="bounded",
                               d_o=d_o_host, d_final_state=d_s_host, **FLAGS)
    found = dict(zip(("dq", "dk", "dv", "dg", "dbeta", "d_initial_state", "dA_log", "ddt_bias"), pull((d_o, d_s))))
    for name, gradient in found.items():
        assert gradient.dtype == getattr(expected, name).dtype
        assert error(gradient, getattr(expected, name)) < 1e-6, name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits(dtype):
    x, *_ = inputs(dtype=dtype)
    o, s = jax.jit(ours)(*x)
    assert o.dtype == dtype and s.dtype == jnp.float32
    assert error(o.astype(jnp.float32), reference(*(y.astype(jnp.float32) for y in x))[0]) < ROUNDING[dtype]
    assert jax.grad(loss(ours))(*x).dtype == dtype


def test_v_first_scale_and_states_of_bfloat16():
    x, *_ = inputs()
    state = x[5].astype(jnp.bfloat16)
    expected = ours(*x[:5], state.astype(jnp.float32), scale=0.25)
    o, s = ours(*x[:5], state.swapaxes(2, 3), state_layout="vk", scale=0.25)
    assert error(o, expected[0]) < ROUNDING["float32"] and error(s.swapaxes(2, 3), expected[1]) < ROUNDING["float32"]
    assert jax.grad(loss(ours), 5)(*x[:5], state).dtype == jnp.bfloat16


@on_the_cpu
def test_segments_and_invariance():
    """Other bits from 3 segments, the same ones without, none of them wrong; in gradients too."""
    x, _, _ = inputs(B=1, T=200)
    x[3] = x[3] / 100  # no state is forgotten
    call = lambda **how: jax.jit(lambda *y: ours(*y, **how)[0])(*x)
    whole, cut = call(), call(context_parallel=3)
    assert error(cut, whole) < ROUNDING["float32"] and (cut != whole).any()
    assert (call(context_parallel="off") == whole).all()
    gradient = lambda **how: jax.grad(loss(lambda *y: ours(*y, **how)), 2)(*x)
    assert error(gradient(context_parallel=3), gradient()) < GRADIENTS
    # This policy cuts by the tokens of the batch, or of a sequence alone.
    x, _, _ = inputs(B=4, T=200, H=4)
    x[3] = x[3] / 100
    batch, alone = call(context_parallel="flashkda"), call(context_parallel="flashkda", batch_invariant=True)
    x = [y[:1] for y in x]
    first = call(context_parallel="flashkda")
    assert (batch[:1] != first).any() and (alone[:1] == first).all()


def test_states_that_begin():
    x, *_ = inputs()
    mask = jnp.array([True, False])
    begun = [*x[:5], x[5] * mask[:, None, None, None]]
    for a, b in zip(ours(*x, has_state=mask), ours(*begun)):
        assert (a == b).all()
    gradient = jax.grad(loss(functools.partial(ours, has_state=mask)), 5)(*x)
    assert gradient[0].any() and not gradient[1].any()
    absent = jax.grad(loss(lambda *y: kda.forward(*y, **FLAGS)))(*x[:5])
    assert error(absent, jax.grad(loss(ours))(*x[:5], x[5] * 0)) < 1e-6


def test_vmap_is_one_folded_call_with_the_same_bits():
    batches = [inputs(seed)[0] for seed in range(3)]
    stacked = [jnp.stack(y) for y in zip(*batches)]
    for i, (o, s) in enumerate(zip(*jax.jit(jax.vmap(ours))(*stacked))):
        alone = ours(*batches[i])
        assert (o == alone[0]).all() and (s == alone[1]).all()


def test_vmap_of_gradients_and_of_parameters():
    x, A_log, dt_bias = inputs()
    many = jnp.stack([A_log, A_log + 0.5, A_log - 0.5])
    gradient = jax.grad(loss(ours), (0, 2, 6))
    batched = jax.jit(jax.vmap(gradient, in_axes=(None,) * 6 + (0, None)))(*x, many, dt_bias)
    for i in range(3):
        for a, b in zip(batched, gradient(*x, many[i], dt_bias)):
            assert error(a[i], b) < 1e-6
    qs = jnp.stack([x[0], -x[0], 2 * x[0]])
    batched = jax.vmap(jax.grad(loss(ours), (2, 6)), in_axes=(0,) + (None,) * 7)(qs, *x[1:], A_log, dt_bias)
    for i in range(3):  # a sum of each entry, not of all
        for a, b in zip(batched, jax.grad(loss(ours), (2, 6))(qs[i], *x[1:], A_log, dt_bias)):
            assert error(a[i], b) < 1e-6


def test_vmaps_of_different_arguments():
    x, *_ = inputs()
    nested = jax.vmap(jax.vmap(ours, in_axes=(0,) + (None,) * 5), in_axes=(None, None, 0) + (None,) * 3)
    qs, vs = jnp.stack([x[0], -x[0]]), jnp.stack([x[2], 2 * x[2], 3 * x[2]])
    o, s = nested(qs, x[1], vs, *x[3:])
    assert o.shape == (3, 2, *x[2].shape) and s.shape == (3, 2, *x[5].shape)
    for i in range(3):
        for j in range(2):
            alone = ours(qs[j], x[1], vs[i], *x[3:])
            assert error(o[i, j], alone[0]) < 1e-6 and error(s[i, j], alone[1]) < 1e-6


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int64])
def test_packed_sequences(dtype):
    ends = [0, 30, 30, 70]
    x, *_ = inputs(B=1)
    states = jnp.concatenate([x[5] * i for i in range(3)])
    gradient = jax.grad(loss(ours), (0, 5))
    with jax.enable_x64(dtype == jnp.int64):
        packed = jnp.array(ends, dtype)
        assert packed.dtype == dtype
        o, s = jax.jit(ours)(*x[:5], states, cu_seqlens=packed)
        dq, ds = jax.grad(lambda *y: (ours(*y, cu_seqlens=packed)[0] ** 2).sum(), (0, 5))(*x[:5], states)
    for i in range(3):
        part = [y[:, ends[i]:ends[i + 1]] for y in x[:5]]
        if part[0].shape[1] == 0:
            assert (s[i] == states[i]).all()
            continue
        alone = ours(*part, states[i:i + 1])
        assert error(o[:, ends[i]:ends[i + 1]], alone[0]) < 1e-6 and error(s[i], alone[1][0]) < 1e-6
        gradient = jax.grad(lambda *y: (ours(*y)[0] ** 2).sum(), (0, 5))(*part, states[i:i + 1])
        assert error(dq[:, ends[i]:ends[i + 1]], gradient[0]) < 1e-5 and error(ds[i], gradient[1][0]) < 1e-5


def test_vmap_of_packed_sequences():
    x, *_ = inputs(B=1)
    states = jnp.concatenate([x[5], -x[5]])
    ends = jnp.array([[0, 10, 70], [0, 50, 70]], jnp.int32)
    o, s = jax.vmap(lambda cu: ours(*x[:5], states, cu_seqlens=cu))(ends)
    for i in range(2):
        alone = ours(*x[:5], states, cu_seqlens=ends[i])
        assert (o[i] == alone[0]).all() and (s[i] == alone[1]).all()


@pytest.mark.parametrize("head_gates", [False, True])
def test_decode_goes_on_from_a_prefill_in_the_memory_of_the_state(head_gates):
    x, *_ = inputs()
    if head_gates:
        x[3] = x[3][..., 0]
    whole, _ = ours(*x)
    _, state = ours(*(y[:, :60] for y in x[:5]), x[5])
    step = jax.jit(functools.partial(kda.decode, **FLAGS), donate_argnames="state")
    for t in range(60, 70):
        place = state.unsafe_buffer_pointer()
        o, state = step(*(y[:, t:t + 1] for y in x[:5]), state)
        assert state.unsafe_buffer_pointer() == place
        assert error(o, whole[:, t:t + 1]) < ROUNDING["float32"]


def test_decode_without_donation_leaves_the_state_alone():
    x, *_ = inputs(T=1)
    before = np.array(x[5])
    o, state = jax.jit(functools.partial(kda.decode, **FLAGS))(*x)
    assert (x[5] == before).all() and not (state == before).all()
    looped = jax.jit(lambda s, *y: jax.lax.fori_loop(0, 5, lambda i, s: kda.decode(*y, s, **FLAGS)[1], s))(x[5], *x[:5])
    for _ in range(4):
        _, state = kda.decode(*x[:5], state, **FLAGS)
    assert (looped == state).all()


def test_vmap_of_decode_has_a_state_for_every_entry():
    x, *_ = inputs(T=3)
    vs = jnp.stack([x[2], 2 * x[2], -x[2]])
    o, s = jax.jit(jax.vmap(lambda v: kda.decode(x[0], x[1], v, *x[3:], **FLAGS)))(vs)
    states = jnp.stack([x[5], 2 * x[5]])
    pairs, _ = jax.vmap(jax.vmap(lambda s, v: kda.decode(x[0], x[1], v, *x[3:5], s, **FLAGS), (None, 0)), (0, None))(
        states, vs)
    assert pairs.shape == (2, 3, *x[2].shape)
    for i in range(3):
        alone = kda.decode(x[0], x[1], vs[i], *x[3:], **FLAGS)
        assert (o[i] == alone[0]).all() and (s[i] == alone[1]).all() and (pairs[0, i] == alone[0]).all()
        assert (pairs[1, i] == kda.decode(x[0], x[1], vs[i], *x[3:5], states[1], **FLAGS)[0]).all()


def test_pool():
    """Prompts of two requests into slots, then a token of each beside a padded row; slot 0 and the others stay."""
    x, *_ = inputs(B=1, T=70)
    other = inputs(seed=1, B=1, T=70)[0]
    expected = [ours(*x[:5], x[5] * 0), ours(*other[:5], other[5] * 0)]
    pool = jnp.full((6, *x[5].shape[1:]), jnp.nan)
    packed = [jnp.concatenate([a[:, :69], b[:, :40]], axis=1) for a, b in zip(x[:5], other[:5])]
    fill = jax.jit(functools.partial(kda.prefill, first_slot=1, **FLAGS), donate_argnames="state")
    place = pool.unsafe_buffer_pointer()
    new = jnp.zeros(2, bool)
    ends = jnp.array([0, 69, 109], jnp.int32)
    o, pool = fill(*packed, pool, jnp.array([4, 2], jnp.int32), has_state=new, cu_seqlens=ends)
    assert error(o[:, :69], expected[0][0][:, :69]) < ROUNDING["float32"]
    o, pool = fill(*(y[:, 40:69] for y in other[:5]), pool, jnp.array([2], jnp.int32))  # the next piece of a prompt
    assert error(o, expected[1][0][:, 40:69]) < ROUNDING["float32"]
    step = jax.jit(functools.partial(kda.decode, first_slot=1, **FLAGS), donate_argnames="state")
    rows = [jnp.concatenate([b[:, 69:], a[:, 69:], a[:, 69:]]) for a, b in zip(x[:5], other[:5])]
    o, pool = step(*rows, pool, indices=jnp.array([2, 0, 4], jnp.int32))
    assert pool.unsafe_buffer_pointer() == place
    assert error(o[0], expected[1][0][0, 69:]) < ROUNDING["float32"] and not o[1].any()
    assert error(o[2], expected[0][0][0, 69:]) < ROUNDING["float32"]
    for slot, (_, state) in ((4, expected[0]), (2, expected[1])):
        assert error(pool[slot], state[0]) < ROUNDING["float32"]
    assert jnp.isnan(pool[jnp.array([0, 1, 3, 5])]).all()


def test_checkpoint_and_scan_over_layers():
    x, *_ = inputs()
    layer = lambda f: lambda v, _: (f(x[0], x[1], v, *x[3:])[0], None)
    layers = lambda f: lambda v: jax.lax.scan(layer(f), v, None, length=3)[0].sum()
    expected = jax.grad(layers(reference))(x[2])
    assert error(jax.jit(jax.grad(jax.checkpoint(layers(ours))))(x[2]), expected) < 1e-5


FITS = dict(zip(("q", "k", "v", "g", "beta"), (np.zeros(shape, np.float32) for shape in (
    (2, 8, 2, 32), (2, 8, 2, 32), (2, 8, 4, 48), (2, 8, 4, 32), (2, 8, 4)))))


@pytest.mark.parametrize("change, kind, text", [
    (dict(q=None), TypeError, "^q must be an array, got NoneType"),
    (dict(k="k"), TypeError, "^k must be an array, got str"),
    (dict(q=np.zeros((2, 8, 2, 32), np.int32)), TypeError, "^q must be float32, bfloat16 or float16, got int32"),
    (dict(v=np.zeros((2, 8, 4), np.float32)), ValueError, "^v must have shape"),
    (dict(v=np.zeros((2, 8, 3, 48), np.float32)), ValueError, r"must be evenly divisible by num_qk_heads"),
    (dict(g=np.zeros((2, 8, 4, 1), np.float32)), ValueError, r"^g must have shape .*got \[2, 8, 4, 1\]"),
    (dict(beta=np.zeros((2, 8, 2), np.float32)), ValueError, r"^beta must have shape"),
    (dict(gate_mode="none"), ValueError, "^gate_mode must be one of log, softplus, bounded, got 'none'"),
    (dict(state_layout="kk"), ValueError, "^state_layout must be one of"),
    (dict(scale="x"), TypeError, "^scale must be a number"),
    (dict(context_parallel=0), ValueError, "^context_parallel must be .* or 1 to 1048576 segments, got 0"),
    (dict(batch_invariant=1), TypeError, "^batch_invariant must be a bool, got 1"),
    (dict(lower_bound=1e39), ValueError, "^lower_bound must be finite"),
    (dict(A_log=np.zeros(3, np.float32)), ValueError, r"^A_log must have shape \[HV\]=\[4\], got \[3\]"),
    (dict(dt_bias=np.zeros(4, np.float32)), ValueError, r"^dt_bias must have shape \[HV, K\] where"),
    (dict(cu_seqlens=np.array([0, 4, 8], np.int32)), ValueError, "^q must have B = 1 with cu_seqlens, got 2"),
    (dict(has_state=np.ones(2, bool)), ValueError, "^has_state is given without initial_state"),
    (dict(initial_state=np.zeros((2, 4, 48, 32), np.float32)), ValueError, r"^initial_state must have shape"),
    (dict(initial_state=np.zeros((2, 4, 32, 48), np.float16)), TypeError, "^initial_state must be float32 or bfloat16"),
])
def test_what_does_not_fit_is_refused_when_traced(change, kind, text):
    with pytest.raises(kind, match=text):
        jax.eval_shape(lambda: kda.forward(**dict(FITS, **change)))


@pytest.mark.parametrize("change, text", [
    (dict(state=np.zeros((3, 4, 32, 48), np.float32)), r"^state must have shape \[N, HV, K, V\]=\[2, 4, 32, 48\]"),
    (dict(indices=np.array([1, 0, 2], np.int32)), r"^indices must have shape \[N\]=\[2\], got \[3\]"),
    (dict(first_slot=-1), "^first_slot must be 0 to"),
])
def test_what_does_not_fit_a_pool(change, text):
    with pytest.raises(ValueError, match=text):
        kda.decode(**(dict(FITS, state=np.zeros((2, 4, 32, 48), np.float32)) | change))


@on_the_cpu
@pytest.mark.parametrize("call, change, text", [
    (kda.forward, dict(gate_mode="softplus"), "A_log: required by gate softplus"),
    (kda.forward, dict(gate_mode="softplus", A_log=np.full(4, 89, np.float32)), "A_log: entry 0 = 89 is above 70"),
    (kda.decode, dict(indices=np.array([7, 1], np.int32)), "INVALID_ARGUMENT: indices: entry 0 = 7"),
    (kda.decode, dict(indices=np.array([1, 1], np.int32)), "INVALID_ARGUMENT: indices: slot 1 would be written twice"),
    (kda.prefill, dict(indices=np.array([0, 4], np.int32)), "INVALID_ARGUMENT: indices: entry 1 = 4"),
])
def test_what_is_refused_by_its_values(call, change, text):
    state = {} if call is kda.forward else dict(state=np.zeros((4, 4, 32, 48), np.float32))
    with pytest.raises(Exception, match=text):
        jax.block_until_ready(call(**FITS, **state, **change))


@on_the_cpu
def test_packed_lengths_are_looked_at():
    x, *_ = inputs(B=1)
    with pytest.raises(Exception, match="cu_seqlens: "):
        jax.block_until_ready(ours(*x, cu_seqlens=jnp.array([0, 71], jnp.int32)))


def test_decode_takes_few_tokens_and_has_no_gradients():
    x, *_ = inputs(T=9)
    with pytest.raises(Exception, match="num_tokens: "):
        jax.block_until_ready(kda.decode(*x, **FLAGS))
    with pytest.raises(NotImplementedError, match="have no gradients"):
        jax.grad(lambda q: kda.decode(q, *(y[:, :1] for y in x[1:5]), x[5], **FLAGS)[0].sum())(x[0][:, :1])


def test_a_package_without_the_handlers_says_so(monkeypatch, tmp_path):
    kda._register.cache_clear()
    monkeypatch.setattr(kda, "FOLDER", tmp_path)
    with pytest.raises(ImportError, match="built where there was no jaxlib"):
        ours(*inputs()[0])


def test_a_jax_that_is_too_old_says_so(monkeypatch):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError("the handler's API version (0.5) is incompatible")
    kda._register.cache_clear()
    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    with pytest.raises(ImportError, match=r"does not take .* built with a newer one: .*\(0.5\)"):
        ours(*inputs()[0])


def test_bench(tmp_path):
    bench = pathlib.Path(__file__).resolve().parents[2] / "bench" / "jax_bench.py"
    run = subprocess.run([sys.executable, bench, "--seconds", "0.2", "--only", "batch 1", "--json",
                          tmp_path / "rows.json"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (name, times), = json.loads((tmp_path / "rows.json").read_text())["rows"].items()
    assert name == "decode, batch 1, 4 heads" and times["ffi"] < 0.5 * times["callback"], run.stdout
