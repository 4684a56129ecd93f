# SPDX-License-Identifier: Apache-2.0
"""Arguments of functions on torch tensors against their rules (rules.py)."""
from __future__ import annotations

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch.compiler import is_compiling

from .refusals import FAILURE, REFUSAL
from .rules import (GATES, IN_PLACE, INTEGERS, LAST_SLOT, MEANT, MOST_A_LOG, PARAMETERS, ROWS, RULES, STATES, WORDS,
                     FlaError, Sizes, check_heads, in_words_of, refuse_type)

_DTYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.int16, torch.int8,
    torch.uint8, torch.bool)}

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_STATES = ("initial_state", "final_state", "states", "pool", "checkpoints", "drafts", "d_final_state", "tail.rest",
           "tail_rest")
_DENSE = ("q", "k", "v", "g", "o", "initial_state", "final_state", "states", "checkpoints", "drafts")


def check(function, values, *, v_first=False, dense_rows=False):
    """Raises TypeError or ValueError for the first of `values`, arguments by name, that `function` does not take."""
    rules, sizes = RULES[function], Sizes()
    first = None  # the tensor whose device is that of all
    float64 = function not in IN_PLACE and computes_in_float64(values.get("q"))
    for name, rule in rules.items():
        if name not in values:
            continue
        x = values[name]
        if x is None and not rule.required:
            continue
        if float64 and rule.types in (ROWS, STATES, PARAMETERS):
            rule = rule._replace(types=(*rule.types, "float64"))
        _check_kind(name, rule, x)
        if first is None:
            first = name, x.device
        _check_place(name, rule, x, *first)
        if name in _STATES:
            sizes.default_n()
            if v_first:
                rule = rule._replace(shape=rule.shape.replace("K V", "V K"))
        elif name not in ("cu_seqlens", "cu_seqlens_cpu") and "N" in rule.shape.split("|")[0].split():
            sizes.default_n()
        expanded = name in GATES and x.dim() == 4 and x.stride(-1) == 0
        sizes.expect(name, rule, tuple(x.shape), expanded)
        expect_memory(name, x)
        one_gate = expanded or name == "g" and x.dim() == 3
        if dense_rows and name in _DENSE and x.stride(-1) != 1 and x.shape[-1] != 1 and not one_gate:
            raise ValueError(f"{name}: innermost stride is {x.stride(-1)}, must be 1")
        if name == "v" and "V" in sizes:
            check_heads(sizes)


def computes_in_float64(q):
    """Whether a call is computed in float64, by the library's oracle."""
    return isinstance(q, torch.Tensor) and q.dtype is torch.float64 and q.device.type == "cpu"


def state_type(q):
    """Of states that are made for a call."""
    return torch.float64 if computes_in_float64(q) else torch.float32


def _check_kind(name, rule, x):
    if not isinstance(x, torch.Tensor):
        hint = "; libkda.arrays takes arrays without torch" if hasattr(x, "__dlpack__") else ""
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}{hint}")
    if x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got {'nested' if x.is_nested else x.layout}")
    if _DTYPES.get(x.dtype) not in rule.types:
        error = refuse_type(name, rule.types, x.dtype)
        if name == "initial_state" and rule.types == ("float32",):  # FLA's words and type
            error = FlaError(f"initial_state must be in float32. Got {x.dtype}")
        raise error
    if rule.written and not is_compiling() and (x.is_neg() or x._is_zerotensor()):
        raise ValueError(f"{name} is written, so it cannot be a negative view or a tensor without memory")


def _check_place(name, rule, x, first, device):
    on_host = rule.where != "q" and x.device.type == "cpu"
    if on_host or (rule.where != "host" and x.device == device):
        return
    if rule.where == "host":
        raise ValueError(f"{name} must be on the CPU, got {x.device}")
    raise ValueError(f"{name} must be on the device of {first}, {device}, got {x.device}")


