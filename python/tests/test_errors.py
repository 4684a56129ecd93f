# SPDX-License-Identifier: Apache-2.0
"""Types and texts of errors are FLA's: callers and its tests match them."""
import inspect
import warnings

import pytest
import torch
from common import make

from libkda import chunk_kda, fused_kda_gate, fused_recurrent_kda, fused_recurrent_kda_fwd, naive_kda_gate
from libkda._binding import checks

CASES = [
    (dict(cu_seqlens=[0, 131]), ValueError, "The batch size is expected to be 1 rather than 2 when using `cu_seqlens`."
                                            "Please flatten variable-length inputs before processing."),
    (dict(chunk_size=16), ValueError, "`chunk_size` must be either 32 or 64 for KDA, got 16."),
    (dict(use_gate_in_kernel=True), ValueError,
     "`A_log` must be provided when `use_gate_in_kernel=True` and `lower_bound` is not set."),
    (dict(use_gate_in_kernel=True, safe_gate=True, A_log=True), ValueError,
     "`lower_bound` must be specified when `safe_gate=True` and `use_gate_in_kernel=True`."),
    (dict(use_gate_in_kernel=True, safe_gate=True, lower_bound=-6.0), ValueError,
     "`lower_bound` must be in the safe range [-5, 0), got -6.0."),
    (dict(allow_neg_eigval=True), ValueError, "`allow_neg_eigval=True` requires `use_beta_sigmoid_in_kernel=True`."),
    (dict(state_v_first=True, transpose_state_layout=True), ValueError,
     "Cannot pass both `state_v_first` and the deprecated `transpose_state_layout`."),
    (dict(initial_state="half"), AssertionError, "initial_state must be in float32."),
    (dict(return_intermediate_states=True), AssertionError,
     "return_intermediate_states is only allowed in inference mode"),
    (dict(g=torch.zeros(2, 131, 4, 63)), AssertionError, "g must have shape [B, T, HV, K]=[2, 131, 4, 64]"),
    (dict(beta=torch.zeros(2, 131, 3)), AssertionError, "beta must have shape [B, T, HV]=[2, 131, 4]"),
    (dict(k=torch.zeros(2, 131, 2, 32)), AssertionError, "q and k must have the same shape"),
    (dict(cp_context=object()), TypeError, "cp_context must be a libkda.context_parallel.Context"),
]


@pytest.mark.parametrize("change, error, text", CASES, ids=[c[2][:40] for c in CASES])
def test_chunk(change, error, text):
    x, parameters, state = make()
    change = dict(change)
    if change.get("A_log") is True:
        change["A_log"] = parameters["A_log"]
    if change.get("initial_state") == "half":
        change["initial_state"] = state.half()
    if "cu_seqlens" in change:
        change["cu_seqlens"] = torch.tensor(change["cu_seqlens"])
    with pytest.raises(error) as raised:
        chunk_kda(**dict(x, **change))
    assert text in str(raised.value)


def test_a_call_that_fails_for_another_reason_is_made_once(monkeypatch):
    calls = []

    def out_of_memory(*args):
        calls.append(args)
        raise RuntimeError("out of memory")
    monkeypatch.setattr("libkda.ops.forward", out_of_memory)
    x, _, _ = make()
    with pytest.raises(RuntimeError, match="out of memory"):
        chunk_kda(**x)
    assert len(calls) == 1


def test_number_of_states():
    x, _, state = make(B=1, N=3)
    with pytest.raises(ValueError, match="i.e., 2 rather than 3"):
        chunk_kda(**x, initial_state=state, cu_seqlens=torch.tensor([0, 100, 131]))


@pytest.mark.parametrize("heads", [(4, 6)])
def test_group_of_value_heads(heads):
    x, _, _ = make(H=heads[0], HV=heads[1])
    with pytest.raises(AssertionError, match="must be evenly divisible by num_qk_heads"):
        chunk_kda(**x)


def test_key_dim():
    x, _, _ = make(K=260)
    with pytest.raises(AssertionError, match="key headdim <=256 for KDA, got 260"):
        chunk_kda(**x)


def test_lengths_that_do_not_fit_name_the_argument():
    x, _, _ = make(B=1)
    with pytest.raises(ValueError, match="cu_seqlens"):
        chunk_kda(**x, cu_seqlens=torch.tensor([0, 140, 131]))
    with pytest.raises(TypeError, match="cu_seqlens must be int32 or int64, got torch.float32"):
        chunk_kda(**x, cu_seqlens=torch.tensor([0.0, 131.0]))


