# SPDX-License-Identifier: Apache-2.0
"""Types and texts of errors are FLA's: callers and its tests match them."""
import pytest
import torch
from common import make

from libkda import chunk_kda, fused_kda_gate, fused_recurrent_kda

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
    (dict(cp_context=object()), NotImplementedError, "cp_context"),
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


@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda])
def test_gradients_are_refused_not_dropped(function):
    x, _, _ = make()
    x["v"].requires_grad_()
    with pytest.raises(NotImplementedError, match="no backward pass"):
        function(**x)
    with torch.no_grad():
        assert function(**x)[0].shape == x["v"].shape


def test_gate_without_parameters():
    with pytest.raises(ValueError, match="A_log"):
        fused_kda_gate(torch.zeros(2, 3, 4))
