#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A client that knows nothing but set_env.sh: source it, compile, run, from sh and from bash.
# Usage: set_env_test.sh TOOLKIT_DIR SOURCE CXX [FLAGS...]
set -u
toolkit=$1
source=$2
cxx=$3
shift 3
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
failures=0

cat >"$scratch/client.sh" <<'END'
set -eu
toolkit=$1; source=$2; cxx=$3; out=$4
shift 4
cd /
. "$toolkit/set_env.sh"
[ -n "$ASCEND_HOME_PATH" ]
[ "$ASCEND_HOME_PATH" = "$ASCEND_TOOLKIT_HOME" ]
[ -d "$ASCEND_HOME_PATH/include/aclnnop" ]
case ":$LD_LIBRARY_PATH:" in
  *":$ASCEND_HOME_PATH/lib64:"*) ;;
  *) echo "no lib64 in LD_LIBRARY_PATH"; exit 1 ;;
esac
INC=$ASCEND_HOME_PATH/include
LIB=$ASCEND_HOME_PATH/lib64
$cxx -std=c++11 "$@" "$source" -I"$INC" -I"$INC/aclnnop" -I"$INC/aclnn" -L"$LIB" \
  -lopapi_math -lopapi_nn -lascendcl -lnnopbase -o "$out"
"$out"
END

for shell in sh bash; do
  command -v $shell >/dev/null 2>&1 || continue
  # Without and with a library path of the client's own, which must survive.
  for before in "" /somewhere/else; do
    if ! env -u LD_LIBRARY_PATH ${before:+LD_LIBRARY_PATH=$before} $shell "$scratch/client.sh" \
      "$toolkit" "$source" "$cxx" "$scratch/client" "$@" >"$scratch/log" 2>&1; then
      echo "FAILED with $shell, LD_LIBRARY_PATH=$before"
      cat "$scratch/log"
      failures=$((failures + 1))
    fi
  done
done
if ! env LD_LIBRARY_PATH=/somewhere/else sh -c '. "$1/set_env.sh"; case ":$LD_LIBRARY_PATH:" in
  *:/somewhere/else:*) exit 0 ;; *) exit 1 ;; esac' sh "$toolkit"; then
  echo "FAILED: set_env.sh lost LD_LIBRARY_PATH"
  failures=$((failures + 1))
fi

# The folder may be moved (bash tells a sourced file where it is; sh does not).
if command -v bash >/dev/null 2>&1; then
  mkdir "$scratch/moved here"
  cp -R "$toolkit/." "$scratch/moved here/"
  if ! env -u LD_LIBRARY_PATH bash "$scratch/client.sh" "$scratch/moved here" "$source" "$cxx" \
    "$scratch/client" "$@" >"$scratch/log" 2>&1; then
    echo "FAILED from a moved folder"
    cat "$scratch/log"
    failures=$((failures + 1))
  fi
fi
echo "$failures failures"
[ "$failures" -eq 0 ]
