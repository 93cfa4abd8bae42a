#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bench/callgrind.sh PROGRAM [ISA...]: instructions per flop of the forward and the memory-saving
# gradient on a small case, counted by valgrind's callgrind. Counts are the same in every run, on a
# busy machine too. Valgrind knows no AVX-512 and hides it from programs: scalar and avx2 only.
#   e.g.  bench/callgrind.sh build/release/cli/logitless avx2
set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help || $# -lt 1 ]]; then
  sed -n '3,6s/^# //p' "$0"
  exit $(($# < 1 ? 2 : 0))
fi
program=$1
shift
isas=("$@")
[[ ${#isas[@]} -gt 0 ]] || isas=(scalar avx2)
command -v valgrind >/dev/null || { echo "callgrind.sh: valgrind is not installed" >&2; exit 2; }

# Whole tiles and pieces of tiles in every dimension; two segments of vocabulary and a piece.
tokens=125 vocab=1001 hidden=513
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
case=$folder/case.safetensors
"$program" make "$case" --tokens "$tokens" --vocab "$vocab" --hidden "$hidden" --seed 1 >/dev/null

# count ISA PLAN ARGUMENT...: instructions inside run(PLAN, ...) alone.
count() {
  local isa=$1 plan=$2 out=$folder/out.$1.$2
  shift 2
  LOGITLESS_ISA=$isa OMP_WAIT_POLICY=passive valgrind --tool=callgrind --quiet \
    --collect-atstart=no --toggle-collect="logitless::*::run(logitless::*::$plan const&*" \
    --callgrind-out-file="$out" "$program" "$@" --threads 1 >"$folder/log" 2>&1 ||
    { cat "$folder/log" >&2; return 1; }
  awk '/^(totals|summary):/ { sum = $2 } END { print sum + 0 }' "$out"
}

for isa in "${isas[@]}"; do
  forward=$(count "$isa" ForwardPlan forward "$case")
  gradient=$(count "$isa" GradientPlan gradient "$case" --mode memory-saving)
  for op in forward gradient; do
    products=$([[ $op == forward ]] && echo 1 || echo 3)
    awk -v isa="$isa" -v op="$op" -v n="${!op}" \
      -v flops=$((2 * products * tokens * vocab * hidden)) 'BEGIN {
        if (n == 0) { print "callgrind.sh: " isa " " op ": nothing was counted" > "/dev/stderr"; exit 1 }
        printf "%s %s %d instructions, %.4f per flop\n", isa, op, n, n / flops }'
  done
done
