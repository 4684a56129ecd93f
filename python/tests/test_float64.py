# SPDX-License-Identifier: Apache-2.0
"""Calls whose q is fp64 on the CPU are computed in float64, by the library's oracle: outputs, states and gradients."""
import pytest
import torch
import torch.nn.functional as F
from common import FLAGS, make, reference

from libkda import chunk_kda, fused_recurrent_kda, ops

GATES = ("log", "softplus", "bounded")


def problem(gates="log", dtype=torch.float64, **sizes):
    x, parameters, state = make(**dict(dict(B=1, T=7, H=1, HV=2, K=4, V=3), **sizes), gates=gates)
    tensors = dict(x, initial_state=state, **(parameters if gates != "log" else {}))
    return {name: t.detach().to(dtype) for name, t in tensors.items()}


def flags_of(gates):
    return dict(FLAGS, use_gate_in_kernel=gates != "log", lower_bound=-5.0 if gates == "bounded" else None)


def gradcheck(tensors, **flags):
    names = list(tensors)
    values = [t.requires_grad_() for t in tensors.values()]

    def outputs(*values):
        return tuple(y for y in chunk_kda(**dict(zip(names, values)), **flags) if y is not None)
    assert torch.autograd.gradcheck(outputs, values, eps=1e-6, atol=1e-6, rtol=1e-6, nondet_tol=0.0)


@pytest.mark.parametrize("gates", GATES)
def test_gradcheck(gates):
    """Every gradient, of parameters and states too."""
    gradcheck(problem(gates), **flags_of(gates))


@pytest.mark.parametrize("flags", [
    dict(use_qk_l2norm_in_kernel=False), dict(use_beta_sigmoid_in_kernel=False), dict(allow_neg_eigval=True),
    dict(scale=-0.7), dict(state_v_first=True), dict(output_final_state=False), dict(disable_recompute=True),
    dict(cu_seqlens=torch.tensor([0, 3, 3, 7]))], ids=lambda flags: next(iter(flags)))
def test_gradcheck_of_options(flags):
    tensors = problem("bounded", N=3 if "cu_seqlens" in flags else 1)
    if flags.get("state_v_first"):
        tensors["initial_state"] = tensors["initial_state"].mT.contiguous()
    gradcheck(tensors, **(flags_of("bounded") | flags))


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("function, T", [(chunk_kda, 70), (fused_recurrent_kda, 70), (fused_recurrent_kda, 3)])
def test_outputs_have_all_digits(function, T, gates):
    x = problem(gates, B=2, T=T, H=2, HV=4, K=16, V=8)
    found = function(**x, **flags_of(gates))
    rows = {name: x[name] for name in ("q", "k", "v", "g", "beta")}
    if gates != "log":  # naive's gates have their parameters in fp32
        raw, rate = rows["g"] + x["dt_bias"].view(4, 16), x["A_log"].exp()[:, None]
        rows["g"] = -rate * F.softplus(raw) if gates == "softplus" else -5 * (rate * raw).sigmoid()
    expected = reference(rows, {}, x["initial_state"])
    for a, b in zip(found, expected):
        assert a.dtype is b.dtype is torch.float64
        assert (a - b).norm() < 1e-13 * b.norm()


def test_other_types_beside_a_float64_q():
    x = problem("softplus")
    expected = chunk_kda(**{n: t.float().double() for n, t in x.items()}, **flags_of("softplus"))
    others = {n: t.float() if n != "q" else t.float().double() for n, t in x.items()}
    found = chunk_kda(**others, **flags_of("softplus"))
    assert torch.equal(found[1], expected[1])
    leaves = {n: t.requires_grad_() for n, t in others.items()}
    o, final = chunk_kda(**leaves, **flags_of("softplus"))
    for x, gradient in zip(leaves.values(), torch.autograd.grad(o.sum() + final.sum(), list(leaves.values()))):
        assert gradient.dtype is x.dtype


def test_float64_beside_a_float32_q_is_computed_in_fp32():
    x = problem("softplus")
    given = {n: t.float() if n == "q" else t for n, t in x.items()}
    given["initial_state"] = given["initial_state"].float()
    found = chunk_kda(**given, **flags_of("softplus"))
    expected = chunk_kda(**{n: t.float() for n, t in x.items()}, **flags_of("softplus"))
    assert found[1].dtype is torch.float32
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_compiled():
    x = {n: t.requires_grad_() for n, t in problem("bounded").items()}
    function = lambda x: chunk_kda(**x, **flags_of("bounded"))
    found, expected = torch.compile(function, fullgraph=True)(x), function(x)
    for a, b in zip(found, expected):
        assert a.dtype is torch.float64 and torch.equal(a, b)
    loss = lambda outputs: sum(y.square().sum() for y in outputs)
    for a, b in zip(torch.autograd.grad(loss(found), list(x.values())),
                    torch.autograd.grad(loss(expected), list(x.values()))):
        assert a.dtype is torch.float64 and torch.allclose(a, b, rtol=1e-14, atol=0)


def test_opcheck():
    x = problem()
    rows = [x[name].requires_grad_() for name in ("q", "k", "v", "g", "beta")]
    tail = (ops.GATE_LOG, ops.BETA_SIGMOID, -5.0, 0.5, True, False, True)
    torch.library.opcheck(torch.ops.libkda.forward_kept.default,
                          (*rows, None, None, x["initial_state"], None, None, *tail, None, ops.KEEP_STATES))


@pytest.mark.parametrize("changed, message", [
    (dict(q=torch.float32), "v must be float32, bfloat16 or float16, got Double"),
    (dict(k=torch.int64), "k must be float32, bfloat16 or float16, got Long"),
    (dict(A_log=torch.float16), "A_log must be float32, got Half"),
    (dict(initial_state=torch.float16), "initial_state must be float32 or bfloat16, got Half"),
])
def test_operators_refuse(changed, message):
    x = problem("softplus")
    for name, dtype in changed.items():
        x[name] = x[name].to(dtype)
    with pytest.raises(ValueError, match=message):
        torch.ops.libkda.forward(*(x[n] for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")),
                                 None, None, ops.GATE_SOFTPLUS, ops.BETA_SIGMOID, -5.0, 0.5, True, False, True)


def test_initial_states_of_other_types_are_refused():
    x = problem()
    with pytest.raises(TypeError, match="initial_state must be float32 or float64, got torch.float16"):
        chunk_kda(**dict(x, initial_state=x["initial_state"].half()), **FLAGS)
    with pytest.raises(AssertionError, match="initial_state must be in float32. Got torch.float64"):
        chunk_kda(**dict(x, q=x["q"].float()), **FLAGS)
