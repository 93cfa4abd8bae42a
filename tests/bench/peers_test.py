# SPDX-License-Identifier: Apache-2.0
"""bench/peers.py without PyTorch: its words and tables, our worker's protocol, a whole comparison
with a worker that makes its answers up. LOGITLESS_BUILD names the build folder."""

import contextlib
import io
import json
import math
import os
import stat
import struct
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCH = HERE.parent.parent / "bench"
BUILD = Path(os.environ["LOGITLESS_BUILD"])
sys.path.insert(0, str(BENCH))
import peer_comparison as comparison  # noqa: E402
import peer_contenders as contenders  # noqa: E402
import peer_report as report  # noqa: E402
import peers  # noqa: E402


def read_safetensors(path):
    """{name: (dtype, shape, bytes)}"""
    data = Path(path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: (
            info["dtype"],
            info["shape"],
            data[8 + length + info["data_offsets"][0] : 8 + length + info["data_offsets"][1]],
        )
        for name, info in header.items()
    }


def bf16_rows(tensor):
    """Rows of floats."""
    dtype, (rows, cols), data = tensor
    assert dtype == "BF16", dtype
    flat = [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]
    return [flat[r * cols : (r + 1) * cols] for r in range(rows)]


class Words(unittest.TestCase):
    def test_times_and_bytes_wear_their_unit(self):
        self.assertEqual(report.time_text(12.345), "12.3 s")
        self.assertEqual(report.time_text(1.2345), "1234 ms")
        self.assertEqual(report.time_text(0.0123), "12.3 ms")
        self.assertEqual(report.time_text(0.000123), "123 us")
        self.assertEqual(report.bytes_text(3 << 20), "3 MiB")
        self.assertEqual(report.bytes_text(5 << 29), "2.50 GiB")
        self.assertEqual(report.bytes_text(None), "")
        self.assertEqual(report.error_text(0.00123), "1.2e-03")
        self.assertEqual(report.error_text(None), "")

    def test_spread_is_over_the_median(self):
        self.assertAlmostEqual(report.spread([1.0, 2.0, 4.0]), 1.5)

    def test_columns_line_up(self):
        self.assertEqual(
            report.table([["a", "bc"], ["long", "1"], ["x", "22"]]),
            "a     bc\n----  --\nlong   1\nx     22\n",
        )
        self.assertEqual(
            report.markdown_table([["a", "bc"], ["x", "1"]]), "| a | bc |\n|---|---:|\n| x | 1 |\n"
        )

    def test_shapes_are_three_positive_numbers(self):
        self.assertEqual(peers.parse_shape("1,20,3"), (1, 20, 3))
        for bad in ("1,2", "a,b,c", "1,2,3,4", "0,1,1"):
            with self.assertRaisesRegex(comparison.Failure, "--shape is '" + bad):
                peers.parse_shape(bad)

    def test_every_option_of_linear_cross_entropy_is_tried_and_named(self):
        tried = contenders.linear_cross_entropy_tunings()
        self.assertEqual(len({json.dumps(t) for t in tried}), 9)
        self.assertEqual(contenders.options_text(tried[0]), "default options")
        self.assertEqual(
            contenders.options_text(tried[1]),
            "acc_policy=accurate, acc_dtype=bfloat16, batch_chunk_size=128",
        )

    def test_contenders_of_several_versions_have_keys_of_their_own(self):
        one = contenders.contenders_of({"python": "1.0"})
        two = contenders.contenders_of({"python": "1.0", "other": "2.0"})
        self.assertEqual(
            [c.key for c in one][:4],
            ["logitless", "logitless-recompute", "logitless-sparse", "eager-bf16"],
        )
        self.assertEqual(len({c.key for c in two}), 2 * len(one) - 3)
        self.assertIn("eager-bf16@2.0", [c.key for c in two])
        self.assertIn(
            "CCE's torch_compile fallback (holds the logits; its Triton kernel needs a GPU)",
            " ".join(c.label for c in one),
        )

    def test_noise_is_told(self):
        class Fake:
            def __init__(self, per_call):
                self.per_call, self.calls = per_call, 0

            def cpu_seconds(self):
                self.calls += 1
                return tuple(self.calls * x for x in self.per_call)

        clock = comparison.CpuClock({"timed": Fake((2.0, 0.5)), "spins": Fake((1.0, 0.0))})
        with unittest.mock.patch.object(comparison.time, "monotonic", side_effect=[10.0, 12.0]):
            with clock.turn_of("timed"):
                pass
        self.assertEqual(clock.starved_share(threads=2), 0.125)
        self.assertEqual(clock.idle_share(), (0.5, "spins"))
        case = {"BT": 1, "V": 2, "H": 3, "skipped": {}, "groups": [[]], "contenders": {}}
        case["noise"] = {"starved": 0.125, "idle": 0.5, "idle_of": "spins"}
        document = {"about": {"amx_present": False}, "cases": [case]}
        notes = " ".join(report.notes_of(document))
        self.assertIn("1,2,3: spins used 50 % of a CPU while it waited for its turn", notes)
        self.assertIn("the machine was not quiet: threads wanted a CPU that something else had for "
                      "12 % of the time", notes)  # fmt: skip

    def test_amx_is_told_with_the_measured_ratio(self):
        step = {"over_ours": 0.8}
        document = {
            "about": {"amx_present": True},
            "cases": [
                {
                    "BT": 1,
                    "V": 2,
                    "H": 3,
                    "contenders": {
                        "logitless": {"sections": {"step": {"over_ours": 1.0}}},
                        "eager": {"sections": {"step": step}},
                        "mm": {"sections": {"step": {"over_ours": 0.1}}},
                    },
                }
            ],
        }
        self.assertEqual(
            report.amx_text(document),
            "AMX present, unused; PyTorch's bf16 uses it: time of the fastest of PyTorch over ours "
            "0.80 at 1,2,3",
        )
        document["about"]["amx_present"] = False
        self.assertEqual(report.amx_text(document), "")


