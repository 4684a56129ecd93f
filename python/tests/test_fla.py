# SPDX-License-Identifier: Apache-2.0
"""FLA's own functions on libkda's kernels, through FLA's registry."""
import inspect

import pytest
import torch
from common import FLAGS, distance, make, reference

import libkda

fla = pytest.importorskip("fla")
fla_kda = pytest.importorskip("fla.ops.kda")
import libkda.fla  # noqa: E402

since_0_6 = pytest.mark.skipif(int(fla.__version__.split(".")[1]) < 6, reason="FLA 0.6's signatures and registry")


@pytest.fixture(autouse=True)
def enabled():
    libkda.fla.enable()
    yield
    libkda.fla.enable()


def test_chunk(device):
    x, parameters, state = make(device=device)
    with torch.no_grad():
        o, final = fla_kda.chunk_kda(**x, initial_state=state, **FLAGS)
    assert libkda.fla.last_path() == "libkda: chunk_kda"
    assert distance(o, reference(x, parameters, state)[0]) < 2e-6
    assert torch.equal(o, libkda.chunk_kda(**x, initial_state=state, **FLAGS)[0])


@since_0_6
def test_recurrent():
    x, parameters, state = make(T=4)
    with torch.no_grad():
        o, _ = fla_kda.fused_recurrent_kda(**x, initial_state=state, **FLAGS)
    assert libkda.fla.last_path() == "libkda: fused_recurrent_kda_fwd"
    assert distance(o, reference(x, parameters, state)[0]) < 2e-6


def test_gate():
    x, parameters, _ = make(T=4)
    from fla.ops.kda.gate import fused_kda_gate
    with torch.no_grad():
        g = fused_kda_gate(x["g"], parameters["A_log"], parameters["dt_bias"])
    assert libkda.fla.last_path() == "libkda: fused_kda_gate"
    assert torch.equal(g, libkda.naive_kda_gate(x["g"], parameters["A_log"], parameters["dt_bias"]))


def decline(change):
    """The backend's answer: FLA's own kernels, which would be next, need a GPU."""
    x, _, _ = make()
    backend = libkda.fla._backend(libkda.chunk_kda)()
    return backend.verify("chunk_kda", **dict(x, **change))


def test_declines_say_why():
    assert decline({}) == (True, None)
    accepted, reason = decline(dict(cp_context=object()))
    assert not accepted and "cp_context" in reason
    assert libkda.fla.last_path() == f"fla: chunk_kda: {reason}"
    x, _, _ = make()
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    flags = [None, None, *[False] * 6, None, False, False, False, None, None]  # scale .. cu_seqlens_cpu
    by_position = libkda.fla._backend(libkda.chunk_kda)().verify("chunk_kda", *rows, *flags, object())
    assert not by_position[0] and "cp_context" in by_position[1]
    accepted, reason = decline(dict(v=torch.zeros(2, 131, 4, 32, requires_grad=True)))
    assert not accepted and "gradient" in reason
    libkda.fla.disable()
    accepted, reason = decline({})
    assert not accepted and "disable" in reason


@since_0_6
@pytest.mark.parametrize("name, module", [
    ("chunk_kda", "fla.ops.kda.chunk"), ("fused_recurrent_kda", "fla.ops.kda.fused_recurrent"),
    ("fused_recurrent_kda_fwd", "fla.ops.kda.fused_recurrent"), ("fused_kda_gate", "fla.ops.kda.gate"),
    ("naive_recurrent_kda", "fla.ops.kda.naive"), ("naive_chunk_kda", "fla.ops.kda.naive"),
    ("naive_kda_gate", "fla.ops.kda.gate"), ("naive_kda_lowerbound_gate", "fla.ops.kda.gate")])
def test_signatures_are_flas(name, module):
    theirs = inspect.signature(getattr(pytest.importorskip(module), name)).parameters
    ours = inspect.signature(getattr(libkda, name)).parameters
    plain = lambda parameters: [(p.name, p.kind, p.default) for p in parameters.values()]
    assert plain(ours) == plain(theirs)


def test_references_agree():
    from fla.ops.kda.naive import naive_recurrent_kda
    x, _, state = make(T=20)
    expected = naive_recurrent_kda(**x, initial_state=state, output_final_state=True)
    found = libkda.naive_recurrent_kda(**x, initial_state=state, output_final_state=True)
    assert distance(found[0], expected[0].double()) < 1e-6 and distance(found[1], expected[1].double()) < 1e-6
