#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ranks_test.sh PROGRAM MPIEXEC [no_]memory_limits: logitless_train_lm on four ranks learns what it learns on one.
set -euo pipefail
program=$1
mpirun=$2
limits=$3
source "$(dirname "${BASH_SOURCE[0]}")/text.sh"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export OMP_NUM_THREADS=1
small_text 9000 >text

"$mpirun" -n 4 "$program" train "${small[@]}" --steps 60 --split 0,10,10,100,132 --record four.json \
  --checkpoint four.safetensors text 2>err | tee out
grep "4, with 10 + 0 + 90 + 32 rows" out >/dev/null || fail "the cut is not the one asked for"
[[ $(grep -c "^step 50 of 60 " err) == 1 ]] || fail "one rank alone must show the progress"
"$program" train "${small[@]}" --steps 60 --record one.json --checkpoint one.safetensors --progress none text \
  >/dev/null
"$program" compare four.json one.json

# An error is said once, whichever ranks have it.
if "$mpirun" -n 3 "$program" train "${small[@]}" none >out 2>err; then fail "a missing text is taken"; fi
[[ $(grep -c "^logitless_train_lm: none: cannot be opened" err) == 1 ]] || {
  cat err
  fail "the error must stand once"
}

# A sparse gradient keeps on three ranks what it keeps on one; a run that goes on has the bits of one that did not stop.
sparse=("${small[@]}" --steps 60 --grad-tolerance 0.125 --progress none)
"$program" train "${sparse[@]}" --record one.json text >one
three=("$mpirun" -n 3 "$program" train "${sparse[@]}" --split 0,10,100,132)
"${three[@]}" --record three.json --checkpoint three.safetensors text >three
"$program" compare three.json one.json
kept() { sed -n 's/^sparse gradients: \([0-9.]*\) % of grad_logits kept, beside \([0-9.]*\) % of the words exact$/\1 \2/p' "$1"; }
python3 - $(kept one) $(kept three) <<'END' || fail "kept on one rank $(kept one), on three $(kept three)"
import sys
one, dense_one, three, dense_three = map(float, sys.argv[1:])
# The two models part by rounding, and with them what is kept.
sys.exit(not (0 < one < 20 and abs(one - three) < 0.02 * one and abs(dense_one - dense_three) < 1))
END
"${three[@]}" --stop-after 23 --checkpoint part.safetensors text >/dev/null
"${three[@]}" --resume part.safetensors --checkpoint rest.safetensors text >/dev/null
cmp three.safetensors rest.safetensors || fail "sparse gradients on ranks differ in a resumed run"

# 64 TiB for the hidden layer: nobody has that, and the limit sees to it where memory is promised to anyone who asks.
if [[ $limits == memory_limits ]]; then
  status=0
  (
    ulimit -v $((8 << 20))
    "$mpirun" -n 3 "$program" train --context 64 --embedding 4096 --hidden 16384 --batch 16 text >out 2>err
  ) || status=$?
  [[ $status == 2 && $(grep -c "^logitless_train_lm: .*not enough memory for the model" err) == 1 ]] || {
    cat err
    fail "exit status $status: three ranks without memory must say so once"
  }
else
  echo "not tested here: ranks without memory, since a sanitizer cannot start under a limit"
fi
