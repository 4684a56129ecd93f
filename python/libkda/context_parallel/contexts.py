# SPDX-License-Identifier: Apache-2.0
"""Which tokens are where, and what follows from it: which spans need a map, and how maps are folded."""
from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._binding.rules import integer, number

_NONE, _ZERO = -1, -2  # of a step of a fold


class Span(NamedTuple):
    """Tokens [begin, end) of the whole, of one sequence, after each other on one rank."""
    sequence: int
    begin: int
    end: int
    rank: int
    place: int  # among the spans of its rank
    first: bool  # begins its sequence
    last: bool  # ends it


class Exchange(NamedTuple):
    """What one call costs beside the kernels, for a rank."""
    forward_maps: int  # spans of this rank whose map is computed
    backward_maps: int
    forward_bytes: int  # that a rank sends; it receives (ranks - 1) times as many
    backward_bytes: int
    seconds: float | None  # of both directions, at the given bandwidth


def lengths_of(cu_seqlens):
    if isinstance(cu_seqlens, torch.Tensor):
        if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
            raise TypeError(f"cu_seqlens must be a list of integers, or int32 or int64 [N + 1], got {cu_seqlens.dtype} "
                            f"{list(cu_seqlens.shape)}")
        cu_seqlens = cu_seqlens.tolist()
    lengths = [integer("cu_seqlens", x, 0, 2**62) for x in cu_seqlens]
    if not lengths or lengths[0] != 0:
        raise ValueError(f"cu_seqlens must start with 0, got {lengths[:1]}")
    for i in range(1, len(lengths)):
        if lengths[i] < lengths[i - 1]:
            raise ValueError(f"cu_seqlens: entry {i} = {lengths[i]} is below entry {i - 1} = {lengths[i - 1]}")
    return lengths


def _table(fragments, tokens):
    """Fragments as lists of pairs, which must be all tokens of the whole, each once."""
    table = []
    for rank, row in enumerate(fragments):
        pairs = []
        for pair in row:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise TypeError(f"fragments[{rank}] must be pairs (begin, end) of tokens, got {pair!r}")
            begin, end = (integer(f"fragments[{rank}]", x, 0, 2**62) for x in pair)
            if begin > end:
                raise ValueError(f"fragments[{rank}]: {(begin, end)} ends before it begins")
            if begin < end:
                pairs.append((begin, end))
        table.append(pairs)
    at = 0
    for begin, end, rank in sorted((*pair, rank) for rank, row in enumerate(table) for pair in row):
        if begin > at:
            raise ValueError(f"fragments: tokens {at} to {begin} are on no rank")
        if begin < at:
            raise ValueError(f"fragments[{rank}]: {(begin, end)} has tokens from {begin} on, which another fragment "
                             f"has too")
        at = end
    if at != tokens:
        raise ValueError(f"fragments end at token {at}, and cu_seqlens at {tokens}")
    return table


