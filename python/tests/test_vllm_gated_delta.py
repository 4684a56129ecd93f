# SPDX-License-Identifier: Apache-2.0
"""vLLM's own layers of Gated DeltaNet, from its wheel, on libkda's kernels: steps of requests that share a pool."""
import importlib
import types

import engine_sources
import pytest
import test_vllm as engines  # its layers and requests
import torch
from common import reference

import libkda.vllm

pytestmark, counted = engines.pytestmark, engines.counted

GDN = "vllm.model_executor.layers.mamba.gdn"
QWEN, OLMO = f"{GDN}.qwen_gdn_linear_attn", f"{GDN}.olmo_gdn_linear_attn"
OPS = "vllm.third_party.flash_linear_attention.ops"
H, HV, D, W, SLOTS = 2, 4, 32, 4, engines.SLOTS
WIDTH = (2 * H + HV) * D


def fused_post_conv_prep(conv_output, a, b, A_log, dt_bias, num_k_heads, head_k_dim, head_v_dim, apply_l2norm,
                         output_g_exp):
    """In the place of vLLM's kernel in front of a prompt: rows behind their norm, log decays, step sizes."""
    q, k, v = (x.unflatten(1, (-1, D)) for x in conv_output.split([H * D, H * D, HV * D], dim=1))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    return q, k, v.contiguous(), -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias), b.float().sigmoid()


def fused_olmo_hybrid_gdn_gating(A_log, a, b, dt_bias, allow_neg_eigval=False):
    """In the place of vLLM's kernel: log decays and step sizes."""
    g = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)
    return g[None], b.float().sigmoid()[None] * (2 if allow_neg_eigval else 1)


NAMES = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", "fused_recurrent_gated_delta_rule_packed_decode",
         "fused_sigmoid_gating_delta_rule_update")
GIVEN = {
    **engines.GIVEN,
    "vllm._aiter_ops": {"rocm_aiter_ops": types.SimpleNamespace(
        are_gdn_triton_kernels_available=lambda: False, is_rdna_gdn_triton_kernels_available=lambda: False)},
    OPS: {"fused_post_conv_prep": fused_post_conv_prep, **{name: engines.refused(name) for name in NAMES}},
    "flashinfer": {},
    "flashinfer.gdn_prefill": {"chunk_gated_delta_rule": engines.refused("FlashInfer")},
}


@pytest.fixture(scope="module")
def engine():
    """vLLM's modules: one is loaded when libkda is enabled, the other later."""
    with engine_sources.Engine("vllm", GIVEN), pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIBKDA_VLLM_GDN_PREFILL", "1")
        patch.setenv("LIBKDA_VLLM_DECODE", "1")
        modules = {QWEN: importlib.import_module(QWEN)}
        libkda.vllm.enable()
        modules[OLMO] = importlib.import_module(OLMO)
        patch.setattr(modules[OLMO], "fused_olmo_hybrid_gdn_gating", fused_olmo_hybrid_gdn_gating)
        yield modules
        libkda.vllm.disable()


