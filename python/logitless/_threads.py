# SPDX-License-Identifier: Apache-2.0
"""What runs: threads, instruction sets, the OpenMP runtime, workspaces."""

from __future__ import annotations

import glob
import importlib.util
import os
from typing import Any

from . import _core

_num_threads = 0  # 0: nobody said


def set_num_threads(threads: int | None) -> None:
    """At most so many threads from now on; None or 0: back to the default.

    The default is torch's count (`torch.get_num_threads()`) when a torch function calls, else
    OMP_NUM_THREADS, else the CPUs that this process may use. Results do not depend on it.
    """
    global _num_threads
    if threads is None:
        threads = 0
    if isinstance(threads, bool) or not isinstance(threads, int):
        raise TypeError(f"threads is a {type(threads).__name__}, must be an int or None")
    if not 0 <= threads <= 4096:
        raise ValueError(f"threads is {threads}, must be between 0 and 4096")
    _num_threads = threads


def get_num_threads() -> int:
    """The number of threads that calls without torch use at most."""
    return _num_threads or int(_core.machine()["threads"])


def wanted_threads(of_host: int = 0) -> int:
    """For the core: ours if set, else the host framework's, else 0 (its own default)."""
    return _num_threads or of_host


def empty_cache() -> None:
    """Gives back the workspaces that calls keep, one per thread that called, and the pages of weight
    gradients that are no longer used."""
    _core.drop_workspaces()


def suggest_openmp() -> None:
    """Tells the core where an installed torch keeps its OpenMP runtime, so that both share it even
    if we compute before torch is imported. Looks at folders only; torch is not imported."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return
    if spec is None or not spec.origin:
        return
    folder = os.path.dirname(spec.origin)
    for place in (os.path.join(folder, "lib"), folder + ".libs"):
        for name in ("libgomp*.so*", "libomp*.so*", "libiomp5*.so*"):
            for path in sorted(glob.glob(os.path.join(place, name))):
                _core.suggest_openmp(path)
                return


def info() -> dict[str, Any]:
    """What runs here: version, CPU, instruction sets, threads, OpenMP runtime, workspaces held."""
    machine = _core.machine()
    return {
        "version": _core.__version__,
        "device": "CPU (the only one, for now)",
        "cpu": machine["cpu"],
        "isa": machine["isa"],
        "isas": machine["isas"],
        "threads": get_num_threads(),
        "openmp": _core.openmp_path() or "chosen at the first parallel call",
        "workspace_bytes_held": _core.workspace_bytes_held(),
        "gradient_bytes_held": _core.page_bytes_held(),
        "l1d_bytes": machine["l1d_bytes"],
        "l2_bytes": machine["l2_bytes"],
        "l3_bytes": machine["l3_bytes"],
        "amx_present": machine["amx_present"],
    }
