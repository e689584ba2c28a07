"""Peak memory of `blockwise`, forward and backward, grows no faster than the sequence."""

from collections.abc import Callable
from pathlib import Path

import torch

from nsa.ops import nsa_attention
from nsa.spec import NSASpec
from tests.peak_memory import print_peak
from tests.ranks import spawn_ranks

SPEC = NSASpec(32, 16, 32, 4, 1, 2, 128)
FIRST = 300  # tokens of a first call: long enough for every kind of tile


def step(seq_len: int) -> Callable[[], None]:
    blocks = SPEC.compressed_len(seq_len)
    shapes = [(seq_len, 2, 16)] + [(blocks, 1, 16)] * 2 + [(seq_len, 1, 16)] * 4 + [(seq_len, 2, 3)]
    tensors = [torch.full((1, *shape), 0.5, requires_grad=True) for shape in shapes]
    return lambda: nsa_attention(*tensors, SPEC, backend="blockwise").sum().backward()


def test_peak_memory_grows_at_most_as_the_sequence_does() -> None:
    """With memory a + b·T, peaks are proportional to T − FIRST: 10.9-fold. With T²: 70-fold.

    Two heads' T × T scores at 8k in float32 are half a gigabyte: less than an eighth of that.
    """
    measured = spawn_ranks(Path(__file__), ranks=0)
    assert measured.codes(300) == [0], measured.text("err")
    short, long = map(int, measured.text("out").split())
    assert short > 1_000_000, "too little to measure"
    assert long <= (8192 - FIRST) / (1024 - FIRST) * short
    assert long < 2 * 8192 * 8192 * 4 / 8


if __name__ == "__main__":
    for length in (1024, 8192):
        print_peak(step(length), step(FIRST))
