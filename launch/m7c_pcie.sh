#!/usr/bin/env bash
# launch/m7c.sh for machines whose GPUs are joined by PCIe: looks at what lies between them, sets
# what this machine needs and nothing else, and says why. Arguments are those of launch/m7c.sh.
#   bash launch/m7c_pcie.sh [--restart N] [arguments of recipes/m7c.py ...]
#   bash launch/m7c_pcie.sh --check            starts no run: looks and says (.venv has to be there, or is made)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
bash "$here/setup.sh"
root=$(dirname "$here")
export PATH="$root/.venv/bin:$PATH"

settings=$(python -m nsa.doctor.pcie) || exit
while IFS= read -r setting; do
    [ -z "$setting" ] || export "${setting?}"
done <<<"$settings"
[ "${1-}" != --check ] || exit 0
exec bash "$here/m7c.sh" "$@"
