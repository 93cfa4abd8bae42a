#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Logitless beside PyTorch on this CPU: time, memory and error of a language model's loss.

  cmake --preset release && cmake --build --preset release
  python3 -m venv .venv && .venv/bin/pip install -r bench/requirements.txt
  .venv/bin/python bench/peers.py --markdown table.md --plot plot.svg

Every contender is a process of its own with the same case and as many threads as the others; one
call of each in turn is timed, round after round. This program and what it imports need nothing but
Python; the workers are bench/peer_logitless (built by CMake) and bench/peer_torch.py.
docs/performance.md, Beside PyTorch, says what is compared and how.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from peer_comparison import HERE, Comparison, Failure, terminal_progress
from peer_contenders import contenders_of
from peer_report import text_of

SHAPES = "1024,49152,576 1024,32000,2048 512,32064,4096 2048,128256,2048 8192,32000,1024".split()
QUICK_SHAPES = SHAPES[:1]


def parse_shape(text):
    try:
        BT, V, H = (int(part) for part in text.split(","))
    except ValueError:
        raise Failure(f"--shape is {text!r}, must be BT,V,H, for example 1024,32000,2048") from None
    if min(BT, V, H) < 1:
        raise Failure(f"--shape is {text!r}, each of BT,V,H must be at least 1")
    return BT, V, H


def arguments_of(argv):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="See docs/performance.md, Beside PyTorch."
    )

    def option(*names, **more):
        parser.add_argument(*names, **more)

    option(
        "--build",
        type=Path,
        default=HERE.parent / "build" / "release",
        metavar="FOLDER",
        help="of the CMake build (default: build/release)",
    )
    option(
        "--python",
        action="append",
        default=[],
        metavar="PATH",
        help="a Python with torch; several for several versions (default: this one)",
    )
    option(
        "--shape",
        action="append",
        default=[],
        metavar="BT,V,H",
        help=f"one or more (default: {' '.join(SHAPES)})",
    )
    option(
        "--case",
        action="append",
        default=[],
        metavar="FILE[,FILE...]",
        help="a bf16 case in safetensors files; one or more, instead of synthetic ones",
    )
    option("--quick", action="store_true", help="the first shape, three rounds")
    option(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="of every contender (default: the CPUs of this process)",
    )
    option("--rounds", type=int, help="timed calls of each (default: 9)")
    option(
        "--pause",
        type=float,
        default=0.05,
        metavar="SECONDS",
        help="before each call, so that the last one's threads sleep (default: 0.05)",
    )
    option(
        "--only",
        action="append",
        default=[],
        metavar="KEY",
        help="peers whose key begins so; one or more (default: all)",
    )
    option(
        "--workspace-limit",
        type=int,
        default=0,
        metavar="BYTES",
        help="of ours (default: the library's)",
    )
    option("--json", type=Path, metavar="FILE", help="everything measured")
    option("--markdown", type=Path, metavar="FILE", help="the tables")
    option(
        "--plot",
        type=Path,
        metavar="FILE.svg",
        help="the whole step as a picture (the first --python needs matplotlib)",
    )
    option("--quiet", action="store_true", help="no progress on stderr")  # fmt: skip
    arguments = parser.parse_args(argv)
    if arguments.rounds is None:
        arguments.rounds = 3 if arguments.quick else 9
    for name in ("threads", "rounds"):
        if getattr(arguments, name) < 1:
            raise Failure(f"--{name} is {getattr(arguments, name)}, must be at least 1")
    if arguments.case and arguments.shape:
        raise Failure("--case and --shape exclude each other")
    arguments.shape = [
        parse_shape(s) for s in arguments.shape or (QUICK_SHAPES if arguments.quick else SHAPES)
    ]
    arguments.worker = arguments.build / "bench" / "peer_logitless"
    arguments.maker = arguments.build / "cli" / "logitless"
    for program in (arguments.worker, arguments.maker):
        if not program.is_file():
            raise Failure(
                f"{program} is missing: build it with `cmake --preset release && cmake --build "
                "--preset release`, or name the build folder with --build"
            )
    return arguments


def torch_versions(pythons):
    """{path: version}"""
    versions = {}
    for python in pythons or [sys.executable]:
        program = "import torch; print(torch.__version__.split('+')[0])"
        try:
            done = subprocess.run([python, "-c", program], capture_output=True, text=True)
        except OSError as e:
            raise Failure(f"cannot start {python}: {e.strerror}") from e
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise Failure(
                f"{python} cannot import torch ({last}); install it with "
                f"`{python} -m pip install -r {HERE / 'requirements.txt'}`"
            )
        version = done.stdout.strip()
        if version in versions.values():
            raise Failure(f"--python {python} has torch {version}, as another one has")
        versions[python] = version
    return versions


def wanted_of(contenders, only):
    for beginning in only:
        if not any(c.key.startswith(beginning) for c in contenders[1:]):
            keys = ", ".join(c.key for c in contenders[1:])
            raise Failure(f"--only is {beginning!r}, must be the beginning of one of: {keys}")
    first, *others = contenders
    return [first] + [c for c in others if not only or c.key.startswith(tuple(only))]


def cases_of(arguments, folder):
    """Yields the files of each case; synthetic ones last until the next is wanted."""
    for case in arguments.case:
        yield [str(Path(file).resolve()) for file in case.split(",")]
    for BT, V, H in [] if arguments.case else arguments.shape:
        file = folder / "case.safetensors"
        command = [arguments.maker, "make", file, "--tokens", BT, "--vocab", V, "--hidden", H]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        if done.returncode != 0:
            raise Failure(f"logitless make: {done.stderr.strip()}")
        yield [str(file)]
        file.unlink()


def draw(python, document, path, folder):
    measured = folder / "document.json"
    measured.write_text(json.dumps(document))
    command = [python, str(HERE / "peer_plot.py"), str(measured), str(path)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise Failure((done.stderr.strip().splitlines() or ["peer_plot.py failed"])[-1])


def compare(arguments, folder):
    versions = torch_versions(arguments.python)
    contenders = wanted_of(contenders_of(versions), arguments.only)
    document = {
        "date": datetime.date.today().isoformat(),
        "torch": versions,
        "rounds": arguments.rounds,
        "cases": [],
    }
    say = terminal_progress(arguments.quiet)
    for files in cases_of(arguments, folder):
        case = Comparison(arguments, folder, say, contenders, files).run()
        document["cases"].append(case)
        document["about"] = case["about"]
        if arguments.json:  # after each case: a long run that breaks off has not been in vain
            arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    say("")
    print(text_of(document), end="")
    if arguments.markdown:
        arguments.markdown.write_text(text_of(document, markdown=True))
    if arguments.plot:
        draw(next(iter(versions)), document, arguments.plot, folder)


def main(argv=None):
    folder = Path(tempfile.mkdtemp(prefix="logitless-peers-"))
    try:
        compare(arguments_of(argv), folder)
    except Failure as e:
        print(f"peers.py: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
