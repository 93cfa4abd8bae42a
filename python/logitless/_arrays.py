# SPDX-License-Identifier: Apache-2.0
"""Arrays of any library as the core's views: address, type, shape, strides; nothing is copied."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import _core
from ._types import BF16, BYTES, F16, F32, I32, I64, NAMES, NUMBERS, U8

_NUMPY_TYPES: dict[np.dtype[Any], int] = {
    np.dtype(np.float32): F32,
    np.dtype(np.float16): F16,
    np.dtype(np.int32): I32,
    np.dtype(np.int64): I64,
    np.dtype(np.uint8): U8,
}
BOOL = -2  # accepted where a byte per token is
_U16 = -3


class Array(NamedTuple):
    """A view of somebody's array; `owner` keeps it alive."""

    address: int
    dtype: int  # a number of _types, or BOOL
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    owner: Any


def view(
    name: str, array: Any, *, bf16: bool = False, output: bool = False, kinds: tuple[int, ...] = ()
) -> Array:
    """The view of a NumPy array, or of anything with DLPack or the buffer protocol.

    bf16: the array's 16-bit integers hold bfloat16. kinds: the types that are taken, if not all.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be ignored; fill it, use counts")
    if isinstance(array, np.ndarray):
        if not array.dtype.isnative:
            raise TypeError(f"{name}: dtype is {array.dtype!r}, must be of this machine's byte order")
        dtype = _NUMPY_TYPES.get(array.dtype)
        if dtype is None:
            if array.dtype.name == "bfloat16" or (bf16 and array.dtype == np.uint16):
                dtype = BF16
            elif array.dtype == np.bool_:
                dtype = BOOL
            else:
                raise TypeError(f"{name}: dtype is {array.dtype.name}, must be {_allowed(bf16, kinds)}")
        if kinds and dtype not in kinds:
            raise TypeError(f"{name}: dtype is {_name(dtype)}, must be {_allowed(bf16, kinds)}")
        if output and not array.flags.writeable:
            raise ValueError(f"{name}: the array is read-only, an output must be writeable")
        size = array.itemsize
        if any(s % size for s in array.strides):
            raise ValueError(
                f"{name}: strides are {array.strides} bytes, must be multiples of {size}"
            )
        if any(s < 0 for s in array.strides):
            # The core's strides are never negative. (Axes of length 1 may carry anything.)
            if output:
                raise ValueError(f"{name}: strides are {array.strides} bytes, must not be negative")
            array = np.ascontiguousarray(array)
        return Array(
            array.ctypes.data, dtype, array.shape, tuple(s // size for s in array.strides), array
        )
    if isinstance(array, (str, bytes, int, float, list, tuple)):
        raise TypeError(
            f"{name} is a {type(array).__name__}, must be an array (NumPy, DLPack or a buffer)"
        )
    try:
        borrowed = _core.borrow(_dlpack_source(array))
    except TypeError:
        raise TypeError(
            f"{name} is a {type(array).__name__}, must be an array (NumPy, DLPack or a buffer)"
        ) from None
    if not borrowed.on_cpu:
        raise ValueError(f"{name}: the array is not in the CPU's memory; copy it there first")
    dtype = borrowed.dtype
    if dtype == _U16 and bf16:
        dtype = BF16
    if dtype in (-1, _U16):
        raise TypeError(f"{name}: the array's dtype must be {_allowed(bf16, kinds)}")
    if kinds and dtype not in kinds:
        raise TypeError(f"{name}: dtype is {_name(dtype)}, must be {_allowed(bf16, kinds)}")
    return Array(borrowed.address, dtype, borrowed.shape, borrowed.strides, borrowed)


def overlap(a: Array, b: Array) -> bool:
    """Whether an element of both lies at the same place."""
    if a.owner is b.owner:
        return 0 not in a.shape
    if isinstance(a.owner, np.ndarray) and isinstance(b.owner, np.ndarray):
        try:
            return bool(np.shares_memory(a.owner, b.owner, max_work=10_000))  # type: ignore[arg-type]
        except RuntimeError:  # too many strides to tell
            return True
    return _span(a)[0] < _span(b)[1] and _span(b)[0] < _span(a)[1]


def _span(a: Array) -> tuple[int, int]:
    if 0 in a.shape:
        return (a.address, a.address)
    last = sum((n - 1) * s for n, s in zip(a.shape, a.strides))
    return (a.address, a.address + (last + 1) * (1 if a.dtype == BOOL else BYTES[a.dtype]))


def _dlpack_source(array: Any) -> Any:
    # torch refuses to export what requires a gradient; reading it is fine.
    return array.detach() if getattr(array, "requires_grad", False) is True else array


def _name(dtype: int) -> str:
    return "bool" if dtype == BOOL else NAMES[dtype]


def _allowed(bf16: bool, kinds: tuple[int, ...]) -> str:
    if kinds:
        return " or ".join(map(_name, kinds))
    names = "one of float32, float16, bfloat16 (ml_dtypes), int32, int64, uint8, bool"
    return names + (", uint16 (bits of bfloat16)" if bf16 else "")


def as_dtype(name: str, dtype: Any) -> int:
    """A type by its name, ours or NumPy's, or by a NumPy dtype."""
    text = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
    if text is None:
        try:
            text = np.dtype(dtype).name
        except TypeError:
            text = repr(dtype)
    if text not in NUMBERS:
        raise TypeError(f"{name} is {text}, must be one of {', '.join(NAMES)}")
    return NUMBERS[text]


