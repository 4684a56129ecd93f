# SPDX-License-Identifier: Apache-2.0
"""One rank of test_context_parallel.py: `context_parallel_worker.py FOLDER RANK RANKS cpu|cuda [PART...]`. Rank 0
writes the errors of random problems to FOLDER/found.json, and each rank the parts that it has done to FOLDER/doneRANK.
A rank that fails prints a traceback and ends at once; one that waits too long in a part prints where. With "cuda" each
rank has a GPU, and no rank stays away or dies: NCCL ends a process whose group has an error."""
import contextlib
import datetime
import faulthandler
import json
import os
import pathlib
import random
import sys
import time
import traceback
import types
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from libkda import chunk_kda, serving
from libkda import context_parallel as cp

CASES = 70
ON_KERNELS = 24  # of these, by the maps of other devices
IN_HALVES = 12  # of those, begun before the exchange
NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
TIMEOUT = 4  # seconds, of the group in which a rank stays away
PART_SECONDS = dict(cpu=170, cuda=60)  # after which a rank prints where it is, and ends

DEVICE = torch.device("cpu")


def main(folder, rank, ranks, kind, *chosen):
    global DEVICE
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    faulthandler.dump_traceback_later(PART_SECONDS[kind], exit=True)
    if kind == "cuda":
        DEVICE = torch.device("cuda", rank)
        torch.cuda.set_device(DEVICE)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl", store=store, rank=rank,
                            world_size=ranks, timeout=datetime.timedelta(seconds=120))
    solo = [dist.new_group([r]) for r in range(ranks)][rank]
    for name, part in parts_of(folder, rank, ranks, kind, solo):
        if chosen and name not in chosen:
            continue
        faulthandler.dump_traceback_later(PART_SECONDS[kind], exit=True)
        start = time.monotonic()
        part()
        print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)
        with open(folder / f"done{rank}", "a", encoding="utf-8") as done:
            done.write(f"{name}\n")
    if kind == "cpu":
        os._exit(0)  # a rank has died: the group cannot be ended in order any more
    dist.destroy_process_group()
    print("the group has ended", flush=True)


def parts_of(folder, rank, ranks, kind, solo):
    """Name and work, in the order in which all ranks do it."""
    yield "fragments", lambda: fragments(folder, rank, ranks)
    yield "tiles", lambda: every_tile(rank, ranks, solo)
    for width in (2, 3, 4):
        yield f"convolution{width}", lambda: convolution(random.Random(10 * ranks + width), rank, ranks, solo, width)
    for layout in ("contiguous", "zigzag"):
        yield f"fla_{layout}", lambda: fla_interface(layout, rank, ranks)
    yield "batch_rows", lambda: batch_rows(rank, ranks)
    for seed in range(6):
        yield f"pools{seed}", lambda: pools(random.Random(10 * ranks + seed), ranks)
    for name in FUNCTIONS:
        yield f"one_is_wrong_{name}", lambda: one_is_wrong(name, rank, ranks)
    if kind == "cuda":
        yield "wrong_device", lambda: wrong_device(rank, ranks)
        yield "graphs", lambda: graphs(rank, ranks)
        return
    yield "layer", lambda: layer(rank, ranks, solo)
    if ranks == 4:
        yield "mesh_and_fsdp", lambda: mesh(rank, ranks, solo)
    yield "refusals", lambda: refusals(rank, ranks)
    yield "wrong_fla_contexts", lambda: wrong_fla_contexts(rank, ranks)
    yield "failing_kernels", lambda: failing_kernels(rank, ranks)
    yield "absent", lambda: absent(rank, ranks)
    yield "dead", lambda: dead(folder, rank, ranks)


def fragments(folder, rank, ranks):
    """Random problems, by the maps of every device. Rank 0 writes their errors to FOLDER/found.json."""
    cases = [play(Case(ranks, i), rank) for i in range(CASES - ON_KERNELS)]
    with by_maps(cp.maps.OnKernels):
        cases += [play(Case(ranks, i), rank) for i in range(CASES - ON_KERNELS, CASES - IN_HALVES)]
    with by_maps(InHalves):
        cases += [play(Case(ranks, i), rank) for i in range(CASES - IN_HALVES, CASES)]
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(dict(cases=cases)))


def every_tile(rank, ranks, solo):
    with by_maps(cp.maps.OnKernels):
        tiles(random.Random(ranks), rank, ranks, solo)
    for i in range(6):
        tiles(random.Random(100 * ranks + i), rank, ranks, solo)


@contextlib.contextmanager
def by_maps(maps):
    """Instead of those of the device."""
    by_device = cp.maps.of_device
    cp.maps.of_device = lambda _: maps
    try:
        yield
    finally:
        cp.maps.of_device = by_device


class InHalves(cp.maps.OnKernels):
    """What some GPUs begin before the exchange, by maps of any device; every second run of spans has no such kernels.
    """
    runs = 0

    @classmethod
    def begin(cls, spans, o, behind, M, B):
        cls.runs += 1
        if cls.runs % 2:
            return None
        if B is not None:
            K = spans.sizes[1]
            cls.forward_maps(spans, spans.new(K, K) if M is None else M, B)
        return types.SimpleNamespace(finish=lambda before: cp.maps.run_forward(spans, o, behind, before))

    @classmethod
    def begin_backward(cls, spans, d_o, d_behind, before, wanted, D, from_final):
        cls.runs += 1
        if cls.runs % 2:
            return None
        if D is not None:
            D.copy_(cls.gradients_before(spans, d_o, d_behind if from_final else None, before))
        return types.SimpleNamespace(
            finish=lambda d_behind: cp.maps.run_backward(spans, d_o, d_behind, before, wanted))


def to(device, x):
    return {name: t.to(device) for name, t in x.items()}