def test_deprecated_layout_warns():
    x, _, state = make()
    with pytest.warns(DeprecationWarning, match="renamed to `state_v_first`"):
        _, final = chunk_kda(**x, initial_state=state.mT.contiguous(), output_final_state=True,
                             transpose_state_layout=True)
    assert final.shape == state.mT.shape


@pytest.mark.parametrize("T", [3, 131])
def test_gradients_of_the_recurrent_function_are_refused_not_dropped(T):
    """FLA's fused_recurrent_kda has none either."""
    x, _, _ = make(T=T)
    x["v"].requires_grad_()
    with pytest.raises(NotImplementedError, match="no backward pass of fused_recurrent_kda .*chunk_kda"):
        fused_recurrent_kda(**x)
    with torch.no_grad():
        assert fused_recurrent_kda(**x)[0].shape == x["v"].shape


def test_gate_without_parameters():
    with pytest.raises(ValueError, match="A_log"):
        fused_kda_gate(torch.zeros(2, 3, 4))


# ---- what is not meant is said ---------------------------------------------------------------------------------------

def test_not_tensors():
    x, _, state = make(T=3)
    numpy = pytest.importorskip("numpy")
    with pytest.raises(TypeError, match="q must be a torch.Tensor, got ndarray; libkda.arrays takes arrays"):
        chunk_kda(**dict(x, q=x["q"].numpy()))
    with pytest.raises(TypeError, match="initial_state must be a torch.Tensor, got ndarray"):
        fused_recurrent_kda(**x, initial_state=numpy.zeros(3))
    with pytest.raises(TypeError, match="beta must be a torch.Tensor, got list"):
        chunk_kda(**dict(x, beta=x["beta"].tolist()))


@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])
@pytest.mark.parametrize("sizes, text", [(dict(K=0), "q must have .* K = 0"), (dict(H=0, HV=0), "q must have .* H = 0"),
                                         (dict(HV=0), "v must have .* HV = 0"), (dict(V=0), "v must have .* V = 0")])
def test_no_heads_or_channels(function, sizes, text):
    x, _, _ = make(**dict(dict(T=3), **sizes))
    with pytest.raises(ValueError, match=text):
        function(**x)


def test_a_pool_must_be_given_and_an_output_must_fit():
    x, _, state = make(T=1)
    with pytest.raises(ValueError, match="initial_state must be given"):
        fused_recurrent_kda_fwd(**x)
    for in_place in (False, True):
        with pytest.raises(ValueError, match=r"out must have shape .*=\[2, 1, 4, 32\], got \[2, 1, 4, 31\]"):
            fused_recurrent_kda_fwd(**x, initial_state=state, inplace_final_state=in_place, out=x["v"][..., 1:])


@pytest.mark.parametrize("change, error, text", [
    (dict(ssm_state_indices=torch.tensor([2**32, 1])), ValueError, "ssm_state_indices must be at most 2147483647"),
    (dict(ssm_state_indices=torch.tensor([0.9, 1.0])), TypeError, "ssm_state_indices must be int32, .* torch.float32"),
    (dict(ssm_state_indices=torch.tensor([1, 1])), ValueError, "ssm_state_indices: slot 1 would be written twice"),
    (dict(ssm_state_indices=torch.tensor([5, 1])), ValueError, "ssm_state_indices: entry 0 = 5"),
    (dict(ssm_state_indices=torch.tensor([[0, 1], [2, 3]]), num_accepted_tokens=torch.tensor([2**32 + 1, 1])),
     ValueError, "num_accepted_tokens must be at most"),
    (dict(ssm_state_indices=torch.tensor([[0, 1], [2, 3]]), num_accepted_tokens=torch.tensor([1.0, 1.0])),
     TypeError, "num_accepted_tokens must be int32"),
    (dict(first_slot=0.5), TypeError, "first_slot must be an integer, got 0.5"),
    (dict(first_slot=2**32), ValueError, "first_slot must be 0 to 2147483647"),
    (dict(has_state=torch.tensor([1.0, 0.0])), TypeError, "has_state must be bool or uint8, got torch.float32"),
])
def test_slots(change, error, text):
    """In the caller's words, and nothing is narrowed on the way."""
    x, _, state = make(T=1)
    pool = torch.cat([state, state, state[:1]])
    before, out = pool.clone(), torch.full_like(x["v"], float("nan"))
    with pytest.raises(error, match=text):
        fused_recurrent_kda_fwd(**x, initial_state=pool, out=out, **change)
    assert torch.equal(pool, before) and out.isnan().all()


