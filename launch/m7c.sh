#!/usr/bin/env bash
# Train M7C on two ranks: on two GPUs, or on the CPU if there is no GPU.
#   bash launch/m7c.sh [--restart N] [arguments of recipes/m7c.py ...]
# Runs under the watchdog (docs/guides/debug-a-hang.md), which returns the ranks' exit code, forwards
# signals so that the ranks save, and leaves no process behind. --restart N resumes a run that crashed
# or hung, N times at most.
# What differs from bare deepspeed: docs/reference/cli.md, "Script or launcher".
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
root=$(dirname "$here")
for argument in "$@"; do
    case $argument in
    -h | --help) # without building .venv, which takes minutes
        sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        [ -x "$root/.venv/bin/python" ] || exit 0
        exec "$root/.venv/bin/python" "$root/recipes/m7c.py" --help
        ;;
    esac
done
bash "$here/setup.sh"
export PATH="$root/.venv/bin:$PATH"

say() { printf 'm7c: %s\n' "$*"; }

watch=()
if [ "${1-}" = --restart ]; then
    watch=(--restart "${2-}")
    shift $(($# > 1 ? 2 : 1))
fi

# A free port, so that two runs on one machine do not collide.
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
    say "WARNING: only ONE GPU here, so ONE rank (--num_gpus 1): a step has half the sequences;"
    say "WARNING: double train.accumulation to keep the batch of two ranks"
    ;;
2) say "two GPUs, a rank on each" ;;
*) say "two of $gpus GPUs; for more: deepspeed --num_gpus $gpus recipes/m7c.py" ;;
esac

devices=(--num_gpus "$ranks")
if [ "$gpus" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    # With --num_gpus the launcher ignores this variable and takes GPUs 0 and 1: name them instead.
    devices=(--include "localhost:$(cut -d, -f"1-$ranks" <<<"$CUDA_VISIBLE_DEVICES")")
fi
command=(deepspeed "${devices[@]}" --master_port "$port" "$root/recipes/m7c.py" "$@")
say "${command[*]}"

exec nsa watch "${watch[@]}" -- "${command[@]}"
