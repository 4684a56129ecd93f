# SPDX-License-Identifier: Apache-2.0
"""The short convolution and the gated RMS norm beside torch's own functions, with gradients."""
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import libkda
from libkda._binding import layer_ops

TYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def conv_in_torch(x, weight, bias=None, silu=False, state=None):
    """y and all inputs, those of the state in front."""
    u = x.transpose(1, 2) if state is None else torch.cat([state, x.transpose(1, 2)], -1)
    taps = weight.shape[1]
    padded = F.pad(u, (max(taps - 1 - (u.shape[-1] - x.shape[1]), 0), 0))
    y = F.conv1d(padded, weight[:, None], bias, groups=x.shape[2])[:, :, -x.shape[1]:] if x.shape[1] else x[:, :0]
    y = y.transpose(1, 2) if x.shape[1] else y
    return F.silu(y) if silu else y, u


def norm_in_torch(x, gate=None, weight=None, eps=1e-5, activation="sigmoid"):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    act = {"sigmoid": torch.sigmoid, "silu": F.silu, "swish": F.silu, None: lambda x: x}[activation]
    return y if gate is None else y * act(gate)


def close(found, expected, dtype=torch.float32):
    return (found.double() - expected.double()).abs().max() <= ROUNDING[dtype] * (1 + expected.abs().max())


def leaves(*shapes, dtype=torch.float32):
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def gradients(outputs, inputs, upstream):
    return torch.autograd.grad(outputs, inputs, upstream)


# ---- short convolution -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_short_conv(taps, with_state, silu):
    B, T, D, S = 2, 37, 21, 5
    x, weight, bias, state = leaves((B, T, D), (D, taps), (D,), (B, D, S))
    state = state if with_state else None
    inputs = [x, weight, bias] + [state] * with_state
    y, final = libkda.short_conv(x, weight, bias, activation="silu" if silu else None, initial_state=state,
                                 output_final_state=True)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    expected, u = conv_in_torch(*wide[:3], silu, wide[3] if with_state else None)
    S = S if with_state else taps
    assert y.is_contiguous() and final.shape == (B, D, S)
    assert close(y, expected) and torch.equal(final, u[..., -S:].float())
    upstream = torch.randn_like(y), torch.randn_like(final)
    found = gradients((y, final), inputs, upstream)
    right = gradients((expected, u[..., -S:]), wide, [t.double() for t in upstream])
    for mine, theirs in zip(found, right):
        assert close(mine, theirs)


@pytest.mark.parametrize("dtype", TYPES)
def test_short_conv_of_channels_first(dtype):
    """[B, D, T] in memory, a view with gaps, and the gradient through both."""
    x = torch.randn(2, 30, 70).to(dtype).requires_grad_()
    weight = torch.randn(20, 4).requires_grad_()
    y, none = libkda.short_conv(x[:, 3:23].transpose(1, 2), weight)
    wide = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = conv_in_torch(wide[0][:, 3:23].transpose(1, 2), wide[1])[0]
    assert none is None and y.dtype == dtype and close(y, expected, dtype)
    upstream = torch.randn_like(y)
    for mine, theirs in zip(gradients(y, (x, weight), upstream), gradients(expected, wide, upstream.double())):
        assert close(mine, theirs, dtype)


@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
def test_short_conv_of_packed_sequences(index_type):
    lengths = [3, 0, 1, 60]
    x, weight, state = leaves((1, 64, 9), (9, 4), (4, 9, 3))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(index_type)
    y, final = libkda.short_conv(x, weight, activation="silu", initial_state=state, output_final_state=True,
                                 cu_seqlens=cu_seqlens)
    parts = zip(x.split(lengths, 1), range(4))
    single = [libkda.short_conv(part, weight, activation="silu", initial_state=state[n:n + 1], output_final_state=True)
              for part, n in parts]
    assert torch.equal(y, torch.cat([one for one, _ in single], 1))
    assert torch.equal(final, torch.cat([one for _, one in single]))
    upstream = torch.randn_like(y), torch.randn_like(final)
    found = gradients((y, final), (x, weight, state), upstream)
    right = gradients((torch.cat([one for one, _ in single], 1), torch.cat([one for _, one in single])),
                      (x, weight, state), upstream)
    assert torch.equal(found[0], right[0]) and close(found[1], right[1]) and torch.equal(found[2], right[2])


