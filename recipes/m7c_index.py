"""M7C with one set of keys and values: attention that is the dense model's, read sparsely.

    deepspeed --num_gpus 2 recipes/m7c_index.py

Each query attends, in one softmax, to its first block, its last 8 and the 13 others that a trained
index ranks highest, of 64 tokens each. Data and schedule are those of m7c.py. Its text and needles
are those of dense attention, not yet of three branches: docs/benchmarks/text.md. `nsa export
--attention dense` writes a plain Llama.
"""

from __future__ import annotations

import m7c

from nsa.engine.config import RunConfig
from nsa.engine.recipe import Recipe, main
from nsa.model.config import INDEXED, AttentionConfig
from nsa.spec import NSASpec


def production() -> RunConfig:
    """50,000 steps, the first half dense."""
    return _with_index(m7c.production(), INDEXED)


def demo() -> RunConfig:
    """The demo of m7c.py: 8 of 16 blocks of 32 tokens."""
    blocks = NSASpec(block_len=32, block_stride=32, select_len=32, select_top=8, local_blocks=4)
    return _with_index(m7c.demo(), blocks)


def _with_index(config: RunConfig, spec: NSASpec) -> RunConfig:
    """Give the recipe's model an index with one key for each block that can be selected."""
    config.model.attention = AttentionConfig(
        branches="sel", compressor="pool", selector_loss=1.0, spec=spec
    )
    return config


if __name__ == "__main__":
    main(Recipe("m7c_index", __doc__, {"production": production, "demo": demo}))
