"""Everything that touches DeepSpeed: configuration, trainer, training loop, recovery."""


def disable_shared_memory_op() -> None:
    """Keep DeepSpeed from building its CPU inference operation on joining a process group.

    Training never uses it. It compiles for a silent minute, and each rank that loads it leaves 66
    MB in /dev/shm. A build that was killed leaves its lock, for which PyTorch waits forever.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
