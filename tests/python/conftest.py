# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    # Anywhere else every run tries other examples.
    settings.register_profile("ci", derandomize=True)
    if os.environ.get("CI"):
        settings.load_profile("ci")

HAS_TORCH = importlib.util.find_spec("torch") is not None
collect_ignore: list[str] = []
if not HAS_TORCH:
    # These files import torch at their top.
    collect_ignore = [p.name for p in Path(__file__).parent.glob("test_torch*.py")]


def pytest_report_header(config: pytest.Config) -> str:
    import logitless

    without = "" if HAS_TORCH else "; torch is not installed: its tests are left out"
    return f"logitless: {logitless.info()['isa']}, {logitless.info()['threads']} threads{without}"


@pytest.fixture
def script():
    """Runs Python source in a fresh process and returns what it printed."""

    def run(source: str, *, timeout: float = 300, env: dict[str, str] | None = None, ok: bool = True):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(source)],
            capture_output=True, text=True, timeout=timeout, env={**os.environ, **(env or {})},
        )  # fmt: skip
        if ok:
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout
        return done

    return run
