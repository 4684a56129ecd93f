# SPDX-License-Identifier: Apache-2.0
"""FLA's own functions on libkda's kernels, through FLA's registry."""
import inspect

import pytest
import torch
from common import FLAGS, distance, make, reference
from torch._subclasses.fake_tensor import FakeTensorMode

import libkda
from libkda._binding import library

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
@pytest.mark.parametrize("text, policy", [(None, "auto"), ("1", "auto"), ("0", "off"), ("off", "off")])
def test_fla_switch_of_cuts(monkeypatch, text, policy):
    """FLA_INTRACARD_CP=0 is the policy "off" of the plan, where neither the call nor libkda.options() has another."""
    numbers, number_of = [], libkda.kda.number_of
    monkeypatch.setattr(libkda.kda, "number_of", lambda given: numbers.append(number_of(given)) or numbers[-1])
    monkeypatch.delenv("FLA_INTRACARD_CP", raising=False)
    if text is not None:
        monkeypatch.setenv("FLA_INTRACARD_CP", text)
    x, three, oracle = make()[0], libkda.Options(context_parallel=3), libkda.Options(backend="oracle")
    with torch.no_grad():
        fla_kda.chunk_kda(**x, **FLAGS)
        fla_kda.fused_recurrent_kda(**x, **FLAGS)
        with libkda.options(context_parallel=3):
            fla_kda.chunk_kda(**x, **FLAGS)
        with libkda.options(backend="oracle"):
            fla_kda.chunk_kda(**x, **FLAGS)
        libkda.chunk_kda(**x, **FLAGS)  # FLA's switch is of FLA's functions
    off = libkda.Options(context_parallel=policy)
    both = libkda.Options(context_parallel=policy, backend="oracle")
    assert numbers == [off.number, off.number, three.number, both.number, libkda.Options().number]
    assert (both == oracle) == (policy == "auto")


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
    backend = libkda.fla._backend((libkda.chunk_kda,))()
    return backend.verify("chunk_kda", **dict(x, **change))


def differentiated():
    """Leaves of a call, and its flags."""
    x, parameters, state = make(gates="softplus")
    leaves = {name: t.requires_grad_() for name, t in dict(x, initial_state=state, **parameters).items()}
    return leaves, dict(FLAGS, use_gate_in_kernel=True)


def test_training_calls():
    leaves, flags = differentiated()
    gradients = lambda outputs: torch.autograd.grad(outputs[0].square().sum() + outputs[1].sum(), list(leaves.values()))
    expected = gradients(libkda.chunk_kda(**leaves, **flags))
    for more in ({}, dict(disable_recompute=True)):
        found = gradients(fla_kda.chunk_kda(**leaves, **flags, **more))
        assert libkda.fla.last_path() == "libkda: chunk_kda"
        assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.needs_cuda
