"""RunRequest: one run, resolved before anything expensive starts; TrainState: its progress."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa.engine.config import RunConfig, to_yaml


@dataclass(frozen=True)
class RunRequest:
    """Config, folder and last step of one run."""

    recipe: str
    profile: str
    config: RunConfig
    ds_config: dict[str, Any]  # DeepSpeed's, with every "auto" filled in
    run_dir: Path
    checkpoint: Path | None  # that the run resumes from
    resumed_config: RunConfig | None  # of a resumed run before this launch's changes
    data_changed: bool  # a resumed run reads another dataset, or the same in another order
    stop_step: int
    notes: list[str]  # for the log
    time_limit: float | None = None  # seconds
    profile_steps: tuple[int, int] | None = None  # first and last step to trace
    universal: bool = False  # convert a checkpoint saved by another number of ranks

    @property
    def zero_stage(self) -> int:
        return int(self.ds_config["zero_optimization"]["stage"])

    @property
    def resume_hint(self) -> str:
        return f"resume: --run-dir {self.run_dir} --resume"

    def config_files(self) -> dict[str, str]:
        """Return file contents by name, enough to start the same run again."""
        return {
            "config.yaml": to_yaml(self.config),
            "ds_config.json": json.dumps(self.ds_config, indent=2) + "\n",
        }


@dataclass
class TrainState:
    """Training state besides weights and optimizer, equal on all ranks, saved in each checkpoint.

    The learning rate is a function of the step, the data order a function of the samples consumed,
    and the forward pass uses no random numbers.
    """

    step: int = 0  # optimizer steps done
    tokens: int = 0  # consumed by all ranks
    samples: int = 0  # consumed by all ranks: the position in the data order
    data: str = ""  # fingerprint of the dataset and its order
    skipped: int = 0  # steps not applied because gradients were not finite
