"""NCCL variables: warn about misspelt names, impossible values and slow settings."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch

from nsa.doctor.check import FAIL, OK, WARN, Check

PREFIX = "NCCL_"

_VALUES = {
    "NCCL_DEBUG": ("VERSION", "WARN", "INFO", "TRACE"),
    "NCCL_P2P_LEVEL": ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS", *"012345"),
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), ("0", "1")),
}
_SLOW = {  # cost of any value except 0
    "NCCL_P2P_DISABLE": "no GPU reads another's memory: safe, but slower",
    "NCCL_SHM_DISABLE": "GPUs of one machine use sockets",
    "NCCL_ALGO": "NCCL no longer chooses by size",
    "NCCL_PROTO": "NCCL no longer chooses by size",
    "CUDA_LAUNCH_BLOCKING": "every kernel blocks the CPU",
}
_CHECKED = {*_VALUES, *_SLOW, "NCCL_SOCKET_IFNAME"}


def p2p_disabled(variables: Mapping[str, str]) -> bool:
    """Return whether the variables disable peer access between GPUs."""
    level = variables.get("NCCL_P2P_LEVEL", "").upper()
    return variables.get("NCCL_P2P_DISABLE") == "1" or level in ("LOC", "0")


def nccl_checks(variables: Mapping[str, str], interfaces: Sequence[str]) -> list[Check]:
    """Return a check per problem, or one that is ok; `interfaces`: network interfaces here."""
    names = sorted(name for name in variables if name.startswith(PREFIX))
    checks = []
    for name in sorted({*names, *_SLOW} & set(variables)):
        if problem := _problem(name, variables[name], interfaces):
            status, detail, fix = problem
            checks.append(Check("nccl settings", status, f"{name}={variables[name]}{detail}", fix))
    values = ", ".join(f"{name}={variables[name]}" for name in names)
    return checks or [Check("nccl settings", OK, values or "none set, none needed")]


def _problem(name: str, value: str, interfaces: Sequence[str]) -> tuple[str, str, str] | None:
    """Return status, detail and fix, or None."""
    if name not in _CHECKED:  # NCCL has many more variables: report only likely misspellings
        near = difflib.get_close_matches(name, _CHECKED, n=1, cutoff=0.9)
        return (WARN, " is probably misspelt", f"did you mean {near[0]}?") if near else None
    if name in _VALUES and value.upper() not in _VALUES[name]:
        return WARN, " is not a valid value", f"use one of {', '.join(_VALUES[name])}"
    if name == "NCCL_SOCKET_IFNAME" and not _matches_any(value, interfaces):
        fix = f"this machine has {', '.join(interfaces)}; or unset it"
        return FAIL, " names no network interface", fix
    if name in _SLOW and value not in ("", "0"):
        return WARN, f": {_SLOW[name]}", "unset it"
    return None


def _matches_any(pattern: str, interfaces: Sequence[str]) -> bool:
    """Match NCCL's syntax: a list of prefixes, after = of full names, after ^ to exclude."""
    negated, pattern = pattern.startswith("^"), pattern.removeprefix("^")
    ending = "" if pattern.startswith("=") else "*"
    names = [name + ending for name in pattern.removeprefix("=").split(",") if name]
    return any(any(fnmatch(one, name) for name in names) != negated for one in interfaces)
