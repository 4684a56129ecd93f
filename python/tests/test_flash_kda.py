# SPDX-License-Identifier: Apache-2.0
import sys

import pytest
import torch
from common import TOLERANCE, distance, make, reference

import libkda
from libkda.compat import flash_kda


@pytest.mark.parametrize("packed", [False, True])
def test_fwd(device, packed):
    lengths = [50, 81] if packed else None
    x, parameters, state = make(B=1 if packed else 2, dtype=torch.bfloat16, device=device, gates="bounded", N=2)
    out, final = torch.full_like(x["v"], float("nan")), torch.full_like(state.mT, float("nan")).contiguous()
    cu = torch.tensor([0, 50, 131], device=device) if packed else None
    flash_kda.fwd(**x, scale=0.1, out=out, **parameters, lower_bound=-5.0, initial_state=state.mT.contiguous(),
                  final_state=final, cu_seqlens=cu)
    for n in range(2):
        part = {name: t[:, sum(lengths[:n]):sum(lengths[:n + 1])] if packed else t[n:n + 1] for name, t in x.items()}
        expected = reference(part, parameters, state[n:n + 1], "bounded", -5.0, 0.1)
        got = out[:, sum(lengths[:n]):sum(lengths[:n + 1])] if packed else out[n:n + 1]
        assert distance(got, expected[0]) < TOLERANCE[device, torch.bfloat16]
        assert distance(final[n:n + 1].mT, expected[1]) < TOLERANCE[device, torch.bfloat16]
    assert flash_kda.get_workspace_size(131, 2) == 0


def test_outputs_of_any_form(device):
    """Written where they lie if kernels can; else through a copy. The final state may be the initial one."""
    x, parameters, state = make(dtype=torch.bfloat16, device=device, gates="bounded")
    call = lambda out, initial, final: flash_kda.fwd(**x, scale=0.1, out=out, **parameters, lower_bound=-5.0,
                                                     initial_state=initial, final_state=final)
    v, start = x["v"], state.mT.contiguous()
    expected, expected_final = torch.empty_like(v), torch.empty_like(start)
    call(expected, start, expected_final)
    pool = torch.full((4, *start.shape[1:]), float("nan"), device=device)
    pool[1:3] = start
    wide = torch.full((*v.shape[:-1], 40), float("nan"), device=device, dtype=v.dtype)
    call(wide[..., :32], pool[1:3], pool[1:3])
    assert torch.equal(wide[..., :32], expected) and wide[..., 32:].isnan().all()
    assert torch.equal(pool[1:3], expected_final) and pool[[0, 3]].isnan().all()
    turned, final = torch.empty_like(v.mT).mT, torch.empty_like(start.mT).mT.double()
    call(turned, start, final)
    assert torch.equal(turned, expected) and torch.equal(final, expected_final.double())
    final = torch.empty_like(start, dtype=torch.bfloat16)
    call(expected, start, final)
    assert torch.equal(final, expected_final.bfloat16())


def rows(x):
    return [x[name] for name in ("q", "k", "v", "g", "beta")]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("state_type", [torch.float32, torch.bfloat16])
