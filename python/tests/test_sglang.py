# SPDX-License-Identifier: Apache-2.0
"""SGLang's own attention backend, from its wheel, on libkda's kernels: every step of requests that share a pool."""
import importlib
import types

import engine_sources
import pytest
import torch
from common import distance, reference

import libkda.sglang
from libkda._plugins import measured

pytestmark = [
    pytest.mark.skipif(engine_sources.folder_of("sglang") is None, reason="KDA_ENGINES names no folder with SGLang's "
                       "sources: python/tests/engine_sources.py FOLDER fetches them"),
    pytest.mark.usefixtures("one_thread", "on_the_device")]

LINEAR = "sglang.srt.layers.attention.linear"
H, D, SLOTS, STEPS, BOUND = 3, 32, 12, 4, -5.0
WIDTH = 3 * H * D


def plain_conv(x, *args, **kwargs):
    """In the place of the convolution: SiLU alone."""
    return torch.nn.functional.silu(x)


def refused(name):
    def function(*args, **kwargs):
        raise AssertionError(f"SGLang's own {name} was called: {libkda.sglang.last_path()}")

    return function


class Base:
    """MambaAttnBackendBase: what follows a step, for the slots of a prefix cache."""

    def _track_mamba_state_decode(self, *args):
        pass

    def _track_mamba_state_extend(self, batch, h, states, metadata, *, h_track_buf=None):
        if metadata.track_ssm_h_src.numel():
            states[metadata.track_ssm_h_dst] = h_track_buf[metadata.track_ssm_h_batch_src].to(states.dtype)


FLA = "sglang.kernels.ops.attention"
GIVEN = {
    "sglang.srt.utils": {f"is_{kind}": lambda: False for kind in ("cpu", "cuda", "hip", "npu", "xpu")},
    "sglang.srt.layers.attention.hybrid_linear_attn_backend": {"MambaAttnBackendBase": Base},
    "sglang.kernels.ops.mamba.causal_conv1d_triton": {"causal_conv1d_fn": plain_conv,
                                                      "causal_conv1d_update": plain_conv},
    f"{LINEAR}.utils": {"select_verify_intermediate_state_indices": lambda indices, *rest: indices},
    f"{FLA}.fla.fused_recurrent": {"fused_recurrent_kda_packed_decode": refused("packed decode")},
    f"{FLA}.kda_fused_decode": {"covered": lambda *args: True, "kda_fused_decode": refused("fused decode")},
    f"{FLA}.fla.kda": {"chunk_kda": refused("chunk_kda")},
    f"{FLA}.linear.fused_recurrent_linear_replayssm": {"fused_recurrent_linear_replayssm_decode": refused("ring")},
    f"{FLA}.linear.fused_sigmoid_gating_recurrent": {
        "fused_sigmoid_gating_delta_rule_update": refused("recurrent kernel")},
}


class Choice:
    """LinearAttnKernelBackend."""

    def __init__(self, kind):
        self.kind = kind

    def __getattr__(self, name):
        return lambda: name == f"is_{self.kind}"


@pytest.fixture(scope="module")
def engine():
    with engine_sources.Engine("sglang", GIVEN), pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIBKDA_SGLANG_DECODE", "1")
        importlib.import_module(f"{LINEAR}.kernels.kda_flashinfer")
        importlib.import_module(f"{FLA}.kda_fused_decode")
        libkda.sglang.enable()
        yield importlib.import_module(f"{LINEAR}.kda_backend")
        libkda.sglang.disable()


