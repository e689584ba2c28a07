#!/usr/bin/env bash
# Serve TensorBoard for runs.
#   bash launch/tensorboard.sh [RUNS] [flags of tensorboard ...]     RUNS: a run, or a folder of runs
# From a remote machine: ssh -L 6006:localhost:6006 MACHINE, then http://localhost:6006.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
runs=runs
case ${1-} in
'' | -*) ;;
*)
    runs=$1
    shift
    ;;
esac
[ -d "$runs" ] || {
    printf 'tensorboard: %s: no such folder\n' "$runs" >&2
    exit 2
}
bash "$here/setup.sh" >&2
root=$(dirname "$here")
export PATH="$root/.venv/bin:$PATH"
printf 'tensorboard: %s; on this machine only; --bind_all serves the network\n' "$(realpath "$runs")"
exec tensorboard --logdir "$runs" "$@"