def test_checkpoints(device, packed, state_type):
    """States behind the first tokens of sequences; 0 and below are none, and the last token is one, too. The form of 16
    arguments has a workspace in the eighth place."""
    x, parameters, state = make(B=1 if packed else 3, T=144, dtype=torch.bfloat16, device=device, gates="bounded", N=3)
    ends = [0, 48, 80, 144] if packed else [144] * 4
    lengths = torch.tensor(ends).diff().tolist() if packed else ends[1:]
    cu = torch.tensor(ends, dtype=torch.int32, device=device) if packed else None
    state = state.mT.contiguous().to(state_type)
    offsets = [16, -1, lengths[2]]
    out, final, checkpoints = torch.empty_like(x["v"]), torch.empty_like(state), torch.full_like(state, float("nan"))
    flash_kda.fwd(*rows(x), 0.1, out, torch.empty(1, dtype=torch.uint8), *parameters.values(), -5.0, state, final,
                  cu, checkpoints, torch.tensor(offsets, device=device))
    expected, expected_final = torch.empty_like(out), torch.empty_like(final)
    flash_kda.fwd(*rows(x), 0.1, expected, *parameters.values(), -5.0, state, expected_final, cu)
    assert distance(out, expected.double()) < TOLERANCE[device, torch.bfloat16]
    assert distance(final, expected_final.double()) < (5e-3 if state_type is torch.bfloat16 else 1e-5)
    assert checkpoints[1].isnan().all() and torch.equal(checkpoints[2], final[2])
    first = {name: t[:1, :16] for name, t in x.items()}
    behind = reference(first, parameters, state[:1].mT, "bounded", -5.0, 0.1)[1]
    assert distance(checkpoints[:1].mT, behind) < 5e-3


@pytest.mark.parametrize("change, text", [
    (dict(checkpoint_state=None), "are given together"),
    (dict(checkpoint_offsets=torch.tensor([16])), r"checkpoint_offsets must have shape \[N\]=\[2\]"),
    (dict(checkpoint_offsets=torch.tensor([16, 132])), "checkpoint_offsets: entry 1 = 132 is above 131"),
    (dict(q=torch.zeros(1, 131, 2, 64), cu_seqlens=torch.tensor([0, 5, 130])), "cu_seqlens must go up from 0 to 131"),
])
def test_checkpoints_that_are_refused(change, text):
    x, parameters, state = make(gates="bounded")
    if "cu_seqlens" in change:
        x = {name: t[:1] for name, t in x.items()}
    out = torch.full_like(x["v"], float("nan"))
    call = dict(x, scale=0.1, out=out, **parameters, lower_bound=-5.0, checkpoint_state=state.mT.contiguous(),
                checkpoint_offsets=torch.tensor([16, 16])) | change
    with pytest.raises(ValueError, match=text):
        flash_kda.fwd(**call)
    assert out.isnan().all()


def test_operators():
    """What vLLM calls, torch.ops._flashkda_C, in a process without vLLM."""
    flash_kda.install_operators()
    flash_kda.install_operators()
    assert torch.ops._flashkda_C.get_workspace_size(100, 4, 2) == 0
    x, parameters, state = make(B=1, gates="bounded", N=2)
    state, cu = state.mT.contiguous(), torch.tensor([0, 50, 131], dtype=torch.int32)
    out, final, checkpoints = torch.empty_like(x["v"]), torch.empty_like(state), torch.empty_like(state)
    expected, expected_final = torch.empty_like(out), torch.empty_like(final)
    torch.ops._flashkda_C.fwd(*rows(x), 0.1, out, torch.empty(0, dtype=torch.uint8), *parameters.values(), -5.0,
                              state, final, cu, checkpoints, torch.tensor([48, 0]))
    flash_kda.fwd(*rows(x), 0.1, expected, *parameters.values(), -5.0, state, expected_final, cu)
    assert distance(out, expected.double()) < 1e-5 and distance(final, expected_final.double()) < 1e-5
    del sys.modules["vllm._flashkda_C"]


def test_out_of_another_shape():
    x, parameters, state = make(gates="bounded")
    with pytest.raises(ValueError, match=r"out must have shape \[B, T, HV, V\]=\[2, 131, 4, 32\]"):
        flash_kda.fwd(**x, scale=0.1, out=x["v"][:, 1:], **parameters, lower_bound=-5.0)


def test_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "flash_kda", raising=False)
    flash_kda.install()
    import flash_kda as found
    assert found is flash_kda
    monkeypatch.delitem(sys.modules, "flash_kda")


