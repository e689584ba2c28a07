"""A run's text: opened, checked and described before anything expensive starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nsa.data.batches import Batch
from nsa.data.loader import BatchLoader, ValidationData, open_loader, open_validation
from nsa.engine.config import RunConfig
from nsa.engine.process_group import Ranks
from nsa.engine.train_state import TrainState


@dataclass
class Data:
    """What a run learns from and is judged by."""

    feed: BatchLoader
    held_out: ValidationData
    notes: list[str]  # what the user should know of it
    open: Callable[[int, dict[str, Any] | None], BatchLoader]  # at so many samples consumed
    readers: Ranks  # where this rank stands among those with other samples than its own
    part: tuple[int, int] = (0, 1)  # which of how many parts of each sequence is this rank's

    def take(self) -> Batch:
        """This rank's next micro-batch."""
        return self.feed.take().part(*self.part)

    def held_out_batches(self) -> list[Batch]:
        """What this rank evaluates, as many batches as the other ranks."""
        return [batch.part(*self.part) for batch in self.held_out.batches(self.readers.rank)]

    def go_back(self, consumed: int, rank_state: dict[str, Any] | None) -> None:
        """Read on from where `consumed` samples were consumed to all ranks."""
        self.feed.close()
        self.feed = self.open(consumed, rank_state)

    def close(self) -> None:
        """End the threads and processes that read ahead."""
        self.feed.close()
        self.held_out.close()


def open_data(
    config: RunConfig,
    ranks: Ranks,
    state: TrainState,
    rank_state: dict[str, Any] | None = None,
    new_data: bool = False,
) -> Data:
    """The text from where `state` stands in it; `state` learns which text it is.

    `new_data`: a resumed run was asked for other text, and begins that at its start.
    """
    notes = []
    size = config.train.sequence_parallel  # so many neighbours read the same and share it
    readers = Ranks(ranks.rank // size, ranks.local_rank, ranks.world_size // size)
    begun = bool(state.data)
    if begun and new_data:
        notes.append(
            "--resume: data.* or train.seed is not what the run was begun with; the new text "
            "begins at its first sample"
        )
        state.samples, rank_state = 0, None

    def open_at(consumed: int, rank_state: dict[str, Any] | None) -> BatchLoader:
        return open_loader(
            config.data,
            rank=readers.rank,
            world_size=readers.world_size,
            micro_batch=config.train.micro_batch,
            accumulation=config.train.accumulation,
            seed=config.train.seed,
            consumed=consumed,
            state=rank_state,
        )

    feed = open_at(state.samples, rank_state)
    try:
        if begun and not new_data and feed.fingerprint != state.data:
            raise ValueError(
                f"data.source = {config.data.source!r} no longer holds the text that this run was "
                f"begun with (fingerprint {feed.fingerprint}, then {state.data}); bring that back, "
                "or start a new run without --resume"
            )
        if feed.vocab_size > config.model.vocab_size:
            raise ValueError(
                f"model.vocab_size = {config.model.vocab_size} is too small for the tokens of "
                f"data.source = {config.data.source!r}, tokenizer {feed.tokenizer!r}; set "
                f"model.vocab_size to {feed.vocab_size} or more"
            )
        feed.wait()  # what the first documents say against it is said now
        state.data = feed.fingerprint
        held_out = open_validation(
            config.data,
            sequences=config.train.eval_samples,
            micro_batch=config.train.micro_batch,
            world_size=readers.world_size,
        )
    except ValueError:
        feed.close()
        raise
    steps_left = config.train.steps - state.step
    notes += feed.plan(steps_left * feed.samples_per_step)
    return Data(feed, held_out, notes, open_at, readers, (ranks.rank % size, size))
