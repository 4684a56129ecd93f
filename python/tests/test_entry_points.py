# SPDX-License-Identifier: Apache-2.0
"""Which rule applies does not depend on which kernel was picked: the same conditions for every function that computes
tokens, on every device. Where a function refuses what others take, REFUSES has the text and the reason; where a GPU
does what a CPU refuses, the test says why."""
import math
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import distance, reference

import libkda
from libkda import context_parallel

H, HV, D, SLOTS, TAPS = 2, 4, 16, 9, 4
NORMS = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)


class Entry(NamedTuple):
    """A function, and what its arguments are called. `pool`: its states, which it updates in place at `slots`;
    `state`: states that it reads, one a sequence; it returns others."""
    name: str
    pool: str | None = None
    slots: str | None = None
    state: str | None = None
    rows: tuple = ("q", "k", "v", "g", "beta")
    gradients: bool = False
    packs: bool = True  # takes cu_seqlens


CONV = ("x", "weight", "bias")
STEP = ("x", "weight", "raw_g", "raw_beta", "A_log", "dt_bias", "output_gate", "norm_weight")
ENTRIES = [
    Entry("prefill", "pool", "slots"), Entry("decode", "pool", "slots"), Entry("verify", "pool", "slots"),
    Entry("fused_recurrent_kda_fwd", "initial_state", "ssm_state_indices"),
    Entry("context_parallel.prefill", "pool", "slots"),
    Entry("fused_decode", "state", "state_indices", rows=STEP, packs=False),
    Entry("short_conv_update", "states", "indices", rows=CONV),
    Entry("chunk_kda", state="initial_state", gradients=True), Entry("fused_recurrent_kda", state="initial_state"),
    Entry("chunk_gated_delta_rule", state="initial_state", gradients=True),
    Entry("fused_recurrent_gated_delta_rule", state="initial_state"),
    Entry("short_conv", state="initial_state", rows=CONV, gradients=True)]
BY_NAME = {entry.name: entry for entry in ENTRIES}
IN_PLACE = [entry for entry in ENTRIES if entry.pool]
KDA = [entry for entry in ENTRIES if entry.rows[0] == "q"]
every = lambda entries: pytest.mark.parametrize("entry", entries, ids=lambda entry: entry.name)

SHORT = "a sequence has at most 8 tokens in a call of decode's kernel"
# (condition, function): text of the refusal, and why there is one.
REFUSES = {
    ("long rows", "decode"): ("q must have at most 8 tokens a sequence for decode", SHORT),
    ("long rows", "verify"): ("q must have at most 8 tokens a sequence for verify", SHORT),
    ("long rows", "fused_decode"): ("x must have 1 to 8 tokens a sequence", SHORT),
    ("long packed", "verify"): ("cu_seqlens: verify takes at most 8 tokens|S = 8 is below the", SHORT),
    ("no rows", "fused_decode"): ("x must have 1 to 8 tokens a sequence", "a step has a token of every sequence"),
    ("rows", "context_parallel.prefill"): ("q must have|B = 1|batch", "tokens of several ranks are packed"),
    ("has_state", "short_conv"): ("has_state", "a caller gives zeros in initial_state"),
    ("head_map", "fused_decode"): ("head_map", "it has as many q/k heads as value heads"),
    ("head_map", "context_parallel.prefill"): ("head_map", "contexts take grouped heads alone"),
    ("out", "context_parallel.prefill"): ("out", "o is made by the exchange"),
}


# ---- a call ----------------------------------------------------------------------------------------------------------

def kda_rows(batch, count, device, one_gate):
    normal = lambda *shape: torch.randn(*shape, device=device)
    g = -torch.rand(batch, count, HV, *(() if one_gate else (D,)), device=device)
    return dict(q=normal(batch, count, H, D), k=normal(batch, count, H, D), v=normal(batch, count, HV, D), g=g,
                beta=normal(batch, count, HV))


