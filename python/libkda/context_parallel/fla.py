# SPDX-License-Identifier: Apache-2.0
"""FLA's contexts (fla.ops.cp), by their fields: FLA is not imported."""
from __future__ import annotations

from typing import Any

import torch

from .contexts import Context, group_of, lengths_of
from .exchange import HEADER, expect_device, gather_integers


def _parts_of(fla):
    """Local lengths of each part of an FLACPContext, and whether its first sequence comes from before and its last one
    goes on."""
    lengths = fla.cu_seqlens_cpu if fla.cu_seqlens_cpu is not None else fla.cu_seqlens
    cu = lengths_of(lengths)
    if fla.layout == "contiguous":
        return [(cu, not fla.is_first_rank, not fla.is_last_rank)]
    if fla.layout != "zigzag":
        raise ValueError(f"cp_context: layout must be 'contiguous' or 'zigzag', got {fla.layout!r}")
    middle = fla.front_num_seqs
    front, back = cu[:middle + 1], [x - cu[middle] for x in cu[middle:]]
    return [(part, not fla.is_first_by_part[i], not fla.is_last_by_part[i]) for i, part in enumerate((front, back))]


def _told_parts(fla, name, x):
    """Parts of this rank, and what each rank says about its own. A rank that has an error tells the others."""
    rank, ranks = group_of(fla.group)
    parts, error = [], None
    try:
        expect_device(fla.group, name, x)
        parts = _parts_of(fla)
    except Exception as refusal:
        error = refusal
    header = [number for cu, before, after in parts for number in (cu[-1], before, after, len(cu) - 1)]
    row = [len(parts), *header, *[0] * (HEADER - 1 - len(header))]
    try:
        rows = gather_integers(fla.group, ranks, row) if ranks > 1 else [row]
    except RuntimeError:
        if error is None:
            raise
    if error is not None:
        raise error
    for other, row in enumerate(rows):
        if row[0] == 0:
            raise ValueError(f"cp_context: rank {other} was given arguments that do not fit; its own error says which")
        if row[0] != len(parts):
            raise ValueError(f"cp_context: ranks {rank} and {other} have contexts of different layouts")
    return parts, rows


def from_fla(fla: Any, name: str, x: torch.Tensor) -> Context:
    """The Context of an FLACPContext (fla.ops.cp.build_cp_context), for a call with tensor `x`. It knows its own
    sequences only: the ranks tell each other, once, which of them go on. Sequences that other ranks have whole are not
    counted."""
    known = getattr(fla, "_libkda_context", None)
    if known is not None:
        return known
    rank, ranks = group_of(fla.group)
    parts, rows = _told_parts(fla, name, x)
    order = [(r, 0) for r in range(ranks)] + [(r, 1) for r in reversed(range(ranks))] * (len(parts) - 1)
    cu_seqlens = [0]
    fragments: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    begin = 0
    for i, (r, part) in enumerate(order):
        tokens, before, _, sequences = rows[r][1 + 4 * part:5 + 4 * part]
        if i and not before and cu_seqlens[-1] != begin:
            cu_seqlens.append(begin)
        inner = parts[part][0][1:-1] if r == rank else [1] if sequences > 1 else []
        cu_seqlens += [begin + x for x in inner]
        fragments[r].append((begin, begin + tokens))
        begin += tokens
    if begin > cu_seqlens[-1]:
        cu_seqlens.append(begin)
    context = Context(cu_seqlens, fragments, fla.group)
    context._of_fla = True
    fla._libkda_context = context
    return context


def context_of(context: Any, name: str, x: Any) -> Context:
    """A Context, or that of an FLACPContext, for a call with tensor `x`."""
    if isinstance(context, Context):
        return context
    if all(hasattr(context, name) for name in ("group", "cu_seqlens", "layout")):
        return from_fla(context, name, x)
    raise TypeError(f"cp_context must be a libkda.context_parallel.Context or an FLACPContext, got "
                    f"{type(context).__name__}")
