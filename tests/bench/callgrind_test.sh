#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: callgrind_test.sh PROGRAM
# Instructions per flop stay within 15 % of what instructions.txt says: compilers differ by some
# per cent, a spilled accumulator or a loop that is no longer vectorised costs more.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")

if ! command -v valgrind >/dev/null; then
  echo "skipped: valgrind is not installed (./test --all installs it)"
  exit 77
fi
"$here/../../bench/callgrind.sh" "$1" | tee /dev/stderr | awk '
  FILENAME != "-" && !/^#/ && NF { bound[$1 " " $2] = $3; next }
  FILENAME == "-" {
    ++seen
    key = $1 " " $2
    if (!(key in bound)) { print "FAILED: instructions.txt has no line for " key; bad = 1; next }
    ratio = $5 / bound[key]
    if (ratio > 1.15) {
      printf "FAILED: %s: %.4f instructions per flop, expected %.4f\n", key, $5, bound[key]
      bad = 1
    } else if (ratio < 0.85) {
      printf "%s: %.4f is far below %.4f: better; lower its line in instructions.txt\n", key, $5, bound[key]
    }
  }
  END {
    if (seen != 4) { print "FAILED: " seen + 0 " counts, expected 4"; bad = 1 }
    exit bad
  }' "$here/instructions.txt" -
