"""NSASpec: the sparse pattern of Native Sparse Attention, seven validated integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache


@dataclass(frozen=True)
class NSASpec:
    """Sizes that determine which keys a query sees in each branch; defaults are the paper's."""

    block_len: int = 32  # l: positions that one compressed key covers
    block_stride: int = 16  # d: distance between the starts of two compressed blocks
    select_len: int = 64  # l': positions of one selection block
    select_top: int = 16  # n: selection blocks per query
    init_blocks: int = 1  # first blocks of the document, always selected
    local_blocks: int = 2  # last blocks up to the query's own, always selected
    window: int = 512  # w: positions of the sliding window, the query's own included

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            minimum = 0 if field.name == "init_blocks" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise ValueError(
                    f"NSASpec.{field.name} = {value!r}: must be a whole number, {minimum} or more"
                )
        if self.block_stride > self.block_len:
            raise ValueError(
                f"NSASpec.block_stride = {self.block_stride} is more than block_len = "
                f"{self.block_len}: positions between blocks would be skipped; "
                "lower block_stride or raise block_len"
            )
        if self.init_blocks + self.local_blocks > self.select_top:
            raise ValueError(
                f"NSASpec.select_top = {self.select_top} is less than init_blocks + local_blocks "
                f"= {self.init_blocks} + {self.local_blocks}, which are always selected; "
                "raise select_top"
            )

    def to_ints(self) -> list[int]:
        """The seven integers in field order, as custom ops take them."""
        # Not vars(self): torch.compile of torch 2.8 and 2.11 does not trace it.
        blocks = self.block_len, self.block_stride, self.select_len, self.select_top
        return [*blocks, self.init_blocks, self.local_blocks, self.window]

    @classmethod
    def from_ints(cls, numbers: Sequence[int]) -> NSASpec:
        """The inverse of `to_ints`; the compiler's symbolic integers become plain ones."""
        return _validated(*map(int, numbers))

    def compressed_len(self, seq_len: int) -> int:
        """N: compressed blocks of a document of `seq_len` positions."""
        if seq_len < self.block_len:
            return 0
        return (seq_len - self.block_len) // self.block_stride + 1

    def select_blocks_len(self, seq_len: int) -> int:
        """Selection blocks of a document of `seq_len` positions; the last may be partial."""
        return -(-seq_len // self.select_len)

    @property
    def max_overlaps(self) -> int:
        """Maximum number of compressed blocks that overlap one selection block."""
        if self.select_len % self.block_stride == 0:  # a compressed block starts where it starts
            start_before = (self.block_len - 1) // self.block_stride
            return start_before + self.select_len // self.block_stride
        starts = self.block_len + self.select_len - 1  # positions at which such a block may start
        return -(-starts // self.block_stride)

    def visible_compressed(self, position: int) -> int:
        """Compressed blocks that end at or before `position`."""
        return self.compressed_len(position + 1)

    def visible_selected(self, position: int) -> int:
        """Positions that the selected branch sees at `position`, whichever blocks it selects."""
        # A query's own block is always selected, and the blocks before it are complete.
        before = min(position // self.select_len, self.select_top - 1) * self.select_len
        return before + position % self.select_len + 1

    def visible_window(self, position: int) -> int:
        """Positions in the window at `position`."""
        return min(position + 1, self.window)

    def mean_visible(self, seq_len: int) -> dict[str, float]:
        """Mean number of keys that a query sees in each branch, in a document of `seq_len`."""
        positions = range(seq_len)
        return {
            "cmp": sum(map(self.visible_compressed, positions)) / seq_len,
            "sel": sum(map(self.visible_selected, positions)) / seq_len,
            "win": sum(map(self.visible_window, positions)) / seq_len,
        }


@lru_cache(maxsize=64)
def _validated(*numbers: int) -> NSASpec:
    """Return the spec of seven integers; cached, because each call of a custom op needs it."""
    return NSASpec(*numbers)