def group_of(group):
    """(rank, ranks) of a group; one process where torch.distributed is not in use."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group: this process is not in it")
    return rank, dist.get_world_size(group)


class Context:
    """Which tokens of packed sequences are where.

    cu_seqlens [N + 1]: of the whole, on every rank the same. fragments: for each rank of `group` a list of
    (begin, end), tokens of the whole in the order in which the rank's tensors have them; together all tokens, each
    once; a rank may have none. group: a torch.distributed process group; None: the default one.

    tile, a multiple of 64: one result for every number of ranks. Sequences are cut every `tile` tokens from their own
    start, and the states at the cuts come from a fold of the tiles' maps. Fragments must begin and end at such cuts.
    None: as few maps as there can be.

    final_states "last": a final state is returned by the rank that ends its sequence, rows in the order of `ends`.
    "all": all of them on every rank. Initial states are given for all N sequences, or for those in `begins` alone;
    those of sequences that begin elsewhere are not looked at.

    One context serves calls of one HV, K and V: the first call fixes them. copy() serves others. That call compares all
    options between the ranks too; on CPUs later calls do as well.
    Raises TypeError and ValueError that name the argument, on every rank alike.
    """

    def __init__(self, cu_seqlens: torch.Tensor | Sequence[int], fragments: Iterable[Iterable[tuple[int, int]]],
                 group: Any = None, *, tile: int | None = None, final_states: str = "last"):
        self.group = group
        self.rank, self.ranks = group_of(group)
        self.cu_seqlens_whole = lengths_of(cu_seqlens)
        self.tile = None if tile is None else integer("tile", tile, 64, 2**62)
        if self.tile is not None and self.tile % 64:
            raise ValueError(f"tile must be a multiple of 64 tokens, got {tile}")
        if final_states not in ("last", "all"):
            raise ValueError(f"final_states must be 'last' or 'all', got {final_states!r}")
        self.final_states = final_states
        self.fragments = _table(fragments, self.cu_seqlens_whole[-1])
        if len(self.fragments) != self.ranks:
            raise ValueError(f"fragments are of {len(self.fragments)} ranks, and the group has {self.ranks}")
        self._plan()
        self._agreed: dict[str, Any] = {}  # exchange.Agreed of the first call, by purpose
        self._halos: dict[tuple[int, torch.device], Any] = {}  # by width (convolution.py)
        self._lengths_on: dict[tuple[int, int, torch.device], tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._seen: dict[tuple[Any, ...], Any] = {}  # exchange.Agreed of arguments that were looked at
        self._tables: dict[tuple[str, torch.device], torch.Tensor] = {}
        self._of_fla = False  # then each rank numbers sequences and tokens its own way

    def copy(self) -> Context:
        """The same tokens on the same ranks, for calls of other sizes."""
        other = Context(self.cu_seqlens_whole, self.fragments, self.group, tile=self.tile,
                        final_states=self.final_states)
        other._of_fla = self._of_fla
        return other

    # -- what is where

    def _cuts(self, begin, end):
        """[begin, end) cut where sequences end, and at tiles: (sequence, begin, end)."""
        n = bisect.bisect_right(self.cu_seqlens_whole, begin) - 1
        while begin < end:
            while self.cu_seqlens_whole[n + 1] <= begin:
                n += 1
            stop = min(end, self.cu_seqlens_whole[n + 1])
            if self.tile is not None:
                start = self.cu_seqlens_whole[n]
                if (begin - start) % self.tile:
                    raise ValueError(f"fragments: token {begin} is token {begin - start} of its sequence, which is no "
                                     f"multiple of tile = {self.tile}")
                stop = min(stop, begin + self.tile)
                if stop == end and stop != self.cu_seqlens_whole[n + 1] and (stop - start) % self.tile:
                    raise ValueError(f"fragments: token {stop} is token {stop - start} of its sequence, which is no "
                                     f"multiple of tile = {self.tile}")
            yield n, begin, stop
            begin = stop

    def _plan(self):
        cu, spans = self.cu_seqlens_whole, []
        for rank, row in enumerate(self.fragments):
            here: list[Span] = []
            for fragment in row:
                for n, begin, end in self._cuts(*fragment):
                    if here and self.tile is None and here[-1].sequence == n and here[-1].end == begin:
                        begin = here.pop().begin
                    here.append(Span(n, begin, end, rank, len(here), begin == cu[n], end == cu[n + 1]))
            spans.append(here)
        self.spans = spans[self.rank]
        offsets = [0]
        for span in self.spans:
            offsets.append(offsets[-1] + span.end - span.begin)
        self.offsets = offsets
        self.num_tokens = offsets[-1]
        #: spans of each sequence, in order
        self.chains: list[list[Span]] = [[] for _ in range(len(cu) - 1)]
        for span in sorted((span for row in spans for span in row), key=lambda span: span.begin):
            self.chains[span.sequence].append(span)
        owners = self._owners_of_empty()
        begins = {span.sequence for span in self.spans if span.first} | owners
        ends = {span.sequence for span in self.spans if span.last} | owners
        #: sequences that begin, and that end, on this rank
        self.begins, self.ends = sorted(begins), sorted(ends)
        self.empty = sorted(owners)
        self._forward = _Direction(self, spans, forward=True)
        self._backward = _Direction(self, spans, forward=False)

    def _owners_of_empty(self):
        """Sequences without tokens that are this rank's: those behind a token of it, the first ones before token 0."""
        cu = self.cu_seqlens_whole
        empty = [n for n in range(len(cu) - 1) if cu[n] == cu[n + 1]]
        if cu[-1] == 0:
            return set(empty) if self.rank == 0 else set()
        mine = self.fragments[self.rank]
        return {n for n in empty if any(begin <= max(cu[n] - 1, 0) < end for begin, end in mine)}

    @property
    def num_sequences(self) -> int:
        """N, of the whole."""
        return len(self.cu_seqlens_whole) - 1

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Where the spans of this rank begin in its tensors, int32 [spans + 1]."""
        return torch.tensor(self.offsets, dtype=torch.int32)

    def _lengths(self, first, last, device):
        """cu_seqlens of spans `first` to `last` as a problem of their own, on a device and on the host; made once: the
        host waits for the copy."""
        key = first, last, device
        if key not in self._lengths_on:
            self._lengths_on[key] = _on_device([x - self.offsets[first] for x in self.offsets[first:last + 1]], device)
        return self._lengths_on[key]

    def _no_tokens(self, device):
        """The same of one sequence without tokens."""
        key = 0, 0, device
        if key not in self._lengths_on:
            self._lengths_on[key] = _on_device([0, 0], device)
        return self._lengths_on[key]

    def _table(self, name, device):
        """`begins`, `ends`, or the sequences of the "tokens" of this rank, as a tensor; made once, as above."""
        if (name, device) not in self._tables:
            values = getattr(self, name, None)
            if values is None:
                values = [span.sequence for span in self.spans for _ in range(span.begin, span.end)]
            self._tables[name, device] = torch.tensor(values, dtype=torch.int64).to(device)
        return self._tables[name, device]

    def take(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The tokens of this rank from a tensor of all tokens."""
        parts = [x.narrow(dim, begin, end - begin) for begin, end in self.fragments[self.rank]]
        return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)

    def exchange(self, num_value_heads: int, K: int, V: int, bytes_per_second: float | None = None) -> Exchange:
        """What a forward and its backward exchange, from sizes alone. bytes_per_second: of a rank's link."""
        forward, backward = (direction.row_floats(num_value_heads, K, V) * 4 if direction.exchanges else 0
                             for direction in (self._forward, self._backward))
        seconds = None
        if bytes_per_second is not None:
            bandwidth = number("bytes_per_second", bytes_per_second)
            if bandwidth <= 0:
                raise ValueError(f"bytes_per_second must be above 0, got {bytes_per_second}")
            seconds = (forward + backward) * (self.ranks - 1) / bandwidth
        maps = len(self._forward.mapped), len(self._backward.mapped) + len(self._backward.early)
        return Exchange(maps[0], maps[1], forward, backward, seconds)

    def __repr__(self):
        return (f"Context(rank {self.rank} of {self.ranks}, {self.num_tokens} of {self.cu_seqlens_whole[-1]} tokens, "
                f"{len(self.spans)} spans of {self.num_sequences} sequences)")