def call_of(entry, lengths, device, packed=True):
    """The arguments of a call of sequences of these `lengths`, packed or in rows of one length. Slots are 1, 2, .."""
    batch, count = (1, sum(lengths)) if packed else (len(lengths), lengths[0])
    N = len(lengths)
    normal = lambda *shape: torch.randn(*shape, device=device)
    slots = torch.arange(1, N + 1, dtype=torch.int32, device=device)
    if entry.name == "fused_decode":
        C = 3 * H * D
        return dict(x=normal(N, count, C), weight=normal(3, TAPS, H * D), bias=None,
                    conv_state=normal(SLOTS, C, TAPS - 1), raw_g=normal(N, count, H, D), raw_beta=normal(N, count, H),
                    A_log=0.3 * normal(H), dt_bias=normal(H * D), state_indices=slots, state=normal(SLOTS, H, D, D),
                    lower_bound=-5.0, output_gate=normal(N, count, H, D), norm_weight=normal(D), first_slot=0)
    if entry.rows == CONV:
        x = dict(x=normal(batch, count, D), weight=normal(D, TAPS), bias=normal(D))
        states = normal(SLOTS if entry.pool else N, D, TAPS)
    else:
        x = kda_rows(batch, count, device, "delta" in entry.name) | NORMS
        states = normal(SLOTS if entry.pool else N, HV, D, D)
    if entry.name == "context_parallel.prefill":
        cu = [sum(lengths[:n]) for n in range(N + 1)]
        x["context"] = context_parallel.Context(cu, [[(0, cu[-1])]], group_of_one())
    elif packed:
        x["cu_seqlens"] = torch.tensor([0, *lengths], device=device).cumsum(0)
    if entry.name == "verify":
        # Its start, and the state behind its last token, at the same place.
        accepted = torch.tensor([min(max(length, 1), 8) for length in lengths], dtype=torch.int32,
                                device=device)
        slots = torch.where(torch.arange(8, device=device) == accepted[:, None] - 1, slots[:, None], -1)
        return x | dict(pool=states, slots=slots, num_accepted_tokens=accepted)
    return x | ({entry.pool: states, entry.slots: slots} if entry.pool else
                dict(initial_state=states, output_final_state=True))


@pytest.fixture(autouse=True, scope="module")
def no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def group_of_one():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def run(entry, x):
    """o, and the states that the function returns."""
    function = libkda
    for part in entry.name.split("."):
        function = getattr(function, part)
    result = function(**x)
    return (result, None) if isinstance(result, torch.Tensor) else result


def tensors_of(x):
    return {name: value for name, value in x.items() if isinstance(value, torch.Tensor)}


