# SPDX-License-Identifier: Apache-2.0
import concurrent.futures
import os
import resource
import sys
import time
import weakref

import pytest
import torch
from common import distance, make, reference

from libkda import arrays
from libkda._binding import repeats

np = pytest.importorskip("numpy")


def numpy_inputs(**shape):
    x, parameters, state = make(**shape)
    raw = dict(qk_l2norm=True, beta_mode="sigmoid", output_final_state=True)
    return x, parameters, state, {n: t.numpy() for n, t in x.items()}, raw


@pytest.mark.parametrize("gates, bound", [("log", None), ("softplus", None), ("bounded", -5.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_numpy(gates, bound, dtype):
    x, parameters, state, arguments, raw = numpy_inputs(dtype=dtype, gates=gates)
    if gates != "log":
        raw.update(gate_mode=gates, A_log=parameters["A_log"].numpy(),
                   dt_bias=parameters["dt_bias"].view(4, 64).numpy())
    o, final = arrays.forward(**arguments, initial_state=state.numpy(), **raw)
    expected = reference(x, parameters, state, gates, bound)
    assert o.dtype == arguments["v"].dtype
    limit = 2e-6 if dtype == torch.float32 else 4e-4
    assert distance(torch.from_numpy(o), expected[0]) < limit and distance(torch.from_numpy(final), expected[1]) < limit


def test_packed_and_v_first():
    x, parameters, state, arguments, raw = numpy_inputs(B=1, N=2)
    o, final = arrays.forward(**arguments, initial_state=state.mT.contiguous().numpy(),
                              cu_seqlens=np.array([0, 40, 131]), state_layout="vk", scale=0.2, **raw)
    for n, (begin, end) in enumerate([(0, 40), (40, 131)]):
        expected = reference({k: t[:, begin:end] for k, t in x.items()}, parameters, state[n:n + 1], scale=0.2)
        assert distance(torch.from_numpy(o[:, begin:end]), expected[0]) < 2e-6
        assert distance(torch.from_numpy(final[n:n + 1]).mT, expected[1]) < 2e-6


def test_segments_and_invariance():
    """What a policy is given for: other bits from 3 segments, the same ones without, none of them wrong."""
    _, _, _, arguments, raw = numpy_inputs(T=200)
    arguments["g"] = arguments["g"] / 100  # no state is forgotten
    call = lambda **how: arrays.forward(**arguments, **raw, **how)[0]
    whole, cut = call(), call(context_parallel=3)
    assert not np.array_equal(whole, cut) and distance(torch.from_numpy(cut), torch.from_numpy(whole).double()) < 2e-6
    assert np.array_equal(whole, call(context_parallel="off"))
    # This policy cuts by the tokens of the batch, or of a sequence alone.
    _, _, _, arguments, raw = numpy_inputs(B=4, T=200, H=4)
    arguments["g"] = arguments["g"] / 100
    batch, alone = call(context_parallel="flashkda"), call(context_parallel="flashkda", batch_invariant=True)
    first = arrays.forward(**{n: x[:1] for n, x in arguments.items()}, **raw, context_parallel="flashkda")[0]
    assert not np.array_equal(batch[:1], first) and np.array_equal(alone[:1], first)
    with pytest.raises(ValueError, match="^context_parallel must be 'auto', 'off', .* got 'on'"):
        call(context_parallel="on")
    with pytest.raises(TypeError, match="^batch_invariant must be a bool, got 1"):
        call(batch_invariant=1)


def test_outputs_of_the_caller_and_strides():
    _, _, _, arguments, raw = numpy_inputs(H=4)
    expected, _ = arrays.forward(**arguments, **raw)
    fused = np.concatenate([arguments["q"], arguments["k"]], axis=-1)
    o = np.full_like(arguments["v"], np.nan)
    found, _ = arrays.forward(**dict(arguments, q=fused[..., :64], k=fused[..., 64:]), o=o, **raw)
    assert found is o and np.array_equal(o, expected)


def test_dlpack_of_other_libraries(monkeypatch):
    """torch stands for any library with __dlpack__; without ml_dtypes bfloat16 needs the caller's output."""
    x, parameters, state = make(dtype=torch.bfloat16)
    raw = dict(qk_l2norm=True, beta_mode="sigmoid", output_final_state=True)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ValueError, match="o: NumPy has no bfloat16"):
        arrays.forward(**x, **raw)
    o = torch.full_like(x["v"], float("nan"))
    arrays.forward(**x, o=o, initial_state=state, **raw)
    assert distance(o, reference(x, parameters, state)[0]) < 2.5e-3


def test_bfloat16_of_ml_dtypes():
    """NumPy arrays as JAX hands them to callbacks."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    x, parameters, state = make(dtype=torch.bfloat16)
    arguments = {name: t.view(torch.uint16).numpy().view(bfloat16) for name, t in x.items()}
    o, final = arrays.forward(**arguments, initial_state=state.numpy(), qk_l2norm=True, beta_mode="sigmoid",
                              output_final_state=True)
    expected = reference(x, parameters, state)
    assert o.dtype == bfloat16 and distance(torch.from_numpy(o.astype(np.float32)), expected[0]) < 2.5e-3
    assert distance(torch.from_numpy(final), expected[1]) < 2e-6


def test_decode_goes_on_where_forward_ends():
    x, parameters, state, arguments, raw = numpy_inputs(T=21)
    expected, expected_final = reference(x, parameters, state)
    some = lambda begin, end: {name: t[:, begin:end] for name, t in arguments.items()}
    _, pool = arrays.forward(**some(0, 12), initial_state=state.numpy(), **raw)
    del raw["output_final_state"]
    for begin, end in [(12, 13), (13, 21)]:  # one token, then as many as a step takes
        o = arrays.decode(**some(begin, end), state=pool, **raw)
        assert distance(torch.from_numpy(o), expected[:, begin:end]) < 2e-6
    assert distance(torch.from_numpy(pool), expected_final) < 2e-6


def test_decode_in_a_pool():
    x, parameters, state, arguments, raw = numpy_inputs(B=3, T=1)
    del raw["output_final_state"]
    pool = np.full((6, *state.shape[1:]), np.nan, np.float32)
    pool[4], pool[1] = state[0].numpy(), state[2].numpy()
    o = arrays.decode(**arguments, state=pool, indices=np.array([4, -1, 1], np.int32), **raw)
    expected, expected_final = reference(x, parameters, state)
    assert not o[1].any()
    for n, slot in [(0, 4), (2, 1)]:
        assert distance(torch.from_numpy(o[n]), expected[n]) < 2e-6
        assert distance(torch.from_numpy(pool[slot]), expected_final[n]) < 2e-6
    assert np.isnan(pool[[0, 2, 3, 5]]).all()


@pytest.mark.parametrize("change, error, text", [
    (dict(state=np.zeros((2, 4, 64, 33), np.float32)), ValueError, r"state must have shape \[2, 4, 64, 32\]"),
    (dict(state=np.zeros((2, 4, 64, 32))), TypeError, "state must be float32 or bfloat16, got float64"),
    (dict(state=np.zeros((2, 4, 64, 32), np.float16)), TypeError, "state must be float32 or bfloat16, got float16"),
    (dict(indices=np.array([0, 1])), TypeError, "indices must be int32, got int64"),
    (dict(indices=np.array([0, 0, 1, 1], np.int32)[::2]), ValueError, "indices must be dense"),
    (dict(indices=np.array([0], np.int32)), ValueError, r"indices must have shape \[2\], got \[1\]"),
])
def test_errors_of_decode(change, error, text):
    _, _, state, arguments, raw = numpy_inputs(T=1)
    del raw["output_final_state"]
    o = np.full_like(arguments["v"], np.nan)
    call = dict(state=state.numpy().copy())
    call.update(change)
    before = call["state"].copy()
    with pytest.raises(error, match=text):
        arrays.decode(**arguments, **call, o=o, **raw)
    assert np.isnan(o).all() and np.array_equal(call["state"], before)


def test_new_requests_and_padded_rows():
    """has_state and first_slot; any number of rows may have the null block."""
    x, parameters, state, arguments, raw = numpy_inputs(B=4, T=2)
    expected, expected_final = reference(x, parameters, state * torch.tensor([1, 0, 1, 1])[:, None, None, None])
    mask = np.array([True, False, True, True])
    o, final = arrays.forward(**arguments, initial_state=state.numpy(), has_state=mask, **raw)
    assert distance(torch.from_numpy(o), expected) < 2e-6 and distance(torch.from_numpy(final), expected_final) < 2e-6
    del raw["output_final_state"]
    pool = np.full((4, *state.shape[1:]), np.nan, np.float32)
    pool[2] = state[1].numpy()
    given = np.full_like(arguments["v"], np.nan)
    step = dict(arguments, state=pool, indices=np.array([0, 2, 0, -3], np.int32), has_state=mask.view(np.uint8), **raw)
    o = arrays.decode(**step, o=given, first_slot=1)
    assert not o[[0, 2, 3]].any() and distance(torch.from_numpy(o[1]), expected[1]) < 2e-6
    assert distance(torch.from_numpy(pool[2]), expected_final[1]) < 2e-6 and np.isnan(pool[[0, 1, 3]]).all()
    assert arrays.workspace_bytes(**step, first_slot=1) >= 0
    with pytest.raises(ValueError, match="has_state is given without initial_state"):
        arrays.forward(**arguments, has_state=mask, **raw)


@pytest.mark.parametrize("change, error, text", [
    (dict(indices=np.array([7, 1], np.int32)), ValueError, "^indices: entry 0 = 7"),
    (dict(indices=np.array([1, 1], np.int32)), ValueError, "^indices: slot 1 would be written twice"),
    (dict(state=np.zeros((2, 4, 64, 64), np.float32)[..., ::2]), ValueError, "^state: innermost stride is 2"),
    (dict(num_threads=2**32 + 1), ValueError, "num_threads must be 0 to"),
    (dict(num_threads=1.5), TypeError, "num_threads must be an integer"),
    (dict(stream=-1), ValueError, "stream must be 0 to"),
    (dict(first_slot=-1), ValueError, "first_slot must be 0 to"),
    (dict(A_log=np.zeros(4), gate_mode="softplus"), TypeError, "^A_log must be float32, got float64$"),
    (dict(A_log=np.full(4, 89, np.float32), gate_mode="softplus"), ValueError, "^A_log: entry 0 = 89 is above 70"),
    (dict(A_log=np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (4,), (0,)), gate_mode="bounded"),
     ValueError, "A_log: stride of dimension 0 is 0"),
    (dict(cu_seqlens=[0, 2**64 + 2]), ValueError, "cu_seqlens: entry 1 = 18446744073709551618"),
    (dict(scale=1e39), ValueError, r"scale must be finite in fp32, got 1e\+39"),
    (dict(lower_bound=-1e39, gate_mode="bounded"), ValueError, "lower_bound must be finite in fp32"),
    (dict(gate_mode=["log"]), ValueError, "gate_mode must be one of"),
    (dict(q=torch._neg_view(torch.zeros(2, 1, 2, 64))), TypeError, "q: cannot export a negative view"),
    (dict(q=torch.zeros(2, 1, 2, 64, device="meta")), TypeError, "q cannot be exported"),
])
def test_what_is_not_meant_is_said(change, error, text):
    _, _, state, arguments, raw = numpy_inputs(T=1)
    del raw["output_final_state"]
    call = dict(arguments, state=np.concatenate([state.numpy()] * 2)[:2].copy(), o=np.full_like(arguments["v"], np.nan))
    call.update(raw)
    call.update(change)
    before = call["state"].copy()
    with pytest.raises(error, match=text):
        arrays.decode(**call)
    assert np.isnan(call["o"]).all() and np.array_equal(call["state"], before)


def test_no_memory():
    _, _, _, arguments, _ = numpy_inputs(B=1, T=1, H=1, HV=1, K=16, V=16)
    huge = {n: np.lib.stride_tricks.as_strided(x, (1 << 30, 1 << 20, *x.shape[2:]), (0, 0, *x.strides[2:]))
            for n, x in arguments.items()}
    with pytest.raises(MemoryError, match="64.0 PiB"):
        arrays.forward(**huge)


def test_decode_takes_few_tokens():
    _, _, state, arguments, raw = numpy_inputs(T=9)
    with pytest.raises(ValueError, match="8"):
        arrays.decode(**arguments, state=state.numpy(), qk_l2norm=True)


def test_read_only_inputs_are_fine_read_only_outputs_are_not():
    _, _, _, arguments, raw = numpy_inputs()
    expected, _ = arrays.forward(**arguments, **raw)
    for array in arguments.values():
        array.flags.writeable = False
    assert np.array_equal(arrays.forward(**arguments, **raw)[0], expected)
    o = np.zeros_like(expected)
    o.flags.writeable = False
    with pytest.raises(ValueError, match="o is read-only"):
        arrays.forward(**arguments, o=o, **raw)


@pytest.mark.parametrize("change, error, text", [
    (dict(gate_mode="fast"), ValueError, "gate_mode must be one of log, softplus, bounded, got 'fast'"),
    (dict(k=np.zeros((2, 131, 2, 63), np.float32)), ValueError, r"k must have shape \[2, 131, 2, 64\]"),
    (dict(v=[1, 2]), TypeError, "v must be an array with __dlpack__"),
    (dict(g=np.zeros((2, 131, 4, 64))), TypeError, "g must be float32, bfloat16 or float16, got float64"),
    (dict(g=np.zeros((2, 131, 4, 64), ">f4")), TypeError, "g cannot be exported by DLPack"),
    (dict(lower_bound=None), TypeError, "lower_bound must be a number, got None"),
    (dict(scale="x"), TypeError, "scale must be a number, got .x."),
    (dict(cu_seqlens=[]), ValueError, "cu_seqlens must have"),
    (dict(cu_seqlens=[0.0, 131.0]), TypeError, "cu_seqlens must be a sequence of integers"),
    (dict(gate_mode="softplus"), ValueError, "A_log"),
    (dict(cu_seqlens=[0, 131]), ValueError, "batch"),
])
def test_errors(change, error, text):
    _, _, _, arguments, raw = numpy_inputs()
    with pytest.raises(error, match=text):
        arrays.forward(**dict(arguments, **raw, **change))


def test_calls_find_their_own_plans():
    """Plans are kept between calls: a call that differs in one thing gets another one."""
    _, _, _, arguments, raw = numpy_inputs(B=1, N=2)
    lengths = [np.array([0, n, 131]) for n in (40, 64)]
    calls = [dict(cu_seqlens=lengths[0]), dict(cu_seqlens=lengths[1]), dict(), dict(scale=0.5), dict(beta_mode="plain"),
             dict(qk_l2norm=False, scale=0.01), dict(output_final_state=False)]
    run = lambda change: arrays.forward(**arguments, **(raw | change))
    first = [run(change) for change in calls]
    for change, (o, final) in zip(calls, first):
        again, final_again = run(change)
        assert np.array_equal(again, o)
        assert np.array_equal(final_again, final) if final is not None else final_again is None
    assert len({o.tobytes() for o, _ in first}) == len(calls) - 1  # the last one differs in its states alone


def test_workspace_bytes():
    _, _, state, arguments, raw = numpy_inputs()
    assert arrays.workspace_bytes(**arguments, initial_state=state.numpy(), **raw) > 0
    token = {name: t[:, :1] for name, t in arguments.items()}
    assert arrays.workspace_bytes(**token, state=state.numpy(), qk_l2norm=True) > 0
    with pytest.raises(ValueError, match="8"):  # the plan is that of decode
        arrays.workspace_bytes(**arguments, state=state.numpy())


GATES = [("log", None), ("softplus", None), ("bounded", -5.0)]


@pytest.fixture
def remembered(monkeypatch):
    """What calls leave for those that repeat them, empty at first."""
    monkeypatch.setattr(repeats, "_remembered", {})
    return repeats._remembered


def calls_with(dtype=torch.float32):
    """forward() and decode() with every argument that they may have, by NumPy; a new copy of the states each time."""
    torch.manual_seed(0)
    x, parameters, state, arguments, _ = numpy_inputs(dtype=dtype, gates="softplus")
    modes = dict(gate_mode="softplus", A_log=parameters["A_log"].numpy(),
                 dt_bias=parameters["dt_bias"].view(4, 64).numpy(), qk_l2norm=True, beta_mode="sigmoid")
    token = {name: np.ascontiguousarray(array[:, :1]) for name, array in arguments.items()}
    pool = np.concatenate([state.numpy()] * 2)
    mask = np.array([True, False])

    def forward(**more):
        return arrays.forward(**dict(arguments, **modes, initial_state=state.numpy(), has_state=mask,
                                     output_final_state=True) | more)

    def decode(**more):
        states = pool.copy()
        o = arrays.decode(**dict(token, **modes, state=states, has_state=mask,
                                 indices=np.array([2, -1], np.int32)) | more)
        return o, states
    return forward, decode


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_repeated_call_is_the_same_call(remembered, monkeypatch, dtype):
    """The same bits, from other addresses too, with its plan kept; and no description anew."""
    first, again = calls_with(dtype), calls_with(dtype)
    expected = [call() for call in first]
    assert len(remembered) == 2
    monkeypatch.setattr(arrays, "_Call", None)
    for calls in (first, again):
        for call, wanted in zip(calls, expected):
            assert all(np.array_equal(x, y) for x, y in zip(call(), wanted))
    monkeypatch.undo()
    o = np.full_like(expected[0][0], np.nan)
    for _ in range(2):
        o[:] = np.nan
        assert again[0](o=o)[0] is o and np.array_equal(o, expected[0][0])


@pytest.mark.parametrize("change", [
    dict(scale=0.2), dict(qk_l2norm=False), dict(beta_mode="sigmoid2"), dict(has_state=None), dict(state_layout="vk"),
    dict(gate_mode="bounded"), dict(gate_mode="bounded", lower_bound=-1.0), dict(num_threads=1),
])
def test_an_option_makes_another_call(remembered, change):
    if change.get("state_layout"):
        change = change | dict(initial_state=calls_with()[0]()[1].swapaxes(2, 3).copy())
    forward, _ = calls_with()
    forward()
    found = forward(**change)
    remembered.clear()
    assert all(np.array_equal(x, y) for x, y in zip(found, forward(**change)))


def test_what_repeats_is_checked_as_before(remembered):
    """Read-only and unaligned memory, options of another type, overlaps: as if no call had come before."""
    forward, decode = calls_with()
    expected, _ = forward(), decode()
    assert len(remembered) == 2
    with pytest.raises(TypeError, match="^num_threads must be"):
        forward(num_threads=0.0)
    with pytest.raises(ValueError, match="^gate_mode must be one of"):
        forward(gate_mode=["softplus"])
    torch.manual_seed(0)
    arguments = numpy_inputs(gates="softplus")[3]
    o = np.empty_like(arguments["v"])
    forward(o=o)
    o.flags.writeable = False
    with pytest.raises(ValueError, match="^o is read-only"):
        forward(o=o)
    v = arguments["v"].copy()
    forward(v=v, o=np.empty_like(v))
    with pytest.raises(ValueError, match="^o: overlaps v"):
        forward(v=v, o=v)
    q = np.empty(arguments["q"].nbytes + 4, np.uint8)[4:].view(np.float32).reshape(arguments["q"].shape)
    q[:] = arguments["q"]
    assert np.array_equal(forward(q=q)[0], expected[0])
    q.flags.writeable = False
    assert np.array_equal(forward(q=q)[0], expected[0])


def test_few_calls_are_remembered(remembered, monkeypatch):
    """The oldest is forgotten, with its plan."""
    forward, _ = calls_with()
    monkeypatch.setattr(repeats, "_MOST", 3)
    freed = []
    for i in range(8):
        forward(scale=0.1 + i)
        weakref.finalize(list(remembered.values())[-1]._plan, freed.append, i)
    assert len(remembered) == 3 and freed == [0, 1, 2, 3, 4]


def test_calls_of_many_threads_repeat(remembered):
    """Each with states of its own and sizes that the others have too."""
    calls = [calls_with() for _ in range(16)]

    def run(pair):
        forward, decode = pair
        return [(*forward(scale=0.1 * (1 + i % 3)), *decode(scale=0.1 * (1 + i % 3))) for i in range(12)]

    expected = run(calls[0])
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for found in threads.map(run, calls):
            assert all(np.array_equal(x, y) for a, b in zip(found, expected) for x, y in zip(a, b))


def test_time_of_a_repeated_call(remembered):
    """A step of a few heads is not for the most part Python: describing it anew takes several times as long."""
    _, _, _, arguments, _ = numpy_inputs(B=1, T=1, H=1, HV=1, K=16, V=16)
    state = np.zeros((1, 1, 16, 16), np.float32)

    def best(before):
        times = []
        for _ in range(200):
            before()
            start = time.perf_counter()
            arrays.decode(**arguments, state=state)
            times.append(time.perf_counter() - start)
        return min(times)

    assert best(lambda: None) < 0.5 * best(remembered.clear)


@pytest.mark.parametrize("gates", ["log", "softplus", "bounded"])
def test_one_gate_a_head(gates):
    """g [B, T, HV] is a gate that is alike in all channels, and dt_bias [HV] such a bias; so are their gradients."""
    x, parameters, state, arguments, _ = numpy_inputs(gates=gates)
    modes = modes_of(gates, parameters)
    g = np.ascontiguousarray(arguments["g"][..., 0])
    wide = dict(arguments, g=np.repeat(g[..., None], 64, -1))
    narrow = dict(arguments, g=g)
    if gates != "log":
        bias = np.ascontiguousarray(modes.pop("dt_bias")[:, 0])
        narrow["dt_bias"], wide["dt_bias"] = bias, np.repeat(bias[:, None], 64, -1)
    d_o = torch.randn_like(x["v"]).numpy()
    found, expected = ([*arrays.forward(**inputs, **modes, initial_state=state.numpy(), output_final_state=True)]
                       for inputs in (narrow, wide))
    assert all(np.array_equal(a, b) for a, b in zip(found, expected))
    pools = [state.numpy().copy(), state.numpy().copy()]
    tokens = [{name: array if name == "dt_bias" else array[:, :3] for name, array in inputs.items()}
              for inputs in (narrow, wide)]
    assert np.array_equal(*(arrays.decode(**token, state=pool, **modes) for token, pool in zip(tokens, pools)))
    assert np.array_equal(*pools)
    found, expected = (arrays.backward(**inputs, **modes, d_o=d_o) for inputs in (narrow, wide))
    assert found.dg.shape == g.shape
    if gates != "log":
        assert found.ddt_bias.shape == bias.shape
        assert distance(as_double(found.ddt_bias), as_double(expected.ddt_bias).sum(-1)) < 1e-5
        with pytest.raises(ValueError, match="^dt_bias must have shape"):
            arrays.forward(**dict(wide, dt_bias=bias), **modes)
    assert distance(as_double(found.dg), as_double(expected.dg).sum(-1)) < 1e-5
    assert distance(as_double(found.dk), as_double(expected.dk)) < 1e-5
    out = np.full((2, 131, 4), np.nan, np.float32)
    assert arrays.backward(**narrow, **modes, d_o=d_o, wanted="dg", out=dict(dg=out)).dg is out
    assert np.array_equal(out, found.dg)
    with pytest.raises(ValueError, match=r"^g must have shape \[2, 131, 4\], got \[2, 131, 2\]"):
        arrays.forward(**dict(arguments, g=g[..., :2]), **modes)
    with pytest.raises(ValueError, match="^dg must have shape"):
        arrays.backward(**narrow, **modes, d_o=d_o, out=dict(dg=np.empty_like(wide["g"])))


def modes_of(gates, parameters, HV=4, K=64):
    raw = dict(qk_l2norm=True, beta_mode="sigmoid", gate_mode=gates)
    if gates != "log":
        raw.update(A_log=parameters["A_log"].numpy(), dt_bias=parameters["dt_bias"].view(HV, K).numpy())
    return raw


def autograd(x, parameters, state, d_o, d_final, gates="log", bound=None, **rest):
    """Gradients of the recurrence in float64, by the names of arrays.Gradients."""
    leaves = {n: t.double().requires_grad_() for n, t in dict(x, **parameters, initial_state=state).items()}
    outputs = reference({n: leaves[n] for n in x}, {n: leaves[n] for n in parameters}, leaves["initial_state"], gates,
                        bound, **rest)
    wanted = list(leaves) if gates != "log" else [*x, "initial_state"]
    found = torch.autograd.grad(outputs, [leaves[n] for n in wanted], [d_o.double(), d_final.double()])
    return {"d_initial_state" if n == "initial_state" else f"d{n}": t for n, t in zip(wanted, found)}


def as_double(x):
    return torch.from_numpy(np.asarray(x, np.float64))


@pytest.mark.parametrize("gates, bound", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients(gates, bound, dtype):
    """All of them, with grouped heads; None where the forward has no such argument."""
    x, parameters, state, arguments, _ = numpy_inputs(T=70, dtype=dtype, gates=gates)
    d_o, d_final = torch.randn_like(x["v"]), torch.randn_like(state)
    found = arrays.backward(**arguments, **modes_of(gates, parameters), initial_state=state.numpy(), d_o=d_o.numpy(),
                            d_final_state=d_final.numpy())
    expected = autograd(x, parameters, state, d_o, d_final, gates, bound)
    for name, gradient in found._asdict().items():
        if name not in expected:
            assert gradient is None and gates == "log"
            continue
        source = arguments.get(name[1:])
        assert gradient.dtype == (np.float32 if source is None else source.dtype)
        exact = gradient.dtype == np.float32
        assert distance(as_double(gradient), expected[name].view(gradient.shape)) < (2e-6 if exact else 5e-4), name


def test_gradients_packed_and_v_first():
    """Two sequences and an empty one, the second without a state; only what is wanted."""
    x, parameters, state, arguments, _ = numpy_inputs(B=1, N=3)
    d_o, d_final = torch.randn_like(x["v"]), torch.randn_like(state)
    mask = np.array([True, False, True])
    found = arrays.backward(**arguments, qk_l2norm=True, beta_mode="sigmoid", state_layout="vk", scale=0.2,
                            initial_state=state.mT.contiguous().numpy(), d_o=d_o.numpy(), has_state=mask,
                            d_final_state=d_final.mT.contiguous().numpy(), cu_seqlens=np.array([0, 40, 131, 131]),
                            wanted=("d_initial_state", "dk", "dg"))
    assert [n for n, gradient in found._asdict().items() if gradient is not None] == ["dk", "dg", "d_initial_state"]
    for n, (begin, end) in enumerate([(0, 40), (40, 131)]):
        some = {name: t[:, begin:end] for name, t in x.items()}
        expected = autograd(some, parameters, state[n:n + 1] * float(mask[n]), d_o[:, begin:end], d_final[n:n + 1],
                            scale=0.2)
        for name in ("dk", "dg"):
            assert distance(as_double(getattr(found, name)[:, begin:end]), expected[name]) < 2e-6
        of_state = as_double(found.d_initial_state[n]).mT
        assert distance(of_state, expected["d_initial_state"][0]) < 2e-6 if mask[n] else not of_state.any()
    assert np.array_equal(found.d_initial_state[2], d_final[2].mT.numpy())


def test_gradients_by_differences():
    """Without any other implementation: the slope of a loss along random directions."""
    x, parameters, state, arguments, _ = numpy_inputs(B=1, T=40, gates="bounded")
    modes = modes_of("bounded", parameters)
    inputs = dict(arguments, initial_state=state.numpy(), A_log=modes.pop("A_log"), dt_bias=modes.pop("dt_bias"))
    d_o, d_final = torch.randn_like(x["v"]).numpy(), torch.randn_like(state[:1]).numpy()

    def loss(**changed):
        o, final = arrays.forward(**dict(inputs, **changed), **modes, output_final_state=True)
        return np.vdot(o.astype(np.float64), d_o) + np.vdot(final.astype(np.float64), d_final)

    inputs["initial_state"] = inputs["initial_state"][:1]
    found = arrays.backward(**inputs, **modes, d_o=d_o, d_final_state=d_final)
    for name, gradient in found._asdict().items():
        argument = "initial_state" if name == "d_initial_state" else name[1:]
        along = gradient / np.linalg.norm(gradient)
        step = np.float32(1e-2) * along
        slope = (loss(**{argument: inputs[argument] + step}) - loss(**{argument: inputs[argument] - step})) / 2e-2
        assert abs(slope / np.linalg.norm(gradient) - 1) < 5e-3, name


def test_gradients_of_bfloat16():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    x, parameters, state = make(T=70, dtype=torch.bfloat16)
    arguments = {name: t.view(torch.uint16).numpy().view(bfloat16) for name, t in x.items()}
    d_o = torch.randn_like(x["v"])
    found = arrays.backward(**arguments, qk_l2norm=True, beta_mode="sigmoid",
                            d_o=d_o.view(torch.uint16).numpy().view(bfloat16))
    assert found.d_initial_state is None and found.dA_log is None
    expected = autograd(x, parameters, torch.zeros_like(state), d_o, torch.zeros_like(state))
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        gradient = getattr(found, name)
        assert gradient.dtype == bfloat16 and distance(as_double(gradient), expected[name]) < 2.5e-3


def test_gradients_into_arrays_of_the_caller(monkeypatch):
    """Other types and strides, of inputs too; without ml_dtypes a bfloat16 gradient needs one."""
    x, _, _, arguments, _ = numpy_inputs()
    call = dict(qk_l2norm=True, beta_mode="sigmoid", d_o=torch.randn_like(x["v"]).numpy())
    expected = arrays.backward(**arguments, **call)
    fused = np.concatenate([arguments["q"], arguments["k"]], axis=-1)
    arguments.update(q=fused[..., :64], k=fused[..., 64:], beta=np.repeat(arguments["beta"], 2, -1)[..., ::2])
    call["d_o"] = np.concatenate([call["d_o"]] * 2, -1)[..., 32:]
    wide = np.full((2, 131, 2, 128), np.nan, np.float32)
    spread, half = np.full((2, 131, 4, 3), np.nan, np.float32), np.full_like(arguments["v"], np.nan, np.float16)
    out = dict(dk=wide[..., 64:], dbeta=spread[..., 1], dv=half)
    found = arrays.backward(**arguments, **call, out=out)
    assert all(getattr(found, name) is array for name, array in out.items())
    assert np.array_equal(wide[..., 64:], expected.dk) and np.isnan(wide[..., :64]).all()
    assert np.array_equal(spread[..., 1], expected.dbeta) and np.isnan(spread[..., [0, 2]]).all()
    assert np.array_equal(half, expected.dv.astype(np.float16)) and np.array_equal(found.dg, expected.dg)

    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    x = {name: t.bfloat16() for name, t in x.items()}
    with pytest.raises(ValueError, match="dv: NumPy has no bfloat16"):
        arrays.backward(**x, d_o=x["v"], wanted=["dv"])
    dv = torch.full_like(x["v"], float("nan"))
    assert arrays.backward(**x, **call, wanted="dv", out=dict(dv=dv)).dv is dv and not dv.isnan().any()


def test_kept_states():
    """What a forward keeps gives the same gradients, again and again; it belongs to that forward."""
    x, _, state, arguments, raw = numpy_inputs(T=300)
    call = dict(arguments, initial_state=state.numpy(), qk_l2norm=True, beta_mode="sigmoid")
    d_o = torch.randn_like(x["v"]).numpy()
    expected = arrays.backward(**call, d_o=d_o)
    kept = arrays.Kept(every=64)
    with pytest.raises(ValueError, match="^kept holds nothing"):
        arrays.backward(**call, d_o=d_o, kept=kept)
    o, _ = arrays.forward(**call, kept=kept)
    assert np.array_equal(o, arrays.forward(**call)[0])
    for _ in range(2):
        found = arrays.backward(**call, d_o=d_o, kept=kept)
        for name in ("dq", "dk", "dv", "dg", "dbeta", "d_initial_state"):
            assert distance(as_double(getattr(found, name)), as_double(getattr(expected, name))) < 1e-6
    with pytest.raises(ValueError, match="^kept: was not written by a run of the forward"):
        arrays.backward(**dict(call, scale=2), d_o=d_o, kept=kept)
    with pytest.raises(ValueError, match="^kept: has "):
        arrays.backward(**dict(call, **{n: np.concatenate([arguments[n]] * 2, 1) for n in arguments}),
                        d_o=np.concatenate([d_o] * 2, 1), kept=kept)
    with pytest.raises(TypeError, match="kept must be a libkda.arrays.Kept, got int"):
        arrays.forward(**call, kept=64)
    with pytest.raises(ValueError, match="every must be a multiple of 64, got 100"):
        arrays.Kept(100)
    with pytest.raises(ValueError, match="every must be 64 to"):
        arrays.Kept(0)
    with pytest.raises(TypeError, match="every must be an integer, got 64.5"):
        arrays.Kept(64.5)


@pytest.mark.parametrize("change, error, text", [
    (dict(d_o=None), ValueError, "^d_o or d_final_state must be given"),
    (dict(d_o=np.zeros((2, 131, 4, 31), np.float32)), ValueError, r"^d_o must have shape \[2, 131, 4, 32\], got"),
    (dict(d_o=np.zeros((2, 131, 4, 32))), TypeError, "^d_o must be float32, bfloat16 or float16, got float64"),
    (dict(d_o=np.zeros((2, 131, 4, 64), np.float32)[..., ::2]), ValueError, "^d_o: innermost stride is 2"),
    (dict(d_o=[1.0]), TypeError, "^d_o must be an array with __dlpack__"),
    (dict(d_final_state=np.zeros((2, 4, 32, 64), np.float32)), ValueError, r"^d_final_state must have shape"),
    (dict(d_final_state=np.zeros((2, 4, 64, 32), np.float16)), TypeError, "^d_final_state must be float32 or bfloat16"),
    (dict(initial_state=np.zeros((3, 4, 64, 32), np.float32)), ValueError, "^initial_state must have shape"),
    (dict(has_state=np.ones(2, bool)), ValueError, "^has_state is given without initial_state"),
    (dict(gate_mode="softplus"), ValueError, "^A_log"),
    (dict(A_log=np.full(4, 89, np.float32), gate_mode="softplus"), ValueError, "^A_log: entry 0 = 89 is above 70"),
    (dict(cu_seqlens=[0, 132]), ValueError, "^cu_seqlens: entry 1 = 132"),
    (dict(scale="x"), TypeError, "^scale must be a number"),
    (dict(num_threads=-1), ValueError, "^num_threads must be 0 to"),
    (dict(wanted=3), TypeError, "^wanted must be names of Gradients, got 3"),
    (dict(wanted=[]), ValueError, "^wanted must name at least one gradient, got none"),
    (dict(wanted=["q"]), ValueError, "^wanted: 'q' is none of dq, dk, dv"),
    (dict(wanted=["dA_log"]), ValueError, "^wanted: dA_log is that of A_log, which is not given"),
    (dict(wanted=["d_initial_state"]), ValueError, "^wanted: d_initial_state is that of initial_state, which is not"),
    (dict(wanted=["dk"]), ValueError, "^out: dq is not wanted"),
    (dict(out=[1]), TypeError, "^out must be a mapping of names to arrays, got list"),
    (dict(out=dict(dx=0)), ValueError, "^out: 'dx' is none of dq"),
    (dict(out=dict(dA_log=np.zeros(4, np.float32))), ValueError, "^out: dA_log is that of A_log, which is not given"),
    (dict(out=dict(dv=np.zeros((2, 131, 4, 31), np.float32))), ValueError, "^dv must have shape"),
    (dict(out=dict(dv=np.zeros((2, 131, 4, 32)))), TypeError, "^dv must be float32, bfloat16 or float16, got float64"),
    (dict(out=dict(dv=np.zeros((2, 131, 4, 64), np.float32)[..., ::2])), ValueError, "^dv: innermost stride is 2"),
    (dict(out=dict(dv=np.broadcast_to(np.float32(0), (2, 131, 4, 32)))), ValueError, "^dv is read-only"),
    (dict(q=torch.zeros(2, 131, 2, 64, device="meta")), TypeError, "^q cannot be exported"),
])
def test_errors_of_backward(change, error, text):
    x, _, _, arguments, _ = numpy_inputs()
    dq = np.full_like(arguments["q"], np.nan)
    call = dict(arguments, d_o=arguments["v"], out=dict(dq=dq), qk_l2norm=True)
    with pytest.raises(error, match=text):
        arrays.backward(**dict(call, **change))
    assert np.isnan(dq).all()


@pytest.mark.parametrize("name, place, text", [
    ("dk", "dq", "overlaps"), ("dq", "q", "^dq: overlaps q"), ("dv", "d_o", "^dv: overlaps d_o"),
])
def test_gradients_do_not_overlap(name, place, text):
    _, _, _, arguments, _ = numpy_inputs()
    memory = dict(arguments, dq=np.full_like(arguments["q"], np.nan), d_o=arguments["v"].copy())
    before = memory[place].copy()
    out = {"dq": memory["dq"], name: memory[place]}
    with pytest.raises(ValueError, match=text):
        arrays.backward(**arguments, d_o=memory["d_o"], out=out)
    assert np.array_equal(memory[place], before, equal_nan=True)


@pytest.mark.skipif("KDA_NAN_MEMORY" in os.environ, reason="all memory is filled")
def test_nobody_fills_a_workspace():
    """Not a page of it is asked for: of one for many threads most is never touched."""
    faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    before = faults()
    memory = repeats.Memory("workspace", 256 << 20)
    assert faults() - before < 1000 and memory.start % 64 == 0


def test_no_memory_for_gradients(monkeypatch):
    _, _, _, arguments, _ = numpy_inputs(B=1, T=1, H=1, HV=1, K=16, V=16)
    huge = {n: np.lib.stride_tricks.as_strided(x, (1 << 30, 1 << 20, *x.shape[2:]), (0, 0, *x.strides[2:]))
            for n, x in arguments.items()}
    with pytest.raises(MemoryError, match="64.0 PiB"):
        arrays.backward(**huge, d_o=huge["v"])

    monkeypatch.setattr(repeats, "_allocate", lambda size: None)
    dv = np.full_like(arguments["v"], np.nan)
    with pytest.raises(MemoryError, match="^workspace: [0-9]+ bytes cannot be allocated"):
        arrays.backward(**arguments, d_o=arguments["v"], out=dict(dv=dv))
    assert np.isnan(dv).all()


@pytest.mark.needs_cuda
@pytest.mark.parametrize("source", ["cupy", "jax"])
def test_arrays_on_a_gpu(source):
    """Inputs of CuPy or JAX; outputs and workspace of CuPy, on a stream of its own."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # JAX would take most of the memory
    cupy = pytest.importorskip("cupy")
    convert = cupy.asarray if source == "cupy" else pytest.importorskip("jax").numpy.asarray
    x, parameters, state, arguments, raw = numpy_inputs(dtype=torch.float16)
    inputs = {name: convert(array) for name, array in dict(arguments, initial_state=state.numpy()).items()}
    o = cupy.full(arguments["v"].shape, np.nan, np.float16)
    final = cupy.full(tuple(state.shape), np.nan, np.float32)
    workspace = cupy.zeros(arrays.workspace_bytes(**inputs, **raw), np.uint8)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    found, found_final = arrays.forward(**inputs, o=o, final_state=final, workspace=workspace, stream=stream.ptr, **raw)
    with pytest.raises(ValueError, match="workspace"):
        arrays.forward(**inputs, o=o, final_state=final, workspace=workspace[64:], stream=stream.ptr, **raw)
    with pytest.raises(ValueError, match="^kept must be None on a GPU"):
        arrays.forward(**inputs, o=o, final_state=final, workspace=workspace, kept=arrays.Kept(), **raw)
    with pytest.raises(ValueError, match=r"^q must be on the CPU: backward\(\) of arrays does not run on a GPU yet"):
        arrays.backward(**inputs, d_o=o)
    stream.synchronize()
    assert found is o and found_final is final
    expected = reference(x, parameters, state)
    assert distance(torch.from_numpy(o.get()), expected[0]) < 1e-3
    assert distance(torch.from_numpy(final.get()), expected[1]) < 1e-3

    token = {name: array[:, :1] for name, array in inputs.items() if name != "initial_state"}
    states = cupy.asarray(state.numpy())
    next_o, memory = o[:, :1].copy(), cupy.zeros(arrays.workspace_bytes(**token, state=states) + 1, np.uint8)
    cupy.cuda.Device().synchronize()
    assert arrays.decode(**token, state=states, o=next_o, workspace=memory, stream=stream.ptr, qk_l2norm=True,
                         beta_mode="sigmoid") is next_o
    stream.synchronize()
    expected = reference({name: t[:, :1] for name, t in x.items()}, parameters, state)
    assert distance(torch.from_numpy(next_o.get()), expected[0]) < 1e-3
    assert distance(torch.from_numpy(states.get()), expected[1]) < 2e-6


def test_head_map():
    """"tiled" is that of q and k with a head for each value head, in each function."""
    rng = np.random.default_rng(3)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
    q, k, v = normal(2, 5, 2, 16), normal(2, 5, 2, 16), normal(2, 5, 4, 8)
    g, beta = -abs(normal(2, 5, 4, 16)), normal(2, 5, 4)
    each = [np.tile(x, (1, 1, 2, 1)) for x in (q, k)]
    modes = dict(beta_mode="sigmoid", qk_l2norm=True)
    o, final = arrays.forward(q, k, v, g, beta, output_final_state=True, head_map="tiled", **modes)
    expected, final_expected = arrays.forward(*each, v, g, beta, output_final_state=True, **modes)
    assert np.allclose(o, expected, atol=1e-6) and np.allclose(final, final_expected, atol=1e-6)
    assert np.allclose(arrays.decode(q, k, v, g, beta, final, head_map="tiled", **modes),
                       arrays.decode(*each, v, g, beta, final_expected, **modes), atol=1e-6)
    found = arrays.backward(q, k, v, g, beta, d_o=o, head_map="tiled", **modes)
    wanted = arrays.backward(*each, v, g, beta, d_o=o, **modes)
    assert np.allclose(found.dq, wanted.dq.reshape(2, 5, 2, 2, 16).sum(2), atol=1e-5)
    assert np.allclose(found.dv, wanted.dv, atol=1e-5)
    with pytest.raises(ValueError, match="head_map must be one of grouped, tiled, got 'striped'"):
        arrays.forward(q, k, v, g, beta, head_map="striped")


def test_rows_without_a_slot_are_zero():
    rng = np.random.default_rng(4)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
    o, state = np.full((2, 1, 2, 8), np.nan, np.float32), normal(3, 2, 16, 8)
    rows = normal(2, 1, 2, 16), normal(2, 1, 2, 16), normal(2, 1, 2, 8), -abs(normal(2, 1, 2, 16)), normal(2, 1, 2)
    arrays.decode(*rows, state, indices=np.array([-1, 2], np.int32), o=o)
    assert not o[0].any() and o[1].any()