# ---- random problems -------------------------------------------------------------------------------------------------

def random_table(rng, tokens, ranks):
    """Any fragments on any ranks, in any order."""
    cuts = sorted({0, tokens, *(rng.randint(0, tokens) for _ in range(rng.randint(0, 3 * ranks)))})
    if rng.random() < 0.4:  # fragments of one token
        cuts = sorted({*cuts, *(min(cut + 1, tokens) for cut in cuts)})
    table = [[] for _ in range(ranks)]
    for pair in zip(cuts, cuts[1:]):
        table[rng.randrange(ranks)].append(pair)
    for row in table:
        rng.shuffle(row)
    return table


class Case:
    """A random problem, the same on every rank."""

    def __init__(self, ranks, seed):
        rng = random.Random(1000 * ranks + seed)
        self.name = f"{ranks} ranks, case {seed}"
        lengths = [rng.choice((0, 1, 2, 5, 17, 40, 63, 64, 65, 130)) for _ in range(rng.randint(1, 6))]
        if not sum(lengths) and seed % 2:
            lengths.append(33)
        self.cu = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        self.T, self.N = self.cu[-1], len(lengths)
        self.layout = rng.choice(("table", "table", "contiguous", "zigzag"))
        self.table = random_table(rng, self.T, ranks)
        self.H, self.K, self.V = rng.choice((1, 2)), rng.choice((4, 8, 16, 33)), rng.choice((3, 8, 20, 40))
        self.HV = self.H * rng.choice((1, 1, 2, 3))
        self.gate = rng.choice(("log", "softplus", "softplus", "bounded"))
        self.dtype = rng.choice((torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16))
        self.states = rng.choice((None, "whole", "begins"))
        self.final_states = rng.choice(("last", "last", "all"))
        self.v_first = rng.random() < 0.3
        sigmoid = rng.random() < 0.6
        self.flags = dict(
            use_qk_l2norm_in_kernel=True, state_v_first=self.v_first, use_gate_in_kernel=self.gate != "log",
            lower_bound=-5.0 if self.gate == "bounded" else None, use_beta_sigmoid_in_kernel=sigmoid,
            allow_neg_eigval=sigmoid and rng.random() < 0.5, scale=rng.choice((None, 0.3)),
            output_final_state=rng.random() < 0.8)
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        normal = lambda *shape: torch.randn(*shape, generator=generator)
        x = dict(q=normal(1, self.T, self.H, self.K), k=normal(1, self.T, self.H, self.K),
                 v=normal(1, self.T, self.HV, self.V), g=normal(1, self.T, self.HV, self.K),
                 beta=normal(1, self.T, self.HV))
        if self.gate == "log":
            x["g"] = -x["g"].abs() * rng.choice((0.01, 0.3, 3))
        if not sigmoid:
            x["beta"] = x["beta"].sigmoid()
        self.x = {name: t.to(self.dtype) for name, t in x.items()}
        if self.gate != "log":
            self.x["A_log"] = normal(self.HV) * 0.3
            if rng.random() < 0.6:
                self.x["dt_bias"] = normal(self.HV * self.K) * 0.3
        matrix = (self.V, self.K) if self.v_first else (self.K, self.V)
        if self.states:
            self.x["initial_state"] = normal(self.N, self.HV, *matrix)
        self.d_o = normal(1, self.T, self.HV, self.V).to(self.dtype)
        self.d_final = normal(ranks, self.N, self.HV, *matrix)  # each rank's, of the states that it is given

    def context(self):
        keywords = dict(final_states=self.final_states)
        if self.layout == "table":
            return cp.Context(self.cu, self.table, **keywords)
        return (cp.contiguous if self.layout == "contiguous" else cp.zigzag)(torch.tensor(self.cu), **keywords)


def differentiated(function, leaves, d_o, d_final_of, flags, device=None):
    """Outputs and gradients by name, computed on a device."""
    device = device or DEVICE
    leaves, flags = to(device, leaves), {name: t.to(device) if isinstance(t, torch.Tensor) else t
                                         for name, t in flags.items()}
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    o, final = function(**leaves, **flags)
    loss = (o * d_o.to(device, o.dtype)).sum()
    if final is not None:
        loss = loss + (final * d_final_of(final).to(device)).sum()
    gradients = torch.autograd.grad(loss, leaves.values(), allow_unused=True)
    found = dict(o=o.detach(), **{f"d{name}": torch.zeros_like(leaves[name]) if gradient is None else gradient
                                  for name, gradient in zip(leaves, gradients)})
    if final is not None:
        found["final_state"] = final.detach()
    return to("cpu", found)


def spread(x, context, whole_tokens):
    """A tensor of this rank's tokens as one of all, zeros elsewhere."""
    whole = x.new_zeros(1, whole_tokens, *x.shape[2:])
    at = 0
    for begin, end in context.fragments[context.rank]:
        whole[:, begin:end] = x[:, at:at + end - begin]
        at += end - begin
    return whole


def added_up(x, group=None):
    x = x.double().contiguous()
    dist.all_reduce(x, group=group)
    return x


@contextlib.contextmanager
def counted_bytes():
    """What this rank gives to all-gathers of floats."""
    all_gather, given = dist.all_gather_into_tensor, []

    def counted(out, mine, *rest, **keywords):
        if mine.dtype.is_floating_point:
            given.append(mine.numel() * mine.element_size())
        return all_gather(out, mine, *rest, **keywords)
    dist.all_gather_into_tensor = counted
    try:
        yield given
    finally:
        dist.all_gather_into_tensor = all_gather


