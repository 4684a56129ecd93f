# SPDX-License-Identifier: Apache-2.0
"""libkda.Options: what they may be, which of them are in force, and that every function that plans hands them on."""
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

import libkda
from libkda import Options, chunk_kda, context_parallel
from libkda._binding import options
from libkda.compat import flash_kda

B, T, H, K, SLOTS = 1, 900, 2, 16, 4
FLAGS = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
ORACLE, THREE, FIVE = Options(backend="oracle"), Options(context_parallel=3), Options(context_parallel=5)
NAMELESS = Options(backend="nameless")


def rows(tokens=T, batch=B, seed=0):
    normal = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    x = {name: normal(batch, tokens, H, K) for name in "qkv"}
    return dict(x, g=-0.01 * normal(batch, tokens, H, K).abs(), beta=normal(batch, tokens, H))


X = rows()


def outputs(**given):
    return chunk_kda(**X, **FLAGS, **given)[0]


AUTO, BY_THREE, BY_FIVE, BY_ORACLE = (outputs(plan_options=x) for x in (Options(), THREE, FIVE, ORACLE))


def test_each_of_them_is_exact_and_has_bits_of_its_own():
    for i, found in enumerate((AUTO, BY_THREE, BY_FIVE, BY_ORACLE)):
        torch.testing.assert_close(found, BY_ORACLE, rtol=1e-4, atol=1e-5)
        assert not any(torch.equal(found, other) for other in (AUTO, BY_THREE, BY_FIVE, BY_ORACLE)[:i])
    assert torch.equal(outputs(plan_options=Options(context_parallel="off")), AUTO)  # "auto" cuts nothing on a CPU
    rules = [outputs(plan_options=Options(context_parallel=rule)) for rule in ("flashkda", "cula")]
    for found in rules:
        torch.testing.assert_close(found, BY_ORACLE, rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(found, AUTO) for found in rules)  # they cut on a CPU too


@pytest.mark.parametrize("name, value, error, allowed", [
    ("context_parallel", "on", ValueError, "'auto', 'off', 'flashkda', 'cula' or 1 to 1048576 segments, got 'on'"),
    ("context_parallel", 0, ValueError, "'auto', 'off', 'flashkda', 'cula' or 1 to 1048576 segments, got 0"),
    ("context_parallel", (1 << 20) + 1, ValueError,
     "'auto', 'off', 'flashkda', 'cula' or 1 to 1048576 segments, got 1048577"),
    ("context_parallel", 2.0, TypeError, "'auto', 'off', 'flashkda', 'cula' or a number of segments, got 2.0"),
    ("context_parallel", True, TypeError, "'auto', 'off', 'flashkda', 'cula' or a number of segments, got True"),
    ("context_parallel", None, TypeError, "'auto', 'off', 'flashkda', 'cula' or a number of segments, got None"),
    ("intra_form", "tokens", ValueError, "one of 'auto', 'tensor', 'token', got 'tokens'"),
    ("intra_form", 1, TypeError, "one of 'auto', 'tensor', 'token', got 1"),
    ("backend", None, TypeError, "a name as `kda info` lists it, or '', got None"),
    ("backend", "sm90\0", ValueError, "a name as `kda info` lists it, got 'sm90\\x00'"),
    ("batch_invariant", 1, TypeError, "a bool, got 1"),
    ("most_cut_bytes", True, TypeError, "a number of bytes, got True"),
    ("most_cut_bytes", -1, ValueError, "0 to 2^63 - 1 bytes, got -1")])
def test_bad_values_are_refused_by_name(name, value, error, allowed):
    for make in (Options, lambda **given: libkda.options(**given).__enter__()):
        with pytest.raises(error) as refused:
            make(**{name: value})
        assert str(refused.value) == f"{name} must be {allowed}"
    assert torch.equal(outputs(), AUTO)


