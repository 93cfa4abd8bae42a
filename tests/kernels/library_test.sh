#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: library_test.sh liblogitless.so
# The shared library exports our namespace only, needs nothing but OpenMP and the C++ runtime, and
# holds less than 1 MiB of static buffers.
set -euo pipefail
library=$1
failed=0
complain() { echo "FAILED: $*"; failed=1; }

# Weak copies of the standard library's own templates are allowed: they are the same everywhere.
foreign=$(nm -DC --defined-only "$library" | cut -d' ' -f2- |
  grep -vE '^[A-Za-z] (typeinfo (name )?for |vtable for )?(logitless::|std::)|^[VWu] ' || true)
[ -z "$foreign" ] || complain "exports $foreign"

needed=$(objdump -p "$library" | awk '$1 == "NEEDED" { print $2 }' |
  grep -vE '^lib(gomp|omp|stdc\+\+|c\+\+|gcc_s|m|c|pthread)[.-]|^libomp|^ld-linux' || true)
[ -z "$needed" ] || complain "needs $needed"

static_bytes=$(size "$library" | awk 'NR == 2 { print $2 + $3 }')
[ "$static_bytes" -lt 1048576 ] || complain "$static_bytes bytes of static data"
echo "static data: $static_bytes bytes"
exit $failed
