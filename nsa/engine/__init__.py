"""Everything that touches DeepSpeed: configuration, trainer, training loop, recovery."""

from nsa.engine.shared_memory_op import disable_shared_memory_op

__all__ = ["disable_shared_memory_op"]
