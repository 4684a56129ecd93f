# SPDX-License-Identifier: Apache-2.0
"""prefill, decode and verify on a pool of states against naive_recurrent_kda, and the traps of an engine's slots."""
import pytest
import torch

import libkda
from common import distance, reference

H, HV, K, V, SLOTS = 2, 4, 32, 16, 7
OPTIONS = dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, lower_bound=-5.0)


def tokens(count, device, batch=1, dtype=torch.float32):
    normal = lambda *shape: torch.randn(*shape, device=device).to(dtype)
    return dict(q=normal(batch, count, H, K), k=normal(batch, count, H, K), v=normal(batch, count, HV, V),
                g=normal(batch, count, HV, K), beta=normal(batch, count, HV))


def gate(device):
    return dict(A_log=0.3 * torch.randn(HV, device=device), dt_bias=torch.randn(HV * K, device=device), **OPTIONS)


def exact(x, options, state=None):
    """o and the final state of one sequence, in float64."""
    state = torch.zeros(1, HV, K, V, device=x["q"].device) if state is None else state
    parameters = {name: options[name] for name in ("A_log", "dt_bias")}
    return reference(x, parameters, state, gates="bounded", lower_bound=options["lower_bound"])


def part(x, begin, end):
    return {n: t[:, begin:end] for n, t in x.items()}


def test_a_history_of_requests(device):
    """Two prompts in pieces, then tokens, then drafts of which one is accepted; padded rows beside them."""
    torch.manual_seed(0)
    options, pool = gate(device), torch.full((SLOTS, HV, K, V), float("nan"), device=device)
    lengths, pieces = [50, 21], [[30, 5], [20, 16]]
    requests = [tokens(length + 5, device) for length in lengths]
    slots = torch.tensor([3, 0, 5, -1], device=device)  # the second and the last rows are padding
    done = [0, 0]
    found = [[], []]

    def packed(counts):
        """Tokens of both requests and none of the padding."""
        x = [part(r, d, d + n) for r, d, n in zip(requests, done, counts)]
        cu = torch.tensor([0, counts[0], counts[0], sum(counts), sum(counts)], dtype=torch.int32, device=device)
        return {n: torch.cat([y[n] for y in x], 1) for n in x[0]}, cu

    for i, (first, second) in enumerate(pieces):
        x, cu = packed([first, second])
        o = libkda.prefill(**x, pool=pool, slots=slots, cu_seqlens=cu, first_slot=1, **options,
                           has_state=torch.full((4,), i > 0, device=device))
        for request, piece in enumerate(o.split([first, second], 1)):
            found[request].append(piece)
            done[request] += (first, second)[request]
    for _ in range(2):
        x = {n: torch.cat([part(r, d, d + 1)[n] for r, d in zip(requests, done)]) for n in requests[0]}
        o = libkda.decode(**x, pool=pool, slots=slots[[0, 2]], first_slot=1, **options)
        for request in range(2):
            found[request].append(o[request:request + 1])
            done[request] += 1
    drafts = torch.tensor([[3, 1, 2], [5, 4, 6]], device=device)
    x = {n: torch.cat([part(r, d, d + 3)[n] for r, d in zip(requests, done)]) for n in requests[0]}
    o = libkda.verify(**x, pool=pool, slots=drafts, **options)
    for request, accepted in enumerate((3, 1)):
        found[request].append(o[request:request + 1])
        expected, state = exact(part(requests[request], 0, done[request] + accepted), options)
        assert distance(torch.cat(found[request], 1)[:, :expected.shape[1]], expected) < 1e-5
        assert distance(pool[drafts[request, accepted - 1]][None], state) < 1e-5
    assert pool[0].isnan().all()  # nobody's


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_first", [True, False])
@pytest.mark.parametrize("size", [64, 128])
def test_prefill_from_a_pool_has_the_bits_of_gathered_states(device, dtype, pool_dtype, v_first, size):
    """Packed prompts, of which one is new, with a pool, and with its states gathered in front and stored behind."""
    normal = lambda *shape: torch.randn(*shape, device=device)
    lengths, heads = [65, 3, 200, 32], 2
    x = {n: normal(1, sum(lengths), heads, size).to(dtype) for n in "qkvg"} | {
        "beta": normal(1, sum(lengths), heads).to(dtype)}
    options = dict(A_log=0.3 * normal(heads), dt_bias=normal(heads * size), state_v_first=v_first, **OPTIONS)
    cu = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    slots = torch.tensor([5, 1, 6, 3], dtype=torch.int32, device=device)
    has_state = torch.tensor([True, True, False, True], device=device)
    pool = normal(SLOTS, heads, size, size).to(pool_dtype)
    after = pool.clone()
    o = libkda.prefill(**x, pool=after, slots=slots, cu_seqlens=cu, has_state=has_state, **options)
    states = torch.where(has_state[:, None, None, None], pool[slots].float(), 0)
    expected, final = libkda.chunk_kda(**x, initial_state=states, output_final_state=True, cu_seqlens=cu, **options)
    assert torch.equal(o, expected)
    pool[slots] = final.to(pool_dtype)
    assert torch.equal(after, pool)


