#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: assembly_test.sh OBJECT...   (the objects of the core library)
# Fails when the k loop of a register tile holds anything but the expected multiply-adds and loads,
# or touches the stack; and when a kernel object defines a weak symbol, whose copy, compiled for
# AVX-512, the linker might keep for everyone.
set -euo pipefail

failed=0
complain() { echo "FAILED: $*"; failed=1; }

# instructions of one function, demangled
body() { # object, pattern of the name
  objdump -d -C --no-show-raw-insn "$1" |
    awk -v name="$2" '/^[0-9a-f]+ </ { inside = index($0, name) > 0 } inside'
}

# check_tile OBJECT NAME INSTRUCTION COUNT BROADCASTS [epilogue]
# epilogue: behind the loop the function may use the stack and broadcast what it likes.
check_tile() {
  local text count stack
  text=$(body "$1" "$2")
  [ -n "$text" ] || { complain "$2 is not a function of its own in $(basename "$1")"; return; }
  # The loop is the only place with multiply-adds, and appears once: fully unrolled over the tile.
  count=$(grep -cE "$3" <<<"$text" || true)
  [ "$count" = "$4" ] || complain "$2: $count x $3, expected $4"
  if [ "${6:-}" = epilogue ]; then
    echo "ok: $2: $4 multiply-adds"
    return
  fi
  stack=$(grep -E '%[er]sp' <<<"$text" | grep -E "$3|vmov|vbroadcast" | head -3 || true)
  [ -z "$stack" ] || complain "$2 touches the stack: $stack"
  count=$(grep -cE 'vbroadcastss' <<<"$text" || true)
  [ "$count" = "$5" ] || complain "$2: $count broadcasts, expected $5"
  [ $failed = 1 ] || echo "ok: $2: $4 multiply-adds, $5 broadcasts, no stack"
}

checked=0
for object in "$@"; do
  case "$object" in
    *kernels_*) ;;
    *) continue ;;
  esac
  checked=$((checked + 1))
  weak=$(nm -C "$object" | grep -E ' [WVu] ' || true)
  [ -z "$weak" ] || complain "$(basename "$object") defines weak symbols: $weak"
  case "$object" in
    *kernels_avx512bf16*)
      check_tile "$object" 'gemm_tile<(anonymous namespace)::Avx512Bf16Dot, 14>(' vdpbf16ps 28 14
      check_tile "$object" \
        'packing_tile<(anonymous namespace)::Avx512Bf16Dot, 14, (logitless::cpu::PackSource)2>(' \
        vdpbf16ps 28 14
      check_tile "$object" 'product_tile<(anonymous namespace)::Avx512Bf16Dot, 11>(' vdpbf16ps 22 11 \
        epilogue
      ;;
    *kernels_avx512.*)
      check_tile "$object" 'gemm_tile<(anonymous namespace)::Avx512F32, 14>(' 'vfmadd[0-9]+ps' 28 14
      ;;
    *kernels_avx2*)
      check_tile "$object" 'gemm_tile<(anonymous namespace)::Avx2F32, 6>(' 'vfmadd[0-9]+ps' 12 6
      ;;
  esac
done
[ "$checked" -ge 4 ] || complain "only $checked kernel objects among the arguments"
exit $failed
