# SPDX-License-Identifier: Apache-2.0
"""plot.py draws what `logitless bench --json` wrote: every kind, legible, the same bytes each time.

python3 plot_test.py PROGRAM
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree

PROGRAM = ""
PLOT = pathlib.Path(__file__).resolve().parents[2] / "bench" / "plot.py"
SVG = "{http://www.w3.org/2000/svg}"


class PlotTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.scratch.name)
        few = ["--threads", "1", "--repeats", "3", "--seconds", "0.1", "--op", "forward,one-pass"]
        cls.shapes = cls.measure("shapes", "--shape", "8,100,64", "9,101,65", *few)
        cls.tokens = cls.measure("tokens", "--shape", "8,100,64", "--tokens", "2,8,32", *few)
        limits = ["--workspace-limit", "300KiB,8MiB,64MiB"]
        cls.limits = cls.measure("limits", "--shape", "64,1000,64", *limits, *few)

    @classmethod
    def tearDownClass(cls):
        cls.scratch.cleanup()

    @classmethod
    def measure(cls, name, *arguments):
        path = cls.folder / f"{name}.json"
        command = [PROGRAM, "bench", "--json", *arguments]
        with open(path, "wb") as out:
            subprocess.run(command, stdout=out, check=True)
        return path

    def plot(self, kind, *files, expected=0):
        out = self.folder / f"{kind}.svg"
        out.unlink(missing_ok=True)
        command = [sys.executable, str(PLOT), kind, str(out), *map(str, files)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertEqual(run.returncode, expected, run.stderr)
        if expected != 0:
            self.assertFalse(out.exists())
            return run.stderr
        return out.read_text(encoding="utf-8")

    def changed(self, path, change):
        document = json.loads(path.read_text())
        change(document)
        out = self.folder / "changed.json"
        out.write_text(json.dumps(document))
        return out

    @staticmethod
    def texts(svg):
        return [" ".join(t.itertext()) for t in ElementTree.fromstring(svg).iter(f"{SVG}text")]

    def check(self, svg, *wanted):
        texts = self.texts(svg)
        document = json.loads(self.shapes.read_text())
        for text in (*wanted, document["cpu"], document["isa"], "1 thread", document["commit"]):
            self.assertTrue(any(text in t for t in texts), f"{text} is not in {texts}")
        # The first thing drawn is an opaque white ground as large as the picture: on a dark page
        # dark text stays legible.
        root = ElementTree.fromstring(svg)
        ground = next(root.iter(f"{SVG}path"))
        self.assertIn("fill: #ffffff", ground.get("style"))
        self.assertNotIn("opacity", ground.get("style"))
        _, _, width, height = map(float, root.get("viewBox").split())
        numbers = list(map(float, re.findall(r"[\d.]+", ground.get("d"))))
        self.assertAlmostEqual(max(numbers[0::2]), width, delta=1)
        self.assertAlmostEqual(max(numbers[1::2]), height, delta=1)

    def test_every_kind_has_its_axes_units_and_caption(self):
        self.check(
            self.plot("shapes", self.shapes),
            "ratio to the instruction's peak",
            "tokens x vocabulary x hidden size",
            "forward",
            "one-pass",
        )
        self.check(self.plot("cliffs", self.shapes), "time / expected time", "15 % more")
        self.check(self.plot("tokens", self.tokens), "time, ms", "memory, MiB", "logits held")
        self.check(self.plot("limit", self.limits), "workspace limit, MiB", "time, ms")

    def test_the_same_numbers_give_the_same_bytes(self):
        self.assertEqual(self.plot("shapes", self.shapes), self.plot("shapes", self.shapes))

    def test_the_points_lie_at_the_measured_values(self):
        def set_ratios(document):
            for case, ratio in zip(document["cases"], (0.6, 0.9, 0.9, 0.6)):
                case["ratio_to_peak"] = ratio
                case["ratio_interval"] = [ratio, ratio]

        root = ElementTree.fromstring(self.plot("shapes", self.changed(self.shapes, set_ratios)))
        heights = [
            float(use.get("y"))
            for group in root.iter(f"{SVG}g")
            if (group.get("id") or "").startswith("line2d")
            for use in group.findall(f".//{SVG}use")
            if "0072b2" in (use.get("style") or "")
        ]
        # forward at 0.6 and at 0.9, and its mark in the legend: the higher value stands higher, at a
        # smaller y.
        self.assertGreaterEqual(len(heights), 2)
        self.assertGreater(heights[0], heights[1])

    def test_many_shapes_go_into_rows(self):
        def many(document):
            one = document["cases"][0]
            document["cases"] = [
                {**one, "shape": {**one["shape"], "BT": BT}} for BT in range(1, 61)
            ]

        svg = self.plot("cliffs", self.changed(self.shapes, many))
        self.assertEqual(sum("time / expected time" in t for t in self.texts(svg)), 3)
        self.check(svg, "60 x 100 x 64")

    def test_files_of_one_run_are_joined(self):
        self.check(self.plot("shapes", self.shapes, self.limits), "64 x")

    def test_what_cannot_be_drawn_is_said(self):
        def refused(kind, *files):
            message = self.plot(kind, *files, expected=2)
            self.assertTrue(message.startswith("plot.py: "), message)
            self.assertEqual(message.count("\n"), 1)
            return message

        self.assertIn("No such file", refused("shapes", self.folder / "absent"))
        text = self.folder / "text"
        text.write_text("3 ms")
        self.assertIn("is not JSON", refused("shapes", text))
        old = self.changed(self.shapes, lambda d: d.update(schema="logitless-bench-0"))
        self.assertIn("schema is 'logitless-bench-0'", refused("shapes", old))
        none = self.changed(self.shapes, lambda d: d.update(cases=[]))
        self.assertIn("has no case", refused("shapes", none))
        other = self.changed(self.shapes, lambda d: d.update(cpu="another CPU"))
        self.assertIn("differ in cpu", refused("shapes", self.shapes, other))
        self.assertIn("--tokens", refused("tokens", self.shapes))
        self.assertIn("--workspace-limit", refused("limit", self.shapes))
        self.assertIn("invalid choice", self.plot("pie", self.shapes, expected=2))


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main(verbosity=2)
