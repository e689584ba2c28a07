#!/usr/bin/env bash
# Formatting, lint and types of the whole project, then its tests: all of them, whichever fails.
# Arguments go to pytest.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
bash "$here/setup.sh"
cd "$here/.."
export PATH="$PWD/.venv/bin:$PATH"

failed=0
check() {
    printf 'test: %s\n' "$*"
    "$@" || failed=1
}
check ruff format --check .
check ruff check .
check mypy
check python -m pytest "$@"
exit "$failed"
