# SPDX-License-Identifier: Apache-2.0
# Sourced by ./demo, ./test and .ci/run: installs what a machine lacks, and says what.

build_packages=(g++ cmake ninja-build pkg-config python3 libcli11-dev libfmt-dev nlohmann-json3-dev
  libgtest-dev libgmock-dev librapidcheck-dev)
mpi_packages=(libopenmpi-dev openmpi-bin)
demo_packages=(python3 python3-venv ca-certificates)
python_packages=(python3 python3-dev python3-venv ca-certificates binutils)
slow_test_packages=(valgrind python3-matplotlib)
arm64_packages=(g++-aarch64-linux-gnu qemu-user googletest)
sanitizer_packages=(clang libclang-rt-dev libomp-dev llvm)

# A heading; bold where a terminal shows it.
say() { if [[ -t 1 ]]; then printf '\n\033[1m== %s\033[0m\n' "$*"; else printf '\n== %s\n' "$*"; fi; }

# need_packages NAME...: returns when all are installed; otherwise installs them with apt, as root
# or through sudo; where neither is possible it lists them and ends the script.
need_packages() {
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    echo "No apt on this machine: going on with what is installed. Debian's names of what is needed:"
    echo "  $*"
    return 0
  fi
  local missing=() package
  for package in "$@"; do
    [[ $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] ||
      missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  local as_root=()
  if ((EUID != 0)); then
    # A password may be asked for only where somebody can type it.
    if command -v sudo >/dev/null && { [[ -t 0 ]] || sudo -n true 2>/dev/null; }; then
      as_root=(sudo)
    else
      echo "Missing packages, and neither root nor sudo to install them with. Please have them" \
        "installed, then run this again:"
      echo "  apt-get install ${missing[*]}"
      exit 1
    fi
  fi
  say "installing with apt: ${missing[*]}"
  "${as_root[@]}" apt-get update -q
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -q -y --no-install-recommends "${missing[@]}"
}
