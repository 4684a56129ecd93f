# SPDX-License-Identifier: Apache-2.0
"""vLLM's own layers, from its wheel, on libkda's kernels: every step of requests that share a pool of states."""
import importlib
import sys
import types

import engine_sources
import pytest
import torch
from common import distance, reference
from packaging.version import Version

import libkda.vllm
from libkda._plugins import measured
from libkda import naive

triton = pytest.importorskip("triton")  # vLLM's own kernels around RecoverSSM's states; by its interpreter on a CPU

pytestmark = [
    pytest.mark.skipif(engine_sources.folder_of("vllm") is None, reason="KDA_ENGINES names no folder with vLLM's "
                       "sources: python/tests/engine_sources.py FOLDER fetches them"),
    pytest.mark.usefixtures("one_thread", "on_the_device")]

OPS = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
KIMI = "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn"
K3 = "vllm.models.kimi_k3.nvidia.kda"
GLM = "vllm.models.glm5next.common.kda"
RECOVERSSM = "vllm.models.kimi_k3.nvidia.ops.recoverssm"
LING = "vllm.model_executor.models.bailing_moe_v3"
H, D, W, SLOTS, BOUND = 3, 32, 4, 14, -5.0
WIDTH = 3 * H * D
SPECULATED = 2


class Metadata(types.SimpleNamespace):
    """GDNAttentionMetadata and KimiK3KDAMetadata."""


def refused(name):
    def function(*args, **kwargs):
        raise AssertionError(f"vLLM's own {name} was called: {libkda.vllm.last_path()}")

    function.__name__ = name
    return function


def plain_conv(x, *args, out=None, **kwargs):
    """In the place of a convolution on a GPU: SiLU alone."""
    y = torch.nn.functional.silu(x)
    return y if out is None else out.copy_(y)


KERNELS = ("chunk_kda_with_fused_gate", "fused_recurrent_kda", "fused_recurrent_kda_packed_decode")
context = types.SimpleNamespace(attn_metadata=None)
CONV = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
class Workspace:
    """vLLM's buffers, one after the other, with whatever was there before."""

    @staticmethod
    def get_simultaneous(*specs):
        return [torch.full(shape, 255, dtype=torch.uint8).view(dtype) if dtype is torch.uint8 else
                torch.full(shape, float("nan"), dtype=dtype) for shape, dtype in specs]


class Exporter:
    """What stores checkpoints where vLLM wants them."""

    def export(self, checkpoint, recurrent_checkpoint, **others):
        self.states = recurrent_checkpoint.clone()


GIVEN = {
    "regex": {},
    "transformers": {},
    "vllm.v1.worker.workspace": {"current_workspace_manager": Workspace},
    "vllm._flashkda_C": None,
    "vllm.triton_utils": {"triton": triton, "tl": triton.language},
    "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0},
    "vllm.models.kimi_k3.nvidia.recoverssm.kernels": {"cute_recoverssm_commit": refused("cute_recoverssm_commit")},
    "vllm._custom_ops": {"fused_kda_decode": refused("fused_kda_decode")},
    "vllm.forward_context": {"get_forward_context": lambda: context},
    "vllm.model_executor.layers.mamba.mamba_utils": {"is_conv_state_dim_first": lambda: False},
    "vllm.model_executor.layers.mamba.ops.gather_initial_states": {
        "gather_initial_states": refused("gather_initial_states")},
    "vllm.model_executor.layers.mamba.ops.scatter_states": {"scatter_states": lambda state, src, indices:
                                                            state.__setitem__(indices, src)},
    CONV: {"causal_conv1d_fn": plain_conv, "causal_conv1d_update": plain_conv},
    "vllm.platforms": {"current_platform": types.SimpleNamespace(is_rocm=lambda: False, is_cpu=lambda: True,
                                                                    simple_compile_backend="eager")},
    "vllm.v1.attention.backends.gdn_attn": {"GDNAttentionMetadata": Metadata},
    "vllm.models.kimi_k3.nvidia.kda_metadata": {"KimiK3KDAMetadata": Metadata},
    OPS: {name: refused(name) for name in KERNELS},
    "vllm.models.glm5next.nvidia.ops.third_party.kda": {name: refused(name) for name in KERNELS[:2]},
    "vllm.third_party.flash_linear_attention.ops.kda": {name: refused(name) for name in (
        "chunk_kda", "fused_recurrent_kda", "fused_recurrent_kda_fwd")},
}


@pytest.fixture(scope="module")
def engine():
    """vLLM's modules: one is loaded when libkda is enabled, the others later."""
    with engine_sources.Engine("vllm", GIVEN), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda **options: lambda function: function)
        patch.setattr(triton.knobs.runtime, "interpret", not torch.cuda.is_available())
        patch.setenv("LIBKDA_VLLM_RECOVERSSM", "1")
        patch.setenv("LIBKDA_VLLM_DECODE", "1")
        importlib.import_module(OPS)
        importlib.import_module("vllm._custom_ops")
        importlib.import_module(GLM)
        libkda.vllm.enable()
        importlib.import_module(KIMI)
        importlib.import_module(K3)
        importlib.import_module(LING)
        yield sys.modules
        libkda.vllm.disable()


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """No call of KDA copies what it is given. On a CPU a step of a whole layer is three calls, and a convolution has a
    result of its own; so have the kernels of a commit."""
    attempt, parts = libkda.vllm._plugin.attempt, ("conv", "step", "commit", "records")

    def without_copies(*args, **kwargs):
        result, found = engine_sources.copies(attempt, *args, **kwargs)
        assert result is None or args[1] in parts or not found, (args[0], found)
        return result

    monkeypatch.setattr(libkda.vllm._plugin, "attempt", without_copies)


