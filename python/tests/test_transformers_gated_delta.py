# SPDX-License-Identifier: Apache-2.0
"""Models of Gated DeltaNet in transformers on libkda's kernels, beside their own functions in torch."""
import copy
import importlib.util

import pytest
import torch
from common import distance

transformers = pytest.importorskip("transformers")
try:
    import libkda.transformers
except ImportError as error:  # a transformers that is too old
    pytest.skip(str(error), allow_module_level=True)
import transformers_models as models  # noqa: E402
from transformers_models import both, paths, prompt  # noqa: E402

INSTALLED = [family for family in models.GATED_DELTA_FAMILIES
             if importlib.util.find_spec(f"transformers.models.{family}") is not None]
CHUNK, RECURRENT = models.GATED_DELTA_FUNCTIONS
ZERO_CENTERED = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp")  # their other norms are not libkda's

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")


@pytest.fixture(scope="module", autouse=True)
def set_up():
    with models.served_where_asked():
        yield


@pytest.fixture(params=INSTALLED)
def family(request):
    with models.torch_functions(request.param):
        yield request.param


@pytest.fixture
def qwen():
    pytest.importorskip("transformers.models.qwen3_next")
    with models.torch_functions("qwen3_next") as file:
        yield file


def paths_of(family, *names):
    other = None if family in ZERO_CENTERED else "libkda: gated_rms_norm"
    return [*(f"libkda: {name}" for name in names), "libkda: gated_rms_norm", other]


def wider(model):
    """Weights that make the layers say more than the residual does, so that an error of theirs is seen."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name:
                weight.mul_(5)
    return model


# ---- models ----------------------------------------------------------------------------------------------------------

def test_logits(family, device):
    model, ids = wider(models.build(family)).to(device), prompt(2, 150, device)
    with torch.no_grad():
        expected, found = both(lambda: (model(ids).logits, paths()))
        assert distance(found[0], expected[0].double()) < 1e-5
        assert expected[1] == [None] * 4
        assert found[1] == paths_of(family, "chunk_gated_delta_rule", "short_conv")


def test_logits_depend_on_the_gates(family, monkeypatch):
    """So that the comparison above can fail."""
    model, ids, file = wider(models.build(family)), prompt(1, 150), models.file_of(family)
    with torch.no_grad():
        expected, own = model(ids).logits, getattr(file, CHUNK)
        monkeypatch.setattr(file, CHUNK, lambda *rows, g, **options: own(*rows, g=1.01 * g, **options))
        assert distance(model(ids).logits, expected.double()) > 1e-4


def test_generates_the_same_tokens(family):
    """16 greedy tokens of two prompts, the second behind padding."""
    model, ids = wider(models.build(family)), prompt(2, 70)
    mask = torch.ones_like(ids)
    mask[1, :40] = ids[1, :40] = 0

    def generate():
        return model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False), paths()

    expected, found = both(generate)
    assert torch.equal(found[0], expected[0]) and found[0].shape == (2, 86)
    assert len(found[0][:, 70:].unique()) > 4
    assert found[1] == paths_of(family, "fused_recurrent_kda_fwd", "short_conv_update")


def test_training(family):
    """20 steps from the same weights: the same losses, and the same weights behind them."""
    start, ids = models.build(family).train(), prompt(2, 66)

    def train():
        model, losses = copy.deepcopy(start), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model.state_dict(), paths()

    expected, found = both(train)
    assert expected[2] == [None] * 4 and found[2] == paths_of(family, "chunk_gated_delta_rule", "short_conv")
    assert expected[0][-1] < expected[0][0] - 0.2
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-5, atol=1e-5)
    for name, weight in expected[1].items():
        if weight.is_floating_point():
            moved = (weight - start.state_dict()[name]).norm()
            rounding = 3e-6 * weight.norm()  # of 20 steps
            assert (found[1][name] - weight).norm() <= 1e-3 * moved + rounding, name


def test_bf16(family):
    model, ids = models.build(family).to(torch.bfloat16), prompt(2, 100)
    with torch.no_grad():
        expected, found = both(lambda: model(ids).logits)
    assert found.dtype == torch.bfloat16 and distance(found, expected.double()) < 3e-2


def test_decode_is_in_place(qwen, monkeypatch):
    """The layer gets the cache's own tensor back, which has the next state."""
    model, ids = models.build("qwen3_next"), prompt(2, 20)
    with torch.no_grad(), models.served():
        ours, seen = getattr(qwen, RECURRENT), []

        def watched(*rows, initial_state, **options):
            before = initial_state.clone()
            o, state = ours(*rows, initial_state=initial_state, **options)
            seen.append((initial_state, state, before))
            return o, state

        monkeypatch.setattr(qwen, RECURRENT, watched)
        cache = model(ids, use_cache=True)["past_key_values"]
        model(ids[:, :1], past_key_values=cache, use_cache=True)
        monkeypatch.setattr(qwen, RECURRENT, ours)
    (given, returned, before), = seen
    assert given is returned and given is cache.layers[0].recurrent_states[0] and not torch.equal(given, before)


