# SPDX-License-Identifier: Apache-2.0
"""o in the caller's memory, of the functions that make it otherwise."""
import pytest
import torch
from common import FLAGS, distance, gate_flags, make, reference

import libkda

NAMES = ["chunk_kda", "fused_recurrent_kda", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]


def arguments(name, device, T=70, dtype=torch.bfloat16):
    """Rows and states of a call, of one gate a head where the function wants that."""
    x, parameters, state = make(T=T, dtype=dtype, device=device, gates="softplus")
    if "delta" in name:
        x["g"] = -x["g"][..., 0].abs()
        return x | dict(initial_state=state, **FLAGS)
    return x | dict(initial_state=state, **FLAGS, **gate_flags("softplus", parameters))


def outs(v, dtype):
    """Views of v's shape in buffers of NaN: dense; with gaps; with tokens innermost, which kernels do not write."""
    B, T, HV, V = v.shape
    nan = lambda *shape: torch.full(shape, float("nan"), device=v.device, dtype=dtype)
    dense, wide, turned = nan(B, T, HV, V), nan(B, T, HV + 1, V + 8), nan(B, HV, V, T)
    return (dense, dense), (wide[:, :, 1:, 8:], wide), (turned.permute(0, 3, 1, 2), turned)


@pytest.mark.parametrize("T", [3, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_out_has_the_bits_of_o(device, name, dtype, T):
    function, x = getattr(libkda, name), arguments(name, device, T, dtype)
    o, state = function(**x)
    for out, buffer in outs(x["v"], dtype):
        version = out._version
        found, final = function(**x, out=out)
        assert found is out and out._version > version
        assert torch.equal(out, o) and torch.equal(final, state)
        assert buffer.isnan().sum() == buffer.numel() - out.numel()
    assert function(**x | dict(output_final_state=False), out=out)[1] is None


@pytest.mark.parametrize("name", NAMES[:2])
def test_out_has_a_type_of_its_own(device, name):
    """fp32 from rows of bf16 is not rounded to them; fp64 comes by a copy."""
    x = arguments(name, device)
    rows = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    exact, _ = reference(rows, dict(A_log=x["A_log"], dt_bias=x["dt_bias"]), x["initial_state"], "softplus")
    rounded = distance(getattr(libkda, name)(**x)[0], exact)
    for dtype in (torch.float32, torch.float64):
        out = torch.empty(x["v"].shape, dtype=dtype, device=device)
        getattr(libkda, name)(**x, out=out)
        assert distance(out, exact) < min(rounded, 8e-3)
        assert torch.equal(out, out.float())


def test_out_beside_chunk_states(device):
    x = arguments("chunk_kda", device)
    out = torch.empty_like(x["v"], dtype=torch.float32)
    with torch.inference_mode():
        expected = libkda.chunk_kda(**x, return_intermediate_states=True)
        o, final, h = libkda.chunk_kda(**x, return_intermediate_states=True, out=out)
    assert o is out and torch.equal(o.to(x["q"].dtype), expected[0])
    assert torch.equal(final, expected[1]) and torch.equal(h, expected[2])


@pytest.mark.parametrize("name", NAMES)
def test_out_of_packed_sequences(device, name):
    x = arguments(name, device)
    x = {n: t[:1] if isinstance(t, torch.Tensor) and t.dim() > 2 else t for n, t in x.items()}
    x["cu_seqlens"] = torch.tensor([0, 70], device=device)
    out = torch.empty_like(x["v"])
    o, _ = getattr(libkda, name)(**x)
    assert torch.equal(getattr(libkda, name)(**x, out=out)[0], o)


@pytest.mark.parametrize("name", NAMES)
def test_bad_outs(device, name):
    x = arguments(name, device)
    function, v, state = getattr(libkda, name), x["v"], x["initial_state"]
    kept = {n: t.clone() for n, t in x.items() if isinstance(t, torch.Tensor)}
    slots = state.view(torch.bfloat16).flatten()
    for out, error, text in ((v[:, :-1], ValueError, "out must have the shape of v|out must have shape"),
                             (5, TypeError, "out must be a torch.Tensor, got int"),
                             (v.int(), TypeError, "out must be float32, bfloat16, float16 or float64, got torch.int32"),
                             (v.to("meta"), ValueError, "out must be on the device of q"),
                             (v, ValueError, "out: overlaps v in memory"),
                             (slots[:v.numel()].view(v.shape), ValueError, "out: overlaps initial_state in memory"),
                             (v[:, :1].expand_as(v), ValueError, "out: stride 0 makes elements of this output overlap"),
                             (v.mT.contiguous().mT[..., :1].expand_as(v), ValueError, "out is written, and its elem")):
        with pytest.raises(error, match=f"^({text})"):
            function(**x, out=out)
    with pytest.raises(NotImplementedError, match="no backward pass of what is written into given tensors"):
        function(**x | dict(v=v.detach().requires_grad_()), out=torch.empty_like(v))
    assert all(torch.equal(x[n], t) for n, t in kept.items())


@pytest.mark.parametrize("name", NAMES)
def test_out_compiles(name):
    x = arguments(name, "cpu")
    out, expected = torch.zeros_like(x["v"]), getattr(libkda, name)(**x)[0]
    step = torch.compile(lambda x, out: getattr(libkda, name)(**x, out=out)[0] * 2, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(step(x, out), expected * 2)
    assert torch.equal(out, expected)
    torch._dynamo.reset()
