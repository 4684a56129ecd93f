#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A whole KDA layer on a GPU: libkda's fused decode step beside a copy of its bytes and beside kernels that are not
fused, and the layer beside FLA's. One result each: gpu_fused_decode.json, gpu_layer.json.

    python3 bench/peers/layer_bench.py [--what step,layer] [--binaries build] [--results bench/results]

Needs the libkda package, triton, einops and fla-core with flash-linear-attention.
"""
import argparse
import functools
import math
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time
import types

os.environ.setdefault("FLA_FLASH_KDA", "0")  # FLA's own kernels

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "report"))
import evidence
import fla_configs  # before fla: it sets FLA's cache mode
import torch

from gpu_cases import COLD_BYTES, MOST_CALLS, PASSES, copy, graph_of, medians, microseconds, relative

ROOT = pathlib.Path(__file__).resolve().parents[2]
D, W, BOUND, EPS = 128, 4, -5.0, 1e-5
STEP_HEADS = (3, 6, 12, 24, 32, 48, 96)
STEP_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
UNFUSED_BATCHES = (1, 2, 4, 8, 16)
HIDDEN, HEADS = 2304, 32  # Kimi-Linear's


def borrow_configs(folder):
    """Where FLA's kernels are not tuned for this card, they start from what is tuned for an H200, another Hopper card
    (fla_configs.py). What is tuned here stays in `folder`. Returns the card whose configs are there."""
    mine = fla_configs.directory(HEADS).parent
    card = mine.name if mine.exists() else "NVIDIA_H200"
    shutil.copytree(fla_configs.ROOT / card, pathlib.Path(folder) / mine.name)
    fla_configs.ROOT = pathlib.Path(folder)
    return card


# ---- a decode step ---------------------------------------------------------------------------------------------------

def step_bytes(N, H):
    """What a step must read and write: states, inputs of the convolution before and behind it, rows of a token."""
    return N * H * (2 * D * D * 4 + (2 * 3 * (W - 1) + 3 + 3) * D * 2)


def step_inputs(N, H, generator):
    """As vLLM has them: rows of a projection, inputs of the convolution token by token, states [V, K], slot 0 none."""
    normal = lambda *shape: torch.randn(*shape, device="cuda", generator=generator)
    C = 3 * H * D
    taps = normal(3, H * D, W).bfloat16()
    conv = torch.zeros(N + 1, W - 1, C, device="cuda", dtype=torch.bfloat16)
    conv.normal_(generator=generator)
    state = torch.zeros(N + 1, H, D, D, device="cuda")
    state.normal_(std=0.1, generator=generator)
    return dict(x=normal(N, C).bfloat16(), weight=taps.float().transpose(1, 2).contiguous(), bias=None,
                conv_state=conv.transpose(1, 2), raw_g=normal(1, N, H, D).bfloat16(),
                raw_beta=normal(1, N, H).bfloat16(), A_log=normal(H) * 0.3, dt_bias=normal(H * D) * 0.3,
                state_indices=torch.arange(1, N + 1, device="cuda", dtype=torch.int32), state=state,
                out=torch.empty(1, N, H, D, device="cuda", dtype=torch.bfloat16), lower_bound=BOUND,
                output_gate=normal(1, N, H, D).bfloat16(), norm_weight=normal(D), norm_eps=EPS)


def unfused_step(a, N, H):
    """The same by libkda's own three calls."""
    import libkda
    weight = a["weight"].transpose(1, 2).flatten(0, 1).contiguous()
    rows, g, gate = a["x"][:, None], a["raw_g"].view(N, 1, H, D), a["output_gate"].view(N, 1, H, D)
    beta = a["raw_beta"].view(N, 1, H)
    kinds = dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True,
                 state_v_first=True)

    def call():
        qkv = libkda.short_conv_update(rows, a["conv_state"], weight, activation="silu", indices=a["state_indices"],
                                       first_slot=1)
        o = libkda.decode(*qkv.view(N, 1, 3, H, D).unbind(2), g, beta, a["state"], a["state_indices"], first_slot=1,
                          A_log=a["A_log"], dt_bias=a["dt_bias"], lower_bound=BOUND, **kinds)
        return libkda.gated_rms_norm(o, gate, a["norm_weight"], eps=EPS)
    return call


