# SPDX-License-Identifier: Apache-2.0
"""python -m logitless.torch_npu script.py ...: runs a script written for an NPU on the CPU.

``import torch_npu`` finds logitless's functions, ``.npu()``, ``.to("npu")`` and ``device="npu"`` mean the
CPU, and ``torch.npu.synchronize()`` and its like return at once.
"""

from __future__ import annotations

import runpy
import sys
import time
import types
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ._install import install

_SENTENCE = (
    "torch.npu is logitless's stand-in on the CPU: it has what scripts call to wait, count and seed, no "
    "{!r}"
)


def on_cpu(device: Any) -> Any:
    """The device that is meant: the CPU for any NPU, everything else as it is."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type in ("npu", "privateuseone") else device
    if isinstance(device, str) and device.split(":")[0] == "npu":
        return "cpu"
    return device


class OnCpu(TorchFunctionMode):
    """Every function of torch that is given an NPU gets the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {k: on_cpu(v) for k, v in (kwargs or {}).items()}
        return func(*(on_cpu(a) for a in args), **kwargs)


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.seconds = 0.0

    def record(self, *_: Any) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end.seconds - self.seconds)

    def synchronize(self) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record()
        return event


class _Npu(types.ModuleType):
    Event = _Event
    Stream = _Stream

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_SENTENCE.format(name))


def _nothing(*_: Any, **__: Any) -> None:
    pass


def pretend() -> None:
    """Everything but the mode: names, methods, torch.npu."""
    package = install()
    npu: Any = _Npu("torch.npu")
    for name in ("synchronize", "empty_cache", "set_device", "init", "reset_peak_memory_stats",
                 "set_compile_mode", "set_option", "reset_max_memory_allocated"):  # fmt: skip
        setattr(npu, name, _nothing)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated",
                 "max_memory_reserved", "current_device"):  # fmt: skip
        setattr(npu, name, lambda *_, **__: 0)
    npu.device_count = lambda: 1
    npu.is_available = lambda: True
    npu.is_initialized = lambda: True
    npu.get_device_name = lambda *_: "logitless on the CPU"
    npu.manual_seed = npu.manual_seed_all = torch.manual_seed
    npu.current_stream = npu.default_stream = npu.stream = _Stream
    npu.device = _Stream  # a context that changes nothing
    torch.npu = npu  # type: ignore[attr-defined]
    sys.modules["torch.npu"] = npu
    if "npu" not in vars(package):
        package.npu = npu
        sys.modules["torch_npu.npu"] = npu
    try:
        torch.utils.rename_privateuse1_backend("npu")  # type: ignore[attr-defined]  # so that torch.device("npu") is a device
    except RuntimeError:
        pass  # it has that name already

    def stay(self: Any, *_: Any, **__: Any) -> Any:
        return self

    torch.Tensor.npu = stay  # type: ignore[attr-defined]
    torch.nn.Module.npu = stay  # type: ignore[attr-defined]
    module_to = torch.nn.Module.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        return module_to(
            self, *(on_cpu(a) for a in args), **{k: on_cpu(v) for k, v in kwargs.items()}
        )

    torch.nn.Module.to = to  # type: ignore[method-assign]


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__.strip())
        sys.exit(0 if len(sys.argv) > 1 else 2)
    del sys.argv[0]
    pretend()
    sys.path[0] = str(__import__("pathlib").Path(sys.argv[0]).resolve().parent)
    with OnCpu():
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
