# SPDX-License-Identifier: Apache-2.0
"""The operators under torch's own checks, torch.compile, threads and repetition."""
import threading

import pytest
import torch
from common import FLAGS, make

import libkda
from libkda import chunk_kda, fused_recurrent_kda, fused_recurrent_kda_fwd, ops

FORWARD, FORWARD_INTO, UPDATE, KEPT = (getattr(torch.ops.libkda, name).default
                                       for name in ("forward", "forward_into", "update", "forward_kept"))
TAIL = (ops.GATE_LOG, ops.BETA_SIGMOID, -5.0, 0.125, True, False)


def test_opcheck_forward(device):
    x, _, state = make(T=70, device=device)
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    for initial, final in ((None, False), (state, True)):
        torch.library.opcheck(FORWARD, (*rows, None, None, initial, None, None, *TAIL, final))
    cu = torch.tensor([0, 30, 70])
    packed = [t[:1] for t in rows]
    torch.library.opcheck(FORWARD, (*packed, None, None, None, cu.to(device), cu, *TAIL, True))


def test_opcheck_forward_into(device):
    x, _, state = make(T=70, device=device)
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    checkpoints = state.new_empty(4, *state.shape[1:])
    for initial, final, states, every in ((None, None, None, 0), (state, torch.empty_like(state), checkpoints, 32)):
        torch.library.opcheck(FORWARD_INTO, (*rows, torch.empty_like(x["v"]), final, states, None, None, initial,
                                                 None, None, *TAIL, every))


def test_checkpoints_must_have_room():
    x, _, state = make(T=70)
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    o = torch.full_like(x["v"], float("nan"))
    with pytest.raises(ValueError, match="checkpoints"):
        ops.forward_into(*rows, o, None, state[:1].clone(), None, None, None, None, None, *TAIL, 32)
    assert o.isnan().all()


@pytest.mark.parametrize("T", [2, 70])
def test_forward_into_writes_what_forward_returns(device, T):
    """Into rows of wider tensors, whose rest stays as it is."""
    x, _, state = make(T=T, device=device, dtype=torch.bfloat16)
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    o, final = FORWARD(*rows, None, None, state, None, None, *TAIL, True)
    wide_o = torch.full((2, T, 4, 48), float("nan"), device=device, dtype=torch.bfloat16)
    wide_final = torch.full((2, 6, *state.shape[2:]), float("nan"), device=device)
    ops.forward_into(*rows, wide_o[..., :32], wide_final[:, 1:5], None, None, None, state, None, None, *TAIL)
    assert torch.equal(wide_o[..., :32], o) and torch.equal(wide_final[:, 1:5], final)
    assert wide_o[..., 32:].isnan().all() and wide_final[:, [0, 5]].isnan().all()
    ops.forward_into(*rows, wide_o[..., 16:], None, None, None, None, state, None, None, *TAIL, 0, True)  # none kept
    assert torch.equal(wide_o[..., 16:], o)


def test_opcheck_update(device):
    x, _, state = make(T=2, device=device)
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    for slots in (None, torch.tensor([0] + [-1] * (len(state) - 1), dtype=torch.int32, device=device)):
        torch.library.opcheck(UPDATE, (*rows, torch.empty_like(x["v"]), state, slots, None, None, None, None, None,
                                           True, *TAIL, slots is not None))


def test_opcheck_update_of_drafts_and_checkpoints(device):
    x, _, state = make(T=32, device=device)
    N, int32 = len(state), dict(dtype=torch.int32, device=device)
    slots, drafts = torch.arange(N, **int32), state.repeat(2, 1, 1, 1)
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    some = [y[:, :2].contiguous() for y in rows]
    tail = None, None, None, None, None
    of_drafts = drafts, torch.arange(2 * N, **int32).view(N, 2), torch.zeros(N, 2, **int32)
    torch.library.opcheck(UPDATE, (*some, torch.empty_like(some[2]), state, slots, *tail, True, *TAIL, True, None, 0,
                                   *of_drafts))
    torch.library.opcheck(UPDATE, (*rows, torch.empty_like(rows[2]), state, slots, *tail, False, *TAIL, False, None, 0,
                                   None, None, None, drafts, torch.full((N,), 16, **int32), slots))


