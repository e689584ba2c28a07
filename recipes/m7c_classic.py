"""M7C with the batch and the learning rate of its first runs: 4 sequences a step, 8,192 tokens.

    deepspeed --num_gpus 2 recipes/m7c_classic.py

Chosen for a system that took minutes a step. On a fast one PCIe takes most of such a step, so
m7c.py has moved on; docs/launching.md says by how much, and why.
"""

from __future__ import annotations

import m7c

from nsa.engine.config import RunConfig
from nsa.engine.recipe import Recipe, main


def production() -> RunConfig:
    """50,000 steps of 4 sequences, one at a time on each GPU: 410 million tokens."""
    config = m7c.production()
    config.train.micro_batch = 1
    config.train.accumulation = 2
    config.train.learning_rate = 2e-4
    config.train.min_learning_rate = 2e-5
    return config


def tuned() -> RunConfig:
    """Two sequences at a time on each GPU, the most that its PCIe machines were given."""
    config = production()
    config.train.micro_batch = 2
    return config


PROFILES = {"production": production, "tuned": tuned, "demo": m7c.demo}

if __name__ == "__main__":
    main(Recipe("m7c_classic", __doc__, PROFILES))
