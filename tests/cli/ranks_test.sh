#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ranks_test.sh PROGRAM MPIEXEC: the program under mpirun, judged by its own `compare`.
set -euo pipefail
program=$1
mpirun=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
case=$folder/case.safetensors
export OMP_NUM_THREADS=1

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

# expect_refused SENTENCE COMMAND...: exit status not 0, and rank 0 alone says why.
expect_refused() {
  local sentence=$1
  shift
  if "$@" >"$folder/out" 2>"$folder/err"; then fail "not refused: $*"; fi
  [[ $(grep -c "^logitless: $sentence" "$folder/err") == 1 ]] || {
    cat "$folder/err"
    fail "must say once: $sentence"
  }
}

"$program" make "$case" --tokens 45 --vocab 507 --hidden 64 --seed 5 --dtype bf16
one=$("$program" loss "$case" --json | sed -n 's/.*"mean_loss": //p')
for split in balanced padded 0,1,1,507; do
  for strategy in one-pass recompute; do
    "$mpirun" -n 3 "$program" gradient "$case" --split "$split" --chunk-tokens 10 \
      --strategy "$strategy" --out "$folder/gradient.safetensors"
    "$program" compare "$case" --outputs "$folder/gradient.safetensors" >"$folder/judged" || {
      cat "$folder/judged"
      fail "--split $split --strategy $strategy"
    }
  done
  several=$("$mpirun" -n 3 "$program" loss "$case" --split "$split" --json |
    sed -n 's/.*"mean_loss": //p')
  python3 -c "exit(abs(${one%,} - ${several%,}) > 1e-5)" || fail "loss: one rank $one, three $several"
done
"$program" gradient "$case" --split balanced --out "$folder/alone.safetensors" | grep "^ranks  1," >/dev/null
"$program" compare "$case" --outputs "$folder/alone.safetensors" >/dev/null
"$mpirun" -n 2 "$program" forward "$case" --json | grep '"ranks": 2' >/dev/null
"$mpirun" -n 2 "$program" gradient "$case" --json | grep '"strategy": "one_pass"' >/dev/null

for ranks in 2 3; do
  "$mpirun" -n "$ranks" "$program" verify "$case" --split padded --chunk-tokens 10 --json >"$folder/verified.json"
  python3 - "$folder/verified.json" "$ranks" <<'END'
import json, sys
report = json.load(open(sys.argv[1]))
assert report["fine"] and report["complete"] and report["ranks"] == int(sys.argv[2]), report
assert report["one_pass_fits"] and report["recomputing_fits"], report
assert report["chunk_tokens"] == [10, 10], report
judged = {(j["stage"], j["output"]) for j in report["judgements"]}
for strategy in "one pass", "recomputed":
    for output in "logits_max", "sum_exp_logits", "predicted_logits":
        assert (strategy + ", forward", output) in judged, (output, judged)
    assert (strategy + ", loss", "loss") in judged, judged
    for output in "grad_input", "grad_weight":
        assert (strategy + ", gradient", output) in judged, (output, judged)
    assert (strategy, "the same bits on every rank") in judged, judged
END
done
"$program" verify "$case" --split 0,507 | grep "every error is within what is allowed" >/dev/null

# A sparse gradient: ranks keep what one process keeps, and say so together. The cuts leave a rank without rows.
peaked=$folder/peaked.safetensors
sparse=(--grad-tolerance 2^-6 --seed 7)
"$program" make "$peaked" --tokens 45 --vocab 3007 --hidden 64 --seed 5 --dtype bf16
"$program" gradient "$peaked" "${sparse[@]}" --json >"$folder/alone.json"
"$mpirun" -n 3 "$program" gradient "$peaked" "${sparse[@]}" --split 0,1000,1000,3007 --json \
  --out "$folder/sparse.safetensors" >"$folder/three.json"