def test_update_in_place():
    """A prefill and single tokens in a pool, whose slots have other bytes between them, are the whole."""
    x, weight = torch.randn(2, 20, 12), torch.randn(12, 4)
    whole, _ = libkda.short_conv(x, weight, activation="silu")
    page = torch.full((5, 100), 7.0)
    pool = page[:, 8:8 + 36].view(5, 12, 3)
    slots, fresh = torch.tensor([4, 1]), torch.tensor([False, False])
    version = pool._version
    pieces = [libkda.short_conv_update(x[:, :15], pool, weight, activation="silu", indices=slots, has_state=fresh)]
    pieces += [libkda.short_conv_update(x[:, t:t + 1], pool, weight, activation="silu", indices=slots)
               for t in range(15, 20)]
    assert pool._version == version + 6
    assert torch.equal(torch.cat(pieces, 1), whole)
    assert torch.equal(pool[slots], x[:, -3:].transpose(1, 2))
    assert (page[[0, 2, 3]] == 7).all() and (page[:, :8] == 7).all() and (page[:, 44:] == 7).all()


def test_null_slots():
    x, weight = torch.randn(3, 1, 8), torch.randn(8, 4)
    pool = torch.randn(3, 8, 4)
    before = pool.clone()
    y = libkda.short_conv_update(x, pool, weight, indices=torch.tensor([0, 2, 0]), first_slot=1)
    assert torch.equal(pool[:2], before[:2]) and not torch.equal(pool[2], before[2])
    assert torch.equal(y[0], x[0] * weight[:, 3])


def test_the_states_of_a_graph():
    pool = torch.zeros(1, 4, 3)
    x = torch.randn(1, 2, 4, requires_grad=True)
    with pytest.raises(NotImplementedError, match="updated in place"):
        libkda.short_conv_update(x, pool, torch.randn(4, 3))
    with torch.no_grad():
        libkda.short_conv_update(x, pool, torch.randn(4, 3))


# ---- gated RMS norm --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("activation", ["sigmoid", "silu", "swish", None])
@pytest.mark.parametrize("shape", [(17,), (3, 128), (2, 3, 5, 40), (2, 1, 2, 3, 8)], ids=str)
def test_gated_rms_norm(shape, activation):
    inputs = leaves(shape, shape, shape[-1:])
    y = libkda.gated_rms_norm(*inputs, eps=1e-4, activation=activation)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    expected = norm_in_torch(*wide, 1e-4, activation)
    assert y.shape == shape and close(y, expected)
    upstream = torch.randn_like(y)
    for mine, theirs in zip(gradients(y, inputs, upstream), gradients(expected, wide, upstream.double())):
        assert close(mine, theirs)


@pytest.mark.parametrize("dtype", TYPES)
def test_gated_rms_norm_of_views(dtype):
    wide = torch.randn(2, 6, 4, 40).to(dtype)
    x, gate = wide[:, :, ::2, :20], wide.transpose(1, 2)[:, :2, :, 20:].transpose(1, 2)
    assert close(libkda.gated_rms_norm(x, gate), norm_in_torch(x.double(), gate.double()), dtype)
    turned = x.transpose(2, 3)  # its last dimension is not contiguous
    assert close(libkda.gated_rms_norm(turned, weight=torch.ones(2)), norm_in_torch(turned.double()), dtype)


