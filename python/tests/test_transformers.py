# SPDX-License-Identifier: Apache-2.0
"""Models of transformers on libkda's kernels, beside their own functions in torch."""
import copy
import importlib.util
import inspect
import os
import subprocess
import sys

import pytest
import torch
from common import distance
from torch._subclasses.fake_tensor import FakeTensorMode

import libkda.kda

transformers = pytest.importorskip("transformers")
try:
    import libkda.transformers
except ImportError as error:  # a transformers without KDA
    pytest.skip(str(error), allow_module_level=True)
import transformers_models as models  # noqa: E402
from transformers_models import both, paths, prompt  # noqa: E402

INSTALLED, GATED_DELTA = ([family for family in families
                           if importlib.util.find_spec(f"transformers.models.{family}") is not None]
                          for families in (models.FAMILIES, models.GATED_DELTA_FAMILIES))
CHUNK, RECURRENT = models.FUNCTIONS

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")


@pytest.fixture(scope="module", autouse=True)
def set_up():
    with models.served_where_asked():
        yield


@pytest.fixture
def kimi_linear():
    return pytest.importorskip("transformers.models.kimi_linear", reason="GLM-5-Next came before it")


@pytest.fixture(params=INSTALLED)
def family(request):
    with models.torch_functions(request.param):
        yield request.param


@pytest.fixture(params=INSTALLED + GATED_DELTA)
def any_family(request):
    """Of KDA or of Gated DeltaNet (test_transformers_gated_delta.py has models of that)."""
    with models.torch_functions(request.param):
        yield request.param


@pytest.fixture
def kimi(kimi_linear):
    with models.torch_functions("kimi_linear"):
        yield models.build("kimi_linear")


# ---- models ----------------------------------------------------------------------------------------------------------

def test_logits(family, device):
    model, ids = models.build(family).to(device), prompt(2, 150, device)
    with torch.no_grad():
        expected, found = both(lambda: (model(ids).logits, paths()))
    assert distance(found[0], expected[0].double()) < (2e-6 if device == "cpu" else 1e-5)
    assert expected[1] == [None] * 4 and found[1][0] == "libkda: chunk_kda"
    assert found[1][1:] == ["libkda: short_conv"] + ["libkda: gated_rms_norm"] * 2


def test_logits_depend_on_kda(kimi, monkeypatch):
    """So that the comparisons above and below can fail."""
    ids = prompt(2, 150)
    with torch.no_grad():
        expected = kimi(ids).logits
        own = getattr(models.file_of("kimi_linear"), CHUNK)
        wrong = lambda *rows, g, **options: own(*rows, g=1.01 * g, **options)
        monkeypatch.setattr(models.file_of("kimi_linear"), CHUNK, wrong)
        assert distance(kimi(ids).logits, expected.double()) > 1e-4


def test_left_padding(family):
    model, ids = models.build(family), prompt(3, 90)
    mask = torch.ones_like(ids)
    mask[1, :40] = mask[2, :89] = 0
    ids[mask == 0] = 0
    with torch.no_grad():
        expected, found = both(lambda: model(ids, attention_mask=mask).logits[mask.bool()])
        assert distance(found, expected.double()) < 2e-6
        generate = lambda: model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
        assert torch.equal(*both(generate))


@pytest.mark.parametrize("beams", [1, 3])
def test_generates_the_same_tokens(family, beams):
    model, ids = models.build(family), prompt(2, 70)

    def generate():
        return model.generate(ids, max_new_tokens=6, do_sample=False, num_beams=beams), paths()

    expected, found = both(generate)
    assert torch.equal(found[0], expected[0]) and found[0].shape == (2, 76)
    assert expected[1] == [None] * 4
    assert found[1] == [f"libkda: {name}" for name in ("fused_recurrent_kda_fwd", "short_conv_update",
                                                       "gated_rms_norm", "gated_rms_norm")]


def test_bf16(family):
    model, ids = models.build(family).to(torch.bfloat16), prompt(2, 150)
    with torch.no_grad():
        expected, found = both(lambda: model(ids).logits)
    assert found.dtype == torch.bfloat16
    assert distance(found, expected.double()) < 3e-2


def cache_of(result):
    return result["cache" if "cache" in result else "past_key_values"]


