# SPDX-License-Identifier: Apache-2.0
"""Context parallelism over 2, 3 and 4 processes: context_parallel_worker.py plays random problems and failures there;
its errors are compared here with those of one process."""
import json
import math
import pathlib
import subprocess
import sys
import time
import types

import pytest
import torch

from libkda import chunk_kda, serving
from libkda import context_parallel as cp

WORKER = pathlib.Path(__file__).with_name("context_parallel_worker.py")
# Relative to the norm of a tensor: below it one process is as exact by chance. fp32, and one rounding of 16 bits.
FLOOR = {"torch.float32": 2e-7, "torch.bfloat16": 4e-4, "torch.float16": 5e-5}
FLOOR_OF_A_LOG = 1e-6  # a sum over all tokens, whose terms cancel
# On a GPU maps come from kernels that multiply in the type of the rows, where one process may not.
FLOOR_ON_GPUS = {"torch.float32": 2e-7, "torch.bfloat16": 6e-3, "torch.float16": 1e-3}
RANKS = (2, 3, 4)
PARTS = ("fragments", "tiles", "convolution2", "convolution3", "convolution4", "fla_contiguous", "fla_zigzag",
         "batch_rows", *(f"pools{seed}" for seed in range(6)), "layer", "refusals", "one_is_wrong_chunk_kda",
         "one_is_wrong_prefill", "one_is_wrong_causal_conv1d", "wrong_fla_contexts", "failing_kernels", "absent",
         "dead")


class Launched:
    """The ranks of a group, each a process."""
    SECONDS = 300
    GRACE = 15  # for the others, once a rank has failed: on GPUs they would wait for it

    def __init__(self, folder, ranks, kind):
        self.folder, self.ranks = folder, ranks
        self.logs = [folder / f"log{rank}" for rank in range(ranks)]
        self.workers = []
        for rank, log in enumerate(self.logs):
            with log.open("w") as out:
                self.workers.append(subprocess.Popen([sys.executable, WORKER, folder, str(rank), str(ranks), kind],
                                                     stdout=out, stderr=subprocess.STDOUT))

    def finish(self):
        """What each has printed, once all have ended."""
        end = time.monotonic() + self.SECONDS
        while any(worker.poll() is None for worker in self.workers) and time.monotonic() < end:
            if any(worker.returncode for worker in self.workers):
                end = min(end, time.monotonic() + self.GRACE)
            time.sleep(0.1)
        self.end()
        return [log.read_text() for log in self.logs]

    def end(self):
        for worker in self.workers:
            worker.kill()
            worker.wait()

    def expect_done(self, part):
        texts = self.finish()
        for rank, text in enumerate(texts):
            done = self.folder / f"done{rank}"
            assert done.exists() and part in done.read_text().splitlines(), f"rank {rank} of {self.ranks}:\n{text}"

    def expect_no_failure(self):
        texts = self.finish()
        failed = [f"rank {rank} of {self.ranks}, exit code {worker.returncode}:\n{text}"
                  for rank, (worker, text) in enumerate(zip(self.workers, texts)) if worker.returncode != 0]
        assert not failed, "\n".join(failed)


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """By number of ranks, all at once: they wait for each other's timeouts in some tests."""
    groups = {ranks: Launched(tmp_path_factory.mktemp(f"ranks{ranks}"), ranks, "cpu") for ranks in RANKS}
    yield groups
    for group in groups.values():
        group.end()


@pytest.mark.parametrize("part,ranks", [*((part, ranks) for part in PARTS for ranks in RANKS), ("mesh_and_fsdp", 4)])
def test_several_processes(launched, part, ranks):
    """A part that the ranks do together: the function of its name in context_parallel_worker.py."""
    launched[ranks].expect_done(part)


@pytest.mark.parametrize("ranks", RANKS)
def test_errors_are_those_of_one_process(launched, ranks):
    """Of outputs and gradients, over random tables of fragments."""
    launched[ranks].expect_no_failure()
    expect_errors(launched[ranks].folder, FLOOR, FLOOR_OF_A_LOG)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("ranks", (2, 4))
