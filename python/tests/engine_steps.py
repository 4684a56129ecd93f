# SPDX-License-Identifier: Apache-2.0
"""Steps of layers of vLLM and SGLang with the Triton kernels of their wheels, and the same steps with libkda's plugin,
from equal memory.

    KDA_ENGINES=FOLDER python engine_steps.py --heads 8 --dim 128 --device cuda

Prints a line of JSON a step: relative distances of outputs and states from float64 for both, and from each other, who
served the plugin's, and whether a CUDA graph of a step has the bits of the step itself. On a CPU Triton's interpreter
runs the engine's kernels, in fp32.
"""
import argparse
import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import os
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

if __name__ == "__main__" and "cuda" not in sys.argv:
    os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")  # before triton is imported

import engine_sources
import torch
import triton
import triton.language.extra.libdevice
from common import distance, reference
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver
from triton.runtime.errors import InterpreterError

import libkda.sglang
import libkda.vllm

W, BOUND, DRAFTS = 4, -5.0, 4
KIMI = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"
QWEN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
VLLM_KDA = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
SGLANG = "sglang.srt.layers.attention.linear"
SGLANG_CONV = "sglang.kernels.ops.mamba.causal_conv1d_triton"


def on_a_gpu():
    return torch.cuda.is_available()


def capability():
    major, minor = torch.cuda.get_device_capability() if on_a_gpu() else (0, 0)
    return 10 * major + minor


def has_capability(wanted):
    return capability() >= wanted


def missing(name):
    def function(*args, **kwargs):
        raise NotImplementedError(f"{name} is compiled, and in no wheel's Python files")

    return function


# ---- what the engines' files import besides their kernels ------------------------------------------------------------

class Metadata(types.SimpleNamespace):
    """GDNAttentionMetadata of vLLM."""


context = types.SimpleNamespace(attn_metadata=None)


def gathered(pool, slots, has_state):
    """gather_initial_states of vLLM."""
    return torch.where(has_state[:, None, None, None], pool[slots.long()], 0)


def vllm_given():
    platform = types.SimpleNamespace(
        is_rocm=lambda: False, is_cpu=lambda: False, is_cuda=on_a_gpu, is_cuda_alike=on_a_gpu, is_xpu=lambda: False,
        is_arch_support_pdl=lambda: has_capability(90), has_device_capability=has_capability,
        is_device_capability_family=lambda *args, **kwargs: False, simple_compile_backend="eager")
    language = dict(triton=triton, tl=triton.language, tldevice=triton.language.extra.libdevice)
    ops = "vllm.model_executor.layers.mamba.ops"
    on_a_cpu = {  # the former asserts that it is on a GPU, and the interpreter cannot run the other
        f"{ops}.gather_initial_states": {"gather_initial_states": gathered},
        f"{ops}.causal_conv1d": {name: getattr(libkda.vllm, name) for name in ("causal_conv1d_fn",
                                                                              "causal_conv1d_update")}}
    return {
        "transformers": {}, "flashinfer": None, "regex": {},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": language,
        "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": contextlib.nullcontext},
        "vllm.utils.torch_utils": {"async_tensor_h2d": lambda x, device, dtype: x.to(device, dtype)},
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
        "vllm.v1.attention.backends.gdn_attn": {"GDNAttentionMetadata": Metadata},
        "vllm.forward_context": {"get_forward_context": lambda: context},
        "vllm.model_executor.layers.mamba.mamba_utils": {"is_conv_state_dim_first": lambda: False},
        "vllm._aiter_ops": {"rocm_aiter_ops": types.SimpleNamespace(
            are_gdn_triton_kernels_available=lambda: False, is_rdna_gdn_triton_kernels_available=lambda: False)},
        **({} if on_a_gpu() else on_a_cpu),
    }


class Struct:
    """msgspec's."""

    def __init_subclass__(cls, **options):
        pass


class Base:
    """MambaAttnBackendBase of SGLang: what follows a step, for the slots of a prefix cache."""

    def _track_mamba_state_decode(self, *args):
        pass


