# SPDX-License-Identifier: Apache-2.0
"""Rollouts of random histories have the bits of one forward: prompts in pieces, drafts and rejections, forks, padded
rows, other sequences in the batch. KDA_ROLLOUT_HISTORIES: how many, from the seed KDA_ROLLOUT_FIRST on, so that
processes may share them; KDA_ROLLOUT_DEVICE: "cuda" on a Hopper GPU."""
import os
import types

import pytest
import torch

import libkda
from libkda import kda, rollout

DEVICE = os.environ.get("KDA_ROLLOUT_DEVICE", "cpu")
CUDA = DEVICE == "cuda"
HISTORIES = int(os.environ.get("KDA_ROLLOUT_HISTORIES", "14"))
FIRST = int(os.environ.get("KDA_ROLLOUT_FIRST", "0"))
SEQUENCES, DRAFTS, PADDED = 5, 3, 2

# Gates: how strong, and whether the call makes them; of heads that forget fast the kernel makes scores in another way.
REGIMES = {
    "log": dict(raw=False, size=0.1), "log, strong": dict(raw=False, size=30.0), "none": dict(raw=False, size=0.0),
    "softplus": dict(raw=True, size=1.0), "softplus, fast": dict(raw=True, size=1.0, A_log=2.5),
    "softplus, slow": dict(raw=True, size=1.0, A_log=-7.0), "bounded": dict(raw=True, size=2.0, lower_bound=-5.0),
}


def made(regime, generator, H, HV, D, lengths):
    """q, k, v, g and beta of each sequence, and the gate's arguments."""
    chosen = REGIMES[regime]
    dtype = torch.bfloat16
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    if chosen["raw"]:
        gate = dict(use_gate_in_kernel=True, A_log=torch.full((HV,), chosen.get("A_log", 0.0)).to(DEVICE),
                    dt_bias=(0.5 * normal(HV * D)).to(DEVICE), use_qk_l2norm_in_kernel=True,
                    use_beta_sigmoid_in_kernel=True, allow_neg_eigval=bool(torch.randint(2, (), generator=generator)))
        if "lower_bound" in chosen:
            gate["lower_bound"] = chosen["lower_bound"]
    else:
        gate = dict(use_qk_l2norm_in_kernel=True)
    sequences = []
    for T in lengths:
        q, k = (normal(T, H, D).to(dtype) for _ in "qk")
        v = (normal(T, HV, D) * 2.0 ** torch.randint(-12, 13, (), generator=generator)).to(dtype)
        g = normal(T, HV, D) * chosen["size"]
        if not chosen["raw"]:
            g = -g.abs()
        beta = (normal(T, HV) if chosen["raw"] else torch.rand(T, HV, generator=generator)).to(dtype)
        sequences.append([x.to(DEVICE) for x in (q, k, v, g, beta)])
    return sequences, gate