# ---- a layer, its pool and its requests ------------------------------------------------------------------------------

def pages(width, state, dtype, pool_dtype):
    """Pages of what a slot has before anybody used it: inputs of the convolution and a state. Views of both."""
    inputs, elements = (W - 1 + SPECULATED) * width * dtype.itemsize, state[0] * state[1] * state[2]
    found = torch.full((SLOTS, inputs + elements * pool_dtype.itemsize + 64), 255, dtype=torch.uint8)
    conv_state = found[:, :inputs].view(dtype).unflatten(1, (-1, width))
    return found, conv_state, found[:, inputs:-64].view(pool_dtype).view(SLOTS, *state)


class Layer:
    """One of vLLM's layers with random parameters, on pages that hold inputs and states of a slot."""

    width = WIDTH

    def __init__(self, engine, module, name, bound=BOUND, dtype=torch.float32, pool_dtype=torch.float32, conv=False):
        self.layer = layer = object.__new__(getattr(engine[module], name))
        self.dtype, self.bound, self.conv = dtype, bound, conv and torch.zeros(0).device.type == "cpu"
        layer.prefix, layer.head_dim, layer.local_num_heads = "a", D, H
        layer.local_projection_size = H * D
        layer.A_log, layer.dt_bias = torch.randn(H) * 0.3, torch.randn(H * D) * 0.3
        layer.gate_lower_bound = layer.kda_lower_bound = bound
        layer.kda_safe_gate = layer.safe_gate = True
        layer.lower_bound = bound
        layer.use_recoverssm, layer.kda_prefill_backend = False, "triton"
        layer.kda_decode_backend, layer.kda_spec_decode_backend = "triton", "native"
        layer._conv_state_dim_first = False
        self.weight = torch.randn(WIDTH, W)
        layer.conv1d = types.SimpleNamespace(weight=self.weight[:, None], bias=None)
        layer.q_conv1d = layer.k_conv1d = layer.v_conv1d = layer.conv1d
        layer._merged_conv_weight = self.weight
        layer.o_norm = lambda x, gate: x
        self.pages, conv_state, self.pool = pages(WIDTH, (H, D, D), dtype, pool_dtype)
        layer.kv_cache = (conv_state, self.pool)
        self.is_glm, self.is_ling = module == GLM, module == LING

    def tokens(self, count):
        """Projections of tokens: packed rows of q, k, v with beta behind them, and gates."""
        wide = torch.randn(count, WIDTH + H + 5).to(self.dtype)
        return wide, torch.randn(count, H * D).to(self.dtype)

    def run(self, wide, gates, rows=None, **metadata):
        """Outputs [rows, H, D] of a step, of which NaN is left where nothing was written."""
        rows = wide.shape[0] if rows is None else rows
        fields = dict.fromkeys((
            "has_initial_state", "non_spec_query_start_loc", "non_spec_state_indices_tensor", "spec_sequence_masks",
            "spec_token_indx", "non_spec_token_indx", "spec_token_start", "non_spec_token_start",
            "spec_state_indices_tensor", "spec_query_start_loc", "num_accepted_tokens", "checkpoint"))
        fields |= dict(num_prefills=0, num_decodes=0, num_spec_decodes=0, num_actual_tokens=wide.shape[0])
        context.attn_metadata = {"a": Metadata(**fields | self.metadata(wide.shape[0], metadata))}
        with torch.inference_mode():
            return self.call(wide, gates, rows)

    def metadata(self, count, given):
        return given

    def call(self, wide, gates, rows):
        out = torch.full((1, rows, H, D), float("nan"), dtype=self.dtype)
        mixed, beta = wide[:, :WIDTH], wide[:, WIDTH:WIDTH + H][None]
        g1 = gates.view(1, -1, H, D)
        if self.is_ling:
            g1 = naive.naive_kda_lowerbound_gate(g1, self.layer.A_log, self.layer.dt_bias, self.bound)
            self.layer._forward(*mixed.split(H * D, dim=1), g1, beta.float().sigmoid(), out)
        elif self.is_glm:
            self.layer._forward(mixed, g1, beta, out)
        else:
            self.layer._forward(mixed, g1, torch.zeros(rows, H, D), beta, out)
        return out[0]

    def expected(self, history):
        """Outputs of all tokens of a request so far, in float64, and the state behind them."""
        wide, gates = (torch.cat(x).double() for x in zip(*history))
        x = wide[:, :self.width]
        if self.conv:
            padded = torch.cat([x.new_zeros(W - 1, self.width), x])
            x = sum(padded[j:j + len(x)] * self.weight[:, j].double() for j in range(W))
        return self.core(x, gates, wide)

    def core(self, x, gates, wide, state=None):
        """Of tokens behind the convolution, in front of its SiLU, and the state behind them; from `state`."""
        q, k, v = torch.nn.functional.silu(x.double()).unflatten(1, (3, H, D)).unbind(1)
        rows = dict(q=q, k=k, v=v, g=gates.view(-1, H, D), beta=wide[:, WIDTH:WIDTH + H])
        kind = "softplus" if self.bound is None else "bounded"
        o, after = reference({name: x[None] for name, x in rows.items()},
                             dict(A_log=self.layer.A_log, dt_bias=self.layer.dt_bias),
                             torch.zeros(1, H, D, D) if state is None else state.mT[None], kind, self.bound)
        return o[0], after[0].mT

    @property
    def tolerance(self):
        kinds = {self.dtype, self.pool.dtype}
        return 3e-2 if torch.bfloat16 in kinds else 2e-5


