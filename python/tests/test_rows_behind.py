# SPDX-License-Identifier: Apache-2.0
"""Tokens behind the last sequence: with lengths on the host a ValueError, with lengths on a GPU alone outputs and
gradients are exactly 0 there, whatever lay in memory and whatever the inputs hold there."""
import pytest
import torch

import libkda
from libkda import gated_delta, layer
from libkda.compat import flash_kda

CU = [0, 40, 40, 100]
T = 128


def lengths(device, cu=CU, dtype=torch.int64):
    return torch.tensor(cu, device=device, dtype=dtype)


def fill_free_memory():
    """Blocks that torch's allocator hands out next hold NaN."""
    if torch.cuda.is_available():
        blocks = [torch.full((1 << size,), float("nan"), device="cuda") for size in range(8, 22) for _ in range(3)]
        del blocks


def rows(dtype, K=64, V=64, H=2, HV=2, head_gates=False, device="cuda", behind=float("nan")):
    """Inputs whose rows behind the last sequence hold `behind`."""
    x = dict(q=torch.randn(1, T, H, K), k=torch.randn(1, T, H, K), v=torch.randn(1, T, HV, V),
             g=-torch.rand(1, T, HV) if head_gates else -torch.rand(1, T, HV, K), beta=torch.rand(1, T, HV))
    for t in x.values():
        t[:, CU[-1]:] = behind
    return {name: t.to(device, dtype).requires_grad_() for name, t in x.items()}


CASES = {
    "bf16": (libkda.chunk_kda, dict(dtype=torch.bfloat16), {}),
    "fp16": (libkda.chunk_kda, dict(dtype=torch.float16), {}),
    "fp32": (libkda.chunk_kda, dict(dtype=torch.float32), {}),
    "128": (libkda.chunk_kda, dict(dtype=torch.bfloat16, K=128, V=128), {}),
    "keep": (libkda.chunk_kda, dict(dtype=torch.bfloat16, K=128, V=128, H=64, HV=64), dict(disable_recompute=True)),
    "groups": (libkda.chunk_kda, dict(dtype=torch.bfloat16, HV=6), {}),
    "odd sizes": (libkda.chunk_kda, dict(dtype=torch.float32, K=33, V=7), {}),
    "head gates": (gated_delta.chunk_gated_delta_rule, dict(dtype=torch.bfloat16, head_gates=True), {}),
    "head gates fp32": (gated_delta.chunk_gated_delta_rule, dict(dtype=torch.float32, head_gates=True), {}),
}


@pytest.mark.needs_cuda
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(case):
    function, sizes, flags = CASES[case]
    x = rows(**sizes)
    state = torch.randn(len(CU) - 1, x["v"].shape[2], x["q"].shape[3], x["v"].shape[3], device="cuda").requires_grad_()
    fill_free_memory()
    o, final = function(**x, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
                        cu_seqlens=lengths("cuda"), **flags)
    assert (o[:, CU[-1]:] == 0).all() and o.isfinite().all() and final.isfinite().all()
    d_o = torch.randn_like(o)
    d_o[:, CU[-1]:] = float("nan")
    fill_free_memory()
    torch.autograd.backward([o, final], [d_o, torch.randn_like(final)])
    for name, t in x.items():
        assert (t.grad[:, CU[-1]:] == 0).all(), name
        assert t.grad.isfinite().all() and (t.grad[:, :CU[-1]] != 0).any(), name
    assert state.grad.isfinite().all()


@pytest.mark.needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_without_gradients(dtype, out, integers):
    """Every function that takes cu_seqlens, into a tensor of its own and into the caller's."""
    def given(like):
        return dict(out=torch.full_like(like, float("nan"))) if out else {}

    def expect(what, o, end=CU[-1]):
        assert (o[:, end:] == 0).all() and o.isfinite().all(), what

    cu = lengths("cuda", dtype=integers)
    with torch.no_grad():
        x = {name: t.detach() for name, t in rows(dtype).items()}
        pool = torch.randn(6, 2, 64, 64, device="cuda")
        fill_free_memory()
        expect("chunk_kda", libkda.chunk_kda(**x, cu_seqlens=cu, **given(x["v"]))[0])
        o = torch.full_like(x["v"], float("nan"))
        flash_kda.fwd(**x, scale=0.1, out=o, A_log=torch.zeros(2, device="cuda"), dt_bias=None, lower_bound=-5.0,
                      cu_seqlens=cu)
        expect("flash_kda.fwd", o)
        expect("fused_recurrent_kda", libkda.fused_recurrent_kda(**x, cu_seqlens=cu)[0])
        slots = torch.tensor([1, -1, 4], device="cuda", dtype=integers)
        expect("prefill", libkda.prefill(**x, pool=pool, slots=slots, cu_seqlens=cu, **given(x["v"])))
        slots[2] = 99  # beyond the pool: none
        o = libkda.prefill(**x, pool=pool, slots=slots, cu_seqlens=cu, **given(x["v"]))
        expect("prefill without slots", o)
        assert (o[:, CU[1]:] == 0).all()
        # As many tokens as sequences: one token each, of which a padded batch has fewer.
        one = {name: t[:, :4] for name, t in x.items()}
        steps = lengths("cuda", [0, 1, 2, 2, 2], integers)
        places = torch.tensor([1, 2, 3, -1], device="cuda", dtype=integers)
        expect("decode", libkda.decode(**one, pool=pool, slots=places, cu_seqlens=steps, **given(one["v"])), 2)
        expect("fused_recurrent_kda of steps", libkda.fused_recurrent_kda(**one, cu_seqlens=steps)[0], 2)
        drafts = torch.tensor([[1, 2], [3, 4]], device="cuda", dtype=integers)
        expect("verify", libkda.verify(**one, pool=pool, slots=drafts, cu_seqlens=lengths("cuda", [0, 2, 3], integers),
                                       **given(one["v"])), 3)
        rows_of_conv = torch.randn(1, T, 24, device="cuda").to(dtype)
        rows_of_conv[:, CU[-1]:] = float("nan")
        weight = torch.randn(24, 4, device="cuda")
        y = layer.short_conv(rows_of_conv, weight, cu_seqlens=cu, **given(rows_of_conv))[0]
        expect("short_conv", y)
        states = torch.randn(6, 24, 3, device="cuda")
        expect("short_conv_update", layer.short_conv_update(rows_of_conv, states, weight, cu_seqlens=cu, indices=slots,
                                                            **given(rows_of_conv)))