@pytest.mark.parametrize("change, text", [
    (dict(draft_indices=None), "drafts and draft_indices are given together"),
    (dict(decode=False), "drafts need decode, and draft_indices"),
    (dict(draft_indices=torch.tensor([[0], [1]], dtype=torch.int32)), "drafts need decode, and draft_indices"),
    (dict(indices=torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)), "indices must have one dimension beside drafts"),
    (dict(drafts=torch.zeros(0, 4, 64, 32)), "drafts has no slots"),
    (dict(checkpoint_offsets=torch.tensor([0, 0], dtype=torch.int32)), "checkpoint_indices are given together"),
])
def test_what_belongs_together_in_a_pool(change, text):
    x, _, state = make(T=2)
    rows = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    int32 = dict(dtype=torch.int32)
    given = dict(rows, o=torch.empty_like(x["v"]), states=state, indices=torch.tensor([0, 1], **int32),
                 num_accepted_tokens=None, A_log=None, dt_bias=None, cu_seqlens=None, cu_seqlens_cpu=None, decode=True,
                 gate_mode=ops.GATE_LOG, beta_mode=ops.BETA_SIGMOID, lower_bound=-5.0, scale=0.125, l2norm=True,
                 state_v_first=False, drafts=state.repeat(2, 1, 1, 1),
                 draft_indices=torch.tensor([[0, 1], [2, 3]], **int32))
    torch.ops.libkda.update(**given)
    with pytest.raises(ValueError, match=text):
        torch.ops.libkda.update(**(given | change))


@pytest.mark.parametrize("name", ["drafts", "checkpoints"])
def test_what_is_written_beside_the_pool_raises_its_version(device, name):
    x, _, state = make(T=32, device=device)
    N, given = len(state), state.repeat(2, 1, 1, 1)
    slots, rows = torch.arange(N, device=device), torch.arange(2 * N, device=device)
    with torch.no_grad():
        if name == "drafts":
            libkda.verify(**{n: y[:, :2].contiguous() for n, y in x.items()}, pool=state, slots=slots, drafts=given,
                          draft_slots=rows.view(N, 2))
        else:
            libkda.prefill(**x, pool=state, slots=slots, checkpoints=given, checkpoint_offsets=slots * 0 + 16,
                           checkpoint_slots=slots)
    assert given._version == 1


@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])
@pytest.mark.parametrize("T", [3, 70])
def test_compile_as_one_graph(device, function, T):
    x, _, state = make(T=T, device=device)
    call = lambda q, k, v, g, beta, state: function(q, k, v, g, beta, initial_state=state, **FLAGS)
    arguments = [x[n] for n in ("q", "k", "v", "g", "beta")] + [state]
    with torch.no_grad():
        expected = call(*arguments)
        found = torch.compile(call, fullgraph=True, backend="aot_eager")(*arguments)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_gates_and_masks_compile_as_one_graph(device):
    x, parameters, state = make(T=70, device=device, gates="softplus")
    call = lambda q, k, v, g, beta, A_log, dt_bias, state, has_state: chunk_kda(
        q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, initial_state=state, has_state=has_state,
        use_gate_in_kernel=True, **FLAGS)
    arguments = [x[n] for n in ("q", "k", "v", "g", "beta")] + [
        parameters["A_log"], parameters["dt_bias"], state, torch.tensor([True, False], device=device)]
    with torch.no_grad():
        expected = call(*arguments)
        for dynamic in (False, True):
            found = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)(*arguments)
            assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("lengths_on_host", [False, True])
def test_packed_steps_compile_as_one_graph(device, lengths_on_host):
    x, _, state = make(B=1, T=12, N=12, device=device)
    call = lambda q, k, v, g, beta, state, cu: fused_recurrent_kda(q, k, v, g, beta, initial_state=state, cu_seqlens=cu,
                                                                   **FLAGS)
    arguments = [x[n] for n in ("q", "k", "v", "g", "beta")] + [
        state, torch.tensor([0] * 12 + [12], device="cpu" if lengths_on_host else device)]
    with torch.no_grad():
        expected = call(*arguments)
        found = torch.compile(call, fullgraph=True, backend="aot_eager")(*arguments)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_a_step_in_a_pool_compiles_as_one_graph(device):
    x, _, state = make(B=3, T=2, device=device)
    call = lambda *rows: fused_recurrent_kda_fwd(*rows[:5], initial_state=rows[5], ssm_state_indices=rows[6],
                                                 has_state=rows[7], out=rows[8], first_slot=1)[0]
    arguments = lambda: [x[n] for n in ("q", "k", "v", "g", "beta")] + [
        state.repeat(2, 1, 1, 1), torch.tensor([0, 2, 4], device=device),
        torch.tensor([True, False, True], device=device), torch.zeros_like(x["v"])]
    eager, compiled = arguments(), arguments()
    with torch.no_grad():
        expected = call(*eager)
        found = torch.compile(call, fullgraph=True, backend="aot_eager")(*compiled)
    assert torch.equal(found, expected) and torch.equal(compiled[5], eager[5])


