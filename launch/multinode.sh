#!/usr/bin/env bash
# Train M7C on several nodes: one rank per slot of a hostfile with lines "NAME slots=2".
#   bash launch/multinode.sh HOSTFILE [flags] [arguments of recipes/m7c.py ...]
#       on the first node of the hostfile; starts the others by ssh (with --srun by Slurm)
#   bash launch/multinode.sh HOSTFILE --no_ssh --node_rank K --master_addr ADDRESS [flags] [...]
#       on every node; K counts from 0 in the hostfile's order, ADDRESS is the first node's
# Flags: --master_port PORT (29500), and --restart N, which resumes a run that crashed or hung.
# The repository, the hostfile and --run-dir need the same path on all nodes, and the run folder a
# shared disk. Each node has its own watchdog (docs/guides/multi-node.md); a signal to the first node
# makes all ranks save and exit.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root=$(dirname "$here")

say() { printf 'multinode: %s\n' "$*"; }
die() {
    say "$*" >&2
    exit 2
}

[ $# -gt 0 ] || die "give a hostfile: lines of NAME slots=N"
hostfile=$(realpath -e -- "$1" 2>/dev/null) || die "$1: no such hostfile"
shift
mapfile -t hosts < <(awk 'NF && $1 !~ /^#/ { print $1 }' "$hostfile")
[ ${#hosts[@]} -gt 0 ] || die "$hostfile lists no node: write lines of NAME slots=N"

start=ssh rank='' address='' port=29500 watch=()
while [ $# -gt 0 ]; do
    case $1 in
    --no_ssh | --srun)
        start=${1#--}
        shift
        continue
        ;;
    --node_rank) rank=${2-} ;;
    --master_addr) address=${2-} ;;
    --master_port) port=${2-} ;;
    --restart) watch=(--restart "${2-}") ;;
    *) break ;;
    esac
    [ $# -gt 1 ] || die "$1 needs a value"
    shift 2
done

bash "$here/setup.sh"
export PATH="$root/.venv/bin:$PATH"

if [ "$start" = no_ssh ]; then
    [[ $rank =~ ^[0-9]+$ ]] && [ "$rank" -lt ${#hosts[@]} ] ||
        die "--node_rank ${rank:-is missing}: give 0 to $((${#hosts[@]} - 1)), this node's line in $hostfile"
    [ -n "$address" ] || die "--no_ssh: give --master_addr too, the address of ${hosts[0]}"
    command=(deepspeed --hostfile "$hostfile" --no_ssh --node_rank "$rank" --master_addr "$address"
        --master_port "$port" "$root/recipes/m7c.py" "$@")
    say "node $rank of ${#hosts[@]}: ${command[*]}"
    exec nsa watch "${watch[@]}" -- "${command[@]}"
fi

[ -z "$rank" ] || die "--node_rank $rank: only with --no_ssh; else the hostfile's order decides"
# The address of the interface that reaches the second node. This node's own name often resolves to
# the loopback address.
[ -n "$address" ] || address=$(
    python -I -c '
import socket, sys
family, *_, where = socket.getaddrinfo(sys.argv[1], 9, type=socket.SOCK_DGRAM)[0]
with socket.socket(family, socket.SOCK_DGRAM) as probe:
    probe.connect(where)
    print(probe.getsockname()[0])' "${hosts[1]-${hosts[0]}}" 2>/dev/null
) || die "${hosts[1]-${hosts[0]}} cannot be resolved: correct $hostfile, or give --master_addr"

# Run command $2 on node $1.
on() {
    if [ "$start" = srun ]; then
        srun --nodes=1 --ntasks=1 --nodelist="$1" --input=none bash -c "$2"
    else
        ssh -n -o ServerAliveInterval=15 -o ServerAliveCountMax=4 "$1" "$2"
    fi
}

child=()
interrupted=''
# shellcheck disable=SC2317,SC2329 # called by the trap
forward_signal() {
    interrupted=yes
    kill -TERM "${child[0]}" 2>/dev/null || true
}
# Wait for a child to end. A signal, which the trap has forwarded by then, only interrupts `wait`.
await() {
    local code
    while :; do
        interrupted='' code=0
        wait "$1" || code=$?
        [ -n "$interrupted" ] || return "$code"
    done
}

common=(--master_addr "$address" --master_port "$port" "${watch[@]}" "$@")

trap forward_signal TERM INT HUP
bash "$here/multinode.sh" "$hostfile" --no_ssh --node_rank 0 "${common[@]}" &
child=("$!")
for ((k = 1; k < ${#hosts[@]}; k++)); do
    remote=$(printf '%q ' cd "$PWD") remote+='&& '
    remote+=$(printf '%q ' bash "$here/multinode.sh" "$hostfile" --no_ssh --node_rank "$k" "${common[@]}")
    say "${hosts[k]}: $remote"
    {
        code=0
        on "${hosts[k]}" "$remote" || code=$?
        [ "$code" -ne 0 ] || exit 0
        # Ranks in training notice the loss themselves; ranks still waiting to join do not.
        for ((i = 0; i < 90; i++)); do
            kill -0 "${child[0]}" 2>/dev/null || exit "$code"
            sleep 1
        done
        say "${hosts[k]} ended with exit code $code; ending this node's ranks"
        kill -TERM "${child[0]}" 2>/dev/null || true
        exit "$code"
    } &
    child+=("$!")
done

result=0
for pid in "${child[@]}"; do
    code=0
    await "$pid" || code=$?
    [ "$result" -ne 0 ] || result=$code
done
exit "$result"
