"""M7C with the paper's attention: three branches, φ = `mlp`, sparse from the first step.

    deepspeed --num_gpus 2 recipes/m7c_paper.py

Compressed blocks of 32 tokens every 16, 16 selected blocks of 64, and a window of 512. The
compressed branch's attention ranks the blocks, and no other loss trains it. Data and schedule are
those of m7c.py, which has one set of keys and values, an index, a dense first half, and values that
learn at half the rate instead.
"""

from __future__ import annotations

import m7c

from nsa.engine.config import RunConfig
from nsa.engine.recipe import Recipe, main
from nsa.model.config import AttentionConfig
from nsa.spec import NSASpec

PAPER = NSASpec(block_len=32, block_stride=16, select_len=64, select_top=16, window=512)
DEMO = NSASpec(block_len=16, block_stride=8, select_len=32, select_top=6, window=128)


def three_branches(config: RunConfig, spec: NSASpec) -> RunConfig:
    """Set the paper's branches and φ, sparse from the first step."""
    config.model.attention = AttentionConfig(compressor="mlp", spec=spec)
    config.train.dense_steps, config.train.value_rate = 0, 1.0
    return config


def production() -> RunConfig:
    """50,000 steps with the paper's attention, and about as many parameters."""
    config = three_branches(m7c.production(), PAPER)
    config.model.mlp_width = 2_368
    return config


def demo() -> RunConfig:
    """The demo of m7c.py with the paper's attention, in smaller blocks."""
    return three_branches(m7c.demo(), DEMO)


if __name__ == "__main__":
    main(Recipe("m7c_paper", __doc__, {"production": production, "demo": demo}))