def bits(tensor):
    """All bytes of the storage that a tensor looks at."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.detach().untyped_storage()).clone()


def expect_refused(entry, x, text, errors=(TypeError, ValueError)):
    """That a call is refused in words of its own, and that nothing has been written."""
    before = {name: bits(value) for name, value in tensors_of(x).items()}
    with pytest.raises(errors, match=text) as caught:
        run(entry, x)
    for name, value in tensors_of(x).items():
        assert torch.equal(bits(value), before[name]), f"{name} was written before: {caught.value}"
    words = {"initial_state", "final_state", "indices", "pool", "slots", "state_indices", "token_parents", "conv_state",
             "initial_state_indices", "final_state_indices", "initial_state_mask", "state_index_columns",
             "num_sequences"}
    said = {word for word in str(caught.value).replace(":", " ").split() if word in words}
    assert said <= {*x, "has_state", "out", "slots" * ("slots," not in said)}


def exact(entry, x, lengths, packed=True, started=None):
    """o and final state of each sequence, in float64. `started`: has_state."""
    states = x[entry.pool][1:len(lengths) + 1] if entry.pool else x["initial_state"]
    found, begin = [], 0
    for n, length in enumerate(lengths):
        part = lambda t: t[:, begin:begin + length] if packed else t[n:n + 1]
        state = states[n:n + 1].double() * (started is None or started[n])
        if entry.rows == CONV:
            inputs = torch.cat([state, part(x["x"]).double().transpose(1, 2)], 2)
            taps, bias = x["weight"].double()[:, None], x["bias"].double()
            y = F.conv1d(inputs[..., 1:], taps, bias, groups=D) if length else inputs
            found.append((y.transpose(1, 2), inputs[..., length:]))
        elif length == 0:
            found.append((part(x["v"]).double(), state))
        else:
            rows = {name: part(x[name]) for name in entry.rows}
            if rows["g"].dim() == 3:
                rows["g"] = rows["g"][..., None].expand(-1, -1, -1, D)
            found.append(reference(rows, None, state))
        begin += length if packed else 0
    return found


def expect_right(entry, lengths, device, packed=True, started=None, **options):
    x = call_of(entry, lengths, device, packed) | options
    if started is not None:
        x["has_state"] = torch.tensor(started, device=device)
    before = {name: t.clone() for name, t in tensors_of(x).items()}
    expected = exact(entry, x, lengths, packed, started)
    o, final = run(entry, x)
    states = x[entry.pool][1:len(lengths) + 1] if entry.pool else final
    begin = 0
    for n, length in enumerate(lengths):
        if length:
            found = o[:, begin:begin + length] if packed else o[n:n + 1]
            assert distance(found, expected[n][0]) < 1e-4
            begin += length if packed else 0
            assert distance(states[n:n + 1], expected[n][1]) < 1e-4
        elif not (entry.name == "verify" and started is not None):  # verify stores states of tokens alone
            assert torch.equal(states[n:n + 1].double(), expected[n][1]), f"the state of sequence {n}"
    untouched = {name for name in before if name not in (entry.pool, "out")}
    assert all(torch.equal(x[name], before[name]) for name in untouched)
    if entry.pool:
        others = [0, *range(len(lengths) + 1, SLOTS)]
        assert torch.equal(x[entry.pool][others], before[entry.pool][others])
    return o, final


def refusal_of(condition, entry):
    return REFUSES.get((condition, entry.name), (None,))[0]


# ---- numbers of tokens, empty sequences, has_state -------------------------------------------------------------------

COUNTS = [0, 1, 7, 8, 9, 63]


@every([entry for entry in ENTRIES if entry.name != "fused_decode"])
@pytest.mark.parametrize("T", COUNTS)
def test_rows_of_one_length(device, entry, T):
    text = refusal_of("rows", entry) or (refusal_of("long rows", entry) if T > 8 else None)
    if entry.name == "context_parallel.prefill":
        x = call_of(entry, [T, T], device) | kda_rows(2, T, device, False)
        return expect_refused(entry, x, text)
    if text:
        return expect_refused(entry, call_of(entry, [T, T], device, packed=False), text)
    expect_right(entry, [T, T], device, packed=False)


@every([entry for entry in ENTRIES if entry.packs])
@pytest.mark.parametrize("T", COUNTS)
def test_packed_sequences_and_empty_ones(device, entry, T):
    """Of T tokens, none and one: of 3 tokens in all, prefill has decode's kernel."""
    for lengths in ([T, 0, 1], [0, T]):
        if T > 8 and refusal_of("long packed", entry):
            if device == "cuda":  # lengths on a GPU are not looked at, and a long sequence is cut
                continue
            expect_refused(entry, call_of(entry, lengths, device), refusal_of("long packed", entry))
        else:
            expect_right(entry, lengths, device)


@every(ENTRIES)
@pytest.mark.parametrize("lengths", [[2, 0, 0, 1, 1], [3, 0, 0, 1, 1], [0, 0], [0, 0, 2], [0, 0, 3], [9, 0]], ids=str)
def test_has_state(device, entry, lengths):
    """False makes the initial state zero, and an empty sequence returns its initial state."""
    started = [n % 3 == 2 for n in range(len(lengths))]
    text = refusal_of("has_state", entry)
    if text:
        x = call_of(entry, lengths, device) | dict(has_state=torch.tensor(started, device=device))
        return expect_refused(entry, x, text)
    if not entry.packs or entry.name == "verify" and max(lengths) > 8:
        lengths = [1] * len(lengths)
    if entry.name == "fused_decode":
        a = call_of(entry, lengths, device, False)
        b = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in a.items()}
        for n, kept in enumerate(started):
            b["state"][n + 1] *= kept
            b["conv_state"][n + 1] *= kept
        o, _ = run(entry, a | dict(has_state=torch.tensor(started, device=device)))
        assert torch.equal(o, run(entry, b)[0])
        assert all(torch.equal(a[name], b[name]) for name in ("state", "conv_state"))
        return
    expect_right(entry, lengths, device, started=started)


