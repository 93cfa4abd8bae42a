# SPDX-License-Identifier: Apache-2.0
"""One comparison of peers.py: starts the workers, has them compute in turn, collects what they say.

A worker reads one JSON object a line from stdin and answers each with one on stdout, which is
{"error": "a sentence"} if the command went wrong:

  {"do": "load", "files": [...], "threads": 2, "workspace_limit": 0}   a case; what it is
  {"do": "prepare", "op": ...}                            ours: an operator, made ready
  {"do": "prepare", "contender": ..., "options": {...}}   PyTorch's: all its ops
  {"do": "memory", "op": ...}     one call: the peak of resident memory over the operands
  {"do": "run", "op": ...}        one call: its seconds, and its CPU seconds over all threads
  {"do": "write", "file": ..., "tokens": [...], "rows": [...]}   the last call's mean loss in the
                                  reply, those rows of grad_input and grad_weight in a file
  {"do": "peak"}                  ours: flop/s of its dot-product instruction on registers alone
  {"do": "golden"}                PyTorch's: the definition in float64, and a sample to judge by
  {"do": "judge", "file": ..., "loss": ...}               PyTorch's: errors of what was written
"""

import contextlib
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from peer_contenders import PRODUCTS, SECTIONS, options_text
from peer_report import GIB, bytes_text, spread

HERE = Path(__file__).resolve().parent

# What PyTorch's timed workers run with. Its large temporaries come from malloc, which by default
# returns them to the system after every step and pays for fresh pages in the next; and it is given
# the huge pages that our workspaces ask for.
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


class Failure(Exception):
    """One sentence for the person who called."""


