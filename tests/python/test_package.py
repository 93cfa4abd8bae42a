# SPDX-License-Identifier: Apache-2.0
"""The package as a whole: what it loads, keeps, and does with threads, signals and forks."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import logitless
import logitless.numpy as ln

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
RUNTIMES = """
def runtimes():
    names = {line.split()[-1] for line in open("/proc/self/maps")}
    return sorted(n for n in names if any(k in n.rsplit("/")[-1] for k in ("libgomp", "libomp", "libiomp")))
def compute():
    import numpy as np, logitless.numpy as ln
    x = np.ones((256, 64), np.float32); w = np.ones((4096, 64), np.float32)
    ln.loss_and_gradient(x, w, np.zeros(256, np.int64))
"""


def big_enough():
    return np.ones((256, 64), np.float32), np.ones((4096, 64), np.float32), np.zeros(256, np.int64)


def test_version_is_that_of_the_core():
    header = Path(__file__).parents[2] / "include/logitless/version.h"
    assert f'LOGITLESS_VERSION "{logitless.__version__}"' in header.read_text()


def test_the_module_links_no_openmp_runtime():
    module = Path(logitless._core.__file__)
    needed = subprocess.run(["readelf", "-d", module], capture_output=True, text=True)
    if needed.returncode != 0:
        pytest.skip("readelf is not installed")
    libraries = re.findall(r"NEEDED.*\[(.*)\]", needed.stdout)
    assert libraries and not [n for n in libraries if "omp" in n]
    symbols = subprocess.run(["nm", "-D", "--undefined-only", module], capture_output=True, text=True)
    assert not re.findall(r"GOMP_\w+|omp_\w+|__kmpc_\w+", symbols.stdout)


@needs_torch
@pytest.mark.parametrize("order", ["import torch; import logitless; compute()",
                                   "import logitless; import torch; compute()",
                                   "import logitless; compute(); import torch"])  # fmt: skip
def test_one_openmp_runtime_is_mapped_in_either_order(script, order):
    out = script(RUNTIMES + order + """
import torch
a = torch.ones(512, 512); (a @ a).sum()
assert len(runtimes()) == 1, runtimes()
import os
assert os.path.samefile(logitless.info()["openmp"], runtimes()[0]), logitless.info()["openmp"]
print("one")
""", env={"OMP_NUM_THREADS": "2"})  # fmt: skip
    assert out == "one\n"


def test_importing_maps_no_runtime_and_no_torch(script):
    out = script(RUNTIMES + """
import sys, logitless, logitless.numpy
assert runtimes() == [], runtimes()
assert "torch" not in sys.modules
print("none")
""")  # fmt: skip
    assert out == "none\n"


def test_without_any_runtime_threads_of_its_own_do_the_work(script):
    source = RUNTIMES + """