def test_an_operator_says_what_does_not_fit():
    x, _, _ = make()
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    rows[4] = rows[4][:, :5]
    with pytest.raises(ValueError, match=r"beta must have shape \[2, 131, 4\], got \[2, 5, 4\]"):
        ops.forward(*rows, None, None, None, None, None, *TAIL, False)


def test_threads_get_serial_bits(device):
    x, _, state = make(T=200, device=device)
    expected = chunk_kda(**x, initial_state=state, **FLAGS)
    results = [None] * 8

    def work(i):
        with torch.no_grad():
            results[i] = [chunk_kda(**x, initial_state=state, **FLAGS) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        for o, final in result:
            assert torch.equal(o, expected[0]) and torch.equal(final, expected[1])


def test_no_memory_is_kept(device):
    """Plans are cached up to a bound; nothing else may stay. Measured over many different shapes."""
    resource = pytest.importorskip("resource")
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def calls(count):
        for i in range(count):
            x, _, state = make(1, 1 + i % 300, 1, 1, 32, 32, device=device)
            fused_recurrent_kda(**x, initial_state=state, **FLAGS)

    calls(600)
    before = peak()
    calls(3000)
    assert peak() - before < 4096  # KiB


def test_no_derivative_is_dropped(device):
    """Of outputs that the caller gives, of states in place, and in forward mode: an error, and nothing is written."""
    x, _, state = make(T=3, device=device)
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    rows[1] = rows[1].clone().requires_grad_()
    o, pool = torch.full_like(x["v"], float("nan")), state.clone()
    into = (*rows, o, None, None, None, None, None, None, None, *TAIL)
    step = (*rows, o, pool, None, None, None, None, None, None, True, *TAIL)
    decode = (*rows, None, None, None, None, None, *TAIL, False, True)
    for call, arguments in ((FORWARD_INTO, into), (ops.forward_into, into), (UPDATE, step), (ops.update, step),
                            (FORWARD, decode), (ops.forward, decode)):
        with pytest.raises(NotImplementedError, match="no backward pass"):
            call(*arguments)
    assert o.isnan().all() and torch.equal(pool, state)
    with torch.no_grad():
        UPDATE(*step)
    assert not o.isnan().any() and not torch.equal(pool, state)


@pytest.mark.parametrize("function", [
    lambda q, x: chunk_kda(**dict(x, q=q))[0], lambda q, x: fused_recurrent_kda(**dict(x, q=q))[0],
    lambda q, x: FORWARD(q, x["k"], x["v"], x["g"], x["beta"], None, None, None, None, None, *TAIL, False)[0],
    lambda q, x: KEPT(q, x["k"], x["v"], x["g"], x["beta"], None, None, None, None, None, *TAIL, False)[0]])
def test_forward_mode_is_refused(device, function):
    x, _, _ = make(T=3, device=device)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: function(q, x), (x["q"],), (torch.ones_like(x["q"]),))


@pytest.mark.parametrize("direct", [False, True])
def test_states_that_change_raise_their_version(device, direct):
    """So autograd refuses a gradient through values that are gone."""
    x, _, state = make(T=1, device=device)
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    weight, o = torch.ones((), device=device, requires_grad=True), torch.empty_like(x["v"])
    y = (weight * state).sum()
    before = [t._version for t in rows]
    with torch.no_grad():
        if direct:
            UPDATE(*rows, o, state, None, None, None, None, None, None, True, *TAIL)
        else:
            fused_recurrent_kda_fwd(**x, initial_state=state, out=o)
    assert state._version == 1 and o._version == 1 and [t._version for t in rows] == before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        fused_recurrent_kda_fwd(**x, initial_state=state, out=o)
        fresh = state.clone()
    assert state._version == 2
    with torch.no_grad():
        fused_recurrent_kda_fwd(**x, initial_state=fresh)  # it has no version
        FORWARD_INTO(*rows, o, state, None, None, None, None, None, None, *TAIL)
    assert state._version == 3 and o._version == 3


