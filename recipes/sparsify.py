"""A dense model becomes sparse: first its selector learns, then all weights.

    nsa import /models/qwen3-0.6b --to runs/nsa-start
    deepspeed --num_gpus 2 recipes/sparsify.py --set train.start_from=runs/nsa-start
    nsa export runs/sparsify-production --to exports/qwen3-0.6b-nsa

In the first train.selector_steps attention stays dense and only the index learns, by the selector
loss; in the others attention is sparse, and all weights learn. The run resumes in both.
Shape and tokenizer are those of train.start_from. The same on two CPU cores:

    deepspeed --num_gpus 2 recipes/m7c_dense.py --profile demo
    nsa import runs/m7c_dense-demo --to runs/nsa-start --attention nsa
    deepspeed --num_gpus 2 recipes/sparsify.py --profile demo
"""

from __future__ import annotations

from dataclasses import replace

import m7c

from nsa.engine.config import RunConfig
from nsa.engine.recipe import Recipe, main


def production() -> RunConfig:
    """100 steps of the selector, 1,000 of all weights at a tenth of pre-training's rate."""
    return _sparsify(m7c.production(), selector_steps=100, steps=1_100, learning_rate=6e-5)


def demo() -> RunConfig:
    """60 steps on short sequences: minutes on two CPU cores, from the demo of m7c_dense.py."""
    return _sparsify(m7c.demo(), selector_steps=20, steps=60, learning_rate=2e-4)


def _sparsify(
    config: RunConfig, selector_steps: int, steps: int, learning_rate: float
) -> RunConfig:
    config.model.attention.selector_loss = 1.0
    config.train = replace(
        config.train,
        start_from="runs/nsa-start",
        selector_steps=selector_steps,
        dense_steps=0,
        value_rate=1.0,  # half the rate was tried for new weights only
        steps=steps,
        learning_rate=learning_rate,
        min_learning_rate=learning_rate / 10,
        warmup_steps=(steps - selector_steps) // 20,
        eval_every=steps // 10,
    )
    config.checkpoint.every = steps // 5
    config.monitor.ladder.min_tokens_per_s = 0.0  # its size is that of train.start_from
    return config


if __name__ == "__main__":
    profiles = {"production": production, "demo": demo}
    main(Recipe("sparsify", __doc__, profiles, model_of_start=True))