"$mpirun" -n 3 "$program" gradient "$peaked" --grad-tolerance 2^-6 --seed 8 --json >"$folder/other.json"
python3 - "$folder" <<'END'
import json, sys
alone, three, other = (json.load(open(f"{sys.argv[1]}/{name}.json")) for name in ("alone", "three", "other"))
assert three["ranks"] == 3 and three["strategy"] == "one_pass", three
for key in "grad_tolerance", "seed", "rows", "dense_rows", "elements":
    assert three[key] == alone[key], (key, three, alone)
# The last bits of a merged sum may decide about an element.
assert abs(three["kept"] - alone["kept"]) <= 3 and 1000 < three["kept"] < three["elements"] / 10, (three, alone)
assert other["kept"] != three["kept"] and other["rows"] == three["rows"], other
END
"$program" compare "$peaked" --outputs "$folder/sparse.safetensors" >"$folder/judged"
grep "its gradients are sparse (grad_tolerance 2^-6)" "$folder/judged" >/dev/null
"$mpirun" -n 2 "$program" gradient "$peaked" "${sparse[@]}" >"$folder/text"
grep "sparse gradient, grad_tolerance 2^-6, seed 7" "$folder/text" >/dev/null
grep "^kept .* % of grad_logits; .* of 45 rows dense" "$folder/text" >/dev/null

"$program" verify "$peaked" "${sparse[@]}" --seeds 24 --json >"$folder/alone.json"
"$mpirun" -n 3 "$program" verify "$peaked" "${sparse[@]}" --seeds 24 --split 0,1000,1000,3007 --json >"$folder/three.json"
python3 - "$folder" <<'END'
import json, sys
alone, three = (json.load(open(f"{sys.argv[1]}/{name}.json")) for name in ("alone", "three"))
assert alone["fine"] and three["fine"], (alone, three)
assert three["ranks"] == 3 and three["split"] == [[0, 1000], [1000, 1000], [1000, 3007]], three
for key in "rows", "dense_rows", "elements", "complete", "tokens_checked", "certain_rows", "seeds", "fixed_rows", "bias_rows":
    assert three[key] == alone[key], (key, three, alone)
judged = lambda report: [(j["stage"], j["output"]) for j in report["judgements"]]
assert judged(three) == judged(alone) + [("every step", "the same bits on every rank")], judged(three)
# The same elements of the same seed: errors differ in float's last bits alone, or by an element.
for name in "grad_input", "grad_weight":
    assert abs(three[name]["all"] - alone[name]["all"]) < 0.02 * alone[name]["all"], (three, alone)
END
"$mpirun" -n 2 "$program" verify "$peaked" "${sparse[@]}" --seeds 0 >"$folder/text"
grep "2 ranks of 1 thread" "$folder/text" >/dev/null
grep "every error is within what is allowed" "$folder/text" >/dev/null
expect_refused "grad_tolerance is 0.015625, must be 0 with the strategy recompute" \
  "$mpirun" -n 2 "$program" gradient "$peaked" "${sparse[@]}" --strategy recompute
expect_refused "workspace_limit_bytes is 1000, the least" \
  "$mpirun" -n 2 "$program" verify "$peaked" "${sparse[@]}" --workspace-limit 1000
expect_refused "--grad-tolerance is 0, that of exact gradients" \
  "$program" verify "$peaked" --split balanced --grad-tolerance 0

"$mpirun" -n 3 "$program" bench --shape 64,507,64 --split padded --repeats 5 --json >"$folder/bench.json"
python3 - "$folder/bench.json" <<'END'
import json, sys
line, = json.load(open(sys.argv[1]))["cases"]
assert line["ranks"] == 3 and line["split"] == [[0, 256], [256, 507], [507, 507]], line
assert line["repeats"] == 5 and 0 <= line["hidden"] <= 1, line
for key in "median_seconds", "computation_seconds", "communication_seconds":
    assert line[key] > 0, line