def test_meta_beside_real_tensors(device):
    """A parameter that was offloaded: the fake kernel would run, and nothing would be written."""
    x, parameters, state = make(T=1, device=device)
    away = torch.zeros(4, device="meta")
    pool = state.clone()
    with pytest.raises(ValueError, match="A_log must be on the device of q, .*, got meta"):
        fused_recurrent_kda_fwd(**x, initial_state=pool, A_log=away, use_gate_in_kernel=True)
    assert torch.equal(pool, state)
    real = chunk_kda(**x, initial_state=state, output_final_state=True)
    shapes = chunk_kda(**{n: t.to("meta") for n, t in x.items()}, output_final_state=True)
    assert [t.shape for t in shapes] == [t.shape for t in real] and shapes[0].is_meta


@pytest.mark.parametrize("change, text", [
    (dict(A_log=torch.zeros(4, device="meta")), "A_log must be on the device of q"),
    (dict(g=torch.zeros(2, 3, 4, 64, dtype=torch.complex64)), "g must be"),
    (dict(initial_state=torch.zeros(2, 4, 64, 31)), "initial_state must have shape"),
    (dict(beta=torch.zeros(2, 3, 3)), "beta must have shape"),
])
@pytest.mark.parametrize("compiled", [False, True])
def test_fake_kernels_refuse_too(change, text, compiled):
    """Under FakeTensor, where no kernel looks, and while torch.compile traces."""
    x, parameters, state = make(T=3)
    arguments = dict(x, initial_state=state, A_log=parameters["A_log"], use_gate_in_kernel=True) | change
    if compiled:
        call = torch.compile(lambda arguments: chunk_kda(**arguments)[0], backend="eager")
        with torch.no_grad(), pytest.raises(Exception, match=text):
            call(arguments)
        return
    mode = torch._subclasses.FakeTensorMode()
    with mode, torch.no_grad(), pytest.raises((TypeError, ValueError), match=text):
        chunk_kda(**{n: mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for n, t in arguments.items()})


def test_refusals_cost_nothing_but_their_text(device):
    """Hundreds of them, of views whose memory holds other values: torch's fallback for these would end the process."""
    x, _, state = make(T=1, device=device)
    view = torch._neg_view(state)
    for _ in range(1000):
        with pytest.raises(ValueError, match="initial_state is written, so it cannot be a negative view"):
            fused_recurrent_kda_fwd(**x, initial_state=view)
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    with pytest.raises(ValueError, match="libkda: states is written"):
        UPDATE(*rows, torch.empty_like(x["v"]), view, None, None, None, None, None, None, True, *TAIL)
    expected, found = state.clone(), state.clone()
    fused_recurrent_kda_fwd(**x, initial_state=expected)
    fused_recurrent_kda_fwd(**dict(x, q=torch._neg_view(-x["q"])), initial_state=found)
    assert torch.equal(found, expected)


def test_no_memory(device, capfd):
    """The size, the allocator's words, and no stack frames; the next call works."""
    x, _, _ = make(B=1, T=1, H=1, HV=1, K=16, V=16, device=device)
    huge = {n: t.expand(1 << 30, 1 << 20, *t.shape[2:]) for n, t in x.items()}  # o of 64 PiB
    capfd.readouterr()
    error = torch.OutOfMemoryError if device == "cuda" else RuntimeError
    with torch.no_grad(), pytest.raises(error, match=r"o: \d+ bytes cannot be allocated"):
        chunk_kda(**huge)
    assert capfd.readouterr().err == ""
    assert chunk_kda(**x)[0].shape == x["v"].shape


def test_operators_check_integers():
    x, _, _ = make(T=3)
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    for mode, text in (((2**32, 0), "gate_mode must be 0 to 2"), ((0, 2**32 + 1), "beta_mode must be 0 to 2")):
        with pytest.raises(ValueError, match=text):
            ops.forward(*rows, None, None, None, None, None, *mode, *TAIL[2:], False)
    cu = torch.tensor([0, -2**63, 2**63 - 1])
    with pytest.raises(ValueError, match="cu_seqlens"):
        ops.forward(*(t[:1] for t in rows), None, None, None, cu, cu, *TAIL, False, True)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("T, shape", [(1, {}), (200, {}), (200, dict(HV=32, K=128, V=128))])