def fla_step(a, N, H):
    """By FLA's: a convolution each of q, k and v, as its layer has it, states in place, and its norm."""
    from fla.modules.causal_conv1d.ops import causal_conv1d_update
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
    caches = [torch.nn.functional.pad(part, (1, 0)).contiguous() for part in a["conv_state"][1:].chunk(3, 1)]
    weights = [part.T.contiguous().bfloat16() for part in a["weight"]]
    rows = [part.contiguous()[:, None] for part in a["x"].chunk(3, 1)]
    pool, steps = a["state"][1:].clone(), torch.arange(N + 1, device="cuda", dtype=torch.int32)
    out, shape = torch.empty_like(a["out"]), (1, N, H, D)

    def call():
        q, k, v = (causal_conv1d_update(x, cache, None, weight, None, "silu")[0].view(shape)
                   for x, cache, weight in zip(rows, caches, weights))
        o, _ = fused_recurrent_kda_fwd(
            q, k, v, a["raw_g"], a["raw_beta"], A_log=a["A_log"], dt_bias=a["dt_bias"], initial_state=pool,
            inplace_final_state=True, state_v_first=True, cu_seqlens=steps, ssm_state_indices=steps[:-1],
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            lower_bound=BOUND, out=out)
        return rms_norm_gated(o, a["output_gate"], a["norm_weight"], None, activation="sigmoid", eps=EPS)
    call.pool = pool
    return call