def numpy_dtype(dtype: int, like: Any = None) -> np.dtype[Any]:
    """NumPy's type; for bf16 ml_dtypes' if it is installed, else uint16 that holds the bits."""
    if dtype == BF16:
        if isinstance(like, np.ndarray) and like.dtype == np.uint16:
            return np.dtype(np.uint16)
        try:
            import ml_dtypes
        except ImportError:
            return np.dtype(np.uint16)
        bf16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bf16
    for numpy_type, number in _NUMPY_TYPES.items():
        if number == dtype:
            return np.dtype(numpy_type)
    raise ValueError(f"no NumPy type for {dtype}")


def matrix(name: str, array: Array) -> tuple[int, int, int, int, int, int]:
    if len(array.shape) != 2:
        raise ValueError(f"{name}: shape is {list(array.shape)}, must have 2 dimensions")
    dtype = U8 if array.dtype == BOOL else array.dtype
    return (array.address, dtype, *array.shape, *array.strides)  # type: ignore[return-value]


def vector(name: str, array: Array) -> tuple[int, int, int, int]:
    if len(array.shape) != 1:
        raise ValueError(f"{name}: shape is {list(array.shape)}, must have 1 dimension")
    dtype = U8 if array.dtype == BOOL else array.dtype
    return (array.address, dtype, array.shape[0], array.strides[0])


def mask(name: str, array: Array, tokens: int) -> tuple[int, int, bool, int]:
    """A bool array has an element per token; a uint8 array is packed, 8 tokens to a byte."""
    if len(array.shape) != 1:
        raise ValueError(f"{name}: shape is {list(array.shape)}, must have 1 dimension")
    if array.dtype == BOOL:
        if array.shape[0] != tokens:
            raise ValueError(f"{name}: size is {array.shape[0]} tokens, must be BT = {tokens}")
        return (array.address, tokens, False, array.strides[0])
    if array.dtype != U8:
        raise TypeError(
            f"{name}: dtype is {NAMES[array.dtype]}, must be uint8 (packed) or bool (one per token)"
        )
    if array.shape[0] * 8 < tokens:
        raise ValueError(
            f"{name}: size is {array.shape[0]} bytes, must hold BT = {tokens} bits, "
            f"{(tokens + 7) // 8} bytes"
        )
    return (array.address, tokens, True, array.strides[0] * BYTES[U8])
