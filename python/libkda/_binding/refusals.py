# SPDX-License-Identifier: Apache-2.0
"""Refusals of operators as ValueError, whatever exception torch makes of them.

The operators refuse with std::invalid_argument and fail with other exceptions. torch up to 2.14 makes ValueError of the
former, torch 2.15 makes RuntimeError of all. The text is the mark: that of a refusal begins with REFUSAL, that of a
failure does not (csrc/describe.hpp).
"""
import functools

import torch

REFUSAL, FAILURE = "libkda: ", "libkda failed: "


def as_value_error(error):
    """The ValueError of a refusal that torch made a RuntimeError of; None for anything else."""
    text = str(error)
    return ValueError(text) if type(error) is RuntimeError and text.startswith(REFUSAL) else None


def _refusing(function):
    """A call of an operator whose refusals are ValueError; one that is taken costs nothing more."""
    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            refusal = as_value_error(error)
            if refusal is None:
                raise
        raise refusal from None

    return call


def keep_types(namespace):
    """Lets the operators of `namespace`, a name under torch.ops, raise ValueError where they refuse: called by anybody,
    eager, by autograd or by compiled code. torch below 2.15 does so itself, and nothing is changed there."""
    if version_of_torch() < (2, 15):
        return
    prefix = f"{namespace}::"
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith(prefix):
            continue
        packet = getattr(getattr(torch.ops, namespace), name.removeprefix(prefix).partition(".")[0])
        # torch has what a call of an operator runs in this attribute, and exchanges it itself (torch/_ops.py).
        for operator in (packet, packet.default):
            operator._op = _refusing(operator._op)
        torch.jit._builtins._register_builtin(packet._op, name)  # torch.jit.script finds it by its function


def version_of_torch():
    """Its first two numbers."""
    return tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2])
