# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy over a huge vocabulary without ever building the logits. CPU only, for now.

    logitless.linear_cross_entropy     torch: the loss of a language model's head, and its gradients
    logitless.LinearCrossEntropyLoss   the same as a module
    logitless.numpy                    the operators on arrays, without torch
    logitless.parallel                 a vocabulary split over ranks: torch.distributed, mpi4py
    logitless.torch_npu                the three torch_npu functions, on any CPU
    logitless.hf                       Hugging Face models and trainers
    logitless.reference                the definition, in float64
"""

from __future__ import annotations

import importlib as _importlib
from typing import TYPE_CHECKING, Any

from ._core import __version__
from ._sparse import SparseCounts, sparse_counts
from ._threads import (
    empty_cache,
    get_num_threads,
    info,
    set_num_threads,
)
from ._threads import suggest_openmp as _suggest_openmp

if TYPE_CHECKING:
    from .torch import LinearCrossEntropyLoss as LinearCrossEntropyLoss
    from .torch import linear_cross_entropy as linear_cross_entropy

__all__ = [
    "LinearCrossEntropyLoss",
    "SparseCounts",
    "__version__",
    "empty_cache",
    "get_num_threads",
    "info",
    "linear_cross_entropy",
    "set_num_threads",
    "sparse_counts",
]

_suggest_openmp()

_IN_TORCH = ("linear_cross_entropy", "LinearCrossEntropyLoss")
_MODULES = ("hf", "numpy", "parallel", "reference", "torch", "torch_npu")


def __getattr__(name: str) -> Any:
    # torch is imported by what needs it, when it is needed.
    try:
        if name in _IN_TORCH:
            value = getattr(_importlib.import_module(".torch", __name__), name)
            globals()[name] = value
            return value
        if name in _MODULES:
            return _importlib.import_module(f".{name}", __name__)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"logitless.{name} needs torch: pip install torch (2.4 or newer)") from None
    raise AttributeError(f"module 'logitless' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
