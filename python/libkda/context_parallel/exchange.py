# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other, so that no rank waits for one that has an error."""
from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

HEADER = 16  # integers that the first call of a context exchanges
_REFUSED = 1  # of a flag; others are of options, and at least 2


def waited(what, work):
    try:
        return work()
    except RuntimeError as error:
        raise RuntimeError(f"context parallelism: {what} failed. A rank has ended, or has not made this call "
                           f"within the group's timeout: {(str(error) or type(error).__name__).splitlines()[0]}"
                           ) from error


def gather_integers(group, ranks, row):
    """Waits for them."""
    device = _place_of_integers(group)
    mine = torch.tensor(row, dtype=torch.int64, device=device)
    rows = torch.empty(ranks * len(row), dtype=torch.int64, device=device)
    waited("the first exchange of a context", lambda: dist.all_gather_into_tensor(rows, mine, group=group))
    return rows.view(ranks, len(row)).tolist()


class AllGather:
    """One row of every rank, the same number of floats, the last of them a flag: a rank that cannot go on says so, and
    no rank waits for it. Nothing is sent where there is nothing to tell. Nobody waits for a GPU to look at flags: there
    such a rank sends NaN, and what nobody writes is anything. `own`: rows of this rank's own behind those of all
    ranks."""

    def __init__(self, agreed, floats, exchanges, dtype=torch.float32, own=0):
        context, device = agreed.context, agreed.device
        self.agreed, self.context, self.exchanges = agreed, context, exchanges and context.ranks > 1
        ranks, rank = (context.ranks, context.rank) if self.exchanges else (1, 0)
        #: [ranks + own, floats]; without an exchange one row of a rank
        self.rows = torch.empty(ranks + own, floats, dtype=dtype, device=device)
        self.mine = self.rows[rank]
        if device.type == "cpu":
            self.mine.zero_()
        self._received = self.rows[:ranks] if own else self.rows
        self._started, self._work = False, None

    def start(self):
        if self.rows.device.type == "cpu":
            self.mine[-1] = _flag_of(self.agreed.digest, self.rows.dtype)
        self._start()

    def _start(self):
        self._started = True
        if self.exchanges:
            self._work = waited("an exchange", lambda: dist.all_gather_into_tensor(
                self._received.view(-1), self.mine, group=self.context.group, async_op=True))

    def finish(self):
        """[ranks, floats - 1]"""
        if self.exchanges:
            waited("an exchange", self._work.wait)
            if self.rows.device.type == "cpu":
                self._expect_one_flag(self._received[:, -1].tolist())
        return self._received[:, :-1]

    def _expect_one_flag(self, flags):
        """All ranks see the same flags, so all of them refuse, or ask each other which option it is."""
        if _REFUSED in flags:
            raise RuntimeError(f"context parallelism: rank {flags.index(_REFUSED)} could not take part in this call; "
                               f"its own error says why")
        if any(flag != flags[0] for flag in flags):
            tell_difference(self.context, self.agreed.options)

    def refuse(self):
        """Tells the others that this rank has an error, which is raised here: they may be gone."""
        if not self.exchanges:
            return
        try:
            if not self._started:
                self.mine.fill_(float("nan"))
                self.mine[-1] = _REFUSED
                self._start()
            if self._work is not None:
                self._work.wait()
        except RuntimeError:
            pass


def _digest_of(x):
    return int.from_bytes(hashlib.sha256(repr(x).encode()).digest()[:7], "big")


def _flag_of(digest, dtype):
    """An integer that `dtype` holds."""
    most = {torch.float32: 2**24, torch.float16: 2**11, torch.bfloat16: 2**8}[dtype]
    return digest % (most - _REFUSED) + _REFUSED + 1


class Agreed(NamedTuple):
    """What a call has in common with those of the other ranks."""
    context: Any
    sizes: tuple[int, ...]  # of a row that is exchanged
    options: dict[str, Any]  # by the names of the caller's arguments
    digest: int  # of the options
    device: torch.device

    @classmethod
    def of(cls, context, sizes, options, device):
        options = dict(options, device=device.type)
        return cls(context, sizes, options, _digest_of(options), device)


