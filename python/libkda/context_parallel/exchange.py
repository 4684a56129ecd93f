# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other, so that no rank waits for one that has an error."""
from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

HEADER = 16  # integers that the first call of a context exchanges


def waited(what, work):
    try:
        return work()
    except RuntimeError as error:
        raise RuntimeError(f"context parallelism: {what} failed. A rank has ended, or has not made this call "
                           f"within the group's timeout: {(str(error) or type(error).__name__).splitlines()[0]}"
                           ) from error


def gather_integers(group, ranks, row, device):
    """Waits for them."""
    mine = torch.tensor(row, dtype=torch.int64, device=device)
    rows = torch.empty(ranks * len(row), dtype=torch.int64, device=device)
    waited("the first exchange of a context", lambda: dist.all_gather_into_tensor(rows, mine, group=group))
    return rows.view(ranks, len(row)).tolist()


class AllGather:
    """One row of every rank, the same number of floats, the last of them a flag: a rank that cannot go on says so, and
    no rank waits for it. Nothing is sent where there is nothing to tell. Nobody waits for a GPU to look at flags: there
    such a rank sends NaN, and what nobody writes is anything. `own`: rows of this rank's own behind those of all
    ranks."""

    def __init__(self, context, floats, exchanges, device, dtype=torch.float32, own=0):
        self.context, self.exchanges = context, exchanges and context.ranks > 1
        ranks, rank = (context.ranks, context.rank) if self.exchanges else (1, 0)
        #: [ranks + own, floats]; without an exchange one row of a rank
        self.rows = torch.empty(ranks + own, floats, dtype=dtype, device=device)
        self.mine = self.rows[rank]
        if device.type == "cpu":
            self.mine.zero_()
        self._received = self.rows[:ranks] if own else self.rows
        self._started, self._work = False, None

    def start(self):
        self._started = True
        if self.exchanges:
            self._work = waited("an exchange", lambda: dist.all_gather_into_tensor(
                self._received.view(-1), self.mine, group=self.context.group, async_op=True))

    def finish(self):
        """[ranks, floats - 1]"""
        if self.exchanges:
            waited("an exchange", self._work.wait)
            if self.rows.device.type == "cpu":
                _expect_no_flag(self._received[:, -1])
        return self._received[:, :-1]

    def refuse(self):
        """Tells the others that this rank has an error, which is raised here: they may be gone."""
        if not self.exchanges:
            return
        try:
            if not self._started:
                self.mine.fill_(float("nan"))
                self.mine[-1] = 1
                self.start()
            if self._work is not None:
                self._work.wait()
        except RuntimeError:
            pass


def _expect_no_flag(flags):
    refused = flags.nonzero().flatten().tolist()
    if refused:
        raise RuntimeError(f"context parallelism: rank {refused[0]} could not take part in this call; its own "
                           f"error says why")


def agree(context, purpose, x, sizes_of, refuse):
    """The sizes of a call, which `sizes_of` finds in the arguments of this rank, and which are the same on every rank.
    The first call asks the others, where tensor `x` is. Later ones know what is exchanged: `refuse(sizes)` tells them
    there."""
    known = context._agreed.get(purpose)
    error, sizes = None, ()
    try:
        sizes = sizes_of()
        if known is not None and sizes != known:
            raise ValueError(f"cp_context is of calls with {purpose} = {known}, got {sizes}; a copy serves others")
    except Exception as refusal:
        error = refusal
    if known is None and context.ranks > 1:
        _first_call(context, purpose, x, sizes, error)
    elif error is not None and known is not None:
        refuse(known)
    if error is not None:
        raise error
    context._agreed[purpose] = sizes
    return sizes


def _first_call(context, purpose, x, sizes, error):
    """Raises on every rank what does not fit on one; this rank's own error is the caller's."""
    table = (context.tile, context.final_states)
    if not context._of_fla:
        table += (context.cu_seqlens_whole, context.fragments)
    digest = int.from_bytes(hashlib.sha256(repr(table).encode()).digest()[:7], "big")
    row = [int(error is not None), digest, *sizes]
    try:
        rows = gather_integers(context.group, context.ranks, row + [0] * (HEADER - len(row)),
                               device_of(context.group, x))
    except RuntimeError:
        if error is None:
            raise
        return
    if error is not None:
        return
    for rank, other in enumerate(rows):
        if other[0]:
            raise ValueError(f"cp_context: rank {rank} was given tensors that do not fit; its own error says which")
        if other[1] != digest:
            raise ValueError(f"cp_context: ranks {context.rank} and {rank} were given different contexts (cu_seqlens, "
                             f"fragments, tile or final_states)")
        if tuple(other[2:2 + len(sizes)]) != sizes:
            raise ValueError(f"cp_context: rank {rank} has {purpose} = {tuple(other[2:2 + len(sizes)])}, and rank "
                             f"{context.rank} {sizes}")


def _devices_of(group):
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return ("cpu", "cuda")
    return tuple(sorted(device.type for device in (dist.group.WORLD if group is None else group)._device_types))


def device_of(group, x):
    """Where ranks tell each other integers: where `x` is, if the group has a way there."""
    device = x.device if isinstance(x, torch.Tensor) else torch.device("cpu")
    devices = _devices_of(group)
    return device if device.type in devices else torch.device(devices[0])


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
