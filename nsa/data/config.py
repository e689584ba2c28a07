"""Where training text comes from, and how it becomes rows of tokens."""

from __future__ import annotations

from dataclasses import dataclass

PACKINGS = ("documents", "concat")


@dataclass
class DataConfig:
    """Source, tokenizer and packing of the training text."""

    # "embedded": Python's standard library; "synthetic": made up; "fineweb_edu"; "hf:<dataset>";
    # or a path: a folder that `nsa data prepare` wrote, a file, or a folder of files of text.
    # Several with weights are a mixture: {/data/web: 0.7, /data/code: 0.3}
    source: str | dict[str, float] = "embedded"
    subset: str | None = None  # which configuration of a hub's dataset; null: its default
    split: str = "train"  # which split of a hub's dataset
    files: str | None = None  # which files of a hub's dataset, as a path or pattern; null: its own
    text_field: str = "text"  # the field of a record that holds its text
    tokenizer: str = "byte"  # "byte": 256 bytes and specials; "hf:<name or folder>"
    packing: str = "concat"  # "documents": attention stays inside one; "concat": plain stream
    seq_len: int = 2_048  # T: tokens that the model sees at once
    held_out: float = 0.05  # share of the documents, by their hash, that only validation sees
    shuffle_documents: int = 1_000  # of a stream, shuffled together; 1: as they come
    workers: int = 1  # processes that read and tokenise a stream, for each rank
    prefetch: int = 8  # micro-batches that are kept ready
    timeout: float = 120.0  # seconds without a batch after which the run ends
    synthetic_bytes: int = 4_000_000  # size of the "synthetic" source

    def validate(self) -> None:
        """Raise a ValueError that names the first setting that cannot work."""
        if self.packing not in PACKINGS:
            raise ValueError(
                f"data.packing = {self.packing!r}: choose one of {', '.join(PACKINGS)}"
            )
        if self.tokenizer != "byte" and not self.tokenizer.removeprefix("hf:").strip():
            raise ValueError("data.tokenizer = 'hf:': a name or a folder belongs behind the colon")
        if self.tokenizer != "byte" and not self.tokenizer.startswith("hf:"):
            raise ValueError(
                f"data.tokenizer = {self.tokenizer!r}: choose byte, or hf:<name or folder>, such "
                "as hf:gpt2"
            )
        for name in ("seq_len", "synthetic_bytes", "shuffle_documents", "workers", "prefetch"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name} = {getattr(self, name)}: must be 1 or more")
        if not 0 < self.held_out < 1:
            raise ValueError(f"data.held_out = {self.held_out}: must lie between 0 and 1")
        if not self.timeout > 0:
            raise ValueError(f"data.timeout = {self.timeout}: must be above 0 seconds")
        if not self.source:
            raise ValueError(f"data.source = {self.source!r}: name one, such as embedded")
        for name, weight in self._weights().items():
            if not 0 < weight < float("inf"):
                raise ValueError(f"data.source: {name!r} weighs {weight}; must be above 0")

    def _weights(self) -> dict[str, float]:
        return self.source if isinstance(self.source, dict) else {self.source: 1.0}

    def parts(self) -> dict[str, float]:
        """Each source with its share of the samples."""
        weights = self._weights()
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}