class Requests:
    """Requests of a layer, each with its slot and all of its tokens so far."""

    def __init__(self, layer):
        self.layer, self.slots, self.histories, self.drafts, self.accepted = layer, {}, {}, {}, {}

    def start(self, name, slot, *drafts):
        """drafts: slots of states behind drafts; the first token's state takes that of the request."""
        self.slots[name], self.histories[name] = slot, []
        self.drafts[name], self.accepted[name] = (slot, *drafts), 1

    def extend(self, name, wide, gates):
        self.histories[name].append((wide, gates))

    def check(self, name, out):
        """That `out` are the last outputs of the request, and its slot has the state behind them."""
        o, state = self.layer.expected(self.histories[name])
        assert distance(out, o[-len(out):]) < self.layer.tolerance
        assert distance(self.layer.pool[self.slots[name]], state) < self.layer.tolerance

    def prefill(self, lengths, padded=0, **more):
        """A step of prompts, of which those with a history go on."""
        wide, gates = self.layer.tokens(sum(lengths.values()))
        out = self.layer.run(wide, gates, **self.prompts(lengths, padded, **more))
        self.check_prompts(lengths, wide, gates, out)

    def prompts(self, lengths, padded=0, **more):
        has_state = [bool(self.histories[name]) for name in lengths]
        ends = torch.tensor([0, *lengths.values()]).cumsum(0).to(torch.int32)
        slots = [self.slots[name] for name in lengths] + [0] * padded
        ends = torch.cat([ends, ends[-1:].expand(padded)])
        return dict(num_prefills=len(lengths), has_initial_state=torch.tensor(has_state + [False] * padded),
                    non_spec_query_start_loc=ends,
                    non_spec_state_indices_tensor=torch.tensor(slots, dtype=torch.int32), **more)

    def check_prompts(self, lengths, wide, gates, out):
        begin = 0
        for name, length in lengths.items():
            self.extend(name, wide[begin:begin + length], gates[begin:begin + length])
            self.check(name, out[begin:begin + length])
            begin += length

    def verify(self, lengths, keep, padded=0, prompts=None, beyond=0):
        """A step of drafts: lengths[name] tokens, the first of them sure; keep[name] of them are accepted. Padded rows
        have null slots and no tokens; those `beyond` the batch have what was there before. With `prompts` beside them
        tokens alternate as the scheduler likes."""
        prompts = prompts or {}
        count, more = sum(lengths.values()), sum(prompts.values())
        wide, gates = self.layer.tokens(count + more)
        ends = torch.tensor([0, *lengths.values()]).cumsum(0)
        ends = torch.cat([ends, ends[-1:].expand(padded + beyond)]).to(torch.int32)
        table = [self.drafts[name] for name in lengths] + [(0,) * (SPECULATED + 1)] * padded
        accepted = [self.accepted[name] for name in lengths] + [1] * padded
        rows = dict(spec_sequence_masks=torch.ones(len(table), dtype=torch.bool), num_spec_decodes=len(table))
        table, accepted = table + [(99,) * (SPECULATED + 1)] * beyond, accepted + [99] * beyond
        rows |= dict(
            num_spec_decode_tokens=count, spec_query_start_loc=ends,
            spec_state_indices_tensor=torch.tensor(table, dtype=torch.int32),
            num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32))
        mine, others = torch.arange(count), torch.arange(count, count + more)
        if prompts:
            mine, others = torch.randperm(count + more).split([count, more])
            mine, others = mine.sort()[0], others.sort()[0]
            rows |= self.prompts(prompts)
        rows |= dict(spec_token_indx=mine, non_spec_token_indx=others)
        out = self.layer.run(wide, gates, **rows)
        self.check_prompts(prompts, wide[others], gates[others], out[others])
        for name, begin, end in zip(lengths, ends.tolist(), ends[1:].tolist()):
            history = self.histories[name]
            for t in range(begin, end):
                self.extend(name, wide[mine[t]][None], gates[mine[t]][None])
                o, state = self.layer.expected(history)
                assert distance(out[mine[t]], o[-1]) < self.layer.tolerance
                assert distance(self.layer.pool[self.drafts[name][t - begin]], state) < self.layer.tolerance
            del history[len(history) - (end - begin) + keep[name]:]
            self.accepted[name] = keep[name]

    def decode(self, names, padded=0):
        wide, gates = self.layer.tokens(len(names) + padded)
        slots = torch.tensor([self.slots[name] for name in names] + [0] * padded, dtype=torch.int32)
        out = self.layer.run(
            wide, gates, num_decodes=len(slots), non_spec_state_indices_tensor=slots,
            non_spec_query_start_loc=torch.arange(len(slots) + 1, dtype=torch.int32))
        for n, name in enumerate(names):
            self.extend(name, wide[n:n + 1], gates[n:n + 1])
            self.check(name, out[n:n + 1])
        return out


