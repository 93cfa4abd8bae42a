# SPDX-License-Identifier: Apache-2.0
"""A vocabulary split over ranks of MPI, on arrays; mpi_ranks.py is what the ranks do."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("mpi4py") is None:
    pytest.skip("mpi4py is not installed", allow_module_level=True)
if shutil.which("mpirun") is None:
    pytest.skip("mpirun is not installed", allow_module_level=True)
pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")

ROOT = Path(__file__).parents[2]


def mpirun(ranks: int, *command: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
    }  # fmt: skip
    return subprocess.run(
        ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(ranks), sys.executable, "-m",
         "mpi4py", *map(str, command)],
        env=environment, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


def run(ranks: int, *arguments: str) -> None:
    done = mpirun(ranks, Path(__file__).parent / "mpi_ranks.py", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    fine = sorted(line for line in done.stdout.splitlines() if line.endswith("is fine"))
    assert fine == sorted(f"rank {r} is fine" for r in range(ranks)), done.stdout


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_has_the_loss_and_its_gradients(ranks):
    run(ranks, "values")


@pytest.mark.parametrize("level", ["funneled", "serialized"])
def test_lower_thread_levels_do(level):
    run(3, "values", level)


def test_an_error_is_the_same_on_every_rank_and_torch_is_not_imported():
    run(4, "errors")


def test_mpi_thread_single_is_refused():
    run(1, "refused", "single")


def test_a_rank_that_is_killed_ends_the_others():
    done = mpirun(3, Path(__file__).parent / "mpi_ranks.py", "dies")
    assert done.returncode != 0
    assert "signal 9" in done.stdout + done.stderr


def test_the_example_runs():
    one, three = (mpirun(ranks, ROOT / "examples/python/split_head_mpi.py") for ranks in (1, 3))
    assert one.returncode == three.returncode == 0, one.stderr + three.stderr
    losses = [[line.split()[3] for line in done.stdout.splitlines()] for done in (one, three)]
    assert len(losses[0]) == 5 and float(losses[0][4]) < float(losses[0][0])
    assert [float(v) for v in losses[0]] == pytest.approx([float(v) for v in losses[1]], abs=2e-4)
