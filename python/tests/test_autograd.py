# SPDX-License-Identifier: Apache-2.0
"""Gradients of chunk_kda: against autograd through the recurrence in float64, and under everything that torch does
with a function that has gradients."""
import threading

import nan_memory
import pytest
import torch
import torch.nn.functional as F
from common import FLAGS, distance, make, reference
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

from libkda import chunk_gated_delta_rule, chunk_kda, naive, ops

ROWS = ("q", "k", "v", "g", "beta")
KEPT, BACKWARD, FORWARD = (getattr(torch.ops.libkda, name).default for name in ("forward_kept", "backward", "forward"))
TAIL = (ops.GATE_LOG, ops.BETA_SIGMOID, -5.0, 0.125, True, False)


def problem(gates="log", **sizes):
    """Leaves by name: rows, state, parameters of the gate if it has some."""
    x, parameters, state = make(**dict(dict(T=131, H=2, HV=4, K=32, V=24), **sizes), gates=gates)
    leaves = dict(x, initial_state=state, **(parameters if gates != "log" else {}))
    return {name: t.requires_grad_() for name, t in leaves.items()}


def flags_of(gates):
    return dict(FLAGS, use_gate_in_kernel=gates != "log", lower_bound=-5.0 if gates == "bounded" else None)


def weights_of(*outputs, types=()):
    """The same for the same shapes, of the type of each, or rounded to `types`."""
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in outputs]
    return [w.to(dtype).to(x) for w, x, dtype in zip(weights, outputs, types or [x.dtype for x in outputs])]


def gradients(function, leaves, wanted=None, types=(), **flags):
    """Of a loss on o and the final state that has another weight for each of their elements."""
    outputs = [x for x in function(**leaves, **flags) if x is not None]
    loss = sum((x * weight).sum() for x, weight in zip(outputs, weights_of(*outputs, types=types)))
    names = wanted or list(leaves)
    return dict(zip(names, torch.autograd.grad(loss, [leaves[name] for name in names])))


def through_operator(keep=None):
    """forward_kept, or without `keep` forward."""
    def call(q, k, v, g, beta, initial_state):
        arguments = (q, k, v, g, beta, None, None, initial_state, None, None, ops.GATE_LOG, ops.BETA_SIGMOID, -5.0,
                     q.shape[-1]**-0.5, True, False, True)
        return FORWARD(*arguments) if keep is None else KEPT(*arguments, None, keep)[:2]
    return call


