# SPDX-License-Identifier: Apache-2.0
"""What a call costs beside the operators: memory, allocations; and what it prints in bench."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from logitless import _bench, _core, _torch_ops, linear_cross_entropy

SHAPE = (4096, 128256, 1024)
MIB = _bench.MIB


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "mixed"])
def test_recompute_adds_gradients_and_at_most_80_mib(dtype):
    BT, V, H = SHAPE
    size = 2 if dtype == "bf16" else 4
    added = _bench.measure_memory("logitless recompute", SHAPE, dtype)
    print(f"{dtype}: {added / MIB:.0f} MiB added, gradients {size * (BT + V) * H / MIB:.0f} MiB")
    assert added <= size * (BT + V) * H + 80 * MIB


@pytest.mark.slow
def test_auto_stays_within_its_limit():
    BT, V, H = SHAPE
    gradients = 2 * (BT + V) * H
    limit = max(256 * MIB, 1.25 * 2 * gradients)  # operands and gradients
    added = _bench.measure_memory("logitless", SHAPE, "bf16")
    print(f"{added / MIB:.0f} MiB added, gradients {gradients / MIB:.0f}, limit {limit / MIB:.0f} MiB")
    assert added <= gradients + limit + 16 * MIB


def test_the_head_is_not_copied_and_logits_are_not_there():
    # 64 MiB of fp32 weight, 128 MiB of logits: neither may show.
    shape = (1024, 32768, 512)
    added = _bench.measure_memory("logitless recompute", shape, "mixed")
    gradients = 4 * (1024 + 32768) * 512
    assert added <= gradients + 80 * MIB


def test_a_call_of_one_token_does_little_beside_the_operator(monkeypatch):
    """Counts, not times: one call into the core for each thing the core does, and few tensors."""
    calls = []
    for name in ("forward", "loss", "gradient", "loss_and_gradient", "count_rows", "weighted_total",
                 "row_logsumexp", "token_gradients", "mark_rows", "takes_one_pass"):  # fmt: skip
        real = getattr(_core, name)
        monkeypatch.setattr(
            _torch_ops._core, name, lambda *a, real=real, name=name: (calls.append(name), real(*a))[1]
        )
    x = torch.randn(1, 64, requires_grad=True)
    w = torch.randn(100, 64, requires_grad=True)
    t = torch.zeros(1, dtype=torch.int64)
    linear_cross_entropy(x, w, t).backward()
    calls.clear()  # whether one pass fits was asked once
    linear_cross_entropy(x, w, t).backward()
    assert calls == ["count_rows", "loss_and_gradient", "row_logsumexp"]
    calls.clear()
    with torch.no_grad():
        linear_cross_entropy(x, w, t)
    assert calls == ["count_rows", "forward", "loss", "weighted_total"]


@pytest.mark.slow
def test_bench_compares_with_torch_s_own(tmp_path):
    picture, table = tmp_path / "bars.svg", tmp_path / "table.md"
    done = subprocess.run(
        [sys.executable, "-m", "logitless", "bench", "--peers", "--shape", "64,500,64", "--seconds", "0.1",
         "--json", "--svg", str(picture), "--markdown", str(table)],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    case = json.loads(done.stdout)["cases"][0]
    names = _bench.available([*_bench.OURS, *_bench.PEERS])
    assert list(case["times"]) == names and list(case["bytes"]) == names
    for name, times in case["times"].items():
        assert len(times["seconds"]) >= 5 and (name == "logitless" or times["over_ours"] > 0)
    rows = table.read_text().splitlines()
    assert len(rows) == 3 and rows[2].startswith("| bf16 | 64, 500, 64 | ") and rows[2].count("|") == rows[0].count("|")
    assert picture.read_text().startswith("<svg")
    words = subprocess.run(
        [sys.executable, "-m", "logitless", "bench", "--shape", "64,500,64", "--seconds", "0.1", "--no-memory"],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert words.returncode == 0 and words.stdout.startswith("CPU only")


@pytest.mark.slow
def test_the_example_plots_memory_and_time_against_the_tokens(tmp_path):
    example = Path(__file__).parents[2] / "examples/python/memory_and_time.py"
    picture = tmp_path / "lines.svg"
    done = subprocess.run(
        [sys.executable, example, "--tokens", "8,16", "--vocab", "200", "--hidden", "32", "--seconds", "0.1", "--out", picture],
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("BT = ") == 6 and "left out" not in done.stdout
    assert picture.read_text().startswith("<svg")


def test_a_contender_that_fails_is_left_out_with_its_reason():
    names = ["logitless", "no such thing"]
    found = _bench.measure_time(names, (8, 50, 8), "f32", 0.1, accumulate=True)
    assert "contender is 'no such thing'" in found["no such thing"]["failed"]
    assert found["logitless"]["seconds"] == []
    with pytest.raises(_bench.Failed, match="no such thing: logitless: contender is"):
        _bench.measure_time(names[1:], (8, 50, 8), "f32", 0.1)
