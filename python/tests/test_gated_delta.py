# SPDX-License-Identifier: Apache-2.0
"""One gate a head, and q/k heads tiled over the value heads: against a recurrence in float64, gates written out, and
transformers' own Gated DeltaNet."""
import inspect

import libkda
import pytest
import torch

B, T, H, HV, K, V = 2, 37, 2, 4, 24, 16


def inputs(dtype=torch.float32, seed=0, T=T):
    torch.manual_seed(seed)
    q, k = (torch.nn.functional.normalize(torch.randn(B, T, H, K), dim=-1).to(dtype) for _ in "qk")
    v = torch.randn(B, T, HV, V).to(dtype)
    g = torch.nn.functional.logsigmoid(torch.randn(B, T, HV) + 2)
    beta = torch.rand(B, T, HV).to(dtype)
    return q, k, v, g, beta


def recurrence(q, k, v, g, beta, state, heads):
    """float64, token by token; value head j reads q/k head heads[j]."""
    q, k, v, g, beta, S = (x.double() for x in (q[:, :, heads], k[:, :, heads], v, g, beta, state))
    rows = []
    for t in range(q.shape[1]):
        S = S * g[:, t].exp()[..., None, None]
        error = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t, :, :, None] * error[:, :, None]
        rows.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(rows, 1), S