class Worker:
    """A process that holds a case and answers commands."""

    def __init__(self, command, environment):
        self.name = Path(command[-1]).name
        self.said = tempfile.TemporaryFile("w+", errors="replace")  # on stderr
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.said,
                text=True,
                env=environment,
            )
        except OSError as e:
            raise Failure(f"cannot start {command[0]}: {e.strerror}") from e

    def limit_memory(self):
        """Rather than drive the system out of memory, an allocation fails."""
        limit = max(memory_available() - GIB // 2, GIB)
        with contextlib.suppress(OSError):
            resource.prlimit(self.process.pid, resource.RLIMIT_DATA, (limit, limit))

    def ask(self, do, **arguments):
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise Failure(self.obituary(do))
        reply = json.loads(line)
        if "error" in reply:
            raise Failure(reply["error"])
        return reply

    def obituary(self, do):
        code = self.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        # Not everything in PyTorch survives an allocation that fails.
        how += " (out of memory?)" if code in (-6, -9, -11) else ""
        self.said.seek(0)
        last = self.said.read().strip().splitlines()[-1:]
        return f"{self.name} {how} when told to {do}" + "".join(f": {line}" for line in last)

    def cpu_seconds(self):
        """(used, wanted in vain) by its threads so far; zeros where the system does not tell."""
        used = wanted = 0
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/schedstat"):
            try:
                fields = task.read_text().split()
                used, wanted = used + int(fields[0]), wanted + int(fields[1])
            except (OSError, IndexError):  # the thread has ended
                pass
        return used * 1e-9, wanted * 1e-9

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
        self.said.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def memory_available():
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise Failure("/proc/meminfo has no MemAvailable")


@dataclasses.dataclass
class Probe:
    """What is known of a contender before it is timed, each from a fresh process."""

    contender: object  # with the best options
    about: dict = dataclasses.field(default_factory=dict)
    tuning: list = dataclasses.field(default_factory=list)
    prepared: dict = dataclasses.field(default_factory=dict)  # by section, as the others
    memory: dict = dataclasses.field(default_factory=dict)
    errors: dict = dataclasses.field(default_factory=dict)


class CpuClock:
    """Who used a CPU while one of the workers was timed: it, or others that should have slept."""

    def __init__(self, workers):
        self.workers = workers
        self.called = self.starved = 0.0
        self.waited, self.burnt = {}, {}

    @contextlib.contextmanager
    def turn_of(self, key):
        before = {k: worker.cpu_seconds() for k, worker in self.workers.items()}
        start = time.monotonic()
        yield
        elapsed = time.monotonic() - start
        for k, (used, wanted) in before.items():
            used_now, wanted_now = self.workers[k].cpu_seconds()
            if k == key:
                self.called += elapsed
                self.starved += wanted_now - wanted
            else:
                self.waited[k] = self.waited.get(k, 0.0) + elapsed
                self.burnt[k] = self.burnt.get(k, 0.0) + used_now - used

    def starved_share(self, threads):
        """Of the time of all calls: threads wanted a CPU that something else had."""
        return self.starved / (self.called * threads) if self.called else 0.0

    def idle_share(self):
        """(share of a CPU, key) of the worker that used most while others were timed."""
        return max(((self.burnt[k] / self.waited[k], k) for k in self.burnt), default=(0.0, ""))


class Comparison:
    """All contenders on one case. `say` takes one line of progress."""

    def __init__(self, arguments, folder, say, contenders, files):
        self.arguments, self.folder, self.say = arguments, folder, say
        self.ours, self.peers, self.files = contenders[0], contenders[1:], files
        self.skipped = {}  # key: why

    def run(self):
        """The entry of this case in the JSON."""
        with self.start(self.ours) as worker:
            about = self.load(worker)
        self.shape = BT, V, H = about["BT"], about["V"], about["H"]
        if about["dtype"] != "bf16":
            raise Failure(f"{self.files[0]} is {about['dtype']}, must be bf16")
        self.held = 2 * (BT + V) * H  # operands; gradients are as large
        self.result = {"BT": BT, "V": V, "H": H, "about": about, "golden": None, "contenders": {}}
        self.refuse_what_cannot_fit()
        probes = self.probe_all()
        self.race(probes)
        self.result["skipped"] = self.skipped
        return self.result

    # ---- workers

    def start(self, contender, timed=False):
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.arguments.threads)}
        if contender.ours:
            return Worker([str(self.arguments.worker)], environment)
        # Compiled code is kept for the other processes of this run, and thrown away with it.
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "inductor")
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if timed:
            environment.update(KEEP_FREED_MEMORY)
        worker = Worker([contender.python, str(HERE / "peer_torch.py")], environment)
        worker.limit_memory()
        return worker

    def load(self, worker):
        return worker.ask(
            "load",
            files=self.files,
            threads=self.arguments.threads,
            workspace_limit=self.arguments.workspace_limit,
        )

    def prepare(self, worker, contender, op):
        if contender.ours:
            return worker.ask("prepare", op=op)
        return worker.ask("prepare", contender=contender.kind, options=contender.options)

    # ---- memory

    def refuse_what_cannot_fit(self):
        for c in (self.ours, *self.peers):
            need = 2 * self.held + c.logit_bytes * self.shape[0] * self.shape[1] + GIB // 2
            have = memory_available()
            if need > have:
                self.give_up(c, f"needs about {bytes_text(need)} of memory, {bytes_text(have)} are "
                                "available")  # fmt: skip

    def give_up(self, contender, why):
        if contender.key == self.ours.key:
            raise Failure(f"{','.join(map(str, self.shape))}: Logitless: {why}")
        self.skipped[contender.key] = str(why)

    # ---- each alone

    def probe_all(self):
        """{key: Probe} of those that run, ours first."""
        probes = {}
        theirs = [c for c in self.peers if not c.ours]
        if not theirs:
            return {c.key: self.probe(c, None, {}) for c in (self.ours, *self.peers)}
        with self.start(theirs[0]) as golden:
            self.load(golden)
            self.say("the definition in float64")
            sample = golden.ask("golden")
            self.result["golden"] = {
                "loss": sample["loss"],
                "tokens": len(sample["tokens"]),
                "rows": len(sample["rows"]),
            }
            for c in (self.ours, *self.peers):
                if c.key in self.skipped:
                    continue
                try:
                    probes[c.key] = self.probe(c, golden, sample)
                except Failure as e:
                    self.give_up(c, e)
        return probes

    def probe(self, contender, golden, sample):
        tuning = []
        if contender.tunings:
            tuning = self.tune(contender)
            contender = dataclasses.replace(contender, options=tuning[0]["options"])
        probe = Probe(contender, tuning=tuning)
        for section, op in contender.ops.items():
            self.say(f"{contender.label}: memory and error of {section}")
            with self.start(contender) as worker:
                probe.about = self.load(worker)
                probe.prepared[section] = self.prepare(worker, contender, op)
                probe.memory[section] = worker.ask("memory", op=op)["memory_bytes"]
                if golden is None or contender.kind == "bare" or section == "forward":
                    continue
                file = str(self.folder / "outputs.safetensors")
                rows = {"tokens": sample["tokens"], "rows": sample["rows"]}
                loss = worker.ask("write", file=file, **rows)["loss"]
                probe.errors[section] = golden.ask("judge", file=file, loss=loss)
        return probe

    def tune(self, contender):
        """[{options, seconds}], the fastest first; seconds: of calls after a first one."""
        tried = []
        with self.start(contender, timed=True) as worker:
            self.load(worker)

            def seconds_of(options, runs):
                self.prepare(worker, dataclasses.replace(contender, options=options), "step")
                return [worker.ask("run", op="step")["seconds"] for _ in range(runs)]

            for options in contender.tunings:
                self.say(f"{contender.label}: trying {options_text(options)}")
                seconds = seconds_of(options, 1)
                best = min((min(t["seconds"]) for t in tried), default=seconds[0])
                if seconds[0] < 3 * best:  # else a first call that is cold does not explain it
                    seconds = seconds_of(options, 3)[1:]
                tried.append({"options": options, "seconds": seconds})
            tried.sort(key=lambda t: min(t["seconds"]))
            for t in tried[:2]:
                t["seconds"] += seconds_of(t["options"], 3)[1:]
            tried[:2] = sorted(tried[:2], key=lambda t: min(t["seconds"]))
        return tried

    # ---- in turn

    def race(self, probes):
        """In as few groups as memory allows, ours in each."""
        self.result.update(groups=[], peaks=[])
        self.result["noise"] = {"starved": 0.0, "idle": 0.0, "idle_of": ""}
        ours = probes.pop(self.ours.key)
        pending = list(probes.values())
        while pending or not self.result["groups"]:
            self.race_group(ours, pending)

    def room_for(self, probe):
        """Whether its timed worker may start now; why not, if it may not."""
        # PyTorch's keep what they free in one heap: 2.3 times their peak was seen.
        factor = 1.0 if probe.contender.ours else 2.5
        most = max((bytes or 0 for bytes in probe.memory.values()), default=0)
        need = int(self.held + factor * most + GIB // 2)
        have = max(memory_available() - GIB, 0)  # a GiB stays free
        if need <= have:
            return ""
        return f"needs {bytes_text(need)} of memory beside ours, {bytes_text(have)} are available"

    def race_group(self, ours, pending):
        """Takes as many of `pending` as fit beside ours; one that never will is given up."""
        number, group, seconds = len(self.result["groups"]), [], {}
        workers = {}

        def start(probe):
            c = probe.contender
            self.say(f"{c.label}: warming up")
            workers[c.key] = self.start(c, timed=True)
            try:
                self.warm_up(workers[c.key], c)
            except Failure as e:
                drop(c, e)
            else:
                group.append(probe)

        def drop(contender, why):
            self.give_up(contender, why)
            workers.pop(contender.key).close()

        try:
            start(ours)
            while pending:
                why_not = self.room_for(pending[0])
                if why_not:
                    if len(group) == 1:
                        self.give_up(pending.pop(0).contender, why_not)
                    break
                start(pending.pop(0))
            if len(group) == 1 and (pending or number > 0):
                return  # nobody to compare with here, and others to come or gone before
            peaks = self.rounds(group, workers, seconds, drop)
        finally:
            for worker in workers.values():
                worker.close()
        self.result["groups"].append([p.contender.key for p in group[1:]])
        self.result["peaks"] += peaks
        for probe in group:
            if probe.contender.key in workers:
                self.enter(probe, number, seconds, max(peaks))

    def rounds(self, group, workers, seconds, drop):
        """Fills seconds: {(key, section): ([seconds], [CPU seconds])}; returns peaks, flop/s."""
        ours = workers[self.ours.key]
        ours.ask("peak")  # a first one wakes the clock up
        peaks = [ours.ask("peak")["flops_per_second"]]
        clock = CpuClock(workers)
        for turn in range(self.arguments.rounds):
            self.say(f"round {turn + 1} of {self.arguments.rounds}")
            for section in SECTIONS:
                racing = [p.contender for p in group if section in p.contender.ops]
                racing = [c for c in racing if c.key in workers]
                first = turn % len(racing)  # nobody always follows the same neighbour
                for c in racing[first:] + racing[:first]:
                    time.sleep(self.arguments.pause)
                    try:
                        with clock.turn_of(c.key):
                            reply = workers[c.key].ask("run", op=c.ops[section])
                    except Failure as e:
                        drop(c, e)
                        continue
                    timed = seconds.setdefault((c.key, section), ([], []))
                    timed[0].append(reply["seconds"])
                    timed[1].append(reply["cpu_seconds"])
        peaks.append(ours.ask("peak")["flops_per_second"])
        self.note_noise(clock)
        return peaks

    def warm_up(self, worker, contender):
        """Twice each: threads, compiled code, memory that malloc keeps."""
        self.load(worker)
        for number, op in enumerate(dict.fromkeys(contender.ops.values())):
            if contender.ours or number == 0:
                self.prepare(worker, contender, op)
            for _ in range(2):
                worker.ask("run", op=op)

    def note_noise(self, clock):
        """The worst of all groups."""
        noise = self.result["noise"]
        noise["starved"] = max(noise["starved"], clock.starved_share(self.arguments.threads))
        share, key = clock.idle_share()
        if share > noise["idle"]:
            noise.update(idle=share, idle_of=key)

    def enter(self, probe, number, seconds, peak):
        """Into the result."""
        BT, V, H = self.shape
        c = probe.contender
        again = c.key == self.ours.key and number > 0
        entry = {
            "label": c.label,
            "group": number,
            "ours_again": again,  # ours, beside a later group
            "about": probe.about,
            "options": c.options,
            "tuning": probe.tuning,
            "sections": {},
        }
        for section in c.ops:
            times, cpu_times = seconds[(c.key, section)]
            median = statistics.median(times)
            entry["sections"][section] = {
                "seconds": times,
                "cpu_seconds": cpu_times,  # of all threads
                "median_seconds": median,
                "spread": spread(times),
                "of_peak": PRODUCTS[section] * 2.0 * BT * V * H / median / peak,
                "over_ours": median / statistics.median(seconds[(self.ours.key, section)][0]),
                "memory_bytes": probe.memory[section],
                "errors": probe.errors.get(section),
                "prepared": probe.prepared[section],
            }
        self.result["contenders"][f"{c.key}#{number}" if again else c.key] = entry


def terminal_progress(quiet):
    """A line that is overwritten on a terminal, lines elsewhere."""

    def say(text):
        if sys.stderr.isatty():
            print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)
        elif text and not quiet:
            print(text, file=sys.stderr, flush=True)

    return say