# ---- the two functions -----------------------------------------------------------------------------------------------

def rows(B=2, T=70, H=4, K=24, V=32):
    q, k, v = (torch.randn(B, T, H, size) for size in (K, K, V))
    return q, k, v, -torch.rand(B, T, H), 2 * torch.rand(B, T, H)  # beta up to 2, as OLMo-Hybrid has it


def test_the_functions(qwen):
    """A state from before, with and without the next one. Several value heads a q/k head are in the models."""
    state = torch.randn(2, 4, 24, 32)
    for name, x in ((CHUNK, rows()), (RECURRENT, rows(T=1))):
        for more in (dict(output_final_state=True), dict(output_final_state=False)):
            call = lambda: getattr(qwen, name)(*x, initial_state=state.clone(), use_qk_l2norm_in_kernel=True, **more)
            expected, found = both(call)
            assert distance(found[0], expected[0].double()) < 2e-6
            if expected[1] is None:
                assert found[1] is None
            else:
                assert distance(found[1], expected[1].double()) < 2e-6


def test_packed_sequences(qwen):
    """cu_seqlens goes to libkda; a model's other keyword arguments do not."""
    x, options = rows(B=1, T=100), dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
    with models.served():
        call = getattr(qwen, CHUNK)
        o, states = call(*x, cu_seqlens=torch.tensor([0, 30, 31, 100]), position_ids=torch.zeros(1, 100), **options)
        for n, (begin, end) in enumerate([(0, 30), (30, 31), (31, 100)]):
            own, state = call(*(y[:, begin:end] for y in x), **options)
            assert torch.equal(o[:, begin:end], own) and torch.equal(states[n:n + 1], state)


def test_what_libkda_refuses_goes_on(qwen):
    wide = rows(T=3, V=300)
    call = lambda: getattr(qwen, CHUNK)(*wide, use_qk_l2norm_in_kernel=True)[0]
    expected, found = both(lambda: (call(), libkda.transformers.last_path()))
    assert torch.equal(expected[0], found[0])
    assert found[1].startswith(f"transformers: {CHUNK}: ") and "256" in found[1]


def test_a_gradient_of_decode(qwen):
    """The state must stay as it was: the graph holds it."""
    one, state = rows(T=1), torch.randn(2, 4, 24, 32)
    before = state.clone()

    def gradient():
        v = one[2].clone().requires_grad_()
        o, final = getattr(qwen, RECURRENT)(*one[:2], v, *one[3:], initial_state=state, output_final_state=True,
                                            use_qk_l2norm_in_kernel=True)
        return torch.autograd.grad(o.sum() + final.sum(), v)[0]

    expected, found = both(gradient)
    assert torch.equal(state, before) and distance(found, expected.double()) < 1e-5
