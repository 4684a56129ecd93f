# SPDX-License-Identifier: Apache-2.0
"""FLA's layer and model on libkda: the same tokens, from prefill and from decode."""
import copy
import json
import pathlib
import re
import subprocess
import sys

import numpy
import pytest
import torch

pytest.importorskip("fla")
pytest.importorskip("transformers")
models = pytest.importorskip("fla.models", reason="flash-linear-attention has them, fla-core has not")

import libkda.fla  # noqa: E402

NUMPY = tuple(int(x) for x in numpy.__version__.split(".")[:2])

NEW_TOKENS = 64


@pytest.fixture(autouse=True)
def switched_back():
    yield
    libkda.fla.enable()


@pytest.fixture
def untuned():
    sys.path.append(str(pathlib.Path(__file__).parents[2] / "bench" / "peers"))
    from fla_untuned import one_config_each
    with one_config_each():
        yield


def logits_of(model, prompt, on_libkda, follow=None):
    """Logits of NEW_TOKENS steps and the paths that served them: the whole prompt, then a token a forward, the
    likeliest one or that of `follow`."""
    (libkda.fla.enable if on_libkda else libkda.fla.disable)()
    paths, logits, cache = set(), [], None
    new = prompt
    with torch.inference_mode():
        for t in range(NEW_TOKENS):
            result = model(new, past_key_values=cache, use_cache=True)
            paths.add(libkda.fla.last_path().split(":")[0])
            cache = result.past_key_values
            logits.append(result.logits[:, -1])
            new = logits[-1].argmax(-1, keepdim=True) if follow is None else follow[:, t:t + 1]
    return torch.stack(logits, 1), paths


@pytest.mark.skipif(NUMPY > (2, 0), reason="Triton's interpreter takes NumPy up to 2.0")
@pytest.mark.parametrize("settings", [{}, dict(num_v_heads=4), dict(safe_gate=True, lower_bound=-5.0)], ids=str)
def test_model_on_the_cpu(settings):
    """FLA's own kernels in Triton's interpreter: exact products, so that near-ties do not flip."""
    script = pathlib.Path(__file__).with_name("fla_on_cpu.py")
    run = subprocess.run([sys.executable, script, json.dumps(settings)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert all(path.startswith("fla: fused_recurrent_kda_fwd") for path in result["by_fla"])
    assert result["by_libkda"] == ["libkda: chunk_kda"] + 3 * ["libkda: fused_recurrent_kda_fwd"]
    assert result["same"] and result["distance"] < 5e-6


# Up to 64 tokens FLA's layer takes fused_recurrent_kda, then chunk_kda.
@pytest.mark.needs_cuda
@pytest.mark.parametrize("length, settings, ties", [(20, {}, 0), (200, {}, 0), (200, dict(num_v_heads=8), 2),
                                                    (200, dict(safe_gate=True, lower_bound=-5.0), 2)], ids=str)
def test_model_generates_the_same_tokens(length, settings, ties):
    torch.manual_seed(length)
    config = models.KDAConfig(hidden_size=256, num_hidden_layers=4, num_heads=4, head_dim=64, vocab_size=512,
                              **settings)
    model = models.KDAForCausalLM(config).cuda().eval()
    prompt = torch.randint(512, (3, length), device="cuda")
    expected, by_fla = logits_of(model, prompt, on_libkda=False)
    found, by_libkda = logits_of(model, prompt, on_libkda=True, follow=expected.argmax(-1))
    assert by_fla == {"fla"} and by_libkda == {"libkda"}
    # FLA multiplies fp32 in tf32: where its two best tokens are as near as the runs, one may win or the other.
    distance = (found - expected).abs().amax(-1)
    best = expected.topk(2).values
    differ = expected.argmax(-1) != found.argmax(-1)
    tie = best[..., 0] - best[..., 1] <= 2 * distance
    error = ((found - expected).norm() / expected.norm()).item()
    print(f"{int(differ.sum())} of {differ.numel()} tokens differ; logits {error:.1e} apart")
    assert error < 5e-3
    assert not (differ & ~tie).any() and differ.sum() <= ties


@pytest.mark.needs_cuda
@pytest.mark.parametrize("dtype, length", [(torch.float32, 200), (torch.bfloat16, 200), (torch.bfloat16, 1)])
def test_layer(dtype, length):
    from fla.layers import KimiDeltaAttention
    torch.manual_seed(length)
    layer = KimiDeltaAttention(hidden_size=256, num_heads=4, head_dim=64, layer_idx=0).cuda().to(dtype).eval()
    x = torch.randn(2, length, 256, device="cuda", dtype=dtype)
    results = []
    for switch in (libkda.fla.disable, libkda.fla.enable):
        switch()
        with torch.inference_mode():
            results.append(layer(x)[0].float())
    assert libkda.fla.last_path().startswith("libkda")
    error = (results[1] - results[0]).norm() / results[0].norm()
    assert error < (2e-2 if dtype == torch.bfloat16 else 2e-3)


def a_training_step(model, tokens, on_libkda):
    """The loss, the gradients by name and who served the calls."""
    (libkda.fla.enable if on_libkda else libkda.fla.disable)()
    model.zero_grad()
    loss = model(tokens, labels=tokens).loss
    path = libkda.fla.last_path()
    loss.backward()
    return loss.item(), {name: p.grad.double() for name, p in model.named_parameters()}, path


def of_every_layer(name):
    return re.sub(r"\.\d+\.", ".*.", name)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("settings", [{}, dict(num_v_heads=4), dict(safe_gate=True, lower_bound=-5.0)], ids=str)
def test_a_training_step(settings, untuned):
    """In bf16, where each of the two is some 1e-2 off a step in fp32, whose gradients judge both. That one is libkda's:
    FLA's chunk kernels for fp32 take many minutes to compile."""
    torch.manual_seed(11)
    config = models.KDAConfig(hidden_size=256, num_hidden_layers=2, num_heads=2, head_dim=128, vocab_size=512,
                              **settings)
    exact = models.KDAForCausalLM(config).cuda().train()
    model = copy.deepcopy(exact).bfloat16()
    exact.load_state_dict(model.state_dict())  # the same weights
    tokens = torch.randint(512, (2, 500), device="cuda")
    wanted, reference, _ = a_training_step(exact, tokens, on_libkda=True)
    loss, gradients, path = a_training_step(model, tokens, on_libkda=True)
    theirs, their_gradients, _ = a_training_step(model, tokens, on_libkda=False)
    assert path.startswith("libkda: "), path
    assert abs(loss - wanted) < 1.05 * abs(theirs - wanted) + 1e-3
    # Tensors of one name, in every layer: what few numbers (A_log) say is luck, of which a factor 2 is common.
    for name in {of_every_layer(name) for name in reference}:
        ours, their, exact = (torch.cat([x[n].flatten() for n in reference if of_every_layer(n) == name])
                              for x in (gradients, their_gradients, reference))
        factor = 1.1 if exact.numel() >= 100 else 2.0
        assert (ours - exact).norm() < factor * (their - exact).norm() + 2e-3 * exact.norm(), name