def test_errors_on_gpus(tmp_path, ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    group = Launched(tmp_path, ranks, "cuda")
    group.expect_no_failure()
    for part in (*(part for part in PARTS if part.startswith("one_is_wrong")), "wrong_device", "graphs"):
        group.expect_done(part)
    expect_errors(tmp_path, FLOOR_ON_GPUS, 1e-2)


def expect_errors(folder, floors, floor_of_A_log):
    found = json.loads((folder / "found.json").read_text())
    assert len(found["cases"]) == 70
    worse = []
    for case in found["cases"]:
        for name, (here, one, norm) in case["tensors"].items():
            here, one, norm = math.sqrt(here), math.sqrt(one), math.sqrt(norm)
            floor = floor_of_A_log if name == "dA_log" else floors[case["dtype"]]
            if not here <= 1.1 * one + floor * norm + 1e-12:
                worse.append(f"{case['case']} {case['dtype']} {name}: {here / norm if norm else here:.2e}, one process "
                             f"{one / norm if norm else one:.2e}")
    assert not worse, "\n".join(worse)


# ---- one process -----------------------------------------------------------------------------------------------------

def test_contexts_that_cannot_be():
    whole = [0, 10]
    for error, text, arguments, keywords in (
            (ValueError, "cu_seqlens must start with 0", ([1, 3], [[(0, 3)]]), {}),
            (ValueError, "cu_seqlens: entry 2 = 3 is below entry 1 = 5", ([0, 5, 3], [[(0, 3)]]), {}),
            (TypeError, "cu_seqlens must be a list", (torch.zeros(2), [[]]), {}),
            (ValueError, "tokens 4 to 6 are on no rank", (whole, [[(0, 4), (6, 10)]]), {}),
            (ValueError, "has tokens from 3 on, which another", (whole, [[(0, 4), (3, 10)]]), {}),
            (ValueError, "end at token 9, and cu_seqlens at 10", (whole, [[(0, 9)]]), {}),
            (ValueError, "ends before it begins", (whole, [[(0, 10), (5, 4)]]), {}),
            (TypeError, r"fragments\[0\] must be pairs", (whole, [[(0, 5, 10)]]), {}),
            (ValueError, "of 2 ranks, and the group has 1", (whole, [[(0, 5)], [(5, 10)]]), {}),
            (ValueError, "tile must be a multiple of 64", (whole, [[(0, 10)]]), dict(tile=100)),
            (ValueError, "no multiple of tile = 64", ([0, 100], [[(70, 100), (0, 70)]]), dict(tile=64)),
            (ValueError, "final_states must be 'last' or 'all'", (whole, [[(0, 10)]]), dict(final_states="some"))):
        with pytest.raises(error, match=text):
            cp.Context(*arguments, **keywords)


def test_spans_and_what_is_exchanged():
    context = cp.Context([0, 0, 100, 300], [[(200, 300), (0, 50), (50, 200)]])
    assert [tuple(span) for span in context.spans] == [
        (2, 200, 300, 0, 0, False, True), (1, 0, 100, 0, 1, True, True), (2, 100, 200, 0, 2, True, False)]
    assert context.begins == context.ends == [0, 1, 2] and context.cu_seqlens.tolist() == [0, 100, 200, 300]
    assert context.exchange(4, 128, 128, 1e9) == (0, 0, 0, 0, 0.0)  # one process
    tokens = torch.arange(300)
    assert context.take(tokens, 0).tolist() == [*range(200, 300), *range(200)]
    with pytest.raises(ValueError, match="bytes_per_second must be above 0"):
        context.exchange(4, 128, 128, 0)
    for tile in (None, 64):
        assert cp.contiguous([0, 1000], tile=tile).fragments == [[(0, 1000)]]
    assert len(cp.Context([0, 1000], [[(0, 1000)]], tile=256).spans) == 4


def arguments(**changes):
    x = dict(q=torch.randn(1, 70, 1, 8), k=torch.randn(1, 70, 1, 8), v=torch.randn(1, 70, 2, 8),
             g=-torch.rand(1, 70, 2, 8), beta=torch.rand(1, 70, 2), use_qk_l2norm_in_kernel=True,
             cp_context=cp.contiguous([0, 30, 70]))
    return {**x, **changes}


@pytest.mark.parametrize("error, text, changes", (
    (ValueError, "`cu_seqlens` is part of `cp_context`", dict(cu_seqlens=torch.tensor([0, 70]))),
    (NotImplementedError, "return_intermediate_states", dict(return_intermediate_states=True)),
    (NotImplementedError, "has_state", dict(has_state=torch.ones(2, dtype=torch.bool))),
    (NotImplementedError, "`out` is not taken with `cp_context`", dict(out=torch.zeros(1, 70, 2, 8))),
    (TypeError, "cp_context must be a libkda", dict(cp_context=3)),
    (TypeError, "q must be float32, bfloat16 or float16 with cp_context", dict(
        q=torch.randn(1, 70, 1, 8, dtype=torch.float64))),
    (ValueError, "initial_state must have shape \\[2, 2, 8, 8\\]", dict(initial_state=torch.zeros(1, 2, 8, 8))),
    (TypeError, "initial_state must be a float32 or bfloat16", dict(initial_state=torch.zeros(2, 2, 8, 8).double())),
    (ValueError, "v must have", dict(v=torch.randn(1, 71, 2, 8)))))
def test_calls_that_do_not_fit(error, text, changes):
    with pytest.raises(error, match=text):
        chunk_kda(**arguments(**changes))


@pytest.mark.parametrize("context", (None, types.SimpleNamespace(group=None, cu_seqlens=None, layout="contiguous")))
def test_other_devices_are_refused(context):
    x = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in arguments().items()}
    x["cp_context"] = context or x["cp_context"]
    with pytest.raises(ValueError, match="q is on meta, and the group of cp_context is for cpu and cuda tensors"):
        chunk_kda(**x)
    with pytest.raises(ValueError, match="x is on meta, and the group of cp_context"):
        cp.causal_conv1d(torch.ones(1, 70, 3, device="meta"), torch.ones(3, 4, device="meta"), context=x["cp_context"])


