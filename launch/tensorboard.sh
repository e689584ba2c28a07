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
printf 'tensorboard: serving %s on this machine only; --bind_all serves the network\n' \
    "$(realpath "$runs")"

# TensorBoard names a run after the folder of its event files: mine/tensorboard. To name it mine, the
# server gets a folder mine of links to them; a loop adds new runs and files until the server ends.
base=$(realpath "$runs")
links=$(mktemp -d)
add_links() {
    local folder run name
    find "$base" -maxdepth 4 -type d -name tensorboard -print0 2>/dev/null |
        while IFS= read -r -d '' folder; do
            run=$(dirname "$folder")
            name=${run#"$base/"}
            [ "$name" != "$run" ] || name=$(basename "$run")
            mkdir -p "$links/$name"
            find "$folder" -maxdepth 1 -name '*tfevents*' -exec ln -sf {} "$links/$name/" \;
        done
}
add_links
(
    trap '' INT # Ctrl-C is for the server
    while kill -0 $$ 2>/dev/null; do
        add_links
        sleep 5
    done
    rm -rf "$links"
) </dev/null >/dev/null 2>&1 &
exec tensorboard --logdir "$links" "$@"
