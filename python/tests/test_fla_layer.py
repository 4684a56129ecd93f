# SPDX-License-Identifier: Apache-2.0
"""FLA's short convolution, gated norm and KDA layer on a CPU, where Triton has no kernels."""
import contextlib
import copy

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
    from libkda.fla import layer
    x, weight = torch.randn(1, 5, 8), torch.randn(8, 4)
    conv = lambda **changes: layer.refusal("causal_conv1d_fwd", dict(x=x, weight=weight, **changes))
    assert conv() is None
    assert conv(residual=x.double()) == "residual of torch.float64"
    assert conv(initial_state=torch.empty(1, 8, 4, device="meta")) == "initial_state on meta"
    assert "2 to 4 taps" in layer.refusal("causal_conv1d_update", dict(x=x, weight=torch.randn(8, 6)))
    good = dict(x=x[0], g=x[0], is_rms_norm=True)
    norm = lambda **changes: layer.refusal("layer_norm_gated_fwd", good | changes)
    assert norm() is None
    assert "a mean or a bias" in norm(is_rms_norm=False) and "a mean or a bias" in norm(bias=weight[0])
    assert "residual" in norm(residual=x[0]) and "two types" in norm(residual_dtype=torch.bfloat16)
    assert "computed again" in norm(recompute_output=True)
    libkda.fla.disable()
    with pytest.raises(Exception):  # Triton has no driver for a CPU
        modules.ShortConvolution(8, 4)(x)
    assert "disable() was called" in libkda.fla.last_path("conv")


def decoded(layer, x):
    """What a layer makes of 66 tokens and then of one after the other."""
    cache, pieces = pytest.importorskip("fla.models.utils").Cache(), []
    with torch.no_grad():
        for piece in (x[:, :66], *x[:, 66:].split(1, 1)):
            out, _, cache = layer(piece, past_key_values=cache, use_cache=True)
            pieces.append(out)
    return torch.cat(pieces, 1)


def losses_of(layer, x):
    """Of two steps of training."""
    target, losses = torch.randn_like(x), []
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(layer(x)[0], target)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
        optimizer.step()
        losses.append(loss.item())
    return losses


LAYERS = {"KimiDeltaAttention": "chunk_kda", "GatedDeltaNet": "chunk_gated_delta_rule"}


@pytest.mark.parametrize("name, settings", [
    ("KimiDeltaAttention", {}), ("KimiDeltaAttention", dict(num_v_heads=4)),
    ("KimiDeltaAttention", dict(safe_gate=True, lower_bound=-5.0)), ("GatedDeltaNet", {}),
    ("GatedDeltaNet", dict(num_v_heads=4, allow_neg_eigval=True, expand_v=1.5, conv_bias=True))], ids=str)
def test_layer(name, settings):
    """Prefill, decode and a training step of the unchanged layer."""
    layers = pytest.importorskip("fla.layers", reason="flash-linear-attention has them, fla-core has not")
    torch.manual_seed(0)
    layer = getattr(layers, name)(hidden_size=64, head_dim=32, num_heads=2, layer_idx=0, **settings)
    x = torch.randn(2, 70, 64)
    whole = layer(x)[0]
    paths = [libkda.fla.last_path(part) for part in ("kda", "conv", "norm")]
    assert paths == [f"libkda: {LAYERS[name]}", "libkda: causal_conv1d_fwd", "libkda: layer_norm_gated_fwd"]
    layer.eval()
    found = decoded(layer, x)
    assert libkda.fla.last_path("conv") == "libkda: causal_conv1d_update"
    assert libkda.fla.last_path().startswith("libkda: fused_recurrent_")
    assert distance(found, whole.double()) < 1e-5
    losses = losses_of(layer.train(), x)
    assert losses[1] < losses[0]


# ---- a decode step of the whole layer, which a GPU has in one kernel -------------------------------------------------

@pytest.fixture
def layer_with_cache(monkeypatch, on_the_device):
    """Makes a layer whose steps are served on a CPU too, and its cache behind a prefill."""
    layers = pytest.importorskip("fla.layers", reason="flash-linear-attention has them, fla-core has not")
    utils = pytest.importorskip("fla.models.utils")
    monkeypatch.setattr("libkda.fla.step._DEVICES", ("cpu", "cuda"))

    def make(**settings):
        torch.manual_seed(0)
        layer = layers.KimiDeltaAttention(hidden_size=32, head_dim=128, num_heads=2, layer_idx=0, **settings).eval()
        cache = utils.Cache()
        with torch.no_grad():
            layer(torch.randn(3, 9, 32), past_key_values=cache, use_cache=True)
        return layer, cache
    return make