@pytest.mark.parametrize("error, text, changes", (
    (TypeError, "x must be float32, bfloat16 or float16, got torch.float64", dict(x=torch.ones(1, 70, 3).double())),
    (TypeError, "bias must be a torch.Tensor", dict(bias=3)),
    (ValueError, r"x must have shape \[1, T, D\]", dict(x=torch.ones(70, 3))),
    (ValueError, "x has 71 tokens", dict(x=torch.ones(1, 71, 3))),
    (ValueError, r"weight must have shape \[3, W\]", dict(weight=torch.ones(3, 5))),
    (ValueError, r"weight must have shape \[3, W\]", dict(weight=torch.ones(4, 3))),
    (ValueError, r"bias must have shape \[3\]", dict(bias=torch.ones(4))),
    (ValueError, "weight must be on the device of x", dict(weight=torch.ones(3, 4, device="meta"))),
    (ValueError, "activation must be None", dict(activation="relu"))))
def test_convolutions_that_do_not_fit(error, text, changes):
    given = dict(x=torch.ones(1, 70, 3), weight=torch.ones(3, 4), context=cp.contiguous([0, 30, 70]))
    cp.causal_conv1d(**given)
    with pytest.raises(error, match=text):
        cp.causal_conv1d(**{**given, **changes})


def prompts(**changes):
    x = dict(arguments(), pool=torch.zeros(3, 2, 8, 8), slots=torch.tensor([2, 0]),
             has_state=torch.tensor([False, True]))
    x["context"] = x.pop("cp_context")
    return {**x, **changes}


@pytest.mark.parametrize("error, text, changes", (
    (TypeError, "context must be a libkda.context_parallel.Context, got int", dict(context=3)),
    (TypeError, "pool must be a float32 or bfloat16 tensor, got torch.float16", dict(
        pool=torch.zeros(3, 2, 8, 8).half())),
    (ValueError, r"pool must have shape \[slots, 2, 8, 8\]", dict(pool=torch.zeros(3, 2, 8, 9))),
    (ValueError, "with at least one slot", dict(pool=torch.zeros(0, 2, 8, 8))),
    (TypeError, "slots must be a tensor of int32 or int64, got list", dict(slots=[2, 0])),
    (ValueError, r"slots must have shape \[2\], got \[3\]", dict(slots=torch.arange(3))),
    (TypeError, "has_state must be a tensor of bool, got torch.int64", dict(has_state=torch.tensor([0, 1]))),
    (ValueError, "slots must be on the device of q", dict(slots=torch.zeros(2, dtype=torch.int32, device="meta"))),
    (ValueError, r"slots: entry 1 = 3 is outside 0..2 \(a negative one", dict(slots=torch.tensor([2, 3]))),
    (ValueError, "slots: slot 2 would be written twice", dict(slots=torch.tensor([2, 2]))),
    (ValueError, "slots: slot 2 would be written twice", dict(
        slots=torch.tensor([2, 2]), context=cp.contiguous([0, 30, 70], final_states="all"))),
    (ValueError, "pool is written, and its elements overlap", dict(pool=torch.zeros(1, 2, 8, 8).expand(3, 2, 8, 8))),
    (ValueError, "first_slot", dict(first_slot=-1)),
    (ValueError, "allow_neg_eigval", dict(allow_neg_eigval=True)),
    (NotImplementedError, "prefill has no gradients", dict(v=torch.randn(1, 70, 2, 8, requires_grad=True)))))
def test_prefills_that_do_not_fit(error, text, changes):
    x = prompts(**changes)
    before = x["pool"].clone() if x["pool"].device.type == "cpu" else None
    with pytest.raises(error, match=text):
        cp.prefill(**x)
    assert before is None or torch.equal(x["pool"], before)


def test_prefill_reads_and_writes_slots():
    x = prompts()
    x["pool"] += 1
    before = x["pool"].clone()
    o = cp.prefill(**x)
    alone = {name: value for name, value in x.items() if name != "context"}
    alone["pool"] = before.clone()
    o1 = serving.prefill(**alone, cu_seqlens=torch.tensor([0, 30, 70]))
    assert torch.equal(o, o1) and torch.equal(x["pool"], alone["pool"]) and torch.equal(x["pool"][1], before[1])
    none = prompts(slots=torch.tensor([-1, -1]))
    assert not cp.prefill(**none).any() and not none["pool"].any()


def test_one_process_has_the_bits_of_no_context():
    x = arguments()
    x["q"].requires_grad_()
    o, final = chunk_kda(**x, output_final_state=True)
    plain = {name: value for name, value in x.items() if name != "cp_context"}
    o1, final1 = chunk_kda(**plain, cu_seqlens=torch.tensor([0, 30, 70]), output_final_state=True)
    assert torch.equal(o, o1) and torch.equal(final, final1)
    (gradient,), (gradient1,) = (torch.autograd.grad(y.sum(), x["q"], create_graph=True) for y in (o, o1))
    assert torch.equal(gradient, gradient1)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        gradient.sum().backward()


def test_a_compiler_refuses():
    compiled = torch.compile(lambda x: chunk_kda(**x)[0], backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="is not for torch.compile"):
        compiled(arguments())