class WorkerProtocol(unittest.TestCase):
    BT, V, H = 6, 40, 16

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.case = os.path.join(cls.folder.name, "case.safetensors")
        subprocess.run(
            [
                BUILD / "cli" / "logitless",
                "make",
                cls.case,
                "--tokens",
                str(cls.BT),
                "--vocab",
                str(cls.V),
                "--hidden",
                str(cls.H),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def setUp(self):
        self.worker = comparison.Worker([str(BUILD / "bench" / "peer_logitless")], dict(os.environ))

    def tearDown(self):
        self.worker.close()

    def load(self):
        return self.worker.ask("load", files=[self.case], threads=2)

    def fails(self, message, do, **arguments):
        with self.assertRaisesRegex(comparison.Failure, message):
            self.worker.ask(do, **arguments)

    def test_the_reply_to_load_describes_case_and_machine(self):
        about = self.load()
        self.assertEqual((about["BT"], about["V"], about["H"]), (self.BT, self.V, self.H))
        self.assertEqual(about["dtype"], "bf16")
        self.assertEqual(about["threads"], 2)
        self.assertIn(about["amx_present"], (True, False))
        for key in ("isa", "cpu", "compiler", "commit", "version"):
            self.assertIsInstance(about[key], str)

    def test_mistakes_are_answered_and_the_worker_lives_on(self):
        self.fails("no case is loaded", "prepare", op="step")
        self.fails("`do` is `sing`, must be", "sing")
        self.fails("bad command", "load")
        self.fails("nowhere", "load", files=["/nowhere.safetensors"])
        self.load()
        self.fails(
            "op is `jump`, must be step, step-recompute, step-sparse, forward or gradient", "prepare", op="jump"
        )
        self.fails("`forward` has not been prepared", "run", op="forward")
        self.worker.ask("prepare", op="step")
        self.worker.ask("run", op="step")
        self.fails(
            r"tokens: row 6 is not in \[0, 6\)", "write", file="/nowhere", tokens=[6], rows=[]
        )
        self.fails(
            r"rows: row -1 is not in \[0, 40\)", "write", file="/nowhere", tokens=[], rows=[-1]
        )
        self.worker.process.stdin.write("{\n")
        self.fails("bad command", "peak")

    def test_every_op_gives_seconds_and_memory(self):
        self.load()
        for op in ("step", "step-recompute", "step-sparse", "forward", "gradient"):
            told = self.worker.ask("prepare", op=op)
            self.assertGreater(told["workspace_bytes"], 0)
            self.assertIn("[BT, V, H] = [6, 40, 16]", told["describe"])
            memory = self.worker.ask("memory", op=op)["memory_bytes"]
            self.assertTrue(memory is None or memory >= 0)
            timed = self.worker.ask("run", op=op)
            self.assertGreater(timed["seconds"], 0)
            self.assertGreater(timed["cpu_seconds"], 0)
        self.assertGreater(self.worker.ask("peak", seconds=0.01)["flops_per_second"], 0)

    def golden(self):
        """(mean loss, grad_input, grad_weight) in double, from the bf16 operands."""
        tensors = read_safetensors(self.case)
        x, w = bf16_rows(tensors["input"]), bf16_rows(tensors["weight"])
        target = struct.unpack(f"<{self.BT}q", tensors["target"][2])
        loss = 0.0
        gi = [[0.0] * self.H for _ in x]
        gw = [[0.0] * self.H for _ in w]
        for b, row in enumerate(x):
            logits = [sum(p * q for p, q in zip(row, word)) for word in w]
            top = max(logits)
            total = sum(math.exp(z - top) for z in logits)
            loss += (math.log(total) + top - logits[target[b]]) / self.BT
            for v, z in enumerate(logits):
                g = (math.exp(z - top) / total - (v == target[b])) / self.BT
                for h in range(self.H):
                    gi[b][h] += g * w[v][h]
                    gw[v][h] += g * row[h]
        return loss, gi, gw

    def test_what_is_written_is_loss_and_gradients_of_the_mean(self):
        loss, gi, gw = self.golden()
        tokens, rows = [5, 0, 3], list(range(self.V))
        file = os.path.join(self.folder.name, "outputs.safetensors")
        self.load()
        for op in ("step", "step-recompute", "gradient"):
            self.worker.ask("prepare", op=op)
            self.worker.ask("run", op=op)
            # fp32 statistics; logits up to 30, so a few ulp of them: 30 * 2^-23 * 4.
            self.assertAlmostEqual(
                self.worker.ask("write", file=file, tokens=tokens, rows=rows)["loss"],
                loss,
                delta=2e-5,
            )
            written = read_safetensors(file)
            for name, golden in (
                ("grad_input", [gi[t] for t in tokens]),
                ("grad_weight", [gw[r] for r in rows]),
            ):
                seen = [x for row in bf16_rows(written[name]) for x in row]
                right = [x for row in golden for x in row]
                # Three roundings to bf16 at most on the way (softmax, grad_logits, the output),
                # 2^-9 each, in the Frobenius norm.
                difference = math.dist(seen, right) / math.hypot(*right)
                self.assertLess(difference, 3 * 2**-9, (op, name))


class WholeComparison(unittest.TestCase):
    """peers.py as a user runs it, with fake_torch.py for a Python with torch."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.python = Path(self.folder.name) / "python"
        self.python.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -B "{HERE / "fake_torch.py"}" "$@"\n'
        )
        self.python.chmod(self.python.stat().st_mode | stat.S_IXUSR)

    def tearDown(self):
        self.folder.cleanup()

    def run_peers(self, *arguments, build=BUILD):
        """(exit code, stdout, stderr)"""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = peers.main(["--quiet", "--build", str(build), "--pause", "0", *arguments])
        return code, out.getvalue(), err.getvalue()

    def test_every_contender_is_in_the_table_or_left_out_with_its_reason(self):
        measured = Path(self.folder.name) / "measured.json"
        tables = Path(self.folder.name) / "tables.md"
        code, out, err = self.run_peers(
            "--python",
            str(self.python),
            "--shape",
            "8,64,32",
            "--rounds",
            "3",
            "--threads",
            "1",
            "--json",
            str(measured),
            "--markdown",
            str(tables),
        )
        self.assertEqual((code, err), (0, ""))
        document = json.loads(measured.read_text())
        self.assertEqual(document["rounds"], 3)
        self.assertEqual(list(document["torch"].values()), ["9.9.9"])
        [case] = document["cases"]
        self.assertEqual((case["BT"], case["V"], case["H"]), (8, 64, 32))
        self.assertEqual(
            set(case["contenders"]),
            {
                "logitless",
                "logitless-recompute",
                "logitless-sparse",
                "eager-bf16",
                "compile-bf16",
                "compile-fp32",
                "linear_cross_entropy",
                "logitless.torch",
                "mm",
            },
        )
        self.assertEqual(
            case["skipped"]["cce"], "cut_cross_entropy cannot be imported: no such module"
        )
        self.assertIn(
            "peer_torch.py ended with 3 when told to run: this one dies",
            case["skipped"]["eager-fp32"],
        )
        ours = case["contenders"]["logitless"]["sections"]
        self.assertEqual(set(ours), {"step", "forward", "gradient"})
        eager = case["contenders"]["eager-bf16"]["sections"]["step"]
        self.assertEqual(eager["seconds"], [0.25] * 3)
        self.assertEqual(eager["cpu_seconds"], [0.5] * 3)
        self.assertEqual(eager["memory_bytes"], 7 << 20)
        self.assertEqual(eager["errors"], {"loss": 0.25, "grad_input": 0.5, "grad_weight": 0.75})
        self.assertAlmostEqual(eager["over_ours"], 0.25 / ours["step"]["median_seconds"])
        self.assertAlmostEqual(eager["of_peak"], 6 * 8 * 64 * 32 / 0.25 / max(case["peaks"]))
        best = case["contenders"]["linear_cross_entropy"]
        self.assertEqual(
            best["options"],
            {"acc_policy": "accurate", "acc_dtype": "bfloat16", "batch_chunk_size": 256},
        )
        self.assertEqual(len(best["tuning"]), 9)
        self.assertEqual(best["sections"]["step"]["seconds"], [0.5] * 3)
        for text in (out, tables.read_text()):
            self.assertIn(
                "linear_cross_entropy, acc_policy=accurate, acc_dtype=bfloat16, "
                "batch_chunk_size=256",
                text,
            )
            self.assertIn("cce left out: cut_cross_entropy cannot be imported", text)
            self.assertIn("linear_cross_entropy with default options takes 1000 ms", text)

    def test_only_and_a_case_of_ones_own(self):
        case = Path(self.folder.name) / "own.safetensors"
        subprocess.run(
            [
                BUILD / "cli" / "logitless",
                "make",
                case,
                "--tokens",
                "4",
                "--vocab",
                "30",
                "--hidden",
                "8",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        measured = Path(self.folder.name) / "measured.json"
        code, _, err = self.run_peers(
            "--python",
            str(self.python),
            "--case",
            str(case),
            "--only",
            "mm",
            "--rounds",
            "1",
            "--threads",
            "1",
            "--json",
            str(measured),
        )
        self.assertEqual((code, err), (0, ""))
        [result] = json.loads(measured.read_text())["cases"]
        self.assertEqual((result["BT"], result["V"], result["H"]), (4, 30, 8))
        self.assertEqual(set(result["contenders"]), {"logitless", "mm"})

    def test_what_is_missing_is_named(self):
        for arguments, build, message in (
            (
                ["--python", str(self.python)],
                "/nowhere",
                "peers.py: /nowhere/bench/peer_logitless is missing: build it with `cmake",
            ),
            (["--python", "/nowhere/python"], BUILD, "peers.py: cannot start /nowhere/python"),
            (["--python", "false"], BUILD, "peers.py: false cannot import torch"),
            (["--python", str(self.python), "--shape", "1,2"], BUILD, "peers.py: --shape is '1,2'"),
            (
                ["--python", str(self.python), "--threads", "0"],
                BUILD,
                "peers.py: --threads is 0, must be at least 1",
            ),
            (
                ["--python", str(self.python), "--only", "jax"],
                BUILD,
                "peers.py: --only is 'jax', must be the beginning of one of: logitless-rec",
            ),
            (["--python", str(self.python), "--case", "/nowhere.safetensors"], BUILD, "nowhere"),
        ):
            code, out, err = self.run_peers(*arguments, build=build)
            self.assertEqual((code, out), (2, ""))
            self.assertIn(message, err)

    def test_what_does_not_fit_into_memory_is_left_out(self):
        run = [
            "--python",
            str(self.python),
            "--shape",
            "8,64,32",
            "--rounds",
            "1",
            "--threads",
            "1",
        ]
        with unittest.mock.patch.object(
            comparison, "memory_available", return_value=report.GIB // 4
        ):
            code, out, err = self.run_peers(*run)
        self.assertEqual((code, out), (2, ""))
        self.assertIn(
            "8,64,32: Logitless: needs about 512 MiB of memory, 256 MiB are available", err
        )
        # Room for ours, and for no peer beside it.
        with unittest.mock.patch.object(
            comparison, "memory_available", return_value=int(1.5 * report.GIB)
        ):
            code, out, err = self.run_peers(*run)
        self.assertEqual((code, err), (0, ""))
        self.assertIn("mm left out: needs", out)
        self.assertNotIn("bare products", out)

    def test_what_does_not_fit_together_runs_in_groups(self):
        running = []

        class Counted(comparison.Worker):
            def __init__(self, *arguments):
                super().__init__(*arguments)
                running.append(self)

            def close(self):
                running.remove(self)
                super().close()

        # Each worker takes half a GiB: two peers beside ours.
        def available():
            return int(2.8 * report.GIB) - len(running) * report.GIB // 2

        measured = Path(self.folder.name) / "measured.json"
        with (
            unittest.mock.patch.object(comparison, "Worker", Counted),
            unittest.mock.patch.object(comparison, "memory_available", available),
        ):
            code, out, err = self.run_peers(
                "--python", str(self.python), "--shape", "8,64,32", "--rounds", "1",
                "--threads", "1", "--json", str(measured),
            )  # fmt: skip
        self.assertEqual((code, err, running), (0, "", []))
        [case] = json.loads(measured.read_text())["cases"]
        self.assertEqual(
            case["groups"],
            [
                ["logitless-recompute", "logitless-sparse"],
                ["eager-bf16", "compile-bf16"],
                ["compile-fp32", "linear_cross_entropy"],
                ["logitless.torch", "mm"],
            ],
        )
        self.assertIn("logitless#3", case["contenders"])
        self.assertEqual(out.count("\nLogitless  "), 3)  # of the first group, once a table
        self.assertIn("4 groups", out)


if __name__ == "__main__":
    unittest.main(verbosity=1)