def play(case, rank):
    """Errors and norms by tensor: of the ranks together, of one process, of the float64 result."""
    context = case.context()
    mine = {name: context.take(t) if name in NAMES[:5] else t for name, t in case.x.items()}
    if case.states == "begins":
        mine["initial_state"] = case.x["initial_state"][context.begins]
    wanted = case.d_final[rank] if case.final_states == "all" else case.d_final[0][context.ends]
    with counted_bytes() as given:
        here = differentiated(chunk_kda, mine, context.take(case.d_o), lambda _: wanted,
                              dict(case.flags, cp_context=context))
    planned = context.exchange(mine["v"].shape[2], case.K, case.V)
    assert sum(given) == planned.forward_bytes + planned.backward_bytes, f"{case.name}: {given}, planned {planned}"
    for name, x in here.items():
        if name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            x = spread(x, context, case.T)
        elif name == "dinitial_state" and len(x) != case.N:
            x = x.new_zeros(case.N, *x.shape[1:]).index_copy_(0, torch.tensor(context.begins, dtype=torch.int64), x)
        elif name == "final_state" and case.final_states == "last":
            x = x.new_zeros(case.N, *x.shape[1:]).index_copy_(0, torch.tensor(context.ends, dtype=torch.int64), x)
        elif name == "final_state":
            first = x.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, x), "final states differ between ranks"
            x = x if rank == 0 else torch.zeros_like(x)
        here[name] = x.double()
    total = added_up(torch.cat([x.flatten() for x in here.values()]))
    if rank != 0:
        return None
    parts = total.split([x.numel() for x in here.values()])
    here = {name: part.view(x.shape) for (name, x), part in zip(here.items(), parts)}
    flags = dict(case.flags, cu_seqlens=torch.tensor(case.cu))
    d_final = case.d_final.sum(0) if case.final_states == "all" else case.d_final[0]
    whole = lambda leaves, device: differentiated(
        chunk_kda, leaves, case.d_o, lambda final: d_final.to(final.dtype), flags, device)
    one = whole(case.x, DEVICE)
    exact = whole({name: t.double() for name, t in case.x.items()}, torch.device("cpu"))
    square = lambda x: float(x.double().square().sum())
    return dict(case=case.name, dtype=str(case.dtype), tensors={
        name: [square(here[name] - exact[name]), square(one[name].double() - exact[name]), square(exact[name])]
        for name in exact})


# ---- one result for every number of ranks ----------------------------------------------------------------------------

def tiles(rng, rank, ranks, solo):
    """The bits of one rank, whatever the fragments and the neighbours."""
    tile = rng.choice((64, 128))
    lengths = [rng.choice((1, 64, 100, 128, 333, 500)) for _ in range(rng.randint(1, 4))]
    cu = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    cuts = sorted({x for n, length in enumerate(lengths) for x in range(cu[n], cu[n] + length, tile)} | {cu[-1]})
    kept = sorted({0, cu[-1], *rng.sample(cuts, rng.randint(0, len(cuts)))})
    table = [[] for _ in range(ranks)]
    for pair in zip(kept, kept[1:]):
        table[rng.randrange(ranks)].append(pair)
    if rng.random() < 0.5:
        table = cp.zigzag(cu, tile=tile).fragments
    T, N, HV, K, V = cu[-1], len(lengths), 2, 16, 24
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    x = dict(q=normal(1, T, 1, K), k=normal(1, T, 1, K), v=normal(1, T, HV, V), g=normal(1, T, HV, K) - 3,
             beta=normal(1, T, HV), initial_state=normal(N, HV, K, V), A_log=normal(HV))
    d_o, d_final = normal(1, T, HV, V), normal(N, HV, K, V)
    flags = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                 output_final_state=True)

    def run(context):
        mine = {name: context.take(t) if name in NAMES[:5] else t for name, t in x.items()}
        return differentiated(chunk_kda, mine, context.take(d_o), lambda _: d_final[context.ends],
                              dict(flags, cp_context=context))

    context = cp.Context(cu, table, tile=tile)
    here, alone = run(context), run(cp.Context(cu, [[(0, T)]], solo, tile=tile))
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(here[name], context.take(alone[name])), f"{name} has other bits on {ranks} ranks"
    assert torch.equal(here["final_state"], alone["final_state"][context.ends])
    for n in context.begins:
        assert torch.equal(here["dinitial_state"][n], alone["dinitial_state"][n])
    total = added_up(here["dA_log"]).float()
    assert torch.allclose(total, alone["dA_log"], rtol=1e-4, atol=1e-4)


# ---- convolution, FLA's contexts -------------------------------------------------------------------------------------

def convolution(rng, rank, ranks, solo, width):
    for dtype in (torch.float32, torch.bfloat16):
        lengths = [rng.choice((0, 1, 2, 3, 20)) for _ in range(5)] + [9]
        cu, D = [sum(lengths[:n]) for n in range(len(lengths) + 1)], 6
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        normal = lambda *shape: torch.randn(*shape, generator=generator)
        x, d_y = normal(1, cu[-1], D).to(dtype), normal(1, cu[-1], D).to(dtype)
        leaves = dict(weight=normal(D, width), bias=normal(D))

        def run(context, activation=None):
            mine = to(DEVICE, dict(leaves, x=context.take(x)))
            mine = {name: t.detach().clone().requires_grad_() for name, t in mine.items()}
            y = cp.causal_conv1d(**mine, context=context, activation=activation)
            y.backward(context.take(d_y).to(DEVICE))
            return y.detach().cpu(), to("cpu", {name: t.grad for name, t in mine.items()})

        context = cp.Context(cu, random_table(rng, cu[-1], ranks))
        whole = cp.Context(cu, [[(0, cu[-1])]], solo)
        (y, gradients), (y1, gradients1) = run(context), run(whole)
        assert torch.equal(y, context.take(y1)), "the convolution has other bits on more ranks"
        assert torch.equal(run(context, "silu")[0], context.take(run(whole, "silu")[0])), "SiLU has other bits"
        most = 1e-2 if dtype is torch.bfloat16 else 1e-5
        assert torch.allclose(gradients["x"].float(), context.take(gradients1["x"]).float(), rtol=most, atol=most)
        for name in leaves:
            assert torch.allclose(added_up(gradients[name]).float(), gradients1[name], rtol=1e-4, atol=1e-4), name
        expected = []
        for n in range(len(lengths)):
            padded = torch.nn.functional.pad(x[:, cu[n]:cu[n + 1]].float().mT, (width - 1, 0))
            if lengths[n]:
                expected.append(torch.nn.functional.conv1d(padded, leaves["weight"][:, None], leaves["bias"],
                                                           groups=D).mT)
        expected = torch.nn.functional.silu(torch.cat(expected, 1))
        assert torch.allclose(run(context, "silu")[0].float(), context.take(expected), rtol=1e-2, atol=1e-5)


