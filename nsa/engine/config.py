"""Config tree of a run: `RunConfig`, with `TrainConfig` for optimisation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from nsa.checkpoint import CheckpointConfig
from nsa.constants import SHORT_RUN
from nsa.data import DataConfig
from nsa.model.config import ModelConfig
from nsa.monitor.config import MonitorConfig
from nsa.validation import above_zero, at_least, at_most, one_of

PRECISIONS = ("bf16", "fp16", "fp32")
AUTO = "auto"
ON_BAD_STEP = ("abort", "skip")
ON_SPIKE = ("ignore", "warn")


@dataclass
class TrainConfig:
    """Optimisation: the values for "auto" in DeepSpeed's JSON, and the policy for bad steps."""

    steps: int = 50_000  # optimizer steps of the run, and length of the learning-rate schedule
    micro_batch: int | str = 8  # sequences per rank in one forward pass; auto: as many as fit
    accumulation: int = 4  # micro-batches per optimizer step; with auto: sequences per rank
    sequence_parallel: int = 1  # ranks that split each sequence, at most model.kv_heads; 1: off
    start_from: str | None = None  # run or checkpoint with the initial weights; null: random
    teacher: str | None = None  # run or checkpoint whose predictions to learn too; null: none
    selector_steps: int = 0  # first steps: dense attention, only compressed keys learn; then all
    selector_rate: float = 1e-3  # constant learning rate of those steps
    # first steps: dense attention, then sparse; auto: half of steps, but 0 without the selector
    # loss and in runs of fewer than 100 steps, which only try whether all works
    dense_steps: int | str = 0
    learning_rate: float = 6e-4  # peak of the cosine schedule
    min_learning_rate: float = 6e-5  # end of the cosine schedule
    warmup_steps: int = 2_000  # steps of linear warmup; scaled if only train.steps is set
    weight_decay: float = 0.01  # AdamW weight decay, on matrices only
    clip: float = 1.0  # max gradient norm; 0: no clipping
    precision: str = "bf16"  # "bf16", "fp16" with loss scaling, or "fp32" for debugging
    compile: bool = False  # torch.compile each block, up to ZeRO stage 2; not measured on a GPU
    seed: int = 1337  # of the initial weights and the data order
    eval_every: int = 500  # steps between validations; 0: only at the end
    eval_samples: int = 64  # validation sequences per evaluation, over all ranks
    on_bad_step: str = "skip"  # non-finite loss or gradient: abort or skip
    on_spike: str = "warn"  # loss far above the last 128: ignore or warn

    def validate(self) -> None:
        at_least(1, "train", self, "steps", "accumulation", "sequence_parallel", "eval_samples")
        for low, name in ((1, "micro_batch"), (0, "dense_steps")):
            value = getattr(self, name)
            if isinstance(value, int):
                at_least(low, "train", self, name)
            elif value != AUTO:
                raise ValueError(f"train.{name} = {value!r}: must be a whole number or {AUTO}")
        limited = ["accumulation"] if self.micro_batch == AUTO else ["micro_batch", "accumulation"]
        at_most(65_536, "train", self, *limited)
        at_least(0, "train", self, "warmup_steps", "eval_every", "clip")
        at_least(0, "train", self, "weight_decay", "min_learning_rate", "seed")
        at_least(0, "train", self, "selector_steps")
        above_zero("train", self, "learning_rate", "selector_rate")
        one_of("train", self, on_bad_step=ON_BAD_STEP, on_spike=ON_SPIKE, precision=PRECISIONS)
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"train.min_learning_rate = {self.min_learning_rate}: is above "
                f"train.learning_rate = {self.learning_rate}; lower it"
            )

    @property
    def rows(self) -> int:
        """`micro_batch` as a number: 1 until nsa/engine/micro_batch.py replaces `auto`."""
        return self.micro_batch if isinstance(self.micro_batch, int) else 1

    @property
    def switch_step(self) -> int:
        """`dense_steps` as a number: 0 until `RunConfig.resolved` replaces `auto`."""
        return self.dense_steps if isinstance(self.dense_steps, int) else 0


