#!/usr/bin/env bash
# Trains M7C on several machines: a rank for each slot of a hostfile, lines of "NAME slots=2".
#   bash launch/multinode.sh HOSTFILE [flags] [arguments of recipes/m7c.py ...]
#       on the first machine of the hostfile; it starts the others by ssh, with --srun by Slurm
#   bash launch/multinode.sh HOSTFILE --no_ssh --node_rank K --master_addr ADDRESS [flags] [...]
#       on every machine; K counts from 0 in the hostfile's order, ADDRESS is the first one's
# Flags: --master_port PORT (29500), and --restart N, which lets a run that crashed go on.
# The repository, the hostfile and --run-dir have the same path everywhere, the last on a disk that
# all share. Each machine has a watchdog of its own (docs/launching.md); a signal to the first one
# has all ranks save and end.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root=$(dirname "$here")

say() { printf 'multinode: %s\n' "$*"; }
die() {
    say "$*" >&2
    exit 2
}

[ $# -gt 0 ] || die "give a hostfile: lines of NAME slots=N"
hostfile=$(realpath -e -- "$1" 2>/dev/null) || die "$1: there is no such hostfile"
shift
mapfile -t hosts < <(awk 'NF && $1 !~ /^#/ { print $1 }' "$hostfile")
[ ${#hosts[@]} -gt 0 ] || die "$hostfile names no machine: write lines of NAME slots=N"

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
    [ $# -gt 1 ] || die "$1 lacks its value"
    shift 2
done

bash "$here/setup.sh"
export PATH="$root/.venv/bin:$PATH"

if [ "$start" = no_ssh ]; then
    [[ $rank =~ ^[0-9]+$ ]] && [ "$rank" -lt ${#hosts[@]} ] ||
        die "--node_rank ${rank:-is missing}: give 0 to $((${#hosts[@]} - 1)), this machine's line in $hostfile"
    [ -n "$address" ] || die "--no_ssh: give --master_addr too, the address of ${hosts[0]}"
    command=(deepspeed --hostfile "$hostfile" --no_ssh --node_rank "$rank" --master_addr "$address"
        --master_port "$port" "$root/recipes/m7c.py" "$@")
    say "machine $rank of ${#hosts[@]}: ${command[*]}"
    exec nsa watch "${watch[@]}" -- "${command[@]}"
fi

[ -z "$rank" ] || die "--node_rank $rank: only with --no_ssh; else the hostfile's order decides"
# The address by which the second machine is reached: a name of one's own is often the loopback's.
[ -n "$address" ] || address=$(
    python -I -c '
import socket, sys
family, *_, where = socket.getaddrinfo(sys.argv[1], 9, type=socket.SOCK_DGRAM)[0]
with socket.socket(family, socket.SOCK_DGRAM) as probe:
    probe.connect(where)
    print(probe.getsockname()[0])' "${hosts[1]-${hosts[0]}}" 2>/dev/null
) || die "${hosts[1]-${hosts[0]}}: this name in $hostfile cannot be resolved; or give --master_addr"

# $1: a machine, $2: what it shall run
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
pass_on() {
    interrupted=yes
    kill -TERM "${child[0]}" 2>/dev/null || true
}
# Wait for a child to end; a signal, which only interrupts waiting, is passed on by then.
await() {
    local code
    while :; do
        interrupted='' code=0
        wait "$1" || code=$?
        [ -n "$interrupted" ] || return "$code"
    done
}

same=(--master_addr "$address" --master_port "$port" "${watch[@]}" "$@")

trap pass_on TERM INT HUP
bash "$here/multinode.sh" "$hostfile" --no_ssh --node_rank 0 "${same[@]}" &
child=("$!")
for ((k = 1; k < ${#hosts[@]}; k++)); do
    there=$(printf '%q ' cd "$PWD") there+='&& '
    there+=$(printf '%q ' bash "$here/multinode.sh" "$hostfile" --no_ssh --node_rank "$k" "${same[@]}")
    say "${hosts[k]}: $there"
    {
        code=0
        on "${hosts[k]}" "$there" || code=$?
        [ "$code" -ne 0 ] || exit 0
        # Ranks that were training miss it by themselves; who still waits for it to come does not.
        for ((i = 0; i < 90; i++)); do
            kill -0 "${child[0]}" 2>/dev/null || exit "$code"
            sleep 1
        done
        say "${hosts[k]} ended with exit code $code; ending this machine's part"
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
