"""M7C as in its first runs: three branches, φ = `mean`, 4 sequences per step, 8,192 tokens.

    deepspeed --num_gpus 2 recipes/m7c_classic.py

With the mean as φ, and without the selector loss, selection hardly learns: README.md. Those runs
took minutes per step. At full speed PCIe traffic takes a third or more of so small a step, so
m7c.py has a larger batch: docs/guides/zero-and-pcie.md.
"""

from __future__ import annotations

import m7c_paper

from nsa.engine.config import RunConfig
from nsa.engine.recipe import Recipe, main


def production() -> RunConfig:
    """50,000 steps of 4 sequences, one per micro-batch and GPU: 410 million tokens."""
    config = m7c_paper.production()
    config.model.attention.compressor = "mean"
    config.model.activation_checkpointing = "reentrant"
    config.train.micro_batch = 1
    config.train.accumulation = 2
    config.train.learning_rate = 2e-4
    config.train.min_learning_rate = 2e-5
    return config


def tuned() -> RunConfig:
    """Two sequences per micro-batch and GPU, the largest batch of those runs."""
    config = production()
    config.train.micro_batch = 2
    return config


def demo() -> RunConfig:
    """The demo of m7c_paper.py with φ = `mean`."""
    config = m7c_paper.demo()
    config.model.attention.compressor = "mean"
    return config


PROFILES = {"production": production, "tuned": tuned, "demo": demo}

if __name__ == "__main__":
    main(Recipe("m7c_classic", __doc__, PROFILES))
