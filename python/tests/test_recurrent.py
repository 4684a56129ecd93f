# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from common import FLAGS, TOLERANCE, distance, gate_flags, make, reference

from libkda import chunk_kda, fused_recurrent_kda, fused_recurrent_kda_fwd


@pytest.mark.parametrize("T", [1, 7, 8, 9, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_first", [False, True])
def test_few_and_many_tokens(device, T, dtype, v_first):
    x, parameters, state = make(T=T, dtype=dtype, device=device, gates="bounded")
    flags = dict(FLAGS, state_v_first=v_first, **gate_flags("bounded", parameters, -5.0))
    o, final = fused_recurrent_kda(**x, initial_state=state.mT.contiguous() if v_first else state, **flags)
    expected = reference(x, parameters, state, "bounded", -5.0)
    assert o.dtype == dtype
    assert distance(o, expected[0]) < TOLERANCE[device, dtype]
    assert distance(final.mT if v_first else final, expected[1]) < TOLERANCE[device, dtype]


def test_initial_state_is_left_alone(device):
    x, _, state = make(T=1, device=device)
    before = state.clone()
    _, final = fused_recurrent_kda(**x, initial_state=state, **FLAGS)
    assert torch.equal(state, before) and not torch.equal(final, before)


@pytest.mark.parametrize("T", [1, 8])
def test_without_initial_state(device, T):
    x, parameters, state = make(T=T, device=device)
    o, final = fused_recurrent_kda(**x, **FLAGS)
    expected = reference(x, parameters, torch.zeros_like(state))
    assert distance(o, expected[0]) < 2e-6 and distance(final, expected[1]) < 2e-6
    assert fused_recurrent_kda(**x, **dict(FLAGS, output_final_state=False))[1] is None


@pytest.mark.parametrize("lengths", [[1] * 12, [0] * 11 + [12], [3, 0, 9], [5, 2]])
@pytest.mark.parametrize("in_place", [False, True])
def test_packed(device, lengths, in_place):
    """As many tokens as sequences look like a decode step; one sequence may have them all."""
    N = len(lengths)
    x, parameters, state = make(B=1, T=sum(lengths), N=N, device=device)
    cu = torch.tensor([0, *lengths], device=device).cumsum(0)
    before = state.clone()
    flags = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, cu_seqlens=cu)
    if in_place:
        o, final = fused_recurrent_kda_fwd(**x, initial_state=state, **flags)
        assert final is state
    else:
        o, final = fused_recurrent_kda(**x, initial_state=state, output_final_state=True, **flags)
        assert torch.equal(state, before)
    for n, (begin, end) in enumerate(zip(cu.tolist(), cu.tolist()[1:])):
        if begin == end:
            assert torch.equal(final[n], before[n])
            continue
        expected = reference({name: t[:, begin:end] for name, t in x.items()}, parameters, before[n:n + 1])
        assert distance(o[:, begin:end], expected[0]) < 2e-6
        assert distance(final[n], expected[1][0]) < 2e-6


def test_double_tensors_are_converted(device):
    """To fp32; on the CPU a call whose q is fp64 is computed in it, but for states in place."""
    x, parameters, state = make(T=5, device=device)
    o, _ = fused_recurrent_kda(**{n: t.double() for n, t in x.items()}, initial_state=state, **FLAGS)
    assert o.dtype == torch.float64
    assert distance(o, reference(x, parameters, state)[0]) < 2e-6
    o, _ = fused_recurrent_kda_fwd(**{n: t.double() for n, t in x.items()}, initial_state=state.clone(),
                                   use_qk_l2norm_in_kernel=True)
    expected, _ = fused_recurrent_kda_fwd(**x, initial_state=state, use_qk_l2norm_in_kernel=True)
    assert torch.equal(o.float(), expected)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_what_the_kernels_do_not_take_is_converted(device, name):
    """A type, or a last dimension, that the operator refuses; nothing of a pool is written before it does."""
    x, _, state = make(T=5, device=device)
    pool = state.clone()
    expected, _ = fused_recurrent_kda_fwd(**x, initial_state=pool, use_qk_l2norm_in_kernel=True)
    spaced = x[name][..., None].repeat_interleave(2, dim=-1)[..., 0]
    assert spaced.stride(-1) == 2
    for other in (x[name].double(), spaced, spaced.double()):
        again = state.clone()
        o, _ = fused_recurrent_kda_fwd(**dict(x, **{name: other}), initial_state=again, use_qk_l2norm_in_kernel=True)
        assert torch.equal(o.float(), expected) and torch.equal(again, pool)


def pool_of(state, slots, slot_of, padding=24):
    """Slots with a gap behind each, as caches that share a page with another state have them; the rest is poison."""
    HV, K, V = state.shape[1:]
    memory = torch.full((slots, HV * K * V + padding), 1e30, device=state.device)
    pool = memory[:, :HV * K * V].unflatten(1, (HV, K, V))
    pool[slot_of] = state
    return memory, pool


@pytest.mark.parametrize("v_first", [False, True])
def test_pool_in_place(device, v_first):
    x, parameters, state = make(B=1, T=5, N=5, device=device)
    slots = torch.tensor([7, 2, 9, 0, 4], device=device)
    stored = state.mT.contiguous() if v_first else state
    memory, pool = pool_of(stored, 11, slots)
    before = memory.clone()
    o, final = fused_recurrent_kda_fwd(**x, initial_state=pool, ssm_state_indices=slots,
                                       cu_seqlens=torch.arange(6, device=device), use_qk_l2norm_in_kernel=True,
                                       use_beta_sigmoid_in_kernel=True, state_v_first=v_first)
    assert final is pool
    for n, slot in enumerate(slots.tolist()):
        expected = reference({name: t[:, n:n + 1] for name, t in x.items()}, parameters, state[n:n + 1])
        assert distance(o[:, n:n + 1], expected[0]) < 2e-6
        assert distance(pool[slot].mT if v_first else pool[slot], expected[1][0]) < 2e-6
    untouched = [s for s in range(11) if s not in slots.tolist()]
    assert torch.equal(memory[untouched], before[untouched])
    assert torch.equal(memory[:, -24:], before[:, -24:])


def test_zeros_where_no_token_is_computed(device):
    """Of a sequence without a slot and, where lengths are on a GPU, of tokens that no sequence has. Lengths that the
    host can see cover all tokens."""
    x, parameters, state = make(B=1, T=5, N=5, device=device)
    slots = torch.tensor([7, -1, 9, 0, -1], device=device)
    covered = 5 if device == "cpu" else 3
    cu_seqlens = torch.arange(6, device=device).clamp(max=covered)
    _, pool = pool_of(state[slots >= 0], 11, slots[slots >= 0])
    memory = torch.full_like(x["v"], float("nan"))
    del memory  # what is allocated next is not zero
    o, _ = fused_recurrent_kda_fwd(**x, initial_state=pool, ssm_state_indices=slots, cu_seqlens=cu_seqlens,
                                   use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    for n, slot in enumerate(slots.tolist()):
        if slot < 0 or n >= covered:
            assert (o[:, n] == 0).all()
        else:
            expected = reference({name: t[:, n:n + 1] for name, t in x.items()}, parameters, state[n:n + 1])
            assert distance(o[:, n:n + 1], expected[0]) < 2e-6


def test_speculative_decode(device):
    """S tokens a sequence, a state a token; the next call starts from the accepted one."""
    N, S = 3, 4
    x, parameters, state = make(B=1, T=N * S, N=N, device=device)
    indices = torch.arange(N * S, device=device, dtype=torch.int32).reshape(N, S)
    accepted = torch.tensor([1, 3, 2], device=device, dtype=torch.int32)
    start = indices[torch.arange(N), (accepted - 1).long()].long()
    memory, pool = pool_of(state, N * S + 1, start)
    o, _ = fused_recurrent_kda_fwd(**x, initial_state=pool, ssm_state_indices=indices, num_accepted_tokens=accepted,
                                   cu_seqlens=torch.arange(N + 1, device=device) * S, use_qk_l2norm_in_kernel=True,
                                   use_beta_sigmoid_in_kernel=True)
    for n in range(N):
        for t in range(S):
            part = {name: rows[:, n * S:n * S + t + 1] for name, rows in x.items()}
            expected = reference(part, parameters, state[n:n + 1])
            assert distance(pool[n * S + t], expected[1][0]) < 2e-6
        assert distance(o[:, n * S:(n + 1) * S], expected[0]) < 2e-6


def test_prefill_into_a_pool(device):
    x, parameters, state = make(B=1, T=90, N=2, device=device)
    slots = torch.tensor([3, 1], device=device, dtype=torch.int32)
    _, pool = pool_of(state, 4, slots.long())
    o, _ = fused_recurrent_kda_fwd(**x, initial_state=pool, ssm_state_indices=slots,
                                   cu_seqlens=torch.tensor([0, 20, 90], device=device), use_qk_l2norm_in_kernel=True,
                                   use_beta_sigmoid_in_kernel=True)
    for n, (begin, end) in enumerate([(0, 20), (20, 90)]):
        expected = reference({name: t[:, begin:end] for name, t in x.items()}, parameters, state[n:n + 1])
        assert distance(o[:, begin:end], expected[0]) < 2e-6
        assert distance(pool[slots[n].long()], expected[1][0]) < 2e-6


def test_out(device):
    x, _, state = make(B=3, T=1, device=device)
    out = torch.full_like(x["v"], float("nan"))
    o, _ = fused_recurrent_kda_fwd(**x, initial_state=state.clone(), out=out)
    assert o is out and not out.isnan().any()


@pytest.mark.parametrize("T", [1, 12])
@pytest.mark.parametrize("v_first", [False, True])
def test_out_with_states_of_its_own(device, T, v_first):
    """Any strides; what `out` does not cover, and the old states, stay."""
    x, _, state = make(B=3, T=T, device=device)
    start = state.mT.contiguous() if v_first else state
    flags = dict(initial_state=start, inplace_final_state=False, use_qk_l2norm_in_kernel=True, state_v_first=v_first,
                 use_beta_sigmoid_in_kernel=True)
    before, expected = start.clone(), fused_recurrent_kda_fwd(**x, **flags, output_final_state=True)
    for wide in (torch.empty(*x["v"].shape[:3], 48, device=device), torch.empty(*x["v"].shape[:3], 64, device=device)):
        out = wide.fill_(float("nan"))[..., ::wide.shape[-1] // 32]  # the second one's elements are apart
        out = out[..., :32]
        o, final = fused_recurrent_kda_fwd(**x, **flags, out=out, output_final_state=True)
        assert o is out and torch.equal(out, expected[0]) and torch.equal(final, expected[1])
        assert wide.isnan().sum() == wide.numel() - out.numel() and torch.equal(start, before)
        assert fused_recurrent_kda_fwd(**x, **flags, out=out)[1] is None


# ---- new requests and padded rows ------------------------------------------------------------------------------------

@pytest.mark.parametrize("T", [2, 70])
@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])
def test_has_state(device, function, T):
    """Where it is False a sequence starts from zero, whatever its state is."""
    x, _, state = make(B=3, T=T, N=3, device=device)
    has_state = torch.tensor([True, False, True], device=device)
    cleared = state * has_state[:, None, None, None]
    expected = function(**x, initial_state=cleared, **FLAGS)
    state[1] = float("nan")
    found = function(**x, initial_state=state, has_state=has_state, **FLAGS)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    with pytest.raises(ValueError, match="has_state is given without"):
        function(**x, has_state=has_state, **FLAGS)


def test_has_state_of_intermediate_states(device):
    x, _, state = make(T=70, device=device)
    has_state = torch.tensor([False, True], device=device)
    with torch.inference_mode():
        expected = chunk_kda(**x, initial_state=state * has_state[:, None, None, None],
                             return_intermediate_states=True, **FLAGS)
        state[0] = float("nan")
        found = chunk_kda(**x, initial_state=state, has_state=has_state, return_intermediate_states=True, **FLAGS)
    for one, other in zip(found, expected):
        assert torch.equal(one, other)


@pytest.mark.parametrize("lengths", [[1, 1, 1], [40, 2, 33]])
@pytest.mark.parametrize("type_of_mask", [torch.bool, torch.uint8])
def test_new_requests_in_a_pool(device, lengths, type_of_mask):
    """A slot holds the state of a request that is gone."""
    x, _, state = make(B=1, T=sum(lengths), N=3, device=device)
    cu = torch.tensor([0, *lengths], device=device).cumsum(0)
    slots, old = torch.tensor([4, 0, 2], dtype=torch.int32, device=device), torch.tensor([1, 0, 1], device=device)
    call = lambda pool, **flags: fused_recurrent_kda_fwd(**x, initial_state=pool, ssm_state_indices=slots,
                                                         cu_seqlens=cu, use_qk_l2norm_in_kernel=True, **flags)[0]
    _, pool = pool_of(state, 6, slots.long())
    _, cleared = pool_of(state * old[:, None, None, None], 6, slots.long())
    o, expected = call(pool, has_state=old.to(type_of_mask)), call(cleared)
    assert torch.equal(o, expected) and torch.equal(pool, cleared)


@pytest.mark.parametrize("lengths", [None, [1, 1, 1, 1], [40, 2, 33, 5]])
@pytest.mark.parametrize("given", [False, True])
def test_first_slot(device, lengths, given):
    """Rows of the null block, as many as there are, and of any negative index: 0, and the pool is left alone."""
    packed = lengths is not None
    x, parameters, state = make(B=1 if packed else 4, T=sum(lengths) if packed else 3, N=4, device=device)
    ends = torch.tensor([0, *(lengths or [3] * 4)], device=device).cumsum(0)
    slots = torch.tensor([0, 2, 0, -7], device=device)
    pool = torch.full((4, *state.shape[1:]), float("nan"), device=device)
    pool[2] = state[1]
    out = torch.full_like(x["v"], float("nan")) if given else None
    o, final = fused_recurrent_kda_fwd(**x, initial_state=pool, ssm_state_indices=slots, out=out, first_slot=1,
                                       cu_seqlens=ends if packed else None, use_qk_l2norm_in_kernel=True,
                                       use_beta_sigmoid_in_kernel=True)
    flat, rows = o.flatten(0, 1), {name: t.flatten(0, 1)[None] for name, t in x.items()}
    for n, (begin, end) in enumerate(zip(ends.tolist(), ends.tolist()[1:])):
        if n != 1:
            assert (flat[begin:end] == 0).all()
            continue
        expected = reference({name: t[:, begin:end] for name, t in rows.items()}, parameters, state[1:2])
        assert distance(flat[begin:end][None], expected[0]) < 2e-6
        assert distance(final[2:3], expected[1]) < 2e-6
    assert final is pool and pool[[0, 1, 3]].isnan().all()


@pytest.mark.parametrize("first_slot", [0, 1])
def test_first_slot_of_speculative_decode(device, first_slot):
    """Padded rows of a graph: every index is the null block's, or negative."""
    x, _, state = make(B=3, T=2, N=3, device=device)
    indices = torch.tensor([[2, 3], [-1, -4], [0, 0] if first_slot else [-2, -2]], device=device, dtype=torch.int32)
    _, pool = pool_of(state[:1], 4, torch.tensor([3], device=device))
    before = pool.clone()
    o, _ = fused_recurrent_kda_fwd(**x, initial_state=pool, ssm_state_indices=indices, first_slot=first_slot,
                                   num_accepted_tokens=torch.tensor([2, 1, 1], device=device))
    assert (o[1:] == 0).all() and o[0].abs().sum() > 0
    assert torch.equal(pool[:2], before[:2]) and not torch.equal(pool[2:], before[2:])


def test_indices_of_64_bits_keep_their_meaning(device):
    """What is too large for 32 bits is refused, or on a GPU, where nobody waits for a look, has no slot."""
    x, _, state = make(B=2, T=1, device=device)
    pool, slots = state.clone(), torch.tensor([2**32, -2**40], device=device)
    call = lambda: fused_recurrent_kda_fwd(**x, initial_state=pool, ssm_state_indices=slots)[0]
    if device == "cpu":
        with pytest.raises(ValueError, match="ssm_state_indices"):
            call()
    else:
        assert (call() == 0).all()
    assert torch.equal(pool, state)