class Layer(engines.Layer):
    """A layer with random parameters, on pages that hold inputs and states of a slot."""

    width = WIDTH

    def __init__(self, engine, module, pool_dtype=torch.float32, packed=True, prefill="native"):
        self.is_olmo, self.is_glm, self.is_ling, self.dtype = module == OLMO, False, False, torch.float32
        self.conv = torch.zeros(0).device.type == "cpu"
        name = "OlmoHybridGatedDeltaNetAttention" if self.is_olmo else "QwenGatedDeltaNetAttention"
        self.layer = layer = object.__new__(getattr(engine[module], name))
        layer.prefix, layer.tp_size, layer.activation, layer.allow_neg_eigval = "a", 1, "silu", self.is_olmo
        layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim = H, HV, D, D
        layer.key_dim, layer.value_dim = H * D, HV * D
        layer.enable_packed_recurrent_decode = packed
        layer.A_log, layer.dt_bias = torch.randn(HV) * 0.3, torch.randn(HV)
        self.weight = torch.randn(WIDTH, W)
        layer.conv1d = types.SimpleNamespace(weight=self.weight[:, None], bias=None)
        if not self.is_olmo:
            rule = object.__new__(engine[module].ChunkGatedDeltaRule)
            layer.chunk_gated_delta_rule = getattr(rule, f"forward_{prefill}")
        self.pages, conv_state, self.pool = engines.pages(WIDTH, (HV, D, D), self.dtype, pool_dtype)
        layer.kv_cache = (conv_state, self.pool)

    def tokens(self, count):
        """Packed rows of q, k, v with betas behind them, and gates."""
        return torch.randn(count, WIDTH + HV + 5), torch.randn(count, HV)

    def call(self, wide, gates, rows):
        out = torch.full((rows, HV, D), float("nan"))
        # The convolution of a token writes over its input.
        self.layer._forward_core(mixed_qkv=wide[:, :WIDTH].clone(), b=wide[:, WIDTH:WIDTH + HV].contiguous(),
                                 a=gates, core_attn_out=out)
        return out

    def metadata(self, count, given):
        decodes = given.get("num_decodes", 0)
        slots, ends = (given.get(f"non_spec_{name}") for name in ("state_indices_tensor", "query_start_loc"))
        if given.get("num_prefills"):  # the sequences behind those of one token
            given |= dict(prefill_state_indices=slots[decodes:],
                          prefill_has_initial_state=given["has_initial_state"][decodes:],
                          prefill_query_start_loc=ends[decodes:] - decodes)
        return dict.fromkeys(("chunk_indices", "chunk_offsets", "aiter_prefill_metadata",
                              "flashinfer_checkpoint_plan")) | dict(num_decode_tokens=decodes) | given

    def core(self, x, gates, wide, state=None):
        q, k, v = torch.nn.functional.silu(x.double()).split([H * D, H * D, HV * D], dim=1)
        q, k = (t.unflatten(1, (H, D)).repeat_interleave(HV // H, 1) for t in (q, k))
        rows = dict(q=q, k=k, v=v.unflatten(1, (HV, D)), g=gates[..., None].expand(-1, -1, D),
                    beta=wide[:, WIDTH:WIDTH + HV])
        o, after = reference({name: x[None] for name, x in rows.items()},
                             dict(A_log=self.layer.A_log, dt_bias=self.layer.dt_bias.repeat_interleave(D)),
                             torch.zeros(1, HV, D, D), "softplus", double=self.is_olmo)
        return o[0], after[0].mT


@pytest.fixture(params=["qwen", "qwen unpacked", "qwen flashinfer", "qwen bf16 pool", "olmo"])
def requests(request, engine):
    name, _, kind = request.param.partition(" ")
    return engines.Requests(Layer(
        engine, OLMO if name == "olmo" else QWEN, torch.bfloat16 if "bf16" in kind else torch.float32,
        packed=kind != "unpacked", prefill="cuda" if kind == "flashinfer" else "native"))


def test_prompts_and_tokens(requests):
    """New requests in slots that hold NaN, a prompt in two pieces, then tokens, beside rows of padding: o is 0 there,
    and slot 0 keeps its bits."""
    for name, slot in dict(a=3, b=9, c=5).items():
        requests.start(name, slot)
    requests.prefill(dict(a=70, b=1, c=20))
    assert libkda.vllm.last_path() in ("libkda: gdn_chunk", "libkda: gdn_flashinfer_chunk")
    if torch.zeros(0).device.type == "cpu":
        assert libkda.vllm.last_path("conv") == "libkda: causal_conv1d_fn"
    requests.prefill(dict(b=33, a=1))
    for padded in (0, 1, 3):
        assert not requests.decode(["b", "a"], padded)[2:].any()
    assert libkda.vllm.last_path() in ("libkda: gdn_packed_decode", "libkda: gdn_update", "libkda: gdn_fused_recurrent")
    assert engines.untouched(requests)


def test_drafts_and_rejections(requests):
    requests.start("a", 3, 4, 5)
    requests.start("b", 9, 8, 7)
    requests.start("c", 11)
    requests.prefill(dict(a=20, b=5))
    requests.verify(dict(a=3, b=3), keep=dict(a=2, b=1))
    requests.verify(dict(a=3, b=2), keep=dict(a=3, b=2), padded=2)
    requests.verify(dict(b=3), keep=dict(b=1), prompts=dict(c=9))
    assert engines.untouched(requests)


def test_tokens_in_front_of_prompts(requests):
    """Qwen's layer takes them apart, others run both as prompts."""
    requests.start("a", 3)
    requests.prefill(dict(a=20))
    requests.start("b", 9)
    requests.prefill(dict(a=1, b=30), num_decodes=0 if requests.layer.is_olmo else 1)
    assert engines.untouched(requests)


def test_checkpoints_are_left_to_flashinfer(engine):
    x = torch.randn(1, 4, HV, D)
    with pytest.raises(AssertionError, match="FlashInfer was called: vllm: gdn_flashinfer_chunk: checkpoints"):
        engine[QWEN].fi_chunk_gated_delta_rule(
            x, x, x, x[..., 0], x[..., 0], torch.zeros(1, HV, D, D), True, torch.tensor([0, 4]), False,
            state_checkpoints=x)


def test_prompts_on_a_gpu_are_asked_for(monkeypatch):
    on_a_gpu = types.SimpleNamespace(is_cuda=True)
    monkeypatch.delenv("LIBKDA_VLLM_GDN_PREFILL", raising=False)
    with pytest.raises(NotImplementedError, match="LIBKDA_VLLM_GDN_PREFILL=1 asks for it"):
        libkda.vllm.gdn_chunk(on_a_gpu, None, None, None, None)


def test_steps_that_stay_with_vllm_on_a_gpu(requests, as_on_a_gpu, monkeypatch):
    engines.check_what_stays(requests, "gdn", HV, monkeypatch)


def test_other_gates_are_left_to_vllm(engine):
    x = torch.randn(1, 4, HV, D)
    with pytest.raises(AssertionError, match="another gate than Gated DeltaNet's"):
        engine[QWEN].fused_sigmoid_gating_delta_rule_update(x, x, x, x, x, x, x, is_kda=True)


def test_who_is_served(engine):
    places = libkda.vllm.places()
    assert f"{QWEN}.fused_recurrent_gated_delta_rule_packed_decode" in places
    assert f"{OLMO}.chunk_gated_delta_rule" in places
