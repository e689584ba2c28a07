"""Where training text comes from."""

from __future__ import annotations

from dataclasses import dataclass

SOURCES = ("embedded", "synthetic")
PACKINGS = ("documents", "concat")


@dataclass
class DataConfig:
    """Source, tokenizer and packing of the training text."""

    source: str = "embedded"  # "embedded": Python's standard library; "synthetic": made-up tokens
    tokenizer: str = "byte"  # "byte": 256 bytes and the specials
    packing: str = "concat"  # "documents": attention stays inside one; "concat": plain stream
    seq_len: int = 2_048  # T: tokens that the model sees at once
    synthetic_bytes: int = 4_000_000  # size of each split of the "synthetic" source

    def validate(self) -> None:
        """Raise a ValueError that names the first setting that cannot work."""
        for name, allowed in (
            ("source", SOURCES),
            ("tokenizer", ("byte",)),
            ("packing", PACKINGS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"data.{name} = {value!r}: choose one of {', '.join(allowed)}")
        for name in ("seq_len", "synthetic_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name} = {getattr(self, name)}: must be 1 or more")