class Requests:
    """KDAAttnBackend with one layer, and requests with all of their tokens so far. Pages of the pool are wider than a
    state, and NaN before somebody has used them; a new request finds zeros, as SGLang has it."""

    def __init__(self, engine, bound=BOUND, prefill="triton", pool_dtype=torch.float32):
        self.backend = backend = object.__new__(engine.KDAAttnBackend)
        backend.kernel_dispatcher = engine.KDAKernelDispatcher(Choice("triton"), Choice(prefill), Choice("triton"))
        backend._fused_override_notice = backend._fused_chain_verify_fn = backend.accept_lens_pool = None
        self.page = torch.full((SLOTS, H * D * D + 16), float("nan"), dtype=pool_dtype)
        self.pool = self.page[:, :-16].view(SLOTS, H, D, D)
        self.scratch = torch.full((SLOTS, STEPS, H, D, D), float("nan"))
        cache = types.SimpleNamespace(
            conv=[torch.zeros(SLOTS, 3, WIDTH)], temporal=self.pool, replayssm_d=None, replayssm_k=None,
            replayssm_g=None, intermediate_ssm=self.scratch, intermediate_conv_window=[torch.zeros(SLOTS, 3, WIDTH)])
        backend.req_to_token_pool = types.SimpleNamespace(mamba2_layer_cache=lambda layer: cache, size=SLOTS)
        backend.verify_intermediate_state_indices = torch.arange(SLOTS, dtype=torch.int32)
        self.layer = types.SimpleNamespace(
            layer_id=0, q_dim=H * D, k_dim=H * D, v_dim=H * D, head_q_dim=D, head_k_dim=D, head_v_dim=D, num_q_heads=H,
            num_v_heads=H, A_log=torch.randn(1, 1, H, 1) * 0.3, dt_bias=torch.randn(H * D) * 0.3, lower_bound=bound,
            conv_weights=None, bias=None)
        self.slots, self.histories = {}, {}

    def start(self, name, slot):
        self.slots[name], self.histories[name] = slot, []
        self.pool[slot] = 0

    def tokens(self, count):
        """Rows of q, k, v; gates; and betas, a view of a wider projection."""
        return torch.randn(count, WIDTH), torch.randn(1, count, H * D), torch.randn(1, count, H + 7)[..., :H]

    def expected(self, name):
        x, gates, beta = (torch.cat(x, dim) for x, dim in zip(zip(*self.histories[name]), (0, 1, 1)))
        q, k, v = torch.nn.functional.silu(x.double()).unflatten(1, (3, H, D)).unbind(1)
        rows = dict(q=q[None], k=k[None], v=v[None], g=gates.unflatten(-1, (H, D)), beta=beta)
        bound = self.layer.lower_bound
        o, state = reference(rows, dict(A_log=self.layer.A_log.flatten(), dt_bias=self.layer.dt_bias),
                             torch.zeros(1, H, D, D), "softplus" if bound is None else "bounded", bound)
        return o[0], state[0].mT

    @property
    def tolerance(self):
        return 1e-2 if self.pool.dtype is torch.bfloat16 else 2e-5

    def step(self, method, mixed, a, b, batch=None, **metadata):
        fields = dict(replayssm_write_pos=None, replayssm_force_flush=None, logical_num_tokens=mixed.shape[0],
                      has_mamba_track_mask=False, track_chunk_idx=None, state_checkpoint_cu_starts=None,
                      num_state_checkpoints=None, state_checkpoint_every_n_tokens=None, state_checkpoint_indices=None,
                      track_ssm_h_batch_src=None, retrieve_next_token=None, retrieve_next_sibling=None,
                      retrieve_parent_token=None)
        self.backend.forward_metadata = types.SimpleNamespace(**fields | metadata)
        mode = types.SimpleNamespace(is_target_verify=lambda: False, is_draft_extend_v2=lambda: False)
        batch = types.SimpleNamespace(**dict(forward_mode=mode) | (batch or {}))
        with torch.inference_mode():
            return method(self.layer, batch, mixed, a, b)[0]

    def decode(self, names, padding=()):
        """A token of each request, and rows of CUDA graphs that have none."""
        count = len(names) + len(padding)
        x, a, b = self.tokens(count)
        out = self.step(self.backend.forward_decode, x, a, b,
                        query_start_loc=torch.arange(count + 1, dtype=torch.int32),
                        mamba_cache_indices=torch.tensor([self.slots[name] for name in names] + list(padding)))
        for n, name in enumerate(names):
            self.keep(name, x[n:n + 1], a[:, n:n + 1], b[:, n:n + 1], out[n:n + 1])
        return out

    def extend(self, lengths, padding=(), **metadata):
        """Prompts, whole or the next piece of them."""
        x, a, b = self.tokens(sum(lengths.values()))
        ends = [0, *torch.tensor(list(lengths.values())).cumsum(0).tolist()]
        batch = dict(extend_prefix_lens=torch.tensor([sum(map(len, (x for x, *_ in self.histories[name])))
                                                      for name in lengths]),
                     extend_seq_lens_cpu=list(lengths.values()))
        out = self.step(
            self.backend.forward_extend, x, a, b, batch,
            query_start_loc=torch.tensor(ends + ends[-1:] * len(padding), dtype=torch.int32),
            mamba_cache_indices=torch.tensor([self.slots[name] for name in lengths] + list(padding)), **metadata)
        for name, begin, end in zip(lengths, ends, ends[1:]):
            self.keep(name, x[begin:end], a[:, begin:end], b[:, begin:end], out[begin:end])
        return out

    def keep(self, name, x, a, b, out):
        self.histories[name].append((x, a, b))
        o, state = self.expected(name)
        assert distance(out, o[-len(out):]) < self.tolerance
        assert distance(self.pool[self.slots[name]], state) < self.tolerance

    def untouched(self):
        others = sorted(set(range(SLOTS)) - set(self.slots.values()))
        return bool(self.page[others].isnan().all() and self.page[:, -16:].isnan().all())


