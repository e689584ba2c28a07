"""M7C: a 125M Llama-like model with Native Sparse Attention.

    deepspeed --num_gpus 2 recipes/m7c.py

trains on two ranks: profile `production` on accelerators, a small `demo` on machines without one.
Each query attends, in one softmax, to its first block, its last 8 and the 13 others that a trained
index ranks highest, of 64 tokens each; in the first half of the steps to all tokens. m7c_paper.py
has the paper's three branches instead.
Choose another ZeRO config with --deepspeed_config ds_configs/<name>.json; monitor with
`bash launch/tensorboard.sh`.
"""

from __future__ import annotations

from dataclasses import replace

from nsa.checkpoint.saver import CheckpointConfig
from nsa.data.config import DataConfig
from nsa.engine.config import RunConfig, TrainConfig
from nsa.engine.recipe import Recipe, main
from nsa.model.config import INDEXED, AttentionConfig, ModelConfig
from nsa.monitor.config import MonitorConfig
from nsa.spec import NSASpec


def production() -> RunConfig:
    """bf16 on 2×A100 over PCIe: 50,000 steps of 64 sequences, 131,072 tokens.

    A step sends 375 MB over PCIe, whatever its batch. With 32 sequences per GPU that is below a
    tenth of its time: docs/guides/zero-and-pcie.md. m7c_classic.py has a small batch.
    """
    return RunConfig(
        model=ModelConfig(
            mlp_width=2_432,  # 125.0M parameters
            attention=AttentionConfig(
                branches="sel",  # one set of keys and values; an index selects blocks
                compressor="pool",
                selector_loss=1.0,
                spec=INDEXED,
            ),
            activation_checkpointing="auto",
        ),
        data=DataConfig(source="fineweb_edu", tokenizer="hf:gpt2", seq_len=2_048, held_out=0.005),
        train=TrainConfig(
            steps=50_000,
            micro_batch="auto",
            accumulation=32,  # sequences per GPU and step, in as few micro-batches as fit
            dense_steps="auto",  # half of the steps, so that the index learns from all blocks
            learning_rate=6e-4,
            min_learning_rate=6e-5,
            value_rate=0.5,  # values that learn at half the rate learn better
            warmup_steps=2_000,
            weight_decay=0.01,
            clip=1.0,
            precision="bf16",
            seed=1337,
        ),
        monitor=MonitorConfig(log_every=10),
        checkpoint=CheckpointConfig(every=5_000),
    )


def demo() -> RunConfig:
    """A small model trained in the same way: minutes on two CPU cores."""
    config = production()
    config.model = ModelConfig(
        vocab_size=320,
        layers=4,
        width=256,
        heads=6,
        kv_heads=1,
        head_dim=64,
        mlp_width=704,
        attention=replace(
            config.model.attention,
            spec=NSASpec(
                block_len=32, block_stride=32, select_len=32, select_top=8, local_blocks=4
            ),
        ),
        activation_checkpointing="none",
    )
    config.data = DataConfig(source="embedded", tokenizer="byte", seq_len=512)
    config.train = TrainConfig(
        steps=300,
        micro_batch=2,
        accumulation=1,
        dense_steps="auto",
        learning_rate=2e-3,
        min_learning_rate=2e-4,
        value_rate=0.5,
        warmup_steps=30,
        weight_decay=0.01,
        precision="fp32",  # a CPU without AVX-512 multiplies bf16 fifteen times slower
        eval_every=50,
    )
    config.monitor.log_every = 1
    config.checkpoint.every = 100
    return config


if __name__ == "__main__":
    main(Recipe("m7c", __doc__, {"production": production, "demo": demo}))