def test_a_form_of_a_backend_that_has_one():
    for backend in ("", "staged", "sm80.staged", "cuda", "cuda.sm80.staged"):
        assert Options(backend=backend, intra_form="token").number > 0
    for backend in ("fused", "oracle", "stage", "80.staged"):
        with pytest.raises(ValueError, match=f"^intra_form = 'token' is of backend cuda.sm80.staged, and backend is "
                                             f"'{backend}'$"):
            Options(backend=backend, intra_form="token")
        Options(backend=backend)
    with libkda.options(backend="oracle"), pytest.raises(ValueError, match="^intra_form = 'tensor' is of backend"):
        libkda.options(intra_form="tensor").__enter__()


def test_equal_options_have_one_number():
    assert Options().number == 0
    made = [Options(), THREE, FIVE, ORACLE, Options(context_parallel="off"), Options("flashkda"), Options("cula"),
            Options(intra_form="token"), Options(intra_form="tensor"), Options(batch_invariant=True),
            Options("off", batch_invariant=True), Options(most_cut_bytes=0)]
    assert len({x.number for x in made}) == len(made)
    for x in made:
        same = Options(x.context_parallel, x.intra_form, x.backend, x.batch_invariant, x.most_cut_bytes)
        assert same == x and hash(same) == hash(x) and same.number == x.number
    with pytest.raises(AttributeError):
        THREE.backend = "oracle"
    with pytest.raises(ValueError, match="options must be a number of libkda.Options, got 1000000$"):
        torch.ops.libkda.forward(*X.values(), *[None] * 5, 0, 0, -5.0, 1.0, True, False, False, False, None, 0, 1000000)


def test_numbers_are_of_a_process():
    code = ("import pickle, sys; import libkda; libkda.Options(context_parallel=77)\n"
            "x = pickle.loads(sys.stdin.buffer.read()); "
            "print(x, libkda.Options(x.context_parallel).number == x.number)")
    run = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(THREE), capture_output=True)
    assert run.stdout.decode().strip() == f"{THREE} True", run.stderr.decode()


# ---- which are in force ----------------------------------------------------------------------------------------------

def test_a_call_wins_over_with_and_with_over_nothing():
    with libkda.options(context_parallel=3) as three:
        assert three == THREE and torch.equal(outputs(), BY_THREE)
        assert torch.equal(outputs(plan_options=FIVE), BY_FIVE) and torch.equal(outputs(plan_options=Options()), AUTO)
        with libkda.options(backend="oracle") as both:
            assert both == Options(context_parallel=3, backend="oracle")
        with pytest.raises(KeyError), libkda.options(context_parallel=5):
            assert torch.equal(outputs(), BY_FIVE)
            raise KeyError
        assert torch.equal(outputs(), BY_THREE)
    assert torch.equal(outputs(), AUTO)


def test_with_is_of_a_thread():
    found = {}
    with libkda.options(context_parallel=3):
        thread = threading.Thread(target=lambda: found.update(o=outputs()))
        thread.start()
        thread.join()
        assert torch.equal(outputs(), BY_THREE)
    assert torch.equal(found["o"], AUTO)


@pytest.fixture
def environment(monkeypatch):
    """Sets the variable as it is before the first call of a process."""
    def set_to(text):
        monkeypatch.setenv("LIBKDA_CONTEXT_PARALLEL", text)
        options._of_environment.cache_clear()
        monkeypatch.setattr(options, "_of_thread", options._OfThread())
    yield set_to
    monkeypatch.undo()
    options._of_environment.cache_clear()


@pytest.mark.parametrize("text, expected", [
    ("3", BY_THREE), (" 5 ", BY_FIVE), ("off", AUTO), ("AUTO", AUTO), ("", AUTO)])
