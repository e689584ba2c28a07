#!/usr/bin/env bash
# Shows the curves of runs in a browser.
#   bash launch/tensorboard.sh [RUNS] [flags of tensorboard ...]     RUNS: a run, or a folder of runs
# On a machine without a screen: ssh -L 6006:localhost:6006 MACHINE, then http://localhost:6006.
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
    printf 'tensorboard: %s: there is no such folder of runs\n' "$runs" >&2
    exit 2
}
bash "$here/setup.sh" >&2
root=$(dirname "$here")
export PATH="$root/.venv/bin:$PATH"
printf 'tensorboard: %s; on this machine alone unless --bind_all is given\n' "$(realpath "$runs")"
exec tensorboard --logdir "$runs" "$@"
