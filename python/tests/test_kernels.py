# SPDX-License-Identifier: Apache-2.0
"""The library's decisions as tracing knows them (libkda/_binding/kernels.py) against the library, on random calls."""
import ctypes
import itertools
import random
import types

import pytest
import torch

from libkda import ops
from libkda._binding import kernels, library

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TYPES = {FP32: 0, BF16: 1, FP16: 2}  # of kda.h
UNSUPPORTED, UNAVAILABLE = 2, 3
CPU, CUDA = 0, 1


def described(target, x):
    """`x` as the operators describe it (csrc/describe.hpp); a meta tensor's storage begins on 16 bytes."""
    size, alignment = x.element_size(), 16
    for bytes in [x.storage_offset() * size, *(step * size for step in x.stride()[:-1])]:
        while bytes % alignment:
            alignment //= 2
    target.dtype, target.alignment = TYPES[x.dtype], max(alignment, size)
    target.strides[:x.dim()] = x.stride()
    if x.device.type == "cpu":
        target.data = x.data_ptr()


def problem_of(q, k, v, g, beta, sequences=0, head_map=0):
    """A kda_problem of packed `sequences`, 0: of rows."""
    p = library.new_problem()
    p.batch, p.num_tokens, p.num_heads, p.key_dim = q.shape
    p.num_value_heads, p.value_dim = v.shape[2:]
    p.num_sequences, p.has_cu_seqlens, p.cu_seqlens_dtype = sequences or q.shape[0], bool(sequences), 4
    p.head_map = head_map
    for name, x in dict(q=q, k=k, v=v, g=g, beta=beta, o=v.new_empty(v.shape)).items():
        described(getattr(p, name), x)
    if g.dim() == 3:
        p.g.strides[3], p.g.alignment = 0, g.element_size()
    return p


def options_of(device, capability=90, sms=132, keep=0, backend=None):
    options = library.PlanOptions()
    library.library().kda_plan_options_init_size(ctypes.byref(options), ctypes.c_size_t(ctypes.sizeof(options)))
    options.device_kind, options.compute_capability, options.num_sms = device, capability, sms
    options.keep, options.backend = keep, backend
    return options


def plan_of(problem, options, lengths=None):
    plan = ctypes.c_void_p()
    host = None if lengths is None else (ctypes.c_int64 * len(lengths))(*lengths)
    library.check(library.library().kda_plan_create(ctypes.byref(problem), host, ctypes.byref(options),
                                                    ctypes.byref(plan)))
    return plan


class Draw(random.Random):
    def rarely(self, usual, *others):
        return self.choice(others) if self.random() < 0.07 else usual


def rows(shape, dtype, draw):
    """A meta tensor that lies as callers' do: dense, or a slice of wider rows; rarely as kernels cannot read it."""
    *outer, size = shape
    wider, first = draw.rarely(draw.choice([0, 8]), 2), draw.rarely(draw.choice([0, 8]), 1)
    x = torch.empty(*outer, size + wider + first, dtype=dtype, device="meta")[..., first:first + size]
    return draw.rarely(x, x.transpose(-1, -2).contiguous().transpose(-1, -2))


