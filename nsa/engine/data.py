"""Data of one rank: training loader and validation batches, opened at the run's data cursor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nsa.constants import IGNORE_INDEX
from nsa.data.batches import Batch
from nsa.data.dataset import open_dataset
from nsa.data.loader import BatchLoader, IndexedBatches, StreamingBatches, open_loader
from nsa.data.validation_data import ValidationData
from nsa.engine.config import RunConfig
from nsa.engine.process_group import Ranks
from nsa.engine.run_request import TrainState
from nsa.monitor.observer import warn


@dataclass
class Data:
    """Training and validation batches of one rank.

    Under sequence parallelism the ranks of a group read the same samples, and each keeps one part
    of every sequence.
    """

    loader: BatchLoader
    validation: ValidationData
    notes: list[str]  # for the log
    data_ranks: Ranks  # this rank among those that read different samples
    sequence_part: tuple[int, int] = (0, 1)  # (index, count) of this rank's part of a sequence

    def next_batch(self) -> Batch:
        """Return this rank's next micro-batch; with documents, its labels are counted."""
        batch = self.loader.next_batch()
        if batch.cu_seqlens is not None:  # else no label is ignored
            batch = replace(batch, label_count=int((batch.labels != IGNORE_INDEX).sum()))
        return batch.sequence_part(*self.sequence_part)

    def validation_batches(self) -> list[Batch]:
        """Return this rank's validation batches; every rank has the same number."""
        batches = self.validation.batches(self.data_ranks.rank)
        return [batch.sequence_part(*self.sequence_part) for batch in batches]

    def close(self) -> None:
        """Stop the prefetching thread and worker, and log what data.on_error left out."""
        self.loader.close()
        for line in self.loader.source.skipped():
            warn(f"rank {self.data_ranks.rank}: {line}")


def open_data(
    config: RunConfig,
    ranks: Ranks,
    state: TrainState,
    loader_state: dict[str, Any] | None = None,
    data_changed: bool = False,
) -> Data:
    """Open the data after `state.samples` samples; record its fingerprint in `state`.

    `data_changed`: the run resumes with other data settings, so data starts at its first sample.
    """
    notes = []
    group = config.train.sequence_parallel  # adjacent ranks that share each sequence
    data_ranks = Ranks(ranks.rank // group, ranks.local_rank, ranks.world_size // group)
    resumed = bool(state.data)
    if resumed and data_changed:
        notes.append(
            "--resume: data.* or train.seed changed since the run started; the new data starts at "
            "its first sample"
        )
        state.samples, loader_state = 0, None

    dataset = open_dataset(config.data)
    loader = open_loader(
        dataset,
        rank=data_ranks.rank,
        world_size=data_ranks.world_size,
        micro_batch=config.train.rows,
        accumulation=config.train.accumulation,
        seed=config.train.seed,
        consumed=state.samples,
        state=loader_state,
    )
    try:
        expected = state.data if resumed and not data_changed else loader.source.fingerprint
        _check_source(config, loader.source, expected)
        validation = ValidationData(
            dataset,
            sequences=config.train.eval_samples,
            micro_batch=config.train.rows,
            world_size=data_ranks.world_size,
        )
        loader.wait_until_ready()  # errors of the first documents surface here
        state.data = loader.source.fingerprint
    except ValueError:
        loader.close()
        raise
    notes += dataset.notes
    steps_left = config.train.steps - state.step
    notes += loader.source.describe(state.samples + steps_left * loader.samples_per_step)
    return Data(loader, validation, notes, data_ranks, (ranks.rank % group, group))


def _check_source(
    config: RunConfig, source: IndexedBatches | StreamingBatches, expected: str
) -> None:
    """Refuse a source whose fingerprint is not `expected`, or whose ids exceed the vocabulary."""
    if source.fingerprint != expected:
        raise ValueError(
            f"data.source = {config.data.source!r}: its content changed since the run started "
            f"(fingerprint {source.fingerprint}, was {expected}); restore it, or start a new "
            "run without --resume"
        )
    if source.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size = {config.model.vocab_size}: too small for the tokens of "
            f"data.source = {config.data.source!r}, tokenizer {source.tokenizer!r}; set "
            f"model.vocab_size to {source.vocab_size} or more"
        )