def steps(layer, cache, count=3, change=lambda cache: None, **arguments):
    """Outputs of steps of the same tokens, and the states behind them."""
    torch.manual_seed(1)
    outputs = []
    with torch.no_grad():
        for _ in range(count):
            outputs.append(layer(torch.randn(3, 1, 32), past_key_values=cache, use_cache=True, **arguments)[0])
            change(cache)
    return torch.cat(outputs, 1), cache[0]["recurrent_state"].clone(), torch.cat(cache[0]["conv_state"], 1)


@pytest.mark.parametrize("settings", [{}, dict(safe_gate=True, lower_bound=-5.0, conv_bias=True)], ids=str)
def test_a_step_of_the_layer(layer_with_cache, monkeypatch, settings):
    """As the layer's own forward has it, on caches that have been joined, and on those that beam search has moved."""
    reorder = lambda cache: cache.reorder_cache(torch.tensor([2, 0, 1]))
    for change in (lambda cache: None, reorder):
        found = steps(*layer_with_cache(**settings), change=change)
        assert libkda.fla.last_path("step") == "libkda: fused_decode"
        with monkeypatch.context() as patch:
            patch.setattr("libkda.fla.step._DEVICES", ())
            expected = steps(*layer_with_cache(**settings), change=change)
        assert "tensors on c" in libkda.fla.last_path("step")
        for mine, right in zip(found, expected):
            assert mine.shape == right.shape and distance(mine, right.double()) < 1e-5


def test_a_step_keeps_caches_together(layer_with_cache, monkeypatch):
    """No copies from the second step on; the count of tokens goes on, and changed weights are seen."""
    layer, cache = layer_with_cache()
    steps(layer, cache, 1)
    first, state = cache[0]["conv_state"], cache[0]["recurrent_state"]
    steps(layer, cache, 1, attention_mask=torch.ones(3, 11))
    assert libkda.fla.last_path("step") == "libkda: fused_decode"
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(first, cache[0]["conv_state"]))
    assert cache[0]["recurrent_state"] is state and cache.get_seq_length() == 11
    layer.k_conv1d.weight.data.mul_(2)  # no count of changes sees it
    before = copy.deepcopy(cache)
    found = steps(layer, cache, 1)
    monkeypatch.setattr("libkda.fla.step._DEVICES", ())
    for mine, right in zip(found, steps(layer, before, 1)):
        assert distance(mine, right.double()) < 1e-5


def test_steps_that_stay_with_the_layer(layer_with_cache, monkeypatch):
    layer, cache = layer_with_cache()
    x, call = torch.randn(3, 1, 32), dict(past_key_values=cache, use_cache=True)
    path = lambda: libkda.fla.last_path("step")
    layer(x, **call)
    assert "gradients" in path()
    with torch.no_grad():
        layer(x.expand(-1, 2, -1), **call)
        assert "one token" in path()
        mask = torch.ones(3, 2, dtype=torch.int32)
        layer(x, attention_mask=mask, **call)
        assert path() == "libkda: fused_decode"
        mask[1, 1] = 0  # the same tensor, other values
        layer(x, attention_mask=mask, **call)
        assert "no token" in path()
        hook = layer.k_conv1d.register_forward_hook(lambda *args: None)
        layer(x, **call)
        assert "hooks" in path()
        hook.remove()
        layer.o_norm.forward = layer.o_norm.forward
        layer(x, **call)
        assert "forward of its own" in path()
        del layer.o_norm.forward
        layer(x, **call)
        assert path() == "libkda: fused_decode"
        layer(x)
        assert "without states" in path()
        monkeypatch.setenv("FLA_LIBKDA", "0")
        with contextlib.suppress(Exception):  # Triton has no driver for a CPU
            layer(x, **call)
        assert "FLA_LIBKDA is off" in path()
        monkeypatch.delenv("FLA_LIBKDA")
        for settings, reason in ((dict(num_v_heads=4), "value heads"), (dict(use_short_conv=False), "convolutions"),
                                 (dict(allow_neg_eigval=True), "allow_neg_eigval")):
            other, states = layer_with_cache(**settings)
            other(x, past_key_values=states, use_cache=True)
            assert reason in path()