@pytest.fixture
def copies_states():
    """For tests of calls that do."""


@pytest.fixture(autouse=True)
def counted(monkeypatch, request):
    """No call copies what it is given, but for the states of a tracked prompt and of drafts. On a CPU a step of a whole
    layer is three calls."""
    attempt = libkda.sglang._plugin.attempt

    def without_copies(*args, **kwargs):
        result, found = engine_sources.copies(attempt, *args, **kwargs)
        found = [made for made in found if made[1] not in states and args[1] != "step"]
        assert not found, (args[0], found, libkda.sglang.last_path())
        return result

    states = ()
    if "copies_states" in request.fixturenames:
        states = {N * H * D * D * size for N in range(1, 8) for size in (2, 4)}
    monkeypatch.setattr(libkda.sglang._plugin, "attempt", without_copies)


@pytest.fixture(params=["softplus", "bounded", "bf16 pool"])
def requests(request, engine):
    """Softplus gates take the packed decode, bounded ones the other."""
    return Requests(engine, None if request.param == "softplus" else BOUND,
                    pool_dtype=torch.bfloat16 if "bf16" in request.param else torch.float32)


def test_extend_takes_the_pool(requests):
    for name, slot in dict(a=3, b=7, c=1).items():
        requests.start(name, slot)
    requests.extend(dict(a=70, b=1, c=130))
    assert libkda.sglang.last_path() == "libkda: extend"
    requests.extend(dict(b=33, a=1))
    assert requests.untouched()


def test_empty_sequences_of_graph_tables(requests):
    """They follow the others, with slot -1; several may share the slot of padding."""
    requests.start("a", 3)
    requests.extend(dict(a=40), padding=(-1, -1))
    requests.extend(dict(a=5), padding=(0, 0, -1))
    assert requests.untouched()


def test_decode_with_rows_of_padding(requests):
    """Slot -1, and slot 0 in several rows: their o is 0."""
    requests.start("a", 3)
    requests.start("b", 7)
    requests.extend(dict(a=20, b=3))
    for padding in ((), (-1,), (0, 0, -1)):
        assert not requests.decode(["b", "a"], padding)[2:].any()
    assert libkda.sglang.last_path() == f"libkda: {'packed_' if requests.layer.lower_bound is None else ''}decode"
    assert requests.untouched()


