# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import logitless
import logitless.numpy as ln
from logitless import _svg


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "logitless", *arguments], capture_output=True, text=True, timeout=300
    )


@pytest.fixture
def case_file(tmp_path):
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((20, 16)).astype("f"), rng.standard_normal((90, 16)).astype("f")
    t = rng.integers(0, 90, 20)
    t[3] = -100
    path = tmp_path / "case.safetensors"
    ln.save_case(path, input=x, weight=w, target=t, ignore_index=-100)
    return path


def test_info_says_that_it_is_cpu_only():
    done = call("info")
    assert done.returncode == 0 and "CPU only, for now" in done.stdout.splitlines()[0]
    assert json.loads(call("info", "--json").stdout)["version"] == logitless.__version__
    assert call("--version").stdout == f"logitless {logitless.__version__}\n"


def test_plan_prints_the_workspace():
    done = call("plan", "--shape", "64,1000,32", "--dtype", "f32")
    assert done.returncode == 0 and done.stdout.count("workspace") >= 3


def test_run_and_verify_a_case(case_file, tmp_path):
    out = tmp_path / "out.safetensors"
    done = call("run", str(case_file), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert set(ln.load_case(out)) == {"loss", "grad_input", "grad_weight"}
    checked = call("verify", str(case_file), "--strategy", "recompute")
    assert checked.returncode == 0 and checked.stdout.count("fine") == 3


def test_a_sparse_gradient_says_what_it_kept(case_file, tmp_path):
    outs = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for out, seed in zip(outs, ("1", "2", "1")):
        done = call("run", str(case_file), "--out", str(out), "--grad-tolerance", "2^-3" if seed == "2" else "0.125", "--seed", seed)
        assert done.returncode == 0 and " elements of grad_logits (" in done.stdout, done.stderr
    first, second, again = (ln.load_case(out)["grad_weight"] for out in outs)
    assert (first == again).all() and (first != second).any()
    assert "grad_tolerance is 2, must be 0" in call("run", str(case_file), "--grad-tolerance", "2").stderr
    plan = call("plan", "--shape", "64,1000,32", "--grad-tolerance", "0.01")
    assert plan.returncode == 0 and "sparse" in plan.stdout and "sparse" not in call("plan", "--shape", "64,1000,32").stdout


def test_errors_are_one_line_and_exit_2(case_file, tmp_path):
    for arguments, sentence in (
        (("run", str(tmp_path / "nothing")), "No such file"),
        (("plan", "--shape", "1,2"), "shape is '1,2', must be BT,V,H"),
        (("run", str(case_file), "--workspace-limit", "10"), "the least possible workspace"),
    ):
        done = call(*arguments)
        assert done.returncode in (1, 2) and sentence in done.stderr
        assert len(done.stderr.splitlines()) == 1
    (tmp_path / "bad").write_bytes(b"x" * 100)
    assert "no safetensors file" in call("verify", str(tmp_path / "bad")).stderr


def test_pictures_are_well_formed():
    import xml.etree.ElementTree as ET

    bars = _svg.bars("a < b", [("time", [("ours", 1.0, "1 s"), ("theirs", 3.0, "3 s")])])
    lines = _svg.lines("t", "tokens", [("s", {"a": [(1, 0.1), (10, 2.0)]}), ("MiB", {"a": [(1, 5.0)]})])
    for picture in (bars, lines):
        ET.fromstring(picture)