@pytest.mark.parametrize("started", [True, False])
def test_an_empty_row_of_verify_stores_nothing(device, started):
    for drafts in (False, True):
        x = call_of(BY_NAME["verify"], [2, 0], device)
        x["has_state"] = torch.tensor([True, started], device=device)
        if drafts:
            x |= dict(drafts=x["pool"].clone(), draft_slots=x["slots"], slots=torch.tensor([1, 2], device=device))
            x.pop("num_accepted_tokens")
        pools = [x["pool"], x["drafts"]] if drafts else [x["pool"]]
        before = [pool.clone() for pool in pools]
        run(BY_NAME["verify"], x)
        assert all(torch.equal(pool[2], old[2]) for pool, old in zip(pools, before))


@pytest.mark.parametrize("entry", [BY_NAME[n] for n in ("prefill", "decode", "fused_recurrent_kda_fwd")],
                         ids=lambda entry: entry.name)
def test_empty_rows_without_lengths(device, entry):
    """B = 2 with T = 0, which is a step of decode without tokens."""
    expect_right(entry, [0, 0], device, packed=False, started=[False, True])


# ---- slots -----------------------------------------------------------------------------------------------------------

@every(IN_PLACE)
@pytest.mark.parametrize("lengths", [[1, 1, 1], [2, 0, 1], [3, 0, 2], [2, 5, 3]], ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["new", "out"])
def test_no_slot(device, entry, lengths, given):
    """o is zero, in an `out` too, and nothing is read or written."""
    if not entry.packs:
        lengths = [1, 1, 1]
    x = call_of(entry, lengths, device, entry.packs)
    slots, nan = x[entry.slots], float("nan")
    alone = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in x.items()}
    slots[0] = -1
    if entry.name == "fused_decode":
        x |= dict(norm_eps=0.0)  # zeros over zero
        alone |= dict(norm_eps=0.0)
    x[entry.pool][[0, 1]] = nan
    shape = x["raw_g"] if entry.name == "fused_decode" else x["x" if entry.rows == CONV else "v"]
    if given:
        x["out"] = torch.full_like(shape, nan)
        if refusal_of("out", entry):
            return expect_refused(entry, x, refusal_of("out", entry))
    before = x[entry.pool].clone()
    o, _ = run(entry, x)
    rest = run(entry, alone)[0]
    own = o[:, :lengths[0]] if entry.packs else o[:1]
    others = (lambda t: t[:, lengths[0]:]) if entry.packs else lambda t: t[1:]
    if entry.rows == CONV:  # without a slot a convolution goes on from zero
        fresh = call_of(BY_NAME["short_conv"], lengths[:1], device) | {n: x[n] for n in ("weight", "bias")}
        fresh |= dict(x=x["x"][:, :lengths[0]], initial_state=torch.zeros(1, D, TAPS, device=device))
        assert torch.equal(own, run(BY_NAME["short_conv"], fresh)[0])
    else:
        assert not own.any()
    assert not o.isnan().any() and distance(others(o), others(rest).double()) < 1e-5
    assert torch.equal(x[entry.pool][[0, 1]].nan_to_num(7), before[[0, 1]].nan_to_num(7))


@every(IN_PLACE)
@pytest.mark.parametrize("lengths", [[1, 1, 1], [2, 1, 0], [3, 0, 0], [4, 5, 3]], ids=str)
def test_two_sequences_with_one_slot(device, entry, lengths):
    """Refused where the host can read slots, sequences without tokens too; verify stores states of tokens alone."""
    if not entry.packs:
        lengths = [1, 1, 1]
    x = call_of(entry, lengths, device, entry.packs)
    for name in (entry.slots, "num_accepted_tokens"):
        if name in x:
            x[name][-1] = x[name][-2]
    if device == "cuda" or entry.name == "verify" and lengths[-1] == 0 == lengths[-2]:
        before = x[entry.pool].clone()
        run(entry, x)
        others = [0, *range(4, SLOTS)]
        assert torch.equal(x[entry.pool][others], before[others])
        return
    expect_refused(entry, x, f"{entry.slots}: slot . (would be written twice|of sequence . would be written by)")