def test_the_environment_is_last(environment, text, expected):
    environment(text)
    assert torch.equal(outputs(), expected)
    assert torch.equal(outputs(plan_options=ORACLE), BY_ORACLE)
    with libkda.options(context_parallel=5):
        assert torch.equal(outputs(), BY_FIVE)
    with libkda.options(batch_invariant=True) as given:  # what it does not name stays
        assert given.context_parallel == (int(text) if text.strip().isdecimal() else text.lower() or "auto")
    assert torch.equal(outputs(), expected)


@pytest.mark.parametrize("text", ["0", "many", "-1", "2.5", "1048577"])
def test_a_bad_word_in_the_environment(environment, text):
    environment(text)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^LIBKDA_CONTEXT_PARALLEL in the environment: context_parallel must be "
                                             r"'auto', 'off', 'flashkda', 'cula' or 1 to 1048576 segments, got '?"
                           + text):
            outputs()
    assert torch.equal(outputs(plan_options=THREE), BY_THREE)


def test_the_variable_is_read_by_the_first_call():
    code = "import torch, libkda; x = torch.zeros(1, 1, 1, 8); libkda.chunk_kda(x, x, x, x, x[..., 0])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                         env=dict(os.environ, LIBKDA_CONTEXT_PARALLEL="nine"))
    assert run.returncode == 1 and "ValueError: LIBKDA_CONTEXT_PARALLEL in the environment: " in run.stderr


# ---- who hands them on -----------------------------------------------------------------------------------------------

def calls():
    """Every function that plans, by name: a call that is given keywords."""
    one, pool = rows(1, 2), torch.zeros(SLOTS, H, K, K)
    slots, two = torch.tensor([1, 2]), torch.tensor([[1, 2], [3, 0]])
    head = dict(X, g=X["g"][..., 0])
    leaves = {name: x.clone().requires_grad_() for name, x in X.items()}
    final = dict(output_final_state=True)
    return {
        "chunk_kda": lambda **more: chunk_kda(**X, **FLAGS, **more),
        "chunk_kda, out": lambda **more: chunk_kda(**X, **FLAGS, out=torch.empty_like(X["v"]), **more),
        "chunk_kda, gradients": lambda **more: chunk_kda(**leaves, **FLAGS, **more),
        "chunk_kda, kept": lambda **more: chunk_kda(**leaves, **FLAGS, disable_recompute=True, **more),
        "chunk_kda, states": lambda **more: torch.inference_mode()(chunk_kda)(
            **X, **FLAGS, return_intermediate_states=True, **more),
        "fused_recurrent_kda": lambda **more: libkda.fused_recurrent_kda(**one, **FLAGS, **final, **more),
        "fused_recurrent_kda, long": lambda **more: libkda.fused_recurrent_kda(**X, **FLAGS, **more),
        "fused_recurrent_kda, out": lambda **more: libkda.fused_recurrent_kda(
            **one, **FLAGS, out=torch.empty_like(one["v"]), **more),
        "fused_recurrent_kda_fwd": lambda **more: libkda.fused_recurrent_kda_fwd(
            **one, initial_state=pool.clone(), ssm_state_indices=slots, **FLAGS, **more),
        "fused_recurrent_kda_fwd, not in place": lambda **more: libkda.fused_recurrent_kda_fwd(
            **one, inplace_final_state=False, **FLAGS, **more),
        "prefill": lambda **more: libkda.prefill(**rows(70, 2), pool=pool.clone(), slots=slots, **FLAGS, **more),
        "decode": lambda **more: libkda.decode(**one, pool=pool.clone(), slots=slots, **FLAGS, **more),
        "verify": lambda **more: libkda.verify(**rows(2, 2), pool=pool.clone(), slots=two, **FLAGS, **more),
        "chunk_gated_delta_rule": lambda **more: libkda.chunk_gated_delta_rule(**head, **FLAGS, **more),
        "fused_recurrent_gated_delta_rule": lambda **more: libkda.fused_recurrent_gated_delta_rule(
            **head, **FLAGS, **more),
    }


CALLS = calls()


