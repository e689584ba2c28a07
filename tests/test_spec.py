"""NSASpec: patterns that raise, and its counts of blocks at every length."""

from dataclasses import FrozenInstanceError, astuple, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.spec import NSASpec

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"block_len": 0}, r"^NSASpec\.block_len = 0: must be a whole number, 1 or more$"),
    ({"block_stride": 0}, r"^NSASpec\.block_stride = 0: must be a whole number, 1 or more$"),
    ({"select_len": -64}, r"^NSASpec\.select_len = -64: must be a whole number, 1 or more$"),
    ({"select_top": 0}, r"^NSASpec\.select_top = 0: must be a whole number, 1 or more$"),
    ({"init_blocks": -1}, r"^NSASpec\.init_blocks = -1: must be a whole number, 0 or more$"),
    ({"local_blocks": 0}, r"^NSASpec\.local_blocks = 0: must be a whole number, 1 or more$"),
    ({"window": 0}, r"^NSASpec\.window = 0: must be a whole number, 1 or more$"),
    ({"window": 512.0}, r"^NSASpec\.window = 512\.0: must be a whole number"),
    ({"window": "512"}, r"^NSASpec\.window = '512': must be a whole number"),
    ({"window": None}, r"^NSASpec\.window = None: must be a whole number"),
    ({"local_blocks": True}, r"^NSASpec\.local_blocks = True: must be a whole number"),
    (
        {"block_stride": 33},
        r"block_stride = 33 is more than block_len = 32.*lower block_stride or raise block_len$",
    ),
    (
        {"select_top": 2},
        r"select_top = 2 is less than init_blocks \+ local_blocks = 1 \+ 2.*raise select_top$",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(c) for c, _ in REFUSED])
def test_an_invalid_pattern_raises_and_names_the_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NSASpec(**changes)


def test_the_default_is_the_papers_pattern() -> None:
    assert astuple(NSASpec()) == (32, 16, 64, 16, 1, 2, 512)


def test_patterns_at_the_limits_are_valid() -> None:
    NSASpec(1, 1, 1, 1, 0, 1, 1)
    NSASpec(select_top=3, init_blocks=1, local_blocks=2)
    NSASpec(block_len=32, block_stride=32)


def test_a_pattern_is_frozen_and_hashable() -> None:
    spec = NSASpec()
    with pytest.raises(FrozenInstanceError):
        spec.window = 3  # type: ignore[misc]
    assert {spec: 1}[NSASpec()] == 1
    again = [NSASpec.from_ints(spec.to_ints()) for _ in range(2)]
    assert again[0] is again[1], "each call of a custom op reads it"
    with pytest.raises(ValueError, match="window = 0"):
        replace(spec, window=0)


@given(
    block_len=st.integers(1, 40),
    stride=st.integers(1, 40),
    select_len=st.integers(1, 70),
    window=st.integers(1, 40),
    length=st.integers(0, 300),
)
@settings(max_examples=200, deadline=None)
def test_counts_of_blocks_equal_the_length_of_their_list(
    block_len: int, stride: int, select_len: int, window: int, length: int
) -> None:
    spec = NSASpec(block_len, min(stride, block_len), select_len, window=window)
    assert NSASpec.from_ints(spec.to_ints()) == spec
    starts = range(0, length, spec.block_stride)
    complete = [start for start in starts if start + block_len <= length]
    assert spec.compressed_len(length) == len(complete)
    assert spec.select_blocks_len(length) == len({t // select_len for t in range(length)})
    for t in range(0, length, 7):
        ended = [start for start in complete if start + block_len - 1 <= t]
        assert spec.visible_compressed(t) == len(ended)
        assert spec.visible_window(t) == len([s for s in range(t + 1) if t - s < window])


def test_max_overlaps_is_exact_where_the_stride_divides_select_len_else_an_upper_bound() -> None:
    """Counted one by one for all small patterns."""
    for length, size in ((length, size) for length in range(1, 14) for size in range(1, 14)):
        for stride in range(1, length + 1):
            most = max(
                sum(
                    i * stride < (j + 1) * size and j * size < i * stride + length
                    for i in range(250)
                )
                for j in range(13, 19)
            )
            actual = NSASpec(length, stride, size).max_overlaps
            assert actual == most if size % stride == 0 else actual >= most, (length, stride, size)