def test_lengths_on_the_host_that_differ():
    x, _, _ = make(B=1, T=20)
    cu = torch.tensor([0, 10, 20])
    with pytest.raises(ValueError, match="cu_seqlens_cpu: entry 1 = 4 is 10 in cu_seqlens"):
        chunk_kda(**x, cu_seqlens=cu, cu_seqlens_cpu=torch.tensor([0, 4, 20]))
    chunk_kda(**x, cu_seqlens=cu, cu_seqlens_cpu=cu.int())


@pytest.mark.parametrize("change, error, text", [
    (dict(scale=1e39), ValueError, r"scale must be finite in fp32, got 1e\+39"),
    (dict(scale="0.5"), TypeError, "scale must be a number, got '0.5'"),
    (dict(scale=float("nan")), ValueError, "scale must be finite"),
    (dict(lower_bound=-1e39, use_gate_in_kernel=True), ValueError, "lower_bound must be finite in fp32"),
    (dict(lower_bound=1.0, use_gate_in_kernel=True), ValueError, "lower_bound"),
    (dict(A_log=torch.full((4,), 89.0), use_gate_in_kernel=True), ValueError,
     r"A_log: entry 0 = 89 is above 70 with gate softplus"),
    (dict(A_log=torch.zeros(4), dt_bias=torch.zeros(3), use_gate_in_kernel=True), ValueError,
     r"dt_bias must have HV \* K = 256 elements"),
])
@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])
def test_numbers_are_checked_as_fp32(function, change, error, text):
    x, _, _ = make(T=3)
    with pytest.raises(error, match=text):
        function(**x, **change)


def test_gates_of_large_rates():
    g, A_log = torch.zeros(2, 3, 4, 8), torch.full((4,), 89.0)
    for call in (lambda: fused_kda_gate(g, A_log), lambda: fused_kda_gate(g, A_log, lower_bound=-5.0),
                 lambda: naive_kda_gate(g, A_log)):
        with pytest.raises(ValueError, match="A_log must be at most"):
            call()


def test_errors_have_no_path_of_the_machine_that_built():
    x, _, _ = make(T=3)
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    rows[1] = rows[1].to(torch.int32)
    with pytest.raises(ValueError) as raised:
        torch.ops.libkda.forward(*rows, None, None, None, None, None, 0, 0, -5.0, 1.0, False, False, False)
    assert str(raised.value) == "libkda: k must be float32, bfloat16 or float16, got Int"


def test_unknown_keywords_are_ignored_with_one_warning():
    x, _, _ = make(T=3)
    expected = chunk_kda(**x)[0]
    with pytest.warns(UserWarning, match="chunk_kda ignores the keyword argument 'inital_state'.*'initial_state'"):
        assert torch.equal(chunk_kda(**x, inital_state=None)[0], expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunk_kda(**x, inital_state=None)
    with pytest.warns(UserWarning, match="fused_recurrent_kda ignores the keyword argument 'A_Log'.*'A_log'"):
        fused_recurrent_kda(**x, A_Log=None)


@pytest.mark.parametrize("name, hint", [("has_stat", "; did you mean 'has_state'?"), ("zzz", "")])
@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])
def test_a_warning_of_a_keyword_names_one_that_is_near_and_the_line_of_the_call(function, name, hint):
    x, _, _ = make(T=3)
    checks._warned.discard((function.__name__, name))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1
        function(**x, **{name: None})
    assert [(str(w.message), w.filename, w.lineno) for w in caught] == [
        (f"{function.__name__} ignores the keyword argument {name!r}, which it does not know{hint}", __file__, line)]


@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda, fused_recurrent_kda_fwd])
def test_a_warning_of_the_old_layout_names_the_line_of_the_call(function):
    x, _, state = make(T=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1
        function(**x, initial_state=state.mT.contiguous(), transpose_state_layout=True)
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line)]
