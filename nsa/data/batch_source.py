"""Where batches come from: computed from tokens that are all there, or streamed by workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from nsa.data.batches import Batch, Batches, to_batch
from nsa.data.config import DataConfig
from nsa.data.coverage import coverage
from nsa.data.factory import open_source, open_store
from nsa.data.order import key
from nsa.data.source import DataError, State
from nsa.data.stream import NOTHING_YET, stream_rows
from nsa.data.token_store import TokenStore
from nsa.data.tokenizer import build_tokenizer
from nsa.data.worker import Worker

PREPARE = "write shards with `nsa data prepare` and name their folder in data.source"


class BatchSource(Iterator[tuple[Batch, "State | None"]], Protocol):
    """Where batches come from, each with the place behind it."""

    fingerprint: str  # of the samples and their order
    vocab_size: int  # no token's number reaches it
    tokenizer: str
    tokenizer_fingerprint: str

    def whereabouts(self) -> tuple[str, str]:
        """What is being read, and how far that came, for messages."""
        ...

    def describe(self, samples: int) -> list[str]:
        """What a run that deals so many samples takes."""
        ...

    def close(self) -> None:
        """End what was started to read."""
        ...


class IndexedBatches:
    """Batches that are a function of their number: there is no place to remember."""

    def __init__(self, batches: Batches, rank: int, consumed: int) -> None:
        self.fingerprint = batches.fingerprint
        self.vocab_size = max(store.vocab_size for store in batches.stores)
        self.tokenizer = batches.stores[0].tokenizer_name
        self.tokenizer_fingerprint = batches.stores[0].tokenizer
        self._batches, self._of_rank = batches, batches.for_rank(rank, consumed)
        self._read = 0

    def __iter__(self) -> IndexedBatches:
        return self

    def __next__(self) -> tuple[Batch, None]:
        batch = next(self._of_rank)
        self._read += 1
        return batch, None

    def whereabouts(self) -> tuple[str, str]:
        names = ", ".join(store.name for store in self._batches.stores)
        return names, f"batches that were read before: {self._read:,}"

    def describe(self, samples: int) -> list[str]:
        batches = self._batches
        return coverage(batches.stores, batches.shares, batches.seq_len, samples)

    def close(self) -> None:
        pass


class StreamingBatches:
    """Batches from worker processes in turn, each of which reads a share of its own."""

    def __init__(
        self,
        config: DataConfig,
        *,
        rank: int,
        world_size: int,
        micro_batch: int,
        seed: int,
        state: State | None,
    ) -> None:
        tokenizer = build_tokenizer(config)
        text = _text_settings(config, seed)
        # Opened here as well: what is not there is refused before a worker or an engine starts.
        sizes = [open_source(config, name).size() for name in config.parts()]
        self.fingerprint = f"{key('stream', tokenizer.fingerprint, repr(text), repr(sizes)):016x}"
        self.vocab_size = tokenizer.vocab_size
        self.tokenizer = tokenizer.name
        self.tokenizer_fingerprint = tokenizer.fingerprint
        self._config, self._eos_id = config, tokenizer.eos_id
        self._under = {
            **text,
            "number of ranks": world_size,
            "data.workers": config.workers,
            "rank": rank,
        }
        if state is not None:
            _check_same(state["under"], self._under)
        self._taken = state["taken"] if state else 0
        self._places = list(state["workers"]) if state else [None] * config.workers
        self._workers: list[Worker] = []
        for number, place in enumerate(self._places):
            work = partial(
                stream_rows,
                config,
                seed=seed,
                part=rank * config.workers + number,
                parts=world_size * config.workers,
                rows=micro_batch,
                state=place,
            )
            name = f"data.source = {source_names(config)!r}, rank {rank}"
            self._workers.append(Worker(work, name))

    @property
    def _next(self) -> int:
        return self._taken % len(self._workers)

    def __iter__(self) -> StreamingBatches:
        return self

    def __next__(self) -> tuple[Batch, State]:
        at = self._next
        rows, self._places[at] = next(self._workers[at])
        self._taken += 1
        state = {"under": self._under, "taken": self._taken, "workers": list(self._places)}
        return to_batch(rows, self._eos_id, self._config.packing), state

    def whereabouts(self) -> tuple[str, str]:
        worker = self._workers[self._next]
        place = f"the last document read was {worker.place or NOTHING_YET}"
        return worker.source or source_names(self._config), place

    def describe(self, samples: int) -> list[str]:
        return [
            f"{name}: streamed, tokenizer {self.tokenizer}, documents shuffled "
            f"{self._config.shuffle_documents:,} at a time; "
            f"the run deals {round(samples * share):,} samples of {self._config.seq_len:,}"
            for name, share in self._config.parts().items()
        ]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def open_batches(
    config: DataConfig,
    split: str,
    *,
    micro_batch: int,
    accumulation: int,
    world_size: int,
    seed: int,
) -> Batches | None:
    """The batches of tokens that are all there, in memory or in shards; None: they are streamed."""
    found = {name: open_store(config, name, split) for name in config.parts()}
    stores = [store for store in found.values() if store is not None]
    if not stores:
        return None
    if len(stores) < len(found):
        streamed = ", ".join(name for name, store in found.items() if store is None)
        whole = ", ".join(name for name, store in found.items() if store is not None)
        raise DataError(
            f"data.source mixes streams ({streamed}) with tokens that are all there ({whole}); "
            f"write shards of {streamed} with `nsa data prepare` and name their folders instead"
        )
    _check_one_tokenizer(stores)
    return build_batches(
        stores,
        config,
        micro_batch=micro_batch,
        accumulation=accumulation,
        world_size=world_size,
        seed=seed,
    )


def build_batches(
    stores: Sequence[TokenStore],
    config: DataConfig,
    *,
    micro_batch: int,
    accumulation: int,
    world_size: int,
    seed: int,
) -> Batches:
    """The batches of these stores, as `data.*` asks for them."""
    return Batches(
        stores,
        shares=list(config.parts().values()),
        seq_len=config.seq_len,
        micro_batch=micro_batch,
        accumulation=accumulation,
        world_size=world_size,
        seed=seed,
        packing=config.packing,
    )


def _check_one_tokenizer(stores: Sequence[TokenStore]) -> None:
    for store in stores:
        if store.tokenizer != stores[0].tokenizer:
            raise DataError(
                f"data.source: the tokens of {stores[0].name} and of {store.name} were made by "
                f"different tokenizers ({stores[0].tokenizer[:12]}, {store.tokenizer[:12]}); "
                "prepare one of them again with the other's tokenizer"
            )


def source_names(config: DataConfig) -> str:
    """All of `data.source`, for messages."""
    return ", ".join(config.parts())


def _text_settings(config: DataConfig, seed: int) -> dict[str, Any]:
    """What decides which documents a stream gives, and in which order; as JSON gives it back."""
    names = ("subset", "split", "files", "text_field", "tokenizer", "held_out", "shuffle_documents")
    return {
        "data.source": [[name, share] for name, share in config.parts().items()],
        **{f"data.{name}": getattr(config, name) for name in names},
        "train.seed": seed,
    }


def _check_same(saved: dict[str, Any], now: dict[str, Any]) -> None:
    for name, value in now.items():
        if saved[name] != value:
            raise DataError(
                f"this run's place in its stream was saved with {name} = {saved[name]}, which is "
                f"now {value}: streams go on only as they were; set it back, or {PREPARE}: that "
                "order goes on with any number of ranks"
            )
