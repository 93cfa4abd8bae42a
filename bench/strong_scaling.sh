#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# strong_scaling.sh PROGRAM [ARGUMENT...]: a step on 2 ranks of one thread and on 1 rank of two threads, by
# turns, as `logitless bench` times it (default --shape 1024,32000,2048); medians of all turns, and the ratio.
# TURNS in the environment: default 7. One line per strategy.
set -euo pipefail
program=$(realpath "$1")
shift
(($# > 0)) || set -- --shape 1024,32000,2048
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_WAIT_POLICY=passive

for strategy in one-pass recompute; do
  for ((turn = 0; turn < ${TURNS:-7}; ++turn)); do
    mpirun --allow-run-as-root -n 2 --bind-to core "$program" bench "$@" --strategy $strategy --threads 1 \
      --repeats 5 --json >"$folder/$strategy.two.$turn"
    "$program" bench "$@" --split balanced --strategy $strategy --threads 2 --repeats 5 --json \
      >"$folder/$strategy.one.$turn"
  done
done
python3 - "$folder" <<'END'
import glob, json, statistics, sys
for strategy in "one-pass", "recompute":
    times = {}
    for ranks in "one", "two":
        lines = [json.load(open(f))["cases"][0] for f in glob.glob(f"{sys.argv[1]}/{strategy}.{ranks}.*")]
        times[ranks] = sorted(line["median_seconds"] for line in lines)
    one, two = (statistics.median(times[r]) for r in ("one", "two"))
    spread = ", ".join(f"{r} {1e3 * t[0]:.1f} to {1e3 * t[-1]:.1f} ms" for r, t in times.items())
    print(f"{strategy}: 1 rank x 2 threads {1e3 * one:.1f} ms, 2 ranks x 1 thread {1e3 * two:.1f} ms, "
          f"ratio {one / two:.3f} ({spread})")
END
