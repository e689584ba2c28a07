"""The whole configuration of a run: one tree of dataclasses, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from nsa.checkpoint.config import CheckpointConfig
from nsa.data import DataConfig
from nsa.model.config import ModelConfig
from nsa.monitor.config import MonitorConfig

PRECISIONS = ("bf16", "fp16", "fp32")
ON_BAD_STEP = ("abort", "skip", "rollback")
ON_SPIKE = ("ignore", "warn", "skip", "rollback")


@dataclass
class TrainConfig:
    """Optimisation: the numbers that DeepSpeed's JSON takes from the recipe as "auto"."""

    steps: int = 50_000  # optimizer steps of the whole run; the schedule ends here
    micro_batch: int = 8  # sequences a rank sees in one forward pass
    accumulation: int = 4  # micro-batches per optimizer step
    sequence_parallel: int = 1  # ranks that share each sequence, up to model.kv_heads; 1: none do
    start_from: str | None = None  # a run or checkpoint whose weights to begin with; null: random
    learning_rate: float = 6e-4  # peak of the cosine schedule
    min_learning_rate: float = 6e-5  # where the cosine ends
    warmup_steps: int = 2_000  # steps of linear warm-up; the first already moves
    weight_decay: float = 0.01  # AdamW's, on matrices only
    beta1: float = 0.9  # AdamW's
    beta2: float = 0.95  # AdamW's
    adam_eps: float = 1e-8  # AdamW's
    clip: float = 1.0  # largest gradient norm; 0: no clipping
    precision: str = "bf16"  # "bf16", "fp16" with loss scaling, or "fp32" for debugging
    seed: int = 1337  # initial weights and the order of the data
    eval_every: int = 500  # steps between two looks at the held-out split; 0: only at the end
    eval_samples: int = 64  # held-out sequences evaluated each time, by all ranks together
    on_bad_step: str = "skip"  # a loss or gradient that is not finite: abort, skip or rollback
    bad_steps: int = 20  # so many are lived with between a start and its end, then the run aborts
    on_spike: str = "warn"  # a loss far above the recent ones: ignore, warn, skip or rollback
    spike_score: float = 12.0  # how far: in robust standard deviations of the last 128 losses

    def validate(self) -> None:
        """Raise a ValueError that names the first setting that cannot work."""
        for name in ("steps", "micro_batch", "accumulation", "sequence_parallel", "eval_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name} = {getattr(self, name)}: must be 1 or more")
        for name in (
            "warmup_steps",
            "eval_every",
            "clip",
            "bad_steps",
            "weight_decay",
            "min_learning_rate",
            "seed",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"train.{name} = {getattr(self, name)}: must be 0 or more")
        for name in ("learning_rate", "adam_eps", "spike_score"):
            if getattr(self, name) <= 0:
                raise ValueError(f"train.{name} = {getattr(self, name)}: must be above 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"train.{name} = {getattr(self, name)}: must be 0 or more and below 1"
                )
        for name, choices in (("on_bad_step", ON_BAD_STEP), ("on_spike", ON_SPIKE)):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"train.{name} = {getattr(self, name)!r}: choose one of {', '.join(choices)}"
                )
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"train.min_learning_rate = {self.min_learning_rate} is above "
                f"train.learning_rate = {self.learning_rate}; lower it"
            )
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"train.precision = {self.precision!r}: choose one of {', '.join(PRECISIONS)}"
            )


@dataclass
class RunConfig:
    """Everything that a run is made from, but for DeepSpeed's JSON."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def validate(self) -> None:
        """Raise a ValueError that names the first setting that cannot work."""
        for section in (self.model, self.data, self.train, self.monitor, self.checkpoint):
            section.validate()
        for value, name, why in (
            (self.model.kv_heads, "model.kv_heads", "each rank attends with whole KV heads"),
            (self.data.seq_len, "data.seq_len", "each rank has as many tokens as the others"),
        ):
            if value % self.train.sequence_parallel:
                raise ValueError(
                    f"train.sequence_parallel = {self.train.sequence_parallel} does not divide "
                    f"{name} = {value}: {why}"
                )