def test_cuda_graph_with_new_data(T, shape):
    x, _, state = make(T=T, device="cuda", dtype=torch.bfloat16, **shape)
    function = fused_recurrent_kda if T == 1 else chunk_kda
    call = lambda: function(**x, initial_state=state, **FLAGS)
    with torch.inference_mode():
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, final = call()
        for t in (*x.values(), state):
            t.copy_(t.flip(1))
        graph.replay()
        expected = call()
    assert torch.equal(o, expected[0]) and torch.equal(final, expected[1])


@pytest.mark.needs_cuda
def test_a_graph_of_drafts_and_checkpoints_with_new_data():
    """Trees, slots, offsets and rows of padding are read when the graph runs."""
    N, S, on = 3, 4, dict(device="cuda")
    x, _, state = make(B=N, T=S, N=N, device="cuda", dtype=torch.bfloat16, K=128, V=128)
    long, _, _ = make(B=1, T=200, device="cuda", dtype=torch.bfloat16, K=128, V=128)
    pool, drafts = state.repeat(3, 1, 1, 1), state.repeat(5, 1, 1, 1)
    slots, parents = torch.tensor([4, 2, 0], **on), torch.tensor([[0, 0, 0, 1], [0, 0, 1, -1], [0, 0, 0, 0]], **on)
    rows, cu = torch.arange(1, 1 + N * S, **on).view(N, S), torch.tensor([0, 100, 200, 200], **on)
    offsets, to = torch.tensor([64, 0, 0], **on), torch.tensor([1, 2, 0], **on)
    o, p = torch.zeros_like(x["v"]), torch.zeros_like(long["v"])
    modes = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)  # or 200 tokens end in NaN

    def step(pool, drafts):
        libkda.verify(**x, pool=pool, slots=slots, first_slot=1, drafts=drafts, draft_slots=rows, parents=parents,
                      out=o, **modes)
        libkda.prefill(**long, pool=pool, slots=slots, cu_seqlens=cu, first_slot=1, checkpoints=drafts,
                       checkpoint_offsets=offsets, checkpoint_slots=to, checkpoint_every=64, out=p, **modes)

    with torch.inference_mode():
        step(pool.clone(), drafts.clone())
        graph, captured = torch.cuda.CUDAGraph(), (pool.clone(), drafts.clone())
        with torch.cuda.graph(graph):
            step(*captured)
        slots.copy_(torch.tensor([1, 0, 3]))
        parents.copy_(parents.flip(0))
        offsets.copy_(torch.tensor([0, 64, 0]))
        for y in (*x.values(), *long.values()):
            y.copy_(y.flip(1))
        for made, y in zip(captured, (pool, drafts)):
            made.copy_(y)
        graph.replay()
        found = [y.clone() for y in (o, p, *captured)]
        eager = pool.clone(), drafts.clone()
        step(*eager)
    assert all(torch.equal(a, b) for a, b in zip(found, (o, p, *eager)))


@pytest.mark.needs_cuda
@pytest.mark.parametrize("where", ["device", "both", "host"])
def test_a_call_never_waits_for_the_device(where):
    x, _, state = make(1, 200, device="cuda", N=2)
    cu = torch.tensor([0, 70, 200])
    arguments = dict(cu_seqlens=cu if where == "host" else cu.cuda(), cu_seqlens_cpu=cu if where == "both" else None)
    chunk_kda(**x, initial_state=state, **arguments, **FLAGS)
    torch.cuda.set_sync_debug_mode("error")
    try:
        chunk_kda(**x, initial_state=state, **arguments, **FLAGS)
        fused_recurrent_kda(**{n: t[:, :2] for n, t in x.items()}, initial_state=state[:1], **FLAGS)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.needs_cuda
def test_runs_on_the_current_stream():
    x, _, state = make(T=500, device="cuda")
    expected = chunk_kda(**x, initial_state=state, **FLAGS)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = {n: torch.zeros_like(t) for n, t in x.items()}
        torch.cuda._sleep(20_000_000)
        for n, t in x.items():
            late[n].copy_(t)
        found = chunk_kda(**late, initial_state=state, **FLAGS)[0]
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(found, expected)
