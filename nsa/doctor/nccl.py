"""NCCL variables: warn about misspelt names, impossible values and slow settings."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch

from nsa.doctor.check import FAIL, OK, WARN, Check

PREFIX = "NCCL_"

# Documented by NVIDIA, without the prefix.
_KNOWN = frozenset(
    """
ALGO ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE CHECKS_DISABLE CHECK_MODE CHECK_POINTERS
COLLNET_ENABLE COLLNET_NODE_THRESHOLD COMM_BLOCKING CONF_FILE CROSS_NIC CTA_POLICY CUMEM_ENABLE
CUMEM_HOST_ENABLE DEBUG DEBUG_FILE DEBUG_SUBSYS DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS
DMABUF_ENABLE ENV_PLUGIN GRAPH_MIXING_SUPPORT GRAPH_REGISTER GRAPH_STREAM_ORDERING
IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY IB_ADDR_RANGE IB_AR_THRESHOLD IB_CUDA_SUPPORT IB_DISABLE
IB_ECE_ENABLE IB_FIFO_TC IB_GDR_LEVEL IB_GID_INDEX IB_HCA IB_MERGE_NICS IB_OOO_RQ
IB_PCI_RELAXED_ORDERING IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_RETURN_ASYNC_EVENTS
IB_ROCE_VERSION_NUM IB_SL IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT IGNORE_COLLNET_MISMATCH
IGNORE_CPU_AFFINITY IGNORE_NET_MISMATCH IPC_USE_ABSTRACT_SOCKET LAUNCH_MODE
LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL LEGACY_CUDA_REGISTER LL_THRESHOLD LOCAL_REGISTER
MAX_CTAS MAX_NCHANNELS MEM_SYNC_DOMAIN MIN_CTAS MIN_NCHANNELS MNNVL_CLIQUE_ID MNNVL_ENABLE
MNNVL_UUID MULTI_RANK_GPU_ENABLE NET NETDEVS_POLICY NET_GDR_C2C NET_GDR_LEVEL NET_GDR_READ
NET_MERGE_POLICY NET_PLUGIN NET_SHARED_BUFFERS NET_SHARED_COMMS NSOCKS_PERTHREAD NTHREADS
NVB_DISABLE NVLS_ENABLE OOB_NET_ENABLE OOB_NET_IFNAME P2P_DIRECT_DISABLE P2P_DISABLE P2P_LEVEL
P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE P2P_PXN_LEVEL PROFILER_PLUGIN PROTO PXN_C2C PXN_DISABLE
RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR RUNTIME_CONNECT SET_STACK_SIZE SET_THREAD_NAME
SHM_DISABLE SINGLE_RING_THRESHOLD SOCKET_FAMILY SOCKET_IFNAME SOCKET_MAGIC SOCKET_NTHREADS
SOCKET_POLL_TIMEOUT_MSEC SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC SYM_GIN_KERNELS_ENABLE
TOPO_DUMP_FILE TOPO_FILE TREE_THRESHOLD TUNER_PLUGIN UID_STAGGER_RATE UID_STAGGER_THRESHOLD
WIN_ENABLE
""".split()  # noqa: SIM905
)

_VALUES = {
    "NCCL_DEBUG": ("VERSION", "WARN", "INFO", "TRACE"),
    "NCCL_P2P_LEVEL": ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS", *"012345"),
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), ("0", "1")),
}
_SLOW = {  # cost of any value except 0
    "NCCL_P2P_DISABLE": "no GPU reads another's memory: safe, but slower",
    "NCCL_SHM_DISABLE": "GPUs of one machine use sockets",
    "NCCL_ALGO": "NCCL no longer chooses by size",
    "NCCL_PROTO": "NCCL no longer chooses by size",
    "NCCL_CHECK_POINTERS": "every call is checked",
    "CUDA_LAUNCH_BLOCKING": "every kernel blocks the CPU",
}
_RENAMED = ("NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING")  # torch reads TORCH_NCCL_*


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
    if name in _RENAMED:
        return WARN, " has an old name", f"use TORCH_{name}"
    if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in _KNOWN:
        near = difflib.get_close_matches(name, [PREFIX + known for known in _KNOWN], n=1)
        fix = f"did you mean {near[0]}?" if near else "unset it"
        return WARN, ": NCCL documents no such variable", fix
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
