"""M7C on 32,768 tokens: starts from the weights of a 2,048-token run.

    deepspeed --num_gpus 2 recipes/m7c.py
    deepspeed --num_gpus 2 recipes/m7c_32k.py

starts from the newest checkpoint of runs/m7c-production; --set train.start_from=<folder> names
another run or checkpoint. The same on two CPU cores, from 256 tokens to 1,024:

    deepspeed --num_gpus 2 recipes/m7c_32k.py --profile demo_short
    deepspeed --num_gpus 2 recipes/m7c_32k.py --profile demo \\
        --set train.start_from=runs/m7c_32k-demo_short
"""

from __future__ import annotations

import m7c

from nsa.engine.config import RunConfig, TrainConfig
from nsa.engine.recipe import Recipe, main


def production() -> RunConfig:
    """2,000 steps of two sequences, one on each of two GPUs."""
    config = m7c.production()
    # RoPE pairs that rotated less than once in 2,048 tokens rotate about as far, or less, in 32,768
    # tokens with this base. The weights need some steps to adapt.
    config.model.rope_theta = 500_000.0
    config.model.activation_checkpointing = "reentrant"
    config.data.seq_len = 32_768
    config.train = TrainConfig(
        steps=2_000,
        micro_batch=1,
        accumulation=1,
        start_from="runs/m7c-production",
        learning_rate=1e-4,
        min_learning_rate=1e-5,
        value_rate=0.5,
        warmup_steps=100,
        weight_decay=0.01,
        eval_every=250,
        eval_samples=16,
    )
    config.checkpoint.every = 500
    return config


def demo_short() -> RunConfig:
    """The short run that `demo` starts from: m7c.py's demo on 256 tokens."""
    config = m7c.demo()
    config.model.activation_checkpointing = "reentrant"
    config.data.seq_len = 256
    return config


def demo() -> RunConfig:
    """Four times the tokens; random weights without train.start_from."""
    config = demo_short()
    config.model.rope_theta = 50_000.0
    config.data.seq_len = 1_024
    config.train.steps, config.train.warmup_steps, config.train.dense_steps = 100, 10, 0
    config.train.learning_rate, config.train.min_learning_rate = 1e-3, 1e-4
    return config


if __name__ == "__main__":
    profiles = {"production": production, "demo": demo, "demo_short": demo_short}
    main(Recipe("m7c_32k", __doc__, profiles))
