# SPDX-License-Identifier: Apache-2.0
"""A package named torch_npu where none is installed."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

import torch

from .. import _core
from ._ops import exports

_SENTENCE = (
    "module {module!r} is logitless's stand-in on the CPU: it has the three fused linear cross-entropy "
    "functions and nothing else of torch_npu, no {name!r}"
)


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_SENTENCE.format(module=self.__name__, name=name))


class NoNpu(AttributeError, RuntimeError):
    """There is no torch.npu. Both kinds, because libraries that find a torch_npu ask torch.npu for
    devices and take a RuntimeError, only, for "none"."""


def _answer_that_there_is_no_npu() -> None:
    usual = torch.__getattr__

    def getattr_of_torch(name: str) -> Any:
        if name == "npu":
            raise NoNpu(
                "module 'torch' has no attribute 'npu': torch_npu is logitless's stand-in on the CPU"
            )
        return usual(name)

    torch.__getattr__ = getattr_of_torch  # type: ignore[assignment]


def _module(name: str, is_package: bool) -> Any:
    module = _StandIn(name, _SENTENCE.split(":")[0].format(module=name))
    spec = importlib.machinery.ModuleSpec(name, None, origin=__file__, is_package=is_package)
    module.__spec__ = spec
    module.__file__ = __file__
    module.__package__ = name if is_package else name.rpartition(".")[0]
    if is_package:
        module.__path__ = []
    return module


def install(force: bool = False) -> Any:
    """Makes ``import torch_npu`` find the functions of `logitless.torch_npu`; returns the module.

    A torch_npu that is installed, or imported already, is left alone unless `force`. Creates no
    ``torch.npu``: libraries that look for an NPU find none.
    """
    present = sys.modules.get("torch_npu")
    if isinstance(present, _StandIn):
        return present
    if not force:
        if present is not None:
            return present
        if importlib.util.find_spec("torch_npu") is not None:
            import torch_npu  # type: ignore[import-not-found]

            return torch_npu
    package = _module("torch_npu", True)
    utils = _module("torch_npu.utils", True)
    custom_ops = _module("torch_npu.utils.custom_ops", False)
    package.__version__ = f"{torch.__version__.split('+')[0]}+logitless{_core.__version__}"
    for name, function in exports.items():
        setattr(package, name, function)
        setattr(custom_ops, name, function)
    package.utils = utils
    utils.custom_ops = custom_ops
    sys.modules.update({m.__name__: m for m in (package, utils, custom_ops)})
    _answer_that_there_is_no_npu()
    return package