@pytest.fixture(params=["kimi", "kimi softplus", "kimi bf16 pool", "kimi bf16", "k3", "glm", "ling"])
def requests(request, engine):
    module, name = {"kimi": (KIMI, "KimiGatedDeltaNetAttention"), "k3": (K3, "KimiK3DeltaAttention"),
                    "glm": (GLM, "Glm5NextLinearAttention"),
                    "ling": (LING, "BailingMoeV3KimiDeltaAttention")}[request.param.split()[0]]
    layer = Layer(engine, module, name, bound=None if "softplus" in request.param else BOUND,
                  dtype=torch.bfloat16 if request.param == "kimi bf16" else torch.float32,
                  pool_dtype=torch.bfloat16 if "pool" in request.param else torch.float32, conv=module == KIMI)
    return Requests(layer)


def untouched(requests):
    """Pages that belong to nobody, as they were made."""
    used = {slot for name in requests.slots for slot in requests.drafts[name]}
    others = sorted(set(range(SLOTS)) - used)
    return bool((requests.layer.pages[others] == 255).all())


def test_prefill_takes_the_pool(requests):
    """New requests in slots that hold NaN, a prompt in two pieces, and one token among prompts."""
    for name, slot in dict(a=3, b=9, c=5).items():
        requests.start(name, slot)
    requests.prefill(dict(a=70, b=1, c=130))
    assert libkda.vllm.last_path().startswith("libkda: ")
    last = "scatter" if requests.layer.is_glm else "gather_initial"
    assert requests.layer.is_ling or libkda.vllm.last_path("states") == f"libkda: {last}_states"
    requests.start("d", 12)
    requests.prefill(dict(b=33, d=64, a=1))
    assert untouched(requests)


def test_padded_sequences_of_a_prefill(requests):
    """Repeated ends and null slots: several share slot 0, which nobody reads or writes."""
    if requests.layer.is_ling:
        pytest.skip("vLLM's own code gathers and stores its states, those of slot 0 too")
    requests.start("a", 4)
    requests.prefill(dict(a=40), padded=3)
    assert untouched(requests)


def test_decode_with_null_slots(requests):
    """Rows of a CUDA graph without a request: o is 0, and slot 0 keeps its bits."""
    requests.start("a", 3)
    requests.start("b", 1)
    requests.prefill(dict(a=20, b=7))
    for padded in (0, 1, 3):
        out = requests.decode(["b", "a"], padded)
        assert not out[2:].any()
    assert untouched(requests)


def test_a_new_request_in_a_used_slot(requests):
    """It does not see the state of the one before."""
    requests.start("a", 3)
    requests.prefill(dict(a=20))
    requests.decode(["a"])
    requests.start("b", 3)
    del requests.slots["a"]
    requests.prefill(dict(b=9))
    requests.decode(["b"])


def test_drafts_and_rejections(requests):
    """Every step begins behind the tokens that the step before has accepted, some of them none but the sure one."""
    requests.start("a", 3, 4, 5)
    requests.start("b", 9, 8, 7)
    requests.prefill(dict(a=20, b=5))
    requests.verify(dict(a=3, b=3), keep=dict(a=2, b=1))
    requests.verify(dict(a=3, b=2), keep=dict(a=3, b=2))
    requests.verify(dict(b=3, a=1), keep=dict(a=1, b=1))
    assert untouched(requests)


def test_drafts_with_null_slots(requests):
    """Padded rows repeat the last end and have null slots in every column; slot 0 keeps its bits."""
    requests.start("a", 3, 4, 5)
    requests.prefill(dict(a=12))
    requests.verify(dict(a=3), keep=dict(a=2), padded=1)
    requests.verify(dict(a=3), keep=dict(a=1), padded=3)
    assert untouched(requests)


def test_rows_of_larger_batches_behind_the_drafts(requests):
    """vLLM's tables are as long as its longest batch; what follows the sequences of this one is old."""
    requests.start("a", 3, 4, 5)
    requests.prefill(dict(a=12))
    requests.verify(dict(a=3), keep=dict(a=2), beyond=2)
    requests.verify(dict(a=2), keep=dict(a=1), padded=1, beyond=1)
    assert untouched(requests)


def test_drafts_beside_prompts(requests):
    requests.start("a", 3, 4, 5)
    requests.start("b", 11)
    requests.prefill(dict(a=12))
    requests.verify(dict(a=3), keep=dict(a=2), prompts=dict(b=30))
    requests.verify(dict(a=2), keep=dict(a=2), prompts=dict(b=4))
    assert untouched(requests)


def test_a_copy_would_be_found(requests, monkeypatch):
    """The canary of `counted`."""
    forward = libkda.kda._update_pool
    monkeypatch.setattr(libkda.serving, "_update_pool", lambda q, *rest: forward(q.clone(), *rest))
    requests.start("a", 3)
    with pytest.raises(AssertionError, match="aten.clone"):
        requests.prefill(dict(a=20))


# ---- other backends of the layers ------------------------------------------------------------------------------------

@pytest.fixture(params=[(K3, "KimiK3DeltaAttention"), (GLM, "Glm5NextLinearAttention")], ids=["k3", "glm"])
def flashkda(request, engine):
    """A layer that takes FlashKDA for prompts."""
    requests = Requests(Layer(engine, *request.param))
    layer = requests.layer.layer
    layer.kda_prefill_backend, layer._checkpoint_exporter = "flashkda", Exporter()
    states = (4, H, D, D), torch.float32
    out = (1, 200, H, D), torch.float32
    layer._flashkda_buffer_specs = (out, states, states, ((1,), torch.uint8))
    if requests.layer.is_glm:
        layer._flashkda_buffer_specs = states, states, ((1,), torch.uint8), out
    return requests