def test_gradients_of_a_part():
    x, gate, weight = leaves((4, 16), (4, 16), (16,))
    upstream = torch.randn(4, 16)
    every = gradients(libkda.gated_rms_norm(x, gate, weight), (x, gate, weight), upstream)
    only = gradients(libkda.gated_rms_norm(x.detach(), gate.detach(), weight), weight, upstream)
    assert torch.equal(every[2], only[0])
    broadcast = gradients(libkda.gated_rms_norm(x, gate, weight).sum(), gate, None)  # d_y of strides 0
    assert close(broadcast[0], gradients(libkda.gated_rms_norm(x, gate, weight), gate, torch.ones(4, 16))[0])


# ---- both ------------------------------------------------------------------------------------------------------------

def test_no_second_derivatives():
    x, weight = leaves((1, 6, 4), (4, 4))
    for y in (libkda.short_conv(x, weight)[0], libkda.gated_rms_norm(x, x)):
        first, = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="no second derivatives"):
            first.sum().backward()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones(1, 6, 4))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            libkda.short_conv(dual, weight)


def test_operators():
    """Fake kernels give what the real ones give, aliases and mutations are as declared."""
    x, weight, bias, state = leaves((2, 6, 4), (4, 3), (4,), (2, 4, 3))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    ops = torch.ops.libkda
    torch.library.opcheck(ops.short_conv.default, (x, weight, bias, state, None, True, 3), test_utils=tests)
    torch.library.opcheck(ops.short_conv.default, (x, weight, None, None, None, True, 0), test_utils=tests)
    torch.library.opcheck(ops.gated_rms_norm.default, (x, x.detach() + 1, None, 1e-5, 1), test_utils=tests)
    plain = [t.detach() for t in (x, weight, bias, state)]
    torch.library.opcheck(ops.short_conv_update.default,
                          (plain[0], plain[3], *plain[1:3], None, None, None, True, 0),
                          test_utils=("test_schema", "test_faketensor"))
    y = torch.empty(2, 6, 4)
    for operator, args in ((ops.short_conv_into, (*plain, None, True, 3, y)),
                           (ops.short_conv_update_into, (plain[0], plain[3], *plain[1:3], *[None] * 3, True, 0, y)),
                           (ops.gated_rms_norm_into, (plain[0], None, None, 1e-5, 1, y))):
        torch.library.opcheck(operator.default, args, test_utils=("test_schema", "test_faketensor"))


def test_compiled():
    x, weight = leaves((2, 30, 8), (8, 4))
    states = torch.zeros(2, 8, 4)

    def call(x, states):
        y, final = libkda.short_conv(x, weight, activation="silu", output_final_state=True)
        return libkda.gated_rms_norm(y, x).sum() + final.sum()

    def step(x, states):
        with torch.no_grad():
            return libkda.short_conv_update(x, states, weight)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert close(compiled(x, states), call(x, states))
    assert close(torch.autograd.grad(compiled(x, states), x)[0], torch.autograd.grad(call(x, states), x)[0])
    expected = step(x, states.clone())
    assert torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(x, states), expected)
    assert torch.equal(states, libkda.short_conv(x, weight, output_final_state=True)[1])
    torch._dynamo.reset()


def refusal(call, *args, **options):
    with pytest.raises((TypeError, ValueError)) as caught:
        call(*args, **options)
    return str(caught.value)


