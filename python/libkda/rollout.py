# SPDX-License-Identifier: Apache-2.0
"""Rollouts with the bits of training: o of every token that is decoded or verified is that of one forward of the whole
sequence, to the last bit, however a sequence is cut into calls and whatever else is in a batch.

    states = libkda.rollout.States(slots, H, HV, K, V, drafts=0, device="cuda")
    o = states.prefill(q, k, v, g, beta, slots, positions, cu_seqlens=cu_seqlens, **gate)   # prompts, or pieces of them
    o = states.decode(q, k, v, g, beta, slots, positions, **gate)                           # the next token of each
    o, _ = libkda.chunk_kda(q, k, v, g, beta, plan_options=libkda.rollout.options(device), **gate)      # training

`gate` is what chunk_kda takes: A_log, dt_bias, scale, lower_bound and the flags that end in _kernel or _eigval.

A slot has the state behind a multiple of 16 tokens and the rows of k, v, g and beta since. A call runs the training
kernel over these rows and its own, from that state, which costs several times a libkda.decode (docs/python.md). It has
fixed shapes and waits for nothing, so a CUDA graph may hold it.

    slots                  [N]   any integers; one below first_slot: none. Nothing is written for it and its o is 0
    positions              [N]   any integers: tokens of the sequence before the call. 0 begins a sequence, whatever its
                                 slot held; sequences begin from a state of zero

Sequences of CUDA tensors need a Hopper GPU, q, k and v in bfloat16, g in float32 and K = V = 64 or 128: with g in
bfloat16 the kernel may have operands in fp16, whose scale is not part of a state. On the CPU all types are served, on
machines of one instruction set. Training has the same types and `options`. There are no gradients here.
"""
from __future__ import annotations

import torch

from ._binding.checks import int32_of
from ._binding.operands import Beside, Slots, head_map_of, modes_of, parameters_of, update
from ._binding.options import Options, number_of
from ._binding.rules import integer

_BOUNDARY = 16


def options(device: torch.device | str) -> Options:
    """The plan_options of a training forward whose bits rollouts on `device` have."""
    on_gpu = torch.device(device).type == "cuda"
    return Options(context_parallel="off", backend="cuda.sm90.fused" if on_gpu else "cpu.blocked")