def test_flashkda_prefill_takes_the_pool(flashkda):
    flashkda.start("a", 3, 4, 5)
    flashkda.start("b", 9)
    flashkda.prefill(dict(a=70, b=3))
    assert libkda.vllm.last_path().startswith("libkda: ")
    flashkda.prefill(dict(b=33, a=1))
    flashkda.verify(dict(a=3), keep=dict(a=2), prompts=dict(b=20))
    assert untouched(flashkda)


def test_checkpoints_of_a_prefill(flashkda, monkeypatch):
    """States in front of the end of a prompt: by the operators of 16 arguments for GLM, which libkda defines."""
    libkda.compat.flash_kda.install_operators()
    monkeypatch.setattr(libkda.vllm._plugin, "attempt", types.MethodType(libkda._plugins.plugin.Plugin.attempt,
                                                                         libkda.vllm._plugin))
    flashkda.start("a", 3)
    flashkda.start("b", 9)
    flashkda.prefill(dict(a=20))
    checkpoint = types.SimpleNamespace(checkpoint_offsets=torch.tensor([32, 0], dtype=torch.int32))
    flashkda.prefill(dict(a=70, b=9), checkpoint=checkpoint)
    history = flashkda.histories["a"]
    wide, gates = (torch.cat(x)[:52] for x in zip(*history))
    state = flashkda.layer.expected([(wide, gates)])[1]
    exported = flashkda.layer.layer._checkpoint_exporter.states
    assert distance(exported[0], state) < 2e-5 and exported[1].isnan().all()


def test_flashinfer_prefill_takes_the_pool(engine):
    requests = Requests(Layer(engine, K3, "KimiK3DeltaAttention"))
    requests.layer.layer.kda_prefill_backend = "flashinfer"
    requests.start("a", 3)
    requests.start("b", 9)
    for lengths in (dict(a=70, b=3), dict(b=20, a=4)):
        ends = torch.tensor([0, *lengths.values()]).cumsum(0).to(torch.int32)
        requests.prefill(lengths, flashinfer_prefill_query_start_loc=ends, flashinfer_prefill_seq_order=ends[1:])
    assert untouched(requests)


def test_a_decode_step_of_the_whole_layer(engine):
    """What vLLM's fused_kda_decode does, with its norm: at padded rows too."""
    requests = Requests(Layer(engine, K3, "KimiK3DeltaAttention"))
    layer = requests.layer.layer
    requests.start("a", 3)
    requests.start("b", 9)
    state, conv_state = requests.layer.pool, layer.kv_cache[0]
    state[[3, 9]], conv_state[[3, 9]] = torch.randn(2, H, D, D), torch.randn(2, W - 1 + SPECULATED, WIDTH)
    before, inputs = state.clone(), conv_state.clone()
    layer.kda_decode_backend = "native"
    layer.decode_conv1d_weight = requests.layer.weight.unflatten(0, (3, -1)).transpose(1, 2).contiguous()
    layer.decode_norm_weight = torch.randn(D)
    layer.o_norm = types.SimpleNamespace(eps=1e-5)
    layer.conv1d.bias = None
    # This layer does not speculate.
    layer.kv_cache = conv_state[:, SPECULATED:], state
    wide, gates = requests.layer.tokens(4)
    out = requests.layer.run(wide, gates, num_decodes=4,
                             non_spec_state_indices_tensor=torch.tensor([9, 3, 0, 0], dtype=torch.int32))
    assert libkda.vllm.last_path("step") == "libkda: fused_kda_decode"
    for n, slot in enumerate((9, 3)):
        window = torch.cat([inputs[slot, SPECULATED:], wide[n:n + 1, :WIDTH]]).double()
        x = (window * requests.layer.weight.T.double()).sum(0)[None]
        o, after = requests.layer.core(x, gates[n:n + 1], wide[n:n + 1], before[slot])
        expected = o[0] * (o[0].square().mean(-1, keepdim=True) + 1e-5).rsqrt() * layer.decode_norm_weight * 0.5
        assert distance(out[n], expected) < 2e-5 and distance(state[slot], after) < 2e-5
        assert torch.equal(conv_state[slot, -1], wide[n, :WIDTH])
    assert not out[2:].any() and untouched(requests)


def test_which_steps_of_a_layer_are_taken(engine, monkeypatch):
    """Without a GPU, or kernels for it, vLLM's own answer, which is no."""
    supported = engine[K3].is_fused_kda_decode_supported
    cases = (False, None, "no GPU"), (True, "an old card", "an old card"), (True, None, "supported")
    for found, refusal, end in cases:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(libkda.vllm, "cuda_refusal", lambda index: refusal)
        assert supported(6, 128, 4, 0, torch.bfloat16, torch.bfloat16, torch.float32) == (end == "supported")
        assert libkda.vllm.last_path("step").endswith(end)
    assert not supported(6, 64, 4, 0, torch.bfloat16, torch.bfloat16, torch.float32)
    assert libkda.vllm.last_path("step").endswith("a step of another shape or type")