def test_bad_convolutions():
    x, weight, state = torch.randn(2, 6, 4), torch.randn(4, 3), torch.randn(2, 4, 3)
    conv, update = libkda.short_conv, libkda.short_conv_update
    assert refusal(conv, [1], weight).startswith("x must be a torch.Tensor, got list")
    assert refusal(conv, x.double(), weight) == "x must be float32, bfloat16 or float16, got torch.float64"
    assert refusal(conv, x[0], weight).startswith("x must have shape [B, T, D], got [6, 4]")
    assert refusal(conv, x, weight.T.contiguous()).startswith("weight must have shape [D, W]=[4, W], got [3, 4]")
    assert "weight must have 2 to 4 taps, got 5" in refusal(conv, x, torch.randn(4, 5))
    assert refusal(conv, x, weight, torch.randn(3)).startswith("bias must have shape [D]=[4], got [3]")
    assert refusal(conv, x, weight, activation="gelu").startswith("activation must be one of None, 'silu', 'swish'")
    assert refusal(conv, x, weight, initial_state=state[:1]).startswith("initial_state must have shape [N, D, S]")
    assert "at least 2 inputs" in refusal(conv, x, weight, initial_state=state[..., :1])
    assert refusal(conv, x, weight, output_final_state=True, state_width=1).startswith("state_width must be 2 to")
    assert "state_width must be that of initial_state, 3, got 4" in refusal(
        conv, x, weight, initial_state=state, output_final_state=True, state_width=4)
    assert "x must have B = 1 with cu_seqlens, got 2" in refusal(conv, x, weight, cu_seqlens=torch.tensor([0, 6]))
    assert "cu_seqlens: ends with 5" in refusal(conv, x[:1], weight, cu_seqlens=torch.tensor([0, 5]))
    assert refusal(conv, x, weight, cu_seqlens=torch.tensor([0.0, 6])).startswith("cu_seqlens must be int32 or int64")
    assert "states must have shape [1, 4, 3], got [2, 4, 3]" in refusal(update, x[:1], state, weight)
    assert refusal(conv, x[..., :0], weight[:0]).startswith("x: is 0, must be 1")
    before = state.clone()
    assert "indices: slot 1 would be written twice" in refusal(update, x, state, weight, indices=torch.tensor([1, 1]))
    assert "indices: entry 1 = 2 is outside 0..1" in refusal(update, x, state, weight, indices=torch.tensor([1, 2]))
    assert refusal(update, x, state, weight, indices=torch.tensor([1])).startswith("indices must have shape [N]=[2]")
    assert refusal(update, x, state, weight, first_slot=-1).startswith("first_slot must be 0 to")
    assert refusal(update, x, state, weight, has_state=torch.zeros(2)).startswith("has_state must be bool or uint8")
    assert torch.equal(state, before)


def test_bad_norms():
    x = torch.randn(2, 6)
    norm = libkda.gated_rms_norm
    assert refusal(norm, x, x[:1]).startswith("gate must have the shape of x, [2, 6], got [1, 6]")
    assert refusal(norm, x, weight=torch.ones(5)).startswith("weight must have shape [D]=[6], got [5]")
    assert refusal(norm, x, eps=-1.0) == "eps: is -1, must be finite in fp32 and not negative"
    assert refusal(norm, x, eps="small").startswith("eps must be a number")
    assert refusal(norm, x, activation="gelu").startswith("activation must be one of 'sigmoid', 'silu', 'swish', None")
    assert refusal(norm, x.int()).startswith("x must be float32, bfloat16 or float16")


def test_a_gpu_has_fake_kernels():
    with FakeTensorMode():
        x, weight = torch.empty(2, 4, 8, device="cuda"), torch.empty(8, 4, device="cuda")
        y, state = libkda.short_conv(x.transpose(0, 1), weight, output_final_state=True)
        assert (y.shape, y.device.type, state.shape) == ((4, 2, 8), "cuda", (4, 8, 4))
        assert libkda.short_conv_update(x, weight.expand(2, 8, 4).clone(), weight).shape == (2, 4, 8)
        assert libkda.gated_rms_norm(x.bfloat16(), x).dtype is torch.bfloat16
        with pytest.raises(ValueError, match="x must be on the CPU or on a CUDA device, got meta"):
            layer_ops._short_conv(x.to("meta"), weight.to("meta"), None, None, None, False, 0)