@pytest.mark.parametrize("name", CALLS)
def test_every_function_hands_them_on(name):
    call, reason = CALLS[name], "^backend: 'nameless' names no implementation for cpu"
    first = lambda result: result[0] if isinstance(result, tuple) else result
    usual = first(call())
    with pytest.raises(ValueError, match=reason):
        call(plan_options=NAMELESS)
    with libkda.options(backend="nameless"):
        with pytest.raises(ValueError, match=reason):
            call()
        assert torch.equal(first(call(plan_options=Options())), usual)
    found = first(call(plan_options=ORACLE))
    torch.testing.assert_close(found, usual, rtol=1e-4, atol=1e-5)
    # No step of decode is cut.
    torch.testing.assert_close(first(call(plan_options=THREE)), usual, rtol=1e-4, atol=1e-5)
    for other in (None, Options()):
        assert torch.equal(first(call(plan_options=other)), usual)
    with pytest.raises(TypeError, match="^plan_options must be libkda.Options, got str$"):
        call(plan_options="oracle")


def test_compat_has_those_of_its_thread():
    x = {name: t.bfloat16() for name, t in X.items()}
    call = lambda: flash_kda.fwd(*x.values(), K ** -0.5, torch.empty_like(x["v"]), torch.zeros(H), torch.zeros(H, K),
                                 -5.0)
    call()
    with libkda.options(backend="nameless"), pytest.raises(ValueError, match="^backend: 'nameless' names no"):
        call()


# ---- derivatives and tracing -----------------------------------------------------------------------------------------

def gradients(backward=lambda o: o.square().sum().backward(), **given):
    leaves = {name: x.clone().requires_grad_() for name, x in X.items()}
    backward(chunk_kda(**leaves, **FLAGS, **given)[0])
    return [x.grad for x in leaves.values()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))


def test_a_backward_has_the_options_of_its_forward():
    usual, by_oracle = gradients(), gradients(plan_options=ORACLE)
    assert not same(usual, by_oracle)
    for x, y in zip(usual, by_oracle):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)

    def in_another_thread(o):
        thread = threading.Thread(target=lambda: o.square().sum().backward())
        thread.start()
        thread.join()

    def within(**given):
        def backward(o):
            with libkda.options(**given):
                o.square().sum().backward()
        return backward

    for other in (THREE, FIVE, Options("off"), Options(intra_form="token"), Options(batch_invariant=True)):
        for more in ({}, dict(disable_recompute=True)):
            for x, y in zip(gradients(plan_options=other, **more), usual):
                torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)
    assert same(gradients(in_another_thread, plan_options=ORACLE), by_oracle)
    assert same(gradients(within(backend="oracle")), usual)
    with libkda.options(backend="oracle"):
        assert same(gradients(in_another_thread), by_oracle) and same(gradients(within(backend="")), by_oracle)
    loss = lambda q: chunk_kda(**dict(X, q=q), **FLAGS, plan_options=ORACLE)[0].square().sum()
    assert torch.equal(torch.func.grad(loss)(X["q"]), by_oracle[0])


def test_a_traced_call_has_them_as_a_constant():
    def given(q):
        return chunk_kda(**dict(X, q=q), **FLAGS, plan_options=THREE)[0]

    def in_force(q):
        return chunk_kda(**dict(X, q=q), **FLAGS)[0]

    assert torch.equal(torch.compile(given, backend="eager", fullgraph=True)(X["q"]), BY_THREE)
    compiled = torch.compile(in_force, backend="aot_eager", fullgraph=True)
    with libkda.options(context_parallel=5):
        assert torch.equal(compiled(X["q"]), BY_FIVE)
    assert torch.equal(compiled(X["q"]), BY_FIVE)  # those of the trace
    leaf = X["q"].clone().requires_grad_()
    with libkda.options(backend="oracle"):
        torch.compile(lambda q: in_force(q).square().sum(), backend="aot_eager", fullgraph=True)(leaf).backward()
    assert torch.equal(leaf.grad, gradients(plan_options=ORACLE)[0])


