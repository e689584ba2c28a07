"""The sparse pattern of Native Sparse Attention: seven numbers and the rules that bind them."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class NSASpec:
    """Which keys a query may see in each branch; pure data, checked when it is made.

    The defaults are the paper's: 32/16/64, 16 blocks (1 initial, 2 local), window 512.
    """

    block_len: int = 32  # l: positions that one compressed key covers
    block_stride: int = 16  # d: distance between the starts of two compressed keys
    select_len: int = 64  # l': positions of one selection block
    select_top: int = 16  # n: selection blocks that a query attends to
    init_blocks: int = 1  # first blocks of the document, always among the n
    local_blocks: int = 2  # blocks that end with the query's own, always among the n
    window: int = 512  # w: positions of the sliding window, the query's own included

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "init_blocks" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"NSASpec.{field.name} = {value!r}: must be a whole number, {least} or more"
                )
        if self.block_stride > self.block_len:
            raise ValueError(
                f"NSASpec.block_stride = {self.block_stride} is more than block_len = "
                f"{self.block_len}: positions between two blocks would be in none; "
                "lower block_stride or raise block_len"
            )
        if self.init_blocks + self.local_blocks > self.select_top:
            raise ValueError(
                f"NSASpec.select_top = {self.select_top} is less than init_blocks + local_blocks "
                f"= {self.init_blocks} + {self.local_blocks}, which are always selected; "
                "raise select_top"
            )

    def compressed_len(self, seq_len: int) -> int:
        """N: the compressed blocks that fit into a document of `seq_len` positions."""
        if seq_len < self.block_len:
            return 0
        return (seq_len - self.block_len) // self.block_stride + 1

    def select_blocks_len(self, seq_len: int) -> int:
        """The selection blocks of a document of `seq_len` positions, the last one maybe partial."""
        return -(-seq_len // self.select_len)

    @property
    def touching(self) -> int:
        """How many compressed blocks overlap one selection block, at the most."""
        if self.select_len % self.block_stride == 0:
            return self.select_len // self.block_stride - (-self.block_len // self.block_stride) - 1
        return -(-(self.block_len + self.select_len - 1) // self.block_stride)

    def visible_compressed(self, position: int) -> int:
        """How many compressed blocks end at or before `position`."""
        return self.compressed_len(position + 1)

    def visible_selected(self, position: int) -> int:
        """How many positions the selected branch sees from `position`, whichever are chosen."""
        before = min(position // self.select_len, self.select_top - 1) * self.select_len
        return before + position % self.select_len + 1

    def visible_window(self, position: int) -> int:
        """How many positions the window holds at `position`."""
        return min(position + 1, self.window)