def step_row(N, H):
    import libkda
    bytes_ = step_bytes(N, H)
    calls = min(math.ceil(COLD_BYTES / bytes_), MOST_CALLS)
    generator = torch.Generator(device="cuda").manual_seed(0)
    layers = [step_inputs(N, H, generator) for _ in range(calls)]
    makers = dict(libkda=lambda a: lambda: libkda.fused_decode(**a))
    row = dict(heads=H, batch=N, bytes=bytes_, calls=calls)
    if N in UNFUSED_BATCHES:
        makers |= dict(libkda_unfused=lambda a: unfused_step(a, N, H), fla=lambda a: fla_step(a, N, H))
        row["difference"] = step_differences(layers[0], makers)
    half = bytes_ // 2
    copies = [torch.empty(2, half, device="cuda", dtype=torch.uint8) for _ in range(calls)]
    rounds = -(-8 // calls)  # a graph is long beside its launch
    launches = dict(copy=graph_of([functools.partial(copy, *pair) for pair in copies] * rounds))
    launches |= {name: graph_of([make(a) for a in layers] * rounds) for name, make in makers.items()}
    row.update(medians(launches, calls * rounds))
    print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return row


def step_differences(a, makers):
    """Of outputs and states, from those of FLA, behind one step from the same states."""
    found = {}
    kept = {n: a[n].clone() for n in ("conv_state", "state")}
    for name, make in makers.items():
        for n, x in kept.items():
            a[n].copy_(x)
        call = make(a)
        out = call().clone()
        found[name] = out, getattr(call, "pool", a["state"][1:]).clone()
    out, state = (x.double() for x in found.pop("fla"))
    return {name: [relative(theirs[0], out.view_as(theirs[0])), relative(theirs[1], state)]
            for name, theirs in found.items()}


def measure_steps():
    rows = []
    for H in STEP_HEADS:
        fla_configs.use(H)
        for N in STEP_BATCHES:
            rows.append(step_row(N, H))
            if N == 1:
                fla_configs.save(H)
            torch.cuda.empty_cache()
    return rows


# ---- a layer ---------------------------------------------------------------------------------------------------------

def fla_layer_class():
    """FLA's; the package around its layers wants transformers, the layer itself does not."""
    try:
        from fla.layers.kda import KimiDeltaAttention
    except ModuleNotFoundError:
        import fla
        for name in [name for name in sys.modules if name.startswith("fla.layers")]:
            del sys.modules[name]
        package = types.ModuleType("fla.layers")
        package.__path__ = [str(pathlib.Path(path) / "layers") for path in fla.__path__]
        sys.modules["fla.layers"] = package
        from fla.layers.kda import KimiDeltaAttention
    return KimiDeltaAttention


class Cache:
    """What FLA's layer asks of one, for one layer."""

    def __init__(self, states=None):
        self.states = states

    def __len__(self):
        return self.states is not None

    def __getitem__(self, layer):
        return self.states

    def update(self, layer_idx, recurrent_state, conv_state, offset):
        self.states = dict(recurrent_state=recurrent_state, conv_state=conv_state)


class LibkdaLayer:
    """The layer by libkda's functions, with the parameters of FLA's: what an engine does. One product makes q, k and
    v."""

    def __init__(self, layer):
        self.layer = layer
        self.projection = torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight])
        convs = (layer.q_conv1d, layer.k_conv1d, layer.v_conv1d)
        self.weight = torch.cat([conv.weight[:, 0] for conv in convs])
        self.taps = self.weight.float().unflatten(0, (3, -1)).transpose(1, 2).contiguous()
        self.norm_weight = layer.o_norm.weight.float()

    def rows(self, x):
        layer = self.layer
        return torch.nn.functional.linear(x, self.projection), layer.f_proj(x), layer.b_proj(x), layer.g_proj(x)

    def prefill(self, x):
        import libkda
        layer, heads = self.layer, (HEADS, D)
        qkv, g, beta, gate = self.rows(x)
        qkv, conv_state = libkda.short_conv(qkv, self.weight, activation="silu", output_final_state=True,
                                            state_width=W - 1)
        q, k, v = qkv.unflatten(-1, (3, *heads)).unbind(2)
        o, state = libkda.chunk_kda(
            q, k, v, g.unflatten(-1, heads), beta, A_log=layer.A_log, dt_bias=layer.dt_bias, output_final_state=True,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            safe_gate=layer.safe_gate, lower_bound=layer.lower_bound, state_v_first=True)
        o = libkda.gated_rms_norm(o, gate.unflatten(-1, heads), self.norm_weight, eps=EPS)
        return layer.o_proj(o.flatten(2)), state, conv_state

    def decode(self, x, conv_state, state, slots):
        import libkda
        layer, N = self.layer, x.shape[0]
        qkv, g, beta, gate = self.rows(x[:, 0])
        o = libkda.fused_decode(
            qkv, self.taps, None, conv_state, g.view(1, N, HEADS, D), beta[None], layer.A_log, layer.dt_bias, slots,
            state, None, layer.lower_bound, gate.view(1, N, HEADS, D), self.norm_weight, EPS)
        return layer.o_proj(o.view(N, 1, HEADS * D))


GATES = {"softplus": None, "bounded": BOUND}


def make_layer(gate):
    torch.manual_seed(0)
    layer = fla_layer_class()(hidden_size=HIDDEN, num_heads=HEADS, head_dim=D, safe_gate=gate == "bounded",
                              lower_bound=GATES[gate], layer_idx=0, norm_eps=EPS)
    layer = layer.cuda().eval().requires_grad_(False)
    for name, parameter in layer.named_parameters():
        if name not in ("A_log", "dt_bias"):
            parameter.data = parameter.data.bfloat16()
    return layer


def prefill_calls(gate, T):
    layer = make_layer(gate)
    x = torch.randn(1, T, HIDDEN, device="cuda").bfloat16()
    fla, ours = lambda: layer(x, past_key_values=Cache(), use_cache=True)[0], LibkdaLayer(layer)
    return {"fla": fla, "libkda_fla": fla, "libkda": lambda: ours.prefill(x)[0]}


