# SPDX-License-Identifier: Apache-2.0
"""prefill, decode, verify and settle with a tail, against the recurrence in float64 and against decode without one.
tests/stage/tail_test.cpp has the kernels, all formats and all refusals of the library."""
import pytest
import torch
from common import distance

import libkda
from libkda import ops

H, HV, K, V, SLOTS, DRAFTS = 2, 4, 32, 16, 6, 4
OPTIONS = dict(use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, lower_bound=-5.0)
NAN = float("nan")


def tokens(count, batch=1, dtype=torch.float32, one_gate=False):
    normal = lambda *shape: torch.randn(*shape).to(dtype)
    return dict(q=normal(batch, count, H, K), k=normal(batch, count, H, K), v=normal(batch, count, HV, V),
                g=normal(batch, count, HV) if one_gate else normal(batch, count, HV, K), beta=normal(batch, count, HV))


def gate(one_gate=False):
    return dict(A_log=0.3 * torch.randn(HV), dt_bias=torch.randn(HV if one_gate else HV * K), **OPTIONS)


def part(x, begin, end=None):
    return {name: t[:, begin:end] for name, t in x.items()}


def joined(*xs, dim=0):
    return {name: torch.cat([x[name] for x in xs], dim) for name in xs[0]}


def at(*values):
    return torch.tensor(values)