# The agreement, a header, 12 bytes for each token; every row of grad_input once, in fp32.
assert line["strategy"] == "one_pass" and line["chunk_tokens"] == 64, line
assert line["gathered_bytes"] == 512 + 64 + 12 * 64 and line["summed_bytes"] == 4 * 64 * 64, line
END
"$mpirun" -n 3 "$program" bench --shape 64,507,64 --strategy recompute --repeats 5 --json >"$folder/bench.json"
python3 - "$folder/bench.json" <<'END'
import json, sys
line, = json.load(open(sys.argv[1]))["cases"]
assert line["strategy"] == "recompute", line
assert line["gathered_bytes"] == 512 + 512 + 12 * 64 and line["summed_bytes"] == 4 * 64 * 64, line
END
"$mpirun" -n 2 "$program" bench --shape 64,507,64 --repeats 5 | grep communicating >/dev/null
"$mpirun" -n 3 "$program" bench --shape 45,3000,64 --grad-tolerance 2^-6 --seed 4 --repeats 5 --json >"$folder/bench.json"
"$program" bench --shape 45,3000,64 --grad-tolerance 2^-6 --seed 4 --repeats 5 --json >"$folder/alone.json"
python3 - "$folder" <<'END'
import json, sys
(line,), (alone,) = (json.load(open(f"{sys.argv[1]}/{name}.json"))["cases"] for name in ("bench", "alone"))
assert line["strategy"] == "one_pass" and line["grad_tolerance"] == alone["grad_tolerance"] == 2**-6, line
sparse, of_one = line["sparse"], alone["sparse"]
for key in "seed", "rows", "dense_rows", "elements":
    assert sparse[key] == of_one[key], (key, sparse, of_one)
assert abs(sparse["kept"] - of_one["kept"]) <= 3 and 0 < sparse["kept_share"] < 0.2, (sparse, of_one)
for key in "forward_median_seconds", "exact_median_seconds", "times_forward", "times_exact":
    assert sparse[key] > 0, (key, sparse)
assert line["computation_seconds"] > 0 and line["gathered_bytes"] > 45 * (28 + 4) and 0 <= line["hidden"] <= 1, line
END
"$mpirun" -n 2 "$program" bench --shape 45,3000,64 --op sparse --grad-tolerance 0.02 --repeats 5 >"$folder/text"
grep "loss and both gradients, sparse" "$folder/text" >/dev/null
grep "/ forward .* / exact" "$folder/text" >/dev/null
expect_refused "--op sparse takes --grad-tolerance EPS" "$program" bench --split balanced --op sparse
expect_refused "--op step is for one rank" "$program" bench --split balanced --op step
expect_refused "grad_tolerance is 0.015625, must be 0 with the strategy recompute" \
  "$mpirun" -n 2 "$program" bench --shape 45,3000,64 --grad-tolerance 2^-6 --strategy recompute

expect_refused "--strategy is 'two', must be automatic, one-pass or recompute" \
  "$program" gradient "$case" --split balanced --strategy two
expect_refused "--shards is for one rank: not with mpirun or --split" \
  "$program" verify "$case" --split balanced --shards 2
expect_refused "--split is '0,10', has 2 numbers, 3 ranks need 4" \
  "$mpirun" -n 3 "$program" gradient "$case" --split 0,10
expect_refused "$folder/none: " "$mpirun" -n 3 "$program" gradient "$folder/none"
"$program" make "$folder/part.safetensors" --tokens 9 --vocab 50 --hidden 8 --vocab-start 100 --masked 1
expect_refused 'target\[0\] is [0-9]*, no rank has it: the case.s vocabulary is \[100, 150)' \
  "$mpirun" -n 2 "$program" loss "$folder/part.safetensors"
expect_refused "workspace_limit_bytes is 1000, the least" \
  "$mpirun" -n 2 "$program" gradient "$case" --workspace-limit 1000
expect_refused "--shards is for one rank: not with mpirun or --split" \
  "$program" gradient "$case" --split balanced --shards 2
# MPI is neither linked nor loaded, but by ranks.
loads_mpi() { "$@" 2>&1 | grep 'libmpi\.so' >/dev/null; }
traced=(env LD_DEBUG=files "$program" gradient "$case")
if loads_mpi "${traced[@]}"; then fail "MPI is loaded without mpirun"; fi
loads_mpi "$mpirun" -n 2 "${traced[@]}" || fail "this test would not see MPI loaded"