@pytest.mark.parametrize("channels, dtype", [(512, torch.bfloat16), (40, torch.float32), (37, torch.float16)])
def test_a_device(device, channels, dtype):
    """A conv in front of a norm, with gradients, from inputs whose tokens or channels lie side by side."""
    for first in (False, True):
        x = torch.randn(2, channels, 70) if first else torch.randn(2, 70, channels)
        x = x.to(device, dtype).transpose(1, 2) if first else x.to(device, dtype)
        rest = [torch.randn(shape, device=device).to(dtype) for shape in ((channels, 4), (channels,), (2, channels, 3))]
        leaves = [t.detach().requires_grad_() for t in (x, *rest)]
        exact = [t.detach().double().requires_grad_() for t in leaves]
        conv = lambda x, weight, bias, state: libkda.short_conv(x, weight, bias, activation="silu", initial_state=state)
        y = libkda.gated_rms_norm(conv(*leaves)[0], leaves[0], leaves[2])
        z, _ = conv_in_torch(exact[0], exact[1], exact[2], True, exact[3])
        expected = norm_in_torch(z, exact[0], exact[2])
        upstream = torch.randn_like(y)
        assert close(y, expected, dtype)
        found = gradients(y, leaves, upstream)
        for one, other in zip(found, gradients(expected, exact, upstream.double())):
            assert close(one, other, dtype), (one.double() - other).abs().max()
        for one, other in zip(found, gradients(libkda.gated_rms_norm(conv(*leaves)[0], leaves[0], leaves[2]), leaves,
                                               upstream)):
            assert torch.equal(one, other)


# ---- into the caller's memory ----------------------------------------------------------------------------------------

def outs(shape, device, dtype):
    """Views of that shape in buffers of NaN, and the buffers: dense; with gaps between rows; channels first."""
    nan = lambda *sizes: torch.full(sizes, float("nan"), device=device, dtype=dtype)
    *rows, D = shape
    dense, wide, first = nan(*shape), nan(*rows, D + 5), nan(*rows[:-1], D, rows[-1])
    return (dense, dense), (wide[..., 2:-3], wide), (first.transpose(-1, -2), first)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("D", [256, 37])
def test_out_of_convolutions(device, dtype, D):
    """The bits of a result of its own, in any memory and type, and nothing beside it."""
    x, weight = torch.randn(2, 30, D, device=device).to(dtype), torch.randn(D, 4, device=device)
    state = torch.randn(2, D, 3, device=device)
    options = dict(activation="silu", initial_state=state, output_final_state=True)
    y, final = libkda.short_conv(x, weight, **options)
    pools = state.clone(), state.clone()
    stepped = libkda.short_conv_update(x[:, :1], pools[0], weight, activation="silu")
    for (out, buffer), (step, _) in zip(outs(y.shape, device, dtype), outs(stepped.shape, device, dtype)):
        version = out._version
        found, behind = libkda.short_conv(x, weight, out=out, **options)
        assert found is out and out._version > version
        assert torch.equal(out, y) and torch.equal(behind, final)
        assert buffer.isnan().sum() == buffer.numel() - out.numel()
        pool = state.clone()
        assert libkda.short_conv_update(x[:, :1], pool, weight, activation="silu", out=step) is step
        assert torch.equal(step, stepped) and torch.equal(pool, pools[0])
    wide = torch.empty(2, 30, D, device=device)
    exact = conv_in_torch(x.double(), weight.double(), None, True, state.double())[0]
    assert close(libkda.short_conv(x, weight, out=wide, **options)[0], exact)  # fp32, whatever x is


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(7,), (3, 128), (2, 3, 5, 40), (2, 1, 2, 3, 8)], ids=str)
def test_out_of_norms(device, dtype, shape):
    x, gate = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(shape[-1], device=device)
    y = libkda.gated_rms_norm(x, gate, weight)
    views = outs(shape, device, dtype)[:1 if len(shape) > 4 else 2] if len(shape) > 1 else [(torch.empty_like(x),) * 2]
    for out, buffer in views:
        assert libkda.gated_rms_norm(x, gate, weight, out=out) is out
        assert torch.equal(out, y) if out is buffer else close(out, y, dtype)  # a GPU adds rows by their alignment
        assert out is buffer or buffer.isnan().sum() == buffer.numel() - out.numel()
    wide = torch.empty(shape, device=device)
    libkda.gated_rms_norm(x, gate, weight, out=wide)
    assert close(wide, norm_in_torch(x.double(), gate.double(), weight.double()))


