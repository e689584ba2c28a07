"""M7C with the paper's attention: three branches, φ = `mlp`, sparse from the first step.

    deepspeed --num_gpus 2 recipes/m7c_paper.py

Compressed blocks of 32 tokens every 16, 16 selected blocks of 64, and a window of 512. The
compressed branch's attention ranks the blocks, and no other loss trains it. Data and schedule are
those of m7c.py, which has φ = `pool`, the selector loss and a dense first half instead.
"""

from __future__ import annotations

import m7c

from nsa.engine.config import RunConfig
from nsa.engine.recipe import Recipe, main


def sparse_throughout(config: RunConfig, compressor: str) -> RunConfig:
    """Set φ, and NSA from the first step without the selector loss."""
    config.model.attention.compressor = compressor
    config.model.attention.selector_loss = 0.0
    config.train.dense_steps = 0
    return config


def production() -> RunConfig:
    """50,000 steps with the paper's attention."""
    return sparse_throughout(m7c.production(), "mlp")


def demo() -> RunConfig:
    """The demo of m7c.py with the paper's attention, in smaller blocks."""
    return sparse_throughout(m7c.demo(), "mlp")


if __name__ == "__main__":
    main(Recipe("m7c_paper", __doc__, {"production": production, "demo": demo}))