class States:
    """States and rows of `slots` slots, all of them without tokens: H heads of K channels of q and k, HV of V channels
    of v. drafts: the most drafts of a call. dtype: of k and v, gate_dtype of g, beta_dtype of beta. In bytes, with
    k, v and beta of 16 bits and g of 32: slots * (8 HV K V + (16 + 2 drafts) (2 H K + HV (4 K + 2 V + 2)))."""

    def __init__(self, slots: int, H: int, HV: int, K: int, V: int, *, drafts: int = 0,
                 dtype: torch.dtype = torch.bfloat16, gate_dtype: torch.dtype = torch.float32,
                 beta_dtype: torch.dtype = torch.bfloat16, device: torch.device | str | None = None):
        slots, H, HV, K, V = (integer(name, x, 1, 1 << 30) for name, x in
                              dict(slots=slots, H=H, HV=HV, K=K, V=V).items())
        self.drafts = integer("drafts", drafts, 0, 1 << 10)
        self.rows = R = _BOUNDARY + 2 * self.drafts
        # Two states a slot: a call reads one, and where a block of 16 is complete writes the other.
        self.pool = torch.zeros(2, slots, HV, K, V, device=device)
        # The row of position p is p mod R. Two more slots: one takes what is written for sequences without a slot, and
        # one of zeros stands behind the tokens of a call, since what a slot holds there may be NaN.
        self.k, self.v, self.g, self.beta = (
            torch.zeros(slots + 2, R, *shape, dtype=of, device=device) for shape, of in (
                ((H, K), dtype), ((HV, V), dtype), ((HV, K), gate_dtype), ((HV,), beta_dtype)))
        # Tokens in front of the state, and which of the two it is.
        self.boundary, self.half = torch.zeros(2, slots + 2, dtype=torch.int64, device=device)
        _expect_served(self)
        self.options = options(self.pool.device)

    @torch.no_grad()
    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies whole slots: forks. Both [n], slots that there are."""
        self.pool[:, targets] = self.pool[:, sources]
        for x in (self.k, self.v, self.g, self.beta, self.boundary, self.half):
            x[targets] = x[sources]

    def decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
               slots: torch.Tensor, positions: torch.Tensor, *, first_slot: int = 0, head_map: str | None = None,
               **gate) -> torch.Tensor:
        """The next token of N sequences, then up to `drafts` drafts: q [N, S, H, K] and so on. The next positions are
        positions + 1 + accepted drafts: rows of others are written over."""
        N, S = q.shape[:2]
        _expect_rows(self, q=q, k=k, v=v, g=g, beta=beta)
        if not 1 <= S <= 1 + self.drafts:
            raise ValueError(f"q must have 1 to {1 + self.drafts} tokens a sequence (1 + drafts), got {S}")
        # All rows of the first token's block are sure, so the state may move behind it.
        call = _Call(self, slots, positions, N, 1, first_slot)
        token = torch.arange(S, device=q.device)
        ring = call.slot[:, None], (call.position[:, None] + token) % self.rows
        place = torch.arange(_BOUNDARY - 1 + self.drafts + S, device=q.device)
        slot = torch.where(place < call.behind[:, None] + S, call.slot[:, None], self.pool.shape[1] + 1)
        from_ring = slot * self.rows + (call.begin[:, None] + place) % self.rows
        x = {}
        for name, rows in (("k", k), ("v", v), ("g", g), ("beta", beta)):
            kept = getattr(self, name)
            kept[ring] = rows
            x[name] = kept.flatten(0, 1)[from_ring.flatten()].unflatten(0, from_ring.shape)
        sequence, own = torch.arange(N, device=q.device)[:, None], call.behind[:, None] + token
        # Outputs of rows that are there already are not looked at: any q will do.
        q = q.expand(N, len(place), *q.shape[2:]) if S == 1 else q[
            sequence, (place - call.behind[:, None]).clamp(0, S - 1)]
        o = self._forward(q, x, call, None, head_map, gate)[sequence, own]
        return call.finish(o, call.wrong[:, None, None, None])

    def prefill(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
                slots: torch.Tensor, positions: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None,
                first_slot: int = 0, head_map: str | None = None, **gate) -> torch.Tensor:
        """Any number of tokens, all of them sure: rows [N, T, H, K], or with cu_seqlens [N + 1] packed ones."""
        _expect_rows(self, q=q, k=k, v=v, g=g, beta=beta)
        B, T = q.shape[:2]
        if cu_seqlens is None:
            cu = torch.arange(B + 1, device=q.device) * T
        elif B == 1:
            cu = cu_seqlens.to(q.device, torch.int64)
        else:
            raise ValueError(f"q must have batch 1 with cu_seqlens, got {B}")
        call = _Call(self, slots, positions, len(cu) - 1, cu.diff(), first_slot)
        before = torch.nn.functional.pad(call.behind.cumsum(0), (1, 0))  # rows of slots in front of each sequence's
        packed, N = cu + before, len(call.slot)
        total = B * T + N * (_BOUNDARY - 1 + self.drafts)
        if not q.is_cuda:
            if cu[0] != 0 or cu[-1] != B * T or (cu.diff() < 0).any():
                raise ValueError(f"cu_seqlens must go from 0 to {B * T} without a step back, got {cu.tolist()}")
            total = int(packed[-1])
        row = torch.arange(total, device=q.device)
        n = (torch.searchsorted(packed, row, right=True) - 1).clamp(0, N - 1)
        place = row - packed[n]
        kept_row, is_kept = call.slot[n] * self.rows + (call.begin[n] + place) % self.rows, place < call.behind[n]
        own_row = (row - before[n + 1]).clamp(0, max(B * T - 1, 0))
        x = {}
        for name, rows in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
            own = rows.flatten(0, 1)[own_row]
            if name != "q":
                kept = getattr(self, name)
                own = torch.where(is_kept.view(-1, *[1] * (own.dim() - 1)), kept.flatten(0, 1)[kept_row], own)
            x[name] = own[None]
        o = self._forward(x.pop("q"), x, call, packed, head_map, gate)[0]
        # The rows since the new boundary.
        last = torch.arange(_BOUNDARY - 1, device=q.device)
        left = last < (call.end - call.boundary)[:, None]
        target = torch.where(left, call.slot[:, None], self.pool.shape[1]), (call.boundary[:, None] + last) % self.rows
        source = (packed[:-1] + call.boundary - call.begin)[:, None] + last
        for name in ("k", "v", "g", "beta"):
            if total:
                getattr(self, name)[target] = x[name][0][source.clamp(0, total - 1)]
        own = torch.arange(B * T, device=q.device)
        n = (torch.searchsorted(cu, own, right=True) - 1).clamp(0, N - 1)
        o = o[(own + before[n + 1]).clamp(0, max(total - 1, 0))]
        o = o.masked_fill_((own >= cu[-1])[:, None, None], 0)
        return call.finish(o, call.wrong[n][:, None, None]).view(v.shape)

    def _forward(self, q, x, call, cu_seqlens, head_map, gate):
        """o of all rows. The state behind the call's boundary goes to its slot; there is no final state."""
        o = torch.empty_like(x["v"])
        pool = self.pool.flatten(0, 1)
        beside = Beside(None, None, None, pool, call.offsets, call.to_state, _BOUNDARY)
        slots = Slots(pool, call.from_state, None, call.begin > 0, 0, beside)
        _run(q, *(x[name] for name in ("k", "v", "g", "beta")), o, slots, (cu_seqlens, None), head_map_of(head_map),
             number_of(self.options), **gate)
        self.boundary[call.slot], self.half[call.slot] = call.boundary, call.half
        return o


