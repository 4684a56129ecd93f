#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains the language model of this folder on text files, with libkda's gradients.

The model reads bytes and predicts the next one. Its layers call libkda.chunk_kda, forward and backward, so
the whole script is plain PyTorch: a loss, loss.backward(), an optimizer step.

    python3 examples/language_model/train.py                       # the texts of this repository, minutes on a CPU
    python3 examples/language_model/train.py book.txt --steps 2000 --output book.safetensors
    python3 examples/language_model/generate.py "The state is" --weights book.safetensors

The loss is in bits a byte: 8 for a model that knows nothing, about 4.3 for letter frequencies, below 3 after some
hundred steps on English text.

Ctrl-C stops after the step at hand and keeps a checkpoint; --resume goes on from it as if nothing had happened, to the
last bit on the same machine and number of threads.
"""
import argparse
import math
import pathlib
import signal
import sys
import time

import torch
import torch.nn.functional as F
from model import LanguageModel
from safetensors.torch import save_file

from libkda import chunk_kda

ROOT = pathlib.Path(__file__).resolve().parents[2]
WARM_UP = 50  # steps until the learning rate is whole


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", type=pathlib.Path, metavar="TEXT",
                        help="files to learn from (the documents of this repository)")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in all (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="pieces of text a step (%(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="bytes a piece (%(default)s)")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the pieces (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda, where gradients of fp32 are slow (%(default)s)")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("model.safetensors"),
                        help="where the weights go, in fp16 (%(default)s)")
    parser.add_argument("--checkpoint", type=pathlib.Path, metavar="FILE",
                        help="weights and optimizer, to resume from (OUTPUT.checkpoint)")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS",
                        help="between checkpoints (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    args = parser.parse_args()
    args.texts = args.texts or [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    args.checkpoint = args.checkpoint or args.output.with_suffix(".checkpoint")
    for name in ("steps", "batch", "tokens", "save_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    for path in args.texts:
        if not path.is_file():
            parser.error(f"{path} is no file")
    if args.resume and not args.checkpoint.is_file():
        parser.error(f"--resume: there is no checkpoint {args.checkpoint}")
    return args, parser


def pieces(data, args, step):
    """[batch, tokens + 1] bytes, a function of seed and step: resuming needs no state."""
    random = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    begin = torch.randint(len(data) - args.tokens, (args.batch, 1), generator=random)
    return data[begin + torch.arange(args.tokens + 1)].to(args.device)


def rate_of(step, args):
    """Up in the first steps, then along a cosine down to a twentieth."""
    done = step / args.steps
    return args.rate * min(1, (step + 1) / WARM_UP) * (0.525 + 0.475 * math.cos(math.pi * done))


def train_step(model, optimizer, rows):
    """The loss in bits a byte."""
    logits, _ = model(rows[:, :-1], chunk_kda)
    loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item() / math.log(2)


class Progress:
    """A bar on a terminal, else a line now and then."""

    def __init__(self, first, args):
        self.first, self.args, self.start, self.mean = first, args, time.perf_counter(), None
        self.bar = sys.stderr.isatty()

    def show(self, step, loss):
        self.mean = loss if self.mean is None else 0.95 * self.mean + 0.05 * loss
        args, done = self.args, step + 1
        last = done == args.steps
        if not (self.bar or last or done % 50 == 0):
            return
        seconds = time.perf_counter() - self.start
        pace = (done - self.first) / seconds
        left = round((args.steps - done) / pace)
        text = (f"step {done}/{args.steps}  {self.mean:.3f} bits a byte  "
                f"{pace * args.batch * args.tokens:,.0f} tokens/s  {left // 60}:{left % 60:02} left")
        if self.bar:
            full = 20 * done // args.steps
            text = f"\r[{'#' * full}{'.' * (20 - full)}] {text}\033[K"
        print(text, end="\n" if last or not self.bar else "", file=sys.stderr, flush=True)


def save_checkpoint(args, model, optimizer, step):
    """Whole or not at all: a checkpoint that was being written is not one."""
    partial = args.checkpoint.with_name(args.checkpoint.name + ".partial")
    torch.save(dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step), partial)
    partial.replace(args.checkpoint)


def main():
    args, parser = arguments()
    torch.manual_seed(args.seed)
    torch.set_flush_denormal(True)
    data = torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in args.texts)), dtype=torch.uint8).long()
    if len(data) <= args.tokens:
        parser.error(f"the texts have {len(data)} bytes, a piece needs {args.tokens + 1}: give more, or less --tokens")
    model = LanguageModel().to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.98), weight_decay=0.05)
    first = 0
    if args.resume:
        kept = torch.load(args.checkpoint, map_location=args.device, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        first = kept["step"]
    print(f"{sum(x.numel() for x in model.parameters()):,} weights, {len(data):,} bytes of text, "
          f"steps {first + 1} to {args.steps} on {args.device}", file=sys.stderr)

    stopped = []
    signal.signal(signal.SIGINT, lambda *_: stopped.append(True))
    progress = Progress(first, args)
    for step in range(first, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step, args)
        progress.show(step, train_step(model, optimizer, pieces(data, args, step)))
        if stopped or (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save_checkpoint(args, model, optimizer, step + 1)
        if stopped:
            print(f"\nstopped; --resume goes on from {args.checkpoint}", file=sys.stderr)
            return 130
    save_file({name: x.half().contiguous() for name, x in model.state_dict().items()}, args.output)
    print(f"weights: {args.output}, {args.output.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