def decode_calls(gate, N):
    """Each has states of its own, all the same at first."""
    layer = make_layer(gate)
    x = torch.randn(N, 1, HIDDEN, device="cuda").bfloat16()
    state = torch.randn(N, HEADS, D, D, device="cuda") * 0.1
    inputs = torch.randn(N, 3 * HEADS * D, W, device="cuda").bfloat16()

    def fla():
        """Every step begins with the same recurrent state: a graph must not read what a later step has freed."""
        states = dict(recurrent_state=state.clone(), conv_state=tuple(c.clone() for c in inputs.chunk(3, 1)))

        def call():
            cache = Cache(dict(states))
            out = layer(x, past_key_values=cache, use_cache=True)[0]
            states["conv_state"] = cache.states["conv_state"]  # of libkda they are parts of one tensor by then
            return out
        return call
    ours = LibkdaLayer(layer)
    pool = torch.zeros(N + 1, HEADS, D, D, device="cuda")
    conv_pool = torch.zeros(N + 1, W - 1, 3 * HEADS * D, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    pool[1:], conv_pool[1:] = state, inputs[..., 1:]
    slots = torch.arange(1, N + 1, device="cuda", dtype=torch.int32)
    return {"fla": fla(), "libkda_fla": fla(), "libkda": lambda: ours.decode(x, conv_pool, pool, slots)}


LAYER_SIZES = {"prefill": (1024, 8192), "decode": (1, 16, 64)}  # tokens; sequences


def switch(way):
    """libkda behind FLA's functions, or not."""
    import libkda.fla
    (libkda.fla.enable if way == "libkda_fla" else libkda.fla.disable)()


def eager_us(call, count=30):
    """A call from Python, until the device is done; never a full queue."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e6


def layer_row(gate, kind, size):
    """Of each way, in turns: us of calls from Python, of decode in a CUDA graph too; distances from FLA's outputs."""
    import libkda.fla
    torch.manual_seed(1)
    calls = (prefill_calls if kind == "prefill" else decode_calls)(gate, size)
    samples, outputs, graphs = {way: [] for way in calls}, {}, {}
    for way, call in calls.items():
        switch(way)
        outputs[way] = call().double()
        path = libkda.fla.last_path("step" if kind == "decode" else "kda")
        if way == "libkda_fla" and not path.startswith("libkda"):
            raise RuntimeError(f"FLA's layer was not served: {path}")
    time_of = eager_us if kind == "decode" else lambda call: microseconds(call, rep=50)
    for _ in range(PASSES):
        for way, call in calls.items():
            switch(way)
            samples[way].append(time_of(call))
    row = dict(gate=gate, kind=kind, size=size,
               **{way: dict(eager=statistics.median(us)) for way, us in samples.items()},
               difference={way: relative(outputs[way], outputs["fla"]) for way in ("libkda_fla", "libkda")})
    if kind == "decode":
        for way, call in calls.items():
            switch(way)
            graphs[way] = graph_of([call] * 8)
        for way, us in medians(graphs, 8).items():
            row[way]["graph"] = us
    print(row, flush=True)
    return row


def measure_layers():
    rows = []
    fla_configs.use(HEADS)
    for gate in GATES:
        for kind, sizes in LAYER_SIZES.items():
            for size in sizes:
                rows.append(layer_row(gate, kind, size))
                torch.cuda.empty_cache()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--what", default="step,layer", help="step, layer or both (%(default)s)")
    parser.add_argument("--binaries", type=pathlib.Path, default=ROOT / "build",
                        help="a folder with kernel_hashes.json of the build that the package has")
    parser.add_argument("--results", type=pathlib.Path, default=evidence.RESULTS)
    args = parser.parse_args()
    import fla
    import triton
    results = {"step": ("gpu_fused_decode", measure_steps),
               "layer": ("gpu_layer", measure_layers)}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        card = borrow_configs(folder)
        for what in args.what.split(","):
            name, measure = results[what]
            report = evidence.header(args.binaries, name, f"python3 bench/peers/layer_bench.py --what {what}")
            report.update(torch=torch.__version__, triton=triton.__version__, fla=fla.__version__, fla_configs=card)
            evidence.write(args.results / f"{name}.json", report | {"cases": measure()})


if __name__ == "__main__":
    main()