# ---- context parallelism ---------------------------------------------------------------------------------------------

def test_beside_several_processes():
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        context = context_parallel.Context([0, T], [[(0, T)]])
        usual = chunk_kda(**X, **FLAGS, cp_context=context, plan_options=Options())[0]
        torch.testing.assert_close(usual, BY_ORACLE, rtol=1e-4, atol=1e-5)
        refused = "^context_parallel = 3 is not taken beside `{}`, which has segments and kernels of its own$"
        with pytest.raises(ValueError, match=refused.format("cp_context")):
            chunk_kda(**X, **FLAGS, cp_context=context, plan_options=THREE)
        with libkda.options(context_parallel=3):
            with pytest.raises(ValueError, match=refused.format("cp_context")):
                chunk_kda(**X, **FLAGS, cp_context=context)
            with pytest.raises(ValueError, match=refused.format("context")):
                context_parallel.prefill(**X, pool=torch.zeros(2, H, K, K), slots=torch.tensor([1]), context=context)
    finally:
        if alone:
            dist.destroy_process_group()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
def test_a_sequence_alone_and_in_100_batches(device):
    size, tokens, dtype = (16, 150, torch.float32) if device == "cpu" else (128, 19000, torch.bfloat16)
    random = torch.Generator().manual_seed(2)
    normal = lambda *shape: torch.randn(*shape, generator=random).to(device, dtype)
    made = lambda T: dict({name: normal(1, T, H, size) for name in "qkv"}, g=-normal(1, T, H, size).abs(),
                          beta=normal(1, T, H))
    cu_seqlens = lambda lengths: torch.tensor([0, *lengths]).cumsum(0).int()
    call = lambda x, lengths: chunk_kda(**x, **FLAGS, cu_seqlens=cu_seqlens(lengths),
                                        plan_options=Options(batch_invariant=True))[0]
    x, others = made(tokens), made(3 * tokens)
    alone = call(x, [tokens])
    for _ in range(100):
        before, behind = ([int(n) for n in torch.randint(0, tokens // 2, (2,), generator=random)] for _ in range(2))
        a, b = sum(before), sum(before) + sum(behind)
        batch = {name: torch.cat([others[name][:, :a], x[name], others[name][:, a:b]], 1) for name in x}
        assert torch.equal(call(batch, [*before, tokens, *behind])[:, a:a + tokens], alone)


# ---- a GPU -----------------------------------------------------------------------------------------------------------

@pytest.mark.needs_cuda
def test_options_of_a_gpu():
    normal = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(1)).cuda().bfloat16()
    x = {name: normal(1, 20000, 2, 128) for name in "qkvg"}
    x = dict(x, g=-x["g"].abs(), beta=normal(1, 20000, 2))
    cu = torch.tensor([0, 19000, 20000], dtype=torch.int32)
    call = lambda **given: chunk_kda(**x, **FLAGS, cu_seqlens=cu, plan_options=Options(**given))[0]
    whole = call(context_parallel="off")
    close = lambda o: ((o.float() - whole.float()).norm() / whole.float().norm()).item() < 1e-2
    assert close(call()) and not torch.equal(call(), whole)
    assert close(call(context_parallel=4)) and close(call(context_parallel=4, backend="staged"))
    token, tensor = (call(backend="staged", intra_form=form) for form in ("token", "tensor"))
    assert close(token) and close(tensor) and not torch.equal(token, tensor)
    first = {name: t[:, :19000].contiguous() for name, t in x.items()}
    alone = chunk_kda(**first, **FLAGS, plan_options=Options(batch_invariant=True))[0]
    assert torch.equal(call(batch_invariant=True)[:, :19000], alone)
    with pytest.raises(ValueError, match="^backend: cuda.smxx.recurrent cannot serve: it has no forward|^backend: "):
        call(backend="oracle")