class History:
    """Sequences that advance by random calls, each beside others."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.regime = list(REGIMES)[seed % len(REGIMES)]
        D = (64, 128)[seed // len(REGIMES) % 2] if CUDA else 16
        H, HV = ((1, 2), (2, 2))[seed % 2]
        self.lengths = [self.choose(1, 90) for _ in range(SEQUENCES)]
        self.inputs, self.gate = made(self.regime, self.generator, H, HV, D, self.lengths)
        self.states = rollout.States(SEQUENCES + 4, H, HV, D, D, drafts=DRAFTS, device=DEVICE)
        self.done = [0] * SEQUENCES
        self.slot = [2 + i for i in range(SEQUENCES)]
        self.o = [torch.full_like(x[2], torch.nan) for x in self.inputs]

    def choose(self, low, high):
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def fork(self, n):
        """The sequence goes on in another slot; what its old slot held is overwritten by a stranger."""
        used, old = set(self.slot), self.slot[n]
        new = next(slot for slot in range(2, SEQUENCES + 4) if slot not in used)
        as_slot = lambda slot: torch.tensor([slot], device=DEVICE)  # noqa: E731
        self.states.copy(as_slot(old), as_slot(new))
        stranger = [x[None, :5] for x in self.inputs[self.choose(0, SEQUENCES - 1)]]
        self.states.prefill(*stranger, as_slot(old), as_slot(0), **self.gate)
        self.slot[n] = new

    def call(self, chosen, counts, drafts, junk):
        """A call of these sequences with so many tokens each, and padded rows behind."""
        parts = [[] for _ in range(5)]
        for n, count in zip(chosen, counts):
            for part, x in zip(parts, self.inputs[n]):
                rows = x[self.done[n]:self.done[n] + count]
                if junk:  # drafts that will be rejected are other tokens
                    rows = torch.cat([rows[:-junk], torch.full_like(rows[-junk:], 3)])
                part.append(rows)
        place = torch.tensor([self.slot[n] for n in chosen] + [0] * PADDED, device=DEVICE)
        done = torch.tensor([self.done[n] for n in chosen] + [7] * PADDED, device=DEVICE)
        if drafts:
            x = [torch.stack(part + [torch.full_like(part[0], torch.nan)] * PADDED) for part in parts]
            o = self.states.decode(*x, place, done, first_slot=2, **self.gate)
            return list(o[:len(chosen)])
        lengths = torch.tensor([0, *counts, *[3] * PADDED])
        x = [torch.cat(part + [torch.full_like(part[0][:1], torch.nan).expand(3 * PADDED, *part[0].shape[1:])])[None]
             for part in parts]
        o = self.states.prefill(*x, place, done, cu_seqlens=lengths.cumsum(0).to(DEVICE), first_slot=2, **self.gate)
        assert not o[0, sum(counts):].any()
        return list(o[0, :sum(counts)].split(counts))

    def step(self):
        left = [n for n in range(SEQUENCES) if self.done[n] < self.lengths[n]]
        order = torch.randperm(len(left), generator=self.generator).tolist()
        chosen = [left[i] for i in order[:self.choose(1, len(left))]]
        if self.choose(0, 9) == 0 and self.done[chosen[0]]:
            self.fork(chosen[0])
        rest = [self.lengths[n] - self.done[n] for n in chosen]
        if self.choose(0, 3) == 0:
            counts = [self.choose(1, min(x, 40)) for x in rest]
            found, taken = self.call(chosen, counts, False, 0), counts
        else:
            S = self.choose(1, min(1 + DRAFTS, *rest)) if min(rest) > 1 else 1
            junk = self.choose(0, S - 1)
            found = self.call(chosen, [S] * len(chosen), True, junk)
            taken = [self.choose(1, S - junk) for _ in chosen]
        for n, o, count in zip(chosen, found, taken):
            self.o[n][self.done[n]:self.done[n] + count] = o[:count]
            self.done[n] += count

    def expect_bits_of_training(self, patch):
        while any(done < T for done, T in zip(self.done, self.lengths)):
            self.step()
        packed = [torch.cat(x)[None] for x in zip(*self.inputs)]
        cu_seqlens = torch.tensor([0, *self.lengths]).cumsum(0)
        for keeps in (False, True):
            if CUDA:  # it would keep nothing for so few heads
                patch.setattr(kda, "_can_keep_chunks", lambda *_: True)
            leaves = [x.clone().requires_grad_(keeps) for x in packed]
            o, _ = libkda.chunk_kda(*leaves, cu_seqlens=cu_seqlens.to(DEVICE), cu_seqlens_cpu=cu_seqlens,
                                    disable_recompute=keeps, plan_options=rollout.options(DEVICE), **self.gate)
            difference = (o[0].detach().double() - torch.cat(self.o).double()).abs()
            assert difference.max() == 0, (self.regime, keeps, difference.max())


@pytest.mark.skipif(CUDA and not torch.cuda.is_available(), reason="no GPU")
def test_random_histories_have_the_bits_of_training(monkeypatch):
    for seed in range(FIRST, FIRST + HISTORIES):
        History(seed).expect_bits_of_training(monkeypatch)


def test_the_convolution_has_equal_bits_for_every_cut():
    generator = torch.Generator().manual_seed(0)
    for D, W, T in ((96, 4, 57), (20, 2, 33), (7, 3, 40)):
        x, weight = (torch.randn(*shape, generator=generator).to(DEVICE, torch.bfloat16)
                     for shape in ((1, T, D), (D, W)))
        for activation in (None, "silu"):
            whole, _ = libkda.short_conv(x, weight, activation=activation)
            pool = torch.full((3, D, W), torch.nan, device=DEVICE, dtype=torch.bfloat16)
            state, begin, found = None, 0, []
            for piece in x.split([1, 16, 1, 2, 9, 1, T - 30], dim=1):
                slot = torch.tensor([0, 2], device=DEVICE)
                both = torch.cat([torch.full_like(piece, torch.nan), piece])  # another sequence in the batch
                y = libkda.short_conv_update(both, pool, weight, activation=activation, indices=slot,
                                             has_state=torch.tensor([begin > 0] * 2, device=DEVICE))
                again, state = libkda.short_conv(piece, weight, activation=activation, initial_state=state,
                                                 output_final_state=True)
                assert torch.equal(y[1:], again)
                found.append(again)
                begin += piece.shape[1]
            assert torch.equal(torch.cat(found, dim=1), whole)


def test_the_norm_has_equal_bits_for_every_cut():
    generator = torch.Generator().manual_seed(0)
    for D in (128, 64, 20):
        x, gate = (torch.randn(300, 4, D, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(2))
        weight = torch.randn(D, generator=generator).to(DEVICE)
        for activation in ("sigmoid", "silu"):
            whole = libkda.gated_rms_norm(x, gate, weight, activation=activation)
            pieces = [1, 2, 1, 31, 64, 1, 200]
            found = [libkda.gated_rms_norm(*part, weight, activation=activation)
                     for part in zip(x.split(pieces), gate.split(pieces))]
            assert torch.equal(torch.cat(found), whole)
            into = torch.empty_like(whole)
            libkda.gated_rms_norm(x.clone(), gate.clone(), weight, activation=activation, out=into)
            assert torch.equal(into, whole)


def call(states, **changed):
    x = torch.zeros(1, 1, 2, 16, dtype=torch.bfloat16)
    arguments = dict(q=x, k=x, v=x, g=x.float(), beta=x[..., 0], slots=torch.tensor([0]), positions=torch.tensor([0]))
    return states.decode(**arguments | changed)


@pytest.mark.skipif(CUDA, reason="of the CPU")
def test_what_does_not_fit_is_refused():
    states = rollout.States(2, 2, 2, 16, 16, drafts=1)
    x = torch.zeros(1, 1, 2, 16)
    with pytest.raises(TypeError, match="k must be torch.bfloat16"):
        call(states, k=x)
    with pytest.raises(ValueError, match="positions: entry 0 = 17; slot 0 has its state behind 0 tokens"):
        call(states, positions=torch.tensor([17]))
    with pytest.raises(ValueError, match=r"q must have 1 to 2 tokens a sequence \(1 \+ drafts\), got 3"):
        call(states, **{name: torch.zeros(1, 3, 2, 16, dtype=torch.bfloat16) for name in ("q", "k", "v")},
             g=torch.zeros(1, 3, 2, 16), beta=torch.zeros(1, 3, 2, dtype=torch.bfloat16))
    assert not states.boundary.any()


@pytest.mark.skipif(CUDA, reason="of the CPU")
def test_lengths_on_the_host_are_refused_where_they_do_not_end_with_the_rows():
    states = rollout.States(2, 2, 2, 16, 16)
    x = torch.zeros(1, 4, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="cu_seqlens"):
        states.prefill(x, x, x, x.float(), x[..., 0], torch.tensor([0]), torch.tensor([0]),
                       cu_seqlens=torch.tensor([0, 3]))


@pytest.mark.parametrize("capability, changed, message", (
    ((8, 0), {}, r"device must be a CPU or a Hopper GPU \(sm_90\).*, got sm_80"),
    ((9, 0), dict(g=torch.bfloat16), "gate_dtype must be torch.float32 on a GPU"),
    ((9, 0), dict(k=torch.float16), "dtype must be torch.bfloat16 on a GPU"),
    ((9, 0), dict(V=64), "K and V must be 64 both, or 128, on a GPU, got 128 and 64")))
def test_what_a_gpu_does_not_serve_is_refused(monkeypatch, capability, changed, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    made = dict(k=torch.bfloat16, g=torch.float32, V=128) | changed
    pool = types.SimpleNamespace(is_cuda=True, device="cuda", shape=(2, 1, 1, 128, made["V"]))
    states = types.SimpleNamespace(pool=pool, k=torch.empty(0, dtype=made["k"]),
                                   g=torch.empty(0, dtype=made["g"]))
    with pytest.raises(ValueError, match=message):
        rollout._expect_served(states)


def test_a_decode_has_final_states():
    x, pool = torch.zeros(1, 1, 2, 16), torch.zeros(1, 2, 16, 16)
    with pytest.raises(ValueError, match="a decode writes its final states"):
        torch.ops.libkda.update(x, x, x, x, x[..., 0], torch.empty_like(x), pool, None, None, None, None, None, None,
                                True, 0, 0, -5.0, 1.0, False, False, final_states=False)