@pytest.mark.parametrize("change, error, text", [
    (dict(A_log=torch.zeros(4, device="meta")), ValueError, "A_log must be on the device of q"),
    (dict(scale=1e39), ValueError, "scale must be finite"), (dict(scale=None), TypeError, "scale must be a number"),
    (dict(A_log=torch.full((4,), 89.0)), ValueError, "A_log: entry 0 = 89 is above 88 with gate bounded"),
    (dict(final_state=torch.zeros(2, 4, 32, 63)), ValueError, "final_state must have shape"),
    (dict(final_state=torch.zeros(()).expand(2, 4, 32, 64)), ValueError, "final_state"),
    (dict(final_state=torch.zeros((), dtype=torch.float64).expand(2, 4, 32, 64)), ValueError, "final_state"),
    (dict(out=torch.zeros(2, 131, 4, 32, dtype=torch.int32)), TypeError, "out must be"),
    (dict(q=torch.zeros(2, 131, 2, 64, requires_grad=True)), NotImplementedError, "no backward pass"),
])
def test_refusals(change, error, text):
    x, parameters, state = make(gates="bounded")
    out = torch.full_like(x["v"], float("nan"))
    call = dict(x, scale=0.1, out=out, **parameters, lower_bound=-5.0) | change
    with pytest.raises(error, match=text):
        flash_kda.fwd(**call)
    assert out.isnan().all()


def call_of(function, **more):
    """What fwd or fwd_cp writes, of a sequence of 900 tokens."""
    torch.manual_seed(0)
    x, parameters, _ = make(B=1, T=900, gates="bounded")
    x["g"] -= 9  # slow decay: segments see each other
    out = torch.full_like(x["v"], float("nan"))
    function(**x, scale=0.1, out=out, **parameters, lower_bound=-5.0, **more)
    return out


def test_auto_cp_is_the_policy_of_the_plan(monkeypatch):
    """On a CPU "auto" and "off" cut nothing; three segments have bits of their own, and an option that is not the
    policy stays in force."""
    uncut, numbers = call_of(flash_kda.fwd), []
    forward_into = flash_kda.forward_into

    def seen(*args, options):
        numbers.append(options)
        forward_into(*args, options=options)

    monkeypatch.setattr(flash_kda, "forward_into", seen)
    with libkda.options(context_parallel=3):
        assert not torch.equal(call_of(flash_kda.fwd), uncut)
        assert torch.equal(call_of(flash_kda.fwd_cp), uncut) and torch.equal(call_of(flash_kda.fwd_cp, auto_cp=False),
                                                                             uncut)
    assert numbers == [libkda.Options(context_parallel=policy).number for policy in (3, "auto", "off")]
    with libkda.options(backend="nameless"):
        for auto_cp in (True, False):
            with pytest.raises(ValueError, match="^backend: 'nameless' names no"):
                call_of(flash_kda.fwd_cp, auto_cp=auto_cp)
    with pytest.raises(TypeError, match="^auto_cp must be a bool, got 1$"):
        call_of(flash_kda.fwd_cp, auto_cp=1)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("function", [flash_kda.fwd, flash_kda.fwd_cp])
def test_lengths_on_the_host(function, checkpoints):
    """A copy of them changes nothing, and is compared with what a CPU has."""
    cu = torch.tensor([0, 300, 900])
    more = {}
    if checkpoints:
        more = dict(checkpoint_state=torch.zeros(2, 4, 32, 64), checkpoint_offsets=torch.tensor([48, 0]))
    more["cu_seqlens"] = cu
    assert torch.equal(call_of(function, **more), call_of(function, **more, cu_seqlens_cpu=cu.int()))
    with pytest.raises(ValueError, match="^cu_seqlens_cpu: entry 1 = 299|^cu_seqlens_cpu is not cu_seqlens"):
        call_of(function, **more, cu_seqlens_cpu=torch.tensor([0, 299, 900]))
    with pytest.raises(ValueError, match="^cu_seqlens_cpu is a copy of cu_seqlens, got no cu_seqlens"):
        call_of(function, cu_seqlens_cpu=torch.tensor([0, 900]))