HEADS = {"grouped": [j // (HV // H) for j in range(HV)], "tiled": [j % H for j in range(HV)]}


@pytest.mark.parametrize("head_map", HEADS)
@pytest.mark.parametrize("function", [libkda.chunk_kda, libkda.fused_recurrent_kda, libkda.chunk_gated_delta_rule,
                                      libkda.fused_recurrent_gated_delta_rule])
def test_is_the_recurrence(function, head_map):
    for length in (T, 3):  # 3: the decode kernel
        q, k, v, g, beta = inputs(T=length)
        state = torch.randn(B, HV, K, V)
        o, final = function(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, head_map=head_map)
        expected, final_expected = recurrence(q, k, v, g, beta, state, HEADS[head_map])
        torch.testing.assert_close(o.double(), expected, rtol=2e-5, atol=2e-6)
        torch.testing.assert_close(final.double(), final_expected, rtol=2e-5, atol=2e-6)


def test_has_the_bits_of_gates_written_out():
    q, k, v, g, beta = inputs(torch.bfloat16)
    wide = g[..., None].expand(-1, -1, -1, K)
    expected = libkda.chunk_kda(q, k, v, wide.contiguous(), beta)[0]
    assert torch.equal(libkda.chunk_kda(q, k, v, g, beta)[0], expected)
    assert torch.equal(libkda.chunk_kda(q, k, v, wide, beta)[0], expected)  # read as it is
    column = torch.randn(B, T, 3 * HV)
    column[..., 1::3] = g
    assert torch.equal(libkda.chunk_kda(q, k, v, column[..., 1::3], beta)[0], expected)
    assert torch.equal(libkda.chunk_kda(q, k, v, g.double(), beta)[0], expected)


@pytest.mark.parametrize("head_map", HEADS)
def test_gradients(head_map):
    rows = [x.requires_grad_() for x in (*inputs(), torch.randn(B, HV, K, V))]
    weights = torch.randn(B, T, HV, V), torch.randn(B, HV, K, V)

    def gradients(o, final):
        loss = (o * weights[0]).sum() + (final * weights[1]).sum()
        return torch.autograd.grad(loss, rows)

    o, final = libkda.chunk_gated_delta_rule(*rows[:5], None, rows[5], True, head_map=head_map)
    found = gradients(o, final)
    assert found[3].shape == (B, T, HV)
    for x, expected in zip(found, gradients(*recurrence(*rows, HEADS[head_map]))):
        torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head_map", HEADS)
def test_rows_of_a_layer(device, head_map):
    """As a layer of Qwen3-Next passes them: bf16, gates in fp32, K = V = 128. On a GPU the tensor cores serve them."""
    rounded = [torch.nn.functional.normalize(torch.randn(B, 70, H, 128), dim=-1).bfloat16() for _ in "qk"]
    rounded += [torch.randn(B, 70, HV, 128).bfloat16(), torch.nn.functional.logsigmoid(torch.randn(B, 70, HV) + 2),
                torch.rand(B, 70, HV).bfloat16(), torch.randn(B, HV, 128, 128)]
    weights = torch.randn(B, 70, HV, 128).bfloat16()

    def results(function, rows):
        rows = [x.detach().requires_grad_() for x in rows]
        o, final = function(*rows)
        gradients = torch.autograd.grad((o * weights.to(o)).sum(), rows)
        return {name: x.detach().cpu().double() for name, x in zip(("o", "final", "q", "k", "v", "g", "beta", "state"),
                                                                   (o, final, *gradients))}

    expected = results(lambda *rows: recurrence(*rows, HEADS[head_map]), [x.double() for x in rounded])
    found = results(lambda q, k, v, g, beta, state: libkda.chunk_gated_delta_rule(
        q, k, v, g, beta, None, state, True, head_map=head_map), [x.to(device) for x in rounded])
    for name, x in found.items():
        assert x.shape == expected[name].shape
        assert (x - expected[name]).norm() < 1.5e-2 * expected[name].norm(), name


def test_gradient_of_an_expanded_view():
    q, k, v, g, beta = inputs()
    results = []
    for expand in (False, True):
        leaf = g.clone().requires_grad_()
        gates = leaf[..., None].expand(-1, -1, -1, K) if expand else leaf
        libkda.chunk_kda(q, k, v, gates, beta)[0].square().sum().backward()
        results.append(leaf.grad)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_raw_gates_have_one_bias_a_head():
    q, k, v, g, beta = inputs()
    A_log, dt_bias = torch.randn(HV, requires_grad=True), torch.randn(HV, requires_grad=True)
    log_decay = -A_log.exp() * torch.nn.functional.softplus(g + dt_bias)
    expected = libkda.chunk_gated_delta_rule(q, k, v, log_decay, beta)[0]
    o = libkda.chunk_gated_delta_rule(q, k, v, g, beta, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias)[0]
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    step = libkda.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, use_gate_in_kernel=True,
                                                   A_log=A_log.detach(), dt_bias=dt_bias.detach())[0]
    torch.testing.assert_close(step, expected.detach(), rtol=1e-4, atol=1e-5)
    for x, y in zip(*(torch.autograd.grad(out.square().sum(), (A_log, dt_bias)) for out in (o, expected))):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_one_bias_a_head_has_the_bits_of_one_a_channel(lower_bound):
    """By every function that takes raw gates; beside a gate a channel it is refused."""
    q, k, v, g, beta = inputs()
    gate = dict(A_log=0.3 * torch.randn(HV), use_gate_in_kernel=True, lower_bound=lower_bound)
    bias, state = torch.randn(HV), torch.randn(B, HV, K, V)
    pools = [state.clone(), state.clone()]
    slots = torch.arange(B)

    def calls(dt_bias, pool, g=g):
        more, rows = dict(gate, dt_bias=dt_bias), (q, k, v, g, beta)
        yield libkda.chunk_kda(*rows, initial_state=state, output_final_state=True, **more)
        yield libkda.fused_recurrent_kda(*rows, initial_state=state, output_final_state=True, **more)
        yield libkda.prefill(*rows, pool, slots, **more), pool.clone()
        yield libkda.decode(*(x[:, :1] for x in rows), pool, slots, **more), pool.clone()
        yield libkda.fused_recurrent_kda_fwd(*(x[:, :2] for x in rows), initial_state=pool, ssm_state_indices=slots,
                                             **more)

    for narrow, wide in zip(calls(bias, pools[0]), calls(bias.repeat_interleave(K), pools[1])):
        assert all(map(torch.equal, narrow, wide))
    for function in (libkda.chunk_kda, libkda.fused_recurrent_kda):
        with pytest.raises(ValueError, match=rf"^dt_bias must have HV \* K = {HV * K} elements"):
            function(q, k, v, g[..., None].repeat(1, 1, 1, K), beta, dt_bias=bias, **gate)


def test_packed_sequences():
    q, k, v, g, beta = (x[:1] for x in inputs())
    cu_seqlens = torch.tensor([0, 5, 5, T])
    o, final = libkda.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, cu_seqlens=cu_seqlens,
                                             use_qk_l2norm_in_kernel=True)
    for n, (begin, end) in enumerate([(0, 5), (5, 5), (5, T)]):
        alone = libkda.chunk_gated_delta_rule(*(x[:, begin:end] for x in (q, k, v, g, beta)), output_final_state=True,
                                              use_qk_l2norm_in_kernel=True)
        assert torch.equal(o[:, begin:end], alone[0])
        assert torch.equal(final[n:n + 1], alone[1])


