#!/usr/bin/env bash
# A small run under the watchdog that suffers random faults for a while, and is then held to a run
# that suffered none: every loss the same to the last bit. Takes half as long again; not in CI.
#   bash launch/soak.sh [MINUTES] [SEED]     20 minutes, and another seed each time
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
bash "$here/setup.sh" >&2
cd "$here/.."
export PATH="$PWD/.venv/bin:$PATH"
exec python -m tests.faults.soak "$@"