@pytest.mark.usefixtures("copies_states")
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
def test_tracked_states(engine, pool_dtype):
    """fp32 states in front of a chunk of 64, for the prefix cache; a row that is not tracked is left alone, and one of
    padding takes no part."""
    requests = Requests(engine, pool_dtype=pool_dtype)
    for name, slot in dict(a=3, b=7, c=1).items():
        requests.start(name, slot)
    requests.extend(dict(a=30, c=5))
    for name, slot in dict(d=9, e=10, f=11).items():
        requests.start(name, slot)
    requests.pool[[9, 10, 11]] = float("nan")
    del requests.slots["d"], requests.slots["e"], requests.slots["f"]
    before = requests.pool[3].clone()
    chunks = torch.tensor([0, 2, -1, 1, -1], dtype=torch.int32)
    requests.start("g", 5)
    requests.extend(dict(a=63, b=150, c=40, g=64), padding=(0,), has_mamba_track_mask=True, track_chunk_idx=chunks,
                    conv_states_mask_indices=torch.tensor([2]), track_conv_indices=torch.tensor([[0, 1, 2]]),
                    track_ssm_h_src=torch.tensor([0, 1, 3]), track_ssm_h_dst=torch.tensor([9, 10, 11]),
                    track_ssm_h_batch_src=torch.tensor([0, 1, 3]))
    assert torch.equal(requests.pool[9], before)
    x, a, b = requests.histories["b"][0]
    requests.histories["front"] = [(x[:128], a[:, :128], b[:, :128])]
    assert distance(requests.pool[10], requests.expected("front")[1]) < requests.tolerance
    assert torch.equal(requests.pool[11], requests.pool[5])
    requests.slots |= dict(d=9, e=10, f=11)
    assert requests.untouched()


def test_tracked_states_of_whole_chunks(engine):
    """Those behind the last token are taken from the pool, and nothing more is asked for."""
    requests = Requests(engine)
    requests.start("a", 3)
    requests.extend(dict(a=128), has_mamba_track_mask=True, track_chunk_idx=torch.tensor([-1]),
                    conv_states_mask_indices=torch.tensor([2]), track_conv_indices=torch.tensor([[0, 1, 2]]),
                    track_ssm_h_src=torch.tensor([]))


def verify(requests, names, count=STEPS, padding=(), **metadata):
    """Drafts of requests: outputs, and states behind each in the scratch of its row; the pool keeps what it has."""
    N = len(names) + len(padding)
    x, a, b = requests.tokens(N * count)
    before = requests.page.clone()
    mode = types.SimpleNamespace(is_target_verify=lambda: True)
    spec = types.SimpleNamespace(draft_token_num=count, ragged_verify_layout=None)
    out = requests.step(
        requests.backend.forward_extend, x, a, b,
        dict(forward_mode=mode, spec_info=spec, req_pool_indices=torch.arange(N)),
        query_start_loc=torch.arange(N + 1, dtype=torch.int32) * count,
        mamba_cache_indices=torch.tensor([requests.slots[name] for name in names] + list(padding)), **metadata)
    assert torch.equal(requests.page.nan_to_num(7), before.nan_to_num(7))
    for n, name in enumerate(names):
        for t in range(n * count, (n + 1) * count):
            requests.histories[name].append((x[t:t + 1], a[:, t:t + 1], b[:, t:t + 1]))
            o, state = requests.expected(name)
            assert distance(out[t], o[-1]) < requests.tolerance
            assert distance(requests.scratch[n, t - n * count], state) < requests.tolerance
        del requests.histories[name][-count:]
    return out[len(names) * count:]


