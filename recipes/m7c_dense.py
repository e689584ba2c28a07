"""The dense twin of M7C: the same model, data and schedule with plain causal attention.

    deepspeed --num_gpus 2 recipes/m7c_dense.py

The baseline for NSA's gain or cost. Profiles `classic` and `tuned` are the twins of
m7c_classic.py's `production` and `tuned`.
"""

from __future__ import annotations

from collections.abc import Callable

import m7c
import m7c_classic

from nsa.engine.config import RunConfig
from nsa.engine.recipe import Recipe, main


def dense(profile: Callable[[], RunConfig]) -> Callable[[], RunConfig]:
    """Return a profile that differs from an M7C profile only in the kind of attention."""

    def twin() -> RunConfig:
        config = profile()
        config.model.attention.kind = "dense"
        config.model.attention.selector_loss = 0.0
        return config

    return twin


if __name__ == "__main__":
    profiles = {
        "production": m7c.production,
        "classic": m7c_classic.production,
        "tuned": m7c_classic.tuned,
        "demo": m7c.demo,
    }
    main(Recipe("m7c_dense", __doc__, {name: dense(profile) for name, profile in profiles.items()}))
