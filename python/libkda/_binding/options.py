# SPDX-License-Identifier: Apache-2.0
"""Options of a call's plan: what they may be, which of them are in force, and their number in csrc/call_options.hpp."""
from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.compiler import assume_constant_result

from .. import ops  # noqa: F401  (it loads the operators' library)
from .._plugins.switches import text_of
from .policies import expect_invariant, policy_of

VARIABLE = "LIBKDA_CONTEXT_PARALLEL"
_FORMS = {"auto": 0, "tensor": 1, "token": 2}  # numbers of kda.h
_WITH_FORMS = "cuda.sm80.staged"  # other backends have one form


@dataclasses.dataclass(frozen=True)
class Options:
    """How the library plans a call (docs/planning.md). Results are exact with all of them.

    context_parallel: "auto" cuts long sequences over a GPU where that is predicted to gain; "off" never does; a number
    cuts each into so many segments, "flashkda" and "cula" by the published rules of these libraries, of a forward where
    lengths are on the host. Decode is never cut.
    intra_form: "tensor" or "token", of backend cuda.sm80.staged. backend: the name of an implementation, or a part of
    it between dots ("sm90.fused", "avx2"; `kda info` lists them); a backward that it has not is of the best one.
    batch_invariant: a sequence has the same bits whatever else is in the batch.
    most_cut_bytes: memory that segments may take where only the GPU knows the lengths; a call that would take more is
    not cut. By tokens and heads, never by lengths. Lengths on the host have no limit.

    TypeError and ValueError name the option. A backend that cannot serve a call is a ValueError of the call."""
    context_parallel: str | int = "auto"
    intra_form: str = "auto"
    backend: str = ""
    batch_invariant: bool = False
    most_cut_bytes: int = 1 << 30
    number: int = dataclasses.field(init=False, repr=False, compare=False)  # what operators are given

    def __post_init__(self):
        policy, segments = policy_of(self.context_parallel)
        if not isinstance(self.intra_form, str):
            raise TypeError(f"intra_form must be one of {', '.join(map(repr, _FORMS))}, got {self.intra_form!r}")
        if self.intra_form not in _FORMS:
            raise ValueError(f"intra_form must be one of {', '.join(map(repr, _FORMS))}, got {self.intra_form!r}")
        if not isinstance(self.backend, str):
            raise TypeError(f"backend must be a name as `kda info` lists it, or '', got {self.backend!r}")
        if "\0" in self.backend:
            raise ValueError(f"backend must be a name as `kda info` lists it, got {self.backend!r}")
        if self.intra_form != "auto" and self.backend and f".{self.backend}." not in f".{_WITH_FORMS}.":
            raise ValueError(f"intra_form = {self.intra_form!r} is of backend {_WITH_FORMS}, and backend is "
                             f"{self.backend!r}")
        expect_invariant(self.batch_invariant)
        if isinstance(self.most_cut_bytes, bool) or not isinstance(self.most_cut_bytes, int):
            raise TypeError(f"most_cut_bytes must be a number of bytes, got {self.most_cut_bytes!r}")
        if not 0 <= self.most_cut_bytes < 1 << 63:
            raise ValueError(f"most_cut_bytes must be 0 to 2^63 - 1 bytes, got {self.most_cut_bytes!r}")
        number = _number_of_options()(policy, segments, _FORMS[self.intra_form], self.backend.encode(),
                                      self.batch_invariant, self.most_cut_bytes)
        object.__setattr__(self, "number", number)

    def __reduce__(self):  # numbers are of this process
        return Options, (self.context_parallel, self.intra_form, self.backend, self.batch_invariant,
                         self.most_cut_bytes)


@functools.cache
def _number_of_options():
    function = ctypes.CDLL(torch.ops.libkda.loaded_by[1]).kda_torch_number_of_options
    function.restype = ctypes.c_int64
    function.argtypes = [ctypes.c_int32, ctypes.c_int64, ctypes.c_int32, ctypes.c_char_p, ctypes.c_int32,
                         ctypes.c_int64]
    return function


@functools.cache
def _of_environment() -> Options:
    text = text_of(VARIABLE)
    if not text:
        return Options()
    try:
        return Options(context_parallel=int(text) if text.isdecimal() else text.lower())
    except ValueError as error:
        raise ValueError(f"{VARIABLE} in the environment: {error}") from None


class _OfThread(threading.local):
    given: Options | None = None  # by options()
    number: int | None = None


_of_thread = _OfThread()


@contextlib.contextmanager
def options(**changes: Any) -> Iterator[Options]:
    """`with libkda.options(backend="staged"):` Fields of Options, in force for calls of this thread that are not given
    plan_options. The others stay as they were. A backward has those of its forward."""
    before = _of_thread.given, _of_thread.number
    made = dataclasses.replace(before[0] or _of_environment(), **changes)
    _of_thread.given, _of_thread.number = made, made.number
    try:
        yield made
    finally:
        _of_thread.given, _of_thread.number = before


@assume_constant_result
def _number_in_force() -> int:
    number = _of_thread.number
    if number is None:
        number = _of_thread.number = _of_environment().number
    return number


@functools.lru_cache
def _with_policy(made: Options, context_parallel: str) -> Options:
    return dataclasses.replace(made, context_parallel=context_parallel)


def uncut_where_auto() -> Options:
    """The options in force, with nothing cut where their policy is "auto"."""
    made = _of_thread.given or _of_environment()
    return _with_policy(made, "off") if made.context_parallel == "auto" else made


@assume_constant_result
def number_with_policy(context_parallel: str) -> int:
    """The number of the options in force, with another policy."""
    return _with_policy(_of_thread.given or _of_environment(), context_parallel).number


def number_of(plan_options: Options | None) -> int:
    """The number of a call's options: its own, else those in force, which a traced call has as a constant."""
    if plan_options is None:
        return _number_in_force()
    if not isinstance(plan_options, Options):
        raise TypeError(f"plan_options must be libkda.Options, got {type(plan_options).__name__}")
    return plan_options.number


def refuse_beside(name: str, plan_options: Options | None) -> None:
    """Raises ValueError where a call with argument `name` would be planned otherwise than by default."""
    if number_of(plan_options):
        given = plan_options or _of_thread.given or _of_environment()
        fields = {field.name: getattr(given, field.name) for field in dataclasses.fields(given) if field.init}
        named = ", ".join(f"{field} = {value!r}" for field, value in fields.items()
                          if value != getattr(Options, field))
        raise ValueError(f"{named} is not taken beside `{name}`, which has segments and kernels of its own")
