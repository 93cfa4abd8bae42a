#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The shared object exports exactly the C functions that its headers declare, which are those of
# exported_symbols.txt, plus three that clients look up without a header; nothing of C++, of the core
# or of the PTA cache. All seven names lead to it.
# Usage: symbols_test.sh TOOLKIT_DIR LIST CXX NM
set -u
LC_ALL=C
export LC_ALL
toolkit=$1
list=$2
cxx=$3
nm=$4
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
failures=0

"$nm" -D --defined-only "$toolkit/lib64/libopapi.so" | awk '$2 != "A" {print $NF}' |
  sed 's/@.*//' | sort -u >"$scratch/exported"
if ! diff "$list" "$scratch/exported" >"$scratch/diff"; then
  echo "FAILED: exported symbols differ (< should be there, > should not):"
  cat "$scratch/diff"
  failures=$((failures + 1))
fi

for header in $(cd "$toolkit/include" && find acl aclnn aclnnop -name '*.h'); do
  echo "#include \"$header\""
done >"$scratch/all.cc"
$cxx -E -P -I"$toolkit/include" "$scratch/all.cc" |
  grep -oE '(^|[^A-Za-z0-9_])(acl|Acl|PTA)[A-Za-z0-9_]* *\(' |
  tr -dc 'A-Za-z0-9_\n' | sort -u >"$scratch/declared"
grep -v HugeMem "$list" >"$scratch/with_header"
if ! diff "$scratch/with_header" "$scratch/declared" >"$scratch/diff"; then
  echo "FAILED: declared functions differ (< should be declared, > should not):"
  cat "$scratch/diff"
  failures=$((failures + 1))
fi

for name in libascendcl libacl_rt libnnopbase libopapi libopapi_nn libopapi_math libcust_opapi; do
  if [ ! "$toolkit/lib64/$name.so" -ef "$toolkit/lib64/libopapi.so" ]; then
    echo "FAILED: $name.so is not the same file"
    failures=$((failures + 1))
  fi
done
echo "$(wc -l <"$scratch/exported") symbols, $failures failures"
[ "$failures" -eq 0 ]