def test_the_cpu_backend_without_kernels(engine, device):
    """Where the packages around vLLM's kernels cannot be loaded; the convolution is libkda's too."""
    if device != "cpu":
        pytest.skip("it tests what serves tensors on a CPU")
    libkda.vllm.disable()
    with engine_sources.Engine("vllm", GIVEN | {OPS: None}):
        libkda.vllm.enable()
        requests = Requests(Layer({KIMI: importlib.import_module(KIMI)}, KIMI, "KimiGatedDeltaNetAttention", conv=True))
        requests.start("a", 3, 4, 5)
        requests.prefill(dict(a=20))
        assert libkda.vllm.last_path("conv") == "libkda: causal_conv1d_fn"
        requests.decode(["a"], padded=1)
        assert libkda.vllm.last_path("conv") == "libkda: causal_conv1d_update"
        requests.verify(dict(a=3), keep=dict(a=2), padded=1)
        requests.verify(dict(a=3), keep=dict(a=1))
        assert untouched(requests)
        x = torch.zeros(1, 4, H, 300)
        with pytest.raises(NotImplementedError, match="vLLM has no KDA on a CPU, and libkda has refused: vllm: chunk"):
            sys.modules[OPS].chunk_kda_with_fused_gate(x, x, x, x, x[..., 0], None, None)
        libkda.vllm.disable()
    libkda.vllm.enable()


def test_convolutions_that_are_left_to_vllm(engine, device):
    """Of GPUs, and of rows that vLLM does not have here."""
    if device != "cpu":
        pytest.skip("it tests what serves tensors on a CPU")
    update = engine[KIMI].causal_conv1d_update
    x = torch.randn(2, WIDTH, 3)
    states, weight = torch.zeros(SLOTS, WIDTH, W - 1), torch.randn(WIDTH, W)
    assert torch.equal(update(x, states, weight), torch.nn.functional.silu(x))
    assert libkda.vllm.last_path("conv") == "vllm: causal_conv1d_update: x of 3 dimensions"
    update(x.to("meta"), states, weight)
    assert libkda.vllm.last_path("conv") == "vllm: causal_conv1d_update: vLLM's own convolution serves GPUs"
    y = update(x[..., 0].contiguous(), states, weight, activation=False, conv_state_indices=torch.tensor([3, 0]))
    assert torch.allclose(y[0], x[0, :, 0] * weight[:, -1]) and states[3].any() and not states[0].any()


# ---- RecoverSSM ------------------------------------------------------------------------------------------------------

class Speculation:
    """Layers of Kimi-K3 that verify with records in the place of states, and the commit of what is accepted, as
    KimiK3KDAMetadata.commit_recoverssm_state calls it."""

    WINDOW = SPECULATED + 1

    def __init__(self, engine, dtype=torch.float32, pool_dtype=torch.float32, bound=BOUND, requests=8):
        self.requests = [Requests(Layer(engine, K3, "KimiK3DeltaAttention", bound, dtype, pool_dtype))
                         for _ in range(2)]
        module = engine[RECOVERSSM]
        for each in self.requests:
            layer = each.layer.layer
            layer.use_recoverssm, layer.recoverssm_backend, layer.spec_query_len = True, "triton", self.WINDOW
            layer.recoverssm_records = module.KDARecoverSSMRecords.allocate(
                requests, H, self.WINDOW, D, dtype, each.layer.pool.device)
            for record in (layer.recoverssm_records.correction, layer.recoverssm_records.key_gate):
                record.fill_(float("nan"))
            libkda.vllm._Records.of(layer.recoverssm_records, torch.zeros(0, dtype=dtype))  # once a layer
        # Layers differ in the base of their gates, not in its bound.
        self.context = module.KDARecoverSSMCommitContext.create(
            [each.layer.layer for each in self.requests], spec_query_len=self.WINDOW, max_num_reqs=requests)

    def start(self, **slots):
        for each in self.requests:
            for name, slot in slots.items():
                each.start(name, slot)
            each.prefill({name: 5 + slot for name, slot in slots.items()})

    def verify(self, lengths, keep, padded=0, order=None, align=None):
        """A step of `lengths` tokens a request, of which keep[name] are accepted. Until the commit states are as they
        were. `order`: the requests' places in num_accepted_tokens; `align`: (block_table, num_computed_tokens,
        block_size), with a slot a block, in which `self.slots` of requests move."""
        names = list(lengths)
        ends = torch.tensor([0, *lengths.values()] + [0] * padded).cumsum(0).to(torch.int32)
        table = torch.tensor([[self.requests[0].slots[name]] for name in names] + [[0]] * padded, dtype=torch.int32)
        rows = dict(spec_sequence_masks=torch.ones(len(table), dtype=torch.bool), num_spec_decodes=len(table),
                    num_spec_decode_tokens=int(ends[-1]), spec_query_start_loc=ends, spec_state_indices_tensor=table,
                    num_accepted_tokens=torch.ones(len(table), dtype=torch.int32),
                    spec_token_indx=torch.arange(int(ends[-1])), non_spec_token_indx=torch.arange(0))
        for each in self.requests:
            before = each.layer.pool.clone()
            wide, gates = each.layer.tokens(int(ends[-1]))
            out = each.layer.run(wide, gates, **rows)
            assert libkda.vllm.last_path() == "libkda: kda_recoverssm_verify"
            assert same_bytes(each.layer.pool, before)
            for name, begin, end in zip(names, ends.tolist(), ends[1:].tolist()):
                for t in range(begin, end):
                    each.extend(name, wide[t:t + 1], gates[t:t + 1])
                o, _ = each.layer.expected(each.histories[name])
                assert distance(out[begin:end], o[begin - end:]) < each.layer.tolerance
                del each.histories[name][len(each.histories[name]) - (end - begin) + keep[name]:]
        accepted = torch.tensor([keep[name] for name in names] + [7] * padded, dtype=torch.int32)
        indices = None
        if order is not None:
            indices = torch.tensor(order, dtype=torch.int32)
            scattered = torch.full((max(order) + 1,), 99, dtype=torch.int32)
            scattered[indices.long()] = accepted
            accepted = scattered
        self.context.commit(accepted, table[:, 0], ends, indices, *(align or (None, None, None)))
        assert libkda.vllm.last_path("records") == "libkda: cute_recoverssm_commit"
        assert self.context.backend == "triton"

    def check(self, *names):
        for each in self.requests:
            for name in names:
                _, state = each.layer.expected(each.histories[name])
                assert distance(each.layer.pool[each.slots[name]], state) < each.layer.tolerance


