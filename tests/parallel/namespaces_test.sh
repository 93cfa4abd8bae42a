#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# namespaces_test.sh PROGRAM MPIRUN: the program's ranks on three hosts that share no memory: network
# namespaces made here, joined by a bridge, TCP between them. Exit status 77: this machine forbids it.
set -euo pipefail
program=$1
mpirun=$2

skip() {
  echo "SKIPPED: $*"
  exit 77
}
((EUID == 0)) || skip "network namespaces need root"
command -v ip >/dev/null || skip "there is no 'ip' (Debian: iproute2)"
command -v unshare >/dev/null || skip "there is no 'unshare' (Debian: util-linux)"
[[ $("$mpirun" --version) =~ "Open MPI"|OpenRTE ]] || skip "how to start ranks elsewhere is written for Open MPI"

id=lt$((BASHPID % 10000)) # names of interfaces are short
hosts=("${id}a" "${id}b" "${id}c")
folder=$(mktemp -d)
cleanup() {
  local host
  for host in "${hosts[@]}"; do ip netns del "$host" 2>/dev/null || true; done
  ip link del "$id" 2>/dev/null || true
  rm -rf "$folder"
}
trap cleanup EXIT

# A network that is unlikely to be anybody's: of the block for documentation.
ip link add "$id" type bridge 2>"$folder/why" || skip "no bridge: $(cat "$folder/why")"
ip addr add 203.0.113.1/24 dev "$id"
ip link set "$id" up
address=2
for host in "${hosts[@]}"; do
  ip netns add "$host" 2>"$folder/why" || skip "no network namespace: $(cat "$folder/why")"
  ip link add "v$host" type veth peer name eth0 netns "$host" 2>"$folder/why" ||
    skip "no pair of interfaces: $(cat "$folder/why")"
  ip link set "v$host" master "$id" up
  ip -n "$host" addr add 203.0.113.$((address++))/24 dev eth0
  ip -n "$host" link set eth0 up
  ip -n "$host" link set lo up
done

# What mpirun takes for ssh: a host is a namespace with a name of its own.
cat >"$folder/rsh" <<'END'
#!/usr/bin/env bash
host=$1
shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"
END
chmod +x "$folder/rsh"

unset OMPI_MCA_rmaps_base_oversubscribe # one rank for each host
"$mpirun" -n 3 --timeout 200 --host "${hosts[0]}:1,${hosts[1]}:1,${hosts[2]}:1" --bind-to none \
  --mca plm rsh --mca plm_rsh_agent "$folder/rsh" --mca oob_tcp_if_include 203.0.113.0/24 \
  --mca btl tcp,self --mca btl_tcp_if_include 203.0.113.0/24 -x OMP_WAIT_POLICY -x OMP_NUM_THREADS \
  -x OMPI_MCA_mpi_yield_when_idle "$program" '--gtest_filter=Mpi.*'
