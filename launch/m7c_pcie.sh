#!/usr/bin/env bash
# launch/m7c.sh for GPUs connected by PCIe, without NVLink: set NCCL_P2P_DISABLE=1 if transfers
# between the GPUs may hang here, and print why.
#   bash launch/m7c_pcie.sh [--restart N] [arguments of recipes/m7c.py ...]
#   bash launch/m7c_pcie.sh --check            inspect and print only
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
case " $* " in *" --help "* | *" -h "*) exec bash "$here/m7c.sh" --help ;; esac

# An IOMMU that is on, and not in pass-through mode, redirects transfers between GPUs.
if [ -n "$(ls /sys/kernel/iommu_groups 2>/dev/null)" ] && ! grep -qw iommu=pt /proc/cmdline &&
    [ -z "${NCCL_P2P_DISABLE-}${NCCL_P2P_LEVEL-}" ]; then # else the user has decided
    export NCCL_P2P_DISABLE=1
    echo "pcie: set  NCCL_P2P_DISABLE=1: the IOMMU redirects peer transfers, which may hang: safe," \
        "but slower; add iommu=pt to the kernel's command line instead" >&2
else
    echo "pcie: set  nothing: NCCL needs no setting here" >&2
fi
[ "${1-}" != --check ] || exit 0
exec bash "$here/m7c.sh" "$@"