def check_what_stays(requests, kind, heads):
    """Steps on a GPU by default, of another threshold, and by LIBKDA_SGLANG_DECODE. Those of requests b and c stay,
    and are not computed here."""
    def stays(reason, step, *args):
        with pytest.raises(AssertionError, match=rf"SGLang's own [\w ]+ was called: sglang: \w+: {reason}"):
            step(*args)

    for n, name in enumerate("abc"):
        requests.start(name, n + 1)
        requests.extend({name: 5})
    for step, of, count in ((requests.decode, "decode", 1), (lambda names: verify(requests, names), "verify", STEPS)):
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("LIBKDA_SGLANG_DECODE")
            stays(f"on a GPU its {of} of {count} x {heads} tokens and value heads is faster; LIBKDA_SGLANG_DECODE=1",
                  step, ["b"])
            patch.setitem(measured.LEAST, ("sglang", kind, of), count * heads)
            step(["a"])
            assert libkda.sglang.last_path().startswith("libkda: ")
            patch.setitem(measured.LEAST, ("sglang", kind, of), measured.NEVER)
            patch.setenv("LIBKDA_SGLANG_DECODE", "1")
            step(["a"])
            assert libkda.sglang.last_path().startswith("libkda: ")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LIBKDA_SGLANG_DECODE", "off")
            stays("LIBKDA_SGLANG_DECODE is off", step, ["c"])


def test_steps_that_stay_with_sglang_on_a_gpu(requests, as_on_a_gpu, copies_states):
    check_what_stays(requests, "kda", H)


def test_target_verify(requests):
    """The committed state is read, and those behind drafts go to the scratch."""
    requests.start("a", 3)
    requests.start("b", 7)
    requests.extend(dict(a=20, b=3))
    verify(requests, ["a", "b"])
    assert libkda.sglang.last_path() == "libkda: target_verify"
    assert not verify(requests, ["b", "a"], count=2, padding=(-1, 0)).any()
    verify(requests, ["b"], count=1)
    assert requests.scratch[3:, 2:].isnan().all() and requests.untouched()


def test_drafts_that_are_a_tree(requests):
    """Each goes on from its parent; states go to the scratch, and the pool keeps what it has."""
    requests.start("a", 3)
    requests.extend(dict(a=20))
    x, a, b = requests.tokens(STEPS)
    mode = types.SimpleNamespace(is_target_verify=lambda: True)
    spec = types.SimpleNamespace(draft_token_num=STEPS, ragged_verify_layout=None)
    out = requests.step(
        requests.backend.forward_extend, x, a, b,
        dict(forward_mode=mode, spec_info=spec, req_pool_indices=torch.arange(1)),
        query_start_loc=torch.tensor([0, STEPS], dtype=torch.int32), mamba_cache_indices=torch.tensor([3]),
        retrieve_parent_token=torch.tensor([[-1, 0, 0, 1]]))
    assert libkda.sglang.last_path() == "libkda: target_verify"
    history = list(requests.histories["a"])
    for path in ([0, 1, 3], [0, 2]):
        requests.histories["a"] = history + [(x[t:t + 1], a[:, t:t + 1], b[:, t:t + 1]) for t in path]
        o, state = requests.expected("a")
        assert distance(out[path], o[-len(path):]) < requests.tolerance
        assert distance(requests.scratch[0, path[-1]], state) < requests.tolerance
    requests.histories["a"] = history
    assert distance(requests.pool[3], requests.expected("a")[1]) < requests.tolerance


