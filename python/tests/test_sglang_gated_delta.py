# SPDX-License-Identifier: Apache-2.0
"""SGLang's own backend of Gated DeltaNet, from its wheel, on libkda's kernels: steps of requests that share a pool."""
import importlib
import types

import engine_sources
import pytest
import test_sglang as engines
import torch
from common import reference

import libkda.sglang

pytestmark, counted = engines.pytestmark, engines.counted

LINEAR, FLA = engines.LINEAR, engines.FLA
H, HV, D, SLOTS, STEPS = 2, 4, 32, engines.SLOTS, engines.STEPS
WIDTH = (2 * H + HV) * D


class Struct:
    """msgspec's."""

    def __init_subclass__(cls, **options):
        pass


def fused_gdn_gating(A_log, a, b, dt_bias):
    """In the place of SGLang's kernel in front of a prompt: log decays and step sizes [1, T, HV]."""
    g = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)
    return g.flatten(0, -2)[None], b.float().sigmoid().flatten(0, -2)[None]


GIVEN = {
    **engines.GIVEN,
    "msgspec": {"Struct": Struct},
    "sglang.srt.mem_cache.memory_pool": {"MambaPool": types.SimpleNamespace(SpeculativeState=types.SimpleNamespace)},
    f"{FLA}.linear.fused_gdn_gating": {"fused_gdn_gating": fused_gdn_gating},
    f"{FLA}.fla.chunk": {"chunk_gated_delta_rule": engines.refused("chunk rule")},
    f"{FLA}.fla.fused_recurrent": {"fused_recurrent_gated_delta_rule_packed_decode": engines.refused("packed decode")},
    f"{FLA}.fla.l2norm": {"gdn_prefill_qkv_prepare_fwd": engines.refused("FlashInfer")},
    f"{FLA}.linear.fused_recurrent_linear_replayssm": {"fused_recurrent_gdn_replayssm_decode": engines.refused("ring")},
    f"{FLA}.linear.fused_sigmoid_gating_recurrent": {
        "fused_sigmoid_gating_delta_rule_update": engines.refused("recurrent kernel")},
}


@pytest.fixture(scope="module")
def engine():
    with engine_sources.Engine("sglang", GIVEN), pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIBKDA_SGLANG_GDN_PREFILL", "1")
        patch.setenv("LIBKDA_SGLANG_DECODE", "1")
        flashinfer = importlib.import_module(f"{LINEAR}.kernels.gdn_flashinfer")
        libkda.sglang.enable()
        backend = importlib.import_module(f"{LINEAR}.gdn_backend")
        backend.FlashInferGDNKernel = flashinfer.FlashInferGDNKernel
        yield backend
        libkda.sglang.disable()


