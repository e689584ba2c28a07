"""Data settings: source, tokenizer, packing and loader."""

from __future__ import annotations

from dataclasses import dataclass

from nsa.validation import above_zero, at_least, at_most, one_of

ON_ERROR = ("stop", "skip")


@dataclass
class DataConfig:
    """The `data` section of a run's settings."""

    # "embedded": DeepSpeed's Python files; "embedded:<package>": those of an installed package;
    # "synthetic": generated; "fineweb_edu"; "hf:<dataset>"; or a path: a folder that
    # `nsa data prepare` wrote, a text file, or a folder of text files (notes, code, tables).
    # Several with weights are a mixture: {/data/web: 0.7, /data/code: 0.3}
    source: str | dict[str, float] = "embedded"
    subset: str | None = None  # configuration of a hub dataset; null: its default
    split: str = "train"  # split of a hub dataset
    # name pattern of the files to read, such as "*.py"; null: all text files of a folder, or a hub
    # dataset's default files
    pattern: str | None = None
    on_error: str = "stop"  # at a line or file that cannot be read: "stop", or "skip" and count it
    text_field: str = "text"  # field that holds a record's text
    tokenizer: str = "byte"  # "byte": 256 bytes and 3 special tokens; or "hf:<name or folder>"
    packing: str = "concat"  # "concat": across documents; "documents": attention stays inside each
    seq_len: int = 2_048  # T: tokens per sequence
    held_out: float = 0.05  # fraction of documents, by hash, that only validation reads
    timeout: float = 120.0  # end the run if a batch waits this many seconds for a document
    # folder for the tokens of sources that are not prepared; runs share it; null: data-cache beside
    # the run's folder
    cache: str | None = None

    def validate(self) -> None:
        one_of("data", self, packing=("documents", "concat"), on_error=ON_ERROR)
        kind, _, name = self.tokenizer.partition(":")
        if self.tokenizer != "byte" and not (kind == "hf" and name.strip()):
            raise ValueError(
                f"data.tokenizer = {self.tokenizer!r}: choose byte, or hf:<name or folder>, such "
                "as hf:gpt2"
            )
        at_least(1, "data", self, "seq_len")
        at_most(2**24, "data", self, "seq_len")
        if not 0 < self.held_out < 1:
            raise ValueError(f"data.held_out = {self.held_out}: must lie between 0 and 1")
        above_zero("data", self, "timeout")
        at_most(604_800, "data", self, "timeout")  # a week
        if not self.source:
            raise ValueError(f"data.source = {self.source!r}: name one, such as embedded")
        for name, weight in self._weights().items():
            if "\0" in name:
                raise ValueError(f"data.source = {name!r}: has a NUL character; remove it")
            if not 0 < weight < float("inf"):
                raise ValueError(f"data.source: {name!r} weighs {weight}; must be above 0")

    def _weights(self) -> dict[str, float]:
        return self.source if isinstance(self.source, dict) else {self.source: 1.0}

    def sources(self) -> dict[str, float]:
        """Return the sources by name, each with its fraction of the samples."""
        weights = self._weights()
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}
