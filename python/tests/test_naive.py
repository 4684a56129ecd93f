# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.nn.functional as F
from common import distance, make

from libkda import fused_kda_gate, naive_chunk_kda, naive_kda_gate, naive_kda_lowerbound_gate, naive_recurrent_kda


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_chunks_are_the_recurrence(chunk_size):
    x, _, state = make(T=70)
    x = {n: t.double() for n, t in x.items()}
    x["k"] = F.normalize(x["k"], dim=-1)
    x["beta"] = x["beta"].sigmoid()
    expected = naive_recurrent_kda(**x, initial_state=state, output_final_state=True)
    found = naive_chunk_kda(**x, initial_state=state, output_final_state=True, chunk_size=chunk_size)
    assert distance(found[0], expected[0]) < 1e-13 and distance(found[1], expected[1]) < 1e-13


def test_one_step_by_hand():
    """K = V = 1: S = exp(g) S0 + beta k (v - k exp(g) S0), o = q S."""
    one = lambda x: torch.tensor([[[[x]]]], dtype=torch.float64)
    o, S = naive_recurrent_kda(one(2.0), one(0.5), one(3.0), one(-1.0), one(0.25)[..., 0], scale=1.0,
                               initial_state=one(4.0), output_final_state=True)
    decayed = 4 * torch.tensor(-1.0, dtype=torch.float64).exp()
    expected = decayed + 0.25 * 0.5 * (3 - 0.5 * decayed)
    assert torch.allclose(S.squeeze(), expected) and torch.allclose(o.squeeze(), 2 * expected)


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_gate(bound, dtype):
    g, A, bias = torch.randn(2, 3, 4, 8).to(dtype), torch.randn(4), torch.randn(32)
    x = g.float() + bias.view(4, 8)
    rate = A.exp()[:, None]
    expected = -rate * F.softplus(x) if bound is None else bound * torch.sigmoid(rate * x)
    assert torch.allclose(fused_kda_gate(g, A, bias, bound), expected, rtol=1e-6)
    naive = naive_kda_gate(g, A, bias) if bound is None else naive_kda_lowerbound_gate(g, A, bias, bound)
    assert torch.equal(naive, fused_kda_gate(g, A.view(1, 1, 4, 1), bias, bound))


def test_gate_without_A_log():
    g = torch.randn(2, 3, 4, 8)
    assert torch.allclose(fused_kda_gate(g, lower_bound=-3.0), -3 * torch.sigmoid(g))


def test_gate_has_gradients():
    g, A = torch.randn(2, 3, 4, 8, dtype=torch.float64, requires_grad=True), torch.randn(4, requires_grad=True)
    fused_kda_gate(g, A).sum().backward()
    assert g.grad.abs().sum() > 0 and A.grad.abs().sum() > 0