@every(IN_PLACE)
def test_first_slot(device, entry):
    x = call_of(entry, [1, 1], device, entry.packs)
    expect_refused(entry, x | dict(first_slot=SLOTS + 1), "first_slot.* 10")
    expect_refused(entry, x | dict(first_slot=-1), "first_slot must be 0 to")
    assert not run(entry, x | dict(first_slot=SLOTS))[0].any() or entry.rows == CONV


@every([entry for entry in ENTRIES if entry.packs and entry.name != "context_parallel.prefill"])
@pytest.mark.parametrize("lengths", [[1, 1], [2, 3]], ids=str)
def test_rows_behind_the_last_length(device, entry, lengths):
    """Refused where the host can read the lengths; on a GPU they are padding, and zero."""
    x = call_of(entry, [*lengths[:-1], lengths[-1] + 3], device)
    x["cu_seqlens"] = torch.tensor([0, *lengths], device=device).cumsum(0)
    if device == "cpu":
        return expect_refused(entry, x, "cu_seqlens: ends with .*, must end with T")
    for out in (None, torch.full_like(x[entry.rows[0] if entry.rows == CONV else "v"], float("nan"))):
        assert not run(entry, x | dict(out=out))[0][:, sum(lengths):].any()


# ---- out -------------------------------------------------------------------------------------------------------------

@every(ENTRIES)
@pytest.mark.parametrize("lengths", [[1, 1], [1, 0, 1, 2], [2, 8], [9, 60]], ids=str)
def test_out_has_the_bits_of_what_is_returned(device, entry, lengths):
    if not entry.packs or entry.name == "verify" and max(lengths) > 8:
        lengths = [1, 1]
    torch.manual_seed(1)
    x = call_of(entry, lengths, device, entry.packs)
    again = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in x.items()}
    again["out"] = torch.full_like(x["x" if entry.rows == CONV else "raw_g" if "raw_g" in x else "v"], float("nan"))
    text = refusal_of("out", entry)
    if text:
        return expect_refused(entry, again, text)
    o, _ = run(entry, x)
    assert run(entry, again)[0] is again["out"] and torch.equal(o, again["out"])
    assert all(torch.equal(x[name], again[name]) for name in tensors_of(x))


@every([entry for entry in ENTRIES if entry.name != "context_parallel.prefill"])
@pytest.mark.parametrize("lengths", [[1, 1], [3, 6]], ids=str)
def test_out_over_something_else(device, entry, lengths):
    """Inside a pool, inside a state, over any input, with elements that overlap: refused, and nothing is written."""
    lengths = lengths if entry.packs else [1, 1]
    x = call_of(entry, lengths, device, entry.packs)
    like = x["x" if entry.rows == CONV else "raw_g" if "raw_g" in x else "v"]
    for name, value in tensors_of(x).items():
        room = torch.zeros(like.numel() * 4 + value.numel() * value.element_size(), dtype=torch.uint8, device=device)
        place = room[:value.numel() * value.element_size()].view(value.dtype).view(value.shape)
        place.copy_(value)
        out = room[:like.numel() * 4].view(torch.float32).view(like.shape)
        expect_refused(entry, x | {name: place, "out": out}, "out: overlaps|: overlaps out")
    expect_refused(entry, x | dict(out=torch.zeros(1, device=device).expand(like.shape)), "out")


# ---- gradients -------------------------------------------------------------------------------------------------------

