#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Logitless beside PyTorch on this CPU: time, memory and error of a language model's loss.

  python3 -m venv .venv && .venv/bin/pip install -r bench/requirements.txt
  cmake --preset release && cmake --build --preset release
  .venv/bin/python bench/peers.py --markdown table.md --plot plot.svg

Every contender is a process of its own with the same case (one safetensors file) and as many threads
as the others; one call of each in turn is timed, inside the process, round after round, so that slow
drifts of the clock meet all alike. Waiting processes sleep in read(); that they burn no CPU is
checked. The peak is the library's own loop of its dot-product instruction on registers alone,
before and after the rounds. This file needs nothing but Python; the workers are bench/peer_logitless
(built by CMake) and bench/peer_torch.py.

The protocol: one JSON object a line, one reply a line, {"error": "a sentence"} if it went wrong.
  {"do": "load", "files": [...], "threads": 2}       a case; the reply describes worker and machine
  {"do": "prepare", "op": ..., "contender": ..., "options": {...}}
  {"do": "memory", "op": ...}                        one call, how far resident memory rises in it
  {"do": "run", "op": ...}                           one call, its seconds
  {"do": "peak"}                                     flop/s of the register-only loop
  {"do": "write", "file": ..., "tokens": [...], "rows": [...]}   rows of the last call's gradients
  {"do": "golden"}, {"do": "judge", "file": ..., "loss": ...}    the float64 definition, errors
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHAPES = ["1024,49152,576", "1024,32000,2048", "512,32064,4096", "2048,128256,2048", "8192,32000,1024"]
QUICK_SHAPES = ["1024,49152,576"]
GIB = 1 << 30


class Failure(Exception):
    """One sentence for the person who called."""


# ---- numbers and words ----------------------------------------------------------------------------


def spread(values):
    """(largest - least) / median."""
    return (max(values) - min(values)) / statistics.median(values)


def time_text(seconds):
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 \
        else f"{seconds * 1e3:.1f} ms"


def bytes_text(count):
    if count is None:
        return ""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / (1 << 20):.0f} MiB"


def error_text(error):
    return "" if error is None else f"{error:.1e}"