def reference_of(leaves, gates="log", lengths=None, double=False, scale=None, l2norm=True, sigmoid=True,
                 output_final_state=True, v_first=False):
    """The recurrence in float64, a sequence at a time, differentiable."""
    x = {name: t.double() for name, t in leaves.items()}
    lower_bound = -5.0 if gates == "bounded" else None
    if gates == "softplus":
        x["g"] = -x["A_log"].exp()[:, None] * F.softplus(x["g"] + x["dt_bias"].view(x["g"].shape[-2:]))
    if gates == "bounded":
        rate = x["A_log"].exp()[:, None] if "A_log" in x else 1
        bias = x["dt_bias"].view(x["g"].shape[-2:]) if "dt_bias" in x else 0
        x["g"] = lower_bound * torch.sigmoid(rate * (x["g"] + bias))
    if l2norm:
        for name in ("q", "k"):
            x[name] = x[name] * (x[name].square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    if sigmoid:
        x["beta"] = x["beta"].sigmoid() * (2 if double else 1)
    state = x.get("initial_state")
    if state is not None and v_first:
        state = state.mT
    begin, o, final = 0, [], []
    for n, length in enumerate(lengths or [None]):
        part = {name: x[name] if length is None else x[name][:, begin:begin + length] for name in ROWS}
        start = state if length is None or state is None else state[n:n + 1]
        y, end = naive.naive_chunk_kda(**part, scale=scale, initial_state=start, output_final_state=True, chunk_size=32)
        o.append(y)
        final.append(end.mT if v_first else end)
        begin += length or 0
    return torch.cat(o, 1), torch.cat(final) if output_final_state else None


def expected_gradients(leaves, **flags):
    """In float64, never rounded."""
    exact = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    return gradients(lambda **given: reference_of(given, **flags), exact, types=(leaves["v"].dtype, torch.float32))


def expect_near(found, expected, leaves, most=3e-6):
    """Each of the type of its tensor, within one rounding of that type."""
    rounding = {torch.float32: 0, torch.bfloat16: 2.5e-3, torch.float16: 3.5e-4}
    for name, gradient in found.items():
        assert gradient.dtype is leaves[name].dtype and gradient.shape == leaves[name].shape
        error = distance(gradient, expected[name].double())
        assert error < most + rounding[gradient.dtype], f"{name}: {error}"


# ---- values ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gates", ["log", "softplus", "bounded"])
def test_every_gradient(gates, dtype):
    leaves = problem(gates, dtype=dtype)
    expected = expected_gradients(leaves, gates=gates)
    found = gradients(chunk_kda, leaves, **flags_of(gates))
    expect_near(found, expected, leaves, 3e-6 if dtype is torch.float32 else 2e-5)


@pytest.mark.parametrize("flags, ours", [
    (dict(double=True), dict(allow_neg_eigval=True)), (dict(scale=0.3), dict(scale=0.3)),
    (dict(output_final_state=False), dict(output_final_state=False)), (dict(), dict(disable_recompute=True)),
    (dict(l2norm=False), dict(use_qk_l2norm_in_kernel=False)), (dict(v_first=True), dict(state_v_first=True))],
    ids=lambda flags: ", ".join(flags) or "default")
def test_options(flags, ours):
    leaves = problem(K=32, V=32)  # a state in either layout
    if "l2norm" in flags:  # as those who normalise before would
        for name in ("q", "k"):
            leaves[name] = F.normalize(leaves[name].detach(), dim=-1).requires_grad_()
    expected = expected_gradients(leaves, **flags)
    expect_near(gradients(chunk_kda, leaves, **dict(FLAGS, **ours)), expected, leaves)


def test_plain_beta_and_zero():
    leaves = problem()
    leaves["beta"] = torch.rand(2, 131, 4).mul(2).requires_grad_()
    with torch.no_grad():
        leaves["beta"][:, ::7] = 0
    expected = expected_gradients(leaves, sigmoid=False)
    expect_near(gradients(chunk_kda, leaves, **dict(FLAGS, use_beta_sigmoid_in_kernel=False)), expected, leaves)


@pytest.mark.parametrize("absent", ["A_log", "dt_bias", "A_log and dt_bias", "initial_state"])
def test_without(absent):
    leaves = problem("bounded")
    for name in absent.split(" and "):
        del leaves[name]
    expect_near(gradients(chunk_kda, leaves, **flags_of("bounded")), expected_gradients(leaves, gates="bounded"),
                leaves)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("gates", ["log", "softplus", "bounded"])
def test_packed_sequences(gates, dtype):
    lengths = [1, 63, 0, 64, 130, 17]
    leaves = problem(gates, B=1, T=sum(lengths), N=len(lengths))
    cu = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
    expected = expected_gradients(leaves, gates=gates, lengths=lengths)
    found = gradients(chunk_kda, leaves, cu_seqlens=cu, **flags_of(gates))
    expect_near(found, expected, leaves)
    _, d_final = weights_of(leaves["v"], leaves["initial_state"])
    assert torch.equal(found["initial_state"][2], d_final[2])  # that of an empty sequence


@pytest.mark.parametrize("group", [2, 3, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_grouped_heads_are_expanded_heads(group, packed):
    lengths = [40, 0, 91] if packed else None
    leaves = problem("softplus", H=2, HV=2 * group, B=1 if packed else 2, N=3 if packed else None)
    more = dict(flags_of("softplus"), cu_seqlens=torch.tensor([0, 40, 40, 131])) if packed else flags_of("softplus")
    expand = lambda x: x.repeat_interleave(group, 2)
    call = lambda q, k, **rest: chunk_kda(expand(q), expand(k), **rest)
    expected, found = gradients(call, leaves, **more), gradients(chunk_kda, leaves, **more)
    expect_near(found, expected, leaves, 1e-6)
    for name in ("v", "beta", "g", "initial_state"):  # nothing is added up in these
        assert distance(found[name], expected[name]) < 1e-6
    expect_near(found, expected_gradients(leaves, gates="softplus", lengths=lengths), leaves)


@pytest.mark.parametrize("used", ["o", "final state"])
def test_one_output_used(used):
    leaves = problem()
    wanted = [leaves[name] for name in leaves]
    pick = lambda outputs: outputs[0].square().sum() if used == "o" else outputs[1].square().sum()
    expected = torch.autograd.grad(pick(reference_of(leaves)), wanted, allow_unused=True)
    found = torch.autograd.grad(pick(chunk_kda(**leaves, **FLAGS)), wanted)
    for name, a, b in zip(leaves, found, expected):
        if b is None:
            assert used == "final state" and name == "q" and not a.any()
        else:
            assert distance(a, b.double()) < 3e-6, name


@pytest.mark.parametrize("name", [*ROWS, "A_log", "dt_bias", "initial_state"])
def test_one_gradient_wanted(name):
    """The others are not computed, and the bits are the same."""
    leaves = problem("softplus")
    every = gradients(chunk_kda, leaves, **flags_of("softplus"))
    one = {n: t if n == name else t.detach() for n, t in leaves.items()}
    assert torch.equal(gradients(chunk_kda, one, [name], **flags_of("softplus"))[name], every[name])


def test_strides_types_and_layouts_of_inputs():
    """Channels first, rows of a packed projection, a beta with a stride, float64: gradients have the form of theirs."""
    base = problem("softplus")
    plain = {name: t.detach() for name, t in base.items()}
    turned = dict(
        plain, q=plain["q"].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
        v=torch.cat([plain["v"], plain["v"]], -1)[..., :24], g=plain["g"].double(),
        beta=torch.stack([plain["beta"]] * 3, -1)[..., 1], A_log=plain["A_log"].double()[None, None, :, None],
        dt_bias=plain["dt_bias"].view(4, 32))
    for t in turned.values():
        t.requires_grad_()
    expected = gradients(chunk_kda, base, **flags_of("softplus"))
    found = gradients(chunk_kda, turned, **flags_of("softplus"))
    for name, gradient in found.items():
        assert gradient.shape == turned[name].shape and gradient.dtype is turned[name].dtype
        assert torch.equal(gradient.flatten().float(), expected[name].flatten()), name


def test_mixed_types():
    leaves = problem("softplus")
    types = dict(q=torch.bfloat16, k=torch.float16, v=torch.bfloat16, beta=torch.float16)
    leaves = {name: t.detach().to(types.get(name, torch.float32)).requires_grad_() for name, t in leaves.items()}
    expect_near(gradients(chunk_kda, leaves, **flags_of("softplus")), expected_gradients(leaves, gates="softplus"),
                leaves, 2e-5)


def test_a_long_sequence_keeps_states():
    """What is kept spares work and changes no more than last bits; the operator says how much it is."""
    leaves = problem(B=1, T=4500, H=1, HV=2, K=16, V=8)
    found = gradients(chunk_kda, leaves, **FLAGS)
    begin = gradients(through_operator(0), leaves)
    assert all(distance(found[name], begin[name].double()) < 1e-6 for name in leaves)
    rows = [leaves[name].detach() for name in ROWS]
    for keep, size in ((ops.KEEP_NOTHING, 0), (ops.KEEP_STATES, 128 + 2 * 2 * 16 * 8 * 4), (64, 128 + 70 * 1024)):
        o, _, saved = KEPT(*rows, None, None, None, None, None, *TAIL, False, None, keep)
        assert saved.dtype is torch.uint8 and saved.shape == (size,)
        assert torch.equal(o, FORWARD(*rows, None, None, None, None, None, *TAIL, False)[0])
    kept = gradients(chunk_kda, leaves, **FLAGS, disable_recompute=True)
    for name in leaves:
        assert torch.equal(kept[name], found[name])


def test_kept_states():
    leaves = problem(T=200)
    expected = expected_gradients(leaves)
    for keep in (64, 128, ops.KEEP_STATES, ops.KEEP_CHUNKS):
        expect_near(gradients(through_operator(keep), leaves), expected, leaves)


def test_masked_states_have_no_gradient():
    leaves = problem(B=3)
    has_state = torch.tensor([True, False, True])
    found = gradients(chunk_kda, leaves, has_state=has_state, **FLAGS)["initial_state"]
    assert not found[1].any() and found[0].any() and found[2].any()


@pytest.mark.parametrize("T", [0, 1])
def test_few_tokens(T):
    leaves = problem(T=T)
    found = gradients(chunk_kda, leaves, **FLAGS)
    expected = expected_gradients(leaves) if T else None
    for name, gradient in found.items():
        assert gradient.shape == leaves[name].shape
        assert not T or distance(gradient, expected[name].double()) < 3e-6
    if T == 0:
        assert torch.equal(found["initial_state"], weights_of(leaves["v"], leaves["initial_state"])[1])


def test_gradcheck():
    """fp32 arithmetic against differences of its outputs: their noise is the tolerance. The exact check is that of the
    oracle in float64."""
    leaves = problem("softplus", B=1, T=7, H=1, HV=2, K=4, V=3)
    leaves = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    names = list(leaves)

    def call(*values):
        given = dict(zip(names, values))
        given["initial_state"] = given["initial_state"].float()
        return tuple(y.double() for y in chunk_kda(**given, **flags_of("softplus")))
    torch.autograd.gradcheck(call, tuple(leaves.values()), eps=1e-2, atol=2e-3, rtol=1e-2, nondet_tol=0.0)


# ---- what does not reach what ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("last", [0, 15, 16, 63, 64, 100])
def test_later_tokens_have_no_gradient(last):
    """Of a loss on tokens up to `last`, to the bit."""
    leaves = problem("softplus")
    o, _ = chunk_kda(**leaves, **flags_of("softplus"))
    found = torch.autograd.grad(o[:, :last + 1].square().sum(), [leaves[name] for name in ROWS])
    for name, gradient in zip(ROWS, found):
        assert not gradient[:, last + 1:].any(), name
        assert gradient[:, :last + 1].any(), name


def test_sequences_are_alone():
    """A sequence among others has the bits that it has alone, also beside one full of NaN."""
    lengths = [70, 0, 129, 33]
    cu = torch.tensor([0, 70, 70, 199, 232])
    leaves = problem("bounded", B=1, T=232, N=4)
    weights = torch.randn(1, 232, 4, 24)

    def of(leaves, cu, weights):
        o, final = chunk_kda(**leaves, cu_seqlens=cu, **flags_of("bounded"))
        names = [*ROWS, "initial_state"]
        return dict(zip(names, torch.autograd.grad((o * weights).sum() + final.sum(), [leaves[n] for n in names])))

    packed = of(leaves, cu, weights)
    spoiled = {name: t.detach().clone() for name, t in leaves.items()}
    for name in ROWS:
        spoiled[name][:, :70] = float("nan")
    beside = of({name: t.requires_grad_() for name, t in spoiled.items()}, cu, weights)
    for n, (begin, length) in enumerate(zip(cu.tolist(), lengths)):
        part = {name: t[:, begin:begin + length] if name in ROWS else t for name, t in leaves.items()}
        part["initial_state"] = leaves["initial_state"][n:n + 1]
        part = {name: t.detach().requires_grad_() for name, t in part.items()}
        alone = of(part, torch.tensor([0, length]), weights[:, begin:begin + length])
        for name, gradient in alone.items():
            cut = lambda x: x[name][n:n + 1] if name == "initial_state" else x[name][:, begin:begin + length]
            assert torch.equal(cut(packed), gradient), name
            assert n == 0 or torch.equal(cut(beside), gradient), name
    assert all(beside[name][:, :70].isnan().any() for name in ROWS)


@pytest.mark.parametrize("spoiled", ["v", "d_o"])
def test_heads_are_alone(spoiled):
    leaves = problem(H=2, HV=4)
    weights = torch.randn(2, 131, 4, 24)
    expected = torch.autograd.grad((chunk_kda(**leaves, **FLAGS)[0] * weights).sum(), list(leaves.values()))
    given = {name: t.detach().clone() for name, t in leaves.items()}
    weights = weights.clone()
    (given["v"] if spoiled == "v" else weights)[:, 50:, 0] = float("nan")
    given = {name: t.requires_grad_() for name, t in given.items()}
    found = torch.autograd.grad((chunk_kda(**given, **FLAGS)[0] * weights).sum(), list(given.values()))
    for name, a, b in zip(leaves, found, expected):
        dim, first = {"q": (2, 1), "k": (2, 1), "initial_state": (1, 1)}.get(name, (2, 1))
        assert torch.equal(a.narrow(dim, first, a.shape[dim] - first), b.narrow(dim, first, b.shape[dim] - first)), name
    assert found[0][:, :, 0].isnan().any()


# ---- bits ------------------------------------------------------------------------------------------------------------

def test_bits_do_not_depend_on_threads():
    leaves = problem("softplus", B=3, H=2, HV=6)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(gradients(chunk_kda, leaves, **flags_of("softplus")))
    finally:
        torch.set_num_threads(before)
    for found in results[1:]:
        assert all(torch.equal(found[name], results[0][name]) for name in leaves)


def test_threads_at_once():
    leaves = problem("softplus")
    expected = gradients(chunk_kda, leaves, **flags_of("softplus"))
    results = [None] * 6

    def work(i):
        own = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
        results[i] = [gradients(chunk_kda, own, **flags_of("softplus")) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for found in sum(results, []):
        assert all(torch.equal(found[name], expected[name]) for name in leaves)


def test_memory_that_held_nan():
    """Every element of a gradient is written: freed memory full of NaN, which torch hands out again, is as good."""
    leaves = problem("softplus", B=1, T=40)
    expected = gradients(chunk_kda, leaves, **flags_of("softplus"))
    seen = 0
    for _ in range(5):
        for t in leaves.values():
            poison = [torch.full_like(t, float("nan")) for _ in range(6)]
            del poison
            seen += torch.empty_like(t).isnan().any().item()
            poison = [torch.full_like(t, float("nan")) for _ in range(6)]
            del poison
        found = gradients(chunk_kda, leaves, **flags_of("softplus"))
        assert all(torch.equal(found[name], expected[name]) for name in leaves)
    assert seen > 0  # else this tests nothing


# ---- under torch's machinery -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("keep", [ops.KEEP_NOTHING, ops.KEEP_STATES, ops.KEEP_CHUNKS])
def test_opcheck_forward_kept(keep):
    leaves = problem(T=70)
    rows = [leaves[name] for name in ROWS]
    state = leaves["initial_state"]
    torch.library.opcheck(KEPT, (*rows, None, None, state, None, None, *TAIL, True, None, keep))
    cu = torch.tensor([0, 30, 70])
    packed = [t.detach()[:1].requires_grad_() for t in rows]
    torch.library.opcheck(KEPT, (*packed, None, None, None, cu, cu, *TAIL, False, None, keep))


def test_opcheck_forward_and_backward():
    leaves = problem(T=70)
    rows = [leaves[name] for name in ROWS]
    torch.library.opcheck(FORWARD, (*rows, None, None, leaves["initial_state"], None, None, *TAIL, True))
    plain = [t.detach() for t in rows]
    d_o, d_final = torch.randn(2, 70, 4, 24), torch.randn(2, 4, 32, 24)
    for given, wanted in (((d_o, d_final), 1 | 2 | 4 | 8 | 16 | 128), ((d_o, None), 4), ((None, d_final), 1 | 16)):
        state = leaves["initial_state"].detach() if wanted & 128 else None
        torch.library.opcheck(BACKWARD, (*given, *plain, None, None, state, None, None, *TAIL, None, None, 0, wanted))


def test_the_operator_has_the_gradients_of_the_function():
    leaves = problem()
    rows = [leaves[name] for name in ROWS]
    expected = gradients(chunk_kda, leaves, **FLAGS)
    found = gradients(through_operator(), leaves)
    assert all(torch.equal(found[name], expected[name]) for name in leaves)
    o, none = FORWARD(*rows, None, None, None, None, None, *TAIL, False)
    assert none.numel() == 0
    (o.sum() + none.sum()).backward()
    assert leaves["q"].grad is not None


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("gates", ["log", "softplus"])
def test_compile_as_one_graph(gates, dynamic):
    leaves = problem(gates)
    names = list(leaves)
    flags = flags_of(gates)
    call = lambda *values: chunk_kda(**dict(zip(names, values)), **flags)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    expected = gradients(chunk_kda, leaves, **flags)
    found = gradients(lambda **given: compiled(*given.values()), leaves)
    assert all(torch.equal(found[name], expected[name]) for name in names)


def test_compile_packed_sequences_in_a_module():
    leaves = problem(B=1, N=2)
    cu = torch.tensor([0, 40, 131])
    project = torch.nn.Linear(16, 2 * 32, bias=False)
    x = torch.randn(1, 131, 16, requires_grad=True)

    def call(x, cu):
        q = project(x).unflatten(-1, (2, 32))
        return chunk_kda(**dict(leaves, q=q), cu_seqlens=cu, disable_recompute=True, **FLAGS)[0].square().sum()
    expected = torch.autograd.grad(call(x, cu), [x, project.weight, leaves["v"]])
    found = torch.autograd.grad(torch.compile(call, fullgraph=True, backend="aot_eager")(x, cu),
                                [x, project.weight, leaves["v"]])
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("function", [chunk_kda, chunk_gated_delta_rule])
def test_a_training_step_is_two_operators_and_one_function(function):
    """Each operator passes torch's dispatcher once, and no other one runs: that is most of a short step's host time."""
    leaves = problem(T=20)
    if function is chunk_gated_delta_rule:
        leaves["g"] = leaves["g"].detach()[..., 0].requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        o, final = function(**leaves, **FLAGS)
    assert o.grad_fn is final.grad_fn and o.grad_fn.name() == "_ForwardBackward"
    nodes = [node for node, _ in o.grad_fn.next_functions if node is not None]
    assert {node.name() for node in nodes} == {"torch::autograd::AccumulateGrad"} and len(nodes) == len(leaves)
    outputs = (torch.ones_like(o), torch.ones_like(final))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as backward:
        torch.autograd.grad((o, final), list(leaves.values()), outputs)
    mine = "libkda::" if nan_memory.is_on() else "::"  # its checks of results are torch's operators
    operators = [[event.name for event in events.events() if mine in event.name and "autograd::" not in event.name]
                 for events in (profile, backward)]
    assert operators == [["libkda::forward_kept"], ["libkda::backward"]]


def test_fake_tensors_have_gradients():
    with FakeTensorMode() as mode:
        leaves = {name: mode.from_tensor(t.detach()).requires_grad_() for name, t in problem().items()}
        o, final = chunk_kda(**leaves, **FLAGS)
        assert o.shape == (2, 131, 4, 24) and final.shape == (2, 4, 32, 24)
        found = torch.autograd.grad((o, final), list(leaves.values()), (torch.ones_like(o), torch.ones_like(final)))
    assert all(type(x) is FakeTensor and x.shape == t.shape for x, t in zip(found, leaves.values()))


class Watched(torch.Tensor):
    """It sees the operators that it is given to."""
    seen = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_subclass_sees_the_operator_with_its_gradients():
    leaves = problem(T=20)
    expected = torch.autograd.grad(chunk_kda(**leaves, **FLAGS)[0].sum(), leaves["v"])
    Watched.seen.clear()
    o, _ = chunk_kda(**dict(leaves, q=leaves["q"].as_subclass(Watched)), **FLAGS)
    assert KEPT in Watched.seen and o.requires_grad
    assert torch.equal(torch.autograd.grad(o.sum(), leaves["v"])[0], expected[0])


def test_backward_twice():
    leaves = problem()
    o, final = chunk_kda(**leaves, **FLAGS, disable_recompute=True)
    loss = o.square().sum() + final.sum()
    first = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    again = torch.autograd.grad(loss, list(leaves.values()))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, list(leaves.values()))


@pytest.mark.parametrize("name", [*ROWS, "initial_state", "cu_seqlens"])
def test_inputs_that_change_are_noticed(name):
    leaves = problem(B=1, N=2)
    given = {n: t.detach().clone().requires_grad_() for n, t in leaves.items()}
    given["cu_seqlens"] = torch.tensor([0, 40, 131])
    o, _ = chunk_kda(**given, **FLAGS)
    with torch.no_grad():
        given[name].mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("T", [131, 4200])
def test_activation_checkpointing(reentrant, T):
    leaves = problem(B=1, T=T, H=1, HV=2)
    expected = gradients(chunk_kda, leaves, **FLAGS)
    names = list(leaves)
    call = lambda *values: chunk_kda(**dict(zip(names, values)), **FLAGS)
    o, final = checkpoint(call, *leaves.values(), use_reentrant=reentrant)
    d_o, d_final = weights_of(o, final)
    ((o * d_o).sum() + (final * d_final).sum()).backward()  # reentrant ones refuse torch.autograd.grad
    found = {name: t.grad for name, t in leaves.items()}
    assert all(torch.equal(found[name], expected[name]) for name in names)


def test_saved_tensors_that_hooks_move():
    """As offloading does: elsewhere in memory, the bits are the same."""
    leaves = problem(B=1, T=4200, H=1, HV=1)
    expected = gradients(chunk_kda, leaves, **FLAGS)

    def pack(x):
        room = torch.empty(x.numel() * x.element_size() + 8, dtype=torch.uint8)
        moved = room[8:].view(x.dtype).view(x.shape)  # less aligned than torch's memory
        return moved.copy_(x)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        found = gradients(chunk_kda, leaves, **FLAGS)
    assert all(torch.equal(found[name], expected[name]) for name in leaves)


def test_autocast_changes_no_type():
    """Every tensor is taken as it comes: bf16 from a linear layer, gates and states in fp32."""
    leaves = problem("softplus")
    project = torch.nn.Linear(16, 2 * 32, bias=False)
    x = torch.randn(2, 131, 16)
    with torch.autocast("cpu", torch.bfloat16):
        q = project(x).unflatten(-1, (2, 32))
        o, final = chunk_kda(**dict(leaves, q=q, v=leaves["v"].bfloat16()), **flags_of("softplus"))
    assert q.dtype is o.dtype is torch.bfloat16 and final.dtype is torch.float32
    (o.float().square().sum() + final.sum()).backward()
    assert project.weight.grad.dtype is leaves["v"].grad.dtype is leaves["g"].grad.dtype is torch.float32
    plain = {name: t.detach() for name, t in leaves.items()}
    without = chunk_kda(**dict(plain, q=q.detach(), v=plain["v"].bfloat16()), **flags_of("softplus"))
    assert torch.equal(without[0], o) and torch.equal(without[1], final)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func():
    leaves = problem(T=20)
    plain = {name: t.detach() for name, t in leaves.items()}
    call = lambda q, v: chunk_kda(**dict(plain, q=q, v=v), **FLAGS)[0].square().sum()
    expected = torch.autograd.grad(call(leaves["q"], leaves["v"]), [leaves["q"], leaves["v"]])
    found = torch.func.grad(call, argnums=(0, 1))(plain["q"], plain["v"])
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    few = lambda q: chunk_kda(**dict(plain, q=q), **FLAGS)[0].sum((0, 1, 2))[:3]
    assert torch.equal(torch.func.jacrev(few)(plain["q"]), torch.autograd.functional.jacobian(few, plain["q"]))
    both = torch.stack([plain["q"], 2 * plain["q"]])
    each = torch.vmap(torch.func.grad(call), (0, None))(both, plain["v"])
    assert torch.equal(each[1], torch.func.grad(call)(both[1], plain["v"]))


SECOND = "no second derivatives.*create_graph=True.*naive_chunk_kda"


@pytest.mark.parametrize("through", [KEPT, FORWARD, None])
def test_second_derivatives_are_refused(through):
    leaves = problem(T=20)
    if through is None:
        o = chunk_kda(**leaves, **FLAGS)[0]
    else:
        o = through(*(leaves[name] for name in ROWS), None, None, None, None, None, *TAIL, False)[0]
    first, = torch.autograd.grad(o.square().sum(), leaves["q"], create_graph=True)  # which alone may be asked for
    with pytest.raises(NotImplementedError, match=SECOND):
        first.sum().backward()
    call = lambda q: chunk_kda(**dict({n: t.detach() for n, t in leaves.items()}, q=q), **FLAGS)[0].square().sum()
    with pytest.raises(NotImplementedError, match=SECOND):
        torch.func.grad(lambda q: torch.func.grad(call)(q).sum())(leaves["q"].detach())
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.hessian(call)(leaves["q"].detach())


def test_forward_mode_is_refused_beside_gradients():
    leaves = problem(T=20)
    rows = [leaves[name] for name in ROWS]
    with torch.autograd.forward_ad.dual_level():
        rows[0] = torch.autograd.forward_ad.make_dual(rows[0], torch.ones_like(rows[0]))
        for call in (lambda: chunk_kda(**dict(leaves, q=rows[0]), **FLAGS),
                     lambda: KEPT(*rows, None, None, None, None, None, *TAIL, False),
                     lambda: FORWARD(*rows, None, None, None, None, None, *TAIL, False)):
            with pytest.raises(NotImplementedError, match="forward-mode"):
                call()


def test_training_reduces_a_loss():
    """A layer learns to repeat the value of a key: all of it moves."""
    torch.manual_seed(0)
    leaves = problem("softplus", B=4, T=64, H=1, HV=1, K=16, V=8)
    target = torch.randn(4, 64, 1, 8)
    optimizer = torch.optim.Adam(leaves.values(), lr=0.05)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.mse_loss(chunk_kda(**leaves, **flags_of("softplus"))[0], target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


# ---- what is not right -----------------------------------------------------------------------------------------------

def plain_call(**change):
    leaves = {name: t.detach() for name, t in problem(T=70).items()}
    arguments = dict({name: leaves[name] for name in ROWS}, d_o=torch.randn(2, 70, 4, 24), d_final_state=None,
                     A_log=None, dt_bias=None, initial_state=None, cu_seqlens=None, cu_seqlens_cpu=None, gate_mode=0,
                     beta_mode=1, lower_bound=-5.0, scale=0.125, l2norm=True, state_v_first=False, has_state=None,
                     saved=None, keep=0, wanted=1)
    return BACKWARD(**(arguments | change))


@pytest.mark.parametrize("change, text", [
    (dict(d_o=None), "d_o"), (dict(wanted=0), "wanted must have"), (dict(wanted=256), "wanted must have"),
    (dict(wanted=32), "wanted: the gradient of A_log, which the forward has not"),
    (dict(wanted=128), "wanted: the gradient of initial_state"), (dict(d_o=torch.zeros(2, 70, 4, 25)), "d_o must have"),
    (dict(d_final_state=torch.zeros(2, 4, 24, 32)), "d_final_state must have shape"),
    (dict(d_o=torch.zeros(2, 70, 4, 24, dtype=torch.float64)), "d_o must be float32, bfloat16 or float16"),
    (dict(keep=-2), "keep must be -1, 0 or tokens, got -2"), (dict(keep=65), "kept_state_every"),
    (dict(keep=64), "saved"), (dict(keep=64, saved=torch.zeros(8, dtype=torch.uint8)), "saved"),
    (dict(keep=64, saved=torch.zeros(128 + 8 * 32 * 24 * 4, dtype=torch.uint8)), "saved: was not written"),
    (dict(saved=torch.zeros(64)), "saved must be uint8")])
def test_refusals_of_the_operator(change, text):
    with pytest.raises(ValueError, match=text):
        plain_call(**change)


def test_errors_of_training_calls_are_those_of_other_calls():
    leaves = problem()
    with pytest.raises(AssertionError, match=r"beta must have shape \[B, T, HV\]"):
        chunk_kda(**dict(leaves, beta=torch.zeros(2, 131, 3, requires_grad=True)))
    with pytest.raises(ValueError, match="A_log: entry 0 = 89 is above 70"):
        chunk_kda(**leaves, A_log=torch.full((4,), 89.0), use_gate_in_kernel=True)


def test_no_backward_here():
    """What a library without a backward for a device answers is a NotImplementedError that says what to do."""
    def operator():
        raise ValueError("libkda: no backward pass: backward: no implementation of this build for cuda")
    with pytest.raises(NotImplementedError, match=r"no backward pass here \(backward: no implementation .* for cuda\)"):
        ops._above_autograd(operator, ())()
    leaves = problem(T=3)
    assert ops.has_backward(*(leaves[name] for name in ROWS))


@pytest.mark.needs_cuda
@pytest.mark.parametrize("gates, sizes, flags", [
    ("log", {}, {}), ("softplus", {}, {}), ("bounded", {}, {}), ("log", dict(K=100, V=60), {}),
    ("softplus", dict(B=1, T=4500, H=1, HV=2), dict(disable_recompute=True)),
    ("bounded", dict(B=1, T=300, N=3), dict(cu_seqlens=torch.tensor([0, 1, 200, 300])))])
def test_a_gpu_has_the_gradients_of_the_cpu(gates, sizes, flags):
    leaves = problem(gates, **sizes)
    expected = gradients(chunk_kda, leaves, **flags_of(gates), **flags)
    on_gpu = {name: t.detach().cuda().requires_grad_() for name, t in leaves.items()}
    flags = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in flags.items()}
    for name, found in gradients(chunk_kda, on_gpu, **flags_of(gates), **flags).items():
        assert distance(found.cpu(), expected[name]) < 2e-5, name


@pytest.mark.needs_cuda
@pytest.mark.parametrize("gates", ["log", "softplus", "bounded"])
def test_a_gpu_has_the_gradients_of_the_cpu_in_bf16(gates):
    """On the tensor cores (docs/design/backward.md): products of bf16 operands, results in bf16."""
    rounded = {name: t.detach().bfloat16() if name in ROWS else t.detach()
               for name, t in problem(gates, T=300, K=128, V=128).items()}
    leaves = {name: t.clone().requires_grad_() for name, t in rounded.items()}
    on_gpu = {name: t.cuda().requires_grad_() for name, t in rounded.items()}
    expected = gradients(chunk_kda, leaves, **flags_of(gates))
    for name, found in gradients(chunk_kda, on_gpu, **flags_of(gates)).items():
        most = 5e-2 if name == "A_log" else 1.5e-2  # one sum a head, whose terms may cancel
        assert distance(found.cpu().double(), expected[name].double()) < most, name


def is_hopper():
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.needs_cuda
@pytest.mark.skipif(not is_hopper(), reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("gates", ["log", "softplus", "bounded"])
@pytest.mark.parametrize("sizes, cu_seqlens", [  # chains enough
    (dict(T=150, H=16, HV=32), None), (dict(B=1, T=300, N=3, H=20, HV=20), torch.tensor([0, 1, 200, 300])),
    (dict(T=70, H=64, HV=64, K=64, V=64), None)])
def test_a_hopper_keeps_states_and_errors(gates, sizes, cu_seqlens):
    sizes = dict(dict(K=128, V=128), **sizes)
    rounded = {name: t.detach().bfloat16() if name in ROWS else t.detach()
               for name, t in problem(gates, **sizes).items()}
    leaves = {name: t.clone().requires_grad_() for name, t in rounded.items()}
    on_gpu = {name: t.cuda().requires_grad_() for name, t in rounded.items()}
    kept = []
    packed = {} if cu_seqlens is None else dict(cu_seqlens=cu_seqlens)
    expected = gradients(chunk_kda, leaves, **flags_of(gates), **packed)
    packed = {name: x.cuda() for name, x in packed.items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        outputs = chunk_kda(**on_gpu, **flags_of(gates), **packed, disable_recompute=True)
    B, T, HV, V = outputs[0].shape
    chunks = B * ((T + 63) // 64) if cu_seqlens is None else T // 64 + 3
    assert max(x.numel() for x in kept if x.dtype is torch.uint8) == 128 + chunks * HV * V * 2 * (sizes["K"] + 64)
    for name, found in gradients(chunk_kda, on_gpu, **flags_of(gates), **packed, disable_recompute=True).items():
        most = 5e-2 if name == "A_log" else 1.5e-2  # one sum a head, whose terms may cancel
        assert distance(found.cpu().double(), expected[name].double()) < most, name


@pytest.mark.needs_cuda
@pytest.mark.skipif(not is_hopper(), reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("gates", ["log", "bounded"])
@pytest.mark.parametrize("lengths", [[9000, 0, 300], [3200, 3000, 3100]])  # cut into segments, and whole
def test_lengths_on_a_hopper_alone_have_the_bits_of_host_lengths(gates, lengths):
    leaves = problem(gates, B=1, T=sum(lengths), N=len(lengths), H=2, HV=2, K=128, V=128)
    leaves = {name: (t.detach().bfloat16() if name in ROWS else t.detach()).cuda().requires_grad_()
              for name, t in leaves.items()}
    cu = torch.tensor([0, *lengths]).cumsum(0)
    on_gpu = gradients(chunk_kda, leaves, **flags_of(gates), cu_seqlens=cu.cuda())
    on_host = gradients(chunk_kda, leaves, **flags_of(gates), cu_seqlens=cu.cuda(), cu_seqlens_cpu=cu)
    assert all(torch.equal(on_gpu[name], on_host[name]) for name in leaves)


@pytest.mark.needs_cuda
@pytest.mark.skipif(not is_hopper(), reason="needs a GPU of compute capability 9.0")
def test_what_a_gpu_does_not_keep():
    rows = {name: t.detach().cuda() for name, t in problem(T=70).items()}  # K = 24 or so, in fp32
    with pytest.raises(ValueError, match="keep must be 0 or -1 on a GPU, got 64"):
        through_operator(64)(**rows)
    with pytest.raises(NotImplementedError, match="keep: chunks cannot be kept for this problem on .*; nothing can"):
        through_operator(ops.KEEP_CHUNKS)(**rows)
    leaves = {name: t.requires_grad_() for name, t in rows.items()}
    same = gradients(chunk_kda, leaves, **FLAGS), gradients(chunk_kda, leaves, **FLAGS, disable_recompute=True)
    assert all(torch.equal(same[0][name], same[1][name]) for name in leaves)  # it keeps nothing then
    few = {name: (t.detach().bfloat16() if name in ROWS else t.detach()).cuda().requires_grad_()
           for name, t in problem(T=70, K=128, V=128).items()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        chunk_kda(**few, **FLAGS, disable_recompute=True)
    assert all(x.numel() == 0 for x in saved if x.dtype is torch.uint8)  # chains for a tenth of the card


@pytest.mark.needs_cuda
def test_training_on_a_gpu_compiles():
    leaves = {name: t.detach().cuda().requires_grad_() for name, t in problem().items()}
    expected = gradients(chunk_kda, leaves, **FLAGS)
    compiled = torch.compile(chunk_kda, fullgraph=True, backend="aot_eager")
    for name, found in gradients(compiled, leaves, **FLAGS).items():
        assert torch.equal(found, expected[name]), name


def test_reference_is_that_of_other_tests():
    leaves = problem(T=70)
    expected = reference({name: leaves[name] for name in ROWS}, {}, leaves["initial_state"])
    assert all(distance(a, b) < 1e-12 for a, b in zip(reference_of(leaves), expected))
