#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bench/measure.sh OUT [PROGRAM]: the runs behind the tables and plots of docs/performance.md, as JSON
# and SVG in the folder OUT. Half an hour on two cores, on a machine with nothing else to do. A JSON
# that is there already is kept, so an interrupted run goes on where it was; delete what should be
# measured again. LINE_SECONDS (5) is the time for each line, PYTHON one that has matplotlib.
set -euo pipefail

if [[ $# -lt 1 || $1 == -h || $1 == --help ]]; then
  sed -n '3,6s/^# //p' "$0"
  exit $(($# < 1 ? 2 : 0))
fi
here=$(dirname "${BASH_SOURCE[0]}")
out=$1
program=${2:-$here/../build/release/cli/logitless}
seconds=${LINE_SECONDS:-5}
python=${PYTHON:-python3}
mkdir -p "$out"

# measure NAME ARGUMENT...: OUT/NAME.json, complete or not there.
measure() {
  local name=$1
  shift
  if [[ -s $out/$name.json ]]; then
    echo "$name: is there already"
    return
  fi
  echo "$name: logitless bench $*"
  "$program" bench --json --seconds "$seconds" "$@" >"$out/$name.part"
  mv "$out/$name.part" "$out/$name.json"
}

goals=(1024,32000,2048 512,32064,4096 2048,128256,2048 8192,32000,1024 1024,49152,576)
measure shapes --shape "${goals[@]}" --op forward,gradient,gradient-hp,one-pass --cold
measure fp16 --shape 1024,32000,2048 --dtype f16 --op forward,gradient,one-pass --no-unfused
measure fp32 --shape 1024,32000,2048 --dtype f32 --op forward,gradient,one-pass --no-unfused
measure few-tokens --shape 1,128256,2048 --tokens 1,4,16 --op forward --no-unfused --cold
measure threads --shape 1024,32000,2048 --threads 1,2 --op forward,gradient,one-pass --no-unfused
measure all-rows --shape 2048,32000,2048 --op gradient,one-pass --no-unfused
measure half-the-rows --shape 2048,32000,2048 --op gradient,one-pass --zero-grad-rows 0.5 \
  --no-unfused
for gradient in grad_input grad_weight; do
  measure "only-$gradient" --shape 1024,32000,2048 --only "$gradient" \
    --op gradient,gradient-hp,one-pass --no-unfused
done
# Lower levels, where the best one here is not one of them.
best=$(LOGITLESS_ISA='' "$program" info --seconds 0.01 --json | sed -n 's/^  "isa": "\(.*\)",$/\1/p')
for isa in avx512 avx2; do
  [[ $isa == "$best" ]] && continue
  LOGITLESS_ISA=$isa "$program" info --seconds 0.01 >/dev/null 2>&1 || continue
  LOGITLESS_ISA=$isa measure "$isa" --shape 1024,32000,2048 --op forward,gradient,one-pass \
    --no-unfused
done
measure tokens --shape 1024,32000,2048 1024,49152,576 --op forward,gradient,one-pass \
  --tokens 1,4,16,32,64,128,256,512,1024,2048,4096
measure limits --shape 1024,32000,2048 1024,49152,576 --op forward,gradient,one-pass --no-unfused \
  --workspace-limit 10MiB,12MiB,16MiB,24MiB,32MiB,48MiB,64MiB,96MiB,128MiB,192MiB,256MiB,512MiB
# At, one below and one above multiples of every tile (14 and 6 tokens, 32 columns, segments of 256,
# chunks of 2,304), few tokens, and strides that alias in a cache beside ones that do not.
cliffs=()
for BT in 13 14 15 31 32 33 63 64 65 127 128 129 255 256 257 1021 1022 1023 1024; do
  cliffs+=("$BT,32000,2048")
done
for V in 31359 31360 31361 31999 32001 32031 32032 32033 32255 32256 32257; do
  cliffs+=("512,$V,2048")
done
for H in 575 576 577 2040 2047 2048 2049 2056 4088 4096 4104; do cliffs+=("512,32000,$H"); done
measure cliffs --shape "${cliffs[@]}" --op forward,gradient,one-pass --no-unfused

plot() { "$python" "$here/plot.py" "$1" "$out/$1.svg" "$out/$2.json"; }
plot shapes shapes
plot tokens tokens
plot limit limits
plot cliffs cliffs
echo "$out: $(cd "$out" && ls -- *.svg | tr '\n' ' ')"
