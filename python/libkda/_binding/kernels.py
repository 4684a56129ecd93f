# SPDX-License-Identifier: Apache-2.0
"""What the library decides of a call, by what a traced tensor knows: shapes, types, strides and places in a storage.

A call that is not traced asks the library itself, where it can. tests/test_kernels.py compares each function here with
what the library says."""
from __future__ import annotations

import torch

from ..ops import KEEP_CHUNKS, KEEP_NOTHING, KEEP_STATES

_CHUNK = 64  # tokens


def saved_bytes(q: torch.Tensor, v: torch.Tensor, keep: int, packed: int) -> int:
    """Room for what a forward keeps: room_for_saved() of csrc/torch_backward.cpp. packed: sequences of cu_seqlens, 0
    without."""
    if keep == KEEP_NOTHING:
        return 0
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    if q.is_cuda:
        chunks = T // _CHUNK + packed if packed else B * ((T + _CHUNK - 1) // _CHUNK)
        return 128 + chunks * HV * (K + _CHUNK) * V * 2
    return 128 + B * T // (KEEP_STATES if keep == KEEP_CHUNKS else keep) * HV * K * V * 4


def keeps_chunks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, sequences: int, head_map: int,
                 card) -> bool:
    """Whether a GPU has kernels of the forward that keep states and errors of chunks, and the call fills enough of it:
    decline(), decline_keep() and defer_keep() of src/cuda/fused/backend.cpp. card: of get_device_properties()."""
    rows, K = (q, k, v, g), q.shape[-1]
    if (card.major, card.minor) != (9, 0) or K not in (64, 128) or v.shape[-1] != K:
        return False
    if any(x.dtype != torch.bfloat16 for x in rows[:3]) or g.dtype not in (torch.bfloat16, torch.float32):
        return False
    if head_map or g.dim() != 4 or any(x.stride(-1) != 1 for x in rows):
        return False  # one gate a head has a stride of 0
    if sequences * v.shape[2] * (K // 64) * 4 < card.multi_processor_count * 3:
        return False
    return all(place * x.element_size() % 16 == 0 for x in rows for place in (x.storage_offset(), *x.stride()[:-1]))


def has_tensor_cores(q: object, k: object, v: object) -> bool:
    """Whether the backward of such rows on a GPU is that of the tensor cores (src/cuda/staged/backward/backend.cpp);
    it has as fast a one for no others. Where rows lie is not looked at: it is on 16 bytes in every model."""
    rows = [x for x in (q, k, v) if isinstance(x, torch.Tensor) and x.dim() == 4 and x.dtype is torch.bfloat16]
    return len(rows) == 3 and all(x.shape[-1] % 8 == 0 for x in rows) and rows[0].shape[-1] <= 128


def trains_fp16(q: object, k: object, v: object, modes: dict[str, object]) -> bool:
    """Whether a layer's rows in fp16 have a backward on the tensor cores of Hopper: decline_fp16_rows() and
    decline_fp16_gradients() of src/cuda/staged/backward/backend.cpp. modes: the arguments of chunk_kda."""
    rows = [x for x in (q, k, v) if isinstance(x, torch.Tensor) and x.dim() == 4 and x.dtype is torch.float16]
    if len(rows) < 3 or any(x.shape[-1] != 128 for x in rows) or not rows[0].is_cuda:
        return False
    if torch.cuda.get_device_capability(rows[0].device) != (9, 0):
        return False
    if not all(modes.get(f"use_{name}_in_kernel") for name in ("gate", "qk_l2norm", "beta_sigmoid")):
        return False
    g, state, bound, scale = (modes.get(name) for name in ("g", "initial_state", "lower_bound", "scale"))
    if isinstance(state, torch.Tensor) and state.requires_grad or not isinstance(g, torch.Tensor) or g.dim() != 4:
        return False
    return (bound is None or bound >= -5.19) and (not scale or 2**-8 <= abs(scale) <= 2**4)


def is_one_kernel(state: torch.Tensor) -> bool:
    """Whether one kernel has a decode step of a layer on this pool: decline_fused_decode() of src/run/check_layer.cpp.
    Its heads must be dense and lie on 16 bytes."""
    if state.shape[-1] != 128:
        return False
    pieces = 16 // state.element_size()
    # torch.compile knows no address while it traces.
    start = 0 if torch.compiler.is_compiling() else state.storage_offset()
    steps = [stride for stride, size in zip(state.stride()[:2], state.shape) if size > 1]
    return state.stride()[2:] == (128, 1) and all(place % pieces == 0 for place in (start, *steps))
