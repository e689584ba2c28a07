#!/usr/bin/env bash
# Soak test: inject random faults into a small run under the watchdog, then compare every row of
# metrics.csv, bit for bit, with an undisturbed run of the same steps. As root it also freezes and fills
# a disk. Not in CI.
#   bash launch/soak.sh [MINUTES] [SEED]     default: 60 minutes, a new seed each time
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
bash "$here/setup.sh" >&2
cd "$here/.."
export PATH="$PWD/.venv/bin:$PATH"
exec python -m tests.faults.soak "$@"