def fla_context(cu, rank, ranks, layout):
    """The fields of an FLACPContext of build_cp_context(), by its rules: W or 2 W equal parts."""
    parts = [rank] if layout == "contiguous" else [rank, 2 * ranks - 1 - rank]
    size = cu[-1] // (ranks if layout == "contiguous" else 2 * ranks)
    lists, first, last = [], [], []
    for part in parts:
        begin, end = part * size, (part + 1) * size
        lists.append(sorted({min(max(x, begin), end) - begin for x in cu}))
        first.append(begin in cu)
        last.append(end in cu)
    local = lists[0] + [x + size for x in lists[-1][1:]] * (len(parts) - 1)
    both = dict(group=dist.group.WORLD, cu_seqlens=torch.tensor(local, dtype=torch.int32), layout=layout,
                cu_seqlens_cpu=torch.tensor(local, dtype=torch.int32))
    if layout == "contiguous":
        return types.SimpleNamespace(**both, is_first_rank=first[0], is_last_rank=last[0])
    return types.SimpleNamespace(**both, front_num_seqs=len(lists[0]) - 1, is_first_by_part=tuple(first),
                                 is_last_by_part=tuple(last))


def fla_interface(layout, rank, ranks):
    """Contexts of FLA give what libkda's give, states included."""
    T = 24 * ranks
    for cu in ([0, T], [0, 5, T], [0, T // 2, T], [0, 1, 7, 24, T - 3, T], [0, 24, 48, T]):
        cu = sorted(set(cu))
        generator = torch.Generator().manual_seed(len(cu))
        normal = lambda *shape: torch.randn(*shape, generator=generator)
        x = dict(q=normal(1, T, 2, 8), k=normal(1, T, 2, 8), v=normal(1, T, 2, 8), g=normal(1, T, 2, 8),
                 beta=normal(1, T, 2))
        state, d_o = normal(len(cu) - 1, 2, 8, 8), normal(1, T, 2, 8)
        flags = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=torch.zeros(2),
                     use_beta_sigmoid_in_kernel=True, output_final_state=True)
        context = (cp.contiguous if layout == "contiguous" else cp.zigzag)(cu)
        fla = fla_context(cu, rank, ranks, layout)
        mine = {name: context.take(t) for name, t in x.items()}
        mine["initial_state"] = state[context.begins]
        run = lambda given: differentiated(chunk_kda, mine, context.take(d_o), torch.ones_like,
                                           dict(flags, cp_context=given))
        a, b = run(context), run(fla)
        run(fla)  # known by now
        assert all(torch.equal(a[name], b[name]) for name in a), cu
        # Megatron's call: one head of q a value head, step sizes already in fp32, lengths beside the context.
        rows = {name: mine[name] * 0.3 for name in ("q", "k", "v", "g")}
        megatron = dict(rows, beta=mine["beta"].sigmoid(), A_log=flags["A_log"], dt_bias=torch.zeros(16),
                        initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
                        use_gate_in_kernel=True, safe_gate=True, lower_bound=-5.0)
        megatron = {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in megatron.items()}
        o = chunk_kda(**megatron, cu_seqlens=fla.cu_seqlens, cp_context=fla)[0]
        assert torch.equal(o, chunk_kda(**megatron, cp_context=context)[0])
        weight = normal(16, 3).to(DEVICE)
        rows = mine["v"].flatten(2).to(DEVICE)
        assert torch.equal(cp.causal_conv1d(rows, weight, context=context), cp.causal_conv1d(rows, weight, context=fla))


def batch_rows(rank, ranks):
    """NeMo's call: each row of a batch by itself, its documents numbered by token and padding a document too, on even
    shards. What comes out is that of one process for the whole batch."""
    T, H, D = 30 * ranks, 2, 16
    generator = torch.Generator().manual_seed(11)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    x = dict(q=normal(2, T, H, D), k=normal(2, T, H, D), v=normal(2, T, H, D), g=normal(2, T, H, D),
             beta=normal(2, T, H).sigmoid())
    d_o, A_log, dt_bias = normal(2, T, H, D), normal(H) * 0.3, normal(H * D) * 0.3
    documents = torch.zeros(2, T, dtype=torch.int64)
    for row, borders in enumerate(((7, 40, T - 5), (1, T // 2))):
        for border in borders:
            documents[row, border:] += 1
    flags = dict(A_log=A_log.to(DEVICE), dt_bias=dt_bias.to(DEVICE), use_qk_l2norm_in_kernel=True,
                 use_gate_in_kernel=True, safe_gate=True, lower_bound=-5.0)
    for row in range(2):
        cu = [0, *((documents[row].diff() != 0).nonzero().flatten() + 1).tolist(), T]
        context = cp.contiguous(torch.tensor(cu))
        one = {name: t[row:row + 1] for name, t in x.items()}
        run = lambda leaves, d_o, **where: differentiated(chunk_kda, leaves, d_o, None, dict(flags, **where))
        here = run({name: context.take(t) for name, t in one.items()}, context.take(d_o[row:row + 1]),
                   cp_context=context)
        alone = run(one, d_o[row:row + 1], cu_seqlens=torch.tensor(cu))
        for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
            assert torch.allclose(here[name], context.take(alone[name]), rtol=1e-3, atol=1e-4), (row, name)


# ---- pools of states -------------------------------------------------------------------------------------------------

def pools(rng, ranks):
    """Prompts in three pieces, each a call on other fragments, leave the pool and the outputs of one process."""
    N, HV, K, V, count = 4, 2, 16, 8, 9
    v_first, dtype = rng.random() < 0.5, rng.choice((torch.float32, torch.bfloat16))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    slots = torch.tensor(rng.sample(range(1, count), N), dtype=rng.choice((torch.int32, torch.int64)))
    slots[rng.randrange(N)] = rng.choice((-1, 0))  # first_slot is 1
    here = normal(count, HV, *((V, K) if v_first else (K, V))).to(dtype).to(DEVICE)
    alone, before = here.clone(), here.clone()
    A_log = normal(HV).to(DEVICE)
    for piece in range(3):
        lengths = [rng.choice((0, 1, 30, 65, 100)) for _ in range(N - 1)] + [70]
        cu = [sum(lengths[:n]) for n in range(N + 1)]
        has_state = torch.tensor([piece > 0 or rng.random() < 0.5 for _ in range(N)])
        x = dict(q=normal(1, cu[-1], 1, K), k=normal(1, cu[-1], 1, K), v=normal(1, cu[-1], HV, V),
                 g=normal(1, cu[-1], HV, K), beta=normal(1, cu[-1], HV))
        flags = dict(has_state=has_state.to(DEVICE), first_slot=1, A_log=A_log, use_gate_in_kernel=True,
                     use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, state_v_first=v_first)
        context = cp.Context(cu, random_table(rng, cu[-1], ranks), final_states="all")
        mine = to(DEVICE, {name: context.take(t) for name, t in x.items()})
        o = cp.prefill(**mine, pool=here, slots=slots.to(DEVICE), context=context, **flags)
        o1 = serving.prefill(**to(DEVICE, x), pool=alone, slots=slots.to(DEVICE), cu_seqlens=torch.tensor(cu), **flags)
        error = 2e-2 if dtype is torch.bfloat16 else 1e-4
        assert torch.allclose(o, context.take(o1), rtol=error, atol=error)
        assert torch.allclose(here.float(), alone.float(), rtol=error, atol=error)
    others = [n for n in range(count) if n not in slots.tolist() or n == 0]
    assert torch.equal(here[others], before[others])
    # "last": the rank that ends a sequence has its state, the others' pools stay.
    mine = to(DEVICE, {name: context.take(t) for name, t in x.items()})
    last = cp.Context(cu, context.fragments)
    pool = before.clone()
    cp.prefill(**mine, pool=pool, slots=slots.to(DEVICE), context=last, **flags)
    written = {int(slots[n]) for n in last.ends if 1 <= slots[n] < count}
    others = [n for n in range(count) if n not in written]
    assert torch.equal(pool[others], before[others])
    assert all(not torch.equal(pool[n], before[n]) or lengths[slots.tolist().index(n)] == 0 for n in written)


def graphs(rank, ranks):
    """A CUDA graph holds a call, its exchange and its backward, and has the bits of calls outside it."""
    T, HV, K = 256 * ranks, 2, 128
    generator = torch.Generator().manual_seed(5)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    context = cp.contiguous([0, 100, T])
    x = dict(q=normal(1, T, HV, K), k=normal(1, T, HV, K), v=normal(1, T, HV, K), g=normal(1, T, HV, K) - 3,
             beta=normal(1, T, HV))
    leaves = {name: context.take(t).to(DEVICE, torch.bfloat16).requires_grad_() for name, t in x.items()}
    flags = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                 lower_bound=-5.0, A_log=torch.zeros(HV, device=DEVICE), cp_context=context)

    def train():
        o, _ = chunk_kda(**leaves, **flags)
        return o, *torch.autograd.grad(o.float().square().sum(), list(leaves.values()))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            expected = [t.clone() for t in train()]
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        found = train()
    for _ in range(2):
        for t in found:
            t.zero_()
        graph.replay()
        torch.cuda.synchronize()
        for a, b in zip(found, expected):
            assert torch.equal(a, b)
    graph.reset()  # NCCL does not end a group while a graph holds its exchanges
    torch.cuda.synchronize()


# ---- other dimensions of a mesh --------------------------------------------------------------------------------------

class Layer(torch.nn.Module):
    """Projections and a short convolution around chunk_kda."""
    H, D = 2, 8

    def __init__(self):
        super().__init__()
        self.into = torch.nn.Linear(16, self.H * (4 * self.D + 1))
        self.out = torch.nn.Linear(self.H * self.D, 16)
        self.A_log = torch.nn.Parameter(torch.zeros(self.H))
        self.taps = torch.nn.Parameter(torch.randn(3 * self.H * self.D, 4) * 0.5)

    def forward(self, x, context):
        width = self.H * self.D
        rows, g, beta = self.into(x).split([3 * width, width, self.H], -1)
        rows = cp.causal_conv1d(rows, self.taps, context=context, activation="silu")
        q, k, v, g = (row.unflatten(-1, (self.H, self.D)) for row in (*rows.split(width, -1), g))
        flags = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
        return self.out(chunk_kda(q, k, v, g, beta, A_log=self.A_log, cp_context=context, **flags)[0].flatten(2))


def layer(rank, ranks, solo):
    """A whole layer on fragments has the outputs and gradients of one process, with libkda's operators alone."""
    T = 90
    generator = torch.Generator().manual_seed(9)
    x, weight = (torch.randn(1, T, 16, generator=generator) for _ in range(2))
    context = cp.zigzag([0, 40, 41, T])
    found = []
    for where in (context, cp.Context([0, 40, 41, T], [[(0, T)]], solo)):
        torch.manual_seed(7)
        module, mine = Layer(), where.take(x).clone().requires_grad_()
        y = module(mine, where)
        (y * where.take(weight)).sum().backward()
        found.append((y.detach(), mine.grad, [p.grad for p in module.parameters()]))
    (y, d_x, d_parameters), (y1, d_x1, d_parameters1) = found
    assert torch.allclose(y, context.take(y1), rtol=1e-4, atol=1e-5)
    assert torch.allclose(d_x, context.take(d_x1), rtol=1e-4, atol=1e-5)
    for a, b in zip(d_parameters, d_parameters1):
        assert torch.allclose(added_up(a).float(), b, rtol=1e-3, atol=1e-4)


def mesh(rank, ranks, solo):
    """Each row of a 2-D mesh has a sequence of its own over its ranks; FSDP shards the layer over all of them."""
    dp, group = rank // 2, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"].get_group()
    generator = torch.Generator().manual_seed(7)
    x, weight = (torch.randn(2, 1, 90, 16, generator=generator) for _ in range(2))
    torch.manual_seed(7)
    whole = Layer()
    alone = cp.Context([0, 40, 90], [[(0, 90)]], solo)
    for n in range(2):
        (whole(x[n], alone) * weight[n]).sum().backward()
    torch.manual_seed(7)
    layer = Layer()
    fully_shard(layer, mesh=init_device_mesh("cpu", (4,)))
    context = cp.zigzag([0, 40, 90], group)
    (layer(context.take(x[dp]), context) * context.take(weight[dp])).sum().backward()
    for (name, here), expected in zip(layer.named_parameters(), whole.parameters()):
        mean = expected.grad / ranks  # as FSDP has it
        assert torch.allclose(here.grad.full_tensor(), mean, rtol=1e-4, atol=1e-5), name


# ---- what goes wrong -------------------------------------------------------------------------------------------------

def small(context, **changes):
    T = changes.pop("T", context.num_tokens)
    HV = changes.pop("HV", 2)
    x = dict(q=torch.ones(1, T, 1, 4), k=torch.ones(1, T, 1, 4), v=torch.ones(1, T, HV, 4),
             g=-torch.ones(1, T, HV, 4), beta=torch.ones(1, T, HV))
    return to_device({**x, **changes})


def to_device(arguments):
    """Those that lie on the host as a GPU's, if there is one."""
    return {name: t.to(DEVICE) if isinstance(t, torch.Tensor) and t.device.type == "cpu" else t
            for name, t in arguments.items()}


def raised(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("no error was raised")


SECONDS = 20  # in which every rank has its error; the group waits for 120


def raised_by_all(odd, call, changes, own, others, kind=Exception):
    """call(**changes) where this rank is the odd one, and call() elsewhere, with an error on each of them."""
    start = time.monotonic()
    error = raised(lambda: call(**changes) if odd else call())
    expected = own if odd else others
    assert expected in str(error), f"{list(changes)}: expected {expected!r}, {type(error).__name__}: {error}"
    assert isinstance(error, kind), type(error)
    assert time.monotonic() - start < SECONDS, f"{list(changes)}: {time.monotonic() - start} s"


def on_cpus(*cases):
    """What is not looked at on a GPU, or is taken there."""
    return cases if DEVICE.type == "cpu" else ()


def chunk_kda_calls(context):
    """A call; what one rank alone gives it, with the text of its refusal; options that one rank alone has, with both
    values."""
    T = context.num_tokens
    gate = dict(use_gate_in_kernel=True, A_log=torch.zeros(2))
    rows = small(context)
    half = lambda name: {name: rows[name].bfloat16()}
    call = lambda **changes: chunk_kda(**small(context, **changes), cp_context=context)
    bad = (
        (dict(T=7), "q has 7 tokens, and cp_context has 10 on rank 1"),
        (dict(q=None), "q must be a torch.Tensor"),
        (dict(q=rows["q"].to("meta")), "k must be on the device of q, meta"),
        (dict(k=torch.ones(1, T, 1, 5)), "k must have"),
        (dict(v=torch.ones(1, T + 1, 2, 4)), "v must have"),
        (dict(g=torch.ones(1, T, 2)), "One gate a head"),
        (dict(beta=torch.ones(1, T, 3)), "beta must have"),
        (dict(initial_state=torch.ones(2, 2, 4, 4)), "initial_state must have shape"),
        (dict(initial_state=torch.ones(1, 2, 4, 4).double()), "initial_state must be"),
        (dict(scale=float("inf")), "scale must be finite"),
        (dict(scale="one"), "scale must be a number"),
        (dict(use_gate_in_kernel=True), "`A_log` must be provided"),
        (dict(use_gate_in_kernel=True, lower_bound=3.0), "lower_bound: 3 is not"),
        (dict(use_gate_in_kernel=True, lower_bound=-9.0, safe_gate=True), "must be in the safe range"),
        (dict(gate, A_log=torch.zeros(3)), "A_log must have"),
        (dict(gate, A_log=[0.0, 0.0]), "A_log must be a torch.Tensor"),
        (dict(gate, dt_bias=torch.zeros(3)), "dt_bias must have"),
        (dict(allow_neg_eigval=True), "requires `use_beta_sigmoid_in_kernel=True`"),
        (dict(chunk_size=7), "`chunk_size` must be"),
        (dict(head_map="tiled"), "tiled heads are not taken"),
        (dict(head_map="none"), "head_map must be"),
        (dict(out=torch.ones(1, T, 2, 4)), "`out` is not taken"),
        (dict(has_state=torch.ones(1, dtype=torch.bool)), "`has_state` is not taken"),
        (dict(return_intermediate_states=True), "`return_intermediate_states` is not taken"),
        (dict(cu_seqlens=torch.tensor([0, T])), "`cu_seqlens` is part of `cp_context`"),
        (dict(state_v_first=True, transpose_state_layout=True), "Cannot pass both"),
        *on_cpus((dict(q=rows["q"].double()), "q must be float32"),
                 (dict(gate, A_log=torch.full((2,), 99.0)), "A_log: entry 0 = 99")))
    different = (
        (dict(scale=0.2), "scale", "0.5", "0.2"),
        (dict(use_qk_l2norm_in_kernel=True), "use_qk_l2norm_in_kernel", "False", "True"),
        (dict(gate), "use_gate_in_kernel", "False", "True"),
        (dict(use_beta_sigmoid_in_kernel=True), "use_beta_sigmoid_in_kernel", "False", "True"),
        (dict(state_v_first=True), "state_v_first", "False", "True"),
        (dict(output_final_state=True), "output_final_state", "False", "True"),
        (dict(beta=rows["beta"].requires_grad_()), "gradients asked for", "False", "True"),
        (dict(q=torch.ones(1, T, 2, 4), k=torch.ones(1, T, 2, 4)), "the number of heads of q", "1", "2"),
        *((half(name), f"the type of {name}", "torch.float32", "torch.bfloat16") for name in ("q", "k", "v", "g")))
    return call, bad, different


def prefill_calls(context):
    pool = torch.zeros(4, 2, 4, 4, device=DEVICE)

    def call(**changes):
        x = dict(pool=pool, slots=torch.tensor([2, 1]), has_state=torch.tensor([False, False]))
        return cp.prefill(**small(context, **{**x, **changes}), context=context)
    bad = (
        (dict(pool=torch.zeros(4, 2, 4, 5)), "pool must have shape"),
        (dict(pool=pool.half()), "pool must be"),
        (dict(pool=pool[:1].expand(4, 2, 4, 4)), "its elements overlap"),
        (dict(slots=[2, 1]), "slots must be a tensor"),
        (dict(slots=torch.tensor([2])), "slots must have shape"),
        (dict(has_state=torch.ones(2)), "has_state must be"),
        (dict(first_slot=-1), "first_slot must be"),
        (dict(allow_neg_eigval=True), "requires `use_beta_sigmoid_in_kernel=True`"),
        (dict(beta=torch.ones(1, context.num_tokens, 2, requires_grad=True)), "prefill has no gradients"),
        *on_cpus((dict(slots=torch.tensor([2, 4])), "slots: entry 1 = 4"),
                 (dict(slots=torch.tensor([2, 2])), "slots: slot 2 would be written twice")))
    different = (
        (dict(first_slot=1), "first_slot", "0", "1"),
        (dict(pool=pool.bfloat16()), "the type of pool", "torch.float32", "torch.bfloat16"),
        (dict(scale=0.2), "scale", "0.5", "0.2"))
    return call, bad, different


def convolution_calls(context):
    x = torch.ones(1, context.num_tokens, 3)
    given = dict(x=x, weight=torch.ones(3, 4), context=context)
    call = lambda **changes: cp.causal_conv1d(**to_device({**given, **changes}))
    bad = (
        (dict(x=torch.ones(1, 7, 3)), "x has 7 tokens"),
        (dict(x=x.double()), "x must be float32"),
        (dict(weight=torch.ones(4, 4)), "weight must have shape"),
        (dict(bias=torch.ones(4)), "bias must have shape"),
        (dict(activation="relu"), "activation must be"))
    different = (
        (dict(activation="silu"), "activation", "None", "silu"),
        (dict(bias=torch.ones(3)), "the type of bias", "None", "torch.float32"),
        (dict(weight=torch.ones(3, 4).bfloat16()), "the type of weight", "torch.float32", "torch.bfloat16"),
        (dict(x=x.clone().requires_grad_()), "a gradient of x asked for", "False", "True"))
    return call, bad, different


FUNCTIONS = dict(chunk_kda=(chunk_kda_calls, lambda ranks: [0, 10 * ranks]),
                 prefill=(prefill_calls, lambda ranks: [0, 13, 10 * ranks]),
                 causal_conv1d=(convolution_calls, lambda ranks: [0, 10 * ranks]))


def one_is_wrong(name, rank, ranks):
    """A bad argument, or another option, on rank 1 alone: an error of every rank within seconds, in the first call of a
    context, and in a later one. The next call works."""
    calls, lengths = FUNCTIONS[name]
    context = cp.contiguous(lengths(ranks))
    call, bad, different = calls(context)
    for changes, own in bad:
        raised_by_all(rank == 1, call, changes, own, "rank 1 was given arguments that do not fit")
    for changes, option, usual, odd in different:
        raised_by_all(rank == 1, call, changes, f"rank 0 was called with {option} = {usual}, and rank 1 with {odd}",
                      f"rank 1 was called with {option} = {odd}, and rank {rank} with {usual}", ValueError)
    good = call()
    for changes, own in bad:
        if DEVICE.type == "cpu":
            raised_by_all(rank == 1, call, changes, own, "rank 1 could not take part in this call")
        else:
            raised_by_one(rank, call, changes, own)
    for changes, option, usual, odd in on_cpus(*different):
        raised_by_all(rank == 1, call, changes, f"rank 0 was called with {option} = {usual}, and rank 1 with {odd}",
                      f"rank 1 was called with {option} = {odd}, and rank {rank} with {usual}", ValueError)
    again = call()
    assert all(torch.equal(a, b) for a, b in zip(again, good) if a is not None)
    for changes, *_ in different:  # every rank with the same other option
        call(**changes)


def raised_by_one(rank, call, changes, own):
    """A later call on GPUs: rank 1 raises its error, and what the rank behind it computes is NaN."""
    start = time.monotonic()
    if rank == 1:
        error = raised(lambda: call(**changes))
        assert own in str(error), f"{list(changes)}: expected {own!r}, {type(error).__name__}: {error}"
    else:
        o = call()
        o = o[0] if isinstance(o, tuple) else o
        assert rank != 2 or o.isnan().any()
    torch.cuda.synchronize()
    assert time.monotonic() - start < SECONDS


def wrong_device(rank, ranks):
    """A rank whose tensors are on the host, where the others' are on GPUs, does not wait in another exchange."""
    context = cp.contiguous([0, 10 * ranks])
    rows = small(context)
    call = lambda rows: chunk_kda(**rows, cp_context=context)
    on_host = dict(rows={name: t.cpu() for name, t in rows.items()})
    usual = lambda **changes: call(**{"rows": rows, **changes})
    raised_by_all(rank == 1, usual, on_host, "rank 0 was called with device = cuda, and rank 1 with cpu",
                  f"rank 1 was called with device = cpu, and rank {rank} with cuda", ValueError)
    usual()
    raised_by_one(rank, usual, on_host, "calls with device = cuda, got cpu")


def wrong_fla_contexts(rank, ranks):
    """What rank 1 alone cannot make of FLA's context is an error of every rank."""
    rows = small(cp.contiguous([0, 10 * ranks]))
    contiguous = lambda: fla_context([0, 10 * ranks], rank, ranks, "contiguous")
    call = lambda fla=None, **changes: chunk_kda(**{**rows, **changes}, cp_context=fla or contiguous())
    striped = types.SimpleNamespace(**{**vars(contiguous()), "layout": "striped"})
    elsewhere = rows["q"].to("meta")
    for changes, own in ((dict(fla=striped), "layout must be"), (dict(q=elsewhere), "k must be on the device of q")):
        raised_by_all(rank == 1, call, changes, own, "rank 1 was given arguments that do not fit")
    call()


def failing_kernels(rank, ranks):
    """A kernel that fails on one rank before its exchange, forward and backward: an error of every rank."""
    context = cp.contiguous([0, 10 * ranks])
    leaves = {name: t.requires_grad_() for name, t in small(context).items()}
    forward = lambda: chunk_kda(**leaves, cp_context=context)[0]

    def fails(*_):
        raise MemoryError("there is none")
    forward().sum().backward()
    # Rank 0 has the near end of a forward, and rank 1 something to give in a backward.
    for odd, names, make in ((rank == 0, ("run_forward", "_span_maps"), lambda: forward),
                             (rank == 1, ("backward", "_span_maps"), lambda: forward().sum().backward)):
        step = make()
        with contextlib.ExitStack() as patches:
            if odd:
                for name in names:
                    patches.enter_context(mock.patch.object(cp.maps, name, fails))
                patches.enter_context(mock.patch.object(cp.attention, "_try_values"))  # it calls run_forward
            raised_by_all(odd, step, {}, "there is none", "could not take part")
        forward().sum().backward()


def refusals(rank, ranks):
    """Sizes and contexts that are not the same on all ranks."""
    cu = [0, 10 * ranks]
    odd = rank == 1
    call = lambda context, **changes: chunk_kda(**small(context, **changes), cp_context=context)

    def expect(error, own, other):
        assert (own if odd else other) in str(error), f"{type(error).__name__}: {error}"

    context = cp.contiguous(cu)
    expect(raised(lambda: call(context, HV=3 if odd else 2)), "and rank 1 (3, 4, 4)", "and rank")
    other = cp.Context([0, 3, *cu[1:]], context.fragments) if odd else context
    expect(raised(lambda: call(other)), "were given different contexts", "were given different contexts")
    good = call(context)[0]
    expect(raised(lambda: call(context, HV=3 if odd else 2)), "a copy serves others", "rank 1 could not take part")
    assert torch.equal(call(context)[0], good)
    call(context.copy(), HV=3)


def absent(rank, ranks):
    """A rank that stays away costs the others the timeout of the group, and no more."""
    dist.barrier()
    group = dist.new_group(list(range(ranks)), timeout=datetime.timedelta(seconds=TIMEOUT))
    context = cp.contiguous([0, 10 * ranks], group)
    dist.barrier()
    chunk_kda(**small(context), cp_context=context)
    if rank != ranks - 1:
        start = time.monotonic()
        error = raised(lambda: chunk_kda(**small(context), cp_context=context))
        assert "A rank has ended, or has not made this call" in str(error), error
        assert time.monotonic() - start < TIMEOUT + 5
    dist.barrier()


def dead(folder, rank, ranks):
    """A rank that dies is an error of the others at once."""
    context = cp.contiguous([0, 10 * ranks])
    chunk_kda(**small(context), cp_context=context)
    dist.barrier()  # the group's timeout is 120 s: the error comes from the broken connection
    if rank == ranks - 1:
        with open(folder / f"done{rank}", "a", encoding="utf-8") as done:
            done.write("dead\n")
        os._exit(0)
    start = time.monotonic()
    error = raised(lambda: chunk_kda(**small(context), cp_context=context))
    assert "A rank has ended, or has not made this call" in str(error), error
    assert time.monotonic() - start < 20


if __name__ == "__main__":
    try:
        main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # an orderly exit waits for the group, in which other ranks may wait for this one
