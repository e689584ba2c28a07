#!/usr/bin/env bash
# Watchdog (`nsa watch`): start a run, end it if it hangs, restart it with --restart.
#   bash launch/watch.sh [--restart N] -- deepspeed ...      start a run and supervise it
# launch/m7c.sh does this automatically. Details and exit codes: docs/guides/debug-a-hang.md.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
bash "$here/setup.sh" >&2
export PATH="$(dirname "$here")/.venv/bin:$PATH"
exec nsa watch "$@"
