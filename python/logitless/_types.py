# SPDX-License-Identifier: Apache-2.0
"""The core's element types by number (include/logitless/tensor.h)."""

from __future__ import annotations

import operator
from typing import Any

F32, F16, BF16, I32, I64, U8 = range(6)
NAMES = ("f32", "f16", "bf16", "i32", "i64", "u8")
NUMBERS = {
    "f32": F32, "float32": F32,
    "f16": F16, "float16": F16,
    "bf16": BF16, "bfloat16": BF16,
    "i32": I32, "int32": I32,
    "i64": I64, "int64": I64,
    "u8": U8, "uint8": U8,
}  # fmt: skip
BYTES = (4, 2, 2, 4, 8, 1)

LOGITS_ROUNDING = {"none": 0, "operand": 1, "infer": 2}
STRATEGY = {"automatic": 0, "one_pass": 1, "recompute": 2}


def integer(name: str, value: Any, least: int = -(2**63), most: int = 2**63 - 1) -> int:
    """An argument that is a whole number."""
    if type(value) is not int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} is a {type(value).__name__}, must be an int")
        value = operator.index(value)
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}, must be between {least} and {most}")
    return int(value)


def choice(name: str, value: object, allowed: dict[str, int]) -> int:
    """The number of one of a few words."""
    if isinstance(value, str) and value in allowed:
        return allowed[value]
    raise ValueError(f"{name} is {value!r}, must be one of {', '.join(map(repr, allowed))}")
