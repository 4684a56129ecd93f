# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from common import FLAGS, TOLERANCE, distance, gate_flags, make, reference

from libkda import fused_recurrent_kda, fused_recurrent_kda_fwd


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


def test_double_tensors_compute_in_fp32(device):
    x, parameters, state = make(T=5, device=device)
    o, _ = fused_recurrent_kda(**{n: t.double() for n, t in x.items()}, initial_state=state, **FLAGS)
    assert o.dtype == torch.float64
    assert distance(o, reference(x, parameters, state)[0]) < 2e-6


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
