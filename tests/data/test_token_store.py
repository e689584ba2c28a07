"""Token stores: one stream of tokens per split, with an end of text after each document."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.data.token_store import TokenStore, coverage


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), data=st.data())
def test_reads_cross_the_borders_of_pieces(lengths: list[int], data: st.DataObject) -> None:
    tokens = np.arange(sum(lengths))
    store = TokenStore(np.split(tokens, np.cumsum(lengths)[:-1]), -1, 1.0)
    assert len(store) == len(tokens)
    if len(tokens):
        start = data.draw(st.integers(0, len(tokens) - 1))
        stop = data.draw(st.integers(start + 1, len(tokens)))
        assert store.read(start, stop).tolist() == tokens[start:stop].tolist()


def test_coverage_reports_samples_epochs_and_left_over_tokens() -> None:
    stores = [
        TokenStore([np.arange(1_004)], -1, 1.0, name="a"),
        TokenStore([np.arange(41)], -1, 1.0),
    ]
    assert coverage(stores, [0.9, 0.1], 10, samples=100) == [
        "a: 1,004 tokens, 100 samples of 10, no padding, and 3 tokens left over; "
        "the run consumes 90: 90.0% of them, once",
        "tokens: 41 tokens, 4 samples of 10, no padding; the run consumes 10: 2.50 epochs",
    ]
    (*_, warning) = coverage(stores, [0.5, 0.5], 10, samples=80)
    assert warning.startswith("WARNING: tokens: 41 tokens, 10 epochs: the model will memorize it")
    assert "WARNING" not in "".join(coverage(stores, [0.8, 0.2], 10, samples=80)), "four epochs"