def sglang_given():
    attention = "sglang.kernels.ops.attention"
    conv = lambda *args, **kwargs: sys.modules[SGLANG_CONV].causal_conv1d_fn(*args, **kwargs)
    return {
        "msgspec": {"Struct": Struct}, "flashinfer": None,
        "sglang.srt.utils": {
            "is_cuda": on_a_gpu, "get_device_sm": capability, "is_sm90_supported": lambda: capability() // 10 == 9,
            **{f"is_{kind}": lambda: False for kind in ("cpu", "hip", "npu", "xpu", "gfx95_supported")}},
        "sglang.srt.utils.common": {"torch_release": (2, 11)},
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: has_capability(90)},
        "sglang.srt.layers.attention.hybrid_linear_attn_backend": {"MambaAttnBackendBase": Base},
        "sglang.srt.layers.attention.mamba.causal_conv1d": {"causal_conv1d_fn": conv},  # else compiled
        f"{SGLANG}.utils": {"select_verify_intermediate_state_indices": lambda indices, *rest: indices},
        "sglang.srt.mem_cache.memory_pool": {"MambaPool": types.SimpleNamespace(
            SpeculativeState=types.SimpleNamespace)},
        f"{attention}.kda_packed_decode": {"covered": lambda *args: False},
        f"{attention}.kda_fused_decode": {"covered": lambda *args: False, "kda_fused_decode": missing("fused decode")},
        f"{attention}.linear.fused_recurrent_linear_replayssm": {
            f"fused_recurrent_{kind}_replayssm_decode": missing("ring") for kind in ("linear", "gdn")},
    }


class Choice:
    """LinearAttnKernelBackend of SGLang: Triton."""

    def __getattr__(self, name):
        return lambda: name == "is_triton"


@contextlib.contextmanager
def engine(name):
    """Modules of an engine's layers with its own kernels; libkda's plugin is off."""
    given = {"vllm": vllm_given, "sglang": sglang_given}[name]()
    modules = {"vllm": (VLLM_KDA, KIMI, QWEN), "sglang": (
        SGLANG_CONV, f"{SGLANG}.kda_backend", f"{SGLANG}.gdn_backend", f"{SGLANG}.kernels.gdn_flashinfer")}[name]
    compile_function = torch.compile
    torch.compile = lambda *args, **options: args[0] if args else lambda function: function
    try:
        with engine_sources.Engine(name, given, kernels=True):
            yield {module: importlib.import_module(module) for module in modules}
    finally:
        torch.compile = compile_function
        if not on_a_gpu():
            driver.set_active(None)  # the next engine asks again


# ---- steps -----------------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Step:
    """A step of a layer. run() returns outputs [rows, HV, D]; `memory` is what it reads and writes again and again;
    expected() is (outputs, states) of its tokens in float64 from the memory as it is, and states() those behind it,
    [tokens or sequences, HV, V, K]. cut(lengths) cuts the same tokens into sequences of other lengths, in the tables
    that the step has."""
    run: Callable
    memory: list
    expected: Callable
    states: Callable
    cut: Callable | None = None


@dataclasses.dataclass
class Rows:
    """Tokens of a step behind the projections: x [T, width] in front of the convolution, gates, betas; tokens
    [begin[n], begin[n + 1]) are those of sequence n, in slot slots[n], behind a state if has_state[n]."""
    x: torch.Tensor
    gates: torch.Tensor
    betas: torch.Tensor
    starts: list
    slots: list
    has_state: list


