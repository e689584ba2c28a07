#!/usr/bin/env bash
# Trains M7C on two ranks: on two GPUs where there are two, on the CPU where there is none.
#   bash launch/m7c.sh [--restart N] [arguments of recipes/m7c.py ...]
# It runs under a watchdog (docs/watchdog.md): a rank's exit code comes back, a signal reaches the
# ranks, so that they save, and nothing outlives it. --restart lets a run that crashed go on.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root=$(dirname "$here")
bash "$here/setup.sh"
export PATH="$root/.venv/bin:$PATH"

say() { printf 'm7c: %s\n' "$*"; }

watch=()
if [ "${1-}" = --restart ]; then
    watch=(--restart "${2-}")
    shift $(($# > 1 ? 2 : 1))
fi

# A port of its own keeps two runs on one machine from answering each other.
read -r gpus port < <(
    python -I -c '
import socket, torch
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    print(torch.cuda.device_count(), probe.getsockname()[1])'
)

ranks=2
case $gpus in
0) say "no GPU here: two ranks on the CPU" ;;
1)
    ranks=1
    say "WARNING: only ONE GPU here, so only ONE rank, with --num_gpus 1: each step sees half the"
    say "WARNING: sequences that two ranks would give it; doubling train.accumulation evens that out"
    ;;
2) say "two GPUs, a rank on each" ;;
*) say "two of $gpus GPUs; for more: deepspeed --num_gpus $gpus recipes/m7c.py" ;;
esac

devices=(--num_gpus "$ranks")
if [ "$gpus" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    # Beside --num_gpus the launcher drops this variable and takes GPUs 0 and 1: name them instead.
    devices=(--include "localhost:$(cut -d, -f"1-$ranks" <<<"$CUDA_VISIBLE_DEVICES")")
fi
command=(deepspeed "${devices[@]}" --master_port "$port" "$root/recipes/m7c.py" "$@")
say "${command[*]}"

exec nsa watch "${watch[@]}" -- "${command[@]}"
