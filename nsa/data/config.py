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
        if self.seq_len < 1:
            raise ValueError(f"data.seq_len = {self.seq_len}: must be 1 or more")
