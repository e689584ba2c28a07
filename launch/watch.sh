#!/usr/bin/env bash
# Watches a run from outside: ends it where it hangs, and starts it again on request.
#   bash launch/watch.sh [--status] RUN                      a run that is going
#   bash launch/watch.sh [--restart N] -- deepspeed ...      one that it starts
# launch/m7c.sh does so by itself. What it does, and its exit codes: docs/watchdog.md.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
bash "$here/setup.sh" >&2
export PATH="$(dirname "$here")/.venv/bin:$PATH"
exec nsa watch "$@"
