#!/usr/bin/env bash
# Supervise a run from outside: end it if it hangs, restart it on request.
#   bash launch/watch.sh [--status] RUN                      a running one
#   bash launch/watch.sh [--restart N] -- deepspeed ...      start it, then supervise
# launch/m7c.sh does this automatically. Details and exit codes: docs/guides/debug-a-hang.md.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
bash "$here/setup.sh" >&2
export PATH="$(dirname "$here")/.venv/bin:$PATH"
exec nsa watch "$@"