def test_drafts_of_flashinfer(engine):
    """Its form with accepted lengths: states stay in the scratch of a slot from one step to the next, and rows of
    padding have negative places of any size."""
    requests = Requests(engine)
    verifier = object.__new__(importlib.import_module(f"{LINEAR}.kernels.kda_flashinfer").FlashInferKDAKernel)
    build = importlib.import_module(f"{LINEAR}.kernels.kda_flashinfer").build_fused_accept_indices
    requests.backend.kernel_dispatcher.verify_kernel = verifier
    requests.start("a", 3)
    requests.start("b", 7)
    requests.extend(dict(a=20, b=3))
    scratch, lengths = requests.scratch, torch.ones(SLOTS, dtype=torch.int32)
    scratch[[3, 7], 0] = requests.pool[[3, 7]]
    slots = torch.tensor([3, -1, 7, -1])
    for accepted in ((1, 1), (4, 2)):
        lengths[[3, 7]] = torch.tensor(accepted, dtype=torch.int32)
        indices, counts = build(slots=slots, scratch_steps=STEPS, draft_token_num=STEPS, accept_lens_pool=lengths)
        x, a, b = requests.tokens(4 * STEPS)
        q, k, v = (t.unflatten(1, (H, D))[None] for t in torch.nn.functional.silu(x).split(H * D, dim=1))
        with torch.inference_mode():
            out = verifier.target_verify(
                requests.layer.A_log, requests.layer.dt_bias, q, k, v, a, b, ssm_states=requests.pool,
                cache_indices=slots, query_start_loc=torch.arange(5, dtype=torch.int32) * STEPS,
                intermediate_states_buffer=scratch, intermediate_state_indices=None, cache_steps=STEPS,
                retrieve_parent_token=None, lower_bound=BOUND, fused_accept_state_indices=indices,
                fused_accept_num_accepted=counts)[0]
        for n, name, count in ((0, "a", accepted[0]), (2, "b", accepted[1])):
            history = requests.histories[name]
            if count > 1 or accepted != (1, 1):
                del history[len(history) - STEPS + count:]
            for t in range(n * STEPS, (n + 1) * STEPS):
                history.append((x[t:t + 1], a[:, t:t + 1], b[:, t:t + 1]))
                o, state = requests.expected(name)
                assert distance(out[t], o[-1]) < 2e-5
                assert distance(scratch[requests.slots[name], t - n * STEPS], state) < 2e-5
        assert not out[STEPS:2 * STEPS].any() and not out[3 * STEPS:].any()
    others = sorted(set(range(SLOTS)) - {3, 7})
    assert scratch[others].isnan().all()


def test_flashkda_extend_takes_the_pool(engine):
    requests = Requests(engine, prefill="flashkda")
    requests.start("a", 3)
    requests.extend(dict(a=70))
    requests.extend(dict(a=9))
    assert type(requests.backend.kernel_dispatcher.extend_kernel).__name__ == "FlashKDAKernel"
    assert libkda.sglang.last_path() == "libkda: extend" and requests.untouched()


