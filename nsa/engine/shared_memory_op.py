"""DeepSpeed's shared-memory operation (`deepspeed_shm_comm`): skip its build.

On CPU, DeepSpeed compiles it on joining a process group, for about a minute, without output. A
build that was killed leaves its lock, and PyTorch waits for that lock forever.
"""

from __future__ import annotations

NAME = "deepspeed_shm_comm"


def disable_shared_memory_op() -> None:
    """Keep DeepSpeed from building its CPU inference operation on joining a process group.

    Training never uses it. It compiles for a minute, and each rank that loads it leaves 66 MB in
    /dev/shm.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__[NAME] = False
