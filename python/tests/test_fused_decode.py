# SPDX-License-Identifier: Apache-2.0
"""The decode step of a whole layer against its three operations in float64."""
import pytest
import torch
import torch.nn.functional as F

import libkda
from common import distance

SLOTS = 6


def make(device, N=3, T=1, H=2, D=128, W=4, dtype=torch.bfloat16, state=torch.float32):
    """The arguments as vLLM has them: x a slice of a projection, pools in pages of one buffer."""
    normal = lambda *shape: torch.randn(*shape, device=device)
    C = 3 * H * D
    batch = (N, T) if T > 1 else (1, N)
    pages = normal(SLOTS, C * (W - 1) + 64).to(dtype)
    states = normal(SLOTS, H * D * D + 64).to(state) * 0.1
    x = normal(*((N, T) if T > 1 else (N,)), C + 8).to(dtype)[..., :C]
    return dict(x=x, weight=normal(3, W, H * D), bias=None,
                conv_state=pages.as_strided((SLOTS, C, W - 1), (pages.shape[1], 1, C)),
                raw_g=normal(*batch, H, D).to(dtype), raw_beta=normal(*batch, H + 3)[..., :H].to(dtype),
                A_log=normal(H) * 0.3, dt_bias=normal(H * D) * 0.3,
                state_indices=torch.tensor([4, 0, 2][:N], dtype=torch.int32, device=device),
                state=states.as_strided((SLOTS, H, D, D), (states.shape[1], D * D, D, 1)), lower_bound=-5.0,
                output_gate=normal(*((N, T) if T > 1 else (N,)), H, D).to(dtype), norm_weight=normal(D))


