"""Everything that touches DeepSpeed: configuration, trainer, training loop, recovery."""