def agree(context, purpose, look, row_of):
    """look(): the Agreed of this rank's arguments; what it raises is known to all ranks. The first call with a purpose
    asks the others. Later ones know what is exchanged: `row_of(agreed)` is an AllGather that says there that this rank
    cannot go on."""
    known = context._agreed.get(purpose)
    error = found = None
    try:
        found = look()
        if known is not None:
            _expect_known(purpose, known, found)
        elif found.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("cp_context: a CUDA graph cannot hold the first call, in which ranks compare what they "
                               "were given; make one before the capture")
    except Exception as refusal:
        error = refusal
    if known is None and context.ranks > 1:
        _first_call(context, purpose, found, error)
    elif error is not None and known is not None:
        row_of(known).refuse()
    if error is not None:
        raise error
    context._agreed.setdefault(purpose, found)
    return found


def _expect_known(purpose, known, found):
    """That a later call exchanges rows of the same size at the same place."""
    for what, before, now in ((purpose, known.sizes, found.sizes),
                              ("device", known.device.type, found.device.type)):
        if before != now:
            raise ValueError(f"cp_context is of calls with {what} = {before}, got {now}; a copy serves others")


def _first_call(context, purpose, found, error):
    """Raises on every rank what does not fit on one; this rank's own error is the caller's."""
    table = (context.tile, context.final_states)
    if not context._of_fla:
        table += (context.cu_seqlens_whole, context.fragments)
    sizes, options = (found.sizes, found.digest) if error is None else ((), 0)
    row = [int(error is not None), _digest_of(table), options, *sizes]
    try:
        rows = gather_integers(context.group, context.ranks, row + [0] * (HEADER - len(row)))
    except RuntimeError:
        if error is None:
            raise
        return
    for rank, other in enumerate(rows):
        if other[0] and error is None:
            raise ValueError(f"cp_context: rank {rank} was given arguments that do not fit; its own error says which")
    if any(other[0] for other in rows):
        return
    for rank, other in enumerate(rows):
        if other[1] != row[1]:
            raise ValueError(f"cp_context: ranks {context.rank} and {rank} were given different contexts (cu_seqlens, "
                             f"fragments, tile or final_states)")
    for rank, other in enumerate(rows):
        theirs = tuple(other[3:3 + len(sizes)])
        if theirs != sizes:
            raise ValueError(f"cp_context: rank {rank} has {purpose} = {theirs}, and rank {context.rank} {sizes}")
    if any(other[2:] != rows[0][2:] for other in rows):
        tell_difference(context, found.options)


def tell_difference(context, options):
    """Raises which option this rank has otherwise than another, once they have told each other all of them. Every rank
    calls it."""
    mine = json.dumps({name: str(value) for name, value in options.items()}).encode()
    longest = max(length for length, in gather_integers(context.group, context.ranks, [len(mine)]))
    rows = gather_integers(context.group, context.ranks, list(mine.ljust(longest)))
    mine = json.loads(mine)
    for rank, row in enumerate(rows):
        theirs = json.loads(bytes(row))
        for name in dict.fromkeys((*mine, *theirs)):
            if theirs.get(name) != mine.get(name):
                raise ValueError(f"cp_context: rank {rank} was called with {name} = {theirs.get(name)}, and rank "
                                 f"{context.rank} with {mine.get(name)}")
    raise ValueError("cp_context: the options of this call differ between other ranks; their errors say which")


def _devices_of(group):
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return ("cpu", "cuda")
    return tuple(sorted(device.type for device in (dist.group.WORLD if group is None else group)._device_types))


def _place_of_integers(group):
    """Where ranks tell each other integers. The group alone decides, since a rank may have been given tensors that are
    elsewhere, or none."""
    devices = _devices_of(group)
    return torch.device("cpu" if "cpu" in devices else devices[0])


def expect_device(group, name, x):
    """That `x` is where the group can send from, and where libkda computes."""
    devices = [device for device in _devices_of(group) if device in ("cpu", "cuda")]
    if x.device.type not in devices:
        raise ValueError(f"{name} is on {x.device}, and the group of cp_context is for {' and '.join(devices)} tensors")


def check_place(context, name, x):
    expect_device(context.group, name, x)
    if x.shape[0] != 1:
        raise ValueError(f"{name}: the batch size must be 1 with cp_context, got {x.shape[0]}")
    if x.shape[1] != context.num_tokens:
        raise ValueError(f"{name} has {x.shape[1]} tokens, and cp_context has {context.num_tokens} on rank "
                         f"{context.rank}")
