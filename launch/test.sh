#!/usr/bin/env bash
# Check format, lint and types, then run the tests. A failure does not stop the checks after it; the
# exit code reports it. Arguments go to pytest, which has three workers, as tests also wait for
# processes; -n 0 runs one process.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
bash "$here/setup.sh"
cd "$here/.."
export PATH="$PWD/.venv/bin:$PATH"

# Hundreds of processes import the project: the first one caches its bytecode.
unset PYTHONDONTWRITEBYTECODE

failed=0
check() {
    printf 'test: %s\n' "$*"
    "$@" || failed=1
}
check ruff format --check .
check ruff check .
check mypy
check python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
exit "$failed"