def test_one_cache_for_several_calls(family):
    """Prompts and answers in turns: prefill from a state, decode, prefill from the state that decode left."""
    model, turns = models.build(family), [prompt(2, length) for length in (40, 1, 25, 3)]

    def run():
        cache, logits = None, []
        for turn in turns:
            for _ in range(2):
                result = model(turn, past_key_values=cache, use_cache=True)
                cache = cache_of(result)
                logits.append(result.logits)
                turn = logits[-1][:, -1:].argmax(-1)
        return torch.cat(logits, 1)

    with torch.no_grad():
        expected, found = both(run)
    assert distance(found, expected.double()) < 2e-6
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_generate_from_a_cache(kimi):
    """generate() with the cache of the last call, and a copy of that cache, which the first must not change."""
    def run():
        with torch.no_grad():
            first = kimi.generate(prompt_ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
            more = torch.cat([first.sequences, new], 1)
            branch = copy.deepcopy(cache_of(first))
            outputs = [kimi.generate(more, past_key_values=cache, max_new_tokens=5, do_sample=False)
                       for cache in (cache_of(first), branch)]
        assert torch.equal(*outputs)
        return outputs[0]

    prompt_ids, new = prompt(2, 50), prompt(2, 7)
    expected, found = both(run)
    assert torch.equal(found, expected)


def recurrent_states(cache):
    states = (getattr(layer, "recurrent_states", {}).get(0) for layer in cache.layers)
    return [state for state in states if state is not None]


def test_decode_is_in_place(kimi, device, monkeypatch):
    """The layer gets the cache's own tensor back, which has the next state."""
    kimi.to(device)
    file = models.file_of("kimi_linear")
    with torch.no_grad(), models.served():
        ours, given, returned = getattr(file, RECURRENT), [], []

        def watched(*rows, initial_state, **options):
            o, state = ours(*rows, initial_state=initial_state, **options)
            given.append(initial_state)
            returned.append(state)
            return o, state

        monkeypatch.setattr(file, RECURRENT, watched)
        ids = prompt(2, 20, device)
        cache = cache_of(kimi(ids, use_cache=True))
        states = recurrent_states(cache)
        before = [state.clone() for state in states]
        kimi(ids[:, :1], past_key_values=cache, use_cache=True)
        monkeypatch.setattr(file, RECURRENT, ours)
    assert len(states) == len(given) == 2
    for state, old, argument, result, now in zip(states, before, given, returned, recurrent_states(cache)):
        assert state is argument and state is result and state is now
        assert not torch.equal(state, old)


def test_compiled(kimi):
    ids = prompt(2, 40)
    compiled = torch.compile(kimi, backend="eager")
    with torch.no_grad():
        expected = kimi(ids, use_cache=False).logits
        with models.served():
            found = compiled(ids, use_cache=False).logits
            path = libkda.transformers.last_path()
    torch._dynamo.reset()
    assert path == "libkda: chunk_kda" and distance(found, expected.double()) < 2e-6


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_gradients(family, training):
    model, ids = models.build(family).train(training), prompt(2, 80)

    def gradients():
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        return [(name, p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None], paths()

    expected, found = both(gradients)
    assert expected[1] == [None] * 4
    assert found[1] == ["libkda: chunk_kda", "libkda: short_conv"] + ["libkda: gated_rms_norm"] * 2
    assert [name for name, _ in expected[0]] == [name for name, _ in found[0]]
    scale = max(grad.norm() for _, grad in expected[0])
    for (name, right), (_, grad) in zip(expected[0], found[0]):
        assert (grad - right).norm() <= 1e-5 * right.norm() + 1e-7 * scale, name


# ---- the two functions -----------------------------------------------------------------------------------------------

def rows(B=2, T=70, H=2, D=32, dtype=torch.float32, family="kimi_linear"):
    normal = lambda: torch.randn(B, T, H, D, dtype=dtype)
    gates = (B, T, H) if family in GATED_DELTA else (B, T, H, D)
    return normal(), normal(), normal(), -torch.rand(gates), torch.rand(B, T, H, dtype=dtype)


def functions(family):
    return [getattr(models.file_of(family), name) for name in models.functions_of(family)]


@pytest.fixture
def kimi_functions(kimi_linear):
    with models.torch_functions("kimi_linear"):
        yield lambda: functions("kimi_linear")


def test_signatures(any_family):
    """All calls that a model's function takes libkda's takes too."""
    for own, ours in zip(functions(any_family), both(lambda: functions(any_family))[1]):
        assert own is not ours and own.__name__ == ours.__name__
        theirs, mine = (inspect.signature(function).parameters.values() for function in (own, ours))
        assert [(p.name, p.kind) for p in theirs] == [(p.name, p.kind) for p in mine]
        assert all(p.default in (p.empty, q.default) for p, q in zip(theirs, mine))


def test_positional_arguments(any_family):
    family = any_family
    q, k, v, g, beta = rows(family=family)
    state = torch.randn(2, 2, 32, 32)
    chunk = lambda: functions(family)[0](q, k, v, g, beta, 16, state, True, True)
    one = [x[:, :1] for x in (q, k, v, g, beta)]
    recurrent = lambda: functions(family)[1](*one, state.clone(), True, True)
    for call in (chunk, recurrent):
        expected, found = both(call)
        for right, mine in zip(expected, found):
            assert distance(mine, right.double()) < 2e-6


def test_packed_sequences(kimi_functions):
    """cu_seqlens goes to libkda; a model's other keyword arguments do not."""
    x = rows(B=1, T=100)
    with models.served():
        call = kimi_functions()[0]
        options = dict(output_final_state=True, use_qk_l2norm_in_kernel=True)
        o, states = call(*x, cu_seqlens=torch.tensor([0, 30, 31, 100]), seq_idx=torch.zeros(1, 100),
                         position_ids=torch.zeros(1, 100), **options)
        assert libkda.transformers.last_path() == "libkda: chunk_kda"
        for n, (begin, end) in enumerate([(0, 30), (30, 31), (31, 100)]):
            own, state = call(*(y[:, begin:end] for y in x), **options)
            assert torch.equal(o[:, begin:end], own) and torch.equal(states[n:n + 1], state)


def test_the_state_in_place(kimi_functions):
    """Nothing but the state is written, in a tensor of which it is a part; without output_final_state not even that."""
    one = rows(T=1)
    pool = torch.randn(6, 2, 32, 32)
    before, state = pool.clone(), pool[2:4]
    call = lambda **options: kimi_functions()[1](*one, initial_state=state, use_qk_l2norm_in_kernel=True, **options)
    expected = call(output_final_state=True)
    assert torch.equal(pool, before)
    with models.served():
        o, none = call(output_final_state=False)
        assert none is None and torch.equal(pool, before)
        assert libkda.transformers.last_path() == "libkda: fused_recurrent_kda"
        again, final = call(output_final_state=True)
    assert final is state and torch.equal(o, again)
    assert torch.equal(pool[:2], before[:2]) and torch.equal(pool[4:], before[4:])
    assert distance(state, expected[1].double()) < 2e-6 and distance(o, expected[0].double()) < 2e-6


def test_what_libkda_refuses_goes_on(kimi_functions):
    wide = rows(T=3, D=300)
    call = lambda: kimi_functions()[0](*wide, output_final_state=True, use_qk_l2norm_in_kernel=True)
    expected = call()
    with models.served():
        found = call()
        assert libkda.transformers.last_path().startswith(f"transformers: {CHUNK}: ")
        assert "256" in libkda.transformers.last_path()
        assert all(torch.equal(*pair) for pair in zip(expected, found))
        kimi_functions()[0](*rows(), seq_idx=torch.zeros(2, 70))
        assert libkda.transformers.last_path() == f"transformers: {CHUNK}: seq_idx without cu_seqlens"


def test_a_build_without_cuda(kimi_functions, monkeypatch):
    """CUDA tensors go on to the model's own function; what fails in a call that libkda serves is not hidden."""
    def fails(text):
        def forward(*args, **options):
            raise RuntimeError(text)
        monkeypatch.setattr(libkda.kda, "forward", forward)

    x = rows()
    expected = kimi_functions()[0](*x, use_qk_l2norm_in_kernel=True)[0]
    with models.served():
        fails("cuda: this build has no CUDA (KDA_CUDA=OFF or no nvcc)")
        assert torch.equal(kimi_functions()[0](*x, use_qk_l2norm_in_kernel=True)[0], expected)
        assert "this build has no CUDA" in libkda.transformers.last_path()
        fails("CUDA error: an illegal memory access was encountered")
        with pytest.raises(RuntimeError, match="illegal memory access"):
            kimi_functions()[0](*x)


def test_training_on_a_gpu():
    """libkda's where it has tensor cores, else the model's own unless libkda's is asked for."""
    def rows_of(dtype):
        with FakeTensorMode():
            return [torch.empty(1, 8, 2, 16, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]

    rows, bf16 = rows_of(torch.float32), rows_of(torch.bfloat16)
    libkda.transformers.enable()
    assert "is fast for q, k, v in bf16" in libkda.transformers._reason(rows, {}, rows)
    assert libkda.transformers._reason(bf16, {}, bf16) is None
    assert "is fast for" in libkda.transformers._reason(bf16, {})  # a convolution
    libkda.transformers.enable(train_on_gpu=True)
    assert libkda.transformers._reason(rows, {}, rows) is None
    libkda.transformers.enable()
    libkda.transformers.disable()


def test_a_gradient_of_decode(kimi_functions):
    """The state must stay as it was: the graph holds it."""
    one, state = rows(T=1), torch.randn(2, 2, 32, 32)
    before = state.clone()

    def gradient():
        v = one[2].clone().requires_grad_()
        o, final = kimi_functions()[1](*one[:2], v, *one[3:], initial_state=state, output_final_state=True,
                                        use_qk_l2norm_in_kernel=True)
        (o.sum() + final.sum()).backward()
        return v.grad

    expected, found = both(gradient)
    assert torch.equal(state, before) and distance(found, expected.double()) < 1e-5


def test_an_exported_program_is_without_libkda(kimi_functions):
    class Layer(torch.nn.Module):
        def forward(self, *x):
            return kimi_functions()[0](*x, use_qk_l2norm_in_kernel=True)[0]

    x = rows()
    with torch.no_grad(), models.served():
        program = torch.export.export(Layer(), x)
        assert "libkda" in libkda.transformers.last_path() and "exported" in libkda.transformers.last_path()
        assert not any("libkda" in str(node.target) for node in program.graph.nodes)
        assert distance(program.module()(*x), Layer()(*x).double()) < 2e-6


# ---- convolution and norm --------------------------------------------------------------------------------------------

def convolutions(family):
    return [getattr(models.file_of(family), name) for name in models.CONVOLUTIONS]


def norm_of(family):
    classes = [found for name, found in vars(models.file_of(family)).items() if name.endswith("RMSNormGated")]
    assert len(classes) == 1
    return classes[0]


@pytest.mark.parametrize("activation", [None, "silu"])
def test_convolution(family, activation):
    """Of [B, D, T], dense in either order, with gradients; libkda's result is [B, T, D] in memory."""
    for channels_first in (True, False):
        x = torch.randn(2, 40, 24) if channels_first else torch.randn(2, 24, 40).transpose(1, 2)
        leaves = [t.requires_grad_() for t in (x, torch.randn(40, 4), torch.randn(40))]
        upstream = torch.randn(2, 40, 24)

        def run():
            y = convolutions(family)[0](*leaves, activation=activation, position_ids=torch.arange(24))
            return y, torch.autograd.grad(y, leaves, upstream)

        (own, own_gradients), (ours, gradients) = both(run)
        assert ours.transpose(1, 2).is_contiguous()
        assert distance(ours, own.double()) < 2e-6
        for mine, right in zip(gradients, own_gradients):
            assert distance(mine, right.double()) < 2e-6


@pytest.mark.parametrize("width", [3, 4, 9])
def test_convolution_in_place(family, width):
    """Of a cache, which keeps more inputs while it records its past; one token and several."""
    weight, states = torch.randn(40, 4), torch.randn(2, 40, width)
    for length in (1, 3):
        x = torch.randn(2, 40, length)

        def run():
            state = states.clone()
            with torch.no_grad():
                y = convolutions(family)[1](x, state, weight, None, "silu")
            return y, state, libkda.transformers.last_path("conv")

        own, ours = both(run)
        assert torch.equal(ours[1], own[1]) and distance(ours[0], own[0].double()) < 2e-6
        assert ours[2] == "libkda: short_conv_update"


def test_what_the_convolution_refuses_goes_on(kimi_functions):
    """A gradient of the step in place, a wide kernel, fp64, another activation; nothing is written before."""
    x, states = torch.randn(1, 8, 1), torch.randn(1, 8, 4)
    weight = torch.randn(8, 4, requires_grad=True)
    wide = torch.randn(8, 6)
    cases = [lambda state: convolutions("kimi_linear")[1](x, state, weight),
             lambda state: convolutions("kimi_linear")[0](torch.randn(1, 8, 9, generator=generator()), wide),
             lambda state: convolutions("kimi_linear")[0](x.double(), weight.double()),
             lambda state: convolutions("kimi_linear")[0](x, weight, activation="gelu")]
    generator = lambda: torch.Generator().manual_seed(1)

    def run(case):
        state = states.clone()
        y = case(state)
        return y, state, libkda.transformers.last_path("conv")

    for case, reason in zip(cases, ("updated in place", "2 to 4 taps", "torch.float64", "activation must be one of")):
        own, ours = both(lambda: run(case))
        assert torch.equal(own[0], ours[0]) and torch.equal(own[1], ours[1])
        assert ours[2].startswith("transformers: causal_conv1d_") and reason in ours[2]


def test_packed_sequences_of_the_convolution(kimi_functions):
    """cu_seqlens keeps them apart; seq_idx alone is the model's own."""
    x, weight = torch.randn(1, 20, 30), torch.randn(20, 4)
    with models.served():
        convolution = convolutions("kimi_linear")[0]
        packed = convolution(x, weight, activation="silu", cu_seqlens=torch.tensor([0, 11, 30], dtype=torch.int32))
        parts = [convolution(part, weight, activation="silu") for part in x.split([11, 19], 2)]
        assert torch.equal(packed, torch.cat(parts, 2))
        convolution(x, weight, seq_idx=torch.zeros(1, 30))
        assert libkda.transformers.last_path("conv") == "transformers: causal_conv1d_fn: seq_idx without cu_seqlens"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm(any_family, dtype):
    norm = norm_of(any_family)(40).to(dtype)
    with torch.no_grad():
        norm.weight.normal_()
    x, gate = (torch.randn(2, 7, 3, 40).to(dtype).requires_grad_() for _ in range(2))
    upstream = torch.randn(2, 7, 3, 40).to(dtype)

    def run():
        y = norm(x, gate)
        return (y, *torch.autograd.grad(y, (x, gate, norm.weight), upstream))

    expected, found = both(run)
    for mine, right in zip(found, expected):
        assert mine.dtype == dtype and distance(mine, right.double()) < (2e-6 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_norms(kimi_functions, dtype):
    """Those without a gate: in fp32 libkda's; in bf16 the class's own, which rounds in between."""
    norm = models.file_of("kimi_linear").KimiLinearRMSNorm(48).to(dtype)
    x, upstream = torch.randn(2, 5, 48).to(dtype).requires_grad_(), torch.randn(2, 5, 48).to(dtype)

    def run():
        y = norm(x)
        return (y, *torch.autograd.grad(y, (x, norm.weight), upstream)), libkda.transformers.last_path("rms_norm")

    (expected, _), (found, path) = both(run)
    if dtype is torch.float32:
        assert path == "libkda: gated_rms_norm"
        assert all(distance(mine, right.double()) < 2e-6 for mine, right in zip(found, expected))
    else:
        assert path == "transformers: KimiLinearRMSNorm: a norm of torch.bfloat16"
        assert all(torch.equal(*pair) for pair in zip(found, expected))


def test_the_parts_of_last_path():
    with pytest.raises(ValueError, match="part must be one of 'kda', .*, got 'gate'"):
        libkda.transformers.last_path("gate")


# ---- the switch ------------------------------------------------------------------------------------------------------

def everything(family):
    return [*functions(family), *convolutions(family), norm_of(family).forward]


def test_switch(any_family):
    family = any_family
    own = everything(family)
    libkda.transformers.enable()
    ours = everything(family)
    libkda.transformers.enable()
    assert everything(family) == ours and not {*own} & {*ours}
    for mine, theirs in zip(ours, own):
        assert list(inspect.signature(mine).parameters) == list(inspect.signature(theirs).parameters)
    chunk = "chunk_gated_delta_rule" if family in GATED_DELTA else "chunk_kda"
    ours[0](*rows(family=family))
    assert libkda.transformers.last_path() == f"libkda: {chunk}"
    libkda.transformers.disable()
    assert everything(family) == own and libkda.transformers.last_path() is None
    held = ours[0]  # as by a file that had imported the name
    held(*rows(family=family))
    assert libkda.transformers.last_path() == (f"transformers: {models.functions_of(family)[0]}: "
                                               "libkda.transformers.disable() was called")


def test_somebody_elses_function_in_front_stays(kimi, monkeypatch):
    file = models.file_of("kimi_linear")
    with models.served():
        ours = getattr(file, CHUNK)
        theirs = lambda *args, **kwargs: ours(*args, **kwargs)
        monkeypatch.setattr(file, CHUNK, theirs)
    assert getattr(file, CHUNK) is theirs
    theirs(*rows())
    assert "disable() was called" in libkda.transformers.last_path()
    monkeypatch.undo()


# ---- interpreters of their own ---------------------------------------------------------------------------------------

def python(code, **environment):
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                         env={**os.environ, **environment})
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


ORIGINALS = """
import importlib, torch
file_of = lambda family: importlib.import_module(f"transformers.models.{family}.modeling_{family}")
functions = lambda: [getattr(file_of(family), name) for family, names in NAMES for name in names]
own = functions()
import libkda.transformers
""".replace("NAMES", repr([(family, models.functions_of(family) + models.CONVOLUTIONS)
                           for family in INSTALLED + GATED_DELTA]))


def test_serves_from_the_import_on():
    """With FLA and `kernels`, if they are installed, in the models' files."""
    assert python(ORIGINALS + """
assert not {*map(id, own)} & {*map(id, functions())}
x = [torch.rand(1, 5, 1, 16) for _ in range(4)]
for call in functions():
    if call.__name__.startswith("causal_conv1d"):
        continue
    g = -x[3][..., 0] if "gated_delta" in call.__name__ else -x[3]
    call(*x[:3], g=g, beta=x[0][..., 0], initial_state=None, output_final_state=True)
    assert libkda.transformers.last_path().startswith("libkda: ")
libkda.transformers.disable()
assert all(a is b for a, b in zip(own, functions()))
print("good")
""") == "good"


def test_environment_variable():
    assert python(ORIGINALS + """
assert all(a is b for a, b in zip(own, functions()))
libkda.transformers.enable()
assert not {*map(id, own)} & {*map(id, functions())}
print("good")
""", LIBKDA_TRANSFORMERS="0") == "good"


IMPORTS = """
try:
    import libkda.transformers
except ImportError as error:
    print(error)
"""


def test_without_transformers():
    out = python("import sys; sys.modules['transformers'] = None" + IMPORTS)
    assert out == "libkda.transformers needs transformers 5.16.1 or later (pip install transformers)"


def test_without_kda_in_transformers():
    block = "".join(f"sys.modules['transformers.models.{family}.modeling_{family}'] = None\n"
                    for family in (*models.FAMILIES, *models.GATED_DELTA_FAMILIES))
    out = python("import sys\n" + block + IMPORTS)
    assert out.startswith("libkda.transformers serves kimi_linear, glm5_next, bailing_hybrid, qwen3_next, qwen3_5, "
                          "qwen3_5_moe, qwen4_exp, olmo_hybrid, lara_mini, and none of them is in transformers "
                          f"{transformers.__version__}")


@pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="needs the package kernels")
def test_with_kernels_from_the_hub(kimi_linear):
    """A model that asks for hub kernels, of which none is for a CPU, is served all the same."""
    model, ids = models.build("kimi_linear"), prompt(2, 40)
    with torch.no_grad(), models.served():
        expected = model(ids).logits
        model.set_use_kernels(True)
        assert torch.equal(model(ids).logits, expected)
        assert libkda.transformers.last_path() == "libkda: chunk_kda"


# ---- time ------------------------------------------------------------------------------------------------------------

def test_prefill_is_faster(kimi_linear):
    """A whole model's prefill of 1,000 tokens; 7 to 8 times is what is measured."""
    by_torch, by_libkda = models.prefill_seconds(models.kimi_of(heads=4), tokens=1000, runs=2)
    print(f"prefill of 1,000 tokens, 4 heads: {by_torch / by_libkda:.1f}x")
    assert by_torch > 4 * by_libkda
