# SPDX-License-Identifier: Apache-2.0
"""A long sequence over the GPUs, or processes, of a machine: speed, bytes exchanged, error against one of them.

    torchrun --nproc-per-node 4 examples/long_context.py --tokens 1048576
    python examples/long_context.py                                        # one process

Forward and backward of one sequence, tokens even over the processes. The error is that of a shorter sequence.
"""
import argparse
import json
import os
import sys
import time

import torch
import torch.distributed as dist

import libkda
from libkda import context_parallel

FLAGS = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
             output_final_state=True)


def options():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=16384, help="of the whole sequence")
    parser.add_argument("--prefix", type=int, default=2048, help="tokens of the sequence whose error is measured")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128, help="K and V")
    parser.add_argument("--layout", choices=("contiguous", "zigzag"), default="contiguous")
    parser.add_argument("--tile", type=int, help="tokens; one result for every number of processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu",
                        help="cuda: a GPU for each process (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write what is printed as JSON, too")
    return parser.parse_args()


def inputs(tokens, heads, dim, seed, device):
    generator = torch.Generator(device).manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device=device)
    rows = dict(q=normal(1, tokens, heads, dim), k=normal(1, tokens, heads, dim), v=normal(1, tokens, heads, dim),
                g=normal(1, tokens, heads, dim) - 4, beta=normal(1, tokens, heads))
    return {name: x.bfloat16() for name, x in rows.items()}


def gradients(rows, A_log, **where):
    """o, the final state, and the gradients of the rows, for a loss that has a gradient of every output."""
    leaves = {name: x.detach().requires_grad_() for name, x in rows.items()}
    o, final_state = libkda.chunk_kda(**leaves, A_log=A_log, **FLAGS, **where)
    loss = (o * rows["v"]).float().sum() + final_state.square().sum()
    return [o.detach(), *torch.autograd.grad(loss, leaves.values())]


def relative_errors(context, arguments, A_log):
    """Of outputs and gradients on all processes, against one process: the largest."""
    rows = inputs(arguments.prefix, arguments.heads, arguments.dim, 1, A_log.device)
    here = gradients({name: context.take(x) for name, x in rows.items()}, A_log, cp_context=context)
    alone = gradients(rows, A_log)
    worst = 0.0
    for x, expected in zip(here, alone):
        sums = torch.stack([(x.double() - context.take(expected).double()).square().sum(),
                            context.take(expected).double().square().sum()])
        if context.ranks > 1:
            dist.all_reduce(sums)
        worst = max(worst, (sums[0] / sums[1]).sqrt().item())
    return worst


def wait(context, device):
    """For this rank's device, and for the other ranks."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    if context.ranks > 1:
        dist.barrier()


def progress(done, rounds, rank):
    if rank == 0 and sys.stderr.isatty():
        bar = "#" * (20 * done // rounds)
        end = "\n" if done == rounds else ""
        print(f"\r[{bar:<20}] {done} of {rounds} rounds", end=end, file=sys.stderr, flush=True)


def main():
    arguments = options()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    build = getattr(context_parallel, arguments.layout)
    A_log = torch.zeros(arguments.heads, device=device)
    error = relative_errors(build([0, arguments.prefix], tile=arguments.tile), arguments, A_log)
    context = build([0, arguments.tokens], tile=arguments.tile)
    rows = inputs(context.num_tokens, arguments.heads, arguments.dim, 2 + context.rank, device)
    seconds = []
    for i in range(arguments.rounds + 1):  # the first one makes plans and touches memory
        wait(context, device)
        start = time.perf_counter()
        gradients(rows, A_log, cp_context=context)
        wait(context, device)
        seconds += [time.perf_counter() - start] if i else []
        progress(i, arguments.rounds, context.rank)
    exchange = context.exchange(arguments.heads, arguments.dim, arguments.dim)
    if context.rank == 0:
        sent = exchange.forward_bytes + exchange.backward_bytes
        found = dict(device=arguments.device, processes=context.ranks, tokens=arguments.tokens,
                     heads=arguments.heads, dim=arguments.dim, layout=arguments.layout, tile=arguments.tile,
                     seconds=min(seconds), tokens_per_second=arguments.tokens / min(seconds), sent_bytes=sent,
                     relative_error=error)
        print(f"{context.ranks} processes, {arguments.tokens} tokens, {arguments.heads} heads of {arguments.dim}: "
              f"{found['seconds'] * 1e3:.1f} ms forward and backward, {found['tokens_per_second']:.0f} tokens/s")
        print(f"each process sends {exchange.forward_bytes} bytes forward and {exchange.backward_bytes} backward")
        print(f"largest relative difference from one process, {arguments.prefix} tokens: {error:.1e}")
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump(found, file, indent=1)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