def exact(a, first_slot=1, v_first=True, activation=torch.sigmoid, has_state=None):
    """out [N, T, H, D], and both pools behind the step, in float64."""
    N, (H, D) = a["x"].shape[0], a["raw_g"].shape[-2:]
    x = a["x"].double().reshape(N, -1, 3 * H * D)
    T, W = x.shape[1], a["weight"].shape[1]
    weight = a["weight"].double().transpose(1, 2).flatten(0, 1)
    g, beta = a["raw_g"].double().reshape(N, T, H, D), a["raw_beta"].double().reshape(N, T, H).sigmoid()
    conv, pool, out = a["conv_state"].double().clone(), a["state"].double().clone(), x.new_zeros(N, T, H, D)
    for n, slot in enumerate(a["state_indices"].tolist()):
        if slot < first_slot:
            continue
        fresh = has_state is not None and not has_state[n]
        u = torch.cat([conv[slot] * (not fresh), x[n].T], 1)
        conv[slot] = u[:, -conv.shape[2]:]
        bias = None if a["bias"] is None else a["bias"].double()
        y = F.silu(F.conv1d(u[:, -(T + W - 1):][None], weight[:, None], bias, groups=3 * H * D))[0].T
        q, k, v = y.view(T, 3, H, D).unbind(1)
        unit = lambda t: t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        q, k = unit(q) * D ** -0.5, unit(k)
        raw = g[n] + (0 if a["dt_bias"] is None else a["dt_bias"].double().view(H, D))
        rate = torch.ones(H, 1, device=x.device) if a["A_log"] is None else a["A_log"].double().exp()[:, None]
        decay = (a["lower_bound"] * (rate * raw).sigmoid() if a["lower_bound"] else -rate * F.softplus(raw)).exp()
        S = pool[slot].transpose(1, 2).clone() if v_first else pool[slot].clone()
        S *= not fresh
        for t in range(T):
            S = S * decay[t][..., None]
            error = beta[n, t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", S, k[t]))
            S = S + k[t][..., None] * error[:, None]
            o = torch.einsum("hkv,hk->hv", S, q[t])
            if a["norm_weight"] is not None:
                o = o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * a["norm_weight"].double()
                if a["output_gate"] is not None:
                    o = o * activation(a["output_gate"].double().reshape(N, T, H, D)[n, t])
            out[n, t] = o
        pool[slot] = S.transpose(1, 2) if v_first else S
    return out, conv, pool


def expect_right(a, bound, **options):
    modes = {name: options[name] for name in ("first_slot", "has_state") if name in options}
    modes |= dict(state_v_first=options["v_first"]) if "v_first" in options else {}
    out, conv, pool = exact(a, **options)
    given = torch.full_like(a["raw_g"], float("nan"))
    assert libkda.fused_decode(**a, out=given, **modes) is given
    assert distance(given.reshape(out.shape), out) < bound
    assert torch.equal(a["conv_state"].double(), conv)
    assert distance(a["state"], pool) < bound


BOUND = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", BOUND)
def test_a_step(device, dtype):
    for change in (dict(), dict(lower_bound=None), dict(dt_bias=None), dict(output_gate=None),
                   dict(output_gate=None, norm_weight=None)):
        expect_right(make(device, dtype=dtype) | change, BOUND[dtype])
    biased = make(device, dtype=dtype, W=3)
    expect_right(biased | dict(bias=torch.randn(biased["x"].shape[-1], device=device)), BOUND[dtype])


@pytest.mark.parametrize("T", [2, 8])
def test_drafts_and_other_heads(device, T):
    expect_right(make(device, T=T, dtype=torch.float32), BOUND[torch.float32])
    expect_right(make(device, T=T, D=64, H=3, dtype=torch.float32), BOUND[torch.float32], v_first=False)


def test_new_sequences_and_no_slots(device):
    a = make(device, dtype=torch.float32)
    slots = torch.tensor([-7, 0, 1], dtype=torch.int32, device=device)
    expect_right(a | dict(state_indices=slots), BOUND[torch.float32], first_slot=0,
                 has_state=torch.tensor([True, False, True], device=device))
    slots = torch.arange(3, device=device, dtype=torch.int32)
    a = make(device, dtype=torch.float32)
    b = {name: x.clone() if name in ("state", "conv_state") else x for name, x in a.items()}
    out = libkda.fused_decode(**a | dict(state_indices=None))
    assert torch.equal(out, libkda.fused_decode(**b | dict(state_indices=slots), first_slot=0)) and out[:, 0].any()
    assert torch.equal(a["state"], b["state"]) and torch.equal(a["conv_state"], b["conv_state"])
    none = make(device)
    before = none["state"].clone(), none["conv_state"].clone()
    assert not libkda.fused_decode(**none | dict(state_indices=torch.zeros(3, dtype=torch.int64, device=device))).any()
    assert torch.equal(none["state"], before[0]) and torch.equal(none["conv_state"], before[1])


def test_weights_as_a_convolution_has_them(device):
    a = make(device)
    b = {name: x.clone() if name in ("state", "conv_state") else x for name, x in a.items()}
    b["weight"] = a["weight"].transpose(1, 2).flatten(0, 1)
    assert torch.equal(libkda.fused_decode(**a), libkda.fused_decode(**b))


def test_refusals(device):
    a = make(device)
    state, conv = a["state"].clone(), a["conv_state"].clone()
    for change, error, text in (
            (dict(raw_beta=a["raw_beta"][..., :1]), ValueError, "raw_beta must have shape"),
            (dict(raw_g=a["raw_g"].expand(2, -1, -1, -1)), ValueError, r"raw_g must have shape .* got \[2, 3, "),
            (dict(raw_g=a["raw_g"][0, :, None].expand(-1, 5, -1, -1)), ValueError,
             r"raw_g must have shape \[3, 1, 2, 128\] or \[1, 3, 2, 128\] \(tokens of x, \[3, 768\]\), got \[3, 5, "),
            (dict(raw_beta=a["raw_beta"][0, :, None].expand(-1, 2, -1)), ValueError, r"raw_beta must have shape \[3, "),
            (dict(output_gate=a["output_gate"][:, None].expand(-1, 2, -1, -1)), ValueError, "output_gate must have s"),
            (dict(out=torch.empty(3, 2, 2, 128, device=device)), ValueError, r"out must have shape .* got \[3, 2, 2, "),
            (dict(state=a["state"].half()), TypeError, "state must be float32 or bfloat16, got torch.float16"),
            (dict(norm_weight=None), ValueError, "output_gate needs norm_weight"),
            (dict(A_log=None, lower_bound=None), ValueError, "A_log is required by a softplus gate"),
            (dict(weight=a["weight"][:, :1]), ValueError, "taps of weight: is 1, must be 2 to 4"),
            (dict(conv_state=a["conv_state"][1:]), ValueError, "must have shape"),
            (dict(x=a["x"][None].expand(9, 3, -1).transpose(0, 1)), ValueError, "x must have 1 to 8 tokens")):
        with pytest.raises(error, match=text):
            libkda.fused_decode(**a | change)
        assert torch.equal(a["state"], state) and torch.equal(a["conv_state"], conv)
    with pytest.raises(NotImplementedError, match="updated in place"):
        libkda.fused_decode(**a | dict(x=a["x"].detach().requires_grad_()))


def test_compiled(device):
    a = make(device)
    b = {name: x.clone() if name in ("state", "conv_state") else x for name, x in a.items()}
    expected = libkda.fused_decode(**a)
    step = torch.compile(lambda **x: libkda.fused_decode(**x) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(step(**b), expected * 2)
    assert torch.equal(b["state"], a["state"]) and torch.equal(b["conv_state"], a["conv_state"])


def test_the_operator(device):
    a = make(device)
    g, beta = a["raw_g"].transpose(0, 1), a["raw_beta"].transpose(0, 1)
    rows = [a["x"][:, None], a["weight"], None, a["conv_state"], g, beta, a["A_log"], a["dt_bias"],
            a["state_indices"], a["state"], torch.empty(3, 1, 2, 128, device=device), None, None, None]
    modes = [2, 1, -5.0, 1.0, True, 1e-5, 2, 1, True]
    with pytest.raises(ValueError, match="weight must have shape"):
        torch.ops.libkda.fused_decode(*rows[:1], a["weight"][:2], *rows[2:], *modes)
    with pytest.raises(ValueError, match="scale must not be 0"):
        torch.ops.libkda.fused_decode(*rows, *modes[:3], 0.0, *modes[4:])
    with pytest.raises(ValueError, match="output_gate needs norm_weight"):
        torch.ops.libkda.fused_decode(*rows[:11], g, *rows[12:], *modes)
    torch.ops.libkda.fused_decode(*rows, *modes)
    assert rows[10].isfinite().all() and rows[10].any()
