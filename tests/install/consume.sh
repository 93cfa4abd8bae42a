#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# consume.sh CASE: one use of the installed package; called by CTest, which sets
#   SOURCE, BUILD  the project's source and build folders     LIBDIR  lib or lib/<triplet>
#   SCRATCH        a folder to work in                        CMAKE, CC, CXX
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
prefix=$SCRATCH/prefix
work=$SCRATCH/work/$1
rm -rf "$work"
mkdir -p "$work"

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

# Installed to one place and moved to another: nothing in the package may remember the first.
prefix() {
  rm -rf "$prefix"
  "$CMAKE" --install "$BUILD" --prefix "$work/installed_here_first" >"$work/log"
  mv "$work/installed_here_first" "$prefix"
  if grep -rIl installed_here_first "$prefix"; then fail "files above name the install prefix"; fi
}

# build_project DIR: configures and builds DIR/CMakeLists.txt, which makes `consumer`; runs it.
build_project() {
  "$CMAKE" -S "$1" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_CXX_COMPILER="$CXX" -DCMAKE_C_COMPILER="$CC" "${@:2}"
  "$CMAKE" --build "$work/build" --target consumer
  "$work/build/consumer"
}

find_package() { build_project "$here/find_package" -DCMAKE_PREFIX_PATH="$prefix"; }

add_subdirectory() { build_project "$here/add_subdirectory" -DLOGITLESS_SOURCE="$SOURCE"; }

flags() { PKG_CONFIG_PATH=$prefix/$LIBDIR/pkgconfig pkg-config "$@" logitless; }

# compile_and_run FILE: the one line that a pkg-config user types.
compile_and_run() {
  # Flags are words of the compiler's command line, hence unquoted.
  "$CXX" -std=c++20 -Wall -Wextra -Werror -o "$work/consumer" "$1" $(flags --cflags --libs) \
    -Wl,-rpath,"$(flags --variable=libdir)"
  "$work/consumer"
}

pkg_config() {
  compile_and_run "$here/consumer.cc"
  local version
  version=$(sed -n 's/#define LOGITLESS_VERSION "\(.*\)"/\1/p' "$SOURCE/include/logitless/version.h")
  [[ $(flags --modversion) == "$version" ]] || fail "logitless.pc says $(flags --modversion)"
}

# The README's first C++ block is a whole program: it must run and print what its last comment says.
readme_example() {
  awk '/^```cpp$/ {inside = 1; next} /^```$/ {if (inside) exit} inside' "$SOURCE/README.md" \
    >"$work/readme.cc"
  [[ -s $work/readme.cc ]] || fail "no C++ block in README.md"
  local printed expected
  printed=$(compile_and_run "$work/readme.cc")
  expected=$(sed -n 's|.*std::printf.*// ||p' "$work/readme.cc")
  [[ -n $expected && $printed == "$expected" ]] || fail "prints '$printed', README says '$expected'"
}

# The example under mpirun, from the installed package; and the README shows what it runs.
mpi() {
  build_project "$here/mpi" -DCMAKE_PREFIX_PATH="$prefix" -DLOGITLESS_SOURCE="$SOURCE" >"$work/log" ||
    fail "$(cat "$work/log")"
  "$MPIEXEC" -n 3 "$work/build/consumer"
  local line
  while read -r line; do
    grep -qF -- "$line" "$SOURCE/examples/mpi/vocab_parallel.cc" ||
      fail "README.md has a line that examples/mpi/vocab_parallel.cc has not: $line"
  done < <(awk '/^```cpp$/ {++block; next} /^```$/ {if (block == 2) exit} block == 2' "$SOURCE/README.md")
  # Without MPI the package is as before, and the library of it neither links MPI nor says so.
  if readelf -d "$prefix/$LIBDIR/liblogitless.so" | grep -i 'NEEDED.*mpi'; then
    fail "liblogitless.so links MPI"
  fi
}