def _on_device(cu_seqlens, device):
    cu = torch.tensor(cu_seqlens, dtype=torch.int32)
    return (cu, None) if device.type == "cpu" else (cu.to(device), cu)


def runs_of(indices):
    """Neighbours among sorted indices, as (first, last + 1)."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = runs[-1][0], index + 1
        else:
            runs.append((index, index + 1))
    return runs


class _Direction:
    """Which spans of this rank run before the exchange, which give a map, and how maps are folded.

    A span at the near end of its sequence (the first one of a forward, the last one of a backward) gives the state that
    leaves it. It runs at once, or, where it is most of what the rank has, gives the state early, without outputs: all
    others wait for it. A span in the middle gives its map. A span at the far end gives nothing, unless all ranks
    want final states. Whole sequences run while maps travel.
    """

    def __init__(self, context, spans, forward):
        self.context, self.forward = context, forward
        self.all = context.final_states == "all"
        chains = [chain if forward else chain[::-1] for chain in context.chains]
        # With "all", a backward does not know before the exchange what final states get.
        exact = forward or not self.all
        self.at_once, self.early, self.mapped, self.meanwhile, self.after = [], [], [], [], []
        shared: list[list[Span]] = [[] for _ in range(context.ranks)]
        private = []
        for chain in chains:
            waited_for = any(span.rank != chain[0].rank for span in chain)
            crosses = self.all and forward or waited_for
            for j, span in enumerate(chain):
                gives = j + 1 < len(chain) or self.all and forward
                if gives:
                    shared[span.rank].append(span) if crosses else private.append(span)
                if span.rank != context.rank:
                    continue
                if len(chain) == 1 and not gives and exact:
                    self.meanwhile.append(span.place)
                elif j == 0 and exact and waited_for and context.tile is None and (
                        2 * (span.end - span.begin) > context.num_tokens):
                    self.early.append(span.place)
                    self.after.append(span.place)
                elif j == 0 and exact:
                    self.at_once.append(span.place)
                else:
                    self.after.append(span.place)
                    if gives:
                        self.mapped.append(span.place)
        self.rows = max(len(row) for row in shared)  # of maps that a rank sends
        # With "all", the states of sequences without tokens; in a backward each rank's gradients of final states.
        self.extra_states = 0
        if self.all:
            self.extra_states = sum(not chain for chain in chains) if forward else context.num_sequences
        self.exchanges = context.ranks > 1 and self.rows + self.extra_states > 0
        slots = {}
        for rank, row in enumerate(shared):
            for slot, span in enumerate(sorted(row, key=lambda span: span.place)):
                slots[span.rank, span.place] = rank * self.rows + slot
        self.shared_slots = {index: slot - context.rank * self.rows
                             for (rank, index), slot in slots.items() if rank == context.rank}
        # Maps that stay here lie behind the shared ones, in rows of the same size (exchange.AllGather.rows).
        self.maps_per_row = max(self.rows, 1)
        mine = [span for span in private if span.rank == context.rank]
        self.own_rows = -(-len(mine) // self.maps_per_row)
        self.keeps_maps = bool(private)  # on some rank
        base = (context.ranks if self.exchanges else 1) * self.maps_per_row
        self.private_slots = {span.place: base + i for i, span in enumerate(mine)}
        slots.update({(span.rank, span.place): base + i for i, span in enumerate(mine)})
        self.steps = torch.tensor(self._steps(chains, slots, exact), dtype=torch.int64).view(-1, 3)
        #: places of states that the fold fills
        self.stored = {store for _, _, store in self.steps.tolist() if store != _NONE}
        self._steps_on: dict[torch.device, torch.Tensor] = {}
        for indices in (self.at_once, self.early, self.mapped, self.meanwhile, self.after):
            indices.sort()

    def steps_on(self, device):
        """The steps in the memory of a GPU, made once: the host waits for the copy. None on a CPU."""
        if device.type == "cpu":
            return None
        if device not in self._steps_on:
            self._steps_on[device] = self.steps.to(device)
        return self._steps_on[device]

    def _steps(self, chains, slots, exact):
        """(start, map, store): a state before each span of this rank but the exact ones, and with "all" behind each
        sequence."""
        context, steps = self.context, []
        for n, chain in enumerate(chains):
            wanted = [j for j, span in enumerate(chain) if span.rank == context.rank and (j > 0 or not exact)]
            final = self.all and self.forward
            if not chain or not wanted and not final:
                continue
            stores = {j: chain[j].place for j in wanted}
            start = _ZERO if exact else n
            if not exact:
                steps.append((start, _NONE, stores.get(0, _NONE)))
                start = _NONE
            for j in range(len(chain) if final else max(wanted)):
                store = stores.get(j + 1, _NONE)
                if final and j + 1 == len(chain):
                    store = len(context.spans) + n
                steps.append((start, slots[chain[j].rank, chain[j].place], store))
                start = _NONE
        return steps

    def row_floats(self, HV, K, V):
        """What a rank sends: maps, states, and a flag, which is last; maps of all rows are aligned alike."""
        floats = self.rows * HV * K * (K + V) + self.extra_states * HV * K * V + 1
        if self.keeps_maps:
            floats = max(floats, HV * K * (K + V))
        return floats + -floats % 4


def _borders(cu, parts, tile):
    """parts + 1 tokens of the whole, as even as can be; at cuts of tiles if there are any."""
    borders = [cu[-1] * i // parts for i in range(parts + 1)]
    if tile is None:
        return borders
    for i in range(1, parts):
        n = bisect.bisect_right(cu, borders[i]) - 1
        if n + 1 < len(cu):
            tiles = (borders[i] - cu[n] + tile // 2) // tile
            borders[i] = min(cu[n] + tiles * tile, cu[n + 1])
    return borders


def contiguous(cu_seqlens: torch.Tensor | Sequence[int], group: Any = None, *, tile: int | None = None,
               final_states: str = "last") -> Context:
    """A context in which rank r of W has the r-th of W pieces of the packed tokens, of about one length."""
    cu, (_, ranks) = lengths_of(cu_seqlens), group_of(group)
    borders = _borders(cu, ranks, tile)
    return Context(cu, [[(borders[r], borders[r + 1])] for r in range(ranks)], group, tile=tile,
                   final_states=final_states)


def zigzag(cu_seqlens: torch.Tensor | Sequence[int], group: Any = None, *, tile: int | None = None,
           final_states: str = "last") -> Context:
    """A context in which rank r of W has the pieces r and 2 W - 1 - r of 2 W, as softmax attention wants them."""
    cu, (_, ranks) = lengths_of(cu_seqlens), group_of(group)
    borders = _borders(cu, 2 * ranks, tile)
    piece = lambda i: (borders[i], borders[i + 1])
    return Context(cu, [[piece(r), piece(2 * ranks - 1 - r)] for r in range(ranks)], group, tile=tile,
                   final_states=final_states)