def test_where_chunks_are_kept():
    draw, lib, found = Draw(1), library.library(), {True: 0, False: 0}
    for _ in range(3000):
        K, B, groups = draw.rarely(draw.choice([64, 128]), 96), draw.choice([1, 2]), draw.choice([1, 1, 2])
        V, H, T = draw.rarely(K, 64, 128), draw.choice([25, 49, 50, 64, 99]), draw.choice([1, 70, 4096])
        HV, sequences = H * groups, draw.choice([0, 1, 3]) if B == 1 else 0
        of_q = draw.rarely(BF16, FP16, FP32)
        q, k = rows((B, T, H, K), of_q, draw), rows((B, T, H, K), draw.rarely(of_q, FP32), draw)
        v = rows((B, T, HV, V), draw.rarely(of_q, FP32), draw)
        of_g, kind = draw.rarely(draw.choice([BF16, FP32]), FP16), draw.rarely("channel", "head", "expanded")
        g = rows((B, T, HV, K) if kind == "channel" else (B, T, HV), of_g, draw)
        if kind == "expanded":
            g = g[..., None].expand(-1, -1, -1, K)
        head_map = draw.rarely(0, 1)
        capability, sms = draw.rarely((90, draw.choice([132, 114])), (80, 108), (100, 148), (120, 188))
        problem = problem_of(q, k, v, g, rows((B, T, HV), of_q, draw), sequences, head_map)
        status = lib.kda_supported(ctypes.byref(problem), ctypes.byref(options_of(CUDA, capability, sms, -1)))
        card = types.SimpleNamespace(major=capability // 10, minor=capability % 10, multi_processor_count=sms)
        answer = kernels.keeps_chunks(q, k, v, g, sequences or B, head_map, card)
        assert answer is (status == 0), (lib.kda_last_error(), q, k, v, g, sequences, head_map, card)
        found[answer] += 1
    assert min(found.values()) > 200, found


def test_the_operator_says_where_chunks_are_kept():
    given = [torch.zeros(1, 5, 2, 8) for _ in range(4)] + [torch.zeros(1, 5, 2)]
    assert ops.keeps_chunks(*given, None, 0)  # a CPU keeps for any call
    assert ops.keeps_chunks(*given, torch.tensor([0, 2, 5]), 1)
    assert not ops.keeps_chunks(given[0].mT.contiguous().mT, *given[1:], None, 0)  # rows that no kernel reads
    with pytest.raises(ValueError, match="head_map must be 0 to 1, got 7$"):
        ops.keeps_chunks(*given, None, 7)


@pytest.mark.parametrize("device, keep", [(CPU, 64), (CPU, 2048), (CPU, -1), (CUDA, -1), (CPU, 0)])
def test_there_is_room_for_what_is_kept(device, keep):
    draw = random.Random(2)
    for _ in range(200):
        K, H, B, T = draw.choice([64, 128]), draw.choice([1, 2]), draw.choice([1, 3]), draw.choice([0, 63, 700, 9000])
        cuts = None if B > 1 or draw.random() < 0.3 else sorted(draw.choices(range(T + 1), k=draw.choice([0, 1, 9])))
        lengths = None if cuts is None else [0, *cuts, T]
        sequences = 0 if lengths is None else len(lengths) - 1
        x = torch.empty(B, T, H, K, dtype=BF16, device="meta")
        plan = plan_of(problem_of(x, x, x, x, x[..., 0].contiguous(), sequences), options_of(device, keep=keep),
                       lengths)
        needed = library.library().kda_plan_saved_bytes(plan)
        library.library().kda_plan_destroy(plan)
        stand_in = types.SimpleNamespace(shape=x.shape, is_cuda=device == CUDA)
        room = kernels.saved_bytes(stand_in, stand_in, keep, sequences)
        a_state = H * (K + 64) * K * 2 if device == CUDA else H * K * K * 4
        assert needed <= room <= needed + 128 + (sequences or B) * a_state * (keep != 0)
    assert keep == 0 or room > 0


def test_where_a_backward_has_tensor_cores():
    lib, found = library.library(), set()
    sizes = itertools.product([8, 20, 64, 128, 136], [8, 12, 64, 256], [1, 2])
    for (K, V, groups), of_q, of_v, capability in itertools.product(sizes, [BF16, FP16, FP32], [BF16, FP32], [80, 90]):
        new = lambda dtype, *shape: torch.empty(1, 70, *shape, dtype=dtype, device="meta")
        q, k, v = new(of_q, 2, K), new(of_q, 2, K), new(of_v, 2 * groups, V)
        g, beta = new(FP32, 2 * groups, K), new(FP32, 2 * groups)
        problem = problem_of(q, k, v, g, beta)
        forward = plan_of(problem, options_of(CUDA, capability))
        gradients = library.GradientTensors()
        gradients.struct_size = ctypes.sizeof(gradients)
        for name, x in dict(d_o=v, dq=q, dk=k, dv=v, dg=g, dbeta=beta).items():
            described(getattr(gradients, name), x.new_empty(x.shape))
        options, plan = options_of(CUDA, capability, backend=b"sm80.staged"), ctypes.c_void_p()
        status = lib.kda_backward_plan_create(forward, ctypes.byref(gradients), ctypes.byref(options),
                                              ctypes.byref(plan))
        assert status in (0, UNAVAILABLE), lib.kda_last_error()
        answer = kernels.has_tensor_cores(q, k, v)
        assert answer is (status == 0), (lib.kda_last_error(), K, V, of_q, of_v)
        found.add(answer)
        if status == 0:
            lib.kda_backward_plan_destroy(plan)
        lib.kda_plan_destroy(forward)
    assert found == {True, False}


class Part(ctypes.Structure):
    _fields_ = [(name, library.Tensor) for name in ("x", "weight", "bias", "state")]


class FusedDecode(ctypes.Structure):
    """kda_fused_decode_call."""
    _fields_ = (
        [("struct_size", ctypes.c_size_t)]
        + [(n, ctypes.c_int64) for n in ("num_sequences", "num_tokens", "num_heads", "head_dim", "width")]
        + [(n, Part) for n in ("q", "k", "v")]
        + [("state_width", ctypes.c_int64), ("g", library.Tensor), ("beta", library.Tensor)]
        + [("gate_mode", ctypes.c_int32), ("beta_mode", ctypes.c_int32)]
        + [("lower_bound", ctypes.c_double), ("scale", ctypes.c_double)]
        + [("qk_l2norm", ctypes.c_int32), ("state_layout", ctypes.c_int32)]
        + [(n, library.Tensor) for n in ("A_log", "dt_bias", "state")]
        + [("num_slots", ctypes.c_int64), ("slots", ctypes.c_void_p), ("first_slot", ctypes.c_int64)]
        + [("has_state", ctypes.c_void_p), ("norm_eps", ctypes.c_double)]
        + [("norm", ctypes.c_int32), ("activation", ctypes.c_int32)]
        + [(n, library.Tensor) for n in ("norm_weight", "output_gate", "y")]
        + [("device", ctypes.c_int32), ("trusted", ctypes.c_int32), ("stream", ctypes.c_void_p)]
    )


def states(slots, H, D, dtype, draw):
    """A pool: dense, or a part of larger slots, heads or rows, or with rows as columns."""
    lie = draw.choice(["dense", "slots", "heads", "rows", "columns", "later"])
    more = draw.choice([1, 2, 4, 8])
    if lie == "slots":
        return torch.zeros(slots, H * D * D + more, dtype=dtype)[:, :H * D * D].unflatten(1, (H, D, D))
    if lie == "heads":
        return torch.zeros(slots, H, D * D + more, dtype=dtype)[..., :D * D].unflatten(2, (D, D))
    if lie == "rows":
        return torch.zeros(slots, H, D, D + more, dtype=dtype)[..., :D]
    if lie == "columns":
        return torch.zeros(slots, H, D, D, dtype=dtype).mT
    first = more if lie == "later" else 0
    return torch.zeros(slots * H * D * D + first, dtype=dtype)[first:].view(slots, H, D, D)


def test_where_a_decode_step_is_one_kernel():
    draw, found = random.Random(3), {True: 0, False: 0}
    for _ in range(300):
        slots, H, D = draw.choice([1, 3]), draw.choice([1, 2]), draw.choice([128, 128, 128, 64])
        state = states(slots, H, D, draw.choice([FP32, BF16]), draw)
        call = FusedDecode()
        call.struct_size, call.num_tokens, call.num_sequences = ctypes.sizeof(call), 1, slots
        call.num_heads, call.head_dim, call.width, call.state_width, call.num_slots = H, D, 4, 3, slots
        kept = [torch.zeros(slots, 1, H * D), torch.zeros(H * D, 4), torch.zeros(slots, 1, H, D)]
        for part in (call.q, call.k, call.v):
            kept.append(torch.zeros(slots, H * D, 3))
            described(part.x, kept[0])
            described(part.weight, kept[1])
            described(part.state, kept[-1])
        y, beta = torch.zeros(slots, 1, H, D), torch.zeros(slots, 1, H)
        for target, x in ((call.g, kept[2]), (call.beta, beta), (call.state, state), (call.y, y)):
            described(target, x)
        status = library.library().kda_fused_decode(ctypes.byref(call))
        reason = library.library().kda_last_error().decode()
        assert status == UNSUPPORTED, reason
        answer = kernels.is_one_kernel(state)
        assert answer is reason.startswith("device: is the CPU"), (reason, state.shape, state.stride())
        found[answer] += 1
    assert min(found.values()) > 50, found
