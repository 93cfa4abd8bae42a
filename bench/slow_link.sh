#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# slow_link.sh PROGRAM RANKS RATE ARGUMENT...: `logitless bench ARGUMENT...` with each rank in a network
# namespace of its own, whose link is slowed down to RATE each way (as tc writes it: 400mbit; "none"
# leaves it alone), then the bytes that left each rank, per step. Needs root, iproute2, util-linux and Open
# MPI. REPEATS in the environment: of the bench, default 9. Everything is undone at the end.
set -euo pipefail
program=$(realpath "$1")
ranks=$2
rate=$3
shift 3

id=ls$((BASHPID % 10000))
folder=$(mktemp -d)
hosts=()
for ((r = 0; r < ranks; ++r)); do hosts+=("$id$r"); done
cleanup() {
  local host
  for host in "${hosts[@]}"; do ip netns del "$host" 2>/dev/null || true; done
  ip link del "$id" 2>/dev/null || true
  rm -rf "$folder"
}
trap cleanup EXIT

ip link add "$id" type bridge
ip addr add 203.0.113.1/24 dev "$id" # a network for documentation, unlikely to be anybody's
ip link set "$id" up
address=2
for host in "${hosts[@]}"; do
  ip netns add "$host"
  ip link add "v$host" type veth peer name eth0 netns "$host"
  ip link set "v$host" master "$id" up
  ip -n "$host" addr add 203.0.113.$((address++))/24 dev eth0
  ip -n "$host" link set eth0 up
  ip -n "$host" link set lo up
  if [[ $rate != none ]]; then
    tc -n "$host" qdisc add dev eth0 root tbf rate "$rate" burst 256kb latency 100ms
    tc qdisc add dev "v$host" root tbf rate "$rate" burst 256kb latency 100ms
  fi
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
bench() {
  mpirun --allow-run-as-root -n "$ranks" --host "$(printf '%s:1,' "${hosts[@]}" | sed 's/,$//')" --bind-to none \
    --mca plm rsh --mca plm_rsh_agent "$folder/rsh" --mca oob_tcp_if_include 203.0.113.0/24 \
    --mca btl tcp,self --mca btl_tcp_if_include 203.0.113.0/24 -x OMP_NUM_THREADS=1 -x OMP_WAIT_POLICY=passive \
    -x OMPI_MCA_mpi_yield_when_idle=1 ${MPIRUN_OPTIONS:-} "$program" bench --threads 1 "$@"
}
sent() { # bytes that left the first rank's host
  ip netns exec "${hosts[0]}" cat /sys/class/net/eth0/statistics/tx_bytes
}

bench "$@" --repeats "${REPEATS:-9}"
# A repetition communicates twice: within the step, and by itself. What else a run sends is the same for
# both lengths.
before=$(sent)
bench "$@" --repeats 2 >/dev/null
few=$(($(sent) - before))
before=$(sent)
bench "$@" --repeats 12 >/dev/null
many=$(($(sent) - before))
echo "bytes that left rank 0 in a step: $(((many - few) / 20)), headers of TCP and IP included"