@pytest.mark.needs_cuda
@pytest.mark.parametrize("channels_first", [False, True])
def test_gradients_of_the_convolution(channels_first):
    x = torch.randn(1, T, 24, device="cuda")
    x[:, CU[-1]:] = float("nan")
    if channels_first:
        x = x.mT.contiguous().mT
    x.requires_grad_()
    weight, bias = (torch.randn(*shape, device="cuda").requires_grad_() for shape in ((24, 4), (24,)))
    fill_free_memory()
    y, _ = layer.short_conv(x, weight, bias, activation="silu", cu_seqlens=lengths("cuda"))
    d_y = torch.randn_like(y)
    d_y[:, CU[-1]:] = float("nan")
    fill_free_memory()
    y.backward(d_y)
    assert (y[:, CU[-1]:] == 0).all() and (x.grad[:, CU[-1]:] == 0).all()
    assert all(t.grad.isfinite().all() for t in (x, weight, bias))


@pytest.mark.needs_cuda
@pytest.mark.parametrize("kind", ["chunk_kda", "prefill", "decode", "backward"])
def test_graphs(kind):
    """One graph, replayed over other lengths."""
    few = kind == "decode"
    count = 4 if few else T
    x = {name: t.detach()[:, :count].nan_to_num(1.0).requires_grad_(kind == "backward")
         for name, t in rows(torch.bfloat16).items()}
    tables = [[0, 1, 2, 3, 4], [0, 1, 2, 2, 2], [0, 0, 0, 0, 0]] if few else [[0, 40, 128], [0, 40, 100], [0, 0, 0]]
    cu = lengths("cuda", tables[0])
    pool = torch.randn(8, 2, 64, 64, device="cuda")
    slots = torch.arange(1, len(tables[0]), device="cuda", dtype=torch.int32)
    found = {}

    def step():
        if kind in ("prefill", "decode"):
            found["o"] = getattr(libkda, kind)(**x, pool=pool, slots=slots, cu_seqlens=cu, use_qk_l2norm_in_kernel=True)
            return
        found["o"] = libkda.chunk_kda(**x, use_qk_l2norm_in_kernel=True, cu_seqlens=cu)[0]
        if kind == "backward":
            names = list(x)
            found.update(zip(names, torch.autograd.grad(found["o"], list(x.values()), torch.ones_like(found["o"]))))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for table in tables:
        cu.copy_(lengths("cuda", table))
        for t in found.values():
            t.detach().fill_(float("nan"))
        graph.replay()
        for name, t in found.items():
            assert (t[:, table[-1]:] == 0).all() and t.isfinite().all(), (name, table)
            assert table[-1] == 0 or (t[:, :table[-1]] != 0).any(), (name, table)


REFUSED = r"cu_seqlens(_cpu)?: ends with 100, must end with T = 128"


def test_lengths_on_the_host_cover_all_tokens(device):
    """The same refusal on both devices; nothing is written."""
    x = {name: t.detach() for name, t in rows(torch.float32, device=device, behind=1.0).items()}
    cu = lengths("cpu")
    pool = torch.randn(6, 2, 64, 64, device=device)
    kept = pool.clone()
    slots = torch.tensor([1, 2, 4], device=device, dtype=torch.int32)
    out = torch.full_like(x["v"], 7.0)
    for call in (lambda: libkda.chunk_kda(**x, cu_seqlens=cu), lambda: libkda.fused_recurrent_kda(**x, cu_seqlens=cu),
                 lambda: libkda.chunk_kda(**x, cu_seqlens=cu.to(device), cu_seqlens_cpu=cu),
                 lambda: libkda.prefill(**x, pool=pool, slots=slots, cu_seqlens=cu, out=out)):
        with torch.no_grad(), pytest.raises(ValueError, match=REFUSED):
            call()
    assert torch.equal(pool, kept) and (out == 7).all()
    if device == "cpu":  # elsewhere the convolution has its lengths on the device
        with pytest.raises(ValueError, match=REFUSED):
            layer.short_conv(torch.randn(1, T, 8), torch.randn(8, 4), cu_seqlens=cu)