class Layer:
    """A layer of KDA or Gated DeltaNet with random parameters, and memory for `slots` requests. Slot 0 is nobody's."""

    def __init__(self, modules, kind, heads, dim, value_heads=None, slots=8, dtype=torch.bfloat16,
                 pool_dtype=torch.float32, drafts=0):
        self.kind, self.H, self.D, self.slots, self.dtype = kind, heads, dim, slots, dtype
        self.HV, self.drafts = value_heads or heads, drafts
        self.keys, self.values = heads * dim, self.HV * dim
        self.width, self.is_kda = 2 * self.keys + self.values, kind == "kda"
        self.weight = torch.randn(self.width, W) * 0.5
        self.A_log = torch.randn(self.HV) * 0.3
        self.dt_bias = torch.randn(self.values if self.is_kda else self.HV) * 0.3
        self.make(modules, pool_dtype)

    def rows(self, lengths, has_state, padded=0):
        T, gates = sum(lengths) + padded, self.values if self.is_kda else self.HV
        wide = torch.randn(T, self.width + self.HV + 8 - self.HV % 8).to(self.dtype)
        return Rows(wide[:, :self.width], torch.randn(T, gates).to(self.dtype),
                    wide[:, self.width:self.width + self.HV], starts_of(lengths), list(range(1, len(lengths) + 1)),
                    has_state)

    def expected(self, rows, conv_states, pool, every_state=False):
        """conv_states: [slots, W - 1 or more, width]."""
        outputs, states = [], []
        for begin, end, slot, has_state in zip(rows.starts, rows.starts[1:], rows.slots, rows.has_state):
            before = conv_states[slot, :W - 1] if has_state else torch.zeros_like(conv_states[slot, :W - 1])
            x = torch.cat([before.double(), rows.x[begin:end].double()])
            x = sum(x[j:j + end - begin] * self.weight[:, j].double() for j in range(W))
            q, k, v = (t.unflatten(1, (-1, self.D)) for t in torch.nn.functional.silu(x).split(
                [self.keys, self.keys, self.values], dim=1))
            q, k = (t.repeat_interleave(self.HV // self.H, 1) for t in (q, k))
            g, bias = rows.gates[begin:end], self.dt_bias
            if self.is_kda:
                g = g.unflatten(1, (self.HV, self.D))
            else:
                g, bias = g[..., None].expand(-1, -1, self.D), bias.repeat_interleave(self.D)
            given = dict(q=q, k=k, v=v, g=g, beta=rows.betas[begin:end])
            state = pool[slot].double().mT[None]
            state = state if has_state else torch.zeros_like(state)
            for first, last in ([(t, t + 1) for t in range(end - begin)] if every_state else [(0, end - begin)]):
                o, state = reference({name: t[None, first:last] for name, t in given.items()},
                                     dict(A_log=self.A_log, dt_bias=bias), state,
                                     "bounded" if self.is_kda else "softplus", BOUND)
                outputs.append(o[0])
                states.append(state[0].mT)
        return torch.cat(outputs), torch.stack(states)

    def prefill(self, lengths, has_state=None, padded=0):
        return self.step("prefill", self.rows(lengths, has_state or [False] * len(lengths)), padded)

    def decode(self, count, padded=0):
        return self.step("decode", self.rows([1] * count, [True] * count, padded), padded)

    def verify(self, count, padded=0):
        return self.step("verify", self.rows([self.drafts] * count, [True] * count,
                                             padded * self.padded_drafts), padded)


def starts_of(lengths):
    return [0, *itertools.accumulate(lengths)]


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


class OfVllm(Layer):
    """Padded rows of a decode have slot 0, padded sequences no tokens besides."""

    plugin, padded_drafts = libkda.vllm, 0

    def make(self, modules, pool_dtype):
        name, module = {"kda": ("KimiGatedDeltaNetAttention", KIMI), "gdn": ("QwenGatedDeltaNetAttention", QWEN)}[
            self.kind]
        self.layer = layer = object.__new__(getattr(modules[module], name))
        window, pages = W - 1 + max(0, self.drafts - 1), self.slots * max(1, self.drafts) + 1
        self.conv_states = torch.randn(pages, window, self.width).to(self.dtype)
        self.pool = (torch.randn(pages, self.HV, self.D, self.D) * 0.2).to(pool_dtype)
        layer.__dict__.update(
            prefix="a", tp_size=1, activation="silu", head_dim=self.D, local_num_heads=self.H,
            local_projection_size=self.keys, gate_lower_bound=BOUND, A_log=self.A_log, dt_bias=self.dt_bias,
            num_k_heads=self.H, num_v_heads=self.HV, head_k_dim=self.D, head_v_dim=self.D, key_dim=self.keys,
            value_dim=self.values, enable_packed_recurrent_decode=True, kv_cache=(self.conv_states, self.pool),
            conv1d=types.SimpleNamespace(weight=self.weight[:, None], bias=None), o_norm=lambda x, gate: x)
        if not self.is_kda:
            layer.chunk_gated_delta_rule = object.__new__(modules[QWEN].ChunkGatedDeltaRule).forward_native

    def step(self, name, rows, padded):
        N, T = len(rows.slots), rows.x.shape[0]
        fields = dict.fromkeys((
            "has_initial_state", "non_spec_query_start_loc", "non_spec_state_indices_tensor", "spec_sequence_masks",
            "spec_token_indx", "non_spec_token_indx", "spec_state_indices_tensor", "spec_query_start_loc",
            "num_accepted_tokens", "checkpoint", "chunk_indices", "chunk_offsets", "aiter_prefill_metadata",
            "flashinfer_checkpoint_plan"))
        fields |= dict(num_prefills=0, num_decodes=0, num_spec_decodes=0, num_actual_tokens=T, num_decode_tokens=0)
        fields |= {"prefill": self.prompts, "decode": self.tokens, "verify": self.drafted}[name](rows, N, padded)
        metadata, after = Metadata(**fields), rows.slots
        if name == "verify":
            after = fields["spec_state_indices_tensor"][:N].flatten().tolist()
        out = torch.empty(1, T, self.HV, self.D, dtype=self.dtype)
        call = self.kda if self.is_kda else self.gdn

        def run():
            context.attn_metadata = {"a": metadata}
            call(rows, out)
            return out[0, :rows.starts[-1]]

        def cut(lengths):
            rows.starts[:] = starts_of(lengths)
            fields["non_spec_query_start_loc"][:] = int32(rows.starts + rows.starts[-1:] * padded)
            fields["programs"][:] = self.programs(rows)

        return Step(run, [rows.x, self.conv_states, self.pool],
                    lambda: self.expected(rows, self.conv_states, self.pool, every_state=name == "verify"),
                    lambda: self.pool[after], cut if name == "prefill" else None)

    def kda(self, rows, out):
        self.layer._forward(rows.x, rows.gates.view(1, -1, self.HV, self.D), None, rows.betas[None], out)

    def gdn(self, rows, out):
        self.layer._forward_core(mixed_qkv=rows.x, b=rows.betas.contiguous(), a=rows.gates, core_attn_out=out[0])

    def prompts(self, rows, N, padded):
        starts, has_state = int32(rows.starts + rows.starts[-1:] * padded), rows.has_state + [False] * padded
        slots, has_state = int32(rows.slots + [0] * padded), torch.tensor(has_state)
        programs = self.programs(rows)
        pointers = dict(batch_ptr=programs[0], token_chunk_offset_ptr=programs[1])
        return dict(num_prefills=N, has_initial_state=has_state, non_spec_query_start_loc=starts,
                    non_spec_state_indices_tensor=slots, prefill_state_indices=slots,
                    prefill_has_initial_state=has_state, prefill_query_start_loc=starts, programs=programs,
                    nums_dict={8: dict(pointers, tot=programs.shape[1], mlist=None, mlist_len=0, offsetlist=None)},
                    **pointers)

    def programs(self, rows):
        """Sequence of each block of 8 tokens of the convolution, and its place there; then -1, to as many blocks as any
        table of so many tokens and sequences has."""
        lengths = [end - begin for begin, end in zip(rows.starts, rows.starts[1:])]
        blocks = [(n, i) for n, length in enumerate(lengths) for i in range(-(-length // 8))]
        most = rows.starts[-1] // 8 + len(lengths)
        return int32(blocks + [(-1, -1)] * (most - len(blocks))).T.contiguous()

    def tokens(self, rows, N, padded):
        return dict(num_decodes=N + padded, num_decode_tokens=N + padded,
                    non_spec_state_indices_tensor=int32(rows.slots + [0] * padded),
                    non_spec_query_start_loc=torch.arange(N + padded + 1, dtype=torch.int32))

    def drafted(self, rows, N, padded):
        table = torch.arange(1, N * self.drafts + 1, dtype=torch.int32).view(self.drafts, N).T
        return dict(num_spec_decodes=N + padded, spec_sequence_masks=torch.ones(N + padded, dtype=torch.bool),
                    spec_query_start_loc=int32(rows.starts + rows.starts[-1:] * padded),
                    spec_state_indices_tensor=torch.nn.functional.pad(table, (0, 0, 0, padded)).contiguous(),
                    num_accepted_tokens=torch.ones(N + padded, dtype=torch.int32))


class OfSglang(Layer):
    """Padded rows have slot -1."""

    plugin, padded_drafts = libkda.sglang, DRAFTS

    def make(self, modules, pool_dtype):
        file = modules[f"{SGLANG}.{self.kind}_backend"]
        name = self.kind.upper()
        self.backend = backend = object.__new__(getattr(file, f"{name}AttnBackend"))
        dispatcher = backend.kernel_dispatcher = getattr(file, f"{name}KernelDispatcher")(*[Choice()] * 3)
        backend._fused_override_notice = backend._fused_chain_verify_fn = backend.accept_lens_pool = None
        backend.prefill_graph_metadata = backend.mis_metadata = None
        backend._use_strided_target_verify_qkv, backend.requires_contiguous_prefill_state = False, True
        if not self.is_kda:  # libkda takes the place of FlashInfer's prompts, and Triton has them else
            self.own_extend, self.flashinfer = dispatcher.extend_kernel, object.__new__(
                modules[f"{SGLANG}.kernels.gdn_flashinfer"].FlashInferGDNKernel)
            self.flashinfer.use_state_pool = False
        slots, window = self.slots + 1, (W - 1, self.width) if self.is_kda else (self.width, W - 1)
        self.conv_pool = torch.randn(slots, *window).to(self.dtype)
        self.pool = (torch.randn(slots, self.HV, self.D, self.D) * 0.2).to(pool_dtype)
        self.scratch = torch.zeros(slots, max(1, self.drafts), self.HV, self.D, self.D)
        cache = types.SimpleNamespace(
            conv=[self.conv_pool], temporal=self.pool, replayssm_d=None, replayssm_k=None, replayssm_g=None,
            replayssm_rawv=None, intermediate_ssm=self.scratch,
            intermediate_conv_window=[torch.zeros(slots, max(1, self.drafts), *window, dtype=self.dtype)])
        backend.req_to_token_pool = types.SimpleNamespace(
            mamba2_layer_cache=lambda layer: cache, size=slots, mamba_pool=types.SimpleNamespace())
        backend.verify_intermediate_state_indices = torch.arange(slots, dtype=torch.int32)
        self.layer = types.SimpleNamespace(
            layer_id=0, q_dim=self.keys, k_dim=self.keys, v_dim=self.values, head_q_dim=self.D, head_k_dim=self.D,
            head_v_dim=self.D, num_q_heads=self.H, num_k_heads=self.H, num_v_heads=self.HV, dt_bias=self.dt_bias,
            A_log=self.A_log.view(1, 1, -1, 1) if self.is_kda else self.A_log, lower_bound=BOUND, bias=None,
            conv_weights=self.weight.to(self.dtype).contiguous(), activation="silu")
        self.weight = self.layer.conv_weights

    def step(self, name, rows, padded):
        N, method = len(rows.slots), self.backend.forward_decode if name == "decode" else self.backend.forward_extend
        starts, slots = int32(rows.starts), int32(rows.slots + [-1] * padded)
        if name == "prefill":
            starts = torch.cat([starts, starts[-1:].expand(padded)])
            self.pool[[slot for slot, started in zip(rows.slots, rows.has_state) if not started]] = 0  # as SGLang does
        else:
            starts = torch.arange(N + padded + 1, dtype=torch.int32) * (self.drafts if name == "verify" else 1)
        metadata = types.SimpleNamespace(
            query_start_loc=starts, mamba_cache_indices=slots, logical_num_tokens=rows.x.shape[0],
            has_mamba_track_mask=False, conv_block_table=None, **dict.fromkeys((
                "replayssm_write_pos", "replayssm_force_flush", "track_chunk_idx", "track_ssm_h_batch_src",
                "state_checkpoint_cu_starts", "num_state_checkpoints", "state_checkpoint_every_n_tokens",
                "state_checkpoint_indices", "retrieve_next_token", "retrieve_next_sibling", "retrieve_parent_token")))
        mode = types.SimpleNamespace(is_target_verify=lambda: name == "verify", is_draft_extend_v2=lambda: False)
        lengths = [end - begin for begin, end in zip(rows.starts, rows.starts[1:])]
        batch = types.SimpleNamespace(
            forward_mode=mode, batch_size=N + padded, extend_seq_lens_cpu=lengths + [0] * padded,
            extend_prefix_lens=int32(rows.has_state + [False] * padded), req_pool_indices=torch.arange(N + padded),
            spec_info=types.SimpleNamespace(draft_token_num=self.drafts, ragged_verify_layout=None))
        a, b = (rows.gates[None], rows.betas[None]) if self.is_kda else (rows.gates, rows.betas.contiguous())

        def run():
            if not self.is_kda:
                self.backend.kernel_dispatcher.extend_kernel = (
                    self.flashinfer if libkda.sglang.places() else self.own_extend)
            self.backend.forward_metadata = metadata
            return method(self.layer, batch, rows.x, a, b)[0].view(-1, self.HV, self.D)[:rows.starts[-1]]

        conv_states = self.conv_pool if self.is_kda else self.conv_pool.mT
        states = (lambda: self.scratch[:N].flatten(0, 1)) if name == "verify" else (lambda: self.pool[rows.slots])
        return Step(run, [rows.x, self.conv_pool, self.pool],
                    lambda: self.expected(rows, conv_states, self.pool, every_state=name == "verify"), states)


LAYERS = dict(vllm=OfVllm, sglang=OfSglang)


# ---- comparison ------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def plugin_on(plugin):
    """With all steps, also those that the plugins leave to the engines unless they are asked."""
    before, asked = dict(os.environ), {f"LIBKDA_{host}_{what}": "1" for host in ("VLLM", "SGLANG")
                                       for what in ("DECODE", "GDN_PREFILL")}
    os.environ.update(asked)
    plugin.enable()
    try:
        yield
    finally:
        plugin.disable()
        for name in asked:
            os.environ.pop(name)
        os.environ.update({name: before[name] for name in asked if name in before})


def ways(layer):
    """{who: a context in which the layer's calls are theirs}."""
    return dict(own=contextlib.nullcontext, libkda=lambda: plugin_on(layer.plugin))


@contextlib.contextmanager
def tuned():
    """In this context an autotuned kernel's candidates are compiled beside each other before they are timed, and each
    is timed for 20 ms."""
    run = Autotuner.run

    def compiled_first(self, *args, **kwargs):
        if len(self.configs) > 1:
            self.do_bench = functools.partial(triton.testing.do_bench, warmup=5, rep=20)
            with ThreadPoolExecutor() as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
                self.warmup(*args, **{name: x for name, x in kwargs.items() if name != "warmup"})
        return run(self, *args, **kwargs)

    Autotuner.run = compiled_first
    try:
        yield
    finally:
        Autotuner.run = run


class Remembered:
    """The memory of a step, to run it again from."""

    def __init__(self, step):
        self.step, self.kept = step, [x.clone() for x in step.memory]

    def back(self):
        for x, kept in zip(self.step.memory, self.kept):
            x.copy_(kept)


def captured(step):
    """A CUDA graph of a step that has run, and its outputs."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.run()
    return graph, out


def graph_bits(step, memory, outputs, states):
    """(whether a replay has the bits of the step, or why there is no graph; what replays it and returns outputs)."""
    try:
        memory.back()
        graph, out = captured(step)
    except RuntimeError as refusal:
        torch.cuda.synchronize()
        return str(refusal).partition("\n")[0], None

    def replay():
        graph.replay()
        return out

    memory.back()
    return torch.equal(replay(), outputs) and torch.equal(step.states(), states), replay


def other_lengths(step, memory, lengths, run):
    """Distances from float64 of the same tokens in sequences of other lengths, by run()."""
    memory.back()
    step.cut(lengths)
    expected = step.expected()
    outputs = run()
    return [distance(x, y) for x, y in zip((outputs, step.states()), expected)]


def reason_of(refusal):
    """Why an engine's own code does not serve a step; raises what is no such reason."""
    if not on_a_gpu() and isinstance(refusal, (InterpreterError, AssertionError)):  # of prompts, by fp32 or by Triton
        return f"not on a CPU: {refusal}"
    if "Index put requires the source and destination dtypes match" in str(refusal):  # fp32 states, a bf16 pool
        return f"not with this pool: {refusal}"
    raise refusal


def compared(layer, step, lengths=()):
    """Distances of a step by both, and who served libkda's; of prompts with the lengths in reverse too. Where the
    engine's own code does not serve the step its reason is in their place."""
    memory = Remembered(step)
    expected, results, report = step.expected(), {}, {}
    for who, context_of in ways(layer).items():
        with context_of():
            memory.back()
            try:
                if on_a_gpu() and who == "own":
                    with tuned():  # on inputs that it may change while it does
                        step.run()
                    memory.back()
                outputs = step.run().clone()
            except (InterpreterError, AssertionError, RuntimeError) as refusal:
                if who == "libkda":
                    raise
                report[who] = reason_of(refusal)
                continue
            states = results[who] = outputs, step.states().clone()
            report[who] = [distance(x, y) for x, y in zip(results[who], expected)]
            if who == "libkda":
                report["served"] = layer.plugin.last_path()
            replay = None
            if on_a_gpu():
                report[f"{who}_graph"], replay = graph_bits(step, memory, *states)
            if who == "libkda" and step.cut:
                report["other_lengths"] = other_lengths(step, memory, lengths[::-1], replay or step.run)
                step.cut(lengths)
    if "own" in results:
        report["apart"] = [distance(x, y.double()) for x, y in zip(results["libkda"], results["own"])]
    memory.back()
    return report


def comparisons(name, kinds, heads, dim, dtype, pool_dtype, lengths):
    with engine(name) as modules, torch.inference_mode():
        if not on_a_gpu():
            interpret(name)
        for kind in kinds:
            sizes = dict(heads=heads, value_heads=heads if kind == "kda" else 2 * heads)
            about = dict(engine=name, kind=kind, **sizes, pool=str(pool_dtype))
            for step_name in ("prefill", "decode", "verify"):
                layer = LAYERS[name](modules, kind, dim=dim, dtype=dtype, pool_dtype=pool_dtype,
                                     drafts=DRAFTS if step_name == "verify" else 0, **sizes)
                step = (layer.prefill(lengths, [n % 2 == 1 for n in range(len(lengths))], padded=2)
                        if step_name == "prefill" else getattr(layer, step_name)(3, padded=2))
                yield dict(about, step=step_name, **compared(layer, step, lengths))


def interpret(name):
    """Triton's interpreter in the place of a GPU, for an engine whose modules have asked what GPU there is."""
    import triton_on_cpu
    triton_on_cpu.prepare([module for path, module in sys.modules.items() if path.startswith(f"{name}.")])
    torch.accelerator.device_index = torch.cpu.device = lambda index: contextlib.nullcontext()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--engine", choices=LAYERS, action="append")
    parser.add_argument("--kind", choices=["kda", "gdn"], action="append")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs="+", default=[70, 3])
    parser.add_argument("--bf16-pool", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(7)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    with torch.device(args.device):
        for name in args.engine or LAYERS:
            for row in comparisons(name, args.kind or ["kda", "gdn"], args.heads, args.dim, dtype,
                                   torch.bfloat16 if args.bf16_pool else torch.float32, args.lengths):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
