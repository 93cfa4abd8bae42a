# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of a head split over ranks: each rank has some rows of the weight, all of them the
same tokens, and gets the loss of the whole vocabulary and the gradients of its part (docs/parallel.md).

    vocab_parallel_linear_cross_entropy   torch, over torch.distributed
    vocab_parallel_loss_and_gradient      arrays, over mpi4py, without torch
    balanced_shard, padded_shard          which rows a rank has: [begin, end)
    Transport                             what either needs to know of ranks; bring your own
"""

from __future__ import annotations

import importlib as _importlib
from typing import TYPE_CHECKING, Any

from ._arrays import vocab_parallel_loss_and_gradient
from ._shards import balanced_shard, padded_shard
from ._transport import Pending, Transport

if TYPE_CHECKING:
    from ._torch import (
        vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy,
    )

__all__ = [
    "Pending",
    "Transport",
    "balanced_shard",
    "padded_shard",
    "vocab_parallel_linear_cross_entropy",
    "vocab_parallel_loss_and_gradient",
]


def __getattr__(name: str) -> Any:
    if name != "vocab_parallel_linear_cross_entropy":
        raise AttributeError(f"module 'logitless.parallel' has no attribute {name!r}")
    try:
        value = _importlib.import_module("._torch", __name__).vocab_parallel_linear_cross_entropy
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            f"logitless.parallel.{name} needs torch: pip install torch (2.4 or newer); "
            "vocab_parallel_loss_and_gradient does without"
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