class Requests(engines.Requests):
    """GDNAttnBackend with one layer, whose prompts are FlashInfer's. The pool is NaN before somebody has used it."""

    def __init__(self, engine, packed=True, pool_dtype=torch.float32, dense=True):
        self.backend = backend = object.__new__(engine.GDNAttnBackend)
        dispatcher = backend.kernel_dispatcher = engine.GDNKernelDispatcher(*map(engines.Choice, ["triton"] * 3))
        dispatcher.extend_kernel = object.__new__(engine.FlashInferGDNKernel)
        dispatcher.extend_kernel.use_state_pool = False
        dispatcher.supports_packed_decode = packed
        backend.mis_metadata, backend._use_strided_target_verify_qkv = None, True
        elements = HV * D * D
        self.page = torch.full((SLOTS, elements + (0 if dense else 16)), float("nan"), dtype=pool_dtype)
        self.pool = self.page[:, :elements].view(SLOTS, HV, D, D)
        self.scratch = torch.full((SLOTS, STEPS, HV, D, D), float("nan"))
        cache = types.SimpleNamespace(
            conv=[torch.zeros(SLOTS, 3, WIDTH)], temporal=self.pool, replayssm_d=None, replayssm_k=None,
            replayssm_g=None, replayssm_rawv=None, intermediate_ssm=self.scratch,
            intermediate_conv_window=[torch.zeros(SLOTS, 3, WIDTH)])
        backend.req_to_token_pool = types.SimpleNamespace(mamba2_layer_cache=lambda layer: cache, size=SLOTS,
                                                          mamba_pool=types.SimpleNamespace())
        backend.verify_intermediate_state_indices = torch.arange(SLOTS, dtype=torch.int32)
        self.layer = types.SimpleNamespace(
            layer_id=0, q_dim=H * D, k_dim=H * D, v_dim=HV * D, head_q_dim=D, head_k_dim=D, head_v_dim=D, num_q_heads=H,
            num_k_heads=H, num_v_heads=HV, A_log=torch.randn(HV) * 0.3, dt_bias=torch.randn(HV), conv_weights=None,
            bias=None, activation="silu")
        self.slots, self.histories = {}, {}

    def tokens(self, count):
        return torch.randn(count, WIDTH), torch.randn(1, count, HV), torch.randn(1, count, HV + 7)[..., :HV]

    def step(self, method, mixed, a, b, batch=None, **metadata):
        """Gates and betas of SGLang's layer are [T, HV]."""
        batch = dict(batch or {}, batch_size=mixed.shape[0])
        return super().step(method, mixed, a[0], b[0], batch, conv_block_table=None, **metadata)

    def expected(self, name):
        x, a, beta = (torch.cat(x, dim) for x, dim in zip(zip(*self.histories[name]), (0, 1, 1)))
        q, k, v = torch.nn.functional.silu(x.double()).split([H * D, H * D, HV * D], dim=1)
        q, k = (t.unflatten(1, (H, D)).repeat_interleave(HV // H, 1)[None] for t in (q, k))
        rows = dict(q=q, k=k, v=v.unflatten(1, (HV, D))[None], g=a[..., None].expand(-1, -1, -1, D), beta=beta)
        o, state = reference(rows, dict(A_log=self.layer.A_log, dt_bias=self.layer.dt_bias.repeat_interleave(D)),
                             torch.zeros(1, HV, D, D), "softplus")
        return o[0], state[0].mT

    def untouched(self):
        return bool(self.page[sorted(set(range(SLOTS)) - set(self.slots.values()))].isnan().all())


@pytest.fixture(params=["packed", "unpacked", "bf16 pool"])
def requests(request, engine):
    return Requests(engine, request.param != "unpacked", torch.bfloat16 if "bf16" in request.param else torch.float32)


def test_prompts_and_tokens(requests):
    """A prompt in two pieces, then tokens, beside rows of graphs that have none: their o is 0."""
    requests.start("a", 3)
    requests.start("b", 7)
    requests.extend(dict(a=70, b=1))
    assert libkda.sglang.last_path() == "libkda: gdn_extend"
    requests.extend(dict(b=33, a=1), padding=(-1, 0))
    for padding in ((), (-1,), (0, 0, -1)):
        assert not requests.decode(["b", "a"], padding)[2:].any()
    packed = requests.backend.kernel_dispatcher.supports_packed_decode
    assert libkda.sglang.last_path() == f"libkda: {'packed_' if packed else ''}decode"
    assert requests.untouched()


def test_target_verify(requests):
    """The committed state is read, and those behind drafts go to the scratch."""
    requests.start("a", 3)
    requests.start("b", 7)
    requests.extend(dict(a=20, b=3))
    engines.verify(requests, ["a", "b"])
    assert libkda.sglang.last_path() == "libkda: target_verify"
    assert not engines.verify(requests, ["b", "a"], count=2, padding=(-1, 0)).any()
    assert requests.scratch[4:].isnan().all() and requests.untouched()


@pytest.mark.parametrize("why, dense, given", [
    ("states on the way", True, dict(num_state_checkpoints=2)),
    ("states that SGLang has gathered from its pool", False, {}),
    ("LIBKDA_SGLANG_GDN_PREFILL=1 asks for it", True, {})])
def test_prompts_that_stay_with_sglang(engine, monkeypatch, why, dense, given):
    if why.startswith("LIBKDA"):
        monkeypatch.delenv("LIBKDA_SGLANG_GDN_PREFILL")
    requests = Requests(engine, dense=dense)
    requests.start("a", 3)
    with pytest.raises(AssertionError, match="own FlashInfer was called: sglang: gdn_extend: .*" + why):
        requests.extend(dict(a=20), **given)


def test_steps_that_stay_with_sglang_on_a_gpu(requests, as_on_a_gpu):
    engines.check_what_stays(requests, "gdn", HV)


def test_rings_are_left_to_sglang(engine):
    x, a = torch.zeros(2, WIDTH), torch.zeros(2, HV)
    with pytest.raises(AssertionError, match="SGLang's own ring was called: sglang: packed_decode: ReplaySSM's rings"):
        engine.TritonGDNKernel().packed_decode(
            x, a, a, A_log=a[0], dt_bias=a[0], scale=1, ssm_states=torch.zeros(4, HV, D, D), cache_indices=None,
            num_v_heads=HV, head_v_dim=D, replayssm_d=x, replayssm_k=x, replayssm_g=x, replayssm_write_pos=x)


def test_who_is_served(engine):
    places = libkda.sglang.places()
    assert f"{LINEAR}.kernels.gdn_triton.TritonGDNKernel.packed_decode" in places
    assert f"{LINEAR}.kernels.gdn_flashinfer.FlashInferGDNKernel.extend" in places
