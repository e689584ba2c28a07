"""Data of one rank: training and validation batches, opened at the run's position."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nsa.data.batches import Batch, Samples
from nsa.data.cache import TokenCache, ValidationData, cache_folder
from nsa.data.dataset import open_dataset
from nsa.engine.config import RunConfig
from nsa.engine.process_group import Ranks
from nsa.engine.run_request import TrainState
from nsa.monitor.observer import warn


@dataclass
class Data:
    """Training and validation batches of one rank."""

    cache: TokenCache
    samples: Samples
    step_batches: Callable[[int], list[Batch]]  # by the number of samples consumed so far
    validation: ValidationData
    notes: list[str]  # for the log
    rank: int

    def close(self) -> None:
        """End the tokenising process, and log what data.on_error left out."""
        self.cache.close()
        if self.rank == 0:
            for store in self.samples.stores:
                for line in store.notes:
                    warn(line)


def open_data(
    config: RunConfig, ranks: Ranks, state: TrainState, run_dir: Path, data_changed: bool = False
) -> Data:
    """Open the data after `state.samples` samples; record its fingerprint in `state`.

    `data_changed`: the run resumes with other data settings, so data starts at its first sample.
    """
    notes, start = list[str](), time.monotonic()
    if state.data and data_changed:
        notes.append(
            "--resume: data.* or train.seed changed since the run started; the new data starts at "
            "its first sample"
        )
        state.samples, state.data = 0, ""
    dataset = open_dataset(config.data)
    cache = TokenCache(dataset, cache_folder(config.data, run_dir))
    largest = max(cache.stamps, key=lambda stamp: stamp.vocab_size)
    if largest.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size = {config.model.vocab_size}: too small for the tokens of "
            f"data.source = {config.data.source!r}, tokenizer {largest.tokenizer!r}; set "
            f"model.vocab_size to {largest.vocab_size} or more"
        )
    shape = {"micro_batch": config.train.rows, "world_size": ranks.world_size}
    steps_left = config.train.steps - state.step
    samples_at_end = state.samples + steps_left * config.samples_per_step(ranks.world_size)
    try:
        cache.start({"train": samples_at_end, "val": config.train.eval_samples})
        samples = cache.open_samples("train", config.train.seed)
        if state.data and samples.fingerprint != state.data:
            raise ValueError(
                f"data.source = {config.data.source!r}: its content changed since the run started "
                f"(fingerprint {samples.fingerprint}, was {state.data}); restore it, or start a "
                "fresh run without --resume"
            )
        validation = ValidationData(cache, sequences=config.train.eval_samples, **shape)
        samples.locate(state.samples)  # errors of the first documents surface here
    except BaseException:
        cache.close()
        raise
    state.data = samples.fingerprint
    notes += [*dataset.notes, *samples.describe(samples_at_end), *validation.notes]
    if (waited := time.monotonic() - start) >= 0.1:  # tokenised or downloaded
        notes.append(f"first batch ready {waited:.1f} s after opening the dataset")
    accumulation = config.train.accumulation
    step_batches = partial(samples.step, rank=ranks.rank, accumulation=accumulation, **shape)
    return Data(cache, samples, step_batches, validation, notes, ranks.rank)