def test_drafts_go_on_from_the_accepted_one(device):
    torch.manual_seed(1)
    options, pool = gate(device), torch.randn(SLOTS, HV, K, V, device=device)
    slots, start = torch.tensor([[1, 2], [4, 6]], device=device), pool.clone()
    x = tokens(2, device, batch=2)
    o = libkda.verify(**x, pool=pool, slots=slots, num_accepted_tokens=torch.tensor([2, 1], device=device), **options)
    for n, slot in enumerate((2, 4)):
        expected, state = exact({name: t[n:n + 1] for name, t in x.items()}, options, start[slot][None])
        assert distance(o[n:n + 1], expected) < 1e-5
        assert distance(pool[slots[n, 1]][None], state) < 1e-5


def test_trees_of_drafts(device):
    """Two branches behind a root, with states in a buffer of their own; a sequence that is shorter; padding."""
    torch.manual_seed(3)
    options, pool = gate(device), torch.randn(SLOTS, HV, K, V, device=device)
    drafts, start = torch.full((9, HV, K, V), float("nan"), device=device), pool.clone()
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, -1, -1], [9, 9, 9, 9]], device=device)
    rows = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [0, 0, 0, 0]], device=device)
    x, slots = tokens(4, device, batch=3), torch.tensor([4, 2, -1], device=device)
    o = libkda.verify(**x, pool=pool, slots=slots, drafts=drafts, draft_slots=rows, parents=parents, **options)
    assert torch.equal(pool, start)
    for n, path in ((0, [0, 1, 3]), (0, [0, 2]), (1, [0, 1])):
        branch = {name: t[n:n + 1, path] for name, t in x.items()}
        expected, state = exact(branch, options, start[slots[n]][None])
        assert distance(o[n:n + 1, path], expected) < 1e-5
        assert distance(drafts[rows[n, path[-1]]][None], state) < 1e-5
    assert not o[1, 2:].any() and not o[2].any() and drafts[6:].isnan().all()


def test_rows_are_the_records_of_drafts(device):
    """As RecoverSSM has it: a verify that stores no state, then, once lengths are accepted, a commit from the same rows
    that reads and writes each state once. Nothing waits for the lengths."""
    torch.manual_seed(5)
    options, pool = gate(device), torch.randn(SLOTS, HV, K, V, device=device)
    x, slots, start = tokens(4, device, batch=3), torch.tensor([4, 2, 0], device=device), pool.clone()
    none = dict(drafts=torch.zeros_like(pool), draft_slots=torch.full((3, 4), -1, device=device))
    o = libkda.verify(**x, pool=pool, slots=slots, first_slot=1, **none, **options)
    assert torch.equal(pool, start) and not o[2].any()
    accepted, column = torch.tensor([3, 1, 2], device=device), torch.arange(4, device=device)
    last = torch.where(column == accepted[:, None] - 1, slots[:, None], -1)
    chain = torch.where(column < accepted[:, None], column - 1, -1)
    libkda.verify(**x, pool=pool, slots=last, num_accepted_tokens=accepted, parents=chain, first_slot=1, **options)
    for n, count in enumerate((3, 1)):
        expected, state = exact({name: y[n:n + 1, :count] for name, y in x.items()}, options, start[slots[n]][None])
        assert distance(o[n:n + 1, :count], expected) < 1e-5
        assert distance(pool[slots[n]][None], state) < 1e-5
    untouched = [0, 1, 3, 5, 6]
    assert torch.equal(pool[untouched], start[untouched])


