"""Teacher of a run (train.teacher): find and check it, load it, compare the model with it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.constants import IGNORE_INDEX
from nsa.data.batches import Batch
from nsa.dtypes import DTYPES
from nsa.engine.config import RunConfig
from nsa.engine.load_run import StoredRun, find_run, load_run
from nsa.model import LanguageModel
from nsa.model.loss import bucket_edges, bucket_of
from nsa.monitor.observer import TEACHER_COLUMNS


class Teacher:
    """A frozen model on this rank, outside of DeepSpeed's engine and of checkpoints."""

    def __init__(self, model: LanguageModel, config: RunConfig) -> None:
        self.model = model.requires_grad_(False)
        self._edges = bucket_edges(config.data.seq_len)

    @torch.no_grad()
    def arguments(self, batch: Batch) -> dict[str, Any]:
        """Return the arguments of the model's forward pass that hold the teacher's prediction."""
        hidden = self.model.hidden(batch.input_ids, batch.cu_seqlens)
        return {"teacher": (hidden.flatten(0, 1), self.model.head_weight)}

    def by_position(self, divergence: Tensor, batch: Batch) -> Tensor:
        """Sum `divergence` [N, 4] and count labels by bucket of positions: float64 [buckets, 5]."""
        bucket = bucket_of(batch.positions(), self._edges)
        counted = (batch.labels.flatten() != IGNORE_INDEX)[:, None]
        rows = torch.cat([divergence.double(), counted.double()], 1)
        sums = rows.new_zeros(len(self._edges) - 1, rows.shape[1])
        return sums.index_add_(0, bucket, rows)

    def rows(self, sums: Tensor) -> list[dict[str, float]]:
        """Return the means of each bucket that has labels, from the sums of all ranks."""
        rows = []
        for (first, end), values in zip(pairwise(self._edges), sums.tolist(), strict=True):
            *totals, labels = values
            if labels:
                row = (first, end - 1, labels, *(total / labels for total in totals))
                rows.append(dict(zip(TEACHER_COLUMNS, row, strict=True)))
        return rows


def find_teacher(config: RunConfig) -> StoredRun | None:
    """Return the run that train.teacher names, without its weights; None without a teacher."""
    path, vocabulary = config.train.teacher, config.model.vocab_size
    if path is None:
        return None
    try:
        stored = find_run(Path(path))
    except ValueError as error:
        raise ValueError(f"train.teacher = {error}; or set train.teacher=null") from None
    size = stored.config.model.vocab_size
    if size != vocabulary:
        raise ValueError(
            f"train.teacher = {path!r}: has a vocabulary of {size:,} and this run one of "
            f"{vocabulary:,}; name a model with the same tokenizer"
        )
    return stored


def check_tokenizer(stored: StoredRun | None, config: RunConfig, fingerprint: str) -> None:
    """Raise a ValueError if the teacher was trained with another tokenizer than the dataset's."""
    if stored is None or stored.tokenizer is None or stored.tokenizer.fingerprint == fingerprint:
        return
    raise ValueError(
        f"train.teacher = {config.train.teacher!r}: was trained with the tokenizer "
        f"{stored.tokenizer.name!r}, and this run uses {config.data.tokenizer!r}; name a model "
        "with the same tokenizer"
    )


def load_teacher(stored: StoredRun, config: RunConfig, device: torch.device) -> Teacher:
    """Load the teacher in the dtype of training."""
    loaded = load_run(stored, device=device, dtype=DTYPES[config.train.precision])
    return Teacher(loaded.model, config)
