# SPDX-License-Identifier: Apache-2.0
"""What an operator refuses is a ValueError and what it fails at is not, on every torch and whoever calls."""
import pytest
import torch
from common import make

from libkda import chunk_kda, fused_recurrent_kda_fwd, ops
from libkda._binding import refusals

# The ordinary forward says what does not fit in its place.
LEFT_OUT = {"libkda::span_begin"}
OPERATORS = sorted({name for name in torch._C._dispatch_get_all_op_names() if name.startswith("libkda::")} - LEFT_OUT)
TAIL = (ops.GATE_LOG, ops.BETA_PLAIN, -5.0, 1.0, False, False)


def refused(operator):
    """Arguments of the right kinds that no operator takes: rows of int32, of one dimension."""
    values = {"Tensor": torch.zeros(1, dtype=torch.int32), "int": 0, "float": 1.0, "bool": False}
    return [None if "Optional" in str(argument.type) else [values["Tensor"]] if "List" in str(argument.type) else
            values[str(argument.type)] for argument in operator._schema.arguments]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator(name, mode):
    """Under inference_mode nothing of Python's is between the caller and the operator."""
    packet = getattr(torch.ops.libkda, name.removeprefix("libkda::"))
    for operator in (packet, packet.default):
        with mode(), pytest.raises(ValueError, match="^libkda: "):
            operator(*refused(packet.default))


def test_all_operators_are_tried():
    assert len(OPERATORS) == 23 and {"libkda::update", "libkda::update_with_tail"} < set(OPERATORS)


def rows_of(x):
    return [x[name] for name in ("q", "k", "v", "g", "beta")]


def test_a_backward_that_refuses():
    x, _, _ = make(T=3)
    rows = [t.requires_grad_() for t in rows_of(x)]
    o, _ = chunk_kda(*rows)
    with pytest.raises(ValueError, match="d_o must have shape"):
        ops._backward(o[:, 1:], None, *rows, *[None] * 5, *TAIL, None, None, 0, 31)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_compiled_code(mode):
    """What only values show is refused while the compiled function runs, and nothing has been written then."""
    x, _, state = make(T=1)
    step = torch.compile(lambda pool, slots: fused_recurrent_kda_fwd(**x, initial_state=pool, ssm_state_indices=slots),
                         backend="eager", fullgraph=True)
    with mode():
        pool = torch.cat([state, state])
        before = pool.clone()
        step(pool.clone(), torch.tensor([3, 1], dtype=torch.int32))
        with pytest.raises(ValueError, match="slot 1 would be written twice"):
            step(pool, torch.tensor([1, 1], dtype=torch.int32))
    assert torch.equal(pool, before)


def test_a_failure_is_no_refusal():
    """It has another mark, and no function takes it for a reason to try something else."""
    x, _, _ = make(B=1, T=1, H=1, HV=1, K=16, V=16)
    huge = [t.expand(1 << 30, 1 << 20, *t.shape[2:]) for t in rows_of(x)]
    for mode in (torch.inference_mode, torch.no_grad):
        with mode(), pytest.raises(RuntimeError, match="^libkda failed: o: .* bytes cannot be allocated") as raised:
            torch.ops.libkda.forward(*huge, *[None] * 5, *TAIL, False)
        assert not isinstance(raised.value, ValueError)
    with torch.no_grad(), pytest.raises(RuntimeError, match="^o: .* bytes cannot be allocated") as raised:
        chunk_kda(*huge)
    assert not isinstance(raised.value, ValueError)


@pytest.mark.parametrize("error, is_refusal", [
    (RuntimeError("libkda: q must be a tensor"), True), (RuntimeError("libkda failed: no memory"), False),
    (RuntimeError("CUDA error: libkda: q"), False), (NotImplementedError("libkda: has no backward pass"), False),
    (ValueError("libkda: q must be a tensor"), False), (torch.OutOfMemoryError("libkda: o"), False)])
def test_the_mark(error, is_refusal):
    """As torch 2.15 raises them, on every torch; an exception of another class is somebody's choice."""
    def operator(*args, **kwargs):
        raise error
    with pytest.raises(ValueError if is_refusal else type(error)) as raised:
        refusals._refusing(operator)(1, x=2)
    assert str(raised.value) == str(error) and (raised.value is error) != is_refusal


@pytest.mark.filterwarnings("ignore")
def test_torch_script():
    """It looks an operator up by its function."""
    @torch.jit.script
    def has_backward(q, k, v, g, beta):
        return torch.ops.libkda.has_backward(q, k, v, g, beta)
    x, _, _ = make(T=3)
    assert has_backward(*rows_of(x))
