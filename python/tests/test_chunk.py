# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from common import FLAGS, TOLERANCE, distance, gate_flags, make, reference

from libkda import chunk_kda

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gates, bound", [("log", None), ("softplus", None), ("bounded", -5.0)])
def test_gates_and_types(device, dtype, gates, bound):
    x, parameters, state = make(dtype=dtype, device=device, gates=gates)
    o, final = chunk_kda(**x, initial_state=state, **FLAGS, **gate_flags(gates, parameters, bound))
    expected = reference(x, parameters, state, gates, bound)
    assert o.dtype == dtype and final.dtype == torch.float32
    assert distance(o, expected[0]) < TOLERANCE[device, dtype]
    assert distance(final, expected[1]) < TOLERANCE[device, dtype]


@pytest.mark.parametrize("T, H, HV, K, V", [(1, 1, 1, 64, 64), (63, 2, 2, 60, 60), (200, 1, 4, 100, 100),
                                            (65, 3, 3, 128, 128), (40, 1, 1, 256, 256), (16, 2, 6, 12, 20)])
def test_shapes(device, T, H, HV, K, V):
    x, parameters, state = make(1, T, H, HV, K, V, device=device)
    o, final = chunk_kda(**x, initial_state=state, scale=0.3, **FLAGS)
    expected = reference(x, parameters, state, scale=0.3)
    assert distance(o, expected[0]) < 2e-6 and distance(final, expected[1]) < 2e-6


@pytest.mark.parametrize("lengths", [None, [37, 1, 0, 64]])
@pytest.mark.parametrize("gates, bound", [("log", None), ("softplus", None), ("bounded", -5.0)])
def test_heads_that_fill_a_card(device, gates, bound, lengths):  # on Hopper all of it is one kernel
    T, N = (131, 1) if lengths is None else (sum(lengths), len(lengths))
    x, parameters, state = make(1, T, 16, 32, 128, 128, dtype=torch.bfloat16, device=device, gates=gates, N=N)
    bounds = torch.tensor([0, *(lengths or [T])]).cumsum(0)
    cu = None if lengths is None else bounds.to(device)
    o, final = chunk_kda(**x, initial_state=state, cu_seqlens=cu, **FLAGS, **gate_flags(gates, parameters, bound))
    for n, (begin, end) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:])):
        if begin == end:
            assert torch.equal(final[n], state[n])
            continue
        expected = reference({name: t[:, begin:end] for name, t in x.items()}, parameters, state[n:n + 1], gates, bound)
        assert distance(o[:, begin:end], expected[0]) < TOLERANCE[device, torch.bfloat16]
        assert distance(final[n:n + 1], expected[1]) < TOLERANCE[device, torch.bfloat16]


def test_negative_eigenvalues(device):
    x, parameters, state = make(device=device)
    o, _ = chunk_kda(**x, initial_state=state, allow_neg_eigval=True, **FLAGS)
    assert distance(o, reference(x, parameters, state, double=True)[0]) < 5e-6


def test_without_states(device):
    x, parameters, state = make(device=device)
    o, final = chunk_kda(**x, **dict(FLAGS, output_final_state=False))
    assert final is None
    assert distance(o, reference(x, parameters, torch.zeros_like(state))[0]) < 2e-6


@pytest.mark.parametrize("cu_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("on_host", [False, True])
def test_packed_sequences(device, cu_type, on_host):
    lengths = [37, 1, 64, 0, 130]
    cu = torch.tensor([0, *lengths]).cumsum(0).to(cu_type)
    x, parameters, state = make(1, sum(lengths), device=device, N=len(lengths))
    o, final = chunk_kda(**x, initial_state=state, cu_seqlens=cu.to(device), cu_seqlens_cpu=cu if on_host else None,
                         **FLAGS)
    for n, (begin, end) in enumerate(zip(cu.tolist(), cu.tolist()[1:])):
        part = {name: t[:, begin:end] for name, t in x.items()}
        if begin == end:
            assert torch.equal(final[n], state[n])
            continue
        expected = reference(part, parameters, state[n:n + 1])
        assert distance(o[:, begin:end], expected[0]) < 2e-6
        assert distance(final[n:n + 1], expected[1]) < 2e-6


def test_state_layouts_are_bit_equal(device):
    x, _, state = make(device=device)
    o, final = chunk_kda(**x, initial_state=state, **FLAGS)
    o2, final2 = chunk_kda(**x, initial_state=state.mT.contiguous(), state_v_first=True, **FLAGS)
    assert torch.equal(o, o2) and torch.equal(final, final2.mT)


def test_strided_inputs_are_read_where_they_lie(device):
    """Views of one fused projection, as serving engines have them, and a last dimension that is not contiguous."""
    x, _, state = make(H=4, device=device)
    fused = torch.cat([x["q"], x["k"], x["g"], x["beta"][..., None].expand(-1, -1, -1, 8)], dim=-1)
    q, k, g, beta = fused.split([64, 64, 64, 8], dim=-1)
    strided = dict(q=q, k=k, g=g, beta=beta[..., 3], v=x["v"].mT.contiguous().mT)
    assert not strided["q"].is_contiguous() and strided["v"].stride(-1) != 1
    expected = chunk_kda(**x, initial_state=state, **FLAGS)
    found = chunk_kda(**strided, initial_state=state, **FLAGS)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("packed", [False, True])
def test_intermediate_states(device, chunk_size, packed):
    lengths = [64, 3, 130] if packed else [131, 131]
    x, parameters, state = make(1 if packed else 2, sum(lengths) if packed else 131, device=device,
                                dtype=torch.bfloat16, N=len(lengths))
    cu = torch.tensor([0, *lengths]).cumsum(0).to(device) if packed else None
    with torch.inference_mode():
        o, final, h = chunk_kda(**x, initial_state=state, cu_seqlens=cu, return_intermediate_states=True,
                                chunk_size=chunk_size, **FLAGS)
    counts = [-(-n // chunk_size) for n in lengths]
    assert h.shape == ((1, sum(counts)) if packed else (2, counts[0])) + state.shape[1:] and h.dtype == torch.bfloat16
    flat, row = h.flatten(0, 1), 0
    for n, length in enumerate(lengths):
        begin = sum(lengths[:n]) if packed else 0
        rows = {name: t[:, begin:begin + length] if packed else t[n:n + 1] for name, t in x.items()}
        for c in range(counts[n]):
            before = {name: t[:, :c * chunk_size] for name, t in rows.items()}
            expected = state[n:n + 1].double() if c == 0 else reference(before, parameters, state[n:n + 1])[1]
            assert distance(flat[row:row + 1], expected) < TOLERANCE[device, torch.bfloat16]
            row += 1


@pytest.mark.parametrize("T", [0, 5])
def test_empty_batches_and_sequences(device, T):
    x, _, state = make(B=2 if T == 0 else 0, T=T, device=device)
    o, final = chunk_kda(**x, initial_state=state[:x["q"].shape[0]], **FLAGS)
    assert o.shape == x["v"].shape and torch.equal(final, state[:x["q"].shape[0]])


def test_hard_gates(device):
    """A decay of exactly 0, no decay at all, and gates far below any exponent."""
    x, parameters, state = make(1, 100, device=device)
    x["g"][:, 10] = 0
    x["g"][:, 20] = -1000
    x["g"][:, 30:35, :, ::2] = -90
    o, final = chunk_kda(**x, initial_state=state, **FLAGS)
    expected = reference(x, parameters, state)
    assert distance(o, expected[0]) < 2e-6 and distance(final, expected[1]) < 2e-6
