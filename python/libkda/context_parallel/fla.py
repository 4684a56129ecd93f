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


def from_fla(fla: Any, device: torch.device) -> Context:
    """The Context of an FLACPContext (fla.ops.cp.build_cp_context). It knows its own sequences only: the ranks tell
    each other, once and on `device`, which of them go on. Sequences that other ranks have whole are not counted."""
    known = getattr(fla, "_libkda_context", None)
    if known is not None:
        return known
    parts = _parts_of(fla)
    rank, ranks = group_of(fla.group)
    header = [number for cu, before, after in parts for number in (cu[-1], before, after, len(cu) - 1)]
    rows = gather_integers(fla.group, ranks, [len(parts), *header, *[0] * (HEADER - 1 - len(header))], device)
    if any(row[0] != len(parts) for row in rows):
        raise ValueError("cp_context: ranks have contexts of different layouts")
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
        expect_device(context.group, name, x)  # before ranks ask each other there
        return from_fla(context, x.device)
    raise TypeError(f"cp_context must be a libkda.context_parallel.Context or an FLACPContext, got "
                    f"{type(context).__name__}")
