# SPDX-License-Identifier: Apache-2.0
"""decode_with_ring in turns with an engine's own steps on the same tensors, which are restated here in float64."""
import pytest
import torch
from common import distance

import libkda
from libkda import ops

H, SLOTS, L = 2, 6, 5
MODES = dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, state_v_first=True)


def normalised(x):
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def engine_step(x, pool, ring, slots, counts, flush, A_log, dt_bias):
    """SGLang's step of one token: rows [0, count) on top of the state, the token's row behind them; a ring with L - 1
    rows, or one that is told to flush, leaves the state behind the token in place of a row."""
    q, k, v, g, beta = (t[:, 0].double() for t in x.values())
    q, k = normalised(q), normalised(k)
    g = -A_log.double().exp()[:, None] * torch.nn.functional.softplus(g + dt_bias.double())
    o = torch.zeros_like(v)
    for n, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        state = pool[slot].double()
        for i in range(int(counts[n])):
            state = state * ring.g[slot, :, i].double().exp()[:, None] + (
                ring.v_new[slot, :, i, :, None].double() * ring.k[slot, :, i, None].double())
        state = state * g[n].exp()[:, None]
        v_new = beta[n].sigmoid()[:, None] * (v[n] - (state * k[n][:, None]).sum(-1))
        state = state + v_new[..., None] * k[n][:, None]
        o[n] = (state * q[n][:, None]).sum(-1) * q.shape[-1] ** -0.5
        if counts[n] == L - 1 or flush[n]:
            pool[slot] = state
        else:
            ring.k[slot, :, counts[n]], ring.g[slot, :, counts[n]], ring.v_new[slot, :, counts[n]] = k[n], g[n], v_new
    return o[:, None]


@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_in_turns_with_an_engine(dtype):
    device = torch.get_default_device()
    D = 128 if device.type == "cuda" else 24
    torch.manual_seed(1)
    A_log, dt_bias = torch.randn(H), torch.randn(H, D)
    pool = torch.randn(SLOTS, H, D, D).mul_(0.1).to(dtype)
    nan = lambda dtype: torch.full((3, SLOTS, H, L, D), float("nan"), dtype=dtype)[1]  # a layer of several
    ring = libkda.Ring(nan(dtype), nan(torch.float32), nan(dtype))
    truth = pool.double(), libkda.Ring(*(rows.double() for rows in ring))
    slots, counts = torch.tensor([4, -1, 2]), torch.zeros(3, dtype=torch.int32)
    for step in range(14):
        x = {name: torch.randn(3, 1, H, D) for name in "qkvg"} | dict(beta=torch.randn(3, 1, H))
        flush = torch.tensor([0, 0, int(step in (2, 3))], dtype=torch.int32)
        expected = engine_step(x, *truth, slots, counts, flush, A_log, dt_bias)
        if step % 3 == 2:
            engine_step(x, pool, ring, slots, counts, flush, A_log, dt_bias)
        else:
            o = libkda.decode_with_ring(**x, pool=pool, slots=slots, ring=ring, counts=counts, flush=flush, A_log=A_log,
                                        dt_bias=dt_bias.flatten(), **MODES)
            assert distance(o, expected) < (1e-5 if dtype is torch.float32 else 2e-2) and not o[1].any()
        counts = torch.where((counts == L - 1) | (flush != 0), 0, counts + 1).int()
    for mine, theirs in ((pool, truth[0]), *zip(ring, truth[1])):
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert distance(mine.nan_to_num(), theirs.nan_to_num()) < (1e-5 if dtype is torch.float32 else 3e-2)


def call(**changes):
    rows = dict(q=torch.randn(1, 1, H, 8), k=torch.randn(1, 1, H, 8), v=torch.randn(1, 1, H, 8),
                g=torch.randn(1, 1, H, 8), beta=torch.randn(1, 1, H))
    ring = libkda.Ring(*(torch.zeros(SLOTS, H, L, 8) for _ in range(3)))
    part = {name: changes.pop(name) for name in ("ring_k", "ring_g") if name in changes}
    ring = ring._replace(**{name.removeprefix("ring_"): x for name, x in part.items()})
    given = dict(pool=torch.zeros(SLOTS, H, 8, 8), slots=torch.tensor([1]), ring=ring, counts=torch.tensor([0]))
    return libkda.decode_with_ring(**rows | given | changes)


@pytest.mark.parametrize("changes, error, text", [
    (dict(ring=None), TypeError, "ring must be a libkda.Ring, got NoneType"),
    (dict(ring_g=torch.zeros(SLOTS, H, L, 8, dtype=torch.bfloat16)), TypeError, "ring.g must be float32, got"),
    (dict(ring_k=torch.zeros(SLOTS, H, L + 1, 8)), ValueError, "ring.g must have shape"),
    (dict(counts=torch.tensor([L])), ValueError, r"counts: entry 0 = 5 is outside 0\.\.4"),
    (dict(counts=torch.tensor([0, 1])), ValueError, "counts must have shape"),
    (dict(flush=torch.zeros(1)), TypeError, "flush must be"),
    (dict(g=torch.randn(1, 1, H)), ValueError, "g")])
def test_wrong_use_is_refused_by_name(changes, error, text):
    with pytest.raises(error, match=f"^{text}"):
        call(**changes)


def test_the_operator_passes_torch_checks():
    rows = *(torch.randn(2, 1, H, 8) for _ in range(4)), torch.randn(2, 1, H)
    i32 = lambda *values: torch.tensor(values, dtype=torch.int32)
    torch.library.opcheck(torch.ops.libkda.update_with_ring.default, (
        *rows, torch.zeros(2, 1, H, 8), torch.zeros(SLOTS, H, 8, 8), i32(1, 3),
        *(torch.zeros(SLOTS, H, L, 8) for _ in range(3)), i32(0, 2), i32(0, 1), None, None, ops.GATE_LOG,
        ops.BETA_SIGMOID, -5.0, 0.125, True, False))
