# SPDX-License-Identifier: Apache-2.0
"""The sparse gradient's arguments, and what it kept. The rule: docs/sparse-gradient.md."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

from . import _core
from ._types import integer

LEAST, MOST = 2.0**-16, 0.5
_SEEDS = 2**64


class SparseCounts(NamedTuple):
    """What a sparse gradient did."""

    rows: int  # tokens that have a gradient
    dense_rows: int  # of them, treated exactly
    kept: int  # elements of grad_logits that were kept, in the other rows
    elements: int  # of these rows: (rows - dense_rows) * V

    @property
    def kept_share(self) -> float:
        """kept / elements; 0 if every row was treated exactly."""
        return self.kept / self.elements if self.elements else 0.0


def sparse_counts() -> Optional[SparseCounts]:
    """What the last gradient that this thread made with a `grad_tolerance` kept; None: it made none.
    In torch that is the forward's in one pass, else the backward's."""
    counts = _core.sparse_counts()
    return None if counts is None else SparseCounts(*counts)


def tolerance(value: Any) -> float:
    """The argument grad_tolerance: 0 (exact), or the relative error of each token's gradient."""
    # (While tracing a float may be symbolic: it has no attributes.)
    if not isinstance(value, float) and (
        isinstance(value, (bool, str)) or not hasattr(value, "__float__")
    ):
        raise TypeError(f"grad_tolerance is a {type(value).__name__}, must be a number")
    number = float(value)
    if number == 0.0:
        return 0.0
    if not LEAST <= number <= MOST:
        raise ValueError(
            f"grad_tolerance is {number:g}, must be 0, or between 2^-16 and 0.5"
        )
    return number


def whole_seed(value: Any) -> int:
    """The argument seed where it is an int."""
    return integer("seed", value, 0, _SEEDS - 1)


def as_int64(seed: int) -> int:
    """The same 64 bits as torch has them."""
    return seed - _SEEDS if seed >= _SEEDS // 2 else seed


def for_core(grad_tolerance: float, seed: int, token_ids: Any = None, start: int = 0) -> Any:
    """The core's last argument: none at all where the gradient is exact."""
    return ((grad_tolerance, seed % _SEEDS, token_ids, start),) if grad_tolerance != 0.0 else ()
