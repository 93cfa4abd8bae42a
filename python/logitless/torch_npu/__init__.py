# SPDX-License-Identifier: Apache-2.0
"""The three fused linear cross-entropy functions of torch_npu, on any CPU.

    npu_fused_linear_online_max_sum             statistics of each token over one vocabulary shard
    npu_fused_cross_entropy_loss_with_max_sum   the loss from merged statistics
    npu_fused_linear_cross_entropy_loss_with_max_sum_backward    the gradients of one shard

Also under their older names (without ``npu_``; the third also as ``..._grad``), and all of them as
dispatcher operators ``torch.ops.npu.<name>``. `install()` makes ``import torch_npu`` find them;
``python -m logitless.torch_npu script.py`` runs a script with ``.npu()`` and ``device="npu"`` meaning
the CPU. Semantics: docs/python.md and docs/numerics.md.
"""

from __future__ import annotations

from ._install import install
from ._ops import NAMES, exports

npu_fused_linear_online_max_sum = exports["npu_fused_linear_online_max_sum"]
fused_linear_online_max_sum = exports["fused_linear_online_max_sum"]
npu_fused_cross_entropy_loss_with_max_sum = exports["npu_fused_cross_entropy_loss_with_max_sum"]
fused_cross_entropy_loss_with_max_sum = exports["fused_cross_entropy_loss_with_max_sum"]
npu_fused_linear_cross_entropy_loss_with_max_sum_backward = exports[
    "npu_fused_linear_cross_entropy_loss_with_max_sum_backward"
]
fused_linear_cross_entropy_loss_with_max_sum_backward = exports[
    "fused_linear_cross_entropy_loss_with_max_sum_backward"
]
npu_fused_linear_cross_entropy_loss_with_max_sum_grad = exports[
    "npu_fused_linear_cross_entropy_loss_with_max_sum_grad"
]
fused_linear_cross_entropy_loss_with_max_sum_grad = exports[
    "fused_linear_cross_entropy_loss_with_max_sum_grad"
]

__all__ = ["NAMES", "install"]
__all__ += NAMES