def _run(q, k, v, g, beta, o, slots, lengths, head_map, options, *, A_log=None, dt_bias=None, scale=None,
         lower_bound=None, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
         use_qk_l2norm_in_kernel=False):
    modes = modes_of(q, scale, lower_bound, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
                     use_qk_l2norm_in_kernel, False)
    update(q, k, v, g, beta, o, slots, parameters_of(A_log, dt_bias, modes), lengths, modes, False, True, head_map,
           options, final_states=False)


def _expect_rows(states, **given):
    """That rows of a call can stand beside those in the slots: a copy would convert or repeat them without a word."""
    for name, x in given.items():
        kept = states.k if name == "q" else getattr(states, name)
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.device != kept.device:
            raise ValueError(f"{name} is on {x.device}, these states are on {kept.device}")
        if x.dtype is not kept.dtype:
            raise TypeError(f"{name} must be {kept.dtype}, as the rows of these states are, got {x.dtype}")
        if x.dim() < 2 or x.shape[:2] != given["q"].shape[:2] or x.shape[2:] != kept.shape[2:]:
            sizes = *given["q"].shape[:2], *kept.shape[2:]
            raise ValueError(f"{name} must have shape {list(sizes)}, got {list(x.shape)}")


def _expect_served(states):
    """That the training kernel has the same bits in pieces. Off Hopper the fused kernel may have operands in fp16, and
    stages have blocks of 64 tokens."""
    if not states.pool.is_cuda:
        return
    capability = torch.cuda.get_device_capability(states.pool.device)
    if capability != (9, 0):
        raise ValueError(f"device must be a CPU or a Hopper GPU (sm_90), whose training kernel runs in blocks of "
                         f"{_BOUNDARY} tokens, got sm_{capability[0]}{capability[1]}")
    for name, given, needed in (("dtype", states.k.dtype, torch.bfloat16),
                                ("gate_dtype", states.g.dtype, torch.float32)):
        if given is not needed:
            raise ValueError(f"{name} must be {needed} on a GPU, where operands have no scale then, got {given}")
    K, V = states.pool.shape[3:]
    if K != V or K not in (64, 128):
        raise ValueError(f"K and V must be 64 both, or 128, on a GPU, got {K} and {V}")


class _Call:
    """Where the sequences of a call are; `sure`: its tokens that the next call cannot take back."""

    def __init__(self, states, slots, positions, N, sure, first_slot):
        slots, position = (int32_of(name, x).long() for name, x in (("slots", slots), ("positions", positions)))
        for name, x in (("slots", slots), ("positions", position)):
            if x.shape != (N,) or N == 0:
                raise ValueError(f"{name} must have shape [{N}], one a sequence and at least one, got {list(x.shape)}")
        none = states.pool.shape[1]
        valid = (slots >= first_slot) & (slots >= 0) & (slots < none)
        slot = torch.where(valid, slots, none)
        begin = torch.where(position == 0, 0, states.boundary[slot])
        behind = position - begin
        self.wrong = valid & ((behind < 0) | (behind >= _BOUNDARY + states.drafts))
        if not slots.is_cuda and bool(self.wrong.any()):
            n = int(self.wrong.nonzero()[0])
            raise ValueError(f"positions: entry {n} = {int(position[n])}; slot {int(slots[n])} has its state behind "
                             f"{int(begin[n])} tokens and takes up to {_BOUNDARY - 1 + states.drafts} more")
        usable = valid & ~self.wrong
        self.slot = torch.where(usable, slot, none)
        self.begin, self.position = torch.where(usable, begin, 0), torch.where(usable, position, 0)
        self.behind, self.end = self.position - self.begin, self.position + sure
        self.boundary = self.end // _BOUNDARY * _BOUNDARY
        self.offsets = (self.boundary - self.begin).int()
        half = states.half[self.slot]
        self.half = torch.where(self.offsets > 0, 1 - half, half)
        self.from_state, self.to_state = (
            torch.where(usable, self.slot + none * x, -1).int() for x in (half, self.half))

    @staticmethod
    def finish(o, wrong):
        """NaN where a GPU finds a position that does not fit. Sequences without a slot have 0 from the kernel."""
        return o.masked_fill_(wrong, torch.nan) if o.is_cuda else o