def same_bytes(x, y):
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


@pytest.mark.parametrize("kinds", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32),
                                   (torch.bfloat16, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("bound", [BOUND, None])
def test_records_of_drafts(engine, kinds, bound):
    """Verify leaves the pool as it is; the commit makes the states of what is accepted, of all layers."""
    steps = Speculation(engine, *kinds, bound)
    steps.start(a=3, b=9)
    steps.verify(dict(a=3, b=3), keep=dict(a=2, b=3))
    steps.check("a", "b")
    steps.verify(dict(b=2, a=3), keep=dict(a=1, b=2), padded=2)
    steps.check("a", "b")
    steps.verify(dict(a=3, b=1), keep=dict(a=3, b=0), order=[4, 1])
    steps.check("a", "b")
    steps.requests[0].decode(["a"])
    assert all(untouched(each) for each in steps.requests)


@pytest.mark.skipif(Version(triton.__version__) >= Version("3.9") and not torch.cuda.is_available(),
                    reason="vLLM takes Triton 3.8; the interpreter of 3.9 refuses a mask in vLLM's own commit kernel")
def test_records_at_a_boundary_of_blocks(engine):
    """A prefix cache in blocks of 4 tokens: the state at the end of a block stays in its slot, and the request goes on
    in the next one; at the end itself they are one."""
    steps = Speculation(engine)
    steps.start(a=3)
    before = {id(each): [x for x in each.histories["a"]] for each in steps.requests}
    # 3 tokens are in the block of slot 3; the fourth ends it, and two more go to slot 6.
    blocks = torch.tensor([[3, 6, 7]], dtype=torch.int32)
    computed = torch.tensor([3], dtype=torch.int32)
    steps.verify(dict(a=3), keep=dict(a=3), align=(blocks, computed, 4))
    for each in steps.requests:
        _, state = each.layer.expected(each.histories["a"][:len(before[id(each)]) + 1])
        assert distance(each.layer.pool[3], state) < each.layer.tolerance
        each.slots["a"] = 6
    steps.check("a")
    steps.verify(dict(a=2), keep=dict(a=2), align=(blocks, torch.tensor([6], dtype=torch.int32), 4))
    steps.check("a")  # at the end of the block of slot 6, whose state is that of the request
    assert all((each.layer.pages[7] == 255).all() for each in steps.requests)


def test_records_that_are_left_to_vllm(engine, monkeypatch):
    """Verify and commit are vLLM's both, or libkda's both."""
    calls = []
    steps = Speculation(engine)
    steps.start(a=3)
    libkda.vllm.disable()
    monkeypatch.setattr(engine[K3], "kda_recoverssm_verify", lambda **x: calls.append("verify") or x["out"])
    monkeypatch.setattr(engine[RECOVERSSM].KDARecoverSSMCommitContext, "commit",
                        lambda *args: calls.append("commit"))
    libkda.vllm.enable()
    layer = steps.requests[0].layer
    arguments = dict(q=torch.zeros(1, 2, H, D), k=torch.zeros(1, 2, H, D).half(), v=torch.zeros(1, 2, H, D),
                     raw_g=torch.zeros(1, 2, H, D), raw_beta=torch.zeros(1, 2, H), A_log=layer.layer.A_log,
                     dt_bias=layer.layer.dt_bias, lower_bound=BOUND, checkpoint_state=layer.pool,
                     records=layer.layer.recoverssm_records, query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
                     state_indices=torch.tensor([3], dtype=torch.int32), spec_query_len=3, out=torch.zeros(1, 2, H, D))
    commit = torch.tensor([1], dtype=torch.int32), arguments["state_indices"], arguments["query_start_loc"]
    for change, reason in ((dict(), "records of another type than keys and gates"),
                           (dict(k=arguments["q"], spec_query_len=9), "a window of 9 tokens"),
                           (dict(k=arguments["q"], out=torch.zeros(1, 3, H, D)), "out must have ")):
        calls.clear()
        engine[K3].kda_recoverssm_verify(**arguments | change)
        assert libkda.vllm.last_path().startswith(f"vllm: kda_recoverssm_verify: {reason}")
        steps.context.commit(*commit)
        assert calls == ["verify", "commit"]
        assert libkda.vllm.last_path("commit") == "vllm: recoverssm_commit: records of vLLM's own verify"
    arguments["k"] = arguments["q"]
    if arguments["q"].is_cuda:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("LIBKDA_VLLM_RECOVERSSM")
            engine[K3].kda_recoverssm_verify(**arguments)
            assert libkda.vllm.last_path().startswith("vllm: kda_recoverssm_verify: on GPUs vLLM's own kernels are fa")
    engine[K3].kda_recoverssm_verify(**arguments)
    assert libkda.vllm.last_path() == "libkda: kda_recoverssm_verify"
    with pytest.raises(RuntimeError, match="some layers' records are of vLLM's own verify"):
        steps.context.commit(*commit)
    libkda.vllm.disable()
    monkeypatch.undo()
    libkda.vllm.enable()


# ---- steps that are faster by vLLM's own kernels ---------------------------------------------------------------------

def check_what_stays(requests, kind, heads, monkeypatch):
    """Steps on a GPU by default, of another threshold, and by LIBKDA_VLLM_DECODE. Those of request a stay,
    and are not computed here."""
    def stays(reason, step, *args, **kwargs):
        with pytest.raises(AssertionError, match=rf"vLLM's own \w+ was called: vllm: \w+: {reason}"):
            step(*args, **kwargs)

    names = "abcd"
    for n, name in enumerate(names):
        requests.start(name, *range(3 * n + 1, 3 * n + 4))
    requests.prefill(dict.fromkeys(names, 5))
    monkeypatch.delenv("LIBKDA_VLLM_DECODE")
    asks = "tokens and value heads is faster; LIBKDA_VLLM_DECODE=1 asks for libkda's"
    stays(f"on a GPU its decode of 2 x {heads} {asks}", requests.decode, ["a"], padded=1)
    stays(f"on a GPU its verify of 3 x {heads} {asks}", requests.verify, dict(a=3), keep=dict(a=1))
    monkeypatch.setitem(measured.LEAST, ("vllm", kind, "decode"), 2 * heads)
    stays(f"on a GPU its decode of 1 x {heads} {asks}", requests.decode, ["a"])
    requests.decode(["b"], padded=1)
    assert libkda.vllm.last_path().startswith("libkda: ")
    monkeypatch.setenv("LIBKDA_VLLM_DECODE", "0")
    stays("LIBKDA_VLLM_DECODE is off", requests.decode, ["a"], padded=1)
    stays("LIBKDA_VLLM_DECODE is off", requests.verify, dict(a=3), keep=dict(a=1))
    monkeypatch.setenv("LIBKDA_VLLM_DECODE", "1")
    requests.decode(["c"])
    requests.verify(dict(d=3), keep=dict(d=1))
    assert libkda.vllm.last_path().startswith("libkda: ")


def test_steps_that_stay_with_vllm_on_a_gpu(requests, as_on_a_gpu, monkeypatch):
    check_what_stays(requests, "kda", H, monkeypatch)


def test_on_a_cpu_all_steps_are_taken(requests, monkeypatch, device):
    if device != "cpu":
        pytest.skip("a GPU leaves some steps: test_steps_that_stay_with_vllm_on_a_gpu")
    monkeypatch.setenv("LIBKDA_VLLM_DECODE", "0")
    requests.start("a", 3, 4, 5)
    requests.prefill(dict(a=5))
    requests.decode(["a"])
    requests.verify(dict(a=3), keep=dict(a=1))
    assert libkda.vllm.last_path().startswith("libkda: ")


# ---- switching ------------------------------------------------------------------------------------------------------

def test_who_is_served(engine):
    """Modules loaded before enable(), and after it."""
    places = libkda.vllm.places()
    assert f"{OPS}.fused_recurrent_kda" in places and f"{KIMI}.gather_initial_states" in places
    assert f"{GLM}.Glm5NextLinearAttention._flashkda_prefill" in places
    libkda.vllm.disable()
    assert not libkda.vllm.places() and libkda.vllm.last_path() is None
    with pytest.raises(AssertionError, match="vLLM's own fused_recurrent_kda"):
        engine[OPS].fused_recurrent_kda()
    libkda.vllm.enable()
    assert sorted(libkda.vllm.places()) == sorted(places)


def test_what_libkda_refuses_is_given_on(engine, monkeypatch):
    """With states in the place of promises, and none of them lost."""
    given = {}

    def own(*args, **kwargs):
        given.update(kwargs)
        return "out", torch.ones(1, H, D, D)

    libkda.vllm.disable()
    monkeypatch.setattr(engine[OPS], "chunk_kda_with_fused_gate", own)
    libkda.vllm.enable()
    requests = Requests(Layer(engine, KIMI, "KimiGatedDeltaNetAttention"))
    requests.start("a", 3)
    pool, slots = requests.layer.pool, torch.tensor([3], dtype=torch.int32)
    pool[3] = 2
    rows = engine[KIMI].gather_initial_states(pool, slots, torch.tensor([True]))
    x = torch.zeros(1, 4, H, 300)
    out, states = engine[OPS].chunk_kda_with_fused_gate(x, x, x, x, x[..., 0], None, None, initial_state=rows)
    assert out == "out" and type(given["initial_state"]) is torch.Tensor and (given["initial_state"] == 2).all()
    assert libkda.vllm.last_path().startswith("vllm: chunk_kda_with_fused_gate: ")
    pool[slots] = states
    assert (pool[3] == 1).all()
    libkda.vllm.disable()
    monkeypatch.undo()
    libkda.vllm.enable()
