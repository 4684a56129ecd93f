# SPDX-License-Identifier: Apache-2.0
"""Memory of arrays that speak DLPack, as the C ABI's kda_tensor describes it."""
from __future__ import annotations

import ctypes
import math
import sys

from .library import I64, PTR
from .rules import refuse_type

CPU, CUDA = 1, 2  # of DLPack
FP32, BF16, FP16, INT32, INT64 = range(5)  # of kda.h
BOOL, UINT8 = 5, 6  # of masks, which kda.h takes as bytes
_DTYPES = {(2, 32): FP32, (4, 16): BF16, (2, 16): FP16, (0, 32): INT32, (0, 64): INT64, (6, 8): BOOL, (1, 8): UINT8}
_NAMES = {FP32: "float32", BF16: "bfloat16", FP16: "float16", INT32: "int32", INT64: "int64", BOOL: "bool",
          UINT8: "uint8"}


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", PTR), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(I64)), ("strides", ctypes.POINTER(I64)),
                ("byte_offset", ctypes.c_uint64)]


pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
pointer_of.restype, pointer_of.argtypes = PTR, [ctypes.py_object, ctypes.c_char_p]


def is_numpy_bfloat16(array):
    """ml_dtypes' bfloat16 in a NumPy array, as JAX hands it to callbacks: DLPack of NumPy does not take it."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(array, numpy.ndarray) and array.dtype.kind == "V" and \
        array.dtype.name == "bfloat16"


# Dimensions of what has one element a head in place of K.
_A_HEAD = dict(g=3, dg=3, dt_bias=1, ddt_bias=1)


class View:
    """An array's memory; holds the array while it lives. `types`: those that it may have, by name; None: any."""

    def __init__(self, array, name, types):
        self.name = name
        if not hasattr(array, "__dlpack__"):
            raise TypeError(f"{name} must be an array with __dlpack__ (NumPy, JAX, CuPy), got {type(array).__name__}")
        bfloat16 = is_numpy_bfloat16(array)
        if bfloat16:
            array = array.view("uint16")
        if getattr(array, "is_neg", bool)():  # torch exports the memory of such a view, whose values are others
            raise TypeError(f"{name}: cannot export a negative view")
        flags = getattr(array, "flags", None)
        self.writable = getattr(flags, "writeable", True)
        if not self.writable:  # DLPack has no word for read-only: NumPy refuses
            array = array.copy()
        try:
            self.owner = array, array.__dlpack__()
        except Exception as refusal:  # each library has its own
            raise TypeError(f"{name} cannot be exported by DLPack: {refusal}") from None
        x = _DLTensor.from_address(pointer_of(self.owner[1], b"dltensor"))
        self.shape = tuple(x.shape[i] for i in range(x.ndim))
        self.device = x.device_type, x.device_id
        self.dtype = BF16 if bfloat16 else _DTYPES.get((x.code, x.bits)) if x.lanes == 1 else None
        self.type_name = _NAMES.get(self.dtype) or str(getattr(array, "dtype", "another type"))
        self.bytes = math.prod(self.shape) * x.bits * x.lanes // 8
        if types is not None and self.type_name not in types:
            raise refuse_type(name, types, self.type_name)
        if not x.data and self.bytes > 0:
            raise ValueError(f"{name} has no memory: its storage has been freed")
        self.data = (x.data or 0) + x.byte_offset
        self.strides = tuple(x.strides[i] for i in range(x.ndim)) if x.strides else self._row_major()

    def _row_major(self):
        strides, step = [], 1
        for size in reversed(self.shape):
            strides.append(step)
            step *= size
        return tuple(reversed(strides))

    def expect_shape(self, shape):
        if self.shape != tuple(shape):
            raise ValueError(f"{self.name} must have shape {list(shape)}, got {list(self.shape)} "
                             f"(sizes of q, v, cu_seqlens)")

    def describe(self, target, shape):
        self.expect_shape(shape)
        target.data, target.dtype = self.data, self.dtype
        for i, (n, stride, step) in enumerate(zip(self.shape, self.strides, self._row_major())):
            target.strides[i] = stride if n > 1 else max(step, 1)  # some libraries have 0 there
        size = 4 if self.dtype == FP32 else 2
        whole_rows = len(shape) != _A_HEAD.get(self.name)  # those are read one by one
        steps = [self.data, *(s * size for s in (self.strides[:-1] if whole_rows else self.strides))]
        target.alignment = max(size, min(16, *(step & -step or 16 for step in steps)))

    def is_dense(self):
        return all(size == 1 or stride == dense
                   for size, stride, dense in zip(self.shape, self.strides, self._row_major()))


def new_numpy(shape, dtype, name):
    """An uninitialised NumPy array; bfloat16 is ml_dtypes' if that is installed, as it is with JAX."""
    import numpy
    if dtype != BF16:
        return numpy.empty(shape, numpy.float32 if dtype == FP32 else numpy.float16)
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise ValueError(f"{name}: NumPy has no bfloat16 without the package ml_dtypes: install it, or give {name} "
                         f"(any writable array of any float type)") from None
    return numpy.empty(shape, bfloat16)
