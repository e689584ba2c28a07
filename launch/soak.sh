#!/usr/bin/env bash
# Soak test: inject random faults into a small run under the watchdog, then compare every loss, bit for bit,
# with an undisturbed run, which takes half as long again. Not in CI.
#   bash launch/soak.sh [MINUTES] [SEED]     default: 20 minutes, a new seed each time
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
bash "$here/setup.sh" >&2
cd "$here/.."
export PATH="$PWD/.venv/bin:$PATH"
exec python -m tests.faults.soak "$@"