import numpy as np, logitless, logitless.numpy as ln
rng = np.random.default_rng(1)
x = rng.standard_normal((128, 64)).astype("f"); w = rng.standard_normal((3000, 64)).astype("f")
r = ln.loss_and_gradient(x, w, np.arange(128), threads=4)
print(logitless.info()["openmp"].rsplit("/")[-1].startswith("threads of its own"), r.grad_weight.tobytes().hex()[:64], r.total)
"""  # fmt: skip
    own = script(source, env={"LOGITLESS_OPENMP": "none"}).split()
    usual = script(source).split()
    assert own[0] == "True"
    assert own[1:] == usual[1:]


@pytest.mark.parametrize("before", ["pass", pytest.param("import torch", marks=needs_torch)])
def test_a_fork_after_a_parallel_region_does_not_hang(script, before):
    out = script(f"""
    {before}
    import os, numpy as np, logitless.numpy as ln
    rng = np.random.default_rng(1)
    x = rng.standard_normal((128, 64)).astype("f"); w = rng.standard_normal((3000, 64)).astype("f")
    t = np.arange(128)
    before = ln.loss_and_gradient(x, w, t, threads=2)
    child = os.fork()
    if child == 0:
        after = ln.loss_and_gradient(x, w, t, threads=2)
        os._exit(0 if (after.grad_weight == before.grad_weight).all() else 3)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status))
    """, timeout=60)  # fmt: skip
    assert out == "0\n"


@needs_torch
def test_workers_of_a_dataloader_compute(script):
    out = script("""
    import torch, logitless
    torch.manual_seed(0)
    w = torch.randn(3000, 64, requires_grad=True)
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, i):
            x = torch.full((128, 64), i / 10)
            loss = logitless.linear_cross_entropy(x, w, torch.arange(128))
            return torch.stack([loss.detach(), torch.autograd.grad(loss, w)[0].abs().sum()])
    here = torch.stack([Rows()[i] for i in range(4)])  # a parallel region before the fork
    there = torch.cat(list(torch.utils.data.DataLoader(Rows(), batch_size=1, num_workers=2, timeout=60)))
    print(torch.allclose(here, there))
    """, timeout=120)  # fmt: skip
    assert out == "True\n"


INTERRUPTED = """
import numpy as np, signal, sys
import logitless.numpy as ln
{handler}
x = np.ones(({BT}, 2048), np.float32); w = np.ones((8192, 2048), np.float32)
ln.forward(x[:4], w, np.zeros(4, np.int64))
print("started", flush=True)
try:
    ln.loss_and_gradient(x, w, np.zeros({BT}, np.int64), strategy="recompute")
    print("finished", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
r = ln.loss_and_gradient(x[:4], w, np.zeros(4, np.int64))
print("usable", np.isfinite(r.total))
"""


def interrupt(source: str) -> list[str]:
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out = process.stdout.read()
    assert process.wait(timeout=300) == 0
    return out.splitlines()


def test_ctrl_c_ends_a_long_call_early():
    # Some 10^13 operations: a minute or more, if nothing stopped them.
    assert interrupt(INTERRUPTED.format(BT=100_000, handler="")) == ["interrupted", "usable True"]


@needs_torch
@pytest.mark.parametrize("where", ["forward", "backward", "one_pass"])
def test_ctrl_c_ends_a_long_call_of_torch_s_face(where):
    lines = interrupt(f"""
import torch, logitless
where = {where!r}
x = torch.ones(100_000 if where != "backward" else 20_000, 2048, requires_grad=True)
w = torch.ones(8192, 2048, requires_grad=True)
t = torch.zeros(len(x), dtype=torch.int64)
logitless.linear_cross_entropy(x[:4], w, t[:4]).backward()
w.grad = None
f = lambda n: logitless.linear_cross_entropy(x[:n], w, t[:n], mode="one_pass" if where == "one_pass" else "recompute")
loss = f(len(x)) if where == "backward" else None
print("started", flush=True)
try:
    loss = loss.backward() if where == "backward" else f(len(x))
    print("finished", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
f(4).backward()
print("usable", bool(w.grad.isfinite().all()))
""")
    assert lines == ["interrupted", "usable True"]


def test_a_handler_of_the_user_s_own_runs_after_the_call():
    handler = "signal.signal(signal.SIGINT, lambda *_: print('noted', flush=True))"
    lines = interrupt(INTERRUPTED.format(BT=2000, handler=handler))
    assert sorted(lines) == ["finished", "noted", "usable True"]


@pytest.mark.parametrize("runtime", ["", "none"])
def test_more_threads_than_cpus_and_several_callers_wait_for_each_other(script, runtime):
    # Members that overtook each other at a barrier would change bits.
    out = script("""
    import threading, numpy as np, logitless.numpy as ln
    rng = np.random.default_rng(1)
    x = rng.standard_normal((200, 64)).astype("f"); w = rng.standard_normal((5000, 64)).astype("f")
    t = np.arange(200)
    one = ln.loss_and_gradient(x, w, t, threads=1, strategy="recompute")
    same = []
    def compute():
        for threads in (2, 7, 3, 16):
            r = ln.loss_and_gradient(x, w, t, threads=threads, strategy="recompute")
            same.append((r.grad_weight == one.grad_weight).all() and (r.grad_input == one.grad_input).all())
    callers = [threading.Thread(target=compute) for _ in range(3)]
    for c in callers: c.start()
    for c in callers: c.join()
    print(len(same), all(same))
    """, env={"LOGITLESS_OPENMP": runtime})  # fmt: skip
    assert out == "12 True\n"


def test_the_workspace_is_kept_and_can_be_dropped():
    logitless.empty_cache()
    assert logitless.info()["workspace_bytes_held"] == 0
    ln.loss_and_gradient(*big_enough())
    held = logitless.info()["workspace_bytes_held"]
    assert held > 0
    ln.loss_and_gradient(*big_enough())
    assert logitless.info()["workspace_bytes_held"] == held
    logitless.empty_cache()
    assert logitless.info()["workspace_bytes_held"] == 0


def test_each_thread_has_a_workspace_that_dies_with_it():
    import threading

    logitless.empty_cache()
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(ln.loss_and_gradient(*big_enough()).total))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1 and len(results) == 4
    for _ in range(1000):  # a joined thread may still be on its way out
        if logitless.info()["workspace_bytes_held"] == 0:
            return
        time.sleep(0.01)
    raise AssertionError("the workspaces of ended threads are still held")


def test_the_gil_is_released_while_computing(script):
    out = script("""
    import threading, numpy as np, logitless.numpy as ln
    x = np.ones((2000, 512), np.float32); w = np.ones((8000, 512), np.float32)
    ticks, done = 0, False
    def compute():
        global done
        ln.loss_and_gradient(x, w, np.zeros(2000, np.int64), threads=1)
        done = True
    thread = threading.Thread(target=compute); thread.start()
    while not done:
        ticks += 1
    thread.join()
    print(ticks > 1000)
    """)  # fmt: skip
    assert out == "True\n"


def test_threads_come_from_the_environment_or_the_call(script):
    ask = "import logitless; print(logitless.get_num_threads())"
    assert script(ask, env={"OMP_NUM_THREADS": "3"}) == "3\n"
    set_them = "import logitless; logitless.set_num_threads(5); print(logitless.get_num_threads()); logitless.set_num_threads(None); print(logitless.get_num_threads())"
    assert script(set_them, env={"OMP_NUM_THREADS": "3"}) == "5\n3\n"
    with pytest.raises(ValueError, match="threads is -1, must be between 0 and 4096"):
        logitless.set_num_threads(-1)
    with pytest.raises(TypeError, match="threads is a float"):
        logitless.set_num_threads(1.5)  # type: ignore[arg-type]


@needs_torch
def test_torch_s_count_of_threads_holds_for_torch_s_calls_unless_ours_is_set(monkeypatch):
    import torch

    from logitless import _torch_ops

    usual, asked = torch.get_num_threads(), []
    real = _torch_ops._core.loss_and_gradient
    monkeypatch.setattr(_torch_ops._core, "loss_and_gradient", lambda *a: (asked.append(a[-1][0]), real(*a))[1])
    x, w = torch.ones(9, 8, requires_grad=True), torch.ones(5, 8)
    try:
        for of_torch, ours in ((3, None), (1, None), (3, 2), (1, 4)):
            torch.set_num_threads(of_torch)
            logitless.set_num_threads(ours)
            logitless.linear_cross_entropy(x, w, torch.zeros(9, dtype=torch.int64))
            assert asked[-1] == (ours or of_torch)
    finally:
        torch.set_num_threads(usual)
        logitless.set_num_threads(None)
    for threads in (1, 2, 3):
        _, _, planned = logitless._core.plan_text("step", 512, 8000, 256, 0, None, 0, True, True, 0, (threads, "", 0))
        assert planned == threads


def test_an_isa_can_be_forced_and_a_wrong_one_is_an_error(script):
    source = """
    import numpy as np, logitless, logitless.numpy as ln
    ln.forward(np.ones((2, 3), "f"), np.ones((4, 3), "f"), np.zeros(2, np.int64))
    print(logitless.info()["isa"])
    """
    assert script(source, env={"LOGITLESS_ISA": "scalar"}) == "scalar\n"
    failed = script(source, env={"LOGITLESS_ISA": "mmx"}, ok=False)
    assert "ValueError: LOGITLESS_ISA: 'mmx' is not an instruction set usable here" in failed.stderr


def test_without_torch_its_face_says_what_to_install(script):
    out = script("""
    import sys, logitless
    sys.modules["torch"] = None
    for name in ("linear_cross_entropy", "LinearCrossEntropyLoss", "hf", "torch_npu"):
        try:
            getattr(logitless, name)
        except ImportError as error:
            print(error)
    """)  # fmt: skip
    assert out.splitlines()[0] == "logitless.linear_cross_entropy needs torch: pip install torch (2.4 or newer)"
    assert len(out.splitlines()) == 4


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'logitless' has no attribute 'logits'"):
        logitless.logits
    assert "linear_cross_entropy" in dir(logitless)


def test_the_package_is_typed():
    folder = Path(logitless.__file__).parent
    assert (folder / "py.typed").exists()
    assert (Path(logitless._core.__file__).parent / "_core.pyi").exists()


@pytest.mark.slow
@needs_torch
def test_mypy_has_nothing_to_say(tmp_path):
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    settings = Path(__file__).parents[2] / "pyproject.toml"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", settings, "--cache-dir", tmp_path],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