def test_pools_take_one_gate_a_head():
    q, k, v, g, beta = inputs(T=2)
    pool, slots = torch.randn(5, HV, K, V), torch.tensor([3, 1])
    expected, final = recurrence(q, k, v, g, beta, pool[slots], HEADS["grouped"])
    o = libkda.decode(q, k, v, g, beta, pool, slots)
    torch.testing.assert_close(o.double(), expected, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(pool[slots].double(), final, rtol=2e-5, atol=2e-6)


def test_compiles():
    q, k, v, g, beta = inputs()
    compiled = torch.compile(libkda.chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, g, beta)[0], libkda.chunk_gated_delta_rule(q, k, v, g, beta)[0])


def test_float64_gradients():
    q, k, v, g, beta = (x[:1, :3].double().requires_grad_() for x in inputs())
    assert torch.autograd.gradcheck(lambda *rows: libkda.chunk_kda(*rows, head_map="tiled")[0], (q, k, v, g, beta),
                                    fast_mode=True)


def test_refusals():
    q, k, v, g, beta = inputs()
    with pytest.raises(ValueError, match="head_map must be 'grouped' or 'tiled', got 'striped'"):
        libkda.chunk_kda(q, k, v, g, beta, head_map="striped")
    with pytest.raises(ValueError, match=r"g must have shape \[B, T, HV\]=\[2, 37, 4\], got \[2, 37, 4, 24\]"):
        libkda.chunk_gated_delta_rule(q, k, v, g[..., None].expand(-1, -1, -1, K), beta)
    with pytest.raises(ValueError, match="g must have shape"):
        libkda.chunk_kda(q, k, v, g[:, :, :3], beta)
    with pytest.raises(ValueError, match="g and beta must be given"):
        libkda.fused_recurrent_gated_delta_rule(q, k, v, g)
    with pytest.raises(NotImplementedError, match="no `gk` and no `gv`"):
        libkda.fused_recurrent_gated_delta_rule(q, k, v, gk=g, beta=beta)
    with pytest.raises(NotImplementedError, match="no context parallelism"):
        libkda.chunk_gated_delta_rule(q, k, v, g, beta, cp_context=object())
    with pytest.raises(ValueError, match="head_map must be 0 to 1, got 2"):
        torch.ops.libkda.forward(q, k, v, g, beta, None, None, None, None, None, 0, 0, -5.0, 1.0, False, False, False,
                                 False, None, 2)


def test_transformers_qwen3_next():
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k, v, g, beta = inputs(torch.bfloat16)
    for ours, theirs in ((libkda.chunk_gated_delta_rule, modeling.torch_chunk_gated_delta_rule),
                         (libkda.fused_recurrent_gated_delta_rule, modeling.torch_recurrent_gated_delta_rule)):
        common = dict(g=g, beta=beta, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True)
        o, state = ours(q, k, v, **common)
        their_o, their_state = inspect.unwrap(theirs)(q, k, v, **common)  # its own, not FLA's
        torch.testing.assert_close(o, their_o, rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(state, their_state.float(), rtol=1e-3, atol=1e-4)