def checked(*keywords: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """A function with errors that name its argument. A call that nothing is wrong with pays for no check of Python's:
    kernels and operators refuse what they do not take, and what they refuse is looked at here. `keywords`: what it
    knows of its **kwargs. What another function knows is refused; what nobody knows is ignored, as FLA's functions
    do, with one warning."""
    return lambda function: _checked(function, keywords)


def _checked(function, keywords):
    names = tuple(inspect.signature(function).parameters)
    name = function.__name__
    known = frozenset((*names, *keywords))

    @functools.wraps(function)
    def call(*args, **kwargs):
        if keywords and not known.issuperset(kwargs):
            _refuse_keywords(name, known, kwargs)
            if not is_compiling():
                _warn_of_keywords(name, known, kwargs)
        if is_compiling():  # nothing but a fake kernel looks
            values = _with_parts(dict(zip(names, args), **kwargs))
            check(_rules_for(name, values), values, v_first=bool(values.get("state_v_first")))
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except Exception as error:
            better = _explained(error, name, dict(zip(names, args), **kwargs))
            if better is error:
                raise
        raise better from None

    call.__code__ = call.__code__.replace(co_name=name)  # torch.compile of 2.15 takes it for the function's __name__
    return call


def checked_first(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The same for what torch computes: it takes much that is not meant, without a word."""
    names = tuple(inspect.signature(function).parameters)
    name = function.__name__

    @functools.wraps(function)
    def call(*args, **kwargs):
        check(name, dict(zip(names, args), **kwargs))
        return function(*args, **kwargs)

    return call


def _rules_for(name, values):
    if name == "fused_recurrent_kda_fwd" and not values.get("inplace_final_state", True):
        return f"{name}, not in place"
    if name == "verify" and (values.get("drafts") is not None or values.get("draft_slots") is not None):
        return f"{name}, with drafts"
    if name == "verify" and values.get("tail") is not None:
        return f"{name}, with a tail"
    return name


def _with_parts(values):
    """The same, with the tensors of a tail or a ring by names of their own."""
    return values | {f"{whole}.{field}": getattr(values[whole], field) for whole in ("tail", "ring")
                     for field in getattr(values.get(whole), "_fields", ())}


def _explained(error, name, values):
    """An error that says which argument it is about, or `error` itself."""
    values = _with_parts(values)
    v_first = bool(values.get("state_v_first") or values.get("transpose_state_layout"))
    if values.get("cp_context") is not None:  # which says what sequences and states there are
        values = {name: x for name, x in values.items() if name not in ("initial_state", "cu_seqlens",
                                                                                  "has_state")}
    rules = _rules_for(name, values)
    try:
        check(rules, values, v_first=v_first)
    except (TypeError, ValueError) as refusal:
        return refusal
    text = str(error)
    if not text.startswith((REFUSAL, FAILURE)):
        return error
    text = in_words_of(rules if rules in WORDS else name, text.removeprefix(FAILURE), values.get("out") is not None)
    if " cannot be allocated: " in text and "CUDA" in text:
        return torch.OutOfMemoryError(text)
    return type(error)(text)


def expect_memory(name, x):
    """That a tensor's storage has not been freed, as sharded training does with parameters that are elsewhere."""
    if is_compiling() or type(x) is not torch.Tensor or x.is_meta or x._is_zerotensor() or x.numel() == 0:
        return
    try:
        held = x.untyped_storage().nbytes()
    except NotImplementedError:  # a wrapper of torch.func
        return
    if held == 0:
        raise ValueError(f"{name} has no memory: its storage has been freed")


# ---- values ----------------------------------------------------------------------------------------------------------

def int32_of(name, x):
    """Slots or counts as the kernels read them; none changes its meaning."""
    expect_memory(name, x)
    if x.dtype is torch.int32:
        return x.contiguous()
    if _DTYPES.get(x.dtype) not in INTEGERS:
        raise refuse_type(name, INTEGERS, x.dtype)
    if x.dtype is torch.int64:
        if x.device.type == "cpu" and type(x) is torch.Tensor and not is_compiling():
            if x.numel() and x.max() > LAST_SLOT:
                raise ValueError(f"{name} must be at most {LAST_SLOT}, got {x.max().item()}")
        # What is too small means none, and what is too large on a GPU is skipped, as the kernels do.
        x = x.clamp(-1, LAST_SLOT)
    return x.to(torch.int32).contiguous()


def check_rates(A_log):
    """That exp(A_log) is finite in fp32, where looking costs no wait."""
    if A_log is None or is_compiling() or type(A_log) is not torch.Tensor or A_log.device.type != "cpu":
        return
    if A_log.numel() and A_log.detach().max() > MOST_A_LOG:
        raise ValueError(f"A_log must be at most {MOST_A_LOG}, where its exp leaves fp32, got {A_log.max().item()}")


def _refuse_keywords(function, known, given):
    """What another function of the package would have honoured. None, False and the default of each ask for nothing."""
    for name, value in given.items():
        nothing = value is None or isinstance(value, (bool, int, str)) and value in (False, "grouped")
        if name in MEANT and name not in known and not nothing:
            raise TypeError(f"{function} has no argument `{name}`, which other functions of libkda have")


_warned: set[tuple[str, str]] = set()


def _warn_of_keywords(function, known, given):
    for name in given:
        if name in known or (function, name) in _warned:
            continue
        _warned.add((function, name))
        near = difflib.get_close_matches(name, sorted(known), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        warnings.warn(f"{function} ignores the keyword argument {name!r}, which it does not know{hint}", stacklevel=3)
