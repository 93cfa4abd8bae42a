#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# interrupt_test.sh PROGRAM MPIEXEC: Ctrl-C, under mpirun, stops four ranks after the same step and saves it; what is
# resumed has the bits of a run that was never stopped.
set -euo pipefail
program=$1
mpirun=$2
source "$(dirname "${BASH_SOURCE[0]}")/text.sh"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export OMP_NUM_THREADS=1
# mpirun waits so many seconds before it sends SIGTERM, and as many before it sends SIGKILL. It does not
# read what ranks write meanwhile.
export OMPI_MCA_odls_base_sigkill_timeout=5
small_text 9000 >text

endless=("${small[@]}" --steps 1000000 --held-out-every 100 --no-check --split 0,10,10,100,132)
set -m # or the shell would have mpirun ignore SIGINT
"$mpirun" -n 4 "$program" train "${endless[@]}" --checkpoint stopped.safetensors text >/dev/null 2>err &
set +m
for ((i = 0; i < 1200; ++i)); do
  grep "^step 100 " err >/dev/null && break
  sleep 0.1
done
kill -INT $!
if wait $!; then fail "an interrupted run ends with exit status 0"; fi
[[ $(grep -c "^interrupted after step" err) == 1 ]] || {
  tail -5 err
  fail "must say once that it was interrupted"
}
done=$(sed -n 's/^interrupted after step \([0-9]*\) .*/\1/p' err)
more=$((done + 4))
"$mpirun" -n 4 "$program" train "${endless[@]}" --resume stopped.safetensors --stop-after $more \
  --checkpoint rest.safetensors --progress none text >/dev/null
"$mpirun" -n 4 "$program" train "${endless[@]}" --stop-after $more --checkpoint whole.safetensors \
  --progress none text >/dev/null
cmp rest.safetensors whole.safetensors || fail "interrupted after step $done the bits differ"
[[ -z $(find . -name '*.tmp*') ]] || fail "a temporary file is left: $(ls)"
