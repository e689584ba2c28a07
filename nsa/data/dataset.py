"""Dataset: the sources of `data.source`, and how each is divided into training and validation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from nsa.data.builtin import embedded, synthetic
from nsa.data.config import DataConfig
from nsa.data.files import Files, open_files
from nsa.data.hub import Hub, check_hub_name
from nsa.data.shards import is_prepared
from nsa.data.source import HeldOut, Source, is_builtin, is_path
from nsa.system import user_path

# A hash decides which documents are held out. If there are fewer than FEW_DOCUMENTS, and it would
# hold out fewer than FEW_IN_VALIDATION on average, the end of each document is held out instead.
FEW_DOCUMENTS = 1_000
FEW_IN_VALIDATION = 5
VALIDATION_BYTES = 1 << 14  # to hold out of few documents: enough for a sample of 2,048 tokens
SMALL_BYTES = 1 << 24  # tokenised in seconds, so complete before step 1


@dataclass
class DividedSource:
    """One source of `data.source`: its documents, and how they are divided."""

    config: DataConfig
    name: str
    division: HeldOut
    is_prepared: bool = False  # a folder of shards, which were divided when they were written
    content: str = ""  # as in `Source`; "" if the source is prepared or of the hub
    size: int | None = None  # bytes of text; None: unknown
    notes: list[str] = field(default_factory=list)  # for the log

    @property
    def is_small(self) -> bool:
        """Whether it is tokenised before step 1, and shuffled as a whole."""
        return is_builtin(self.name) or (self.size is not None and self.size <= SMALL_BYTES)

    @cached_property
    def documents(self) -> Source:
        config, name = self.config, self.name
        if name == "embedded" or name.startswith("embedded:"):
            return embedded(name.partition(":")[2] or "deepspeed")
        if name == "synthetic":
            return synthetic()
        if name == "fineweb_edu" or name.startswith("hf:"):
            return Hub(config, name)
        return open_files(user_path(name), config.text_field, config.pattern, config.on_error)

    def __getstate__(self) -> dict[str, Any]:  # another process opens the documents again
        return {name: value for name, value in vars(self).items() if name != "documents"}


@dataclass(frozen=True)
class Dataset:
    """The sources of `data.source`; `config` decides how they are tokenised and packed."""

    config: DataConfig
    sources: list[DividedSource]

    @property
    def notes(self) -> list[str]:
        return [note for source in self.sources for note in source.notes]


def open_dataset(config: DataConfig) -> Dataset:
    """Open the sources of `data.source`; read up to FEW_DOCUMENTS of a local one to count them."""
    return Dataset(config, [_open(config, name) for name in config.sources()])


def _open(config: DataConfig, name: str) -> DividedSource:
    source = DividedSource(config, name, HeldOut(config.held_out), is_prepared(name))
    if source.is_prepared:
        return source
    if not is_path(name) and not is_builtin(name):  # of the hub: opening it takes seconds
        check_hub_name(name)
        return source
    documents = source.documents
    source.content, source.size = documents.content, documents.size()
    if isinstance(documents, Files):
        if documents.left_out:
            source.notes = [
                f"{name}: {len(documents.files):,} files are read; {documents.left_out:,} that are "
                "empty, binary or huge are not"
            ]
        limit = min(FEW_DOCUMENTS, math.ceil(FEW_IN_VALIDATION / config.held_out))
        if size := documents.size_if_few(limit):
            fraction = max(config.held_out, min(0.5, VALIDATION_BYTES / size))
            source.division, source.size = HeldOut(fraction, by_position=True), size
            if fraction > config.held_out:
                source.notes.append(
                    f"{name}: is small, so the last {fraction:.0%} of each document is held out "
                    f"for validation, instead of data.held_out = {config.held_out:g}"
                )
    return source