def test_bad_outs(device):
    normal = lambda *shape: torch.randn(*shape, device=device)
    x, weight, state = normal(2, 6, 4), normal(4, 3), normal(2, 4, 3)
    conv = lambda out, **more: libkda.short_conv(x, weight, out=out, **more)
    update = lambda out, states=state: libkda.short_conv_update(x, states, weight, out=out)
    norm = lambda out, rows=x: libkda.gated_rms_norm(rows, out=out)
    kept = x.clone(), weight.clone(), state.clone()
    for call, name in ((conv, r"[B, T, D]=[2, 6, 4]"), (update, r"[B, T, D]=[2, 6, 4]")):
        assert f"out must have shape {name}, got [2, 6, 5]" in refusal(call, normal(2, 6, 5))
    assert refusal(norm, normal(3, 6, 4)) == "out must have the shape of x, [2, 6, 4], got [3, 6, 4]"
    assert refusal(norm, normal(2, 6, 5)).startswith("out must have shape [.., D]=[.., 4], got [5]")
    for call in (conv, update, norm):
        assert refusal(call, [1]).startswith("out must be a torch.Tensor, got list")
        assert refusal(call, x.double()) == "out must be float32, bfloat16 or float16, got torch.float64"
        assert refusal(call, x) == "out: overlaps x"
        assert refusal(call, normal(2, 6, 1).expand(2, 6, 4)).startswith("out: is written, and its elements overlap")
        assert refusal(call, x.to("meta")).startswith("out must be on the device of x")
        with pytest.raises(NotImplementedError, match="no backward pass of (states that are|what is written)"):
            call(torch.empty_like(x).requires_grad_())
    assert refusal(norm, normal(2, 4, 6).mT) == "out: innermost stride is 6, must be 1"
    six = normal(1, 2, 3, 2, 4, 4)
    assert refusal(norm, normal(1, 2, 3, 2, 4, 8)[..., :4], six) == "out must be contiguous where it has 6 dimensions"
    room = normal(2, 200)
    assert refusal(update, room.flatten()[:48].view(2, 6, 4), room[:, :12].view(2, 4, 3)) == "out: overlaps states"
    slots = torch.zeros(48, dtype=torch.int32, device=device)
    assert refusal(libkda.short_conv_update, x, state, weight, indices=slots[:2].add_(torch.tensor([0, 1]).to(slots)),
                   out=slots.view(torch.float32).view(2, 6, 4)) == "out: overlaps indices"
    assert all(torch.equal(*pair) for pair in zip(kept, (x, weight, state)))


def test_outs_compile():
    x, weight = torch.randn(2, 30, 8), torch.randn(8, 4)

    def layer(x, states, y, z, u):
        libkda.short_conv(x, weight, out=y)
        libkda.short_conv_update(x, states, weight, out=z)
        return libkda.gated_rms_norm(y, z, out=u) * 2

    make = lambda: [torch.zeros(2, 8, 3), *(torch.zeros(2, 30, 8) for _ in range(3))]
    found, expected = make(), make()
    with torch.no_grad():
        result = torch.compile(layer, backend="aot_eager", fullgraph=True)(x, *found)
        assert torch.equal(result, layer(x, *expected))
    assert all(torch.equal(*pair) and pair[0].any() for pair in zip(found, expected))
    torch._dynamo.reset()


def test_threads_do_not_matter():
    x, weight = leaves((1, 300, 400), (400, 4))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            y, _ = libkda.short_conv(x, weight, activation="silu")
            z = libkda.gated_rms_norm(y, x)
            found.append((y, z, *torch.autograd.grad(z.square().sum(), (x, weight))))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other))