@every(ENTRIES)
@pytest.mark.parametrize("lengths", [[1, 1], [3, 6]], ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["new", "out"])
def test_arguments_that_require_a_gradient(device, entry, lengths, given):
    """Refused where there is none, before anything is written; else given."""
    lengths = lengths if entry.packs else [1, 1]
    x = call_of(entry, lengths, device, entry.packs)
    if given:
        x["out"] = torch.zeros_like(x["x" if entry.rows == CONV else "raw_g" if "raw_g" in x else "v"])
    if given and refusal_of("out", entry):
        return expect_refused(entry, x, refusal_of("out", entry))
    for name, value in tensors_of(x).items():
        if not value.is_floating_point():
            continue
        asks = x | {name: value.detach().requires_grad_()}
        if entry.gradients and not given:
            o, final = run(entry, asks)
            (o.sum() + final.sum()).backward()
            assert asks[name].grad.isfinite().all()
        else:
            expect_refused(entry, asks, "libkda", NotImplementedError)
        with torch.no_grad():
            run(entry, {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in asks.items()})


# ---- heads and options -----------------------------------------------------------------------------------------------

@every(ENTRIES)
@pytest.mark.parametrize("lengths", [[1, 1], [2, 0, 6], [8, 1], [9, 63]], ids=str)
def test_head_map(device, entry, lengths):
    """"tiled" is honoured or refused; it is that of q and k with a head for each value head."""
    if not entry.packs or entry.name == "verify" and max(lengths) > 8:
        lengths = [1, 1]
    x = call_of(entry, lengths, device, entry.packs)
    text = "head_map" if entry.rows == CONV else refusal_of("head_map", entry)
    if text:
        return expect_refused(entry, x | dict(head_map="tiled"), text)
    expect_refused(entry, x | dict(head_map="striped"), "head_map must be 'grouped' or 'tiled', got 'striped'")
    each = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in x.items()}
    for name in ("q", "k"):
        each[name] = x[name].repeat(1, 1, HV // H, 1)
    o, final = run(entry, x | dict(head_map="tiled"))
    expected, final_expected = run(entry, each)
    assert distance(o, expected.double()) < 1e-5
    if entry.pool:
        final, final_expected = x[entry.pool], each[entry.pool]
    assert distance(final, final_expected.double()) < 1e-5


@every([BY_NAME[n] for n in ("prefill", "decode", "verify", "fused_decode", "fused_recurrent_kda_fwd")])
def test_compiled(device, entry):
    """In one graph, with the same bits."""
    torch._dynamo.reset()  # else the functions before it count as recompilations
    x = call_of(entry, [2, 0, 1] if entry.packs else [1, 1, 1], device, entry.packs)
    x["has_state"] = torch.tensor([True, False, True], device=device)
    x[entry.slots][-1] = -1
    if entry.packs:
        x["head_map"] = "tiled"
    y = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in x.items()}
    compiled = torch.compile(lambda **given: run(entry, given)[0] * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**y), run(entry, x)[0] * 2)
    assert all(torch.equal(x[name], y[name]) for name in tensors_of(x))


def test_what_another_function_takes_is_never_ignored():
    for entry, name, value in (("fused_recurrent_kda", "ssm_state_indices", torch.tensor([1])),
                               ("fused_recurrent_kda", "first_slot", 1), ("chunk_kda", "first_slot", 1),
                               ("chunk_kda", "checkpoints", torch.zeros(1)), ("chunk_kda", "inplace_final_state", True),
                               ("fused_recurrent_kda_fwd", "drafts", torch.zeros(1)),
                               ("fused_recurrent_gated_delta_rule", "return_intermediate_states", True)):
        x = call_of(BY_NAME[entry], [2, 1], "cpu") | {name: value}
        expect_refused(BY_NAME[entry], x, f"{entry} has no argument `{name}`", TypeError)
    run(BY_NAME["chunk_kda"], call_of(BY_NAME["chunk_kda"], [2, 1], "cpu") | dict(first_slot=0, parents=None))


GATE = dict(use_gate_in_kernel=True, A_log=torch.zeros(HV), lower_bound=-5.0)
BAD = {"scale inf": (dict(scale=math.inf), "scale"), "scale nan": (dict(scale=math.nan), "scale"),
       "scale 1e37": (dict(scale=1e37), "scale"), "lower_bound 3": (GATE | dict(lower_bound=3.0), "lower_bound"),
       "lower_bound nan": (GATE | dict(lower_bound=math.nan), "lower_bound"),
       "A_log 99": (GATE | dict(A_log=torch.full((HV,), 99.0)), "A_log: entry 0 = 99")}


