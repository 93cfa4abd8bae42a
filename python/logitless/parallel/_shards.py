# SPDX-License-Identifier: Apache-2.0
"""Which rows of the vocabulary, or of the tokens, a rank has."""

from __future__ import annotations

from .. import _core
from .._types import integer

_INT = 2**31 - 1


def balanced_shard(V: int, ranks: int, rank: int) -> tuple[int, int]:
    """Rows [begin, end) of a rank, sizes within one of each other, the longer ones first. Slices of
    tokens (sequence parallel) are cut so."""
    return _core.balanced_shard(
        integer("V", V), integer("ranks", ranks, -_INT, _INT), integer("rank", rank, -_INT, _INT)
    )


def padded_shard(V: int, ranks: int, rank: int, multiple: int = 128) -> tuple[int, int]:
    """As Megatron cuts: V is rounded up to a multiple of `multiple` * ranks, then equally. Rows of the
    padding are no vocabulary here: the last shards may be shorter, or empty."""
    return _core.padded_shard(
        integer("V", V), integer("ranks", ranks, -_INT, _INT), integer("rank", rank, -_INT, _INT),
        integer("multiple", multiple),
    )  # fmt: skip