def table(header, rows):
    """Columns as wide as they must be; the first to the left, numbers to the right."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [str(cell).ljust(w) if i == 0 else str(cell).rjust(w)
                 for i, (cell, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines) + "\n"


def markdown_table(header, rows):
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in [header, *rows]]
    lines.insert(1, "|" + "|".join("---" if i == 0 else "---:" for i in range(len(header))) + "|")
    return "\n".join(lines) + "\n"


def parse_shape(text):
    try:
        BT, V, H = (int(part) for part in text.split(","))
    except ValueError:
        raise Failure(f"--shape is {text!r}, must be BT,V,H, for example 1024,32000,2048") from None
    if min(BT, V, H) < 1:
        raise Failure(f"--shape is {text!r}, each of BT,V,H must be at least 1")
    return BT, V, H


# ---- workers --------------------------------------------------------------------------------------


class Worker:
    """A process that holds a case and answers commands."""

    def __init__(self, command, environment, log):
        self.name = Path(command[-1]).name
        self.log = log
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=log, text=True, env=environment)
        except OSError as e:
            raise Failure(f"cannot start {command[0]}: {e.strerror}") from e

    def ask(self, do, **arguments):
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self.process.wait()
            why = f"killed by signal {-code}" if code < 0 else f"ended with {code}"
            why += " (out of memory?)" if code == -9 else ""
            raise Failure(f"{self.name} {why} while asked to {do}; what it said is in {self.log.name}")
        reply = json.loads(line)
        if "error" in reply:
            raise Failure(reply["error"])
        return reply

    def cpu_seconds(self):
        """Of all its threads so far."""
        with open(f"/proc/{self.process.pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self):
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# ---- contenders -----------------------------------------------------------------------------------

# What the timed workers of PyTorch run with: its large temporaries come from malloc, which by default
# returns them to the system after every step and pays for fresh pages in the next.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}

CCE_LABEL = "CCE's torch_compile fallback (holds the logits; its Triton kernel needs a GPU)"


@dataclasses.dataclass
class Contender:
    key: str  # unique, on the command line and in the JSON
    label: str
    ops: dict  # section of the table -> what the worker calls it
    logit_bytes: float = 0  # that it is known to hold per element of [BT, V], for a guess beforehand
    contender: str = ""  # of peer_torch.py; empty: ours
    options: dict = dataclasses.field(default_factory=dict)
    tunings: list = dataclasses.field(default_factory=list)  # options to choose from
    python: str = ""

    @property
    def ours(self):
        return not self.contender


def linear_cross_entropy_tunings():
    chosen = [{"chunked": True}]
    for acc_dtype in ("bfloat16", "float32"):
        for chunk in (128, 256, 512, 1024):
            chosen.append({"acc_policy": "accurate", "acc_dtype": acc_dtype, "batch_chunk_size": chunk})
    return chosen


def options_text(options):
    if not options:
        return ""
    words = [f"{key}={value}" for key, value in options.items() if key != "chunked"]
    return ", ".join(words) if words else "default options"


SECTIONS = {
    "step": "Loss and both gradients",
    "forward": "Forward and loss",
    "gradient": "Both gradients, logits recomputed",
}
# Products of 2 BT V H that the result needs, however many a contender computes.
PRODUCTS = {"step": 3, "forward": 1, "gradient": 3}


def contenders_of(pythons):
    """[Contender]; pythons: {path: version of its torch}."""
    found = [Contender("logitless", "Logitless", {s: s for s in SECTIONS})]
    for python, version in pythons.items():
        several = len(pythons) > 1
        name = f"PyTorch {version}"
        suffix = f"@{version}" if several else ""

        def add(key, label, ops, contender, logit_bytes, **more):
            found.append(Contender(key + suffix, f"{name}: {label}", ops, logit_bytes=logit_bytes,
                                   contender=contender, python=python, **more))

        both = {"step": "step", "forward": "forward"}
        add("eager-bf16", "eager, bf16 loss", both, "eager", 8, options={"loss_dtype": "bfloat16"})
        add("eager-fp32", "eager, fp32 loss", both, "eager", 18, options={"loss_dtype": "float32"})
        add("compile-bf16", "torch.compile, bf16 loss", both, "compile", 6,
            options={"loss_dtype": "bfloat16"})
        add("compile-fp32", "torch.compile, fp32 loss", both, "compile", 10,
            options={"loss_dtype": "float32"})
        add("linear_cross_entropy", "linear_cross_entropy, best options", {"step": "step"},
            "linear_cross_entropy", 2, tunings=linear_cross_entropy_tunings())
        add("cce", CCE_LABEL, {"step": "step"}, "cce", 10)
        add("mm", "bare products, mm(out=)",
            {"step": "products", "forward": "product", "gradient": "products"}, "bare", 2)
    return found


# ---- a comparison -----------------------------------------------------------------------------------


def memory_available():
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise Failure("/proc/meminfo has no MemAvailable")


def groups_of(sizes, budget):
    """Cuts {key: bytes} into as few groups as fit `budget` one after the other, in order; a group has
    at least one member."""
    groups, used = [], 0
    for key, size in sizes.items():
        if not groups or used + size > budget:
            groups.append([])
            used = 0
        groups[-1].append(key)
        used += size
    return groups


class Comparison:
    """One case, all contenders."""

    def __init__(self, arguments, folder, log):
        self.arguments, self.folder, self.log = arguments, folder, log
        self.skipped = {}  # key: a sentence

    def say(self, text):
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{text[:100]}")
            sys.stderr.flush()
        elif not self.arguments.quiet:
            print(text, file=sys.stderr, flush=True)

    def start(self, contender, timed):
        environment = dict(os.environ)
        environment["OMP_NUM_THREADS"] = str(self.arguments.threads)
        if contender.ours:
            command = [str(self.arguments.worker)]
        else:
            command = [contender.python, str(HERE / "peer_torch.py")]
            # Compiled code is kept for the next process of this run, and thrown away with it.
            environment["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "inductor")
            environment["CUDA_VISIBLE_DEVICES"] = ""
            if timed:
                environment.update(KEEP_FREED_MEMORY)
        return Worker(command, environment, self.log)

    def load(self, worker):
        return worker.ask("load", files=self.files, threads=self.arguments.threads,
                          workspace_limit=self.arguments.workspace_limit)

    def prepare(self, worker, contender, op):
        more = {} if contender.ours else {"contender": contender.contender, "options": contender.options}
        return worker.ask("prepare", op=op, **more)

    def run(self, contenders, shape, files):
        self.files, self.skipped = files, {}
        BT, V, H = self.shape = shape
        self.held = 2 * 2 * (BT + V) * H  # operands and outputs, bf16
        with self.start(contenders[0], timed=False) as worker:
            self.about = self.load(worker)
        result = {"BT": BT, "V": V, "H": H, "about": self.about, "contenders": {}, "golden": None}
        present = [c for c in contenders if self.fits(c)]
        if contenders[0] not in present:
            raise Failure(f"{BT},{V},{H}: Logitless {self.skipped[contenders[0].key]}")
        golden = self.golden(contenders)
        if golden is not None:
            with golden:
                self.say("the definition in float64")
                right = golden.ask("golden")
                result["golden"] = {"loss": right["loss"], "tokens": len(right["tokens"]),
                                    "rows": len(right["rows"])}
                probed = {c.key: self.probe(c, golden, right) for c in present}
        else:
            probed = {c.key: self.probe(c, None, None) for c in present}
        if probed[contenders[0].key] is None:
            raise Failure(f"{BT},{V},{H}: {self.skipped[contenders[0].key]}")
        present = [c for c in present if probed[c.key] is not None]
        self.race(present, probed, result)
        result["skipped"] = self.skipped
        return result

    def golden(self, contenders):
        """The worker that knows the definition: any torch will do."""
        for c in contenders:
            if not c.ours:
                worker = self.start(c, timed=False)
                self.load(worker)
                return worker
        return None

    def fits(self, contender):
        BT, V, _ = self.shape
        need = self.held + contender.logit_bytes * BT * V + GIB // 2
        have = memory_available()
        if need > have:
            self.skipped[contender.key] = (f"needs about {bytes_text(need)} of memory, "
                                           f"{bytes_text(have)} are available")
        return need <= have

    def probe(self, contender, golden, right):
        """In fresh processes: the best options, peak memory of every op, errors. None: skipped."""
        found = {"memory_bytes": {}, "errors": {}, "prepared": {}, "tuning": []}
        try:
            if contender.tunings:
                found["tuning"] = self.tune(contender)
                contender = dataclasses.replace(contender, options=found["tuning"][0]["options"])
                found["options"] = contender.options
            for section, op in contender.ops.items():
                self.say(f"{contender.label}: memory and error of {section}")
                with self.start(contender, timed=False) as worker:
                    told = self.load(worker)
                    found["about"] = told
                    found["prepared"][section] = self.prepare(worker, contender, op)
                    found["memory_bytes"][section] = worker.ask("memory", op=op)["memory_bytes"]
                    if right and contender.contender != "bare" and section != "forward":
                        file = str(self.folder / "outputs.safetensors")
                        loss = worker.ask("write", file=file, tokens=right["tokens"],
                                          rows=right["rows"])["loss"]
                        found["errors"][section] = golden.ask("judge", file=file, loss=loss)
        except Failure as e:
            self.skipped[contender.key] = str(e)
            return None
        return found

    def tune(self, contender):
        """[{options, seconds}], the fastest first; seconds: of the calls after a first one."""
        tried = []
        with self.start(contender, timed=True) as worker:
            self.load(worker)

            def time_of(options, runs):
                self.prepare(worker, dataclasses.replace(contender, options=options), "step")
                return [worker.ask("run", op="step")["seconds"] for _ in range(runs)]

            for options in contender.tunings:
                self.say(f"{contender.label}: trying {options_text(options)}")
                seconds = time_of(options, 1)
                best = min((min(t["seconds"]) for t in tried), default=seconds[0])
                # The first call is cold, but not by that much.
                if seconds[0] < 3 * best:
                    seconds = time_of(options, 3)[1:]
                tried.append({"options": options, "seconds": seconds})
            tried.sort(key=lambda t: min(t["seconds"]))
            for t in tried[:2]:  # the two best again, in the other order
                t["seconds"] += time_of(t["options"], 3)[1:]
            tried[:2] = sorted(tried[:2], key=lambda t: min(t["seconds"]))
        return tried

    def warm_up(self, worker, contender):
        """Twice each: threads, compiled code, memory that malloc keeps."""
        self.load(worker)
        ops = dict.fromkeys(contender.ops.values())
        if not contender.ours:
            self.prepare(worker, contender, "")
        for op in ops:
            if contender.ours:
                self.prepare(worker, contender, op)
            for _ in range(2):
                worker.ask("run", op=op)

    def race(self, contenders, probed, result):
        """Times every op of every contender in turn, in as few groups as memory allows; ours is in
        each group."""
        ours, peers = contenders[0], contenders[1:]
        margin = GIB
        own = self.held + max(m or 0 for m in probed[ours.key]["memory_bytes"].values()) + GIB // 4
        budget = memory_available() - margin - own
        sizes = {}
        for c in peers:
            rise = max(m or 0 for m in probed[c.key]["memory_bytes"].values())
            sizes[c.key] = int(self.held + 1.25 * rise + GIB // 2)
            if sizes[c.key] > budget:
                self.skipped[c.key] = (f"needs {bytes_text(sizes[c.key])} of memory beside ours, "
                                       f"{bytes_text(budget)} are available")
        peers = [c for c in peers if c.key not in self.skipped]
        by_key = {c.key: c for c in peers}
        groups = groups_of({c.key: sizes[c.key] for c in peers}, budget) or [[]]
        result["groups"], result["peaks"], result["idle_cpu"] = groups, [], 0.0
        for number, group in enumerate(groups):
            self.race_group([ours, *(by_key[key] for key in group)], probed, result, number)

    def race_group(self, group, probed, result, number):
        workers, seconds = {}, {}

        def give_up(contender, failure):
            if contender.ours:
                raise failure
            self.skipped[contender.key] = str(failure)
            workers.pop(contender.key).close()
            for section in contender.ops:
                seconds.pop((contender.key, section), None)

        try:
            for c in group:
                self.say(f"{c.label}: warming up")
                workers[c.key] = self.start(c, timed=True)
                try:
                    self.warm_up(workers[c.key], dataclasses.replace(
                        c, options=probed[c.key].get("options", c.options)))
                except Failure as e:
                    give_up(c, e)
            ours = workers[group[0].key]
            ours.ask("peak")
            peaks = [ours.ask("peak")["flops_per_second"]]
            before = {key: worker.cpu_seconds() for key, worker in workers.items()}
            busy = dict.fromkeys(workers, 0.0)
            start = time.monotonic()
            for turn in range(self.arguments.rounds):
                self.say(f"round {turn + 1} of {self.arguments.rounds}")
                for section in SECTIONS:
                    racing = [c for c in group if section in c.ops and c.key in workers]
                    # Nobody always follows the same neighbour.
                    first = turn % len(racing)
                    for c in racing[first:] + racing[:first]:
                        time.sleep(self.arguments.pause)
                        called = time.monotonic()
                        try:
                            once = workers[c.key].ask("run", op=c.ops[section])["seconds"]
                        except Failure as e:
                            give_up(c, e)
                            continue
                        busy[c.key] += time.monotonic() - called
                        seconds.setdefault((c.key, section), []).append(once)
            elapsed = time.monotonic() - start
            # CPU time beyond threads x its own turns was burnt while a worker should have slept.
            for key, worker in workers.items():
                burnt = worker.cpu_seconds() - before[key] - busy[key] * self.arguments.threads
                result["idle_cpu"] = max(result["idle_cpu"], burnt / max(elapsed - busy[key], 1e-9))
            peaks.append(ours.ask("peak")["flops_per_second"])
        finally:
            for worker in workers.values():
                worker.close()
        result["peaks"] += peaks
        flops = 2.0 * self.shape[0] * self.shape[1] * self.shape[2]
        for c in (c for c in group if c.key in workers):
            for section in c.ops:
                key = c.key if number == 0 or not c.ours else f"{c.key}#{number}"
                entry = result["contenders"].setdefault(key, {
                    "label": c.label, "group": number, "about": probed[c.key]["about"],
                    "options": probed[c.key].get("options", c.options),
                    "tuning": probed[c.key]["tuning"], "sections": {}})
                times = seconds[(c.key, section)]
                median = statistics.median(times)
                ours_here = statistics.median(seconds[(group[0].key, section)])
                entry["sections"][section] = {
                    "seconds": times, "median_seconds": median, "spread": spread(times),
                    "of_peak": PRODUCTS[section] * flops / median / max(peaks),
                    "over_ours": median / ours_here,
                    "memory_bytes": probed[c.key]["memory_bytes"][section],
                    "errors": probed[c.key]["errors"].get(section),
                    "prepared": probed[c.key]["prepared"][section]}


# ---- what is printed ----------------------------------------------------------------------------------


HEADER = ["", "median", "spread", "of peak", "x ours", "memory", "error: loss", "grad_input",
          "grad_weight"]


def section_rows(result, section):
    """Rows of the table, ours first, then as they were named."""
    rows = []
    for key, entry in result["contenders"].items():
        measured = entry["sections"].get(section)
        if measured is None or "#" in key:
            continue
        label = entry["label"]
        if entry["tuning"]:
            label = label.replace("best options", options_text(entry["options"]))
        errors = measured["errors"] or {}
        rows.append([label, time_text(measured["median_seconds"]), f"{100 * measured['spread']:.0f} %",
                     f"{measured['of_peak']:.3f}", f"{measured['over_ours']:.2f}",
                     bytes_text(measured["memory_bytes"]), error_text(errors.get("loss")),
                     error_text(errors.get("grad_input")), error_text(errors.get("grad_weight"))])
    return rows


def machine_text(document):
    about = document["about"]
    torches = ", ".join(document["torch"].values())
    return (f"{about['cpu']}, {about['threads']} threads, {about['isa']}; Logitless {about['commit']} "
            f"({about['compiler']}), PyTorch {torches}; {document['date']}")


def amx_text(document):
    """What a reader must know where AMX is present, with the measured ratio; else nothing."""
    if not document["about"]["amx_present"]:
        return ""
    ratios = []
    for result in document["cases"]:
        times = [e["sections"]["step"]["over_ours"] for k, e in result["contenders"].items()
                 if not k.startswith("logitless") and not k.startswith("mm") and "step" in e["sections"]]
        if times:
            ratios.append(f"{min(times):.2f} at {result['BT']},{result['V']},{result['H']}")
    return ("AMX present, unused; PyTorch's bf16 uses it: fastest of PyTorch / ours "
            + "; ".join(ratios))


def notes_of(document):
    notes = ["of peak: products of the result (3 for loss and both gradients, 1 for the forward) over "
             "the register-only peak of the instruction that Logitless multiplies with, measured in "
             "the same run",
             "memory: rise of resident memory over operands and outputs, in a fresh process",
             "errors: relative, in the Frobenius norm, against float64 from the same bf16 operands, "
             "over a sample of tokens and vocabulary rows"]
    if amx_text(document):
        notes.append(amx_text(document))
    for result in document["cases"]:
        shape = f"{result['BT']},{result['V']},{result['H']}"
        for key, why in result["skipped"].items():
            notes.append(f"{shape}: {key} left out: {why}")
        if result["idle_cpu"] > 0.02:
            notes.append(f"{shape}: a waiting worker used {100 * result['idle_cpu']:.0f} % of a CPU")
        if len(result["groups"]) > 1:
            notes.append(f"{shape}: {len(result['groups'])} groups, as memory does not hold all "
                         "contenders at once; ratios are to ours in the same group")
        for entry in result["contenders"].values():
            for t in entry["tuning"]:
                if options_text(t["options"]) == "default options":
                    notes.append(f"{shape}: {entry['label'].split(',')[0]} with default options "
                                 f"{time_text(min(t['seconds']))}")
    return notes


def print_document(document, markdown=False):
    make = markdown_table if markdown else table
    out = [("" if markdown else "") + machine_text(document), ""]
    for result in document["cases"]:
        peaks = [p * 1e-9 for p in result["peaks"]]
        out.append(("### " if markdown else "") + f"BT, V, H = {result['BT']}, {result['V']}, "
                   f"{result['H']}; peak {min(peaks):.0f} to {max(peaks):.0f} GFLOP/s")
        out.append("")
        for section, title in SECTIONS.items():
            rows = section_rows(result, section)
            if len(rows) > 0:
                out.append(make([title, *HEADER[1:]], rows))
    out += ["- " + note for note in notes_of(document)]
    return "\n".join(out) + "\n"


# ---- the program ----------------------------------------------------------------------------------------


def arguments_of(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     epilog="See docs/performance.md, Beside PyTorch.")
    parser.add_argument("--build", type=Path, default=HERE.parent / "build" / "release",
                        help="folder of the CMake build (default: build/release)")
    parser.add_argument("--python", action="append", default=[], metavar="PATH",
                        help="a Python with torch; several for several versions (default: this one)")
    parser.add_argument("--shape", action="append", default=[], metavar="BT,V,H",
                        help=f"one or more (default: {' '.join(SHAPES)})")
    parser.add_argument("--case", action="append", default=[], metavar="FILE[,FILE...]",
                        help="a case in safetensors files instead of a synthetic one of --shape")
    parser.add_argument("--quick", action="store_true", help="one shape, three rounds")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)),
                        help="for every contender (default: the CPUs of this process)")
    parser.add_argument("--rounds", type=int, default=0, help="timed calls of each (default: 9)")
    parser.add_argument("--pause", type=float, default=0.05, metavar="SECONDS",
                        help="before each call, so that the last one's threads sleep")
    parser.add_argument("--only", action="append", default=[], metavar="KEY",
                        help="contenders beside ours, by key or its beginning; several")
    parser.add_argument("--workspace-limit", type=int, default=0, metavar="BYTES",
                        help="of ours (default: the library's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything measured")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the tables")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg",
                        help="the whole step, as a picture (needs matplotlib in the first --python)")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    arguments = parser.parse_args(argv)
    if arguments.threads < 1:
        raise Failure(f"--threads is {arguments.threads}, must be at least 1")
    if arguments.rounds < 0:
        raise Failure(f"--rounds is {arguments.rounds}, must be at least 1")
    if arguments.rounds == 0:
        arguments.rounds = 3 if arguments.quick else 9
    arguments.worker = arguments.build / "bench" / "peer_logitless"
    arguments.maker = arguments.build / "cli" / "logitless"
    for program in (arguments.worker, arguments.maker):
        if not program.is_file():
            raise Failure(f"{program} is missing: build it with `cmake --preset release && cmake "
                          "--build --preset release`, or name the build folder with --build")
    arguments.python = arguments.python or [sys.executable]
    return arguments


def torch_version(python):
    try:
        done = subprocess.run([python, "-c", "import torch; print(torch.__version__.split('+')[0])"],
                              capture_output=True, text=True)
    except OSError as e:
        raise Failure(f"cannot start {python}: {e.strerror}") from e
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Failure(f"{python} cannot import torch ({last}); "
                      f"install it with `{python} -m pip install -r {HERE / 'requirements.txt'}`")
    return done.stdout.strip()


def cases_of(arguments, folder):
    """Yields (shape, files)."""
    for case in arguments.case:
        files = [str(Path(f).resolve()) for f in case.split(",")]
        yield None, files
    if arguments.case and not arguments.shape:
        return
    for text in arguments.shape or (QUICK_SHAPES if arguments.quick else SHAPES):
        BT, V, H = parse_shape(text)
        file = folder / "case.safetensors"
        done = subprocess.run([str(arguments.maker), "make", str(file), "--tokens", str(BT), "--vocab",
                               str(V), "--hidden", str(H)], capture_output=True, text=True)
        if done.returncode != 0:
            raise Failure(f"logitless make: {done.stderr.strip()}")
        yield (BT, V, H), [str(file)]
        file.unlink()


def main(argv=None):
    try:
        arguments = arguments_of(argv)
        for text in arguments.shape:
            parse_shape(text)
        pythons = {python: torch_version(python) for python in arguments.python}
        contenders = contenders_of(pythons)
        if arguments.only:
            for wanted in arguments.only:
                if not any(c.key.startswith(wanted) for c in contenders):
                    raise Failure(f"--only is {wanted!r}, must be the beginning of one of: "
                                  + ", ".join(c.key for c in contenders[1:]))
            contenders = [c for c in contenders
                          if c.ours or any(c.key.startswith(w) for w in arguments.only)]
        folder = Path(tempfile.mkdtemp(prefix="logitless-peers-"))
        log = open(folder / "workers.log", "w+")
        keep = True
        try:
            document = {"date": datetime.date.today().isoformat(), "torch": pythons,
                        "rounds": arguments.rounds, "cases": []}
            comparison = Comparison(arguments, folder, log)
            for shape, files in cases_of(arguments, folder):
                if shape is None:
                    with comparison.start(contenders[0], timed=False) as worker:
                        about = worker.ask("load", files=files, threads=arguments.threads)
                        shape = about["BT"], about["V"], about["H"]
                comparison.say(f"{shape[0]},{shape[1]},{shape[2]}")
                document["cases"].append(comparison.run(contenders, shape, files))
                document["about"] = document["cases"][-1]["about"]
                if arguments.json:
                    arguments.json.write_text(json.dumps(document, indent=1) + "\n")
            comparison.say("")
            print(print_document(document))
            if arguments.markdown:
                arguments.markdown.write_text(print_document(document, markdown=True))
            if arguments.plot:
                file = folder / "document.json"
                file.write_text(json.dumps(document))
                done = subprocess.run([arguments.python[0], str(HERE / "peers_plot.py"), str(file),
                                       str(arguments.plot)], stderr=subprocess.PIPE, text=True)
                if done.returncode != 0:
                    raise Failure((done.stderr.strip().splitlines() or ["no plot"])[-1])
            keep = False
        finally:
            log.close()
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)
    except Failure as e:
        print(f"peers.py: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
