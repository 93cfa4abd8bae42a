#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# program_test.sh PROGRAM: logitless_train_lm on one rank, and what it says of bad input.
set -euo pipefail
program=$1
source "$(dirname "${BASH_SOURCE[0]}")/text.sh"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export OMP_NUM_THREADS=1
small_text 9000 >text

# expect_refused STATUS SENTENCE ARGUMENT...: that exit status, and one line that says why.
expect_refused() {
  local status=$1 sentence=$2 got=0
  shift 2
  "$program" "$@" >out 2>err || got=$?
  [[ $got == "$status" ]] || fail "exit status $got, must be $status: $*"
  [[ $(grep -c "^logitless_train_lm: .*$sentence" err) == 1 ]] || {
    cat err
    fail "must say once: $sentence"
  }
}

"$program" train "${small[@]}" --steps 60 --record one.json --checkpoint one.safetensors text 2>err | tee out
grep "of 60  loss .* held out .* words/s, .*iB" err >/dev/null || fail "no progress"
grep "gradients within" out >/dev/null || fail "the first step was not checked"
grep "^after 60 steps: held-out loss" out >/dev/null || fail "no result"
"$program" train "${small[@]}" --steps 60 --record two.json --checkpoint two.safetensors --progress none text \
  >/dev/null 2>err
[[ ! -s err ]] || fail "--progress none is not silent"
cmp one.safetensors two.safetensors
"$program" compare one.json two.json --picture losses.svg
grep "</svg>" losses.svg >/dev/null || fail "no picture"
"$program" train "${small[@]}" --steps 60 --seed 2 --no-check --checkpoint two.safetensors text >out 2>err
if cmp -s one.safetensors two.safetensors; then fail "--seed is ignored"; fi
if grep "float64" out; then fail "--no-check is ignored"; fi
# A run of its own that has learned nothing is no success.
"$program" train "${small[@]}" --steps 2 --record few.json --progress none text >/dev/null
got=0
"$program" compare few.json few.json >out || got=$?
[[ $got == 1 ]] || fail "compare of untrained runs: exit status $got"
grep "^FAILED: held-out loss below" out >/dev/null || fail "compare does not say what failed"

# Resumed: after a stop, at every save, and when there is nothing left to do.
"$program" train "${small[@]}" --steps 60 --save-every 7 --stop-after 20 --checkpoint part.safetensors text \
  >/dev/null 2>&1
"$program" train "${small[@]}" --steps 60 --resume part.safetensors --checkpoint rest.safetensors text \
  >out 2>/dev/null
grep "going on after step 20" out >/dev/null || fail "does not go on"
cmp one.safetensors rest.safetensors
"$program" train "${small[@]}" --steps 60 --resume rest.safetensors --checkpoint rest.safetensors text |
  grep "^after 60 steps" >/dev/null

# A sparse gradient: another run, the same again, and resumed.
sparse=("${small[@]}" --steps 30 --grad-tolerance 0.25)
"$program" train "${sparse[@]}" --checkpoint sparse.safetensors --progress none text >out
grep "gradients are sparse" out >/dev/null || fail "the first step does not say that gradients are sparse"
grep "^sparse gradients: .* % of grad_logits kept" out >/dev/null || fail "does not say what was kept"
"$program" train "${sparse[@]}" --stop-after 13 --checkpoint part.safetensors --progress none text >/dev/null
"$program" train "${sparse[@]}" --resume part.safetensors --checkpoint rest.safetensors --progress none text >/dev/null
cmp sparse.safetensors rest.safetensors || fail "sparse gradients differ in a resumed run"

expect_refused 2 "none: cannot be opened" train "${small[@]}" none
expect_refused 2 "texts is required" train
expect_refused 2 "--batch is 0, must be in \[1, 9350\], the words to train on" train --batch 0 text
expect_refused 2 "--steps" train --steps many text
expect_refused 2 "--split is '0,10', must rise from 0 to V = " train "${small[@]}" --split 0,10 text
expect_refused 2 "--grad-tolerance is 0.75, must be 0 (exact) or in" train "${small[@]}" --grad-tolerance 0.75 text
expect_refused 2 "--progress is 'loud'" train "${small[@]}" --progress loud text
expect_refused 2 "--record is none/r.json, and in none no file can be written" \
  train "${small[@]}" --record none/r.json text
small_text 3000 >short
expect_refused 2 "the text has 3250 words, must have at least 3801" train "${small[@]}" short
head -c 20000 one.safetensors >broken
expect_refused 2 "broken: " train "${small[@]}" --steps 60 --resume broken text
expect_refused 2 "one.safetensors: was made with --steps 60, this run has 61" \
  train "${small[@]}" --steps 61 --resume one.safetensors text
expect_refused 2 "one.safetensors: was made with another text" \
  train "${small[@]}" --steps 60 --resume one.safetensors text text
expect_refused 2 "text: is no record of a run" compare text one.json
expect_refused 2 "the runs differ: --steps is 2 and 60" compare few.json one.json