mpi_symbols() {
  local library=$prefix/$LIBDIR/liblogitless_mpi.so foreign
  foreign=$(nm -D --defined-only "$library" | awk '$2 ~ /[TDBR]/ {print $3}' | c++filt |
    grep -v '^logitless::v0::\|^logitless_mpi_v0_open_world$' || true)
  [[ -z $foreign ]] || fail "not ours, yet exported: $foreign"
  if readelf -d "$library" | grep 'NEEDED.*liblogitless\.so'; then
    fail "liblogitless_mpi.so needs liblogitless.so: a program that has the library inside would load a second one"
  fi
}

# Nothing but the public API may be visible, and the file must be found by its SONAME.
exported_symbols() {
  local library=$prefix/$LIBDIR/liblogitless.so foreign soname
  soname=$(readelf -d "$library" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p')
  [[ $soname == liblogitless.so.0 ]] || fail "SONAME is '$soname', must be liblogitless.so.0"
  [[ -e $prefix/$LIBDIR/$soname ]] || fail "$soname is not installed"
  # Weak symbols are the C++ runtime's templates, instantiated here as in every C++ library.
  foreign=$(nm -D --defined-only "$library" | awk '$2 ~ /[TDBR]/ {print $3}' | c++filt |
    grep -v '^logitless::v0::' || true)
  [[ -z $foreign ]] || fail "not ours, yet exported: $foreign"
}

program() {
  local logitless=$prefix/bin/logitless
  "$logitless" --help >/dev/null
  "$logitless" make "$work/case.safetensors" --tokens 33 --vocab 1000 --hidden 64 --dtype bf16 --seed 1
  "$logitless" verify "$work/case.safetensors" --shards 3
}

# A client that knows only set_env.sh, compiled as C++11: all three operators, both modes, types and
# index types against float64. The first with the documented link line, the second linking nothing.
toolkit_client() {
  (
    unset ASCEND_HOME_PATH ASCEND_TOOLKIT_HOME LD_LIBRARY_PATH
    set +u
    source "$prefix/ascend/set_env.sh"
    set -u
    [[ $ASCEND_HOME_PATH == "$prefix/ascend" ]] || fail "ASCEND_HOME_PATH is '$ASCEND_HOME_PATH'"
    [[ $ASCEND_TOOLKIT_HOME == "$ASCEND_HOME_PATH" ]] || fail "ASCEND_TOOLKIT_HOME differs"
    local include=$ASCEND_HOME_PATH/include
    "$CXX" -std=c++11 -Wall -Wextra -Wpedantic -Werror -o "$work/client" \
      "$SOURCE/tests/ascend/clients/matrix_client.cc" -I"$include" -I"$include/aclnn" \
      -I"$include/aclnnop" -L"$ASCEND_HOME_PATH/lib64" "$@"
    "$work/client" | tee "$work/printed"
    [[ $(grep -c '^[fb][pf]16 int.*within' "$work/printed") == 16 ]] || fail "not 16 combinations"
  )
}

toolkit_folder() { toolkit_client -lopapi_math -lopapi_nn -lascendcl -lnnopbase; }

toolkit_dlopen() {
  toolkit_client -DCLIENT_DLOPEN -ldl
  if readelf -d "$work/client" | grep -E 'NEEDED.*(ascend|acl|opapi|nnopbase)'; then
    fail "the client links what it should look up"
  fi
}

# Every block of misuse.cc compiles with the right half and must not with the wrong one; were only
# the wrong half tried, a typing error would pass for a rejected misuse.
misuse() {
  local case
  for case in $(grep -o 'MISUSE_[A-Z_]*' "$here/misuse.cc" | sort -u); do
    local compile=("$CXX" -std=c++20 -fsyntax-only -Werror=unused-result $(flags --cflags) "$here/misuse.cc")
    "${compile[@]}" "-D$case=0" || fail "$case: the right use does not compile"
    if "${compile[@]}" "-D$case=1" 2>"$work/$case"; then fail "$case: the misuse compiles"; fi
    echo "$case: rejected"
  done
}

"$1"