@every([entry for entry in ENTRIES if entry.rows != CONV])
@pytest.mark.parametrize("lengths", [[1, 1], [3, 6]], ids=str)
@pytest.mark.parametrize("bad", BAD)
def test_options_that_are_refused(device, entry, lengths, bad):
    lengths = lengths if entry.packs else [1, 1]
    x = call_of(entry, lengths, device, entry.packs)
    change, text = BAD[bad]
    change = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in change.items()}
    if entry.name == "fused_decode":
        change.pop("use_gate_in_kernel", None)
        if "A_log" in change:
            change["A_log"] = change["A_log"][:H]
    if entry.name == "fused_recurrent_gated_delta_rule" or entry.name == "chunk_gated_delta_rule":
        if "lower_bound" in change:
            change.pop("lower_bound")
            text = text if bad == "A_log 99" else None
    if bad == "A_log 99" and device == "cuda" or text is None:  # a GPU's values are not looked at; no such argument
        run(entry, x | change)
    else:
        expect_refused(entry, x | change, text)


@every(IN_PLACE)
@pytest.mark.parametrize("lengths", [[1, 1], [3, 6]], ids=str)
def test_pools_that_are_refused(device, entry, lengths):
    """Whose slots are one piece of memory, that hold other sizes, or are of another type."""
    lengths = lengths if entry.packs else [1, 1]
    x = call_of(entry, lengths, device, entry.packs)
    pools = [name for name in (entry.pool, "conv_state") if name in x]
    for name in pools:
        expect_refused(entry, x | {name: x[name][:1].expand(x[name].shape)}, name)
        expect_refused(entry, x | {name: x[name][..., :-2]}, name)
        expect_refused(entry, x | {name: x[name].long()}, name)
        expect_refused(entry, x | {name: x[name][:0]}, name)


STEPS = {"norm_eps -1": (dict(norm_eps=-1.0), "norm_eps"), "norm_eps nan": (dict(norm_eps=math.nan), "norm_eps"),
         "scale 0": (dict(scale=0.0), "scale must not be 0"),
         "pools of other sizes": (dict(state=torch.zeros(SLOTS - 1, H, D, D)), "state must have shape"),
         "slot beyond": (dict(state_indices=torch.tensor([1, SLOTS])), "state_indices: entry 1 = 9")}


@pytest.mark.parametrize("bad", STEPS)
def test_a_step_of_a_layer_is_refused_before_it_begins(bad):
    change, text = STEPS[bad]
    expect_refused(BY_NAME["fused_decode"], call_of(BY_NAME["fused_decode"], [1, 1], "cpu", False) | change, text)


def test_pools_of_a_step_that_overlap():
    entry = BY_NAME["fused_decode"]
    x = call_of(entry, [1, 1], "cpu", False)
    for name, value in tensors_of(x).items():
        for pool in ("state", "conv_state"):
            if name == pool:
                continue
            room = torch.zeros(x[pool].numel() * 4 + value.numel() * value.element_size(), dtype=torch.uint8)
            place = room[:value.numel() * value.element_size()].view(value.dtype).view(value.shape)
            place.copy_(value)
            inside = room[:x[pool].numel() * 4].view(torch.float32).view(x[pool].shape)
            expect_refused(entry, x | {name: place, pool: inside}, "overlaps")


def test_words_of_refusals():
    """No argument that the caller did not give, and no empty parentheses."""
    x = call_of(BY_NAME["decode"], [1, 1], "cpu")
    decode = BY_NAME["decode"]
    expect_refused(decode, x | dict(first_slot=10), "first_slot = 10 is above 9, the number of slots of pool")
    expect_refused(decode, x | dict(q=x["q"][0]), r"q must have shape \[B, T, H, K\], got \[2, 2, 16\]$")
    x = call_of(BY_NAME["short_conv_update"], [1], "cpu", packed=False)
    expect_refused(BY_NAME["short_conv_update"], x | dict(indices=None), r"states must have shape .* \(sizes of x\)$")