def test_a_batch_in_training_equals_its_rows_packed():
    """Few heads and many tokens, which a plan would cut if it knew their lengths."""
    shape = dict(dtype=torch.bfloat16, device="cuda")
    rows = {n: torch.randn(4, 1024, 4, 64, **shape).requires_grad_() for n in ("q", "k", "v", "g")}
    rows["beta"] = torch.randn(4, 1024, 4, **shape).requires_grad_()
    state = torch.randn(4, 4, 64, 64, device="cuda")
    flags = dict(FLAGS, A_log=torch.zeros(4, device="cuda"), use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    outputs = fla_kda.chunk_kda(**rows, initial_state=state, **flags)
    assert libkda.fla.last_path() == "libkda: chunk_kda"
    ends = torch.arange(0, 4097, 1024, device="cuda")
    packed = {n: t.flatten(0, 1)[None] for n, t in rows.items()}
    expected = fla_kda.chunk_kda(**packed, initial_state=state, cu_seqlens=ends, **flags)
    assert torch.equal(outputs[0].flatten(0, 1), expected[0][0]) and torch.equal(outputs[1], expected[1])
    d_o = torch.randn_like(outputs[0])
    gradients = torch.autograd.grad(outputs[0], list(rows.values()), d_o)
    wanted = torch.autograd.grad(expected[0], list(rows.values()), d_o.flatten(0, 1)[None])
    assert all(torch.equal(found, other) for found, other in zip(gradients, wanted))


@since_0_6
def test_the_recurrent_function_is_cut_off_from_its_inputs():
    """As FLA's, which has no gradients: the call is served all the same."""
    leaves, flags = differentiated()
    o, final = fla_kda.fused_recurrent_kda(**leaves, **flags)
    assert libkda.fla.last_path() == "libkda: fused_recurrent_kda_fwd"
    assert not o.requires_grad and not final.requires_grad


def test_gradients_of_the_gate():
    from fla.ops.kda.gate import fused_kda_gate
    g = torch.randn(2, 5, 4, 16, requires_grad=True)
    A_log = torch.randn(4, requires_grad=True)
    found = torch.autograd.grad(fused_kda_gate(g, A_log).square().sum(), [g, A_log])
    assert libkda.fla.last_path() == "libkda: fused_kda_gate"
    expected = torch.autograd.grad(libkda.naive_kda_gate(g, A_log).square().sum(), [g, A_log])
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_the_backward_of_the_gate_alone():
    from fla.ops.kda.gate import kda_gate_bwd
    g, dyg = torch.randn(2, 5, 4, 16, dtype=torch.bfloat16), torch.randn(2, 5, 4, 16)
    A_log, dt_bias = torch.randn(4), torch.randn(64)
    for lower_bound in (None, -4.0):
        for rates in ((A_log, dt_bias), (A_log, None)) if lower_bound is None else ((A_log, dt_bias), (None, dt_bias)):
            found = kda_gate_bwd(g, *rates, dyg=dyg, lower_bound=lower_bound)
            assert libkda.fla.last_path() == "libkda: kda_gate_bwd"
            x = [None if t is None else t.double().requires_grad_() for t in (g, *rates)]
            u = x[0] if x[2] is None else x[0] + x[2].view(4, 16)
            rate = 1 if x[1] is None else x[1].exp().view(4, 1)
            y = (-rate * torch.nn.functional.softplus(u) if lower_bound is None
                 else lower_bound * torch.sigmoid(rate * u))
            expected = iter(torch.autograd.grad(y, [t for t in x if t is not None], dyg.double()))
            for t, gradient in zip((g, *rates), found):
                if t is None:
                    assert gradient is None
                else:
                    assert gradient.dtype == t.dtype and gradient.shape == t.shape
                    assert distance(gradient, next(expected)) < (2e-2 if t is g else 1e-5)


def test_gradients_that_the_library_has_not_are_left_to_fla(monkeypatch):
    monkeypatch.setattr(libkda.ops, "has_backward", lambda *args: False)
    accepted, reason = decline({})
    assert accepted
    accepted, reason = decline(dict(v=torch.zeros(2, 131, 4, 32, requires_grad=True)))
    assert not accepted and "no backward pass here" in reason
    with torch.no_grad():
        assert decline(dict(v=torch.zeros(2, 131, 4, 32, requires_grad=True)))[0]


def test_what_does_not_fit_is_said_by_the_call():
    leaves, flags = differentiated()
    with pytest.raises(AssertionError, match="beta must have shape"):
        fla_kda.chunk_kda(**dict(leaves, beta=leaves["beta"][:, 1:]), **flags)
    assert libkda.fla.last_path() == "libkda: chunk_kda"


def test_declines_say_why():
    assert decline({}) == (True, None)
    elsewhere = torch.empty(1, 4, 1, 8, device="meta")
    accepted, reason = decline(dict(q=elsewhere))
    assert not accepted and reason == "tensors on cpu, meta"
    assert libkda.fla.last_path() == f"fla: chunk_kda: {reason}"
    x, _, _ = make()
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    by_position = libkda.fla._backend((libkda.chunk_kda,))().verify("chunk_kda", elsewhere, *rows[1:])
    assert not by_position[0] and "meta" in by_position[1]
    libkda.fla.disable()
    accepted, reason = decline({})
    assert not accepted and "disable" in reason


def test_training_on_a_gpu(monkeypatch):
    """libkda's where it has tensor cores, else FLA's unless libkda's is asked for; and every call of a GPU is FLA's
    where this build does not run on it."""
    def rows_of(dtype=torch.float32, K=16, V=16):
        sizes = dict(q=K, k=K, v=V, g=K)
        with FakeTensorMode():
            rows = {n: torch.empty(1, 8, 2, size, device="cuda", dtype=dtype) for n, size in sizes.items()}
            return dict(rows, beta=torch.empty(1, 8, 2, device="cuda", dtype=dtype, requires_grad=True))

    rows, bf16 = rows_of(), torch.bfloat16
    monkeypatch.setattr(libkda.fla, "cuda_refusal", lambda ordinal: None)
    monkeypatch.setattr(libkda.fla.ops, "has_backward", lambda *tensors: True)
    for served in (rows_of(bf16), rows_of(bf16, K=128, V=200), dict(rows_of(bf16), g=rows["g"])):
        assert libkda.fla._reason("chunk_kda", served) is None
    for left in (rows, rows_of(torch.float16), rows_of(bf16, K=136), rows_of(bf16, K=60), rows_of(bf16, V=60),
                 dict(rows_of(bf16), v=rows["v"])):
        assert "is fast for q, k, v in bf16" in libkda.fla._reason("chunk_kda", left)
    layer = dict(rows_of(torch.float16, K=128, V=128), **{
        f"use_{name}_in_kernel": True for name in ("gate", "qk_l2norm", "beta_sigmoid")})
    for capability, changes, is_served in (
            ((9, 0), {}, True), ((9, 0), dict(lower_bound=-5.0, scale=0.1), True), ((8, 0), {}, False),
            ((9, 0), dict(lower_bound=-6.0), False), ((9, 0), dict(scale=17.0), False),
            ((9, 0), dict(use_gate_in_kernel=False), False), ((9, 0), dict(use_beta_sigmoid_in_kernel=False), False),
            ((9, 0), dict(use_qk_l2norm_in_kernel=False), False), ((9, 0), dict(initial_state=layer["beta"]), False),
            ((9, 0), dict(g=layer["beta"]), False), ((9, 0), dict(v=rows["v"]), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        assert (libkda.fla._reason("chunk_kda", dict(layer, **changes)) is None) is is_served, changes
    assert libkda.fla._reason("chunk_gated_delta_rule", layer) is not None
    with torch.no_grad():
        assert libkda.fla._reason("chunk_kda", rows) is None
    libkda.fla.enable(train_on_gpu=True)
    assert libkda.fla._reason("chunk_kda", rows) is None
    monkeypatch.setattr(libkda.fla, "cuda_refusal", lambda ordinal: f"no kernels for device {ordinal}")
    assert libkda.fla._reason("chunk_kda", rows) == "no kernels for device 0"


def test_what_a_build_says_of_a_gpu():
    if torch.cuda.is_available():
        assert library.cuda_refusal(0) is None
    else:
        assert "cuda" in library.cuda_refusal(0).lower()


@since_0_6
@pytest.mark.parametrize("name, module", [
    ("chunk_gated_delta_rule", "fla.ops.gated_delta_rule"),
    ("fused_recurrent_gated_delta_rule", "fla.ops.gated_delta_rule"), ("chunk_kda", "fla.ops.kda.chunk"),
    ("fused_recurrent_kda", "fla.ops.kda.fused_recurrent"),
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


# ---- Gated DeltaNet --------------------------------------------------------------------------------------------------

def gated(T=70):
    """Rows of FLA's Gated DeltaNet: two value heads a q/k head, raw gates a head and betas."""
    rows = dict(q=torch.randn(2, T, 2, 32), k=torch.randn(2, T, 2, 32), v=torch.randn(2, T, 4, 48),
                g=torch.randn(2, T, 4), beta=torch.randn(2, T, 4))
    return dict(rows, A_log=torch.randn(4), dt_bias=torch.randn(4), initial_state=torch.randn(2, 4, 48, 32))


GATED_FLAGS = dict(output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, state_v_first=True,
                   use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)


def in_torch(x, scale=None):
    """The same by FLA's recurrence in torch, from activated rows."""
    from fla.ops.gated_delta_rule import naive_recurrent_gated_delta_rule
    q, k = (torch.nn.functional.normalize(x[n], dim=-1).repeat_interleave(2, 2) for n in "qk")
    g = -x["A_log"].exp() * torch.nn.functional.softplus(x["g"] + x["dt_bias"])
    o, final = naive_recurrent_gated_delta_rule(q=q, k=k, v=x["v"], beta=2 * x["beta"].sigmoid(), g=g, scale=scale,
                                                initial_state=x["initial_state"].mT, output_final_state=True)
    return o, final.mT


@since_0_6
def test_gated_delta_net():
    """All options, both functions, and the gradient of every tensor."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    x = {name: t.requires_grad_() for name, t in gated().items()}
    outputs, expected = chunk_gated_delta_rule(**x, **GATED_FLAGS, scale=0.3, chunk_size=32), in_torch(x, 0.3)
    assert libkda.fla.last_path() == "libkda: chunk_gated_delta_rule"
    for mine, right in zip(outputs, expected):
        assert distance(mine, right.double()) < 1e-5
    gradients = [torch.autograd.grad(o.square().sum() + final.square().sum(), list(x.values()))
                 for o, final in (outputs, expected)]
    for name, mine, right in zip(x, *gradients):
        assert mine.shape == x[name].shape and distance(mine, right.double()) < 1e-4, name
    few = gated(T=3)
    o, final = fused_recurrent_gated_delta_rule(**few, **GATED_FLAGS)
    assert libkda.fla.last_path() == "libkda: fused_recurrent_gated_delta_rule_fwd"
    for mine, right in zip((o, final), in_torch(few)):
        assert distance(mine, right.double()) < 1e-5


@since_0_6
def test_gated_delta_net_comes_before_flashqla(monkeypatch):
    """Where both are there, FLA asks libkda first; what libkda leaves goes to FlashQLA."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gated_delta_rule.backends import FlashQLABackend
    name = "chunk_gated_delta_rule"
    monkeypatch.setattr(FlashQLABackend, "is_available", classmethod(lambda cls: True))
    monkeypatch.setattr(FlashQLABackend, f"{name}_verifier", lambda self, *args, **kwargs: (True, None))
    monkeypatch.setattr(FlashQLABackend, name, lambda self, *args, **kwargs: "FlashQLA's")
    x = gated(T=3)
    o, _ = chunk_gated_delta_rule(**x, **GATED_FLAGS)
    assert libkda.fla.last_path() == f"libkda: {name}" and o.shape == x["v"].shape
    monkeypatch.setenv("FLA_LIBKDA", "0")
    assert chunk_gated_delta_rule(**x, **GATED_FLAGS) == "FlashQLA's"


@since_0_6
def test_packed_gated_delta_net():
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    from fla.ops.utils.index import prepare_chunk_indices
    x = gated()
    del x["initial_state"]
    x = {name: t[:1] if t.dim() > 2 else t for name, t in x.items()}
    states, cu_seqlens = torch.randn(2, 4, 48, 32), torch.tensor([0, 9, 70])
    for function, more in ((chunk_gated_delta_rule, dict(cu_seqlens_cpu=cu_seqlens,
                                                         chunk_indices=prepare_chunk_indices(cu_seqlens, 64))),
                           (fused_recurrent_gated_delta_rule, {})):
        o, final = function(**x, **GATED_FLAGS, initial_state=states, cu_seqlens=cu_seqlens, **more)
        for n, (begin, end) in enumerate(((0, 9), (9, 70))):
            part = {name: t[:, begin:end] if t.dim() > 2 else t for name, t in x.items()}
            alone, state = in_torch(dict(part, initial_state=states[n:n + 1]))
            assert distance(o[:, begin:end], alone.double()) < 1e-5
            assert distance(final[n:n + 1], state.double()) < 1e-5


@since_0_6
def test_gates_of_gated_delta_net():
    from fla.ops.gated_delta_rule.gate import fused_gdn_gate, naive_gdn_gate
    leaves = [t.requires_grad_() for t in (torch.randn(2, 5, 4), torch.randn(4), torch.randn(4))]
    for x in (leaves, leaves[:2]):
        found, expected = fused_gdn_gate(*x), naive_gdn_gate(*x)
        assert libkda.fla.last_path() == "libkda: gdn_gate_fwd" and torch.equal(found, expected)
        found, expected = (torch.autograd.grad(y.square().sum(), x) for y in (found, expected))
        assert libkda.fla.last_path() == "libkda: gdn_gate_bwd"
        assert all(distance(mine, right.double()) < 1e-6 for mine, right in zip(found, expected))


@since_0_6
def test_what_of_gated_delta_net_stays_with_fla(monkeypatch):
    """With a reason; FLA's own kernels then need a GPU."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    x = {name: t for name, t in gated(T=3).items() if name not in ("A_log", "dt_bias", "initial_state")}
    wide = torch.randn(2, 3, 4, 264)
    for changes, reason in ((dict(v=wide), "heads of 264 channels, more than 256"),
                            (dict(cp_context=object()), "cp_context"), (dict(head_first=True), "head_first")):
        with pytest.raises(Exception):
            chunk_gated_delta_rule(**dict(x, **changes))
        assert libkda.fla.last_path().startswith(f"fla: chunk_gated_delta_rule: {reason}")
    name = "fused_recurrent_gated_delta_rule_fwd"
    for changes, reason in ((dict(v=wide), "up to 256"), (dict(gk=torch.randn(2, 3, 4, 32)), "`gk`"),
                            (dict(beta=torch.rand(2, 3, 4, 48)), "beta must have shape")):
        with pytest.raises(Exception):
            fused_recurrent_gated_delta_rule(**dict(x, **changes))
        assert libkda.fla.last_path().startswith(f"fla: {name}: ") and reason in libkda.fla.last_path()
    monkeypatch.setenv("FLA_LIBKDA", "0")
    with pytest.raises(Exception):
        fused_recurrent_gated_delta_rule(**x)
    assert libkda.fla.last_path() == f"fla: {name}: FLA_LIBKDA is off"
    monkeypatch.undo()
    libkda.fla.disable()
    with pytest.raises(Exception):
        chunk_gated_delta_rule(**x)
    assert "disable() was called" in libkda.fla.last_path()


@since_0_6
def test_refusals_of_gated_delta_net_are_flas():
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    x = gated(T=3)
    with pytest.raises(ValueError, match="`chunk_size` must be 16, 32, or 64 for Gated Delta Rule, got 128"):
        chunk_gated_delta_rule(**x, **GATED_FLAGS, chunk_size=128)
    with pytest.raises(ValueError, match="allow_neg_eigval"):
        chunk_gated_delta_rule(**x, **dict(GATED_FLAGS, use_beta_sigmoid_in_kernel=False))


# ---- context parallelism ---------------------------------------------------------------------------------------------

@pytest.fixture
def alone(tmp_path):
    """A group of this process alone."""
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@since_0_6
@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
def test_contexts_of_fla(alone, layout):
    cp = pytest.importorskip("fla.ops.cp")
    x, _, _ = make(B=1, T=130)
    cu_seqlens = torch.tensor([0, 40, 130])
    context = cp.build_cp_context(cu_seqlens, alone, **({} if layout == "contiguous" else dict(layout=layout)))
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    flags = {name: value for name, value in FLAGS.items() if name != "output_final_state"}
    o, _ = fla_kda.chunk_kda(**leaves, **flags, cu_seqlens=cu_seqlens, cp_context=context)
    assert libkda.fla.last_path() == "libkda: chunk_kda"
    plain, _ = libkda.chunk_kda(**leaves, **flags, cu_seqlens=cu_seqlens)
    assert distance(o, plain.double()) < 1e-6
    o.sum().backward(inputs=list(leaves.values()))
    # what FLA refuses: states
    _, final = libkda.chunk_kda(**x, **flags, cp_context=context.copy_for_backward(), output_final_state=True,
                                initial_state=torch.ones(2, 4, 64, 32))
    assert final.shape == (2, 4, 64, 32)


@since_0_6
def test_imitated_contexts_of_fla(alone):
    """test_context_parallel.py has processes without FLA, whose contexts are imitated."""
    cp = pytest.importorskip("fla.ops.cp.context")
    from context_parallel_worker import fla_context
    for layout in ("contiguous", "zigzag"):
        for ranks in (2, 3, 4):
            T = 24 * ranks
            for cu in ([0, T], [0, 5, T], [0, 1, 7, 24, T - 3, T]):
                for rank in range(ranks):
                    real = cp.get_cp_cu_seqlens(torch.tensor(cu), world_size=ranks, rank=rank, group=alone,
                                                **({} if layout == "contiguous" else dict(layout=layout)))
                    imitated = vars(fla_context(cu, rank, ranks, layout))
                    for name, value in imitated.items():
                        if isinstance(value, torch.Tensor):
                            assert torch.equal(getattr(real, name), value), (layout, ranks, cu, rank, name)
                        elif name != "group":
                            assert getattr(real, name) == value, (layout, ranks, cu, rank, name)
