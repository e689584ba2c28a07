#!/usr/bin/env bash
# launch/m7c.sh for GPUs connected by PCIe: inspect the links, set only the variables of NCCL
# that this machine needs, and print why.
#   bash launch/m7c_pcie.sh [--restart N] [arguments of recipes/m7c.py ...]
#   bash launch/m7c_pcie.sh --check            inspect and print only
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
case " $* " in *" --help "* | *" -h "*) exec bash "$here/m7c.sh" --help ;; esac
bash "$here/setup.sh"
root=$(dirname "$here")
export PATH="$root/.venv/bin:$PATH"

settings=$(python -m nsa.doctor.pcie) || exit
while IFS= read -r setting; do
    [ -z "$setting" ] || export "${setting?}"
done <<<"$settings"
[ "${1-}" != --check ] || exit 0
exec bash "$here/m7c.sh" "$@"