def recurrence(x, options, state=None):
    """o and the last state of one sequence, token by token in float64: S' = D S, S = S' + k beta (v - S'^T k)^T."""
    q, k, v, g, beta = (x[name][0].double() for name in ("q", "k", "v", "g", "beta"))
    unit = lambda t: t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    q, k = (unit(t).repeat_interleave(HV // H, 1) for t in (q, k))
    g = g[..., None].expand(-1, -1, K) if g.dim() == 2 else g
    raw = (g + options["dt_bias"].double().view(HV, -1)) * options["A_log"].double().exp()[:, None]
    decay = (options["lower_bound"] * raw.sigmoid()).exp()
    S, o = torch.zeros(HV, K, V).double() if state is None else state.double(), []
    for t in range(len(q)):
        S = decay[t][..., None] * S
        v_new = beta[t].sigmoid()[:, None] * (v[t] - torch.einsum("hkv,hk->hv", S, k[t]))
        S = S + k[t][..., None] * v_new[:, None]
        o.append(torch.einsum("hkv,hk->hv", S, q[t]) * K ** -0.5)
    return torch.stack(o)[None], S


def new_pool(dtype=torch.float32, v_first=False):
    return torch.full((SLOTS, HV, V, K) if v_first else (SLOTS, HV, K, V), NAN, dtype=dtype)


def new_tail(dtype=torch.float32, rows=16 + DRAFTS, one_gate=False, split=False, v_first=False):
    """Of memory that holds NaN, slots of it further apart than they need be."""
    tail = libkda.tail(SLOTS, H, HV, K, V, rows=rows, dtype=dtype, one_gate=one_gate, split=split,
                       state_v_first=split and v_first)
    value = lambda t: NAN if t.is_floating_point() else -1
    wide = [t if t is None else
            torch.full((SLOTS, 2 * t[0].numel()), value(t), dtype=t.dtype)[:, :t[0].numel()].view(t.shape)
            for t in tail]
    return libkda.Tail(*wide)


SIGMOID = dict(use_beta_sigmoid_in_kernel=True)


on_each_device = pytest.mark.usefixtures("on_the_device")


@on_each_device
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("one_gate", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
def test_a_history_equals_the_recurrence(v_first, one_gate, split):
    """Two prompts in pieces, tokens, drafts of which some are rejected, and plain states in the end; padding beside
    them, and all memory NaN before it is written."""
    torch.manual_seed(0)
    options = dict(gate(one_gate), state_v_first=v_first, first_slot=1)
    pool = new_pool(torch.bfloat16 if split else torch.float32, v_first)
    tail = new_tail(one_gate=one_gate, split=split, v_first=v_first)
    requests = [tokens(60, one_gate=one_gate) for _ in range(2)]
    slots, found, done = at(3, 0, 5), [[], []], [0, 0]
    call = dict(pool=pool, slots=slots, tail=tail, **options)

    def step(function, counts, kept=None, **more):
        x = [part(r, d, d + n) for r, d, n in zip(requests, done, counts)]
        more["positions"] = at(done[0], 99, done[1])
        if "cu_seqlens" in more:
            x = joined(*x, dim=1)
        else:
            x = joined(x[0], x[0], x[1])  # the second row is padding
        o = function(**x, **call, **SIGMOID, **more)
        pieces = o.split([counts[0], counts[1]], 1) if "cu_seqlens" in more else (o[:1], o[2:])
        if "cu_seqlens" not in more:
            assert not o[1].any()
        for n, accepted in enumerate(kept or counts):
            found[n].append(pieces[n][:, :accepted])
            done[n] += accepted

    for counts in ([20, 3], [5, 11]):
        cu = at(0, counts[0], counts[0], sum(counts))
        step(libkda.prefill, counts, cu_seqlens=cu, has_state=at(done[0] > 0, False, done[1] > 0))
    for _ in range(9):
        step(libkda.decode, [1, 1])
    for kept in ([5, 1], [2, 3], [1, 1]):
        step(libkda.verify, [5, 5], kept)
    step(libkda.decode, [1, 1])
    boundaries = tail.folded.tolist()
    assert boundaries[3] == [32] * HV and boundaries[5] == [16] * HV and boundaries[1] == [-1] * HV
    libkda.settle(positions=at(done[0], 0, done[1]), **call, **SIGMOID)
    for n, slot in enumerate((3, 5)):
        expected, state = recurrence(part(requests[n], 0, done[n]), options)
        assert distance(torch.cat(found[n], 1), expected) < (3e-3 if split else 1e-5)
        settled = libkda.join_states(pool[slot], tail.rest[slot]) if split else pool[slot]
        assert distance(settled.mT if v_first else settled, state) < 1e-5
        assert tail.folded[slot].tolist() == [done[n]] * HV
    assert pool[[0, 1, 2, 4]].isnan().all() and (tail.folded[[0, 1, 2, 4]] == -1).all()
    assert all(t[[0, 1, 2, 4]].isnan().all() for t in tail[:3])


@on_each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_rows_equal_a_plain_decode(dtype):
    """Step by step; drafts that are rejected leave no trace, and settled states go on without a tail."""
    torch.manual_seed(1)
    options, x = dict(gate(), **SIGMOID), tokens(40, batch=2, dtype=dtype)
    slots, tail, pool, plain = at(4, 2), new_tail(dtype), new_pool(), new_pool()
    start = dict(has_state=at(0, 0).bool())
    tailed = dict(pool=pool, slots=slots, tail=tail, **options)
    for t in range(36):
        expected = libkda.decode(**part(x, t, t + 1), pool=plain, slots=slots, **options, **start)
        more = dict(start, positions=at(t, t))
        o = libkda.verify(**part(x, t, t + 4), **tailed, **more) if t % 3 else libkda.decode(**part(x, t, t + 1),
                                                                                         **tailed, **more)
        assert o.dtype is dtype and distance(o[:, :1], expected.double()) < 8 * torch.finfo(dtype).eps
        start = {}
    settled = {name: options[name] for name in ("A_log", "dt_bias", *OPTIONS)}
    libkda.settle(pool, slots, tail=tail, positions=at(36, 36), **settled)
    assert distance(pool[slots], plain[slots].double()) < 1e-5
    a, b = (libkda.decode(**part(x, 36, 37), pool=p, slots=slots, **options) for p in (pool, plain))
    assert distance(a, b.double()) < 2 * torch.finfo(dtype).eps


@on_each_device
def test_every_cut_has_the_same_bits():
    """Decodes of several tokens do not reach beyond a boundary. A prefill on a GPU has its forward's roundings."""
    torch.manual_seed(2)
    options, x, slots = gate(), tokens(50), at(1)
    results = []
    for cut in ([50], [1] * 50, [13, 1, 2, 1, 1, 21, 5, 6]):
        pool, tail, done, found = new_pool(), new_tail(), 0, []
        for count in cut:
            function = libkda.decode if count <= 5 else libkda.prefill
            found.append(function(**part(x, done, done + count), pool=pool, slots=slots, tail=tail, positions=at(done),
                                  has_state=at(done > 0), **options, **SIGMOID))
            done += count
        libkda.settle(pool, slots, tail=tail, positions=at(done), **options)
        results.append((torch.cat(found, 1), pool[1]))
    for a, b in ((a, b) for other in results[1:] for a, b in zip(results[0], other)):
        assert distance(a, b.double()) < 1e-5 if slots.is_cuda else torch.equal(a, b)


@on_each_device
def test_a_tree_of_drafts():
    """Two branches behind a token; the next call keeps one of them."""
    torch.manual_seed(3)
    options, x, y, slots = gate(), tokens(12), tokens(6), at(2)
    pool, tail = new_pool(), new_tail(rows=16 + 6)
    call = dict(pool=pool, slots=slots, tail=tail, **options, **SIGMOID)
    libkda.prefill(**x, **call, positions=at(0), has_state=at(False))
    tree = torch.tensor([[-1, 0, 0, 2, 1, 3]])  # 0 - 1 - 4 and 0 - 2 - 3 - 5
    o = libkda.verify(**y, **call, positions=at(12), parents=tree)
    picked = lambda path: joined(x, {name: t[:, path] for name, t in y.items()}, dim=1)
    for path in ([0, 1, 4], [0, 2, 3, 5]):
        expected, _ = recurrence(picked(path), options)
        assert distance(o[:, path], expected[:, 12:]) < 1e-5
    kept, last = at(0, 2, 3, -1, -1, -1)[None], tokens(1)
    o = libkda.decode(**last, **call, positions=at(15), accepted_rows=kept)
    expected, state = recurrence(joined(picked([0, 2, 3]), last, dim=1), options)
    assert distance(o, expected[:, -1:]) < 1e-5
    libkda.settle(pool, slots, tail=tail, positions=at(16), **options)
    assert distance(pool[2], state) < 1e-5


@on_each_device
def test_a_fork_reads_the_state_of_its_source():
    torch.manual_seed(4)
    options, x = gate(), tokens(32)
    pool, tail = new_pool(), new_tail()
    source = dict(pool=pool, slots=at(1), tail=tail, **options)
    libkda.prefill(**x, positions=at(0), has_state=at(False), **source, **SIGMOID)
    libkda.settle(positions=at(32), **source)  # decodes leave the last 16 tokens in the tail
    parent, children = pool[1].clone(), tokens(20, batch=2)
    call = dict(pool=pool, slots=at(3, 4), tail=tail, **options, **SIGMOID)
    for t in range(20):
        sources = torch.where(tail.folded[[3, 4], 0] <= 32, at(1, -1), -1)  # the second: a copy, made at once
        if t == 0:
            pool[4], tail.folded[4] = pool[1], 32  # a plain state as a start
        o = libkda.decode(**part(children, t, t + 1), **call, positions=at(32 + t, 32 + t), sources=sources)
        assert t < 16 <= pool[3].isnan().sum() or t >= 16 and not pool[3].isnan().any()
        for n in range(2):
            expected, _ = recurrence(joined(x, {name: y[n:n + 1, :t + 1] for name, y in children.items()}, dim=1),
                                     options)
            assert distance(o[n:n + 1], expected[:, -1:]) < 1e-5
    assert torch.equal(pool[1], parent) and torch.equal(pool[3].isnan(), pool[4].isnan())


@on_each_device
def test_a_state_without_a_tail_goes_on_in_one():
    torch.manual_seed(5)
    options, x, pool, tail = gate(), tokens(30), new_pool(), new_tail()
    libkda.prefill(**part(x, 0, 21), pool=pool, slots=at(2), has_state=at(False), **options, **SIGMOID)
    tail.folded[2] = 21
    o = libkda.prefill(**part(x, 21), pool=pool, slots=at(2), tail=tail, positions=at(21), **options, **SIGMOID)
    expected, _ = recurrence(x, options)
    assert distance(o, expected[:, 21:]) < 1e-5


@on_each_device
def test_a_state_is_split_and_goes_on_in_a_tail():
    torch.manual_seed(9)
    options, x, plain = gate(), tokens(40), new_pool()
    pool, tail = new_pool(torch.bfloat16), new_tail(split=True)
    libkda.prefill(**part(x, 0, 21), pool=plain, slots=at(2), has_state=at(False), **options, **SIGMOID)
    pool[2], tail.rest[2] = libkda.split_states(plain[2])
    assert torch.equal(libkda.join_states(pool[2], tail.rest[2]), plain[2])
    tail.folded[2] = 21
    o = libkda.prefill(**part(x, 21), pool=pool, slots=at(2), tail=tail, positions=at(21), **options, **SIGMOID)
    libkda.settle(pool, at(2), tail=tail, positions=at(40), **options, **SIGMOID)
    expected, state = recurrence(x, options)
    assert distance(o, expected[:, 21:]) < 3e-3
    assert distance(libkda.join_states(pool[2], tail.rest[2]), state) < 1e-5


def test_parts_of_split_states_have_all_bits():
    x = torch.cat([torch.randn(10000) * 2.0 ** torch.randint(-60, 60, (10000,)),
                   torch.tensor([0.0, -0.0, 1.00390625, -1.00390625, 3.4e38, float("inf"), -float("inf"), NAN])])
    rounded, rest = libkda.split_states(x)
    assert torch.equal(libkda.join_states(rounded, rest)[:-1].view(torch.int32), x[:-1].view(torch.int32))
    assert rounded[-1].isnan() and libkda.join_states(rounded, rest)[-1].isnan()
    assert rounded[10002] == 1.0078125  # a tie goes away from zero
    finite = rounded.isfinite()
    assert ((rounded.float() - x).abs() <= x.abs() * 2.0 ** -8)[finite].all()
    with pytest.raises(TypeError, match="^states must be float32, got torch.bfloat16"):
        libkda.split_states(rounded)
    with pytest.raises(TypeError, match="^pool must be bfloat16, got torch.float32"):
        libkda.join_states(x, rest)
    with pytest.raises(TypeError, match="^rest must be int16, got torch.int32"):
        libkda.join_states(rounded, rest.int())
    with pytest.raises(ValueError, match=r"^rest must have the shape of pool, \[10008\], got \[1\]"):
        libkda.join_states(rounded, rest[:1])


@on_each_device
def test_a_step_compiles():
    """As one graph, with the bits of eager calls; what has a wrong shape is refused while it is traced."""
    torch.manual_seed(6)
    options, x, y = gate(), tokens(1, batch=2), tokens(3, batch=2)

    def steps(pool, tail, slots, positions):
        o = libkda.decode(**x, pool=pool, slots=slots, tail=tail, positions=positions, **options, **SIGMOID)
        drafts = libkda.verify(**y, pool=pool, slots=slots, tail=tail, positions=positions + 1, **options, **SIGMOID)
        libkda.settle(pool, slots, tail=tail, positions=positions + 2, **options)
        return o, drafts

    def results(run):
        pool, tail = torch.zeros(SLOTS, HV, K, V), libkda.tail(SLOTS, H, HV, K, V, rows=18, dtype=torch.float32)
        tail = libkda.Tail(*(t.zero_() for t in tail[:4]))
        outputs = run(pool, tail, at(1, 2), at(0, 0))
        assert pool[1].any() and tail.folded[1, 0] == 2
        return [*outputs, pool, *tail[:4]]

    compiled = torch.compile(steps, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(results(compiled), results(steps)))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Observed exception"):
        compiled(torch.zeros(SLOTS, HV, K, V), libkda.tail(3, H, HV, K, V, dtype=torch.float32), at(1, 2), at(0, 0))


@pytest.mark.parametrize("expanded", [False, True])
def test_one_gate_and_one_bias_a_head(expanded):
    """Eager and compiled, with gates of three dimensions or expanded to K. dt_bias is not blamed for another argument's
    fault."""
    torch.manual_seed(8)
    options, x = gate(one_gate=True), tokens(1, one_gate=True)
    wide = lambda g: g[..., None].expand(*g.shape, K) if expanded else g
    x["g"] = wide(x["g"])

    def steps(pool, tail, positions, options):
        o = libkda.decode(**x, pool=pool, slots=at(1), tail=tail, positions=positions, **options, **SIGMOID)
        libkda.settle(pool, at(1), tail=tail, positions=positions + 1, **options)
        return o

    def results(run):
        pool, tail = torch.zeros(SLOTS, HV, K, V), new_tail(one_gate=True)
        tail.folded.zero_()
        return run(pool, tail._replace(g=wide(tail.g)), at(0), options), pool

    compiled = torch.compile(steps, backend="eager", fullgraph=True)
    (o, pool), again = results(steps), results(compiled)
    expected, state = recurrence(x, options)
    assert distance(o, expected) < 1e-5 and distance(pool[1], state) < 1e-5
    assert torch.equal(o, again[0]) and torch.equal(pool, again[1])

    tail = new_tail(one_gate=True)
    tail = tail._replace(g=wide(tail.g))
    call = dict(pool=torch.zeros(SLOTS, HV, K, V), slots=at(1), tail=tail, positions=at(1))
    for function, rows in ((libkda.settle, {}), (libkda.decode, dict(x, **SIGMOID))):
        with pytest.raises(ValueError, match="^tail.folded: slot 1 of sequence 0 has -1"):
            function(**rows, **call, **options)
        with pytest.raises(ValueError, match=r"^dt_bias must have HV = 4 elements, got \[3\]"):
            function(**rows, **call, **options | dict(dt_bias=torch.zeros(3)))


def test_the_operator_passes_torch_checks():
    x, tail = tokens(2, batch=2), libkda.tail(SLOTS, H, HV, K, V, rows=18, dtype=torch.float32)
    modes = ops.GATE_LOG, ops.BETA_SIGMOID, -5.0, 0.125, True, False
    i32 = lambda *values: torch.tensor(values, dtype=torch.int32)
    torch.library.opcheck(torch.ops.libkda.update_with_tail.default, (
        *x.values(), torch.zeros_like(x["v"]), torch.zeros(SLOTS, HV, K, V), i32(1, 3), *(t.zero_() for t in tail[:4]),
        i32(0, 0), None, None, None, None, True, *modes))


@on_each_device
def test_plans_are_found_by_the_tail():
    """Two calls that differ in their tails alone, one after the other: each has its plan."""
    options, x = dict(gate(), **SIGMOID), tokens(3)
    results = []
    for rows in (18, 40, 18):
        tail, pool = new_tail(rows=rows), torch.zeros(SLOTS, HV, K, V)
        tail.folded.zero_()
        for t in range(0, 24, 3):
            o = libkda.verify(**x, pool=pool, slots=at(1), tail=tail, positions=at(t), **options)
        results.append(o)
        assert tail.k.isnan().sum() == (SLOTS * rows - min(rows, 24)) * H * K
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


TAIL = libkda.tail(SLOTS, H, HV, K, V, rows=18, dtype=torch.float32)


SPLIT = libkda.tail(SLOTS, H, HV, K, V, rows=18, dtype=torch.float32, split=True)._replace(folded=TAIL.folded)


def other(**change):
    """The tail of the calls with another tensor."""
    return dict(tail=TAIL._replace(**change))


def split(**change):
    return dict(tail=SPLIT._replace(**change), **SIGMOID)


BAD = {
    "prefill, decode, verify, settle": [
        (dict(tail=tuple(TAIL)), "^tail must be a libkda.Tail, got tuple"),
        (dict(positions=None), "^positions must be given with a tail"),
        (dict(positions=at(0, 0)), r"^positions must have shape \[N\]=\[1\], got \[2\]"),
        (dict(positions=torch.zeros(1)), "^positions must be int32, .* got torch.float32"),
        (dict(positions=at(-3)), "^positions: entry 0 = -1 is negative"),
        (dict(positions=at(19)), "^positions: entry 0 = 19 is 19 tokens behind .* R = 18 rows"),
        (dict(positions=at(2 ** 31)), "^positions must be at most 2147483647, got 2147483648"),
        (dict(sources=at(SLOTS)), "^sources: entry 0 = 6 is outside 0..5"),
        (dict(sources=at(3)), "^tail.folded: source slot 3 of sequence 0 has -1, no tail was begun there"),
        (dict(slots=at(3)), "^tail.folded: slot 3 of sequence 0 has -1, no tail was begun there"),
        (dict(slots=at(SLOTS)), "^slots: entry 0 = 6 is outside"),
        (dict(slots=torch.tensor([[1]])), r"^slots must have shape .*, got \[1, 1\]"),
        (other(k=TAIL.k[:3]), r"^tail.k must have shape .*=\[6, ., R, 32\], got \[3, 2, 18, 32\]"),
        (other(k=TAIL.k[:, :, :15]), r"tail.* R = 15 is outside 16..256|^tail.v_new must have shape|^tail.g must have"),
        (other(g=TAIL.g[..., :8]), r"^tail.g must have shape .* got \[6, 4, 18, 8\]"),
        (other(v_new=TAIL.v_new.half()), "^tail.v_new must be float32, got torch.float16"),
        (other(folded=TAIL.folded.long()), "^tail.folded must be int32, got torch.int64"),
        (other(folded=TAIL.folded[:, :2]), r"^tail.folded must have shape \[slots, HV\]=\[6, 4\], got \[6, 2\]"),
        (other(rest=SPLIT.rest) | SIGMOID, "^tail.rest, tail.v and tail.beta are given together"),
        (split(rest=SPLIT.rest.int()), "^tail.rest must be int16, got torch.int32"),
        (split(rest=SPLIT.rest[:, :2]), r"^tail.rest must have shape .* got \[6, 2, 32, 16\]"),
        (split(beta=SPLIT.beta[..., :3]), r"^tail.beta must have shape .* got \[6, 4, 3\]"),
        (split(), "^pool: dtype fp32 is not bf16, which split states have beside tail.rest"),
        (other(v_new=None), "^tail.v_new must be a torch.Tensor, got NoneType"),
        (dict(tail=None), "^positions belongs to a tail, got no tail")],
    "prefill, decode, verify": [
        (other(k=TAIL.k.bfloat16()), "^tail.k: dtype bf16 is not that of k, fp32"),
        (other(g=TAIL.g.bfloat16()), "^tail.g: dtype bf16 is not that of g, fp32"),
        (other(g=TAIL.g[..., 0]), "^tail.g: innermost stride 0, but g has a gate a channel")],
    "decode, verify": [
        (tokens(4), "^q: a tail of R = 18 rows takes 1..3 tokens a sequence, got 4"),
        (dict(accepted_rows=at(0, 1)), r"^accepted_rows must have shape \[N, columns\]=\[1, columns\], got \[2\]"),
        (dict(accepted_rows=torch.tensor([[1, 0]])), "^accepted_rows: entry 0, 1 = 0 is not above 1")],
    "decode, verify, settle": [
        (dict(accepted_rows=torch.full((1, 19), -1)), "^accepted_rows: columns = 19 is outside 0..18")],
    "verify": [
        (dict(parents=torch.tensor([[-1]])), "^parents: S = 1 is below the 2 tokens of sequence 0"),
        (dict(parents=torch.tensor([[-1, 1]])), "^parents: entry 0, 1 = 1 is not below 1"),
        (dict(parents=at(0)), r"^parents must have shape \[N, S\]"),
        (dict(num_accepted_tokens=at(1)), "^num_accepted_tokens is not taken with a tail"),
        (dict(drafts=torch.zeros(2, HV, K, V)), "^drafts is not taken with a tail"),
        (dict(draft_slots=torch.tensor([[1, 2]])), "^draft_slots is not taken with a tail")],
    "prefill": [(dict(checkpoints=torch.zeros(2, HV, K, V), checkpoint_offsets=at(0), checkpoint_slots=at(0)),
                 "^checkpoints are not taken with a tail")],
}


@pytest.mark.parametrize(("name", "change", "text"),
                         [(n, *row) for names, rows in BAD.items() for n in names.split(", ") for row in rows])
def test_errors_name_the_argument(name, change, text):
    TAIL.folded.fill_(-1)[1] = 0
    pool, rows = torch.ones(SLOTS, HV, K, V), [t.clone() for t in TAIL[:4]]
    x = {} if name == "settle" else dict(tokens(2), **SIGMOID)
    slots = torch.tensor([[1, 2]]) if name == "verify" and "tail" in change and change["tail"] is None else at(1)
    arguments = dict(x, pool=pool, slots=slots, tail=TAIL, positions=at(2), **gate()) | change
    with pytest.raises((TypeError, ValueError), match=text):
        getattr(libkda, name)(**arguments)
    assert torch.equal(pool, torch.ones_like(pool))
    assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(TAIL, rows))


@pytest.mark.parametrize(("change", "text"), [
    (dict(rows=15), "rows must be 16 to 256, got 15"), (dict(rows=257), "rows must be 16 to 256, got 257"),
    (dict(HV=3), "HV must be a multiple of H = 2, got 3"), (dict(K=257), "K must be 1 to 256, got 257"),
    (dict(V=0), "V must be 1 to 256, got 0"), (dict(slots=-1), "slots must be 0 to .*, got -1"),
    (dict(H="2"), "H must be an integer, got '2'"), (dict(dtype=torch.float64), "dtype must be float32, bfloat16 or"),
    (dict(gate_dtype=torch.int8), "gate_dtype must be float32, bfloat16 or float16, got torch.int8"),
    (dict(split=True, beta_dtype=torch.int8), "beta_dtype must be float32, bfloat16 or float16, got torch.int8"),
    (dict(value_dtype=torch.float16), "value_dtype belongs to split states, got split=False"),
    (dict(state_v_first=True), "state_v_first belongs to split states, got split=False")])
def test_a_tail_of_wrong_sizes(change, text):
    with pytest.raises((TypeError, ValueError), match=text):
        libkda.tail(**(dict(slots=SLOTS, H=H, HV=HV, K=K, V=V) | change))


def test_settling_split_states_asks_for_the_mode_of_beta():
    with pytest.raises(ValueError, match="^use_beta_sigmoid_in_kernel must be given with split states"):
        libkda.settle(new_pool(torch.bfloat16), at(1), tail=SPLIT, positions=at(0), **gate())


def test_where_a_tail_is_asked_for_in_vain():
    x = tokens(1)
    pool = torch.zeros(SLOTS, HV, K, V)
    for name, given in (("sources", at(1)), ("accepted_rows", torch.tensor([[0]]))):
        with pytest.raises(ValueError, match=f"^{name} belongs to a tail, got no tail"):
            libkda.decode(**x, pool=pool, slots=at(1), **{name: given})
    with pytest.raises(TypeError, match="chunk_kda has no argument `tail`"):
        libkda.chunk_kda(**x, tail=TAIL)
    with pytest.raises(NotImplementedError, match="states that are updated in place"):
        libkda.decode(**(x | dict(v=x["v"].requires_grad_())), pool=pool, slots=at(1), tail=TAIL, positions=at(0))
