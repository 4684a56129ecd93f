#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a transformers model gains by `import libkda.transformers` on a CPU: prefill and decode of a Kimi-Linear model,
or of a Qwen3-Next model, with random weights, three layers of KDA or Gated DeltaNet and one of full attention, fp32,
one thread.

    python3 bench/transformers_bench.py --json bench/results/cpu_transformers.json
    python3 bench/transformers_bench.py --model qwen3_next --json bench/results/cpu_transformers_gdn.json

Every number is the least processor time of several runs; the three ways take turns, so that other work on the machine
meets all of them: the model's own torch functions, libkda's KDA or Gated DeltaNet with torch's convolution and norms,
and all that libkda serves.
"""
import argparse
import contextlib
import pathlib
import platform
import shlex
import sys
import time

import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python" / "tests"))
import transformers_models as models  # noqa: E402

import libkda.transformers  # noqa: E402
from report import evidence  # noqa: E402


MODELS = dict(kimi_linear=models.kimi_of, qwen3_next=models.qwen_of)
LAYERS = dict(kimi_linear="self_attn", qwen3_next="linear_attn")  # where layers of KDA or Gated DeltaNet are


@contextlib.contextmanager
def kda_alone(family):
    """libkda without the convolution and the norms."""
    file = models.file_of(family)
    norms = [found for name, found in vars(file).items() if name.endswith(("RMSNormGated", "RMSNorm"))]
    places = [(file, name) for name in models.CONVOLUTIONS] + [(norm, "forward") for norm in norms]
    own = [getattr(place, name) for place, name in places]
    with models.served():
        ours = [getattr(place, name) for place, name in places]
        for (place, name), function in zip(places, own):
            setattr(place, name, function)
        try:
            yield
        finally:
            for (place, name), function in zip(places, ours):
                setattr(place, name, function)


def ways_of(family):
    return dict(torch=contextlib.nullcontext, kda_alone=lambda: kda_alone(family), libkda=models.served)


def in_turns(ways, calls, rounds, repeats):
    """Milliseconds of calls[way]() by way."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for way, switch in ways.items():
            with switch():
                for _ in range(repeats):
                    start = time.process_time()
                    calls[way]()
                    best[way] = min(best[way], time.process_time() - start)
    return {way: 1e3 * seconds for way, seconds in best.items()}


def caches_of(ways, model, ids):
    """A cache of its own for each way, after a prefill."""
    caches = {}
    for way, switch in ways.items():
        with switch():
            caches[way] = model(ids, use_cache=True)[1]
    return caches


def measure(family, heads, tokens, rounds):
    ways = ways_of(family)
    model, ids = MODELS[family](heads), torch.randint(2, models.VOCABULARY, (1, tokens))
    layer = getattr(model.model.layers[0], LAYERS[family])
    hidden = torch.randn(1, 1, model.config.hidden_size)
    caches = caches_of(ways, model, ids)
    cases = {
        "prefill": (lambda cache: model(ids, use_cache=True), rounds, 1),
        "decode": (lambda cache: model(ids[:, :1], use_cache=True, past_key_values=cache), rounds, 20),
        "layer_decode": (lambda cache: layer(hidden, cache=cache), rounds, 100),
    }
    rows = []
    for name, (call, count, repeats) in cases.items():
        calls = {way: (lambda way=way, call=call: call(caches[way])) for way in ways}
        ms = in_turns(ways, calls, count, repeats)
        rows.append(dict(case=name, heads=heads, tokens=tokens if name == "prefill" else 1, ms=ms,
                         times_as_fast=ms["torch"] / ms["libkda"]))
        print(f"{heads:3} heads, {name:13}" + "".join(f"{way} {x:9.2f} ms  " for way, x in ms.items()) +
              f"{rows[-1]['times_as_fast']:.2f}x", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="kimi_linear")
    parser.add_argument("--heads", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=4, help="of 32 heads; more of fewer, which take less time")
    parser.add_argument("--json", type=pathlib.Path, help="write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    machine, rows = evidence.machine(), []
    with torch.inference_mode(), models.torch_functions(args.model):
        for heads in args.heads:
            rows += measure(args.model, heads, args.tokens, max(1, args.rounds * 32 // heads))
    if args.json:
        about = dict(machine, threads=1,
                     command=shlex.join(["python3", "bench/transformers_bench.py", *sys.argv[1:]]),
                     versions=dict(libkda=libkda.__version__, torch=torch.__version__,
                                   transformers=transformers.__version__, python=platform.python_version()))
        evidence.write(args.json, dict(about, rows=rows))


if __name__ == "__main__":
    main()
