# SPDX-License-Identifier: Apache-2.0
"""Calls of libkda.arrays like an earlier one: of NumPy arrays of the same types, sizes and strides, with the same
options. Nothing of them but the addresses is described anew, and the plan is kept."""
from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref

from .dlpack import is_numpy_bfloat16, pointer_of
from .library import PTR, Problem, State, check, library

_MOST = 256  # calls that are remembered; the oldest is forgotten first
_MOST_WORKSPACE = 8 << 20  # bytes that a thread keeps between calls
_remembered: dict[tuple, _Repeat] = {}
_lock = threading.Lock()
_of_thread = threading.local()
_allocate = ctypes.PYFUNCTYPE(PTR, ctypes.c_size_t)(("PyMem_RawMalloc", ctypes.pythonapi))
_free = ctypes.PYFUNCTYPE(None, PTR)(("PyMem_RawFree", ctypes.pythonapi))


def _places():
    """Where kda_problem has the address of an argument, in words of 8 bytes."""
    tensors = {name: getattr(Problem, name).offset for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "o")}
    for name in ("initial_state", "final_state"):
        tensors[name] = getattr(Problem, name).offset + State.tensor.offset
    tensors["state"] = tensors["initial_state"]
    tensors["indices"] = Problem.initial_state.offset + State.indices.offset
    tensors["has_state"] = Problem.initial_state_mask.offset
    return {name: offset // 8 for name, offset in tensors.items()}


_PLACES = _places()


class Memory:
    """Memory of this process, as the C ABI wants it aligned. Nobody fills it: much of a workspace for many threads is
    never touched."""

    def __init__(self, name, size):
        allocated = _allocate(size + 64) if size + 64 < 1 << 63 else None
        if allocated is None:
            raise MemoryError(f"{name}: {size} bytes cannot be allocated")
        weakref.finalize(self, _free, allocated).atexit = False  # a call may still be at it
        self.start, self.bytes = (allocated + 63) // 64 * 64, size


def workspace_of(size):
    """A workspace for a call of this thread: that of its last call, if it is large enough."""
    kept = getattr(_of_thread, "memory", None)
    if kept is None or kept.bytes < size:
        kept = Memory("workspace", size)
        if size <= _MOST_WORKSPACE:
            _of_thread.memory = kept
    return kept


class Plan:
    """A plan of the C ABI; freed with this object. `kind`: "plan", or "backward_plan" of a forward's; `make`: what
    gives it for `arguments`."""

    def __init__(self, kind, words, make, *arguments):
        self._kind, self.handle = kind, PTR()
        check(make(*arguments, ctypes.byref(self.handle)), words)
        weakref.finalize(self, self._function("destroy"), self.handle).atexit = False

    def _function(self, name):
        return getattr(library(), f"kda_{self._kind}_{name}")

    @property
    def workspace_bytes(self):
        return self._function("workspace_bytes")(self.handle)

    @property
    def saved_bytes(self):
        return self._function("saved_bytes")(self.handle)


def key_of(function, given, options):
    """What a call has in common with those that repeat it; None: it is not remembered. `given`: its arrays by name."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    key = [function, options, tuple(map(type, options)), os.environ.get("OMP_NUM_THREADS")]
    for array in given.values():
        if array is None:
            key.append(None)
        elif type(array) is numpy.ndarray:
            key += (array.shape, array.strides, array.dtype)
        else:
            return None
    key = tuple(key)
    try:
        hash(key)
    except TypeError:  # an option that is not allowed
        return None
    return key


def run(key, given):
    """The outputs of a call by name, if it repeats an earlier one; else None."""
    repeat = _remembered.get(key)
    return None if repeat is None else repeat.run(given)


def remember(key, given, made, problem, plan, words):
    """Keeps what a call of that key had, which has succeeded. `made`: the outputs that it allocated, by name."""
    if key is None:
        return
    arrays = {name: array for name, array in (given | made).items() if array is not None}
    repeat = _Repeat(arrays, made, problem, plan, words)
    if not repeat.possible(arrays):
        return
    with _lock:
        while len(_remembered) >= _MOST:
            del _remembered[next(iter(_remembered))]
        _remembered[key] = repeat


class _Repeat:
    """What a call leaves for the next ones."""

    def __init__(self, given, made, problem, plan, words):
        self._problem, self._plan, self._words = bytes(problem), plan, words
        self._workspace_bytes = plan.workspace_bytes
        self._made = [(name, made[name].shape, made[name].dtype) for name in made]
        self._zeroed = "o" in made and "indices" in given
        self._bfloat16 = frozenset(name for name, array in given.items() if is_numpy_bfloat16(array))

    def possible(self, arrays):
        """Whether another call differs in its addresses alone: an array without memory has none, and one that is
        aligned otherwise has another plan."""
        return all(array.size > 0 for array in arrays.values()) and self._addresses(arrays) is not None

    def run(self, given):
        """The call's outputs by name; None: this one is not alike after all."""
        numpy = sys.modules["numpy"]
        outputs = {name: (numpy.zeros if self._zeroed else numpy.empty)(shape, dtype)
                   for name, shape, dtype in self._made}
        arrays = given | outputs
        found = self._addresses({name: array for name, array in arrays.items() if array is not None})
        if found is None:
            return None
        owners, addresses = found
        memory = bytearray(self._problem)
        with memoryview(memory).cast("Q") as words:
            for place, address in addresses:
                words[place] = address
        problem = (ctypes.c_char * len(memory)).from_buffer(memory)
        workspace = workspace_of(self._workspace_bytes)
        status = library().kda_run(self._plan.handle, problem, workspace.start, workspace.bytes)
        del owners
        check(status, self._words)
        return arrays

    def _addresses(self, arrays):
        """The arrays' owners and (place, address); None where one is read-only or aligned to less than 16 bytes."""
        owners, addresses = [], []
        for name, array in arrays.items():
            if name in self._bfloat16:
                array = array.view("uint16")
            try:
                capsule = array.__dlpack__()
            except BufferError:
                return None
            address = PTR.from_address(pointer_of(capsule, b"dltensor")).value
            if not address or address % 16:
                return None
            owners.append(capsule)
            addresses.append((_PLACES[name], address))
        return owners, addresses
