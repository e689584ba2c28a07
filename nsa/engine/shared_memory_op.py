"""DeepSpeed's shared-memory operation (`deepspeed_shm_comm`): skip its build, or limit the wait.

On CPU, DeepSpeed compiles it on joining a process group, for about a minute, without output. A
build that was killed leaves its lock, and PyTorch waits for that lock forever.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

NAME = "deepspeed_shm_comm"
BUILD_SECONDS = 300  # a lock older than this was left by a build that was killed or hangs
SKIP = "nsa.engine.disable_shared_memory_op() before DeepSpeed joins a process group skips it"


def disable_shared_memory_op() -> None:
    """Keep DeepSpeed from building its CPU inference operation on joining a process group.

    Training never uses it. It compiles for a minute, and each rank that loads it leaves 66 MB in
    /dev/shm.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__[NAME] = False


def limit_build_wait(comm: Any) -> None:
    """Announce the build in deepspeed.comm.torch, and end its wait for an old lock."""
    build = comm.build_shm_op

    def build_or_raise() -> Any:
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        on_cpu = get_accelerator().device_name() == "cpu"
        if on_cpu and deepspeed.ops.__compatible_ops__.get(NAME, False):
            _wait_for_other_builds()
        return build()

    comm.build_shm_op = build_or_raise


def _wait_for_other_builds() -> None:
    from torch.utils import cpp_extension

    folder = Path(cpp_extension._get_build_directory(NAME, verbose=False))
    if not list(folder.glob("*.so")):
        warnings.warn(f"DeepSpeed compiles {NAME}, about a minute; {SKIP}", stacklevel=3)
    lock = folder / "lock"
    while True:
        try:
            age = time.time() - lock.stat().st_mtime
        except FileNotFoundError:  # the build has ended
            return
        if age > BUILD_SECONDS:
            raise TimeoutError(
                f"{lock}: left by a build of DeepSpeed's {NAME} that was killed or hangs; "
                f"fix: rm {lock}, or skip the operation: {SKIP}"
            )
        time.sleep(0.5)
