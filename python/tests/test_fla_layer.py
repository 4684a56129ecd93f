# SPDX-License-Identifier: Apache-2.0
"""FLA's short convolution, gated norm and KDA layer on a CPU, where Triton has no kernels."""
import pytest
import torch
import torch.nn.functional as F
from common import distance

pytest.importorskip("fla.backends", reason="FLA 0.6 has one registry for all functions")

import libkda.fla  # noqa: E402

modules = pytest.importorskip("fla.modules")
CLOSE = 3e-6


@pytest.fixture(autouse=True)
def switched_back():
    yield
    libkda.fla.enable()


def gradients(outputs, inputs, upstream):
    return torch.autograd.grad(outputs, inputs, upstream, allow_unused=True)


def conv_of(module, x, state=None):
    """The module in torch: y, and all inputs."""
    u = x.transpose(1, 2)
    u = F.pad(u, (3, 0)) if state is None else torch.cat([state[..., -3:], u], -1)
    return F.silu(F.conv1d(u, module.weight, module.bias, groups=x.shape[-1]).transpose(1, 2)), u


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_short_convolution(bias, with_state):
    module = modules.ShortConvolution(24, 4, bias=bias, activation="silu")
    x, state = torch.randn(2, 30, 24, requires_grad=True), torch.randn(2, 24, 4, requires_grad=True)
    state = state if with_state else None
    inputs = [x, *module.parameters()] + [state] * with_state
    y, final = module(x, cache=state, output_final_state=True)
    assert libkda.fla.last_path("conv") == "libkda: causal_conv1d_fwd"
    expected, u = conv_of(module, x, state)
    assert distance(y, expected.double()) < CLOSE and torch.equal(final, u[..., -4:])
    upstream = torch.randn_like(y)
    for mine, right in zip(gradients(y, inputs, upstream), gradients(expected, inputs, upstream)):
        assert distance(mine, right.double()) < CLOSE
    assert libkda.fla.last_path("conv") == "libkda: causal_conv1d_bwd"


@pytest.mark.parametrize("shape", [(3, 1, 24), (1, 3, 24)], ids=str)
def test_a_step_of_the_short_convolution(shape):
    """One token of each sequence, the cache in place."""
    module = modules.ShortConvolution(24, 4, activation="silu")
    x, cache = torch.randn(shape), torch.randn(3, 24, 4)
    cu_seqlens = torch.arange(4) if shape[0] == 1 else None
    expected, u = conv_of(module, x.view(3, 1, 24), cache)
    with torch.no_grad():
        y, final = module(x, cache=cache, output_final_state=True, cu_seqlens=cu_seqlens)
    assert libkda.fla.last_path("conv") == "libkda: causal_conv1d_update"
    assert final is cache and torch.equal(cache, u[..., -4:])
    assert y.shape == shape and distance(y.view(3, 1, 24), expected.double()) < CLOSE


@pytest.mark.parametrize("activation", ["sigmoid", "swish"])
def test_gated_norm(activation):
    module = modules.FusedRMSNormGated(32, activation=activation, eps=1e-5)
    with torch.no_grad():
        module.weight.normal_()
    x, gate = torch.randn(2, 9, 3, 32, requires_grad=True), torch.randn(2, 9, 3, 32, requires_grad=True)
    y = module(x, gate)
    assert libkda.fla.last_path("norm") == "libkda: layer_norm_gated_fwd"
    act = torch.sigmoid if activation == "sigmoid" else F.silu
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * module.weight * act(gate)
    assert distance(y, expected.double()) < CLOSE
    inputs, upstream = (x, gate, module.weight), torch.randn_like(y)
    for mine, right in zip(gradients(y, inputs, upstream), gradients(expected, inputs, upstream)):
        assert distance(mine, right.double()) < CLOSE


def test_what_stays_with_fla():
    from libkda import _fla_layer
    x, weight = torch.randn(1, 5, 8), torch.randn(8, 4)
    conv = lambda **changes: _fla_layer.refusal("causal_conv1d_fwd", dict(x=x, weight=weight, **changes))
    assert conv() is None
    assert conv(residual=x.double()) == "residual of torch.float64"
    assert conv(initial_state=torch.empty(1, 8, 4, device="meta")) == "initial_state on meta"
    assert "2 to 4 taps" in _fla_layer.refusal("causal_conv1d_update", dict(x=x, weight=torch.randn(8, 6)))
    good = dict(x=x[0], g=x[0], is_rms_norm=True)
    norm = lambda **changes: _fla_layer.refusal("layer_norm_gated_fwd", good | changes)
    assert norm() is None
    assert "a mean or a bias" in norm(is_rms_norm=False) and "a mean or a bias" in norm(bias=weight[0])
    assert "residual" in norm(residual=x[0]) and "two types" in norm(residual_dtype=torch.bfloat16)
    assert "computed again" in norm(recompute_output=True)
    libkda.fla.disable()
    with pytest.raises(Exception):  # Triton has no driver for a CPU
        modules.ShortConvolution(8, 4)(x)
    assert "disable() was called" in libkda.fla.last_path("conv")


@pytest.mark.parametrize("settings", [{}, dict(num_v_heads=4), dict(safe_gate=True, lower_bound=-5.0)], ids=str)
def test_layer(settings):
    """Prefill, decode and a training step of the unchanged layer."""
    layers = pytest.importorskip("fla.layers", reason="flash-linear-attention has them, fla-core has not")
    utils = pytest.importorskip("fla.models.utils")
    torch.manual_seed(0)
    layer = layers.KimiDeltaAttention(hidden_size=64, head_dim=32, num_heads=2, layer_idx=0, **settings)
    x = torch.randn(2, 70, 64)
    whole = layer(x)[0]
    paths = [libkda.fla.last_path(part) for part in ("kda", "conv", "norm")]
    assert paths == ["libkda: chunk_kda", "libkda: causal_conv1d_fwd", "libkda: layer_norm_gated_fwd"]
    layer.eval()
    cache, pieces = utils.Cache(), []
    with torch.no_grad():
        for piece in (x[:, :66], *x[:, 66:].split(1, 1)):
            out, _, cache = layer(piece, past_key_values=cache, use_cache=True)
            pieces.append(out)
    assert libkda.fla.last_path("conv") == "libkda: causal_conv1d_update"
    assert distance(torch.cat(pieces, 1), whole.double()) < 1e-5
    layer.train()
    target, losses = torch.randn(2, 70, 64), []
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(layer(x)[0], target)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]