def learning_rate(step: int, train: TrainConfig) -> float:
    """Return the rate of step `step`, counted from 0: linear warmup, then cosine, never 0.

    The steps of `selector_steps` come before and have a rate of their own.
    """
    if step < train.selector_steps:
        return train.selector_rate
    step, steps = step - train.selector_steps, train.steps - train.selector_steps
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    progress = (step - train.warmup_steps) / max(1, steps - train.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return train.min_learning_rate + (train.learning_rate - train.min_learning_rate) * cosine


@dataclass
class RunConfig:
    """All settings of a run except DeepSpeed's JSON."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def validate(self) -> None:
        for section in (self.model, self.data, self.train, self.monitor, self.checkpoint):
            section.validate()
        attention = self.model.attention
        if attention.has_index and not attention.selector_loss:
            raise ValueError(
                "model.attention.selector_loss = 0: nothing else trains the index of branches=sel; "
                "set it to 1"
            )
        if self.train.selector_steps and not (attention.kind == "nsa" and attention.selector_loss):
            raise ValueError(
                f"train.selector_steps = {self.train.selector_steps}: trains by the selector loss "
                "alone; set model.attention.selector_loss=1 with kind nsa, or selector_steps to 0"
            )
        if 0 < self.train.steps <= self.train.selector_steps:
            raise ValueError(
                f"train.selector_steps = {self.train.selector_steps}: not below train.steps = "
                f"{self.train.steps}, so no weight but the selector's is trained; lower it"
            )
        if self.train.switch_step:
            if not attention.can_rank:
                raise ValueError(
                    f"train.dense_steps = {self.train.dense_steps}: needs an index, or the keys "
                    "and values of three branches; set model.attention.kind=nsa, branches=sel or "
                    "cmp+sel+win, or dense_steps to 0"
                )
            if self.train.start_from is not None:
                raise ValueError(
                    f"train.dense_steps = {self.train.dense_steps}: begins with new weights; set "
                    "train.start_from=null, or dense_steps to 0"
                )
            if self.train.selector_steps:
                raise ValueError(
                    f"train.selector_steps = {self.train.selector_steps}: not with "
                    "train.dense_steps, in which the selector loss already trains compressed keys; "
                    "set one of them to 0"
                )
            if self.train.switch_step >= self.train.steps:
                raise ValueError(
                    f"train.dense_steps = {self.train.dense_steps}: not below train.steps = "
                    f"{self.train.steps}, so attention never becomes sparse; lower it, or set auto"
                )
        ranks = self.train.sequence_parallel
        for name, value in (
            ("model.kv_heads", self.model.kv_heads),
            ("data.seq_len", self.data.seq_len),
        ):
            if value % ranks:
                raise ValueError(
                    f"train.sequence_parallel = {ranks}: does not divide {name} = {value}; "
                    "choose a divisor of both model.kv_heads and data.seq_len"
                )

    def tokens_per_step(self, ranks: int) -> int:
        """Return the tokens of one optimizer step on `ranks` ranks."""
        train = self.train
        sequences = train.rows * train.accumulation * ranks // train.sequence_parallel
        return sequences * self.data.seq_len

    def resolved(self) -> RunConfig:
        """Return the config with train.dense_steps=auto as a number: 0 where it cannot be used."""
        train = self.train
        if train.dense_steps != AUTO:
            return self
        attention = self.model.attention
        usable = attention.can_rank and attention.selector_loss > 0
        fresh = train.start_from is None and not train.selector_steps
        steps = train.steps // 2 if usable and fresh and train.steps >= SHORT_RUN else 0
        return replace(self, train=replace(train, dense_steps=steps))

    def selects_all_note(self) -> str | None:
        """Return a warning if sequences are so short that no block is left out."""
        attention, seq_len = self.model.attention, self.data.seq_len
        blocks, top = attention.spec.select_blocks_len(seq_len), attention.spec.select_top
        if attention.kind != "nsa" or "sel" not in attention.branch_names or blocks > top:
            return None
        return (
            f"data.seq_len = {seq_len}: has {blocks} selection blocks and "
            f"model.attention.spec.select_top = {top}, so every query selects all of its blocks; "
            f"set data.seq_len above {top * attention.spec.select_len}, or lower select_top"
        )