@pytest.mark.parametrize("own", [False, True])
def test_checkpoints_of_a_prefill(device, own):
    """One a prompt, in bf16 rows of their own or in slots of the pool; a prompt without one, and padding."""
    torch.manual_seed(4)
    options, pool = gate(device), torch.randn(SLOTS, HV, K, V, device=device)
    rows = torch.zeros(5, HV, K, V, device=device, dtype=torch.bfloat16) if own else pool
    x, on = tokens(120, device), dict(device=device)
    cu, offsets = torch.tensor([0, 50, 50, 100, 120], **on), torch.tensor([48, 16, 16, 0], **on)
    slots, to = torch.tensor([3, 0, 5, 6], **on), torch.tensor([1, 0, 4, 2], **on)
    kept, start = rows[2].clone(), pool.clone()
    libkda.prefill(**x, pool=pool, slots=slots, cu_seqlens=cu, first_slot=1, checkpoints=rows,
                   checkpoint_offsets=offsets, checkpoint_slots=to, **options)
    for begin, offset, slot, row in ((0, 48, 3, 1), (50, 16, 5, 4)):
        _, state = exact(part(x, begin, begin + offset), options, start[slot][None])
        assert distance(rows[row][None].float(), state) < (5e-3 if own else 1e-5)
    assert torch.equal(rows[2], kept) and torch.equal(pool[0], start[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_and_layouts(device, dtype):
    """The caller's memory, states with V first, in a pool whose slots are padded."""
    torch.manual_seed(2)
    x, options = tokens(40, device, dtype=dtype), gate(device)
    room = torch.zeros(SLOTS, HV * V * K + 8, device=device)
    pool = room[:, :HV * V * K].unflatten(1, (HV, V, K))
    out, slots = torch.empty_like(x["v"]), torch.tensor([2], device=device)
    fresh = torch.tensor([False], device=device)
    assert libkda.prefill(**x, pool=pool, slots=slots, has_state=fresh, out=out, state_v_first=True, **options) is out
    o, state = libkda.chunk_kda(**x, output_final_state=True, **options)
    assert torch.equal(out, o)
    assert torch.equal(pool[2], state[0].transpose(1, 2))
    assert not room[:, HV * V * K:].any()


def test_prefill_is_one_operator():
    """A sequence without a slot costs no operators of torch: the library writes zeros to its rows."""
    x, pool, options = tokens(40, "cpu"), torch.randn(SLOTS, HV, K, V), gate("cpu")
    slots, cu = torch.tensor([3, -1, 5], dtype=torch.int32), torch.tensor([0, 20, 29, 40])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        o = libkda.prefill(**x, pool=pool, slots=slots, cu_seqlens=cu, **options)
    assert [event.name for event in profile.events() if "aten::empty" not in event.name] == ["libkda::update"]
    assert not o[:, 20:29].any() and o[:, :20].all() and o[:, 29:].all()


CHECKPOINTS = dict(checkpoints=torch.zeros(3, HV, K, V), checkpoint_offsets=torch.tensor([0]),
                   checkpoint_slots=torch.tensor([1]))
DRAFTS = dict(slots=torch.tensor([1]), drafts=torch.zeros(4, HV, K, V), draft_slots=torch.tensor([[2, 3]]))
BAD = {
    "prefill": [(dict(slots=None), "slots must be a torch.Tensor"), (dict(pool=None), "pool must be a torch.Tensor"),
                (dict(slots=torch.tensor([[1, 2]])), r"slots must have shape \[N\]=\[1\], got \[1, 2\]"),
                (dict(slots=torch.tensor([1, 2])), r"slots must have shape \[N\]=\[1\], got \[2\]"),
                (dict(pool=torch.zeros(3, HV, K, V + 8)), r"pool must have shape .* got \[3, 4, 32, 24\]"),
                (dict(pool=torch.zeros(3, HV, K, V, dtype=torch.float16)), "pool must be float32 or bfloat16"),
                (dict(out=torch.zeros(1)), r"out must have shape .*, got \[1\]"),
                (dict(CHECKPOINTS, checkpoint_slots=None), "are given together, got no checkpoint_slots"),
                (dict(CHECKPOINTS, checkpoint_offsets=torch.tensor([2])), "checkpoint_offsets: entry 0 = 2 is not"),
                (dict(CHECKPOINTS, checkpoint_slots=torch.tensor([3])), "checkpoint_slots: entry 0 = 3 is outside"),
                (dict(CHECKPOINTS, checkpoint_slots=torch.tensor([1, 2])), r"checkpoint_slots must have shape \[N\]"),
                (dict(CHECKPOINTS, checkpoint_every=24), "checkpoint_every: 24 is not a positive multiple of 16"),
                (dict(CHECKPOINTS, checkpoints=torch.zeros(0, HV, K, V)), "checkpoints has no slots"),
                (dict(slots=torch.tensor([9])), "slots"), (dict(first_slot=-1), "first_slot must be 0 to"),
                (dict(allow_neg_eigval=True, use_beta_sigmoid_in_kernel=False), "`allow_neg_eigval=True` requires")],
    "decode": [(dict(tokens(9, "cpu")), "q must have at most 8 tokens a sequence for decode, got 9; prefill")],
    "verify": [(dict(slots=torch.tensor([1])), r"^slots must have shape \[N, S\]=\[1, S\], got \[1\]"),
               (dict(parents=torch.zeros(1, 3, dtype=torch.int32)), r"parents must have shape \[N, S\]=\[1, 2\]"),
               (dict(parents=torch.tensor([[0, 1]])), "parents: entry 0, 1 = 1 is not below 1"),
               (dict(DRAFTS, draft_slots=None), "^drafts and draft_slots are given together, got no draft_slots"),
               (dict(DRAFTS, slots=torch.tensor([[1, 2]])), r"^slots must have shape \[N\]=\[1\], got \[1, 2\]"),
               (dict(DRAFTS, **tokens(3, "cpu", batch=1)), "^draft_slots: S = 2 is below the 3 tokens"),
               (dict(DRAFTS, out=DRAFTS["drafts"].flatten()[:2 * HV * V].view(1, 2, HV, V)), "^out: overlaps drafts"),
               (dict(DRAFTS, draft_slots=torch.tensor([[1, 4]])), "draft_slots: entry 1 = 4 is outside"),
               (dict(DRAFTS, draft_slots=torch.tensor([[1]])), "draft_slots must have at least 2 columns"),
               (dict(DRAFTS, drafts=torch.zeros(4, HV, K, 9)), r"drafts must have shape .* got \[4, 4, 32, 9\]"),
               (dict(DRAFTS, num_accepted_tokens=torch.tensor([1])), "num_accepted_tokens counts columns of slots"),
               (dict(slots=torch.tensor([[1]])), "slots must have at least 2 columns for verify"),
               (dict(num_accepted_tokens=torch.tensor([1.0])), "num_accepted_tokens must be int32")]}


@pytest.mark.parametrize(("name", "change", "text"), [(n, *row) for n, rows in BAD.items() for row in rows])
def test_errors_name_the_argument(name, change, text):
    pool, slots = torch.ones(SLOTS, HV, K, V), torch.tensor([[1, 2]]) if name == "verify" else torch.tensor([1])
    arguments = dict(tokens(2, "cpu"), pool=pool, slots=slots, **gate("cpu")) | change
    with pytest.raises((TypeError, ValueError), match=text):
        getattr(libkda, name)(**arguments)
    assert torch.equal(pool, torch.ones_like(pool))


def test_drafts_and_checkpoints_compile():
    """As one graph, with the same bits; what has a wrong shape is refused while the graph is made."""
    options, pool, x = gate("cpu"), torch.randn(SLOTS, HV, K, V), tokens(2, "cpu")
    drafts, long = dict(DRAFTS, drafts=torch.zeros(4, HV, K, V), parents=torch.tensor([[-1, 0]])), tokens(20, "cpu")
    kept = dict(CHECKPOINTS, checkpoints=torch.zeros(3, HV, K, V), checkpoint_offsets=torch.tensor([16]))

    def steps(pool, drafts, kept):
        return (libkda.verify(**x, pool=pool, **drafts, **options),
                libkda.prefill(**long, pool=pool, slots=drafts["slots"], **kept, **options))

    compiled = torch.compile(steps, backend="aot_eager", fullgraph=True)
    wrong = dict(drafts, slots=torch.tensor([[1, 2]]))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Observed exception"):
        compiled(pool, wrong, kept)

    def results(run):
        written = [y.clone() for y in (pool, drafts["drafts"], kept["checkpoints"])]
        outputs = run(written[0], dict(drafts, drafts=written[1]), dict(kept, checkpoints=written[2]))
        assert written[1].any() and written[2].any()
        return [*written, *outputs]

    assert all(torch.equal(a, b) for a, b in zip(results(compiled), results(steps)))


def test_two_sequences_in_one_slot_are_refused():
    x, pool = tokens(2, "cpu", batch=2), torch.ones(SLOTS, HV, K, V)
    with pytest.raises(ValueError, match="slots: slot 3 would be written twice"):
        libkda.decode(**x, pool=pool, slots=torch.tensor([3, 3]), **gate("cpu"))
    assert torch.equal(pool, torch.ones_like(pool))
