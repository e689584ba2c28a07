"""M7C that starts dense: half of its steps attend to all tokens, and train the selector meanwhile.

    deepspeed --num_gpus 2 recipes/m7c_dense_first.py

At train.dense_steps attention becomes sparse in the same run: no weight and no optimizer state
changes. --set train.dense_steps=45000 switches later; with --steps give it too, as half is that of
the profile's steps.
docs/design/evidence.md compares it with NSA and dense attention in all steps.
"""

from __future__ import annotations

from collections.abc import Callable

import m7c

from nsa.engine.config import RunConfig
from nsa.engine.recipe import Recipe, main


def dense_first(profile: Callable[[], RunConfig]) -> Callable[[], RunConfig]:
    """Return an M7C profile with half of its steps dense, φ = pool and the selector loss."""

    def first() -> RunConfig:
        config = profile()
        config.model.attention.compressor = "pool"
        config.model.attention.selector_loss = 1.0
        config.train.dense_steps = config.train.steps // 2
        return config

    return first


if __name__ == "__main__":
    profiles = {"production": dense_first(m7c.production), "demo": dense_first(m7c.demo)}
    main(Recipe("m7c_dense_first", __doc__, profiles))