def test_a_decode_step_of_the_whole_layer(engine):
    """Kimi-K3's, with its convolution, which is the last input alone here, and its norm; the last row is padding."""
    requests = Requests(engine)
    layer, pool = requests.layer, requests.pool
    taps = torch.zeros(4, WIDTH)
    taps[-1] = 1
    layer._k3_fused_decode_args = (*taps.split(H * D, dim=1), None, layer.A_log.flatten(), torch.ones(D), 1e-5)
    requests.start("a", 3)
    requests.start("b", 7)
    requests.extend(dict(a=20, b=3))
    for padding in ((), (-1, 0)):
        count = 2 + len(padding)
        layer._k3_onorm_gate = torch.randn(count, H * D)
        x, a, b = requests.tokens(count)
        out = requests.step(requests.backend.forward_decode, x, a[0], b, query_start_loc=None,
                            mamba_cache_indices=torch.tensor([7, 3, *padding], dtype=torch.int32))
        assert libkda.sglang.last_path("step") == "libkda: kda_fused_decode" and layer._k3_onorm_consumed
        for n, name in enumerate("ba"):
            requests.histories[name].append((x[n:n + 1], a[:, n:n + 1], b[:, n:n + 1]))
            o, state = requests.expected(name)
            normed = o[-1] * (o[-1].square().mean(-1, keepdim=True) + 1e-5).rsqrt()
            gate = layer._k3_onorm_gate[n].view(H, D).double().sigmoid()
            assert distance(out[n], normed * gate) < 2e-5 and distance(pool[requests.slots[name]], state) < 2e-5
        assert not out[2:].any() and requests.untouched()


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
def test_tokens_with_rings(engine, pool_dtype):
    """--enable-linear-replayssm: the backend counts rows, and takes a bounded gate's tokens without a ring."""
    requests, L = Requests(engine, None, pool_dtype=pool_dtype), 5
    for name, slot in dict(a=3, b=7).items():
        requests.start(name, slot)
    requests.extend(dict(a=20, b=3))
    cache = requests.backend.req_to_token_pool.mamba2_layer_cache(0)
    nan = lambda dtype: torch.full((SLOTS, H, L, D), float("nan"), dtype=dtype)
    cache.replayssm_d, cache.replayssm_k, cache.replayssm_g = nan(pool_dtype), nan(pool_dtype), nan(torch.float32)
    counts = torch.zeros(SLOTS, dtype=torch.int32)
    for step in range(12):
        slots = torch.tensor([7, 3][:1 + step % 3] + [-1, 0])  # "b" alone in some steps
        names, N = ["b", "a"][:len(slots) - 2], len(slots)
        x, a, b = requests.tokens(N)
        before = requests.pool.clone()
        flush = torch.tensor([int(step == 7)] * N, dtype=torch.int32)
        out = requests.step(
            requests.backend.forward_decode, x, a, b, query_start_loc=torch.arange(N + 1, dtype=torch.int32),
            mamba_cache_indices=slots, replayssm_write_pos=counts[slots.clamp(min=0)], replayssm_force_flush=flush)
        assert libkda.sglang.last_path() == "libkda: packed_decode" and not out[len(names):].any()
        for n, name in enumerate(names):
            requests.histories[name].append((x[n:n + 1], a[:, n:n + 1], b[:, n:n + 1]))
            (o, state), slot = requests.expected(name), requests.slots[name]
            folds = counts[slot] == L - 1 or step == 7
            assert distance(out[n], o[-1]) < requests.tolerance
            assert distance(requests.pool[slot], state if folds else before[slot]) < requests.tolerance * folds + 1e-30
            counts[slot] = 0 if folds else counts[slot] + 1
        assert requests.untouched()
    requests.layer.lower_bound = BOUND  # SGLang takes the plain kernel, though there are rings
    kernel = requests.backend.kernel_dispatcher.decode_kernel
    x, a, b = requests.tokens(1)
    before = cache.replayssm_d.isnan()
    kernel.packed_decode(
        x, a, b, A_log=requests.layer.A_log, dt_bias=requests.layer.dt_bias, scale=1.0, ssm_states=requests.pool,
        cache_indices=torch.tensor([3]), num_v_heads=H, head_v_dim=D, lower_bound=BOUND, replayssm_d=cache.replayssm_d,
        replayssm_k=cache.replayssm_k, replayssm_g=cache.replayssm_g, replayssm_write_pos=counts[3:4])
    assert libkda.sglang.last_path() == "libkda: packed_decode" and torch.equal(before, cache.replayssm_d.isnan())


def test_a_copy_would_be_found(requests, monkeypatch):
    """The canary of `counted`."""
    forward = libkda.kda._update_pool
    monkeypatch.setattr(libkda.serving, "_update_pool", lambda q, *rest: forward(q.contiguous(), *rest))
    requests.start("a", 3)
    with pytest.raises(AssertionError, match="aten.contiguous"):
        requests.extend(dict(a=20))


def test_who_is_served(engine):
    places = libkda.sglang.places()
    assert f"{LINEAR}.kernels.kda_triton.TritonKDAKernel.extend" in places
    assert f"{LINEAR}.kernels.kda_flashinfer.FlashInferKDAKernel.target_verify" in places
    libkda.sglang.disable()
    assert not libkda.sglang.places() and libkda.sglang.last_path() is None
    libkda.sglang.enable()
